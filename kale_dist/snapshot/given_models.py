"""Models among the arguments of a `launch`ed function: their trained weights return with the function's value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kale_dist.snapshot.identity import times_changed

_SAMPLES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Returned:
    """A function's return value, and the weights of its models."""

    value: Any
    model_state: dict[str, Any]
    """The state dict of `together(models)`, on the CPU."""
    model: None = None
    optimizer_state: None = None
    scheduler_state: None = None
    state: tuple[Any, ...] = ()


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
    """Detects whether the models among a call's arguments changed while the call ran.

    Args:
        args: The call's positional arguments.
        kwargs: The call's keyword arguments.
        rank: This rank; only rank 0 returns its models.
        beside: Other objects that the function uses, by name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rank: int, beside: Mapping[str, Any]) -> None:
        import torch

        self._models = models_in(args, kwargs)
        self._is_first = not rank
        self._before = _marks(self._models)
        given = {id(part) for model in self._models for part in model.modules()}
        self._beside = {
            name: (value, _marks([value]))
            for name, value in beside.items()
            if isinstance(value, torch.nn.Module) and id(value) not in given
        }

    def lost(self) -> list[str]:
        """Names of the models that have changed and are not among the arguments."""
        return [name for name, (model, before) in self._beside.items() if _marks([model]) != before]

    def are_trained(self) -> bool:
        """Whether a model that the function uses has changed."""
        return _marks(self._models) != self._before or bool(self.lost())

    def with_weights(self, value: Any) -> Any:
        """The call's return value, with the weights of its models if they have changed."""
        import torch

        if not self._models or _marks(self._models) == self._before:
            return value
        state = {}
        for name, one in together(self._models).state_dict().items():
            try:
                # Each rank has a part of weights that `fully_shard` or `parallelize_module` has divided.
                whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            except Exception as error:  # noqa: BLE001 - what the function returned is not lost for this
                print(f"kale_dist: the model does not come back, because {name} is divided over ranks: {error}")  # noqa: T201
                return value
            if type(whole) not in (torch.Tensor, torch.nn.Parameter):
                return value
            state[name] = whole.detach().cpu() if self._is_first else None
        return Returned(value=value, model_state=state) if self._is_first else value


def _marks(models: list[Any]) -> list[Any]:
    import torch

    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    return [
        (tensor.data_ptr(), times_changed(tensor), _sample(tensor))
        for tensor in tensors
        if not torch.nn.parameter.is_lazy(tensor) and not tensor.is_inference()
    ]


def _sample(tensor: Any) -> str:
    """Some numbers of a tensor as text: writes to `p.data` leave no other trace."""
    if hasattr(tensor, "full_tensor") or tensor.is_sparse or tensor.is_meta:
        return ""
    flat = tensor.detach().reshape(-1)
    return str(flat[:: max(1, len(flat) // _SAMPLES)].tolist())
