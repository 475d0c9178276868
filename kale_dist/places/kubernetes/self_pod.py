"""The pod that this process runs in, if it is a notebook in the cluster: its image, its user, its volumes, and what jobs take over of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
from typing import Any

from kale_dist.job.spec.job_spec import Request, Settled
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.volumes import Volume, VolumeKind, hidden_by
from kale_dist.places.kubernetes.client import Cluster, own_namespace
from kale_dist.places.manifests.object_settings import CLAIM_SCHEME, LEFT_FOLDER, claim_of

NODE_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

_MOUNTS = pathlib.Path("/proc/self/mountinfo")
_HOST_NAME = pathlib.Path("/etc/hostname")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MountedClaim:
    """A claim that this container sees."""

    path: str
    """Where it is mounted."""
    claim: str
    sub_path: str = ""
    """Folder of the claim that is mounted instead of its root."""
    read_only: bool = False
    access_modes: tuple[str, ...] = ()
    """Such as `ReadWriteMany`; empty where this user may not read the claim."""

    @property
    def is_of_one_node(self) -> bool:
        """Whether only the pods of one node can mount it."""
        return "ReadWriteOnce" in self.access_modes and "ReadWriteMany" not in self.access_modes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SelfPod:
    """What is known of this process's own pod."""

    namespace: str
    name: str
    run_as_user: int
    """User of this process."""
    container: str = ""
    """Empty, as is all that follows, where the pod cannot be read."""
    image: str = ""
    """By its digest if the node knows it, else by its tag."""
    image_warning: str = ""
    """A sentence, where the image may be another one when pods pull it."""
    image_pull_secrets: tuple[str, ...] = ()
    claims: tuple[MountedClaim, ...] = ()
    node: str = ""


def find(cluster: Cluster) -> SelfPod | None:
    """This process's own pod; None outside of the cluster. What may not be read is left empty."""
    namespace = own_namespace()
    if not namespace or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    uid, container = _from_mounts()
    plain = SelfPod(namespace=namespace, name=_own_name(), run_as_user=os.getuid())
    pod: Any = None
    with contextlib.suppress(Exception):
        pod = cluster.core.read_namespaced_pod(plain.name, namespace)
    # The kubeconfig may be that of another cluster, where a pod of this name is another user's.
    found = _container(pod, container) if pod is not None and uid in ("", pod.metadata.uid) else None
    if found is None:
        return plain
    image_ids = {status.name: status.image_id for status in pod.status.container_statuses or ()}
    image, warning = _image(found.image, image_ids.get(found.name) or "")
    return dataclasses.replace(
        plain,
        container=found.name,
        image=image,
        image_warning=warning,
        image_pull_secrets=tuple(secret.name for secret in pod.spec.image_pull_secrets or () if secret.name),
        claims=_claims(pod, found, namespace, cluster),
        node=pod.spec.node_name or "",
    )


# -- what jobs take over of it ------------------------------------------------------------------------------------------


def own_volumes(volumes: tuple[Volume, ...], own: SelfPod | None, namespace: str) -> tuple[Volume, ...]:
    """The notebook's ReadWriteMany claims, which pods of all nodes can mount: a path then means the same in both.

    Args:
        volumes: The call's, which go first.
        own: This process's pod; None outside of the cluster.
        namespace: Where the job runs: a claim is its namespace's.
    """
    taken = {volume.mount_path for volume in volumes}
    return tuple(
        Volume(
            mount_path=claim.path, source=claim.claim, kind=VolumeKind.CLAIM, sub_path=claim.sub_path, read_only=claim.read_only
        )
        for claim in _own_claims(own, namespace)
        if "ReadWriteMany" in claim.access_modes and claim.path not in taken and not hidden_by(claim.path)
    )  # fmt: skip


def affinity_of(options: ClusterOptions, volumes: tuple[Volume, ...], own: SelfPod | None) -> str:
    """The job's affinity: held to the notebook's node if the call names a ReadWriteOnce claim of its pod.

    Only that node can mount it. A call that chooses nodes itself keeps its own affinity.

    Args:
        options: The job's, settled in all else.
        volumes: The job's.
        own: This process's pod; None outside of the cluster.
    """
    named = {volume.source for volume in volumes if volume.kind is VolumeKind.CLAIM}
    if own is None or not own.node or _chooses_nodes(options):
        return options.affinity
    if not any(claim.is_of_one_node and claim.claim in named for claim in _own_claims(own, options.namespace)):
        return options.affinity
    field = {"key": "metadata.name", "operator": "In", "values": [own.node]}
    return json.dumps({"nodeAffinity": {NODE_REQUIRED: {"nodeSelectorTerms": [{"matchFields": [field]}]}}})


def about_claims(spec: Request, settled: Settled, own: SelfPod | None) -> list[str]:
    """Return the lines to log on the claims of the notebook's pod: which the pods mount, and which they do not.

    Args:
        spec: The job as the call gave it.
        settled: The same, with the claims and the node that were added.
        own: This process's pod; None outside of the cluster.
    """
    lines = []
    for volume in settled.volumes[len(spec.volumes) :]:
        where = f"pvc://{volume.source}/{volume.sub_path}".rstrip("/")
        lines.append(
            f"The pods mount {where} at {volume.mount_path}, as this notebook's own pod does. "
            f"volumes={{{volume.mount_path!r}: 'emptydir://'}} leaves it out"
        )
    named = {volume.source for volume in spec.volumes if volume.kind is VolumeKind.CLAIM}
    taken = {volume.mount_path for volume in spec.volumes}
    is_held = settled.cluster.affinity != spec.cluster.affinity
    first: dict[str, MountedClaim] = {}
    for claim in _own_claims(own, settled.cluster.namespace):
        if claim.is_of_one_node and (claim.claim in named or not (claim.path in taken or hidden_by(claim.path))):
            first.setdefault(claim.claim, claim)
    for name, claim in first.items():
        if name not in {*named, claim_of(settled)[0]}:
            source = f"pvc://{name}/{claim.sub_path}" if claim.sub_path else name
            then = "" if _chooses_nodes(settled.cluster) and not is_held else ", and then all pods run on this node"
            lines.append(
                f"The claim {name} of this notebook is ReadWriteOnce and not mounted. "
                f"volumes={{{claim.path!r}: {source!r}}} mounts it{then}"
            )
        elif name in named and is_held and own is not None:
            lines.append(f"All pods run on this notebook's node {own.node}, as the claim {name} is ReadWriteOnce")
    return lines


def _own_claims(own: SelfPod | None, namespace: str | None) -> tuple[MountedClaim, ...]:
    return own.claims if own is not None and own.namespace == namespace else ()


def _chooses_nodes(options: ClusterOptions) -> bool:
    """Whether the call chooses the nodes of its pods, itself or by a queue with nodes of its own."""
    is_patched = any(field in options.patch for field in ("nodeSelector", "nodeName", "affinity"))
    return bool(options.node_selector or options.affinity or options.queue or is_patched)


def own_store(own: SelfPod | None) -> str:
    """A volume of the notebook's pod that other pods can write into, too."""
    for claim in own.claims if own is not None else ():
        if "ReadWriteMany" in claim.access_modes and not claim.read_only:
            return f"{CLAIM_SCHEME}{claim.claim}/{claim.sub_path}".rstrip("/") + f"/{LEFT_FOLDER}"
    return ""


def claim_here(spec: Settled, own: SelfPod | None) -> pathlib.Path | None:
    """The store's folder as this process sees it, if the claim is mounted in its own pod.

    Args:
        spec: The job.
        own: This process's pod; None outside of the cluster.
    """
    claim, folder = claim_of(spec)
    for mounted in own.claims if own is not None and claim else ():
        inside = pathlib.PurePosixPath("/", folder)
        root = pathlib.PurePosixPath("/", mounted.sub_path)
        if mounted.claim == claim and not mounted.read_only and inside.is_relative_to(root):
            return pathlib.Path(mounted.path) / inside.relative_to(root)
    return None


# -- inside --------------------------------------------------------------------------------------------------------------


def _from_mounts() -> tuple[str, str]:
    """UID of the pod and name of the container, which the kubelet leaves in the source of /dev/termination-log."""
    with contextlib.suppress(OSError):
        found = re.search(r"/pods/([0-9a-f-]{36})/containers/([^/\s]+)/\S* /dev/termination-log", _MOUNTS.read_text())
        if found:
            return found[1], found[2]
    return "", ""


def _own_name() -> str:
    """A pod's name is its host name, of which the variable may have been changed."""
    with contextlib.suppress(OSError):
        return _HOST_NAME.read_text().strip()
    return os.environ.get("HOSTNAME", "") or socket.gethostname()


def _container(pod: Any, name: str) -> Any:
    containers = {container.name: container for container in pod.spec.containers}
    if name in containers:
        return containers[name]
    if len(containers) == 1:
        return next(iter(containers.values()))
    # Kubeflow names a notebook's container as the notebook, and its pod after both.
    own = [container for container in containers if re.fullmatch(rf"{re.escape(container)}-\d+", pod.metadata.name)]
    return containers[own[0]] if own else None


def _image(named: str, image_id: str) -> tuple[str, str]:
    """Reference of an image as other nodes can pull it, and a warning where that is not certain."""
    digested = image_id.removeprefix("docker-pullable://")
    if re.fullmatch(r"[^@\s]+/[^@\s]+@sha256:[0-9a-f]{64}", digested):
        return digested, ""
    if "@sha256:" in named:
        return named, ""
    warning = f"The notebook's image is known as {named} only, not by its digest: pods may pull a newer one of that tag"
    return named, warning


def _claims(pod: Any, container: Any, namespace: str, cluster: Cluster) -> tuple[MountedClaim, ...]:
    sources = {
        volume.name: volume.persistent_volume_claim
        for volume in pod.spec.volumes or ()
        if volume.persistent_volume_claim
    }
    modes: dict[str, tuple[str, ...]] = {}
    found = []
    for mount in container.volume_mounts or ():
        source = sources.get(mount.name)
        if source is None or mount.sub_path_expr:
            continue
        if source.claim_name not in modes:
            modes[source.claim_name] = ()
            with contextlib.suppress(Exception):
                claim: Any = cluster.core.read_namespaced_persistent_volume_claim(source.claim_name, namespace)
                modes[source.claim_name] = tuple(claim.status.access_modes or claim.spec.access_modes or ())
        found.append(
            MountedClaim(
                path=mount.mount_path,
                claim=source.claim_name,
                sub_path=mount.sub_path or "",
                read_only=bool(mount.read_only or source.read_only),
                access_modes=modes[source.claim_name],
            )
        )
    return tuple(found)
