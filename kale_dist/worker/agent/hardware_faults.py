"""Explains errors of CUDA, cuDNN, NCCL, gloo and shared memory: one sentence and a remedy for each, and what a job may do about it.

An entry is recognised by the text of an exception or by a dead rank's last lines. The first that fits is taken, so the most
specific ones come first. Texts are those of CUDA 12 and 13, NCCL 2.2x and torch 2.11 to 2.13, and of the NCCL backend that torch 2.15 has
by default ("nccl2"), read in its library. Pure.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One trouble."""

    name: str
    """For code and tests."""
    pattern: str
    """A regular expression, without regard to case."""
    sentence: str
    """Without its full stop."""
    remedy: str
    """What to do, without its full stop."""
    _: dataclasses.KW_ONLY
    may_restart: bool = False
    """Whether the same ranks may do better on another try: the GPU, its node or the network is at fault, not the code."""
    follows: bool = False
    """Whether it only shows that another rank is gone: that one is to blame, if it is known."""


_NODE = "Have the node looked at (nvidia-smi -q, dmesg), and keep jobs away from it"
_NCCL_LOG = 'environment={"NCCL_DEBUG": "INFO"} logs what NCCL tries'

_WATCHDOG = (
    r"ProcessGroupNCCL.*(watchdog|terminat)|Watchdog caught collective operation timeout|NCCL operation timed out"
    r"|Aborting process on rank \d+ due to timeout|Work timed out during finalize"
)
"""The first is of torch's former NCCL backend, the second of both, the last three are nccl2's."""

TABLE = (
    Fault("watchdog", _WATCHDOG, "NCCL gave up waiting for another rank", "Look at the ranks that failed first", may_restart=True, follows=True),
    Fault("ecc", r"uncorrectable (ECC|NVLink) error|\bXid\b|GPU (is lost|has fallen off the bus)|device (is )?lost|CUDA error: .*hardware", "The GPU has a hardware fault", _NODE, may_restart=True),
    Fault("launch-failure", r"unspecified launch failure|cudaErrorLaunchFailure", "A kernel died on the GPU: a hardware fault, or a kernel that wrote where it may not", f"If it happens on one node only: {_NODE[0].lower()}{_NODE[1:]}. Otherwise environment={{'CUDA_LAUNCH_BLOCKING': '1'}} shows the line", may_restart=True),
    Fault("duplicate-gpu", r"Duplicate GPU detected", "Two ranks have the same GPU (time slices, or parts of one GPU in one pod)", "Give each rank a GPU: fewer processes, or processes_per_pod=1"),
    Fault("nccl-oom", r"NCCL.*out of memory|Failed to CUDA (m|c)alloc", "NCCL found no memory left on the GPU", "Use less: a smaller batch_size, or precision='bf16'"),
    Fault("nccl-shm", r"Error while (creating|attaching to) shared memory|No space left on device.*(/dev/shm|nccl)", "NCCL found /dev/shm full", "Make it larger: resources={'shm': '8Gi'}, or --shm-size=8g for a container of your own"),
    Fault("nccl-interface", r"no socket interface found|Bootstrap : no", "NCCL found no network interface of that name", "Correct NCCL_SOCKET_IFNAME in environment=, or leave it out"),
    Fault("nccl-peer", r"NCCL.*(remote process exited|network error|connection (closed|reset|refused)|Connect to .* failed)|ncclRemoteError|NCCL communicator was aborted|ncclInProgress", "A rank lost the connection to another one", "Look at the ranks that failed first", may_restart=True, follows=True),
    Fault("nccl-usage", r"NCCL.*invalid (usage|argument)|ncclInvalid(Usage|Argument)", "NCCL was called in a way that it refuses: other sizes, dtypes or devices than on the other ranks", _NCCL_LOG),
    Fault("nccl-system", r"NCCL.*(unhandled system error|system call)|ncclSystemError", "NCCL could not use the network or shared memory", f"Check /dev/shm, NetworkPolicies and NCCL_SOCKET_IFNAME; {_NCCL_LOG}", may_restart=True),
    Fault("nccl-other", r"NCCL.*(internal error|unhandled cuda error)|ncclInternalError|ncclUnhandledCudaError", "NCCL failed", _NCCL_LOG, may_restart=True),
    Fault("gloo-sizes", r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size", "Ranks gave a collective tensors of different sizes, as those of an uneven last batch are", "Make all batches alike, with drop_last=True in the DataLoader, or gather the sizes first"),
    Fault("out-of-memory", r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED", "The GPU's memory ran out", "A smaller batch_size with accumulate=, precision='bf16', or strategy='fsdp'; `del` and torch.cuda.empty_cache() free what a notebook holds on the same GPU"),
    Fault("no-kernel-image", r"no kernel image is available", "This torch has no code for this model of GPU", "Use an image or torch with an older CUDA (cu126 for Volta and Pascal), or other GPUs"),
    Fault("driver-too-old", r"driver on your system is too old|CUDA driver version is insufficient|forward compatibility was attempted", "The node's driver is too old for the CUDA of this torch", "Use an image or torch with an older CUDA, or have the driver updated (CUDA 13 needs 580, CUDA 12 525)"),
    Fault("no-driver", r"Found no NVIDIA driver|no CUDA-capable device|No CUDA GPUs are available", "There is no GPU that this process can use", "Ask for GPUs (cuda=True, resources={'gpus': 1}), and check the node's driver"),
    Fault("busy", "busy or unavailable", "Another process holds the GPU alone (exclusive mode)", "End it, such as a notebook that has used this GPU, or choose others with CUDA_VISIBLE_DEVICES"),
    Fault("device-assert", r"device-side assert", "An index in a kernel was out of range: often a class or token number above the model's", "Check labels and token numbers on the CPU: cuda=False names the line"),
    Fault("illegal-access", r"illegal memory access|misaligned address", "A kernel read or wrote where it may not", "environment={'CUDA_LAUNCH_BLOCKING': '1'} shows the line"),
    Fault("same-device", r"Expected all tensors to be on the same device|same device as the indexed tensor", "Tensors of one operation are on different devices", "Use the device that the step is given (in launch: kale_dist.context().device), not one that is named in a cell"),
    Fault("forked", r"Cannot re-initialize CUDA in forked subprocess|CUDA error: initialization error", "A forked process, such as a DataLoader's worker, used a GPU", "Keep the dataset's tensors on the CPU, from where batches are moved to each rank's GPU; or num_workers=0"),
    Fault("invalid-ordinal", r"invalid device ordinal", "The code names a GPU that this rank does not have", "Use the device that the step is given (in launch: kale_dist.context().device)"),
    Fault("bus-error", r"Unexpected bus error|insufficient shared memory \(shm\)", "Shared memory (/dev/shm) is full", "Make it larger: resources={'shm': '8Gi'}, or fewer DataLoader workers"),
)  # fmt: skip
"""All of them."""


def find(text: str) -> Fault | None:
    """The fault that an error's text, or a dead rank's last lines, are about; None for any other."""
    return next((fault for fault in TABLE if re.search(fault.pattern, text, re.IGNORECASE | re.DOTALL)), None)
