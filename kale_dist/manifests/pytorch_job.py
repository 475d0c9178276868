"""A job as a PyTorchJob of Kubeflow's Training Operator (v1): one Master with rank 0, and Workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kale_dist.manifests.kind import Kind, ObjectState, PodGroup, last_condition
from kale_dist.manifests.pod_template import pod_template
from kale_dist.manifests.settings import REPLICA_INDEX_LABEL, PodSettings, object_name
from kale_dist.spec import JobSpec

_INIT_CONTAINER = {
    "name": "init-pytorch",
    "image": "alpine:3.10",
    "command": ["sh", "-c", "true"],
    "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
}
"""As the operator puts it before workers beside a master."""


class PyTorchJob(Kind):
    """Workers only (`worker-0` has rank 0) where Pod Security forbids what the operator puts before workers beside a master."""

    word = "pytorch"
    name = "PyTorchJob"
    group, version, plural = "kubeflow.org", "v1", "pytorchjobs"
    container = "pytorch"
    roles = ("master", "worker")
    controller = "Kubeflow's Training Operator"
    find_controller = "kubectl get pods -A -l control-plane=kubeflow-training-operator"
    install = (
        "kubectl apply --server-side -k "
        "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3'"
    )
    is_automatic = True
    services_a_pod = True
    own_manager = "kubeflow.org/training-operator"

    def body(self, spec: JobSpec, settings: PodSettings) -> dict[str, Any]:
        """Run policy and replicas."""
        per_pod = spec.topology.processes_per_pod
        return {
            "runPolicy": _run_policy(spec),
            **({"nprocPerNode": str(per_pod)} if per_pod > 1 else {}),
            "pytorchReplicaSpecs": self._replicas(spec, settings),
        }

    def pod_groups(self, made: Mapping[str, Any]) -> list[PodGroup]:
        """Master, then workers, with the operator's init container before these."""
        replicas = made["spec"]["pytorchReplicaSpecs"]
        groups = []
        for role, replica in sorted(replicas.items()):
            waits = (_INIT_CONTAINER,) if role == "Worker" and "Master" in replicas else ()
            # The API fills in a number that is left out.
            pods, policy = int(replica.get("replicas", 1)), replica.get("restartPolicy", "")
            template = replica.get("template", {})
            group = PodGroup(role=role.lower(), pods=pods, template=template, restart_policy=policy, put_before=waits)
            groups.append(group)
        return groups

    def pod_names(self, spec: JobSpec, run: int = 1) -> tuple[str, ...]:
        """`x-master-0`, `x-worker-0`, ..."""
        pods, name = spec.topology.number_of_pods, object_name(spec.name, run)
        if not _has_master(spec):
            return tuple(f"{name}-worker-{index}" for index in range(pods))
        return (f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(pods - 1)))

    def head_host(self, spec: JobSpec, run: int = 1) -> str:
        """That of the head's Service, which the operator makes for each pod."""
        return self.pod_names(spec, run)[0]

    def state(self, made: Mapping[str, Any]) -> ObjectState:
        """Its last condition."""
        condition, status = last_condition(made), made.get("status") or {}
        word, message = condition.get("type"), str(condition.get("message") or "")
        limit: Any = ""
        for words, name in (("longer than specified deadline", "deadline"), ("backoff limit", "backoff")):
            limit = name if word == "Failed" and words in message.lower() else limit
        finished: Any = {"Succeeded": "succeeded", "Failed": "failed"}.get(str(word), "")
        return ObjectState(
            finished=finished,
            limit=limit,
            message=message if word == "Failed" else "",
            is_running=word == "Running",
            is_known=bool(condition),
            started=status.get("startTime"),
            ended=status.get("completionTime") or (condition.get("lastTransitionTime") if finished else None),
        )

    def suspension(self, *, value: bool) -> dict[str, Any]:
        """In its run policy."""
        return {"spec": {"runPolicy": {"suspend": value}}}

    def policy(self, made: Mapping[str, Any]) -> Mapping[str, Any]:
        """The run policy."""
        return (made.get("spec") or {}).get("runPolicy") or {}

    def _replicas(self, spec: JobSpec, settings: PodSettings) -> dict[str, Any]:
        topology = spec.topology
        world, per_pod, pods = topology.number_of_processes, topology.processes_per_pod, topology.number_of_pods
        head = min(world, per_pod)
        if not _has_master(spec):
            return {"Worker": self._replica(spec, settings, "worker", first_pod=0, pods=pods, ranks=head)}
        replicas = {"Master": self._replica(spec, settings, "master", first_pod=0, pods=1, ranks=head)}
        if pods > 1:
            ranks = min(per_pod, world - head)
            replicas["Worker"] = self._replica(spec, settings, "worker", first_pod=1, pods=pods - 1, ranks=ranks)
        return replicas

    def _replica(
        self, spec: JobSpec, settings: PodSettings, role: str, *, first_pod: int, pods: int, ranks: int
    ) -> dict[str, Any]:
        template = pod_template(
            spec, settings, container=self.container, first_pod=first_pod, ranks=ranks,
            index=f"metadata.labels['{REPLICA_INDEX_LABEL}']", role=role,
        )  # fmt: skip
        return {"replicas": pods, "restartPolicy": "Never", "template": template}


def _has_master(spec: JobSpec) -> bool:
    """A job of a single pod has a master in any case."""
    return spec.cluster.master is not False or spec.topology.number_of_pods == 1


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
