"""What tests on a real Docker engine share: they skip where there is none, and leave nothing on one."""

import importlib.util
import os

import pytest

HAS_CLIENT = importlib.util.find_spec("docker") is not None
collect_ignore_glob = [] if HAS_CLIENT else ["test_*.py"]

IMAGE = "localhost:5000/kale-dist/torch-cpu:2.13.0"


@pytest.fixture(scope="session")
def engine():
    """A connection to the engine; skips where none answers."""
    from kale_dist import engine as module
    from kale_dist.errors import BackendError

    try:
        found = module.connect()
    except BackendError as error:
        if os.environ.get("KALE_DIST_REQUIRE_CLUSTER"):
            pytest.fail(f"no engine answers, and KALE_DIST_REQUIRE_CLUSTER is set: {error}")
        pytest.skip("no Docker engine answers")
    yield found
    found.close()


@pytest.fixture(scope="session")
def image(engine):
    """An image with this Python's minor version and torch, which the engine has."""
    from kale_dist.backends.docker import images
    from kale_dist.errors import BackendError

    try:
        images.ensure(engine, IMAGE)
    except BackendError as error:
        if os.environ.get("KALE_DIST_REQUIRE_CLUSTER"):
            pytest.fail(f"{error}")
        pytest.skip(f"the engine cannot have {IMAGE}")
    return IMAGE


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(request):
    """After the last test the engine has no container or network of a job that this session has made."""
    yield
    from kale_dist import backends

    backend = backends.get("docker")
    for ref in backend.list():
        # Jobs of others on the same engine are left alone.
        if ref.name.startswith("test-"):
            backend.delete(ref)
    backend.close()
    del request
