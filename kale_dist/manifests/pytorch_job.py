"""A job as a PyTorchJob of Kubeflow's Training Operator, and the Secret with its input. Pure."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.manifests.patching import apply_patch
from kale_dist.manifests.pod_template import pod_template
from kale_dist.manifests.settings import (
    API_VERSION,
    CONTAINER,
    KIND,
    QUEUE_LABEL,
    RUN_LABEL,
    SPEC_ANNOTATION,
    PodSettings,
    has_master,
    input_secret_name,
    object_name,
    own_labels,
)
from kale_dist.spec import JobSpec

_LARGEST_ANNOTATION = 200_000
"""Characters; all annotations of an object together may have 256 KiB."""


def pytorch_job(spec: JobSpec, settings: PodSettings) -> dict[str, Any]:
    """The object to create. The same arguments give the same object, with its keys in the same order.

    Args:
        spec: The job.
        settings: What the backend has settled.

    Returns:
        A PyTorchJob (kubeflow.org/v1), patched as the user asks.

    Raises:
        ConfigError: The patch cannot be applied, or changes what the job depends on.
    """
    cluster = spec.cluster
    labels = {
        **own_labels(spec.name),
        **({QUEUE_LABEL: cluster.queue} if cluster.queue else {}),
        **({RUN_LABEL: str(settings.run)} if settings.run > 1 else {}),
        **dict(cluster.labels),
    }
    annotations = {**dict(cluster.annotations), **dict(settings.annotations), SPEC_ANNOTATION: spec_annotation(spec)}
    per_pod = spec.topology.processes_per_pod
    made = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": object_name(spec.name, settings.run),
            "namespace": settings.namespace,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {
            "runPolicy": _run_policy(spec),
            **({"nprocPerNode": str(per_pod)} if per_pod > 1 else {}),
            "pytorchReplicaSpecs": _replicas(spec, settings),
        },
    }
    if not cluster.patch:
        return made
    patched: dict[str, Any] = apply_patch(made, json.loads(cluster.patch))
    _check_patched(made, patched)
    return patched


def spec_annotation(spec: JobSpec) -> str:
    """The specification as JSON, for `attach` from another machine: without the variables' values.

    The digests of the blobs are left out where there are so many that an annotation could not hold them; they are in
    the job's order, too.
    """
    hidden = dataclasses.replace(spec, environment=tuple((name, "") for name, _ in spec.environment))
    for shown in (hidden, dataclasses.replace(hidden, blobs=())):
        text = json.dumps(shown.to_json(), separators=(",", ":"))
        if len(text) <= _LARGEST_ANNOTATION:
            break
    return text


def input_secret(spec: JobSpec, settings: PodSettings, owner_uid: str, data: Mapping[str, bytes]) -> dict[str, Any]:
    """The Secret that a run's pods wait for. It is deleted with the run's PyTorchJob.

    Args:
        spec: The job.
        settings: As for `pytorch_job`.
        owner_uid: UID of the PyTorchJob; empty: the Secret has no owner.
        data: Bytes by the names of `contract.InputFiles`.
    """
    name = object_name(spec.name, settings.run)
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": name, "uid": owner_uid, "blockOwnerDeletion": False}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": input_secret_name(name),
            "namespace": settings.namespace,
            "labels": own_labels(spec.name),
            **({"ownerReferences": [owner]} if owner_uid else {}),
        },
        "type": "Opaque",
        "immutable": True,
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }


def _run_policy(spec: JobSpec) -> dict[str, Any]:
    """Neither a deadline nor retries of the operator's: both delete pods and their logs."""
    cluster = spec.cluster
    policy: dict[str, Any] = {"cleanPodPolicy": "None"}
    if cluster.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = cluster.ttl_s
    if cluster.gang:
        policy["schedulingPolicy"] = {
            "minAvailable": cluster.min_available or spec.topology.number_of_pods,
            **({"priorityClass": cluster.priority_class} if cluster.priority_class else {}),
        }
    return policy


def _replicas(spec: JobSpec, settings: PodSettings) -> dict[str, Any]:
    topology = spec.topology
    world, per_pod, pods = topology.number_of_processes, topology.processes_per_pod, topology.number_of_pods
    head = min(world, per_pod)
    if not has_master(spec, master=settings.master):
        return {"Worker": _replica(spec, settings, first_pod=0, pods=pods, ranks=head)}
    replicas = {"Master": _replica(spec, settings, first_pod=0, pods=1, ranks=head)}
    if pods > 1:
        ranks = min(per_pod, world - head)
        replicas["Worker"] = _replica(spec, settings, first_pod=1, pods=pods - 1, ranks=ranks)
    return replicas


def _replica(spec: JobSpec, settings: PodSettings, *, first_pod: int, pods: int, ranks: int) -> dict[str, Any]:
    template = pod_template(spec, settings, first_pod=first_pod, ranks=ranks)
    return {"replicas": pods, "restartPolicy": "Never", "template": template}


def _check_patched(before: dict[str, Any], after: Any) -> None:
    """Refuse patches after which the job could not be found, or would not be this job."""

    def refuse(problem: str) -> ConfigError:
        return ConfigError("patch", problem, "Leave that out of the patch")

    try:
        changed = [
            path
            for path, old, new in (
                ("apiVersion", before["apiVersion"], after["apiVersion"]),
                ("kind", before["kind"], after["kind"]),
                ("metadata.name", before["metadata"]["name"], after["metadata"]["name"]),
                ("metadata.namespace", before["metadata"]["namespace"], after["metadata"]["namespace"]),
            )
            if old != new
        ]
        replicas = after["spec"]["pytorchReplicaSpecs"]
        if {kind: replica["replicas"] for kind, replica in replicas.items()} != {
            kind: replica["replicas"] for kind, replica in before["spec"]["pytorchReplicaSpecs"].items()
        }:
            changed.append("the number of replicas")
        if any(replica["restartPolicy"] != "Never" for replica in replicas.values()):
            changed.append("restartPolicy")
        without = [
            kind
            for kind, replica in replicas.items()
            if CONTAINER not in {container["name"] for container in replica["template"]["spec"]["containers"]}
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise refuse(f"after it the object is no PyTorchJob any more ({type(error).__name__}: {error})") from None
    if changed:
        raise refuse(f"it changes {changed[0]}, on which the job depends")
    if without:
        raise refuse(f"it removes the container {CONTAINER!r} of {without[0]}, in which the ranks run")
