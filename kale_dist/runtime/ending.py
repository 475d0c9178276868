"""How a job ended, judged from how its ranks did. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from kale_dist.contract import FailureCause, RankStateName, StateName
from kale_dist.runtime.rank_run import Rank

BLAME_AFTER_S = 0.15
"""A rank that dies takes the others along with errors of their own; its end may be reported after theirs."""

BLAME_FAR_AFTER_S = 0.5
"""The same where ranks run in several pods."""

_PEER_GONE = re.compile(r"gloo|connection (closed|reset|refused)|broken pipe|nccl|peer|socket|store", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The job's final state."""

    state: StateName
    cause: FailureCause | None
    reason: str
    """A sentence; empty if there is nothing to say."""
    rank: int | None = None
    """The rank that failed first; None if none has, or if nobody can tell."""
    error_type: str = ""
    """Of its exception, if it raised one."""
    error_text: str = ""
    last_line: str = ""
    """The last line it wrote, if it died."""
    may_restart: bool = False
    """Whether another attempt could end otherwise: a rank was lost, and not for want of memory."""


def rank_state(rank: Rank, *, stopped: bool) -> RankStateName:
    """The final state of a rank that has ended.

    Args:
        rank: The rank.
        stopped: Whether the agent ended it because of something else.
    """
    if rank.done is not None:
        return RankStateName.SUCCEEDED if rank.done["ok"] else RankStateName.FAILED
    return RankStateName.STOPPED if stopped else RankStateName.FAILED


def blame(failures: Sequence[Rank]) -> Verdict:
    """The verdict on a job with failed ranks.

    Args:
        failures: The ranks that failed or died, in the order in which the agent heard of it; at least one.
    """
    first = next((rank for rank in failures if rank.done is not None and not lost_peer(rank)), None)
    dead = next((rank for rank in failures if rank.done is None), None)
    if dead is not None and (first is None or failures.index(dead) < failures.index(first)):
        first = dead
    return _describe(first or failures[0])


def lost_peer(rank: Rank) -> bool:
    """Whether a rank's error only says that it lost another rank."""
    done = rank.done or {}
    return bool(_PEER_GONE.search(done.get("error_text", ""))) and done.get("error_type", "").endswith("Error")


def _describe(rank: Rank) -> Verdict:
    if rank.done is not None:
        return _describe_error(rank.rank, rank.done)
    end = rank.end
    if end is None or (end.reason and end.signal is None):
        why = end.reason if end is not None else "unknown"
        return _failed(FailureCause.NOT_STARTED, f"Rank {rank.rank} could not be started: {why}", rank)
    if end.reason:
        what = f"was killed because {end.reason}"
    elif end.memory_limit:
        what = f"was killed because memory ran out (its container has {end.memory_limit})"
    elif end.signal is not None:
        hint = " (often because memory ran out)" if end.signal == "SIGKILL" else ""
        what = f"was killed by {end.signal}{hint}"
    else:
        what = f"ended with exit code {end.exit_code} before its function returned (os._exit, or an exit in C code)"
    last = f'. Its last lines: "{" / ".join(rank.tail)}"' if rank.tail else ", without a line of output"
    remedy = (
        ". Ask for more memory, or use less (smaller batches, fewer DataLoader workers)" if end.memory_limit else ""
    )
    verdict = _failed(FailureCause.DIED, f"Rank {rank.rank} {what}{last}{remedy}", rank)
    return dataclasses.replace(verdict, may_restart=not end.memory_limit)


def _describe_error(rank: int, done: dict[str, Any]) -> Verdict:
    kind, text = str(done["error_type"]), str(done["error_text"])
    shown = f"{kind}: {text}" if text else kind
    cause, what = FailureCause.ERROR, "failed"
    if done.get("not_started"):
        cause, what = FailureCause.NOT_STARTED, "could not start"
    return Verdict(StateName.FAILED, cause, f"Rank {rank} {what}: {shown}", rank=rank, error_type=kind, error_text=text)


def _failed(cause: FailureCause, reason: str, rank: Rank) -> Verdict:
    return Verdict(StateName.FAILED, cause, reason, rank=rank.rank, last_line=rank.tail[-1] if rank.tail else "")
