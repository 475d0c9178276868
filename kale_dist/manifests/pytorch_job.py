"""A job as a PyTorchJob of Kubeflow's Training Operator (v1): one Master with rank 0, and Workers. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kale_dist.manifests.kind import PodGroup
from kale_dist.manifests.kubeflow_job import KubeflowJob, run_policy
from kale_dist.manifests.settings import PodSettings, object_name
from kale_dist.spec import JobSpec

_INIT_CONTAINER = {
    "name": "init-pytorch",
    "image": "alpine:3.10",
    "command": ["sh", "-c", "true"],
    "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": {"cpu": "50m", "memory": "10Mi"}},
}
"""As the operator puts it before workers beside a master."""


class PyTorchJob(KubeflowJob):
    """Workers only (`worker-0` has rank 0) where Pod Security forbids what the operator puts before workers beside a master."""

    word = "pytorch"
    name = "PyTorchJob"
    group, version, plural = "kubeflow.org", "v1", "pytorchjobs"
    container = "pytorch"
    replicas_field = "pytorchReplicaSpecs"
    roles = ("master", "worker")
    controller = "Kubeflow's Training Operator"
    find_controller = "kubectl get pods -A -l control-plane=kubeflow-training-operator"
    install = (
        "kubectl apply --server-side -k "
        "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3'"
    )
    is_automatic = True
    services_a_pod = True

    def body(self, spec: JobSpec, settings: PodSettings) -> dict[str, Any]:
        """Run policy and replicas."""
        per_pod = spec.topology.processes_per_pod
        return {
            "runPolicy": run_policy(spec),
            **({"nprocPerNode": str(per_pod)} if per_pod > 1 else {}),
            "pytorchReplicaSpecs": self._replicas(spec, settings),
        }

    def pod_groups(self, made: Mapping[str, Any]) -> list[PodGroup]:
        """Master, then workers, with the operator's init container before these."""
        return [
            dataclasses.replace(group, put_before=(_INIT_CONTAINER,))
            if group.role == "worker" and "Master" in made["spec"][self.replicas_field]
            else group
            for group in sorted(super().pod_groups(made), key=lambda group: group.role)
        ]

    def pod_names(self, spec: JobSpec, run: int = 1) -> tuple[str, ...]:
        """`x-master-0`, `x-worker-0`, ..."""
        pods, name = spec.topology.number_of_pods, object_name(spec.name, run)
        if not _has_master(spec):
            return tuple(f"{name}-worker-{index}" for index in range(pods))
        return (f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(pods - 1)))

    def head_host(self, spec: JobSpec, run: int = 1) -> str:
        """That of the head's Service, which the operator makes for each pod."""
        return self.pod_names(spec, run)[0]

    def _replicas(self, spec: JobSpec, settings: PodSettings) -> dict[str, Any]:
        topology = spec.topology
        world, per_pod, pods = topology.number_of_processes, topology.processes_per_pod, topology.number_of_pods
        head = min(world, per_pod)
        if not _has_master(spec):
            return {"Worker": self.replica(spec, settings, "worker", first_pod=0, pods=pods, ranks=head)}
        replicas = {"Master": self.replica(spec, settings, "master", first_pod=0, pods=1, ranks=head)}
        if pods > 1:
            ranks = min(per_pod, world - head)
            replicas["Worker"] = self.replica(spec, settings, "worker", first_pod=1, pods=pods - 1, ranks=ranks)
        return replicas


def _has_master(spec: JobSpec) -> bool:
    """A job of a single pod has a master in any case."""
    return spec.cluster.master is not False or spec.topology.number_of_pods == 1
