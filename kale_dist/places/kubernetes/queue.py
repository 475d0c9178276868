"""The position in its queue of a job that Kueue has suspended."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.views import QueuePosition
from kale_dist.places.manifests import Kind
from kale_dist.places.manifests.object_settings import QUEUE_LABEL

_GROUP = "kueue.x-k8s.io"
_TIMEOUT_S = 5.0
_FRESH_S = 5.0
"""How long an answer serves all jobs of a queue: each of them looks every second or two."""

_Positions = Mapping[tuple[str, str], QueuePosition]
"""Positions of workloads by kind and name of the objects that they were made for."""


def queue_of(job: Mapping[str, Any]) -> str:
    """The local queue of a job's object; empty if it is in none."""
    return str((job["metadata"].get("labels") or {}).get(QUEUE_LABEL) or "")


def position(cluster: Cluster, kind: Kind, job: Mapping[str, Any]) -> QueuePosition | None:
    """The position of a job's object in its queue; None if it does not wait there, or if this user may not read it.

    Kueue's visibility API knows the order of all jobs that wait for the same quota, those of other namespaces among them. Where
    it is not served, or not for this user, the workloads of the namespace are put in order.
    """
    if not kind.is_suspended(job) or not queue_of(job):
        return None
    meta = job["metadata"]
    positions = _positions(cluster, meta["namespace"], queue_of(job))
    return next((positions[owner] for owner in kind.reporters_of(meta["name"]) if owner in positions), None)


_lock = threading.Lock()
_known: dict[tuple[str, str, str, str], tuple[float, _Positions]] = {}


def _positions(cluster: Cluster, namespace: str, queue: str) -> _Positions:
    key = (cluster.server, cluster.identity, namespace, queue)
    # One request at a time: the others take its answer.
    with _lock:
        asked, found = _known.get(key, (-_FRESH_S, {}))
        if time.monotonic() - asked > _FRESH_S:
            found = _in_cluster_queue(cluster, namespace, queue) or _in_namespace(cluster, namespace, queue)
            _known[key] = time.monotonic(), found
    return found


def _in_cluster_queue(cluster: Cluster, namespace: str, queue: str) -> _Positions:
    where = (f"visibility.{_GROUP}", "v1beta1", namespace, "localqueues", f"{queue}/pendingworkloads")
    read = functools.partial(cluster.custom.get_namespaced_custom_object, *where)
    return {
        owner: QueuePosition(number=int(workload.get("positionInClusterQueue", 0)) + 1)
        for workload in _items(read)
        for owner in _owners(workload)
    }


def _in_namespace(cluster: Cluster, namespace: str, queue: str) -> _Positions:
    where = (_GROUP, "v1beta1", namespace, "workloads")
    workloads = _items(functools.partial(cluster.custom.list_namespaced_custom_object, *where))
    here = [workload for workload in workloads if workload["spec"].get("queueName") == queue and _waits(workload)]
    here.sort(key=lambda one: (-int(one["spec"].get("priority", 0)), one["metadata"]["creationTimestamp"]))
    waiting = [workload for workload in here if not _problem(workload)]
    positions = [QueuePosition(number=number, of=len(waiting)) for number in range(1, len(waiting) + 1)]
    refused = [(workload, QueuePosition(number=None, problem=_problem(workload))) for workload in here]
    return {
        owner: position
        for workload, position in (*refused, *zip(waiting, positions, strict=True))
        for owner in _owners(workload)
    }


def _waits(workload: Mapping[str, Any]) -> bool:
    held = {item["type"] for item in _conditions(workload) if item["status"] == "True"}
    return bool(workload["spec"].get("active", True)) and not held & {"QuotaReserved", "Admitted", "Finished"}


def _problem(workload: Mapping[str, Any]) -> str:
    """Why Kueue does not even put it into the queue, such as one that does not exist."""
    return next(
        (str(item.get("message")) for item in _conditions(workload) if item.get("reason") == "Inadmissible"), ""
    )


def _conditions(workload: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (workload.get("status") or {}).get("conditions") or ()


def _owners(workload: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(owner["kind"], owner["name"]) for owner in workload["metadata"].get("ownerReferences") or ()]


def _items(read: Callable[..., Any]) -> Sequence[Mapping[str, Any]]:
    """The items of a list; empty if it is not served, or if this user may not read it."""
    try:
        return list(read(_request_timeout=_TIMEOUT_S)["items"] or ())
    except Exception:  # noqa: BLE001 - a job waits the same without its position
        return ()
