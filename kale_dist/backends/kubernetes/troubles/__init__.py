"""Every trouble of a job on a cluster that can be told in one sentence, with what to do about it.

One table serves the status of a job, the page `docs/troubleshooting.md` and the tests. A trouble is recognised by the
cluster's own words, `Reason: message`, at the place where the cluster says them; the first entry that fits is taken.
"""

from __future__ import annotations

from kale_dist.backends.kubernetes.troubles import containers, ends, images, jobs, placing, refused, volumes
from kale_dist.backends.kubernetes.troubles.entry import Place, Trouble

GROUPS: tuple[tuple[str, tuple[Trouble, ...]], ...] = (
    ("Images", images.TROUBLES),
    ("No node for a pod", placing.TROUBLES),
    ("Pods that are refused", refused.TROUBLES),
    ("Volumes and secrets", volumes.TROUBLES),
    ("Containers that do not start", containers.TROUBLES),
    ("Pods that ended", ends.TROUBLES),
    ("The job as a whole", jobs.TROUBLES),
)
"""Titles and entries, in the order in which the page shows them."""

ALL: tuple[Trouble, ...] = tuple(trouble for _, group in GROUPS for trouble in group)

_BY_NAME = {trouble.name: trouble for trouble in ALL}
_BY_PLACE = {place: tuple(trouble for trouble in ALL if trouble.place is place) for place in Place}

__all__ = ["ALL", "GROUPS", "Place", "Trouble", "match", "named"]


def named(name: str) -> Trouble:
    """The entry of this name.

    Raises:
        KeyError: There is none.
    """
    return _BY_NAME[name]


def match(place: Place, said: str, container: str = "") -> tuple[Trouble, dict[str, str]] | None:
    """The first entry that fits.

    Args:
        place: Where the words were found.
        said: The cluster's words, `Reason: message`.
        container: The container they are about; empty for none.

    Returns:
        The entry, and what its pattern's named groups found; None if no entry fits.
    """
    for trouble in _BY_PLACE[place]:
        if trouble.container in ("", container) and (found := trouble.pattern.search(said)):
            return trouble, {name: value.strip() for name, value in found.groupdict().items() if value}
    return None
