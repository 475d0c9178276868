"""Judges from how its ranks ended how a job did, and makes a head's last report: termination message and exit code."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from collections.abc import Sequence

from kale_dist.wire import EXIT_TERMINATED, FailureCause, RankStateName, StateName, Verdict, encode
from kale_dist.wire.messages import Done
from kale_dist.worker.agent import hardware_faults
from kale_dist.worker.agent.rank_run import Rank

MAX_BYTES = 4096
"""A kubelet reads no more of a termination message."""

BLAME_AFTER_S = 0.15
"""A rank that dies takes the others along with errors of their own; its end may be reported after theirs."""

BLAME_FAR_AFTER_S = 0.5
"""The same where ranks run in several pods."""

_PEER_GONE = re.compile(
    r"gloo|connection (closed|reset|refused)|broken pipe|peer|socket|store|rank \d+ was lost", re.IGNORECASE
)


def rank_state(rank: Rank, *, stopped: bool) -> RankStateName:
    """The final state of a rank that has ended.

    Args:
        rank: The rank.
        stopped: Whether the agent ended it because of something else.
    """
    if rank.done is not None:
        return RankStateName.SUCCEEDED if rank.done.ok else RankStateName.FAILED
    return RankStateName.STOPPED if stopped else RankStateName.FAILED


def blame(failures: Sequence[Rank]) -> Verdict:
    """The verdict on a job with failed ranks.

    Args:
        failures: The ranks that failed or died, in the order in which the agent noticed it; at least one.
    """
    first = next((rank for rank in failures if rank.done is not None and not lost_peer(rank)), None)
    dead = next((rank for rank in failures if rank.done is None and not lost_peer(rank)), None)
    if dead is not None and (first is None or failures.index(dead) < failures.index(first)):
        first = dead
    return _describe(first or failures[0])


def lost_peer(rank: Rank) -> bool:
    """Whether a rank's error, or its last lines, only show that it lost another rank."""
    if (fault := _fault_of(rank)) is not None:
        return fault.follows
    done = rank.done or Done()
    return bool(_PEER_GONE.search(done.error_text)) and done.error_type.endswith("Error")


def _fault_of(rank: Rank) -> hardware_faults.Fault | None:
    """What a rank's error or last lines are about, if that is a trouble of GPUs or NCCL."""
    if rank.done is not None:
        return hardware_faults.find(rank.done.error_text)
    # A rank that was killed may have printed the error of an earlier try.
    aborted = rank.end is not None and rank.end.signal == "SIGABRT"
    return hardware_faults.find("\n".join(rank.end.tail)) if rank.end is not None and aborted else None


def _describe(rank: Rank) -> Verdict:
    if rank.done is not None:
        return _describe_error(rank.rank, rank.done, _fault_of(rank))
    end = rank.end
    if end is None or (end.reason and end.signal is None and not end.memory_limit):
        why = end.reason if end is not None else "unknown"
        reason = f"Rank {rank.rank} could not be started: {why}"
        return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, reason, rank=rank.rank)
    if end.memory_limit:
        what = f"was killed because memory ran out (its container has {end.memory_limit})"
    elif end.reason:
        what = f"was killed because {end.reason}"
    elif end.signal is not None:
        hint = " (often because memory ran out)" if end.signal == "SIGKILL" else ""
        what = f"was killed by {end.signal}{hint}"
    else:
        what = f"ended with exit code {end.exit_code} before its function returned (os._exit, or an exit in C code)"
    last = f'. Its last lines: "{" / ".join(end.tail)}"' if end.tail else ", without a line of output"
    remedy = ""
    if end.memory_limit:
        remedy = ". Ask for more memory, or use less (smaller batches, fewer DataLoader workers)"
    elif fault := _fault_of(rank):
        remedy = f". {fault.sentence}. {fault.remedy}"
    reason = f"Rank {rank.rank} {what}{last}{remedy}"
    return Verdict(StateName.FAILED, FailureCause.DIED, reason, rank=rank.rank, may_restart=not end.memory_limit)


def _describe_error(rank: int, done: Done, fault: hardware_faults.Fault | None) -> Verdict:
    shown = f"{done.error_type}: {done.error_text}" if done.error_text else done.error_type
    cause, what = FailureCause.ERROR, "failed"
    if done.is_not_started:
        cause, what = FailureCause.NOT_STARTED, "could not start"
    may_restart = False
    if fault is not None:
        place = f" on node {done.node}" if done.node else ""
        first = shown.partition("\n")[0]
        shown, may_restart = f"{first}. {fault.sentence}{place}. {fault.remedy}", fault.may_restart
    return Verdict(StateName.FAILED, cause, f"Rank {rank} {what}: {shown}", rank=rank, may_restart=may_restart)


def log_line(verdict: Verdict) -> str:
    """What the log says of a verdict, where the error of a rank stands already, printed by the rank."""
    error = verdict.reason.removeprefix(f"Rank {verdict.rank} failed: ")
    if error == verdict.reason or error.startswith("SystemExit") or hardware_faults.find(error) is not None:
        return verdict.reason
    return f"Rank {verdict.rank} failed: its error is above"


# -- a head's last words ---------------------------------------------------------------------------------------------


def exit_code(verdict: Verdict, *, is_terminated: bool) -> int:
    """The exit code of a pod whose job has ended so.

    Args:
        verdict: How the job has ended.
        is_terminated: Whether the pod got SIGTERM.
    """
    if verdict.state is StateName.SUCCEEDED:
        return 0
    return EXIT_TERMINATED if is_terminated else 1


def termination_message(verdict: Verdict) -> bytes:
    """The verdict as JSON of at most `MAX_BYTES`."""
    limit = MAX_BYTES
    while True:
        reason = verdict.reason if len(verdict.reason) <= limit else verdict.reason[: limit - 3] + "..."
        written = json.dumps({**encode(verdict.last_state), "reason": reason}, ensure_ascii=False).encode(
            "utf-8", "replace"
        )
        if len(written) <= MAX_BYTES:
            return written
        limit = limit * 3 // 4


def write_termination(path: pathlib.Path | None, data: bytes) -> None:
    """Write a termination message, if one is read."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.write_bytes(data[:MAX_BYTES])


def name_ranks(ranks: list[int]) -> str:
    """`rank 0`, `ranks 0, 2 and 3`."""
    words = [str(rank) for rank in sorted(ranks)]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"
