"""The runtime that `kale-dist runtime` prints, with which a TrainJob has what the other kinds have. Pure.

A lost pod is made again, up to `MOST_RESTARTS` times each; a pod that has judged is not, and fails the job at once; the head's success ends
the pods that still wait. The pods are those of Pod Security "restricted".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.manifests.bootstrap import EXIT_CODE
from kale_dist.places.manifests.pod_template import CONTAINER_SECURITY, pod_security
from kale_dist.wire import EXIT_BROKEN, EXIT_LOST_HEAD

API_GROUP, API_VERSION = "trainer.kubeflow.org", "v1alpha1"
NAMESPACED, OF_CLUSTER = "TrainingRuntime", "ClusterTrainingRuntime"
"""The kinds of runtimes: of a namespace, and for all of a cluster."""

STEP = "node"
"""Trainer's name for the replicated job whose pods train, and for the container in each."""

NAME = "kale-dist"
"""The name of the runtime that a TrainJob takes if its call names none."""

VERSION = 1
"""Of what is rendered here: it goes up with each change that jobs depend on."""

MOST_RESTARTS = 20
"""How often a pod is made again."""

SETTINGS = ("priority_class", "runtime_class", "scheduler_name", "image_pull_policy")
"""Fields of `ClusterOptions` that a TrainJob takes from its runtime."""

_VERSION_LABEL = "kale-dist.dev/runtime"
_GRACE_S = 330
"""Before Trainer 2.3 it holds for all jobs, whatever their `grace_s` is."""


def make(name: str, options: ClusterOptions, ttl_s: int | None = None) -> dict[str, Any]:
    """The runtime to create.

    Args:
        name: Of the runtime.
        options: Its namespace (empty for a runtime of the whole cluster), user, priority class, runtime class, scheduler and pull
            policy.
        ttl_s: Seconds after its end when a job is deleted; None for never. Before Trainer 2.4 such a job runs again, for ever.
    """
    pod = {
        "restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_S, "securityContext": pod_security(options.run_as_user),
        "priorityClassName": options.priority_class, "runtimeClassName": options.runtime_class,
        "schedulerName": options.scheduler_name,
    }  # fmt: skip
    main = {"name": STEP, "image": "registry.example.com/replaced:1", "imagePullPolicy": options.image_pull_policy}
    containers = [{**_set(main), "securityContext": CONTAINER_SECURITY}]
    codes = {"containerName": STEP, "operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": {**codes, "values": [1, EXIT_BROKEN, EXIT_CODE]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # The head counts its losses.
        {"action": "Ignore", "onExitCodes": {**codes, "values": [EXIT_LOST_HEAD]}},
    ]
    job = {
        "completionMode": "Indexed",
        "backoffLimitPerIndex": MOST_RESTARTS,
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {"spec": {**_set(pod), "containers": containers}},
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    jobs = [{"name": STEP, "template": {"metadata": {"labels": labels}, "spec": job}}]
    ttl = {} if ttl_s is None else {"ttlSecondsAfterFinished": ttl_s}
    own_labels = {"trainer.kubeflow.org/framework": "torch", _VERSION_LABEL: str(VERSION)}
    return {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": NAMESPACED if options.namespace else OF_CLUSTER,
        "metadata": _set({"name": name, "namespace": options.namespace, "labels": own_labels}),
        "spec": {"mlPolicy": {"numNodes": 1}, "template": {"spec": {**ttl, "replicatedJobs": jobs}}},
    }


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not empty text."""
    return {name: value for name, value in fields.items() if value != ""}


def secured(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The `spec` of a pod with the security context that it has from a runtime of ours, unless it has its own."""
    containers = [{"securityContext": CONTAINER_SECURITY, **one} for one in pod["containers"]]
    return {"securityContext": pod_security(None), **pod, "containers": containers}


def option(field: str) -> str:
    """The option of `kale-dist runtime` for a field of `ClusterOptions`."""
    return f"--{field.removesuffix('_s').replace('_', '-')}"


def version_of(made: Mapping[str, Any]) -> int:
    """The version of a runtime that `kale-dist runtime` printed; 0 of any other."""
    label = str((made["metadata"].get("labels") or {}).get(_VERSION_LABEL, ""))
    return int(label) if label.isdecimal() else 0


def chosen(there: Mapping[str, Any], wanted: str) -> tuple[str, int]:
    """The runtime that a TrainJob takes, and its version; 0 for one of others, and without a name for Trainer's own.

    Args:
        there: The runtimes by their names, as far as they can be read.
        wanted: As `kd.Kubernetes(runtime=...)` has it; empty for `kale-dist`, that of the namespace first.
    """
    named = (wanted,) if wanted else (f"{NAMESPACED}/{NAME}", NAME)
    own = ((name, version_of(there[name])) for name in named if name in there)
    return next((found for found in own if found[1]), (wanted, 0))


def has_ttl(made: Mapping[str, Any]) -> bool:
    """Whether jobs of a runtime are deleted some time after their end: before Trainer 2.4 they then run again, for ever."""
    jobs = made["spec"]["template"]["spec"]
    inner = (one["template"]["spec"] for one in jobs.get("replicatedJobs") or ())
    return any("ttlSecondsAfterFinished" in one for one in (jobs, *inner))
