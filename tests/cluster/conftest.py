"""What tests on the real cluster share: a namespace of one's own, users with the rights that a test gives them."""

import importlib.util
import json
import uuid

import pytest

HAS_CLIENT = importlib.util.find_spec("kubernetes") is not None
collect_ignore_glob = [] if HAS_CLIENT else ["test_*.py"]

if HAS_CLIENT:
    from on_cluster import IMAGE, grant, pods_in, run_kubectl, write_kubeconfig

    from kale_dist import places
    from kale_dist.places.kubernetes import client

_SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, size):
        self.send_response(200); self.send_header("Content-Length", str(size)); self.end_headers()
    def do_GET(self):
        left = int(self.path[1:]); self.answer(left); block = bytes(range(256)) * 4096
        while left:
            self.wfile.write(block[:left]); left -= min(left, len(block))
    def do_PUT(self):
        left = int(self.headers["Content-Length"]); total = 0
        while left:
            block = self.rfile.read(min(left, 1 << 20)); left -= len(block); total += sum(block[:1] + block[-1:])
        text = str(total).encode(); self.answer(len(text)); self.wfile.write(text)
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest.fixture(scope="session", autouse=True)
def no_connection_is_left():
    yield
    client.disconnect()


@pytest.fixture(scope="session")
def plain_image(plain_pod_image):
    return plain_pod_image


@pytest.fixture
def plain(namespace, plain_image):
    """Where calls go that compute nothing."""
    return pods_in(namespace, image=plain_image)


@pytest.fixture(scope="module")
def jobs_end(namespace):
    """When a module is through, this process follows none of its jobs any more."""
    yield
    places.get("kubernetes").close()


@pytest.fixture(scope="module")
def namespace(make_namespace):
    """A namespace that is deleted with the module: the cluster has few volumes for claims."""
    name = make_namespace()
    yield name
    run_kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def cluster(kubeconfig, namespace):
    """The administrator's connection."""
    return client.connect(namespace=namespace)


@pytest.fixture(scope="session")
def make_user(kubeconfig, tmp_path_factory):
    """A function that makes a service account with a Role and gives the path of its kubeconfig."""

    def make(namespace, role=None, name="", **cluster_settings):
        name = name or f"user-{uuid.uuid4().hex[:6]}"
        run_kubectl("-n", namespace, "create", "serviceaccount", name)
        if role is not None:
            identity = f"system:serviceaccount:{namespace}:{name}"
            grant(namespace, identity, role(identity))
        token = run_kubectl("-n", namespace, "create", "token", name, "--duration=1h").strip()
        return write_kubeconfig(tmp_path_factory.mktemp("user") / "config", kubeconfig, token=token, **cluster_settings)

    return make


@pytest.fixture(scope="module")
def make_server_pod(namespace):
    """A function that makes a pod with an HTTP server at 127.0.0.1:8000: GET /N gives N bytes, PUT counts its body."""

    def make(name):
        run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(_server_pod(name)))
        run_kubectl("-n", namespace, "wait", "--for=condition=Ready", f"pod/{name}", "--timeout=90s")
        return name

    return make


@pytest.fixture(scope="module")
def server_pod(make_server_pod):
    """The name of such a pod."""
    return make_server_pod("server")


def _server_pod(name):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "pytorch",
                    "image": IMAGE,
                    "command": ["python3", "-c", _SERVER],
                    "readinessProbe": {"exec": {"command": ["python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 8000))"]}, "periodSeconds": 1, "timeoutSeconds": 10},
                    "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
                }
            ],
        },
    }  # fmt: skip
