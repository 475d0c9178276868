"""The pod that this process runs in, if it is a notebook in the cluster: its image, its user, its volumes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import socket
from typing import Any

from kale_dist.backends.kubernetes.client import Cluster, own_namespace

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
    def is_shared(self) -> bool:
        """Whether pods of several nodes can write into it."""
        return "ReadWriteMany" in self.access_modes and not self.read_only

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
    fs_group: int
    """Group of the pod's volumes, or else of this process."""
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
    name = _own_name()
    plain = SelfPod(namespace=namespace, name=name, run_as_user=os.getuid(), fs_group=os.getgid())
    with contextlib.suppress(Exception):
        pod: Any = cluster.core.read_namespaced_pod(name, namespace)
        # The kubeconfig may be that of another cluster, where a pod of this name is another user's.
        if uid in ("", pod.metadata.uid):
            return describe(pod, container, plain, cluster)
    return plain


def describe(pod: Any, container: str, plain: SelfPod, cluster: Cluster) -> SelfPod:
    """What a pod's object tells of one of its containers.

    Args:
        pod: The object, as the kubernetes client has it.
        container: The container's name; empty if it is not known.
        plain: What is known without the object.
        cluster: Where claims are looked up.
    """
    found = _container(pod, container)
    if found is None:
        return plain
    statuses = {status.name: status for status in (pod.status.container_statuses or ())}
    status = statuses.get(found.name)
    image, warning = _image(found.image, getattr(status, "image_id", "") or "")
    security = pod.spec.security_context
    group = getattr(security, "fs_group", None)
    secrets = tuple(secret.name for secret in pod.spec.image_pull_secrets or () if secret.name)
    return dataclasses.replace(
        plain,
        container=found.name,
        image=image,
        image_warning=warning,
        image_pull_secrets=secrets,
        fs_group=plain.fs_group if group is None else group,
        claims=_claims(pod, found, plain.namespace, cluster),
        node=pod.spec.node_name or "",
    )


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
