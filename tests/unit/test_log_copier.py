"""What an agent writes into its folder comes out of its stdout, in order, whatever the reader does."""

from __future__ import annotations

import os
import threading

import pytest

from kale_dist import contract, transport
from kale_dist.contract import JobFiles, Stream
from kale_dist.runtime import log_segments
from kale_dist.runtime.log_copier import LogCopier
from kale_dist.runtime.output import LogWriter
from kale_dist.transport import EventItem, FrameReader, Heartbeat, Line, OutcomeItem

KEY = b"k" * 32
WAIT_S = 60


class Reader(threading.Thread):
    """Reads a pipe as the container runtime does, once it is started."""

    def __init__(self, descriptor):
        super().__init__(daemon=True)
        self.descriptor = descriptor
        self.items = []

    def run(self):
        frames = FrameReader(KEY, 2)
        while data := os.read(self.descriptor, 65536):
            self.items += frames.feed_block(data)

    def of(self, kind):
        return [item for item in self.items if isinstance(item, kind)]


class Pod:
    def __init__(self, folder, limit_bytes=None):
        self.files = JobFiles(folder)
        self.output, self.input = os.pipe()
        self.reader = Reader(self.output)
        self.copier = LogCopier(self.files, KEY, 2, self.input)
        self.log = LogWriter(self.files.log, 0, self.copier.wake, limit_bytes)

    def event(self, **fields):
        with self.files.events.open("ab") as file:
            file.write(contract.encode_record(fields))
        self.copier.wake()

    def progress(self, **fields):
        self.appear(self.files.progress, contract.encode_record(fields))

    def appear(self, path, data):
        temporary = path.with_name(".new")
        temporary.write_bytes(data)
        temporary.replace(path)
        self.copier.wake()

    def finish(self):
        """Everything that the reader has got."""
        if not self.reader.is_alive():
            self.reader.start()
        assert self.copier.drain(WAIT_S)
        self.close_input()
        self.reader.join(WAIT_S)
        return self.reader

    def close_input(self):
        self.copier.close()
        if self.input >= 0:
            os.close(self.input)
            self.input = -1


@pytest.fixture
def make(tmp_path):
    made = []

    def make_pod(**settings):
        made.append(Pod(tmp_path, **settings))
        return made[-1]

    yield make_pod
    for pod in made:
        pod.log.close()
        pod.close_input()
        os.close(pod.output)


def texts(reader):
    return [contract.parse_line(line.framed).text for line in reader.of(Line)]


def test_lines_events_outcomes_and_progress_arrive(make):
    pod = make()
    pod.reader.start()
    pod.log.lines(4, Stream.STDOUT, [b"one", b"\xff\x1b[1m", b""])
    pod.appear(pod.files.outcome(0, 4), b"signed bytes")
    pod.event(event="state", state="succeeded")
    pod.progress(**{"4": {"event": "progress", "rank": 4, "step": 1}})
    reader = pod.finish()
    assert texts(reader) == ["one", "\\xff\x1b[1m", ""]
    assert reader.of(OutcomeItem) == [OutcomeItem(attempt=0, rank=4, data=b"signed bytes")]
    assert EventItem(number=0, event={"event": "state", "state": "succeeded"}, trusted=True) in reader.items
    assert EventItem(number=None, event={"event": "progress", "rank": 4, "step": 1}, trusted=True) in reader.items
    assert reader.items[-1] == Heartbeat(next_line=3, next_event=1)


def test_who_reads_an_event_has_read_the_lines_and_outcomes_before_it(make):
    pod = make()
    pod.reader.start()
    for number in range(300):
        pod.log.lines(0, Stream.STDOUT, [b"%d" % number] * 100)
        pod.appear(pod.files.outcome(number, 0), b"x")
        pod.event(event="note", text=str(number))
    reader = pod.finish()
    lines, outcomes, numbers = 0, set(), []
    for item in reader.items:
        if isinstance(item, Line):
            lines += 1
        elif isinstance(item, OutcomeItem):
            outcomes.add(item.attempt)
        elif isinstance(item, EventItem):
            numbers.append(item.number)
            assert lines >= (item.number + 1) * 100
            assert item.number in outcomes
    assert numbers == list(range(300))


def test_two_hundred_thousand_lines_at_once(make):
    pod = make()
    pod.reader.start()
    wanted = [b"%d " % number + b"x" * 190 for number in range(200_000)]
    for start in range(0, len(wanted), 300):
        pod.log.lines(0, Stream.STDOUT, wanted[start : start + 300])
    lines = pod.finish().of(Line)
    assert [line.sequence for line in lines] == list(range(200_000))
    assert b"\n".join(line.framed.split(b" ", 5)[5] for line in lines) == b"\n".join(wanted)


def test_nothing_waits_for_a_reader_that_does_not_read(make):
    pod = make()
    for number in range(100):
        pod.log.lines(0, Stream.STDOUT, [b"%d" % number] * 1000)
    assert not pod.copier.drain(0.2)
    assert len(pod.finish().of(Line)) == 100_000


def test_a_reader_that_is_gone_is_told_apart_from_one_that_has_everything(make, tmp_path):
    output, descriptor = os.pipe()
    os.close(output)
    log = LogWriter(tmp_path / "log", 0, lambda: None)
    log.say("hello")
    log.close()
    copier = LogCopier(JobFiles(tmp_path), KEY, 0, descriptor)
    assert not copier.drain(WAIT_S)
    os.close(descriptor)


def test_a_line_that_is_not_whole_yet_waits_for_its_rest(make):
    pod = make()
    pod.reader.start()
    framed = contract.frame_lines(0, 0, 0, 1, Stream.STDOUT, [b"a line in two writes"])
    with pod.files.log.open("ab", buffering=0) as file:
        file.write(framed[:10])
        pod.copier.wake()
        assert pod.copier.drain(WAIT_S)
        file.write(framed[10:])
    assert texts(pod.finish()) == ["a line in two writes"]


def test_a_large_outcome_stays_in_its_folder(make):
    pod = make()
    pod.appear(pod.files.outcome(0, 0), b"x" * (transport.SMALL_OUTCOME_BYTES + 1))
    pod.appear(pod.files.outcome(0, 1), b"y" * transport.SMALL_OUTCOME_BYTES)
    assert [item.rank for item in pod.finish().of(OutcomeItem)] == [1]


def test_progress_is_thinned_and_its_last_state_arrives(make):
    pod = make()
    pod.reader.start()
    for step in range(2000):
        pod.progress(**{"0": {"event": "progress", "rank": 0, "step": step}, "1": {"event": "progress", "rank": 1}})
    seen = [item.event for item in pod.finish().of(EventItem)]
    steps = [event["step"] for event in seen if event["rank"] == 0]
    assert steps == sorted(set(steps))
    assert steps[-1] == 1999
    assert len(steps) < 1000
    assert len([event for event in seen if event["rank"] == 1]) == 1


def test_progress_arrives_without_another_change(make):
    pod = make()
    pod.reader.start()
    for step in (1, 2):
        pod.progress(**{"0": {"event": "progress", "rank": 0, "step": step}})
        while not any(item.event["step"] == step for item in pod.reader.of(EventItem)):
            pod.reader.join(0.01)
    pod.finish()


def test_heartbeats_tell_what_should_have_been_seen(make, monkeypatch):
    monkeypatch.setattr(transport, "HEARTBEAT_S", 0.05)
    pod = make()
    pod.reader.start()
    pod.log.say("one")
    while len(pod.reader.of(Heartbeat)) < 3:
        pod.reader.join(0.01)
    assert pod.finish().of(Heartbeat)[-1] == Heartbeat(next_line=1, next_event=0)


# -- the bounded log -------------------------------------------------------------------------------------------------


def test_a_bounded_log_is_copied_whole_while_its_oldest_lines_go_from_the_disk(make):
    pod = make(limit_bytes=200_000)
    pod.reader.start()
    for number in range(2000):
        pod.log.lines(0, Stream.STDOUT, [b"%d" % number + b"x" * 1000])
        if number % 50 == 0:
            assert pod.copier.drain(WAIT_S)
    lines = pod.finish().of(Line)
    assert [line.sequence for line in lines] == list(range(len(lines)))
    assert len([line for line in lines if b" a only the last 200,000 bytes" in line.framed]) >= 15
    kept = [pod.files.log, log_segments.older(pod.files.log)]
    assert sum(path.stat().st_size for path in kept) <= 202_000


def test_lines_that_went_before_they_were_copied_leave_a_gap_and_no_more(make):
    pod = make(limit_bytes=200_000)
    for number in range(2000):
        pod.log.lines(0, Stream.STDOUT, [b"%d" % number + b"x" * 1000])
    lines = pod.finish().of(Line)
    sequences = [line.sequence for line in lines]
    assert sequences == sorted(set(sequences))
    assert lines[-1].framed.endswith(b" 1999" + b"x" * 1000)
    assert pod.reader.items[-1] == Heartbeat(next_line=sequences[-1] + 1, next_event=0)


@pytest.mark.parametrize("limit_bytes", [None, 3000])
@pytest.mark.parametrize("first", [0, 1, 50, 98, 99, 100, 5000])
def test_a_log_is_read_from_any_line_on(tmp_path, first, limit_bytes):
    log = LogWriter(tmp_path / "log", 0, lambda: None, limit_bytes)
    for number in range(100):
        log.lines(0, Stream.STDERR, [b"y" * (number * 7 % 200)])
    count = log_segments.next_line(tmp_path / "log")
    with (tmp_path / "log").open("ab") as file:
        file.write(b"%x torn" % count)
    read = log_segments.read_from(tmp_path / "log", first, 1 << 20)
    sequences = [contract.parse_line(line).sequence for line in read.splitlines()]
    assert sequences == list(range(sequences[0], count)) if sequences else first >= count
    if limit_bytes is None:
        assert count == 100
        assert len(sequences) == max(0, 100 - first)
    else:
        assert not sequences or sequences[0] == max(first, sequences[0])
        assert first >= count or sequences
    log.close()


def test_a_log_is_read_in_pieces(tmp_path):
    log = LogWriter(tmp_path / "log", 0, lambda: None)
    log.lines(0, Stream.STDOUT, [b"z" * 5000, *[b"%d" % number for number in range(5000)], b"z" * 900_000])
    log.close()
    sequences = []
    while piece := log_segments.read_from(tmp_path / "log", len(sequences), 1000):
        sequences += [contract.parse_line(line).sequence for line in piece.splitlines()]
    assert sequences == list(range(5002))


def test_the_log_of_a_job_that_has_none_is_empty(tmp_path):
    assert log_segments.next_line(tmp_path / "log") == 0
    assert log_segments.read_from(tmp_path / "log", 0, 1000) == b""
    (tmp_path / "log").write_bytes(b"0 torn")
    assert log_segments.next_line(tmp_path / "log") == 0
    assert log_segments.read_from(tmp_path / "log", 0, 1000) == b""
