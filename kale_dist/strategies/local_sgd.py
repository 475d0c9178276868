"""Settings of local SGD: ranks train on their own and average their weights now and then."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from kale_dist.strategies import base


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGD(base.Settings):
    """Each rank steps its own optimizer; weights and buffers are averaged over ranks every `sync_every` steps.

    They are also averaged at the end of each epoch, so that evaluation and checkpoints see one model. A step sends
    2(n - 1)/n of the model's bytes per rank, divided by `sync_every` (ring all-reduce: Patarasuk and Yuan, JPDC 2009).
    Sources: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019; with `outer="diloco"`, Douillard et al.,
    DiLoCo, 2023, algorithm 1.
    """

    word: ClassVar[str] = "local-sgd"
    home: ClassVar[str] = "local_averaging.LocalSteps"

    sync_every: int | Literal["epoch"] = 8
    """Steps of the optimizer between two averages; `"epoch"` averages at the end of each epoch only."""
    outer: Literal["diloco"] | None = None
    """How the average is used: None takes it as the new weights; `"diloco"` steps towards it by SGD with Nesterov
    momentum 0.9 and learning rate 0.7."""

    def __post_init__(self) -> None:
        every = self.sync_every
        steps = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if not steps and not (isinstance(every, str) and every == "epoch"):
            problem = f"sync_every={every!r} is neither a number of steps nor 'epoch'"
            raise base.refusal(problem, "Write sync_every=8, for instance, or sync_every='epoch'")
        base.refuse_choice("outer", self.outer, (None, "diloco"))

    def check(self, given: base.Conditions) -> None:
        """Refuse an optimizer that evaluates the loss itself."""
        base.refuse_closures(self.word, given)

    def layout(self, rank: int, world_size: int) -> base.Layout:
        """Every rank has a shard of its own; with an average after every step they agree at all times."""
        return base.Layout.of_replicas(rank, world_size, agree="epoch")
