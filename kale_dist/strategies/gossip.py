"""Settings of gossip: ranks average their weights with a few neighbours after each step."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from kale_dist.errors import ConfigError
from kale_dist.strategies import base


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gossip(base.Settings):
    """Each rank steps its own optimizer, then averages its weights with those of a few neighbours.

    All ranks are averaged at the end of each epoch, so that evaluation and checkpoints see one model. A step sends per
    rank: ring, 2 times the model's bytes (1 with 2 ranks); exponential, 1 time; asynchronous, 1 time on average. With
    `send="changed"`, a tenth of the numbers, each with its position of 4 bytes. Sources: Lian et al., D-PSGD, NeurIPS
    2017, algorithm 1; Assran et al., Stochastic Gradient Push, ICML 2019 (exponential graph); Lian et al., AD-PSGD, ICML
    2018 (asynchronous); Koloskova et al., CHOCO-SGD, ICML 2019, algorithm 2 (only what changed).
    """

    word: ClassVar[str] = "gossip"
    home: ClassVar[str] = "gossip_averaging.Neighbours"

    graph: Literal["ring", "exponential"] = "ring"
    """`"ring"`: the rank before and the one after. `"exponential"`: one neighbour in each step, 1, 2, 4, ... ranks away."""
    mode: Literal["sync", "async"] = "sync"
    """`"sync"`: neighbours meet after every step. `"async"`: even ranks meet a random odd neighbour, which does not wait."""
    send: Literal["all", "changed"] = "all"
    """`"changed"`: only the tenth of the weights that changed most; the others are sent when their change has grown."""

    def __post_init__(self) -> None:
        base.refuse_choice("graph", self.graph, ("ring", "exponential"))
        base.refuse_choice("mode", self.mode, ("sync", "async"))
        base.refuse_choice("send", self.send, ("all", "changed"))
        if self.mode == "async" and self.send == "changed":
            problem = "send='changed' needs neighbours that meet after every step, and mode is 'async'"
            raise base.refusal(problem, "Use mode='sync', or send='all'")

    def check(self, given: base.Conditions) -> None:
        """Refuse a world without neighbours."""
        ranks = given.number_of_processes
        if ranks < 2:  # noqa: PLR2004 - a pair
            problem = "is 1, and gossip averages weights with neighbours"
            raise ConfigError("number_of_processes", problem, "Use at least 2 processes, or strategy='ddp'")
        if self.mode == "async" and ranks % 2:
            raise ConfigError(
                "number_of_processes",
                f"is {ranks}, and with mode='async' each even rank meets odd ones: round a circle of {ranks}, two even"
                " ranks would be neighbours",
                f"Use {ranks - 1} or {ranks + 1} processes, or mode='sync'",
            )
        base.refuse_closures(self.word, given)

    def layout(self, rank: int, world_size: int) -> base.Layout:
        """Every rank has a shard of its own; they agree at the end of each epoch."""
        return base.Layout.of_replicas(rank, world_size, agree="epoch")
