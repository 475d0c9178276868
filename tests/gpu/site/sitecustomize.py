"""Lets two ranks share one GPU. NCCL refuses that on one host, so that each rank here says it is a host of its own."""

import os
import sys

_NCCL = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0",
}  # fmt: skip


def _share():
    """In a rank, which is forked with the library already imported."""
    gpus = sys.modules.get("kale_dist.worker.rank.rank_gpus")
    if gpus is None or hasattr(gpus, "claims_alone"):
        return
    gpus.claims_alone = alone = gpus.claim

    def claim(local_rank, local_world_size, each):
        import torch

        how = os.environ.get("KALE_DIST_SHARED_GPU")
        if not how:
            return alone(local_rank, local_world_size, each)
        for name, value in _NCCL.items():
            os.environ.setdefault(name, value)
        if how == "hosts":
            os.environ["NCCL_HOSTID"] = f"host{local_rank}"
        torch.cuda.set_device(0)
        return "cuda:0"

    gpus.claim = claim


if os.environ.get("KALE_DIST_GPU_SUITE") == "cuda":
    os.register_at_fork(after_in_child=_share)
