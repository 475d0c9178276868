"""`TrainingArguments` of transformers, and what is derived from them (TRL's `SFTConfig`), that were made in another process.

Their constructor notes which of how many processes it runs in. A pickle leaves that out, and who loads it finds out its own when it is
first read, which may join the processes' group: so not while a snapshot is loaded. What finds it out disables no Accelerator that is
there, as the constructor would; but for a Trainer that needs another one.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_DEVICES = "_setup_devices"
"""The cached property that finds out the process."""

_GPUS = "_n_gpu"

_SHARED = "_shared_state"
"""Where the classes of Accelerate's states keep the one state of their process."""

_PRECISION = "_mixed_precision"

_OF_A_PROCESS = ("distributed_state", _GPUS, _DEVICES, f"__cached_{_DEVICES}")
"""What they know of their process."""

_IS_OPEN = "is_open_for_kale_dist"
"""The mark of arguments that came from another process, until a Trainer is made from them."""


def base_of(kind: type) -> Any:
    """The TrainingArguments of transformers that a class is, or is derived from; else None."""
    names = "transformers.training_args", "TrainingArguments"
    return next((base for base in kind.__mro__ if (base.__module__, base.__qualname__) == names), None)


def reduce(arguments: Any) -> Any:
    """Reduce arguments as they do themselves, but without what they know of their process."""
    reduced = arguments.__reduce_ex__(5)
    if not isinstance(reduced, tuple) or len(reduced) < 3:  # noqa: PLR2004 - the third is the state
        return reduced
    constructor, values, state, *rest = reduced
    attributes, *slots = state if isinstance(state, tuple) else (state,)
    if isinstance(attributes, dict):
        kept = {name: value for name, value in attributes.items() if name not in _OF_A_PROCESS}
        attributes = kept | {_IS_OPEN: True}
    return (make, (constructor, values), (attributes, *slots) if slots else attributes, *rest)


def make(constructor: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    """Make arguments without their state, of a class that finds out its process."""
    made = constructor(*values)
    base = base_of(type(made))
    devices = vars(base).get(_DEVICES)
    if devices is not None and not isinstance(devices, _Devices):
        setattr(base, _DEVICES, _Devices(devices))
        for name in ("distributed_state", _GPUS):
            setattr(base, name, _Found(name))
    return made


class _Found:
    """An attribute that arguments have once they know their process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, arguments: Any, owner: type) -> Any:
        if arguments is None:
            return self
        getattr(arguments, _DEVICES)
        return vars(arguments)[self._name]


class _Devices:
    """In place of the cached property that finds out the process.

    Args:
        original: That property.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, arguments: Any, owner: type) -> Any:
        if arguments is None:
            return self
        if _IS_OPEN not in vars(arguments):
            return self._original.__get__(arguments, owner)
        if multiprocessing.parent_process() is not None:
            return _of_the_parent(arguments)
        with _keeping_accelerator():
            return self._original.__get__(arguments, owner)


def _of_the_parent(arguments: Any) -> Any:
    """A process that a rank has started, such as a DataLoader's worker, joins no group: it has what the rank knew by then."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if not getattr(state, _SHARED, None):
        raise RuntimeError(
            "This process was started by a rank, and cannot find out for TrainingArguments which one. Read what you need "
            "of them, such as args.process_index, in the rank, and pass it on"
        )
    vars(arguments).update({"distributed_state": state(), _GPUS: 0})
    return state().device


@contextlib.contextmanager
def _keeping_accelerator() -> Iterator[None]:
    """Let an Accelerator that is there be the same afterwards."""
    shared = _accelerator_state()
    kept = dict(shared)
    yield
    shared.update(kept)


def _accelerator_state() -> dict[str, Any]:
    found: dict[str, Any] = getattr(getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None), _SHARED, {})
    return found


def make_sharing(cls: type) -> Any:
    """An object of a class whose objects all share one state, that of their process."""
    made: Any = object.__new__(cls)
    made.__dict__ = getattr(cls, _SHARED)
    return made


def settle_in_trainers(_: ModuleType) -> None:
    """Have each Trainer's arguments find out their process before it makes its Accelerator, as their constructor does."""
    trainer: Any = sys.modules["transformers.trainer"]
    create = getattr(getattr(trainer, "Trainer", None), "create_accelerator_and_postprocess", None)
    if create is None:
        return

    @functools.wraps(create)
    def settled(self: Any) -> None:
        _settle(self.args)
        create(self)

    trainer.Trainer.create_accelerator_and_postprocess = settled


def _settle(arguments: Any) -> None:
    known = vars(arguments)
    if _IS_OPEN not in known:
        return
    precision = known.get("mixed_precision")
    if precision is None:
        # Before transformers 5 the constructor sets a variable, which a pod does not have.
        precision = "fp16" if arguments.fp16 else "bf16" if arguments.bf16 else "no"
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    is_other = _accelerator_state().get(_PRECISION, precision) != precision
    if is_other:
        for name in (_IS_OPEN, *_OF_A_PROCESS):
            known.pop(name, None)
    getattr(arguments, _DEVICES)
    known.pop(_IS_OPEN, None)
