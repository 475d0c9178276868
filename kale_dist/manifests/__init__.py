"""Pure functions from a job's specification to the objects that a cluster is asked for."""

from __future__ import annotations

from kale_dist.manifests.pytorch_job import input_secret, pytorch_job
from kale_dist.manifests.settings import PodSettings, StoreMount, head_host, input_secret_name, object_name, pod_names
from kale_dist.manifests.yaml_text import to_yaml

__all__ = [
    "PodSettings",
    "StoreMount",
    "head_host",
    "input_secret",
    "input_secret_name",
    "object_name",
    "pod_names",
    "pytorch_job",
    "to_yaml",
]
