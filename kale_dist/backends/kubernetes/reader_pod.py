"""A short-lived pod that mounts a job's claim and shows its results to this machine, which does not mount it."""

from __future__ import annotations

import contextlib
import http.client
import pathlib
import re
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from kale_dist import manifests
from kale_dist.backends.kubernetes import port_forward, refusals, submission
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.refusals import Doing
from kale_dist.errors import BackendError, StoreError
from kale_dist.manifests.settings import API_VERSION, CONTAINER, KIND, STORE_FOLDER, own_labels
from kale_dist.spec import JobSpec

_PORT = 8000
_START_LIMIT_S = 180.0
_LISTEN_LIMIT_S = 30.0
_POLL_S = 0.3
_BLOCK_BYTES = 1 << 20
_TRIES = 3
# For a reader whose maker was killed before it could delete it.
_DEADLINE_S = 3600
_KEPT = re.compile(r'href="((?:outcome-\d{1,9}-\d{1,9})|checkpoint)"', re.ASCII)
_OK, _NOT_FOUND = 200, 404
_HOPELESS = frozenset({"ErrImageNeverPull", "InvalidImageName", "CreateContainerConfigError", "ImagePullBackOff"})


class ClaimReader:
    """What a running reader pod shows. For one thread at a time.

    Args:
        cluster: Where it runs.
        spec: The job whose results it shows.
        pod: Its name.
    """

    def __init__(self, cluster: Cluster, spec: JobSpec, pod: str) -> None:
        self._cluster = cluster
        self._spec = spec
        self._pod = pod

    def names(self) -> Sequence[str]:
        """Names of the outcomes that the claim has of this job, and `checkpoint`.

        Raises:
            StoreError: The claim has nothing of this job.
            BackendError: The pod cannot be reached.
        """
        with self._asking("") as answer:
            return sorted(set(_KEPT.findall(answer.read().decode("utf-8", "replace"))))

    def fetch(self, name: str, path: pathlib.Path) -> None:
        """Copy one file; one that is at the path is replaced when all has come.

        Args:
            name: One of `names`.
            path: Where to.

        Raises:
            StoreError: The claim has no such file, or it cannot be written here.
            BackendError: The connection was cut several times.
        """
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
        for left in reversed(range(_TRIES)):
            try:
                self._copy(name, temporary)
                temporary.replace(path)
            except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
                if not left:
                    raise BackendError(
                        f"The connection to the pod {self._pod}, which reads the claim, was cut while {name} was fetched: "
                        f"{error}",
                        retryable=True,
                    ) from error
            except OSError as error:
                raise StoreError(f"{path} could not be written on the notebook's side: {error.strerror}") from error
            else:
                return
            finally:
                temporary.unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            BackendError: It does not start, or does not answer.
        """
        self._wait_until_running()
        deadline = time.monotonic() + _LISTEN_LIMIT_S
        while True:
            try:
                with contextlib.suppress(StoreError):
                    self.names()
            except (OSError, http.client.HTTPException, BackendError) as error:
                if time.monotonic() > deadline or (isinstance(error, BackendError) and not error.retryable):
                    raise refusals.explain(error, doing=self._doing("get")) from error
                time.sleep(_POLL_S)
            else:
                return

    def _wait_until_running(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                pod: Any = self._cluster.core.read_namespaced_pod(self._pod, self._spec.cluster.namespace)
            except Exception as error:
                raise refusals.explain(error, doing=self._doing("get")) from error
            if pod.status.phase == "Running":
                return
            said = _waits_for(pod)
            if pod.status.phase in ("Succeeded", "Failed") or time.monotonic() > deadline or said[0] in _HOPELESS:
                raise BackendError(f"The pod that reads the claim does not start: {': '.join(filter(None, said))}")
            time.sleep(_POLL_S)

    def _copy(self, name: str, target: pathlib.Path) -> None:
        with self._asking(name) as answer, target.open("wb") as file:
            target.chmod(0o600)
            expected = int(answer.headers["Content-Length"])
            while piece := answer.read(_BLOCK_BYTES):
                file.write(piece)
            if file.tell() != expected:
                raise http.client.IncompleteRead(b"", expected - file.tell())

    @contextlib.contextmanager
    def _asking(self, name: str) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request for one file; the folder's list for no name."""
        claim, folder = submission.claim_of(self._spec)
        below = "/".join(part for part in (folder, "jobs", self._spec.name) if part)
        peer = http.client.HTTPConnection("reader")
        peer.auto_open = 0
        peer.sock = port_forward.connect(self._cluster, self._spec.cluster.namespace, self._pod, _PORT)
        with contextlib.closing(peer):
            peer.request("GET", f"/{name}")
            answer = peer.getresponse()
            if answer.status == _NOT_FOUND:
                raise StoreError(f"The claim {claim!r} has no {'/'.join(filter(None, (below, name)))}")
            if answer.status != _OK:
                raise http.client.HTTPException(f"status {answer.status}")
            yield answer

    def _doing(self, verb: str) -> Doing:
        return Doing(verb=verb, resource="pods", namespace=self._spec.cluster.namespace, name=self._pod)


@contextlib.contextmanager
def reading(cluster: Cluster, spec: JobSpec) -> Iterator[ClaimReader]:
    """Start a reader pod for a job's claim; it is deleted in the end, whatever happens.

    Args:
        cluster: Where.
        spec: The job; its store is a claim.

    Raises:
        BackendError: The pod cannot be made, does not start, or cannot be reached; the message says how to get at the
            results without it.
    """
    name = f"kale-dist-reader-{secrets.token_hex(4)}"
    namespace = spec.cluster.namespace
    try:
        _create(cluster, spec, name)
        try:
            reader = ClaimReader(cluster, spec, name)
            reader.wait()
            yield reader
        finally:
            _delete(cluster, namespace, name)
    except BackendError as error:
        claim, folder = submission.claim_of(spec)
        below = "/".join(part for part in (folder, "jobs", spec.name) if part)
        raise BackendError(
            f"The results of {spec.name} lie in the claim {claim!r} of the namespace {namespace!r}, in {below}, and could "
            f"not be read from there. {error} They are also loaded by a notebook in a pod that mounts this claim",
            retryable=error.retryable,
        ) from error


def reader_object(spec: JobSpec, name: str, owner_uid: str) -> dict[str, Any]:
    """The reader pod: the job's own pod with nothing in it but a file server, and the claim read-only.

    Args:
        spec: The job, settled.
        name: Of the pod.
        owner_uid: Of the PyTorchJob with which it goes; empty if that is gone.
    """
    job = manifests.pytorch_job(spec, submission.settings_of(spec))
    template = next(iter(job["spec"]["pytorchReplicaSpecs"].values()))["template"]["spec"]
    container = next(item for item in template["containers"] if item["name"] == CONTAINER)
    store = next(mount for mount in container["volumeMounts"] if mount["mountPath"] == STORE_FOLDER)
    _, folder = submission.claim_of(spec)
    below = "/".join(part for part in (STORE_FOLDER, folder, "jobs", spec.name) if part)
    # With HTTP/1.0 http.client would close the connection before the body has come.
    server = ["python3", "-m", "http.server", str(_PORT), "--protocol", "HTTP/1.1"]
    command = [*server, "--bind", "127.0.0.1", "--directory", below]
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": spec.name, "uid": owner_uid, "blockOwnerDeletion": False}
    annotations = {"sidecar.istio.io/inject": "false"}
    kept = ("serviceAccountName", "securityContext", "imagePullSecrets", "nodeSelector", "tolerations", "affinity")
    limits = {"memory": "256Mi", **({"cpu": "500m"} if "cpu" in container["resources"]["limits"] else {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": spec.cluster.namespace,
            "labels": {**own_labels(spec.name), "app.kubernetes.io/component": "reader", **annotations},
            "annotations": annotations,
            **({"ownerReferences": [owner]} if owner_uid else {}),
        },
        "spec": {
            **{field: template[field] for field in kept if field in template},
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _DEADLINE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": CONTAINER,
                    "image": container["image"],
                    **({"imagePullPolicy": container["imagePullPolicy"]} if "imagePullPolicy" in container else {}),
                    "command": command,
                    "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": limits},
                    "securityContext": {**container["securityContext"], "readOnlyRootFilesystem": True},
                    "volumeMounts": [{**store, "readOnly": True}],
                }
            ],
            "volumes": [volume for volume in template["volumes"] if volume["name"] == store["name"]],
        },
    }


def _create(cluster: Cluster, spec: JobSpec, name: str) -> None:
    namespace = spec.cluster.namespace
    try:
        body: Any = reader_object(spec, name, _uid_of(cluster, spec))
        cluster.core.create_namespaced_pod(namespace, body)
    except Exception as error:
        doing = Doing(verb="create", resource="pods", namespace=namespace, name=name)
        raise refusals.explain(error, doing=doing) from error


def _uid_of(cluster: Cluster, spec: JobSpec) -> str:
    """UID of the PyTorchJob; empty if it is gone: a pod with an owner that is gone would be collected at once."""
    try:
        job: Any = cluster.custom.get_namespaced_custom_object(
            submission.GROUP, submission.VERSION, spec.cluster.namespace, submission.PLURAL, spec.name
        )
    except Exception as error:
        if getattr(error, "status", None) == refusals.NOT_FOUND:
            return ""
        raise
    return str(job["metadata"]["uid"])


def _delete(cluster: Cluster, namespace: str, name: str) -> None:
    # Without the right to, it goes with its job; what it was made for is done.
    with contextlib.suppress(Exception):
        cluster.core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)


def _waits_for(pod: Any) -> tuple[str, str]:
    """Reason and message of what keeps a pod from running; empty where nothing is known."""
    for status in pod.status.container_statuses or ():
        waiting = status.state and (status.state.waiting or status.state.terminated)
        if waiting and waiting.reason not in (None, "ContainerCreating"):
            return waiting.reason, waiting.message or ""
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status != "True":
            return condition.reason or "", condition.message or ""
    return pod.status.reason or "", pod.status.message or ""
