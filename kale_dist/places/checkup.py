"""What `kale-dist doctor` finds out, in all places: checks with their results. Pure."""

from __future__ import annotations

import dataclasses
import enum

from kale_dist.errors import BackendError


class Grade(enum.StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"
    """Jobs run, but slower or with less than they might."""
    FAILED = "failed"
    """Jobs cannot run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One check and its result."""

    name: str
    verdict: Grade
    sentence: str
    """What the check found."""
    remedy: str = ""
    """What to do; empty if all is well."""


def ok(name: str, sentence: str) -> CheckResult:
    """A check that has found nothing wrong."""
    return CheckResult(name=name, verdict=Grade.OK, sentence=sentence)


def warning(name: str, sentence: str, remedy: str) -> CheckResult:
    """A check that has found something without which jobs run, but slower or with less."""
    return CheckResult(name=name, verdict=Grade.WARNING, sentence=sentence, remedy=remedy)


def failed(name: str, sentence: str, remedy: str) -> CheckResult:
    """A check that has found why jobs cannot run."""
    return CheckResult(name=name, verdict=Grade.FAILED, sentence=sentence, remedy=remedy)


def broken(name: str, error: BackendError, remedy: str) -> CheckResult:
    """A check that an error ended: its first sentence, and the rest as what to do, or else this remedy."""
    first, _, rest = str(error).partition(". ")
    return failed(name, first, rest or remedy)
