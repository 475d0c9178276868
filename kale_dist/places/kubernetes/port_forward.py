"""A connection to a port of a pod, through the API server, by port-forward.

The kubernetes client's own port-forward copies all that waits for each piece it sends, and is slow for it. Here the
caller's thread reads and writes the websocket itself.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, cast

import certifi
import websocket
from websocket import ABNF

from kale_dist.job.backend import NoConnectionError
from kale_dist.places.kubernetes.client import CONNECT_S, Cluster, Patience
from kale_dist.places.kubernetes.explain import api as answers
from kale_dist.places.kubernetes.explain.api import Doing

SILENT_S = 20.0
"""Limit of each piece. When a pod is killed, a connection into it may not end, but stay silent forever (tried)."""

_SEND_BYTES = 128 * 1024
"""Payload of one message."""

_DATA, _PROBLEM = 0, 1
"""Numbers of the channels for the bytes and for error messages."""
_PORT_BYTES = 2
"""Each channel of a port-forward begins with its port's number."""
_SHOWN = 300


class PodConnection:
    """One connection to a port of a pod: a `HeadConnection` of `job.backend`.

    Not for several threads, but that one may write while another reads. There is no half-closing.

    Args:
        tunnel: A websocket whose handshake is done.
    """

    def __init__(self, tunnel: websocket.WebSocket) -> None:
        self._socket = tunnel
        self._prefix = dict.fromkeys((_DATA, _PROBLEM), _PORT_BYTES)
        self._waiting = memoryview(b"")
        self._problems = b""
        self._at_end = False
        self._sending = threading.Lock()

    def sendall(self, data: Any, /) -> None:
        """Write all of it.

        Raises:
            ConnectionError: The pod, its port or the API server has gone.
            TimeoutError: The peer did not take it in time.
        """
        view = memoryview(data).cast("B")
        with self._sending, _as_os_errors(self):
            for start in range(0, len(view), _SEND_BYTES):
                self._socket.send(bytes([_DATA]) + view[start : start + _SEND_BYTES], ABNF.OPCODE_BINARY)

    def recv(self, size: int, /) -> bytes:
        """Read at most so many bytes; none at the end.

        Raises:
            ConnectionError: The connection broke, or nothing listens at the port.
            TimeoutError: Nothing came in time.
        """
        while not self._waiting and not self._at_end:
            self._receive()
        data, self._waiting = self._waiting[:size], self._waiting[size:]
        return bytes(data)

    def settimeout(self, seconds: float | None, /) -> None:
        """Seconds that each piece may take; None for no limit."""
        self._socket.settimeout(seconds)

    def shutdown(self, how: int, /) -> None:
        """End the connection for a thread that waits in `recv`.

        That thread closes it: OpenSSL knows only the descriptor's number, and would read from the next connection that gets it.
        """
        self._at_end = True
        with contextlib.suppress(OSError, TypeError):
            socket.socket.shutdown(cast("socket.socket", self._socket.sock), how)

    def close(self) -> None:
        """End the connection. A second time is fine."""
        self._at_end = True
        with contextlib.suppress(Exception):
            self._socket.close(timeout=0)
        with contextlib.suppress(Exception):
            # `close` above leaves the descriptor of a socket that is no longer connected open.
            self._socket.shutdown()  # type: ignore[no-untyped-call]

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def problems(self) -> str:
        """The error messages that the cluster sent over this connection."""
        return " ".join(self._problems.decode("utf-8", "replace").split())[:_SHOWN]

    def _receive(self) -> None:
        with _as_os_errors(self):
            opcode, frame = self._socket.recv_data_frame(control_frame=False)
        if opcode == ABNF.OPCODE_CLOSE or not frame.data:
            self._end()
            return
        channel, data = frame.data[0], memoryview(frame.data)[1:]
        skipped = min(self._prefix.get(channel, 0), len(data))
        if skipped:
            self._prefix[channel] -= skipped
            data = data[skipped:]
        if channel == _DATA:
            self._waiting = data
        elif channel == _PROBLEM and data:
            self._problems += bytes(data)
            self._end()

    def _end(self) -> None:
        self._at_end = True
        if re.search(b"failed to connect|onnection ?[Rr]efused", self._problems):
            raise ConnectionRefusedError("Nothing listens at this port of the pod now")
        if self._problems:
            raise ConnectionResetError(f"The connection to the pod ended: {self.problems}")


@contextlib.contextmanager
def _as_os_errors(connection: PodConnection) -> Iterator[None]:
    """Turn the websocket library's errors into those of a socket."""
    try:
        yield
    except websocket.WebSocketTimeoutException as error:
        raise TimeoutError("The connection through the API server was silent for too long") from error
    except websocket.WebSocketException as error:
        problem = connection.problems or str(error)
        raise ConnectionResetError(f"The connection through the API server broke: {problem}") from error


# -- opening ---------------------------------------------------------------------------------------------------------


def connect(cluster: Cluster, namespace: str, pod: str, port: int, *, timeout_s: float = SILENT_S) -> PodConnection:
    """Connect to a port of a pod.

    Args:
        cluster: Where.
        namespace: Of the pod.
        pod: Its name.
        port: What listens there may listen on 127.0.0.1.
        timeout_s: Seconds that each piece may take.

    Returns:
        A connection. Whether anything listens at the port shows when it is used.

    Raises:
        NoConnectionError: This user has no right to it.
        BackendError: The cluster refused for another reason, or cannot be reached.
    """
    patience = Patience()
    try:
        while True:
            try:
                return PodConnection(_open(cluster, namespace, pod, port, timeout_s))
            except websocket.WebSocketBadStatusException as error:
                if error.status_code != HTTPStatus.TOO_MANY_REQUESTS or not patience.waited(error.resp_headers or {}):
                    raise
    except Exception as error:
        doing = Doing(verb="create", resource="pods/portforward", namespace=namespace, name=pod)
        explained = answers.explain(error, doing)
        if answers.status_of(error) == answers.FORBIDDEN:
            raise NoConnectionError(str(explained)) from error
        raise explained from error


def _open(cluster: Cluster, namespace: str, pod: str, port: int, timeout_s: float) -> websocket.WebSocket:
    """The handshake of a websocket with the API server, with this user's credentials."""
    settings = cluster.api.configuration
    base = urllib.parse.urlsplit(settings.host)
    whole = f"{base.path.rstrip('/')}/api/v1/namespaces/{namespace}/pods/{pod}/portforward"
    scheme = "wss" if base.scheme == "https" else "ws"
    url = urllib.parse.urlunsplit((scheme, base.netloc, whole, f"ports={port}", ""))
    token = cluster.token()
    header = {"Sec-WebSocket-Protocol": "v4.channel.k8s.io", **({"Authorization": token} if token else {})}
    options: dict[str, Any] = {"header": header, "suppress_origin": True, **_proxy(settings, base)}
    socket = websocket.WebSocket(sslopt=_tls(settings), skip_utf8_validation=True)
    socket.settimeout(CONNECT_S)
    try:
        socket.connect(url, **options)  # type: ignore[no-untyped-call]
    except BaseException:
        socket.shutdown()  # type: ignore[no-untyped-call]
        raise
    socket.settimeout(timeout_s)
    return socket


def _tls(settings: Any) -> dict[str, Any]:
    if not settings.verify_ssl:
        options: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE, "check_hostname": False}
    else:
        options = {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": settings.ssl_ca_cert or certifi.where()}
        if settings.assert_hostname is not None:
            options["check_hostname"] = settings.assert_hostname
    given: Mapping[str, Any] = {
        "certfile": settings.cert_file, "keyfile": settings.key_file, "server_hostname": settings.tls_server_name
    }  # fmt: skip
    return options | {name: value for name, value in given.items() if value}


def _proxy(settings: Any, base: urllib.parse.SplitResult) -> dict[str, Any]:
    """By which proxy. Named in any case: websocket-client would look into the environment by itself."""
    left_out = tuple(part.strip() for part in (settings.no_proxy or "").split(",") if part.strip())
    if not settings.proxy:
        return {"http_no_proxy": [base.hostname or "*"]}
    proxy = urllib.parse.urlsplit(settings.proxy)
    options: dict[str, Any] = {
        "http_proxy_host": proxy.hostname, "http_proxy_port": proxy.port, "proxy_type": proxy.scheme or "http"
    }  # fmt: skip
    if proxy.username:
        options["http_proxy_auth"] = (proxy.username, proxy.password or "")
    return {**options, **({"http_no_proxy": list(left_out)} if left_out else {})}
