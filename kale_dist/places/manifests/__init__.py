"""Pure functions from a job's specification to the objects that a cluster is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from kale_dist.job.spec.job_spec import Request
from kale_dist.places.manifests.batch_job import BatchJob
from kale_dist.places.manifests.kind import (
    POLICY_API,
    Kind,
    ObjectState,
    PodGroup,
    input_secret,
    network_policy,
    owner_of,
)
from kale_dist.places.manifests.kubeflow_jobs import MPIJob, PyTorchJob, TFJob
from kale_dist.places.manifests.train_job import TrainJob
from kale_dist.places.manifests.yaml_text import to_yaml

__all__ = [
    "KINDS",
    "POLICY_API",
    "Kind",
    "ObjectState",
    "PodGroup",
    "input_secret",
    "kind_of",
    "network_policy",
    "owner_of",
    "to_yaml",
]

KINDS: Mapping[str, Kind] = {kind.word: kind for kind in (PyTorchJob(), TrainJob(), BatchJob(), MPIJob(), TFJob())}
"""By their words, in the order in which one is chosen for a cluster."""


def kind_of(spec: Request) -> Kind:
    """The kind of a job; the first one while that is not settled."""
    return KINDS[spec.cluster.kind] if spec.cluster.kind else next(iter(KINDS.values()))
