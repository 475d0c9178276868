"""How a job ended, judged from how its ranks did. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from kale_dist.contract import FailureCause, RankStateName, StateName
from kale_dist.runtime.rank_run import RankRun

BLAME_AFTER_S = 0.15
"""A rank that dies takes the others along with errors of their own; its end may be reported after theirs."""

_PEER_GONE = re.compile(r"gloo|connection (closed|reset|refused)|broken pipe|nccl|peer|socket|store", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The job's final state."""

    state: StateName
    cause: FailureCause | None
    reason: str
    """A sentence; empty if there is nothing to say."""


def rank_state(rank: RankRun, *, stopped: bool) -> RankStateName:
    """The final state of a rank that has ended.

    Args:
        rank: The rank.
        stopped: Whether the agent ended it because of something else.
    """
    if rank.done is not None:
        return RankStateName.SUCCEEDED if rank.done["ok"] else RankStateName.FAILED
    return RankStateName.STOPPED if stopped else RankStateName.FAILED


def blame(failures: Sequence[RankRun]) -> Verdict:
    """The verdict on a job with failed ranks.

    Args:
        failures: The ranks that failed or died, in the order in which the agent heard of it; at least one.
    """
    first = next((rank for rank in failures if rank.done is not None and not _lost_peer(rank)), None)
    dead = next((rank for rank in failures if rank.done is None), None)
    if dead is not None and (first is None or failures.index(dead) < failures.index(first)):
        first = dead
    return _describe(first or failures[0])


def _lost_peer(rank: RankRun) -> bool:
    """Whether a rank's error only says that it lost another rank."""
    done = rank.done or {}
    return bool(_PEER_GONE.search(done.get("error_text", ""))) and done.get("error_type", "").endswith("Error")


def _describe(rank: RankRun) -> Verdict:
    if rank.done is not None:
        text = (
            f"{rank.done['error_type']}: {rank.done['error_text']}"
            if rank.done["error_text"]
            else rank.done["error_type"]
        )
        if rank.done.get("not_started"):
            return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, f"Rank {rank.rank} could not start: {text}")
        return Verdict(StateName.FAILED, FailureCause.ERROR, f"Rank {rank.rank} failed: {text}")
    end = rank.end
    if end is None or (end.reason and end.signal is None):
        why = end.reason if end is not None else "unknown"
        return Verdict(StateName.FAILED, FailureCause.NOT_STARTED, f"Rank {rank.rank} could not be started: {why}")
    if end.reason:
        what = f"was killed because {end.reason}"
    elif end.signal is not None:
        hint = " (often because memory ran out)" if end.signal == "SIGKILL" else ""
        what = f"was killed by {end.signal}{hint}"
    else:
        what = f"ended with exit code {end.exit_code} before its function returned (os._exit, or an exit in C code)"
    last = f'. Its last lines: "{" / ".join(rank.tail)}"' if rank.tail else ", without a line of output"
    return Verdict(StateName.FAILED, FailureCause.DIED, f"Rank {rank.rank} {what}{last}")
