"""The ranks of a pod that obeys the head: started, ended and let go as it says, and reported to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kale_dist.contract import EventKind, JobOrder
from kale_dist.errors import KaleDistError
from kale_dist.runtime.hang_watch import ANSWER_S
from kale_dist.runtime.job_run import EXIT_LIMIT_S
from kale_dist.runtime.local_ranks import LocalRanks
from kale_dist.runtime.member_protocol import Op
from kale_dist.runtime.pod_site import Site
from kale_dist.runtime.rank_run import RankRun

MOVES_EACH_S = 1.0
"""Progress is reported at most this often."""


class MemberRun:
    """Runs the ranks of one pod without judging them.

    Args:
        site: The pod.
        send: Sends a message to the head.
        ship: As for `LocalRanks`.
        on_gone: Called when no rank is left, if there were any.
    """

    def __init__(
        self,
        site: Site,
        send: Callable[[dict[str, Any]], None],
        ship: Callable[[RankRun], bool],
        on_gone: Callable[[], None],
    ) -> None:
        self._site = site
        self._send = send
        self._on_gone = on_gone
        self._ship = ship
        self._attempt: int | None = None
        self._refusal = ""
        self._event: dict[str, Any] | None = None
        self._moves_are_due = False
        self._is_ending = False
        self.local = self._make_ranks(site.job)

    def _make_ranks(self, order: JobOrder) -> LocalRanks:
        site = self._site
        return LocalRanks(
            order,
            site.loop,
            site.pool,
            site.writer,
            on_change=self._changed,
            on_move=self._moved,
            on_refusal=self._refuse,
            on_all_forked=lambda: None,
            ship=self._ship,
        )

    @property
    def is_gone(self) -> bool:
        """Whether no rank runs (any more), and every outcome is where it is wanted."""
        return all(rank.is_gone for rank in self.local.ranks)

    def take(self, message: dict[str, Any]) -> None:
        """Do what the head says."""
        match message.get("op"):
            case Op.START:
                self._start(int(message["attempt"]), int(message["seed"]), int(message["port"]))
            case Op.LET_GO:
                self.local.by_number(message["rank"]).let_go()
            case Op.TERMINATE:
                self._end_rank(self.local.by_number(message["rank"]))
            case Op.KILL:
                self.local.end()
                self.local.by_number(message["rank"]).kill()
            case Op.STACKS:
                self._answer_stacks(self.local.by_number(message["rank"]))

    def repeat(self) -> None:
        """The head has been away: say again all that is known."""
        if self._refusal:
            self._send({"op": Op.REFUSED, "reason": self._refusal})
        elif self._attempt is not None:
            for rank in self.local.ranks:
                self._report(rank)

    def end(self, grace_s: float) -> None:
        """End all ranks without being told to.

        Args:
            grace_s: Seconds from SIGTERM to SIGKILL.
        """
        self._is_ending = True
        self.local.end()
        for rank in self.local.ranks:
            if rank.done is not None:
                rank.let_go()
            else:
                rank.terminate()
        self._site.loop.call_later(grace_s, self._kill_unfinished)
        self._site.loop.call_later(max(grace_s, EXIT_LIMIT_S), self._kill)

    def _start(self, attempt: int, seed: int, port: int) -> None:
        """Start the ranks of an attempt; nothing if they were started already, as after a cut of the connection."""
        if self._is_ending or (self._attempt is not None and attempt <= self._attempt):
            return
        if self._attempt is not None:
            self.local.close()
        self._attempt = attempt
        self._event = None
        self._site.writer.begin_attempt(attempt)
        self.local = self._make_ranks(dataclasses.replace(self._site.job, attempt=attempt, master_port=port))
        try:
            self.local.start(seed)
        except (OSError, KaleDistError) as error:
            self._refuse(f"the ranks could not be started: {error}")

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._site.say(reason)
        self._send({"op": Op.REFUSED, "reason": reason})
        self.end(0.0)

    def _end_rank(self, rank: RankRun) -> None:
        self.local.end()
        rank.terminate()
        if rank.is_gone:
            # It had no process yet, so nothing else will tell of its end.
            self._changed(rank)

    def _kill_unfinished(self) -> None:
        for rank in self.local.ranks:
            if rank.done is None:
                rank.kill()

    def _kill(self) -> None:
        for rank in self.local.ranks:
            rank.kill()

    # -- what ranks do ----------------------------------------------------------------------------------------------

    def _changed(self, rank: RankRun) -> None:
        if self._is_ending and rank.done is not None and rank.end is None:
            rank.let_go()
        self._report(rank)
        if self.is_gone:
            self.local.close()
            self._on_gone()

    def _report(self, rank: RankRun) -> None:
        self._send(
            {
                "op": Op.RANK,
                "attempt": rank.attempt,
                "rank": rank.rank,
                "state": str(rank.state),
                "pid": rank.pid,
                "done": rank.done,
                "end": None if rank.end is None else dataclasses.asdict(rank.end),
                "gone": rank.is_gone,
                "tail": rank.tail if rank.end is not None else [],
            }
        )

    def _moved(self, _rank: RankRun, event: dict[str, Any] | None) -> None:
        if event is not None and event.get("event") == EventKind.PROGRESS:
            self._event = {name: event.get(name) for name in ("event", "epoch", "step")}
        if not self._moves_are_due:
            self._moves_are_due = True
            self._site.loop.call_later(MOVES_EACH_S, self._report_moves)

    def _report_moves(self) -> None:
        self._moves_are_due = False
        event, self._event = self._event, None
        moves = {str(rank.rank): rank.moves for rank in self.local.ranks}
        self._send({"op": Op.MOVED, "attempt": self._attempt, "moves": moves, "event": event})

    def _answer_stacks(self, rank: RankRun) -> None:
        rank.ask_stacks()

        def answer() -> None:
            self._send(
                {
                    "op": Op.STACKS,
                    "attempt": rank.attempt,
                    "rank": rank.rank,
                    "stacks": rank.stacks.decode("utf-8", "surrogateescape"),
                    "cpu_ticks": rank.sample().cpu_ticks,
                    "moves": rank.moves,
                }
            )

        self._site.loop.call_later(ANSWER_S, answer)
