"""Which cluster a call means, and what is said of one that cannot be used."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from fake_api import FakeApi, status
from on_cluster import write_kubeconfig

from kale_dist.config import Config
from kale_dist.errors import BackendError, BackendUnavailableError, ConfigError
from kale_dist.places.kubernetes import client, objects
from kale_dist.places.kubernetes.explain import api as answers
from kale_dist.places.kubernetes.explain.api import Doing


@pytest.fixture
def use(monkeypatch, tmp_path, kubeconfig):
    """A function that writes a changed copy of the kubeconfig and makes it the current one."""

    def change(name="config", **changes):
        path = write_kubeconfig(tmp_path / name, kubeconfig, **changes)
        monkeypatch.setenv("KUBECONFIG", str(path))
        return path

    return change


def test_a_cluster_that_answers(kubeconfig):
    found = client.connect()
    assert found.server.startswith("https://")
    assert (found.identity, found.namespace, found.in_cluster) == ("admin", "default", False)
    assert found.core.list_namespaced_pod("default") is not None


def test_credentials_are_never_shown(kubeconfig):
    found = client.connect()
    token = found.token().split()[-1]
    assert token
    assert token not in repr(found)


def test_explicit_beats_configured_beats_the_contexts_namespace(use):
    use(namespace="of-context", user={"token": client.connect().token().split()[-1]})
    assert client.connect(config=Config()).namespace == "of-context"
    assert client.connect(config=Config(namespace="configured")).namespace == "configured"
    assert client.connect(namespace="explicit", config=Config(namespace="configured")).namespace == "explicit"


def test_one_connection_for_all_namespaces(kubeconfig):
    assert client.connect(namespace="a").api is client.connect(namespace="b").api


def test_a_kubeconfig_that_changed_is_read_again(use):
    token = client.connect().token().split()[-1]
    use(user={"token": token})
    first = client.connect()
    use(user={"token": token})
    assert client.connect().api is not first.api


def test_a_configured_kubeconfig_beats_the_variable(kubeconfig, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    assert client.connect(config=Config(kubeconfig=kubeconfig)).identity == "admin"


def test_the_first_of_several_files_that_are_there(kubeconfig, monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/nowhere{os.pathsep}{kubeconfig}")
    assert client.connect().identity == "admin"


def test_an_unknown_context_is_named_with_those_there_are(kubeconfig):
    with pytest.raises(ConfigError, match=r"has no context 'kd-clustre'. Did you mean 'kd-cluster'"):
        client.connect(context="kd-clustre")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "a", "contexts: 3", "contexts: [3]", "contexts: [{}]", "{}", "\x00", "current-context: 7"],
)
def test_a_file_that_is_no_kubeconfig_is_named(monkeypatch, tmp_path, content):
    (tmp_path / "config").write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        client.connect()


@pytest.mark.parametrize("missing", ["clusters", "users"])
def test_a_context_whose_parts_are_missing_is_named(use, missing):
    path = use(token="x")
    path.write_text(path.read_text().replace(f'"{missing}"', '"others"'))
    with pytest.raises((ConfigError, BackendError)):
        client.connect()


def test_no_cluster_at_all(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match=r"No cluster is known"):
        client.connect()


def test_a_token_that_is_not_accepted(use):
    use(token="expired")
    with pytest.raises(BackendUnavailableError, match=r"does not accept these credentials"):
        client.connect()


def test_nobody_is_known_without_credentials(use):
    use(user={})
    with pytest.raises(BackendUnavailableError, match=r"credentials"):
        client.connect()


def test_a_login_program_that_is_not_installed(use):
    use(user={"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-login", "args": [],
                       "installHint": "Install it from example.com", "interactiveMode": "Never"}})  # fmt: skip
    with pytest.raises(
        BackendUnavailableError, match=r"'no-such-login', which is not installed .* Install it from exam"
    ):
        client.connect()


def test_a_login_program_that_fails(use):
    use(user={"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "false", "args": [],
                       "interactiveMode": "Never"}})  # fmt: skip
    with pytest.raises(BackendUnavailableError, match=r"The program 'false'.* gave none"):
        client.connect()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"certificate-authority-data": None}, "the certificate of the API server is not accepted"),
        ({"tls-server-name": "wrong.example.com"}, "the certificate of the API server is not accepted"),
        ({"server": "https://127.0.0.1:1"}, "the API server cannot be reached: .*Connection refused"),
        ({"server": "https://no-such-host.invalid:6443"}, "the API server cannot be reached"),
        # It closes at once, and its sentence may not arrive.
        ({"server": "http://127.0.0.1:6443"}, "HTTP request to an HTTPS server|Connection reset by peer"),
    ],
)
def test_a_way_that_leads_nowhere(use, changes, words):
    use(token="x", **changes)
    with pytest.raises(BackendError, match=words):
        client.connect()


def test_a_server_without_tls(use):
    with FakeApi().running() as api:
        use(token="x", server=api.url.replace("http:", "https:"))
        with pytest.raises(BackendUnavailableError, match=r"no TLS at the other end"):
            client.connect()


def test_a_server_that_never_answers(use, monkeypatch):
    monkeypatch.setattr(client, "READ_S", 0.2)
    monkeypatch.setattr(client, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        use(token="x", server=f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(BackendUnavailableError, match=r"cannot be reached: .*timed out") as caught:
            client.connect()
        assert caught.value.retryable


def test_a_server_that_hangs_up(use):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        use(token="x", server=f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(BackendUnavailableError, match=r"cannot be reached"):
            client.connect()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_old_server_does_not_say_who_asks(monkeypatch, tmp_path):
    with FakeApi().running() as api:
        api.answers.clear()
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        found = client.connect()
        assert (found.identity, found.namespace) == ("", "team")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_busy_server_is_asked_again_when_it_says(method, monkeypatch, tmp_path):
    path, pod = "/api/v1/namespaces/team/pods", {"metadata": {"name": "x"}, "spec": {"containers": []}}
    with FakeApi().running() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        found = client.connect()
        api.answer(method, path, 429, status(429, "slow down", "TooManyRequests"), Retry_After="2")
        api.answer(method, path, 429, b"Too many requests, please try again later.", Retry_After="1")
        api.answer(method, path, 201, {"items": []} if method == "GET" else pod)
        began = time.monotonic()
        found.core.list_namespaced_pod("team") if method == "GET" else found.core.create_namespaced_pod("team", pod)
        assert time.monotonic() - began >= 3
        asked = [body for verb, where, body in api.asked if (verb, where) == (method, path)]
        assert len(asked) == 3
        assert len(set(asked)) == 1


@pytest.mark.parametrize(("wished", "times"), [("3600", 1), ("2", 2)])
def test_a_server_that_stays_busy_is_reported(wished, times, monkeypatch, tmp_path):
    monkeypatch.setattr(client, "BUSY_S", 3.5)
    with FakeApi().running() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        found = client.connect()
        path = "/api/v1/namespaces/team/pods"
        api.answer("GET", path, 429, status(429, "slow down", "TooManyRequests"), Retry_After=wished)
        with pytest.raises(Exception, match=r"429") as caught:
            found.core.list_namespaced_pod("team")
        said = answers.explain(caught.value, Doing(verb="list", resource="pods", namespace="team"))
        assert said.retryable
        assert f"Try again in {wished} s" in str(said)
        assert [asked[1] for asked in api.asked].count(path) == times


def test_pods_of_a_deleted_job_are_waited_for_as_long_as_they_end(monkeypatch, tmp_path):
    with FakeApi().running() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        found = client.connect()
        run = types.SimpleNamespace(
            ref="kubernetes://team/x", object="x",
            spec=types.SimpleNamespace(cluster=types.SimpleNamespace(namespace="team")),
        )  # fmt: skip
        path = "/api/v1/namespaces/team/pods"
        for count in (40, 4, 2, 0):
            pods = [{"metadata": {"name": f"x-{number}", "deletionTimestamp": "now"}} for number in range(count)]
            api.answer("GET", path, 200, {"items": pods})
        first = api.answers["GET", path][:1]
        objects.wait_until_gone(found, run, 0.1)
        api.answers["GET", path] = first
        with pytest.raises(BackendError, match=r"its pods x-0, x-1, x-2 and 37 more have not ended"):
            objects.wait_until_gone(found, run, 0.1)


def test_answers_are_not_written_into_logs(kubeconfig, caplog):
    found = client.connect()
    with caplog.at_level(logging.DEBUG):
        found.core.list_namespaced_secret("kube-system")
    assert "response body" not in caplog.text


ENDS_WHILE_IT_ASKS = """
import threading, time
from kale_dist.places.kubernetes import client
cluster = client.connect()
def ask():
    while True:
        cluster.core.list_namespaced_pod("team", _preload_content=False)
for _ in range(8):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.3)
"""


def test_a_process_ends_in_peace_while_its_threads_ask_the_cluster(tmp_path):
    with FakeApi().running() as api:
        api.answer("GET", "/api/v1/namespaces/team/pods", 200, {"items": [], "metadata": {}})
        environment = {**os.environ, "KUBECONFIG": str(api.kubeconfig(tmp_path / "config"))}
        ended = subprocess.run(
            [sys.executable, "-c", ENDS_WHILE_IT_ASKS], env=environment, capture_output=True, text=True, check=False,
            timeout=60,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
