"""Jobs that this machine has no record of: listed from the cluster, and taken over into a record."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist import names, records, transport
from kale_dist.backends.base import JobRef
from kale_dist.backends.kubernetes import refusals, restarts, submission
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.refusals import Doing
from kale_dist.errors import ConfigError, JobExistsError, JobNotFoundError, warn
from kale_dist.manifests import input_secret_name
from kale_dist.manifests.settings import SPEC_ANNOTATION, SUBMITTED_BY_ANNOTATION
from kale_dist.pod_order import InputFiles, Source
from kale_dist.records import Record
from kale_dist.spec import JobSpec
from kale_dist.wording import show

MANAGED_BY = "app.kubernetes.io/managed-by=kale-dist"


def select(cluster: Cluster, namespace: str | None, labels: Mapping[str, str]) -> Sequence[JobRef]:
    """References of this library's jobs on a cluster, oldest first.

    Args:
        cluster: Where.
        namespace: None for the cluster's configured one, `*` for all.
        labels: Those that have all of these.

    Raises:
        ConfigError: The namespace or a label is none.
        BackendError: The cluster refused.
    """
    found = find(cluster, namespace, labels)
    jobs = [job["metadata"] for job in found if restarts.RESTART_LABEL not in job["metadata"]["labels"]]
    return [JobRef("kubernetes", f"{job['namespace']}/{job['name']}") for job in jobs]


def find(cluster: Cluster, namespace: str | None, labels: Mapping[str, str]) -> Sequence[dict[str, Any]]:
    """PyTorchJobs of this library on a cluster, oldest first, those of later runs among them. Takes what `select` takes."""
    _check_selection(namespace, labels)
    selector = ",".join([MANAGED_BY, *(f"{name}={value}" for name, value in labels.items())])
    place = (submission.GROUP, submission.VERSION)
    where = cluster.namespace if namespace is None else namespace
    found: Any
    try:
        if where == "*":
            found = cluster.custom.list_cluster_custom_object(*place, submission.PLURAL, label_selector=selector)
        else:
            found = cluster.custom.list_namespaced_custom_object(
                *place, where, submission.PLURAL, label_selector=selector
            )
    except Exception as error:
        doing = Doing(verb="list", resource=submission.PLURAL, namespace="" if where == "*" else where, name="")
        raise refusals.explain(error, doing=doing) from error
    return sorted(found["items"], key=lambda job: (job["metadata"]["creationTimestamp"], job["metadata"]["name"]))


def _check_selection(namespace: Any, labels: Any) -> None:
    """Refuse what would select other jobs than meant: a comma in a value begins another condition."""
    is_place = namespace is None or namespace == "*" or (isinstance(namespace, str) and names.is_label(namespace))
    if not is_place:
        remedy = "Write lower-case letters, digits and dashes, such as 'team-a', or '*' for all"
        raise ConfigError("namespace", f"{show(namespace)} cannot be a namespace", remedy)
    if not isinstance(labels, Mapping):
        raise ConfigError("labels", f"{show(labels)} is not a dict", "Write it as {'team': 'vision'}")
    for key, value in labels.items():
        if not isinstance(key, str) or not names.is_qualified_name(key):
            raise ConfigError("labels", f"{show(key)} cannot be a label", "Write it as 'team' or 'example.com/team'")
        if not isinstance(value, str) or not names.is_label_value(value):
            remedy = "Write at most 63 letters, digits, '-', '_' and '.'"
            raise ConfigError("labels", f"{show(value)} of {key} cannot be a label's value", remedy)


def adopt(cluster: Cluster, ref: JobRef, *, trust: bool | None) -> None:
    """Make a record of a job that is on the cluster.

    Args:
        cluster: Where.
        ref: The job, with its namespace.
        trust: Whether its key is taken although another user submitted it; None leaves the key where it is.

    Raises:
        JobNotFoundError: There is no such job, or it is not one of this library's.
        BackendError: The cluster refused.
    """
    namespace, _, name = ref.name.partition("/")
    job = _read_job(cluster, namespace, name)
    annotations = job["metadata"].get("annotations") or {}
    try:
        spec = JobSpec.from_json(json.loads(annotations[SPEC_ANNOTATION]))
    except (KeyError, ValueError, TypeError) as error:
        raise JobNotFoundError(
            f"{ref} was not submitted by kale_dist, or by a version that this one does not understand ({error})"
        ) from error
    last = restarts.find_last(cluster, namespace, job)
    data = _read_input(cluster, namespace, name)
    submitter = annotations.get(SUBMITTED_BY_ANNOTATION, "")
    key = b"" if trust is None else data.get(InputFiles.KEY, b"")
    if key and submitter != cluster.identity and not trust:
        key = b""
        warn(
            f"{ref} was submitted by {submitter or 'an unknown user'}, and to load its result can run code of theirs: "
            "status and logs are shown, results are not. kale_dist.attach(ref, trust=True) loads them too"
        )
    if records.exists(ref.record_name):
        if not key:
            return
        records.withdraw(ref.record_name)
    with records.keeping_blobs(), contextlib.suppress(JobExistsError):
        records.create(ref.record_name, key)
        if key and InputFiles.SNAPSHOT in data:
            # The model can then be built again from here.
            transport.unpack_blobs(data[InputFiles.SNAPSHOT], records.blobs_dir())
        source = Source.INPUT
        if InputFiles.ORDER in data:
            source = Source(json.loads(data[InputFiles.ORDER])["source"])
        created = dt.datetime.fromisoformat(job["metadata"]["creationTimestamp"]).timestamp()
        place = {"server": cluster.server, "uid": job["metadata"]["uid"], "source": str(source)}
        record = Record(
            ref=str(ref), name=ref.record_name, created=created, spec=spec, kernel_pid=os.getpid(), detach=True,
            place=tuple(place.items()),
        )  # fmt: skip
        records.write(restarts.with_run(record, last))


def _read_job(cluster: Cluster, namespace: str, name: str) -> Any:
    try:
        job: Any = cluster.custom.get_namespaced_custom_object(
            submission.GROUP, submission.VERSION, namespace, submission.PLURAL, name
        )
    except Exception as error:
        if getattr(error, "status", None) == refusals.NOT_FOUND:
            raise JobNotFoundError(
                f"There is no job {name!r} in the namespace {namespace!r} of {cluster.server}. "
                "kale_dist.jobs(on='kubernetes') lists those there are"
            ) from error
        doing = Doing(verb="get", resource=submission.PLURAL, namespace=namespace, name=name)
        raise refusals.explain(error, doing=doing) from error
    return job


def _read_input(cluster: Cluster, namespace: str, name: str) -> dict[str, bytes]:
    """The job's Secret; empty if this user may not read it."""
    from kubernetes.client.exceptions import ApiException

    try:
        secret = cluster.core.read_namespaced_secret(input_secret_name(name), namespace)
    except ApiException:
        return {}
    return {file: base64.b64decode(text) for file, text in (secret.data or {}).items()}
