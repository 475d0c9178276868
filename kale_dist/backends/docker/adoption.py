"""Jobs that this machine has no record of: listed from the engine, and taken over into a record."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any

import docker.errors

from kale_dist import records, transport
from kale_dist.backends.base import JobRef
from kale_dist.backends.docker import archive, connection, containers, submission, views
from kale_dist.engine import Engine, explained
from kale_dist.errors import JobExistsError, JobNotFoundError, StoreError, warn
from kale_dist.manifests.settings import INPUT_FOLDER
from kale_dist.pod_order import InputFiles
from kale_dist.records import Record
from kale_dist.spec import JobSpec


def select(engine: Engine) -> Sequence[JobRef]:
    """References of this library's jobs on an engine, oldest first.

    Raises:
        BackendError: The engine refused.
    """
    with explained("listing containers"):
        found = engine.api.containers(all=True, filters={"label": containers.JOB_LABEL})
    made: dict[str, int] = {}
    for item in found:
        name = item["Labels"][containers.JOB_LABEL]
        made[name] = min(item["Created"], made.get(name, item["Created"]))
    return [JobRef("docker", name) for name in sorted(made, key=lambda name: (made[name], name))]


def adopt(engine: Engine, ref: JobRef, *, trust: bool | None) -> None:
    """Make a record of a job that is on the engine.

    Args:
        engine: Where.
        ref: The job.
        trust: Whether its key is taken although another user submitted it; None leaves the key where it is.

    Raises:
        JobNotFoundError: There is no such job, or it is not one of this library's.
        BackendError: The engine refused.
    """
    detail = _read_job(engine, ref)
    labels = detail["Config"].get("Labels") or {}
    try:
        spec = JobSpec.from_json(json.loads(labels[containers.SPEC_LABEL]))
    except (KeyError, ValueError, TypeError) as error:
        raise JobNotFoundError(
            f"{ref} was not submitted by kale_dist, or by a version that this one does not understand ({error})"
        ) from error
    key = b"" if trust is None else _read_input(engine, detail["Id"], InputFiles.KEY)
    submitter = labels.get(containers.SUBMITTED_BY_LABEL, "")
    if key and submitter != submission.identity() and not trust:
        key = b""
        warn(
            f"{ref} was submitted by {submitter or 'an unknown user'}, and to load its result can run code of theirs: "
            "status and logs are shown, results are not. kale_dist.attach(ref, trust=True) loads them too"
        )
    if records.exists(ref.record_name):
        if not key:
            return
        records.withdraw(ref.record_name)
    with records.keeping_blobs(), contextlib.suppress(JobExistsError):
        records.create(ref.record_name, key)
        if key and (packed := _read_input(engine, detail["Id"], InputFiles.SNAPSHOT)):
            # The model can then be built again from here.
            transport.unpack_blobs(packed, records.blobs_dir())
        records.write(
            Record(
                ref=str(ref), name=ref.record_name, created=views.created(detail), spec=spec, kernel_pid=os.getpid(),
                detach=True, place=connection.place(engine),
            )
        )  # fmt: skip


def _read_job(engine: Engine, ref: JobRef) -> dict[str, Any]:
    with explained(f"looking for {ref}"):
        try:
            detail: dict[str, Any] = engine.api.inspect_container(containers.container_name(ref.name, 0))
        except docker.errors.NotFound:
            raise JobNotFoundError(
                f"There is no job {ref.name!r} on the Docker engine at {engine.url}. kale_dist.jobs(on='docker') lists "
                "those there are"
            ) from None
    return detail


def _read_input(engine: Engine, container: str, name: str) -> bytes:
    """A file of the job's input; empty if it is not there."""
    with explained(f"reading {name} of a container"), contextlib.suppress(docker.errors.NotFound, StoreError):
        stream, _ = engine.api.get_archive(container, f"{INPUT_FOLDER}/{name}")
        with contextlib.closing(stream):
            return archive.read_file(stream)
    return b""
