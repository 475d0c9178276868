"""From a settled specification to a job on the cluster: its order, the object, and then the input its pods wait for."""

from __future__ import annotations

import contextlib
import email.utils
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist import manifests, payload, records, transport
from kale_dist.backends.kubernetes import refusals
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.refusals import Doing
from kale_dist.blobs import FolderStore
from kale_dist.contract import encode_record
from kale_dist.errors import BackendError
from kale_dist.image import for_job
from kale_dist.manifests import PodSettings, StoreMount, input_secret_name
from kale_dist.manifests.settings import (
    ATTEMPT_ANNOTATION,
    CANCELLED_ANNOTATION,
    PORT,
    START_WAIT_S,
    STORE_FOLDER,
    SUBMITTED_BY_ANNOTATION,
)
from kale_dist.pod_order import CALLED_OFF, InputFiles, PodOrder, Source
from kale_dist.snapshot import process
from kale_dist.spec import JobSpec

GROUP, VERSION, PLURAL = "kubeflow.org", "v1", "pytorchjobs"

INPUT_BYTES = 600_000
"""A snapshot up to this size travels in the Secret: with the runtime it stays below 900 kB, and a Secret holds 1 MiB."""

CLAIM_SCHEME = "pvc://"

DEFAULT_USER = 1000
"""User and group of the processes where nobody has said otherwise."""

AS_CLUSTER_LIKES = -1
"""As `run_as_user`: no user is asked for; OpenShift gives one itself."""

_POLL_S = 0.3


def source_of(spec: JobSpec) -> Source:
    """Where the pods get the snapshot from, as far as the specification decides it."""
    if spec.snapshot_bytes <= INPUT_BYTES:
        return Source.INPUT
    return Source.URL if spec.store and not spec.store.startswith(CLAIM_SCHEME) else Source.STREAM


def order_of(spec: JobSpec, source: Source, *, log_is_read: bool = True, torch_flags: Any = ()) -> PodOrder:
    """What the pods' agents are told."""
    policy = spec.policy
    return PodOrder(
        job=spec.name,
        world_size=spec.topology.number_of_processes,
        processes_per_pod=spec.topology.processes_per_pod,
        head=head_of(spec),
        port=PORT,
        start_wait_s=START_WAIT_S,
        snapshot=spec.snapshot,
        blobs=spec.blobs,
        source=source,
        store=_store_in_pod(spec),
        cuda=spec.cuda,
        threads=spec.threads,
        seed=spec.seed,
        torch_flags=torch_flags,
        timeout_s=policy.timeout_s,
        stall_warn_s=policy.stall_warn_s,
        stall_timeout_s=policy.stall_timeout_s,
        max_restarts=policy.max_restarts,
        input_wait_s=spec.cluster.input_wait_s,
        collect_wait_s=spec.cluster.collect_wait_s,
        log_is_read=log_is_read,
    )


def claim_of(spec: JobSpec) -> tuple[str, str]:
    """Claim and folder of a job's store; empty if its store is no claim."""
    if not spec.store.startswith(CLAIM_SCHEME):
        return "", ""
    claim, _, folder = spec.store.removeprefix(CLAIM_SCHEME).partition("/")
    return claim, folder


def _store_in_pod(spec: JobSpec) -> str:
    claim, folder = claim_of(spec)
    return f"{STORE_FOLDER}/{folder}".rstrip("/") if claim else spec.store


def head_of(spec: JobSpec) -> str:
    """Name of pod 0."""
    return manifests.head_host(spec, master=spec.cluster.master is not False)


def settings_of(spec: JobSpec, submitter: str = "") -> PodSettings:
    """What the manifest needs beyond the specification, which `prepare` has settled."""
    options = spec.cluster
    user = DEFAULT_USER if options.run_as_user is None else options.run_as_user
    user_or_none = None if user == AS_CLUSTER_LIKES else user
    claim, _ = claim_of(spec)
    return PodSettings(
        namespace=options.namespace,
        image=spec.image,
        master=options.master is not False,
        run_as_user=user_or_none,
        fs_group=user_or_none,
        # The whole claim: a folder of it that the kubelet has to make belongs to root.
        store=StoreMount(claim=claim) if claim else None,
        annotations=((SUBMITTED_BY_ANNOTATION, submitter),) if submitter else (),
    )


def render(spec: JobSpec) -> str:
    """The object and its Secret as YAML. What the Secret holds in bytes is left out, and named in a comment."""
    source = source_of(spec)
    order = json.dumps(order_of(spec, source).to_json(), indent=2).encode()
    secret = manifests.input_secret(spec.name, spec.cluster.namespace, "", {InputFiles.ORDER: order})
    files = [InputFiles.RUNTIME, InputFiles.KEY, *([InputFiles.SNAPSHOT] if source is Source.INPUT else [])]
    recipe = f"# {for_job.describe(spec.recipe, spec.image)}.\n" if spec.recipe is not None else ""
    return (
        f"{recipe}"
        f"# The Secret gets the PyTorchJob as its owner once that has a uid. It also gets: {', '.join(files)}.\n"
        f"# Snapshot {spec.snapshot}: {spec.snapshot_bytes:,} bytes in {len(spec.blobs)} blobs.\n"
        f"{manifests.to_yaml(manifests.pytorch_job(spec, settings_of(spec)), secret)}"
    )


def input_data(spec: JobSpec, key: bytes, source: Source, *, log_is_read: bool) -> dict[str, bytes]:
    """Files of the job's input."""
    flags = process.capture_process(cuda=spec.cuda).torch_flags
    order = order_of(spec, source, log_is_read=log_is_read, torch_flags=flags)
    data = {
        InputFiles.RUNTIME: payload.runtime_zip(),
        InputFiles.KEY: key,
        InputFiles.ORDER: encode_record(order.to_json()),
    }
    if source is Source.INPUT:
        data[InputFiles.SNAPSHOT] = transport.pack_blobs(FolderStore(records.blobs_dir()), spec.blobs)
    return data


def create(cluster: Cluster, spec: JobSpec, data: Mapping[str, bytes]) -> Any:
    """Create the job, then at once its Secret, which the job owns. If the Secret is refused, the job goes again.

    Args:
        cluster: Where.
        spec: The job, settled.
        data: Its input.

    Returns:
        The PyTorchJob as the cluster has it.

    Raises:
        JobExistsError: The name is taken.
        BackendError: The cluster refused; the message says what and what to do.
    """
    namespace = spec.cluster.namespace
    job = manifests.pytorch_job(spec, settings_of(spec, cluster.identity))
    try:
        made: Any = cluster.custom.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, job)
    except Exception as error:
        raise refusals.explain(
            error, doing=Doing(verb="create", resource=PLURAL, namespace=namespace, name=spec.name)
        ) from error
    secret = manifests.input_secret(spec.name, namespace, made["metadata"]["uid"], data)
    try:
        cluster.core.create_namespaced_secret(namespace, secret)  # type: ignore[arg-type]
    except BaseException as error:
        remove(cluster, namespace, spec.name)
        if not isinstance(error, Exception):
            raise
        raise refusals.explain(
            error, doing=Doing(verb="create", resource="secrets", namespace=namespace, name=secret["metadata"]["name"])
        ) from error
    return made


def remove(cluster: Cluster, namespace: str, name: str) -> None:
    """Delete a job, and with it all that it owns. One that is not there is left at that.

    Raises:
        BackendError: The cluster refused.
    """
    from kubernetes.client.exceptions import ApiException

    with contextlib.suppress(ApiException):
        # It has the job as its owner; without the garbage collector (a dead controller manager) it would stay.
        cluster.core.delete_namespaced_secret(input_secret_name(name), namespace)
    try:
        cluster.custom.delete_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, name, propagation_policy="Background"
        )
    except ApiException as error:
        if error.status != refusals.NOT_FOUND:
            raise refusals.explain(
                error, doing=Doing(verb="delete", resource=PLURAL, namespace=namespace, name=name)
            ) from error


def mark_cancelled(cluster: Cluster, spec: JobSpec, person: str) -> bool:
    """Write on the job that somebody cancelled it, so that it is seen from everywhere.

    Returns:
        Whether the job is there.

    Raises:
        BackendError: The cluster refused.
    """
    return patch(
        cluster, spec.cluster.namespace, spec.name, {"metadata": {"annotations": {CANCELLED_ANNOTATION: person}}}
    )


def suspend(cluster: Cluster, namespace: str, name: str) -> bool:
    """Suspend a job for good: the operator deletes its pods, which get SIGTERM first. The job itself stays.

    Whoever resumes it, as Kueue does by itself, gets pods that end at once.

    Returns:
        Whether the job is there.

    Raises:
        BackendError: The cluster refused.
    """
    found = find(cluster, namespace, name)
    if found is None:
        return False
    called_off = for_next_pods(found[0], CALLED_OFF)
    return patch(cluster, namespace, name, {"spec": {"runPolicy": {"suspend": True}, **called_off}})


def find(cluster: Cluster, namespace: str, name: str) -> tuple[Any, float | None] | None:
    """A PyTorchJob, and what the API server's clock shows; None if it is not there.

    Raises:
        BackendError: The cluster refused.
    """
    try:
        found, _, headers = cluster.custom.get_namespaced_custom_object_with_http_info(
            GROUP, VERSION, namespace, PLURAL, name
        )
    except Exception as error:
        if getattr(error, "status", None) == refusals.NOT_FOUND:
            return None
        raise refusals.explain(
            error, doing=Doing(verb="get", resource=PLURAL, namespace=namespace, name=name)
        ) from error
    date = email.utils.parsedate_to_datetime(headers["Date"]) if "Date" in headers else None
    return found, None if date is None else date.timestamp()


def for_next_pods(job: Mapping[str, Any], attempt: str) -> dict[str, Any]:
    """What has to be changed in a PyTorchJob's `spec` so that its next pods make an attempt, or none (`CALLED_OFF`)."""
    said = {"template": {"metadata": {"annotations": {ATTEMPT_ANNOTATION: attempt}}}}
    return {"pytorchReplicaSpecs": dict.fromkeys(job["spec"]["pytorchReplicaSpecs"], said)}


def patch(cluster: Cluster, namespace: str, name: str, change: dict[str, Any]) -> bool:
    """Change a job by a merge patch.

    Returns:
        Whether the job is there.

    Raises:
        BackendError: The cluster refused.
    """
    try:
        cluster.custom.patch_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name, change)
    except Exception as error:
        if getattr(error, "status", None) == refusals.NOT_FOUND:
            return False
        raise refusals.explain(
            error, doing=Doing(verb="patch", resource=PLURAL, namespace=namespace, name=name)
        ) from error
    return True


def wait_until_gone(cluster: Cluster, spec: JobSpec, names: Sequence[str], timeout_s: float) -> None:
    """Wait until no pod of a deleted job is left.

    Args:
        cluster: Where it was.
        spec: The job.
        names: Its PyTorchJobs.
        timeout_s: Seconds to wait at most.

    Raises:
        BackendError: Pods are still there after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    namespace, selector = spec.cluster.namespace, f"training.kubeflow.org/job-name in ({','.join(names)})"
    while True:
        try:
            left = [
                str(pod.metadata and pod.metadata.name)
                for pod in cluster.core.list_namespaced_pod(namespace, label_selector=selector).items
            ]
        except Exception as error:
            raise refusals.explain(
                error, doing=Doing(verb="list", resource="pods", namespace=namespace, name="")
            ) from error
        if not left:
            return
        if time.monotonic() > deadline:
            raise BackendError(
                f"The job {spec.name} was deleted, but its pods {', '.join(left)} have not ended within {timeout_s:.0f} s. "
                f"If their node is gone, they go by: kubectl -n {namespace} delete pod --force {left[0]}",
                retryable=True,
            )
        time.sleep(_POLL_S)
