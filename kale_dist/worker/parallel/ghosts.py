"""One stage of a model: the user's forward runs on every rank, with ghosts in the place of other ranks' modules.

A model is cut in front of some of its modules. A *unit* is a largest module that has no cut inside; the forward of every
unit is replaced, in place. In the rank of stage s, units of earlier stages return ghosts: tensors filled with NaN that take no
memory, in the shapes of the results in the earlier stages' ranks. When the first unit of stage s is called, its input
tensor, the object itself, is filled with what stage s - 1 sent, so that everything that the parent's forward does with
it later (a residual connection) is right. At the first unit of stage s + 1 an exception leaves the forward. So no
tracing is needed, and any forward works in which one tensor crosses each cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import KaleDistError
from kale_dist.worker.training.construction import pytree
from kale_dist.worker.training.trained import alter, own_parameters

_WHERE = (
    "Cut where one tensor is all that later modules need. If the model's last layers use what its first ones gave, as in a U-Net"
    " or a decoder with its encoder's output, no cut divides it evenly: use strategy='fsdp'"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Stands for a tensor in a description that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Calls = list[tuple[str, Any]]
"""Units in the order of their calls, each with its result, which has `Shape` in the place of tensors."""


class Reached(BaseException):
    """Ends a forward at the first unit of the next stage, with the tensor that crosses to it.

    Not an Exception: the model's own handlers let it through.
    """


@dataclasses.dataclass(slots=True)
class Unit:
    """A module that one stage runs as a whole."""

    name: str
    module: torch.nn.Module
    stage: int
    is_first: bool
    """Whether the stage begins here."""
    has_parameters: bool
    is_ghost: bool
    """Whether later stages skip it. Modules of the user's that have no parameters (a mask, rotary embeddings) run
    everywhere, like the forward of the model itself."""


def units_of(model: torch.nn.Module, cuts: Sequence[str]) -> list[Unit]:
    """Return the units of a model, in the order of their registration.

    Args:
        model: The model.
        cuts: Names of the modules at which stage 1, 2, ... begin, in the order of their registration.
    """
    parents = {name[:i] for name in cuts for i, letter in enumerate(f"{name}.") if letter == "."} - set(cuts) | {""}
    units: list[Unit] = []
    seen: set[int] = set()
    stage = 0

    def walk(name: str, module: torch.nn.Module) -> None:
        nonlocal stage
        if id(module) in seen:
            return
        seen.add(id(module))
        if name in parents:
            for child_name, child in module.named_children():
                walk(f"{name}.{child_name}" if name else child_name, child)
            return
        stage += name in cuts
        has_parameters = next(module.parameters(), None) is not None
        is_ghost = has_parameters or type(module).__module__.startswith("torch.nn.")
        units.append(Unit(name, module, stage, name in cuts, has_parameters, is_ghost))

    walk("", model)
    return units


def owners_of(model: torch.nn.Module, units: Sequence[Unit], stages: int) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter, by name.

    A unit's parameter is in one stage, a tied one in all stages that use it, the parent's own in every stage.
    """
    found: dict[int, set[int]] = {}
    inside: set[int] = set()
    for unit in units:
        inside.update(id(module) for module in unit.module.modules())
        for _, parameter in unit.module.named_parameters():
            found.setdefault(id(parameter), set()).add(unit.stage)
    for module in model.modules():
        if id(module) not in inside:
            # The code of the model itself runs everywhere.
            found.update((id(parameter), set(range(stages))) for parameter in own_parameters(module))
    return {name: tuple(sorted(found[id(parameter)])) for name, parameter in model.named_parameters()}


class Ghosts:
    """Runs the part of a model that belongs to one stage.

    Args:
        model: The model.
        units: The model's units.
        stage: The stage of this rank.
        stages: Number of stages.
        device: Where the model is.
        stack: Undoes it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        units: Sequence[Unit],
        stage: int,
        stages: int,
        device: torch.device,
        stack: contextlib.ExitStack,
    ) -> None:
        self._model = model
        self._stage = stage
        self._stages = stages
        self._device = device
        self._first = [unit.name for unit in units if unit.is_first]
        self._forward = model.forward
        self._at: int | None = None
        """The stage that the forward is in; None outside a forward."""
        self._known: Calls = []
        """Calls of the units of earlier stages."""
        self._made: Calls = []
        self._arrived: Tensor | None = None
        self._with_gradient = False
        self._is_checked = False
        self._fill: Callable[[int], float] = lambda _: float("nan")
        self.runs_backward = False
        """Whether this stage runs backwards."""
        for unit in units:
            alter(unit.module, stack, forward=functools.partial(self._call, unit, unit.module.forward))
            if unit.is_first and unit.stage == stage > 0:
                # Before the module's own hooks, which may compute its weight (pruning, spectral norm).
                stack.callback(unit.module.register_forward_pre_hook(self._begin_gradients, prepend=True).remove)

    # -- one micro-batch -------------------------------------------------------------------------------------------

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        known: Calls,
        arrived: Tensor | None,
        with_gradient: bool,
        check: bool,
    ) -> tuple[Any, Calls]:
        """Run this stage's part of the forward.

        Args:
            args: Positional arguments of the model's forward.
            kwargs: Keyword arguments of the model's forward.
            known: Calls of units in the stages before.
            arrived: The tensor that crossed the cut to this stage, a leaf if it needs a gradient; None in stage 0.
            with_gradient: Whether a backward pass will follow.
            check: Whether to check that no other tensor of an earlier stage was used.

        Returns:
            The model's result (in the last stage) or the tensor that crosses to the next stage, and the calls so far.

        Raises:
            KaleDistError: The forward cannot be cut so.
        """
        self._at, self._known, self._made, self._arrived = 0, known, [], arrived
        self._with_gradient, self._is_checked = with_gradient, check
        try:
            # Before its own part there is nothing to differentiate.
            with torch.set_grad_enabled(with_gradient and self._stage == 0):
                result = self._forward(*args, **kwargs)
            if self._at != self._stages - 1:
                missing = self._first[self._at]
                raise KaleDistError(
                    f"strategy=Pipeline: the model's forward ended without calling {missing}, where stage"
                    f" {self._at + 1} begins. Cut at modules that every forward calls, in the order of the calls"
                )
        except Reached as reached:
            result = reached.args[0]
        finally:
            self._at = None
            self._arrived = None
        made = self._made
        if check and arrived is not None and _has_nan(result) and not _has_nan(arrived):
            self._explain_nan(args, kwargs, known, arrived)
        return result, made

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Allow units to be called while a backward pass runs: checkpointed parts of the model call them."""
        self.runs_backward = True
        try:
            yield
        finally:
            self.runs_backward = False

    # -- a unit is called ------------------------------------------------------------------------------------------

    def _call(self, unit: Unit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._at is None:
            if self.runs_backward:
                return forward(*args, **kwargs)
            raise KaleDistError(
                f"strategy=Pipeline: {unit.name} was called outside the model's own forward. In each rank, only the parts"
                " of its stage are there: call model(...), also in methods of the model"
            )
        if unit.is_first and unit.stage == self._at + 1:
            self._at = unit.stage
            if self._at == self._stage + 1:
                raise Reached(_crossing(unit.name, args, kwargs))
            if self._at == self._stage:
                self._enter(unit.name, args, kwargs)
        if self._at < self._stage:
            return self._pass_over(unit, forward, args, kwargs)
        if unit.has_parameters and unit.stage != self._at:
            raise KaleDistError(
                f"strategy=Pipeline: {unit.name} was called in stage {self._at}, and its weights are in stage {unit.stage},"
                f" as modules are registered in the model. Register modules in the order of their calls. {_WHERE}"
            )
        result = forward(*args, **kwargs)
        if self._at < self._stages - 1:
            self._made.append((unit.name, _described(unit.name, result)))
        return result

    def _pass_over(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return ghosts in the place of the result of a unit of an earlier stage."""
        position = len(self._made)
        name, result = self._known[position] if position < len(self._known) else ("nothing more", None)
        if name != unit.name:
            raise KaleDistError(
                f"strategy=Pipeline: {unit.name} was called here, in stage {self._stage}, where stage {self._at} had called"
                f" {name}. A forward must call the same modules on all ranks: it cannot decide by values of other stages"
            )
        self._made.append((name, result))
        if not unit.is_ghost:
            return forward(*args, **kwargs)
        return pytree.tree_map_only(Shape, lambda shape: ghost(shape, self._fill(position), self._device), result)

    def _begin_gradients(self, *_: Any) -> None:
        if self._at == self._stage - 1:
            torch.set_grad_enabled(self._with_gradient)

    def _enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin this stage: fill its input with the tensor that the stage before has sent."""
        arrived = self._arrived
        tensor = _crossing(name, args, kwargs)
        if arrived is None or tensor.shape != arrived.shape or tensor.dtype != arrived.dtype:
            sent = None if arrived is None else (tuple(arrived.shape), arrived.dtype)
            raise KaleDistError(
                f"strategy=Pipeline: at {name}, stage {self._stage} expected {(tuple(tensor.shape), tensor.dtype)} and got"
                f" {sent}"
            )
        if self._is_checked:
            others = [
                one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one is not tensor
            ]
            if any(_has_nan(one) for one in others):
                raise KaleDistError(
                    f"strategy=Pipeline: more than one tensor crosses the cut at {name}: one of its other arguments was"
                    f" computed by a module of an earlier stage. {_WHERE}"
                )
        torch.set_grad_enabled(self._with_gradient)
        if not arrived.requires_grad:
            tensor.data = arrived
        elif tensor._is_view():  # noqa: SLF001 - views of tensors made without gradient refuse to be written
            tensor.data = arrived.detach()
            tensor.requires_grad_()
            tensor.register_hook(functools.partial(_keep, arrived))  # type: ignore[no-untyped-call]
        else:
            # Not a leaf itself, so that a module that works in place can begin the stage.
            tensor.data = torch.empty_like(arrived)
            tensor.copy_(arrived)

    # -- a result that is not a number -----------------------------------------------------------------------------

    def _explain_nan(self, args: Any, kwargs: Any, known: Calls, arrived: Tensor) -> None:
        """Find out whether NaN comes from a ghost, by running the stage with ghosts of zeros.

        Raises:
            KaleDistError: NaN does. The text names the module whose result is used behind the cut.
        """
        foreign = [(name, p) for name, p in self._model.named_parameters() if is_ghost(p)]

        def gives_nan(position: int | None, parameter: str | None) -> bool:
            self._fill = lambda at: float("nan") if at == position else 0.0
            for name, one in foreign:
                one.data = ghost(one, float("nan") if name == parameter else 0.0, one.device)
            outcome, _ = self.run(args, kwargs, known=known, arrived=arrived.detach(), with_gradient=False, check=False)
            return _has_nan(outcome)

        try:
            if gives_nan(None, None):
                # The model itself gives NaN.
                return
            names = [name for at, (name, _) in enumerate(known) if gives_nan(at, None)]
            names = names or [name for name, _ in foreign if gives_nan(None, name)]
        finally:
            self._fill = lambda _: float("nan")
            for _, one in foreign:
                one.data = ghost(one, float("nan"), one.device)
        raise KaleDistError(
            f"strategy=Pipeline: stage {self._stage} uses {', '.join(names[:3]) or 'something'} of an earlier stage, beside the"
            f" one tensor that crosses the cut at {self._first[self._stage - 1]}: a skip connection over the cut. {_WHERE}"
        )


def ghost(like: Shape | Tensor, value: float, device: torch.device) -> Tensor:
    """Make a tensor full of one value, in the memory of one number."""
    is_real = like.dtype.is_floating_point or like.dtype.is_complex
    one = torch.full((), value if is_real else 0, dtype=like.dtype, device=device)
    # Its own object: what `expand` gives is a view, which cannot be written later.
    made = torch.empty((), dtype=like.dtype, device=device)
    made.data = one.expand(like.shape)
    return made


def is_ghost(tensor: Tensor) -> bool:
    """Whether a tensor has the memory of one number only."""
    return tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.element_size()


def _keep(leaf: Tensor, gradient: Tensor) -> None:
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def _crossing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor that crosses the cut at a module: the module's first argument.

    Raises:
        KaleDistError: The first argument is no tensor, or a tensor of whole numbers.
    """
    first = next(iter((*args, *kwargs.values())), None)
    if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
        return first
    what = f"a tensor of {first.dtype}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
    raise KaleDistError(
        f"strategy=Pipeline: {what} crosses the cut at {name}, and only one tensor of floating-point numbers can: the module's"
        f" first argument. {_WHERE}"
    )


def _described(name: str, result: Any) -> Any:
    """Return a unit's result with `Shape` in the place of tensors."""
    leaves, _ = pytree.tree_flatten(result)
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, Tensor | bool | int | float | str)):
            raise KaleDistError(
                f"strategy=Pipeline: {name} gives a {type(leaf).__name__}, which cannot be sent to other stages. Only the"
                " last stage may give more than tensors: cut behind it"
            )
    return pytree.tree_map_only(Tensor, lambda tensor: Shape(tuple(tensor.shape), tensor.dtype), result)


def _has_nan(value: Any) -> bool:
    tensors = (one for one in pytree.tree_leaves(value) if isinstance(one, Tensor) and one.is_floating_point())
    return any(bool(one.isnan().any()) for one in tensors)
