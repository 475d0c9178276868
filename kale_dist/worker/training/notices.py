"""Notes that a training logs once: state that will not come back, a loss that is nan, the layer in which a step failed."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import math
import operator
import time
import traceback
import types
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kale_dist.snapshot.identity import times_changed
from kale_dist.wire import context
from kale_dist.worker.training.data.loader import Loaders
from kale_dist.worker.training.rank_group import Group, fingerprint, own_part
from kale_dist.worker.training.settings import Training, can_be_state
from kale_dist.worker.training.trained import Trained

_NAMED = 5
"""At most this many names are listed."""

_DEPTH = 3
"""How far functions that call each other are followed."""

_LOOKED_INTO = 32
"""Longer lists and dicts count as changed by their length alone."""

_COMPARED_BYTES = 1 << 20
"""The contents of larger arrays are not compared."""

_OF_NO_INTEREST = ("logging", "pandas", "torch", "tqdm")
"""Packages whose objects change in ways that no user misses, but for those that are looked at by other means."""

_KEPT = 1000
"""After so many batches, only the losses of every second one are kept; after twice as many, those of every fourth, and so on."""

_MOST_RANKS = 100
"""More ranks keep none: all would get those of all."""

_COMPARED_BATCHES = 16
"""The criterion's rows are compared between ranks in so many batches."""

STOPPED = (
    "The loss became nan, and with it the weights (stop_on_nan=True): a line of the log says where. If a checkpoint"
    " was written before, job.state_dict(partial=True) has its weights"
)

_PLAIN = (int, float, str, bool, type(None))


class _Harmless(contextlib.suppress, contextlib.ContextDecorator):
    """Guards every entry of this module: a notice looks at objects of the user's, and may never fail a training."""


_harmless = _Harmless(Exception)
_differ = _harmless(operator.ne)


class Captured:
    """The names outside of their own bodies that the functions of a training use, and may change.

    Only counts of changes, addresses and lengths are kept, so that ten million numbers cost no more than ten.

    Args:
        training: Has the steps, and what they get.
        trained: The objects that come back.
    """

    def __init__(self, training: Training, trained: Trained) -> None:
        self._functions = training.train_step, training.eval_step
        self._given = {"train_args": training.train_args, "eval_args": training.eval_args}
        self._known = {id(value) for value in (*trained.parts(), *trained.loaders, trained.criterion)}
        self._before = self._marks()

    @_harmless
    def changed(self) -> dict[str, bool]:
        """Names of what has changed since this object was made, each with whether `state=` takes it."""
        now, found = self._marks(), self._found()
        names = sorted(name for name, mark in self._before.items() if name in now and _differ(mark, now[name]))
        return {name: can_be_state(found[name]) for name in names}

    @_harmless
    def _marks(self) -> dict[str, Any]:
        return {name: _mark(value, 2, self._known) for name, value in self._found().items()}

    def _found(self) -> dict[str, Any]:
        return {name: value for function in self._functions for name, value in used(function)} | self._given


@_harmless
def _mark(value: Any, depth: int, known: Collection[int] = ()) -> Any:
    """Return a mark of a value that changes when the value is changed in place; the same for all objects of `known`."""
    if id(value) in known:
        return ()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        # Those without a shape have no address, and those of inference mode do not count their changes: the guard gives None.
        address = value.data_ptr() if value.layout is torch.strided else id(value)
        return address, times_changed(value)
    if isinstance(value, torch.nn.Module):
        return [_mark(tensor, 0, known) for tensor in (*value.parameters(), *value.buffers())]
    if isinstance(value, collections.deque):
        # A full one keeps its length.
        return id(value), len(value), id(value[-1]) if value else 0
    if hasattr(type(value), "__array_interface__"):
        return id(value), zlib.crc32(value.tobytes()) if value.nbytes <= _COMPARED_BYTES else 0
    if isinstance(value, list | dict | set):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        is_looked_into = depth and not isinstance(value, set) and len(value) <= _LOOKED_INTO
        return (
            id(value),
            len(value),
            [(name, _mark(part, depth - 1, known)) for name, part in parts] if is_looked_into else (),
        )
    mark: list[Any] = [id(value), getattr(value, "shape", ())]
    if isinstance(value, type | types.ModuleType):
        return mark
    if callable(getattr(value, "load_state_dict", None)):
        mark.append(_contents(value.state_dict()))
    if type(value).__module__.partition(".")[0] not in _OF_NO_INTEREST:
        mark.append(_mark(dict(getattr(value, "__dict__", {})), depth, known)[1:] if depth else ())
    return mark


@_harmless
def _contents(value: Any) -> Any:
    """Return a mark of what a state dict contains, whose tensors may be new copies in each call."""
    if isinstance(value, Tensor):
        return fingerprint([own_part(value)])
    if isinstance(value, dict | list | tuple):
        return [_contents(one) for one in (value.values() if isinstance(value, dict) else value)]
    return value if isinstance(value, _PLAIN) else None


def used(function: Any, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Names and values that a function and the notebook's functions that it calls find outside their own bodies.

    Args:
        function: The function.
        depth: How far functions that call each other are followed.
    """
    if not isinstance(function, types.FunctionType) or not depth:
        return
    try:
        names = inspect.getclosurevars(function)
    except ValueError:  # a name of the enclosing function that is not bound yet
        return
    for name, value in {**names.globals, **names.nonlocals}.items():
        if type(value) is not types.FunctionType:
            yield name, value
        elif value.__module__ in ("__main__", function.__module__):
            yield from used(value, depth - 1)


def used_beside_arguments(function: Any) -> dict[str, Any]:
    """What a call's function uses beside its arguments, by name; of a method also its object, and what that has."""
    if not isinstance(function, types.MethodType):
        return dict(used(function))
    owner, kind = function.__self__, type(function.__self__).__name__
    own = {f"{kind}.{name}": value for name, value in getattr(owner, "__dict__", {}).items()}
    return {kind: owner, **own, **dict(used(function.__func__))}


class OwnLosses:
    """The losses of this rank; logs the first that is nan.

    Args:
        group: The ranks.
        model: What is trained.
    """

    _loaders: Loaders

    def __init__(self, group: Group, model: torch.nn.Module) -> None:
        self._group = group
        self._model = model
        self._latest: Tensor | None = None
        self._root: Tensor | None = None
        self._has_warned = False
        self._copy: tuple[Tensor, Any] | None = None
        """Numbers on their way from the GPU, and the event that ends it."""
        self._numbers: list[float | None] = [None, None]
        self._kept: dict[int, tuple[float, Tensor]] = {}
        """Of the epoch's batches, by step: when each was, and its loss, which may still be computed."""
        self._batch, self._batches, self._every = (0, 0), 0, 1
        self._rows: dict[int, tuple[int, int]] | None = {}
        """Of the first batches, by step: this rank's samples, and the rows of the criterion's input; None once they are compared."""

    @contextlib.contextmanager
    def watched(self, criterion: Any, loaders: Loaders, passed: Callable[[Tensor], None]) -> Iterator[None]:
        """Look at the losses that a criterion returns, and at the tensors whose `backward()` is called.

        Args:
            criterion: Passed to the steps.
            loaders: Which epoch and batch it is. The criterion's losses in an evaluation are passed over.
            passed: Called with such a tensor when its `backward()` is over.
        """
        self._loaders = loaders
        original: Any = torch.Tensor.backward

        @functools.wraps(original)
        def backward(root: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._note_root(root)
            original(root, *args, **kwargs)
            passed(root)

        hook = criterion.register_forward_hook(self._note) if isinstance(criterion, torch.nn.Module) else None
        setattr(torch.Tensor, "backward", backward)  # noqa: B010 - mypy sees no function of this type there
        try:
            yield
        finally:
            setattr(torch.Tensor, "backward", original)  # noqa: B010
            if hook is not None:
                hook.remove()

    @_harmless
    def latest(self) -> float | None:
        """Return the criterion's latest loss of the training; on a GPU the last one that has arrived, for which nothing waits."""
        root, latest = self._root, self._latest
        given = latest if latest is not None else root
        if given is not None and given.is_cuda:
            root_value, value = self._arrived(given if root is None else root.to(given.device), given)
        else:
            root_value, value = (None if one is None else float(one) for one in (root, latest))
        if root_value is not None:
            self._look(root_value)
        return value if latest is not None else None

    @_harmless
    def of_epoch(self) -> dict[int, tuple[float, float]] | None:
        """Return the time and the loss of each batch that was kept of the epoch's first pass, by step, and forget them; waits for a GPU."""
        kept, self._kept = self._kept, {}
        losses = torch.stack([loss.float().reshape(()) for _, loss in kept.values()]).tolist() if kept else []
        return {step: (moment, loss) for (step, (moment, _)), loss in zip(kept.items(), losses, strict=True)}

    def _keep(self, loss: Tensor) -> None:
        feed = self._loaders.train
        if not feed.step or feed.current is not feed.counts.first or self._group.world_size > _MOST_RANKS:
            return
        # A criterion may be called several times a batch: its last loss counts.
        if self._batch != (batch := (feed.counts.epoch, feed.step)):
            self._batch, self._batches = batch, self._batches + 1
        if self._batches > _KEPT * self._every:
            self._every *= 2
            self._kept = dict(list(self._kept.items())[::2])
        if self._batches % self._every == 0:
            self._kept[feed.step] = time.time(), loss

    def _count_rows(self, criterion: Any, given: Any) -> None:
        """Note how many rows the criterion gets for the batch's samples, if it averages over them.

        Samples in another dimension than the first, as `CTCLoss` has them, are no rows.
        """
        feed, portion = self._loaders.train, self._loaders.train.role.portion
        if self._rows is None or len(self._rows) >= _COMPARED_BATCHES or portion is None or not portion.local:
            return
        is_mean = getattr(criterion, "reduction", "mean") != "sum"
        if is_mean and isinstance(given, Tensor) and given.dim() and portion.local not in given.shape[1:]:
            self._rows[feed.step] = portion.local, len(given)

    def rows(self) -> dict[int, tuple[int, int]]:
        """Return the samples and the rows of the first epoch's first batches, by step; nothing in later epochs."""
        rows, self._rows = self._rows or {}, None
        return rows

    def compare_rows(self, everyone: Sequence[Mapping[int, tuple[int, int]]]) -> None:
        """Log where the criterion got other numbers of rows for equal numbers of samples: its mean is not over samples.

        Args:
            everyone: What `rows` returned in each rank.
        """
        for step in sorted(set().union(*everyone)):
            found = {ranks[step] for ranks in everyone if step in ranks}
            if len({samples for samples, _ in found}) < len(found):
                numbers = [rows for _, rows in found]
                self._group.log(
                    f"In batch {step}, the criterion got {min(numbers)} to {max(numbers)} rows on ranks with equally many samples. Its loss"
                    " is the mean over the rows of each rank: where ranks have unequally many, the gradient is not that of one process."
                    " Where it has to be, use reduction='sum' and divide by a fixed number in train_step."
                )
                return

    def _arrived(self, root: Tensor, latest: Tensor) -> tuple[float | None, float | None]:
        """Start to copy two numbers from the GPU, and return those of an earlier copy that has ended."""
        if self._copy is not None and self._copy[1].query():
            self._numbers, self._copy = self._copy[0].tolist(), None
        if self._copy is None:
            numbers = torch.empty(2, device="cpu", pin_memory=True)
            numbers.copy_(torch.stack([root.float().reshape(()), latest.float().reshape(())]), non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copy = numbers, event
        return self._numbers[0], self._numbers[1]

    @_harmless
    def _note(self, criterion: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.numel() == 1 and self._loaders.running.role.is_training:
            self._latest = own_part(output.detach())
            self._keep(self._latest)
            self._count_rows(criterion, inputs[0])

    @_harmless
    def _note_root(self, root: Tensor) -> None:
        if root.numel() == 1 and not self._has_warned:
            self._root = own_part(root.detach())
            if root.device.type == "cpu":
                self._look(float(self._root))

    def _look(self, loss: float) -> None:
        if self._has_warned or not math.isnan(loss):
            return
        self._has_warned = True
        is_spread = _hold_nan(self._model.parameters())
        # By the exchange of gradients, one rank's nan is in all weights a step later.
        if is_spread and self._group.rank:
            return
        # On a GPU, the last loss of an epoch may arrive in the evaluation.
        train = self._loaders.train
        epoch, first = train.counts.epoch, train.counts.first
        step = train.step or (0 if first is None else first.index)
        cause = ", and the weights hold nan already" if is_spread else ""
        text = f"The loss is nan on rank {self._group.rank} in step {step} of epoch {epoch}{cause}."
        context.log(text, warns=True, nan=(epoch, step))

    @_harmless
    def have_spoilt(self, tensors: Iterable[Tensor], *, waits: bool) -> bool:
        """Whether a loss of this rank was nan, and these tensors hold nan now: a step that a loss scaler skips does no harm.

        Args:
            tensors: Of the model.
            waits: Whether to wait for the latest loss, if it is on a GPU.
        """
        is_nan = self._has_warned or (waits and self._root is not None and bool(self._root.isnan()))
        return is_nan and _hold_nan(tensors)


def _hold_nan(tensors: Iterable[Tensor]) -> bool:
    """Whether some of them hold nan in this rank.

    Those of other stages of a pipeline have no memory of their own, and are passed over.
    """
    with torch.no_grad():
        own = (own_part(one) for one in tensors if not torch.nn.parameter.is_lazy(one))
        return any(bool(one.isnan().any()) for one in own if 0 not in one.stride())


@_harmless
def note_layer(error: BaseException, model: torch.nn.Module, criterion: Any, batch: str) -> None:
    """Add a note to an exception: which layer raised it, and for which inputs. No note where no layer did.

    Args:
        error: With its traceback.
        model: Whose layers are named.
        criterion: Passed to the step.
        batch: Which batch it was.
    """
    called: list[Mapping[str, Any]] = []
    with context.only_shown("The layer in which a step fails"):
        code = torch.nn.Module._call_impl.__code__  # noqa: SLF001 - the frame that has a layer and what it was given
        called = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
    layer = called[-1]["self"]
    name = next((name for name, one in model.named_modules() if one is layer), None)
    kind = f"{type(layer).__name__}({'' if any(layer.children()) else layer.extra_repr()})"
    where = f"layer {name!r}, {kind}" if name else "the criterion" if layer is criterion else kind
    given = [*map(_shown, called[-1]["args"])]
    given += [f"{key}={_shown(value)}" for key, value in called[-1]["kwargs"].items()]
    error.add_note(f"Raised in {where}, called with {', '.join(given) or 'nothing'}, in {batch}.")


def _shown(value: Any) -> str:
    """An input by its dtype and shape, or else its class."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, tuple | list) and 0 < len(value) <= _NAMED:
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, dict) and 0 < len(value) <= _NAMED:
        return "{" + ", ".join(f"{key!r}: {_shown(one)}" for key, one in value.items()) + "}"
    return type(value).__name__
