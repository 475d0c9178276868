"""From a settled specification to running containers: created with their input in them, then started, the first one first."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import getpass
import os
import pathlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import docker.errors

from kale_dist import payload, records, transport
from kale_dist.backends.docker import archive, containers, gpus
from kale_dist.backends.docker.archive import Entry
from kale_dist.backends.docker.containers import Facts
from kale_dist.blobs import FolderStore
from kale_dist.contract import encode_record
from kale_dist.engine import Engine, explain, explained
from kale_dist.errors import BackendError, JobExistsError
from kale_dist.manifests.settings import HOME_FOLDER, INPUT_FOLDER, WORK_FOLDER
from kale_dist.pod_order import InputFiles, Source
from kale_dist.snapshot import process
from kale_dist.spec import JobSpec, VolumeKind

_AT_ONCE = 8
"""Requests that an engine gets at the same time."""

_ATTEMPTS = 3
_CONFLICT = 409
_DEFAULT_USER = 1000

Say = Callable[[str], None]


def facts_of(engine: Engine) -> Facts:
    """What the engine's machine decides for all jobs."""
    cores = int(engine.info.get("NCPU") or 0) or None
    submitter = identity()
    if engine.is_rootless or engine.is_podman:
        # Root in there is the engine's own user out here; any other number is one that owns nothing.
        return Facts(user="0:0", cores=cores, submitter=submitter)
    if engine.is_local:
        groups = tuple(sorted(set(os.getgroups()) - {os.getgid()}))
        return Facts(user=f"{os.getuid()}:{os.getgid()}", groups=groups, cores=cores, submitter=submitter)
    return Facts(user=f"{_DEFAULT_USER}:{_DEFAULT_USER}", cores=cores, submitter=submitter)


def identity() -> str:
    """Who submits: a user of a machine."""
    person = "somebody"
    with contextlib.suppress(Exception):
        person = getpass.getuser()
    return f"{person}@{socket.gethostname()}"


def create(engine: Engine, spec: JobSpec, key: bytes) -> tuple[str, ...]:
    """Create and start a job's containers. If one cannot be, none is left.

    Args:
        engine: Where.
        spec: The job, settled.
        key: Its secret bytes.

    Returns:
        The containers' ids.

    Raises:
        JobExistsError: The name is taken.
        BackendError: The engine refused; says what and what to do.
    """
    order = containers.order_of(spec, process.capture_process(cuda=spec.cuda).torch_flags)
    files = {
        InputFiles.RUNTIME: payload.runtime_zip(),
        InputFiles.KEY: key,
        InputFiles.ORDER: encode_record(order.to_json()),
    }
    if order.source is Source.INPUT:
        files[InputFiles.SNAPSHOT] = transport.pack_blobs(FolderStore(records.blobs_dir()), spec.blobs)
    facts = facts_of(engine)
    for attempt in range(1, _ATTEMPTS + 1):
        ensure_network(engine)
        made: list[str] = []
        try:
            with gpus.held(engine, spec, facts) as settled:
                _start_all(engine, spec, settled, files, made)
        except BaseException as error:
            _remove_ids(engine, made)
            # Between two requests the last job of another process may have taken the network with it.
            if isinstance(error, BackendError) and _lost_network(error) and attempt < _ATTEMPTS:
                continue
            remove_unused_network(engine)
            raise
        return tuple(made)
    raise AssertionError("unreachable")


def ensure_network(engine: Engine) -> None:
    """Have the network that all jobs share.

    Raises:
        BackendError: The engine has none and makes none.
    """
    with explained(f"creating the network {containers.NETWORK}"):
        if engine.api.networks(names=[f"^{containers.NETWORK}$"]):
            return
        with contextlib.suppress(docker.errors.NotFound):
            engine.api.inspect_network(containers.NETWORK)
            return
        try:
            engine.api.create_network(
                containers.NETWORK, driver="bridge", check_duplicate=True, labels={containers.NETWORK_LABEL: "true"}
            )
        except docker.errors.APIError as error:
            if error.status_code != _CONFLICT:
                raise


def remove_unused_network(engine: Engine) -> None:
    """Remove the network, unless a container still has it. Another user's network of the name is left."""
    with contextlib.suppress(docker.errors.APIError):
        used = engine.api.containers(all=True, filters={"network": containers.NETWORK})
        found = engine.api.networks(filters={"label": containers.NETWORK_LABEL, "name": f"^{containers.NETWORK}$"})
        if found and not used:
            engine.api.remove_network(found[0]["Id"])


def remove(engine: Engine, job: str) -> None:
    """Remove a job's containers with what they wrote, and the network with the last of them.

    Raises:
        BackendError: The engine refused.
    """
    with explained(f"removing the containers of {job}"):
        found = engine.api.containers(all=True, filters={"label": f"{containers.JOB_LABEL}={job}"})
    _remove_ids(engine, [item["Id"] for item in found])
    remove_unused_network(engine)


def signal_all(engine: Engine, job: str, name: str) -> None:
    """Send a signal to a job's running containers. Those that end meanwhile are left at that."""
    with explained(f"ending the containers of {job}"):
        found = engine.api.containers(filters={"label": f"{containers.JOB_LABEL}={job}"})
    for item in found:
        with contextlib.suppress(docker.errors.APIError):
            engine.api.kill(item["Id"], signal=name)


def _start_all(engine: Engine, spec: JobSpec, facts: Facts, files: dict[str, bytes], made: list[str]) -> None:
    numbers = range(spec.topology.number_of_pods)
    fresh = _fresh_volumes(engine, spec)

    def make(number: int) -> str:
        name = containers.container_name(spec.name, number)
        body = containers.container(spec, number, facts)
        with explained(f"creating the container {name} from {spec.image}"):
            try:
                identifier = engine.api.create_container_from_config(body, name=name)["Id"]
            except docker.errors.APIError as error:
                if error.status_code == _CONFLICT:
                    raise JobExistsError(
                        f"name: the Docker engine at {engine.url} has a container {name} already. Choose another name, "
                        f"or remove the old job: kale-dist delete docker://{spec.name}"
                    ) from error
                raise
        made.append(identifier)
        return str(identifier)

    def run(number: int, identifier: str = "") -> None:
        identifier, name = identifier or make(number), containers.container_name(spec.name, number)
        with explained(f"copying the job's input into the container {name}"):
            engine.api.put_archive(identifier, "/", archive.pack(_input(spec, number, facts, files, fresh)))
        with explained(f"starting the container {name} from {spec.image}"):
            engine.api.start(identifier)

    # The first one is made alone: it takes the name, and if that is taken there is nothing else to undo.
    first = make(0)
    _each(lambda number: run(number, "" if number else first), numbers)


def _each(act: Callable[[Any], None], items: Sequence[Any]) -> None:
    """Do it for all, several at once; raises the first error once all have ended."""
    if not items:
        return
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kale_dist docker") as pool:
        for done in [pool.submit(act, item) for item in items]:
            done.result()


def _input(spec: JobSpec, number: int, facts: Facts, files: dict[str, bytes], fresh: Sequence[str]) -> Iterator[Entry]:
    """Folders that the container's user can write into, and the job's input."""
    user, _, group = facts.user.partition(":")
    own = (int(user or 0), int(group or 0))
    yield _folder("/kale-dist", 0o755, (0, 0))
    for folder in (INPUT_FOLDER, WORK_FOLDER, HOME_FOLDER):
        yield _folder(folder, 0o700, own)
    if number == 0:
        for mount in fresh:
            yield _folder(mount, 0o755, own)
    for name, data in files.items():
        yield Entry(path=f"{INPUT_FOLDER}/{name}".lstrip("/"), mode=0o400, data=data, owner=own)
    if number == 0 and InputFiles.SNAPSHOT not in files:
        store = FolderStore(records.blobs_dir())
        inside = pathlib.PurePosixPath(WORK_FOLDER, "blobs")
        yield _folder(str(inside), 0o700, own)
        known: set[pathlib.PurePosixPath] = {inside}
        for digest in spec.blobs:
            path = store.path(digest)
            target = inside / path.relative_to(store.root)
            if target.parent not in known:
                known.add(target.parent)
                yield _folder(str(target.parent), 0o700, own)
            yield Entry(path=str(target).lstrip("/"), mode=0o444, data=path, owner=own)


def _folder(path: str, mode: int, owner: tuple[int, int]) -> Entry:
    return Entry(path=path.lstrip("/"), mode=mode, owner=owner)


def _fresh_volumes(engine: Engine, spec: JobSpec) -> tuple[str, ...]:
    """Paths of named volumes that the engine is about to make: they would belong to root."""
    named = [volume for volume in spec.volumes if volume.kind is not VolumeKind.FOLDER and not volume.read_only]
    if not named:
        return ()
    with explained("listing volumes"):
        there = {volume["Name"] for volume in engine.api.volumes()["Volumes"] or ()}
    return tuple(volume.mount_path for volume in named if volume.source not in there)


def _remove_ids(engine: Engine, identifiers: Sequence[str]) -> None:
    def remove_one(identifier: str) -> None:
        with contextlib.suppress(docker.errors.NotFound):
            try:
                engine.api.remove_container(identifier, v=True, force=True)
            except docker.errors.APIError as error:
                # It is being removed already.
                if error.status_code != _CONFLICT:
                    raise explain(error, "removing a container") from error

    _each(functools.partial(remove_one), identifiers)


def _lost_network(error: BackendError) -> bool:
    return "network" in f"{error}" and "not found" in f"{error}"
