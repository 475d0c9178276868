"""A pod's last words and its exit code, and what is known about memory that ran out."""

from __future__ import annotations

import pytest

from kale_dist.wire import FailureCause, StateName, Verdict
from kale_dist.worker.agent import ending, usage
from kale_dist.worker.agent.processes import _cores_of_quota

SUCCESS = Verdict(StateName.SUCCEEDED, None, "")
FAILURE = Verdict(StateName.FAILED, FailureCause.ERROR, "Rank 1 failed: ValueError", rank=1)
CANCEL = Verdict(StateName.CANCELLED, FailureCause.USER, "The job was cancelled")


@pytest.mark.parametrize(
    ("verdict", "is_terminated", "code"),
    [(SUCCESS, False, 0), (SUCCESS, True, 0), (FAILURE, False, 1), (CANCEL, False, 1), (CANCEL, True, 143)],
)
def test_the_exit_code(verdict, is_terminated, code):
    assert ending.exit_code(verdict, is_terminated=is_terminated) == code


@pytest.mark.parametrize("text", ["short", "x" * 100_000, '\n"\\' * 30_000, "\U0001f600" * 30_000, "\udc80" * 10])
def test_last_words_fit_what_a_kubelet_reads(text, tmp_path):
    verdict = Verdict(StateName.FAILED, FailureCause.DIED, text, rank=3)
    ending.write_termination(tmp_path / "log", ending.termination_message(verdict))
    data = (tmp_path / "log").read_bytes()
    assert len(data) <= ending.MAX_BYTES
    said = Verdict.parse(data)
    assert (said.state, said.cause, said.rank) == ("failed", "died", 3)
    assert said.reason[:5] in (text[:5], "?" * 5)


@pytest.mark.parametrize(
    ("files", "kills", "limit"),
    [
        ({"memory.events": "low 0\noom 3\noom_kill 2\n", "memory.max": "2147483648"}, 2, "a limit of 2.0 GiB"),
        ({"memory.events": "oom_kill 1\n", "memory.max": "134217728"}, 1, "a limit of 128 MiB"),
        ({"memory.events": "oom_kill 0\n", "memory.max": "max\n"}, 0, "no limit but the machine's"),
        (
            {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
             "memory/memory.limit_in_bytes": "536870912\n"}, 1, "a limit of 512 MiB",
        ),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 0, "no limit but the machine's"),
        ({"memory.events": "nonsense\n"}, 0, "no limit but the machine's"),
    ],
)  # fmt: skip
def test_what_a_cgroup_says_of_memory(tmp_path, files, kills, limit):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usage.kills(tmp_path) == kills
    assert usage.limit_text(tmp_path) == limit


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_what_a_cgroup_says_of_cores(tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _cores_of_quota(tmp_path) == cores


@pytest.mark.parametrize("verdict", [SUCCESS, FAILURE, CANCEL, Verdict(StateName.SUCCEEDED, lost=(2, 3))])
def test_a_notebook_reads_the_verdict_that_a_head_has_sent(verdict):
    assert Verdict.parse(ending.termination_message(verdict)) == verdict


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "null", "{}", '{"state": "running"}', '{"state": 3}', '{"state": "failed", "cause": "nonsense"}'],
)
def test_what_is_no_verdict_is_none(text):
    assert Verdict.parse(text) is None
