"""Makes a job's order, which states what its agents do, for all backends."""

from __future__ import annotations

from typing import Any

from kale_dist.job.spec.job_spec import WARM, JobSpec
from kale_dist.job.spec.volumes import VolumeKind
from kale_dist.wire import Order

_LASTING = (VolumeKind.FOLDER, VolumeKind.CLAIM, VolumeKind.HOST_PATH)


def order_of(spec: JobSpec, *, used_restarts: int = 0, **site: Any) -> Order:
    """The order for a job.

    Args:
        spec: The job.
        used_restarts: How many restarts earlier heads of the job have used.
        **site: Fields of `Order` that only the backend knows: where the head and the blobs are, how long to wait. They
            replace values that follow from the specification.
    """
    fields: dict[str, Any] = {
        "job": spec.name,
        "object": spec.name,
        "number_of_processes": spec.topology.number_of_processes,
        "sizes": spec.topology.sizes or (spec.topology.number_of_processes,),
        "processes_per_agent": spec.topology.number_of_processes,
        "snapshot": spec.snapshot,
        "blobs": spec.blobs,
        "offer": spec.offer,
        "resume": spec.resume,
        "sealed": spec.sealed,
        "cuda": spec.cuda,
        "gpus_each": spec.resources.gpus or 1,
        "threads": spec.threads,
        "seed": spec.seed,
        "debugging": spec.debugging,
        "idle_s": spec.keep_warm_s or 0.0 if spec.kind == WARM else 0.0,
        "policy": spec.policy,
        "folders": tuple(one.mount_path for one in spec.volumes if one.kind in _LASTING and not one.read_only),
        "used_restarts": used_restarts,
    }
    return Order(**(fields | site))
