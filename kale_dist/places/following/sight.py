"""What a place reports about a job, look by look, and how long it has reported the same."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kale_dist.errors import BackendError
from kale_dist.job.backend import Look, Place, PlacedJob
from kale_dist.places.following.copy import FollowerClock

LOOK_S = 1.0
"""How often a follower looks at a place that reports no change."""


class Sight:
    """The last report of a place about a job.

    Args:
        place: Where the job is.
        clock: The follower's.
        on_change: Called when there is another report.
    """

    def __init__(self, place: Place, clock: FollowerClock, on_change: Callable[[], None]) -> None:
        self.look = Look(fresh=False)
        """The report."""
        self.problem = ""
        """Why the place does not answer, as a sentence."""
        self.has_looked = threading.Event()
        """Whether the first status of the job need not wait any longer."""
        self.is_over = False
        """Whether the follower ends the job unless its head runs: the first status then waits for that."""
        self._place = place
        self._clock = clock
        self._on_change = on_change
        self._seen_s: dict[str, float] = {}
        self._looked_at = clock.monotonic()
        self._between_looks_s = 0.0

    @property
    def head_runs(self) -> bool:
        """Whether the head can be asked."""
        return self.look.head is not None and self.look.head.state == "running"

    def take(self, handle: PlacedJob) -> None:
        """Ask the place once more."""
        now = self._clock.monotonic()
        self._looked_at, self._between_looks_s = now, min(now - self._looked_at, 2 * LOOK_S)
        before = self.look, self.problem
        try:
            self.look, self.problem = self._place.look(handle), ""
        except BackendError as error:
            self.problem = f"{error}"
        has_ended = self.look.head is not None and self.look.head.state == "ended"
        self.is_over = self.is_over or self.look.is_over_unheard
        ends = has_ended or (self.is_over and not self.head_runs and not self.look.suspended)
        # What a head that runs has is read first.
        if self.problem or (self.look.fresh and not ends and not self.head_runs):
            self.has_looked.set()
        if (self.look, self.problem) != before:
            self._on_change()

    def lasts(self, name: str, seconds: float, *, seen: bool = True) -> bool:
        """Count how long a condition has been seen at every look; called at every look.

        Time in which this machine slept does not count.

        Returns:
            Whether that is `seconds` or more.
        """
        if not seen:
            self._seen_s.pop(name, None)
            return False
        self._seen_s[name] = self._seen_s.get(name, -self._between_looks_s) + self._between_looks_s
        return self._seen_s[name] >= seconds

    def forget(self) -> None:
        """Begin anew with another head."""
        self.look = Look(fresh=False)
        self._seen_s.clear()
