"""What a backend has found out before a manifest can be made, and the names that follow from it. Pure."""

from __future__ import annotations

import dataclasses

INSTANCE_LABEL = "app.kubernetes.io/instance"
"""Of every object of a job: its name."""

OBJECT_LABEL = "kale-dist.dev/object"
"""On every pod: the name of its run's object."""

FIRST_POD_LABEL = "kale-dist.dev/first-pod"
"""On every pod: the number in the job that the first pod of its replica type has."""

CONTAINER_ANNOTATION = "kubectl.kubernetes.io/default-container"
"""On every pod: the container with the agent, which is also what `kubectl logs` shows."""

REPLICA_INDEX_LABEL = "training.kubeflow.org/replica-index"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""Label and annotation of a pod of an indexed Job. The labels of its index are the same for all kinds of one controller."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_BY = "kale-dist"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
"""Of all jobs and pods of this library in a namespace."""

SPEC_ANNOTATION = "kale-dist.dev/spec"
SUBMITTED_BY_ANNOTATION = "kale-dist.dev/submitted-by"
CANCELLED_ANNOTATION = "kale-dist.dev/cancelled"
RUN_LABEL = "kale-dist.dev/run"
"""On the objects of later runs: which run it is. The first one has none."""

TOUCHED_ANNOTATION = "kale-dist.dev/touched"
"""When a job that waits under a quota was last shown to the operator again."""

PORT = 23456
"""The first of a pod's three ports; an order's `port`. It is also the operator's default."""

START_WAIT_S = 3600.0
"""How long the agents of a job wait for each other; an order's `start_wait_s`."""

INPUT_BYTES = 600_000
"""A snapshot up to this size is part of a Secret: with the runtime it stays below 900 kB, and a Secret holds 1 MiB."""

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
    """Which run of the job; each has an object of its own."""
    command: tuple[str, ...] = ()
    """In the place of the agent: an errand of this library, which has no input and is listed nowhere."""


def object_name(job: str, run: int) -> str:
    """Name of the object of one run: the job's own for the first, `<job>-2` for the second.

    `names.MAX_LENGTH` leaves room for it and for the `-worker-123` of its pods.
    """
    return job if run == 1 else f"{job}-{run}"


def input_secret_name(object_: str) -> str:
    """Name of the Secret with a run's input.

    Args:
        object_: Name of the run's object.
    """
    return f"{object_}-input"


def own_labels(job: str, *, is_errand: bool = False) -> dict[str, str]:
    """The recommended labels, which every object of a job has, in all its runs."""
    return {
        "app.kubernetes.io/name": "kale-dist",
        MANAGED_BY_LABEL: "kale-dist-errand" if is_errand else MANAGED_BY,
        INSTANCE_LABEL: job,
        "app.kubernetes.io/component": "training",
    }
