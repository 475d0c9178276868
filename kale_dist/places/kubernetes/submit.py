"""From a job's specification to its objects on a cluster: settled and checked, then created.

What is created is an object of some kind, and one Secret that it owns: the pods wait for the Secret, and it is deleted
with the object.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import pathlib
import threading
from typing import Any

from kale_dist import config
from kale_dist.config import Config
from kale_dist.errors import BackendError, ConfigError, log, note, warn
from kale_dist.image import for_job
from kale_dist.job import records
from kale_dist.job.records import FIRST_LIFE, Life
from kale_dist.job.spec.job_spec import JobSpec, Request, Settled
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.recipe import Recipe
from kale_dist.job.view import facts
from kale_dist.places import manifests, orders
from kale_dist.places.kubernetes import client, errand, objects, preflight, roles, self_pod
from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.self_pod import SelfPod
from kale_dist.places.manifests import KINDS, Kind, kind_of, object_settings, owner_of
from kale_dist.wire import InputFiles, Order, Source, encode, encode_json, payload
from kale_dist.wire.blobs import FolderStore, Store, map_file, pack_blobs
from kale_dist.wire.url_store import UrlStore
from kale_dist.worker.rank import process_state

_SECRET_BYTES = 1_000_000


def settle(request: Request, *, name: str, image: str, recipe: Recipe | None, submit: bool) -> Settled:
    """Settle namespace, image, kind and form of a job, its volumes, user and store; look whether it could run.

    Arguments as for `Backend.settle`. Without a submission a request is also settled where no cluster can be reached, and no
    image is made.

    Raises:
        ConfigError: There is no image, or the cluster does not serve the kind.
        BackendError: The job could not run; the message gives the reason.
    """
    configured, asked = config.load(), request.cluster
    cluster = _reach(asked, configured, required=submit)
    own = self_pod.find(cluster) if cluster is not None else None
    asked = dataclasses.replace(asked, queue=asked.queue or configured.queue)
    asked = objects.choose(cluster, asked, request.policy) if cluster is not None else asked
    found = preflight.look_at_namespace(cluster, KINDS[asked.kind]) if cluster is not None else None
    namespace = cluster.namespace if cluster is not None else asked.namespace or configured.namespace or "default"
    own_secrets = own.image_pull_secrets if own is not None and not image else ()
    options = dataclasses.replace(
        asked,
        namespace=namespace,
        service_account=asked.service_account or configured.service_account,
        image_pull_secrets=asked.image_pull_secrets or configured.image_pull_secrets or own_secrets,
        run_as_user=own.run_as_user if asked.run_as_user is None and own is not None else asked.run_as_user,
        master=False if asked.master is None and found is not None and found.forbids_master else asked.master,
        network_policy=_network_policy(asked, found),
    )
    volumes = (*request.volumes, *self_pod.own_volumes(request.volumes, own, namespace))
    options = dataclasses.replace(options, affinity=self_pod.affinity_of(options, volumes, own))
    resources, note = request.resources, ""
    if cluster is not None and found is not None and (resources.gpus or (request.cuda and resources.gpus is None)):
        resources, note = preflight.fit_gpus(cluster, request, found.quotas)
    cores = resources.filled(cuda=request.cuda).cpu or 0.0
    free_cores = found.free_cores if found is not None else math.inf
    if resources.cpu_limit is None and cores * request.topology.processes_per_pod > free_cores:
        resources = dataclasses.replace(resources, cpu_limit=cores)
    store = request.store or configured.store or self_pod.own_store(own)
    image = _image(image, recipe, configured, own, cuda=request.cuda)

    def settled(image: str) -> Settled:
        looked_up = dataclasses.replace(request, volumes=volumes, resources=resources, store=store, cluster=options)
        prints_results = found is not None and not found.granted.issuperset(roles.CONNECT)
        return Settled.of(looked_up, name=name, image=image, recipe=recipe, prints_results=prints_results)

    # An API server wants an image, also one that is asked before the image is made: a refusal shall not cost a build.
    draft = settled(image or (recipe.base if recipe is not None else "") or preflight.NOT_MADE_YET)
    if cluster is None or found is None or not submit:
        return settled(image)
    for line in (*self_pod.about_claims(request, draft, own), *([note] if note else [])):
        log(line)
    if store and not request.store and not configured.store:
        warn(
            f"Results, and the snapshot if it is large, are kept in {store}, a volume of this notebook's pod that "
            "other pods can write to. store= names another place"
        )
    _check(cluster, settled(draft.image), own, found)
    # The image of a job that is submitted again is made.
    return settled(image if isinstance(request, Settled) else _made(cluster, settled(image), configured))


def render(spec: JobSpec) -> str:
    """The object and its Secret as YAML. What the Secret holds in bytes is left out, and named in a comment."""
    source, settings, kind = _source(spec), object_settings.ObjectSettings(), kind_of(spec)
    made = json.dumps(encode(order(spec, source)), indent=2).encode()
    secret = manifests.input_secret(spec, settings, {}, {InputFiles.ORDER: made})
    files = [InputFiles.RUNTIME, InputFiles.KEY, *([InputFiles.SNAPSHOT] if source is Source.INPUT else [])]
    recipe = f"# {for_job.describe(spec.recipe, spec.image)}.\n" if spec.recipe is not None else ""
    has_policy = spec.cluster.network_policy is not False
    policies = (manifests.network_policy(spec, settings, {}),) if has_policy else ()
    without = "" if has_policy else f"# It gets no NetworkPolicy. {roles.POLICIES.without}.\n"
    when = "" if spec.prints_results else " if no notebook is connected at the job's end"
    printed = f"# Results of up to 1 MB are printed into the first pod's log{when}, {roles.WHO_READS_LOGS}.\n"
    return (
        f"{recipe}{without}{printed * (spec.prints_results or not spec.store)}"
        f"# The {kind.name} becomes the owner of what follows it, once it has a uid. "
        f"The Secret also gets: {', '.join(files)}.\n"
        f"# Snapshot {spec.snapshot}: {spec.snapshot_bytes:,} bytes in {len(spec.blobs)} blobs.\n"
        f"{manifests.to_yaml(kind.make(spec, settings), *policies, *kind.beside(spec, settings, {}), secret)}"
    )


def create(
    cluster: Cluster, spec: JobSpec, key: bytes, life: Life = FIRST_LIFE, checkpoint: pathlib.Path | None = None
) -> tuple[Any, Source]:
    """Create a job's object, then at once what stands beside it. If that is refused, the object is deleted again.

    Args:
        cluster: Where.
        spec: The job, settled.
        key: Its secret bytes.
        life: Which object of the job it is.
        checkpoint: What the ranks resume from. One that a Secret cannot hold is in the job's store, or sent as a part of the snapshot.

    Returns:
        The object as the cluster has it, and where its pods find the snapshot.

    Raises:
        JobExistsError: The name is taken.
        StoreError: The store cannot be written.
        BackendError: The cluster refused; the message names the cause and what to do.
    """
    source = _place_bytes(cluster, spec, logs=life.number == 1)
    data, source = _input(spec, key, source, life, checkpoint)
    namespace, kind = spec.cluster.namespace, kind_of(spec)
    settings = object_settings.ObjectSettings(life=life.number, submitter=cluster.identity)
    made = _uninterrupted(cluster, kind, kind.make(spec, settings))
    try:
        owner, core = owner_of(made), cluster.core
        secret: Any = manifests.input_secret(spec, settings, owner, data)
        if spec.cluster.network_policy is not False:
            objects.create_policy(cluster, spec, manifests.network_policy(spec, settings, owner))
        services: list[Any] = list(kind.beside(spec, settings, owner))
        for service in services:
            with objects.asking("create", kind, namespace, service["metadata"]["name"], "services"):
                core.create_namespaced_service(namespace, service)
        # The Secret last: the pods wait for it, and so are never without their NetworkPolicy.
        with objects.asking("create", kind, namespace, secret["metadata"]["name"], "secrets"):
            core.create_namespaced_secret(namespace, secret)
    except BaseException:
        # Alone: the Secret or Service that is in the way may be that of another user's job of another kind.
        objects.delete_object(cluster, kind, namespace, made["metadata"]["name"])
        raise
    return made, source


def _uninterrupted(cluster: Cluster, kind: Kind, wanted: Any) -> Any:
    """Create an object. On Ctrl-C, delete it once the cluster has answered: its pods alone would wait for their Secret forever."""
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def ask() -> None:
        try:
            answer.set_result(objects.create(cluster, kind, wanted))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            answer.set_exception(error)

    thread = threading.Thread(target=ask, name="kale_dist create", daemon=True)
    try:
        thread.start()
        return answer.result()
    except KeyboardInterrupt:
        # It may come before the thread runs, and then there is no answer.
        with contextlib.suppress(TimeoutError):
            if answer.exception(client.READ_S) is None:
                objects.delete_object(cluster, kind, wanted["metadata"]["namespace"], wanted["metadata"]["name"])
        raise


# -- settling and checking ----------------------------------------------------------------------------------------------


def _reach(asked: ClusterOptions, configured: Config, *, required: bool) -> Cluster | None:
    try:
        return client.connect(asked.namespace, asked.context, configured, secret=asked.cluster_secret)
    except (BackendError, ConfigError):
        if required:
            raise
        return None


def _network_policy(asked: ClusterOptions, found: preflight.Namespace | None) -> bool | None:
    """What `network_policy` is where this user's rights are known: not made without the right to it, and missed if it was asked for.

    Raises:
        ConfigError: It was asked for, and this user may not make it.
    """
    if found is None or "create networkpolicies" in found.granted or asked.network_policy is False:
        return asked.network_policy
    if asked.network_policy:
        problem = "you may not create networkpolicies in the job's namespace"
        remedy = "Have an administrator grant it (`kale-dist doctor --on kubernetes` prints the Role), or leave it out"
        raise ConfigError("network_policy", problem, remedy)
    return False


def _image(asked: str, recipe: Recipe | None, configured: Config, own: SelfPod | None, *, cuda: bool) -> str:
    """The image, or what its recipe goes on top of; empty where an image like this Python has to be made."""
    image = asked or configured.image or (own.image if own is not None else "")
    if not image and recipe is None and not configured.registry:
        return for_job.make(None, image="", settings=configured, cuda=cuda, in_engine=False)
    return image


def _made(cluster: Cluster, spec: Settled, configured: Config) -> str:
    """The image by its digest, made now if it has to be."""

    def ask(image: str) -> bytes:
        # It needs packages that a job without an image of its own does not need.
        from kale_dist.image import base_image

        return errand.ask(cluster, spec, image, base_image.COMMAND, base_image.ENVIRONMENT)

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


def _check(cluster: Cluster, spec: Settled, own: SelfPod | None, namespace: preflight.Namespace) -> None:
    """Ask the cluster whether the job would run, and warn the user of what it would lack."""
    if spec.store and not spec.store.startswith(object_settings.CLAIM_SCHEME):
        # A protocol that this side cannot speak would show only when the results are wanted.
        UrlStore(spec.store)
    found = preflight.check(cluster, spec, namespace)
    fatal = [str(item.trouble) for item in found if item.is_fatal]
    if fatal:
        raise BackendError(f"The job cannot run in the namespace {cluster.namespace!r}. " + "\n".join(fatal))
    for item in found:
        warn(str(item.trouble))
    if own is not None and own.image_warning and spec.image == own.image:
        warn(own.image_warning)
    if not spec.store and spec.keep_warm_s is None:
        left, wait_s = object_settings.left_results(spec)[0], spec.cluster.collect_wait_s
        then = f"go to {left}" if left else f"are lost {facts.duration(wait_s)} later; store='pvc://claim' keeps them"
        log(f"If no notebook is connected when the job ends, results over 1 MB and a failed job's checkpoint {then}")


# -- what a job gets ----------------------------------------------------------------------------------------------------


def _place_bytes(cluster: Cluster, spec: JobSpec, *, logs: bool) -> Source:
    """Put the snapshot where the pods will find it, if that is not the job's own input; gives where they do."""
    source = _source(spec)
    if source is Source.URL:
        _put(spec, UrlStore(spec.store))
    elif source is Source.STREAM:
        folder = self_pod.claim_here(spec, self_pod.find(cluster))
        if folder is not None:
            _put(spec, FolderStore(folder))
            return Source.FOLDER
        if logs:
            more = ", and the packages that their image lacks," if spec.offer.packages else ""
            size = spec.snapshot_bytes + sum(package.packed_bytes for package in spec.offer.packages)
            note(
                f"The job's code and data ({spec.snapshot_bytes / 1e3:,.0f} kB){more} are sent to its pods when they run, which takes"
                f" about {max(1, round(size / 1e7))} s at 10 MB/s. Leave this kernel running until the job runs"
            )
    return source


def _put(spec: JobSpec, store: Store) -> None:
    """Copy what the store lacks of the snapshot."""
    ours = FolderStore(records.blobs_dir())
    for digest in (*spec.blobs, *spec.offer.blobs):
        if not store.exists(digest):
            store.put([ours.open(digest)])


def _source(spec: JobSpec) -> Source:
    """Where the pods get the snapshot from, as far as the specification decides it."""
    if spec.snapshot_bytes <= object_settings.INPUT_BYTES and not spec.offer.packages:
        return Source.INPUT
    return Source.URL if spec.store and not spec.store.startswith(object_settings.CLAIM_SCHEME) else Source.STREAM


def order(spec: JobSpec, source: Source, life: Life = FIRST_LIFE, *, torch_flags: Any = ()) -> Order:
    """The order that the agents get."""
    claim, folder = object_settings.claim_of(spec)
    pending_s = spec.cluster.pending_timeout_s
    return orders.order_of(
        spec,
        used_restarts=life.used_restarts,
        object=object_settings.object_name(spec.name, life.number),
        processes_per_agent=spec.topology.processes_per_pod,
        head=kind_of(spec).head_host(spec, life.number),
        port=object_settings.PORT,
        store=f"{object_settings.STORE_FOLDER}/{folder}".rstrip("/") if claim else spec.store,
        source=source,
        torch_flags=torch_flags,
        start_wait_s=math.inf if pending_s is None else pending_s,
        input_wait_s=spec.cluster.input_wait_s,
        collect_wait_s=spec.cluster.collect_wait_s,
        metrics_port=spec.cluster.metrics_port or 0,
        replaces_pods=kind_of(spec).replaces_pods(spec),
        returns_head=kind_of(spec).returns_head(spec),
        outcomes_on_stdout=spec.prints_results,
        ends_unfollowed=not spec.store,
        left_in=object_settings.left_results(spec)[1],
        **kind_of(spec).order(spec),
    )


def _input(
    spec: JobSpec, key: bytes, source: Source, life: Life, checkpoint: pathlib.Path | None
) -> tuple[dict[str, bytes], Source]:
    """Files of a job's input, and where its pods find the snapshot."""
    data = {InputFiles.RUNTIME: payload.runtime_zip(), InputFiles.KEY: key}
    store, digest = FolderStore(records.blobs_dir()), ""
    if spec.snapshot_bytes <= object_settings.INPUT_BYTES:
        data[InputFiles.SNAPSHOT] = pack_blobs(store, spec.blobs)
    if checkpoint is not None and checkpoint.stat().st_size < _SECRET_BYTES - sum(map(len, data.values())):
        data[InputFiles.CHECKPOINT] = checkpoint.read_bytes()
    elif checkpoint is not None and not spec.store:
        data.pop(InputFiles.SNAPSHOT, None)
        digest, source = store.put([map_file(checkpoint)]), Source.STREAM
    made = order(spec, source, life, torch_flags=process_state.read_flags(cuda=spec.cuda))
    made = dataclasses.replace(made, blobs=(*made.blobs, *filter(None, [digest])), checkpoint=digest)
    data[InputFiles.ORDER] = encode_json(made)
    return data, source
