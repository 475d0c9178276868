"""Requests of the notebook to the agent of one pod (`runtime.pod_server`), over whatever connection there is."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kale_dist import transport
from kale_dist.blobs import Buffer, Store
from kale_dist.errors import BackendError, StoreError
from kale_dist.transport import MAC_HEADER, SIZE_HEADER, EventItem, FrameReader, Line

OnProgress = Callable[[int, int], None]
"""Told how many bytes have been carried, and how many there are."""

_CHUNK_BYTES = 1 << 20
# A larger one is asked for first: what came before a cut need not be sent again.
_ASK_FIRST_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 64 << 20
_TRIES = 3  # In a row without anything carried.
_PAUSE_S = 0.1
_RETRYABLE = (OSError, http.client.HTTPException)

_OK, _CREATED, _PARTIAL = 200, 201, 206
_FORBIDDEN, _NOT_FOUND, _CONFLICT, _UNSATISFIABLE, _WRONG_DIGEST, _FULL = 403, 404, 409, 416, 422, 507


class Connection(Protocol):
    """What is needed of a socket."""

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        """Write all of it."""
        ...

    def makefile(self, mode: str = ..., /) -> Any:
        """A file to read from."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class PodClient:
    """The agent of one pod. For one thread at a time.

    Every method raises `BackendError` if the agent cannot be reached or refuses; it is retryable where another moment
    may be better.

    Args:
        connect: Opens a connection to the agent's port for bytes. Called for each request, and again after a cut.
        key: The job's secret.
        pod: The pod's number, which its events are signed with; None: as the agent says.
    """

    def __init__(self, connect: Callable[[], Connection], key: bytes, pod: int | None = None) -> None:
        self._connect = connect
        self._key = key
        self._pod = pod

    def status(self) -> dict[str, Any]:
        """What `GET /status` of `runtime.pod_server` says."""
        found = self._ask("GET", "/status")
        if not isinstance(found, dict):
            raise _nonsense("/status")
        return found

    def ack(self) -> None:
        """Tell the agent that the notebook has all it wants, so that the pod may end."""
        self._ask("POST", "/ack", b"")

    def cancel(self, grace_s: float) -> None:
        """Tell the agent to end the job.

        Args:
            grace_s: Seconds that ranks may take to end by themselves.
        """
        self._ask("POST", "/cancel", json.dumps({"grace_s": grace_s}).encode())

    def log(self, first: int) -> Sequence[Line]:
        """Lines of the pod's log from a number on, as many as one reply holds; none if there are no more."""
        data = self._read("GET", f"/log?from={first}")
        framed = data[: data.rfind(b"\n") + 1]
        if not framed:
            return ()
        reader = FrameReader(self._key, 0)
        items = reader.feed_block(b"~" + framed[:-1].replace(b"\n", b"\n~") + b"\n")
        return [item for item in items if isinstance(item, Line)]

    def events(self, first: int) -> Sequence[EventItem]:
        """Events of the pod from a number on, as many as one reply holds. Those with a wrong signature are left out."""
        if self._pod is None:
            pod = self.status().get("pod")
            if type(pod) is not int:
                raise _nonsense("/status")
            self._pod = pod
        reader = FrameReader(self._key, self._pod)
        lines = self._read("GET", f"/events?from={first}").split(b"\n")
        items = (item for line in lines[:-1] for item in reader.feed(b"!" + line))
        return [item for item in items if isinstance(item, EventItem)]

    # -- bytes up ------------------------------------------------------------------------------------------------------

    def upload(self, store: Store, digests: Iterable[str], on_progress: OnProgress | None = None) -> int:
        """Send blobs to the agent's store. A cut connection is taken up where it broke.

        Args:
            store: Where they are.
            digests: Which; what the agent has already is not sent again.
            on_progress: Told after each piece.

        Returns:
            Bytes of all of them.

        Raises:
            StoreError: The pod's disk is full, the store here lacks a blob, or its bytes are not what its name says.
            BackendError: The connection was cut again before anything more had arrived.
        """
        blobs = [(digest, store.open(digest)) for digest in dict.fromkeys(digests)]
        total = sum(view.nbytes for _, view in blobs)
        done = 0
        with contextlib.ExitStack() as stack:
            wire: _Wire | None = None
            for digest, view in blobs:
                wire = self._send_blob(stack, wire, digest, view, _shift(on_progress, done, total))
                done += view.nbytes
        return total

    def _send_blob(
        self, stack: contextlib.ExitStack, wire: _Wire | None, digest: str, view: Buffer, tell: Callable[[int], None]
    ) -> _Wire:
        """Send one blob; gives the connection, to be used for the next one."""
        size = memoryview(view).nbytes
        offset, carried, failures, wrong = 0, 0, 0, 0
        asks = size >= _ASK_FIRST_BYTES
        while True:
            try:
                wire = wire or stack.enter_context(contextlib.closing(_Wire(self._connect())))
                if asks:
                    # Bytes that a cut connection has under way would count only after the answer.
                    path = f"/blobs/{digest}/size{'?settled=1' if failures else ''}"
                    there = self._json(wire.ask(self._key, "GET", path), "/blobs")
                    offset = size if there["complete"] else int(there["received"])
                    if offset > carried:
                        carried, failures = offset, 0
                if offset < size or not asks:
                    status, answer = wire.put(self._key, f"/blobs/{digest}?offset={offset}", view, offset, size, tell)
                    if status == _WRONG_DIGEST:
                        # The bytes on the way were damaged, or those here are.
                        wrong, offset, asks = wrong + 1, 0, False
                        if wrong > 1 or _digest(view) != digest:
                            raise StoreError(
                                f"The blob {digest} did not arrive in the pod as what its name says: the snapshot on "
                                "the notebook's side, or the connection, is damaged. Submit the job again"
                            )
                        continue
                    if status == _CONFLICT:
                        offset, asks = int(self._json((_OK, answer), "/blobs")["received"]), False
                        continue
                    offset = int(self._json((status, answer), "/blobs")["received"])
                if offset >= size:
                    tell(size)
                    return wire
            except _RETRYABLE as error:
                asks, wire, failures = True, None, failures + 1
                if failures == _TRIES:
                    raise _cut(error, f"sending blob {digest[:12]} of the snapshot ({size:,} bytes)") from error
                time.sleep(_PAUSE_S)
            except (KeyError, TypeError, ValueError) as error:
                raise _nonsense("/blobs") from error

    # -- bytes down ----------------------------------------------------------------------------------------------------

    def fetch_file(self, name: str, path: pathlib.Path, on_progress: OnProgress | None = None) -> None:
        """Fetch an outcome or the checkpoint. A cut connection is taken up where it broke.

        Args:
            name: `outcome-<attempt>-<rank>` or `checkpoint`.
            path: Where to; a file that is there is replaced when all has come.
            on_progress: Told after each piece.

        Raises:
            StoreError: The pod has no such file, or the disk here is full.
            BackendError: The connection was cut again before anything more had come.
        """
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                self._fetch(name, file, path, on_progress)
            pathlib.Path(temporary).replace(path)
        finally:
            pathlib.Path(temporary).unlink(missing_ok=True)

    def _fetch(self, name: str, file: Any, path: pathlib.Path, on_progress: OnProgress | None) -> None:
        target = f"/files/{name}"
        total, failures = -1, 0
        while True:
            offset = file.tell()
            try:
                with contextlib.closing(_Wire(self._connect())) as wire:
                    response = wire.send(self._key, "GET", target, {"Range": f"bytes={offset}-"} if offset else {})
                    if response.status not in (_OK, _PARTIAL):
                        self._check(response.status, response.read(_CHUNK_BYTES), target)
                        raise _nonsense(target)
                    size = _whole_size(response, offset)
                    if (offset and size != total) or (response.status == _OK and offset):
                        # Another file has its name by now.
                        file.seek(0)
                        file.truncate()
                        total = -1
                        continue
                    total = size
                    for piece in _pieces(response):
                        _write(file, piece, path)
                        if on_progress is not None:
                            on_progress(file.tell(), total)
                if file.tell() != total:
                    raise ConnectionResetError("the connection ended too early")
            except _RETRYABLE as error:
                if name == "checkpoint":
                    # It is replaced by the next one: the rest may be another's.
                    failures += 1
                    file.seek(0)
                    file.truncate()
                else:
                    failures = failures + 1 if file.tell() <= offset else 1
                if failures == _TRIES:
                    raise _cut(error, f"fetching {name}") from error
                time.sleep(_PAUSE_S)
            else:
                return

    # -- requests ------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: bytes | None = None) -> Any:
        """The JSON that a request is answered with."""
        try:
            return json.loads(self._read(method, path, body))
        except (ValueError, RecursionError) as error:
            raise _nonsense(path) from error

    def _read(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """What a request is answered with. All of these are harmless the second time, so a cut one is repeated."""
        for left in reversed(range(_TRIES)):
            try:
                with contextlib.closing(_Wire(self._connect())) as wire:
                    status, answer = wire.ask(self._key, method, path, body)
            except _RETRYABLE as error:
                if not left:
                    raise _cut(error, f"asking {method} {path.partition('?')[0]}") from error
                time.sleep(_PAUSE_S)
            else:
                self._check(status, answer, path)
                return answer
        raise AssertionError

    def _json(self, answered: tuple[int, bytes], path: str) -> Any:
        status, answer = answered
        self._check(status, answer, path)
        return json.loads(answer)

    @staticmethod
    def _check(status: int, answer: bytes, path: str) -> None:
        """Word a refusal."""
        if status in (_OK, _CREATED):
            return
        said = ""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            said = str(json.loads(answer)["error"])[:500]
        if status == _FORBIDDEN:
            raise BackendError(
                "The agent in the pod refused the notebook's request: it has another key. The pod belongs to another "
                "job than this notebook's record says; attach to the job again"
            )
        if status == _FULL:
            raise StoreError(f"The pod could not keep what the notebook sent: {said}")
        if status in (_NOT_FOUND, _UNSATISFIABLE) and path.startswith("/files/"):
            raise StoreError(f"The pod has no {path.removeprefix('/files/')} (yet, or any more)")
        raise BackendError(f"The agent in the pod answered {path} with status {status}. {said}".rstrip())


class _Wire:
    """One connection, for requests one after another."""

    def __init__(self, connection: Connection) -> None:
        self._http = http.client.HTTPConnection("agent")
        self._http.sock = connection
        # Else a connection that has ended would be opened anew, to a host of that name.
        self._http.auto_open = 0

    def close(self) -> None:
        self._http.close()

    def ask(self, key: bytes, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises:
            OSError: The connection was cut.
            http.client.HTTPException: So it was, or the other side speaks no HTTP.
        """
        return self._finish(self.send(key, method, path, {}, body))

    def send(
        self, key: bytes, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> http.client.HTTPResponse:
        """Send a request; the answer's body is still to be read. Errors as `ask`."""
        digest = hashlib.sha256(body or b"").hexdigest() if method == "POST" else ""
        signed = {MAC_HEADER: transport.sign_request(key, method, path, digest), **headers}
        self._http.request(method, path, body, signed)
        return self._http.getresponse()

    def put(
        self, key: bytes, path: str, view: Buffer, offset: int, size: int, tell: Callable[[int], None]
    ) -> tuple[int, bytes]:
        """Send a buffer from an offset on. Errors as `ask`."""
        self._http.putrequest("PUT", path)
        self._http.putheader(MAC_HEADER, transport.sign_request(key, "PUT", path))
        self._http.putheader(SIZE_HEADER, str(size))
        self._http.putheader("Content-Length", str(size - offset))
        self._http.endheaders()
        rest = memoryview(view)[offset:]
        while rest:
            self._http.send(rest[:_CHUNK_BYTES])
            rest = rest[_CHUNK_BYTES:]
            tell(size - len(rest))
        return self._finish(self._http.getresponse())

    @staticmethod
    def _finish(response: http.client.HTTPResponse) -> tuple[int, bytes]:
        answer = response.read(_MAX_ANSWER_BYTES)
        if response.length:
            raise http.client.IncompleteRead(answer, response.length)
        return response.status, answer


def _pieces(response: http.client.HTTPResponse) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    while count := response.readinto(buffer):
        yield buffer[:count]


def _whole_size(response: http.client.HTTPResponse, offset: int) -> int:
    """Bytes of the whole file that a reply brings the rest of."""
    length = response.length
    found = re.search(r"/(\d{1,15})$", response.headers.get("Content-Range", ""), re.ASCII)
    size = int(found[1]) if found else length
    if size is None or length is None or (found and size != offset + length):
        raise _nonsense("/files")
    return size


def _write(file: Any, piece: memoryview, path: pathlib.Path) -> None:
    try:
        file.write(piece)
        file.flush()
    except OSError as error:
        raise _unwritable(path, error) from error


def _shift(on_progress: OnProgress | None, done: int, total: int) -> Callable[[int], None]:
    """Tells of one blob as a part of all."""

    def tell(sent: int) -> None:
        if on_progress is not None:
            on_progress(done + sent, total)

    return tell


def _digest(view: Buffer) -> str:
    return hashlib.sha256(view).hexdigest()


def _cut(error: Exception, doing: str) -> BackendError:
    text = str(error) or type(error).__name__
    return BackendError(f"The connection between notebook and pod was cut while {doing}: {text}", retryable=True)


def _nonsense(path: str) -> BackendError:
    return BackendError(f"What answers {path} in the pod is no agent of this version of kale_dist")


def _unwritable(path: pathlib.Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} could not be written on the notebook's side: {error.strerror}. Free some space, or set XDG_STATE_HOME "
        "to a folder on a larger disk."
    )
