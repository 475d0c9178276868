"""Which kinds of objects a cluster serves, and which of them a job becomes."""

from __future__ import annotations

from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.explain import api
from kale_dist.backends.kubernetes.explain.api import Doing
from kale_dist.errors import ConfigError
from kale_dist.manifests import KINDS, Kind

_TIMEOUT_S = 10.0

AUTOMATIC: tuple[Kind, ...] = tuple(kind for kind in KINDS.values() if kind.is_automatic)
"""Those that are chosen without a wish, the best first."""


def is_served(cluster: Cluster, kind: Kind) -> bool:
    """Whether the cluster has this kind, in the version that this library writes. Every user may ask this.

    Raises:
        BackendError: The cluster does not answer.
    """
    try:
        listed = cluster.custom.get_api_resources(*kind.api, _request_timeout=_TIMEOUT_S)
    except Exception as error:
        if api.status_of(error) == api.NOT_FOUND:
            return False
        raise api.explain(error, Doing(verb="list", resource=kind.plural)) from error
    return any(resource.name == kind.plural for resource in listed.resources or ())


def choose(cluster: Cluster, word: str) -> Kind:
    """The kind that a job becomes: the one that was asked for, else the first that the cluster serves.

    Args:
        cluster: Where.
        word: As `kd.Kubernetes(kind=...)` has it; empty for no wish.

    Raises:
        ConfigError: The cluster does not serve it; the message says what it serves, and how to install the rest.
        BackendError: The cluster does not answer.
    """
    if word and is_served(cluster, KINDS[word]):
        return KINDS[word]
    if not word:
        # The last one is a part of Kubernetes itself.
        *first, last = AUTOMATIC
        return next((kind for kind in first if is_served(cluster, kind)), last)
    there = [repr(kind.word) for kind in KINDS.values() if is_served(cluster, kind)]
    kind = KINDS[word]
    problem = (
        f"{cluster.server} serves no {kind.name} of {'/'.join(kind.api)}: {kind.controller} is not installed there"
    )
    remedy = f"It serves {', '.join(there)}. Leave out `kind`, or have an administrator install it: {kind.install}"
    raise ConfigError("kind", problem, remedy)
