"""The one writer of a job's folder: numbers without gaps, whole records, a disk that is full, a bounded copy on stdout."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import threading
import time

import pytest

from kale_dist.wire import BlockReader, EventKind, Foreign, JobFiles, LineBlock, Stream, body_of
from kale_dist.worker.agent import writer as writer_module
from kale_dist.worker.agent.writer import JobWriter, StdoutCopy


class Folder:
    """A job's folder, and a writer of it in a loop of its own."""

    def __init__(self, path, **options):
        self.files = JobFiles(path)
        self.changes = 0
        self.loop = asyncio.new_event_loop()
        self.writer = JobWriter(self.files, self.loop, self._changed, **options)

    def _changed(self):
        self.changes += 1

    def run(self, seconds=0.05):
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def put(self, rank, *lines):
        self.writer.lines(rank, body_of(Stream.STDOUT, lines), len(lines))

    def close(self):
        done = self.loop.create_future()
        self.writer.close(lambda: done.set_result(None))
        self.loop.run_until_complete(asyncio.wait_for(done, 20))
        self.loop.close()

    def records(self):
        reader = BlockReader()
        found = [*reader.feed(self.files.log.read_bytes()), *reader.finish()]
        assert not [block for block in found if isinstance(block, Foreign)]
        return found

    def texts(self):
        return [line.text for record in self.records() for line in record.lines()]

    def events(self):
        return [json.loads(line) for line in self.files.events.read_bytes().splitlines()]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.fixture
def full_disk():
    """Makes this process's disk full, and gives room again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(limit=0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if limit is None else limit, before[1]))

    yield fill
    fill(None)
    signal.signal(signal.SIGXFSZ, handler)


def test_numbers_have_no_gaps_over_ranks(folder):
    for number in range(50):
        for rank in (0, 1, None):
            folder.put(rank, b"a %d" % number, b"b")
        if number % 10 == 0:
            folder.run(0.03)
    folder.writer.say("two\nlines")
    folder.close()
    numbers = [line.sequence for record in folder.records() for line in record.lines()]
    assert numbers == list(range(302))
    assert folder.writer.written.next_line == 302
    assert folder.writer.written.is_last
    assert folder.changes


def test_the_last_event_knows_how_many_lines_there_were(folder):
    folder.put(0, b"a", b"b", b"c")
    folder.writer.event(EventKind.STATE, state="succeeded", reason="", cause="")
    folder.close()
    assert folder.events()[-1]["next_line"] == 3


def test_progress_is_kept_by_rank_and_is_there_before_the_last_event(folder):
    for step in range(100):
        folder.writer.record({"event": "progress", "rank": step % 2, "step": step})
    folder.writer.event(EventKind.STATE, state="succeeded", reason="", cause="")
    folder.close()
    kept = json.loads(folder.files.progress.read_bytes())
    assert {name: event["step"] for name, event in kept.items()} == {"0": 98, "1": 99}
    assert [event["event"] for event in folder.events()] == ["state"]


def test_a_full_disk_costs_lines_that_are_counted_and_no_event(folder, full_disk):
    folder.put(0, b"before")
    folder.run()
    full_disk(folder.files.log.stat().st_size + 20)
    folder.put(0, *(b"lost %d" % number for number in range(5000)))
    folder.put(1, b"lost as well")
    for number in range(2000):
        folder.writer.event(EventKind.NOTE, text=f"{number} " + "x" * 100)
    folder.run(0.2)
    full_disk(None)
    folder.run(1.2)
    folder.put(0, b"after")
    folder.close()
    texts = folder.texts()
    assert texts[0] == "before"
    assert texts[-1] == "after"
    assert sorted(texts[1:-1]) == [
        "1 lines of rank 1 are missing here: the disk was full or too slow",
        "5,000 lines of rank 0 are missing here: the disk was full or too slow",
    ]
    assert [event["text"].split()[0] for event in folder.events()] == [str(number) for number in range(2000)]


def test_a_slow_disk_stops_neither_ranks_nor_the_loop(tmp_path, monkeypatch):
    held, write, written = threading.Event(), writer_module._append, []

    def slow(*arguments):
        held.wait(200)
        written.append(arguments)
        return write(*arguments)

    monkeypatch.setattr(writer_module, "_append", slow)
    monkeypatch.setattr(writer_module, "QUEUE_BYTES", 1 << 20)
    folder = Folder(tmp_path)
    folder.put(0, b"first")
    folder.run(0.1)
    for number in range(3000):
        folder.put(0, b"%d " % number + b"x" * 1000)
    assert written == []
    assert folder.writer.has_room
    held.set()
    folder.run(0.3)
    folder.put(0, b"last")
    folder.close()
    texts = folder.texts()
    (gap,) = [text for text in texts if "are missing here: the disk was full or too slow" in text]
    assert int(gap.split()[0].replace(",", "")) + len(texts) - 3 == 3000
    assert [line.sequence for record in folder.records() for line in record.lines()] == list(range(len(texts)))


def test_events_that_a_full_disk_keeps_waiting_stay_with_their_ranks(folder, full_disk, monkeypatch):
    monkeypatch.setattr(writer_module, "EVENTS_IN_HAND_BYTES", 1000)
    full_disk(10)
    folder.writer.event(EventKind.NOTE, text="x" * 2000)
    folder.run(0.2)
    assert not folder.writer.has_room
    full_disk(None)
    folder.run(1.2)
    assert folder.writer.has_room
    folder.close()


def test_only_the_newest_part_of_a_long_log_is_kept(tmp_path):
    folder = Folder(tmp_path, limit_bytes=4 << 20)
    for number in range(200):
        folder.put(0, *([b"%d " % number + b"x" * 990] * 60))
        folder.run(0.03 if number % 5 == 0 else 0)
    folder.close()
    written = folder.writer.written
    if not written.log_start:
        pytest.skip("this file system cannot give parts of a file back")
    assert folder.files.log.stat().st_blocks * 512 < 6 << 20
    with folder.files.log.open("rb") as file:
        file.seek(written.log_start)
        first = next(block for block in BlockReader().feed(file.read()) if isinstance(block, LineBlock))
    assert first.first > 0


# -- the copy on stdout ----------------------------------------------------------------------------------------------


def test_stdout_has_all_of_a_quiet_job_and_always_what_matters(tmp_path):
    reader, writer = os.pipe()
    folder = Folder(tmp_path, stdout=StdoutCopy(writer, bytes_per_s=0, in_hand_bytes=1000))
    folder.put(0, b"small")
    folder.run()
    folder.put(0, b"x" * 5000)
    folder.run()
    folder.writer.say("the agent's own line")
    folder.writer.event(EventKind.STATE, state="failed", reason="x" * 2000, cause="error")
    folder.close()
    time.sleep(0.2)
    blocks = list(BlockReader().feed(os.read(reader, 1 << 20)))
    assert [line.text for block in blocks[:-1] for line in block.lines()] == ["small", "the agent's own line"]
    assert [block.first for block in blocks[:-1]] == [0, 2]
    assert (blocks[-1].number, blocks[-1].event["next_line"]) == (0, 3)
    os.close(reader)
    os.close(writer)


def test_a_reader_of_stdout_that_sleeps_holds_nothing_up(tmp_path):
    reader, writer = os.pipe()
    copy = StdoutCopy(writer, bytes_per_s=1e9, in_hand_bytes=1 << 20)
    # Far more than a pipe holds: it would wait for ever.
    for _ in range(5000):
        copy.offer(b"x" * 1000)
    copy.drain(0.1)
    os.close(reader)
    copy.drain(5)
    os.close(writer)
