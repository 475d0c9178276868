"""The process group of a rank: ready before the user's function, kept until the process is gone.

Torch 2.13 with gloo may hang or abort when a group is destroyed while something still refers to it (a model in
DistributedDataParallel that dies after `destroy_process_group`). So nothing here is ever destroyed: the user's
`destroy_process_group` hides the group, `init_process_group` shows it again, and `os._exit` ends all.
"""

from __future__ import annotations

import datetime as dt
import functools
import sys
from collections.abc import Callable
from typing import Any

from kale_dist.contract import Assignment
from kale_dist.errors import ConfigError

_TIMEOUT = dt.timedelta(days=7)
"""Torch's own limits must not end a job: telling a hang from slow work is the agent's task."""


class KeptGroup:
    """The rank's default process group and the store it was made with.

    Args:
        assignment: The rank's.
        listener: Descriptor of the listening socket, for rank 0; None for the others.
    """

    def __init__(self, assignment: Assignment, listener: int | None) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        order, rank = assignment.order, assignment.rank
        self._order = order
        self._rank = rank
        self.backend = "cpu:gloo,cuda:nccl" if order.cuda else "gloo"
        self.store = TCPStore(
            assignment.master_addr,
            assignment.port,
            is_master=listener is not None,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        dist.init_process_group(
            self.backend,
            store=PrefixStore(f"kale_dist/{assignment.attempt}", self.store),
            rank=rank,
            world_size=order.world_size,
            timeout=_TIMEOUT,
        )
        self.world: Any = dist.group.WORLD
        self._subgroups: list[Any] = []
        self._replace_functions()
        _mark_waits()

    def _replace_functions(self) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        for name, make in (
            ("init_process_group", self._make_init),
            ("destroy_process_group", self._make_destroy),
        ):
            replacement = make(getattr(c10d, name))
            setattr(c10d, name, replacement)
            setattr(dist, name, replacement)

    def _make_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init_process_group(
            backend: str | None = None,
            init_method: str | None = None,
            timeout: dt.timedelta | None = None,
            world_size: int = -1,
            rank: int = -1,
            *_args: Any,
            **_kwargs: Any,
        ) -> None:
            from torch.distributed import distributed_c10d as c10d

            del init_method, timeout
            self._check("world_size", world_size, self._order.world_size)
            self._check("rank", rank, self._rank)
            c10d._update_default_pg(self.world)  # noqa: SLF001 - there is no public way to show a group again
            if self._rank == 0:
                asked = f" (not {backend})" if backend and str(backend) not in self.backend else ""
                print(  # noqa: T201 - the rank's output is the job's log
                    f"kale_dist: init_process_group keeps the group that every rank has: {self.backend}{asked}, "
                    f"{self._order.world_size} ranks",
                    file=sys.stderr,
                )

        return init_process_group

    def _check(self, argument: str, given: int, actual: int) -> None:
        if given not in (-1, None, actual):
            raise ConfigError(
                argument,
                f"init_process_group was called with {argument}={given}, but here it is {actual}",
                "Leave rank and world_size out, and set the number of ranks with number_of_processes",
            )

    def _make_destroy(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def destroy_process_group(group: Any = None) -> None:
            from torch.distributed import distributed_c10d as c10d

            if group is None or group is self.world:
                if c10d.GroupMember.WORLD is None:
                    raise AssertionError("Process group cannot be None")  # what torch raises
                c10d._update_default_pg(None)  # noqa: SLF001 - as above
            else:
                self._subgroups.append(group)

        return destroy_process_group


def _mark_waits() -> None:
    """Give waiting for an asynchronous collective a Python frame of its own, by which the agent recognises it."""
    from torch._C import _distributed_c10d

    work: Any = _distributed_c10d.Work
    wait = work.wait

    @functools.wraps(wait)
    def wait_for_ranks(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wait(self, *args, **kwargs)

    work.wait = wait_for_ranks
