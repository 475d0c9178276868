"""A job's profile in the notebook: a table of the parts of a training step, and the ranks' traces."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

from kale_dist.errors import ConfigError, ResultUnavailableError
from kale_dist.job import view
from kale_dist.job.status import JobStatus


class Profile:
    """Where the time of a step goes, in each rank. Made by `job.profile()`.

    Args:
        status: The job's status.
        results: Waits for the job's success, and returns the ranks' results.
    """

    def __init__(self, status: JobStatus, results: Callable[[], list[Any]]) -> None:
        self._status = status
        self._results = results

    @property
    def rows(self) -> list[dict[str, float]]:
        """One row for each rank: `pandas.DataFrame(job.profile().rows)` makes a table.

        A row has `rank`, `steps` (how many were measured) and seconds a step: `step_s`, of which `data_s`, `forward_s`, `backward_s`,
        `exchange_s` and `optimizer_s` are parts.
        """
        found = {row.rank: row for row in self._status.metrics if row.source == "profile" and row.rank is not None}
        return [{"rank": rank, **dict(found[rank].values)} for rank in sorted(found)]

    def trace(self, rank: int = 0, path: str | os.PathLike[str] | None = None) -> pathlib.Path:
        """Write a rank's trace to a file, for Perfetto (https://ui.perfetto.dev) or `chrome://tracing`. Waits for the job's success.

        Args:
            rank: The rank.
            path: The file; None for `trace-RANK.json.gz` in the working folder. It is compressed by gzip.

        Returns:
            The absolute path.

        Raises:
            ConfigError: There is no such rank.
            ResultUnavailableError: The rank has no trace.
            JobError: As `job.result`.
        """
        results = self._results()
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(results):
            raise ConfigError("rank", f"the job has no rank {rank!r}", f"Its ranks are 0 to {len(results) - 1}")
        if results[rank].trace is None:
            raise ResultUnavailableError(f"Rank {rank} of {self._status.ref} has no trace", self._status.ref)
        file = pathlib.Path(f"trace-{rank}.json.gz" if path is None else path).expanduser().absolute()
        file.write_bytes(results[rank].trace)
        return file

    def __repr__(self) -> str:
        """The table as text."""
        return "\n".join(view.profile_text(self._status))

    def _repr_html_(self) -> str:
        return view.profile_html(self._status)
