"""Makes a job's order, which tells its agents what to do, for all backends."""

from __future__ import annotations

from typing import Any

from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.wire import Order


def order_of(spec: JobSpec, **site: Any) -> Order:
    """The order for a job.

    Args:
        spec: The job. Its topology, limits and policies go into the order as they are.
        **site: Fields of `Order` that only the backend knows: where the head and the blobs are, how long to wait. They
            go before what follows from the spec.
    """
    policy = spec.policy
    fields: dict[str, Any] = {
        "job": spec.name,
        "number_of_processes": spec.topology.number_of_processes,
        "processes_per_agent": spec.topology.number_of_processes,
        "snapshot": spec.snapshot,
        "blobs": spec.blobs,
        "cuda": spec.cuda,
        "threads": spec.threads,
        "seed": spec.seed,
        "timeout_s": policy.timeout_s,
        "stall_warn_s": policy.stall_warn_s,
        "stall_timeout_s": policy.stall_timeout_s,
        "max_restarts": policy.max_restarts,
        "detach": policy.detach,
    }
    return Order(**(fields | site))
