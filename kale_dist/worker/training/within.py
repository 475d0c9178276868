"""Checkpoints within an epoch: when they are written, what a resumption needs besides the states, and how an epoch goes on.

Ranks meet after a number of batches that rank 0 has named at the meeting before, about every `MEET_S`. Between meetings a batch
costs one comparison. At a meeting rank 0 decides whether a checkpoint is due: by the clock, by its steps, or because the agent asks.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from kale_dist import wording
from kale_dist.errors import KaleDistError
from kale_dist.snapshot.identity import times_changed
from kale_dist.wire import context
from kale_dist.worker.training.checkpoint import Writing
from kale_dist.worker.training.contents import Position, RankPosition
from kale_dist.worker.training.data.batches import Batches, Feed
from kale_dist.worker.training.data.generators import GlobalStates, RandomStates
from kale_dist.worker.training.notices import STOPPED
from kale_dist.worker.training.optimizer import OptimizerControl
from kale_dist.worker.training.rank_group import LARGE, Group, buffers_of
from kale_dist.worker.training.resumption import Resumption
from kale_dist.worker.training.strategy import Strategy
from kale_dist.worker.training.supervised import Totals
from kale_dist.worker.training.trained import Trained

MEET_S = 2.0
"""About how often ranks meet."""

SHARE = 0.01
"""The share of the time that checkpoints of `auto` may take."""

SOONEST_S, LATEST_S = 2.0, 600.0
"""The shortest and the longest time between two checkpoints of `auto`."""

_MOST_BYTES = 64 << 20
"""Larger buffers of a rank's own are in no checkpoint within an epoch: all ranks exchange them."""

_TRIES = 256
"""How many batches in a row ranks wait for a moment at which a checkpoint can be written; then they meet as usual."""


class Schedule:
    """When ranks meet, and when a checkpoint is due, as rank 0 decides.

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
        self.next = 1
        """The number of batches at which ranks meet."""
        self._tries = 0
        self._met = 0, time.monotonic()

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

    def batches_ahead(self, steps: int, count: int) -> int:
        """How many batches ranks take before they meet again; called at a meeting, in rank 0.

        Args:
            steps: Real steps so far.
            count: Batches so far.
        """
        (before, met), now = self._met, time.monotonic()
        done, since_s, self._met = max(1, count - before), now - met, (count, now)
        meet_s = min(MEET_S, self._amount) if self._unit == "s" else MEET_S
        # At first a batch may be slow (compilation, the first files): they meet again soon.
        ahead = max(1, min(2 * done, round(meet_s * done / since_s) if since_s > 0 else 1))
        return max(1, min(ahead, int(self._amount) - (steps - self._steps))) if self._unit == "steps" else ahead

    def meet_after(self, count: int, ahead: int, *, is_waiting: bool) -> None:
        """Set when ranks meet again.

        Args:
            count: Batches so far.
            ahead: Batches until then.
            is_waiting: Whether they meet after the next batch instead, and wait for a moment at which a checkpoint can be written.
        """
        is_waiting = is_waiting and self._tries < _TRIES
        self._tries = self._tries + 1 if is_waiting else 0
        self.next = count + (1 if is_waiting else ahead)

    def written(self, steps: int) -> None:
        """A checkpoint was written after so many steps."""
        self._at, self._steps, self.has_written = time.monotonic(), steps, True


@dataclasses.dataclass(kw_only=True, slots=True)
class _Epoch:
    """Notes of this rank at the beginning of an epoch, for the checkpoints within it."""

    sums: Totals | None
    """The sums of the ready-made step; None with a step of the user's."""
    restored: RandomStates
    """This rank's generators before they were set to draw the order of the epoch."""
    began: RandomStates
    """This rank's generators when the step is called."""
    marks: list[Any]
    """Marks of the weights and of the optimizer's state."""
    buffers: dict[str, int | None]
    """How often each buffer was changed."""
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    why: str = ""
    """Why no checkpoint can be written in this epoch, as the end of a sentence about the step; empty if one can."""


class Within:
    """The checkpoints within the epochs of one training, in a rank with data.

    Args:
        every: `checkpoint_every` of the call. No text: no checkpoint is written within epochs.
        trained: The objects that are trained.
        group: The ranks with data.
        strategy: Prepared.
        resumption: What the training has resumed from.
        control: Counts steps.
        feed: Of the training loader.
        write: Writes a checkpoint in all ranks, of all ranks' and this rank's position.
        stops: Whether the training is to stop because of this rank's loss.
    """

    _epoch: _Epoch

    def __init__(
        self,
        every: int | str | None,
        trained: Trained,
        group: Group,
        strategy: Strategy,
        resumption: Resumption,
        control: OptimizerControl,
        feed: Feed,
        write: Callable[[Position, RankPosition], None],
        stops: Callable[[], bool],
    ) -> None:
        self._trained, self._group, self._strategy, self._resumption = trained, group, strategy, resumption
        self._control, self._feed, self._write, self._stops = control, feed, write, stops
        self._steps = control.real_steps
        has_files = context.context().files is not None
        self._schedule = Schedule(every, self._steps) if isinstance(every, str) and has_files else None
        self.writing = Writing()
        self.is_asked = False
        """Whether the agent has asked for the checkpoint that is being written."""
        self._resumed = self._resumption.progress.position
        mine = self._mine
        self._load_buffers(mine)
        # A known order has a place for ranks of any number and batches of any size; the batches of a stream are only counted.
        has_place = mine is not None and self._resumption.differences.has_same_batches
        if self._resumed is not None and (self._resumed.order or has_place):
            feed.start, feed.mine = self._resumed, mine
        feed.within = self
        if self._schedule is not None and not self._group.rank and self._strategy.saves_within_epochs:
            context.can_save(resumes=True)

    @property
    def _mine(self) -> RankPosition | None:
        """This rank's part of the position, where the training has resumed with as many ranks and the same strategy."""
        ranks = () if self._resumed is None or not self._resumption.differences.has_same_ranks else self._resumed.ranks
        return ranks[self._group.rank] if len(ranks) == self._group.world_size else None

    # -- an epoch ------------------------------------------------------------------------------------------------------

    def begin_epoch(self, sums: Totals | None) -> None:
        """Called before the step.

        Args:
            sums: What the ready-made step adds up; None with a step of the user's.
        """
        device, loaders = self._group.device, self._trained.loaders
        restored = began = RandomStates.now(device, loaders)
        if self._resumed is not None:
            # Without a part of its own, each rank as rank 0, which draws the order.
            (self._mine or self._resumed.ranks[0]).began.restore(device, loaders)
            began = RandomStates.now(device, loaders)
        self._epoch = _Epoch(
            sums=sums,
            restored=restored,
            began=began,
            marks=[] if self._schedule is None else self._mark(),
            buffers={name: _changes(buffer) for name, buffer in buffers_of(self._trained).items()},
        )

    def ends_epoch(self, *, is_last: bool) -> bool:
        """Whether a checkpoint is due now that an epoch has ended. All ranks call this."""
        if self._schedule is None:
            return False
        # The first epoch's end is worth one, however soon it comes: what ends later by an error has something to show.
        is_due = self._meet(is_busy=False) or is_last or not self._schedule.has_written
        if is_due:
            self._schedule.written(self._control.real_steps)
        return is_due

    def begin(self, batches: Batches) -> None:
        """Called when the step requests the first batch of the epoch's first pass, whose data is at its position."""
        resumed, mine, self._resumed = self._resumed, self._mine, None
        if self._schedule is not None and self._mark() != self._epoch.marks:
            self._epoch.why = "changes weights or the optimizer's state before its loop"
        if resumed is not None:
            self._go_on(resumed, mine, batches)

    def pass_again(self) -> None:
        """Called when the step asks its loader for another iterator in the same epoch."""
        self._epoch.why = "makes another pass over its loader"

    def _mark(self) -> list[Any]:
        """A mark of the weights and the optimizer's state that changes when they do."""
        tensors, states = self._trained.tensors().values(), self._trained.optimizer.state
        kept = (states.get(one) for one in tensors)
        values = [value for state in kept if isinstance(state, dict) for value in state.values()]
        return [(id(one), _changes(one)) for one in (*tensors, *values)]

    def _go_on(self, position: Position, mine: RankPosition | None, batches: Batches) -> None:
        """Undo what the step has done again on its way to its loop."""
        self._resumption.load_again()
        self._load_buffers(mine)
        if position.scheduler_stepped:
            self._control.scheduler_calls.add(id(self._trained.scheduler))
        is_there = all(self._group.gather(batches.items > 0 or not self._feed.role.reads))
        is_same = mine is not None and is_there
        restored = self._resumption.random if is_same else self._epoch.restored
        restored.restore(self._group.device, self._trained.loaders)
        if not is_there:
            batches.begin_again()
            self._group.log(_FROM_ITS_START)
        elif mine is not None and mine.sums is not None and self._epoch.sums is not None:
            self._epoch.sums.load(mine.sums)
            self._feed.counts.samples = mine.samples
        else:
            counts = self._feed.counts
            counts.from_batch = batches.index + 1
            self._group.log(_ANEW.format(counts.from_batch, counts.epoch), warns=True)

    # -- between two batches -------------------------------------------------------------------------------------------

    def meet_between(self, batches: Batches, *, left: bool = False) -> None:
        """Called when the step requests another batch, or has left the loop: the ranks may meet, and write a checkpoint."""
        portion, schedule = self._feed.role.portion, self._schedule
        if schedule is None or portion is None or not self._strategy.saves_within_epochs:
            return
        if threading.get_ident() != self._epoch.thread:
            # The other thread may exchange something at this moment: ranks meet only in this one.
            self._epoch.why = "reads its loader in another thread"
            return
        steps = self._control.real_steps
        has_stepped, self._steps = steps != self._steps, steps
        if self._count < schedule.next or portion.last:
            return
        is_busy = not has_stepped or self._strategy.has_pending or not self._strategy.is_settled
        if self._meet(is_busy=is_busy or bool(self._epoch.why), left=left):
            self._save(batches)

    @property
    def _count(self) -> int:
        """Batches so far: a number that is equal in all ranks."""
        return 0 if self._feed.role.pace is None else self._feed.role.pace.batches

    def _meet(self, *, is_busy: bool, left: bool = False) -> bool:
        """Meet the other ranks; returns whether to write a checkpoint now.

        Raises:
            KaleDistError: Only some ranks have left the loop, or the loss is nan and was not to be.
        """
        steps, count, schedule = self._control.real_steps, self._count, self._schedule
        if schedule is None:
            return False
        wanted = asked = ahead = 0
        if not self._group.rank:
            self.is_asked = context.is_asked_to_save() or self.is_asked
            wanted, asked = int(schedule.is_due(steps, self.writing)), int(self.is_asked)
            ahead = schedule.batches_ahead(steps, count)
        numbers = [wanted, asked, ahead, int(is_busy), bool(self._epoch.why), int(left), int(self._stops())]
        wanted, asked, ahead, busy, stuck, leaving, stops = self._group.sum_int64(numbers)
        if stops:
            raise KaleDistError(STOPPED)
        if leaving not in (0, self._group.world_size):
            raise KaleDistError(
                f"train_step left the loop over its loader on {leaving} of {self._group.world_size} ranks only. All ranks must"
                " take the same steps: decide on a value that is equal on all"
            )
        self.is_asked = bool(asked)
        is_wanted = bool(wanted or asked)
        if is_wanted and stuck:
            self._log_why()
        schedule.meet_after(count, ahead, is_waiting=is_wanted and bool(busy or leaving) and not stuck)
        return is_wanted and not busy and not leaving

    def _log_why(self) -> None:
        why = next(filter(None, self._group.gather(self._epoch.why)), "is elsewhere in another rank")
        self._group.log(f"train_step {why}: until the end of an epoch no checkpoint can be written.")

    def _save(self, batches: Batches) -> None:
        began, buffers, epoch = time.monotonic(), self._own_buffers(), self._epoch
        if sum(one.nbytes for one in buffers.values()) > _MOST_BYTES:
            epoch.why = "changes large buffers"
        epoch.why = epoch.why or batches.obstacle
        if any(self._group.gather(bool(epoch.why))):
            self._log_why()
            epoch.why = epoch.why or "cannot be resumed by another rank"
            return
        position = Position(
            batches=batches.index,
            items=batches.items,
            order=batches.order,
            scheduler_stepped=id(self._trained.scheduler) in self._control.scheduler_calls,
        )
        mine = RankPosition(
            began=epoch.began,
            buffers=buffers,
            samples=batches.samples,
            before=None if batches.before is None else GlobalStates.of(batches.before),
            sums=None if epoch.sums is None else epoch.sums.state(),
        )
        self._write(position, mine)
        if self._schedule is not None:
            self._schedule.cost_s = time.monotonic() - began
            self._schedule.written(self._control.real_steps)

    def _load_buffers(self, mine: RankPosition | None) -> None:
        named = buffers_of(self._trained)
        with torch.no_grad():
            for name, saved in () if mine is None else mine.buffers.items():
                # A later call's model may lack a buffer that is in no `state_dict`.
                if name in named and named[name].shape == saved.shape:
                    named[name].copy_(saved)

    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that differ between ranks until an epoch has ended, such as BatchNorm's, or that the step may reset."""
        found = {}
        for name, buffer in buffers_of(self._trained).items():
            is_plain = buffer.layout is torch.strided and not isinstance(buffer, DTensor)
            if is_plain and (buffer.numel() <= LARGE or _changes(buffer) != self._epoch.buffers.get(name)):
                found[name] = buffer.detach().cpu().clone()
        return found


def _changes(value: Any) -> int | None:
    """How often a tensor was changed in place; None for one of inference mode, which does not count, and for what is no tensor."""
    try:
        return times_changed(value)
    except (RuntimeError, AttributeError):
        return None


_FROM_ITS_START = (
    "The place in the epoch is not known with other data, another sampler or other ranks of a stream: the epoch begins again"
    " from its start, with the weights of the checkpoint."
)
_ANEW = (
    "train_step is called again with the batches from {} on, and its own variables begin again: its metrics of epoch {} are of these"
    " batches only."
)
