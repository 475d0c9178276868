"""Settings of parameter servers: some ranks hold the weights and step the optimizer, the others compute gradients."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from kale_dist.errors import ConfigError
from kale_dist.strategies import base

DEFAULT_STALENESS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServer(base.Settings):
    """The last ranks hold the parameters and the optimizer's state, divided among them; the others are workers.

    In each step a worker sends its gradients to the servers and receives the new weights. A step of W workers sends W
    times the model's bytes to the servers and as much back, however many servers there are (Li et al., Scaling
    Distributed Machine Learning with the Parameter Server, OSDI 2014); with backups, twice that. The asynchronous mode
    keeps the bound of stale synchronous parallel (Ho et al., NeurIPS 2013).
    """

    word: ClassVar[str] = "parameter-server"
    home: ClassVar[str] = "server_worker.make"

    servers: int = 1
    """How many ranks the parameters are divided among: the last ones, or those before the backups."""
    mode: Literal["sync", "async"] = "sync"
    """`"sync"`: one step for the gradients of all workers, as on one process. `"async"`: one step for each worker's."""
    staleness: int | None = None
    """With `mode="async"`, how many steps a worker may be ahead of the slowest; None for 4."""
    backup: bool = False
    """With `mode="sync"`: each server has a backup, a rank that does the same. If one of the two processes dies, the others
    carry on."""

    def __post_init__(self) -> None:
        base.refuse_count("servers", self.servers)
        base.refuse_choice("mode", self.mode, ("sync", "async"))
        if self.staleness is not None:
            if self.mode == "sync":
                raise base.refusal(
                    f"staleness={self.staleness!r} is given, and with mode='sync' all workers take each step together",
                    "Leave staleness out, or use mode='async'",
                )
            base.refuse_count("staleness", self.staleness, at_least=0)
        base.check_flags(self, "backup")
        if self.backup and self.mode == "async":
            raise base.refusal(
                "backup=True is given, and with mode='async' a server and its backup would step in different orders",
                "Use mode='sync', or leave backup out: the job resumes from its last checkpoint with max_restarts=1",
            )

    def check(self, given: base.Conditions) -> None:
        """Refuse a world without workers, and whatever needs the optimizer in the workers."""
        ranks, serving = given.number_of_processes, self._serving
        if ranks <= serving:
            count = "the only process is a server" if ranks == 1 else f"all {ranks} would be servers"
            backups = " and as many backups" if self.backup else ""
            raise ConfigError(
                "number_of_processes",
                f"is {ranks}, and it counts servers too: with servers={self.servers}{backups} {count}, and no worker is"
                " left",
                f"Use at least {serving + 1} processes, better {serving + 2}",
            )
        if isinstance(given.optimizer, dict):
            problem = "'parameter-server' steps one optimizer, and there are several"
            raise base.refusal(problem, "Use strategy='ddp' or 'local-sgd', or one optimizer")
        if given.precision == "fp16":
            problem = "'fp16' leaves out steps whose gradients overflow, and the servers would wait for them"
            raise ConfigError("precision", problem, "Use precision='bf16', or another strategy")
        base.refuse_optimizers(
            given, base.ALL_WEIGHTS, "looks at all weights at once, and servers step them one by one"
        )
        base.refuse_sparse(self.word, given)

    @property
    def _serving(self) -> int:
        return self.servers * (1 + self.backup)

    def dispensable(self, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Each server with its backup; or the workers of asynchronous servers."""
        workers = world_size - self._serving
        if self.mode == "async":
            return (tuple(range(workers)),)
        first = range(workers, workers + self.servers)
        return tuple((server, server + self.servers) for server in first) if self.backup else ()

    def layout(self, rank: int, world_size: int) -> base.Layout:
        """Workers come first, each with its shard; then the servers and their backups, without data."""
        workers = world_size - self._serving
        is_worker = rank < workers
        number, is_backup = (rank - workers) % self.servers, rank >= workers + self.servers
        server = f"{'backup of ' if is_backup else ''}server {number} of {self.servers}"
        return base.Layout(
            shards=workers,
            shard=rank if is_worker else None,
            peers=(rank,),
            replicas=tuple(range(workers)) if is_worker else (rank,),
            part=f"shard {rank} of {workers}" if is_worker else server,
            agree="step" if self.mode == "sync" else "epoch",
        )
