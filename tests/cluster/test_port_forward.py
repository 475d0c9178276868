"""Connections to a port of a pod: whole bytes both ways, and what ends them."""

import collections
import contextlib
import http.client
import socket
import threading
import time

import pytest
from on_cluster import run_kubectl

from kale_dist.config import Config
from kale_dist.errors import BackendError
from kale_dist.places.following.head_client import HttpSocket
from kale_dist.places.kubernetes import client, port_forward, roles
from kale_dist.places.manifests import KINDS

SIZE = 200_000_000
PORT = 8000


def role(namespace, *resources):
    """What makes a Role with some of the rights, for `make_user`."""
    rights = [right for right in roles.rights(KINDS["pytorch"]) if right.resource in resources]
    return lambda identity: roles.role_yaml(namespace, identity, rights).replace(
        "name: kale-dist", f"name: {identity.rpartition(':')[2]}"
    )


@pytest.fixture(scope="module")
def connect(namespace, server_pod, make_user):
    """A function that connects as a user who may do nothing else."""
    path = make_user(namespace, role(namespace, "pods/portforward"))
    user = client.connect(namespace=namespace, config=Config(kubeconfig=str(path)))
    return lambda port=PORT: port_forward.connect(user, namespace, server_pod, port)


@contextlib.contextmanager
def http_over(connection):
    made = http.client.HTTPConnection("pod")
    made.sock = HttpSocket(connection)
    with contextlib.closing(connection):
        yield made


def get(pod, path):
    pod.request("GET", path)
    return pod.getresponse()


def incomplete():
    raise http.client.IncompleteRead(b"")


def test_many_requests_on_one_connection(connect):
    with http_over(connect()) as pod:
        for size in (0, 1, 255, 1 << 20, 3):
            pod.request("GET", f"/{size}")
            assert pod.getresponse().read() == (bytes(range(256)) * 4096)[:size]


@pytest.mark.nightly
def test_200_megabytes_down_and_up(connect):
    with http_over(connect()) as pod:
        pod.request("GET", f"/{SIZE}")
        response, total = pod.getresponse(), 0
        while block := response.read(1 << 20):
            assert block[0] == total % 256
            total += len(block)
        assert total == SIZE
        pod.request("PUT", "/", body=memoryview(bytes(SIZE)))
        assert pod.getresponse().status == 200


def test_two_connections_at_once(connect):
    with http_over(connect()) as one, http_over(connect()) as other:
        one.request("GET", "/100000")
        other.request("GET", "/10")
        assert len(other.getresponse().read()) == 10
        assert len(one.getresponse().read()) == 100_000


def test_nothing_listens_at_the_port(connect):
    with (
        http_over(connect(PORT + 1)) as pod,
        pytest.raises(ConnectionRefusedError, match=r"Nothing listens at this port"),
    ):
        get(pod, "/1")


def test_silence_has_a_limit(connect):
    with contextlib.closing(connect()) as connection:
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError, match=r"silent for too long"):
            connection.recv(1)


def test_reading_after_closing_is_at_the_end(connect):
    connection = connect()
    connection.close()
    connection.close()
    assert connection.recv(10) == b""


def test_without_the_right(namespace, server_pod, make_user):
    user = client.connect(namespace=namespace, config=Config(kubeconfig=str(make_user(namespace))))
    with pytest.raises(BackendError, match=r"may not (get|create) pods/portforward(.|\n)*kind: Role"):
        port_forward.connect(user, namespace, server_pod, PORT)


def test_a_pod_that_is_not_there(cluster, namespace):
    with pytest.raises(BackendError, match='pods "no-such" not found'):
        port_forward.connect(cluster, namespace, "no-such", PORT)


@pytest.mark.nightly
def test_a_pod_that_is_killed_ends_the_connection_or_falls_silent(cluster, namespace, server_pod, make_server_pod):
    make_server_pod("short")
    with http_over(port_forward.connect(cluster, namespace, "short", PORT, timeout_s=2.0)) as pod:
        pod.request("GET", "/100000000000")
        response = pod.getresponse()
        assert response.read(10)
        run_kubectl("-n", namespace, "delete", "pod", "short", "--now", "--wait=false")
        with pytest.raises((OSError, http.client.IncompleteRead)):
            collections.deque(iter(lambda: response.read(1 << 20) or incomplete(), b""), maxlen=0)


@pytest.mark.nightly
def test_a_connection_that_is_ended_elsewhere_takes_no_bytes_from_the_next_one(connect):
    for _ in range(30):
        waiting = connect()

        def wait(waiting=waiting):
            with contextlib.suppress(OSError), contextlib.closing(waiting):
                waiting.recv(1)

        reader = threading.Thread(target=wait, daemon=True)
        reader.start()
        time.sleep(0.05)
        waiting.shutdown(socket.SHUT_RDWR)
        # This one gets the lowest descriptor that is free.
        with http_over(connect()) as pod:
            assert get(pod, "/3").read() == bytes(range(3))
        reader.join(20)
        assert not reader.is_alive()
