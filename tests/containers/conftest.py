"""What tests on a real Docker engine share: they skip where there is none, and leave nothing on one."""

import importlib.util

import pytest

HAS_CLIENT = importlib.util.find_spec("docker") is not None
collect_ignore_glob = [] if HAS_CLIENT else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left():
    """After the last test the engine has no container of a job that this session has made."""
    yield
    from kale_dist import places
    from kale_dist.job import records
    from kale_dist.job.backend import JobRef

    backend = places.get("docker")
    # Jobs of others on the same engine are left alone.
    for ref in map(JobRef.parse, records.refs("docker")):
        backend.delete(ref)
    backend.close()
