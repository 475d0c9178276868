"""A model cut into stages, one a rank, through which each batch goes in micro-batches (GPipe).

The user's step runs on every rank, with the whole batch. Its call of the model runs this rank's stage (see `ghosts`) for one
micro-batch after another and returns the output of the last stage, which sends it to all; so every rank computes the same
loss. Its `backward()` runs the stages backwards, the last first. All micro-batches go
forward before the first goes backward (Huang et al., GPipe, NeurIPS 2019, section 2.2): stages wait for each other for
(S - 1) / (M + S - 1) of the time, with S stages and M micro-batches.

Parameters of other stages keep their identity and shape, and take no memory; the optimizer has no state for them. A
parameter that several stages use (tied weights, the model's own) is in each of them, and their gradients are added up.
Over several pipelines, each with its part of the batch, the gradients of a stage are averaged as by data parallelism.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.strategies import DDP, Layout, Pipeline
from kale_dist.wire import context
from kale_dist.worker.parallel.blocks import alter_blocks
from kale_dist.worker.parallel.data_parallel import DataParallel
from kale_dist.worker.parallel.ghosts import Calls, Ghosts, Shape, ghost, owners_of, units_of
from kale_dist.worker.parallel.replica import backward_pass, refuse_gradients
from kale_dist.worker.training.construction import pytree
from kale_dist.worker.training.rank_group import Group
from kale_dist.worker.training.result import optimizers_of
from kale_dist.worker.training.strategy import FullState, Parts
from kale_dist.worker.training.trained import alter


class _Links:
    """Point-to-point messages between the stages.

    Args:
        row: The ranks of the stages, in their order.
    """

    def __init__(self, row: Group) -> None:
        self._row = row
        self._under_way: list[tuple[Any, Tensor]] = []
        self._last_sent: dict[tuple[str, int], bytes] = {}
        self._last_received: dict[tuple[str, int], bytes] = {}
        self.bytes_sent = 0
        """Bytes of tensors. Notes about their shapes are a few bytes, and sent in full only where they change."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Start to send a tensor."""
        whole = tensor.detach().contiguous()
        self.bytes_sent += whole.nbytes
        self._send(whole, to)

    def _send(self, tensor: Tensor, to: int) -> None:
        self._under_way.append((dist.isend(tensor, group=self._row.world, group_dst=to), tensor))

    def receive(self, like: Shape | Tensor, source: int, device: str | torch.device | None = None) -> Tensor:
        """Wait for a tensor, and return it. It has to be on the same kind of device as where it is sent: each has a backend."""
        tensor = torch.empty(like.shape, dtype=like.dtype, device=device or self._row.device)
        return self._receive(tensor, source)

    def _receive(self, tensor: Tensor, source: int) -> Tensor:
        dist.recv(tensor, group=self._row.world, group_src=source)
        return tensor

    def send_note(self, kind: str, value: Any, to: int) -> None:
        """Send a small value; nearly nothing where it equals the last value of its kind."""
        data = pickle.dumps(value)
        is_known = self._last_sent.get((kind, to)) == data
        self._last_sent[kind, to] = data
        self._send(torch.tensor([0 if is_known else len(data)], device="cpu"), to)
        if not is_known:
            self._send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)

    def receive_note(self, kind: str, source: int) -> tuple[Any, bool]:
        """Receive a value; returns it, and whether it differs from the last value of its kind."""
        size = int(self._receive(torch.empty(1, dtype=torch.int64, device="cpu"), source))
        if size:
            array: Any = self._receive(torch.empty(size, dtype=torch.uint8, device="cpu"), source).numpy()
            self._last_received[kind, source] = array.tobytes()
        return pickle.loads(self._last_received[kind, source]), bool(size)

    def flush(self) -> None:
        """Wait until all messages are sent."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()


@dataclasses.dataclass(slots=True)
class _Passage:
    """One micro-batch on its way back."""

    size: int
    """Samples in it."""
    arrived: Tensor | None = None
    """The tensor that came from the stage before: a leaf that gets a gradient."""
    sent: Tensor | None = None
    """The tensor that went to the next stage, if it needs a gradient."""
    outputs: list[Tensor | None] = dataclasses.field(default_factory=list)
    """The outputs of the last stage; None for those that need no gradient."""


class _Join(torch.autograd.Function):
    """Begins the user's graph at the outputs of the last stage; its backward pass runs the stages backwards."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, backward: Any, flags: Sequence[bool], *outputs: Tensor) -> Any:
        ctx.run = backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(one for one, wanted in zip(outputs, flags, strict=True) if not wanted))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.run(gradients)
        return (None, None, None, *(None for _ in gradients))


class PipelineParallel(DataParallel):
    """Runs one stage, and hides that from the user's step; averages its gradients over pipelines.

    Bytes of tensors that all ranks send for a training step with S stages (Huang et al., section 2.2, with our additions):
    2 (S - 1) A for activations of A bytes at each cut and their gradients, (S - 1) O for an output of O bytes, and up to
    2 (k - 1) W for each parameter of W bytes that k stages share: stages that did not use it send nothing.

    Args:
        settings: Cuts and micro-batches.
        layout: This rank's layout.
    """

    divides = True
    torch_errors = (
        (
            r"(?s)NoneType.*\.grad\b",
            "the step takes p.grad of all weights, and a rank has those of its own stage",
            "Leave out weights whose grad is None, or use strategy='ddp' or 'fsdp'",
        ),
        (
            "does not require grad and does not have a grad_fn",
            "a stage's output has no gradient, as with reentrant checkpointing, or where all weights of a stage are frozen",
            "Call checkpoint(..., use_reentrant=False), cut elsewhere, or use strategy='fsdp'",
        ),
    )

    def __init__(self, settings: Pipeline, layout: Layout) -> None:
        super().__init__(DDP(), layout)
        self._cutting = settings
        self._full: FullState | None = None

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Cut the model, and free the parameters of other stages."""
        model, row = parts.model, parts.row
        self.stage, self.stages = row.rank, row.world_size
        self._links = _Links(row)
        self._units = units_of(model, self._cutting.cuts(model, self.stages))
        self._owners = owners_of(model, self._units, self.stages)
        named = dict(model.named_parameters())
        self._stages_of = {id(p): self._owners[name] for name, p in named.items()}
        self._elsewhere = {name: p for name, p in named.items() if self.stage not in self._owners[name]}
        elsewhere = {id(p) for p in self._elsewhere.values()}
        self._shared = [p for name, p in named.items() if len(self._owners[name]) > 1]
        own = {name: tensor for name, tensor in parts.named.items() if id(tensor) not in elsewhere}
        stack.callback(self._restore)
        for name, parameter in self._elsewhere.items():
            self._let_go(name, parameter, parts, stack)
        parts.move()
        super().prepare(dataclasses.replace(parts, named=own), stack)
        own_units = [unit for unit in self._units if unit.stage == self.stage]
        alter_blocks([unit.module for unit in own_units if unit.has_parameters], self._cutting, stack)
        self._ghosts = Ghosts(model, self._units, self.stage, self.stages, row.device, stack)
        alter(model, stack, forward=self._forward)
        refuse_gradients(model, "pipeline", stack)
        count = sum(p.numel() for p in self.parameters.values())
        total = sum(p.numel() for p in named.values())
        if not self.layout.shard:
            context.log(
                f"Stage {self.stage} of {self.stages}: {own_units[0].name} to {own_units[-1].name}, {count:,} of"
                f" {total:,} parameters, {self._cutting.micro_batches} micro-batches"
            )

    def _restore(self) -> None:
        """Give rank 0's model the trained weights of all stages: it is sent itself where its structure has changed."""
        if self._full is not None:
            for name, parameter in self._elsewhere.items():
                parameter.data = self._full.model[name]

    def _let_go(self, name: str, parameter: torch.nn.Parameter, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Free a parameter of another stage; a result that uses it is NaN, and a gradient of it raises an error."""
        parameter.data = ghost(parameter, float("nan"), parts.group.device)
        parameter.grad = None
        for optimizer in optimizers_of(parts.optimizer):
            optimizer.state.pop(parameter, None)

        def refuse(_: Tensor) -> None:
            raise KaleDistError(
                f"strategy=Pipeline: {name} was used outside the model's forward, in stage {self.stage}, and it is in stage"
                f" {self._owners[name][0]} only. A penalty on weights cannot be a part of the loss: use weight_decay="
            )

        if parameter.requires_grad:
            stack.callback(parameter.register_post_accumulate_grad_hook(refuse).remove)  # type: ignore[no-untyped-call]

    def begin_batch(self, *, weight: float, due: bool) -> None:
        """Free the states that a checkpoint has gathered, too."""
        self._full = None
        super().begin_batch(weight=weight, due=due)

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Add new parameters, on every stage alike."""
        elsewhere = {id(p) for p in self._elsewhere.values()}
        super().adopt([p for p in parameters if id(p) not in elsewhere])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Refuse a copy of the model, whose `forward` is a method of this object.

        Raises:
            KaleDistError: Always.
        """
        raise KaleDistError(
            "strategy=Pipeline: train_step copies the model, and each rank has only its stage of it. For an average of the"
            " weights use callbacks=[kd.callbacks.EMA()]; make other copies before the call"
        )

    # -- the forward pass ------------------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the model's `forward`: run this stage on all micro-batches, and return the last stage's output."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        wants_gradient = torch.is_grad_enabled()
        if wants_gradient and any(tensor.requires_grad for tensor in tensors):
            raise KaleDistError(
                "strategy=Pipeline: an input of the model requires a gradient, which stages do not send back. Detach it if"
                " nothing needs its gradient, as a hidden state of the last batch, or use strategy='ddp'"
            )
        batch = len(tensors[0]) if tensors else 1
        sizes = _divided(batch, self._cutting.micro_batches)
        pieces = [
            torch.split(leaf, sizes)
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == batch
            else [leaf] * len(sizes)
            for leaf in leaves
        ]
        passages, outcomes = [], []
        for number, size in enumerate(sizes):
            given = pytree.tree_unflatten([piece[number] for piece in pieces], structure)
            passage, outcome = self._run(size, *given, wants_gradient=wants_gradient)
            passages.append(passage)
            outcomes.append(outcome)
        result = self._share_output(passages, outcomes)
        self._links.flush()
        return result

    def _run(
        self, size: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, wants_gradient: bool
    ) -> tuple[_Passage, Any]:
        """Run this stage on one micro-batch."""
        passage = _Passage(size=size)
        known: Calls = []
        arrived, is_new = None, False
        if self.stage:
            (known, shape, has_gradient), is_new = self._links.receive_note("calls", self.stage - 1)
            arrived = self._links.receive(shape, self.stage - 1)
            if has_gradient and wants_gradient:
                passage.arrived = arrived.requires_grad_()
        outcome, made = self._ghosts.run(
            args, kwargs, known=known, arrived=arrived, with_gradient=wants_gradient, check=is_new
        )
        if self.stage < self.stages - 1:
            shape = Shape(tuple(outcome.shape), outcome.dtype)
            self._links.send_note("calls", (made, shape, outcome.requires_grad), self.stage + 1)
            self._links.send(outcome, self.stage + 1)
            passage.sent = outcome if outcome.requires_grad else None
        return passage, outcome

    def _share_output(self, passages: list[_Passage], outcomes: list[Any]) -> Any:
        """Send every stage the output of the last stage, for the whole batch."""
        last = self.stages - 1
        if self.stage == last:
            leaves = [pytree.tree_leaves(outcome) for outcome in outcomes]
            for passage, tensors in zip(passages, leaves, strict=True):
                passage.outputs = [one if one.requires_grad else None for one in tensors if isinstance(one, Tensor)]
            flags = [one is not None for one in passages[0].outputs]
            sizes = [passage.size for passage in passages]
            output = _joined(outcomes, sizes)
            tensors = [one for one in pytree.tree_leaves(output) if isinstance(one, Tensor)]
            described = pytree.tree_map(_described, output)
            for stage in range(last):
                self._links.send_note("output", (described, flags), stage)
                for tensor in tensors:
                    self._links.send(tensor, stage)
        else:
            (described, flags), _ = self._links.receive_note("output", last)
            shapes = [one for one in pytree.tree_leaves(described) if isinstance(one, Shape)]
            tensors = [self._links.receive(shape, last) for shape in shapes]
        if any(flags) and torch.is_grad_enabled():
            anchor = torch.zeros((), device="cpu", requires_grad=True)
            # Some versions of torch annotate its type.
            apply: Any = _Join.apply
            tensors = list(apply(anchor, functools.partial(self._backward, passages), flags, *tensors))
        found = iter(tensors)
        return pytree.tree_map_only(Shape, lambda _: next(found), described)

    # -- the backward pass -----------------------------------------------------------------------------------------

    def _backward(self, passages: list[_Passage], gradients: Sequence[Tensor | None]) -> None:
        """Run this stage backwards, once. Autograd calls this within the user's `backward()`."""
        if not passages:
            raise KaleDistError(
                "strategy=Pipeline: backward() came to the same call of the model a second time. Add the losses up, or"
                " call the model again"
            )
        # The hooks take the passes of all micro-batches for one: the user's.
        task = backward_pass()
        if not self._is_passive and task != self._task:
            self._begin(task, None)
        with self._summed_over_stages(), self._ghosts.backward():
            sizes = [passage.size for passage in passages]
            for number in range(len(sizes)):
                passage = passages.pop(0)
                if self.stage == self.stages - 1:
                    self._backward_output(passage, _part_of(gradients, sizes, number))
                elif passage.sent is not None:
                    torch.autograd.backward(passage.sent, self._links.receive(passage.sent, self.stage + 1))
                if passage.arrived is not None:
                    gradient = passage.arrived.grad
                    self._links.send(
                        torch.zeros_like(passage.arrived) if gradient is None else gradient, self.stage - 1
                    )
            self._links.flush()

    def _backward_output(self, passage: _Passage, gradients: Sequence[Tensor | None]) -> None:
        pairs = [
            (output, gradient)
            for output, gradient in zip(passage.outputs, gradients, strict=True)
            if output is not None and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._ghosts.runs_backward:
            super()._on_gradient(parameter)

    @contextlib.contextmanager
    def _summed_over_stages(self) -> Iterator[None]:
        """Add up this pass's gradients of the parameters that several stages hold."""
        shared = [p for p in self._shared if p.requires_grad]
        before = {id(p): p.grad for p in shared}
        for parameter in shared:
            parameter.grad = None
        yield
        for parameter in shared:
            stages = self._stages_of[id(parameter)]
            if self.stage in stages:
                parameter.grad = self._summed(parameter, stages)
            earlier = before[id(parameter)]
            if earlier is not None:
                # The same object: `check_held` knows a gradient by its identity.
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._links.flush()

    def _summed(self, parameter: torch.nn.Parameter, stages: Sequence[int]) -> Tensor | None:
        """Return the sum of a gradient over stages, in their order, on each of them; None where no stage has a gradient."""
        links, (first, *others), gradient = self._links, stages, parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.stage == first:
            for stage in others:
                if links.receive_note("used", stage)[0]:
                    part = links.receive(parameter, stage)
                    gradient = part if gradient is None else gradient + part
            for stage in others:
                links.send_note("used", gradient is not None, stage)
                if gradient is not None:
                    links.send(gradient, stage)
            return gradient
        links.send_note("used", gradient is not None, first)
        if gradient is not None:
            links.send(gradient, first)
        return links.receive(parameter, first) if links.receive_note("used", first)[0] else None

    # -- around a step ---------------------------------------------------------------------------------------------

    def complete(self, correction: float) -> None:
        """Refuse a step within the backward pass, for which other stages wait.

        Raises:
            ConfigError: It is one.
        """
        if self._ghosts.runs_backward:
            problem = "an optimizer steps within backward(), in a hook, where a gradient is that of one micro-batch"
            raise ConfigError("strategy", problem, "Step after backward(), or use strategy='ddp', 'fsdp' or 'tensor'")
        super().complete(correction)

    def total_norm(self, gradients: Sequence[Tensor], kind: float) -> Tensor:
        """Return the norm over all stages; a parameter that several stages hold counts once."""
        counted = {
            id(p.grad)
            for p in self.parameters.values()
            if p.grad is not None and self.stage == self._stages_of.get(id(p), (0,))[0]
        }
        mine = [gradient for gradient in gradients if id(gradient) in counted]
        norm = super().total_norm(mine, kind) if mine else torch.zeros((), device="cpu")
        norms = [torch.zeros((), dtype=torch.float64, device="cpu") for _ in range(self.stages)]
        dist.all_gather(norms, norm.detach().to("cpu", torch.float64), group=self.parts.row.world)
        like = gradients[0] if gradients else next(self.parts.model.parameters())
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), kind)
        return total.to(like.device, like.dtype)

    def metrics(self) -> dict[str, float]:
        """Return the bytes of tensors that this rank has sent to other stages and other pipelines."""
        sent, self._links.bytes_sent = self._links.bytes_sent, 0
        return {"bytes_sent": sent + super().metrics().get("bytes_sent", 0.0)}

    # -- states ----------------------------------------------------------------------------------------------------

    def full_state(self) -> FullState | None:
        """Gather the model on rank 0, read its states, and free the other stages' parameters."""
        if self.layout.shard:
            return None
        sent, model, row = self._links.bytes_sent, self.parts.model, self.parts.row
        optimizers = optimizers_of(self.parts.optimizer)
        home = {id(unit.module): unit.stage for unit in self._units}
        buffers = _buffers_of(model, home, self.stages - 1)
        for stage in range(1, self.stages):
            names = [name for name, owners in self._owners.items() if owners[0] == stage]
            theirs = {name: buffer for name, (buffer, at) in buffers.items() if at == stage}
            named = dict(model.named_parameters())
            if self.stage == stage:
                states = [[_stripped(one.state.get(named[name], {})) for name in names] for one in optimizers]
                self._links.send_note("states", states, 0)
                self._links.send_note("buffers", _stripped(theirs), 0)
                for tensor in (
                    *(named[name].detach() for name in names),
                    *theirs.values(),
                    *_tensors_of(optimizers, named, names),
                ):
                    # Rank 0's GPU need not hold the whole model, and step counts are on the CPU anyway.
                    self._links.send(tensor.cpu(), 0)
                self._links.flush()
            elif not self.stage:
                states, _ = self._links.receive_note("states", stage)
                shapes, _ = self._links.receive_note("buffers", stage)
                for name in names:
                    named[name].data = self._links.receive(named[name], stage, "cpu")
                for name, shape in shapes.items():
                    _set_buffer(model, name, self._links.receive(shape, stage, "cpu").to(row.device))
                for optimizer, described in zip(optimizers, states, strict=True):
                    for name, state in zip(names, described, strict=True):
                        if state:
                            optimizer.state[named[name]] = {
                                key: self._links.receive(value, stage, "cpu") if isinstance(value, Shape) else value
                                for key, value in state.items()
                            }
        self._links.bytes_sent = sent
        if row.rank:
            return None
        self._full = full = super().full_state()
        for parameter in self._elsewhere.values():
            parameter.data = ghost(parameter, float("nan"), row.device)
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)
        return full


def _stripped(state: dict[str, Any]) -> dict[str, Any]:
    return {key: Shape(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for key, v in state.items()}


def _tensors_of(optimizers: Sequence[Any], named: dict[str, Any], names: Sequence[str]) -> list[Tensor]:
    states = [optimizer.state.get(named[name], {}) for optimizer in optimizers for name in names]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _buffers_of(model: torch.nn.Module, home: dict[int, int], last: int) -> dict[str, tuple[Tensor, int]]:
    """Every buffer of the model's state with the stage that changes it: its unit's, or the last for the parent's own buffers."""
    found: dict[int, tuple[str, tuple[Tensor, int]]] = {}
    kept = model.state_dict(keep_vars=True)

    def walk(module: torch.nn.Module, name: str, stage: int) -> None:
        stage = home.get(id(module), stage)
        for own, buffer in module.named_buffers(name, recurse=False):
            if own in kept:
                found.setdefault(id(buffer), (own, (buffer, stage)))
        for child_name, child in module.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name, stage)

    walk(model, "", last)
    return dict(found.values())


def _set_buffer(model: torch.nn.Module, name: str, value: Tensor) -> None:
    """Give a buffer the value of another stage, where forward may have added it or changed its shape."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    buffer = getattr(module, own, None)
    if isinstance(buffer, Tensor) and buffer.shape == value.shape and buffer.dtype == value.dtype:
        buffer.copy_(value)
    else:
        module.register_buffer(own, value)


# -- micro-batches ---------------------------------------------------------------------------------------------------


def _divided(batch: int, parts: int) -> list[int]:
    """Return the sizes of the micro-batches: as even as possible, none empty, the larger ones first."""
    parts = max(1, min(parts, batch))
    return [batch // parts + (number < batch % parts) for number in range(parts)]


def _described(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Shape(tuple(leaf.shape), leaf.dtype)
    # A cache of keys and values, for one: other ranks could not use it.
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else None


def _joined(outcomes: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the output for the whole batch: tensors are concatenated, single numbers averaged by samples.

    Raises:
        KaleDistError: A tensor's first dimension is not the batch.
    """
    leaves = [pytree.tree_flatten(outcome) for outcome in outcomes]
    columns = zip(*(found for found, _ in leaves), strict=True)
    return pytree.tree_unflatten([_join(column, sizes) for column in columns], leaves[0][1])


def _join(column: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        return first
    tensors = [one.detach() for one in column]
    if len(tensors) == 1:
        return first.detach()
    if not first.dim():
        # A mean over samples: a loss that the model computes itself.
        weighted = [one * (size / sum(sizes)) for one, size in zip(tensors, sizes, strict=True)]
        return functools.reduce(torch.add, weighted)
    if [len(one) for one in tensors] != list(sizes):
        raise KaleDistError(
            f"strategy=Pipeline: the model gives a tensor of shape {tuple(first.shape)} for {sizes[0]} samples, and its first"
            " dimension is not the batch. Return tensors of (batch, ...), or use micro_batches=1"
        )
    return torch.cat(tensors)


def _part_of(gradients: Sequence[Tensor | None], sizes: Sequence[int], number: int) -> list[Tensor | None]:
    """Return one micro-batch's part of the gradients of the outputs."""
    start, total = sum(sizes[:number]), sum(sizes)

    def part(gradient: Tensor | None) -> Tensor | None:
        if gradient is None or len(sizes) == 1:
            return gradient
        if not gradient.dim():
            return gradient * (sizes[number] / total)
        return gradient[start : start + sizes[number]]

    return [part(gradient) for gradient in gradients]
