"""A small job of one pod that runs a command for this library: it asks an image what it has, or reads files on a claim.

It is an object of the same kind as jobs, so that it needs no rights beyond those of any job, and has the pod of a job: its user, its security
context, its pull secrets. It is deleted when it has answered, and ends by itself after ten minutes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import pathlib
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kale_dist.errors import BackendError, ImageError
from kale_dist.job.spec.job_spec import Settled, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.resources import Resources
from kale_dist.places.following.head_client import HttpSocket, writing
from kale_dist.places.kubernetes import objects, port_forward
from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.explain import api
from kale_dist.places.kubernetes.explain import pods as explain
from kale_dist.places.kubernetes.views import JobView, PodView, pod_view
from kale_dist.places.manifests import kind_of
from kale_dist.places.manifests.object_settings import STORE_FOLDER, ObjectSettings, claim_of
from kale_dist.places.manifests.pod_template import ERRAND_S

_PORT = 8000
_START_S = 60.0
"""How long it may wait for a node, a quota, or a queue."""

_HINDERED_S = 20.0
"""How long a node may report that it cannot start it: a registry is sometimes only busy."""

_LISTEN_S = 15.0
_POLL_S = 0.2
_OK, _NOT_FOUND = 200, 404


def ask(cluster: Cluster, spec: Settled, image: str, command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Run a command in an image, as a job of this specification would be run.

    Args:
        cluster: Where.
        spec: Whose namespace, user and pull secrets the pod gets.
        image: The image.
        command: In the place of its entry point.
        environment: Variables beside those of every job.

    Returns:
        What it wrote, or the runtime's words if it did not start.

    Raises:
        ImageError: It could not be run within a minute; the message gives the reason.
    """
    try:
        with _running(cluster, spec, image, command, environment) as started:
            job, pod = started
            while not pod.has_ended:
                time.sleep(_POLL_S)
                pod = _look(cluster, spec.cluster.namespace, job) or pod
            if pod.main.reason in ("StartError", "ContainerCannotRun"):
                return pod.main.message.encode()
            with api.asking("get", "pods/log", spec.cluster.namespace, pod.name):
                answer: Any = cluster.core.read_namespaced_pod_log(
                    pod.name, spec.cluster.namespace, container=pod.container, _preload_content=False
                )
                return bytes(answer.data)
    except BackendError as error:
        raise ImageError(
            f"The base image {image} has to be asked what it has, and no pod of it answered: {str(error).rstrip('.')}",
            error.retryable,
        ) from error


def read_store(cluster: Cluster, spec: Settled, name: str, target: pathlib.Path) -> bool:
    """Copy a file from the claim that is a job's store, through a pod that mounts it.

    Args:
        cluster: Where.
        spec: The job.
        name: Of the file.
        target: Where to write it.

    Returns:
        Whether the claim has such a file.

    Raises:
        BackendError: The pod could not be run or reached; the message names the claim and the folder.
    """
    claim, folder = claim_of(spec)
    kept = f"{folder}/jobs/{spec.name}".removeprefix("/")
    # With HTTP/1.0 http.client would close the connection when it has read the headers, and a tunnel ends with that.
    command = (
        *("python3", "-P", "-m", "http.server", str(_PORT), "--bind", "127.0.0.1"),
        *("--directory", f"{STORE_FOLDER}/{kept}", "--protocol", "HTTP/1.1"),
    )
    try:
        with _running(cluster, spec, spec.image, command, {}, store=spec.store) as (_, pod):
            return _download(cluster, spec.cluster.namespace, pod, name, target)
    except (OSError, http.client.HTTPException, BackendError) as error:
        raise BackendError(
            f"{name} lies on the claim {claim!r} in the folder {kept}, and a pod that reads it from there "
            f"failed: {str(error).rstrip('.')}. A notebook whose own pod mounts the claim loads the result, too",
            retryable=True,
        ) from error


def _download(cluster: Cluster, namespace: str, pod: PodView, name: str, target: pathlib.Path) -> bool:
    deadline = time.monotonic() + _LISTEN_S
    while True:
        connection = port_forward.connect(cluster, namespace, pod.name, _PORT)
        peer = http.client.HTTPConnection("pod")
        peer.sock = HttpSocket(connection)
        try:
            peer.request("GET", f"/{name}")
            answer = peer.getresponse()
            break
        except (OSError, http.client.HTTPException):
            # It does not listen yet.
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
    with contextlib.closing(connection):
        if answer.status == _NOT_FOUND:
            return False
        if answer.status != _OK:
            raise BackendError(f"the pod {pod.name} answered {answer.status} to a request for {name}")
        with writing(target) as file:
            shutil.copyfileobj(answer, file)
            if file.tell() != int(answer.headers["Content-Length"]):
                raise BackendError(
                    f"the connection to the pod {pod.name} was cut while {name} was fetched", retryable=True
                )
    return True


@contextlib.contextmanager
def _running(
    cluster: Cluster, spec: Settled, image: str, command: Sequence[str], environment: Mapping[str, str], store: str = ""
) -> Iterator[tuple[str, PodView]]:
    """Run an errand; gives the name of its object, which is deleted at the end, and its pod, which has started."""
    kind, job = kind_of(spec), make(spec.cluster, image, command, environment, store)
    namespace, name = spec.cluster.namespace, job["metadata"]["name"]
    objects.create(cluster, kind, job)
    try:
        yield name, _await(cluster, namespace, name)
    finally:
        with contextlib.suppress(BackendError):
            objects.delete(cluster, kind, namespace, name)


def make(
    cluster: ClusterOptions, image: str, command: Sequence[str], environment: Mapping[str, str], store: str = ""
) -> dict[str, Any]:
    """The object of an errand."""
    options = dataclasses.replace(
        cluster, patch="", roles="", queue="", gang=False, min_available=None, secret_environment=(), ttl_s=ERRAND_S
    )
    small = Settled(
        name=f"kale-dist-{secrets.token_hex(4)}", label="errand", kind="call", image=image, store=store, cluster=options,
        topology=Topology(number_of_processes=1), environment=tuple(environment.items()),
        resources=Resources(cpu=0.1, memory_gib=0.5),
    )  # fmt: skip
    return kind_of(small).make(small, ObjectSettings(command=tuple(command)))


def _await(cluster: Cluster, namespace: str, job: str) -> PodView:
    """Wait until the pod has started, also while its node pulls the image; not for long if something keeps it."""
    began = time.monotonic()
    while True:
        pod = _look(cluster, namespace, job)
        if pod is not None and (pod.is_running or pod.has_ended):
            return pod
        found = explain.hindrance(pod, JobView(name=job, namespace=namespace, pods=(pod,))) if pod is not None else None
        waited_s = time.monotonic() - began
        # Its node pulls the image, which may be large; or reports that it cannot.
        has_node = pod is not None and bool(pod.node)
        limit_s = _START_S if not has_node else ERRAND_S if found is None else _HINDERED_S
        if waited_s > limit_s or (found is not None and not found.trouble.heals):
            why = f"the pod was not started within {waited_s:.0f} s" if found is None else str(found.trouble)
            raise BackendError(why, retryable=True)
        time.sleep(_POLL_S)


def _look(cluster: Cluster, namespace: str, job: str) -> PodView | None:
    pods = objects.pods_of(cluster, namespace, job)
    return pod_view(pods[0]) if pods else None
