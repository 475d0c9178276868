"""Warm pods on the notebook's side: a place where a call that wants it runs in pods that are there, or in a set of them made for it.

A set is a job of the kind `warm`, with a record, a follower and an object of its own. A job in it has its own record and key; by its
handle the place finds the set, and in its head the job's part.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kale_dist import strategies, wire
from kale_dist.errors import BackendError, KaleDistError, say
from kale_dist.job import interrupts, records
from kale_dist.job.backend import Backend, Connection, JobRef, NoConnectionError, Place, RunHandle
from kale_dist.job.reader import JobReader
from kale_dist.job.records import Record
from kale_dist.job.spec.job_spec import WARM, Debugging, JobSpec, Policy
from kale_dist.job.status import JobStatus
from kale_dist.places.following.client import HeadClient
from kale_dist.wire import Source, StateName, payload
from kale_dist.wire.blobs import FolderStore, map_file, pack_blobs
from kale_dist.worker.agent import processes

_PACKED_BYTES = 64 << 10
"""Blobs up to this size travel with the order, so long as they are `_PACKED_TOGETHER_BYTES` at most; others each with a request of its own."""

_PACKED_TOGETHER_BYTES = 1 << 20

_WORDS = {
    "snapshot": "version of kale_dist",
    "topology": "number_of_processes",
    "keep_warm_s": "keep_warm",
    "policy": "max_restarts",
}


def prefix_of(handle: RunHandle) -> str:
    """What comes before the paths of requests about a job in warm pods."""
    return f"/jobs/{handle.get('warm_id')}" if handle.get("warm_id") else ""


class WarmPlace:
    """A place, with warm pods for the calls that want them. What is not here is the place's own.

    Args:
        place: Where pods run.
        backend: What has sets of pods made and follows them.
    """

    def __init__(self, place: Place, backend: Backend) -> None:
        self.inner = place
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    # -- starting -----------------------------------------------------------------------------------------------------

    def start(
        self, spec: JobSpec, key: bytes, *, run: int = 1, checkpoint: pathlib.Path | None = None, used_restarts: int = 0
    ) -> RunHandle:
        """Offer a run to the sets that fit, or make one, which gets it when its head runs (`send_input`)."""
        if spec.keep_warm_s is None or spec.kind == WARM:
            return self.inner.start(spec, key, run=run, checkpoint=checkpoint, used_restarts=used_restarts)
        wanted = _set_for(spec)
        more = {"used_restarts": str(used_restarts), "checkpoint": _kept(checkpoint)}
        others: list[Record] = []
        for there in self._sets(wanted):
            if _differences(wanted, there.spec):
                others.append(there)
                continue
            handle = self._handle(spec, there, run, {**more, "warm_id": secrets.token_hex(8)})
            try:
                if not self._offer(handle, key):
                    _use(self, there)
                    return handle
            except NoConnectionError:
                raise
            except BackendError:
                # Its end may not be known here yet: once it is, it is not asked any more.
                with contextlib.suppress(KaleDistError):
                    self._backend.status(JobRef.parse(there.ref))
        name = f"{WARM}-{''.join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(5))}"
        made = records.read(
            self._backend.submit(dataclasses.replace(wanted, name=name), secrets.token_bytes(32)).record_name
        )
        say(_told(made, self.inner.noun, others, wanted))
        _use(self, made)
        return self._handle(spec, made, run, {**more, "warm_id": name})

    def send_input(self, handle: RunHandle, key: bytes, on_progress: Callable[[str], None]) -> None:
        """Offer a run to the set that was made for it, whose head runs now."""
        if not prefix_of(handle):
            self.inner.send_input(handle, key, on_progress)
        elif not _is_ordered(handle) and (why := self._offer(handle, key)):
            raise BackendError(f"The warm {self.inner.noun}s {handle.get('warm')} do not take the job: {why}")

    def _offer(self, handle: RunHandle, key: bytes) -> str:
        """Send a run's order, and before it what is missing of its blobs; returns why it is not taken, empty if it is."""
        there, spec = _set_of(handle), handle.spec
        sets_key, store = records.read_key(there.ref.record_name), FolderStore(records.blobs_dir())
        if sets_key is None:
            raise BackendError(f"The key of {there.ref} is not on this machine")
        order = self.inner.order(spec, run=handle.run, used_restarts=int(handle.get("used_restarts")))
        checkpoint = handle.get("checkpoint")
        order = dataclasses.replace(
            order, head=self.inner.order(there.spec, run=1, used_restarts=0).head, source=Source.STREAM,
            blobs=(*order.blobs, *([checkpoint] if checkpoint else ())), outcomes_on_stdout=False,
            note=f"Runs in the warm {self.inner.noun}s {there.object}",
        )  # fmt: skip
        name = handle.get("warm_id")
        job = {
            "id": name, "key": wire.hidden_key(sets_key, name, key).hex(), "order": dataclasses.asdict(order),
            "checkpoint": checkpoint,
        }  # fmt: skip
        head = HeadClient(lambda: self.inner.connect(there), sets_key)
        small, room = [], _PACKED_TOGETHER_BYTES
        for digest in order.blobs:
            size = store.path(digest).stat().st_size
            if size <= min(_PACKED_BYTES, room):
                small.append(digest)
                room -= size
        packed = pack_blobs(store, small)
        while missing := (answer := head.offer(job, packed)).get("missing"):
            head.upload(store, missing)
        if "busy" not in answer:
            _ordered(handle).write_text(name)
        return str(answer.get("busy", ""))

    # -- a job in a set -----------------------------------------------------------------------------------------------

    def connect(self, handle: RunHandle) -> Connection:
        """Connect to the head; that of a set knows a job once it has its order."""
        if prefix_of(handle) and not _is_ordered(handle):
            raise BackendError(
                f"The warm {self.inner.noun}s {handle.get('warm')} do not have the job yet", retryable=True
            )
        return self.inner.connect(_set_of(handle))

    @contextlib.contextmanager
    def head_output(self, handle: RunHandle, *, follow: bool) -> Iterator[Iterator[bytes]]:
        """The head's output, in which a set writes nothing of its jobs."""
        if prefix_of(handle):
            yield iter(())
            return
        with self.inner.head_output(handle, follow=follow) as pieces:
            yield pieces

    def fetch(self, handle: RunHandle, name: str, target: pathlib.Path) -> bool:
        """Fetch a file without a connection: of a job in a set only from the store."""
        if not prefix_of(handle):
            return self.inner.fetch(handle, name, target)
        return bool(handle.spec.store) and self.inner.fetch(handle, name, target)

    def kill(self, handle: RunHandle, grace_s: float, why: str = "", *, head_leaves: bool = False) -> None:
        """End a run's pods. Those of a set only where its head cannot end the job."""
        if not (prefix_of(handle) and head_leaves):
            self.inner.kill(_set_of(handle), grace_s, why, head_leaves=head_leaves)

    def remove(self, handle: RunHandle) -> None:
        """Remove a run's objects; of one in a set nothing but what its head has of it."""
        if not prefix_of(handle):
            self.inner.remove(handle)
        elif not _is_ordered(handle):
            self.inner.kill(_set_of(handle), 0.0)
        elif key := records.read_key(handle.ref.record_name):
            head = HeadClient(lambda: self.connect(handle), key, prefix_of(handle))
            # It may have ended, or the set.
            with contextlib.suppress(KaleDistError):
                head.ack()
                head.cancel(0.0)

    def survey(self, namespace: str | None, labels: Mapping[str, str]) -> Sequence[JobStatus]:
        """The jobs of the place, and all sets of this user with their jobs."""
        found = list(self.inner.survey(namespace, labels))
        known = {status.ref for status in found}
        mine = (
            record for record in self._records()
            if (record.spec.kind == WARM or dict(record.place).get("warm")) and record.ref not in known
            and namespace in (None, "*", record.spec.cluster.namespace)
        )  # fmt: skip
        found += [_seen(record) for record in mine if not labels]
        return sorted(found, key=lambda status: status.created or 0.0)

    # -- sets ---------------------------------------------------------------------------------------------------------

    def _records(self) -> Iterator[Record]:
        return (record for record in records.all_records() if record.ref.startswith(f"{self.inner.name}://"))

    def _sets(self, wanted: JobSpec) -> Iterator[Record]:
        """This user's sets that run, the newest first."""
        for record in reversed(list(self._records())):
            there = record.spec
            if there.kind != WARM or there.cluster.namespace != wanted.cluster.namespace:
                continue
            if _seen(record).state is StateName.RUNNING and not records.canceller(records.files(record.name)):
                yield record

    def _handle(self, spec: JobSpec, there: Record, run: int, more: Mapping[str, str]) -> RunHandle:
        name = f"{spec.cluster.namespace}/{spec.name}" if spec.cluster.namespace else spec.name
        return RunHandle(
            ref=JobRef(self.inner.name, name), object=self.inner.object_name(spec.name, run), run=run, spec=spec,
            place=(*there.place, ("warm", there.spec.name), *more.items()),
        )  # fmt: skip


def _seen(record: Record) -> JobStatus:
    return JobReader(record.name, lambda _: True).status()


# The methods of `Place` that only have to look at the set in the place of the job.
def _of_set(name: str) -> Callable[..., Any]:
    def ask(self: WarmPlace, handle: RunHandle, *given: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(_set_of(handle), *given, **named)

    return ask


for _name in ("look", "listen", "last_words", "describe", "events"):
    setattr(WarmPlace, _name, _of_set(_name))


def _set_for(spec: JobSpec) -> JobSpec:
    """The specification of a set that a job fits: all that its pods are made of."""
    topology = dataclasses.replace(spec.topology, sizes=())
    return dataclasses.replace(
        spec, name=WARM, label="warm pods", kind=WARM, topology=topology, threads=None, seed=None, recipe=None,
        strategy=strategies.DDP(), saves=False, policy=Policy(max_restarts=spec.policy.max_restarts),
        debugging=Debugging(), snapshot=_library(), blobs=(), snapshot_bytes=0, resume="",
    )  # fmt: skip


@functools.cache
def _library() -> str:
    """The digest of the part of this library that runs in pods."""
    return hashlib.sha256(payload.runtime_zip()).hexdigest()


def _differences(wanted: JobSpec, there: JobSpec) -> list[str]:
    """In what a set does not fit, in the words of arguments."""
    names = [
        field.name
        for one, other in ((wanted, there), (wanted.cluster, there.cluster))
        for field in dataclasses.fields(one)
        if field.name not in ("name", "cluster") and getattr(one, field.name) != getattr(other, field.name)
    ]
    return [_WORDS.get(name, name) for name in names]


def _told(made: Record, noun: str, others: Sequence[Record], wanted: JobSpec) -> str:
    """What a set holds, for how long, how it is ended, and why another one did not do."""
    spec = made.spec
    gpus = (spec.resources.gpus or int(spec.cuda)) * spec.topology.number_of_processes
    holds = [f"{spec.topology.number_of_pods} {noun}s"]
    holds += [f"{gpus} GPUs"] if gpus else []
    holds += [f"quota of the queue {spec.cluster.queue}"] if spec.cluster.queue else []
    text = (
        f"{made.ref} is made for this call and holds {', '.join(holds)}, until no call that fits has come for "
        f"{(spec.keep_warm_s or 0.0) / 60:.3g} min. To end it before: kale-dist cancel {made.ref}"
    )
    for other in others:
        text += f". {other.ref} does not fit: another {', another '.join(_differences(wanted, other.spec))}"
    return text


def _set_of(handle: RunHandle) -> RunHandle:
    """The handle of the set that a job runs in; of any other run its own."""
    if not prefix_of(handle):
        return handle
    name = handle.get("warm")
    ref = JobRef.parse(str(handle.ref).removesuffix(handle.spec.name) + name)
    spec = dataclasses.replace(_set_for(handle.spec), name=name)
    return dataclasses.replace(handle, ref=ref, object=name, run=1, spec=spec)


def _ordered(handle: RunHandle) -> pathlib.Path:
    """The file that says which id's order the set has."""
    return records.files(handle.ref.record_name).folder / "ordered"


def _is_ordered(handle: RunHandle) -> bool:
    with contextlib.suppress(OSError):
        return _ordered(handle).read_text() == handle.get("warm_id")
    return False


def _kept(checkpoint: pathlib.Path | None) -> str:
    """Put a checkpoint beside the snapshots; gives its digest, empty for none."""
    return "" if checkpoint is None else FolderStore(records.blobs_dir()).put([map_file(checkpoint)])


# -- kernels that use a set ----------------------------------------------------------------------------------------------


def _use(place: WarmPlace, there: Record) -> None:
    """Note that a kernel with a person uses a set: the last such kernel that ends has the set end as soon as it is idle."""
    if not interrupts.is_interactive():
        return
    mark = records.files(there.name).folder / f"kernel-{os.getpid()}-{processes.start_time(os.getpid())}"
    if not mark.exists():
        mark.touch()
        atexit.register(_release, place, there, mark)


def _release(place: WarmPlace, there: Record, mark: pathlib.Path) -> None:
    mark.unlink(missing_ok=True)
    others = (other.name.split("-")[1:] for other in mark.parent.glob("kernel-*"))
    if any(processes.is_running(int(pid), int(start)) for pid, start in others):
        return
    # It may have ended, or the network may be gone: it then ends idle.
    with contextlib.suppress(KaleDistError, OSError):
        run = records.runs(there.name)[-1]
        handle = RunHandle(ref=JobRef.parse(there.ref), object=run.object, run=1, spec=there.spec, place=there.place)
        HeadClient(lambda: place.inner.connect(handle), records.read_key(there.name) or b"").ack()
