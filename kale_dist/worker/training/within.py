"""Checkpoints within an epoch: when they are written, what a resumption needs besides the states, and how an epoch goes on.

Ranks meet after a number of batches that rank 0 has named at the meeting before, about every `MEET_S`. Between meetings a batch
costs one comparison. At a meeting rank 0 says whether a checkpoint is due: by the clock, by its steps, or because the agent asks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from kale_dist import wording
from kale_dist.errors import KaleDistError
from kale_dist.snapshot.identity import times_changed
from kale_dist.wire import context
from kale_dist.worker.training import checkpoint
from kale_dist.worker.training.data.batches import Batches, Feed
from kale_dist.worker.training.group import LARGE
from kale_dist.worker.training.notices import Captured
from kale_dist.worker.training.optimizer import OptimizerControl
from kale_dist.worker.training.variables import MOST_BYTES, Unkept, Variables
from kale_dist.worker.training.writing import Writing

if TYPE_CHECKING:
    from kale_dist.worker.training.loop import Setup

MEET_S = 2.0
"""About how often ranks meet."""

SHARE = 0.01
"""Of the time, that checkpoints of `auto` may take."""

SOONEST_S, LATEST_S = 2.0, 600.0
"""The shortest and the longest time between two checkpoints of `auto`."""

_TRIES = 256
"""So many batches in a row ranks wait for a moment at which a checkpoint can be written; then they meet as usual."""


class Schedule:
    """When a checkpoint is due, as rank 0 decides.

    Args:
        every: `checkpoint_every` of the call, but no number of epochs.
        steps: Real steps so far.
    """

    def __init__(self, every: str, steps: int) -> None:
        self._unit, self._amount = wording.interval(every) or ("auto", 0.0)
        self._at, self._steps = time.monotonic(), steps
        self.has_written = False
        self.cost_s = 0.0
        """How long the training has last waited for a checkpoint within an epoch."""

    def is_due(self, steps: int, writing: Writing) -> bool:
        """Whether a checkpoint is due now.

        Args:
            steps: Real steps so far.
            writing: Where the last one is being written.
        """
        if self._unit == "steps":
            return steps - self._steps >= self._amount
        since = time.monotonic() - self._at
        if self._unit == "s":
            return since >= self._amount
        # A thread that writes takes time from the training where all cores are used.
        cost_s = self.cost_s + writing.seconds
        return since >= max(SOONEST_S, min(LATEST_S, cost_s / SHARE)) and not writing.is_busy

    def batches_ahead(self, steps: int, done: int, since_s: float) -> int:
        """How many batches ranks take before they meet again.

        Args:
            steps: Real steps so far.
            done: Batches since the last meeting.
            since_s: Seconds since then.
        """
        meet_s = min(MEET_S, self._amount) if self._unit == "s" else MEET_S
        # At first a batch may be slow (compilation, the first files): they meet again soon.
        ahead = max(1, min(2 * done, round(meet_s * done / since_s) if since_s > 0 else 1))
        return max(1, min(ahead, int(self._amount) - (steps - self._steps))) if self._unit == "steps" else ahead

    def written(self, steps: int) -> None:
        """A checkpoint was written after so many steps."""
        self._at, self._steps, self.has_written = time.monotonic(), steps, True


class Within:
    """The checkpoints within the epochs of one training, in a rank with data.

    Args:
        setup: The training. Without a text as its `checkpoint_every`, no checkpoint is written within epochs.
        control: Counts steps.
        feed: Of the training loader.
        captured: Notes what the step changes outside of itself.
        write: Writes a checkpoint in all ranks, of this rank's and all ranks' position.
    """

    def __init__(
        self,
        setup: Setup,
        control: OptimizerControl,
        feed: Feed,
        captured: Captured,
        write: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        self._trained, self._group, self._strategy = setup.trained, setup.group, setup.strategy
        self._control, self._feed, self._captured, self._write = control, feed, captured, write
        self._resumption, every = setup.resumption, setup.training.checkpoint_every
        self._steps = control.real_steps
        has_files = context.context().files is not None
        self._schedule = Schedule(every, self._steps) if isinstance(every, str) and has_files else None
        self.writing = Writing()
        self.is_asked = False
        """Whether the agent has asked for the checkpoint that is being written."""
        self._next = 1
        self._met = 0, time.monotonic()
        self._tries = 0
        self._thread = 0
        self._why = ""
        self._variables: Variables | None = None
        self._gradients: _Gradients | None = _Gradients(setup.trained.model)
        self._began: dict[str, Any] = {}
        self._later: dict[str, Any] = {}
        """This rank's generators as restored, until the order of the epoch is drawn by those of its start."""
        self._marks: Any = None
        self._fields: Any = None
        self._buffers: dict[str, int] = {}
        self._root: types.CodeType | None = None
        self._resumed = self._resumption.progress.position
        mine = self._mine
        self._load_buffers(mine)
        # A known order has a place for ranks of any number and batches of any size; the batches of a stream are only counted.
        has_place = mine is not None and self._resumption.has_same_batches
        if self._resumed is not None and (self._resumed["order"] or has_place):
            feed.start = {
                "items": self._resumed["items"], "order": self._resumed["order"],
                "samples": 0 if mine is None else mine["samples"],
                "before": None if mine is None or mine["before"] is None else checkpoint.unpacked(mine["before"]),
            }  # fmt: skip
        feed.within = self
        if self._schedule is not None and not self._group.rank and self._strategy.saves_within_epochs:
            context.can_save()

    @property
    def _mine(self) -> dict[str, Any] | None:
        """This rank's part of the position, where the training has resumed with as many ranks and the same strategy."""
        ranks = [] if self._resumed is None or not self._resumption.has_same_ranks else self._resumed["ranks"]
        return ranks[self._group.rank] if len(ranks) == self._group.world_size else None

    # -- an epoch ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def epoch(self, root: types.CodeType) -> Iterator[None]:
        """Around the call of the step.

        Args:
            root: The code of the function that calls it.
        """
        self._root, self._thread, self._why = root, threading.get_ident(), ""
        if self._resumed is not None:
            self._later = checkpoint.random_states(self._group.device, self._trained.loaders)
            # Without a part of its own, each rank as rank 0, which draws the order.
            began = (self._mine or self._resumed["ranks"][0])["began"]
            checkpoint.set_random_states(self._group.device, self._trained.loaders, began)
        self._began = checkpoint.random_states(self._group.device, self._trained.loaders)
        self._marks = _guarded(self._mark)
        self._buffers = {name: times_changed(buffer) for name, buffer in self._trained.model.named_buffers()}
        try:
            yield
        finally:
            # It holds the step's frames.
            self._variables = None

    def ends_epoch(self, *, is_last: bool) -> bool:
        """Whether a checkpoint is due now that an epoch has ended. All ranks call this."""
        if self._schedule is None:
            return False
        # The first epoch's end is worth one, however soon it comes: what ends later by an error has something to show.
        is_due = self._meet(is_busy=False) or is_last or not self._schedule.has_written
        if is_due:
            self._schedule.written(self._control.real_steps)
        return is_due

    def make(self, batches: Batches) -> None:
        """Called when an epoch's first pass is made, in which checkpoints are written."""
        self._variables = None
        if self._root is not None and (self._schedule is not None or self._resumed is not None):
            known = (*self._trained.parts(), *self._trained.data(), self._feed)
            self._variables = _guarded(lambda: Variables(self._root, known, batches))  # type: ignore[arg-type]

    def begin(self, batches: Batches) -> None:
        """Called when the step requests the first batch of that pass, whose data is at its position."""
        resumed, mine, self._resumed = self._resumed, self._mine, None
        if self._variables is not None:
            # Before they are set: what differs from this later has to be kept.
            _guarded(self._variables.begin)
        is_changed = self._marks is None or _guarded(self._mark) != self._marks
        if self._schedule is not None and resumed is None and is_changed:
            self._why = "changes weights or the optimizer's state before its loop"
        self._fields = _guarded(self._attributes)
        if resumed is not None:
            self._go_on(resumed, mine, batches)

    def _attributes(self) -> dict[tuple[int, str], Any]:
        """The modules' own numbers and tensors, such as a hidden state, which are in no `state_dict`."""
        found: dict[tuple[int, str], Any] = {}
        for part in self._trained.parts():
            if isinstance(part, torch.nn.Module):
                for name, value in vars(part).items():
                    if isinstance(value, bool | int | float | str) and name != "training":
                        found[id(part), name] = value
                    elif isinstance(value, torch.Tensor) and value.grad_fn is None:
                        found[id(part), name] = id(value), times_changed(value)
        return found

    def _mark(self) -> Any:
        """A mark of the weights and the optimizer's state that changes when they do."""
        tensors, states = self._trained.tensors().values(), self._trained.optimizer.state
        values = [value for one in tensors for value in states.get(one, {}).values()]
        return [(id(one), getattr(one, "_version", None)) for one in (*tensors, *values)]

    def _go_on(self, position: dict[str, Any], mine: dict[str, Any] | None, batches: Batches) -> None:
        """Undo what the step has done again on its way, and give it its own variables."""
        self._resumption.load_again()
        self._load_buffers(mine)
        if position["scheduler_stepped"]:
            self._control.scheduler_calls.add(id(self._trained.scheduler))
        is_there = all(self._group.gather(batches.items > 0 or not self._feed.reads))
        if not is_there:
            self._group.say(_FROM_ITS_START)
        elif mine is None:
            self._group.say(_ANEW)
        if mine is None or not is_there:
            checkpoint.set_random_states(self._group.device, self._trained.loaders, self._later)
            return
        checkpoint.set_random_states(self._group.device, self._trained.loaders, self._resumption.random)
        state = mine["variables"]
        variables = self._variables
        is_loaded = variables is not None and _guarded(lambda: variables.load(state)) is True
        if all(self._group.gather(is_loaded)):
            self._feed.samples = mine["fed"]
            if made := state["made"]:
                self._group.say(f"Not part of checkpoints, and made again by train_step: {', '.join(made)}.")
        else:
            self._group.say(_ANEW)

    # -- between two batches -------------------------------------------------------------------------------------------

    def meet_between(self, batches: Batches, *, left: bool = False) -> None:
        """Called when the step requests another batch, or has left the loop: the ranks may meet, and write a checkpoint."""
        portion = None if self._feed.pace is None else self._feed.pace.portion
        if self._schedule is None or portion is None or not self._strategy.saves_within_epochs:
            return
        if threading.get_ident() != self._thread:
            # The other thread may exchange something at this moment: ranks meet only in this one.
            self._why = "reads its loader in another thread"
            return
        steps = self._control.real_steps
        has_stepped, self._steps = steps != self._steps, steps
        gradients = self._gradients
        if gradients is not None and gradients.is_watching:
            self._gradients = None
            if _guarded(gradients.end) is not False:
                self._why = self._why or "does not clear gradients before each backward pass"
                self._gradients = _Gradients(self._trained.model)
        elif gradients is not None and has_stepped:
            _guarded(gradients.watch)
        if self._count < self._next or portion.last:
            return
        if self._feed.first is not batches:
            self._why = self._why or "makes another pass over its loader"
        is_busy = not has_stepped or self._strategy.has_pending or not self._strategy.is_settled
        if self._meet(is_busy=is_busy or gradients is not None or bool(self._why), left=left):
            self._save(batches)

    @property
    def _count(self) -> int:
        """Batches so far: a number that is equal in all ranks."""
        return 0 if self._feed.pace is None else self._feed.pace.batches

    def _meet(self, *, is_busy: bool, left: bool = False) -> bool:
        """Meet the other ranks; returns whether to write a checkpoint now.

        Raises:
            KaleDistError: Only some ranks have left the loop.
        """
        steps, now, count, schedule = self._control.real_steps, time.monotonic(), self._count, self._schedule
        if schedule is None:
            return False
        wanted = asked = ahead = 0
        if not self._group.rank:
            self.is_asked = context.is_asked_to_save() or self.is_asked
            wanted, asked = int(schedule.is_due(steps, self.writing)), int(self.is_asked)
            ahead = schedule.batches_ahead(steps, max(1, count - self._met[0]), now - self._met[1])
        numbers = [wanted, asked, ahead, int(is_busy), bool(self._why), int(left)]
        wanted, asked, ahead, busy, stuck, leaving = self._group.sum_int64(numbers)
        if leaving not in (0, self._group.world_size):
            raise KaleDistError(
                f"train_step left the loop over its loader on {leaving} of {self._group.world_size} ranks only. All ranks must"
                " take the same steps: decide on a value that is equal on all"
            )
        self._met, self.is_asked = (count, now), bool(asked)
        is_wanted = bool(wanted or asked)
        if is_wanted and stuck:
            self._say_why()
        is_waiting = is_wanted and (busy or leaving) and not stuck and self._tries < _TRIES
        self._tries = self._tries + 1 if is_waiting else 0
        self._next = count + (1 if is_waiting else ahead)
        return is_wanted and not busy and not leaving

    def _say_why(self) -> None:
        why = next(filter(None, self._group.gather(self._why)), "is elsewhere in another rank")
        self._group.say(f"train_step {why}: until the end of an epoch no checkpoint can be written.")

    def _save(self, batches: Batches) -> None:
        began, mine = time.monotonic(), None
        try:
            mine = self._position(batches)
        except Unkept as error:
            self._why = str(error)
        except Exception as error:  # noqa: BLE001 - looking at a step's variables may never fail a training
            self._why = f"has variables that cannot be looked at ({type(error).__name__}: {error})"
        if any(self._group.gather(bool(self._why))) or mine is None:
            self._say_why()
            self._why = self._why or "cannot be resumed by another rank"
            return
        common = {
            "batches": batches.index, "items": batches.items, "order": batches.order,
            "scheduler_stepped": id(self._trained.scheduler) in self._control.scheduler_calls,
        }  # fmt: skip
        self._write(common, mine)
        if self._schedule is not None:
            self._schedule.cost_s = time.monotonic() - began
            self._schedule.written(self._control.real_steps)

    def _position(self, batches: Batches) -> dict[str, Any]:
        """This rank's part of the position.

        Raises:
            Unkept: The step cannot go on here.
        """
        if batches.obstacle:
            raise Unkept(batches.obstacle)
        variables = self._variables
        if variables is None:
            raise Unkept("has variables that cannot be looked at")
        fields = self._attributes()
        if self._fields is None or (others := [key for key, value in fields.items() if self._fields.get(key) != value]):
            raise Unkept(
                f"uses a model that changes its {others[0][1] if self._fields is not None else 'fields'}, which is in no state_dict"
            )
        if changed := self._captured.changed():
            raise Unkept(
                f"changes {', '.join(changed)} outside of itself (state=[...] keeps what has a state_dict, lists and dicts)"
            )
        return {
            "began": self._began,
            "variables": variables.state(),
            "buffers": self._own_buffers(),
            "fed": self._feed.samples,
            "samples": batches.samples,
            "before": None if batches.before is None else checkpoint.packed(batches.before),
        }

    def _load_buffers(self, mine: dict[str, Any] | None) -> None:
        named = dict(self._trained.model.named_buffers())
        with torch.no_grad():
            for name, saved in () if mine is None else mine["buffers"].items():
                # A later call's model may lack a buffer that is in no `state_dict`.
                if name in named and named[name].shape == saved.shape:
                    named[name].copy_(saved)

    def _own_buffers(self) -> dict[str, Any]:
        """The buffers that differ between ranks until an epoch has ended, such as BatchNorm's, or that the step may reset."""
        found = {}
        for name, buffer in self._trained.model.named_buffers():
            is_plain = buffer.layout is torch.strided and not isinstance(buffer, DTensor)
            if is_plain and (buffer.numel() <= LARGE or times_changed(buffer) != self._buffers.get(name)):
                found[name] = buffer.detach().cpu().clone()
        if sum(one.nbytes for one in found.values()) > MOST_BYTES:
            raise Unkept("changes large buffers")
        return found


_FROM_ITS_START = (
    "The place in the epoch is not known with other data, another sampler or other ranks of a stream: the epoch begins again"
    " from its start, with the weights of the checkpoint."
)
_ANEW = (
    "train_step's own variables, such as counts and sums, begin again at this batch, as always with another step or other ranks: its"
    " metrics of this epoch are those of the batches from here on."
)


class _Gradients:
    """Sees in one batch whether gradients are added to those of the batch before, which a checkpoint does not hold."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._added: dict[int, torch.Tensor] = {}
        self.is_watching = False

    def watch(self) -> None:
        """Begin."""
        self.is_watching = True
        for parameter in self._model.parameters():
            if parameter.requires_grad and not torch.nn.parameter.is_lazy(parameter):
                hook = functools.partial(self._look, parameter)
                self._handles.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def _look(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        # Of several backward passes in a batch only the first one counts.
        if id(parameter) not in self._added:
            before = gradient.new_zeros(()) if parameter.grad is None else parameter.grad.detach()
            self._added[id(parameter)] = before.any()

    def end(self) -> bool:
        """End; returns whether gradients were added."""
        for handle in self._handles:
            handle.remove()
        return any(map(bool, self._added.values()))


def _guarded(call: Callable[[], Any]) -> Any:
    """Call what looks at a user's objects: it may never fail a training. None if it raised something."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - whatever it is, the caller then counts the step as one that cannot be resumed
        return None
