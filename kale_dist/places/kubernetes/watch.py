"""Watches the jobs of a namespace: one set of watches for all jobs of this process.

Three `ResourceWatch`es (the objects of one kind, pods, events) feed one `_State`, from which `view` makes a frozen `JobView`. While a
job waits under a quota a fourth one looks at the quotas: when room becomes free the job is touched, because the operator's
own retries back off (32 s against 0.3 s: tried).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kubernetes.client.exceptions import ApiException

from kale_dist.job.spec import quantities
from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.explain import sentences
from kale_dist.places.kubernetes.resource_watch import ResourceWatch
from kale_dist.places.kubernetes.views import (
    EventView,
    JobView,
    PodView,
    event_view,
    owner_of_workload,
    pod_view,
    seconds,
)
from kale_dist.places.manifests import Kind
from kale_dist.places.manifests.settings import OBJECT_LABEL, SELECTOR, TOUCHED_ANNOTATION

JOBS = "jobs"
"""What a watch of objects is called here, whatever their kind."""

_QUOTAS = "resourcequotas"
_QUOTA_REFUSAL = "exceeded quota"
_EVENTS_AN_OBJECT = 20
_OBJECTS_WITH_EVENTS = 4096
_TIMEOUT_S = 10.0

Object = dict[str, Any]


class NamespaceWatch:
    """All jobs of one kind in one namespace. Its threads run while there are subscriptions.

    Args:
        cluster: Where; its namespace is watched.
        kind: What the jobs are.
    """

    def __init__(self, cluster: Cluster, kind: Kind) -> None:
        self.namespace = cluster.namespace
        self.kind = kind
        self._path = (*kind.api, cluster.namespace, kind.plural)
        self._cluster = cluster
        self._lock = threading.RLock()
        self._callbacks: dict[str, dict[object, Callable[[], None]]] = {}
        self._watches: dict[str, ResourceWatch] = {}
        self._state = _State(self.namespace, kind)
        self._views: dict[str, JobView] = {}

    def subscribe(self, job_name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called whenever something about the job has changed.

        Args:
            job_name: The object.
            callback: Called in a thread of the watch. It must be quick, and may look at `view`.

        Returns:
            A function that ends the subscription; more than one call of it is fine.
        """
        token = object()
        with self._lock:
            self._callbacks.setdefault(job_name, {})[token] = callback
            if not self._watches:
                self._start()
            elif JOBS in self._state.listed and job_name not in self._state.jobs:
                self._look_up(job_name)
        return functools.partial(self._unsubscribe, job_name, token)

    def view(self, job_name: str) -> JobView:
        """What is known now."""
        with self._lock:
            found = self._views.get(job_name)
            if found is None:
                found = self._views[job_name] = self._state.view(job_name)
            return found

    # -- inside -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        core, custom, namespace = self._cluster.core, self._cluster.custom, self.namespace
        state = self._state = _State(namespace, self.kind)
        state.followed = self._callbacks.keys()
        self._views.clear()
        jobs = functools.partial(custom.list_namespaced_custom_object, *self._path, label_selector=SELECTOR)
        pods = functools.partial(core.list_namespaced_pod, namespace, label_selector=SELECTOR)
        events = functools.partial(core.list_namespaced_event, namespace)
        self._watches = {
            kind: ResourceWatch(f"kale_dist watch {kind} of {namespace}", call, _Sink(self, state, kind))
            for kind, call in ((JOBS, jobs), ("pods", pods), ("events", events))
        }
        for watch in self._watches.values():
            watch.start()

    def _unsubscribe(self, job_name: str, token: object) -> None:
        with self._lock:
            callbacks = self._callbacks.get(job_name, {})
            callbacks.pop(token, None)
            if not callbacks:
                self._callbacks.pop(job_name, None)
            if self._callbacks:
                return
            watches, self._watches = self._watches, {}
        for watch in watches.values():
            watch.stop()

    def take(self, state: _State, kind: str, change: Callable[[], set[str]], *, is_list: bool = False) -> None:
        """Apply a change to what is known, and call those whose jobs it concerns. For the watches' threads.

        Args:
            state: What is to be changed; that of watches that have been stopped is left alone.
            kind: What was listed or has changed.
            change: Changes it and returns the names of the jobs concerned.
            is_list: Whether all objects of the kind were listed.
        """
        with self._lock:
            if state is not self._state or not self._watches:
                return
            before = dict(state.problems), state.lacks_events
            names = change()
            if before != (state.problems, state.lacks_events):
                names = set(self._callbacks)
            if kind == JOBS and is_list:
                # It may have been made while the list was on its way.
                for name in self._callbacks:
                    if name not in state.jobs:
                        self._look_up(name)
            if kind in (JOBS, "events") and _QUOTAS not in self._watches and state.waiting_for_quota():
                self._watch_quotas(state)
            for name in names:
                self._views.pop(name, None)
            callbacks = [callback for name in names for callback in self._callbacks.get(name, {}).values()]
        for callback in callbacks:
            callback()

    def _look_up(self, name: str) -> None:
        """Ask for one job by its name: the watches tell nothing of what is not there."""
        state = self._state
        if name in state.deleted:
            return

        def ask() -> None:
            try:
                self._cluster.custom.get_namespaced_custom_object(*self._path, name, _request_timeout=_TIMEOUT_S)
            except ApiException as error:
                if error.status == http.HTTPStatus.NOT_FOUND:
                    self.take(state, "one job", lambda: state.is_missing(name))

        _in_background(f"look up {name}", ask)

    def _watch_quotas(self, state: _State) -> None:
        call = functools.partial(self._cluster.core.list_namespaced_resource_quota, self.namespace)
        watch = ResourceWatch(f"kale_dist watch {_QUOTAS} of {self.namespace}", call, _Sink(self, state, _QUOTAS))
        self._watches[_QUOTAS] = watch
        watch.start()

    def touch(self, names: Collection[str]) -> None:
        """Change something of jobs that wait under a quota, so that the operator looks at them now."""
        change = {"metadata": {"annotations": {TOUCHED_ANNOTATION: f"{time.time():.3f}"}}}

        def ask() -> None:
            for name in names:
                self._cluster.custom.patch_namespaced_custom_object(
                    *self._path, name, change, _request_timeout=_TIMEOUT_S
                )

        if names:
            _in_background("touch jobs", ask)


class _Sink:
    """Hands what one kind's watch says to the state that it was started for."""

    def __init__(self, owner: NamespaceWatch, state: _State, kind: str) -> None:
        self._owner, self._state, self._kind = owner, state, kind

    def listed(self, items: list[Object]) -> None:
        """Take all objects."""
        state = self._state
        take = {JOBS: state.list_jobs, "pods": state.list_pods}.get(self._kind)
        if take is None:
            for item in items:
                self.changed("ADDED", item)
        else:
            self._owner.take(state, self._kind, lambda: take(items), is_list=True)

    def changed(self, change: str, item: Object) -> None:
        """Take one object."""
        state = self._state
        if self._kind == _QUOTAS:
            if state.change_quota(item):
                self._owner.touch(state.waiting_for_quota())
            return
        take = {JOBS: state.change_job, "pods": state.change_pod, "events": state.change_event}[self._kind]
        self._owner.take(state, self._kind, lambda: take(change, item))

    def troubled(self, error: Exception | None) -> None:
        """Take what went wrong."""
        state, kind = self._state, self._kind
        if kind == _QUOTAS:
            return

        def note() -> set[str]:
            if error is None:
                state.problems.pop(kind, None)
            elif kind != "events":
                state.problems[kind] = _describe(state, kind, error)
            if kind == "events":
                state.lacks_events = getattr(error, "status", None) == http.HTTPStatus.FORBIDDEN
            return set()

        self._owner.take(state, "troubles", note)


class _State:
    """What is known of one namespace. Each method that takes something returns the names of the jobs concerned."""

    def __init__(self, namespace: str, kind: Kind) -> None:
        self.namespace = namespace
        self.kind = kind
        self._told_kinds = {"Pod", "PersistentVolumeClaim", "Workload", *(told for told, _ in kind.told_by(""))}
        self.followed: Collection[str] = ()
        """Jobs whose deleted pods are remembered."""
        self.problems: dict[str, str] = {}
        """Kind of object to why nothing is known of it now."""
        self.lacks_events = False
        self.listed: set[str] = set()
        """Kinds of which all objects are known: a job whose pods were not listed yet only seems to have none."""
        self.jobs: dict[str, Object] = {}
        self.deleted: set[str] = set()
        self._pods: dict[str, dict[str, PodView]] = {}
        self._events: dict[tuple[str, str], dict[str, EventView]] = {}
        self._quota_used: dict[str, dict[str, str]] = {}

    def view(self, name: str) -> JobView:
        """One job."""
        job = self.jobs.get(name)
        # Pods of an earlier job of this name may still be ending.
        since = 0.0 if job is None else seconds(job["metadata"].get("creationTimestamp")) or 0.0
        pods = [pod for pod in self._pods.get(name, {}).values() if pod.created >= since]
        about = [*self.kind.told_by(name), ("Workload", name), *(("Pod", pod.name) for pod in pods)]
        events = [event for key in about for event in self._events.get(key, {}).values() if event.time >= since]
        for claim in dict.fromkeys(claim for pod in pods for claim in pod.claims):
            events += self._events.get(("PersistentVolumeClaim", claim), {}).values()
        problem = " ".join(dict.fromkeys(self.problems.values()))
        return JobView(
            name=name,
            namespace=self.namespace,
            job=job,
            pods=tuple(sorted(pods, key=lambda pod: pod.created)),
            events=tuple(sorted(events, key=lambda event: event.time)),
            # With --cascade=foreground, an object stays until its pods are gone.
            is_deleted=name in self.deleted or (job is not None and "deletionTimestamp" in job["metadata"]),
            healthy=not problem,
            is_complete={JOBS, "pods"} <= self.listed,
            problem=problem,
            lacks_events=self.lacks_events,
        )

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def list_jobs(self, items: Sequence[Object]) -> set[str]:
        """All jobs there are. A job of which nothing is known yet may still come: see `is_missing`."""
        now = {item["metadata"]["name"]: item for item in items}
        gone = set(self.jobs) - set(now)
        changed = {name for name, item in now.items() if item != self.jobs.get(name)}
        self.deleted = (self.deleted | gone) - set(now)
        self.jobs = now
        self.listed.add(JOBS)
        return changed | gone

    def change_job(self, change: str, item: Object) -> set[str]:
        """A job was `ADDED`, `MODIFIED` or `DELETED`."""
        name = item["metadata"]["name"]
        if change == "DELETED":
            self.jobs.pop(name, None)
            self.deleted.add(name)
        else:
            self.jobs[name] = item
            self.deleted.discard(name)
        return {name}

    def is_missing(self, name: str) -> set[str]:
        """The cluster has no job of this name, as it says when asked for it."""
        if name in self.jobs or name in self.deleted:
            return set()
        self.deleted.add(name)
        return {name}

    # -- pods ---------------------------------------------------------------------------------------------------------

    def list_pods(self, items: Sequence[Object]) -> set[str]:
        """All pods there are."""
        names = {name for item in items for name in self.change_pod("MODIFIED", item)}
        if "pods" not in self.listed:
            self.listed.add("pods")
            names |= set(self.followed)
        there = {item["metadata"]["uid"] for item in items}
        for name, pods in list(self._pods.items()):
            for uid, pod in list(pods.items()):
                if uid not in there and not pod.is_gone:
                    self._lose_pod(name, pod)
                    names.add(name)
        return names

    def change_pod(self, change: str, item: Object) -> set[str]:
        """A pod was `ADDED`, `MODIFIED` or `DELETED`. What changes nothing that is shown concerns no job."""
        name = (item["metadata"].get("labels") or {}).get(OBJECT_LABEL)
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

    def _lose_pod(self, name: str, pod: PodView) -> None:
        pods = self._pods.setdefault(name, {})
        if name in self.followed:
            pods[pod.uid] = dataclasses.replace(pod, is_gone=True)
            return
        pods.pop(pod.uid, None)
        if not pods:
            del self._pods[name]

    # -- events and quotas ----------------------------------------------------------------------------------------------

    def change_event(self, change: str, item: Object) -> set[str]:
        """An event of anything in the namespace.

        What may be ours is kept, for it may be heard of before its object; whether it is, names and UIDs tell later.
        """
        event = event_view(item)
        name, kind = event.name, event.kind
        if kind == "Workload":
            name = owner_of_workload(name, self.kind)
        if change == "DELETED" or kind not in self._told_kinds:
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
        if kind == "Pod":
            return {job for job, pods in self._pods.items() if any(name == pod.name for pod in pods.values())}
        return {job for job in tuple(self.followed) if (kind, name) in (("Workload", job), *self.kind.told_by(job))}

    def waiting_for_quota(self) -> set[str]:
        """Followed jobs of which a quota has refused pods."""
        return {
            name
            for name in tuple(self.followed)
            if name in self.jobs
            and any(
                _QUOTA_REFUSAL in event.message
                for told in self.kind.told_by(name)
                for event in self._events.get(told, {}).values()
            )
        }

    def change_quota(self, item: Object) -> bool:
        """A quota was listed or has changed. Whether less of it is used than before."""
        used, name = (item.get("status") or {}).get("used") or {}, item["metadata"]["name"]
        before, self._quota_used[name] = self._quota_used.get(name, {}), used
        return any(quantities.amount(used.get(key, "0")) < quantities.amount(text) for key, text in before.items())


def _describe(state: _State, kind: str, error: Exception) -> str:
    status = getattr(error, "status", None)
    if status == http.HTTPStatus.NOT_FOUND and kind == JOBS:
        return str(sentences.of("operator-missing", **sentences.facts_of(state.kind)))
    if status == http.HTTPStatus.FORBIDDEN:
        what = state.kind.plural if kind == JOBS else kind
        return str(sentences.of("not-readable", kind=what, namespace=state.namespace))
    if status == http.HTTPStatus.UNAUTHORIZED:
        return str(sentences.of("credentials"))
    what = f"answers with {status}" if status else f"cannot be reached ({type(error).__name__})"
    return str(sentences.of("watch-cut", what=what))


def _in_background(what: str, ask: Callable[[], None]) -> None:
    """Ask something of the cluster whose refusal is no trouble: the watches tell of a cluster that does not answer."""

    def run() -> None:
        with contextlib.suppress(Exception):
            ask()

    threading.Thread(target=run, name=f"kale_dist {what}", daemon=True).start()


_shared: dict[tuple[str, str, str, str], NamespaceWatch] = {}
_shared_lock = threading.Lock()


def shared(cluster: Cluster, kind: Kind) -> NamespaceWatch:
    """The watch of one kind in a cluster's namespace for this process and user."""
    key = (cluster.server, cluster.identity, cluster.namespace, kind.word)
    with _shared_lock:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = NamespaceWatch(cluster, kind)
        return found
