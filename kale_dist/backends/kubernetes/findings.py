"""What was found out about a cluster before a job is sent to it. Pure."""

from __future__ import annotations

import dataclasses

from kale_dist.errors import BackendError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    name: str
    """A word for tests and the doctor, such as `quota`."""
    sentence: str
    """Without its full stop."""
    remedy: str = ""
    is_fatal: bool = False
    """Whether the job cannot run. Otherwise it runs with less, or waits."""

    def __str__(self) -> str:
        """The sentence and the remedy."""
        return f"{self.sentence}. {self.remedy}" if self.remedy else self.sentence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """All that was found."""

    namespace: str
    items: tuple[Finding, ...] = ()
    granted: frozenset[str] = frozenset()
    """What this user may do there: a verb and a resource, such as `get pods/log`."""
    pod_security: str = ""
    """Level that the namespace enforces; empty if none, or if it may not be read."""
    cpu_limit_needed: bool = False
    """Whether pods are refused that have no limit of cores."""

    @property
    def fatal(self) -> tuple[Finding, ...]:
        """Why the job cannot run."""
        return tuple(item for item in self.items if item.is_fatal)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What stops nothing."""
        return tuple(item for item in self.items if not item.is_fatal)

    @property
    def forbids_master(self) -> bool:
        """Whether workers beside a master would be refused, because of the operator's init container."""
        return self.pod_security == "restricted"

    def may(self, verb: str, resource: str) -> bool:
        """Whether this user may, as in `may("get", "pods/log")`."""
        return f"{verb} {resource}" in self.granted

    def check(self) -> None:
        """Raise what is fatal.

        Raises:
            BackendError: The job cannot run; says all the reasons.
        """
        if self.fatal:
            reasons = "\n".join(f"{item}" for item in self.fatal)
            raise BackendError(f"The job cannot run in the namespace {self.namespace!r}. {reasons}")
