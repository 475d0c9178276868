"""The pods of a job: their labels, default memory and cores, volumes and environment. Pure."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from kale_dist.job.spec.job_spec import Settled, Volume, VolumeKind
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.quantities import memory_text
from kale_dist.job.spec.resources import Resources
from kale_dist.places.manifests import bootstrap
from kale_dist.places.manifests.object_settings import (
    CONTAINER_ANNOTATION,
    FIRST_POD_LABEL,
    HOME_FOLDER,
    INPUT_FOLDER,
    OBJECT_LABEL,
    PORT,
    STORE_FOLDER,
    WORK_FOLDER,
    ObjectSettings,
    claim_of,
    input_secret_name,
    object_name,
    own_labels,
)
from kale_dist.wire import PodVariable

_USER = "kale-dist"
_ISTIO = "sidecar.istio.io/inject"
_DEADLINE_MARGIN_S = 600
ERRAND_S = 600
"""An errand ends by itself after so long."""

_RDMA = ("rdma", "/efa", "infiniband", "/roce", "/ib")
"""In the names of resources of network cards that write into memory by themselves."""

DEFAULT_USER = 1000
"""User and group of the processes where none is given."""

AS_CLUSTER_LIKES = -1
"""As `run_as_user`: no user is asked for; OpenShift gives one itself."""

CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""What Pod Security "restricted" asks of a container."""


def pod_template(
    spec: Settled,
    settings: ObjectSettings,
    *,
    container: str,
    first_pod: int,
    ranks: int,
    index: str = "",
    role: str = "",
) -> dict[str, Any]:
    """The template of one replica type's pods.

    Args:
        spec: The job.
        settings: Of the object.
        container: The name that the agent's container has in this kind of object.
        first_pod: Number of the type's first pod.
        ranks: Ranks of each of these pods.
        index: Field of the pod that holds its index in the type; empty for a type of one pod.
        role: The type, for `kd.Kubernetes(roles=...)`; empty for a kind whose pods are all alike.
    """
    cluster = spec.cluster
    asked = dataclasses.replace(spec.resources, **roles_of(spec).get(role, {})).filled(cuda=spec.cuda)
    volumes, mounts = _volumes(spec, settings, asked, ranks)
    has_metrics = bool(cluster.metrics_port) and first_pod == 0 and not settings.command
    main = {
        "name": container,
        "image": spec.image,
        **_if("imagePullPolicy", cluster.image_pull_policy),
        "command": list(settings.command) or bootstrap.command(),
        "env": _environment(spec, first_pod, index, container),
        # The Training Operator gives a port of this name to its Services, or adds its own.
        "ports": [
            {"name": "pytorchjob-port", "containerPort": PORT},
            {"name": "agents", "containerPort": PORT + 1},
            {"name": "bytes", "containerPort": PORT + 2},
            *([{"name": "metrics", "containerPort": cluster.metrics_port}] if has_metrics else []),
        ],
        "resources": asked.of_container(ranks),
        "volumeMounts": mounts,
        "securityContext": _security(asked),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    pod = {
        **_if("activeDeadlineSeconds", ERRAND_S if settings.command else _deadline_s(spec)),
        "automountServiceAccountToken": cluster.mount_service_account_token,
        **_if("serviceAccountName", cluster.service_account),
        # Otherwise each Service of the namespace adds seven variables.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1 if settings.command else spec.policy.pod_grace_s,
        "securityContext": pod_security(spec.cluster.run_as_user),
        **_if("imagePullSecrets", [{"name": name} for name in cluster.image_pull_secrets]),
        **_if("nodeSelector", dict(cluster.node_selector)),
        **_if("tolerations", _tolerations(cluster, asked)),
        **_if("affinity", json.loads(cluster.affinity or "{}")),
        **_if("priorityClassName", cluster.priority_class),
        **_if("runtimeClassName", cluster.runtime_class),
        **_if("schedulerName", cluster.scheduler_name),
        "containers": [main],
        "volumes": volumes,
    }
    labels = {
        **own_labels(spec.name, is_errand=bool(settings.command)),
        OBJECT_LABEL: object_name(spec.name, settings.life),
        FIRST_POD_LABEL: str(first_pod),
        _ISTIO: "false",
        **dict(cluster.labels),
    }
    scraped = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(cluster.metrics_port),
        "prometheus.io/path": "/metrics",
    }
    annotations = {
        CONTAINER_ANNOTATION: container,
        _ISTIO: "false",
        **(scraped if has_metrics else {}),
        **dict(cluster.annotations),
    }
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod}


def roles_of(spec: Settled) -> dict[str, dict[str, Any]]:
    """What `kd.Kubernetes(roles=...)` sets of the resources of each role."""
    given: dict[str, dict[str, Any]] = json.loads(spec.cluster.roles or "{}")
    pairs = {role: tuple((name, amount) for name, amount in one.get("extended", ())) for role, one in given.items()}
    return {role: {**one, **({"extended": pairs[role]} if pairs[role] else {})} for role, one in given.items()}


def _if(key: str, value: Any) -> dict[str, Any]:
    """Return the entry, if its value is not empty."""
    return {key: value} if value else {}


def _deadline_s(spec: Settled) -> int | None:
    """Seconds after which the kubelet ends a pod whose agent should have done so itself long before."""
    pending_s = spec.cluster.pending_timeout_s
    if spec.policy.timeout_s is None or pending_s is None:
        return None
    waits = pending_s + spec.cluster.input_wait_s + spec.cluster.collect_wait_s
    return math.ceil(spec.policy.timeout_s + waits + _DEADLINE_MARGIN_S)


def pod_security(run_as_user: int | None) -> dict[str, Any]:
    """What Pod Security "restricted" asks of a pod.

    Args:
        run_as_user: User of the processes and group of the volumes' files, as `kd.Kubernetes(run_as_user=...)` has it.
    """
    user = DEFAULT_USER if run_as_user is None else run_as_user
    whose = {"runAsUser": user, "runAsGroup": user, "fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch"}
    return {
        "runAsNonRoot": user != 0,
        **({} if user == AS_CLUSTER_LIKES else whose),
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def identity_of(home: str) -> dict[str, str]:
    """Variables of a user that is only a number, with neither a name nor a home: torch.compile asks for both.

    Args:
        home: A folder that the user can write into.
    """
    return {
        "HOME": home,
        "USER": _USER,
        "LOGNAME": _USER,
        "XDG_CACHE_HOME": f"{home}/.cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{home}/.cache/torchinductor",
        "TRITON_CACHE_DIR": f"{home}/.cache/triton",
    }


def _environment(spec: Settled, first_pod: int, index: str, container: str) -> list[dict[str, Any]]:
    given = dict(spec.environment)
    secret = {variable for variable, _, _ in spec.cluster.secret_environment}
    fixed = {**identity_of(HOME_FOLDER), "TMPDIR": "/tmp", "PYTHONUNBUFFERED": "1"}  # noqa: S108 - a volume of the pod's own
    variables = {PodVariable.INPUT: INPUT_FOLDER, PodVariable.WORK: WORK_FOLDER, PodVariable.FIRST_POD: str(first_pod)}
    number = {"valueFrom": {"fieldRef": {"fieldPath": index}}} if index else {"value": "0"}
    request = {"resourceFieldRef": {"containerName": container, "resource": "requests.cpu", "divisor": "1m"}}
    return [
        *({"name": name, "value": value} for name, value in fixed.items() if name not in given | dict.fromkeys(secret)),
        *({"name": name.value, "value": value} for name, value in variables.items()),
        {"name": PodVariable.REPLICA_INDEX.value, **number},
        {"name": PodVariable.CPU_REQUEST.value, "valueFrom": request},
        {"name": PodVariable.NODE.value, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        # The kubelet would replace $(NAME) by that variable's value.
        *({"name": name, "value": value.replace("$(", "$$(")} for name, value in given.items()),
        *(
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
            for variable, name, key in spec.cluster.secret_environment
        ),
    ]


def _security(asked: Resources) -> dict[str, Any]:
    """What Pod Security "restricted" asks for; with RDMA, which pins memory, one capability more than it allows."""
    pins = any(word in name for word in _RDMA for name, _ in asked.extended)
    return CONTAINER_SECURITY | ({"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}} if pins else {})


def _tolerations(cluster: ClusterOptions, asked: Resources) -> list[Any]:
    """Those of the call, and one for the taint that nodes with GPUs often have."""
    given: list[Any] = json.loads(cluster.tolerations or "[]")
    if not asked.gpus or any(one.get("key") == asked.gpu_resource for one in given):
        return given
    return [*given, {"key": asked.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]


def _volumes(
    spec: Settled, settings: ObjectSettings, asked: Resources, ranks: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes and mounts: those that every pod has, then the user's. Mounts of one source share a volume."""
    secret = {"secretName": input_secret_name(object_name(spec.name, settings.life)), "optional": False}
    has_input = not settings.command
    own = [
        ("work", WORK_FOLDER, {}),
        ("home", HOME_FOLDER, {}),
        ("tmp", "/tmp", {}),  # noqa: S108 - a volume of the pod's own
        ("shm", "/dev/shm", {"medium": "Memory", "sizeLimit": memory_text(asked.shm_of(ranks))}),  # noqa: S108 - a volume of the pod's own
    ]
    volumes: list[dict[str, Any]] = [
        *([{"name": "input", "secret": secret}] if has_input else []),
        *({"name": name, "emptyDir": folder} for name, _, folder in own),
    ]
    mounts: list[dict[str, Any]] = [
        *([{"name": "input", "mountPath": INPUT_FOLDER, "readOnly": True}] if has_input else []),
        *({"name": name, "mountPath": path} for name, path, _ in own),
    ]
    names: dict[str, str] = {}
    for number, volume in enumerate((*spec.volumes, *_store(spec, settings))):
        source = _source(volume)
        shared = json.dumps(source) if volume.kind is not VolumeKind.EMPTY_DIR else f"empty {number}"
        if shared not in names:
            names[shared] = f"volume-{len(names)}"
            volumes.append({"name": names[shared], **source})
        mount: dict[str, Any] = {"name": names[shared], "mountPath": volume.mount_path}
        mounts.append({**mount, **_if("subPath", volume.sub_path), **_if("readOnly", volume.read_only)})
    return volumes, mounts


def _store(spec: Settled, settings: ObjectSettings) -> tuple[Volume, ...]:
    """The whole claim: a folder of it that the kubelet has to make belongs to root, so that pods cannot write into it."""
    claim, _ = claim_of(spec)
    return (Volume(mount_path=STORE_FOLDER, source=claim, read_only=bool(settings.command)),) if claim else ()


def _source(volume: Volume) -> dict[str, Any]:
    match volume.kind:
        case VolumeKind.HOST_PATH:
            # Without a type a missing folder would be made, and be empty.
            return {"hostPath": {"path": volume.source, "type": "Directory"}}
        case VolumeKind.EMPTY_DIR:
            medium = _if("medium", "Memory" if volume.in_memory else "")
            limit = _if("sizeLimit", volume.size_gib and memory_text(volume.size_gib))
            return {"emptyDir": {**medium, **limit}}
        case VolumeKind.CONFIG_MAP:
            return {"configMap": {"name": volume.source}}
        case VolumeKind.SECRET:
            return {"secret": {"secretName": volume.source}}
        case _:
            return {"persistentVolumeClaim": {"claimName": volume.source}}
