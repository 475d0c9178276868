"""What a backend has found out before a manifest can be made, and the names that follow from it. Pure."""

from __future__ import annotations

import dataclasses

from kale_dist.spec import JobSpec

API_VERSION = "kubeflow.org/v1"
KIND = "PyTorchJob"
CONTAINER = "pytorch"
"""The name by which the operator knows the container that counts."""

JOB_NAME_LABEL = "training.kubeflow.org/job-name"
REPLICA_TYPE_LABEL = "training.kubeflow.org/replica-type"
REPLICA_INDEX_LABEL = "training.kubeflow.org/replica-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_BY = "kale-dist"
SELECTOR = f"app.kubernetes.io/managed-by={MANAGED_BY}"
"""Of all jobs and pods of this library in a namespace."""

SPEC_ANNOTATION = "kale-dist.dev/spec"
SUBMITTED_BY_ANNOTATION = "kale-dist.dev/submitted-by"
CANCELLED_ANNOTATION = "kale-dist.dev/cancelled"
RUN_LABEL = "kale-dist.dev/run"
"""On the PyTorchJobs of later runs: which run it is. The first one has none."""

TOUCHED_ANNOTATION = "kale-dist.dev/touched"
"""When a job that waits under a quota was last shown to the operator again."""

PORT = 23456
"""The first of a pod's three ports; an order's `port`. It is also the operator's default."""

START_WAIT_S = 3600.0
"""How long the agents of a job wait for each other; an order's `start_wait_s`."""

INPUT_FOLDER = "/kale-dist/input"
WORK_FOLDER = "/kale-dist/work"
HOME_FOLDER = "/kale-dist/home"
STORE_FOLDER = "/kale-dist/store"
"""Where pods see the volume of `StoreMount`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreMount:
    """A claim that pods see at `STORE_FOLDER`."""

    claim: str
    sub_path: str = ""
    """Folder in the claim that is there already: one that is missing is made by the kubelet, and belongs to root, so that
    pods cannot write into it. Empty for all of the claim."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PodSettings:
    """What a specification leaves open and the backend has settled."""

    namespace: str
    image: str
    """Reference of the image."""
    master: bool = True
    """One master and workers, or workers only. A job of a single pod has a master in any case."""
    run_as_user: int | None = 1000
    """None: left to the cluster, as on OpenShift."""
    fs_group: int | None = 1000
    """Group of the processes, and of the volumes' files; None: left to the cluster."""
    python: str = "python3"
    """The interpreter, as a command."""
    store: StoreMount | None = None
    annotations: tuple[tuple[str, str], ...] = ()
    """Annotations of the job besides the user's own and that of the specification."""
    run: int = 1
    """Which run of the job; each has a PyTorchJob of its own."""


def has_master(spec: JobSpec, *, master: bool) -> bool:
    """Whether the job has a replica of type Master."""
    return master or spec.topology.number_of_pods == 1


def object_name(job: str, run: int) -> str:
    """Name of the PyTorchJob of one run: the job's own for the first, `<job>-2` for the second.

    `names.MAX_LENGTH` leaves room for it and for the `-worker-123` of its pods.
    """
    return job if run == 1 else f"{job}-{run}"


def pod_names(spec: JobSpec, *, master: bool, run: int = 1) -> tuple[str, ...]:
    """Names of a run's pods by their number; pod 0 holds rank 0."""
    pods, name = spec.topology.number_of_pods, object_name(spec.name, run)
    if not has_master(spec, master=master):
        return tuple(f"{name}-worker-{index}" for index in range(pods))
    return (f"{name}-master-0", *(f"{name}-worker-{index}" for index in range(pods - 1)))


def head_host(spec: JobSpec, *, master: bool, run: int = 1) -> str:
    """Host name of pod 0 within the namespace: that of its headless Service, which the operator makes."""
    return pod_names(spec, master=master, run=run)[0]


def input_secret_name(object_: str) -> str:
    """Name of the Secret with a run's input.

    Args:
        object_: Name of the run's PyTorchJob.
    """
    return f"{object_}-input"


def own_labels(job: str) -> dict[str, str]:
    """The recommended labels, which every object of a job has, in all its runs."""
    return {
        "app.kubernetes.io/name": "kale-dist",
        "app.kubernetes.io/managed-by": MANAGED_BY,
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/component": "training",
    }
