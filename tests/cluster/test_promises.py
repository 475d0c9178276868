"""What the pages promise of a cluster and no other test shows: refusals of pods, exit codes, lists, logins, proxies."""

import contextlib
import datetime as dt
import json
import pathlib
import select
import socket
import socketserver
import threading

import flat
import pytest
from fake_api import FakeApi
from on_cluster import call_in, run_kubectl, write_kubeconfig
from rank_work import bytes_of, exit_with_3, summed

import kale_dist as kd
from kale_dist.backends.kubernetes import client, preflight, roles
from kale_dist.contract import FailureCause, StateName
from kale_dist.errors import BackendUnavailableError, ConfigError

pytestmark = pytest.mark.usefixtures("jobs_end")

SUSPENDED = {"spec": {"runPolicy": {"suspend": True}}}


@pytest.fixture
def on(namespace):
    return call_in(namespace, processes=1)


def test_an_image_with_another_torch_is_refused_in_one_sentence(on, namespace):
    # Python finds this in front of what the image says of its own torch.
    about = {"METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 1.13.1\n"}
    run_kubectl(
        "-n", namespace, "apply", "-f", "-",
        text=json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "old-torch"}, "data": about}),
    )  # fmt: skip
    job = flat.launch(
        summed, 1, **on, volumes={"/old/torch-1.13.1.dist-info": "configmap://old-torch"},
        environment={"PYTHONPATH": "/old"},
    )  # fmt: skip
    status = job.wait(120)
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.NOT_STARTED)
    assert "The image does not fit the notebook: torch is 2" in status.reason
    assert "in the notebook and 1.13.1 in the image" in status.reason
    assert "image=" in status.reason
    job.delete()


def test_an_image_whose_torch_knows_no_gpu_is_refused_in_one_sentence(on):
    job = flat.launch(summed, 1, **on, cuda=True)
    status = job.wait(120)
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.NOT_STARTED)
    assert "cuda=True, but torch 2" in status.reason
    assert "sees no GPU here" in status.reason
    job.delete()


def test_the_exit_code_of_the_failing_rank_is_told(on):
    job = flat.launch(exit_with_3, **{**on, "number_of_processes": 2})
    status = job.wait(120)
    assert (status.state, status.cause, status.failed_rank) == (StateName.FAILED, FailureCause.DIED, 1)
    assert status.replicas[1].exit_code == 3
    assert "exit code 3" in status.reason
    job.delete()


def test_jobs_are_listed_by_labels_in_one_namespace_or_all(on, namespace, make_namespace):
    other = make_namespace()
    made = {}
    for place, team in ((namespace, "vision"), (namespace, "speech"), (other, "vision")):
        options = {"namespace": place, "labels": {"team": team}, "patch": SUSPENDED}
        made[place, team] = flat.launch(summed, 1, **{**on, "cluster": options})

    def refs(**selection):
        return {job.ref for job in kd.jobs(on="kubernetes", **selection)}

    assert refs(namespace=namespace, labels={"team": "vision"}) == {made[namespace, "vision"].ref}
    everywhere = refs(namespace="*", labels={"team": "vision"})
    assert everywhere >= {made[namespace, "vision"].ref, made[other, "vision"].ref}
    assert made[namespace, "speech"].ref not in everywhere
    for job in made.values():
        job.delete()


@pytest.mark.parametrize(
    ("selection", "argument"),
    [
        ({"labels": {"team": "vision,app=x"}}, "labels"),
        ({"labels": {"a b": "c"}}, "labels"),
        ({"labels": {"team": 3}}, "labels"),
        ({"labels": ["team=vision"]}, "labels"),
        ({"namespace": "Team A"}, "namespace"),
        ({"namespace": "../kube-system"}, "namespace"),
    ],
)
def test_a_selection_that_is_none_is_refused(kubeconfig, selection, argument):
    with pytest.raises(ConfigError) as caught:
        kd.jobs(on="kubernetes", **selection)
    assert caught.value.argument == argument


def test_a_connection_goes_on_after_another_login(kubeconfig, monkeypatch, tmp_path, namespace, make_user):
    granted = json.loads(pathlib.Path(make_user(namespace, lambda who: roles.role_yaml(namespace, who))).read_text())
    token = granted["users"][0]["user"]["token"]
    path = tmp_path / "config"

    def log_in(**credentials):
        # As login programs do: whoever reads meanwhile has the old file or the new one.
        write_kubeconfig(tmp_path / "new", kubeconfig, namespace=namespace, **credentials).replace(path)

    log_in(token=token)
    monkeypatch.setenv("KUBECONFIG", str(path))
    held = client.connect()
    held.core.list_namespaced_pod(namespace)
    log_in(token="expired")
    with pytest.raises(Exception, match="401"):
        held.core.list_namespaced_pod(namespace)
    path.write_text("half a kubeconf")
    with pytest.raises(Exception, match="401"):
        held.core.list_namespaced_pod(namespace)
    log_in(token=token)
    held.core.list_namespaced_pod(namespace)
    assert held.token() == f"Bearer {token}"
    # A client certificate in the place of a token needs connections of its own.
    path.write_bytes(pathlib.Path(kubeconfig).read_bytes())
    held.core.list_namespaced_secret("kube-system")


class Tunnel(socketserver.BaseRequestHandler):
    """An HTTP proxy that makes tunnels, or refuses to."""

    refuses = False
    made = 0

    def handle(self):
        asked = b""
        while b"\r\n\r\n" not in asked:
            asked += self.request.recv(65536)
        if self.refuses:
            self.request.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = asked.split()[1].decode().rpartition(":")
        type(self).made += 1
        with socket.create_connection((host, int(port))) as server, contextlib.suppress(OSError):
            self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            while True:
                for ready in select.select([self.request, server], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    (server if ready is self.request else self.request).sendall(data)


@pytest.fixture
def proxy(monkeypatch, kubeconfig):
    """The class of a proxy's handler; HTTPS_PROXY leads to it."""
    handler = type("Handler", (Tunnel,), {})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "localhost")
        client.disconnect()
        yield handler
        client.disconnect()
        server.shutdown()
        thread.join()


def test_a_proxy_that_refuses_is_named(proxy):
    proxy.refuses = True
    with pytest.raises(BackendUnavailableError, match=r"the proxy does not let us through: .* NO_PROXY"):
        client.connect()


def test_everything_goes_by_the_proxy_that_is_set(proxy, on):
    job = flat.launch(bytes_of, 300_000, **on)
    assert job.result(120) == bytes(300_000)
    job.delete()
    # Requests, a watch or a log, and a port-forward: connections of their own.
    assert proxy.made > 3


@pytest.mark.parametrize(("not_ready_s", "told"), [(3600, ["operator"]), (5, [])])
def test_a_dead_operator_is_told_before_a_job_waits_for_it(monkeypatch, tmp_path, not_ready_s, told):
    # A fake one: the real operator is everybody's.
    since = (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=not_ready_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = [{"type": "Available", "status": "False", "lastTransitionTime": since}]
    kinds = {"kind": "APIResourceList", "groupVersion": "kubeflow.org/v1", "resources": [
        {"name": "pytorchjobs", "kind": "PyTorchJob", "namespaced": True, "singularName": "", "verbs": []}
    ]}  # fmt: skip
    deployment = {
        "metadata": {"name": "training-operator", "namespace": "kubeflow"}, "status": {"conditions": conditions},
        "spec": {"selector": {}, "template": {}},
    }  # fmt: skip
    rules = {"status": {"resourceRules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}],
                        "nonResourceRules": [], "incomplete": False}, "spec": {}}  # fmt: skip
    namespace = {"kind": "Namespace", "metadata": {"name": "team"}}
    with FakeApi().running() as api:
        api.answer("GET", "/api/v1/namespaces/team", 200, namespace)
        api.answer("GET", "/apis/kubeflow.org/v1", 200, kinds)
        api.answer("GET", "/apis/apps/v1/deployments", 200, {"kind": "DeploymentList", "items": [deployment]})
        api.answer("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", 201, rules)
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        found = preflight.check(client.connect())
    assert [item.name for item in found.warnings] == told
    assert found.fatal == ()
    for item in found.warnings:
        assert "training-operator in kubeflow) is not running" in item.sentence
        assert "kubectl -n kubeflow describe pods" in item.remedy
