"""The protocol that every backend keeps, and the values it speaks in. No third-party import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, Self, runtime_checkable

from kale_dist.contract import LogLine
from kale_dist.errors import ConfigError
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus


@dataclasses.dataclass(frozen=True, slots=True)
class JobRef:
    """Names a job everywhere: `local://name`, `kubernetes://namespace/name`."""

    backend: str
    name: str
    """With the namespace in front where the backend has namespaces."""

    def __str__(self) -> str:
        """The form that `attach` takes."""
        return f"{self.backend}://{self.name}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str()`. A bare name is a job of the local backend.

        Raises:
            ConfigError: The text is empty or has no name.
        """
        backend, separator, name = text.rpartition("://")
        if not name or (separator and not backend):
            raise ConfigError(
                "ref", f"{text!r} does not name a job", "Write it as 'local://name'; see kale_dist.jobs()"
            )
        return cls(backend or "local", name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Exactly what `submit` would send. Same spec, same plan."""

    backend: str
    spec: JobSpec
    text: str
    """What is submitted, for people: YAML, or command lines."""

    def __str__(self) -> str:
        """The text."""
        return self.text


@runtime_checkable
class Backend(Protocol):
    """How a job runs: plans, submits, watches, reads logs, cancels.

    Results travel through the store and images are resolved before; waiting belongs to `watch`.
    """

    @property
    def name(self) -> str:
        """The word that `on=` takes."""

    def plan(self, spec: JobSpec) -> Plan:
        """The request for a spec. Pure: reads no clock, no environment, no disk."""

    def submit(self, plan: Plan, key: bytes) -> JobRef:
        """Start a job and return at once.

        Args:
            plan: From `plan`.
            key: The job's 32 secret bytes, which sign its outcomes.

        Raises:
            JobExistsError: A job of this name is there.
            BackendUnavailableError: Nothing can be started there.
        """

    def status(self, ref: JobRef) -> JobStatus:
        """What is known now.

        Raises:
            JobNotFoundError: No such job.
        """

    def logs(
        self, ref: JobRef, *, follow: bool = False, ranks: Sequence[int] | None = None, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Lines of the log; with `follow` until the job has ended.

        Args:
            ref: The job.
            follow: Whether to wait for more lines while the job runs.
            ranks: Only these ranks' lines (and no lines of the agent); None for all.
            tail: Only the last lines of those there are now, this many, and with `follow` all later ones; None for
                all from the first.

        Raises:
            JobNotFoundError: No such job.
        """

    def cancel(self, ref: JobRef, *, grace_s: float = 5.0) -> None:
        """End a job: SIGTERM, then SIGKILL after `grace_s`. A job that has ended is left as it is.

        Raises:
            JobNotFoundError: No such job.
        """

    def delete(self, ref: JobRef) -> None:
        """Cancel if need be, then remove every trace.

        Raises:
            JobNotFoundError: No such job.
        """

    def list(self) -> Sequence[JobRef]:
        """All jobs there are, oldest first."""


@runtime_checkable
class Wakes(Protocol):
    """A backend that can tell at once when a job has changed. Others are asked again and again by `watch`."""

    def listen(self, callback: Callable[[JobRef], None]) -> None:
        """Call `callback` from a thread of the backend's own whenever a job may have changed. It must be quick."""


@runtime_checkable
class WarmsUp(Protocol):
    """A backend that gains from hearing of a call before its snapshot is taken."""

    def warm_up(self) -> None:
        """Begin to get ready, in the background.

        Raises:
            BackendUnavailableError: There is no way to get ready.
        """
