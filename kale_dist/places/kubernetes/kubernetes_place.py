"""A cluster as a `Place`: a job is an object of some kind and a Secret; `following` does everything beyond that."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import getpass
import json
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kale_dist.errors import BackendError, ConfigError, JobNotFoundError, warn
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Look, Part, PlacedJob, PlaceEvent
from kale_dist.job.records import FIRST_LIFE, Life
from kale_dist.job.spec import names
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.status import JobStatus
from kale_dist.places.following.head_client import HeadClient, send_missing, writing
from kale_dist.places.kubernetes import client, errand, objects, port_forward, queue, self_pod, watch
from kale_dist.places.kubernetes import look as looks
from kale_dist.places.kubernetes import submit as submission
from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.explain import api
from kale_dist.places.kubernetes.port_forward import PodConnection
from kale_dist.places.kubernetes.views import Owner, PodView, event_view, is_about, seconds
from kale_dist.places.manifests import Kind, kind_of, object_settings
from kale_dist.wire import BlockReader, InputFiles, JobFiles, Order, OutcomePart, Source, blobs, mark_of
from kale_dist.wire.url_store import UrlStore
from kale_dist.wording import listing, show, untrusted
from kale_dist.worker.rank import process_state

_BYTES_PORT = object_settings.PORT + 2
_GONE_S = 90.0
"""How long pods may take to end: their grace of 60 s and a busy node."""

_CONNECT_S = 10.0
_READ_BYTES = 1 << 16


class KubernetesPlace:
    """Runs jobs as objects of a cluster. One instance serves a whole process; it is safe to use from threads."""

    name = "kubernetes"
    noun = "pod"

    settle = staticmethod(submission.settle)
    render = staticmethod(submission.render)
    object_name = staticmethod(object_settings.object_name)

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        """UID of each pod that was seen, and that of the object that it belongs to; empty for a stranger's."""

    def start(
        self, spec: JobSpec, key: bytes, life: Life = FIRST_LIFE, checkpoint: pathlib.Path | None = None
    ) -> PlacedJob:
        """Create the object of a job, then its Secret."""
        cluster = client.connect(spec.cluster.namespace, spec.cluster.context, secret=spec.cluster.cluster_secret)
        made, source = submission.create(cluster, spec, key, life, checkpoint)
        return self._handle(cluster, spec, made, source, life.number)

    def order(self, spec: JobSpec, life: Life) -> Order:
        """The order of a job in warm pods, which serve no metrics of single jobs."""
        made = submission.order(spec, Source.STREAM, life)
        return dataclasses.replace(made, torch_flags=process_state.read_flags(cuda=spec.cuda), metrics_port=0)

    def send_input(self, handle: PlacedJob, key: bytes, on_progress: Callable[[str], None]) -> None:
        """Send to the head, which has to run, what neither the Secret nor a store holds of the snapshot and the packages."""
        if handle.get("source") == Source.STREAM:
            head, is_fresh = HeadClient(lambda: self.connect(handle), key), handle.life == 1 and not handle.spec.store
            send_missing(head, handle.spec, head.missing(), on_progress, is_fresh=is_fresh)

    # -- while it runs --------------------------------------------------------------------------------------------------

    def look(self, handle: PlacedJob) -> Look:
        """How the job is, as the watch of its namespace has it."""
        view = watch.shared(self._cluster(handle), kind_of(handle.spec)).view(handle.object)
        uid = ((view.job or {}).get("metadata") or {}).get("uid")
        if uid is not None and handle.get("uid") not in ("", uid):
            # Another job has its name by now.
            view = dataclasses.replace(view, job=None, pods=(), events=(), is_deleted=True)
        view = dataclasses.replace(view, pods=self._own_pods(handle, handle.get("uid") or uid or "", view.pods))
        if view.job is not None:
            position = queue.position(self._cluster(handle), kind_of(handle.spec), view.job)
            view = dataclasses.replace(view, queue_position=position)
        return looks.look(view, handle.spec, time.time())

    def listen(self, handle: PlacedJob, changed: Callable[[], None]) -> Callable[[], None]:
        """Watch the job; its namespace has one set of watches for all jobs."""
        return watch.shared(self._cluster(handle), kind_of(handle.spec)).subscribe(handle.object, changed)

    @contextlib.contextmanager
    def head_output(self, handle: PlacedJob, *, follow: bool) -> Iterator[Iterator[bytes]]:
        """The log of the head's container, as far as its node still has it."""
        pod, namespace = self._head(handle).name, handle.spec.cluster.namespace
        asking = functools.partial(api.asking, "get", "pods/log", namespace, pod)
        with asking():
            # A log may be silent for hours; a dead connection is found by TCP's keepalive.
            core: Any = self._cluster(handle).core
            answer = core.read_namespaced_pod_log(
                pod, namespace, container=kind_of(handle.spec).container, follow=follow, _preload_content=False,
                _request_timeout=(_CONNECT_S, None),
            )  # fmt: skip

        def pieces() -> Iterator[bytes]:
            with asking():
                yield from answer.stream(_READ_BYTES)

        try:
            yield pieces()
        finally:
            answer.close()
            answer.release_conn()

    def last_words(self, handle: PlacedJob, part: Part, limit: int) -> bytes:
        """The end of a pod's log; empty if the pod is gone."""
        with contextlib.suppress(Exception):
            answer: Any = self._cluster(handle).core.read_namespaced_pod_log(
                part.name, handle.spec.cluster.namespace, container=kind_of(handle.spec).container,
                tail_lines=max(1, limit // 50), _preload_content=False,
            )  # fmt: skip
            return bytes(answer.data[-limit:])
        return b""

    def connect(self, handle: PlacedJob) -> PodConnection:
        """Connect to the head's byte server by port-forward."""
        namespace, pod = handle.spec.cluster.namespace, self._head(handle).name
        return port_forward.connect(self._cluster(handle), namespace, pod, _BYTES_PORT)

    # -- its end --------------------------------------------------------------------------------------------------------

    def fetch(self, handle: PlacedJob, name: str, target: pathlib.Path) -> bool:
        """Copy an outcome or the checkpoint from the log of the head, or from where it has put them."""
        if name.startswith("outcome-") and self._from_log(handle, name, target):
            return True
        if not handle.spec.store:
            handle = dataclasses.replace(handle, spec=dataclasses.replace(handle.spec, store=self._left(handle)))
        if not handle.spec.store or not (name == "checkpoint" or name.startswith("outcome-")):
            return False
        return self._from_store(handle, name, target)

    def _left(self, handle: PlacedJob) -> str:
        """Where the head of a job without a store may have left results, once it has ended in order; empty if it is not this user's."""
        look, key = self.look(handle), records.read_key(handle.ref.record_name)
        in_order = look.finished == "succeeded" if look.head is None else bool(look.head.message)
        folder, _ = object_settings.left_results(handle.spec)
        return f"{folder}/{mark_of(key)}" if folder and in_order and key else ""

    def _from_log(self, handle: PlacedJob, name: str, target: pathlib.Path) -> bool:
        """Copy small outcomes out of the head's log: all of them at once, as reading the log again for each would take long."""
        parts: dict[str, list[bytes]] = {}
        reader = BlockReader()
        with contextlib.suppress(BackendError), self.head_output(handle, follow=False) as pieces:
            for piece in pieces:
                for block in reader.feed(piece):
                    if isinstance(block, OutcomePart):
                        path = JobFiles(target.parent).outcome(handle.first_attempt + block.attempt, block.rank)
                        known = parts.setdefault(path.name, [])
                        if block.index == len(known):
                            known.append(block.data)
                        if len(known) == block.count:
                            _write(path, b"".join(known))
        return name in parts and target.exists()

    def _from_store(self, handle: PlacedJob, name: str, target: pathlib.Path) -> bool:
        spec, name = handle.spec, handle.name_at_head(name)
        kept = f"jobs/{spec.name}/{name}"
        claim, _ = object_settings.claim_of(spec)
        if not claim:
            store = UrlStore(spec.store)
            if not store.exists(kept):
                return False
            store.get_file(kept, target)
            return True
        cluster = self._cluster(handle)
        folder = self_pod.claim_here(spec, self_pod.find(cluster))
        if folder is None:
            return errand.read_store(cluster, spec, name, target)
        if not (folder / kept).exists():
            return False
        _write(target, (folder / kept).read_bytes())
        return True

    def kill(self, handle: PlacedJob, grace_s: float, why: str = "", *, head_leaves: bool = False) -> None:
        """Mark the object as cancelled or failed, and have its controller end the pods, which have their own grace."""
        del grace_s
        mark = {object_settings.FAILED_ANNOTATION: why} if why else {object_settings.CANCELLED_ANNOTATION: _person()}
        objects.end(self._cluster(handle), handle.spec, handle.object, mark, head_leaves=head_leaves)

    def remove(self, handle: PlacedJob) -> None:
        """Delete the object and its Secret, and wait until its pods are gone."""
        cluster = self._cluster(handle)
        objects.delete(cluster, kind_of(handle.spec), handle.spec.cluster.namespace, handle.object)
        objects.wait_until_gone(cluster, handle, _GONE_S)

    # -- jobs of other machines -----------------------------------------------------------------------------------------

    def survey(self, namespace: str | None, labels: Mapping[str, str]) -> Sequence[JobStatus]:
        """How the jobs of a namespace are by their objects alone, oldest first.

        Args:
            namespace: None for the configured one, `*` for all.
            labels: Those that have all of these.

        Raises:
            ConfigError: The namespace or a label is not valid.
            BackendError: The cluster refused.
        """
        _check_selection(namespace, labels)
        cluster = client.connect()
        where = cluster.namespace if namespace is None else namespace
        selector = ",".join([object_settings.SELECTOR, *(f"{name}={value}" for name, value in labels.items())])
        found = objects.list_all(cluster, "" if where == "*" else where, selector)
        found.sort(key=lambda item: (item[1]["metadata"]["creationTimestamp"], item[1]["metadata"]["name"]))
        queued = {item["metadata"]["uid"]: queue.position(cluster, kind, item) for kind, item in found}
        return looks.statuses(found, queued)

    def adopt(self, ref: JobRef, *, trust: bool | None) -> tuple[PlacedJob, bytes | None]:
        """Find the newest object of a job on the cluster, and with `trust` its key.

        Who may create objects may write anything into them. So they state what a job is, and never where to connect to or
        what to change: place, names and kind are those of the object that was found.
        """
        asked, _, name = ref.name.rpartition("/")
        cluster = client.connect(namespace=asked)
        namespace = cluster.namespace
        selector = f"{object_settings.SELECTOR},{object_settings.INSTANCE_LABEL}={name}"
        # Other text than names would be refused as a selector or a path, or select other jobs.
        is_name = names.is_label_value(name) and "/" not in asked
        found = objects.list_all(cluster, namespace, selector) if is_name else []
        if not found:
            raise JobNotFoundError(
                f"There is no job {name!r} in the namespace {namespace!r} of {cluster.server}. {listing(self.name)}"
            )
        kind, job = max(found, key=lambda item: _life_of(item[1]))
        annotations = job["metadata"].get("annotations") or {}
        ref = JobRef(self.name, f"{namespace}/{name}")
        try:
            written = JobSpec.from_json(json.loads(annotations[object_settings.SPEC_ANNOTATION]))
            spec = _described(written, name, namespace, kind)
        except (KeyError, ValueError, TypeError) as error:
            raise JobNotFoundError(
                f"{ref} was not submitted by kale_dist, or by a version that this one does not understand ({error})"
            ) from error
        if not trust:
            spec = dataclasses.replace(spec, store="", cluster=dataclasses.replace(spec.cluster, patch=""))
            if trust is not None:
                warn(untrusted(ref))
            return self._handle(cluster, spec, job, Source.INPUT, _life_of(job)), None
        data = objects.read_input(cluster, namespace, job["metadata"]["name"])
        key, source = data.get(InputFiles.KEY) or None, Source.INPUT
        if InputFiles.ORDER in data:
            source = Source(json.loads(data[InputFiles.ORDER])["source"])
        if key is not None and InputFiles.SNAPSHOT in data:
            # The model can then be built again from here.
            with records.keeping_blobs():
                blobs.unpack_blobs(data[InputFiles.SNAPSHOT], records.blobs_dir())
        return self._handle(cluster, spec, job, source, _life_of(job)), key

    def describe(self, handle: PlacedJob) -> dict[str, Any]:
        """The object.

        Raises:
            JobNotFoundError: It was deleted.
        """
        kind = kind_of(handle.spec)
        found = objects.find(self._cluster(handle), kind, handle.spec.cluster.namespace, handle.object)
        if found is None:
            raise JobNotFoundError(f"The {kind.name} {handle.object} of {handle.ref} no longer exists")
        return dict(found)

    def events(self, handle: PlacedJob) -> Sequence[PlaceEvent]:
        """The events about the object and its pods; a cluster keeps them for an hour."""
        namespace = handle.spec.cluster.namespace
        with api.asking("list", "events", namespace):
            listed: Any = self._cluster(handle).core.list_namespaced_event(namespace, _preload_content=False)
            found = [event_view(item) for item in listed.json()["items"]]
        return [
            PlaceEvent(
                time=event.time, about=f"{event.kind.lower()}/{event.name}", is_warning=event.is_warning, reason=event.reason,
                message=" ".join(event.message.split()), count=event.count,
            )
            for event in sorted(found, key=lambda event: event.time)
            if is_about(event, handle)
        ]  # fmt: skip

    def volumes(self) -> Sequence[str]:
        """Names of the claims in the configured namespace."""
        cluster = client.connect()
        with api.asking("list", "persistentvolumeclaims", cluster.namespace):
            listed = cluster.core.list_namespaced_persistent_volume_claim(cluster.namespace)
        return sorted(claim.metadata.name for claim in listed.items if claim.metadata and claim.metadata.name)

    def close(self) -> None:
        """Close idle connections; the next call opens others."""
        client.disconnect()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _handle(self, cluster: Cluster, spec: JobSpec, job: Mapping[str, Any], source: Source, life: int) -> PlacedJob:
        place = {
            "server": cluster.server, "context": cluster.context, "uid": job["metadata"]["uid"], "source": str(source),
            "created": str(seconds(job["metadata"].get("creationTimestamp")) or 0),
        }  # fmt: skip
        return PlacedJob(
            ref=JobRef(self.name, f"{spec.cluster.namespace}/{spec.name}"),
            object=job["metadata"]["name"],
            life=life,
            spec=spec,
            place=tuple(place.items()),
        )

    def _cluster(self, handle: PlacedJob) -> Cluster:
        """The cluster that a job was started on, also when the kubeconfig's current context is another one by now."""
        asked = handle.spec.cluster.namespace, handle.spec.cluster.context or handle.get("context")
        try:
            return client.connect(*asked, secret=handle.spec.cluster.cluster_secret)
        except ConfigError as error:
            raise BackendError(f"{handle.ref} is on the cluster {handle.get('server')}, and {error}") from error

    def _own_pods(self, handle: PlacedJob, uid: str, pods: Sequence[PodView]) -> tuple[PodView, ...]:
        """Those pods that the controllers of a job have made. One that was known stays, also when its object is deleted without it."""
        made: dict[Owner, bool] = {}
        for pod in pods if uid else ():
            # Those about which the cluster does not answer now count at the next look.
            with contextlib.suppress(BackendError):
                if pod.uid not in self._known:
                    if pod.owner not in made:
                        made[pod.owner] = objects.made_for(self._cluster(handle), handle, uid, pod.owner)
                    self._known[pod.uid] = uid if made[pod.owner] else ""
        return tuple(pod for pod in pods if uid and self._known.get(pod.uid) == uid)

    def _head(self, handle: PlacedJob) -> Part:
        head = self.look(handle).head
        if head is None or head.state == "waiting":
            raise BackendError(f"The first pod of {handle.ref} does not run yet", retryable=True)
        return head


def _write(target: pathlib.Path, data: bytes) -> None:
    with writing(target) as file:
        file.write(data)


def _life_of(job: Mapping[str, Any]) -> int:
    number = str((job["metadata"].get("labels") or {}).get(object_settings.RUN_LABEL, "1"))
    return int(number) if re.fullmatch("[1-9][0-9]{0,3}", number, re.ASCII) else 1


def _described(spec: JobSpec, name: str, namespace: str, kind: Kind) -> JobSpec:
    """Return an object's specification of its job, with the names and the connection by which the object was found."""
    here = dataclasses.replace(spec.cluster, namespace=namespace, kind=kind.word, context="", cluster_secret="")
    return dataclasses.replace(spec, name=name, cluster=here)


def _check_selection(namespace: Any, labels: Any) -> None:
    """Refuse what would select other jobs than meant: a comma in a value begins another condition."""
    is_namespace = namespace is None or namespace == "*" or (isinstance(namespace, str) and names.is_label(namespace))
    if not is_namespace:
        remedy = "Write lower-case letters, digits and dashes, such as 'team-a', or '*' for all"
        raise ConfigError("namespace", f"{show(namespace)} cannot be a namespace", remedy)
    if not isinstance(labels, Mapping):
        raise ConfigError("labels", f"{show(labels)} is not a dict", "Write it as {'team': 'vision'}")
    for key, value in labels.items():
        if not isinstance(key, str) or not names.is_qualified_name(key):
            raise ConfigError("labels", f"{show(key)} cannot be a label", "Write it as 'team' or 'example.com/team'")
        if not isinstance(value, str) or not names.is_label_value(value):
            remedy = "Write at most 63 letters, digits, '-', '_' and '.'"
            raise ConfigError("labels", f"{show(value)} of {key} cannot be a label's value", remedy)


def _person() -> str:
    with contextlib.suppress(Exception):
        return getpass.getuser()
    return "a user without a name"
