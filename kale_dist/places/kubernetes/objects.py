"""Objects of jobs on a cluster: which kinds it serves, and how they are created, found, cancelled and deleted."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kale_dist.errors import BackendError, ConfigError, log
from kale_dist.job.backend import PlacedJob
from kale_dist.job.spec.job_spec import Policy, Settled, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.kubernetes import roles
from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.explain import api
from kale_dist.places.kubernetes.explain.api import Doing
from kale_dist.places.kubernetes.views import Owner, owner_in
from kale_dist.places.manifests import KINDS, POLICY_API, Kind, kind_of, train_runtime
from kale_dist.places.manifests.object_settings import FAILED_ANNOTATION, OBJECT_LABEL, input_secret_name
from kale_dist.places.manifests.train_job import NEWEST, OLD, SECURE, TrainJob
from kale_dist.wording import listed

_POLL_S = 0.3
_NAMED = 3
_BETWEEN = {"Job": ("batch", "v1", "jobs"), "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets")}
"""Kinds of objects that stand between a TrainJob or an MPIJob and its pods."""

_RUNTIMES = (("clustertrainingruntimes", ""), ("trainingruntimes", "TrainingRuntime/"))

AUTOMATIC: tuple[Kind, ...] = tuple(kind for kind in KINDS.values() if kind.is_automatic)
"""The kinds among which one is chosen if the call names none, the best first."""


def is_served(cluster: Cluster, kind: Kind, version: str = "") -> bool:
    """Whether the cluster has this kind, in the version that this library writes. Every user may ask this.

    Raises:
        BackendError: The cluster does not answer.
    """
    listed: Any = None
    with asking("list", kind):
        listed = cluster.custom.get_api_resources(kind.group, version or kind.version)
    return listed is not None and any(resource.name == kind.plural for resource in listed.resources or ())


def choose(cluster: Cluster, asked: ClusterOptions, policy: Policy | None = None) -> ClusterOptions:
    """Settle the kind that a job becomes: the one that was asked for, else the best that the cluster serves; of a TrainJob its runtime and form, too.

    A TrainJob is better than a PyTorchJob where Trainer is 2.2 or later, its runtime is one of `kale-dist runtime`, and the job asks for
    nothing that it cannot have.

    Args:
        cluster: Where.
        asked: What the call asks for.
        policy: Of the job; None for the usual one.

    Raises:
        ConfigError: The cluster does not serve the kind, and the message names what it serves and how to install the rest; or its Trainer is too old.
        BackendError: The cluster does not answer.
    """
    word = asked.kind
    if word and not is_served(cluster, KINDS[word]):
        raise _not_served(cluster, KINDS[word])
    if not word:
        # The last one is a part of Kubernetes itself.
        *first, last = AUTOMATIC
        word = next((kind.word for kind in first if is_served(cluster, kind)), last.word)
    if word == TrainJob.word:
        return _as_train_job(cluster, asked)
    wants_pytorch = asked.kind or asked.master is not None or asked.patch or asked.queue
    if word == AUTOMATIC[0].word and not wants_pytorch and is_served(cluster, KINDS[TrainJob.word]):
        with contextlib.suppress(ConfigError):
            better = _as_train_job(cluster, asked)
            KINDS[better.kind].make(example(cluster, better, policy=policy or Policy()))
            if better.runtime_version and better.trainer >= SECURE:
                return better
    return dataclasses.replace(asked, kind=word)


def _not_served(cluster: Cluster, kind: Kind) -> ConfigError:
    there = [repr(kind.word) for kind in KINDS.values() if is_served(cluster, kind)]
    do, api_of = "install it", "/".join(kind.api)
    problem = f"{cluster.server} serves no {kind.name} of {api_of}: {kind.controller} is not installed there"
    if kind.clashes_with and is_served(cluster, kind, kind.clashes_with):
        do = "replace it by"
        problem = (
            f"{cluster.server} serves another {kind.name}, of {kind.group}/{kind.clashes_with} (Kubeflow's Training Operator), "
            f"and not that of {api_of} ({kind.controller}). A cluster can have only one of them"
        )
    remedy = f"It serves {', '.join(there)}. Leave out `kind`, or have an administrator {do}: {kind.install}"
    return ConfigError("kind", problem, remedy)


def example(cluster: Cluster, options: ClusterOptions, image: str = "none", **settings: Any) -> Settled:
    """The smallest job with a worker, with the resources that jobs have by default; `settings` are other fields of it."""
    return Settled(
        name="kale-dist-example", label="example", kind="call", topology=Topology(number_of_processes=2), image=image,
        cluster=dataclasses.replace(options, namespace=cluster.namespace), **settings,
    )  # fmt: skip


# -- runtimes of TrainJobs ---------------------------------------------------------------------------------------------


def _as_train_job(cluster: Cluster, asked: ClusterOptions) -> ClusterOptions:
    """What was asked for as a TrainJob, with the runtime that there is, in the form that the cluster's Trainer takes."""
    name, version = train_runtime.chosen(runtimes(cluster), asked.runtime)
    served = asked.trainer or trainer(cluster, name)
    return dataclasses.replace(asked, kind=TrainJob.word, runtime=name, runtime_version=version, trainer=served)


def trainer(cluster: Cluster, runtime: str) -> str:
    """The version of Trainer by what it takes, as `kd.Kubernetes(trainer=...)` has it.

    A dry run shows it: an API server drops fields that it does not know. Where even that is refused, it is empty, and the checks that
    follow give the reason.

    Args:
        cluster: Where.
        runtime: As `kd.Kubernetes(runtime=...)` has it.

    Raises:
        ConfigError: It is too old.
    """
    kind = TrainJob()
    create: Any = cluster.custom.create_namespaced_custom_object
    for tried in (NEWEST, OLD):
        job = kind.make(example(cluster, ClusterOptions(kind=kind.word, runtime=runtime, trainer=tried)))
        try:
            taken = create(*kind.api, cluster.namespace, kind.plural, job, dry_run="All")
        except Exception:  # noqa: BLE001 - the checks that follow explain it
            return ""
        if found := kind.trainer_of(taken):
            return found
    problem = f"the Kubeflow Trainer of {cluster.server} is 2.0, which is too old: what pods need beside their image cannot be set"
    raise ConfigError("kind", problem, f"Give kind='job', or have an administrator install a newer one: {kind.install}")


def runtimes(cluster: Cluster) -> Mapping[str, Any]:
    """The runtimes that TrainJobs of the namespace can have, by their names, as far as this user may list them."""
    found: dict[str, Any] = {}
    for plural, prefix in _RUNTIMES:
        with contextlib.suppress(Exception):
            listed = _list(cluster, KINDS[TrainJob.word].api, cluster.namespace if prefix else "", plural)
            found |= {prefix + item["metadata"]["name"]: item for item in listed["items"]}
    return found


@contextlib.contextmanager
def asking(verb: str, kind: Kind, namespace: str = "", name: str = "", resource: str = "") -> Iterator[None]:
    """Explain what the cluster refuses of a job's object, or of another resource beside it.

    That an object does not exist is no error, unless it was to be created.
    """
    try:
        yield
    except Exception as error:
        if verb == "create" or api.status_of(error) != api.NOT_FOUND:
            doing = Doing(verb=verb, resource=resource or kind.plural, namespace=namespace, name=name, kind=kind.word)
            raise api.explain(error, doing) from error


def _list(
    cluster: Cluster, group_version: tuple[str, str], namespace: str, plural: str, selector: str | None = None
) -> Any:
    """The objects of a namespace, or where that is empty of the whole cluster."""
    custom = cluster.custom
    if namespace:
        return custom.list_namespaced_custom_object(*group_version, namespace, plural, label_selector=selector)
    return custom.list_cluster_custom_object(*group_version, plural, label_selector=selector)


# -- one of them -------------------------------------------------------------------------------------------------------


def create(cluster: Cluster, kind: Kind, job: Any) -> Any:
    """Create a job's object alone; gives it as the cluster has it.

    Raises:
        JobExistsError: The name is taken.
        BackendError: The cluster refused.
    """
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    with asking("create", kind, namespace, name):
        return cluster.custom.create_namespaced_custom_object(*kind.api, namespace, kind.plural, job)


def create_policy(cluster: Cluster, spec: Settled, policy: Any) -> None:
    """Create a job's NetworkPolicy, in one attempt; one that is refused and that the call has not asked for is only logged.

    Raises:
        BackendError: The cluster refused.
    """
    (group, version, plural), namespace = POLICY_API, spec.cluster.namespace
    try:
        cluster.custom.create_namespaced_custom_object(group, version, namespace, plural, policy)
    except Exception as error:
        doing = Doing(verb="create", resource=plural, namespace=namespace, name=policy["metadata"]["name"])
        if api.status_of(error) != api.FORBIDDEN or spec.cluster.network_policy:
            raise api.explain(error, doing) from error
        log(f"Cannot {doing}: {api.look_up(error, doing).words}. {roles.POLICIES.without}")


def find(cluster: Cluster, kind: Kind, namespace: str, name: str) -> Any:
    """A job's object; None if it does not exist.

    Raises:
        BackendError: The cluster refused.
    """
    found = None
    with asking("get", kind, namespace, name):
        found = cluster.custom.get_namespaced_custom_object(*kind.api, namespace, kind.plural, name)
    return found  # noqa: RET504 - of one that does not exist it is None


def end(cluster: Cluster, spec: Settled, name: str, mark: Mapping[str, str], *, head_leaves: bool) -> None:
    """Annotate a job with why it ends, which is seen from everywhere, and have its controller end its pods; see `Kind.end`.

    Raises:
        BackendError: The cluster refused.
    """
    kind, namespace = kind_of(spec), spec.cluster.namespace
    ended = kind.end(spec, head_leaves=head_leaves)
    if FAILED_ANNOTATION in mark and kind.is_suspended(ended):
        why = mark[FAILED_ANNOTATION].rstrip(".")
        mark = {FAILED_ANNOTATION: f"{why}. Its {kind.name} is Suspended, not Failed, to free its GPUs"}
    change = {"metadata": {"annotations": dict(mark)}, **ended}
    with asking("patch", kind, namespace, name):
        cluster.custom.patch_namespaced_custom_object(*kind.api, namespace, kind.plural, name, change)


def delete_object(cluster: Cluster, kind: Kind, namespace: str, name: str) -> None:
    """Delete a job's object; the cluster deletes what it owns. One that does not exist is no error.

    Raises:
        BackendError: The cluster refused.
    """
    with asking("delete", kind, namespace, name):
        cluster.custom.delete_namespaced_custom_object(
            *kind.api, namespace, kind.plural, name, propagation_policy="Background"
        )


def delete(cluster: Cluster, kind: Kind, namespace: str, name: str) -> None:
    """Delete a job with its Secret, its Service and its NetworkPolicy. One that does not exist is no error.

    Raises:
        BackendError: The cluster refused.
    """
    # First of all: this process may have little time left.
    delete_object(cluster, kind, namespace, name)
    with contextlib.suppress(Exception):
        # The job owns it; without the garbage collector (a dead controller manager) it would stay.
        cluster.core.delete_namespaced_secret(input_secret_name(name), namespace)
    with contextlib.suppress(Exception):
        if kind.makes_services:
            cluster.core.delete_namespaced_service(name, namespace)
    with contextlib.suppress(Exception):
        group, version, plural = POLICY_API
        cluster.custom.delete_namespaced_custom_object(group, version, namespace, plural, name)


def wait_until_gone(cluster: Cluster, handle: PlacedJob, timeout_s: float) -> None:
    """Wait until no pod of a deleted job is left: they hold GPUs and quota, and their names.

    Pods whose init container still runs are not waited for: the operator's ignores SIGTERM for 60 s, and nothing runs after
    it.

    Raises:
        BackendError: Pods still exist, and for `timeout_s` seconds none of them has ended.
    """
    deadline, fewest = time.monotonic() + timeout_s, math.inf
    namespace = handle.spec.cluster.namespace
    while True:
        left = []
        for pod in pods_of(cluster, namespace, handle.object):
            meta, status = pod["metadata"], pod.get("status") or {}
            if not (meta.get("ownerReferences") or meta.get("deletionTimestamp")):
                # An object that was deleted with --cascade=orphan has left it behind.
                with contextlib.suppress(Exception):
                    cluster.core.delete_namespaced_pod(meta["name"], namespace)
            initialises = any("running" in one["state"] for one in status.get("initContainerStatuses") or ())
            if not (meta.get("deletionTimestamp") and initialises):
                left.append(meta["name"])
        if not left:
            return
        if len(left) < fewest:
            deadline, fewest = time.monotonic() + timeout_s, len(left)
        if time.monotonic() > deadline:
            raise BackendError(
                f"The job {handle.ref} was deleted, but its pods {listed(left, _NAMED)} have not ended within {timeout_s:.0f} s. "
                f"If their node is gone, remove them with: kubectl -n {namespace} delete pod --force {left[0]}",
                retryable=True,
            )
        # A list of 1,000 pods is 5 MB.
        time.sleep(max(_POLL_S, len(left) / 200))


def pods_of(cluster: Cluster, namespace: str, name: str) -> list[dict[str, Any]]:
    """The pods of a job's object, as the API has them.

    Raises:
        BackendError: The cluster refused.
    """
    with api.asking("list", "pods", namespace):
        listed: Any = cluster.core.list_namespaced_pod(
            namespace, label_selector=f"{OBJECT_LABEL}={name}", _preload_content=False
        )
        return list(listed.json()["items"])


def list_all(cluster: Cluster, namespace: str, selector: str) -> list[tuple[Kind, Any]]:
    """Objects of all kinds that the cluster serves and this user may list; an error if that is none."""
    found: list[tuple[Kind, Any]] = []
    refusals: list[Exception] = []
    for kind in KINDS.values():
        try:
            listed = _list(cluster, kind.api, namespace, kind.plural, selector)
        except Exception as error:
            explained = api.explain(error, Doing(verb="list", resource=kind.plural, namespace=namespace))
            if api.status_of(error) not in (api.NOT_FOUND, api.FORBIDDEN):
                raise explained from error
            refusals.append(explained)
            continue
        found += [(kind, item) for item in listed["items"]]
    if len(refusals) == len(KINDS):
        raise refusals[0]
    return found


def made_for(cluster: Cluster, handle: PlacedJob, uid: str, owner: Owner) -> bool:
    """Whether a controller is a job's object, or was made for it. Labels prove nothing: who may make pods may write any.

    Args:
        cluster: Where.
        handle: The job.
        uid: Of its object.
        owner: The controller of a pod.

    Raises:
        BackendError: The cluster does not answer.
    """
    kind, name, own_uid = owner
    namespace = handle.spec.cluster.namespace
    # One after the other, each at most once: what owns what may be a circle.
    for _ in _BETWEEN:
        if own_uid == uid or kind not in _BETWEEN:
            break
        group, version, plural = _BETWEEN[kind]
        try:
            found: Any = cluster.custom.get_namespaced_custom_object(group, version, namespace, plural, name)
        except Exception as error:
            if api.status_of(error) == api.FORBIDDEN:
                return (kind, name) in kind_of(handle.spec).reporters_of(handle.object)
            if api.status_of(error) == api.NOT_FOUND:
                return False
            raise api.explain(error, Doing(verb="get", resource=plural, namespace=namespace, name=name)) from error
        if found["metadata"]["uid"] != own_uid:
            return False
        kind, name, own_uid = owner_in(found["metadata"])
    return own_uid == uid


def read_input(cluster: Cluster, namespace: str, name: str) -> dict[str, bytes]:
    """A job's Secret; empty if this user may not read it."""
    with contextlib.suppress(Exception):
        secret = cluster.core.read_namespaced_secret(input_secret_name(name), namespace)
        return {file: base64.b64decode(text) for file, text in (secret.data or {}).items()}
    return {}
