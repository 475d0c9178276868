"""A job as a TFJob of Kubeflow's Training Operator (v1): a chief with rank 0, workers, and parameter servers. Pure.

The operator tells each pod in `TF_CONFIG` where the others are and which of them it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kale_dist.contract import EndsWith
from kale_dist.errors import ConfigError
from kale_dist.manifests.kubeflow_job import KubeflowJob, run_policy
from kale_dist.manifests.pytorch_job import PyTorchJob
from kale_dist.manifests.settings import PodSettings, object_name
from kale_dist.spec import JobSpec


class TFJob(KubeflowJob):
    """The last pods are the parameter servers. TensorFlow has one process a pod, which uses all of its GPUs."""

    word = "tf"
    name = "TFJob"
    group, version, plural = "kubeflow.org", "v1", "tfjobs"
    container = "tensorflow"
    replicas_field = "tfReplicaSpecs"
    roles = ("chief", "worker", "ps")
    controller = PyTorchJob.controller
    find_controller = PyTorchJob.find_controller
    install = PyTorchJob.install
    services_a_pod = True

    def body(self, spec: JobSpec, settings: PodSettings) -> dict[str, Any]:
        """Run policy and replicas.

        Raises:
            ConfigError: More than one process a pod, for which TF_CONFIG has no place.
        """
        topology, servers = spec.topology, spec.cluster.servers
        if topology.processes_per_pod > 1:
            problem = f"{topology.processes_per_pod}, and TensorFlow has one process a pod"
            remedy = "Leave it out, and give each process more with resources="
            raise ConfigError("processes_per_pod", problem, remedy)
        workers = topology.number_of_pods - 1 - servers
        counts = {"Chief": (0, 1), "Worker": (1, workers), "PS": (1 + workers, servers)}
        return {
            "runPolicy": run_policy(spec),
            "tfReplicaSpecs": {
                role: self.replica(spec, settings, role.lower(), first_pod=first, pods=pods, ranks=1)
                for role, (first, pods) in counts.items()
                if pods
            },
        }

    def pod_names(self, spec: JobSpec, run: int = 1) -> tuple[str, ...]:
        """`x-chief-0`, `x-worker-0`, ..., `x-ps-0`, ..."""
        name, servers = object_name(spec.name, run), spec.cluster.servers
        workers = spec.topology.number_of_pods - 1 - servers
        return (
            f"{name}-chief-0",
            *(f"{name}-worker-{index}" for index in range(workers)),
            *(f"{name}-ps-{index}" for index in range(servers)),
        )

    def head_host(self, spec: JobSpec, run: int = 1) -> str:
        """That of the chief's Service, which the operator makes for each pod."""
        return self.pod_names(spec, run)[0]

    def order(self, spec: JobSpec) -> Mapping[str, Any]:
        """With parameter servers, which wait for requests until they are ended, the chief's end is that of the job."""
        servers = spec.cluster.servers
        return {"servers": servers, "ends_with": EndsWith.RANK_0} if servers else {}
