"""Models among the arguments of a `launch`ed function: their trained weights return with the function's value.

A tensor that is equal to what arrived, byte for byte, stays behind: the notebook reads it from the snapshot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from kale_dist.errors import SnapshotDamagedError, StoreError
from kale_dist.snapshot.identity import has_same_bytes, storage_id
from kale_dist.snapshot.loading import BlobRanges, Loaded
from kale_dist.wire import blobs, context


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stayed:
    """A tensor that did not change in the rank: where the snapshot has its bytes."""

    range: tuple[str, int, int]
    """The blob of its storage, the first byte in it, and how many bytes."""
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Its first element in the storage."""

    def tensor(self, memory: BlobRanges) -> Any:
        """The tensor, in memory that its blob is mapped into.

        Raises:
            StoreError: The blob is not there.
        """
        import torch

        view = memory.view(*self.range)
        made = torch.empty(0, dtype=self.dtype, device="cpu")
        storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage() if view.nbytes else made.untyped_storage()
        return made.set_(storage, self.start, self.shape, self.stride)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Returned:
    """A function's return value, and the weights of its models."""

    value: Any
    model_state: dict[str, Any]
    """The state dict of `together(models)`, on the CPU, with a `Stayed` for each tensor that has not changed."""
    adapters: tuple[tuple[str, str, str], ...] = ()
    """What the function has added by PEFT: the place of a module in `together(models)`, the adapter's name, its configuration as JSON."""
    problem: str = ""
    """Why there are no weights, as a clause; empty if they are there."""
    model: None = None
    optimizer_state: None = None
    scheduler_state: None = None
    state: tuple[Any, ...] = ()

    @property
    def is_trained(self) -> bool:
        """Whether the function has changed a model, as far as that is known."""
        return bool(self.problem) or any(hasattr(one, "detach") for one in self.model_state.values())


def models_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The modules among the arguments, and in lists, tuples and dicts there, each once."""
    import torch

    found = {id(value): value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.nn.Module)}
    return list(found.values())


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
    """The models that a call's function uses, as they arrived.

    Args:
        loaded: The call.
        rank: This rank; only rank 0 compares its models with what arrived, and returns them.
        store: The store that the call was loaded from.
        beside: Other objects that the function uses, by name.
    """

    def __init__(self, loaded: Loaded, rank: int, store: blobs.Store, beside: Mapping[str, Any]) -> None:
        import torch

        models = models_in(loaded.args, loaded.kwargs)
        memory = BlobRanges(store)
        self._is_first = not rank
        self._given = _Arrived(together(models), loaded, memory) if models else None
        self._adapters = {(place, name) for place, name, _ in self._adapters_now()}
        given = {id(part) for model in models for part in model.modules()}
        self._beside = {
            name: _Arrived(value, loaded, memory)
            for name, value in beside.items()
            if not rank and isinstance(value, torch.nn.Module) and id(value) not in given
        }

    def lost(self) -> list[str]:
        """Names of the models that have changed and are not among the arguments; of rank 0 only."""
        return [name for name, arrived in self._beside.items() if arrived.has_changed()]

    def with_weights(self, value: Any) -> Any:
        """The call's return value, in rank 0 with the weights of the models among its arguments."""
        import torch

        if self._given is None:
            return value
        state: dict[str, Any] = {}
        problem = ""
        own = dict(_tensors(self._given.model))
        for name, one in self._given.model.state_dict().items():
            try:
                # Each rank has a part of weights that `fully_shard` or `parallelize_module` has divided.
                whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            except Exception as error:  # noqa: BLE001 - what the function returned is not lost for this
                problem = f"{name} is divided over ranks: {error}"
                break
            if not isinstance(whole, torch.Tensor):
                state[name] = whole
            elif not _is_plain(whole):
                problem = f"{name} is a {type(whole).__name__} {'without values' if whole.is_meta else ''}".rstrip()
                break
            elif self._is_first:
                context.mark_progress()
                whole = whole.detach().cpu()
                state[name] = self._given.stayed(name, own.get(name), whole) or whole
        if not self._is_first:
            return value
        added = tuple(one for one in self._adapters_now() if one[:2] not in self._adapters)
        return Returned(value=value, model_state={} if problem else state, adapters=added, problem=problem)

    def _adapters_now(self) -> Iterator[tuple[str, str, str]]:
        outer: list[str] = []
        for place, module in self._given.model.named_modules() if self._given is not None else ():
            configs = getattr(module, "peft_config", None)
            if not isinstance(configs, dict) or place.startswith(tuple(outer)):
                continue
            outer.append(f"{place}." if place else "")
            for name, config in configs.items():
                # In the form in which PEFT saves them.
                with contextlib.suppress(AttributeError, TypeError, ValueError):
                    yield place, name, json.dumps(config.to_dict(), default=list)


class _Arrived:
    """A model, and where the snapshot has the bytes of its tensors."""

    def __init__(self, model: Any, loaded: Loaded, memory: BlobRanges) -> None:
        self.model = model
        self._memory = memory
        # By the tensor, too: layers that are put around others change its name.
        self._known: dict[str | int, Stayed | None] = {}
        for name, tensor in _tensors(model):
            self._known[name] = self._known[id(tensor)] = _place(tensor, loaded)

    def stayed(self, name: str, own: Any, tensor: Any) -> Stayed | None:
        """Where the snapshot has the bytes of a tensor; None if it has others.

        Args:
            name: Of an entry of the model's state dict.
            own: The model's own parameter or buffer of this name.
            tensor: Its values.
        """
        for one in (self._known.get(id(own)), self._known.get(name)):
            with contextlib.suppress(StoreError, SnapshotDamagedError):
                if one is not None and _is_plain(tensor) and has_same_bytes(tensor.cpu(), one.tensor(self._memory)):
                    return one
        return None

    def has_changed(self) -> bool:
        """Whether a tensor differs from what arrived, or is new."""
        for name, tensor in _tensors(self.model):
            context.mark_progress()
            if self._known.get(name, self) is not None and self.stayed(name, tensor, tensor) is None:
                return True
        return False


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters and buffers that have a shape, by all of their names."""
    import torch

    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            if not torch.nn.parameter.is_lazy(tensor):
                yield name, tensor


def _is_plain(tensor: Any) -> bool:
    """Whether a value is a tensor of torch's own with a memory."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta


def _place(tensor: Any, loaded: Loaded) -> Stayed | None:
    import torch

    if not _is_plain(tensor) or tensor.layout is not torch.strided:
        return None
    found = loaded.storages.get(storage_id(tensor.untyped_storage()))
    shape, stride, start = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return found and Stayed(range=found, dtype=tensor.dtype, shape=shape, stride=stride, start=start)
