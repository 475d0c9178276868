"""A job whose pod was lost goes on in new pods: another PyTorchJob, `<name>-r1`, that the first one owns.

It is made of what the cluster has: the object before it and that one's input. So it runs the same snapshot with the same
key, and goes with the first one, by whomever that is deleted.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kale_dist import manifests
from kale_dist.backends.kubernetes import refusals, submission
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.refusals import Doing
from kale_dist.backends.kubernetes.submission import GROUP, PLURAL, VERSION
from kale_dist.backends.kubernetes.views import attempt_of, seconds
from kale_dist.contract import RankStateName, encode_record
from kale_dist.errors import BackendError
from kale_dist.manifests.settings import ATTEMPT_ANNOTATION, CANCELLED_ANNOTATION, own_labels
from kale_dist.pod_order import CALLED_OFF, InputFiles
from kale_dist.records import Record
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus

RESTART_LABEL = "kale-dist.dev/restart"
"""On all PyTorchJobs of a job but the first: which one it is."""

_PLACE_NUMBER, _PLACE_ATTEMPT = "restarts", "attempt"
_LONGEST_NAME = 46
_SHORTENED = 41
_CONFLICT = 409
_SHORTEST_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One of the PyTorchJobs of a job."""

    number: int = 0
    """0 is the one that was submitted."""
    attempt: int = 0
    """The first attempt that its pods make."""


def run_of(record: Record) -> Run:
    """The last one that a record knows of."""
    place = dict(record.place)
    return Run(int(place.get(_PLACE_NUMBER, 0)), int(place.get(_PLACE_ATTEMPT, 0)))


def with_run(record: Record, run: Run) -> Record:
    """A record that knows of one more."""
    place = dict(record.place) | {_PLACE_NUMBER: str(run.number), _PLACE_ATTEMPT: str(run.attempt)}
    return dataclasses.replace(record, place=tuple(place.items()))


def name_of(job: str, number: int) -> str:
    """Name of a job's PyTorchJob by its number."""
    if not number:
        return job
    if len(job) > _LONGEST_NAME:
        # The names of its pods are longer still, and have to be labels.
        job = f"{job[:_SHORTENED].rstrip('-')}-{hashlib.sha256(job.encode()).hexdigest()[:4]}"
    return f"{job}-r{number}"


def spec_of(spec: JobSpec, run: Run) -> JobSpec:
    """The specification under the name of one of its PyTorchJobs."""
    return dataclasses.replace(spec, name=name_of(spec.name, run.number))


def waits_for_pods(run: Run, base: JobStatus) -> bool:
    """Whether the pods of a PyTorchJob have not started a rank yet, as far as their agents have told."""
    if not run.attempt:
        return base.started is None
    return base.attempt == run.attempt and all(rank.state is RankStateName.PENDING for rank in base.replicas)


def find_last(cluster: Cluster, namespace: str, job: Mapping[str, Any]) -> Run:
    """The last PyTorchJob of a job, as the cluster has it.

    Args:
        cluster: Where.
        namespace: The job's.
        job: The first one.

    Raises:
        BackendError: The cluster refused.
    """
    uid, selector = job["metadata"]["uid"], f"{RESTART_LABEL},app.kubernetes.io/instance={job['metadata']['name']}"
    try:
        found: Any = cluster.custom.list_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, label_selector=selector
        )
    except Exception as error:
        doing = Doing(verb="list", resource=PLURAL, namespace=namespace, name="")
        raise refusals.explain(error, doing=doing) from error
    ours = [_run(item) for item in found["items"] if _owner(item) == uid]
    return max(ours, key=lambda run: run.number, default=Run())


def newest(cluster: Cluster, spec: JobSpec, known: Run) -> Run:
    """The last PyTorchJob of a job: as the cluster has it, where another machine may have made one, else as known here."""
    if spec.policy.max_restarts:
        namespace = spec.cluster.namespace
        with contextlib.suppress(BackendError):
            found = find_last(cluster, namespace, _read(cluster, namespace, spec.name))
            return max(known, found, key=lambda run: run.number)
    return known


def run_in(job: Mapping[str, Any] | None, uid: str) -> Run | None:
    """Which of a job's PyTorchJobs an object is.

    Args:
        job: The object; None if there is none.
        uid: Of the job's first PyTorchJob.

    Returns:
        None if it is none of them, or the first one.
    """
    return _run(job) if job is not None and _owner(job) == uid else None


def begin(cluster: Cluster, spec: JobSpec, before: Run, attempt: int, started: float | None) -> Run | str:
    """Make the next PyTorchJob of a job. If it is there already, because somebody else was faster, it is taken as it is.

    Args:
        cluster: Where.
        spec: The job.
        before: Its last PyTorchJob, whose pods have ended or are ending.
        attempt: The attempt that the new pods begin with.
        started: When the job's first rank has started, by the clock of its pods; None: none has.

    Returns:
        The new one; the name of a person who has cancelled the job meanwhile.

    Raises:
        BackendError: The cluster refused, or the job was deleted meanwhile.
    """
    namespace, old_name = spec.cluster.namespace, name_of(spec.name, before.number)
    first = _read(cluster, namespace, spec.name)
    old = first if not before.number else _read(cluster, namespace, old_name)
    if person := _canceller(first) or _canceller(old):
        return person
    if (old["spec"].get("runPolicy") or {}).get("suspend"):
        raise BackendError(f"{old_name} is suspended; it begins again when it is resumed", retryable=True)
    if "ttlSecondsAfterFinished" in first["spec"].get("runPolicy", {}):
        keep(cluster, namespace, spec.name)
    run = Run(before.number + 1, attempt)
    name = name_of(spec.name, run.number)
    try:
        data = _read_input(cluster, namespace, old_name)
    except BackendError:
        # Whoever may not read it can still follow what another notebook has made.
        last = find_last(cluster, namespace, first)
        if last.number <= before.number:
            raise
        return last
    try:
        made: Any = cluster.custom.create_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, _next_object(old, first, name, run)
        )
    except Exception as error:
        if getattr(error, "status", None) != _CONFLICT:
            raise refusals.explain(
                error, doing=Doing(verb="create", resource=PLURAL, namespace=namespace, name=name)
            ) from error
        made = _read(cluster, namespace, name)
        if _owner(made) != first["metadata"]["uid"]:
            raise BackendError(f"there is another job named {name!r} in the namespace {namespace!r}") from error
    data = _next_input(data, old_name, name, attempt, _gone_s(old, made, started))
    try:
        _make_input(cluster, spec, made, data)
    except BackendError:
        submission.remove(cluster, namespace, name)
        raise
    # Whoever cancels marks the last one that there is, and then looks whether there is another.
    if person := _canceller(_read(cluster, namespace, old_name)):
        submission.remove(cluster, namespace, name)
        return person
    return _run(made)


def put_off(cluster: Cluster, job: Mapping[str, Any], attempt: int) -> None:
    """Tell a suspended PyTorchJob which attempt its next pods will make.

    Args:
        cluster: Where.
        job: The PyTorchJob as it was seen to be suspended; if it is another by now, this is refused.
        attempt: The attempt.

    Raises:
        BackendError: The cluster refused.
    """
    meta, said = job["metadata"], {ATTEMPT_ANNOTATION: str(attempt)}
    change = {
        "metadata": {"resourceVersion": meta["resourceVersion"], "annotations": said},
        "spec": submission.for_next_pods(job, str(attempt)),
    }
    submission.patch(cluster, meta["namespace"], meta["name"], change)


def is_told(job: Mapping[str, Any], attempt: int) -> bool:
    """Whether the next pods of a PyTorchJob know their attempt, or that there is none.

    Kueue puts their template back when it suspends the job.
    """
    said = [
        ((replica["template"].get("metadata") or {}).get("annotations") or {}).get(ATTEMPT_ANNOTATION, "0")
        for replica in job["spec"]["pytorchReplicaSpecs"].values()
    ]
    return all(text == CALLED_OFF or (text.isdecimal() and int(text) >= attempt) for text in said)


def complete(cluster: Cluster, spec: JobSpec, run: Run, started: float | None) -> None:
    """Give a PyTorchJob its input, if whoever made it has ended in between.

    Args:
        cluster: Where.
        spec: The job.
        run: Its last PyTorchJob.
        started: As for `begin`.

    Raises:
        BackendError: The cluster refused.
    """
    namespace, name = spec.cluster.namespace, name_of(spec.name, run.number)
    old_name = name_of(spec.name, run.number - 1)
    old, made = _read(cluster, namespace, old_name), _read(cluster, namespace, name)
    data = _read_input(cluster, namespace, old_name)
    data = _next_input(data, old_name, name, run.attempt, _gone_s(old, made, started))
    _make_input(cluster, spec, made, data)


def keep(cluster: Cluster, namespace: str, name: str) -> None:
    """Have the first PyTorchJob outlive its `ttl_s`: with it, the one that goes on would be deleted.

    Raises:
        BackendError: The cluster refused.
    """
    submission.patch(cluster, namespace, name, {"spec": {"runPolicy": {"ttlSecondsAfterFinished": None}}})


def release(cluster: Cluster, spec: JobSpec) -> None:
    """The job has ended: from now on the first PyTorchJob lives for its `ttl_s`, and the others with it.

    Raises:
        BackendError: The cluster refused.
    """
    if spec.cluster.ttl_s is None:
        return
    namespace = spec.cluster.namespace
    first, now = _read_with_time(cluster, namespace, spec.name)
    # The operator counts from the end of the pods that were lost.
    ended = seconds((first.get("status") or {}).get("completionTime"))
    gone_s = 0.0 if ended is None or now is None else max(0.0, now - ended)
    ttl_s = round(gone_s) + spec.cluster.ttl_s
    submission.patch(cluster, namespace, spec.name, {"spec": {"runPolicy": {"ttlSecondsAfterFinished": ttl_s}}})


def _run(job: Mapping[str, Any]) -> Run:
    meta = job["metadata"]
    return Run(int(meta.get("labels", {}).get(RESTART_LABEL, "0")), attempt_of(job))


def _canceller(job: Mapping[str, Any]) -> str:
    return str((job["metadata"].get("annotations") or {}).get(CANCELLED_ANNOTATION, ""))


def _owner(job: Mapping[str, Any]) -> str:
    return next((str(owner["uid"]) for owner in job["metadata"].get("ownerReferences") or ()), "")


def _next_object(old: Mapping[str, Any], first: Mapping[str, Any], name: str, run: Run) -> dict[str, Any]:
    """The object before it, under another name and with another input. Pure."""
    meta = old["metadata"]
    annotations = {key: value for key, value in (meta.get("annotations") or {}).items() if "kubectl" not in key}
    owner = {
        "apiVersion": first["apiVersion"], "kind": first["kind"], "name": first["metadata"]["name"],
        "uid": first["metadata"]["uid"], "blockOwnerDeletion": False,
    }  # fmt: skip
    spec = copy.deepcopy(old["spec"])
    # Kueue suspends the new one by itself.
    spec.get("runPolicy", {}).pop("suspend", None)
    inputs = {manifests.input_secret_name(meta["name"]): manifests.input_secret_name(name)}
    attempt = {ATTEMPT_ANNOTATION: str(run.attempt)}
    for replica in spec["pytorchReplicaSpecs"].values():
        pod = replica["template"].setdefault("metadata", {})
        pod["annotations"] = {**(pod.get("annotations") or {}), **attempt}
        for volume in replica["template"]["spec"].get("volumes", ()):
            secret = volume.get("secret", {})
            if secret.get("secretName") in inputs:
                secret["secretName"] = inputs[secret["secretName"]]
    return {
        "apiVersion": old["apiVersion"],
        "kind": old["kind"],
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": {**meta["labels"], RESTART_LABEL: str(run.number)},
            "annotations": {**annotations, **attempt},
            "ownerReferences": [owner],
        },
        "spec": spec,
    }


def _next_input(data: Mapping[str, bytes], old_name: str, name: str, attempt: int, gone_s: float) -> dict[str, bytes]:
    """The input before it, whose order names the new pods. Pure."""
    order = json.loads(data[InputFiles.ORDER])
    order["head"] = name + order["head"].removeprefix(old_name)
    order["attempt"] = attempt
    if order.get("timeout_s") is not None:
        order["timeout_s"] = max(_SHORTEST_S, order["timeout_s"] - gone_s)
    return {**data, InputFiles.ORDER: encode_record(order)}


def _gone_s(old: Mapping[str, Any], made: Mapping[str, Any], started: float | None) -> float:
    """How much of the time that the pods before had has gone. Pure: this machine's clock may be wrong by hours.

    Those pods got what was left when they were asked for, which after a suspension was when the job was resumed.
    """
    if started is None:
        return 0.0
    asked, ended = (seconds(job["metadata"].get("creationTimestamp")) for job in (old, made))
    resumed = seconds((old.get("status") or {}).get("startTime")) or 0.0
    return 0.0 if asked is None or ended is None else max(0.0, ended - max(asked, resumed, started))


def _make_input(cluster: Cluster, spec: JobSpec, job: Mapping[str, Any], data: Mapping[str, bytes]) -> None:
    """Make the Secret of one of a job's PyTorchJobs, unless it is there."""
    namespace = spec.cluster.namespace
    secret = manifests.input_secret(job["metadata"]["name"], namespace, job["metadata"]["uid"], data)
    secret["metadata"]["labels"] = own_labels(spec.name)
    try:
        cluster.core.create_namespaced_secret(namespace, secret)  # type: ignore[arg-type]
    except Exception as error:
        if getattr(error, "status", None) != _CONFLICT:
            doing = Doing(verb="create", resource="secrets", namespace=namespace, name=secret["metadata"]["name"])
            raise refusals.explain(error, doing=doing) from error


def _read(cluster: Cluster, namespace: str, name: str) -> Any:
    return _read_with_time(cluster, namespace, name)[0]


def _read_with_time(cluster: Cluster, namespace: str, name: str) -> tuple[Any, float | None]:
    """A PyTorchJob that has to be there, and what the API server's clock shows."""
    found = submission.find(cluster, namespace, name)
    if found is None:
        raise BackendError(f"the PyTorchJob {name!r} is no longer there")
    return found


def _read_input(cluster: Cluster, namespace: str, job: str) -> dict[str, bytes]:
    name = manifests.input_secret_name(job)
    try:
        secret = cluster.core.read_namespaced_secret(name, namespace)
    except Exception as error:
        doing = Doing(verb="get", resource="secrets", namespace=namespace, name=name)
        raise refusals.explain(error, doing=doing) from error
    return {file: base64.b64decode(text) for file, text in (secret.data or {}).items()}
