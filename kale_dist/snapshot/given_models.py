"""Models among the arguments of a `launch`ed function: their trained weights return with the function's value.

A tensor that is equal to what arrived, byte for byte, stays behind: the notebook reads it from the snapshot.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from kale_dist.errors import SnapshotDamagedError, StoreError
from kale_dist.snapshot.changes import Changes
from kale_dist.snapshot.identity import has_same_bytes, sum_of_bits
from kale_dist.snapshot.loading import Loaded
from kale_dist.snapshot.origin import Origin, Stayed, is_own
from kale_dist.wire import context


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter of PEFT in a model: its state is more than the weights that it has."""

    place: str
    """Of the module that has it, in `together(models)`."""
    name: str
    config: str
    """Its configuration as PEFT saves it, in JSON."""
    is_active: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Returned:
    """A function's return value, and the weights of its models."""

    value: Any
    model_state: dict[str, Any] | None = None
    """The state dict of `together(models)`, on the CPU, with a `Stayed` for each tensor that has not changed; None of a function that
    got no model."""
    changes: tuple[Changes, ...] = ()
    """What else the function has changed of its arguments and of what it uses."""
    is_trained: bool = False
    """Whether the function has changed a model, as far as that is known."""
    adapters: tuple[Adapter, ...] = ()
    problem: str = ""
    """Why there are no weights, as a clause; empty if they are there."""
    model: None = None
    optimizer_state: None = None
    scheduler_state: None = None
    state: tuple[Any, ...] = ()


def models_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The modules among the arguments, and in lists, tuples and dicts there, each once."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = {id(value): value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.nn.Module)}
    return list(found.values())


def modules_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """All modules whose weights come back with a function's value."""
    return [part for model in models_in(args, kwargs) for part in model.modules()]


def together(models: list[Any]) -> Any:
    """Combine models into one module."""
    import torch

    return models[0] if len(models) == 1 else torch.nn.ModuleList(models)


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        yield value
        if isinstance(value, list | tuple):
            yield from value
        elif isinstance(value, dict):
            yield from value.values()


class GivenModels:
    """The models among a call's arguments, as they arrived.

    Args:
        loaded: The call.
        rank: This rank; only rank 0 compares its models with what arrived, and returns them.
    """

    def __init__(self, loaded: Loaded, rank: int) -> None:
        models = models_in(loaded.args, loaded.kwargs)
        self._is_first = not rank
        self.fingerprint = ""
        """Of the weights that `with_weights` has found changed in this rank; empty if there are none."""
        self._given = _Arrived(together(models), loaded.origin) if models else None

    def with_weights(self, value: Any, *, has_trained: bool) -> Any:
        """The call's return value, in rank 0 with the weights of the models among its arguments.

        Args:
            value: It.
            has_trained: Whether the function has trained anything: what has no place in the snapshot may have changed then.
        """
        if self._given is None:
            return value
        state: dict[str, Any] = {}
        is_changed, prints = False, list[tuple[str, int]]()
        try:
            given = self._given.model.state_dict()
            # With what it has beside its entries: the versions of its parts.
            state = copy.copy(given)
            state.clear()
            own = dict(_tensors(self._given.model))
            # Buffers are each rank's own also where weights are not.
            weights = {name for name, _ in self._given.model.named_parameters(remove_duplicate=False)}
            problem, wrapped = self._given.problem(), self._given.wrapped()
            for its_name, one in {} if problem else given.items():
                start = next(filter(its_name.startswith, wrapped), "")
                name = start.removesuffix("module.") + its_name.removeprefix(start)
                # Each rank has a part of weights that `fully_shard` or `parallelize_module` has divided.
                whole = one.full_tensor() if hasattr(one, "full_tensor") else one
                if not hasattr(whole, "detach"):
                    state[name] = whole
                elif not is_own(whole):
                    problem = f"{name} is a {type(whole).__name__} {'without values' if whole.is_meta else ''}".rstrip()
                    break
                else:
                    context.mark_progress()
                    whole = whole.detach().cpu()
                    place = self._given.place(name, own.get(its_name))
                    state[name] = place if place is not None and self._given.is_at(place, whole) else whole
                    if state[name] is whole and its_name in weights:
                        prints.append((name, sum_of_bits(whole)))
                    is_new = its_name in own and not self._given.has_met(name, own[its_name])
                    is_changed = is_changed or (state[name] is whole and (place is not None or is_new or has_trained))
        except Exception as error:  # noqa: BLE001 - what the function returned is not lost for this
            problem = f"its state_dict cannot be had: {type(error).__name__}: {error}"
        self.fingerprint = str(zlib.crc32(repr(prints).encode())) if prints and not problem else ""
        if not self._is_first:
            return value
        is_trained = is_changed or (bool(problem) and (has_trained or self._given.has_changed()))
        return Returned(
            value=value,
            model_state={} if problem else state,
            is_trained=is_trained,
            adapters=tuple(_adapters(self._given.model)),
            problem=problem,
        )


class _Arrived:
    """A model, and where the snapshot has the bytes of its tensors."""

    def __init__(self, model: Any, origin: Origin) -> None:
        self.model = model
        self._memory = origin.memory
        # By the tensor, too: layers that are put around others change its name.
        self._known: dict[str | int, Stayed | None] = {}
        for name, tensor in _tensors(model):
            self._known[name] = self._known[id(tensor)] = origin.place(tensor)

    def wrapped(self) -> list[str]:
        """What names begin with of parts that the function has put into DistributedDataParallel, up to the `module.` that it adds."""
        import torch

        found = self.model.named_modules()
        return [
            f"{place}.module." for place, part in found if isinstance(part, torch.nn.parallel.DistributedDataParallel)
        ]

    def has_met(self, name: str, own: Any) -> bool:
        """Whether a parameter or buffer is one that arrived, or has the name of one."""
        return id(own) in self._known or name in self._known

    def place(self, name: str, own: Any) -> Stayed | None:
        """Where the snapshot has what arrived as a tensor; None if it did not come with the snapshot.

        Args:
            name: Of an entry of the model's state dict.
            own: The model's own parameter or buffer of this name.
        """
        return self._known.get(id(own)) or self._known.get(name)

    def is_at(self, place: Stayed, tensor: Any) -> bool:
        """Whether the snapshot has the very bytes of a tensor there."""
        with contextlib.suppress(StoreError, SnapshotDamagedError):
            return is_own(tensor) and has_same_bytes(tensor.cpu(), place.tensor(self._memory))
        return False

    def has_changed(self) -> bool:
        """Whether a tensor differs from what arrived, or is new."""
        for name, tensor in _tensors(self.model):
            context.mark_progress()
            if name not in self._known or ((place := self._known[name]) and not self.is_at(place, tensor)):
                return True
        return False

    def problem(self) -> str:
        """Why the weights that the model has now are not all of them, as a clause; empty if they are."""
        for module in self.model.modules():
            if getattr(module, "merged", False) is True and hasattr(module, "unmerge"):
                return "an adapter is merged into its base: call unmerge_adapter() at the function's end"
        for name, tensor in _tensors(self.model):
            was = self._known.get(name)
            is_flat = was is not None and len(was.shape) > 1 and tensor.dim() == 1
            if (
                is_flat
                or name.endswith("flat_param")
                or (was is not None and math.prod(was.shape) and not tensor.numel())
            ):
                return f"{name} is divided over ranks by FSDP 1 or DeepSpeed, which gather it only when asked to"
        return ""


def _adapters(model: Any) -> Iterator[Adapter]:
    """The adapters of PEFT in a model, each once."""
    found: dict[int, tuple[str, Any]] = {}
    for place, module in model.named_modules():
        # A PeftModel, its tuner and the model in it have one object.
        if isinstance(configs := getattr(module, "peft_config", None), dict):
            found.setdefault(id(configs), (place, module))
    for place, module in found.values():
        # Layers of PEFT have a list; models of transformers a method of this name.
        lists = (getattr(part, "active_adapters", None) for part in module.modules())
        active = {name for names in lists if isinstance(names, list) for name in names}
        for name, config in module.peft_config.items():
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                written = json.dumps(config.to_dict(), default=list)
                yield Adapter(place=place, name=name, config=written, is_active=name in active)


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters and buffers that have a shape, by all of their names."""
    import torch

    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            if not torch.nn.parameter.is_lazy(tensor):
                yield name, tensor
