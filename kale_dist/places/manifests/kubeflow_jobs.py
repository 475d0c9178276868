"""A job as an object of Kubeflow's Training Operator (v1) or of the MPI Operator. Pure.

- A PyTorchJob has one Master with rank 0, and Workers.
- A TFJob has a chief with rank 0, workers, and parameter servers. The operator sets each pod's `TF_CONFIG`: where the others
  are and which of them it is.
- The launcher of an MPIJob (v2beta1) is the head and has rank 0, its workers are relays. The operator's ssh and its file of
  hosts are not used: agents start the ranks, and `mpirun` reaches all pods through them (`worker/pod/mpi.py`).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kale_dist.errors import ConfigError
from kale_dist.job.spec.job_spec import Settled
from kale_dist.places.manifests.kind import Kind, ObjectState, PodGroup, last_condition
from kale_dist.places.manifests.object_settings import REPLICA_INDEX_LABEL, ObjectSettings, object_name
from kale_dist.places.manifests.pod_template import pod_template
from kale_dist.wire import EndsWith

INIT_REQUESTS = {"cpu": "50m", "memory": "10Mi"}
"""The requests of the init container that the operator puts before workers beside a master."""

_INIT_CONTAINER = {
    "name": "init-pytorch",
    "image": "alpine:3.10",
    "command": ["sh", "-c", "true"],
    "resources": {"limits": {"cpu": "100m", "memory": "20Mi"}, "requests": INIT_REQUESTS},
}
"""The init container, in the form that the operator gives it."""


class KubeflowJob(Kind):
    """An object with a run policy and replica types, the head's first."""

    replicas_field: ClassVar[str]
    """The field of its `spec` that holds them."""
    head_index: ClassVar[bool] = True
    """Whether the controller labels the head's pod with its index."""

    @abc.abstractmethod
    def counts(self, spec: Settled) -> Mapping[str, int]:
        """How many pods each replica type has, the head's first."""

    def pod_groups(self, made: Mapping[str, Any]) -> list[PodGroup]:
        """Each replica type. The API fills in a number that is left out."""
        return [
            PodGroup(
                role=role.lower(), pods=int(replica.get("replicas", 1)), template=replica.get("template", {}),
                restart_policy=replica.get("restartPolicy", ""),
            )
            for role, replica in made["spec"][self.replicas_field].items()
        ]  # fmt: skip

    def state(self, made: Mapping[str, Any]) -> ObjectState:
        """Its last condition."""
        condition, status = last_condition(made), made.get("status") or {}
        was_suspended = any(item.get("type") == "Suspended" for item in status.get("conditions") or ())
        return dataclasses.replace(
            ObjectState.of(condition, status),
            is_running=condition.get("type") == "Running",
            is_known=bool(condition),
            # The operator writes it after it has made the pods, on a busy cluster long after: it shows which pods are of
            # an earlier life only if the job was suspended.
            started=status.get("startTime") if was_suspended else None,
        )

    def suspension(self, *, value: bool) -> dict[str, Any]:
        """The change that suspends or resumes a job, in its run policy."""
        return {"spec": {"runPolicy": {"suspend": value}}}

    def end(self, spec: Settled, *, head_leaves: bool) -> dict[str, Any]:
        """The change that ends a job by its policy for pods, as an object that has failed or succeeded no longer heeds a suspension."""
        del spec
        suspend = {} if head_leaves else {"suspend": True}
        return {"spec": {"runPolicy": {"cleanPodPolicy": "Running", **suspend}}}

    def is_suspended(self, made: Mapping[str, Any]) -> bool:
        """Return whether its run policy suspends it."""
        return bool(((made.get("spec") or {}).get("runPolicy") or {}).get("suspend"))

    def replicas(self, spec: Settled, settings: ObjectSettings) -> dict[str, Any]:
        """The replica types that have pods, by their names."""
        made: dict[str, Any] = {}
        world, per_pod, first_pod = spec.topology.number_of_processes, spec.topology.processes_per_pod, 0
        for role, pods in self.counts(spec).items():
            if not pods:
                continue
            index = f"metadata.labels['{REPLICA_INDEX_LABEL}']" if first_pod or self.head_index else ""
            template = pod_template(
                spec, settings, container=self.container, first_pod=first_pod, index=index, role=role.lower(),
                ranks=min(per_pod, world - first_pod * per_pod),
            )  # fmt: skip
            # The operator makes pods again whose exit code is 128 or above.
            comes_back = self.replaces_pods(spec) if first_pod else self.returns_head(spec)
            policy = "ExitCode" if comes_back else "Never"
            made[role] = {"replicas": pods, "restartPolicy": policy, "template": template}
            first_pod += pods
        return made

    def pod_names(self, spec: Settled, life: int = 1) -> tuple[str, ...]:
        """`x-master-0`, `x-worker-0`, ...: the job, its pods' type, and their number in it."""
        name = object_name(spec.name, life)
        return tuple(f"{name}-{role.lower()}-{i}" for role, pods in self.counts(spec).items() for i in range(pods))


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

    def body(self, spec: Settled, settings: ObjectSettings) -> dict[str, Any]:
        """Run policy and replicas."""
        per_pod = spec.topology.processes_per_pod
        return {
            "runPolicy": _run_policy(spec),
            **({"nprocPerNode": str(per_pod)} if per_pod > 1 else {}),
            self.replicas_field: self.replicas(spec, settings),
        }

    def pod_groups(self, made: Mapping[str, Any]) -> list[PodGroup]:
        """Master, then workers, with the operator's init container before these."""
        return [
            dataclasses.replace(group, put_before=(_INIT_CONTAINER,))
            if group.role == "worker" and "Master" in made["spec"][self.replicas_field]
            else group
            for group in sorted(super().pod_groups(made), key=lambda group: group.role)
        ]

    def counts(self, spec: Settled) -> Mapping[str, int]:
        """A master and workers, or workers only."""
        pods = spec.topology.number_of_pods
        return {"Master": 1, "Worker": pods - 1} if _has_master(spec) else {"Worker": pods}

    def replaces_pods(self, spec: Settled) -> bool:
        """Of workers only the first is the head, and they are made again as it is: with a store that counts the attempts before."""
        return spec.policy.max_restarts > 0 and (_has_master(spec) or (spec.saves and bool(spec.store)))


def _has_master(spec: Settled) -> bool:
    """A job of a single pod has a master in any case."""
    return spec.cluster.master is not False or spec.topology.number_of_pods == 1


class TFJob(KubeflowJob):
    """The last pods are the parameter servers. TensorFlow has one process a pod, which uses all of its GPUs.

    Lost pods are not waited for: the operator may take a TFJob for failed while it makes them again, as it happens to look at
    the chief or at the workers first.
    """

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

    def body(self, spec: Settled, settings: ObjectSettings) -> dict[str, Any]:
        """Run policy and replicas.

        Raises:
            ConfigError: More than one process a pod, for which TF_CONFIG has no place.
        """
        if spec.topology.processes_per_pod > 1:
            problem = f"{spec.topology.processes_per_pod}, and TensorFlow has one process a pod"
            remedy = "Leave it out, and give each process more with resources="
            raise ConfigError("processes_per_pod", problem, remedy)
        return {"runPolicy": _run_policy(spec), self.replicas_field: self.replicas(spec, settings)}

    def counts(self, spec: Settled) -> Mapping[str, int]:
        """One chief, workers and parameter servers."""
        servers = spec.cluster.servers
        return {"Chief": 1, "Worker": spec.topology.number_of_pods - 1 - servers, "PS": servers}

    def order(self, spec: Settled) -> Mapping[str, Any]:
        """With parameter servers, which wait for requests until they are ended, the chief's end is that of the job."""
        servers = spec.cluster.servers
        return {"servers": servers, "ends_with": EndsWith.RANK_0} if servers else {}


class MPIJob(KubeflowJob):
    """The launcher asks for what a worker asks for, because a rank runs in it."""

    word = "mpi"
    name = "MPIJob"
    group, version, plural = "kubeflow.org", "v2beta1", "mpijobs"
    container = "mpi"
    replicas_field = "mpiReplicaSpecs"
    head_index = False
    roles = ("launcher", "worker")
    controller = "the MPI Operator"
    find_controller = "kubectl get pods -A -l app=mpi-operator"
    install = (
        "kubectl apply --server-side -f "
        "https://raw.githubusercontent.com/kubeflow/mpi-operator/v0.6.0/deploy/v2beta1/mpi-operator.yaml"
    )
    clashes_with = "v1"

    def body(self, spec: Settled, settings: ObjectSettings) -> dict[str, Any]:
        """Run policy and replicas. A launcher that fails is not started again: the head decides what a failure means."""
        return {
            "slotsPerWorker": spec.topology.processes_per_pod,
            # Otherwise the operator hides the GPUs of the launcher.
            "runLauncherAsWorker": True,
            "runPolicy": {**_run_policy(spec), "backoffLimit": 0},
            self.replicas_field: self.replicas(spec, settings),
        }

    def pod_names(self, spec: Settled, life: int = 1) -> tuple[str, ...]:
        """`x-launcher`, to which the controller appends five characters, and `x-worker-0`, ..."""
        head, *workers = super().pod_names(spec, life)
        return (head.removesuffix("-0"), *workers)

    def counts(self, spec: Settled) -> Mapping[str, int]:
        """One launcher and workers."""
        return {"Launcher": 1, "Worker": spec.topology.number_of_pods - 1}

    def reporters_of(self, name: str) -> Sequence[tuple[str, str]]:
        """Its own events, and those of the Job that makes the launcher."""
        return ((self.name, name), ("Job", f"{name}-launcher"))

    def order(self, spec: Settled) -> Mapping[str, Any]:
        """The head runs `mpirun`."""
        del spec
        return {"mpi": True}


def _run_policy(spec: Settled) -> dict[str, Any]:
    """Neither a deadline nor retries of the operator's: both delete pods and their logs."""
    cluster, topology = spec.cluster, spec.topology
    # Pods of a range that still run or wait when the head has ended are deleted.
    policy: dict[str, Any] = {"cleanPodPolicy": "Running" if topology.sizes else "None"}
    if cluster.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = cluster.ttl_s
    if cluster.gang:
        policy["schedulingPolicy"] = {
            "minAvailable": cluster.min_available or topology.fewest_pods,
            **({"priorityClass": cluster.priority_class} if cluster.priority_class else {}),
        }
    return policy
