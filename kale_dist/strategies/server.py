"""Settings of parameter servers: some ranks hold the weights and step the optimizer, the others compute gradients."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from kale_dist.errors import ConfigError
from kale_dist.strategies.base import Conditions, Layout, Settings, refuse_choice, refuse_count
from kale_dist.strategies.local_sgd import refuse_closures

DEFAULT_STALENESS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer(Settings):
    """The last `servers` ranks hold the parameters and the optimizer's state, divided among them; the others are workers.

    In each step a worker sends its gradients to the servers and receives the new weights. A step of W workers sends W
    times the model's bytes to the servers and as much back, however many servers there are (Li et al., Scaling
    Distributed Machine Learning with the Parameter Server, OSDI 2014). The asynchronous mode keeps the bound of stale
    synchronous parallel (Ho et al., NeurIPS 2013).
    """

    word: ClassVar[str] = "parameter-server"
    home: ClassVar[str] = "server_worker.make"

    servers: int = 1
    """Ranks that are servers: the last ones."""
    mode: Literal["sync", "async"] = "sync"
    """`"sync"`: one step for the gradients of all workers, as on one process. `"async"`: one step for each worker's."""
    staleness: int | None = None
    """With `mode="async"`, how many steps a worker may be ahead of the slowest; None for 4."""

    def __post_init__(self) -> None:
        refuse_count("servers", self.servers)
        refuse_choice("mode", self.mode, ("sync", "async"))
        if self.staleness is not None:
            if self.mode == "sync":
                raise ConfigError(
                    "strategy",
                    f"staleness={self.staleness!r} is given, and with mode='sync' all workers take each step together",
                    "Leave staleness out, or use mode='async'",
                )
            refuse_count("staleness", self.staleness, at_least=0)

    def check(self, given: Conditions) -> None:
        """Refuse a world without workers, and what needs the optimizer in the workers."""
        ranks = given.number_of_processes
        if ranks <= self.servers:
            count = "the only process is a server" if ranks == 1 else f"all {ranks} would be servers"
            raise ConfigError(
                "number_of_processes",
                f"is {ranks}, and it counts servers too: with servers={self.servers} {count}, and no worker is left",
                f"Use at least {self.servers + 1} processes, better {self.servers + 2}",
            )
        if isinstance(given.optimizer, dict):
            raise ConfigError(
                "strategy",
                "'parameter-server' steps one optimizer, and there are several",
                "Use strategy='ddp' or 'local-sgd', or one optimizer",
            )
        if given.precision == "fp16":
            raise ConfigError(
                "precision",
                "'fp16' leaves out steps whose gradients overflow, and the servers would wait for them",
                "Use precision='bf16', or another strategy",
            )
        refuse_closures(self.word, given)

    def layout(self, rank: int, world_size: int) -> Layout:
        """The last ranks are servers, without data."""
        workers = world_size - self.servers
        is_worker = rank < workers
        return Layout(
            shards=workers,
            shard=rank if is_worker else None,
            peers=(rank,),
            replicas=tuple(range(workers)) if is_worker else (rank,),
            part=f"shard {rank} of {workers}" if is_worker else f"server {rank - workers} of {self.servers}",
            agree="step" if self.mode == "sync" else "epoch",
            exact=self.mode == "sync",
        )
