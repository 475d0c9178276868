"""Frees a rank from a collective, and repairs its process groups in place. All private calls of torch that this takes stand here.

A rank that waits in a collective of gloo cannot be interrupted (torch 2.13: neither a signal nor `abort` ends the wait). Its sockets
are shut down; the wait then raises, and every group gets a new backend, in the same object, so that models wrapped with it go on.
"""

from __future__ import annotations

import contextlib
import gc
import socket
from typing import Any

from kale_dist.worker.rank import peers
from kale_dist.worker.rank.process_group import TIMEOUT, collectives, process_groups

_FIRST_TYPE = 7
"""Backend types from here on are free. A type keeps its first backend, and is one byte."""


def cut(store_port: int) -> None:
    """Shut down the connections of this process to other ranks, except those to a store. The user's own stay.

    Args:
        store_port: MASTER_PORT, where the ranks' store listens, or the user's.
    """
    own = peers.of_python()
    for descriptor, one in peers.tcp_sockets():
        # What listens, or is closed by now, raises.
        with contextlib.suppress(OSError):
            if descriptor not in own and store_port not in (one.getpeername()[1], one.getsockname()[1]):
                one.shutdown(socket.SHUT_RDWR)


def renew(store: Any, generation: int) -> None:
    """Give each process group a new backend in the place of the one whose connections are cut. All ranks have to call it.

    Args:
        store: The ranks' store.
        generation: The number of the repair, the same on all ranks, from 1.

    Raises:
        Exception: This torch has no such calls.
    """
    import torch
    from torch.distributed import PrefixStore, ProcessGroup, _register_comm_hook  # type: ignore[attr-defined] # from torch._C
    from torch.distributed.distributed_c10d import ProcessGroupGloo
    from torch.nn.parallel import DistributedDataParallel

    kind: Any = ProcessGroup.BackendType
    gloo: Any = ProcessGroupGloo
    for group in process_groups():
        options = gloo._Options()  # noqa: SLF001
        options._timeout = TIMEOUT  # noqa: SLF001
        options._devices = [gloo.create_default_device()]  # noqa: SLF001
        prefix = PrefixStore(f"kale_dist/repair/{generation}/{group.group_name}", store)
        backend = gloo(prefix, group.rank(), group.size(), options)
        group._register_backend(torch.device("cpu"), kind(_FIRST_TYPE + generation), backend)  # noqa: SLF001
    # Where a backward pass was broken off, ranks may differ in what their models exchange next: that aborts the process.
    for model in [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]:
        parameters, expect_sparse = model._build_params_for_reducer()  # noqa: SLF001
        names = model._build_debug_param_to_name_mapping(parameters)  # noqa: SLF001
        model._ddp_init_helper(parameters, expect_sparse, names, model.static_graph)  # noqa: SLF001
        if model.static_graph:
            model.reducer._set_static_graph()  # noqa: SLF001
            model._static_graph_delay_allreduce_enqueued = False  # noqa: SLF001
        for hook, state in model._comm_hooks:  # noqa: SLF001
            _register_comm_hook(model.reducer, state, hook)


def counts() -> dict[str, int]:
    """How many collectives of each process group this rank has begun, by the group's name."""
    import torch

    cpu = torch.device("cpu")
    return {group.group_name: collectives(group, cpu) for group in process_groups()}
