"""Frees what a job that has ended would hold for long: pods that wait for what will not come. They may hold GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from kale_dist.backends.kubernetes import states, submission
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.views import JobView, PodView
from kale_dist.backends.pod_client import PodClient
from kale_dist.errors import BackendError, StoreError


def replacements(view: JobView) -> Sequence[PodView]:
    """Pods that the operator has made for ones that somebody deleted, as far as they have not ended.

    They know nothing of the job so far, and wait for agents that have left.
    """
    firsts: dict[tuple[str, int], str] = {}
    for pod in sorted(states.current_pods(view), key=lambda pod: pod.created):
        firsts.setdefault((pod.replica_type, pod.index), pod.uid)
    return [
        pod for pod in view.pods if not pod.is_over and firsts.get((pod.replica_type, pod.index), pod.uid) != pod.uid
    ]


def are_all(view: JobView) -> bool:
    """Whether no pod of the job runs any longer, or is to run, but for such."""
    left = replacements(view)
    return all(pod.is_over or pod in left for pod in view.pods)


def suspend(cluster: Cluster, view: JobView) -> None:
    """Have the operator delete the pods of a job whose end it has not seen; their logs go with them.

    One that is suspended already is not to be resumed.
    """
    if view.job is not None and (states.is_suspended(view.job) or any(not pod.has_ended for pod in view.pods)):
        with contextlib.suppress(BackendError):
            submission.suspend(cluster, view.namespace, view.name)


def remove_replacements(cluster: Cluster, view: JobView, agent: Callable[[PodView], PodClient]) -> Sequence[str]:
    """Remove the pods that replace others: suspending a job that has failed does not.

    Args:
        cluster: Where the job is.
        view: What the cluster says of the job.
        agent: Gives the agent of a pod, which is told to end where this user may not delete pods.

    Returns:
        A sentence for each pod that could not be removed.
    """
    return [text for pod in replacements(view) if (text := _remove(cluster, view, pod, agent))]


def _remove(cluster: Cluster, view: JobView, pod: PodView, agent: Callable[[PodView], PodClient]) -> str:
    from kubernetes.client import V1DeleteOptions, V1Preconditions

    with contextlib.suppress(Exception):
        # Not by name alone: that may be another pod's by now.
        options = V1DeleteOptions(grace_period_seconds=1, preconditions=V1Preconditions(uid=pod.uid))
        cluster.core.delete_namespaced_pod(pod.name, view.namespace, body=options)
        return ""
    with contextlib.suppress(BackendError, StoreError, OSError):
        agent(pod).cancel(0.0)
        return ""
    return (
        f"Pod {pod.name}, which the operator made for one that was deleted, holds its resources until the job is "
        f"deleted, or the pod: kubectl -n {view.namespace} delete pod {pod.name}"
    )
