"""Several jobs at once: the list of all, which shows itself as a table, and a comparison."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import time
from typing import Any

from kale_dist.errors import JobNotFoundError, short_refusals
from kale_dist.job.handle import Job, inside
from kale_dist.job.spec.checks import one_of
from kale_dist.job.view import tables
from kale_dist.job.view.tables import Row
from kale_dist.wire import StateName, encode


class Jobs(list[Job[Any]]):
    """Jobs, oldest first. Printed, or at the end of a cell, a table of the newest; in all else a list."""

    @short_refusals
    def filter(self, *, state: str | None = None, name: str = "*") -> Jobs:
        """Those in a state and with a name.

        Args:
            state: `pending`, `starting`, `running`, `succeeded`, `failed` or `cancelled`; None for all.
            name: The job's name, in which `*` stands for anything: `train-net-*`.

        Raises:
            ConfigError: There is no such state.
        """
        one_of(state.value for state in StateName).or_(None)("state", state)
        return Jobs(
            job for job in self if fnmatch.fnmatchcase(job.name, name) and (state is None or job.status.state == state)
        )

    def __repr__(self) -> str:
        """The table as text."""
        return tables.text(*self._shown())

    def _repr_html_(self) -> str:
        return tables.html(*self._shown())

    def _shown(self) -> tuple[list[Row], int, float]:
        left_out = max(0, len(self) - tables.MAX_ROWS)
        return _rows(self[left_out:]), left_out, time.time()


class Comparison:
    """Jobs beside each other, as they are whenever it is shown.

    Args:
        jobs: The jobs, in the order in which they are shown.
    """

    def __init__(self, jobs: tuple[Job[Any], ...]) -> None:
        self.jobs = jobs

    def __repr__(self) -> str:
        """The table as text."""
        return tables.comparison_text(_rows(self.jobs))

    def _repr_html_(self) -> str:
        return tables.comparison_html(_rows(self.jobs))


def _rows(jobs: Any) -> list[Row]:
    found = []
    for job in jobs:
        # A job may be deleted meanwhile.
        with contextlib.suppress(JobNotFoundError):
            status = job.status
            created = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.created)) if status.created else ""
            found.append(Row(status=status, arguments=_arguments(job), created=created))
    return found


def _arguments(job: Job[Any]) -> dict[str, str]:
    """Arguments of a job's call, as far as this machine knows them."""
    given: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        given = json.loads(inside(job).files.arguments.read_text())
    spec, backend = job.spec, job.ref.partition("://")[0]
    given |= {"processes": spec.topology.number_of_processes, "seed": spec.seed, "on": backend}
    given |= {"max_restarts": spec.policy.max_restarts}
    given |= {"strategy": _changed(spec.strategy)} if spec.kind == "training" else {}
    return {name: f"{value:.10g}" if isinstance(value, float) else str(value) for name, value in given.items()}


def _changed(settings: Any) -> str:
    """A strategy, with the settings that are not its defaults: `FSDP(shard=2)`."""
    changed = ", ".join(f"{name}={getattr(settings, name)!r}" for name in encode(settings))
    return f"{type(settings).__name__}({changed})" if changed else type(settings).__name__
