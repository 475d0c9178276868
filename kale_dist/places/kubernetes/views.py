"""The state of one job's objects on the cluster, as frozen values made from the API's plain objects. Pure."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any

from kale_dist.job.backend import PlacedJob
from kale_dist.places.manifests import Kind, kind_of
from kale_dist.places.manifests.object_settings import (
    COMPLETION_INDEX,
    CONTAINER_ANNOTATION,
    FIRST_POD_LABEL,
    REPLICA_INDEX_LABEL,
)
from kale_dist.wire import FIRST_SIGNAL

_NOTHING: Mapping[str, Any] = {}

Owner = tuple[str, str, str]
"""Kind, name and UID of the controller that has made an object; empty texts if none has."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContainerView:
    """One container of a pod."""

    name: str
    image: str = ""
    is_init: bool = False
    state: str = ""
    """`waiting`, `running`, `terminated`; empty while the node has not looked at the pod."""
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    """The exit code of a terminated container; else None."""
    ended: float | None = None
    """When it terminated, in seconds since 1970."""
    restarts: int = 0
    last_message: str = ""
    last_exit_code: int | None = None
    requests: tuple[tuple[str, str], ...] = ()
    """Resources asked for, as quantities."""
    limits: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PodView:
    """One pod. Pods are distinguished by UID, because a deleted pod's name is used again."""

    uid: str
    name: str
    number: int
    """The pod's number in its job; 0 is the head."""
    owner: Owner = ("", "", "")
    container: str = "pytorch"
    """Name of the agent's container."""
    created: float = 0.0
    """Seconds since 1970."""
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    node: str = ""
    """Empty while the pod has no node."""
    scheduling: str = ""
    """Why it has no node, in the scheduler's words: `Reason: message`."""
    scheduler: str = ""
    """Who chooses its node, if that is not Kubernetes' own scheduler."""
    disruption: str = ""
    """Why the cluster ends it, in the cluster's words: `Reason: message`."""
    is_ending: bool = False
    """Whether it is being deleted; its processes may run on for their grace period."""
    is_gone: bool = False
    """Whether it no longer exists; the rest is as last seen."""
    life: int = 0
    """How often its agent's container was killed and started again in the same pod: then the agent begins again."""
    is_past: bool = False
    """Whether its container was killed, and another life follows."""
    containers: tuple[ContainerView, ...] = ()
    claims: tuple[str, ...] = ()
    """Names of the claims it mounts."""

    @property
    def identity(self) -> str:
        """Its UID, and from the second life on the life's number."""
        return f"{self.uid}.{self.life}" if self.life else self.uid

    @property
    def main(self) -> ContainerView:
        """The agent's container."""
        return next(
            (item for item in self.containers if item.name == self.container), ContainerView(name=self.container)
        )

    @property
    def is_running(self) -> bool:
        """Whether the agent runs."""
        return self.main.state == "running" and not self.has_ended

    @property
    def has_started(self) -> bool:
        """Whether the agent's container was started, so that it has a log."""
        main = self.main
        return main.state == "running" or main.exit_code is not None or main.restarts > 0

    @property
    def has_ended(self) -> bool:
        """Whether the agent runs no longer, and will not again in this pod."""
        return self.is_over or self.main.state == "terminated"

    @property
    def is_over(self) -> bool:
        """Whether none of its containers runs any longer, so that the cluster's reason is known."""
        return self.is_gone or self.is_past or self.phase in ("Succeeded", "Failed")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EventView:
    """An event: what a part of the cluster reports about an object."""

    uid: str
    kind: str
    """Kind of the object that the event is about."""
    name: str
    object_uid: str
    is_warning: bool
    reason: str
    message: str
    time: float
    """When it was reported last, in seconds since 1970."""
    count: int = 1
    """How often it was reported."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueuePosition:
    """The position of a job among those that wait for the same quota."""

    number: int | None
    """From 1; None if Kueue does not take the job into the queue."""
    of: int | None = None
    """How many jobs of the namespace wait, if only these were counted; None if `number` counts other namespaces' too."""
    problem: str = ""
    """Why Kueue does not take it, in Kueue's words."""

    def __str__(self) -> str:
        """Such as `at position 3`."""
        return f"at position {self.number}" + (f" of the namespace's {self.of}" if self.of is not None else "")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """Holds all that the cluster reports of one job at one moment."""

    name: str
    namespace: str = ""
    job: Mapping[str, Any] | None = None
    """Its object; not to be changed."""
    pods: tuple[PodView, ...] = ()
    """Oldest first, those that are gone or past among them."""
    events: tuple[EventView, ...] = ()
    """About the job, its pods and their claims; oldest first."""
    is_deleted: bool = False
    """Whether its object is known to be gone."""
    problem: str = ""
    """Why this is not up to date, in a sentence; empty if it is."""
    is_complete: bool = True
    """Whether all pods there are have been listed."""
    lacks_events: bool = False
    """Whether this user may not read events, so that the reason why pods are refused is not known."""
    queue_position: QueuePosition | None = None
    """The job's position in Kueue's queue; None if it does not wait there."""

    @property
    def latest_pods(self) -> tuple[PodView, ...]:
        """The newest pod of each number, the head first."""
        newest = {pod.number: pod for pod in sorted(self.pods, key=lambda pod: pod.created)}
        return tuple(newest[key] for key in sorted(newest))


def lives_of(data: Mapping[str, Any], last: int = 0) -> tuple[PodView, ...]:
    """A pod of the API; of one whose agent's container was killed and is started again, how that life ended comes first.

    Args:
        data: The pod.
        last: The number of the last life that was seen of it. An agent that has judged ends in each later one as it did there.
    """
    past = pod_view(data)
    main = past.main
    if (main.last_exit_code or 0) < FIRST_SIGNAL:
        # Of one that has succeeded, the kubelet no longer says how the lives before have ended.
        return (dataclasses.replace(past, life=main.restarts if main.exit_code == 0 else last),)
    status = next(item for item in data["status"]["containerStatuses"] if item["name"] == main.name)
    present, before = next(iter(status["state"].items())), status["lastState"]["terminated"]
    life = main.restarts + (present[0] == "waiting")
    began = present[1].get("startedAt") or before.get("finishedAt")
    return (
        dataclasses.replace(
            past, life=life - 1, created=seconds(before.get("startedAt")) or past.created, is_past=True
        ),
        dataclasses.replace(pod_view(data, ends_once=False), life=life, created=seconds(began) or past.created),
    )


def pod_view(data: Mapping[str, Any], *, ends_once: bool = True) -> PodView:
    """A pod of the API. Where its agent's container was started again and `ends_once`, that of its end."""
    meta, spec, status = data["metadata"], data.get("spec") or {}, data.get("status") or {}
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    scheduled, disruption = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    # The one pod of a type may have no index. Before Kubernetes 1.28 that of a Job stands in the annotation alone.
    index = labels.get(REPLICA_INDEX_LABEL) or labels.get(COMPLETION_INDEX) or annotations.get(COMPLETION_INDEX)
    main = annotations.get(CONTAINER_ANNOTATION, "pytorch")
    statuses = [
        _ended_once(item) if ends_once and item["name"] == main else item
        for item in status.get("containerStatuses") or ()
    ]
    digits = (labels.get(FIRST_POD_LABEL, "0"), index or "0")
    return PodView(
        uid=meta.get("uid", ""),
        name=meta["name"],
        number=sum(int(text) for text in digits if text.isdigit()),
        owner=owner_in(meta),
        container=main,
        created=seconds(meta.get("creationTimestamp")) or 0.0,
        phase=status.get("phase") or "Pending",
        reason=status.get("reason") or "",
        message=(status.get("message") or "").strip(),
        node=spec.get("nodeName") or "",
        scheduling=_words_of(scheduled) if scheduled.get("status") == "False" else "",
        scheduler=(spec.get("schedulerName") or "").replace("default-scheduler", ""),
        disruption=_words_of(disruption) if disruption.get("status") == "True" else "",
        is_ending="deletionTimestamp" in meta,
        containers=(
            *_containers(spec.get("initContainers"), status.get("initContainerStatuses"), is_init=True),
            *_containers(spec.get("containers"), statuses, is_init=False),
        ),
        claims=tuple(
            volume["persistentVolumeClaim"]["claimName"]
            for volume in spec.get("volumes") or ()
            if "persistentVolumeClaim" in volume
        ),
    )


def owner_in(meta: Mapping[str, Any]) -> Owner:
    """The controller that an object's metadata names."""
    owners = (one for one in meta.get("ownerReferences") or () if one.get("controller"))
    return next(((one.get("kind", ""), one.get("name", ""), one.get("uid", "")) for one in owners), ("", "", ""))


def event_view(data: Mapping[str, Any]) -> EventView:
    """An event of the API."""
    about, series = data.get("involvedObject") or {}, data.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        data.get("lastTimestamp"),
        data.get("eventTime"),
        data["metadata"].get("creationTimestamp"),
    )
    return EventView(
        uid=data["metadata"].get("uid", ""),
        kind=about.get("kind") or "",
        name=about.get("name") or "",
        object_uid=about.get("uid") or "",
        is_warning=data.get("type") == "Warning",
        reason=data.get("reason") or "",
        message=(data.get("message") or "").strip(),
        time=max(seconds(time) or 0.0 for time in times),
        count=data.get("count") or series.get("count") or 1,
    )


def is_about(event: EventView, handle: PlacedJob) -> bool:
    """Whether an event concerns a job's object or what was made for it. Earlier jobs may have had the same names."""
    kind, owner = kind_of(handle.spec), event.name.rpartition("-")[0]
    names = kind.pod_names(handle.spec, handle.life)
    if event.time < float(handle.get("created") or 0):
        return False
    if event.kind == "Pod":
        return event.name in names or owner in names
    if event.kind == "Workload":
        return owner_of_workload(event.name, kind) == handle.object
    return (event.kind, event.name) in kind.reporters_of(handle.object)


def owner_of_workload(name: str, kind: Kind) -> str:
    """The object that a Workload of Kueue's stands for, which calls it `pytorchjob-<object>-<hash>`; "" for another kind's."""
    owner, _, rest = name.partition("-")
    return rest.rpartition("-")[0] if owner == kind.name.lower() else ""


def seconds(text: str | None) -> float | None:
    """A time of the API, such as `2026-01-31T08:00:00Z`, in seconds since 1970; None for none."""
    return dt.datetime.fromisoformat(text).timestamp() if text else None


def _words_of(condition: Mapping[str, Any]) -> str:
    return f"{condition.get('reason') or ''}: {condition.get('message') or ''}"


def _ended_once(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the agent's container; where it was started again, that of its end."""
    last = status.get("lastState") or {}
    return {**status, "state": last} if "terminated" in last else status


def _containers(specs: Any, statuses: Any, *, is_init: bool) -> tuple[ContainerView, ...]:
    by_name = {status["name"]: status for status in statuses or ()}
    return tuple(_container(spec, by_name.get(spec["name"], {}), is_init=is_init) for spec in specs or ())


def _container(spec: Mapping[str, Any], status: Mapping[str, Any], *, is_init: bool) -> ContainerView:
    resources = spec.get("resources") or {}
    states: Mapping[str, Mapping[str, Any]] = status.get("state") or {}
    state, details = next(iter(states.items()), ("", _NOTHING))
    last = (status.get("lastState") or {}).get("terminated") or {}
    return ContainerView(
        name=spec["name"],
        image=spec.get("image") or "",
        is_init=is_init,
        state=state,
        reason=details.get("reason") or "",
        message=(details.get("message") or "").strip(),
        exit_code=details.get("exitCode"),
        ended=seconds(details.get("finishedAt")),
        restarts=status.get("restartCount") or 0,
        last_message=(last.get("message") or "").strip(),
        last_exit_code=last.get("exitCode"),
        requests=tuple((resources.get("requests") or {}).items()),
        limits=tuple((resources.get("limits") or {}).items()),
    )
