"""The protocol that every backend keeps, and the values it speaks in. No third-party import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    @property
    def record_name(self) -> str:
        """The name of its record and folder on this machine: `name`, `kubernetes.namespace.name`."""
        return self.name if self.backend == "local" else f"{self.backend}.{self.name.replace('/', '.')}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str()`. A bare name is a job of the local backend.

        Raises:
            ConfigError: The text is empty or has no name, or is that of a record of another backend.
        """
        backend, separator, name = text.rpartition("://")
        if not name or (separator and not backend) or (backend in ("", "local") and "." in name and "/" not in name):
            remedy = "Write it as 'local://name' or 'kubernetes://namespace/name'; see kale_dist.jobs()"
            raise ConfigError("ref", f"{text!r} does not name a job", remedy)
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


@runtime_checkable
class Prepares(Protocol):
    """A backend that has to look at where a job will run before it can plan it."""

    def prepare(self, spec: JobSpec, *, submit: bool) -> JobSpec:
        """Settle what the specification leaves open, and look whether the job could run.

        Args:
            spec: As the call gave it.
            submit: Whether a submission follows. Otherwise what cannot be reached is left open.

        Returns:
            The specification of which `plan` makes a request.

        Raises:
            ConfigError: Something is left open that only the user can settle.
            BackendError: The job could not run there; the message says why.
        """


@runtime_checkable
class Adopts(Protocol):
    """A backend whose jobs can be found from machines that have no record of them."""

    def adopt(self, ref: JobRef, *, trust: bool) -> JobRef:
        """Make a record on this machine of a job that was submitted from another one.

        Args:
            ref: The job; a namespace that is left out is the configured one.
            trust: Whether results may be loaded although another user submitted the job.

        Returns:
            The full reference.

        Raises:
            JobNotFoundError: No such job.
        """


@runtime_checkable
class Fetches(Protocol):
    """A backend whose jobs' files are brought to this machine when they are asked for."""

    def fetch(self, ref: JobRef, name: str) -> None:
        """Bring a file of a job up to date: `checkpoint`, or an outcome. What a running job cannot give is left as it is.

        Raises:
            KaleDistError: An ended job's file cannot be had; the message says why.
        """


@runtime_checkable
class Selects(Protocol):
    """A backend whose jobs lie in namespaces and have labels."""

    def select(self, *, namespace: str | None, labels: Mapping[str, str] | None) -> Sequence[JobRef]:
        """Jobs of this library, oldest first, whoever submitted them.

        Args:
            namespace: None for the configured one, `*` for all.
            labels: Those that have all of these; None for all.
        """


@runtime_checkable
class OffersVolumes(Protocol):
    """A backend that knows the volumes a job can have."""

    def volumes(self) -> Sequence[str]:
        """Their names, as the values of `volumes=` take them."""


@runtime_checkable
class Describes(Protocol):
    """A backend whose jobs are objects that it can show."""

    def describe(self, ref: JobRef) -> Mapping[str, object]:
        """The object as it is now, such as a PyTorchJob with its status.

        Raises:
            JobNotFoundError: No such job.
        """
