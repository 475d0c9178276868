"""Who waits in a collective."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kale_dist.worker.agent.ending import name_ranks
from kale_dist.worker.agent.hang_watch import Frame, Sample, parse_main_thread, waits

C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
CELL = "/tmp/ipykernel_1/1.py"


def sample(*files, ticks=0, moves=0):
    frames = tuple(Frame(file=file, line=7, function="f") for file in files)
    return Sample(frames=frames, cpu_ticks=ticks, moves=moves)


RANK = """
import faulthandler, sys, threading

def hangs():
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    faulthandler.dump_traceback(sys.stdout, all_threads=True)
    release.set()
    thread.join()

hangs()
"""


def test_the_main_thread_of_a_real_dump_is_found(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    dump = subprocess.run([sys.executable, path], check=True, capture_output=True, timeout=60).stdout
    first = parse_main_thread(dump)[0]
    assert (first.function, first.file) == ("hangs", str(path))


@pytest.mark.parametrize(
    "dump", [b"", b"garbage\n", b"\xff\xfe", b"Thread 0x1 (most recent call first):\n  <no Python frame>"]
)
def test_a_dump_without_frames(dump):
    assert parse_main_thread(dump) == ()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (sample(C10D, CELL), sample(C10D, CELL), True),
        (sample("/x/kale_dist/worker/parallel/data_parallel.py"), sample("/x/kale_dist/worker/parallel/data_parallel.py"), True),
        (sample("/x/kale_dist/worker/rank/process_group.py", CELL), sample("/x/kale_dist/worker/rank/process_group.py", CELL), True),
        (sample(CELL), sample(CELL), False),
        (sample(C10D, CELL), sample(CELL), False),
        (sample(C10D, CELL), sample(C10D, CELL, ticks=50), False),
        (sample(C10D, CELL), sample(C10D, CELL, moves=1), False),
        (sample(C10D, CELL), sample(C10D, "/home/other.py"), False),
        (sample(), sample(), False),
    ],
)  # fmt: skip
def test_waiting_is_a_collective_seen_twice_with_nothing_in_between(before, after, expected):
    assert waits(before, after) is expected


def test_backward_may_wait_in_c():
    frame = Frame(file="/x/site-packages/torch/autograd/graph.py", line=1, function="_engine_run_backward")
    assert Sample(frames=(frame,), cpu_ticks=0, moves=0).may_wait


def test_the_users_frame_is_not_ours_or_torchs():
    assert (
        sample(C10D, "/usr/lib/python3.11/runpy.py", CELL, "/x/kale_dist/worker/rank/rank_main.py").user_frame.file
        == CELL
    )
    assert sample(C10D).user_frame is None


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "rank 0"), ([2, 0], "ranks 0 and 2"), ([3, 1, 2], "ranks 1, 2 and 3")]
)
def test_ranks_are_named_in_words(ranks, text):
    assert name_ranks(ranks) == text
