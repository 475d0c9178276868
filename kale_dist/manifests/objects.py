"""What the objects of all kinds have in common: their metadata, and the Secret and the Service beside them. Pure."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kale_dist.manifests.settings import (
    OBJECT_LABEL,
    QUEUE_LABEL,
    RUN_LABEL,
    SPEC_ANNOTATION,
    PodSettings,
    input_secret_name,
    object_name,
    own_labels,
)
from kale_dist.spec import JobSpec

_LARGEST_ANNOTATION = 200_000
"""Characters; all annotations of an object together may have 256 KiB."""


def metadata(spec: JobSpec, settings: PodSettings) -> dict[str, Any]:
    """Name, labels and annotations of a run's object."""
    cluster, is_errand = spec.cluster, bool(settings.command)
    labels = {
        **own_labels(spec.name, is_errand=is_errand),
        **({QUEUE_LABEL: cluster.queue} if cluster.queue else {}),
        **({RUN_LABEL: str(settings.run)} if settings.run > 1 else {}),
        **dict(cluster.labels),
    }
    described = {} if is_errand else {SPEC_ANNOTATION: spec_annotation(spec)}
    annotations = {**dict(cluster.annotations), **dict(settings.annotations), **described}
    return {
        "name": object_name(spec.name, settings.run),
        "namespace": settings.namespace,
        "labels": labels,
        "annotations": annotations,
    }


def spec_annotation(spec: JobSpec) -> str:
    """The specification as JSON, for `attach` from another machine: without the variables' values.

    The digests of the blobs are left out where there are so many that an annotation could not hold them; they are in
    the job's order, too.
    """
    hidden = dataclasses.replace(spec, environment=tuple((name, "") for name, _ in spec.environment))
    for shown in (hidden, dataclasses.replace(hidden, blobs=())):
        text = json.dumps(shown.to_json(), separators=(",", ":"))
        if len(text) <= _LARGEST_ANNOTATION:
            break
    return text


def input_secret(
    spec: JobSpec, settings: PodSettings, owner: Mapping[str, Any], data: Mapping[str, bytes]
) -> dict[str, Any]:
    """The Secret that a run's pods wait for. It is deleted with the run's object.

    Args:
        spec: The job.
        settings: As for the object.
        owner: From `owner_of`.
        data: Bytes by the names of `contract.InputFiles`.
    """
    name = input_secret_name(object_name(spec.name, settings.run))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _beside(spec, settings, owner, name),
        "type": "Opaque",
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }


def headless_service(spec: JobSpec, settings: PodSettings, owner: Mapping[str, Any]) -> dict[str, Any]:
    """The Service that gives the pods of a run their host names, also before they are ready.

    Args:
        spec: The job.
        settings: As for the object.
        owner: From `owner_of`.
    """
    name = object_name(spec.name, settings.run)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _beside(spec, settings, owner, name),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {OBJECT_LABEL: name}},
    }


def owner_of(made: Mapping[str, Any]) -> dict[str, Any]:
    """The reference by which other objects belong to an object that was created; empty before it has a UID."""
    meta = made["metadata"]
    if "uid" not in meta:
        return {}
    return {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "blockOwnerDeletion": False,
    }


def _beside(spec: JobSpec, settings: PodSettings, owner: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": settings.namespace,
        "labels": own_labels(spec.name),
        **({"ownerReferences": [dict(owner)]} if owner else {}),
    }
