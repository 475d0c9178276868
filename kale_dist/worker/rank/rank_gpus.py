"""The GPU of a rank: whether GPUs work here, and which one is the rank's own."""

from __future__ import annotations

import json
import os
import sys

from kale_dist.errors import ContractError

HIDING = "CUDA_VISIBLE_DEVICES"


def claim(local_rank: int, local_world_size: int, each: int) -> str:
    """Make this rank's first GPU the current device, and return its name.

    Args:
        local_rank: The rank among those of its agent.
        local_world_size: How many ranks the agent has.
        each: GPUs of each rank.

    Raises:
        ContractError: There is none for it, or none works.
    """
    import torch

    if why := why_not():
        raise ContractError(
            f"cuda=True, but torch sees no GPU here: {why}. Ask for GPUs, and use a torch that is built for CUDA (on a "
            "cluster that of the image)"
        )
    there, needed = torch.cuda.device_count(), local_world_size * each
    if there < needed:
        raise ContractError(
            f"{local_world_size} process{'es need' if local_world_size > 1 else ' needs'} {needed} GPUs here, and torch sees "
            f"{there}. A process sees one part of a divided GPU (MIG) at most, and time slices of one GPU as one GPU: give "
            "each process a pod of its own on a cluster (processes_per_pod=1), or ask for fewer processes"
        )
    device = f"cuda:{local_rank * each}"
    torch.cuda.set_device(device)
    return device


def why_not() -> str:
    """Why torch can use no GPU in this process, as a clause; empty if it can. Initialises CUDA."""
    import torch

    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "" if torch.cuda.device_count() else f"torch {torch.__version__} finds none that it can use"


def hide() -> None:
    """Hide GPUs from a rank of a job without CUDA, unless its environment names those it sees. Before CUDA starts."""
    os.environ.setdefault(HIDING, "")


def probe() -> tuple[int, str]:
    """Compute a small product on each GPU; return how many there are, and what is wrong, as a clause.

    It finds drivers that are too old, GPUs for which this torch has no code, and GPUs that others hold exclusively.
    """
    import torch

    if why := why_not():
        return 0, why
    for number in range(torch.cuda.device_count()):
        try:
            ones = torch.ones(64, 64, device=f"cuda:{number}")
            (ones @ ones).sum().item()
        except RuntimeError as error:
            return 0, f"GPU {number} ({torch.cuda.get_device_name(number)}): {str(error).partition(chr(10))[0]}"
    return torch.cuda.device_count(), ""


def main() -> int:
    """Print the answer of `probe` as JSON, in a process of its own."""
    sys.stdout.write(f"\n{json.dumps(probe())}\n")
    return 0
