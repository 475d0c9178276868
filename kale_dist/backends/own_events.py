"""What a backend itself writes into a job's mirror, where no agent can speak: how the job has ended, and remarks."""

from __future__ import annotations

import time

from kale_dist.backends.mirror import Mirror
from kale_dist.contract import EventKind
from kale_dist.status import JobStatus


def record_ranks(mirror: Mirror, status: JobStatus) -> None:
    """Keep how each rank has ended."""
    for replica in status.replicas:
        mirror.record_event(
            {
                "event": EventKind.RANK, "time": time.time(), "rank": replica.rank, "attempt": status.attempt,
                "state": str(replica.state), "pid": None, "exit_code": replica.exit_code, "signal": replica.signal,
            }
        )  # fmt: skip


def record_state(mirror: Mirror, status: JobStatus) -> None:
    """Let everybody see the job's state, and the log its reason."""
    mirror.say(status.reason)
    mirror.record_event(
        {
            "event": EventKind.STATE, "time": time.time(), "rank": None, "attempt": status.attempt,
            "state": str(status.state), "reason": status.reason, "cause": str(status.cause or ""),
            "failed_rank": status.failed_rank,
        }
    )  # fmt: skip


def record_note(mirror: Mirror, text: str, attempt: int) -> None:
    """Add a remark to the status and to the log."""
    mirror.say(text)
    mirror.record_event({"event": EventKind.NOTE, "time": time.time(), "rank": None, "attempt": attempt, "text": text})
