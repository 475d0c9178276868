"""Notes that a training logs once: a loader that is not divided, a loss that is nan, the layer in which a step failed."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from kale_dist.errors import ConfigError
from kale_dist.snapshot import sources
from kale_dist.wire import context
from kale_dist.worker.training.data.batches import Batches
from kale_dist.worker.training.data.loader import Loaders, divides_itself
from kale_dist.worker.training.rank_group import Group, own_part
from kale_dist.worker.training.settings import Training

_NAMED = 5
"""At most this many parts of an argument are shown."""

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

_IN_TURN = 3
"""So many batches of another loader, each with one more of the step's own, are taken in turn with them."""

_SHARE = "Put kd.share(...) around it in the step, for this rank's share"


class _Harmless(contextlib.suppress, contextlib.ContextDecorator):
    """Guards every entry of this module: a notice looks at objects of the user's, and may never fail a training."""


_harmless = _Harmless(Exception)


class OtherLoaders:
    """The loaders that a step iterates beside its own, and that are not divided: each is named once.

    Args:
        training: Has the steps, and what they get.
        loaders: Those that are divided.
        group: The ranks with different data.
        everyone: All ranks, for which samplers may be made as well.
    """

    def __init__(self, training: Training, loaders: Loaders, group: Group, everyone: Group) -> None:
        self._training, self._loaders, self._groups = training, loaders, (group, everyone)
        self._found: weakref.WeakKeyDictionary[Any, tuple[str, list[int]]] = weakref.WeakKeyDictionary()
        """By loader and by iterator: its name, and in which batches of the training's own loader its first ones were taken."""

    def watch(self, stack: contextlib.ExitStack) -> None:
        """Look at loaders where they are iterated, until the stack ends it.

        One of which a step takes a batch with each of its own loader's is refused: where all ranks begin with the same ones, none
        gets to the others.
        """
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        make, take = DataLoader.__iter__, _BaseDataLoaderIter.__next__

        def made(loader: Any) -> Any:
            iterator = make(loader)
            self._look(loader, iterator)
            return iterator

        def taken(iterator: Any) -> Any:
            if name := self._taken_in_turn(iterator):
                problem = (
                    f"{name} is not divided, and the step takes a batch of it with each batch of its own loader: ranks"
                )
                problem += " read some of its samples several times, and others never"
                raise ConfigError("train_step", problem, _SHARE)
            return take(iterator)

        setattr(DataLoader, "__iter__", made)  # noqa: B010 - mypy lets no method be replaced
        setattr(_BaseDataLoaderIter, "__next__", taken)  # noqa: B010
        stack.callback(setattr, DataLoader, "__iter__", make)
        stack.callback(setattr, _BaseDataLoaderIter, "__next__", take)

    @_harmless
    def _look(self, loader: Any, iterator: Any) -> None:
        if isinstance(iterator, Batches) or get_worker_info() is not None or divides_itself(loader, *self._groups):
            return
        if loader not in self._found:
            path = next((path for path, value in self._named() if value is loader), "")
            self._found[loader] = path or f"The loader at {_users_line()}", []
        name, _ = self._found[iterator] = self._found[loader]
        self._groups[0].log(f"{name} is not divided: each rank that iterates it reads all of it. {_SHARE}.")

    @_harmless
    def _taken_in_turn(self, iterator: Any) -> str:
        name, batches = self._found.get(iterator, ("", []))
        if not name or len(batches) == _IN_TURN:
            return ""
        batches.append(self._loaders.train.step)
        return name if batches == [*range(batches[0], batches[0] + _IN_TURN)] else ""

    def _named(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._training.objects().items():
            yield name, value
            held = (
                dict(enumerate(value)) if isinstance(value, list | tuple) else value if isinstance(value, dict) else {}
            )
            yield from ((f"{name}[{key!r}]", one) for key, one in held.items())
            yield from ((f"{name}.{key}", one) for key, one in getattr(value, "__dict__", {}).items())


def _users_line() -> str:
    """The user's line that is being run, as `place_of` names it."""
    frames = traceback.walk_stack(None)
    return next(sources.place_of(one, line) for one, line in frames if sources.is_users(one.f_code.co_filename))


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
