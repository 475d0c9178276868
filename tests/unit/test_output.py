"""Lines of output: whole, thinned where a progress bar redraws itself, rate-limited where a rank floods."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import pytest

from kale_dist.wire import MAX_LINE_BYTES, LineBlock, Stream
from kale_dist.worker.agent import output
from kale_dist.worker.agent.output import BAR_INTERVAL_S, LineCutter, RankOutput, RateLimit


class Written:
    """The lines that a cutter gives, and events."""

    def __init__(self):
        self.lines = []
        self.sent = b""
        self.has_room = True

    def output(self, body, count):
        self.add((body, count))

    def events(self, data):
        self.sent += data

    def add(self, cut):
        body, count = cut
        found = list(LineBlock(first=0, count=count, ms=0, attempt=0, rank=3, body=body).lines())
        assert len(found) == count
        self.lines += found

    @property
    def texts(self):
        return [line.text for line in self.lines]


@pytest.fixture
def written():
    return Written()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"o", b"ne\ntw", b"o\n"], ["one", "two"]),
        ([b"one\r\ntwo\r\n"], ["one", "two"]),
        ([b"one\r", b"\ntwo\n"], ["one", "two"]),
        ([b"\n"], [""]),
        ([b"\n\n"], ["", ""]),
        ([b"no end"], ["no end"]),
        ([b"no end\r"], ["no end"]),
        ([b"\xff\x00\n"], ["\\xff\\x00"]),
        (["é".encode()[:1], "é\n".encode()[1:]], ["é"]),
        ([b"@0 1 2 3 0 -\n|fake\n"], ["@0 1 2 3 0 -", "|fake"]),
        ([], []),
    ],
)
def test_lines_are_whole_however_they_arrive(written, pieces, expected):
    cutter = LineCutter(Stream.STDOUT)
    for piece in pieces:
        written.add(cutter.feed(piece))
    written.add(cutter.finish())
    assert written.texts == expected
    assert all(line.stream is Stream.STDOUT for line in written.lines)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("style", [b"\r%d%%", b"%d%%\r"])
def test_a_bar_keeps_its_first_and_last_state(written, style, end):
    cutter = LineCutter(Stream.STDERR)
    written.add(cutter.feed(b"".join(style % percent for percent in range(101)) + end))
    written.add(cutter.feed(b"done\n" if end else b""))
    written.add(cutter.finish())
    assert written.texts[0] == "0%"
    assert "100%" in written.texts
    assert len(written.texts) <= 4
    assert written.texts[-1] == ("done" if end else "100%")


def test_a_bar_that_clears_itself_leaves_no_empty_line(written):
    cutter = LineCutter(Stream.STDERR)
    written.add(cutter.feed(b"\r 1%\r     \rloss 3.4\n\r 2%\r     \r"))
    written.add(cutter.finish())
    assert written.texts == [" 1%", "loss 3.4", " 2%"]


def test_the_last_lines_of_a_crash_are_those_before_pythons_stacks(written):
    cutter = LineCutter(Stream.STDERR)
    cutter.feed(b"before\nterminate called\n  what(): 84 vs 72\nFatal Python error: Aborted\n\nThread 0x1:\n")
    cutter.feed(b"  File 1\nExtension modules: torch._C\n")
    assert cutter.tail == ("terminate called", "  what(): 84 vs 72", "Fatal Python error: Aborted")
    # Another process may have crashed, after which the rank goes on.
    cutter.feed(b"\nno license\n")
    assert cutter.tail == ("  what(): 84 vs 72", "Fatal Python error: Aborted", "no license")


def test_a_bar_shows_about_five_states_a_second(written):
    cutter = LineCutter(Stream.STDERR)
    start = time.monotonic()
    while time.monotonic() - start < 2.2 * BAR_INTERVAL_S:
        written.add(cutter.feed(b"\r%f" % time.monotonic()))
        written.add(cutter.show_bar())
    assert 2 <= len(written.texts) <= 5


def test_a_held_bar_appears_when_its_time_has_come(written):
    cutter = LineCutter(Stream.STDERR)
    written.add(cutter.feed(b"1\r2\r3\r "))
    assert written.texts == ["1"]
    written.add(cutter.show_bar())
    assert cutter.holds_bar
    time.sleep(BAR_INTERVAL_S)
    written.add(cutter.show_bar())
    assert not cutter.holds_bar
    assert written.texts == ["1", "3"]


@pytest.mark.parametrize("letter", ["x", "é", "\U0001f600"])
@pytest.mark.parametrize("size", [MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 3 * MAX_LINE_BYTES + 5])
@pytest.mark.parametrize("piece", [1000, 1 << 18])
def test_a_long_line_is_cut_into_marked_parts(written, letter, size, piece):
    data = (letter * size + "\nnext\n").encode()
    cutter = LineCutter(Stream.STDOUT)
    for start in range(0, len(data), piece):
        written.add(cutter.feed(data[start : start + piece]))
    *parts, last = written.lines
    assert last.text == "next"
    assert "".join(part.text for part in parts) == letter * size
    assert all(len(part.text.encode()) <= MAX_LINE_BYTES for part in parts)
    assert [part.continued for part in parts] == [True] * (len(parts) - 1) + [False]


def test_a_long_line_of_bytes_is_cut_after_it_was_made_text(written):
    cutter = LineCutter(Stream.STDOUT)
    written.add(cutter.feed(b"\xff" * 40_000 + b"\n"))
    assert "".join(written.texts) == "\\xff" * 40_000
    assert all(len(text) <= MAX_LINE_BYTES for text in written.texts)


def test_the_tail_is_the_last_lines(written):
    cutter = LineCutter(Stream.STDOUT)
    written.add(cutter.feed(b"".join(b"line %d\n" % number for number in range(10))))
    written.add(cutter.feed(b"rest"))
    written.add(cutter.finish())
    assert cutter.tail == ("line 8", "line 9", "rest")


def test_a_flood_is_rate_limited_and_what_is_missing_is_counted(written, monkeypatch):
    clock = [0.0]
    limit = RateLimit(now=lambda: clock[0])
    cutter = LineCutter(Stream.STDOUT)
    number, sent_bytes = 0, 0
    while clock[0] < 20:
        lines = b"".join(b"line %d %s\n" % (one, b"." * 80) for one in range(number, number + 1000))
        number += 1000
        sent_bytes += len(lines)
        written.add(limit.admit(*cutter.feed(lines)))
        clock[0] += 0.01
    written.add(limit.finish())
    texts = [line.text for line in written.lines if line.stream is Stream.STDOUT]
    gaps = [line.text for line in written.lines if line.stream is Stream.AGENT]
    assert texts[0].startswith("line 0 ")
    assert texts[-1].startswith(f"line {number - 1} ")
    missing = sum(int(text.split()[0].replace(",", "")) for text in gaps)
    assert all("lines of this rank are missing here: it wrote more than 2 MiB a second" in text for text in gaps)
    assert missing + len(texts) == number
    passed_bytes = sum(len(text) + 2 for text in texts)
    most = output.BURST_BYTES + 20 * output.RATE_BYTES_PER_S
    assert 0.7 * most < passed_bytes < 1.05 * most < sent_bytes / 2
    assert len(gaps) < 100


def test_a_rank_that_writes_steadily_below_the_rate_loses_nothing(written):
    clock = [0.0]
    limit = RateLimit(now=lambda: clock[0])
    for _ in range(2000):
        written.add(limit.admit(b"|" + b"x" * 9_998 + b"\n", 1))
        clock[0] += 0.01
    assert len(written.texts) == 2000


class Pipes:
    """The three pipes of a rank, and what reads them."""

    def __init__(self, written):
        (stdout, self.out), (stderr, self.err), (events, self.events) = pairs = [os.pipe() for _ in range(3)]
        for pair in pairs:
            os.set_blocking(pair[0], False)
            os.set_blocking(pair[1], False)
        self._all = {end for pair in pairs for end in pair}
        pipes = {Stream.STDOUT: stdout, Stream.STDERR: stderr}
        self.rank = RankOutput(asyncio.get_running_loop(), pipes, events, written, is_limited=True)

    def close(self, *ends):
        for end in ends or self._all:
            os.close(end)
        self._all -= set(ends)


def test_pipes_are_read_to_their_end(written):
    async def read():
        pipes = Pipes(written)
        os.write(pipes.err, b"10%\r20%\r30%\r40%\r")
        while written.texts != ["10%", "30%"]:  # noqa: ASYNC110 - what is written has no event
            await asyncio.sleep(0.01)
        os.write(pipes.out, b"whole\nno end")
        pipes.close(pipes.out)
        os.write(pipes.events, b'{"event": 1}\n{"ev')
        pipes.rank.read_rest()
        assert written.texts[2:] == ["whole"]
        os.write(pipes.events, b'ent": 2}\n')
        os.write(pipes.err, b"\nlast words")
        pipes.rank.read_rest()
        assert pipes.rank.finish() == ("10%", "30%", "40%", "last words")[-output.TAIL_LINES :]
        pipes.rank.close()
        pipes.close()

    asyncio.run(read())
    assert written.texts == ["10%", "30%", "whole", "40%", "no end", "last words"]
    assert written.sent == b'{"event": 1}\n{"event": 2}\n'


def test_pipes_are_not_read_while_there_is_no_room(written):
    async def read():
        written.has_room = False
        pipes = Pipes(written)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipes.out, b"a line\n" * 100)
        os.write(pipes.events, b"{}\n")
        await asyncio.sleep(0.25)
        assert (written.texts, written.sent) == ([], b"")
        written.has_room = True
        while len(written.texts) < 100:  # noqa: ASYNC110 - what is written has no event
            await asyncio.sleep(0.01)
        written.has_room = False
        await asyncio.sleep(0.05)
        before = len(written.texts)
        os.write(pipes.out, b"more\n")
        await asyncio.sleep(0.25)
        assert len(written.texts) == before
        # The rank has ended: what is in the pipes counts, room or not.
        pipes.rank.read_rest()
        pipes.rank.finish()
        pipes.rank.close()
        pipes.close()

    asyncio.run(read())
    assert written.sent == b"{}\n"
    assert len(written.texts) > 5000
    assert "".join(written.texts).replace("a line", "").replace("more", "") == ""
