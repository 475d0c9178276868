"""Docker engines: connections to them, the network that jobs share, and which GPUs are free."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import os
import threading
from collections.abc import Iterator

import docker.errors

from kale_dist import engine, records
from kale_dist.backends.docker import containers
from kale_dist.backends.docker.containers import Facts
from kale_dist.engine import Engine, explained
from kale_dist.errors import StoreError
from kale_dist.spec import JobSpec

_HOLDING = ("created", "running", "paused", "restarting")
"""States of containers whose GPUs are not free: one that was just created is about to run."""

_DEFAULT_USER = 1000
_CONFLICT = 409

_lock = threading.Lock()
_engines: dict[str, Engine] = {}


def connect(url: str = "") -> Engine:
    """The engine at a place; one connection for each that this process has spoken to.

    Args:
        url: Such as `unix:///var/run/docker.sock`; empty for the one that a new job would go to.

    Raises:
        BackendUnavailableError: It cannot be reached.
    """
    # What it says may change within a process, and with it which engine is meant.
    name = url or f"as configured by {os.environ.get('DOCKER_HOST', '')} {os.environ.get('DOCKER_CONTEXT', '')}"
    with _lock:
        found = _engines.get(name)
        if found is None:
            made = engine.connect(url or None)
            found = _engines[name] = _engines.setdefault(made.url, made)
            if found is not made:
                made.close()
        return found


def disconnect() -> None:
    """Close all connections; the next call makes new ones."""
    with _lock:
        known = set(_engines.values())
        _engines.clear()
    for found in known:
        found.close()


def facts_of(engine: Engine) -> Facts:
    """What the engine's machine decides for all jobs."""
    cores = int(engine.info.get("NCPU") or 0) or None
    submitter = records.identity()
    if engine.is_rootless or engine.is_podman:
        # Root in there is the engine's own user out here; any other number is one that owns nothing.
        return Facts(user="0:0", cores=cores, submitter=submitter)
    if engine.is_local:
        groups = tuple(sorted(set(os.getgroups()) - {os.getgid()}))
        return Facts(user=f"{os.getuid()}:{os.getgid()}", groups=groups, cores=cores, submitter=submitter)
    return Facts(user=f"{_DEFAULT_USER}:{_DEFAULT_USER}", cores=cores, submitter=submitter)


def ensure_network(engine: Engine) -> None:
    """Have the network that all jobs share. It stays: a job that is just being started may need it.

    Raises:
        BackendError: The engine has none and makes none.
    """
    with explained(f"creating the network {containers.NETWORK}"):
        with contextlib.suppress(docker.errors.NotFound):
            engine.api.inspect_network(containers.NETWORK)
            return
        try:
            engine.api.create_network(containers.NETWORK, driver="bridge", check_duplicate=True)
        except docker.errors.APIError as error:
            if error.status_code != _CONFLICT:
                raise


@contextlib.contextmanager
def gpus_held(engine: Engine, spec: JobSpec, facts: Facts) -> Iterator[Facts]:
    """The facts with a job's GPUs: the first ones that no other job holds, for an engine knows no counts.

    Args:
        engine: Where the job goes.
        spec: The job.
        facts: What is known so far.

    Raises:
        StoreError: The lock that keeps this user's other kernels from choosing meanwhile cannot be taken.
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
        with explained("looking which GPUs are held"):
            found = engine.api.containers(all=True, filters={"label": containers.GPUS_LABEL, "status": list(_HOLDING)})
        numbers = ",".join(item["Labels"][containers.GPUS_LABEL] for item in found).split(",")
        taken = {int(number) for number in numbers if number.isdecimal()}
        free = (number for number in itertools.count() if number not in taken)
        yield dataclasses.replace(facts, gpus=tuple(itertools.islice(free, wanted)))
