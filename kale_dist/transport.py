"""What a pod's agent and the notebook say to each other: frames on stdout, signed requests, packed blobs.

An agent copies what it writes into its job folder to its stdout, so that the pod's log alone carries a job home, also
after the pod has ended. Each line there is a *frame*, told apart by its first byte; a newline byte, and nothing else,
ends it:

    ~<a line of `contract.frame_lines`>
    !<number> <mac> <json>                 an event; number "-" for kinds of which the last one counts
    =<attempt> <rank> <base64>             a rank's outcome file, which is signed itself
    .<next line> <next event>              heartbeat: what the reader should have seen so far
    :<id> <index> <count> <bytes>          a part of a frame that is longer than `MAX_FRAME_BYTES`

Numbers are hexadecimal but for attempts and ranks, and count the pod's own lines and events from 0. Parts of one frame
follow each other; joined they are the frame with its first byte. Whatever is not a frame was written past the agent
(by the interpreter as it died, say) and is shown as it is. A line of the user's that looks like a frame is none,
because it stands inside one. containerd drops a carriage return before the newline; lines of a log have none, because
it ends a line there (`output.LineCutter`).

The MAC of an event is an HMAC-SHA256 with the job's key over pod, number and JSON. It guards against others who can
write into the log, not against who holds the key. Requests to an agent are signed over method, path with query and,
for a POST, the digest of the body. They hold no moment, because clocks differ: whoever repeats one that he saw says
again what was said before, and every request is harmless the second time.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import hmac
import io
import json
import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from kale_dist import contract
from kale_dist.blobs import FolderStore, Store, digest_of
from kale_dist.errors import SnapshotDamagedError, StoreError

MAX_FRAME_BYTES = 15 * 1024
"""Longest line that an agent writes: container runtimes cut lines at 16 KiB."""

SMALL_OUTCOME_BYTES = 256 * 1024
"""Outcomes up to this size travel in the log."""

HEARTBEAT_S = 15.0
"""Seconds between an agent's heartbeats. A reader that sees nothing three times as long reads a dead stream."""

MAC_HEADER = "X-Kale-Dist-Mac"
"""Header of every request, with its signature."""

SIZE_HEADER = "X-Kale-Dist-Size"
"""Header of a PUT: bytes of the whole blob or file, of which the request may bring a part."""

MAX_REPLY_BYTES = 8 << 20
"""A reply with log lines or events holds at most this much."""

_PART_BYTES = MAX_FRAME_BYTES - 64
_MAX_PARTS = 1024
_LINE = re.compile(rb"~([0-9a-f]{1,12}) [0-9a-f]{1,12} [0-9]{1,6} (?:-|[0-9]{1,6}) [oeaOEA] ")
_EVENT = re.compile(rb"!([0-9a-f]{1,12}|-) ([0-9a-f]{32}) ")
_OUTCOME = re.compile(rb"=([0-9]{1,6}) ([0-9]{1,6}) ")
_HEARTBEAT = re.compile(rb"\.([0-9a-f]{1,12}) ([0-9a-f]{1,12})")
_PART = re.compile(rb":([~!=][0-9a-f-]{1,16}) ([0-9a-f]{1,4}) ([0-9a-f]{1,4}) ")


# -- frames, written -------------------------------------------------------------------------------------------------


def line_frames(framed: bytes) -> bytes:
    """Frames for one or more whole lines of an agent's log.

    Args:
        framed: Lines as `contract.frame_lines` makes them, ending with a newline.

    Returns:
        One frame a line, or several parts for a long one; whole lines.
    """
    lines = framed.split(b"\n")
    # One pass over the block instead of one per line: a rank may print hundreds of thousands at once.
    if max(map(len, lines)) < MAX_FRAME_BYTES:
        return b"~" + framed[:-1].replace(b"\n", b"\n~") + b"\n"
    return b"".join(_whole_or_parts(b"~" + line.partition(b" ")[0], b"~" + line) for line in lines[:-1])


def event_frame(key: bytes, pod: int, number: int | None, event: dict[str, Any] | bytes) -> bytes:
    """A frame, or parts, for an event.

    Args:
        key: The job's secret.
        pod: The pod's number.
        number: The event's number in the pod's `events` file; None for kinds of which the last one counts.
        event: As in `contract`, or its JSON on one line, without a newline.
    """
    encoded = event if isinstance(event, bytes) else contract.encode_record(event).removesuffix(b"\n")
    shown = b"-" if number is None else b"%x" % number
    return _whole_or_parts(b"!" + shown, b"!" + sign_event(key, pod, number, encoded))


def sign_event(key: bytes, pod: int, number: int | None, encoded: bytes) -> bytes:
    """`<number> <mac> <json>`: an event frame without its first byte, whatever its length, without a newline."""
    shown = b"-" if number is None else b"%x" % number
    return b"%s %s %s" % (shown, _event_mac(key, pod, shown, encoded), encoded)


def outcome_frames(attempt: int, rank: int, data: bytes) -> Iterator[bytes]:
    """Frames for the bytes of a rank's outcome file."""
    whole = b"=%d %d %s" % (attempt, rank, base64.b64encode(data))
    yield from _whole_or_parts(b"=%d-%d" % (attempt, rank), whole).splitlines(keepends=True)


def heartbeat_frame(next_line: int, next_event: int) -> bytes:
    """A sign of life, with the numbers that the next line and the next event will have."""
    return b".%x %x\n" % (next_line, next_event)


def _whole_or_parts(name: bytes, frame: bytes) -> bytes:
    if len(frame) <= MAX_FRAME_BYTES:
        return frame + b"\n"
    parts = [frame[start : start + _PART_BYTES] for start in range(0, len(frame), _PART_BYTES)]
    return b"".join(b":%s %x %x %s\n" % (name, index, len(parts), part) for index, part in enumerate(parts))


def _event_mac(key: bytes, pod: int, shown: bytes, encoded: bytes) -> bytes:
    text = b"event\n%d\n%s\n%s" % (pod, shown, encoded)
    return hmac.digest(key, text, hashlib.sha256).hex()[:32].encode()


# -- frames, read ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of the pod's log."""

    sequence: int
    """Its number in the pod's log."""
    framed: bytes
    """As in `contract`, without its newline; `contract.parse_line` takes it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EventItem:
    """An event."""

    number: int | None
    """Its number in the pod; None for progress and usage, of which the last one counts."""
    event: dict[str, Any]
    trusted: bool
    """Whether its MAC was checked: False where the reader has no key. A wrong one is never handed on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeItem:
    """A rank's outcome file. Who has the key checks the signature in it."""

    attempt: int
    rank: int
    data: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a reader should have seen before it."""

    next_line: int
    next_event: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plain:
    """A line that no agent wrote, without its newline."""

    text: bytes


Item = Line | EventItem | OutcomeItem | Heartbeat | Plain


class FrameReader:
    """Reads one stream of a pod's log. A stream that is opened anew gets a new reader.

    Args:
        key: The job's secret; None where this user does not have it.
        pod: The pod's number.
    """

    def __init__(self, key: bytes | None, pod: int) -> None:
        self.rejected = 0
        """Events with a wrong MAC so far."""
        self._key = key
        self._pod = pod
        self._rest = b""
        self._parts: list[bytes] = []
        self._parts_of = (b"", 0)

    def feed_block(self, data: bytes) -> list[Item]:
        """Take bytes as they come from the stream, cut anywhere. The quick way for much of it."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        items: list[Item] = []
        match = _LINE.match
        for line in lines:
            found = match(line)
            if found:
                items.append(Line(sequence=int(found[1], 16), framed=line[1:]))
            else:
                items += self._read(line)
        if len(self._rest) > contract.MAX_LINE_BYTES:
            items.append(Plain(text=self._rest))
            self._rest = b""
        return items

    def finish(self) -> list[Item]:
        """The stream has ended: the start of a line is shown if no agent wrote it, a torn frame is dropped."""
        rest, self._rest = self._rest, b""
        return [Plain(text=rest)] if rest and rest[:1] not in b"~!=.:" else []

    def feed(self, line: bytes) -> list[Item]:
        """Take one whole line, with or without its newline."""
        return self._read(line.removesuffix(b"\n"))

    def _read(self, line: bytes) -> list[Item]:
        mark = line[:1]
        if mark == b"~" and (found := _LINE.match(line)):
            return [Line(sequence=int(found[1], 16), framed=line[1:])]
        if mark == b"!" and (found := _EVENT.match(line)):
            return self._read_event(line, found[1], found[2], line[found.end() :])
        if mark == b":" and (found := _PART.match(line)):
            return self._join(found[1], int(found[2], 16), int(found[3], 16), line[found.end() :])
        if mark == b"." and (found := _HEARTBEAT.fullmatch(line)):
            return [Heartbeat(next_line=int(found[1], 16), next_event=int(found[2], 16))]
        if mark == b"=" and (found := _OUTCOME.match(line)):
            try:
                data = base64.b64decode(line[found.end() :], validate=True)
            except binascii.Error:
                return [Plain(text=line)]
            return [OutcomeItem(attempt=int(found[1]), rank=int(found[2]), data=data)]
        return [Plain(text=line)]

    def _read_event(self, line: bytes, shown: bytes, mac: bytes, encoded: bytes) -> list[Item]:
        if self._key is not None and not hmac.compare_digest(mac, _event_mac(self._key, self._pod, shown, encoded)):
            self.rejected += 1
            return []
        try:
            event = json.loads(encoded)
        except (ValueError, RecursionError):
            return [Plain(text=line)]
        if not isinstance(event, dict):
            return [Plain(text=line)]
        number = None if shown == b"-" else int(shown, 16)
        return [EventItem(number=number, event=event, trusted=self._key is not None)]

    def _join(self, name: bytes, index: int, count: int, part: bytes) -> list[Item]:
        """Keep a part; parts of which the first were not seen, as after a cut, are dropped."""
        if index == 0:
            self._parts, self._parts_of = [], (name, count)
        if self._parts_of != (name, count) or index != len(self._parts) or count > _MAX_PARTS:
            return []
        self._parts.append(part)
        if len(self._parts) < count:
            return []
        whole = b"".join(self._parts)
        self._parts, self._parts_of = [], (b"", 0)
        return self._read(whole) if whole[:1] == name[:1] else []


# -- requests --------------------------------------------------------------------------------------------------------


def sign_request(key: bytes, method: str, path: str, body_digest: str = "") -> str:
    """The signature of a request.

    Args:
        key: The job's secret.
        method: Such as "GET".
        path: With the query, exactly as it is sent.
        body_digest: SHA-256 of a POST's body, in hexadecimal; empty for GET and PUT (what a PUT brings is checked by
            the digest in its path, or is signed itself).
    """
    text = f"request\n{method}\n{path}\n{body_digest}".encode()
    return hmac.digest(key, text, hashlib.sha256).hex()


def check_request(key: bytes, method: str, path: str, body_digest: str, mac: str) -> bool:
    """Whether a request bears the right signature; takes the same time whatever is wrong with it."""
    return hmac.compare_digest(sign_request(key, method, path, body_digest).encode(), mac.encode("utf-8", "replace"))


# -- packed blobs ----------------------------------------------------------------------------------------------------


def pack_blobs(store: Store, digests: Iterable[str]) -> bytes:
    """Blobs as one zip file. The same blobs give the same bytes.

    Raises:
        StoreError: The store lacks one.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for digest in sorted(set(digests)):
            entry = zipfile.ZipInfo(digest, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o444 << 16
            archive.writestr(entry, store.open(digest))
    return file.getvalue()


def unpack_blobs(data: bytes | pathlib.Path, folder: pathlib.Path) -> None:
    """Put packed blobs into a folder store, each checked against its name.

    Args:
        data: What `pack_blobs` gave, or a file with it.
        folder: Root of a `FolderStore`.

    Raises:
        SnapshotDamagedError: It is no zip file, or a blob in it has another digest than its name.
        StoreError: The folder cannot be written.
    """
    store = FolderStore(folder)
    try:
        with zipfile.ZipFile(io.BytesIO(data) if isinstance(data, bytes) else data) as archive:
            for entry in archive.infolist():
                content = archive.read(entry)
                if digest_of([content]) != entry.filename:
                    raise SnapshotDamagedError(
                        f"The packed snapshot is damaged: the bytes under {entry.filename[:80]!r} have another digest."
                    )
                store.put([content])
    except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        raise SnapshotDamagedError(f"The packed snapshot is damaged: {error}.") from error
    except OSError as error:
        raise StoreError(f"The packed snapshot could not be read: {error.strerror}.") from error
