"""Names, labels, folders and sizes that manifests and those who look for their objects share. Pure."""

from __future__ import annotations

import dataclasses

from kale_dist.job.spec.job_spec import Settled
from kale_dist.job.spec.volumes import VolumeKind

INSTANCE_LABEL = "app.kubernetes.io/instance"
"""Label on every object of a job: the job's name."""

OBJECT_LABEL = "kale-dist.dev/object"
"""Label on every pod: the name of its job's object."""

FIRST_POD_LABEL = "kale-dist.dev/first-pod"
"""Label on every pod: the number in the job that the first pod of its replica type has."""

CONTAINER_ANNOTATION = "kubectl.kubernetes.io/default-container"
"""Annotation on every pod: the container with the agent, which is also what `kubectl logs` shows."""

REPLICA_INDEX_LABEL = "training.kubeflow.org/replica-index"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""Label and annotation of a pod of an indexed Job. The labels of its index are the same for all kinds of one controller."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
MANAGED_BY = "kale-dist"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
SELECTOR = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
"""Selects all jobs and pods of this library in a namespace."""

SPEC_ANNOTATION = "kale-dist.dev/spec"
SUBMITTED_BY_ANNOTATION = "kale-dist.dev/submitted-by"
CANCELLED_ANNOTATION = "kale-dist.dev/cancelled"
"""Annotation on the object of a cancelled job: who cancelled it."""

FAILED_ANNOTATION = "kale-dist.dev/failed"
"""Annotation on the object of a job that its follower ended because it had failed: why."""

RUN_LABEL = "kale-dist.dev/run"
"""Label on the later objects of a job: how many there have been. The first one has none."""

TOUCHED_ANNOTATION = "kale-dist.dev/touched"
"""When a job that waits under a quota was last shown to the operator again."""

PORT = 23456
"""The first of a pod's three ports; an order's `port`. It is also the operator's default."""

INPUT_BYTES = 500_000
"""A snapshot up to this size is part of a Secret: with the runtime (435 kB) it stays below 950 kB, and a Secret holds 1 MiB."""

INPUT_FOLDER = "/kale-dist/input"
WORK_FOLDER = "/kale-dist/work"
HOME_FOLDER = "/kale-dist/home"
STORE_FOLDER = "/kale-dist/store"
"""Folder at which pods mount the claim that is the job's store."""

LEFT_FOLDER = ".kale-dist"
"""Folder of a claim that was mounted for something else."""

CLAIM_SCHEME = "pvc://"
"""Begins the URL of a store that is a claim."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObjectSettings:
    """Holds what the object of a job has beyond the job's specification."""

    life: int = 1
    """How many objects the job has had, this one included."""
    submitter: str = ""
    """Who creates it, as the API server names them."""
    command: tuple[str, ...] = ()
    """Runs instead of the agent: for an errand of this library, which has no input and is not listed."""


def object_name(job: str, life: int) -> str:
    """Name of the object of a life: the job's own for the first, `<job>-2` for the second.

    `names.MAX_LENGTH` leaves room for it and for the `-worker-123` of its pods.
    """
    return job if life == 1 else f"{job}-{life}"


def input_secret_name(object_: str) -> str:
    """Name of the Secret with a job's input.

    Args:
        object_: Name of the job's object.
    """
    return f"{object_}-input"


def own_labels(job: str, *, is_errand: bool = False) -> dict[str, str]:
    """The recommended labels, which every object of a job has."""
    return {
        "app.kubernetes.io/name": "kale-dist",
        MANAGED_BY_LABEL: "kale-dist-errand" if is_errand else MANAGED_BY,
        INSTANCE_LABEL: job,
        "app.kubernetes.io/component": "training",
    }


def left_results(spec: Settled) -> tuple[str, str]:
    """Where the head of a job without a store leaves results if no notebook is connected: in a claim that is mounted for writing.

    Returns:
        The folder as `store=` would name it, and its path in the pods; both empty if there is no such claim.
    """
    for volume in spec.volumes if not spec.store else ():
        if volume.kind is VolumeKind.CLAIM and not volume.read_only:
            source = f"{volume.source}/{volume.sub_path}".rstrip("/")
            return f"{CLAIM_SCHEME}{source}/{LEFT_FOLDER}", f"{volume.mount_path}/{LEFT_FOLDER}"
    return "", ""


def claim_of(spec: Settled) -> tuple[str, str]:
    """Claim and folder of a job's store; empty if its store is no claim."""
    if not spec.store.startswith(CLAIM_SCHEME):
        return "", ""
    claim, _, folder = spec.store.removeprefix(CLAIM_SCHEME).partition("/")
    return claim, folder
