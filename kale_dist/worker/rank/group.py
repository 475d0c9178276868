"""The process group of a rank: ready before the user's function, kept until the process is gone.

Torch's functions that make and destroy it are replaced before anything of the user's is loaded: also a name that was
imported before the call, in a cell or a module, is then bound to the replacement.

Torch 2.13 with gloo may hang or abort when a group is destroyed while something still refers to it (a model in
DistributedDataParallel that dies after `destroy_process_group`). So nothing here is ever destroyed: the user's
`destroy_process_group` hides the group, `init_process_group` shows it again, and `os._exit` ends all.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
import sys
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.wire import Assignment, context

_TIMEOUT = dt.timedelta(days=7)
"""Torch's own limits must not end a job: telling a hang from slow work is the agent's task."""


class KeptGroup:
    """The rank's default process group and the store it was made with.

    Args:
        assignment: The rank's.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._attempt = assignment.attempt
        self._world_size = assignment.attempt.world_size
        self._rank = assignment.rank
        self._cuda = assignment.order.cuda
        self.backend = "cpu:gloo,cuda:nccl" if self._cuda else "gloo"
        self.store: Any = None
        self.world: Any = None
        self._subgroups: list[Any] = []
        self._steps = self._passes = self._exchanges = 0
        self._has_other_store = False
        self._replace_functions()

    def open(self, listener: int | None) -> None:
        """Make the group.

        Args:
            listener: Descriptor of the store's listening socket, for rank 0; None for the others.
        """
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.store = TCPStore(
            self._assignment.master_addr,
            self._attempt.port,
            is_master=listener is not None,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        self._init(
            self.backend,
            store=PrefixStore(f"kale_dist/{self._attempt.number}", self.store),
            rank=self._rank,
            world_size=self._world_size,
            timeout=_TIMEOUT,
        )
        self.world = dist.group.WORLD
        _mark_waits()
        self._exchanges = self._count_exchanges()
        register_optimizer_step_post_hook(self._count_step)
        original: Any = torch.Tensor.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._passes += 1
            return original(*args, **kwargs)

        setattr(torch.Tensor, "backward", backward)  # noqa: B010 - mypy sees no function of this type there

    def _count_step(self, *_: Any) -> None:
        self._steps += 1

    def _count_exchanges(self) -> int:
        """Collectives so far, of this group; one more where the user's code has found another way to talk."""
        import torch
        from torch.distributed import distributed_c10d as c10d

        found = len(c10d._world.pg_map) + self._has_other_store  # noqa: SLF001 - there is no public list of groups
        for device in ("cpu", "cuda") if self._cuda else ("cpu",):
            backend = self.world._get_backend(torch.device(device))  # noqa: SLF001 - nor of a group's backends
            found += backend._get_sequence_number_for_group()  # noqa: SLF001
        return int(found)

    def advise(self, *, trained: bool) -> None:
        """After the user's function: say so if the ranks have trained and never exchanged anything.

        Args:
            trained: Whether weights of known models changed, for functions without an optimizer of torch's.
        """
        world = self._world_size
        steps = self._steps or (self._passes if trained else 0)
        if self._rank or world == 1 or not steps or self._count_exchanges() != self._exchanges:
            return
        text = (
            f"The ranks made {steps:,} {'optimizer steps' if self._steps else 'backward passes'} and exchanged nothing: has each of the {world} processes"
            " trained a copy of its own? Use distribute(), wrap the model in DistributedDataParallel, or give Lightning's"
            f" Trainer devices={self._assignment.local_world_size} and num_nodes={len(self._attempt.members)}."
        )
        context.say(text)

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
        self._replace_store()
        _replace_spawn()

    def _replace_store(self) -> None:
        """Let rank 0 open a store at any other port than ours: `init_rpc(init_method="tcp://...")` waits for one.

        TORCHELASTIC_USE_AGENT_STORE tells torch that a store listens already, wherever it is asked to connect to.
        """
        module: Any = sys.modules["torch.distributed.rendezvous"]
        original = module._create_c10d_store  # noqa: SLF001 - torch has no setting for it

        @functools.wraps(original)
        def create(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
            module._torchelastic_use_agent_store = lambda: port == self._attempt.port  # noqa: SLF001 - read by the original
            self._has_other_store = True
            return original(hostname, port, *args, **kwargs)

        module._create_c10d_store = create  # noqa: SLF001

    def _make_init(self, original: Callable[..., None]) -> Callable[..., None]:
        self._init = original

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
            self._check("world_size", world_size, self._world_size)
            self._check("rank", rank, self._rank)
            c10d._update_default_pg(self.world)  # noqa: SLF001 - there is no public way to show a group again
            if self._rank == 0:
                asked = f" (not {backend})" if backend and str(backend) not in self.backend else ""
                print(  # noqa: T201 - the rank's output is the job's log
                    f"kale_dist: init_process_group keeps the group that every rank has: {self.backend}{asked}, "
                    f"{self._world_size} ranks",
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


def _replace_spawn() -> None:
    """Let processes that multiprocessing spawns open stores: `torch.multiprocessing.spawn` gives them ranks of their own."""
    original: Any = util.spawnv_passfds
    name = "TORCHELASTIC_USE_AGENT_STORE"

    @functools.wraps(original)
    def spawn(*args: Any) -> Any:
        before = os.environ.pop(name, None)
        try:
            return original(*args)
        finally:
            if before is not None:
                os.environ[name] = before

    setattr(util, "spawnv_passfds", spawn)  # noqa: B010 - mypy wants its types


def _mark_waits() -> None:
    """Give waiting for an asynchronous collective a Python frame of its own, by which the agent recognises it."""
    from torch._C import _distributed_c10d

    work: Any = _distributed_c10d.Work
    wait = work.wait

    @functools.wraps(wait)
    def wait_for_ranks(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wait(self, *args, **kwargs)

    work.wait = wait_for_ranks
