"""Warm pods on the notebook's side: a call that wants them runs in a set of pods that is there, or in one made for it.

A set is a job of the kind `warm`, with a record, a follower and an object of its own. A job in it has a record and a key of its own; its
handle names the set.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kale_dist import strategies, wire
from kale_dist.errors import BackendError, KaleDistError, log
from kale_dist.job import interrupts, records
from kale_dist.job.backend import (
    Backend,
    HeadConnection,
    JobRef,
    Look,
    NoConnectionError,
    Part,
    Place,
    PlacedJob,
    PlaceEvent,
)
from kale_dist.job.reader import JobReader
from kale_dist.job.records import FIRST_LIFE, Life, Record
from kale_dist.job.spec.job_spec import WARM, Debugging, JobSpec, Policy
from kale_dist.job.status import JobStatus
from kale_dist.job.view import facts
from kale_dist.places.following.head_client import HeadClient, send_missing
from kale_dist.wire import JobFiles, Offer, Source, payload
from kale_dist.wire.blobs import FolderStore, map_file, pack_blobs
from kale_dist.worker.agent import processes

_SMALL_BYTES, _MOST_SMALL = 64 << 10, 32
"""So many blobs of at most this size travel with the order, the others each with a request of its own."""

_WORDS = {"snapshot": "version of kale_dist", "topology": "number_of_processes", "policy": "max_restarts or grace_s"}


def prefix_of(handle: PlacedJob) -> str:
    """What comes before the paths of requests about a job in warm pods; empty for any other job."""
    return f"/jobs/{handle.get('warm_id')}" if handle.get("warm_id") else ""


class WarmPlace:
    """A place, with warm pods for the calls that want them.

    Args:
        place: Where pods run.
        backend: Submits and follows sets.
    """

    def __init__(self, place: Place, backend: Backend) -> None:
        self.inner = place
        self.name, self.noun = place.name, place.noun
        self._backend = backend
        # What asks for nothing of a job's pods is the place's own.
        self.settle, self.render, self.object_name = place.settle, place.render, place.object_name
        self.order, self.fetch, self.adopt = place.order, place.fetch, place.adopt
        self.volumes, self.close = place.volumes, place.close

    def look(self, handle: PlacedJob) -> Look:
        """Report on the pods that a job is in."""
        return self.inner.look(_set_of(handle))

    def listen(self, handle: PlacedJob, changed: Callable[[], None]) -> Callable[[], None]:
        """Watch the pods that a job is in."""
        return self.inner.listen(_set_of(handle), changed)

    def last_words(self, handle: PlacedJob, part: Part, limit: int) -> bytes:
        """The end of the output of a pod that a job is in."""
        return self.inner.last_words(_set_of(handle), part, limit)

    def describe(self, handle: PlacedJob) -> dict[str, Any]:
        """The object that a job is in."""
        return self.inner.describe(_set_of(handle))

    def events(self, handle: PlacedJob) -> Sequence[PlaceEvent]:
        """Events about the object that a job is in."""
        return self.inner.events(_set_of(handle))

    def start(
        self, spec: JobSpec, key: bytes, life: Life = FIRST_LIFE, checkpoint: pathlib.Path | None = None
    ) -> PlacedJob:
        """Give a job to a set that fits, or make one, which gets it once its head runs (`send_input`)."""
        if spec.keep_warm_s is None or spec.kind == WARM:
            return self.inner.start(spec, key, life, checkpoint)
        wanted, others = _set_for(spec), list[str]()
        ref = JobRef(self.inner.name, f"{spec.cluster.namespace}/{spec.name}".lstrip("/"))

        def handle_in(there: Record, name: str) -> PlacedJob:
            place = (*there.place, ("warm", there.spec.name), ("warm_id", name))
            name = self.inner.object_name(spec.name, life.number)
            return PlacedJob(ref=ref, object=name, life=life.number, spec=spec, place=place)

        for there in self._sets(wanted):
            if differences := _differences(wanted, there.spec):
                others.append(f"{there.ref} does not fit: another {', another '.join(differences)}")
                continue
            handle = handle_in(there, secrets.token_hex(8))
            try:
                # It may have ended unseen. This also waits until the place knows its pods: a command has just begun.
                if self._backend.status(JobRef.parse(there.ref)).is_final:
                    continue
                if not (why := self._offer(handle, key)):
                    _use(self.inner, there)
                    return handle
                others.append(f"{there.ref} does not take this job: {why}")
            except NoConnectionError:
                raise
            except BackendError:
                continue
        name = f"{WARM}-{''.join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(5))}"
        made = records.read(
            self._backend.submit(dataclasses.replace(wanted, name=name), secrets.token_bytes(32)).record_name
        )
        log(". ".join([_described(made, self.inner.noun), *others]))
        _use(self.inner, made)
        return handle_in(made, name)

    def send_input(self, handle: PlacedJob, key: bytes, on_progress: Callable[[str], None]) -> None:
        """Give a job to the set that was made for it, whose head runs now."""
        if not prefix_of(handle):
            self.inner.send_input(handle, key, on_progress)
        elif not _is_ordered(handle) and (why := self._offer(handle, key, on_progress)):
            raise BackendError(f"The warm {self.inner.noun}s {handle.get('warm')} do not take the job: {why}")

    def _offer(self, handle: PlacedJob, key: bytes, on_progress: Callable[[str], None] = lambda _: None) -> str:
        """Send a job's order, and before it what is missing of its blobs; returns why it is not taken, empty if it is."""
        there, spec, name, files = _set_of(handle), handle.spec, handle.get("warm_id"), _files(handle)
        store, sets_key = FolderStore(records.blobs_dir()), records.read_key(there.ref.record_name) or b""
        checkpoint = store.put([map_file(files.checkpoint)]) if files.checkpoint.exists() else ""
        order = self.inner.order(spec, records.life(files))
        sets_order = self.inner.order(there.spec, FIRST_LIFE)
        order = dataclasses.replace(
            order, head=sets_order.head, port=sets_order.port, source=Source.STREAM, checkpoint=checkpoint,
            blobs=(*order.blobs, *([checkpoint] if checkpoint else ())), outcomes_on_stdout=False, ends_unfollowed=False,
            returns_head=False, note=f"Runs in the warm {self.inner.noun}s {there.object}",
        )  # fmt: skip
        job = {"id": name, "sealed": wire.seal(sets_key, {"key": key.hex()}), "order": wire.encode(order)}
        head = HeadClient(lambda: self.inner.connect(there), sets_key)
        small = [digest for digest in order.blobs if store.path(digest).stat().st_size <= _SMALL_BYTES]
        packed = pack_blobs(store, small[:_MOST_SMALL])
        while missing := (answer := head.offer(job, packed)).get("missing"):
            send_missing(head, spec, missing, on_progress, is_fresh=name == handle.get("warm"))
        if "busy" not in answer:
            _ordered(handle).write_text(name)
        return str(answer.get("busy", ""))

    def connect(self, handle: PlacedJob) -> HeadConnection:
        """Connect to the head; that of a set knows a job once it has its order."""
        if prefix_of(handle) and not _is_ordered(handle):
            raise BackendError(f"The warm {self.inner.noun}s do not have {handle.ref} yet", retryable=True)
        return self.inner.connect(_set_of(handle))

    def head_output(self, handle: PlacedJob, *, follow: bool) -> contextlib.AbstractContextManager[Iterator[bytes]]:
        """The head's output, in which a set writes nothing of its jobs."""
        return contextlib.nullcontext(iter(())) if prefix_of(handle) else self.inner.head_output(handle, follow=follow)

    def kill(self, handle: PlacedJob, grace_s: float, why: str = "", *, head_leaves: bool = False) -> None:
        """End a job's pods. Those of a set only where its head cannot end the job."""
        if not (prefix_of(handle) and head_leaves):
            self.inner.kill(_set_of(handle), grace_s, why, head_leaves=head_leaves)

    def remove(self, handle: PlacedJob) -> None:
        """Remove a job's objects. The pods of a job in a set stay; their head forgets it."""
        if not prefix_of(handle):
            self.inner.remove(handle)
        elif not _is_ordered(handle):
            self.inner.kill(_set_of(handle), 0.0)
        elif key := records.read_key(handle.ref.record_name):
            head = HeadClient(lambda: self.connect(handle), key, prefix_of(handle))
            # The job or the set may have ended.
            with contextlib.suppress(KaleDistError):
                head.ack()
                head.cancel(0.0)

    def survey(self, namespace: str | None, labels: Mapping[str, str]) -> Sequence[JobStatus]:
        """The jobs of the place, and all sets of this user with their jobs."""
        found = {status.ref: status for status in self.inner.survey(namespace, labels)}
        for record in self._records() if not labels else ():
            is_mine = record.spec.kind == WARM or dict(record.place).get("warm")
            if is_mine and record.ref not in found and namespace in (None, "*", record.spec.cluster.namespace):
                found[record.ref] = _seen(record)
        return sorted(found.values(), key=lambda status: status.created or 0.0)

    def _records(self) -> Iterator[Record]:
        return (record for record in records.all_records() if record.ref.startswith(f"{self.inner.name}://"))

    def _sets(self, wanted: JobSpec) -> Iterator[Record]:
        """This user's sets that have not ended, the newest first."""
        for record in reversed(list(self._records())):
            is_set = record.spec.kind == WARM and record.spec.cluster.namespace == wanted.cluster.namespace
            if (
                is_set
                # The command that made it may have exited before it knew that its head runs.
                and not _seen(record).is_final
                and not records.canceller(records.files(record.name))
            ):
                yield record


def _seen(record: Record) -> JobStatus:
    return JobReader(record.name, lambda _: True).status()


def _set_for(spec: JobSpec) -> JobSpec:
    """The specification of a set that a job fits: all that its pods are made of, and this library as its snapshot."""
    return dataclasses.replace(
        spec, name=WARM, label="warm pods", kind=WARM, topology=dataclasses.replace(spec.topology, sizes=()),
        threads=None, seed=None, recipe=None, secrets=(), sealed="", strategy=strategies.DDP(), saves=False, debugging=Debugging(), blobs=(),
        policy=Policy(max_restarts=spec.policy.max_restarts, grace_s=spec.policy.grace_s), snapshot=hashlib.sha256(payload.runtime_zip()).hexdigest(),
        snapshot_bytes=0, resume="", offer=Offer(),
    )  # fmt: skip


def _set_of(handle: PlacedJob) -> PlacedJob:
    """The handle of the set that a job runs in; of any other job its own."""
    if not prefix_of(handle):
        return handle
    name, (namespace, slash, _) = handle.get("warm"), handle.ref.name.rpartition("/")
    spec, ref = (
        dataclasses.replace(_set_for(handle.spec), name=name),
        JobRef(handle.ref.backend, namespace + slash + name),
    )
    return dataclasses.replace(handle, ref=ref, object=name, life=1, spec=spec)


def _differences(wanted: JobSpec, there: JobSpec) -> list[str]:
    """In what a set does not fit, in the words of arguments."""
    pairs = ((wanted, there), (wanted.cluster, there.cluster))
    names = ((field.name, one, other) for one, other in pairs for field in dataclasses.fields(one))
    differing = [name for name, one, other in names if getattr(one, name) != getattr(other, name)]
    return [_WORDS.get(name, name.removesuffix("_s")) for name in differing if name not in ("name", "cluster")]


def _described(made: Record, noun: str) -> str:
    """What a set holds, for how long, and how it is ended."""
    spec = made.spec
    gpus = (spec.resources.gpus or int(spec.cuda)) * spec.topology.number_of_processes
    queue = f", quota of the queue {spec.cluster.queue}" if spec.cluster.queue else ""
    pods = f"{spec.topology.number_of_pods} {noun}{'s' if spec.topology.number_of_pods > 1 else ''}"
    return (
        f"{made.ref} holds {pods}{f', {gpus} GPUs' if gpus else ''}{queue} until it has waited "
        f"{facts.duration(spec.keep_warm_s or 0.0)} for a call that fits. To end it before: kale-dist cancel {made.ref}"
    )


def _files(handle: PlacedJob) -> JobFiles:
    return records.files(handle.ref.record_name)


def _ordered(handle: PlacedJob) -> pathlib.Path:
    """Return the path of the file with the id whose order the set has."""
    return _files(handle).folder / "ordered"


def _is_ordered(handle: PlacedJob) -> bool:
    with contextlib.suppress(OSError):
        return _ordered(handle).read_text() == handle.get("warm_id")
    return False


def _use(place: Place, there: Record) -> None:
    """Note that a kernel with a person uses a set, which ends with the last such kernel."""
    mark = records.files(there.name).folder / f"kernel-{os.getpid()}-{processes.start_time(os.getpid())}"
    if interrupts.is_interactive() and not mark.exists():
        mark.touch()
        atexit.register(_release, place, there, mark)


def _release(place: Place, there: Record, mark: pathlib.Path) -> None:
    mark.unlink(missing_ok=True)
    others = (other.name.split("-")[1:] for other in mark.parent.glob("kernel-*"))
    if any(processes.is_running(int(pid), int(start)) for pid, start in others):
        return
    handle = PlacedJob(ref=JobRef.parse(there.ref), object=there.spec.name, spec=there.spec, place=there.place)
    # Where it cannot be reached it ends idle, if it has not ended.
    with contextlib.suppress(KaleDistError, OSError):
        HeadClient(lambda: place.connect(handle), records.read_key(there.name) or b"").ack()
