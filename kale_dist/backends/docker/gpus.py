"""Which GPUs a job gets: an engine knows no counts, so that each job takes the first ones that no other job holds."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
from collections.abc import Iterator

from kale_dist import records
from kale_dist.backends.docker import containers
from kale_dist.backends.docker.containers import Facts
from kale_dist.engine import Engine, explained
from kale_dist.errors import StoreError
from kale_dist.spec import JobSpec

_HOLDING = ("created", "running", "paused", "restarting")
"""States of containers whose GPUs are not free: one that was just created is about to run."""


@contextlib.contextmanager
def held(engine: Engine, spec: JobSpec, facts: Facts) -> Iterator[Facts]:
    """What the containers get, while no other kernel of this user chooses.

    Args:
        engine: Where the job goes.
        spec: The job.
        facts: What is known so far.

    Raises:
        StoreError: The lock cannot be taken.
        BackendError: The engine does not say what others hold.
    """
    wanted = containers.gpus_of(spec) * spec.topology.number_of_processes
    if not wanted:
        yield facts
        return
    path = records.state_dir() / "gpus.lock"
    try:
        file = path.open("a")
    except OSError as error:
        raise StoreError(f"{path} could not be written ({error.strerror or error}). Set XDG_STATE_HOME") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        taken = _taken(engine)
        free = (number for number in itertools.count() if number not in taken)
        yield dataclasses.replace(facts, gpus=tuple(itertools.islice(free, wanted)))


def _taken(engine: Engine) -> set[int]:
    """GPUs of all jobs on the engine that have not ended, whosever they are."""
    with explained("looking which GPUs are held"):
        found = engine.api.containers(all=True, filters={"label": containers.GPUS_LABEL, "status": list(_HOLDING)})
    numbers = ",".join(item["Labels"][containers.GPUS_LABEL] for item in found)
    return {int(number) for number in numbers.split(",") if number.isdecimal()}
