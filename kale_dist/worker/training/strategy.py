"""The interface between the training loop and a strategy. All that ranks exchange because they train together is behind this.

To add a strategy: settings in `kale_dist.strategies` (one file, listed in its `ALL`), and a class with these methods in a
module of `worker/parallel/`, which the settings name as their `home`. The class is made with `(settings, layout)`. It derives from `Strategy`,
or from `Replica` (replica.py), which adds the hooks on gradients.
`tests/strategies/` has the harness that compares a strategy with one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from kale_dist.errors import ConfigError
from kale_dist.strategies import Layout, Settings
from kale_dist.worker.training.construction import Construction
from kale_dist.worker.training.data.sharding import Pace
from kale_dist.worker.training.rank_group import Buffers, Group


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The objects that a strategy is given to alter."""

    model: torch.nn.Module
    """Several models are one `ModuleDict`."""
    criterion: Any
    optimizer: Any
    """A torch optimizer, or `result.Optimizers` for several."""
    named: dict[str, Tensor]
    """All parameters that training may change, each once, in an order that is equal on all ranks."""
    group: Group
    """All ranks."""
    column: Group
    """The ranks with the same position among their peers, one for each shard, in the order of the shards: those that
    average gradients and buffers. All ranks where every rank has a shard of its own; alone in a rank without data."""
    row: Group
    """The peers, in their order; alone where there are none."""
    pace: Pace
    """The current batch."""
    move: Callable[[], None]
    """Brings model and optimizer to the rank's device, which strategies with `divides` call when they have divided them."""
    construction: Construction | None = None
    """Gives the model's tensors their values, where they have none; only strategies with `divides` are given one."""
    are_weights_read: bool = False
    """Whether the model's weights get other values after `prepare`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FullState:
    """The states as one process would have them: names and order of the notebook's objects, plain tensors, ties kept."""

    model: dict[str, Any]
    """The same names and order as in `model.state_dict()`."""
    optimizer: dict[str, Any]
    """The same form as `optimizer.state_dict()`."""


class Strategy:
    """One way in which ranks share a training. This class alone exchanges buffers, and no gradients.

    All ranks call a method at the same place, unless its docstring has the word "Local".

    Args:
        settings: The strategy's.
        layout: This rank's.
    """

    levels: frozenset[str] = frozenset()
    """Names of `metrics` that are not added up over epochs, such as a distance."""
    divides = False
    """Whether no rank has the whole model: then it is divided on the CPU, where it fits."""
    saves_within_epochs = True
    """Whether there are moments within an epoch at which all ranks are at the same step and `is_settled`."""
    is_settled = True
    """Whether, between two batches, `full_state` and `own_state` hold all that the ranks need to go on."""
    meets_in_steps = False
    """Whether all ranks exchange gradients in each step, and so wait for the slowest."""
    torch_errors: tuple[tuple[str, str, str], ...] = ()
    """Errors of torch's that have a reason with this strategy: a pattern of the text and its line of code, the reason, a remedy."""
    average_buffers = True
    """Whether floating-point buffers of model and criterion are averaged over shards after each epoch, where they differ."""

    def __init__(self, settings: Settings, layout: Layout) -> None:
        self.settings: Any = settings
        self.layout = layout
        self.has_pending = False
        """Whether gradients of an unfinished accumulation window are there, which `zero_grad` must not clear."""

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:  # noqa: ARG002
        """Alter model and optimizer in place; the stack undoes it.

        Called when the objects are on the rank's device, a checkpoint was loaded into them and all ranks hold the same
        values, and before the loop takes over `optimizer.step` and the loaders.
        """
        self.parts = parts
        self._buffers = Buffers(parts, parts.column, average=self.average_buffers)

    def explain(self, error: Exception) -> None:
        """Raise an error in words in the place of one of torch's that a step met. Local.

        Raises:
            ConfigError: It is one of `torch_errors`.
        """
        frames = traceback.extract_tb(error.__traceback__)
        text = f"{error} {frames[-1].line if frames else ''}"
        for pattern, problem, remedy in self.torch_errors:
            if re.search(pattern, text):
                raise ConfigError("strategy", problem, remedy) from error

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters that were made after `prepare`: those of lazy modules, or of an optimizer that the step made.

        Called by all ranks or none, with parameters that may be known already.

        Raises:
            ConfigError: This strategy cannot add parameters.
        """

    def begin_batch(self, *, weight: float, due: bool) -> None:
        """Called when this rank has taken a batch. Local: ranks do not wait for each other here.

        Args:
            weight: What this rank's gradients are multiplied by before they are averaged over shards: shards x this
                rank's samples / samples of the window. 0 means zeros, whatever the gradients are (a repeated sample
                may give nan).
            due: Whether the optimizer's step after this batch is real; else gradients are held back.
        """

    @property
    def is_awaited(self) -> bool:
        """Whether the other ranks may wait in a collective of this batch that this rank has not joined."""
        return False

    def end_batch(self, *, left: bool) -> None:
        """Called before this rank takes the next batch: join the collectives that other ranks made in the last one.

        Args:
            left: This rank left the loop over its loader early.

        Raises:
            KaleDistError: The ranks are not at the same place.
        """

    def passed(self, root: Tensor) -> None:
        """Called when a `backward()` of the step is over. Local.

        Args:
            root: Its tensor, such as the loss.
        """

    def check_held(self) -> None:
        """Called where a step of the optimizer is held back. Local.

        Raises:
            KaleDistError: The user's code has changed or dropped gradients that are being accumulated.
        """

    def keep_gradients(self) -> None:
        """Called where the user's code clears gradients that are being accumulated; they stay. Local."""

    def complete(self, correction: float) -> None:
        """Called before a real step: make gradients those of the whole window, for the parameters that this rank steps.

        Args:
            correction: Factor on the gradients in the end; 1 unless a loop was left early or had no known length.
        """

    def total_norm(self, gradients: Sequence[Tensor], kind: float) -> Tensor:
        """The norm of gradients over the whole model, equal on all ranks.

        Serves `clip_norm=` and the `clip_grad_norm_` of the user's step.

        Args:
            gradients: This rank's gradients of the parameters that are clipped; maybe none.
            kind: The p of the p-norm, may be inf.
        """
        return get_total_norm(gradients, kind)

    def stepped(self) -> None:
        """Called after a real step of the optimizer: average weights, gossip, push and pull."""
        self.has_pending = False

    def end_epoch(self) -> None:
        """Called after the user's train_step and the last held-back step: bring all shards to one state, buffers too."""
        self._buffers.synchronise()

    def end_evaluation(self) -> None:
        """Called after the user's eval_step, in which ranks may have taken different numbers of batches."""

    def full_state(self) -> FullState | None:
        """Return the states of one process in rank 0, None in the others. Called between two batches or epochs, and before all is undone."""
        if self.parts.group.rank:
            return None
        return FullState(model=self.parts.model.state_dict(), optimizer=self.parts.optimizer.state_dict())

    def own_state(self) -> dict[str, Any]:
        """Return what this rank needs to resume and `full_state` lacks: residuals, an outer momentum.

        Returns:
            Tensors, numbers, lists and dicts.
        """
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restore what `own_state` returned. Called after `prepare`."""

    def metrics(self) -> dict[str, float]:
        """Return numbers since the last call, such as `bytes_sent`. The loop sums them over ranks after each epoch."""
        return {}

    def serve(self) -> None:
        """Do what a rank without data does after `prepare`; returns when the training is over.

        Such a rank takes part in no collective, so that the others can do without it. Call `context.mark_progress()`
        while it serves, or the rank counts as stalled.
        """
