"""Frames, signatures and packed blobs: what was written is read, whatever is in it and however it is cut."""

from __future__ import annotations

import io
import zipfile

import pytest

from kale_dist import contract, transport
from kale_dist.blobs import FolderStore, MemoryStore, digest_of
from kale_dist.contract import Stream
from kale_dist.errors import SnapshotDamagedError
from kale_dist.transport import EventItem, FrameReader, Heartbeat, Line, OutcomeItem, Plain

KEY = b"k" * 32
POD = 3
HOSTILE_LINES = [
    b"",
    b"plain",
    b"\xff\x00\xfe",
    b"\x1b[31mred\x1b[0m",
    b"half\rway\r",
    "naïve \u2028 \x85".encode(),
    b"~0 0 0 0 o forged",
    b"!0 " + b"0" * 32 + b" {}",
    b":~0 0 1 ~0 0 0 0 o forged",
    b".ff ff",
    b"=0 0 AAAA",
    b"x" * transport.MAX_FRAME_BYTES,
    b"\r\n"[:1] * contract.MAX_LINE_BYTES,
]


def framed(lines, first=0):
    return contract.frame_lines(first, 1_700_000_000_000, 0, 1, Stream.STDOUT, lines)


def read(data, key=KEY, pod=POD, size=None):
    reader = FrameReader(key, pod)
    size = size or len(data) or 1
    items = [item for start in range(0, len(data), size) for item in reader.feed_block(data[start : start + size])]
    return items + reader.finish(), reader


@pytest.mark.parametrize("line", HOSTILE_LINES)
def test_a_line_comes_out_as_it_went_in(line):
    log = framed([b"before", line, b"after"], first=0xABC)
    frames = transport.line_frames(log)
    assert max(map(len, frames.split(b"\n"))) <= transport.MAX_FRAME_BYTES
    items, _ = read(frames)
    assert items == [
        Line(sequence=0xABC + index, framed=text) for index, text in enumerate(log.removesuffix(b"\n").split(b"\n"))
    ]


@pytest.mark.parametrize("size", [1, 7, 4096, 100_000])
def test_it_does_not_matter_how_the_stream_is_cut(size):
    log = framed([b"a", b"", b"b" * 40_000, b"c"])
    event = {"event": "metrics", "text": "é" * 20_000, "loss": 0.5}
    outcome = bytes(range(256)) * 300
    data = (
        transport.line_frames(log)
        + transport.event_frame(KEY, POD, 7, event)
        + b"Fatal Python error\n"
        + b"".join(transport.outcome_frames(2, 11, outcome))
        + transport.heartbeat_frame(4, 8)
        + b"Segmenta"
    )
    items, reader = read(data, size=size)
    assert [item.sequence for item in items[:4]] == [0, 1, 2, 3]
    assert items[4:] == [
        EventItem(number=7, event=event, trusted=True),
        Plain(text=b"Fatal Python error"),
        OutcomeItem(attempt=2, rank=11, data=outcome),
        Heartbeat(next_line=4, next_event=8),
        Plain(text=b"Segmenta"),
    ]
    assert reader.rejected == 0


def test_feed_takes_single_lines_with_and_without_their_end():
    reader = FrameReader(KEY, POD)
    frame = transport.line_frames(framed([b"text"]))
    assert (
        reader.feed(frame)
        == reader.feed(frame.removesuffix(b"\n"))
        == [Line(sequence=0, framed=framed([b"text"])[:-1])]
    )


def test_a_stream_that_starts_within_a_long_line_shows_it_only_when_it_comes_again():
    frames = transport.line_frames(framed([b"x" * 50_000, b"next"])).splitlines(keepends=True)
    assert len(frames) > 3
    items, _ = read(b"".join(frames[2:] + frames))
    assert [item.sequence for item in items] == [1, 0, 1]


def test_a_torn_frame_at_the_end_is_dropped():
    items, _ = read(transport.line_frames(framed([b"one", b"two"]))[:-2])
    assert [item.sequence for item in items] == [0]


def test_progress_has_no_number():
    items, _ = read(transport.event_frame(KEY, POD, None, {"event": "progress", "rank": 1}))
    assert items == [EventItem(number=None, event={"event": "progress", "rank": 1}, trusted=True)]


@pytest.mark.parametrize("change", ["key", "pod", "number", "text"])
def test_an_event_that_was_not_signed_so_is_counted_and_dropped(change):
    frame = transport.event_frame(b"x" * 32 if change == "key" else KEY, POD, 5, {"event": "state", "state": "running"})
    if change == "number":
        frame = b"!6" + frame[2:]
    if change == "text":
        frame = frame.replace(b"running", b"success")
    items, reader = read(frame, pod=POD + 1 if change == "pod" else POD)
    assert items == []
    assert reader.rejected == 1


def test_without_the_key_events_are_shown_as_not_trusted():
    items, _ = read(transport.event_frame(KEY, POD, 0, {"event": "note"}), key=None)
    assert items == [EventItem(number=0, event={"event": "note"}, trusted=False)]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"~",
        b"~1 2 3",
        b"~zz 0 0 0 o x",
        b"~-1 0 0 0 o x",
        b"~1 0 0 0 q x",
        b"!1 short {}",
        b"=0 0 not base64!",
        b"=x 0 AAAA",
        b". ",
        b".1 2 3",
        b":~0 0",
        b"\x00\xff",
        b"Traceback (most recent call last):",
    ],
)
def test_what_is_not_a_frame_is_shown_as_it_is(line):
    assert read(line + b"\n")[0] == [Plain(text=line)]


@pytest.mark.parametrize("encoded", [b"[]", b"1", b"{", b"[" * 100_000])
def test_an_event_that_is_no_object_is_shown_and_breaks_nothing(encoded):
    frame = b"!" + transport.sign_event(KEY, POD, 0, encoded)
    assert read(frame + b"\n")[0] == [Plain(text=frame)]


@pytest.mark.parametrize(
    "lines", [[b":~0 0 ffff ~x"], [b":~0 1 2 x"], [b":~0 0 2 ~0", b":~0 0 2 ~0"], [b":~0 0 1 !0 forged"]]
)
def test_parts_that_do_not_join_give_nothing(lines):
    assert read(b"".join(line + b"\n" for line in lines))[0] == []


def test_bytes_without_a_line_end_do_not_pile_up():
    items, _ = read(b"x" * (3 * contract.MAX_LINE_BYTES), size=100_000)
    assert b"".join(item.text for item in items) == b"x" * (3 * contract.MAX_LINE_BYTES)
    assert len(items) > 1


@pytest.mark.parametrize(
    "other",
    [
        (b"x" * 32, "GET", "/log?from=1", ""),
        (KEY, "PUT", "/log?from=1", ""),
        (KEY, "GET", "/log?from=2", ""),
        (KEY, "GET", "/log?from=1", "00"),
    ],
)
def test_a_signature_holds_for_one_request(other):
    mac = transport.sign_request(KEY, "GET", "/log?from=1")
    assert transport.check_request(KEY, "GET", "/log?from=1", "", mac)
    assert not transport.check_request(*other, mac)


@pytest.mark.parametrize("mac", ["", "00", "é", "\udcff"])
def test_an_odd_signature_is_a_wrong_one(mac):
    assert not transport.check_request(KEY, "GET", "/status", "", mac)


def test_blobs_are_packed_the_same_each_time_and_come_out(tmp_path):
    store = MemoryStore()
    contents = [b"", b"a" * 100_000, bytes(range(256))]
    digests = [store.put([content]) for content in contents]
    packed = transport.pack_blobs(store, digests)
    assert packed == transport.pack_blobs(store, [*reversed(digests), digests[0]])
    transport.unpack_blobs(packed, tmp_path / "a")
    (tmp_path / "packed").write_bytes(packed)
    transport.unpack_blobs(tmp_path / "packed", tmp_path / "b")
    for place in "ab":
        unpacked = FolderStore(tmp_path / place)
        assert [bytes(unpacked.open(digest)) for digest in digests] == contents


def zipped(name, content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no zip",
        zipped("../../evil", b"x"),
        zipped("/etc/evil", b"x"),
        zipped(digest_of([b"y"]), b"x"),
        zipped(digest_of([b"x"]), b"x" * 1000)[:-40],
        zipped(digest_of([b"x" * 99]), b"x" * 99).replace(b"x" * 99, b"z" * 99),
    ],
)
def test_a_damaged_pack_is_refused_and_nothing_odd_is_written(packed, tmp_path):
    with pytest.raises(SnapshotDamagedError, match="packed snapshot is damaged"):
        transport.unpack_blobs(packed, tmp_path / "folder" / "blobs")
    assert not (tmp_path / "evil").exists()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
