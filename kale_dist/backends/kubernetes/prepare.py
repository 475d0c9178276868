"""Prepares a job on a cluster: fills in what its specification leaves open, and asks the cluster whether it would run."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import pathlib
import sys

from kale_dist import config, records
from kale_dist.backends.kubernetes import checks, client, errand, self_pod, served, submit
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.self_pod import MountedClaim, SelfPod
from kale_dist.blobs import FolderStore, Store
from kale_dist.config import Config
from kale_dist.contract import Source
from kale_dist.errors import BackendError, ConfigError, warn
from kale_dist.image import for_job
from kale_dist.places import ClusterOptions
from kale_dist.spec import JobSpec
from kale_dist.url_store import UrlStore
from kale_dist.volumes import Volume, VolumeKind, hidden_by

_MIB = 1 << 20
_LONG_S = 3600.0
_NOT_MADE_YET = "made-first"
"""Stands for the image in dry runs: an API server wants one."""


def prepare(spec: JobSpec, *, submits: bool) -> JobSpec:
    """Settle a specification.

    Args:
        spec: As the call gave it.
        submits: Whether a submission follows. Otherwise it is also settled where no cluster can be reached.

    Returns:
        The specification with namespace, image, kind and form of the job, user and store.

    Raises:
        ConfigError: There is no image, or the cluster does not serve the kind.
        BackendError: The job could not run; the message says why.
    """
    configured = config.load()
    cluster = _reach(spec, configured, required=submits)
    own = self_pod.find(cluster) if cluster is not None else None
    options = spec.cluster
    kind = served.choose(cluster, options.kind) if cluster is not None else None
    namespace = cluster.namespace if cluster is not None else options.namespace or configured.namespace or "default"
    settled = dataclasses.replace(
        spec,
        image=_image(spec, configured, own),
        volumes=(*spec.volumes, *own_volumes(spec, own, namespace)),
        store=spec.store or configured.store or _own_volume(own),
        cluster=dataclasses.replace(
            options,
            namespace=namespace,
            service_account=options.service_account or configured.service_account,
            queue=options.queue or configured.queue,
            image_pull_secrets=options.image_pull_secrets
            or configured.image_pull_secrets
            or (own.image_pull_secrets if own is not None and not spec.image else ()),
            kind=kind.word if kind is not None else options.kind,
            run_as_user=own.run_as_user if options.run_as_user is None and own is not None else options.run_as_user,
        ),
    )
    if cluster is None or kind is None:
        return settled
    found = checks.look_at_namespace(cluster, kind)
    if settled.cluster.master is None and found.forbids_master:
        settled = dataclasses.replace(settled, cluster=dataclasses.replace(settled.cluster, master=False))
    settled = served.with_runtime_field(cluster, settled)
    settled = beside_notebook(settled, own)
    if found.needs_cpu_limit and settled.resources.cpu_limit is None:
        limit = dataclasses.replace(settled.resources, cpu_limit=settled.resources.cpu or 1.0)
        settled = dataclasses.replace(settled, resources=limit)
    if not submits:
        return settled
    for line in about_claims(spec, settled, own):
        print(f"[kale-dist] {line}", file=sys.stderr, flush=True)  # noqa: T201 - beside the cell's own output, as other notes are
    if settled.store and not spec.store and not configured.store:
        warn(
            f"Results, and the snapshot if it is large, are kept in {settled.store}, a volume of this notebook's pod that "
            "other pods can write to. store= names another place"
        )
    # Asked before an image is made: what is refused anyway shall not cost a build.
    base = settled.image or (settled.recipe.base if settled.recipe is not None else "") or _NOT_MADE_YET
    _check(cluster, dataclasses.replace(settled, image=base), own, found)
    return dataclasses.replace(settled, image=_made(cluster, settled, configured))


def place_bytes(cluster: Cluster, spec: JobSpec, *, says: bool) -> Source:
    """Put the snapshot where the pods will find it, if that is not the job's own input.

    Args:
        cluster: Where the job will run.
        spec: The job.
        says: Whether to warn that this kernel has to live until the snapshot was sent.

    Returns:
        Where they find it.

    Raises:
        StoreError: The store cannot be written.
    """
    source = submit.source_of(spec)
    if source is Source.URL:
        _put(spec, UrlStore(spec.store))
    elif source is Source.STREAM:
        folder = claim_here(spec, self_pod.find(cluster))
        if folder is not None:
            _put(spec, FolderStore(folder))
            return Source.FOLDER
        if says:
            warn(
                f"The snapshot has {spec.snapshot_bytes / _MIB:,.0f} MiB: what the pods lack of it is sent when they run. "
                "Until a line of the log says so, this kernel has to live"
            )
    return source


def claim_here(spec: JobSpec, own: SelfPod | None) -> pathlib.Path | None:
    """The store's folder as this process sees it, if the claim is mounted in its own pod.

    Args:
        spec: The job.
        own: This process's pod; None outside of the cluster.
    """
    claim, folder = submit.claim_of(spec)
    for mounted in own.claims if own is not None and claim else ():
        inside = pathlib.PurePosixPath("/", folder)
        root = pathlib.PurePosixPath("/", mounted.sub_path)
        if mounted.claim == claim and not mounted.read_only and inside.is_relative_to(root):
            return pathlib.Path(mounted.path) / inside.relative_to(root)
    return None


def _reach(spec: JobSpec, configured: Config, *, required: bool) -> Cluster | None:
    try:
        return client.connect(
            spec.cluster.namespace, spec.cluster.context, configured, secret=spec.cluster.cluster_secret
        )
    except (BackendError, ConfigError):
        if required:
            raise
        return None


def _image(spec: JobSpec, configured: Config, own: SelfPod | None) -> str:
    """The image, or what its recipe goes on top of; empty where an image like this Python has to be made."""
    image = spec.image or configured.image or (own.image if own is not None else "")
    if not image and spec.recipe is None and not configured.registry:
        return for_job.make(None, image="", settings=configured, cuda=spec.cuda, in_engine=False)
    return image


def _made(cluster: Cluster, spec: JobSpec, configured: Config) -> str:
    """The image by its digest, made now if it has to be."""

    def ask(image: str) -> bytes:
        # It needs packages that a job without an image of its own does not need.
        from kale_dist.image import base

        return errand.ask(cluster, spec, image, base.COMMAND, base.ENVIRONMENT)

    secrets = []
    if spec.recipe is not None or not spec.image:
        for name in spec.cluster.image_pull_secrets:
            # The registry may let this machine in without it.
            with contextlib.suppress(Exception):
                data = cluster.core.read_namespaced_secret(name, spec.cluster.namespace).data or {}
                secrets.append(base64.b64decode(data[".dockerconfigjson"]).decode())
    return for_job.make(
        spec.recipe,
        image=spec.image,
        settings=configured,
        cuda=spec.cuda,
        in_engine=False,
        pull_secret_jsons=tuple(secrets),
        ask=ask,
        adds_torch=spec.cluster.kind != "tf",
    )


def own_volumes(spec: JobSpec, own: SelfPod | None, namespace: str) -> tuple[Volume, ...]:
    """The notebook's ReadWriteMany claims, which pods of all nodes can mount: a path then means the same in both.

    Args:
        spec: The job, whose own volumes go first.
        own: This process's pod; None outside of the cluster.
        namespace: Where the job runs: a claim is its namespace's.
    """
    taken = {volume.mount_path for volume in spec.volumes}
    return tuple(
        Volume(
            mount_path=claim.path, source=claim.claim, kind=VolumeKind.CLAIM, sub_path=claim.sub_path, read_only=claim.read_only
        )
        for claim in _own_claims(own, namespace)
        if "ReadWriteMany" in claim.access_modes and claim.path not in taken and not hidden_by(claim.path)
    )  # fmt: skip


def beside_notebook(spec: JobSpec, own: SelfPod | None) -> JobSpec:
    """Hold the pods to the notebook's node if the call names a ReadWriteOnce claim of its pod.

    Only that node can mount it. A call that chooses nodes itself is left as it is.

    Args:
        spec: The job, settled in all else.
        own: This process's pod; None outside of the cluster.
    """
    options = spec.cluster
    named = {volume.source for volume in spec.volumes if volume.kind is VolumeKind.CLAIM}
    if own is None or not own.node or _chooses_nodes(options):
        return spec
    if not any(claim.is_of_one_node and claim.claim in named for claim in _own_claims(own, options.namespace)):
        return spec
    field = {"key": "metadata.name", "operator": "In", "values": [own.node]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    affinity = json.dumps({"nodeAffinity": {checks.NODE_REQUIRED: terms}})
    return dataclasses.replace(spec, cluster=dataclasses.replace(options, affinity=affinity))


def about_claims(spec: JobSpec, settled: JobSpec, own: SelfPod | None) -> list[str]:
    """What the log says of the claims of the notebook's pod: which the pods mount, and which they do not.

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
        if name not in {*named, submit.claim_of(settled)[0]}:
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
    """Whether the call says on which nodes the pods run, itself or by a queue with nodes of its own."""
    is_patched = any(field in options.patch for field in ("nodeSelector", "nodeName", "affinity"))
    return bool(options.node_selector or options.affinity or options.queue or is_patched)


def _own_volume(own: SelfPod | None) -> str:
    """A volume of the notebook's pod that other pods can write into, too."""
    shared = [claim for claim in (own.claims if own is not None else ()) if claim.is_shared]
    if not shared:
        return ""
    return f"{submit.CLAIM_SCHEME}{shared[0].claim}/{shared[0].sub_path}".rstrip("/") + "/.kale-dist"


def _put(spec: JobSpec, store: Store) -> None:
    """Copy what the store lacks of the snapshot."""
    ours = FolderStore(records.blobs_dir())
    for digest in spec.blobs:
        if not store.exists(digest):
            store.put([ours.open(digest)])


def _check(cluster: Cluster, spec: JobSpec, own: SelfPod | None, namespace: checks.Namespace) -> None:
    """Ask the cluster whether the job would run, and tell the user what it would lack."""
    if spec.store and not spec.store.startswith(submit.CLAIM_SCHEME):
        # A protocol that this side cannot speak would show only when the results are wanted.
        UrlStore(spec.store)
    found = checks.check(cluster, spec, namespace)
    fatal = [str(item.trouble) for item in found if item.is_fatal]
    if fatal:
        raise BackendError(f"The job cannot run in the namespace {cluster.namespace!r}. " + "\n".join(fatal))
    for item in found:
        warn(str(item.trouble))
    if own is not None and own.image_warning and spec.image == own.image:
        warn(own.image_warning)
    if spec.policy.timeout_s is not None and spec.policy.timeout_s > _LONG_S and not spec.store:
        warn(
            f"The job may run for {spec.policy.timeout_s / _LONG_S:.1f} hours, and its results are lost if this kernel "
            f"does not fetch them within {spec.cluster.collect_wait_s:g} s of its end: give a store, such as "
            "store='pvc://claim'"
        )
