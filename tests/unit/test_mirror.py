"""A job's folder filled from its pods' logs: what readers of the folder see, whatever happens on the way."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from kale_dist import contract, transport
from kale_dist.backends.job_reader import LogReader
from kale_dist.backends.mirror import Mirror
from kale_dist.contract import EventKind, JobFiles, Stream
from kale_dist.errors import JobNotFoundError, StoreError
from kale_dist.runtime import outcome
from kale_dist.runtime.log_copier import LogCopier
from kale_dist.runtime.output import LogWriter
from kale_dist.runtime.references import References
from kale_dist.transport import FrameReader, Heartbeat, OutcomeItem

KEY = b"k" * 32


def nobody(*_):
    return None


def lines(texts, first=0, rank=0):
    """What the log of a pod shows of some lines of a rank."""
    return transport.line_frames(contract.frame_lines(first, 1_000, 0, rank, Stream.STDOUT, texts))


def event(kind, number, pod=0, key=KEY, **fields):
    record = {"event": str(kind), "time": 1.0, "rank": None, "attempt": 0, **fields}
    return transport.event_frame(key, pod, number, record)


def final(number, pod=0):
    return event(EventKind.STATE, number, pod, state="succeeded", reason="", cause="")


class Job:
    """A job's folder, a mirror, and what a reader finds there."""

    def __init__(self, folder, *, key=KEY, fill=nobody, fill_events=None):
        folder.mkdir(exist_ok=True)
        self.key = key
        self.files = JobFiles(folder)
        self.mirror = Mirror(self.files, key, job="digits", world_size=4, fill=fill, fill_events=fill_events)

    def take(self, data, uid="a", pod=0, reader=None):
        reader = reader or FrameReader(self.key, pod)
        self.mirror.take(uid, pod, [*reader.feed_block(data), *reader.finish()])

    @property
    def log(self):
        return [str(line) for line in LogReader(self.files.log).read()]

    @property
    def numbers(self):
        return [line.sequence for line in LogReader(self.files.log).read()]

    @property
    def events(self):
        return list(contract.decode_records(self.files.events.read_bytes()))


@pytest.fixture
def make(tmp_path):
    with contextlib.ExitStack() as stack:

        def begin(**settings):
            job = Job(tmp_path / "job", **settings)
            assert job.mirror.try_lock()
            stack.callback(job.mirror.close)
            return job

        yield begin


@pytest.fixture
def job(make):
    return make()


# -- lines ---------------------------------------------------------------------------------------------------------------


def test_pods_interleave_as_they_come_and_are_numbered_anew(job):
    job.take(lines([b"one", b"two"], rank=0))
    job.take(lines([b"uno"], rank=2), uid="b", pod=1)
    job.mirror.say("sent\nthe snapshot")
    job.take(lines([b"three"], first=2, rank=1))
    assert job.log == ["[0] one", "[0] two", "[2] uno", "[kale-dist] sent", "[kale-dist] the snapshot", "[1] three"]
    assert job.numbers == list(range(6))
    assert (job.mirror.next_line("a"), job.mirror.next_line("b"), job.mirror.next_line("c")) == (3, 1, 0)


def test_what_a_stream_repeats_is_dropped(job):
    job.take(lines([b"1", b"2", b"3"]))
    job.take(lines([b"2", b"3", b"4"], first=1))
    job.take(lines([b"1"]))
    assert job.log == ["[0] 1", "[0] 2", "[0] 3", "[0] 4"]


def test_a_pod_that_takes_the_name_of_another_starts_anew(job):
    job.take(lines([b"first life"]), uid="a")
    job.take(lines([b"second life"]), uid="b")
    assert job.log == ["[0] first life", "[0] second life"]


@pytest.mark.parametrize("text", [b"", b"\xff\x00\x1b[31m", b"~0 0 0 0 o x", b"a\rb", b"x" * 900_000, b" two  blanks "])
def test_any_text_arrives_as_it_is(job, text):
    job.take(lines([text, b"next"]))
    shown = text.decode("utf-8", "backslashreplace")
    assert job.log == [f"[0] {shown}", "[0] next"]


def test_lines_that_were_skipped_are_fetched_piece_by_piece(make):
    asked = []

    def fill(uid, pod, first, last):
        asked.append((uid, pod, first, last))
        reader = FrameReader(KEY, 0)
        return reader.feed_block(lines([b"%d" % number for number in range(first, first + 4)], first=first))

    job = make(fill=fill)
    job.take(lines([b"0"]))
    job.take(lines([b"10"], first=10))
    assert job.log == [f"[0] {number}" for number in range(11)]
    assert asked == [("a", 0, 1, 9), ("a", 0, 5, 9), ("a", 0, 9, 9)]


def test_lines_that_nobody_has_are_counted(job):
    job.take(lines([b"0"]))
    job.take(lines([b"13"], first=13))
    job.take(lines([b"15"], first=15))
    assert [line.partition(":")[0] for line in job.log] == [
        "[0] 0",
        "[kale-dist] 12 lines were lost of pod 0",
        "[0] 13",
        "[kale-dist] 1 line was lost of pod 0",
        "[0] 15",
    ]


def test_of_lines_that_are_partly_gone_the_rest_is_fetched(make):
    def fill(uid, pod, first, last):
        return FrameReader(KEY, 0).feed_block(lines([b"8", b"9", b"10"], first=8)) if first <= 8 else None

    job = make(fill=fill)
    job.take(lines([b"10"], first=10))
    assert [line.partition(":")[0] for line in job.log] == [
        "[kale-dist] 8 lines were lost of pod 0", "[0] 8", "[0] 9", "[0] 10",
    ]  # fmt: skip


def test_a_heartbeat_shows_that_the_end_is_missing(make):
    missing = lines([b"2", b"3"], first=2)
    job = make(fill=lambda *_: FrameReader(KEY, 0).feed_block(missing))
    job.take(lines([b"0", b"1"]) + transport.heartbeat_frame(4, 0))
    job.take(transport.heartbeat_frame(2, 0))
    assert job.log == ["[0] 0", "[0] 1", "[0] 2", "[0] 3"]


def test_a_pod_that_could_not_be_read_to_its_end_is_said_once(make, tmp_path):
    job = make()
    job.take(lines([b"one", b"two"]))
    job.take(lines([b"all"]), uid="b", pod=1)
    job.mirror.begin("c", 2)
    assert job.mirror.unfinished == {"a": 0, "b": 1, "c": 2}
    job.mirror.finish("b", 1, is_whole=True)
    for _ in range(2):
        job.mirror.finish("a", 0, is_whole=False)
        job.mirror.finish("b", 1, is_whole=False)
        job.mirror.finish("c", 2, is_whole=False)
    broken, lost = job.log[-2:]
    assert "The log of pod 0 breaks off behind its first 2 lines: the pod was gone" in broken
    assert "The log of pod 2 is lost: the pod was gone before a line of it could be read" in lost
    job.mirror.close()
    following = Job(tmp_path / "job")
    assert following.mirror.try_lock()
    assert (following.mirror.unfinished, following.mirror.is_continued) == ({}, True)
    following.mirror.finish("a", 0, is_whole=False)
    following.mirror.close()
    assert len(following.log) == 5


def test_lines_and_events_that_the_pods_agent_denies_are_no_gap(make):
    job = make(fill=lambda *_: (), fill_events=lambda *_: ())
    job.take(lines([b"0"]) + transport.heartbeat_frame(9, 9) + 2 * lines([b"forged"], first=7))
    job.take(lines([b"1"], first=1) + event(EventKind.NOTE, 0, text="0"))
    assert [line.partition(":")[0] for line in job.log] == [
        "[0] 0",
        "[kale-dist] Refused a line in the log of pod 0 that the pod's agent has not written",
        "[0] 1",
    ]
    assert [found["text"] for found in job.events] == ["0"]


def test_a_number_that_cannot_be_is_no_gap(job):
    job.take(lines([b"0"]) + lines([b"nonsense"], first=1 << 40) + transport.heartbeat_frame(1 << 40, 1 << 40))
    job.take(lines([b"1"], first=1))
    assert job.log == ["[0] 0", "[0] 1"]


def test_a_pod_that_is_asked_for_lines_does_not_hold_up_the_others(make):
    asked, answer = threading.Event(), threading.Event()

    def fill(*_):
        asked.set()
        answer.wait(60)

    job = make(fill=fill)
    slow = threading.Thread(target=job.take, args=(lines([b"late"], first=3),))
    slow.start()
    assert asked.wait(60)
    job.take(lines([b"quick"], rank=1), uid="b", pod=1)
    assert job.log == ["[1] quick"]
    answer.set()
    slow.join(60)
    assert job.log[0] == "[1] quick"
    assert job.log[2] == "[0] late"


# -- lines that no agent wrote -------------------------------------------------------------------------------------------


def test_a_crash_before_the_agent_is_shown_once(job):
    text = b"Traceback (most recent call last):\n  import torch\nModuleNotFoundError: torch\n"
    for _ in range(3):
        job.mirror.begin("a", 1)
        job.take(text, pod=1)
    assert job.log == [
        "[kale-dist] pod 1: Traceback (most recent call last):",
        "[kale-dist] pod 1:   import torch",
        "[kale-dist] pod 1: ModuleNotFoundError: torch",
    ]


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("abc", "bcd", "abcd"),
        ("abc", "cde", "abcde"),
        ("abc", "xyz", "abcxyz"),
        ("aaa", "aaaaa", "aaaaa"),
        ("abab", "ababc", "ababc"),
        ("abcd", "bxx", "abcdbxx"),
        ("abc", "", "abc"),
        ("", "abc", "abc"),
    ],
)
def test_what_another_stream_repeats_of_them_is_recognised(make, first, second, shown):
    job = make()
    for text in (first, second):
        job.mirror.begin("a", 0)
        for letter in text:
            job.take(letter.encode() + b"\n")
    job.mirror.close()
    assert [line[-1] for line in job.log] == list(shown)


def test_they_stand_where_they_came(job):
    job.take(b"before\n" + lines([b"0"]) + b"between\n" + lines([b"1"], first=1) + b"after\n")
    assert job.log == [
        "[kale-dist] pod 0: before", "[0] 0", "[kale-dist] pod 0: between", "[0] 1", "[kale-dist] pod 0: after",
    ]  # fmt: skip


# -- events, progress, outcomes ------------------------------------------------------------------------------------------


def test_events_arrive_once_and_the_final_one_waits(job):
    job.take(event(EventKind.STATE, 0, state="running", reason="", cause=""))
    job.take(event(EventKind.NOTE, 1, text="sharded") + final(2) + event(EventKind.NOTE, 3, text="after"))
    job.take(event(EventKind.NOTE, 1, text="sharded") + final(2))
    assert [found.get("text", found.get("state")) for found in job.events] == ["running", "sharded", "after"]
    assert job.mirror.verdict["state"] == "succeeded"
    job.mirror.release_final()
    job.mirror.release_final()
    assert [found.get("text", found.get("state")) for found in job.events][3:] == ["succeeded"]
    assert job.mirror.next_event("a") == 4


def test_only_pod_0_speaks_for_the_job(job):
    job.take(final(0, pod=1) + event(EventKind.NOTE, 1, pod=1, text="hello"), uid="b", pod=1)
    assert job.mirror.verdict is None
    assert [found["event"] for found in job.events] == ["note"]


def test_a_final_event_of_the_backend_is_seen_at_once(job):
    job.mirror.record_event({"event": "state", "state": "failed", "time": 1.0, "rank": None, "attempt": 0})
    assert [found["state"] for found in job.events] == ["failed"]


def test_events_that_were_skipped_are_fetched_or_counted(make):
    def fill_events(uid, pod, first, last):
        if first < 4:
            data = b"".join(event(EventKind.NOTE, number, text=f"{number}") for number in range(first, 4))
            return FrameReader(KEY, 0).feed_block(data)
        return None

    job = make(fill_events=fill_events)
    job.take(event(EventKind.NOTE, 3, text="3"))
    job.take(event(EventKind.NOTE, 7, text="7"))
    assert [found["text"] for found in job.events] == ["0", "1", "2", "3", "7"]
    assert job.log[0].startswith("[kale-dist] 3 events were lost of pod 0")


@pytest.mark.parametrize(
    "forged", [final(0), event(EventKind.NOTE, 0, text="x"), event(EventKind.PROGRESS, None, rank=0)]
)
def test_an_event_that_nobody_checked_is_refused_with_one_note(job, forged):
    job.take(forged * 3, reader=FrameReader(None, 0))
    job.mirror.refuse("a", 0)
    assert job.events == []
    assert job.mirror.verdict is None
    assert not job.files.progress.exists()
    assert [line.partition(":")[0] for line in job.log] == [
        "[kale-dist] Refused an event in the log of pod 0 that this job has not signed"
    ]


def test_without_the_key_events_are_shown(make):
    job = make(key=None)
    job.take(event(EventKind.NOTE, 0, text="sharded") + event(EventKind.OUTCOME, 1, rank=0, ok=True))
    assert [found["event"] for found in job.events] == ["note", "outcome"]
    assert job.mirror.outcomes == []


def progress(step, moment, rank=0):
    return event(EventKind.PROGRESS, None, rank=rank, step=step, time=moment)


def test_progress_never_goes_back(job):
    job.take(progress(1, 10.0) + progress(5, 11.0) + progress(9, 11.0, rank=3))
    job.take(progress(1, 10.0))
    known = json.loads(job.files.progress.read_bytes())
    assert {rank: found["step"] for rank, found in known.items()} == {"0": 5, "3": 9}


@pytest.mark.parametrize("rank", [-1, 4, 10**9, "0", "../../key", None, True, 1.0, []])
def test_progress_and_outcomes_of_ranks_that_are_none_are_dropped(job, rank):
    job.take(progress(1, 10.0, rank=rank) + event(EventKind.OUTCOME, 0, rank=rank, ok=True))
    assert not job.files.progress.exists()
    assert job.mirror.outcomes == []


def signed(tmp_path, *, key=KEY, name="digits", attempt=0, rank=1, value=7):
    path = tmp_path / "made"
    outcome.write_success(path, key=key, job=name, attempt=attempt, rank=rank, value=value, references=References())
    return path.read_bytes()


def test_a_signed_outcome_can_be_loaded(job, tmp_path):
    job.take(event(EventKind.OUTCOME, 0, rank=1, ok=True) + b"".join(transport.outcome_frames(0, 1, signed(tmp_path))))
    path = job.files.outcome(0, 1)
    assert outcome.read(path, key=KEY, job="digits", attempt=0, rank=1, resolve=nobody).value == 7
    assert job.mirror.outcomes == ["outcome-0-1"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "how",
    [
        {"key": b"x" * 32},
        {"name": "other"},
        {"attempt": 1},
        {"rank": 2},
        {"damaged": True},
        {"text": b"nonsense"},
        {"text": b""},
    ],
)
def test_a_forged_outcome_is_refused_with_one_note(job, tmp_path, how):
    if "text" in how:
        data = how["text"]
    elif "damaged" in how:
        # The pickled 7 becomes an 8.
        data = signed(tmp_path).replace(b"K\x07", b"K\x08")
    else:
        data = signed(tmp_path, **how)
    for _ in range(3):
        job.mirror.take("b", 1, [OutcomeItem(attempt=0, rank=1, data=data)])
    assert sorted(path.name for path in job.files.folder.iterdir() if "outcome" in path.name) == []
    assert len(job.log) == 1
    assert "Refused an outcome in the log of pod 1" in job.log[0]
    genuine = signed(tmp_path)
    job.mirror.take("a", 0, [OutcomeItem(attempt=0, rank=1, data=genuine)])
    assert job.files.outcome(0, 1).read_bytes() == genuine


def test_a_large_outcome_or_a_checkpoint_is_waited_for(job, tmp_path):
    job.take(event(EventKind.OUTCOME, 0, rank=1, ok=True))
    assert job.mirror.waits_for_acknowledgement
    job.take(b"".join(transport.outcome_frames(0, 1, signed(tmp_path))))
    assert not job.mirror.waits_for_acknowledgement
    job.take(event(EventKind.CHECKPOINT, 1, rank=0, epoch=1))
    assert not job.mirror.waits_for_acknowledgement
    job.take(event(EventKind.STATE, 2, state="failed", reason="", cause="error"))
    assert job.mirror.waits_for_acknowledgement


# -- the lock, the end of a process, the end of a folder -----------------------------------------------------------------


def test_only_one_mirrors_at_a_time(job, tmp_path):
    other = Job(tmp_path / "job")
    assert not other.mirror.try_lock()
    other.take(lines([b"dropped"]))
    script = "import sys; from kale_dist.backends.mirror import *; "
    script += "print(Mirror(JobFiles(sys.argv[1]), None, job='j', world_size=1, fill=print).try_lock())"
    ask = [sys.executable, "-c", script, str(job.files.folder)]
    assert subprocess.run(ask, capture_output=True, check=True, timeout=120).stdout == b"False\n"
    job.take(lines([b"kept"]))
    job.mirror.close()
    job.take(lines([b"late"], first=1))
    assert subprocess.run(ask, capture_output=True, check=True, timeout=120).stdout == b"True\n"
    assert other.mirror.try_lock()
    other.take(lines([b"kept", b"next"]))
    other.mirror.close()
    assert job.log == ["[0] kept", "[0] next"]


def test_the_next_mirror_knows_all_that_the_last_one_did(make, tmp_path):
    job = make()
    job.take(
        b"plain\n" + lines([b"0", b"1"]) + event(EventKind.OUTCOME, 0, rank=1, ok=True) + final(1) + progress(5, 11.0)
    )
    job.take(b"".join(transport.outcome_frames(0, 1, signed(tmp_path))))
    job.mirror.close()
    job = make()
    job.mirror.begin("a", 0)
    assert job.mirror.verdict["state"] == "succeeded"
    assert job.mirror.outcomes == ["outcome-0-1"]
    assert not job.mirror.waits_for_acknowledgement
    job.take(b"plain\n" + lines([b"0", b"1", b"2"]) + event(EventKind.OUTCOME, 0, rank=1, ok=True) + progress(1, 10.0))
    assert job.log == ["[kale-dist] pod 0: plain", "[0] 0", "[0] 1", "[0] 2"]
    assert [found["event"] for found in job.events] == ["outcome"]
    assert json.loads(job.files.progress.read_bytes())["0"]["step"] == 5
    job.mirror.release_final()
    job.mirror.close()
    job = make()
    job.mirror.release_final()
    assert [found["event"] for found in job.events] == ["outcome", "state"]


WRITER = """
import pathlib, sys
sys.path.insert(0, sys.argv[2])
from test_mirror import *
job = Job(pathlib.Path(sys.argv[1]))
assert job.mirror.try_lock()
print(flush=True)
while True:
    for uid, pod in (("a", 0), ("b", 1)):
        first = min(job.mirror.next_line(uid), job.mirror.next_event(uid))
        numbers = range(first, first + 50)
        data = lines([b"%d of %d" % (number, pod) for number in numbers], first=first, rank=pod)
        data += b"".join(event("note", number, pod, text=str(number)) for number in numbers)
        job.take(data, uid=uid, pod=pod)
"""


def test_a_mirror_that_is_killed_is_continued_without_a_line_lost_or_doubled(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    for pause in (0.02, 0.05, 0.11, 0.07):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(pathlib.Path(__file__).parent)],
            stdout=subprocess.PIPE,
            cwd=".",
        )
        with process:
            assert process.stdout.readline()
            time.sleep(pause)
            process.send_signal(signal.SIGKILL)
    job = Job(folder)
    assert job.mirror.try_lock()
    counts = [job.mirror.next_line(uid) for uid in "ab"]
    events = [job.mirror.next_event(uid) for uid in "ab"]
    job.mirror.close()
    assert min(counts) > 50
    assert job.numbers == list(range(sum(counts)))
    for pod in (0, 1):
        assert [line for line in job.log if line.startswith(f"[{pod}]")] == [
            f"[{pod}] {number} of {pod}" for number in range(counts[pod])
        ]
    assert len(job.events) == sum(events)


@pytest.mark.parametrize("cut", [0, 1, 7, 14, 20, 21, 40])
def test_what_was_written_of_a_block_counts_wherever_it_was_torn(make, cut):
    """As after a kill within one write: the account knows of the block, the file holds a part of it."""
    job = make()
    job.take(lines([b"0", b"1"]))
    account = job.files.folder / "mirror.json"
    size = job.files.log.stat().st_size
    job.take(lines([b"2", b"3", b"4"], first=2))
    torn = account.read_bytes()
    job.mirror.close()
    account.write_bytes(torn)
    with job.files.log.open("rb+") as file:
        file.truncate(size + cut)
    job = make()
    job.take(lines([b"0", b"1", b"2", b"3", b"4"]))
    assert job.log == ["[0] 0", "[0] 1", "[0] 2", "[0] 3", "[0] 4"]
    assert job.numbers == [0, 1, 2, 3, 4]


def test_lines_from_before_the_first_mirror_stay(make, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "log").write_bytes(contract.frame_lines(0, 1, 0, None, Stream.AGENT, [b"submitted"]))
    job = make()
    job.take(lines([b"0"]))
    assert job.log == ["[kale-dist] submitted", "[0] 0"]
    assert job.numbers == [0, 1]


def test_a_full_disk_is_said_and_what_was_lost_comes_again(job):
    block = lines([b"%0100d" % number for number in range(1000)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        with pytest.raises(StoreError, match=r"could not be written into .*Free some space"):
            job.take(block)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    job.take(block)
    assert job.log == [f"[0] {number:0100d}" for number in range(1000)]


def test_a_job_that_was_deleted_is_not_written_again(job, tmp_path):
    folder = job.files.folder
    aside = tmp_path / "aside"
    folder.rename(aside)
    for path in aside.iterdir():
        path.unlink()
    aside.rmdir()
    folder.mkdir()
    with pytest.raises(JobNotFoundError):
        job.take(lines([b"0"]))
    assert list(folder.iterdir()) == []
    with pytest.raises(JobNotFoundError):
        Mirror(JobFiles(tmp_path / "nowhere"), KEY, job="digits", world_size=1, fill=nobody).try_lock()


@pytest.mark.parametrize("account", [b"", b"{}", b"[]", b'{"sizes": 1}', b"\xff"])
def test_a_damaged_account_is_said(make, tmp_path, account):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "mirror.json").write_bytes(account)
    with pytest.raises(StoreError, match=r"mirror.json is damaged .*Delete that file"):
        make()
    (folder / "mirror.json").unlink()
    make()


# -- much of it ----------------------------------------------------------------------------------------------------------


def test_forty_megabytes_at_once_arrive_whole(job):
    block = lines([b"%0200d" % number for number in range(200_000)])
    assert len(block) > 40 << 20
    reader = FrameReader(KEY, 0)
    for start in range(0, len(block), 1 << 16):
        job.mirror.take("a", 0, reader.feed_block(block[start : start + (1 << 16)]))
    job.mirror.take("a", 0, [Heartbeat(next_line=200_000, next_event=0)])
    texts = [line.rpartition(b" ")[2] for line in job.files.log.read_bytes().split(b"\n")[:-1]]
    assert texts == [b"%0200d" % number for number in range(200_000)]


def test_what_an_agent_copies_to_its_stdout_comes_home(job, tmp_path):
    """Both ends as they are: an agent's folder, its copier, a pipe cut anywhere, and the mirror."""
    pod = JobFiles(tmp_path / "pod")
    pod.folder.mkdir()
    read, write = os.pipe()
    copier = LogCopier(pod, KEY, 0, write)
    log = LogWriter(pod.log, 0, copier.wake)
    log.lines(1, Stream.STDOUT, [b"%d" % number for number in range(1000)])
    log.continued(1, Stream.STDOUT, b"y" * (1 << 20))
    log.lines(1, Stream.STDOUT, [b"end"])
    pod.outcome(0, 1).write_bytes(signed(tmp_path))
    announced = {"event": "outcome", "time": 1.0, "rank": 1, "attempt": 0, "ok": True}
    ended = {"event": "state", "time": 2.0, "rank": None, "attempt": 0, "state": "succeeded", "reason": "", "cause": ""}
    pod.events.write_bytes(contract.encode_record(announced) + contract.encode_record(ended))
    reader = FrameReader(KEY, 0)
    with os.fdopen(read, "rb", buffering=0) as pipe:
        threading.Thread(target=lambda: (copier.drain(60), os.close(write)), daemon=True).start()
        while data := pipe.read(777):
            job.mirror.take("a", 0, reader.feed_block(data))
    log.close()
    copier.close()
    assert job.log == [f"[1] {number}" for number in range(1000)] + ["[1] " + "y" * (1 << 20), "[1] end"]
    assert job.mirror.outcomes == ["outcome-0-1"]
    assert job.mirror.verdict == ended
    assert outcome.read(job.files.outcome(0, 1), key=KEY, job="digits", attempt=0, rank=1, resolve=nobody).value == 7
