"""Fully sharded data parallelism by torch's `fully_shard`, in place.

The model stays an instance of its class, but every parameter is a new object (a DTensor), which replaces the old one of the
same name in the optimizer. The old parameters become NaN: a step that captured them before the call gets NaN at once, instead
of training weights that nothing uses.

Four things are not torch's. Gradients are multiplied by the weight of the rank's batch before the reduce-scatter. Before
each collective, ranks compare a few numbers on the CPU, so that ranks which use different layers get an error in words:
torch's collectives of different sizes hang, or end the process. A parameter that a rank did not use, in a
unit that it did use, takes part with zeros; a parameter that no rank used keeps `grad` None. And a rank that has
evaluated all of its batches still joins the gathers of the others.

Gradients are reduced after every backward pass, also within an accumulation window: kept whole, they would need the
memory that sharding saves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.snapshot.changes import load_state_dict
from kale_dist.strategies import Layout, Settings
from kale_dist.strategies.fsdp import select_units
from kale_dist.strategies.tensor import parameters_of
from kale_dist.worker.parallel.blocks import alter_blocks
from kale_dist.worker.parallel.early_agreement import local_part
from kale_dist.worker.parallel.replica import Replica, backward_pass, refuse_gradients
from kale_dist.worker.parallel.tensor_parallel import norm_of_parts, whole_states
from kale_dist.worker.training.construction import Construction, pytree
from kale_dist.worker.training.parts import lora_of
from kale_dist.worker.training.rank_group import all_gather_single, reduce_scatter_single
from kale_dist.worker.training.strategy import FullState, Parts

_GATHER, _REDUCE, _NO_BACKWARD, _LEFT, _EVALUATED = range(5)

_DOING = {
    _GATHER: "uses {unit}",
    _REDUCE: "has the gradients of {unit}",
    _NO_BACKWARD: "made no backward pass in its batch",
    _LEFT: "left the loop over its loader",
    _EVALUATED: "has evaluated all of its batches",
}

_STATE_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
"""Where torch puts what holds process groups: a model with it could not be sent back, as one is whose structure has changed."""

_CHANGED = (
    "The model's {}() changes {}, as max_norm= of an Embedding does, a first batch that sets weights, or a limit or an average"
    " that is written there. With fsdp, weights are whole while the model is called only, and such a change would be lost."
    " Change them in the step itself, or use strategy='ddp'"
)


class FullySharded(Replica):
    """Shards the model, its gradients and the optimizer's state.

    Args:
        settings: The units.
        layout: This rank's layout.
    """

    reduces, divides, meets_in_steps = False, True, True

    torch_errors = (
        (
            "FSDP does not support deepcopy",
            "the step copies the model, of which each rank has a part",
            "For a moving average of the weights use callbacks=[kd.callbacks.EMA()], for other copies strategy='ddp'",
        ),
        (
            "mixed torch.Tensor and DTensor|not have a sharding strategy|in-place operations that require placement changes",
            "the step or the optimizer mixes weights, of which each rank has a part, with whole tensors, or cannot do with parts",
            (
                "Use AdamW, weight_decay= for a penalty, callbacks=[kd.callbacks.EMA()] for an average,"
                " kd.strategies.FSDP(units=('encoder',)) for a call of model.encoder(x), or strategy='ddp'"
            ),
        ),
        (
            "out of bounds for storage of size 0",
            "the loss contains a gradient (create_graph=True), and weights are freed once that is computed",
            "Use strategy='ddp' or 'tensor'",
        ),
        (
            r"\.(tolist|numpy)\(\) is not supported for tensor subclasses",
            "the step reads weights, of which each rank has a part, as numbers",
            "Write .full_tensor() in front of .tolist() or .numpy(), on all ranks, or use .item() for one number",
        ),
    )

    def __init__(self, settings: Settings, layout: Layout) -> None:
        super().__init__(settings, layout)
        self._units: list[_Unit] = []
        self._sent = 0.0
        self._joins = False
        self._full: FullState | None = None
        self._old_of: dict[int, Any] = {}

    # -- sharding --------------------------------------------------------------------------------------------------

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Shard the model and the optimizer's state in place."""
        model, optimizer = parts.model, parts.optimizer
        if parts.column.is_alone:
            parts.move()
            super().prepare(parts, stack)
            return
        # What undoes this needs them, also if it fails on its way.
        self.parts = parts
        _write_data(stack)
        _read_scalars(stack)
        mesh = DeviceMesh.from_group(parts.column.world, parts.group.device.type)
        modules = dict(model.named_modules())
        names = [*select_units(modules, self.settings.units), ""]
        alter_blocks([modules[name] for name in names], self.settings, stack)
        before = [(module, name, p) for module in modules.values() for name, p in parameters_of(module).items()]
        named_before = dict(model.named_parameters(remove_duplicate=False))
        attributes = {module: set(vars(module)) for module in modules.values()}
        for module in modules.values():
            for name in _STATE_HOOKS:
                stack.callback(_put_back, getattr(module, name), dict(getattr(module, name)))
        stack.callback(self._restore, modules, before, {module: type(module) for module in modules.values()})
        for name in names:
            # The outermost is gathered until the backward pass, which begins with it, as by `fully_shard` itself.
            fully_shard(modules[name], mesh=mesh, reshard_after_forward=name != "")
            # The unit was brought to the GPU whole, which need not hold the next one, too.
            used = {id(p) for module, own, p in before if parameters_of(module).get(own) is p}
            for old in (p for p in named_before.values() if id(p) not in used and parts.construction is None):
                value = float("nan") if old.is_floating_point() or old.is_complex() else 0
                old.data = torch.full((), value, dtype=old.dtype, device=old.device).expand(old.shape)
                old.grad = None
        for module, its in attributes.items():
            for name in module.__dict__.keys() - its:
                stack.callback(module.__dict__.pop, name, None)
        now = dict(model.named_parameters(remove_duplicate=False))
        self._old_of = {id(now[name]): old for name, old in named_before.items()}
        new_of = {id(old): now[name] for name, old in named_before.items()}
        _rekey(optimizer, new_of, mesh)
        for name, tensor in parts.named.items():
            parts.named[name] = new_of.get(id(tensor), tensor)
        if parts.construction is None:
            parts.move()
        else:
            _materialise(parts, parts.construction, named_before, now)
        largest = max(sum(1 for _ in modules[name].parameters()) for name in names)
        for number, name in enumerate(names):
            self._units.append(_Unit(self, number, name, modules[name], largest))
        super().prepare(parts, stack)
        refuse_gradients(model, "fsdp", stack)

    def _restore(self, modules: dict[str, Any], before: list[Any], classes: dict[Any, type]) -> None:
        """Put the old parameters back; in rank 0 with the trained values."""
        for unit in self._units:
            unit.undo()
        for module, name, old in before:
            module.register_parameter(name, old)
        for module, kind in classes.items():
            module.__class__ = kind
        optimizer = self.parts.optimizer
        for group in optimizer.param_groups:
            group["params"] = [self.old_of(p) for p in group["params"]]
        optimizer.state.clear()
        if self._full is not None:
            by_name = {
                f"{name}.{own}" if name else own: p
                for name, m in modules.items()
                for own, p in parameters_of(m).items()
            }
            for name, parameter in by_name.items():
                if name in self._full.model:
                    # On the CPU: one GPU need not hold the whole model.
                    parameter.data = self._full.model[name]
            load_state_dict(optimizer, self._full.optimizer)

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters that were not in the model at the call."""
        if not self._units:
            super().adopt(parameters)
        elif any(id(parameter) not in self.parameters for parameter in parameters if parameter.is_floating_point()):
            raise ConfigError(
                "strategy",
                "an optimizer of the step trains parameters that were not in the model at the call, or were captured"
                " before it",
                "Make the optimizer before the call and use the one that train_step gets, or strategy='ddp'",
            )

    def begin_batch(self, *, weight: float, due: bool) -> None:
        """Free the states that a checkpoint has gathered, too."""
        self._full = None
        super().begin_batch(weight=weight, due=due)

    # -- collectives -----------------------------------------------------------------------------------------------

    def agree(self, kind: int, unit: int = 0, flags: Sequence[bool] = ()) -> list[list[int]]:
        """Compare the next collective with the other ranks'; returns the flags of each rank.

        Raises:
            KaleDistError: The ranks are not at the same collective.
        """
        column = self.parts.column
        width = self._units[0].width if self._units else 0
        mine = torch.tensor(
            [kind, unit, *map(int, flags)] + [0] * (width - len(flags)), dtype=torch.int32, device="cpu"
        )
        everyone = mine.new_empty(column.world_size * len(mine))
        all_gather_single(everyone, mine, group=column.world)
        rows = everyone.view(column.world_size, -1).tolist()
        heads = [tuple(row[:2]) for row in rows]
        going = {head for head in heads if head[0] != _EVALUATED}
        if len(going) > 1 or (len(set(heads)) > 1 and going and next(iter(going))[0] != _GATHER):
            raise KaleDistError(self._difference(heads))
        self._going = next(iter(going), None)
        return [row[2:] for row in rows]

    def _difference(self, heads: list[tuple[int, int]]) -> str:
        other = next(rank for rank, head in enumerate(heads) if head != heads[0])
        first, second = (
            f"shard {rank} {_DOING[heads[rank][0]].format(unit=self._units[heads[rank][1]].shown)}"
            for rank in (0, other)
        )
        return (
            f"The ranks do not compute the same: {first}, and {second}. With fsdp, all ranks have to call the same layers"
            " and backward() in each batch, whatever the data. Where layers depend on the data, use"
            " kd.strategies.FSDP(units='whole') or strategy='ddp'; call the model on all ranks, not on rank 0 alone"
        )

    def gather(self, unit: _Unit, output: Tensor, given: Tensor, **_: Any) -> None:
        """All-gather a unit's weights."""
        if not self._joins:
            self.agree(_GATHER, unit.number)
        all_gather_single(output, given, group=self.parts.column.world)
        self._count(output)

    def reduce_scatter(self, output: Tensor, given: Tensor, *, op: Any, **_: Any) -> None:
        """Multiply a unit's gradients by the weight of the rank's batch, and reduce-scatter them."""
        if not self._weight:
            # A repeated sample may well give nan, which no factor removes.
            given.zero_()
        elif self._weight != 1.0:
            given.mul_(self._weight)
        reduce_scatter_single(output, given, op=op, group=self.parts.column.world)
        self._count(given)

    def _count(self, whole: Tensor) -> None:
        n = self.parts.column.world_size
        self._sent += whole.numel() * whole.element_size() * (n - 1) / n

    # -- a batch ---------------------------------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether the other ranks may be in a forward or backward pass of this batch without this rank."""
        return bool(self._units) and not self._reductions_of_batch

    def end_batch(self, *, left: bool) -> None:
        """Tell ranks that have made a backward pass that this rank has not, or has left the loop: they raise an error."""
        if self._units and (left or not self._reductions_of_batch):
            self.agree(_LEFT if left else _NO_BACKWARD)

    def begins_reduction(self) -> None:
        """Begin the backward pass, if no unit has. In torch's hooks it is too late to look at gradients that are held.

        Those of a unit are views of one tensor: once torch has added to the first one, all of them count as changed.
        """
        task = backward_pass()
        if task != self._task:
            self._begin(task, None)

    def _on_gradient(self, parameter: Tensor) -> None:
        self._reductions_of_batch += 1
        super()._on_gradient(parameter)

    def stepped(self) -> None:
        """Free what a forward has gathered for a backward pass that did not come: these weights are those before the step."""
        super().stepped()
        self._free()

    def end_epoch(self) -> None:
        """Free it here, too: the model has the weights of its own names again."""
        super().end_epoch()
        self._free()

    def _free(self) -> None:
        if self._units:
            self._units[-1].module.reshard()

    def end_evaluation(self) -> None:
        """Join the gathers of ranks that have more batches to evaluate."""
        if not self._units:
            return
        self._free()
        self._joins = True
        try:
            while True:
                self.agree(_EVALUATED)
                if self._going is None:
                    return
                module: Any = self._units[self._going[1]].module
                module.unshard()
                module.reshard()
        finally:
            self._joins = False

    def total_norm(self, gradients: Sequence[Tensor], kind: float) -> Tensor:
        """Return the norm over all ranks' parts."""
        local = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        if not local:
            return super().total_norm(gradients, kind)
        return norm_of_parts(local, kind, self.parts.column, local[0])

    # -- states ----------------------------------------------------------------------------------------------------

    def full_state(self) -> FullState | None:
        """Gather the states; rank 0 keeps them, on the CPU."""
        if not self._units:
            return super().full_state()
        full, _ = whole_states(self.parts, self.whole)
        self._full = full if self.parts.group.rank == 0 else None
        return self._full

    def whole(self, value: Tensor, parameter: Any) -> Tensor:  # noqa: ARG002 - where weights are divided too, it matters
        """Gather a parameter, or an optimizer's state of its shape."""
        gathered = value.detach()
        return gathered.full_tensor() if isinstance(gathered, DTensor) else gathered

    def old_of(self, parameter: Any) -> Any:
        """Return the object that a parameter was before the model was sharded."""
        return self._old_of.get(id(parameter), parameter)

    def metrics(self) -> dict[str, float]:
        """Return the bytes sent."""
        sent, self._sent = self._sent, 0.0
        return {"bytes_sent": sent}


class _Unit:
    """A module whose parameters are gathered together, and its collectives."""

    def __init__(self, strategy: FullySharded, number: int, name: str, module: Any, width: int) -> None:
        self.number = number
        self.shown = name or ("what is in no other unit" if number else "the model")
        self.module = module
        self.width = width
        self._strategy = strategy
        self._called = "forward"
        module.set_custom_all_gather(_Collective(functools.partial(strategy.gather, self)))
        module.set_custom_reduce_scatter(_Collective(strategy.reduce_scatter))
        kind = type(module).__mro__[2]
        self._methods = [method for method in _public_methods(kind) if method not in module.__dict__]
        self._state = module._get_fsdp_state()  # noqa: SLF001 - nothing public shows gradients before their reduction
        for method in self._methods:
            register_fsdp_forward_method(module, method)
            module.__dict__[method] = self._plain_within_forward(module.__dict__[method], getattr(kind, method))
        state: Any = self._state
        # One group a unit before torch 2.13.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
        # The outermost has none where all weights are in other units.
        for group in filter(None, groups):
            group.post_backward = self._agreed(group)
            group.post_forward = self._compared(group, group.post_forward)

    def _plain_within_forward(self, gathers: Any, plain: Any) -> Any:
        """A method that gathers the unit's weights, but not where `forward` calls it: its end would divide weights that are still in use."""

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._state._training_state.name == "FORWARD":  # noqa: SLF001 - there is no public name
                return plain(self.module, *args, **kwargs)
            self._called = plain.__name__
            try:
                return gathers(*args, **kwargs)
            finally:
                self._called = "forward"

        return call

    def _compared(self, group: Any, original: Any) -> Any:
        """Wrap torch's end of a call: weights that forward or a method has changed, in its first call in training, would be lost.

        What it returns of them is copied, as they are freed; so is the outermost unit, where no backward pass frees it.
        """
        compared = set()

        def post_forward(*given: Any) -> Any:
            if self.module.training and self._called not in compared:
                compared.add(self._called)
                names = {id(whole): name for name, whole in self.module.named_parameters()}
                for one in group.fsdp_params:
                    whole, part = one._unsharded_param, one.sharded_param.detach()  # noqa: SLF001
                    if id(whole) not in names or not _is_part(part, whole.detach()):
                        name = names.get(id(whole), f"a weight of {self.shown}")
                        raise KaleDistError(_CHANGED.format(self._called, name))
            module, inputs, output = given
            own = {one._unsharded_param.untyped_storage().data_ptr() for one in group.fsdp_params}  # noqa: SLF001
            output = original(module, inputs, pytree.tree_map_only(Tensor, functools.partial(_copied, own), output))
            if not torch.is_grad_enabled():
                self.module.reshard()
            return output

        return post_forward

    def _agreed(self, group: Any) -> Any:
        """Wrap torch's end of a unit's backward pass: parameters that only other ranks have used get zeros."""
        original = group.post_backward

        def post_backward(*unused: Any) -> None:
            whole = [getattr(parameter, "_unsharded_param", None) for parameter in group.fsdp_params]
            used = [parameter is not None and parameter.grad is not None for parameter in whole]
            anywhere = [any(flags) for flags in zip(*self._strategy.agree(_REDUCE, self.number, used), strict=True)]
            for parameter, is_used, is_anywhere in zip(whole, used, anywhere, strict=False):
                if is_anywhere and not is_used and parameter is not None:
                    parameter.grad = torch.zeros_like(parameter)
            self._strategy.begins_reduction()
            original(*unused)

        return post_backward

    def undo(self) -> None:
        """Take off hooks and methods."""
        self._state._pre_forward_hook_handle.remove()  # noqa: SLF001
        self._state._post_forward_hook_handle.remove()  # noqa: SLF001
        for method in self._methods:
            self.module.__dict__.pop(method, None)


def _part_of(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor that is divided as another one is; nothing is exchanged."""
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def _copied(own: set[int], returned: Tensor) -> Tensor:
    """A copy of what shares the memory of a unit's weights, and any other tensor itself."""
    if returned.layout is not torch.strided or isinstance(returned, DTensor):
        return returned
    return returned.clone() if returned.untyped_storage().data_ptr() in own else returned


def _is_part(part: DTensor, whole: Tensor) -> bool:
    """Whether a part has the values of the whole tensor."""
    is_alike = whole.shape == part.shape
    return is_alike and torch.allclose(_part_of(whole, part), part.to_local(), rtol=0, atol=0, equal_nan=True)


class _Collective:
    """Stands in for a collective of torch's, which names all arguments."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **more: Any) -> None:
        self._call(output_tensor, input_tensor, **more)


def _write_data(stack: contextlib.ExitStack) -> None:
    """Make `p.data = values` copy the values of a DTensor: by itself it changes nothing, without an error (torch 2.13)."""
    original: Any = Tensor.data

    def write(tensor: Any, values: Any) -> None:
        if isinstance(values, DTensor) and values.placements == tensor.placements and values.dtype == tensor.dtype:
            local_part(tensor).detach().copy_(local_part(values))
        else:
            original.__set__(tensor, values)

    setattr(DTensor, "data", property(original.__get__, write))  # noqa: B010 - mypy sees no such attribute
    stack.callback(delattr, DTensor, "data")


def _read_scalars(stack: contextlib.ExitStack) -> None:
    """Make `item()`, `float()` and `bool()` read the whole value of a DTensor: by themselves they read this rank's part (torch 2.13).

    All ranks have to read then, as they exchange what they have; a value that each rank has whole is read without an exchange.
    """

    def read(op_call: Any, args: Any, kwargs: Any) -> Any:
        return op_call(args[0].full_tensor(), *args[1:], **kwargs)

    handlers = DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001 - there is no public way to add one
    scalar = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001 - what `item()` is made of
    stack.callback(handlers.pop, scalar)
    handlers[scalar] = read


def _put_back(entries: dict[Any, Any], before: dict[Any, Any]) -> None:
    entries.clear()
    entries.update(before)


def _materialise(parts: Parts, construction: Construction, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Give every tensor of the model memory and values, one at a time: of a weight, this rank's part."""
    device = parts.group.device
    others = [
        (module, name, value)
        for module in parts.model.modules()
        # Of a module's own attributes, too: a mask need not be a buffer.
        for name, value in (*module.named_buffers(recurse=False, remove_duplicate=False), *vars(module).items())
        if isinstance(value, Tensor) and value.is_meta
    ]
    parts.model.to_empty(device=device)
    for module, name, value in others:
        setattr(module, name, construction.value(value).to(device))
    lora = lora_of(parts.model)
    made = {
        id(now[name]): (now[name], old)
        for name, old in before.items()
        if not parts.are_weights_read or f"model.{name}" in lora
    }
    for new, old in made.values():
        new.detach().to_local().copy_(_part_of(construction.value(old), new))


def _public_methods(kind: type) -> list[str]:
    """Return the methods of a user's class beyond torch's modules: they may use the weights, as `model.loss(x)` does."""
    names: list[str] = []
    for base in kind.__mro__:
        if base is torch.nn.Module or base.__module__.startswith("torch."):
            break
        names += [name for name, value in vars(base).items() if inspect.isfunction(value) and name[0] != "_"]
    return [name for name in dict.fromkeys(names) if name != "forward" and not hasattr(torch.nn.Module, name)]


def _rekey(optimizer: Any, new_of: dict[int, Any], mesh: DeviceMesh) -> None:
    """Replace the optimizer's parameters by the new ones, and divide the state of the old ones."""
    for group in optimizer.param_groups:
        group["params"] = [new_of[id(p)] for p in group["params"]]
    old_state = list(optimizer.state.items())
    optimizer.state.clear()
    for old, values in old_state:
        new = new_of[id(old)]
        optimizer.state[new] = {
            name: distribute_tensor(value, mesh, new.placements)
            if isinstance(value, Tensor) and value.dim() and value.shape == old.shape
            else value
            for name, value in values.items()
        }
