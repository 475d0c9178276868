"""Watches the jobs of a namespace: one set of watches for all jobs of this process.

Three threads read one `ResourceWatch` each (the objects of one kind, pods, events) into one `_State`, from which `view` makes a
frozen `JobView`. While a job waits under a quota, a fourth one reads the quotas: when room becomes free, the job is touched,
because the operator's own retries back off (32 s against 0.3 s: tried).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from kale_dist.job.spec import quantities
from kale_dist.places.kubernetes import views
from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.explain import sentences
from kale_dist.places.kubernetes.resource_watch import DELETED, LISTED, TROUBLED, ResourceWatch
from kale_dist.places.manifests import Kind
from kale_dist.places.manifests.object_settings import OBJECT_LABEL, SELECTOR, TOUCHED_ANNOTATION

_JOBS, _PODS, _EVENTS, _QUOTAS = "jobs", "pods", "events", "resourcequotas"
"""What is watched. Objects are called jobs here, whatever their kind."""

_MISSING = "MISSING"
"""The change of a job that was looked up by its name and does not exist."""

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
        self._cluster = cluster
        self._kind = kind
        self._path = (*kind.api, cluster.namespace, kind.plural)
        self._lock = threading.RLock()
        self._callbacks: dict[str, dict[object, Callable[[], None]]] = {}
        self._watches: dict[str, ResourceWatch] = {}
        self._state = _State(cluster.namespace, kind, self._callbacks.keys())

    def subscribe(self, job_name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called whenever something about the job has changed.

        Args:
            job_name: The object.
            callback: Called in a thread of the watch. It must be quick, and may call `view`.

        Returns:
            A function that ends the subscription; more than one call of it is fine.
        """
        token = object()
        with self._lock:
            self._callbacks.setdefault(job_name, {})[token] = callback
            if not self._watches:
                self._start()
            elif _JOBS in self._state.listed and job_name not in self._state.jobs:
                self._look_up(job_name)
        return functools.partial(self._unsubscribe, job_name, token)

    def view(self, job_name: str) -> views.JobView:
        """What is known of a job now."""
        with self._lock:
            return self._state.view(job_name)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        core, custom, namespace = self._cluster.core, self._cluster.custom, self._cluster.namespace
        self._state = _State(namespace, self._kind, self._callbacks.keys())
        self._watch(_JOBS, custom.list_namespaced_custom_object, *self._path, label_selector=SELECTOR)
        self._watch(_PODS, core.list_namespaced_pod, namespace, label_selector=SELECTOR)
        self._watch(_EVENTS, core.list_namespaced_event, namespace)

    def _watch(self, what: str, call: Callable[..., Any], *where: str, **selector: str) -> None:
        watch = self._watches[what] = ResourceWatch(functools.partial(call, *where, **selector))
        _in_thread(f"watch {what} of {self._cluster.namespace}", self._follow, watch, self._state, what)

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

    def _follow(self, watch: ResourceWatch, state: _State, what: str) -> None:
        """Apply each change to the state, and call those who follow a job that it concerns."""
        try:
            for change, value in watch:
                self._apply(state, what, change, value)
        except Exception as error:
            self._apply(state, what, TROUBLED, error)
            raise

    def _apply(self, state: _State, what: str, change: str, value: Any) -> None:
        with self._lock:
            if state is not self._state or not self._watches:
                return
            names = state.apply(what, change, value)
            if what == _JOBS and change == LISTED:
                # They may have been made while the list was on its way.
                for name in self._callbacks.keys() - state.jobs.keys():
                    self._look_up(name)
            if what in (_JOBS, _EVENTS) and _QUOTAS not in self._watches and state.waiting_for_quota():
                self._watch(_QUOTAS, self._cluster.core.list_namespaced_resource_quota, self._cluster.namespace)
            callbacks = [callback for name in names for callback in self._callbacks.get(name, {}).values()]
        for callback in callbacks:
            callback()
        if what == _QUOTAS:
            self._touch(names)

    def _look_up(self, name: str) -> None:
        """Ask for one job by its name, as watches do not mention what does not exist."""
        if name not in self._state.deleted:
            _in_thread(f"look up {name}", self._ask_for, self._state, name)

    def _ask_for(self, state: _State, name: str) -> None:
        try:
            self._cluster.custom.get_namespaced_custom_object(*self._path, name, _request_timeout=_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - the watches report a cluster that does not answer
            if getattr(error, "status", None) == http.HTTPStatus.NOT_FOUND:
                self._apply(state, _JOBS, _MISSING, {"metadata": {"name": name}})

    def _touch(self, names: Collection[str]) -> None:
        """Change something of jobs that wait under a quota, so that the operator looks at them now."""
        change = {"metadata": {"annotations": {TOUCHED_ANNOTATION: f"{time.time():.3f}"}}}
        for name in names:
            with contextlib.suppress(Exception):
                self._cluster.custom.patch_namespaced_custom_object(
                    *self._path, name, change, _request_timeout=_TIMEOUT_S
                )


class _State:
    """What is known of one namespace.

    Args:
        namespace: Its name.
        kind: What the jobs are.
        followed: Names of the jobs with a subscription, as a live view: their deleted pods are remembered.
    """

    def __init__(self, namespace: str, kind: Kind, followed: Collection[str]) -> None:
        self._namespace = namespace
        self._kind = kind
        self._followed = followed
        self._about = {"Pod", "PersistentVolumeClaim", "Workload", *(about for about, _ in kind.reporters_of(""))}
        """Kinds of objects whose events are kept."""
        self.listed: set[str] = set()
        """Kinds of objects that were listed as a whole: before, a job only seems to have no pods."""
        self.jobs: dict[str, Object] = {}
        self.deleted: set[str] = set()
        self._pods: dict[str, dict[str, views.PodView]] = {}
        self._events: dict[tuple[str, str], dict[str, views.EventView]] = {}
        self._quota_used: dict[str, dict[str, str]] = {}
        self._problems: dict[str, str] = {}
        """Why nothing is known of jobs or pods now."""
        self._lacks_events = False

    def view(self, name: str) -> views.JobView:
        """All that is known of a job now."""
        job = self.jobs.get(name)
        # Pods of an earlier job of this name may still be ending.
        since = 0.0 if job is None else views.seconds(job["metadata"].get("creationTimestamp")) or 0.0
        pods = [pod for pod in self._pods.get(name, {}).values() if pod.created >= since]
        about = [*self._kind.reporters_of(name), ("Workload", name), *(("Pod", pod.name) for pod in pods)]
        events = [event for key in about for event in self._events.get(key, {}).values() if event.time >= since]
        for claim in dict.fromkeys(claim for pod in pods for claim in pod.claims):
            events += self._events.get(("PersistentVolumeClaim", claim), {}).values()
        return views.JobView(
            name=name,
            namespace=self._namespace,
            job=job,
            pods=tuple(sorted(pods, key=lambda pod: pod.created)),
            events=tuple(sorted(events, key=lambda event: event.time)),
            # With --cascade=foreground, an object stays until its pods are gone.
            is_deleted=name in self.deleted or (job is not None and "deletionTimestamp" in job["metadata"]),
            is_complete={_JOBS, _PODS} <= self.listed,
            problem=" ".join(dict.fromkeys(self._problems.values())),
            lacks_events=self._lacks_events,
        )

    def waiting_for_quota(self) -> set[str]:
        """Followed jobs of which a quota has refused pods."""

        def is_refused(name: str) -> bool:
            known = (self._events.get(about, {}).values() for about in self._kind.reporters_of(name))
            return any(_QUOTA_REFUSAL in event.message for events in known for event in events)

        return {name for name in self._followed if name in self.jobs and is_refused(name)}

    def apply(self, what: str, change: str, value: Any) -> set[str]:
        """Take in what a `ResourceWatch` yields.

        Returns:
            Names of the jobs that it concerns; of a quota those that wait for it, if less of it is used than before.
        """
        if change == TROUBLED:
            return self._trouble(what, value)
        take: Callable[[str, Object], set[str]] = {
            _JOBS: self._job, _PODS: self._pod, _EVENTS: self._event, _QUOTAS: self._quota
        }[what]  # fmt: skip
        if change != LISTED:
            return take(change, value)
        names = self._vanish(what, value)
        if what == _PODS and what not in self.listed:
            names |= set(self._followed)
        self.listed.add(what)
        return names

    def _vanish(self, what: str, there: Collection[str]) -> set[str]:
        """Jobs or pods were deleted between two lists: their uids are not in the second."""
        if what == _JOBS:
            jobs = [job for job in self.jobs.values() if job["metadata"]["uid"] not in there]
            return {name for job in jobs for name in self._job(DELETED, job)}
        pods = [(name, pod) for name, found in self._pods.items() for pod in found.values()] if what == _PODS else []
        lost = [(name, pod) for name, pod in pods if pod.uid not in there and not (pod.is_gone or pod.is_past)]
        for name, pod in lost:
            self._lose_pod(name, pod)
        return {name for name, _ in lost}

    def _job(self, change: str, item: Object) -> set[str]:
        name = item["metadata"]["name"]
        if self.jobs.get(name) == item and change != DELETED:
            return set()
        # It may have come in the meantime.
        if change == _MISSING and name in self.jobs:
            return set()
        if change in (DELETED, _MISSING):
            self.jobs.pop(name, None)
            self.deleted.add(name)
        else:
            self.jobs[name] = item
            self.deleted.discard(name)
        return {name}

    def _pod(self, change: str, item: Object) -> set[str]:
        """A pod's change; one in which nothing differs that is shown concerns no job."""
        name = (item["metadata"].get("labels") or {}).get(OBJECT_LABEL)
        if name is None:
            return set()
        pods = self._pods.get(name, {})
        last = max((pod.life for pod in pods.values() if pod.uid == item["metadata"]["uid"]), default=0)
        lives = {pod.identity: pod for pod in views.lives_of(item, last)}
        if change != DELETED and lives.items() <= pods.items():
            return set()
        self._pods.setdefault(name, {}).update(lives)
        if change == DELETED:
            self._lose_pod(name, [*lives.values()][-1])
        return {name}

    def _lose_pod(self, name: str, pod: views.PodView) -> None:
        pods = self._pods.setdefault(name, {})
        if name in self._followed:
            pods[pod.identity] = dataclasses.replace(pod, is_gone=True)
            return
        for key in [key for key, one in pods.items() if one.uid == pod.uid]:
            del pods[key]
        if not pods:
            del self._pods[name]

    def _event(self, change: str, item: Object) -> set[str]:
        """An event of anything in the namespace.

        It may come before the object that it is about, so it is kept if it may be one of a job; `view` selects by names and times.
        """
        event = views.event_view(item)
        name, kind = event.name, event.kind
        if kind == "Workload":
            name = views.owner_of_workload(name, self._kind)
        if change == DELETED or kind not in self._about:
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
        return {job for job in self._followed if (kind, name) in (("Workload", job), *self._kind.reporters_of(job))}

    def _quota(self, _: str, item: Object) -> set[str]:
        used, name = (item.get("status") or {}).get("used") or {}, item["metadata"]["name"]
        before, self._quota_used[name] = self._quota_used.get(name, {}), used
        is_less = any(quantities.amount(used.get(key, "0")) < quantities.amount(text) for key, text in before.items())
        return self.waiting_for_quota() if is_less else set()

    def _trouble(self, what: str, error: Exception | None) -> set[str]:
        """Note why changes do not arrive, or that they arrive again; all followed jobs are concerned if that differs from before."""
        before = dict(self._problems), self._lacks_events
        if what == _EVENTS:
            self._lacks_events = getattr(error, "status", None) == http.HTTPStatus.FORBIDDEN
        elif error is None:
            self._problems.pop(what, None)
        elif what != _QUOTAS:
            self._problems[what] = self._describe(what, error)
        return set() if before == (self._problems, self._lacks_events) else set(self._followed)

    def _describe(self, what: str, error: Exception) -> str:
        status = getattr(error, "status", None)
        if status == http.HTTPStatus.NOT_FOUND and what == _JOBS:
            return str(sentences.of("operator-missing", **sentences.facts_of(self._kind)))
        if status == http.HTTPStatus.FORBIDDEN:
            plural = self._kind.plural if what == _JOBS else what
            return str(
                sentences.of("not-readable", kind=plural, namespace=self._namespace, unknown="the state of the job")
            )
        if status == http.HTTPStatus.UNAUTHORIZED:
            return str(sentences.of("credentials", status=f"{status}"))
        problem = f"answers with {status}" if status else f"cannot be reached ({type(error).__name__})"
        return str(sentences.of("watch-cut", what=problem))


def _in_thread(name: str, target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name=f"kale_dist {name}", daemon=True).start()


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
