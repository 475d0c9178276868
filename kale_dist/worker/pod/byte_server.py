"""The byte server of a head: signed HTTP requests, each in a thread of its own.

Every request bears `wire.MAC_HEADER`; without the right one the answer is 403 (400 to another version's) and nothing more, and no body is read. Replies are JSON
but for bytes. What fails for another reason comes back as `{"error": sentence}`.

    GET  /stream?line=N&event=M   blocks (`wire.log`) from the record with line N (or an older one) and from event M on, as
                                  they come, and empty lines where none comes for long; ends after the last one of a job that has ended.
                                  No Content-Length
    GET  /missing                 digests of the blobs that the notebook has to send
    GET  /blobs/<digest>?offset=N the bytes from N on
    GET  /blobs/<digest>/size     {"received": bytes, "complete": bool}
    PUT  /blobs/<digest>?offset=N appends from N on; 201 when that completes the blob, 200 while more has to come. 409 with
                                  {"received"} if N is not where the last one ended. 422: wrong digest, begin again at 0
    GET  /files/<name>            outcome-A-R or checkpoint, like a blob
    POST /ack                     the notebook has all it wants
    POST /cancel {"grace_s": s, "save": b}   end the job
    POST /send?rank=R             pass a message (`wire.messages`) on to a rank; -1: to all
    POST /jobs                    of warm pods: take a job, as `warm.WarmPods.offer` does. Requests about the job, signed with its
                                  key, are the others of this list, with /jobs/<id> before their paths

A PUT has the size of the whole in `wire.SIZE_HEADER`, and so has an answer with bytes. A relay's server answers `GET /blobs/<digest>`
alone, and sends what there is so far of a blob that it is fetching itself.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import http.server
import io
import json
import os
import pathlib
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol, Self

from kale_dist import wire
from kale_dist.errors import StoreError
from kale_dist.wire import BODY_HEADER, MAC_HEADER, SIZE_HEADER, JobFiles, check_request, messages
from kale_dist.wire.blobs import FolderStore, digest_of
from kale_dist.wire.messages import ToAgent
from kale_dist.worker.agent.job_run import open_port
from kale_dist.worker.agent.writer import JobWriter, LogFile

SILENCE_LIMIT_S = 60.0
"""A connection on which nothing moves for so long is closed."""

ATTENDED_S = 30.0
"""A notebook that wants something asks again within this time, however its network is."""

GATHER_S = 0.02
"""What comes within this time of the last piece of a stream is sent together: each piece costs the notebook's processor alike."""

NOT_YET = pathlib.Path(os.devnull), 1 << 62
"""A blob that is coming, and of which nothing is known: an empty file, and a size that means that there is more."""

_COMING_WAIT_S = 5.0
"""Who asks a relay for more of a blob than it has waits so long before it has to ask again."""

_MAX_STRANGERS = 64
"""Connections that have not proved the key; one more closes the oldest."""
_STRANGERS_LIMIT_S = 5.0
"""How long the headers of a connection's first request may take."""
_MAX_HEAD_BYTES = 16 << 10
_OTHER_VERSION = "This job's head speaks another version of kale_dist: update it here, and restart the kernel"
_MAX_BODY_BYTES = 1 << 20
_MAX_ORDER_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20
_OUTCOME = re.compile(r"outcome-\d{1,6}-\d{1,6}", re.ASCII)


class HeadOfJob(Protocol):
    """What a server tells of requests, in threads of its own."""

    def missing(self) -> list[str]:
        """Digests of the blobs that the notebook has to send."""

    def cancel(self, grace_s: float, *, save: bool) -> None:
        """End the job, with a grace in seconds; ranks that can may save first."""

    def send(self, rank: int, message: ToAgent) -> None:
        """Pass a message on to a rank."""

    def acknowledge(self) -> None:
        """The notebook has all it wants."""

    def offer(self, body: bytes) -> Any:
        """Take a job. Raises FileNotFoundError where the pods are not warm."""


class Served:
    """What a server answers for: the secret that requests are signed with, and blobs."""

    def __init__(self, key: bytes, store: FolderStore) -> None:
        self.key = key
        self.store = store
        self._requests: set[object] = set()
        # The notebook of a short job has only just seen that its pod runs.
        self._asked_at = time.monotonic()

    @property
    def is_attended(self) -> bool:
        """Whether somebody with the key is there: receives or sends something, or has done so a moment ago."""
        return bool(self._requests) or time.monotonic() - self._asked_at < ATTENDED_S

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        """Count a request while it is answered."""
        self._requests.add(request := object())
        try:
            yield
        finally:
            self._asked_at = time.monotonic()
            self._requests.remove(request)

    def find(self, path: str) -> tuple[Self, str]:
        """The job that a request is about, and the rest of its path."""
        return self, path


class ServedJob(Served):
    """A job whose files, log and blobs are served.

    Args:
        head: Its head.
        key: Its secret.
        files: Its folder.
        store: Where blobs go and come from.
        writer: What writes that folder.
    """

    def __init__(self, head: HeadOfJob, *, key: bytes, files: JobFiles, store: FolderStore, writer: JobWriter) -> None:
        super().__init__(key, store)
        self.head = head
        self.files = files
        self.writer = writer
        self.news = threading.Condition()
        """Notified when the files have grown, or a blob has come."""
        self.upload_locks: dict[str, threading.Lock] = {}

    def notify(self) -> None:
        """The files have grown."""
        with self.news:
            self.news.notify_all()

    def received(self, digest: str) -> int:
        """Bytes of a blob that have come so far."""
        with contextlib.suppress(OSError):
            return _part(self.store.path(digest)).stat().st_size
        return 0


class ByteServer:
    """Serves the job of a pod, and those that warm pods take, until it is closed.

    Args:
        host: Address to listen on; empty for all, of both IP versions.
        port: Port; 0 for any that is free.
        job: The pod's own.

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, host: str, port: int, job: ServedJob) -> None:
        self.jobs = {"": job}
        """By what comes before the paths of requests about them."""
        self._server = HttpServer(host, port, _JobRequest, self)
        self.port = self._server.port

    def find(self, path: str) -> tuple[ServedJob, str]:
        """The job that a request is about, and the rest of its path."""
        prefix = "/".join(path.split("/", 3)[:3])
        job = self.jobs.get(prefix)
        return (self.jobs[""], path) if job is None else (job, path.removeprefix(prefix))

    def close(self) -> None:
        """Stop listening. Replies under way are cut when the process ends."""
        self._server.stop()


class BlobServer(Served):
    """What a relay fetches, and serves to other relays until its process ends.

    Args:
        key: The pods' secret.
        store: Where the blobs are.
    """

    def __init__(self, key: bytes, store: FolderStore) -> None:
        super().__init__(key, store)
        self.source: tuple[str, int] | None = None
        """Host and port of another relay, from which this one fetches as long as that answers; None for the head."""
        self.coming: dict[str, tuple[pathlib.Path, int]] = {}
        """Blobs that are being fetched, by their digests: the file that grows, and how large it will be."""
        self.is_over = threading.Event()
        """Nothing more is to be fetched."""
        self.port = 0

    def listen(self, host: str) -> None:
        """Begin to serve, at an address; empty for all."""
        self.port = HttpServer(host, 0, _BlobRequest, self).port


class HttpServer(http.server.ThreadingHTTPServer):
    """Answers requests, each in a thread of its own, until it is stopped.

    Args:
        host: Address to listen on; empty for all, of both IP versions.
        port: Port; 0 for any that is free.
        requests: Answers one request.
        owner: Whose answers they are.

    Raises:
        OSError: The port is taken.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, requests: type[http.server.BaseHTTPRequestHandler], owner: Any) -> None:
        listener = open_port(host, port, 1024)
        super().__init__(listener.getsockname()[:2], requests, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.owner = owner
        self.strangers: dict[socket.socket, float] = {}
        """Connections that have not proved the key, the oldest first, and when they came."""
        self.port: int = listener.getsockname()[1]
        self._thread = threading.Thread(target=self.serve_forever, args=(1.0,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening."""
        # Wakes the thread in `serve_forever`, which else would look for the end once a second.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to answer a connection, of strangers a limited number."""
        self.strangers[request] = time.monotonic()
        self.service_actions()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called once a second: end connections whose first headers do not come, or that are too many."""
        known, too_old = list(self.strangers.items()), time.monotonic() - _STRANGERS_LIMIT_S
        for at, (connection, since) in enumerate(known, _MAX_STRANGERS - len(known)):
            if at < 0 or since < too_old:
                self.strangers.pop(connection, None)
                # Its thread reads the end.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        self.strangers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a broken connection is its peer's affair."""


class _Request(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = SILENCE_LIMIT_S
    disable_nagle_algorithm = True
    wbufsize = -1
    server: HttpServer
    _owner: Served

    def handle_one_request(self) -> None:
        """Answer requests until the connection ends or breaks."""
        try:
            super().handle_one_request()
        except OSError:
            self.close_connection = True

    def parse_request(self) -> bool:
        """Read headers of limited size: what is beyond counts as the body."""
        rest, head = self.rfile, b""
        while (line := rest.readline(_MAX_HEAD_BYTES - len(head))).strip():
            head += line
        self.rfile = io.BytesIO(head + b"\r\n")
        try:
            return super().parse_request()
        finally:
            self.rfile = rest

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - as the base class calls it
        """Rejects malformed requests without an explanation."""
        self._refuse()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Write nothing: stderr is the pod's log."""

    def _answer(self) -> None:
        self._owner, path = self.server.owner.find(self.path)
        owner = self._owner
        length, limit = (
            self.headers.get("Content-Length", "0"),
            _MAX_ORDER_BYTES if path == "/jobs" else _MAX_BODY_BYTES,
        )
        if not re.fullmatch(r"\d{1,15}", length, re.ASCII) or (self.command == "POST" and int(length) > limit):
            self._refuse()
            return
        text, self._left = b"", int(length)
        announced = self.headers.get(BODY_HEADER, "") if self.command == "POST" else ""
        if self.command == "POST" and not announced:
            self.close_connection = True
            self._reply(400, {"error": _OTHER_VERSION})
            return
        if not check_request(owner.key, self.command, self.path, announced, self.headers.get(MAC_HEADER, "")):
            self._refuse()
            return
        self.server.strangers.pop(self.connection, None)
        if self.command == "POST":
            text, self._left = self.rfile.read(int(length)), 0
            if hashlib.sha256(text).hexdigest() != announced:
                self._refuse()
                return
        target = urllib.parse.urlsplit(path)
        try:
            with owner.attended():
                self._route(target.path.split("/")[1:], dict(urllib.parse.parse_qsl(target.query)), text)
        except FileNotFoundError:
            self._reply(404, {"error": f"{self.path} is not there"})
        except StoreError as error:
            self._reply(507, {"error": str(error)})
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            self._reply(400, {"error": f"{self.path}: {error}"})
        self.wfile.flush()
        if self._left:
            # A peer that is still sending would not see the reply otherwise.
            self.close_connection = True
            while self._left and (data := self.rfile.read1(min(self._left, _PIECE_BYTES))):
                self._left -= len(data)

    def _route(self, path: list[str], query: dict[str, str], body: bytes) -> None:
        raise NotImplementedError

    do_GET = do_PUT = do_POST = _answer  # noqa: N815 - as the base class calls them

    def _send_file(self, path: pathlib.Path, offset: int = 0, whole: int = 0, version: str | None = None) -> None:
        """Send a file from an offset on; from its beginning if it is another version than the one that the peer has a part of."""
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            size, there = found.st_size, f"{found.st_ino:x}-{found.st_mtime_ns:x}"
            offset = offset if version in (None, there) else 0
            if not 0 <= offset <= size:
                raise ValueError(f"there are no bytes from {offset} on")
            self._head(200, size - offset, whole or size, there)
            self.wfile.flush()
            if offset < size:
                self.connection.sendfile(file, offset, size - offset)

    def _reply(self, code: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self._head(code, len(data))
        self.wfile.write(data)

    def _head(self, code: int, size: int, whole: int = 0, version: str = "") -> None:
        self.send_response_only(code)
        self.send_header("ETag", version)
        self.send_header("Content-Length", str(size))
        self.send_header(SIZE_HEADER, str(whole))
        self.end_headers()

    def _refuse(self) -> None:
        """Answer 403 and end the connection, whose body has not been read."""
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


class _JobRequest(_Request):
    """One connection to a head."""

    _owner: ServedJob

    def _route(self, path: list[str], query: dict[str, str], body: bytes) -> None:
        owner = self._owner
        match self.command, *path:
            case "GET", "blobs", digest:
                self._send_file(_blob(owner.store, digest), int(query.get("offset", "0")))
            case "GET", "blobs", digest, "size":
                whole = _blob(owner.store, digest)
                is_whole = whole.exists()
                received = whole.stat().st_size if is_whole else owner.received(digest)
                self._reply(200, {"received": received, "complete": is_whole})
            case "GET", "stream":
                self._stream(owner.writer, int(query.get("line", "0")), int(query.get("event", "0")))
            case "GET", "missing":
                self._reply(200, owner.head.missing())
            case "PUT", "blobs", digest:
                self._take(digest, int(query.get("offset", "0")))
            case "GET", "files", name if _OUTCOME.fullmatch(name) or name == owner.files.checkpoint.name:
                self._send_file(
                    owner.files.folder / name, int(query.get("offset", "0")), version=query.get("version", "")
                )
            case "POST", "ack":
                self._reply(200, {})
                owner.head.acknowledge()
            case "POST", "jobs":
                self._reply(200, owner.head.offer(body))
            case "POST", "send":
                rank, message = int(query["rank"]), messages.parse(json.loads(body))
                self._reply(200, {})
                owner.head.send(rank, message)
            case "POST", "cancel":
                asked = json.loads(body)
                grace_s = float(asked["grace_s"])
                if not grace_s >= 0:
                    raise ValueError("grace_s has to be 0 or more")
                self._reply(200, {})
                owner.head.cancel(grace_s, save=bool(asked.get("save")))
            case _:
                raise FileNotFoundError

    def _stream(self, writer: JobWriter, line: int, event: int) -> None:
        """Send all blocks from some numbers on, until the job has ended."""
        owner = self._owner
        self.close_connection = True
        self.send_response_only(200)
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.closing(_LogSender(writer, line)) as log, owner.files.events.open("rb") as events:
            for _ in range(event):
                if not events.readline().endswith(b"\n"):
                    break
            number, sent_progress, is_current = event, dict[str, bytes](), False
            while True:
                written = writer.written
                for data in log.pieces(written.log):
                    self.wfile.write(data)
                while events.tell() < written.event_bytes:
                    self.wfile.write(wire.encode_event(number, events.readline()))
                    number += 1
                # It is replaced as a whole.
                if (progress := writer.progress) is not sent_progress:
                    for name, encoded in progress.items():
                        if sent_progress.get(name) != encoded:
                            self.wfile.write(wire.encode_progress(encoded))
                    sent_progress = progress
                self.wfile.flush()
                if written.is_last:
                    return
                # An empty line: what was there when the stream began has been sent.
                self.wfile.write(b"" if is_current else b"\n")
                is_current = True
                time.sleep(GATHER_S)
                with owner.news:
                    if writer.written == written and not owner.news.wait(SILENCE_LIMIT_S / 4):
                        # So that both sides notice an end of the connection.
                        self.wfile.write(b"\n")

    def _take(self, digest: str, offset: int) -> None:
        """Take the body of a PUT, append it, and answer."""
        owner, whole = self._owner, _blob(self._owner.store, digest)
        size, part = int(self.headers.get(SIZE_HEADER, "")), _part(whole)
        with owner.upload_locks.setdefault(digest, threading.Lock()):
            if owner.store.exists(digest):
                self._reply(200, {"received": size, "complete": True})
                return
            received = part.stat().st_size if part.exists() else 0
            if not 0 <= offset <= offset + self._left <= size:
                raise ValueError(f"{self._left} bytes from {offset} on do not fit into {size}")
            if offset != received:
                self._reply(409, {"received": received})
                return
            try:
                part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with part.open("ab") as file:
                    while self._left:
                        if not (data := self.rfile.read1(min(self._left, _PIECE_BYTES))):
                            raise ConnectionResetError
                        self._left -= len(data)
                        file.write(data)
                    received = file.tell()
            except ConnectionError:
                raise
            except OSError as error:
                raise StoreError(f"The pod cannot keep a part of the snapshot: {error.strerror}.") from error
            if received < size:
                self._reply(200, {"received": received, "complete": False})
                return
            if not is_intact(part, digest):
                part.unlink()
                self._reply(422, {"error": f"The bytes that came for {digest} have another digest"})
                return
            part.chmod(0o444)
            part.replace(whole)
            owner.store.received(digest)
        self._reply(201, {"received": size, "complete": True})
        owner.notify()


class _BlobRequest(_Request):
    """One connection to a relay."""

    _owner: BlobServer

    def _route(self, path: list[str], query: dict[str, str], body: bytes) -> None:
        if (self.command, path[0], len(path)) != ("GET", "blobs", 2) or body:
            raise FileNotFoundError
        offset, whole = int(query.get("offset", "0")), _blob(self._owner.store, path[1])
        until = time.monotonic() + _COMING_WAIT_S
        while True:
            is_late = time.monotonic() >= until
            part, size = self._owner.coming.get(path[1], (whole, 0))
            try:
                if part == whole or is_late or part.stat().st_size > offset:
                    return self._send_file(part, offset, size)
            except FileNotFoundError:
                # It is whole in this moment, or the relay does not know of it yet.
                if is_late:
                    raise
            time.sleep(GATHER_S)


class _LogSender:
    """Reads a head's log across its files, from the record with a line on.

    Args:
        writer: What writes it.
        line: Its number.
    """

    def __init__(self, writer: JobWriter, line: int) -> None:
        self._writer = writer
        self._line = line
        self._first = -1
        self._file: BinaryIO | None = None

    def pieces(self, log: tuple[LogFile, ...]) -> Iterator[bytes]:
        """What there is since the last call.

        Args:
            log: The log's files, as far as they are written.
        """
        for at, file in enumerate(log):
            if file.first > self._first and (at + 1 == len(log) or log[at + 1].first > self._line):
                # One that is deleted in this moment was too old.
                with contextlib.suppress(FileNotFoundError):
                    self._open(file)
            while file.first == self._first and self._file is not None and self._file.tell() < file.bytes:
                yield self._file.read(min(_PIECE_BYTES, file.bytes - self._file.tell()))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _open(self, file: LogFile) -> None:
        fresh = self._writer.open_log(file.first)
        self.close()
        self._first, self._file = file.first, fresh

        def is_beyond(at: int) -> bool:
            after = wire.lines_after(fresh, at)
            return after is None or after[0] >= file.bytes or after[1] > self._line

        fresh.seek(max(0, bisect.bisect_left(range(file.bytes), x=True, key=is_beyond) - 1))


def _blob(store: FolderStore, digest: str) -> pathlib.Path:
    """The file of a blob.

    Raises:
        ValueError: This is no digest.
    """
    try:
        return store.path(digest)
    except StoreError as error:
        raise ValueError(str(error)) from error


def _part(whole: pathlib.Path) -> pathlib.Path:
    return whole.with_name(f".{whole.name}.part")


def is_intact(path: pathlib.Path, digest: str) -> bool:
    """Whether a file has the digest that names a blob."""
    with path.open("rb") as file:
        return digest_of(iter(lambda: file.read(_PIECE_BYTES), b"")) == digest
