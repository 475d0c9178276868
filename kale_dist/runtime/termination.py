"""The last words of a pod: what its termination message says, and its exit code. Standard library only."""

from __future__ import annotations

import contextlib
import json
import pathlib

from kale_dist.contract import StateName
from kale_dist.runtime.ending import Verdict

MAX_BYTES = 4096
"""A kubelet reads no more of a termination message."""

EXIT_OURS = 70
"""Our own code failed; as EX_SOFTWARE."""

EXIT_TOLD_TO_END = 143
"""128 + SIGTERM."""


def exit_code(verdict: Verdict, *, told_to_end: bool) -> int:
    """The exit code of a pod whose job has ended so.

    Args:
        verdict: How the job has ended.
        told_to_end: Whether the pod got SIGTERM.
    """
    if verdict.state is StateName.SUCCEEDED:
        return 0
    return EXIT_TOLD_TO_END if told_to_end else 1


def message(verdict: Verdict) -> bytes:
    """The verdict as JSON of at most `MAX_BYTES`: state, cause, rank, error_type, message, last_line."""
    limit = MAX_BYTES
    while True:
        said = {
            "state": str(verdict.state),
            "cause": str(verdict.cause or ""),
            "rank": verdict.rank,
            "error_type": verdict.error_type[:200],
            "message": _cut(verdict.reason, limit),
            "last_line": _cut(verdict.last_line, limit // 8),
        }
        encoded = json.dumps(said, ensure_ascii=False).encode("utf-8", "replace")
        if len(encoded) <= MAX_BYTES:
            return encoded
        limit = limit * 3 // 4


def write(path: pathlib.Path | None, data: bytes) -> None:
    """Write a termination message, if anybody reads it."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.write_bytes(data[:MAX_BYTES])


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(0, limit - 3)] + "..."
