"""What the ranks of a launched function agree on through the job's store: the step at which all of them save, and where they resume.

The agent asks each rank to save at another moment, and ranks that saved at once would save different steps. So they meet after a number of
steps that rank 0 has named at the meeting before, about every `MEET_S`, and there rank 0 says whether to save. Between meetings a step costs
one comparison.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from kale_dist.wire import context

MEET_S = 1.0
"""About how often ranks meet. Each meeting leaves some 60 bytes in the store."""

_MOST_AHEAD = 100
"""Steps from one meeting to the next at most: they may become slower."""

_LONGEST_LOOK_S = 0.02


class _Scope:
    """The function or cell that runs in this rank, and what its ranks have agreed on so far."""

    store: Any = None
    """The store of all ranks; None where they do not run the same."""
    name = ""
    answers = trainings = 0
    """How many answers and trainings of all ranks there were."""
    saves = 0
    """How many saves were asked for, as far as this rank knows."""
    savers: tuple[SaveAtOneStep, ...] = ()
    """The trainings that save."""
    own: SaveAtOneStep | None = None
    """The user's own loop, registered by `kd.leaving()`."""


def begin(store: Any, name: str = "function") -> None:
    """A function or cell begins.

    Args:
        store: The store of all ranks; None if only some of them run it.
        name: Tells it from others in the same store.
    """
    _Scope.store, _Scope.name, _Scope.answers, _Scope.trainings, _Scope.saves = store, name, 0, 0, 0


def end() -> None:
    """It has ended: nobody needs to wait for this rank."""
    for one in _Scope.savers:
        one.end()
    _end_for_others(_Scope.name)
    _Scope.store = _Scope.own = None


def of_first(find: Callable[[], str]) -> str:
    """What a function returns in rank 0, in all ranks, which call this equally often; in each rank where they do not run the same."""
    if _Scope.store is None:
        return find()
    _Scope.answers += 1
    found = _from_first(f"{_Scope.name}/answer {_Scope.answers}", _Scope.name, find)
    return find() if found is None else found


def _from_first(key: str, what: str, find: Callable[[], str]) -> str | None:
    """What a function returns in rank 0, by a key; None in others once that of which it is a part has ended in rank 0."""
    if context.context().rank == 0:
        value = find()
        _Scope.store.set(key, value)
        return value
    look_s = 0.0005
    # The store's own wait could not be interrupted.
    while not _Scope.store.check([key]):
        if any(_Scope.store.check([f"{one}/end"]) for one in (what, _Scope.name)):
            return None
        time.sleep(look_s)
        look_s = min(2 * look_s, _LONGEST_LOOK_S)
    return str(_Scope.store.get(key).decode())


def _end_for_others(what: str) -> None:
    if context.context().rank == 0 and _Scope.store is not None:
        # The connection may be what has ended.
        with contextlib.suppress(RuntimeError):
            _Scope.store.set(f"{what}/end", "")


class SaveAtOneStep:
    """Finds the step after which the ranks of one training save because they have to leave.

    Args:
        is_alone: Whether this rank trains by itself. Otherwise all ranks of the job do.
        is_in_step: Whether no rank can take a step before the training has begun in rank 0, unless rank 0 leaves it out.
    """

    def __init__(self, *, is_alone: bool, is_in_step: bool) -> None:
        _Scope.trainings += not is_alone
        self.is_saving = False
        """Whether this rank has not finished the save that was due."""
        self._is_first = is_alone or context.context().rank == 0
        self._is_alone, self._name = is_alone, f"{_Scope.name}/training {_Scope.trainings}"
        self._may_lack_first = is_in_step and not self._is_first
        self.served = _Scope.saves
        """How many of the saves that were asked for have been due."""
        self._steps = self._meeting = 0
        self._next = 1
        self._met = 0, time.monotonic()
        if self._is_first and not is_alone:
            _Scope.store.set(f"{self._name}/begin", "")
        _Scope.savers += (self,)
        context.can_save()

    @classmethod
    def of(cls, world_size: int, *, is_in_step: bool = True) -> SaveAtOneStep | None:
        """The saver of a training on so many ranks; None if no agent asks for checkpoints, or only some ranks of the job train."""
        place = context.context()
        is_alone = world_size == 1
        if not place.in_job or not (is_alone or (world_size == place.world_size and _Scope.store is not None)):
            return None
        return cls(is_alone=is_alone, is_in_step=is_in_step)

    def is_due(self) -> bool:
        """Called by all ranks after each step: whether they save now. All do at the same step."""
        self._steps += 1
        if self._steps < self._next:
            return False
        _Scope.saves += self._is_first and context.is_asked_to_save()
        asked, ahead = int(_Scope.saves > self.served), self._ahead()
        if not self._is_alone:
            asked, ahead = self._meet(asked, ahead)
        self._next = self._steps + ahead
        self.served += asked
        _Scope.saves = max(_Scope.saves, self.served)
        self.is_saving = self.is_saving or bool(asked)
        return bool(asked)

    def _meet(self, asked: int, ahead: int) -> tuple[int, int]:
        """What rank 0 says: whether they save now, and after how many steps they meet again."""
        if self._may_lack_first and not _Scope.store.check([f"{self._name}/begin"]):
            self.end()
            context.log("The training of rank 0 keeps no checkpoints: this rank does not save before it is ended")
            return 0, sys.maxsize
        self._may_lack_first = False
        self._meeting += 1
        answer = _from_first(f"{self._name}/{self._meeting}", self._name, lambda: f"{asked} {ahead}")
        if answer is None:
            self.end()
            return 0, sys.maxsize
        asked, ahead = (int(number) for number in answer.split())
        return asked, ahead

    def _ahead(self) -> int:
        """How many steps they take until they meet again, as this rank sees it."""
        (before, met), now = self._met, time.monotonic()
        self._met = self._steps, now
        done, since_s = self._steps - before, now - met
        # The first steps may be slow (compilation): they meet again soon.
        ahead = round(MEET_S * done / since_s) if since_s > 0 else 1
        return max(1, min(2 * done, ahead, _MOST_AHEAD))

    def saved(self) -> None:
        """This rank has written all of its part. Once its other trainings have, too, the agent may end it."""
        if self.is_saving:
            self.is_saving = False
            if all(one.served >= _Scope.saves and not one.is_saving for one in _Scope.savers):
                context.can_save(has_saved=True)

    def end(self) -> None:
        """The training is over."""
        if self in _Scope.savers:
            _Scope.savers = tuple(one for one in _Scope.savers if one is not self)
            if not self._is_alone:
                _end_for_others(self._name)
            if not _Scope.savers:
                context.can_save(can=False)


def leaving() -> bool:
    """Whether the ranks are about to be ended: save now. For a loop of your own in `launch`; call it in all ranks, once in each step.

    It is True in all ranks at the same step, about a second after a cancel, `timeout_s`, or SIGTERM for one of the job's pods; later if steps
    take longer, or have become much slower. Your next call, or the end of your function, says that the rank has saved; all have to within
    `grace_s`. Go on, or return: an exit code is taken for a failure. It costs a comparison, and every second a message to rank 0's machine::

        for step, batch in enumerate(loader):
            ...
            if kd.leaving():
                save(step)

    Outside a job, in a cell that only some ranks run, without PyTorch, and in `distribute`, which writes a checkpoint by itself, it is False.
    """
    if _Scope.own is None and _Scope.store is not None:
        _Scope.own = SaveAtOneStep.of(context.context().world_size, is_in_step=False)
    if _Scope.own is None:
        return False
    _Scope.own.saved()
    return _Scope.own.is_due()
