"""A run's objects: what they are made of, and how they are created, found, cancelled and removed.

The job is created first, then one Secret that it owns: the pods wait for the Secret, and it is deleted with the job.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from kale_dist import manifests, orders, payload, records
from kale_dist.backends.base import RunHandle
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.explain import api
from kale_dist.backends.kubernetes.explain.api import Doing
from kale_dist.blobs import FolderStore, pack_blobs
from kale_dist.contract import InputFiles, Order, Source, encode_json
from kale_dist.errors import BackendError
from kale_dist.image import for_job
from kale_dist.manifests import Kind, PodSettings, StoreMount, kind_of, owner_of
from kale_dist.manifests.settings import (
    CANCELLED_ANNOTATION,
    INPUT_BYTES,
    OBJECT_LABEL,
    PORT,
    START_WAIT_S,
    STORE_FOLDER,
    SUBMITTED_BY_ANNOTATION,
)
from kale_dist.runtime import process_state
from kale_dist.spec import JobSpec

_SECRET_BYTES = 1_000_000
CLAIM_SCHEME = "pvc://"

DEFAULT_USER = 1000
"""User and group of the processes where none is given."""

AS_CLUSTER_LIKES = -1
"""As `run_as_user`: no user is asked for; OpenShift gives one itself."""

_MIB = 1 << 20
_POLL_S = 0.3


# -- what a run is made of -----------------------------------------------------------------------------------------------


def claim_of(spec: JobSpec) -> tuple[str, str]:
    """Claim and folder of a job's store; empty if its store is no claim."""
    if not spec.store.startswith(CLAIM_SCHEME):
        return "", ""
    claim, _, folder = spec.store.removeprefix(CLAIM_SCHEME).partition("/")
    return claim, folder


def source_of(spec: JobSpec) -> Source:
    """Where the pods get the snapshot from, as far as the specification decides it."""
    if spec.snapshot_bytes <= INPUT_BYTES:
        return Source.INPUT
    return Source.URL if spec.store and not spec.store.startswith(CLAIM_SCHEME) else Source.STREAM


def settings_of(spec: JobSpec, *, submitter: str = "", run: int = 1) -> PodSettings:
    """What the manifest needs beyond the specification, which `prepare` has settled."""
    options = spec.cluster
    user = DEFAULT_USER if options.run_as_user is None else options.run_as_user
    user_or_none = None if user == AS_CLUSTER_LIKES else user
    claim, _ = claim_of(spec)
    return PodSettings(
        namespace=options.namespace,
        image=spec.image,
        run_as_user=user_or_none,
        fs_group=user_or_none,
        # The whole claim: a folder of it that the kubelet has to make belongs to root.
        store=StoreMount(claim=claim) if claim else None,
        annotations=((SUBMITTED_BY_ANNOTATION, submitter),) if submitter else (),
        run=run,
    )


def order_of(spec: JobSpec, source: Source, *, run: int = 1, torch_flags: Any = (), note: str = "") -> Order:
    """The order that the agents get."""
    claim, folder = claim_of(spec)
    return orders.order_of(
        spec,
        job=manifests.object_name(spec.name, run),
        run=run,
        processes_per_agent=spec.topology.processes_per_pod,
        head=kind_of(spec).head_host(spec, run),
        port=PORT,
        store=f"{STORE_FOLDER}/{folder}".rstrip("/") if claim else spec.store,
        source=source,
        torch_flags=torch_flags,
        note=note,
        start_wait_s=START_WAIT_S,
        input_wait_s=spec.cluster.input_wait_s,
        collect_wait_s=spec.cluster.collect_wait_s,
        metrics_port=spec.cluster.metrics_port or 0,
        **kind_of(spec).order(spec),
    )


def render(spec: JobSpec) -> str:
    """The object and its Secret as YAML. What the Secret holds in bytes is left out, and named in a comment."""
    source, settings, kind = source_of(spec), settings_of(spec), kind_of(spec)
    order = json.dumps(order_of(spec, source).to_json(), indent=2).encode()
    secret = manifests.input_secret(spec, settings, {}, {InputFiles.ORDER: order})
    files = [InputFiles.RUNTIME, InputFiles.KEY, *([InputFiles.SNAPSHOT] if source is Source.INPUT else [])]
    recipe = f"# {for_job.describe(spec.recipe, spec.image)}.\n" if spec.recipe is not None else ""
    return (
        f"{recipe}"
        f"# The {kind.name} becomes the owner of what follows it, once it has a uid. "
        f"The Secret also gets: {', '.join(files)}.\n"
        f"# Snapshot {spec.snapshot}: {spec.snapshot_bytes:,} bytes in {len(spec.blobs)} blobs.\n"
        f"{manifests.to_yaml(kind.make(spec, settings), *kind.beside(spec, settings, {}), secret)}"
    )


def input_data(
    spec: JobSpec, key: bytes, source: Source, *, run: int = 1, checkpoint: pathlib.Path | None = None
) -> dict[str, bytes]:
    """Files of a run's input.

    Args:
        spec: The job.
        key: Its secret bytes.
        source: Where the pods get the snapshot from.
        run: Which run.
        checkpoint: What the run resumes from; one that a Secret cannot hold is left to the job's store.
    """
    data = {InputFiles.RUNTIME: payload.runtime_zip(), InputFiles.KEY: key}
    if source is Source.INPUT:
        data[InputFiles.SNAPSHOT] = pack_blobs(FolderStore(records.blobs_dir()), spec.blobs)
    note = ""
    if checkpoint is not None:
        room, size = _SECRET_BYTES - sum(map(len, data.values())), checkpoint.stat().st_size
        if size < room:
            data[InputFiles.CHECKPOINT] = checkpoint.read_bytes()
        elif not spec.store:
            note = (
                f"The last checkpoint has {size / _MIB:,.1f} MiB, too much to send to new pods without a store, so that the "
                "training starts from the beginning: give a store=, such as 'pvc://claim'"
            )
    flags = process_state.read_flags(cuda=spec.cuda)
    data[InputFiles.ORDER] = encode_json(order_of(spec, source, run=run, torch_flags=flags, note=note).to_json())
    return data


# -- on the cluster ------------------------------------------------------------------------------------------------------


def create(cluster: Cluster, spec: JobSpec, data: Mapping[str, bytes], *, run: int = 1) -> Any:
    """Create the job, then at once what stands beside it. If that is refused, the job is deleted again.

    Returns:
        The object as the cluster has it.

    Raises:
        JobExistsError: The name is taken.
        BackendError: The cluster refused; the message says what and what to do.
    """
    namespace, settings = spec.cluster.namespace, settings_of(spec, submitter=cluster.identity, run=run)
    kind = kind_of(spec)
    made = create_object(cluster, kind, kind.make(spec, settings))
    owner, core = owner_of(made), cluster.core
    secret: Any = manifests.input_secret(spec, settings, owner, data)
    services: list[Any] = list(kind.beside(spec, settings, owner))
    # The Secret last: the pods wait for it.
    beside: list[tuple[str, Any, Any]] = [
        *(("services", core.create_namespaced_service, service) for service in services),
        ("secrets", core.create_namespaced_secret, secret),
    ]
    for resource, make, wanted in beside:
        try:
            make(namespace, wanted)
        except BaseException as error:
            delete(cluster, kind, namespace, made["metadata"]["name"])
            if not isinstance(error, Exception):
                raise
            name = wanted["metadata"]["name"]
            doing = Doing(verb="create", resource=resource, namespace=namespace, name=name, kind=kind.word)
            raise api.explain(error, doing) from error
    return made


def create_object(cluster: Cluster, kind: Kind, job: Any) -> Any:
    """Create a job's object alone; gives it as the cluster has it.

    Raises:
        JobExistsError: The name is taken.
        BackendError: The cluster refused.
    """
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    try:
        return cluster.custom.create_namespaced_custom_object(*kind.api, namespace, kind.plural, job)
    except Exception as error:
        doing = Doing(verb="create", resource=kind.plural, namespace=namespace, name=name, kind=kind.word)
        raise api.explain(error, doing) from error


def find(cluster: Cluster, kind: Kind, namespace: str, name: str) -> Any:
    """A job's object; None if it does not exist.

    Raises:
        BackendError: The cluster refused.
    """
    try:
        return cluster.custom.get_namespaced_custom_object(*kind.api, namespace, kind.plural, name)
    except Exception as error:
        if api.status_of(error) == api.NOT_FOUND:
            return None
        raise api.explain(error, Doing(verb="get", resource=kind.plural, namespace=namespace, name=name)) from error


def cancel(cluster: Cluster, kind: Kind, namespace: str, name: str, person: str) -> None:
    """Mark a job as cancelled, which is seen from everywhere, and suspend it: the operator ends its pods.

    Raises:
        BackendError: The cluster refused.
    """
    change = {"metadata": {"annotations": {CANCELLED_ANNOTATION: person}}, **kind.suspension(value=True)}
    try:
        cluster.custom.patch_namespaced_custom_object(*kind.api, namespace, kind.plural, name, change)
    except Exception as error:
        if api.status_of(error) != api.NOT_FOUND:
            doing = Doing(verb="patch", resource=kind.plural, namespace=namespace, name=name, kind=kind.word)
            raise api.explain(error, doing) from error


def delete(cluster: Cluster, kind: Kind, namespace: str, name: str) -> None:
    """Delete a job, and with it all that it owns. One that does not exist is no error.

    Raises:
        BackendError: The cluster refused.
    """
    # First of all: this process may have little time left.
    where = (*kind.api, namespace, kind.plural, name)
    try:
        cluster.custom.delete_namespaced_custom_object(*where, propagation_policy="Background")
    except Exception as error:
        if api.status_of(error) != api.NOT_FOUND:
            doing = Doing(verb="delete", resource=kind.plural, namespace=namespace, name=name, kind=kind.word)
            raise api.explain(error, doing) from error
    with contextlib.suppress(Exception):
        # The job owns it; without the garbage collector (a dead controller manager) it would stay.
        cluster.core.delete_namespaced_secret(manifests.input_secret_name(name), namespace)
    with contextlib.suppress(Exception):
        if kind.makes_services:
            cluster.core.delete_namespaced_service(name, namespace)


def wait_until_gone(cluster: Cluster, handle: RunHandle, timeout_s: float) -> None:
    """Wait until no pod of a deleted job is left: they hold GPUs and quota, and their names.

    Pods that never started, and never will, are not waited for: the operator's init container ignores SIGTERM for 60 s.

    Raises:
        BackendError: Pods still exist after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    namespace, selector = handle.spec.cluster.namespace, f"{OBJECT_LABEL}={handle.object}"
    while True:
        try:
            items: list[Any] = cluster.core.list_namespaced_pod(namespace, label_selector=selector).items
        except Exception as error:
            raise api.explain(error, Doing(verb="list", resource="pods", namespace=namespace)) from error
        left = [
            pod.metadata.name
            for pod in items
            if not (pod.metadata.deletion_timestamp and pod.status.phase == "Pending")
        ]
        if not left:
            return
        if time.monotonic() > deadline:
            raise BackendError(
                f"The job {handle.ref} was deleted, but its pods {', '.join(left)} have not ended within {timeout_s:.0f} s. "
                f"If their node is gone, remove them with: kubectl -n {namespace} delete pod --force {left[0]}",
                retryable=True,
            )
        time.sleep(_POLL_S)
