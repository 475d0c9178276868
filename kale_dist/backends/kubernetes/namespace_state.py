"""What is known of the jobs, pods and events of one namespace. No thread, no I/O; whoever shares it locks it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import Any

from kale_dist.backends.kubernetes.views import JOB_LABEL, EventView, JobView, NodeView, PodView, event_view, pod_view

Object = dict[str, Any]

_POD_NAME = re.compile(r"-(master|worker)-\d+$")
_EVENTS_AN_OBJECT = 20
_OBJECTS_WITH_EVENTS = 4096


class NamespaceState:
    """Takes lists and changes as the API gives them. Each of these methods returns the names of the jobs concerned.

    Args:
        namespace: Its name.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.nodes: tuple[NodeView, ...] | None = None
        self.followed: Collection[str] = ()
        """Jobs whose deleted pods are remembered."""
        self.problems: dict[str, str] = {}
        """Kind of object to why nothing can be learnt of it now."""
        self.degraded: dict[str, str] = {}
        """Kind of object to what is missed for want of rights."""
        self.has_listed_jobs = False
        self._jobs: dict[str, Object] = {}
        self._deleted: set[str] = set()
        self._pods: dict[str, dict[str, PodView]] = {}
        self._events: dict[tuple[str, str], dict[str, EventView]] = {}

    def view(self, name: str) -> JobView:
        """One job."""
        job = self._jobs.get(name)
        uid = job["metadata"]["uid"] if job is not None else None
        # Pods of an earlier job of this name may still be ending.
        pods = [pod for pod in self._pods.get(name, {}).values() if uid is None or pod.owner in ("", uid)]
        claims = dict.fromkeys(claim for pod in pods for claim in pod.claims)
        about = [
            ("PyTorchJob", name),
            ("Workload", name),
            *(("Pod", pod.name) for pod in pods),
            *(("PersistentVolumeClaim", claim) for claim in claims),
        ]
        events = [event for key in about for event in self._events.get(key, {}).values()]
        problem = " ".join(dict.fromkeys(self.problems.values()))
        return JobView(
            name=name,
            namespace=self.namespace,
            job=job,
            pods=tuple(sorted(pods, key=lambda pod: pod.created)),
            events=tuple(sorted(events, key=lambda event: event.time)),
            nodes=self.nodes,
            is_deleted=name in self._deleted,
            healthy=not problem,
            problem=problem,
            degraded=tuple(self.degraded.values()),
        )

    def knows(self, name: str) -> bool:
        """Whether there is a job of this name."""
        return name in self._jobs

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def list_jobs(self, items: Sequence[Object]) -> set[str]:
        """All jobs there are. A job of which nobody has heard yet may still come: see `is_missing`."""
        now = {item["metadata"]["name"]: item for item in items}
        gone = set(self._jobs) - set(now)
        changed = {name for name, item in now.items() if item != self._jobs.get(name)}
        self._deleted = (self._deleted | gone) - set(now)
        self._jobs = now
        self.has_listed_jobs = True
        return changed | gone

    def change_job(self, change: str, item: Object) -> set[str]:
        """A job was `ADDED`, `MODIFIED` or `DELETED`."""
        name = item["metadata"]["name"]
        if change == "DELETED":
            self._jobs.pop(name, None)
            self._deleted.add(name)
        else:
            self._jobs[name] = item
            self._deleted.discard(name)
        return {name}

    def is_missing(self, name: str) -> set[str]:
        """The cluster has no job of this name, as it says when asked for it."""
        if name in self._jobs or name in self._deleted:
            return set()
        self._deleted.add(name)
        return {name}

    # -- pods ---------------------------------------------------------------------------------------------------------

    def list_pods(self, items: Sequence[Object]) -> set[str]:
        """All pods there are."""
        names = {name for item in items for name in self.change_pod("MODIFIED", item)}
        there = {item["metadata"]["uid"] for item in items}
        for name, pods in list(self._pods.items()):
            for uid, pod in list(pods.items()):
                if uid not in there and not pod.is_gone:
                    self._lose_pod(name, pod)
                    names.add(name)
        return names

    def change_pod(self, change: str, item: Object) -> set[str]:
        """A pod was `ADDED`, `MODIFIED` or `DELETED`. What changes nothing that is shown concerns no job."""
        name = (item["metadata"].get("labels") or {}).get(JOB_LABEL)
        if name is None:
            return set()
        pod = pod_view(item)
        if change == "DELETED":
            self._lose_pod(name, pod)
            return {name}
        pods = self._pods.setdefault(name, {})
        if pods.get(pod.uid) == pod:
            return set()
        pods[pod.uid] = pod
        return {name}

    def lacks_resources(self, names: Collection[str]) -> bool:
        """Whether pods of these jobs find no node with enough of something."""
        return any("Insufficient" in pod.scheduling for name in names for pod in self._pods.get(name, {}).values())

    def _lose_pod(self, name: str, pod: PodView) -> None:
        pods = self._pods.setdefault(name, {})
        if name in self.followed:
            pods[pod.uid] = dataclasses.replace(pod, is_gone=True)
            return
        pods.pop(pod.uid, None)
        if not pods:
            del self._pods[name]

    # -- events -------------------------------------------------------------------------------------------------------

    def list_events(self, items: Sequence[Object]) -> set[str]:
        """All events there are."""
        return {name for item in items for name in self.change_event("ADDED", item)}

    def change_event(self, change: str, item: Object) -> set[str]:
        """An event of anything in the namespace.

        What may be ours is kept, for it may be heard of before its object; whether it is, names and UIDs tell later.
        """
        event = event_view(item)
        name, kind = event.name, event.kind
        if kind == "Workload":
            # Kueue calls it `pytorchjob-<job>-<hash>`.
            name = name.removeprefix("pytorchjob-").rpartition("-")[0]
        job = _POD_NAME.sub("", name) if kind == "Pod" else name
        is_ours = job != name if kind == "Pod" else kind in ("PyTorchJob", "PersistentVolumeClaim", "Workload")
        if change == "DELETED" or not is_ours:
            return set()
        known = self._events.setdefault((kind, name), {})
        known.pop(event.uid, None)
        known[event.uid] = event
        if len(known) > _EVENTS_AN_OBJECT:
            del known[next(iter(known))]
        if len(self._events) > _OBJECTS_WITH_EVENTS:
            del self._events[next(iter(self._events))]
        if kind == "PersistentVolumeClaim":
            return {job for job, pods in self._pods.items() if any(name in pod.claims for pod in pods.values())}
        return {job}
