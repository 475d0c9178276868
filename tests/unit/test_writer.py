"""The one writer of a job's folder: numbers without gaps, whole records, a disk that is full or hangs, a bounded copy on stdout."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import threading
import time

import pytest

from kale_dist.job.reader import LogReader
from kale_dist.wire import (
    BlockReader,
    FailureCause,
    Foreign,
    JobFiles,
    LineBlock,
    Moment,
    StateName,
    Stream,
    body_of,
)
from kale_dist.wire.events import JobState, Note
from kale_dist.worker.agent import writer as writer_module
from kale_dist.worker.agent.writer import JobWriter, StdoutCopy, open_to_append


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
    folder.writer.log("two\nlines")
    folder.close()
    numbers = [line.sequence for record in folder.records() for line in record.lines()]
    assert numbers == list(range(302))
    assert folder.writer.written.next_line == 302
    assert folder.writer.written.is_last
    assert folder.changes


def test_the_last_event_knows_how_many_lines_there_were(folder):
    folder.put(0, b"a", b"b", b"c")
    folder.writer.event(JobState(state=StateName.SUCCEEDED))
    folder.close()
    assert folder.events()[-1]["next_line"] == 3


def test_progress_is_kept_by_rank_and_is_there_before_the_last_event(folder):
    for step in range(100):
        folder.writer.record({"event": "progress", "rank": step % 2, "step": step}, None)
    folder.writer.event(JobState(state=StateName.SUCCEEDED))
    folder.close()
    kept = json.loads(folder.files.progress.read_bytes())
    assert {name: event["step"] for name, event in kept.items()} == {"0": 98, "1": 99}
    assert [event["event"] for event in folder.events()] == ["state"]


def test_a_full_disk_costs_neither_a_line_nor_an_event(folder, full_disk):
    folder.put(0, b"before")
    folder.run()
    full_disk(folder.files.log.stat().st_size + 20)
    folder.put(0, *(b"waits %d" % number for number in range(5000)))
    for number in range(2000):
        folder.writer.event(Note(text=f"{number} " + "x" * 100))
    folder.run(0.2)
    full_disk(None)
    folder.run(1.2)
    folder.put(0, b"after")
    folder.close()
    assert folder.texts() == ["before", *(f"waits {number}" for number in range(5000)), "after"]
    assert [event["text"].split()[0] for event in folder.events()] == [str(number) for number in range(2000)]


def test_a_job_ends_although_its_disk_stays_full(folder, full_disk, monkeypatch):
    monkeypatch.setattr(writer_module, "_CLOSE_LIMIT_S", 0.2)
    folder.put(0, b"before")
    folder.run()
    full_disk(folder.files.log.stat().st_size + 20)
    folder.put(0, b"x" * 100)
    folder.close()
    assert folder.texts() == ["before"]


class HangingDisk:
    """A file whose disk takes nothing until `answers` is set."""

    answers = threading.Event()

    def __init__(self, path):
        self._file = open_to_append(path)

    def write(self, data):
        assert self.answers.wait(60)
        return self._file.write(data)

    def close(self):
        self._file.close()


@pytest.fixture
def hanging_disk(monkeypatch):
    monkeypatch.setattr(writer_module, "open_to_append", HangingDisk)
    HangingDisk.answers.set()
    yield HangingDisk.answers
    HangingDisk.answers.set()


def test_a_disk_that_hangs_leaves_no_room_and_says_so_past_itself(tmp_path, hanging_disk, monkeypatch):
    monkeypatch.setattr(writer_module, "SLOW_DISK_S", 0.1)
    reader, stdout = os.pipe()
    folder = Folder(tmp_path, stdout=StdoutCopy(stdout))
    folder.put(0, b"before")
    folder.run()
    hanging_disk.clear()
    count = 0
    while folder.writer.has_room:
        folder.put(0, *[b"x" * 1000] * 50)
        count += 50
    folder.run(0.2)
    changes = folder.changes
    folder.writer.look_at_disk()
    problem = folder.writer.disk_problem
    assert str(tmp_path) in problem
    assert folder.changes == changes + 1
    assert json.loads(folder.writer.progress["disk"])["problem"] == problem
    time.sleep(0.1)
    said = [block for block in BlockReader().feed(os.read(reader, 1 << 20)) if isinstance(block, LineBlock)]
    assert [(line.sequence, line.text) for line in said[-1].lines()] == [(None, problem)]
    hanging_disk.set()
    folder.run(0.3)
    assert folder.writer.has_room
    folder.writer.look_at_disk()
    assert folder.writer.disk_problem == ""
    folder.close()
    # Nothing was left out, and the log says that the ranks had to wait.
    assert len(folder.texts()) == count + 2
    assert folder.records()[-1].rank is None
    assert json.loads(folder.files.progress.read_bytes())["disk"].get("problem", "") == ""
    os.close(reader)
    os.close(stdout)


def test_events_that_a_full_disk_keeps_waiting_stay_with_their_ranks(folder, full_disk, monkeypatch):
    monkeypatch.setattr(writer_module, "QUEUED_EVENTS", 2)
    full_disk(10)
    folder.writer.event(Note(text="x" * 2000))
    folder.run(0.2)
    for _ in range(2):
        folder.writer.event(Note(text="waits"))
    assert not folder.writer.has_room
    full_disk(None)
    folder.run(1.2)
    assert folder.writer.has_room
    folder.close()
    assert len(folder.events()) == 3


def test_the_newest_part_of_a_long_log_is_kept_by_whole_files(tmp_path):
    folder = Folder(tmp_path, limit_bytes=4 << 20)
    for number in range(200):
        folder.put(0, *([b"%d " % number + b"x" * 990] * 60))
        folder.run(0.03 if number % 5 == 0 else 0)
    folder.close()
    kept = folder.writer.written.log
    assert [file.bytes for file in kept] == [folder.files.older_log.stat().st_size, folder.files.log.stat().st_size]
    assert 2 << 20 < sum(file.bytes for file in kept) < 5 << 20
    numbers = []
    for file in kept:
        with folder.writer.open_log(file.first) as log:
            found = [block for block in BlockReader().feed(log.read()) if isinstance(block, LineBlock)]
        assert found[0].first == file.first
        numbers += [line.sequence for block in found for line in block.lines()]
    assert numbers == list(range(kept[0].first, 12_000))
    with pytest.raises(FileNotFoundError):
        folder.writer.open_log(0)


def test_a_reader_gets_each_line_of_a_log_that_begins_another_file(tmp_path):
    folder = Folder(tmp_path, limit_bytes=2 << 20)
    reader, read = LogReader(folder.files), []
    for number in range(100):
        folder.put(0, *([b"%d " % number + b"x" * 990] * 60))
        if number % 5 == 0:
            folder.run(0.03)
            read += [line.sequence for line in reader.read()]
    folder.close()
    assert [*read, *(line.sequence for line in reader.read())] == list(range(6_000))
    kept = [line.sequence for line in LogReader(folder.files).read()]
    assert kept == list(range(folder.writer.written.log[0].first, 6_000))
    assert [line.sequence for line in LogReader(folder.files).tail(len(kept) - 1)] == kept[1:]


# -- the copy on stdout ----------------------------------------------------------------------------------------------


def test_stdout_has_all_of_a_quiet_job_and_always_what_matters(tmp_path):
    reader, writer = os.pipe()
    folder = Folder(tmp_path, stdout=StdoutCopy(writer, bytes_per_s=0, in_hand_bytes=1000))
    folder.put(0, b"small")
    folder.run()
    folder.put(0, b"x" * 5000)
    folder.run()
    folder.writer.log("the agent's own line")
    folder.writer.event(JobState(state=StateName.FAILED, reason="x" * 2000, cause=FailureCause.ERROR))
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


def test_a_history_is_in_the_folder_and_leaves_only_its_name_on_stdout(tmp_path):
    reader, writer = os.pipe()
    folder = Folder(tmp_path, stdout=StdoutCopy(writer))
    folder.writer.event(Moment(values=(("memory_gib", (1.0,) * 1000),)))
    folder.writer.event(Note(text="a note"))
    folder.close()
    time.sleep(0.2)
    history, note = BlockReader().feed(os.read(reader, 1 << 20))
    assert (history.number, history.event) == (0, {"event": "history"})
    assert (note.number, note.event["text"]) == (1, "a note")
    assert b"memory_gib" in folder.files.events.read_bytes()
    os.close(reader)
    os.close(writer)
