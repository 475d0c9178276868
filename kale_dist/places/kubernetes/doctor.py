"""The lines that `kale-dist doctor --on kubernetes` prints: the checks before a job, also those that pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kale_dist import config
from kale_dist.config import Config
from kale_dist.errors import BackendError, ConfigError
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.checkup import CheckResult, broken, failed, ok, warning
from kale_dist.places.kubernetes import client, objects, preflight, roles, self_pod
from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.preflight import Finding, Namespace
from kale_dist.places.manifests import KINDS, Kind, train_runtime
from kale_dist.places.manifests.train_job import DEFAULT_RUNTIME, MAKE_RUNTIME, TrainJob

_REMEDY = "Correct it and try again"
_WEAKER = (
    "TrainJobs take {runtime}, which makes lost pods again six times in a job at most, and has no ranges of processes. "
    "A job that fails without its notebook holds its GPUs for some minutes and loses its log. Before Trainer 2.2, "
    "processes are root"
)
_STRONGER = f"Have an administrator run {MAKE_RUNTIME}, or where you may: kale-dist runtime --namespace {{namespace}} | kubectl apply -f -"


def examine(namespace: str = "", context: str = "") -> tuple[CheckResult, ...]:
    """Look at the configuration, the connection and the namespace. Never raises for what is found.

    Args:
        namespace: Empty for the one that jobs would go to.
        context: Of the kubeconfig; empty for its current one.
    """
    try:
        configured = config.load()
        cluster = client.connect(namespace=namespace, context=context, config=configured)
    except ConfigError as error:
        return (failed("configuration", f"{error.argument}: {error.problem}", error.remedy),)
    except BackendError as error:
        return (broken("connection", error, _REMEDY),)
    rows = [_configuration(configured), _connection(cluster), _image(configured, cluster)]
    rows.append(_results(configured, cluster))
    try:
        there = [kind for kind in KINDS.values() if objects.is_served(cluster, kind)]
        options = objects.choose(cluster, ClusterOptions())
        kind = KINDS[options.kind]
        others = ", ".join(f"{one.name}s (kind={one.word!r})" for one in there if one is not kind) or "no others"
        rows.append(ok("kind", f"Jobs become {kind.name}s, if you do not say otherwise; the cluster also has {others}"))
        if KINDS[TrainJob.word] in there:
            rows += _runtimes(cluster)
        found = preflight.look_at_namespace(cluster, kind)
        options = dataclasses.replace(options, master=False if found.forbids_master else None)
        spec = objects.example(cluster, options, configured.image or "none")
        rows += _findings(preflight.check(cluster, spec, found), found, cluster, kind)
    except ConfigError as error:
        rows.append(failed("kind", error.problem, error.remedy))
    except BackendError as error:
        rows.append(broken("namespace", error, _REMEDY))
    return tuple(rows)


def _configuration(configured: Config) -> CheckResult:
    used = ", ".join(f"{key} (from {origin})" for key, origin in configured.origins)
    return ok("configuration", used or f"Nothing is set; settings can be written into {config.path()}")


def _connection(cluster: Cluster) -> CheckResult:
    who = f" as {cluster.identity}" if cluster.identity else ""
    by = "by the pod's service account" if cluster.in_cluster else f"by the context {cluster.context!r}"
    return ok("connection", f"{cluster.server}{who}, {by}, namespace {cluster.namespace}")


def _image(configured: Config, cluster: Cluster) -> CheckResult:
    if image := configured.kubernetes.image or configured.image:
        return ok("image", str(image))
    own = self_pod.find(cluster)
    if own is None:
        remedy = f"Give image= in kd.Kubernetes(...), or write it into {config.path()} or KALE_DIST_IMAGE"
        return warning("image", "None is configured, and this is not a pod of the cluster", remedy)
    if not own.image:
        remedy = "Grant it 'get pods', or give image="
        return warning("image", "This notebook's own pod cannot be read, so that its image is not known", remedy)
    if own.image_warning:
        return warning("image", own.image_warning, "Give image= with a digest, if that matters")
    return ok("image", f"That of this notebook: {own.image}")


def _results(configured: Config, cluster: Cluster) -> CheckResult:
    store = configured.store or self_pod.own_store(self_pod.find(cluster))
    kept = f"are kept in {store}" if store else "over 1 MB are kept if it has a claim in volumes= or a store="
    return ok("results", f"If no notebook is connected when a job ends, its results {kept}")


def _runtimes(cluster: Cluster) -> Iterator[CheckResult]:
    """What TrainJobs have from their runtimes, and what they lack."""
    there = objects.runtimes(cluster)
    name, version = train_runtime.chosen(there, "")
    listed = ", ".join(there) or "none that you may list"
    yield ok("runtimes", f"TrainJobs (kind='train') can have the runtimes (runtime=): {listed}")
    if not version:
        yield warning("runtime", _WEAKER.format(runtime=DEFAULT_RUNTIME), _STRONGER.format(namespace=cluster.namespace))
    elif version < train_runtime.VERSION:
        where = f" --namespace {cluster.namespace}" if "/" in name else ""
        sentence = f"The runtime {name} is of version {version}, and this kale_dist has version {train_runtime.VERSION}"
        yield warning("runtime", sentence, f"Replace it: kale-dist runtime{where} | kubectl apply -f -")
    for one, made in there.items():
        if train_runtime.has_ttl(made):
            sentence = f"The runtime {one} has a ttlSecondsAfterFinished: before Trainer 2.4, an ended TrainJob of it runs again, for ever"
            yield warning("runtime", sentence, "Take it out, or have an administrator install Trainer 2.4")


def _findings(found: tuple[Finding, ...], namespace: Namespace, cluster: Cluster, kind: Kind) -> Iterator[CheckResult]:
    named = {item.name for item in found}
    if "rights" not in named:
        yield ok("rights", "You have all rights that kale_dist can use")
    if "get namespaces" not in namespace.granted:
        sentence = "may not be read, so that it is not known whether it enforces Pod Security"
    else:
        level = namespace.pod_security
        sentence = f'enforces Pod Security "{level}"' if level else "enforces no Pod Security"
        sentence += "; jobs are made of workers only" if namespace.forbids_master else ""
    yield ok("namespace", f"{cluster.namespace} {sentence}")
    for item in found:
        trouble = item.trouble
        judged = failed if item.is_fatal else warning
        yield judged(item.name, trouble.sentence, trouble.remedy or "Correct it")
    if "rights" in named and not any(item.name == "rights" and item.is_fatal for item in found):
        role = roles.role_yaml(cluster.namespace, cluster.identity, roles.rights(kind))
        yield warning("role", "Some rights are missing", f"All of them are granted by this:\n{role}")
