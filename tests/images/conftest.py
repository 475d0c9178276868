"""What tests of images share: the registry beside the cluster, and registries of their own."""

import importlib.util
import os
import urllib.request

import pytest

HAS_URLLIB3 = importlib.util.find_spec("urllib3") is not None
collect_ignore_glob = [] if HAS_URLLIB3 else ["test_*.py"]

import registries  # noqa: E402 - it is beside this file
from on_cluster import lacking  # noqa: E402


@pytest.fixture(scope="session")
def registry_host():
    """The host of the registry beside the cluster, where nothing asks for credentials; skips where none answers."""
    host = os.environ.get("REGISTRY", "")
    try:
        with urllib.request.urlopen(f"http://{host}/v2/", timeout=5):
            return host
    except (OSError, ValueError):
        lacking("no registry answers at REGISTRY")


@pytest.fixture(scope="session")
def registry_folder(tmp_path_factory):
    """Where registries of the tests' own keep what they have; skips where the program is not installed."""
    if registries.PROGRAM is None:
        lacking("the program docker-registry is not installed")
    return tmp_path_factory.mktemp("registries")


@pytest.fixture(scope="session")
def own_registry(registry_folder):
    """The host of a registry without accounts."""
    with registries.registry_program(registry_folder / "own") as host:
        yield host


@pytest.fixture(scope="session")
def password_registry(registry_folder):
    """The host of a registry that knows one account, by HTTP Basic."""
    folder = registry_folder / "password"
    with registries.registry_program(folder, auth=registries.htpasswd(folder)) as host:
        yield host


@pytest.fixture(scope="session")
def tls_registry(registry_folder):
    """The host of a registry with TLS and an account, and the path of its authority's certificate."""
    folder = registry_folder / "tls"
    with registries.registry_program(folder, auth=registries.htpasswd(folder), tls=True) as host:
        yield host, str(folder / "ca.crt")


@pytest.fixture(scope="session")
def token_registry(registry_folder):
    """The host of a registry that wants tokens, and the server that gives them."""
    with (
        registries.TokenServer(registry_folder / "tokens").serving() as server,
        registries.registry_program(registry_folder / "token", auth=server.settings()) as host,
    ):
        yield host, server


@pytest.fixture
def scripted():
    """A function that starts a registry which answers as it is told; gives it and its host."""
    import contextlib

    with contextlib.ExitStack() as stack:

        def start(answer):
            fake = registries.ScriptedRegistry(answer)
            return fake, stack.enter_context(fake.serving())

        yield start
