"""The Docker engine as a place: one container has all ranks of a job; input and results are copied as archives."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import docker.errors

from kale_dist import wire
from kale_dist.errors import BackendError, ConfigError, JobExistsError, JobNotFoundError, StoreError, warn
from kale_dist.image.engine import Engine, explained
from kale_dist.image.tar import TarEntry, tar
from kale_dist.job import records
from kale_dist.job.backend import HeadConnection, JobRef, Look, Part, Place, PlacedJob, Trouble
from kale_dist.job.records import FIRST_LIFE, Life
from kale_dist.job.spec.job_spec import JobSpec, VolumeKind
from kale_dist.job.status import JobStatus, ReplicaStatus
from kale_dist.places.docker import archive, containers, engines
from kale_dist.places.docker.containers import MachineFacts
from kale_dist.places.docker.explain import ContainerEnd, explain
from kale_dist.places.following.head_client import HeadClient, send_missing
from kale_dist.places.manifests.object_settings import HOME_FOLDER, INPUT_FOLDER, PORT, WORK_FOLDER
from kale_dist.wire.blobs import FolderStore, pack_blobs, unpack_blobs
from kale_dist.wording import listing, untrusted
from kale_dist.worker.rank import process_state

_CONNECT_S = 1.0
"""A container on this machine answers or refuses within milliseconds. If none answers, the connection goes through the engine."""

_NOT_FOUND, _CONFLICT = 404, 409
_ENDED = ("exited", "dead", "removing")
_WORDS = 20
_PIECE_BYTES = 1 << 20
_FRAME = struct.Struct(">BxxxI")

_BRIDGE = """
import os, socket, sys, threading
port = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def up():
    while data := os.read(0, 1 << 17):
        port.sendall(data)
    port.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := port.recv(1 << 17):
    view = memoryview(data)
    while view:
        view = view[os.write(1, view):]
"""
"""A program run by exec in a container: it connects its standard streams to the port in its first argument."""


class DockerPlace(Place):
    """Containers on a Docker engine, rootless Docker or Podman. Safe to use from threads."""

    name = "docker"
    noun = "container"

    settle = staticmethod(engines.settle)
    render = staticmethod(containers.render)
    object_name = staticmethod(containers.object_name)

    def __init__(self) -> None:
        self._bridged: set[str] = set()

    def volumes(self) -> Sequence[str]:
        """Names of the engine's volumes."""
        engine = engines.connect()
        with explained("listing volumes"):
            return sorted(volume["Name"] for volume in engine.api.volumes()["Volumes"] or ())

    def close(self) -> None:
        """Close the connections to engines."""
        engines.disconnect()

    def order(self, spec: JobSpec, life: Life) -> wire.Order:
        """The order of a job in warm containers, which cannot be read after its end."""
        flags = process_state.read_flags(cuda=spec.cuda)
        return dataclasses.replace(containers.make_order(spec, life, flags), work_is_kept=False)

    # -- starting -----------------------------------------------------------------------------------------------------

    def start(
        self, spec: JobSpec, key: bytes, life: Life = FIRST_LIFE, checkpoint: pathlib.Path | None = None
    ) -> PlacedJob:
        """Create a job's container, copy its input into it, and start it. After an error none is left."""
        engine = engines.connect()
        order = containers.make_order(spec, life, process_state.read_flags(cuda=spec.cuda))
        files: dict[str, bytes | pathlib.Path] = {
            wire.InputFiles.RUNTIME: wire.payload.runtime_zip(),
            wire.InputFiles.KEY: key,
            wire.InputFiles.ORDER: wire.encode_json(order),
        }
        if spec.snapshot_bytes <= containers.INPUT_BYTES:
            files[wire.InputFiles.SNAPSHOT] = pack_blobs(FolderStore(records.blobs_dir()), spec.blobs)
        if checkpoint is not None:
            files[wire.InputFiles.CHECKPOINT] = checkpoint
        engines.ensure_network(engine)
        fresh = _fresh_volumes(engine, spec)
        handle = _handle(engine, spec, life.number)
        name, identifier = _name(handle), ""
        try:
            with engines.gpus_held(engine, spec, engines.facts_of(engine)) as facts:
                with explained(f"creating the container {name} from {spec.image}"):
                    identifier = _create(engine, spec, name, containers.container(spec, life.number, facts))
                with explained(f"copying the job's input into the container {name}"):
                    engine.api.put_archive(identifier, "/", tar(_input(spec, facts, files, fresh)))
                with explained(f"starting the container {name} from {spec.image}"):
                    engine.api.start(identifier)
        except BaseException:
            if identifier:
                _remove(engine, identifier)
            raise
        return handle

    def send_input(self, handle: PlacedJob, key: bytes, on_progress: Callable[[str], None]) -> None:
        """Send the packages that the image lacks. The snapshot was in the container before it started."""
        if handle.spec.offer.packages:
            head = HeadClient(lambda: self.connect(handle), key)
            send_missing(head, handle.spec, head.missing(), on_progress, is_fresh=handle.life == 1)

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self, handle: PlacedJob) -> Look:
        """The state of the job's container."""
        engine = _engine(handle)
        with explained(f"looking at the container of {handle.ref}"):
            try:
                part = _part(engine, engine.api.inspect_container(_name(handle)))
            except docker.errors.NotFound:
                return Look(gone=True)
        if part.lost and (person := _read(engine, part.uid, containers.CANCELLED_FILE).decode(errors="replace")):
            trouble = Trouble(sentence=f"The job was cancelled by {person}", cause=wire.FailureCause.USER)
            return Look(parts=(part,), trouble=trouble, finished="cancelled")
        return Look(parts=(part,), trouble=part.trouble)

    def survey(self, namespace: str | None, labels: Mapping[str, str]) -> Sequence[JobStatus]:
        """Statuses of the jobs on the engine, oldest first."""
        if namespace is not None or labels:
            argument = "namespace" if namespace is not None else "labels"
            raise ConfigError(argument, "jobs on a Docker engine have none", "Leave it out")
        engine = engines.connect()
        with explained("listing containers"):
            found = engine.api.containers(all=True, filters={"label": containers.JOB_LABEL})
        return [_surveyed(item) for item in sorted(found, key=lambda item: item["Created"])]

    # -- bytes --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def head_output(self, handle: PlacedJob, *, follow: bool) -> Iterator[Iterator[bytes]]:
        """The container's output. Of one that has ended the whole log and all events come first, from its folder."""
        engine, name = _engine(handle), _name(handle)
        with explained(f"reading the output of {name}"):
            is_over = not follow and engine.api.inspect_container(name)["State"]["Status"] in _ENDED
            stream = engine.api.logs(name, stream=True, follow=follow)
            try:
                yield itertools.chain(self._kept(handle), stream) if is_over else stream
            finally:
                with contextlib.suppress(Exception):
                    stream.close()

    def _kept(self, handle: PlacedJob) -> Iterator[bytes]:
        with contextlib.suppress(BackendError), tempfile.TemporaryDirectory(prefix="kale-dist-") as folder:
            files = wire.JobFiles(folder)
            for log in (files.older_log, files.log):
                if self.fetch(handle, log.name, log):
                    with log.open("rb") as file:
                        blocks = wire.BlockReader()
                        while piece := file.read(_PIECE_BYTES):
                            # The last block may be torn.
                            yield b"".join(
                                one.encode() for one in blocks.feed(piece) if isinstance(one, wire.LineBlock)
                            )
            if self.fetch(handle, files.events.name, files.events):
                for number, event in enumerate(wire.decode_json_lines(files.events.read_bytes())):
                    yield wire.encode_event(number, event)

    def last_words(self, handle: PlacedJob, part: Part, limit: int) -> bytes:
        """The end of a container's output."""
        with explained(f"reading the output of {part.name}"):
            written: bytes = _engine(handle).api.logs(part.uid, tail=limit // 50)
        return written[-limit:]

    def connect(self, handle: PlacedJob) -> HeadConnection:
        """Connect to the container's agent: directly where its network is this machine's, else through the engine."""
        engine, name = _engine(handle), _name(handle)
        with explained(f"connecting to {name}"):
            within = engine.api.inspect_container(name)["NetworkSettings"]["Networks"]
        address = next((str(each["IPAddress"]) for each in within.values() if each.get("IPAddress")), "")
        if engine.is_local and address and engine.url not in self._bridged:
            try:
                return socket.create_connection((address, PORT + 2), _CONNECT_S)
            except ConnectionRefusedError as error:
                raise BackendError(f"The agent in {name} does not listen yet", retryable=True) from error
            except OSError:
                # The networks of rootless engines and of virtual machines cannot be reached from this machine.
                self._bridged.add(engine.url)
        with explained(f"connecting to {name}"):
            made = engine.api.exec_create(name, ["python3", "-P", "-c", _BRIDGE, str(PORT + 2)], stdin=True)["Id"]
            return _Bridge(engine.api.exec_start(made, socket=True))

    def fetch(self, handle: PlacedJob, name: str, target: pathlib.Path) -> bool:
        """Copy a file out of the container, even after its end."""
        engine, container = _engine(handle), _name(handle)
        with explained(f"fetching {name} from the container {container}"):
            try:
                stream, _ = engine.api.get_archive(container, f"{WORK_FOLDER}/job/{handle.name_at_head(name)}")
            except docker.errors.NotFound:
                return False
            with contextlib.closing(stream):
                archive.save_file(stream, target)
        return True

    # -- ending -------------------------------------------------------------------------------------------------------

    def kill(self, handle: PlacedJob, grace_s: float, why: str = "", *, head_leaves: bool = False) -> None:
        """End the job's container, unless it ends by itself; the engine sends SIGKILL when the grace is over."""
        if head_leaves:
            return
        engine, name = _engine(handle), _name(handle)

        def stop() -> None:
            with contextlib.suppress(Exception):
                engine.api.stop(name, timeout=max(1, round(grace_s)))

        with explained(f"ending the container {name}"):
            if not why:
                mark = TarEntry(path=containers.CANCELLED_FILE, content=records.identity().encode(), mode=0o444)
                with contextlib.suppress(docker.errors.APIError):
                    engine.api.put_archive(name, "/", tar([mark]))
            if grace_s > 0:
                # No daemon: a process that ends now would take the request along.
                threading.Thread(target=stop).start()
            else:
                with contextlib.suppress(docker.errors.APIError):
                    engine.api.kill(name)

    def remove(self, handle: PlacedJob) -> None:
        """Remove the job's container and its files."""
        _remove(_engine(handle), _name(handle))

    # -- adoption -----------------------------------------------------------------------------------------------------

    def adopt(self, ref: JobRef, *, trust: bool | None) -> tuple[PlacedJob, bytes | None]:
        """Find a job on the engine: a label has its specification, the container's input its key and snapshot."""
        engine = engines.connect()
        with explained(f"looking for {ref}"):
            found = engine.api.containers(all=True, filters={"label": f"{containers.JOB_LABEL}={ref.name}"})
        if not found:
            raise JobNotFoundError(
                f"There is no job {ref.name!r} on the Docker engine at {engine.url}. {listing(self.name)}"
            )
        try:
            newest = max(found, key=lambda item: int(item["Labels"][containers.RUN_LABEL]))
            life = int(newest["Labels"][containers.RUN_LABEL])
            spec = JobSpec.from_json(json.loads(newest["Labels"][containers.SPEC_LABEL]))
        except (KeyError, ValueError, TypeError) as error:
            raise JobNotFoundError(
                f"{ref} was not submitted by kale_dist, or by a version that this one does not understand ({error})"
            ) from error
        handle = _handle(engine, dataclasses.replace(spec, name=ref.name), life)
        if not trust:
            if trust is not None:
                warn(untrusted(ref))
            return handle, None
        key = _read(engine, newest["Id"], f"{INPUT_FOLDER}/{wire.InputFiles.KEY}")
        if key and (packed := _read(engine, newest["Id"], f"{INPUT_FOLDER}/{wire.InputFiles.SNAPSHOT}")):
            # `job.model` is built from the snapshot.
            unpack_blobs(packed, records.blobs_dir())
        return handle, key or None


class _Bridge:
    """A connection to a program in a container: its streams, in frames of the engine's."""

    def __init__(self, stream: Any) -> None:
        # Depending on the engine, docker-py returns the socket or a file around it.
        self._stream = stream
        self._socket = getattr(stream, "_sock", stream)
        self._left = 0
        self._is_output = True

    def sendall(self, data: bytes, /) -> None:
        self._socket.sendall(data)

    def recv(self, size: int, /) -> bytes:
        while True:
            while not self._left:
                header = self._exactly(_FRAME.size)
                if not header:
                    return b""
                kind, self._left = _FRAME.unpack(header)
                self._is_output = kind == 1
            data: bytes = self._socket.recv(min(size, self._left))
            self._left -= len(data)
            if self._is_output or not data:
                return data

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                return b""
            data += piece
        return data

    def settimeout(self, seconds: float | None, /) -> None:
        self._socket.settimeout(seconds)

    def shutdown(self, how: int, /) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def close(self) -> None:
        self.shutdown(socket.SHUT_RDWR)
        # docker-py also keeps the response that the socket came from.
        for held in (self._stream, getattr(self._stream, "_response", self._stream), self._socket):
            with contextlib.suppress(Exception):
                held.close()


def _engine(handle: PlacedJob) -> Engine:
    return engines.connect(handle.get("engine"))


def _handle(engine: Engine, spec: JobSpec, life: int) -> PlacedJob:
    return PlacedJob(
        ref=JobRef("docker", spec.name),
        object=containers.object_name(spec.name, life),
        life=life,
        spec=spec,
        place=(("engine", engine.url),),
    )


def _name(handle: PlacedJob) -> str:
    return containers.container_name(handle.spec.name, handle.life)


def _surveyed(item: Mapping[str, Any]) -> JobStatus:
    """The status of a job from its container, as the engine lists it."""
    labels = item["Labels"]
    state = wire.StateName.RUNNING if item["State"] == "running" else wire.StateName.PENDING
    if item["State"] in _ENDED:
        state = wire.StateName.SUCCEEDED if str(item["Status"]).startswith("Exited (0)") else wire.StateName.FAILED
    world_size = 0
    # Another version of kale_dist may have written it.
    with contextlib.suppress(KeyError, ValueError, TypeError):
        world_size = int(json.loads(labels[containers.SPEC_LABEL])["topology"]["number_of_processes"])
    return JobStatus(
        ref=str(JobRef("docker", labels[containers.JOB_LABEL])),
        state=state,
        created=float(item["Created"]),
        replicas=tuple(ReplicaStatus(rank=rank) for rank in range(world_size)),
    )


def _part(engine: Engine, detail: Mapping[str, Any]) -> Part:
    """A container with why it ended or does not run, from how the engine describes it."""
    state, identifier, name = detail["State"], str(detail["Id"]), str(detail["Name"]).lstrip("/")
    status, exit_code = str(state["Status"]), int(state.get("ExitCode") or 0)
    has_ended = status in _ENDED
    end = ContainerEnd(
        name=name, status=status, exit_code=exit_code, is_out_of_memory=bool(state.get("OOMKilled")),
        error=str(state.get("Error") or ""), memory_bytes=int((detail.get("HostConfig") or {}).get("Memory") or 0),
        last_line=_last_line(engine, identifier) if has_ended and exit_code else "",
    )  # fmt: skip
    trouble, lost = explain(end)
    message = b""
    if has_ended:
        with contextlib.suppress(BackendError, StoreError):
            message = _read(engine, identifier, containers.TERMINATION_FILE)
    return Part(
        number=0, name=name, uid=identifier,
        state="ended" if has_ended else "waiting" if status == "created" else "running",
        exit_code=exit_code if has_ended else None, message=message.decode(errors="replace"), trouble=trouble, lost=lost,
    )  # fmt: skip


def _last_line(engine: Engine, identifier: str) -> str:
    """The last line of a container's output that is no block of its agent; a line of the bootstrap if there is one."""
    with contextlib.suppress(docker.errors.APIError):
        written = engine.api.logs(identifier, tail=_WORDS).decode(errors="replace").splitlines()
        plain = [line for line in written if line.strip() and line[:1] not in "@=~*|!#+{"]
        own = [line.removeprefix("kale_dist: ") for line in plain if line.startswith("kale_dist: ")]
        return str((own or plain or [""])[-1])
    return ""


def _read(engine: Engine, container: str, path: str) -> bytes:
    """Read a small file of a container; empty if there is none."""
    with explained(f"reading {path} of a container"), contextlib.suppress(docker.errors.NotFound, StoreError):
        stream, _ = engine.api.get_archive(container, path)
        with contextlib.closing(stream):
            return archive.read_file(stream)
    return b""


def _create(engine: Engine, spec: JobSpec, name: str, body: dict[str, Any]) -> str:
    try:
        return str(engine.api.create_container_from_config(body, name=name)["Id"])
    except docker.errors.APIError as error:
        if error.status_code != _CONFLICT:
            raise
        raise JobExistsError(
            f"name: the Docker engine at {engine.url} has a container {name} already. Choose another name, "
            f"or remove the old job: kale-dist delete docker://{spec.name}"
        ) from error


def _input(
    spec: JobSpec, facts: MachineFacts, files: Mapping[str, bytes | pathlib.Path], fresh: Sequence[str]
) -> Iterator[TarEntry]:
    """The contents of a container before its start: folders that its user can write into, and the job's input."""
    user, _, group = facts.user.partition(":")
    own = (int(user or 0), int(group or 0))
    yield TarEntry(path="kale-dist", content=None, mode=0o755)
    for folder in (INPUT_FOLDER, WORK_FOLDER, HOME_FOLDER):
        yield TarEntry(path=folder, content=None, mode=0o700, owner=own)
    for mount in fresh:
        yield TarEntry(path=mount, content=None, mode=0o755, owner=own)
    for name, data in files.items():
        yield TarEntry(path=f"{INPUT_FOLDER}/{name}", content=data, mode=0o400, owner=own)
    if wire.InputFiles.SNAPSHOT not in files:
        store, inside = FolderStore(records.blobs_dir()), pathlib.PurePosixPath(WORK_FOLDER, "blobs")
        targets = {inside / (path := store.path(digest)).relative_to(store.root): path for digest in spec.blobs}
        for parent in dict.fromkeys((inside, *(target.parent for target in targets))):
            yield TarEntry(path=str(parent), content=None, mode=0o700, owner=own)
        for target, path in targets.items():
            yield TarEntry(path=str(target), content=path, mode=0o444, owner=own)


def _fresh_volumes(engine: Engine, spec: JobSpec) -> tuple[str, ...]:
    """Paths of named volumes that the engine will create: without a folder of the job's user they would belong to root."""
    named = [volume for volume in spec.volumes if volume.kind is not VolumeKind.FOLDER and not volume.read_only]
    if not named:
        return ()
    with explained("listing volumes"):
        there = {volume["Name"] for volume in engine.api.volumes()["Volumes"] or ()}
    return tuple(volume.mount_path for volume in named if volume.source not in there)


def _remove(engine: Engine, container: str) -> None:
    """Remove a container, which may be gone already, or on its way because another process removes it."""
    with explained("removing a container"):
        try:
            engine.api.remove_container(container, v=True, force=True)
        except docker.errors.APIError as error:
            if error.status_code not in (_NOT_FOUND, _CONFLICT):
                raise
