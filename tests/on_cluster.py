"""Functions that tests on the real cluster share."""

import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import threading
import time

import pytest
from waiting import until

IMAGE = "localhost:5000/kale-dist/torch-cpu:2.13.0"
IMAGE_PYTHON = (3, 11)
PLAIN_IMAGE = "localhost:5000/kale-dist-tests/python:3.11-slim"
"""Python alone, for pods that compute nothing: PyTorch costs each pod some seconds of its start. See `plain_image`."""


def lacking(what):
    """Skip a test for want of something; where the cluster is required, it fails."""
    if os.environ.get("KALE_DIST_REQUIRE_CLUSTER"):
        pytest.fail(f"{what}, and KALE_DIST_REQUIRE_CLUSTER is set")
    pytest.skip(what)


def need_the_python_of_the_image():
    """Go on only where the tests' image has this Python: what this one pickles, another cannot read."""
    if sys.version_info[:2] != IMAGE_PYTHON:
        lacking(f"{IMAGE} has Python {'.'.join(map(str, IMAGE_PYTHON))}")


def run_kubectl(*arguments, text=None):
    ended = subprocess.run(
        ["kubectl", *arguments], input=text, capture_output=True, text=True, timeout=180, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def pods_in(namespace, **settings):
    """Where a call goes: small pods of a namespace."""
    import kale_dist as kd

    return kd.Kubernetes(
        **{"namespace": namespace, "image": IMAGE, "resources": {"cpu": 0.1, "memory": "1Gi"}, **settings}
    )


def wait_for(job, seen, timeout_s=120):
    """Wait until a job's status is as it should be."""
    until(lambda: seen(job.status), timeout_s, lambda: (job.status, [str(line) for line in job.logs()]))


def make_claim(namespace, name):
    """Make a claim that pods of several nodes may write into, and wait for its volume: a call that comes before warns."""
    spec = {
        "storageClassName": "shared", "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
    }  # fmt: skip
    made = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(made))
    run_kubectl("-n", namespace, "wait", "--for=jsonpath={.status.phase}=Bound", f"pvc/{name}", "--timeout=90s")


def grant(namespace, identity, role):
    """Apply a Role with its binding, and wait until the API server knows of it."""
    import yaml

    run_kubectl("apply", "-f", "-", text=role)
    resource = next(yaml.safe_load_all(role))["rules"][-1]["resources"][0]
    deadline = time.monotonic() + 30
    while not any(
        line.split()[0].partition(".")[0] == resource
        for line in run_kubectl("-n", namespace, "--as", identity, "auth", "can-i", "--list").splitlines()
        if line.strip()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def write_kubeconfig(path, original, *, token=None, user=None, namespace="", **cluster_settings):
    """A copy of a kubeconfig with other credentials or another server."""
    import yaml

    data = yaml.safe_load(pathlib.Path(original).read_text())
    data["clusters"][0]["cluster"].update(cluster_settings)
    data["clusters"][0]["cluster"] = {k: v for k, v in data["clusters"][0]["cluster"].items() if v is not None}
    data["users"][0]["user"] = {"token": token} if user is None else user
    data["contexts"][0]["context"]["namespace"] = namespace
    path.write_text(json.dumps(data))
    return path


class Network:
    """Stands between a process and an API server or a Docker engine, and can be cut.

    Args:
        family: Of the server's address.
        address: The server's.
    """

    def __init__(self, family, address):
        self._family, self._address = family, address
        self._is_up = True
        self._bytes_each = None
        self._flows = threading.Event()
        self._flows.set()
        self._sockets = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.here = f"127.0.0.1:{self._listener.getsockname()[1]}"
        """Where this network is entered."""
        threading.Thread(target=self._serve, daemon=True).start()

    @classmethod
    def of_cluster(cls, original, path):
        """One before the server of a kubeconfig, with a kubeconfig that leads through it."""
        import yaml

        config = yaml.safe_load(pathlib.Path(original).read_text())
        host, _, port = config["clusters"][0]["cluster"]["server"].removeprefix("https://").partition(":")
        made = cls(socket.AF_INET, (host, int(port or 443)))
        config["clusters"][0]["cluster"] |= {"server": f"https://{made.here}", "tls-server-name": host}
        path.write_text(json.dumps(config))
        return made

    def refuse(self):
        """Refuse new connections; those that are there stay."""
        self._is_up = False

    def hang(self):
        """Neither end connections nor carry anything."""
        self._flows.clear()

    def cut_each_after(self, size):
        """Cut each new connection after so many bytes from afar."""
        self._bytes_each = size

    def cut(self):
        self._is_up = False
        for one in self._sockets:
            # Both directions end at once, in the middle of whatever was on its way.
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def mend(self):
        self._is_up = True
        self._flows.set()

    def close(self):
        self._listener.close()
        self._flows.set()
        self.cut()

    def _serve(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._is_up:
                near.close()
                continue
            far = socket.socket(self._family)
            far.connect(self._address)
            self._sockets += [near, far]
            threading.Thread(target=self._pump, args=(near, far, self._bytes_each), daemon=True).start()

    def _pump(self, near, far, left):
        try:
            while left is None or left > 0:
                for one in select.select([near, far], [], [])[0]:
                    data = one.recv(1 << 16)
                    self._flows.wait()
                    if not data:
                        return
                    (far if one is near else near).sendall(data)
                    if one is far and left is not None:
                        left -= len(data)
        except OSError:
            return
        finally:
            near.close()
            far.close()
