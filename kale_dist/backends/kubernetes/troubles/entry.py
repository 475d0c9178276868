"""The form of one entry."""

from __future__ import annotations

import dataclasses
import enum
import re

from kale_dist.contract import FailureCause


class Place(enum.Enum):
    """Where the cluster says what a trouble is recognised by."""

    WAITING = "the state of a waiting container"
    ENDED = "the state of a container that ended"
    POD = "the reason of a pod that failed"
    DISRUPTION = "the condition DisruptionTarget of a pod"
    SCHEDULING = "the condition PodScheduled of a pod"
    POD_EVENT = "the last event of a pod that has a node and no running container"
    JOB_EVENT = "an event of the PyTorchJob that lacks pods"
    STRUCTURE = "the objects themselves"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """One trouble."""

    name: str
    """For tests and links."""
    title: str
    """For the page."""
    place: Place
    pattern: re.Pattern[str] = re.compile("")
    """Searched in `Reason: message`. Named groups are facts for the sentence."""
    container: str = ""
    """Only for the container of this name."""
    sentence: str
    """One sentence without its full stop; `{names}` stand for facts."""
    remedy: str
    """What to do; one sentence without its full stop."""
    is_final: bool = False
    """Whether the job has failed by it. What may heal is only told."""
    cause: FailureCause = FailureCause.NOT_STARTED
    """Of the failure, if it is one."""
    loses_pod: bool = False
    """Whether the cluster, or somebody, took a pod away that had done nothing wrong: other pods may do better."""


def pattern(text: str) -> re.Pattern[str]:
    """A pattern over several lines of a message."""
    return re.compile(text, re.DOTALL)
