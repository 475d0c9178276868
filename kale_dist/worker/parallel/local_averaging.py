"""Local SGD: each rank steps its own optimizer, and weights and buffers are averaged now and then.

Gradients are weighted by samples as in `ddp` (shards x local / global), and weights are averaged plainly. So the average
of what optimizers do that are linear in the gradient (SGD, with momentum too) is one step with the gradient of the
global batch, also where the last batches are uneven. Adam is not linear: with it, an average after each step is close to
one process and not equal to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kale_dist.errors import KaleDistError
from kale_dist.snapshot.changes import load_state_dict
from kale_dist.worker.parallel.flat import Flat
from kale_dist.worker.parallel.replica import Replica
from kale_dist.worker.training.construction import pytree
from kale_dist.worker.training.rank_group import LARGE, Group, differing, fingerprint
from kale_dist.worker.training.strategy import FullState, Parts

OUTER_LEARNING_RATE = 0.7
OUTER_MOMENTUM = 0.9


class OwnSteps(Replica):
    """A replica with an optimizer of its own: what local SGD and gossip have in common.

    Weights are equal over ranks at the start, and after `end_epoch`.
    """

    reduces = False
    saves_within_epochs = False

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Put hooks on all parameters, and begin to count steps and bytes."""
        super().prepare(parts, stack)
        self.group: Group = parts.column
        self.steps = 0
        """Real steps in this epoch."""
        self.bytes_sent = 0.0
        """Bytes sent since the last call of `metrics`."""

    def stepped(self) -> None:
        """Count the step."""
        super().stepped()
        self.steps += 1

    def weights(self) -> list[Tensor]:
        """Return the parameters that training may change."""
        return list(self.parameters.values())

    def buffers(self) -> list[Tensor]:
        """Return the floating-point buffers that are averaged with the weights; large ones are not, nor those that no state has.

        A table that grows with the longest sample, as of rotary embeddings, has another shape on each rank.
        """
        kept = self.parts.model.state_dict(keep_vars=True)
        named = sorted((name, b) for name, b in self.parts.model.named_buffers() if name in kept)
        floats = [b for _, b in named if b.is_floating_point() and not torch.nn.parameter.is_lazy(b)]
        return [b for b in floats if b.numel() <= LARGE]

    def agree(self, *, at_end: bool) -> None:
        """Check that all ranks have made as many steps and are at the same place, before weights are averaged.

        Raises:
            KaleDistError: The ranks have made different numbers of steps, or some have ended the epoch.
        """
        world, steps = self.group.world_size, self.steps
        total, squares, ends = self.group.sum_int64([steps, steps * steps, int(at_end)])
        if ends not in (0, world) or world * squares != total * total:
            raise KaleDistError(different_steps(steps))

    def average(self, tensors: Iterable[Tensor], *, is_counted: bool = True) -> Flat:
        """Average tensors over ranks; returns flat buffers with the means, the same bits on all ranks."""
        flat = Flat(tensors).read()
        world = self.group.world_size
        for buffer in flat.buffers:
            dist.all_reduce(buffer.div_(world), group=self.group.world)
        # What a checkpoint or the result costs is not part of a step.
        if is_counted:
            self.bytes_sent += 2 * (world - 1) / world * flat.bytes
        return flat

    def are_apart(self) -> bool:
        """Whether the ranks' weights differ at the end of an epoch though no step of an optimizer was counted since they met."""
        is_apart = bool(differing(self.group.gather(fingerprint(self.weights())), tolerance=0.0))
        if is_apart and not self.steps:
            self.group.log(
                "train_step changes weights without optimizer.step(): they were averaged over all ranks at the end of the"
                " epoch, and not within it."
            )
        return is_apart

    def end_epoch(self) -> None:
        """Copy rank 0's other buffers to all ranks, and begin to count the steps of the next epoch."""
        super().end_epoch()
        self.steps = 0

    def full_state(self) -> FullState | None:
        """Return the model, and the mean of all ranks' optimizer states; rank 0's own step counts and the like."""
        if self.group.is_alone:
            return super().full_state()
        groups, state_of = self.parts.optimizer.param_groups, self.parts.optimizer.state
        states: list[tuple[int, str, Tensor]] = []
        index = 0
        for options in groups:
            for parameter in options["params"]:
                for name, value in sorted(state_of.get(parameter, {}).items()):
                    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
                    if is_dense and value.is_floating_point() and value.shape == parameter.shape:
                        states.append((index, name, value))
                index += 1
        everyone = self.group.gather([(index, name) for index, name, _ in states])
        # A rank that never used a parameter has no state for it.
        common = set(everyone[0]).intersection(*everyone[1:])
        shared = [state for state in states if state[:2] in common]
        copies = [value.detach().clone() for *_, value in shared]
        self.average(copies, is_counted=False).write()
        whole = super().full_state()
        if whole is None:
            return None
        means = {id(value): mean for (*_, value), mean in zip(shared, copies, strict=True)}
        optimizer = pytree.tree_map_only(Tensor, lambda value: means.get(id(value), value), whole.optimizer)
        return FullState(model=whole.model, optimizer=optimizer)

    def own_state(self) -> dict[str, Any]:
        """Return this rank's optimizer state."""
        return {"optimizer": self.parts.optimizer.state_dict()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Load this rank's optimizer state in the place of the mean."""
        load_state_dict(self.parts.optimizer, state["optimizer"])

    def metrics(self) -> dict[str, float]:
        """Return the bytes that this rank has sent since the last call."""
        sent, self.bytes_sent = self.bytes_sent, 0.0
        return {"bytes_sent": sent}


class LocalSteps(OwnSteps):
    """Local SGD, with the plain mean or with DiLoCo's outer step.

    DiLoCo (Douillard et al., 2023, algorithm 1) takes `w_before - mean(w)` as a gradient, for SGD with Nesterov momentum.
    """

    saves_within_epochs = True

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        """Only when weights have just been averaged are they equal in all ranks."""
        return self.group.is_alone or not self._since

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Keep a copy of the weights where the outer step needs them."""
        super().prepare(parts, stack)
        self._since = 0
        self._before: Flat | None = None
        self._momentum: list[Tensor] = []
        if self.settings.outer == "diloco":
            self._remember()

    def stepped(self) -> None:
        """Average the weights after every `sync_every` steps."""
        super().stepped()
        self._since += 1
        if self._since == self.settings.sync_every:
            self._synchronise(at_end=False)

    def end_epoch(self) -> None:
        """Average the weights if there were steps since the last time."""
        self._synchronise(at_end=True)
        super().end_epoch()

    def _synchronise(self, *, at_end: bool) -> None:
        if self.group.is_alone:
            return
        self.agree(at_end=at_end)
        if not self._since and not self.are_apart():
            return
        self._since = 0
        if self.settings.outer is None:
            self.average([*self.weights(), *self.buffers()]).write()
        else:
            self.average(self.buffers()).write()
            self._step_outer(self.average(self.weights()))

    @torch.no_grad()
    def _step_outer(self, mean: Flat) -> None:
        before = self._before
        if before is None or [b.shape for b in before.buffers] != [b.shape for b in mean.buffers]:
            # The step made new parameters: there are no weights before them to step from.
            mean.write()
            self._momentum = []
        else:
            self._momentum = self._momentum or [torch.zeros_like(buffer) for buffer in mean.buffers]
            for old, new, momentum in zip(before.buffers, mean.buffers, self._momentum, strict=True):
                gradient = old - new
                momentum.mul_(OUTER_MOMENTUM).add_(gradient)
                gradient.add_(momentum, alpha=OUTER_MOMENTUM)
                new.copy_(old).sub_(gradient, alpha=OUTER_LEARNING_RATE)
            mean.write()
        self._remember()

    def _remember(self) -> None:
        self._before = Flat(self.weights()).read()

    def own_state(self) -> dict[str, Any]:
        """Return this rank's optimizer state and the outer momentum."""
        return {**super().own_state(), "momentum": list(self._momentum)}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Load this rank's optimizer state and the outer momentum."""
        super().load_own_state(state)
        self._momentum = [momentum.to(self.group.device) for momentum in state["momentum"]]


def different_steps(steps: int) -> str:
    """Word the error of a rank that has made another number of steps than the others."""
    return (
        f"The ranks have not made the same number of optimizer steps in this epoch (this rank has made {steps}). All ranks"
        " must take the same steps: do not skip a batch or leave the loop over the loader because of this rank's own data"
    )
