"""Lines of output: whole, thinned where a progress bar redraws itself, held to a rate where a rank floods."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from kale_dist.wire import MAX_LINE_BYTES, LineBlock, Stream
from kale_dist.worker.agent import output
from kale_dist.worker.agent.output import BAR_INTERVAL_S, FloodGate, LineCutter, RankOutput


class Written:
    """The lines that a cutter gives."""

    def __init__(self):
        self.lines = []

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


def test_a_flood_is_held_to_a_rate_and_what_is_missing_is_counted(written, monkeypatch):
    clock = [0.0]
    gate = FloodGate(now=lambda: clock[0])
    cutter = LineCutter(Stream.STDOUT)
    number, sent_bytes = 0, 0
    while clock[0] < 20:
        lines = b"".join(b"line %d %s\n" % (one, b"." * 80) for one in range(number, number + 1000))
        number += 1000
        sent_bytes += len(lines)
        written.add(gate.admit(*cutter.feed(lines)))
        clock[0] += 0.01
    written.add(gate.finish())
    texts = [line.text for line in written.lines if line.stream is Stream.STDOUT]
    gaps = [line.text for line in written.lines if line.stream is Stream.AGENT]
    assert texts[0].startswith("line 0 ")
    assert texts[-1].startswith(f"line {number - 1} ")
    missing = sum(int(text.split()[0].replace(",", "")) for text in gaps)
    assert all("lines of this rank are missing here: it wrote more than 2 MiB a second" in text for text in gaps)
    assert missing + len(texts) == number
    passed_bytes = sum(len(text) + 2 for text in texts)
    limit = output.FLOOD_IN_HAND_BYTES + 20 * output.FLOOD_BYTES_PER_S
    assert 0.7 * limit < passed_bytes < 1.05 * limit < sent_bytes / 2
    assert len(gaps) < 100


def test_a_rank_that_writes_steadily_below_the_rate_loses_nothing(written):
    clock = [0.0]
    gate = FloodGate(now=lambda: clock[0])
    for _ in range(2000):
        written.add(gate.admit(b"|" + b"x" * 9_998 + b"\n", 1))
        clock[0] += 0.01
    assert len(written.texts) == 2000


def test_pipes_are_read_to_their_end(written):
    async def read():
        (stdout, out), (stderr, err) = pipes = os.pipe(), os.pipe()
        for pipe, _ in pipes:
            os.set_blocking(pipe, False)
        loop = asyncio.get_running_loop()
        rank = RankOutput(
            loop, {Stream.STDOUT: stdout, Stream.STDERR: stderr}, lambda *cut: written.add(cut), is_held=True
        )
        os.write(err, b"10%\r20%\r30%\r40%\r")
        while written.texts != ["10%", "30%"]:  # noqa: ASYNC110 - what is written has no event
            await asyncio.sleep(0.01)
        os.write(out, b"whole\nno end")
        os.close(out)
        rank.read_rest()
        assert written.texts[2:] == ["whole"]
        os.write(err, b"\nlast words")
        rank.read_rest()
        assert rank.finish() == ("10%", "30%", "40%", "last words")[-output.TAIL_LINES :]
        rank.close()
        for pipe in (stdout, stderr, err):
            os.close(pipe)

    asyncio.run(read())
    assert written.texts == ["10%", "30%", "whole", "40%", "no end", "last words"]
