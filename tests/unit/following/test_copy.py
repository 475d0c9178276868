"""The copy of a run, and reading a job's folder: what is appended once, cut off, said to be missing, and found again."""

import dataclasses
import json

import pytest
from scripted_place import spec_of

from kale_dist import wire
from kale_dist.errors import StoreError
from kale_dist.job import records
from kale_dist.job.reader import JobReader, LogReader
from kale_dist.job.records import Life, Record
from kale_dist.places.following.copy import GapError, HeadCopy
from kale_dist.wire import BlockReader, JobFiles, StateName, Stream


@pytest.fixture
def files(tmp_path):
    return JobFiles(tmp_path)


@pytest.fixture
def copy(files):
    copy = HeadCopy(files, Life(), lambda: None, lambda: None)
    yield copy
    copy.close()


def lines(first, rank, *texts, attempt=0, stream=Stream.STDOUT):
    body = wire.body_of(stream, [text.encode() for text in texts])
    return wire.encode_lines(first, 1000, attempt, rank, body, len(texts))


def state(number, name, attempt=0, **more):
    event = {"event": "state", "time": 1.0, "rank": None, "attempt": attempt, "state": name, **more}
    return wire.encode_event(number, event)


def blocks(data):
    reader = BlockReader()
    yield from reader.feed(data)
    yield from reader.finish()


def read(files, **which):
    return [str(line) for line in LogReader(files).read(**which)]


def test_each_line_is_appended_once(copy, files):
    copy.take(blocks(lines(0, 0, "a", "b") + lines(2, 1, "c")))
    copy.take(blocks(lines(1, 0, "b") + lines(2, 1, "c", "d")))
    assert read(files) == ["[0] a", "[0] b", "[1] c", "[1] d"]


def test_lines_alone_wake_readers_of_the_log_but_have_no_status_computed(files):
    told = []
    copy = HeadCopy(files, Life(), lambda: told.append("lines"), lambda: told.append("status"))
    copy.take(blocks(lines(0, 0, "a") + wire.encode_progress({"event": "progress", "rank": 0})))
    assert told == ["lines", "status"]
    progress = files.progress.stat()
    copy.take(blocks(lines(1, 0, "b")))
    assert told == ["lines", "status", "lines"]
    assert files.progress.stat() == progress
    copy.close()


def test_lines_that_were_skipped_are_an_error_or_are_said_to_be_missing(copy, files):
    copy.take(blocks(lines(0, 0, "a")))
    with pytest.raises(GapError):
        copy.take(blocks(lines(3, 0, "d")))
    assert copy.next_line == 1
    copy.take(blocks(lines(3, 0, "d")), missing="the disk was full")
    assert read(files) == [
        "[0] a",
        "[kale-dist] 2 lines are missing here (number 1 to 2), because the disk was full",
        "[0] d",
    ]
    assert [line.sequence for line in LogReader(files).read()] == [0, None, 3]


def test_what_a_killed_follower_left_is_cut_off_and_taken_up(copy, files):
    copy.take(blocks(lines(0, 0, "a", "b") + state(0, "running")))
    copy.close()
    with files.log.open("ab") as log, files.events.open("ab") as events:
        log.write(lines(2, 0, "torn")[:-3])
        events.write(b'{"event": "sta')
    again = HeadCopy(files, Life(), lambda: None, lambda: None)
    assert (again.next_line, again.next_event) == (2, 1)
    again.take(blocks(lines(2, 0, "whole") + state(1, "running", attempt=3)))
    assert read(files) == ["[0] a", "[0] b", "[0] whole"]
    assert len(files.events.read_bytes().splitlines()) == 2
    assert again.last_attempt == 3
    again.close()


@pytest.mark.parametrize("size", [0, 200, 900_000])
def test_the_next_line_is_found_behind_whatever_was_added(copy, files, size):
    copy.take(blocks(lines(0, 0, "first") + lines(1, 1, *["x" * 1000] * 20)))
    for _ in range(size // 100):
        copy.log("y" * 5000)
    copy.close()
    again = HeadCopy(files, Life(), lambda: None, lambda: None)
    assert again.next_line == 21
    again.close()
    assert len(read(files)) == 21 + size // 100


def test_the_verdict_is_shown_when_it_is_released(copy, files):
    copy.take(blocks(state(0, "running") + state(1, "succeeded", next_line=2)))
    assert len(files.events.read_bytes().splitlines()) == 1
    assert not copy.is_complete
    copy.take(blocks(lines(0, 0, "a", "b")))
    assert copy.is_complete
    copy.release()
    assert json.loads(files.events.read_bytes().splitlines()[1])["state"] == "succeeded"


def test_lines_of_no_agent_are_copied_when_stdout_is_read_for_the_last_time(copy, files):
    stdout = b"Segmentation fault\n" + lines(0, 0, "a") + b"\nAborted\x00\n"
    for is_last in (False, False, True):
        copy.take(blocks(stdout), is_last=is_last)
    copy.close()
    again = HeadCopy(files, Life(), lambda: None, lambda: None)
    again.take(blocks(stdout))
    again.close()
    assert read(files) == ["[0] a", "[kale-dist] pod 0: Segmentation fault", "[kale-dist] pod 0: Aborted\\x00"]


def test_outcomes_ride_in_parts(copy, files):
    data = bytes(range(256)) * 200
    parts = list(wire.encode_outcome(0, 1, data))
    copy.take(blocks(b"".join(parts[:2])))
    assert not files.outcome(0, 1).exists()
    copy.take(blocks(b"".join(parts)))
    assert files.outcome(0, 1).read_bytes() == data


def test_a_folder_that_was_deleted_is_not_made_again(tmp_path):
    files = JobFiles(tmp_path / "job")
    files.folder.mkdir()
    copy = HeadCopy(files, Life(), lambda: None, lambda: None)
    for path in list(files.folder.iterdir()):
        path.unlink()
    files.folder.rmdir()
    with pytest.raises(StoreError, match="deleted"):
        copy.take(blocks(wire.encode_progress({"event": "progress", "rank": 0})))
    copy.close()


# -- reading ----------------------------------------------------------------------------------------------------------


def test_rubbish_in_a_log_hides_no_line(files):
    files.log.write_bytes(lines(0, 0, "a") + b"\x00\xff rubbish\n@1 2\n" + lines(1, 1, "b") + lines(2, 1, "torn")[:-2])
    assert read(files) == ["[0] a", "[1] b"]


def test_the_tail_of_one_rank_and_what_comes_after_it(copy, files):
    copy.take(blocks(b"".join(lines(number, number % 3, f"line {number}") for number in range(300))))
    log = LogReader(files)
    assert [line.text for line in log.tail(2, [1])] == ["line 295", "line 298"]
    assert [line.sequence for line in log.tail(2, [1])] == [295, 298]
    copy.take(blocks(lines(300, 1, "later")))
    assert [line.text for line in log.read()] == ["later"]
    assert [line.text for line in LogReader(files).tail(3)] == ["line 298", "line 299", "later"]
    assert LogReader(files).tail(0) == ()


def test_a_tail_reads_little_of_a_long_log(copy, files):
    copy.take(blocks(b"".join(lines(number * 100, number % 2, *(["x" * 80] * 100)) for number in range(200))))
    size = files.log.stat().st_size
    with files.log.open("r+b") as file:
        # What is not read is not missed.
        file.write(b"\0" * (size // 2))
    assert len(LogReader(files).tail(50)) == 50


def test_a_tail_finds_the_lines_of_a_rank_that_has_been_silent_for_long(copy, files):
    copy.take(blocks(lines(0, 1, "@0 1 5 0 0 0", "early")))
    copy.take(blocks(b"".join(lines(2 + number * 100, 0, *(["x" * 80] * 100)) for number in range(400))))
    log = LogReader(files)
    assert [line.text for line in log.tail(9, [1])] == ["@0 1 5 0 0 0", "early"]
    copy.take(blocks(lines(40_002, 1, "late")))
    assert [line.text for line in log.read([1])] == ["late"]
    assert [line.text for line in LogReader(files).tail(2, [1])] == ["early", "late"]


def begin(files, life):
    """A head after another one; returns the copy of what it says."""
    copy = HeadCopy(files, life, lambda: None, lambda: None)
    first_line, first_event = copy.end()
    copy.close()
    records.write_life(files, dataclasses.replace(life, first_line=first_line, first_event=first_event))
    return HeadCopy(files, records.life(files), lambda: None, lambda: None)


def test_the_lines_of_all_heads_are_one_log(files):
    for number, texts in ((1, ["a", "b"]), (2, ["c"]), (3, [])):
        copy = begin(files, Life(number=number, first_attempt=number - 1))
        assert copy.next_line == 0
        copy.take(blocks(lines(0, 0, *texts) if texts else b""))
        copy.close()
    found = LogReader(files).tail(2)
    assert [(line.text, line.sequence, line.attempt) for line in found] == [("b", 1, 0), ("c", 2, 1)]
    assert read(files) == ["[0] a", "[0] b", "[0] c"]


def test_what_is_torn_in_a_later_life_is_taken_up_there(files):
    copy = begin(files, Life())
    copy.take(blocks(lines(0, 0, "a", "b") + state(0, "running")))
    copy.release()
    copy.close()
    copy = begin(files, Life(number=2, first_attempt=1))
    copy.take(blocks(lines(0, 0, "c") + state(0, "running")), missing="")
    copy.close()
    with files.log.open("ab") as log, files.events.open("ab") as events:
        log.write(lines(3, 0, "torn")[:-3])
        events.write(b'{"event": "sta')
    again = HeadCopy(files, records.life(files), lambda: None, lambda: None)
    assert (again.next_line, again.next_event, again.last_attempt) == (1, 1, 1)
    again.take(blocks(lines(0, 0, "c", "d") + state(0, "running") + state(1, "running", attempt=2)))
    again.close()
    assert read(files) == ["[0] a", "[0] b", "[0] c", "[0] d"]
    assert [json.loads(line)["attempt"] for line in files.events.read_bytes().splitlines()] == [0, 1, 3]


def test_a_folder_that_a_power_failure_has_set_back_takes_a_later_life(files):
    records.write_life(files, Life(number=2, first_line=5, first_event=3, first_attempt=1))
    for texts in (["c"], ["c", "d"]):
        copy = HeadCopy(files, records.life(files), lambda: None, lambda: None)
        copy.take(blocks(lines(0, 0, *texts) + state(0, "running")))
        copy.close()
    assert [(line.text, line.sequence) for line in LogReader(files).read()] == [("c", 5), ("d", 6)]
    assert files.events.read_bytes().count(b"\n") == 4


def test_attempts_count_through_all_lives():
    spec = spec_of()
    job = records.create(f"scripted.{spec.name}", b"k" * 32)
    records.write(
        Record(ref=f"scripted://{spec.name}", name=job.folder.name, created=1.0, spec=spec, kernel_pid=1, detach=True)
    )
    reader = JobReader(job.folder.name, lambda _: True)
    for number, first in ((1, 0), (2, 2)):
        copy = begin(job, Life(number=number, first_attempt=first, object=f"{spec.name}-{number}"))
        copy.take(blocks(state(0, "running") + state(1, "running", attempt=1)))
        copy.close()
        assert reader.status().attempt == first + 1
    assert reader.status().state is StateName.RUNNING
    assert (records.life(job).object, records.life(job).first_attempt) == (f"{spec.name}-2", 2)
    records.delete(job.folder.name)


def test_a_text_of_several_lines_is_read_line_by_line(copy, files):
    copy.log("Results could not be fetched: outcome-0-0\n\nkind: Role")
    copy.log("and then")
    texts = [line.text for line in LogReader(files).read()]
    assert texts == ["Results could not be fetched: outcome-0-0", "", "kind: Role", "and then"]
