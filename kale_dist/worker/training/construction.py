"""Makes a model without holding it: its constructor runs on tensors without values, and what it computes is recorded.

The values of each tensor can then be computed alone. They are those that the constructor would have given it: random numbers are drawn
while it runs, in its order, into memory that is dropped at once, and the generator's state before each draw is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kale_dist.snapshot.identity import storage_id

pytree = _pytree
"""Finds the tensors in nested lists, tuples and dicts; torch has no public name for it."""

_META, _CPU = torch.device("meta"), torch.device("cpu")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Operation:
    """One operation of the constructor."""

    number: int
    function: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    state: Tensor | None
    """The generator's before a draw."""

    def run(self, value: Callable[[Tensor], Tensor]) -> Any:
        """Do it with values; `value` gives those of a tensor without."""
        args, kwargs = _filled((self.args, self.kwargs), value)
        if self.state is None:
            return self.function(*args, **kwargs)
        generator = _generator(kwargs)
        now = generator.get_state()
        generator.set_state(self.state)
        try:
            return self.function(*args, **kwargs)
        finally:
            generator.set_state(now)


class Construction(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How the tensors of a model come about.

    Args:
        make: Makes the model. It is called at once.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: dict[int, list[_Operation]] = {}
        """The storage of each tensor to all operations, in their order, on it and on what was computed with it."""
        self._count = 0
        # Functions of `torch.nn.init` do nothing where this is true.
        torch.Tensor.is_meta = property(lambda _: False)  # type: ignore[assignment]
        try:
            with self:
                self.made = make()
        finally:
            del torch.Tensor.is_meta

    def value(self, tensor: Tensor) -> Tensor:
        """Compute the values of a tensor that the constructor has made; each call does so again."""
        with torch.no_grad():
            return _values(self._operations[_key(tensor)], tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        is_back = str(function) == "aten._to_copy.default" and kwargs.get("device") == _CPU
        if any(map(_is_empty, given)) and (torch.Tag.data_dependent_output in function.tags or is_back):
            # The constructor decides by values.
            return function(*_filled(args, self.value), **kwargs)
        is_factory = not given and any(one.name == "device" for one in _schema(function).arguments)
        # By `torch.tensor([]).device` Transformers finds out whether to leave weights without values.
        is_constant = function is torch.ops.aten.lift_fresh.default and not _is_empty(args[0]) and args[0].numel()
        if is_constant:
            out = args[0].to(_META)
        else:
            elsewhere: dict[str, Any] = {"device": _META} if is_factory else {}
            elsewhere |= {"generator": None} if kwargs.get("generator") is not None else {}
            out = function(*args, **{**kwargs, **elsewhere})
        empty = [one for one in (*given, *pytree.tree_leaves(out)) if isinstance(one, Tensor) and _is_empty(one)]
        if not empty:
            return out
        state = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            state = _generator(kwargs).get_state()
            first: tuple[Tensor, ...] = ()
            if given and _schema(function).is_mutable:
                # What is overwritten needs no values.
                like = args[0]
                first = (torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=_CPU),)
            function(*first, *_filled(args[len(first) :], self.value), **_filled(kwargs, self.value))
        self._count += 1
        made = _Operation(number=self._count, function=function, args=args, kwargs=kwargs, out=out, state=state)
        lists = {id(ops): ops for one in empty if (ops := self._operations.get(_key(one))) is not None}
        joined = next(iter(lists.values()), [])
        if len(lists) > 1:
            joined = sorted((one for ops in lists.values() for one in ops), key=lambda one: one.number)
            for storage in {
                _key(one) for op in joined for one in pytree.tree_leaves((op.args, op.out)) if _is_empty(one)
            }:
                self._operations[storage] = joined
        joined.append(made)
        for one in empty:
            self._operations[_key(one)] = joined
        return out


def _filled(given: Any, value: Callable[[Tensor], Tensor]) -> Any:
    """Arguments with values in the place of tensors without, which `value` gives, and on the CPU."""

    def real(one: Any) -> Any:
        if _is_empty(one):
            return value(one)
        return _CPU if isinstance(one, torch.device) and one == _META else one

    return pytree.tree_map(real, given)


def _values(operations: list[_Operation], wanted: Tensor) -> Tensor:
    """Do operations again, with values, and return those of one tensor."""
    storages: dict[int, Any] = {}

    def known(one: Tensor) -> Tensor:
        made = torch.empty(0, dtype=one.dtype, device="cpu")
        return made.set_(storages[_key(one)], one.storage_offset(), one.size(), one.stride())

    for operation in operations:
        outs = [one for one in pytree.tree_leaves(operation.out) if isinstance(one, Tensor)]
        is_view = all(_key(one) in storages for one in outs)
        if is_view and not _schema(operation.function).is_mutable:
            continue
        found = [one for one in pytree.tree_leaves(operation.run(known)) if isinstance(one, Tensor)]
        for out, value in zip(outs, found, strict=True):
            if _key(out) not in storages:
                # Kernels with values may lay them out in another order.
                like = torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device="cpu")
                laid = value if value.stride() == out.stride() else like.copy_(value)
                storages[_key(out)] = laid.untyped_storage()
    return known(wanted)


def _is_empty(one: Any) -> bool:
    return isinstance(one, Tensor) and one.device.type == "meta"


def _key(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _schema(function: Any) -> Any:
    """The arguments of an operation, and whether it writes into them."""
    return function._schema  # noqa: SLF001


def _generator(kwargs: dict[str, Any]) -> torch.Generator:
    found: torch.Generator = kwargs.get("generator") or torch.default_generator
    return found
