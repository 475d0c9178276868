"""Tensor parallelism, in place: a Linear or Embedding keeps its part of the weight, and its `forward` exchanges activations.

Parameters stay the objects that they were; only their data become smaller, so the optimizer, hooks and tied weights
stay as they are. Four autograd functions exchange activations, those of Megatron-LM (Shoeybi et al., 2019, section 3): a
copy in one direction is a sum in the other.

All ranks of a group see the same batch, so gradients of weights that every rank holds are equal without an exchange.
Over the groups, where there are several, gradients are averaged as by data parallelism.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.strategies import DDP, Layout, Settings
from kale_dist.strategies.tensor import assign, dimension, kind_of
from kale_dist.wire import context
from kale_dist.wording import listed
from kale_dist.worker.parallel.blocks import alter_blocks, blocks_of
from kale_dist.worker.parallel.data_parallel import DataParallel
from kale_dist.worker.training.rank_group import Group, all_gather_single, differing, fingerprint
from kale_dist.worker.training.strategy import FullState, Parts
from kale_dist.worker.training.trained import alter

_NAMED = 5
"""At most so many layers that are not divided are named."""


class Peers:
    """The ranks that divide weights among them, and the bytes that this rank has sent to the others.

    Args:
        group: The ranks.
    """

    def __init__(self, group: Group) -> None:
        self.size, self.index = group.world_size, group.rank
        self.bytes_sent = 0.0
        self._group = group.world

        def exchange(do: Callable[[Tensor], Tensor], undo: str) -> Callable[[Tensor], Tensor]:
            def call(tensor: Tensor) -> Tensor:
                # Some versions of torch annotate its type.
                apply: Any = _Exchange.apply
                found: Tensor = apply(tensor, do, getattr(self, undo))
                return found

            # The compiler fails on the count of bytes, and cannot look into a collective anyway.
            return torch.compiler.disable(call)  # type: ignore[no-untyped-call, no-any-return]

        # A whole input of a divided weight: its gradient is the sum of the ranks' gradients.
        self.enter = exchange(lambda tensor: tensor.view_as(tensor), "whole_of_summands")
        self.whole_of_summands = exchange(self.sum, "enter")
        self.whole_of_parts = exchange(self.join, "own_of_whole")
        self.own_of_whole = exchange(self.own, "whole_of_parts")

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, as a new tensor."""
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=self._group)
        self.bytes_sent += 2 * (self.size - 1) / self.size * total.numel() * total.element_size()
        return total

    def join(self, tensor: Tensor) -> Tensor:
        """Concatenate all ranks' tensors in the last dimension."""
        parts = self.gather(tensor)
        self.bytes_sent += (self.size - 1) * tensor.numel() * tensor.element_size()
        return torch.cat(parts, dim=-1)

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return all ranks' tensors."""
        parts = tensor.new_empty(self.size * tensor.numel())
        all_gather_single(parts, tensor.contiguous().view(-1), group=self._group)
        return parts.view(self.size, *tensor.shape).unbind()

    def own(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of the last dimension."""
        return tensor.chunk(self.size, dim=-1)[self.index].contiguous()


class _Exchange(torch.autograd.Function):
    """An exchange whose backward pass is another exchange, so that a loss may contain a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, do: Callable[[Tensor], Tensor], undo: Callable[[Tensor], Tensor]) -> Any:
        ctx.undo = undo
        return do(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.undo(gradients[0]), None, None


class DividedWeights:
    """The weights that are divided over a group of ranks; makes them whole again.

    Args:
        peers: The ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.dimensions: dict[int, tuple[int, int]] = {}
        """By identity of each divided parameter: the divided dimension, and how many weights are side by side in it."""
        self._parameters: dict[int, Any] = {}
        self._shapes: dict[int, torch.Size] = {}

    def divide(self, parameter: Any, along: int, pieces: int, optimizer: Any) -> None:
        """Keep this rank's part of a parameter, and of the optimizer's state for it.

        Raises:
            ConfigError: The optimizer has a state for the weight that is neither a number nor of the weight's shape.
        """
        if parameter is None or id(parameter) in self.dimensions:
            return
        shape = parameter.shape
        self.dimensions[id(parameter)] = along, pieces
        self._parameters[id(parameter)] = parameter
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            if value.shape != shape:
                problem = f"the optimizer keeps {name!r} of shape {tuple(value.shape)} for a weight of {tuple(shape)}"
                raise ConfigError("strategy", problem, "Use an optimizer such as AdamW, or strategy='ddp'")
            optimizer.state[parameter][name] = self._part(value, along, pieces)
        parameter.data = self._part(parameter.data, along, pieces)
        parameter.grad = None
        self._shapes[id(parameter)] = parameter.shape

    def _part(self, tensor: Tensor, along: int, pieces: int) -> Tensor:
        whole = tensor.to_dense() if tensor.is_sparse else tensor
        mine = [one.chunk(self.peers.size, along)[self.peers.index] for one in whole.chunk(pieces, along)]
        return torch.cat(mine, along).clone()

    def whole(self, value: Tensor, parameter: Any) -> Tensor:
        """Gather a parameter, or an optimizer's state of its shape. All ranks of the group call this."""
        if value.shape != self._shapes.get(id(parameter)):
            return value.detach()
        if value.is_sparse:
            return self.whole(value.to_dense(), parameter).to_sparse(value.sparse_dim())
        along, pieces = self.dimensions[id(parameter)]
        # These bytes do not count as sent: they are for a checkpoint, not for a step.
        each = [one.chunk(pieces, along) for one in self.peers.gather(value.detach())]
        return torch.cat([one[piece] for piece in range(pieces) for one in each], along)

    def restore(self, full: dict[int, Tensor]) -> None:
        """Put whole values back into the parameters.

        Args:
            full: Values by identity of the parameter; other keys are ignored.
        """
        for key, value in full.items():
            if key in self._parameters:
                self._parameters[key].data = value


def divide_layers(
    model: torch.nn.Module, plan: tuple[tuple[str, str], ...], peers: Peers, optimizer: Any, stack: contextlib.ExitStack
) -> DividedWeights:
    """Divide a model's Linear and Embedding layers over ranks, in place.

    Args:
        model: The model.
        plan: Pairs of a pattern and a word.
        peers: The ranks.
        optimizer: The optimizer, whose state is divided too.
        stack: Puts each `forward` back.

    Raises:
        ConfigError: A layer cannot be divided so.
    """
    modules = dict(model.named_modules())
    division, words = DividedWeights(peers), assign(modules, plan, peers.size)
    left = [name for name, module in modules.items() if kind_of(module) and name not in words]
    if left and not context.context().rank:
        context.log(
            f"Whole on each rank, as {peers.size} ranks do not divide it or a plan says so: {listed(left, _NAMED)}"
        )
    for name, word in words.items():
        module: Any = modules[name]
        along, pieces = dimension(kind_of(module) or "", word)
        # A weight that layers share is divided with the first of them: only from here on is its shape the same for all.
        division.divide(module.weight, along, pieces, optimizer)
        if isinstance(module, torch.nn.Linear):
            if word != "rows":
                division.divide(module.bias, 0, pieces, optimizer)
            forward = _linear(name, word, module.weight.shape[1], peers)
        elif word == "vocabulary":
            forward = _vocabulary(module.weight.shape[0], peers)
        else:
            forward = _embedding(peers)
        alter(module, stack, forward=types.MethodType(forward, module))
    return division


def _linear(name: str, word: str, inputs: int, peers: Peers) -> Callable[[Any, Tensor], Tensor]:
    def rows(module: Any, given: Tensor) -> Tensor:
        if given.shape[-1] != inputs:
            raise KaleDistError(
                f"{name} is planned as 'rows' and got an input of width {given.shape[-1]}, not {inputs}: what"
                " is before it has to be planned as 'columns' (attention has to use view(batch, time, -1, head_size))"
            )
        output = peers.whole_of_summands(functional.linear(given, module.weight))
        return output if module.bias is None else output + module.bias

    def columns(module: Any, given: Tensor) -> Tensor:
        return functional.linear(peers.enter(given), module.weight, module.bias)

    def alone(module: Any, given: Tensor) -> Tensor:
        return peers.whole_of_parts(columns(module, given))

    return rows if word == "rows" else alone if word == "alone" else columns


def _embedding(peers: Peers) -> Callable[[Any, Tensor], Tensor]:
    def forward(module: Any, given: Tensor) -> Tensor:
        found = functional.embedding(
            given, module.weight, module.padding_idx, None, 2.0, module.scale_grad_by_freq, module.sparse
        )
        return peers.whole_of_parts(found)

    return forward


def _vocabulary(entries: int, peers: Peers) -> Callable[[Any, Tensor], Tensor]:
    """An embedding that shares its weight with a Linear: each rank has some entries, and zeros for the others."""
    first = peers.index * entries

    def forward(module: Any, given: Tensor) -> Tensor:
        is_here = (given >= first) & (given < first + entries)
        if module.padding_idx is not None:
            # Its gradient is zero; its value is the weight's all the same.
            is_trained = (given != module.padding_idx).unsqueeze(-1)
        local = (given - first).where(is_here, 0)
        found = functional.embedding(local, module.weight, None, None, 2.0, module.scale_grad_by_freq, module.sparse)
        if module.padding_idx is not None:
            found = torch.where(is_trained, found, found.detach())
        return peers.whole_of_summands(found.where(is_here.unsqueeze(-1), 0.0))

    return forward


class TensorParallel(DataParallel):
    """Divides weights over the ranks of a group, and averages gradients over groups.

    Args:
        settings: The plan.
        layout: This rank's layout.
    """

    divides = True
    division: DividedWeights
    divides_weights = True
    torch_errors = (
        (
            r"size of tensor a \(\d+\) must match the size of tensor b",
            "the step computes with tensors of different sizes, as where it mixes weights, of which each rank has a part, with whole ones",
            "For a moving average of the weights use callbacks=[kd.callbacks.EMA()], or keep these layers whole by plan=",
        ),
    )

    def __init__(self, settings: Settings, layout: Layout) -> None:
        super().__init__(DDP(), layout)
        self._dividing: Any = settings
        self._full: dict[int, Tensor] = {}

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Divide the weights, then put hooks on the parameters."""
        prepare_without_fast_path(stack)
        stack.callback(self._restore)
        peers = Peers(parts.row)
        self.division = divide_layers(parts.model, self._dividing.plan, peers, parts.optimizer, stack)
        parts.move()
        alter_blocks(blocks_of(parts.model), self._dividing, stack)
        whole = [(name, p) for name, p in parts.named.items() if id(p) not in self.division.dimensions]
        self._whole_names, self._whole = [name for name, _ in whole], [p for _, p in whole]
        super().prepare(parts, stack)

    def _restore(self) -> None:
        if hasattr(self, "division"):
            self.division.restore(self._full)

    def begin_batch(self, *, weight: float, due: bool) -> None:
        """Free the weights that a checkpoint has gathered, too."""
        self._full = {}
        super().begin_batch(weight=weight, due=due)

    def total_norm(self, gradients: Sequence[Tensor], kind: float) -> Tensor:
        """Return the norm over all parts; gradients of weights that every rank holds count once."""
        divided = {id(p.grad) for key, p in self.parameters.items() if key in self.division.dimensions}
        row = self.parts.row
        counted = [one for one in gradients if id(one) in divided or row.rank == 0]
        if not gradients:
            return super().total_norm(gradients, kind)
        return norm_of_parts(counted, kind, row, gradients[0])

    def end_epoch(self) -> None:
        """Average the buffers, and check that weights which every rank holds are equal.

        Raises:
            KaleDistError: They are not equal, so a layer that needs whole inputs got divided inputs.
        """
        super().end_epoch()
        prints = self.parts.row.gather(fingerprint(self._whole))
        if positions := differing(prints):
            name = self._whole_names[positions[0]]
            raise KaleDistError(
                f"{name} is on every rank, and its gradients were not equal: it works on an output that the plan keeps"
                " divided (plan the layers around it as 'alone'), or the step computes with its part of all gradients or draws"
                " random numbers outside of torch (use strategy='ddp' for such a step)"
            )

    def full_state(self) -> FullState | None:
        """Gather the parts; rank 0 keeps the whole weights."""
        if self.layout.shard != 0:
            return None
        full, whole = whole_states(self.parts, self.division.whole)
        if self.parts.group.rank:
            return None
        self._full = whole
        return full

    def metrics(self) -> dict[str, float]:
        """Return the bytes sent, of activations and of gradients."""
        sent = super().metrics()
        peers = self.division.peers
        sent["bytes_sent"] = sent.get("bytes_sent", 0.0) + peers.bytes_sent
        peers.bytes_sent = 0.0
        return sent


def prepare_without_fast_path(stack: contextlib.ExitStack) -> None:
    """Make TransformerEncoderLayer call its layers in evaluations: its fast path reads their weights, which are divided."""
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)


def whole_states(parts: Parts, whole: Callable[[Tensor, Any], Tensor]) -> tuple[FullState, dict[int, Tensor]]:
    """The states of model and optimizer with every tensor made whole, on the CPU. All ranks that hold parts call this.

    Args:
        parts: Model and optimizer.
        whole: Makes a tensor whole: a parameter, or a state of that parameter.

    Returns:
        The states, and the model's whole tensors by the identity of the parameter or buffer that they come from. Only rank 0
        keeps them: the other ranks drop each at once.
    """
    seen: dict[int, Tensor] = {}

    def kept(value: Tensor, parameter: Any) -> Tensor:
        made = whole(value, parameter)
        return made.cpu() if parts.group.rank == 0 else made.new_empty(0)

    model = parts.model.state_dict(keep_vars=True)
    for name, value in model.items():
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen[id(value)] = kept(value, value)
            model[name] = seen[id(value)]
    return FullState(model=model, optimizer=_whole_optimizer_state(parts.optimizer, kept)), seen


def _whole_optimizer_state(optimizer: Any, whole: Callable[[Tensor, Any], Tensor]) -> dict[str, Any]:
    """`optimizer.state_dict()` with the state of each parameter made whole."""
    several = getattr(optimizer, "named", None)
    if several is not None:
        states = {name: _whole_optimizer_state(one, whole) for name, one in several.items()}
        return {
            "named": states,
            "param_groups": [group for state in states.values() for group in state["param_groups"]],
        }
    state: dict[str, Any] = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state["state"]:
            state["state"][number] = {
                name: whole(value, parameter) if isinstance(value, Tensor) and value.dim() else value
                for name, value in state["state"][number].items()
            }
    return state


def norm_of_parts(parts: Sequence[Tensor], kind: float, group: Group, like: Tensor) -> Tensor:
    """Return the p-norm of gradients that are divided over a group, equal on all of its ranks.

    Args:
        parts: This rank's parts; maybe none.
        kind: The p; may be inf.
        group: The ranks.
        like: Has the dtype and device of the norm where this rank has no parts.
    """
    norms = [torch.linalg.vector_norm(part.detach(), kind) for part in parts if part.numel()]
    is_max = kind == float("inf")
    if not norms:
        total = torch.zeros((), dtype=like.dtype, device=like.device)
    else:
        total = torch.stack(norms).max() if is_max else (torch.stack(norms) ** kind).sum()
    if not group.is_alone:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group.world)
    return total if is_max else total ** (1.0 / kind)
