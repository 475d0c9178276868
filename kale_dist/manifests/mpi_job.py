"""A job as an MPIJob (v2beta1) of the MPI Operator: the launcher is the head and has rank 0, the workers are relays. Pure.

The operator's ssh and its file of hosts are not used: agents start the ranks, and `mpirun` reaches all pods through them
(`runtime/mpi.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist.manifests.kubeflow_job import KubeflowJob, run_policy
from kale_dist.manifests.settings import PodSettings, object_name
from kale_dist.spec import JobSpec


class MPIJob(KubeflowJob):
    """The launcher asks for what a worker asks for, because a rank runs in it."""

    word = "mpi"
    name = "MPIJob"
    group, version, plural = "kubeflow.org", "v2beta1", "mpijobs"
    container = "mpi"
    replicas_field = "mpiReplicaSpecs"
    roles = ("launcher", "worker")
    controller = "the MPI Operator"
    find_controller = "kubectl get pods -A -l app=mpi-operator"
    install = (
        "kubectl apply --server-side -f "
        "https://raw.githubusercontent.com/kubeflow/mpi-operator/v0.6.0/deploy/v2beta1/mpi-operator.yaml"
    )
    clashes_with = "v1"

    def body(self, spec: JobSpec, settings: PodSettings) -> dict[str, Any]:
        """Run policy and replicas. A launcher that fails is not started again: the head decides what a failure means."""
        topology = spec.topology
        world, per_pod, pods = topology.number_of_processes, topology.processes_per_pod, topology.number_of_pods
        head = min(world, per_pod)
        launcher = self.replica(spec, settings, "launcher", first_pod=0, pods=1, ranks=head, has_index=False)
        replicas = {"Launcher": launcher}
        if pods > 1:
            ranks = min(per_pod, world - head)
            replicas["Worker"] = self.replica(spec, settings, "worker", first_pod=1, pods=pods - 1, ranks=ranks)
        return {
            "slotsPerWorker": per_pod,
            # Otherwise the operator hides the GPUs of the launcher.
            "runLauncherAsWorker": True,
            "runPolicy": {**run_policy(spec), "backoffLimit": 0},
            "mpiReplicaSpecs": replicas,
        }

    def pod_names(self, spec: JobSpec, run: int = 1) -> tuple[str, ...]:
        """`x-launcher`, to which the controller appends five characters, and `x-worker-0`, ..."""
        pods, name = spec.topology.number_of_pods, object_name(spec.name, run)
        return (f"{name}-launcher", *(f"{name}-worker-{index}" for index in range(pods - 1)))

    def head_host(self, spec: JobSpec, run: int = 1) -> str:
        """The launcher's name in the Service that the operator makes."""
        name = object_name(spec.name, run)
        return f"{name}-launcher.{name}"

    def told_by(self, name: str) -> Sequence[tuple[str, str]]:
        """Its own events, and those of the Job that makes the launcher."""
        return ((self.name, name), ("Job", f"{name}-launcher"))

    def order(self, spec: JobSpec) -> Mapping[str, Any]:
        """The head runs `mpirun`."""
        del spec
        return {"mpi": True}
