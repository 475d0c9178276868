"""Lines of output: whole, numbered, thinned where a progress bar redraws itself, never lost on a full disk."""

from __future__ import annotations

import time

import pytest

from kale_dist import contract
from kale_dist.contract import MAX_LINE_BYTES, Stream
from kale_dist.runtime.output import BAR_INTERVAL_S, LineCutter, LogWriter


@pytest.fixture
def log(tmp_path):
    writer = LogWriter(tmp_path / "log", 0, lambda: None)
    yield writer
    writer.close()


def lines(tmp_path):
    return [contract.parse_line(line) for line in (tmp_path / "log").read_bytes().split(b"\n")[:-1]]


def texts(tmp_path):
    return [line.text for line in lines(tmp_path)]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"o", b"ne\ntw", b"o\n"], ["one", "two"]),
        ([b"one\r\ntwo\r\n"], ["one", "two"]),
        ([b"one\r", b"\ntwo\n"], ["one", "two"]),
        ([b"\n\n"], ["", ""]),
        ([b"no end"], ["no end"]),
        ([b"no end\r"], ["no end"]),
        ([b"\xff\x00\n"], ["\\xff\x00"]),
        ([b"0 1 2 - a fake\n"], ["0 1 2 - a fake"]),
        ([], []),
    ],
)
def test_lines_are_whole_however_they_arrive(log, tmp_path, pieces, expected):
    cutter = LineCutter(log, 3, Stream.STDOUT)
    for piece in pieces:
        cutter.feed(piece)
    cutter.finish()
    assert texts(tmp_path) == expected
    assert all((line.rank, line.stream) == (3, Stream.STDOUT) for line in lines(tmp_path))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("style", [b"\r%d%%", b"%d%%\r"])
def test_a_bar_keeps_its_first_and_last_state(log, tmp_path, style, end):
    cutter = LineCutter(log, 0, Stream.STDERR)
    cutter.feed(b"".join(style % percent for percent in range(101)) + end)
    cutter.feed(b"done\n" if end else b"")
    cutter.finish()
    found = texts(tmp_path)
    assert found[0] == "0%"
    assert "100%" in found
    assert len(found) <= 4
    assert found[-1] == ("done" if end else "100%")


def test_a_bar_shows_about_five_states_a_second(log, tmp_path):
    cutter = LineCutter(log, 0, Stream.STDERR)
    start = time.monotonic()
    while time.monotonic() - start < 2.2 * BAR_INTERVAL_S:
        cutter.feed(b"\r%f" % time.monotonic())
        cutter.show_bar()
    assert 2 <= len(texts(tmp_path)) <= 5


def test_a_held_bar_appears_when_its_time_has_come(log, tmp_path):
    cutter = LineCutter(log, 0, Stream.STDERR)
    cutter.feed(b"1\r2\r3\r ")
    assert texts(tmp_path) == ["1"]
    assert cutter.show_bar()
    time.sleep(BAR_INTERVAL_S)
    assert not cutter.show_bar()
    assert texts(tmp_path) == ["1", "3"]


@pytest.mark.parametrize("size", [MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 3 * MAX_LINE_BYTES + 5])
@pytest.mark.parametrize("piece", [1 << 18, 5 << 20])
def test_a_long_line_is_cut_into_marked_parts(log, tmp_path, size, piece):
    data = b"x" * size + b"\nnext\n"
    cutter = LineCutter(log, 0, Stream.STDOUT)
    for start in range(0, len(data), piece):
        cutter.feed(data[start : start + piece])
    *parts, last = lines(tmp_path)
    assert last.text == "next"
    assert "".join(part.text for part in parts) == "x" * size
    assert all(len(part.text) <= MAX_LINE_BYTES for part in parts)
    assert [part.continued for part in parts] == [True] * (len(parts) - 1) + [False]


def test_numbers_have_no_gaps_over_ranks_and_streams(log, tmp_path):
    cutters = [LineCutter(log, rank, stream) for rank in (0, 1) for stream in (Stream.STDOUT, Stream.STDERR)]
    for _ in range(3):
        for cutter in cutters:
            cutter.feed(b"a\nb\n")
    log.say("two\nlines")
    assert [line.sequence for line in lines(tmp_path)] == list(range(26))
    assert lines(tmp_path)[-1].rank is None


def test_the_tail_is_the_last_lines(log):
    cutter = LineCutter(log, 0, Stream.STDOUT)
    cutter.feed(b"".join(b"line %d\n" % number for number in range(10)))
    cutter.feed(b"rest")
    cutter.finish()
    assert cutter.tail == ["line 8", "line 9", "rest"]


def test_a_full_disk_delays_lines_and_loses_none(tmp_path):
    import resource
    import signal

    changed = []
    writer = LogWriter(tmp_path / "log", 0, lambda: changed.append(1))
    cutter = LineCutter(writer, 0, Stream.STDOUT)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        cutter.feed(b"".join(b"line %d\n" % number for number in range(50)))
        assert writer.has_unwritten
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not writer.retry()
    writer.close()
    assert texts(tmp_path) == [f"line {number}" for number in range(50)]
    assert changed
