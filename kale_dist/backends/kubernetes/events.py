"""What the parts of a cluster have said about a job: the events of its object and its pods, as `kubectl describe` lists them."""

from __future__ import annotations

from typing import Any

from kale_dist.backends.base import PlaceEvent
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.explain import api
from kale_dist.backends.kubernetes.explain.api import Doing


def of_job(cluster: Cluster, namespace: str, job: str) -> list[PlaceEvent]:
    """Events of an object and of everything whose name begins with its own, oldest first.

    A cluster keeps events for an hour, unless it is set up otherwise.

    Args:
        cluster: The connection.
        namespace: The object's.
        job: The object's name, with which those of its pods begin.

    Raises:
        BackendError: The cluster refused.
    """
    try:
        listed = cluster.core.list_namespaced_event(namespace)
    except Exception as error:
        raise api.explain(error, Doing(verb="list", resource="events", namespace=namespace)) from error
    found = [_event(item) for item in listed.items if _is_about(item, job)]
    return sorted(found, key=lambda event: event.time)


def _is_about(item: Any, job: str) -> bool:
    name = item.involved_object.name or ""
    return bool(name == job or name.startswith(f"{job}-"))


def _event(item: Any) -> PlaceEvent:
    last = item.last_timestamp or item.event_time or item.metadata.creation_timestamp
    return PlaceEvent(
        time=last.timestamp() if last is not None else 0.0,
        about=f"{(item.involved_object.kind or '').lower()}/{item.involved_object.name}",
        is_warning=item.type == "Warning",
        reason=item.reason or "",
        message=" ".join((item.message or "").split()),
        count=item.count or 1,
    )
