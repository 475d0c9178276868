r"""The log and the stream of a job: blocks, in files, over connections and on stdout.

Each block begins at the start of a line. Numbers are hexadecimal, but attempt and rank are decimal:

    @<first> <count> <bytes> <ms> <attempt> <rank>\n<body>    lines of output (`LineBlock`)
    =<number> <bytes>\n<json>\n                              an event; numbered from 0 and never dropped (`EventBlock`)
    ~<bytes>\n<json>\n                                       progress or usage, of which the last counts (`ProgressBlock`)
    *<attempt> <rank> <index> <count> <bytes>\n<base64>\n    a part of an outcome file; on stdout only (`OutcomePart`)

`first` is the number of a record's first line, `count` how many there are, `ms` milliseconds since 1970 by the head's
clock, `rank` is "-" for the agent's own lines. Each line of a body has a mark before it: `|` stdout, `!` stderr, `#` the
agent; a `+` before the mark means that the next line carries this one on. A record whose `first` is "-" has no number:
the notebook wrote it into its copy, for what is missing or what a pod wrote that had no head. The file `log` holds only
records, the file `events` only the bare JSON lines.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar, NamedTuple

from kale_dist.wire.decoding import decode_json_lines, encode_json

MAX_LINE_BYTES = 15_000
"""A longer line of output is cut into parts of this size, marked as continued: containerd splits lines at 16 KiB."""

MAX_ATTEMPT = 999_999
"""The largest number of an attempt, which has six digits in a block's header."""

MAX_BLOCK_BYTES = 1 << 20
"""A larger block is `Foreign`, as is a line without an end: what an agent writes is far smaller."""

MAX_EVENT_BYTES = 4 << 20
"""The same for events: a picture of 512 KiB may be six times as much in JSON."""

OUTCOME_PART_BYTES = 12_000
"""Bytes of an outcome file in one `OutcomePart`, for the same reason."""


_ESCAPE_SEQUENCES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|.?)"
)
_COLOURS = re.compile(r"(\x1b\[[\d;]*m)")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Stream(enum.StrEnum):
    """Where a line of the log came from: the mark before it."""

    STDOUT = "|"
    STDERR = "!"
    AGENT = "#"


_STREAMS = {stream.value: stream for stream in Stream}


def prefix_of(rank: int | None) -> str:
    """What stands before a line of a rank, or of the agent (None), in every log that people see; `PREFIX` recognises it."""
    return f"[{'kale-dist' if rank is None else rank}]"


PREFIX = re.compile(r"\[(?:\d+|kale-dist)\] ")


class LogLine(NamedTuple):
    """One line of a job's log. A tuple, which is made ten times faster than a frozen dataclass: logs have millions."""

    sequence: int | None
    """Number of the line in the log, from 0; None for a line that the notebook added to its copy."""
    time: float
    """When the head got it, in seconds since 1970."""
    attempt: int
    rank: int | None
    """None for a line of the agent itself."""
    stream: Stream
    text: str
    """As it was written, with control characters, without the line end. Bytes that are not UTF-8 appear as `\\xNN`."""
    continued: bool = False
    """Whether the next line of the same rank and stream is a part of the same line."""

    @property
    def prefix(self) -> str:
        """Where it comes from: `[0]`, or `[kale-dist]` for the agent."""
        return prefix_of(self.rank)

    def __str__(self) -> str:
        """The text behind its prefix, `[0] text`, as a terminal may show it: of control characters colours are kept alone."""
        return f"{self.prefix} {visible(self.text, keeps_colours=True)}"


@dataclasses.dataclass(kw_only=True, slots=True)
class LineBlock:
    """Lines of one rank that stand together in the log. Not frozen, because there may be one for each line."""

    first: int | None
    """Number of its first line; None for a record that the notebook wrote into its copy."""
    count: int
    ms: int
    """Milliseconds since 1970."""
    attempt: int
    rank: int | None
    body: bytes
    """Marked lines, each with its newline."""

    @property
    def next(self) -> int | None:
        """Number of the line after it."""
        return None if self.first is None else self.first + self.count

    def encode(self) -> bytes:
        """The whole block."""
        return encode_lines(self.first, self.ms, self.attempt, self.rank, self.body, self.count)

    def lines(self) -> Iterator[LogLine]:
        """The lines one by one."""
        time = self.ms / 1000
        for at, line in enumerate(self.body.decode("utf-8", "backslashreplace").split("\n")[:-1]):
            continued = line.startswith("+")
            yield LogLine(
                sequence=None if self.first is None else self.first + at, time=time, attempt=self.attempt, rank=self.rank,
                stream=_STREAMS[line[continued]], text=line[1 + continued :], continued=continued,
            )  # fmt: skip

    def since(self, number: int) -> LineBlock:
        """The record without the lines before a number; itself where there are none."""
        if self.first is None or number <= self.first:
            return self
        skipped = number - self.first
        body = self.body.split(b"\n", skipped)[skipped]
        return dataclasses.replace(self, first=number, count=self.count - skipped, body=body)


def encode_lines(first: int | None, ms: int, attempt: int, rank: int | None, body: bytes, count: int) -> bytes:
    """A record as a block.

    Args:
        first: Number of the first line; None for a record without numbers.
        ms: Milliseconds since 1970.
        attempt: The attempt, from 0.
        rank: The rank, or None for the agent's own lines.
        body: Marked lines as `body_of` makes them.
        count: Lines in it.
    """
    number = b"-" if first is None else b"%x" % first
    name = b"-" if rank is None else b"%d" % rank
    return b"@%s %x %x %x %d %s\n%s" % (number, count, len(body), ms, attempt, name, body)


def body_of(stream: Stream, lines: Sequence[bytes], *, continued: bool = False) -> bytes:
    """The body of a record with some lines of one stream.

    Args:
        stream: Where the lines came from.
        lines: Lines without line ends, none longer than `MAX_LINE_BYTES`, each valid UTF-8 (`clean`).
        continued: Whether the next line of the stream carries the last of these on.
    """
    if not lines:
        return b""
    mark = stream.value.encode()
    body = mark + (b"\n" + mark).join(lines) + b"\n"
    if continued:
        start = body.rfind(b"\n", 0, -1) + 1
        body = body[:start] + b"+" + body[start:]
    return body


def own_lines(text: str) -> tuple[bytes, int]:
    """A text of the agent's or the notebook's own as the body of a record, and how many lines it has."""
    limit, lines = MAX_LINE_BYTES, list[bytes]()
    for line in (clean(line.encode("utf-8", "replace")) for line in text.splitlines()):
        lines += [line[at : at + limit] for at in range(0, len(line), limit)] or [b""]
    return body_of(Stream.AGENT, lines), len(lines)


def visible(text: str, *, keeps_colours: bool = False) -> str:
    r"""Text without characters that could control a terminal or change the reading direction.

    Escape sequences are removed; other control characters, and halves of surrogate pairs, become `\xNN`.

    Args:
        text: Of a rank or a cluster, of one line or several.
        keeps_colours: Whether the colours stay that a user's code has given it.
    """
    if text.isprintable():
        return text
    if keeps_colours and "\x1b" in text:
        return "".join(part if at % 2 else visible(part) for at, part in enumerate(_COLOURS.split(text)))
    lines = (_ESCAPE_SEQUENCES.sub("", line).rstrip("\r") for line in text.split("\n"))
    # A progress bar overwrites its line: its final state follows the last carriage return.
    shown = "\n".join(line.rpartition("\r")[2] for line in lines)
    return _UNPRINTABLE.sub(lambda found: f"\\x{ord(found[0]):02x}", shown)


def clean(data: bytes) -> bytes:
    r"""Output as a log may hold it: bytes that are not UTF-8, NUL and carriage returns become `\xNN`.

    Docker's json-file driver would replace such bytes, and containerd drop them.
    """
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        data = data.decode("utf-8", "backslashreplace").encode()
    if b"\0" in data or b"\r" in data:
        data = data.replace(b"\0", rb"\x00").replace(b"\r", rb"\x0d")
    return data


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EventBlock:
    """An event with its number."""

    number: int
    event: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgressBlock:
    """Progress or usage of one rank, in the place of the one before it."""

    event: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutcomePart:
    """A part of a rank's outcome file, which is signed itself."""

    attempt: int
    rank: int
    index: int
    count: int
    """How many parts there are."""
    data: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A line between blocks that no agent wrote whole, without its newline: an interpreter's last words, a torn block."""

    text: bytes


Block = LineBlock | EventBlock | ProgressBlock | OutcomePart | Foreign


def encode_event(number: int, event: bytes | Mapping[str, Any]) -> bytes:
    """An event as a block; `event` may be its JSON on one line, with or without a newline."""
    data = _json_line(event)
    return b"=%x %x\n%s" % (number, len(data) - 1, data)


def encode_progress(event: bytes | Mapping[str, Any]) -> bytes:
    """Progress or usage as a block."""
    data = _json_line(event)
    return b"~%x\n%s" % (len(data) - 1, data)


def encode_outcome(attempt: int, rank: int, data: bytes) -> Iterator[bytes]:
    """An outcome file as blocks."""
    count = max(1, -(-len(data) // OUTCOME_PART_BYTES))
    for index in range(count):
        part = base64.b64encode(data[index * OUTCOME_PART_BYTES : (index + 1) * OUTCOME_PART_BYTES])
        yield b"*%d %d %x %x %x\n%s\n" % (attempt, rank, index, count, len(part), part)


def _json_line(event: bytes | Mapping[str, Any]) -> bytes:
    if isinstance(event, bytes):
        return event if event.endswith(b"\n") else event + b"\n"
    return encode_json(event)


class BlockReader:
    """Cuts a stream of bytes into blocks, of a file, a connection or a container's stdout.

    Only whole blocks come out. What stands between them, and the lines of a block that was torn by a foreign line or
    by the next block, comes out as `Foreign`. A stream that is opened again gets a new reader.
    """

    # The numbers of a header in the order of `LineBlock`; lines are the most common blocks by far.
    _LINES: ClassVar[re.Pattern[bytes]] = re.compile(
        rb"@([0-9a-f]{1,15}|-) ([0-9a-f]{1,8}) ([0-9a-f]{1,8}) ([0-9a-f]{1,12}) ([0-9]{1,6}) ([0-9]{1,6}|-)"
    )
    _OTHER: ClassVar[re.Pattern[bytes]] = re.compile(
        rb"=(?P<number>[0-9a-f]{1,15}) (?P<event>[0-9a-f]{1,8})"
        rb"|~(?P<progress>[0-9a-f]{1,8})"
        rb"|\*(?P<attempt>[0-9]{1,6}) (?P<rank>[0-9]{1,6}) (?P<index>[0-9a-f]{1,8}) (?P<parts>[0-9a-f]{1,8})"
        rb" (?P<part>[0-9a-f]{1,8})"
    )

    def __init__(self) -> None:
        self._data = b""
        self._pieces: list[bytes] = []
        self._lacks = 0
        """Bytes that have to come before the next block is whole."""
        self._start = 0
        self._whole = 0

    @property
    def whole_bytes(self) -> int:
        """How many bytes of the stream are in blocks or lines that came out; where a torn file is to be cut off."""
        return self._whole

    def feed(self, data: bytes) -> Iterator[Block]:
        """Take bytes; gives the blocks that they complete. Use up the iterator before the next call."""
        self._pieces.append(data)
        self._lacks -= len(data)
        return iter(()) if self._lacks > 0 else self._blocks()

    def finish(self) -> Iterator[Block]:
        """The stream has ended: lines of a torn block and a last line without an end come out as `Foreign`."""
        yield from self._blocks(is_last=True)
        if self._start < len(self._data):
            yield self._take_foreign(len(self._data))

    def _blocks(self, *, is_last: bool = False) -> Iterator[Block]:
        self._data = data = b"".join((self._data[self._start :], *self._pieces))
        self._pieces, self._start, self._lacks = [], 0, 0
        while (end := data.find(b"\n", self._start)) >= 0:
            lines = self._LINES.fullmatch(data, self._start, end)
            header = lines or self._OTHER.fullmatch(data, self._start, end)
            size_text = lines[3] if lines else header and (header["event"] or header["progress"] or header["part"])
            size = int(size_text or b"0", 16)
            if header is None or size > (MAX_BLOCK_BYTES if lines else MAX_EVENT_BYTES):
                yield self._take_foreign(end + 1)
                continue
            stop = end + 1 + size + (lines is None)
            if len(data) < stop and not is_last:
                self._lacks = stop - len(data)
                return
            content = data[end + 1 : stop]
            block: Block | None = None
            if len(data) >= stop and content.endswith(b"\n"):
                block = _lines(lines, content) if lines else _other(header, content)
            # The lines of a torn block come out one by one.
            self._advance(end + 1 if block is None else stop)
            if block is not None:
                yield block
        if len(data) - self._start > MAX_BLOCK_BYTES:
            yield self._take_foreign(len(data))

    def _take_foreign(self, stop: int) -> Foreign:
        text = self._data[self._start : stop].removesuffix(b"\n")
        self._advance(stop)
        return Foreign(text=text)

    def _advance(self, stop: int) -> None:
        self._whole += stop - self._start
        self._start = stop


def _lines(header: re.Match[bytes], body: bytes) -> LineBlock | None:
    """Return the block, if its content fits the header."""
    first, lines, _, ms, attempt, rank = header.groups()
    count = int(lines, 16)
    if body[0] not in b"|!#+" or body.count(b"\n") != count:
        return None
    if count > 1 and sum(body.count(b"\n" + mark) for mark in (b"|", b"!", b"#", b"+")) != count - 1:
        return None
    return LineBlock(
        first=None if first == b"-" else int(first, 16), count=count, ms=int(ms, 16), attempt=int(attempt),
        rank=None if rank == b"-" else int(rank), body=body,
    )  # fmt: skip


def _other(header: re.Match[bytes], content: bytes) -> EventBlock | ProgressBlock | OutcomePart | None:
    """Return the block, if its content fits the header."""
    if header["part"] is not None:
        try:
            data = base64.b64decode(content[:-1], validate=True)
        except binascii.Error:
            return None
        return OutcomePart(
            attempt=int(header["attempt"]), rank=int(header["rank"]), index=int(header["index"], 16),
            count=int(header["parts"], 16), data=data,
        )  # fmt: skip
    event = next(decode_json_lines(content), None)
    if event is None:
        return None
    if header["number"] is None:
        return ProgressBlock(event=event)
    return EventBlock(number=int(header["number"], 16), event=event)


def lines_after(log: BinaryIO, offset: int) -> tuple[int, int] | None:
    """Where the first numbered record at or behind an offset of a log begins, and the number of its first line.

    None if there is none. It reads no more than one record, for no line of a body looks like a header.
    """
    log.seek(max(0, offset - 1))
    if offset:
        log.readline()
    for line in iter(log.readline, b""):
        if line.startswith(b"@"):
            with contextlib.suppress(ValueError):
                return log.tell() - len(line), int(line[1:].partition(b" ")[0], 16)
    return None
