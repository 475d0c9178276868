"""The notebook's side of the head's byte server: signed HTTP requests over any connection that a place can open."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import http.client
import importlib
import io
import json
import pathlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kale_dist.errors import BackendError, StoreError
from kale_dist.job import records
from kale_dist.job.backend import HeadConnection
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.wire import BODY_HEADER, MAC_HEADER, SIZE_HEADER, messages, sign_request
from kale_dist.wire.blobs import FolderStore, Store, fresh
from kale_dist.wire.messages import ToAgent

Answer = TypeVar("Answer")

OnProgress = Callable[[int, int], None]
"""Called with the number of bytes transferred so far, and of all."""

_PIECE_BYTES = 1 << 20
_ASK_FIRST_BYTES = 1 << 20
"""Before a larger blob is sent, the head is asked how much of it it has."""

_AT_ONCE = 4
"""So many blobs are sent at once: of small ones each takes as long as its connection."""

_PAUSES_S = 0.2, 1.0
"""Pauses before a request is sent again whose connection was cut. After the last one the follower tries again, which also looks at the pod."""

_ANSWER_S = 60.0
"""A head that sends no byte of an answer for so long counts as gone. A busy head answers within seconds."""

_CUT = (OSError, http.client.HTTPException)


class HeadClient:
    """Requests to one head. Each uses a connection of its own, so that threads can share a client.

    Every method raises `BackendError`: retryable where the head could not be reached or the connection was cut.

    Args:
        connect: Opens a connection to the head's byte server.
        key: The job's secret bytes.
        prefix: What comes before the paths of requests, for a job in warm pods: `/jobs/<id>`.
    """

    def __init__(self, connect: Callable[[], HeadConnection], key: bytes, prefix: str = "") -> None:
        self._connect = connect
        self._key = key
        self._prefix = prefix

    def offer(self, job: Mapping[str, Any], packed: bytes) -> dict[str, Any]:
        """Offer a job to warm pods; see `WarmPods.offer`, which describes what both sides send."""
        described = json.dumps(job).encode()
        return dict(json.loads(self._ask("POST", "/jobs", len(described).to_bytes(4, "big") + described + packed)))

    def missing(self) -> list[str]:
        """Digests of the blobs of the snapshot that the head does not have yet."""
        return [str(digest) for digest in json.loads(self._ask("GET", "/missing"))]

    def ack(self) -> None:
        """Tell the head that all outcomes have been fetched, so that its pod may end."""
        self._ask("POST", "/ack", b"{}")

    def cancel(self, grace_s: float, *, save: bool = False) -> None:
        """Have the head end the job: one more checkpoint if wanted, SIGTERM to all ranks, SIGKILL after `grace_s` seconds."""
        self._ask("POST", "/cancel", json.dumps({"grace_s": grace_s, "save": save}).encode())

    def send(self, rank: int, message: ToAgent) -> None:
        """Have the head pass a message on to a rank, or with -1 to all."""
        self._ask("POST", f"/send?rank={rank}", messages.encode(message))

    @contextlib.contextmanager
    def stream(self, line: int, event: int, silence_s: float) -> Iterator[tuple[Iterator[bytes], Callable[[], None]]]:
        """Blocks of the log and events as they come, until the job has ended.

        Args:
            line: Number of the first line to send.
            event: Number of the first event to send.
            silence_s: Seconds without a byte after which the connection counts as dead.

        Returns:
            The bytes, and a function that ends the stream from another thread.
        """
        with self._request("GET", f"/stream?line={line}&event={event}", silence_s=silence_s) as (answer, end):

            def pieces() -> Iterator[bytes]:
                try:
                    # `read` would wait for a whole piece.
                    while piece := answer.read1(_PIECE_BYTES):
                        yield piece
                except (*_CUT, ValueError) as error:
                    raise _cut("copying the log", error) from error

            yield pieces(), end

    def upload(self, store: Store, digests: Iterable[str], on_progress: OnProgress | None = None) -> None:
        """Send blobs that the head lacks. A blob that was cut is resumed where it broke.

        Args:
            store: Where they are.
            digests: Which.
            on_progress: Called after each piece.

        Raises:
            StoreError: The store lacks a blob, it is damaged, or the head's disk is full.
        """
        blobs = [(digest, memoryview(store.open(digest)).cast("B")) for digest in dict.fromkeys(digests)]
        total, sent = sum(len(view) for _, view in blobs), dict.fromkeys((digest for digest, _ in blobs), 0)

        def send(blob: tuple[str, memoryview]) -> None:
            self._upload_one(*blob, functools.partial(note, blob[0]))

        def note(digest: str, count: int) -> None:
            sent[digest] = count
            if on_progress is not None:
                on_progress(sum(sent.values()), total)

        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(send, blobs))

    def fetch_file(self, name: str, target: pathlib.Path, on_progress: OnProgress | None = None) -> bool:
        """Bring a file of the head's folder here, whole or not at all.

        One that was cut is resumed where it broke, if the head can be reached again within a second.

        Args:
            name: Of an outcome, or `checkpoint`.
            target: Where to write it.
            on_progress: Called after each piece.

        Returns:
            Whether the head has such a file.

        Raises:
            StoreError: It cannot be written here.
        """
        with contextlib.suppress(_NotThereError), writing(target) as file:
            version, total = "", -1

            def fetch() -> None:
                """Get the rest, or some of it."""
                nonlocal version, total
                begun = file.tell()
                path = f"/files/{name}?offset={begun}&version={version}"
                with contextlib.suppress(*_CUT), self._request("GET", path) as (answer, _):
                    total = int(answer.headers[SIZE_HEADER])
                    if answer.headers["ETag"] != version:
                        version, begun = answer.headers["ETag"], 0
                        file.seek(0)
                        file.truncate()
                    while piece := answer.read1(_PIECE_BYTES):
                        with _stored(target):
                            file.write(piece)
                        if on_progress is not None:
                            on_progress(file.tell(), total)
                if file.tell() == begun != total:
                    raise ConnectionResetError(f"{begun:,} of {total:,} bytes had come")

            while file.tell() != total:
                self._repeat(f"fetching {name}", fetch)
            return True
        return False

    # -- inside -------------------------------------------------------------------------------------------------------

    def _upload_one(self, digest: str, view: memoryview, on_progress: Callable[[int], None]) -> None:
        path = f"/blobs/{digest}"
        may_be_there = len(view) > _ASK_FIRST_BYTES

        def send() -> None:
            nonlocal may_be_there
            offset = 0
            if may_be_there:
                there = json.loads(self._request_once("GET", f"{path}/size"))
                offset = len(view) if there["complete"] else int(there["received"])
            may_be_there = True
            if offset < len(view) or not len(view):
                headers = {SIZE_HEADER: str(len(view)), "Content-Length": str(len(view) - offset)}
                with self._request("PUT", f"{path}?offset={offset}", pieces(offset), headers=headers):
                    pass
            on_progress(len(view))

        def pieces(offset: int) -> Iterator[memoryview]:
            for start in range(offset, len(view), _PIECE_BYTES):
                yield view[start : start + _PIECE_BYTES]
                on_progress(min(len(view), start + _PIECE_BYTES))

        self._repeat(f"sending {len(view):,} bytes of the snapshot", send)

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        return self._repeat(f"asking {method} {path}", lambda: self._request_once(method, path, body))

    def _request_once(self, method: str, path: str, body: bytes = b"") -> bytes:
        with self._request(method, path, body) as (answer, _):
            return answer.read()

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[memoryview] = b"",
        *,
        silence_s: float = _ANSWER_S,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[tuple[http.client.HTTPResponse, Callable[[], None]]]:
        path = self._prefix + path
        with contextlib.closing(self._connect()) as connection:
            connection.settimeout(silence_s)
            peer = http.client.HTTPConnection("head")
            peer.sock = HttpSocket(connection)
            peer.auto_open = 0
            # The body of a PUT is a blob, which its digest in the path signs.
            digest = hashlib.sha256(body).hexdigest() if method == "POST" and isinstance(body, bytes) else ""
            signature = {MAC_HEADER: sign_request(self._key, method, path, digest), BODY_HEADER: digest}
            try:
                peer.request(method, path, body or None, signature | dict(headers or {}))
                answer = peer.getresponse()
            except _CUT as error:
                raise _cut(f"asking {method} {path}", error) from error
            with answer:
                _check(answer, path)
                yield answer, functools.partial(connection.shutdown, socket.SHUT_RDWR)

    def _repeat(self, doing: str, act: Callable[[], Answer]) -> Answer:
        pauses_s = iter(_PAUSES_S)
        while True:
            try:
                return act()
            except StoreError:
                raise
            except (*_CUT, BackendError) as error:
                if isinstance(error, BackendError) and not error.retryable:
                    raise
                if (pause_s := next(pauses_s, None)) is None:
                    raise error if isinstance(error, BackendError) else _cut(doing, error) from error
                time.sleep(pause_s)
            except (ValueError, KeyError, TypeError) as error:
                raise BackendError(f"The head's answer while {doing} could not be read: {error}") from error


def send_missing(
    head: HeadClient, spec: JobSpec, missing: Sequence[str], on_progress: Callable[[str], None], *, is_fresh: bool
) -> None:
    """Send what a head lacks of a job's snapshot and packages. What this machine does not have is left to the one that submitted the job.

    Args:
        head: Of the job, or of its warm pods.
        spec: The job.
        missing: Digests of the blobs.
        on_progress: Called with a sentence.
        is_fresh: Whether the pods have nothing but their image.
    """
    store, what = FolderStore(records.blobs_dir()), "packages" if set(missing) & set(spec.offer.blobs) else "snapshot"
    if is_fresh and missing and spec.offer.packages:
        # The notebook that submitted the job has the extra for it; another may not.
        with contextlib.suppress(ImportError):
            importlib.import_module("kale_dist.image.here").remember(spec.image, spec.offer.packages, missing)

    def show(done: int, total: int) -> None:
        on_progress(f"Sending the {what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    if there := [digest for digest in missing if store.exists(digest)]:
        head.upload(store, there, show)


class _NotThereError(StoreError):
    """The head has no such file."""


class HttpSocket:
    """Gives a place's connection the methods of a socket that `http.client` uses."""

    def __init__(self, connection: HeadConnection) -> None:
        self._connection = connection
        self.sendall = connection.sendall

    def close(self) -> None:
        """Do nothing: `http.client` closes its socket before the answer has been read."""

    def makefile(self, _mode: str) -> io.BufferedReader:
        """A file that reads the connection."""
        return io.BufferedReader(_Received(self._connection), _PIECE_BYTES)


class _Received(io.RawIOBase):
    def __init__(self, connection: HeadConnection) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._connection.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def writing(target: pathlib.Path) -> Iterator[io.BufferedWriter]:
    """A file that gets its name when it is complete, and is removed after an error.

    Raises:
        StoreError: The disk is full or read-only.
    """
    with _stored(target), fresh(target) as part, part.open("wb") as file:
        yield file


@contextlib.contextmanager
def _stored(target: pathlib.Path) -> Iterator[None]:
    """Name the disk where one is the reason."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
            raise
        raise StoreError(
            f"{target} could not be written on the notebook's side: {error.strerror or error}. Free some space, or set "
            "XDG_STATE_HOME to a folder on a larger disk"
        ) from error


def _check(answer: http.client.HTTPResponse, path: str) -> None:
    """Raise the error that the status of the head's answer stands for.

    Raises:
        BackendError: The head refused.
        StoreError: The head has no such file, or could not store the blob.
    """
    if answer.status < http.client.MULTIPLE_CHOICES:
        return
    problem = answer.read(_PIECE_BYTES).decode(errors="replace").strip()
    name = path.rpartition("/")[2].partition("?")[0]
    match answer.status:
        case http.client.NOT_FOUND:
            raise _NotThereError(f"The head has no {name}")
        case http.client.FORBIDDEN:
            raise BackendError(
                "The head refused the request: the key of this job here is not the one it was started with"
            )
        case http.client.CONFLICT:
            raise ConnectionResetError(problem or "another part of the blob was expected")
        case http.client.INSUFFICIENT_STORAGE:
            raise StoreError(f"The disk of the head's pod is full: {problem}")
        case http.client.UNPROCESSABLE_ENTITY:
            raise StoreError(
                f"The head received other bytes than those of blob {name}: the snapshot's file on this machine is damaged"
            )
    raise BackendError(
        f"The head answered {path} with {answer.status}: {problem}",
        retryable=answer.status >= http.client.INTERNAL_SERVER_ERROR,
    )


def _cut(doing: str, error: BaseException) -> BackendError:
    return BackendError(f"The connection to the job's head was cut while {doing}: {error}", retryable=True)
