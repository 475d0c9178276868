"""What tests on a real Docker engine share: they skip where there is none, and leave nothing on one."""

import importlib.util

import pytest

HAS_CLIENT = importlib.util.find_spec("docker") is not None
collect_ignore_glob = [] if HAS_CLIENT else ["test_*.py"]


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
