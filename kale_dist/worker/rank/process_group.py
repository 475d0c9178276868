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
import shutil
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from kale_dist.errors import ConfigError, ContractError
from kale_dist.wire import Assignment, context
from kale_dist.worker.rank import peers, process_state

TIMEOUT = dt.timedelta(days=7)
"""Torch's own limits must not end a job: distinguishing a hang from slow work is the agent's task."""

CONNECT_S = 120.0
"""In which all ranks have exchanged a first number over NCCL, counted from when the last one is there. It takes seconds."""

_COUNT_EACH_S = 1.0
_SHM = "/dev/shm"  # noqa: S108 - NCCL's and DataLoader's
_SHM_BYTES = 64 << 20
"""Bytes of shared memory for each rank. Containers have 64 MiB in all unless set otherwise."""


_NO_CONNECTION = (
    f"The ranks could not exchange a number over NCCL within {CONNECT_S:g} s. Between machines NCCL needs all ports of the"
    " job's pods (a NetworkPolicy may close them) and an interface that all can reach, which environment="
    '{"NCCL_SOCKET_IFNAME": "eth0"} names; within one it needs /dev/shm. {"NCCL_DEBUG": "INFO"} logs what NCCL tries'
)


def small_shm(ranks: int) -> str:
    """A sentence if shared memory is too small for so many ranks of one machine; empty if it is not."""
    try:
        free = shutil.disk_usage(_SHM).free
    except OSError:
        return ""
    if ranks == 1 or free >= ranks * _SHM_BYTES:
        return ""
    return (
        f"{_SHM} has {free >> 20} MiB free for {ranks} ranks: NCCL and DataLoader's workers pass data through it, and fail when"
        " it is full (Bus error, unhandled system error). Start the container with --shm-size=8g, or mount a larger one"
    )


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
        self.report = "", ""
        """A fingerprint of the weights that this rank has trained, and what to log where others have other ones."""
        self._has_other_store = False
        self._replace_functions()

    def open(self, descriptor: int | None, give_up: Callable[[BaseException], None]) -> None:
        """Make the group, and with CUDA connect all ranks over NCCL.

        Args:
            descriptor: Of the file that the store is, on one machine; else of its listening socket, for rank 0, and None for the others.
            give_up: Called in another thread, and not to return, if the ranks do not connect.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined] # public, and imported there from torch._C
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if self._attempt.is_on_one_machine:
            self.store = FileStore(f"/proc/self/fd/{descriptor}", self._world_size)
            self.store.set_timeout(TIMEOUT)
            self._warn_of_interfaces()
        else:
            self.store = TCPStore(
                self._assignment.master_addr,
                self._attempt.port,
                is_master=descriptor is not None,
                timeout=TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
        store = PrefixStore(f"kale_dist/{self._attempt.number}", self.store)
        given: dict[str, Any] = {"rank": self._rank, "world_size": self._world_size, "timeout": TIMEOUT}
        if self._cuda:
            self._connect(store, given, give_up)
        else:
            self._init(self.backend, store=store, **given)
        self.world = dist.group.WORLD
        with context.only_shown("Which rank waits in an asynchronous collective"):
            _mark_waits()
        self._exchanges = self._count_exchanges()
        register_optimizer_step_post_hook(self._count_step)
        original: Any = torch.Tensor.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._passes += 1
            return original(*args, **kwargs)

        setattr(torch.Tensor, "backward", backward)  # noqa: B010 - mypy sees no function of this type there
        if self._cuda:
            threading.Thread(target=self._report_exchanges, name="kale_dist exchanges", daemon=True).start()

    def _connect(self, store: Any, given: dict[str, Any], give_up: Callable[[BaseException], None]) -> None:
        """Make the group and exchange a number over NCCL at once, not in the first backward pass, where it may hang unseen."""
        import torch
        import torch.distributed as dist

        device = torch.device(context.context().device)
        if not self._assignment.local_rank and (sentence := small_shm(self._assignment.local_world_size)):
            context.log(sentence)
        # The last rank may still load its snapshot, which may take long and is no hang.
        if store.add("here", 1) == self._world_size:
            store.set("all", "")
        store.wait(["all"], TIMEOUT)
        limit = threading.Timer(CONNECT_S, lambda: give_up(ContractError(_NO_CONNECTION)))
        limit.daemon = True
        limit.start()
        self._init(self.backend, store=store, device_id=device, **given)
        first = torch.ones(1, device=device)
        dist.all_reduce(first)
        first.item()
        limit.cancel()
        if not self._rank:
            _log_backend(dist.group.WORLD, device)

    def _report_exchanges(self) -> None:
        """Tell the agent, while the main thread may wait for a GPU, how many collectives and steps there were. A thread."""
        logged: tuple[int, ...] = ()
        while True:
            now = (*self.exchanges(), self._steps)
            if now != logged:
                logged = now
                context.mark_exchanges(now[:-1])
            time.sleep(_COUNT_EACH_S)

    def exchanges(self) -> tuple[int, ...]:
        """Collectives of the default group so far, of each backend. The same on all ranks that wait for none."""
        import torch

        devices = [torch.device(name) for name in (("cpu", "cuda") if self._cuda else ("cpu",))]
        return tuple(collectives(self.world, device) for device in devices)

    def _count_step(self, *_: Any) -> None:
        self._steps += 1

    def _count_exchanges(self) -> int:
        """Collectives so far, of this group; one more where the user's code has found another way to talk."""
        return len(process_groups()) + self._has_other_store + sum(self.exchanges())

    @property
    def has_trained(self) -> bool:
        """Whether this rank has made a backward pass or a step of an optimizer."""
        return bool(self._steps or self._passes)

    def advise(self, *, trained: bool, weights: str = "") -> None:
        """Log a hint after the user's function if the ranks have trained and never exchanged anything.

        Args:
            trained: Whether weights of known models changed, for functions without an optimizer of torch's.
            weights: A fingerprint of what this rank has trained of the models that the function was given: then its agent compares
                those of all ranks.
        """
        world = self._world_size
        steps = self._steps or (self._passes if trained else 0)
        what, end = ("optimizer step", "s") if self._steps else ("backward pass", "es")
        is_silent = bool(steps) and self._count_exchanges() == self._exchanges
        made = f"made {steps:,} {what}{end * (steps > 1)} and exchanged nothing"
        if not is_silent:
            made = "hold different weights of the models that they were given"
        text = (
            f"The ranks {made}: has each of the {world} processes trained a copy of its own? Use distribute(), wrap the model in DistributedDataParallel, or give Lightning's"
            f" Trainer devices={self._assignment.local_world_size} and num_nodes={len(self._attempt.members)}."
        )
        if weights:
            self.report = weights, text
        elif is_silent and world > 1 and not self._rank:
            context.log(text, warns=True)

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
        # All that makes groups calls it.
        c10d._new_process_group_helper = self.guarded(c10d._new_process_group_helper)  # noqa: SLF001
        self._replace_store()
        _replace_spawn()

    def _replace_store(self) -> None:
        """Between machines, let rank 0 open a store at any other port than ours: `init_rpc(init_method="tcp://...")` waits for one.

        With TORCHELASTIC_USE_AGENT_STORE torch expects a store to listen already, wherever it is asked to connect to.
        """
        module: Any = sys.modules["torch.distributed.rendezvous"]
        original = module._create_c10d_store  # noqa: SLF001 - torch has no setting for it

        @functools.wraps(original)
        def create(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
            if not self._attempt.is_on_one_machine:
                module._torchelastic_use_agent_store = lambda: port == self._attempt.port  # noqa: SLF001 - read by the original
            self._has_other_store = True
            return original(hostname, port, *args, **kwargs)

        module._create_c10d_store = create  # noqa: SLF001

    def guarded(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        """A function that connects ranks; on one machine it refuses connections to other users' processes, as `peers.check` does."""
        if not self._attempt.is_on_one_machine:
            return connect

        @functools.wraps(connect)
        def connect_to_own(*args: Any, **kwargs: Any) -> Any:
            before = peers.sockets()
            made = connect(*args, **kwargs)
            # gloo has connected to all ranks now, unless it waits for the first message. Others, such as NCCL, may not have.
            is_gloo = not self._cuda and not {"ucc", "mpi"} & set(map(str, (*args, *kwargs.values())))
            peers.check(before, closes=is_gloo and not os.environ.get("TORCH_GLOO_LAZY_INIT"))
            return made

        return connect_to_own

    def _warn_of_interfaces(self) -> None:
        for name in process_state.ONLY_LOOPBACK:
            if (
                not self._rank
                and os.environ.get(name, "lo").lstrip("=") != "lo"
                and (self._cuda or name.startswith("GLOO"))
            ):
                text = f"{name}={os.environ[name]} lets more than this machine connect to the ranks, which ask nobody who connects. Leave it out"
                context.log(text, warns=True)

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
            del init_method, timeout
            self._check("world_size", world_size, self._world_size)
            self._check("rank", rank, self._rank)
            _show(self.world)
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
                _show(None)
            else:
                self._subgroups.append(group)

        return destroy_process_group


def _show(group: Any) -> None:
    """Make a group the default one, or let there be none."""
    from torch.distributed import distributed_c10d as c10d

    c10d._update_default_pg(group)  # noqa: SLF001 - there is no public way to show a group again


def process_groups() -> list[Any]:
    """All process groups of this rank."""
    from torch.distributed import distributed_c10d as c10d

    return list(c10d._world.pg_map)  # noqa: SLF001 - there is no public list


def collectives(group: Any, device: Any) -> int:
    """How many collectives of a group this rank has begun on a kind of device."""
    counts = [0]
    with context.only_shown("Which rank waits for which"):
        counts.append(group._get_backend(device)._get_sequence_number_for_group())  # noqa: SLF001 - there is no public way
    return counts[-1]


def _log_backend(group: Any, device: Any) -> None:
    """Log which NCCL backend a group has, from torch 2.15 on, whose default is another one than before."""
    import torch

    if torch.__version__ >= "2.15":  # compared as versions, not as texts
        with context.only_shown("The NCCL backend"):
            name = type(group._get_backend(device)).__name__  # noqa: SLF001 - there is no public way
            context.log(f"The NCCL backend is torch {torch.__version__}'s {name}")


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
    import torch.distributed as dist

    work: Any = dist.Work
    wait = work.wait

    @functools.wraps(wait)
    def wait_for_ranks(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wait(self, *args, **kwargs)

    work.wait = wait_for_ranks
