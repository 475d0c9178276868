"""A rank that another pod's agent runs, as the head sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kale_dist.contract import RankStateName
from kale_dist.runtime.fork_pool import End
from kale_dist.runtime.member_protocol import Op
from kale_dist.runtime.watchdog import Sample, parse_main_thread


class RemoteRank:
    """What was said of a rank, and what was asked of it.

    Args:
        rank: The rank.
        send: Sends a message to its agent; nothing if there is no connection now.
        on_change: Called when its `state`, `done`, `end` or `is_gone` has changed.
    """

    def __init__(
        self, rank: int, send: Callable[[dict[str, Any]], None], on_change: Callable[[RemoteRank], None]
    ) -> None:
        self.rank = rank
        self._send = send
        self._on_change = on_change
        self._forget()

    def _forget(self) -> None:
        """Know nothing of it."""
        self.state = RankStateName.PENDING
        self.done: dict[str, Any] | None = None
        """Its own account of how the call went, once the outcome is written."""
        self.end: End | None = None
        """How its process ended."""
        self.pid = 0
        self.tail: list[str] = []
        """Its last lines of output, once it has ended."""
        self.moves = 0
        self.stacks = b""
        """The answer to `ask_stacks`; empty if there is none."""
        self._is_started = False
        self._is_over = False
        self._wishes: dict[str, None] = {}
        self._cpu_ticks = 0

    @property
    def is_gone(self) -> bool:
        """Whether nothing more will come of it: it has ended and its outcome is where it is wanted."""
        return self._is_over or not self._is_started

    def started(self) -> None:
        """Its agent was told to start it, for the first time or anew."""
        self._forget()
        self._is_started = True

    def take(self, message: dict[str, Any]) -> None:
        """Take what its agent says of it.

        Raises:
            KeyError, TypeError, ValueError: The message is not one of this version's.
        """
        state, done, end = RankStateName(message["state"]), message["done"], message["end"]
        before = (self.state, self.done, self.end, self._is_over)
        self.state, self.pid, self.tail = state, int(message["pid"]), [str(line) for line in message["tail"]]
        if done is not None:
            self.done = {"ok": bool(done["ok"]), **{name: done[name] for name in _DONE if name in done}}
        self.end = None if end is None else End(**end)
        self._is_over = bool(message["gone"])
        if before != (self.state, self.done, self.end, self._is_over):
            self._on_change(self)

    def take_stacks(self, message: dict[str, Any]) -> None:
        """Take the answer to `ask_stacks`."""
        self.stacks = str(message["stacks"]).encode("utf-8", "surrogateescape")
        self._cpu_ticks, self.moves = int(message["cpu_ticks"]), int(message["moves"])

    def lose(self, reason: str) -> None:
        """Its agent is lost, and the rank with it.

        Args:
            reason: What there is to say about it, for a rank that has not ended before.
        """
        self._is_over = True
        self.end = self.end or End(reason=reason)
        self._on_change(self)

    def repeat(self) -> None:
        """Say again what is wanted of it: its agent has connected anew."""
        for wish in self._wishes:
            self._send({"op": wish, "rank": self.rank})

    def ask_stacks(self) -> None:
        """Ask for the stacks; `stacks` and `sample` have the answer a moment later."""
        self.stacks = b""
        self._send({"op": Op.STACKS, "rank": self.rank})

    def sample(self) -> Sample:
        """What the answer to `ask_stacks` shows."""
        return Sample(frames=parse_main_thread(self.stacks), cpu_ticks=self._cpu_ticks, moves=self.moves)

    def let_go(self) -> None:
        """Tell a rank that is done to end."""
        self._wish(Op.LET_GO)

    def terminate(self) -> None:
        """End a rank that is at work; it may still clean up."""
        self._wish(Op.TERMINATE)

    def kill(self) -> None:
        """End it at once."""
        self._wish(Op.KILL)

    def _wish(self, op: Op) -> None:
        if self._is_started and self.end is None:
            self._wishes[op] = None
            self._send({"op": op, "rank": self.rank})


_DONE = ("error_type", "error_text", "not_started")
