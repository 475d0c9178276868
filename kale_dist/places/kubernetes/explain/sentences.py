"""An entry of the table and the facts at hand, made into sentences. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
import string
from collections.abc import Mapping

from kale_dist.job.backend import Trouble
from kale_dist.places.kubernetes.explain import table
from kale_dist.places.kubernetes.explain.table import Entry
from kale_dist.places.manifests import Kind

_SHOWN = 300
NOT_RETRIED = re.compile(r'^(Error creating: |Back-off pulling image "[^"]*": |(Err)?ImagePull: )+')
"""What senders put in front of an event's message each time that they try again."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A trouble that was recognised."""

    entry: Entry
    words: str
    """The sentence as it stands within another one: it begins with a small letter, or a name."""
    trouble: Trouble

    @property
    def name(self) -> str:
        """Name of the entry."""
        return self.entry.name


class _Facts(dict[str, str]):
    """A fact that is not known leaves a gap in words, never an error on the way to a user."""

    def __missing__(self, name: str) -> str:
        return "an unknown " + name.replace("_", " ")


def fill(entry: Entry, facts: Mapping[str, str], *, prefix: str = "") -> Found:
    """Fill in the facts.

    Args:
        entry: What is wrong.
        facts: By the names that stand in the entry's sentences.
        prefix: Stands before the sentence, with its colon.
    """
    known = _Facts(facts)
    format_ = string.Formatter()
    sentence, remedy = (format_.vformat(text, (), known) for text in (entry.sentence, entry.remedy))
    words = f"{prefix}{sentence}".rstrip(".")
    trouble = Trouble(
        sentence=f"{words[:1].upper()}{words[1:]}", remedy=f"{remedy}.", heals=entry.heals,
        needs_action=entry.needs_action, cause=entry.cause,
    )  # fmt: skip
    return Found(entry=entry, words=words, trouble=trouble)


def of(name: str, **facts: str) -> Trouble:
    """The trouble of an entry by its name."""
    return fill(table.named(name), {key: cut(value) for key, value in facts.items()}).trouble


def facts_of(kind: Kind) -> dict[str, str]:
    """The facts about a kind of object that sentences may name."""
    suspension = json.dumps(kind.suspension(value=False), separators=(",", ":"))
    return {
        "job_kind": kind.name, "jobs": kind.plural, "resume": suspension,
        "controller": kind.controller, "find_controller": kind.find_controller, "install": kind.install,
    }  # fmt: skip


def cut(text: str, length: int = _SHOWN) -> str:
    """Foreign words on one line, without a full stop, and not whole pages of them."""
    line = " ".join(text.split()).rstrip(". ")
    return line if len(line) <= length else line[: length - 3] + "..."


def detail(words: str) -> str:
    """The cluster's own words, `Reason: message`, without their repetitions."""
    reason, _, message = words.partition(": ")
    message = NOT_RETRIED.sub("", message)
    # The container runtime puts its steps in front of one another; the last ones name what was wrong.
    parts = message.split(": ")
    has_steps = reason.startswith(("ErrImagePull", "ImagePull", "StartError"))
    return cut(": ".join(parts[-3:]) if has_steps else message or reason)
