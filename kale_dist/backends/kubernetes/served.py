"""Which kinds of objects a cluster serves, and which of them a job becomes."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from kale_dist.backends.kubernetes import submit
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.explain import api
from kale_dist.backends.kubernetes.explain.api import Doing
from kale_dist.errors import ConfigError
from kale_dist.manifests import KINDS, Kind, kind_of
from kale_dist.manifests.train_job import TrainJob
from kale_dist.spec import JobSpec

_RUNTIMES = (("clustertrainingruntimes", ""), ("trainingruntimes", "TrainingRuntime/"))

AUTOMATIC: tuple[Kind, ...] = tuple(kind for kind in KINDS.values() if kind.is_automatic)
"""Those that are chosen without a wish, the best first."""


def is_served(cluster: Cluster, kind: Kind, version: str = "") -> bool:
    """Whether the cluster has this kind, in the version that this library writes. Every user may ask this.

    Raises:
        BackendError: The cluster does not answer.
    """
    try:
        listed = cluster.custom.get_api_resources(kind.group, version or kind.version)
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
    if kind.clashes_with and is_served(cluster, kind, kind.clashes_with):
        problem = (
            f"{cluster.server} serves another {kind.name}, of {kind.group}/{kind.clashes_with} (Kubeflow's Training Operator), "
            f"and not that of {'/'.join(kind.api)} ({kind.controller}). A cluster can have only one of them"
        )
        remedy = (
            f"It serves {', '.join(there)}. Leave out `kind`, or have an administrator replace it by: {kind.install}"
        )
    raise ConfigError("kind", problem, remedy)


def with_runtime_field(cluster: Cluster, spec: JobSpec) -> JobSpec:
    """A TrainJob's specification with the field by which this cluster's version of Trainer changes a runtime's pods.

    A dry run tells: an API server drops fields that it does not know. Where even that is refused, nothing is settled, and
    the checks that follow say why.
    """
    if not isinstance(kind_of(spec), TrainJob) or spec.cluster.runtime_field:
        return spec
    kind = kind_of(spec)
    taken: Any = {}
    with contextlib.suppress(Exception):
        taken = cluster.custom.create_namespaced_custom_object(
            *kind.api, spec.cluster.namespace, kind.plural, kind.make(spec, submit.settings_of(spec)), dry_run="All"
        )  # fmt: skip
    if not taken:
        return spec
    field = "runtimePatches" if "runtimePatches" in taken["spec"] else "podTemplateOverrides"
    return dataclasses.replace(spec, cluster=dataclasses.replace(spec.cluster, runtime_field=field))


def runtimes(cluster: Cluster) -> tuple[str, ...]:
    """Names of the runtimes that TrainJobs of the namespace can have, as far as this user may list them."""
    found: list[str] = []
    for plural, prefix in _RUNTIMES:
        api_of = KINDS[TrainJob.word].api
        with contextlib.suppress(Exception):
            listed: Any = (
                cluster.custom.list_namespaced_custom_object(*api_of, cluster.namespace, plural)
                if prefix
                else cluster.custom.list_cluster_custom_object(*api_of, plural)
            )
            found += [prefix + item["metadata"]["name"] for item in listed["items"]]
    return tuple(found)
