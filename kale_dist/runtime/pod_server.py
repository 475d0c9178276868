"""The byte server of a pod's agent: signed HTTP requests for blobs, outcomes, log and events.

Every request bears `transport.MAC_HEADER`; without the right one the answer is 403 and nothing more. Replies are JSON
but for blobs, files, log and events. What fails for another reason comes back as `{"error": sentence}`.

    GET  /status                  see `PodServer`
    GET  /blobs/<digest>          the bytes; with `Range: bytes=N-` those from N on
    GET  /blobs/<digest>/size     {"received": bytes, "complete": bool}; `?settled=1` ends an upload that is under way first
    PUT  /blobs/<digest>?offset=N appends from N on; 201 when that completes the blob, 200 while more has to come.
                                  409 with {"received"} if N is not where the last one ended; a later PUT of the same
                                  blob ends an earlier one that hangs. 422 if the digest is wrong: begin again at 0
    GET  /files/<name>            outcome-A-R or checkpoint, like a blob
    PUT  /files/outcome-A-R?offset=N   the same for another agent's outcome, without a digest
    GET  /log?from=N              framed lines of this pod (`contract`) from number N on, 8 MiB at most
    GET  /events?from=N           events from number N on, each a frame of `transport` without its first byte
    POST /ack                     the notebook has all it wants
    POST /cancel {"grace_s": s}   end the job

A PUT says in `transport.SIZE_HEADER` how large the whole is.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import re
import socket
import threading
import urllib.parse
from typing import Any, Protocol

from kale_dist import transport
from kale_dist.blobs import FolderStore
from kale_dist.contract import JobFiles
from kale_dist.errors import StoreError
from kale_dist.runtime import log_segments
from kale_dist.runtime.uploads import Body, Conflict, Uploads, WrongDigest
from kale_dist.transport import MAC_HEADER, MAX_REPLY_BYTES, SIZE_HEADER

SILENCE_LIMIT_S = 60.0
"""A connection on which nothing moves for so long is closed."""

_MAX_BODY_BYTES = 64 << 10
_OUTCOME = re.compile(r"outcome-(\d{1,6}-\d{1,6})", re.ASCII)


class Handler(Protocol):
    """What the agent does about requests. Called in the server's threads: queue, wake the loop and return."""

    def status(self) -> dict[str, Any]:
        """State ("waiting-for-input", "running" or "ended"), missing (digests), verdict ({state, reason} or None)."""
        ...

    def cancel(self, grace_s: float) -> None:
        """The notebook wants the job to end."""
        ...

    def acknowledged(self) -> None:
        """The notebook has all it wants."""
        ...

    def blob_arrived(self, digest: str) -> None:
        """A blob is whole and in the store."""
        ...

    def outcome_arrived(self, name: str) -> None:
        """Another agent's outcome is whole and in the job's folder, under this name."""
        ...


class PodServer:
    """Serves until it is closed.

    `GET /status` gives what `Handler.status` says and, beside it, pod (its number), outcomes (bytes of each outcome in
    the job's folder by "attempt-rank"), checkpoint (its bytes or None), next_line and next_event (numbers that the next
    of this pod will have).

    Args:
        host: Address to listen on; empty for all, of both IP versions.
        port: Port; 0 for any that is free.
        key: The job's secret.
        pod: The pod's number.
        files: The pod's job folder.
        store: Where blobs go and come from.
        handler: The agent.

    Raises:
        OSError: The port is taken.
    """

    def __init__(
        self, host: str, port: int, *, key: bytes, pod: int, files: JobFiles, store: FolderStore, handler: Handler
    ) -> None:
        self.key = key
        self.pod = pod
        self.files = files
        self.store = store
        self.handler = handler
        self.blobs = Uploads(store.root)
        self.outcomes = Uploads(files.folder)
        self._server = _Server(_listen(host, port), self)
        self.port: int = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(3600.0,), daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """What `GET /status` answers."""
        outcomes = {}
        for path in self.files.folder.glob("outcome-*"):
            named = _OUTCOME.fullmatch(path.name)
            if named:
                outcomes[named[1]] = path.stat().st_size
        checkpoint = self.files.checkpoint
        return {
            "pod": self.pod,
            "outcomes": outcomes,
            "checkpoint": checkpoint.stat().st_size if checkpoint.exists() else None,
            "next_line": log_segments.next_line(self.files.log),
            "next_event": _count_events(self.files.events),
            **self.handler.status(),
        }

    def events(self, first: int) -> bytes:
        """Signed events from a number on, one a line."""
        found: list[bytes] = []
        size = 0
        with contextlib.suppress(FileNotFoundError), self.files.events.open("rb") as file:
            for number, line in enumerate(file):
                if size > MAX_REPLY_BYTES or not line.endswith(b"\n"):
                    break
                if number >= first:
                    found.append(transport.sign_event(self.key, self.pod, number, line[:-1]) + b"\n")
                    size += len(found[-1])
        return b"".join(found)

    def close(self) -> None:
        """Stop listening. Replies under way are cut when the process ends."""
        # Wakes the thread in `serve_forever`, which else would look for the end only now and then.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def _count_events(path: pathlib.Path) -> int:
    count = 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
    return count


class _Server(http.server.ThreadingHTTPServer):
    """Threads for requests on a socket that listens already."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, pod: PodServer) -> None:
        super().__init__(listener.getsockname()[:2], _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.pod = pod

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a broken connection is its peer's affair."""


class _Request(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = SILENCE_LIMIT_S
    disable_nagle_algorithm = True
    wbufsize = -1
    server: _Server

    def handle_one_request(self) -> None:
        """As the base class, but a connection that breaks just ends."""
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def do_GET(self) -> None:
        """Answer with bytes or facts."""
        self._answer()

    def do_PUT(self) -> None:
        """Take bytes."""
        self._answer()

    def do_POST(self) -> None:
        """Take an instruction."""
        self._answer()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - as the base class calls it
        """What is not even a request is told nothing either."""
        self._refuse()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Write nothing: stderr is the pod's log."""

    def _answer(self) -> None:
        pod = self.server.pod
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch(r"\d{1,15}", length, re.ASCII) or (
            self.command == "POST" and int(length) > _MAX_BODY_BYTES
        ):
            self._refuse()
            return
        text, digest, self._body = b"", "", Body(self.rfile, int(length))
        if self.command == "POST":
            text, self._body.left = self.rfile.read(int(length)), 0
            digest = hashlib.sha256(text).hexdigest()
        if not transport.check_request(pod.key, self.command, self.path, digest, self.headers.get(MAC_HEADER, "")):
            self._refuse()
            return
        target = urllib.parse.urlsplit(self.path)
        try:
            self._route(target.path.split("/")[1:], dict(urllib.parse.parse_qsl(target.query)), text)
        except Conflict as error:
            self._reply(409, {"received": error.received})
        except WrongDigest as error:
            self._reply(422, {"error": str(error)})
        except FileNotFoundError:
            self._reply(404, {"error": f"{self.path} is not there"})
        except StoreError as error:
            self._reply(507, {"error": str(error)})
        except (ValueError, TypeError, LookupError) as error:
            self._reply(400, {"error": f"{self.path}: {error}"})
        self.wfile.flush()
        self._body.pass_over()

    def _route(self, path: list[str], query: dict[str, str], body: bytes) -> None:
        """Do what is asked.

        Raises:
            ValueError: It makes no sense.
            FileNotFoundError: There is no such thing.
        """
        pod = self.server.pod
        match self.command, *path:
            case "GET", "status":
                self._reply(200, pod.status())
            case "GET", "blobs", digest:
                self._send_file(_blob(pod.store, digest))
            case "GET", "blobs", digest, "size":
                whole = _blob(pod.store, digest)
                size = whole.stat().st_size if whole.exists() else None
                counted = pod.blobs.settled if "settled" in query else pod.blobs.received
                received = counted(digest) if size is None else size
                self._reply(200, {"received": received, "complete": size is not None})
            case "PUT", "blobs", digest:
                if self._take(pod.blobs, _blob(pod.store, digest).name, digest, 0o444, query):
                    pod.handler.blob_arrived(digest)
            case "GET", "files", name if _OUTCOME.fullmatch(name) or name == pod.files.checkpoint.name:
                self._send_file(pod.files.folder / name)
            case "PUT", "files", name if _OUTCOME.fullmatch(name):
                if self._take(pod.outcomes, name, None, 0o600, query):
                    pod.handler.outcome_arrived(name)
            case "GET", "log":
                self._reply(200, log_segments.read_from(pod.files.log, int(query.get("from", "0")), MAX_REPLY_BYTES))
            case "GET", "events":
                self._reply(200, pod.events(int(query.get("from", "0"))))
            case "POST", "ack":
                self._reply(200, {})
                pod.handler.acknowledged()
            case "POST", "cancel":
                grace_s = float(json.loads(body)["grace_s"])
                if not grace_s >= 0:
                    raise ValueError("grace_s has to be 0 or more")
                self._reply(200, {})
                pod.handler.cancel(grace_s)
            case _:
                raise FileNotFoundError

    def _take(self, uploads: Uploads, name: str, digest: str | None, mode: int, query: dict[str, str]) -> bool:
        """Take the body of a PUT and answer it; whether the file has become whole by that."""
        size = int(self.headers.get(SIZE_HEADER, ""))
        offset = int(query.get("offset", "0"))
        if (uploads.folder / name).exists():
            self._reply(200, {"received": size, "complete": True})
            return False
        if not 0 <= offset <= offset + self._body.left <= size:
            raise ValueError(f"{self._body.left} bytes from {offset} on do not fit into {size}")
        received, is_new = uploads.take(name, offset, size, self.connection, self._body, digest=digest, mode=mode)
        self._reply(201 if is_new else 200, {"received": received, "complete": received == size})
        return is_new

    def _send_file(self, path: pathlib.Path) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            wanted = re.fullmatch(r"bytes=(\d{1,15})-", self.headers.get("Range", ""), re.ASCII)
            if wanted is None:
                first = 0
                self._head(200, size)
            elif (first := int(wanted[1])) < size:
                self._head(206, size - first, ("Content-Range", f"bytes {first}-{size - 1}/{size}"))
            else:
                first = size
                self._head(416, 0, ("Content-Range", f"bytes */{size}"))
            self.wfile.flush()
            if first < size:
                self.connection.sendfile(file, first, size - first)

    def _reply(self, code: int, answer: bytes | dict[str, Any]) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self._head(code, len(data))
        self.wfile.write(data)

    def _head(self, code: int, size: int, *headers: tuple[str, str]) -> None:
        self.send_response_only(code)
        for name, value in (("Content-Length", str(size)), *headers):
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self) -> None:
        """Answer 403 and end the connection, whose body has not been read."""
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def _blob(store: FolderStore, digest: str) -> pathlib.Path:
    """The file of a blob.

    Raises:
        ValueError: This is no digest.
    """
    try:
        return store.path(digest)
    except StoreError as error:
        raise ValueError(str(error)) from error
