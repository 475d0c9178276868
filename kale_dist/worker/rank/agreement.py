"""What the ranks of a launched function agree on through the job's store: the step at which all of them save, and where they resume.

The agent asks each rank to save at another moment, and ranks that saved at once would save different steps. So they meet after a number of
steps that rank 0 has named at the meeting before, about every `MEET_S`, and there rank 0 says whether to save. Between meetings a step costs
one comparison.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from kale_dist.wire import context

MEET_S = 2.0
"""About how often ranks meet. Each meeting leaves some 60 bytes in the store."""

_LONGEST_LOOK_S = 0.02


class _Scope:
    """The function or cell that runs in this rank, and what its ranks have agreed on so far."""

    store: Any = None
    """The store of all ranks; None where they do not run the same."""
    name = ""
    answers = trainings = 0
    own: SaveAtOneStep | None = None
    """That of the user's loop."""
    can_save = False
    """Whether the agent knows of a training that saves."""


def begin(store: Any, name: str = "function") -> None:
    """A function or cell begins.

    Args:
        store: The store of all ranks; None if only some of them run it.
        name: Tells it from others in the same store.
    """
    end()
    _Scope.store, _Scope.name, _Scope.answers, _Scope.trainings, _Scope.own = store, name, 0, 0, None


def end() -> None:
    """It has ended, or the training that could save has: nobody needs to wait for it."""
    if _Scope.can_save:
        _Scope.can_save = False
        context.can_save(can=False)


def of_first(find: Callable[[], str]) -> str:
    """What a function returns in rank 0, in all ranks, which call this equally often; in each rank where they do not run the same."""
    if _Scope.store is None:
        return find()
    _Scope.answers += 1
    return _from_first(f"{_Scope.name}/answer {_Scope.answers}", find)


def _from_first(key: str, find: Callable[[], str]) -> str:
    if context.context().rank == 0:
        value = find()
        _Scope.store.set(key, value)
        return value
    look_s = 0.0005
    # The store's own wait could not be interrupted.
    while not _Scope.store.check([key]):
        time.sleep(look_s)
        look_s = min(2 * look_s, _LONGEST_LOOK_S)
    return str(_Scope.store.get(key).decode())


class SaveAtOneStep:
    """Finds the step after which the ranks of one training save because they have to leave.

    Args:
        is_alone: Whether this rank trains by itself. Otherwise all ranks of the job do.
    """

    def __init__(self, *, is_alone: bool) -> None:
        _Scope.trainings += not is_alone
        self.is_saving = False
        """Whether this rank has not finished the save that was due."""
        self._is_alone, self._prefix = is_alone, f"{_Scope.name}/training {_Scope.trainings}"
        self._steps = self._meeting = 0
        self._next = 1
        self._met = 0, time.monotonic()
        _Scope.can_save = True
        context.can_save()

    @classmethod
    def of(cls, world_size: int) -> SaveAtOneStep | None:
        """That of a training on so many ranks; None where nobody asks, or where only some ranks of the job train."""
        place = context.context()
        is_alone = world_size == 1
        is_together = world_size == place.world_size and _Scope.store is not None
        return cls(is_alone=is_alone) if place.in_job and (is_alone or is_together) else None

    def is_due(self) -> bool:
        """Called by all ranks after each step: whether they save now. All do at the same step."""
        self._steps += 1
        if self._steps < self._next:
            return False
        asked, ahead = int(context.is_asked_to_save()), self._ahead()
        if not self._is_alone:
            self._meeting += 1
            answer = _from_first(f"{self._prefix}/{self._meeting}", functools.partial("{} {}".format, asked, ahead))
            asked, ahead = (int(number) for number in answer.split())
        self._next = self._steps + ahead
        self.is_saving = bool(asked)
        return self.is_saving

    def _ahead(self) -> int:
        """How many steps they take until they meet again, as this rank sees it."""
        (before, met), now = self._met, time.monotonic()
        self._met = self._steps, now
        done, since_s = self._steps - before, now - met
        # The first steps may be slow (compilation): they meet again soon.
        return max(1, min(2 * done, round(MEET_S * done / since_s) if since_s > 0 else 1))

    def saved(self) -> None:
        """This rank has written all of its part: the agent may end it."""
        if self.is_saving:
            self.is_saving = False
            context.can_save(has_saved=True)


def leaving() -> bool:
    """Whether the ranks are about to be ended: save now. For a loop of your own in `launch`; call it in all ranks, once in each step.

    It is True in all ranks at the same step, at most 2 s (or a step, if that takes longer) after a cancel, `timeout_s`, or SIGTERM for one of
    the job's pods. Your next call, or the end of your function, says that the rank has saved; all have to within `grace_s`. It costs a
    comparison, and every 2 s a message to rank 0's machine. Outside a job, and in `distribute`, which writes a checkpoint by itself, it is False.

        for step, batch in enumerate(loader):
            ...
            if kd.leaving():
                save(step)
    """
    if _Scope.own is None and _Scope.store is not None:
        _Scope.own = SaveAtOneStep.of(context.context().world_size)
    if _Scope.own is None:
        return False
    _Scope.own.saved()
    return _Scope.own.is_due()
