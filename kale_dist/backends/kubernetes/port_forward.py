"""A connection to a port of a pod, through the API server: by port-forward, or by exec where only that is allowed.

The kubernetes client's own port-forward copies all that waits for each piece it sends, and is slow for it. Here the
caller's thread reads and writes the websocket itself.
"""

from __future__ import annotations

import collections
import contextlib
import io
import re
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any, Self, cast

import certifi
import websocket
from websocket import ABNF

from kale_dist.backends.base import BRIDGE
from kale_dist.backends.kubernetes.client import CONNECT_S, Cluster
from kale_dist.backends.kubernetes.explain import api as answers
from kale_dist.backends.kubernetes.explain.api import Doing
from kale_dist.errors import BackendError

SILENT_S = 20.0
"""Limit of each piece. When a pod is killed, a connection into it may not end, but stay silent forever (tried)."""

_SEND_BYTES = 128 * 1024
"""Payload of one message; exec takes no larger ones quickly."""
_STDIN, _STDOUT, _STDERR, _STATUS = 0, 1, 2, 3
_FORWARD_CHANNELS = (0, 1)
"""Data, and what went wrong with it."""
_PORT_BYTES = 2
"""Each channel of a port-forward begins with its port's number."""
_SHOWN = 300


class PodConnection:
    """One connection to a port of a pod. It has what `http.client` needs of a socket.

    Not for several threads, but that one may write while another reads. There is no half-closing.

    Args:
        socket: A websocket whose handshake is done.
        send_channel: The channel of what is written.
        receive_channel: The channel of what is read.
        error_channels: Channels of what goes wrong.
        prefix_bytes: How many bytes at the beginning of each channel are no data.
    """

    def __init__(
        self,
        socket: websocket.WebSocket,
        *,
        send_channel: int,
        receive_channel: int,
        error_channels: tuple[int, ...],
        prefix_bytes: int = 0,
    ) -> None:
        self._socket = socket
        self._send_channel = bytes([send_channel])
        self._receive_channel = receive_channel
        self._error_channels = error_channels
        self._prefix = dict.fromkeys((receive_channel, *error_channels), prefix_bytes)
        self._waiting: collections.deque[memoryview] = collections.deque()
        self._problems = b""
        self._at_end = False
        self._sending = threading.Lock()

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Write all of it.

        Raises:
            ConnectionError: The pod, its port or the API server has gone.
            TimeoutError: The peer did not take it in time.
        """
        del flags
        view = memoryview(data).cast("B")
        with self._sending, _as_os_errors(self):
            for start in range(0, len(view), _SEND_BYTES):
                self._socket.send(self._send_channel + view[start : start + _SEND_BYTES], ABNF.OPCODE_BINARY)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Read into a buffer, as a socket does: 0 at the end.

        Raises:
            ConnectionError: The connection broke, or nothing listens at the port.
            TimeoutError: Nothing came in time.
        """
        del flags
        view = memoryview(buffer).cast("B")[: nbytes or None]
        while not self._waiting:
            if self._at_end:
                return 0
            self._receive()
        first = self._waiting[0]
        count = min(len(view), len(first))
        view[:count] = first[:count]
        if count == len(first):
            self._waiting.popleft()
        else:
            self._waiting[0] = first[count:]
        return count

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Read at most so many bytes; none at the end."""
        del flags
        buffer = bytearray(bufsize)
        return bytes(memoryview(buffer)[: self.recv_into(buffer)])

    def makefile(self, mode: str = "r", buffering: int = -1, **_: Any) -> Any:
        """A file to read the connection by, as a socket's."""
        if "w" in mode or "b" not in mode:
            raise ValueError(f"only 'rb' is possible here, not {mode!r}")
        raw = _Reader(self)
        return raw if buffering == 0 else io.BufferedReader(raw, buffering if buffering > 1 else _SEND_BYTES)

    def settimeout(self, timeout: float | None) -> None:
        """Seconds that each piece may take; None for no limit."""
        self._socket.settimeout(timeout)

    def gettimeout(self) -> float | None:
        """Seconds that each piece may take."""
        return cast("float | None", self._socket.gettimeout())

    def setsockopt(self, *_: Any) -> None:
        """Options of a socket mean nothing here."""

    def fileno(self) -> int:
        """The descriptor of the connection to the API server."""
        return cast("int", self._socket.fileno())  # type: ignore[no-untyped-call]

    def shutdown(self, _: int) -> None:
        """End the connection: it cannot be half closed."""
        self.close()

    def close(self) -> None:
        """End the connection. A second time is fine."""
        self._at_end = True
        with contextlib.suppress(Exception):
            self._socket.close(timeout=0)
        with contextlib.suppress(Exception):
            # What was not connected any more, it has not closed.
            self._socket.shutdown()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def problems(self) -> str:
        """What the cluster said of this connection."""
        return " ".join(self._problems.decode("utf-8", "replace").split())[:_SHOWN]

    def _receive(self) -> None:
        with _as_os_errors(self):
            opcode, frame = self._socket.recv_data_frame(control_frame=False)
        if opcode == ABNF.OPCODE_CLOSE or not frame.data:
            self._end()
            return
        data = memoryview(frame.data)
        channel = data[0]
        data = data[1:]
        skipped = min(self._prefix.get(channel, 0), len(data))
        if skipped:
            self._prefix[channel] -= skipped
            data = data[skipped:]
        if channel == self._receive_channel:
            if data:
                self._waiting.append(data)
        elif channel in self._error_channels and data:
            self._problems += bytes(data)
            # A relay's last words on its stderr come before the status that ends it.
            if channel != _STDERR or self._receive_channel != _STDOUT:
                self._end()

    def _end(self) -> None:
        self._at_end = True
        said = self.problems
        if re.search(b"failed to connect|onnection ?[Rr]efused", self._problems):
            raise ConnectionRefusedError("Nothing listens at this port of the pod now")
        if said and '"status":"Success"' not in said.replace(" ", ""):
            raise ConnectionResetError(f"The connection to the pod ended: {said}")


class _Reader(io.RawIOBase):
    """What `io.BufferedReader` reads a connection by."""

    def __init__(self, connection: PodConnection) -> None:
        super().__init__()
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._connection.recv_into(buffer)


class _as_os_errors:  # noqa: N801 - used as a word, like contextlib.suppress
    """Turns the websocket library's errors into those of a socket."""

    def __init__(self, connection: PodConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, websocket.WebSocketTimeoutException):
            raise TimeoutError("The connection through the API server was silent for too long") from error
        if isinstance(error, websocket.WebSocketException):
            said = self._connection.problems or str(error)
            raise ConnectionResetError(f"The connection through the API server broke: {said}") from error


class ForbiddenError(BackendError):
    """This user may connect to pods neither by port-forward nor by exec."""


# -- opening ---------------------------------------------------------------------------------------------------------


def connect(
    cluster: Cluster, namespace: str, pod: str, port: int, *, container: str, timeout_s: float = SILENT_S
) -> PodConnection:
    """Connect to a port of a pod.

    Args:
        cluster: Where.
        namespace: Of the pod.
        pod: Its name.
        port: What listens there may listen on 127.0.0.1.
        container: Where a relay is started if port-forward is forbidden; it needs a `python3`.
        timeout_s: Seconds that each piece may take.

    Returns:
        A connection. Whether anything listens at the port shows when it is used.

    Raises:
        ForbiddenError: This user has the right to neither way.
        BackendError: The cluster refused for another reason, or cannot be reached.
    """
    try:
        return _forward(cluster, namespace, pod, port, timeout_s)
    except websocket.WebSocketBadStatusException as error:
        doing = Doing(verb="create", resource="pods/portforward", namespace=namespace, name=pod)
        if error.status_code != answers.FORBIDDEN:
            raise answers.explain(error, doing) from error
        refused = answers.explain(error, doing)
    except Exception as error:
        doing = Doing(verb="create", resource="pods/portforward", namespace=namespace, name=pod)
        raise answers.explain(error, doing) from error
    try:
        return _relay(cluster, namespace, pod, port, container, timeout_s)
    except websocket.WebSocketBadStatusException as error:
        if error.status_code == answers.FORBIDDEN:
            raise ForbiddenError(str(refused)) from error
        doing = Doing(verb="create", resource="pods/exec", namespace=namespace, name=pod)
        raise answers.explain(error, doing) from error


def _forward(cluster: Cluster, namespace: str, pod: str, port: int, timeout_s: float) -> PodConnection:
    socket = _open(cluster, namespace, f"{pod}/portforward", [("ports", str(port))], timeout_s)
    data, problem = _FORWARD_CHANNELS
    return PodConnection(
        socket, send_channel=data, receive_channel=data, error_channels=(problem,), prefix_bytes=_PORT_BYTES
    )


def _relay(cluster: Cluster, namespace: str, pod: str, port: int, container: str, timeout_s: float) -> PodConnection:
    words = ("python3", "-c", BRIDGE, str(port))
    flags = [(name, "true") for name in ("stdin", "stdout", "stderr")]
    query = [("container", container), *flags, ("tty", "false"), *(("command", word) for word in words)]
    socket = _open(cluster, namespace, f"{pod}/exec", query, timeout_s)
    return PodConnection(
        socket, send_channel=_STDIN, receive_channel=_STDOUT, error_channels=(_STDERR, _STATUS), prefix_bytes=0
    )


def _open(
    cluster: Cluster, namespace: str, path: str, query: list[tuple[str, str]], timeout_s: float
) -> websocket.WebSocket:
    """The handshake of a websocket with the API server, with this user's credentials."""
    settings = cluster.api.configuration
    base = urllib.parse.urlsplit(settings.host)
    whole = f"{base.path.rstrip('/')}/api/v1/namespaces/{namespace}/pods/{path}"
    scheme = "wss" if base.scheme == "https" else "ws"
    url = urllib.parse.urlunsplit((scheme, base.netloc, whole, urllib.parse.urlencode(query), ""))
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
