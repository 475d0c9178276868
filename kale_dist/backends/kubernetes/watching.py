"""What happens to the jobs of a namespace: one set of watches for all jobs of this process. Never polls while it may watch."""

from __future__ import annotations

import contextlib
import functools
import http
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kubernetes.client.exceptions import ApiException

from kale_dist.backends.kubernetes import troubles
from kale_dist.backends.kubernetes.namespace_state import NamespaceState, Object
from kale_dist.backends.kubernetes.resource_watch import ResourceWatch
from kale_dist.backends.kubernetes.views import JobView, PodView, node_view

if TYPE_CHECKING:
    from kale_dist.backends.kubernetes.client import Cluster

__all__ = ["JobView", "NamespaceWatch", "PodView", "shared"]

SELECTOR = "app.kubernetes.io/managed-by=kale-dist"
"""Of jobs and pods of this library, whoever submitted them."""

_GROUP, _VERSION, _PLURAL = "kubeflow.org", "v1", "pytorchjobs"
_NODES_S = 60.0
_NODES = 200
_TIMEOUT_S = 10.0


class NamespaceWatch:
    """All jobs of this library in one namespace. Its threads run while somebody has subscribed.

    Args:
        cluster: Where; its namespace is watched.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.namespace = cluster.namespace
        self._cluster = cluster
        self._lock = threading.RLock()
        self._callbacks: dict[str, dict[object, Callable[[str], None]]] = {}
        self._watches: tuple[ResourceWatch, ...] = ()
        self._state = NamespaceState(self.namespace)
        self._views: dict[str, JobView] = {}
        self._nodes_looked_at = -_NODES_S

    def subscribe(self, job_name: str, callback: Callable[[str], None]) -> Callable[[], None]:
        """Have `callback` called with the job's name whenever something about the job has changed.

        Args:
            job_name: The job. It has been made, or nobody waits for it to be.
            callback: Called in a thread of the watch. It must be quick, and may look at `view`.

        Returns:
            A function that ends the subscription; more than one call of it is fine.
        """
        token = object()
        with self._lock:
            self._callbacks.setdefault(job_name, {})[token] = callback
            self._state.followed = self._callbacks.keys()
            if not self._watches:
                self._start()
            elif self._state.has_listed_jobs and not self._state.knows(job_name):
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
        state = self._state = NamespaceState(namespace)
        state.followed = self._callbacks.keys()
        self._views.clear()
        self._nodes_looked_at = -_NODES_S
        jobs = functools.partial(
            custom.list_namespaced_custom_object, _GROUP, _VERSION, namespace, _PLURAL, label_selector=SELECTOR
        )
        pods = functools.partial(core.list_namespaced_pod, namespace, label_selector=SELECTOR)
        events = functools.partial(core.list_namespaced_event, namespace)
        self._watches = tuple(
            ResourceWatch(f"kale_dist watch {kind} of {namespace}", call, _Sink(self, state, kind, on_list, on_change))
            for kind, call, on_list, on_change in (
                (_PLURAL, jobs, state.list_jobs, state.change_job),
                ("pods", pods, state.list_pods, state.change_pod),
                ("events", events, state.list_events, state.change_event),
            )
        )
        for watch in self._watches:
            watch.start()

    def _unsubscribe(self, job_name: str, token: object) -> None:
        with self._lock:
            callbacks = self._callbacks.get(job_name, {})
            callbacks.pop(token, None)
            if not callbacks:
                self._callbacks.pop(job_name, None)
            if self._callbacks:
                return
            watches, self._watches = self._watches, ()
        for watch in watches:
            watch.stop()

    def take(self, state: NamespaceState, kind: str, change: Callable[[], set[str]]) -> None:
        """Apply a change to what is known, and tell those whose jobs it concerns. For the watches' threads.

        Args:
            state: What is to be changed; that of watches that have been stopped is left alone.
            kind: What was listed or has changed.
            change: Changes it and returns the names of the jobs concerned.
        """
        with self._lock:
            if state is not self._state or not self._watches:
                return
            before = (dict(state.problems), dict(state.degraded))
            names = change()
            if before != (state.problems, state.degraded):
                names = set(self._callbacks)
            if kind == _PLURAL and state.has_listed_jobs:
                # It may have been made while the list was on its way.
                for name in self._callbacks:
                    if not state.knows(name):
                        self._look_up(name)
            if kind == "pods" and state.lacks_resources(names):
                self._look_at_nodes()
            for name in names:
                self._views.pop(name, None)
            callbacks = [(name, callback) for name in names for callback in self._callbacks.get(name, {}).values()]
        for name, callback in callbacks:
            callback(name)

    def _look_up(self, name: str) -> None:
        """Ask for one job by its name: the watches tell nothing of what is not there."""
        state = self._state
        if state.view(name).is_deleted:
            return

        def look() -> None:
            try:
                self._cluster.custom.get_namespaced_custom_object(
                    _GROUP, _VERSION, self.namespace, _PLURAL, name, _request_timeout=_TIMEOUT_S
                )
            except ApiException as error:
                if error.status == http.HTTPStatus.NOT_FOUND:
                    self.take(state, "one job", lambda: state.is_missing(name))
            except Exception:  # noqa: BLE001 - the watches tell of a cluster that does not answer
                return

        threading.Thread(target=look, name=f"kale_dist look up {name}", daemon=True).start()

    def _look_at_nodes(self) -> None:
        """How much the cluster has, where this user may see it; few may, so that a refusal is no trouble."""
        state, now = self._state, time.monotonic()
        if now - self._nodes_looked_at < _NODES_S:
            return
        self._nodes_looked_at = now

        def look() -> None:
            with contextlib.suppress(Exception):
                response: Any = self._cluster.core.list_node(
                    limit=_NODES, _preload_content=False, _request_timeout=_TIMEOUT_S
                )
                nodes = tuple(node_view(item) for item in json.loads(response.data)["items"])

                def keep() -> set[str]:
                    state.nodes = nodes
                    return set(self._callbacks)

                self.take(state, "nodes", keep)

        threading.Thread(target=look, name="kale_dist list nodes", daemon=True).start()


class _Sink:
    """Hands what one kind's watch says to the state that it was started for."""

    def __init__(
        self,
        owner: NamespaceWatch,
        state: NamespaceState,
        kind: str,
        on_list: Callable[[list[Object]], set[str]],
        on_change: Callable[[str, Object], set[str]],
    ) -> None:
        self._owner = owner
        self._state = state
        self._kind = kind
        self._on_list = on_list
        self._on_change = on_change

    def listed(self, items: list[dict[str, Any]]) -> None:
        """Take all objects."""
        self._owner.take(self._state, self._kind, lambda: self._on_list(items))

    def changed(self, change: str, item: dict[str, Any]) -> None:
        """Take one object."""
        self._owner.take(
            self._state,
            f"one of {self._kind}" if self._kind == _PLURAL else self._kind,
            lambda: self._on_change(change, item),
        )

    def troubled(self, error: Exception | None, *, is_watch: bool) -> None:
        """Take what went wrong."""

        def note() -> set[str]:
            _note_trouble(self._state, self._kind, error, is_watch=is_watch)
            return set()

        self._owner.take(self._state, "troubles", note)


def _note_trouble(state: NamespaceState, kind: str, error: Exception | None, *, is_watch: bool) -> None:
    """Write down what cannot be learnt, in sentences."""
    if error is None:
        state.problems.pop(kind, None)
        # What may be listed but not watched stays so.
        if "watched" not in state.degraded.get(kind, "watched"):
            del state.degraded[kind]
    elif is_watch:
        state.degraded[kind] = (
            f"The {kind} of the namespace {state.namespace} may be listed but not watched, so that they are looked at every "
            f"2 s. The right to watch {kind} helps."
        )
    elif kind != "events":
        state.problems[kind] = _describe(state, kind, error)
    elif getattr(error, "status", None) == http.HTTPStatus.FORBIDDEN:
        state.degraded[kind] = (
            f"Without the right to list and watch events in the namespace {state.namespace} it cannot be said why pods are "
            "refused or wait for volumes."
        )


def _describe(state: NamespaceState, kind: str, error: Exception) -> str:
    status = getattr(error, "status", None)
    if status == http.HTTPStatus.NOT_FOUND and kind == _PLURAL:
        trouble = troubles.named("operator-missing")
        return f"{trouble.sentence[:1].upper()}{trouble.sentence[1:]}. {trouble.remedy}."
    if status == http.HTTPStatus.FORBIDDEN:
        return (
            f"This user may not list {kind} in the namespace {state.namespace}, so that the job's state cannot be seen. "
            f"Have the administrator grant get, list and watch of {kind}."
        )
    if status == http.HTTPStatus.UNAUTHORIZED:
        return "The cluster does not know this user any more (401). Log in again."
    what = f"answers with {status}" if status else f"cannot be reached ({type(error).__name__})"
    return f"The cluster's API server {what}; it is asked again by itself."


_shared: dict[tuple[str, str, str], NamespaceWatch] = {}
_shared_lock = threading.Lock()


def shared(cluster: Cluster) -> NamespaceWatch:
    """The watch of a cluster's namespace for this process and user."""
    key = (cluster.server, cluster.identity, cluster.namespace)
    with _shared_lock:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = NamespaceWatch(cluster)
        return found
