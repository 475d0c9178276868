"""What would keep a job from running, asked of the cluster before anything is made there.

What this user may not read is passed over: it shows when the job runs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime as dt
import functools
from collections.abc import Callable, Iterable
from typing import Any

from kubernetes import client

from kale_dist.backends.kubernetes import capacity, refusals, roles
from kale_dist.backends.kubernetes.capacity import Wanted
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.findings import Finding, Findings
from kale_dist.backends.kubernetes.refusals import Doing

__all__ = ["Finding", "Findings", "Wanted", "check", "granted"]

_TIMEOUT_S = 10.0
_AT_ONCE = 8
_MANY_NODES = 500
_OPERATOR_LABEL = "control-plane=kubeflow-training-operator"
_ENFORCE = "pod-security.kubernetes.io/enforce"
_FLAP = dt.timedelta(minutes=1)
_INSTALL = "An administrator installs Kubeflow's Training Operator; docs/rbac.md says how"
_BYTES = ("create pods/portforward", "get pods/portforward"), ("create pods/exec", "get pods/exec")


@dataclasses.dataclass(kw_only=True, slots=True)
class _Notes:
    """What the single checks have found; each adds to it."""

    items: list[Finding] = dataclasses.field(default_factory=list)
    pod_security: str = ""
    cpu_limit_needed: bool = False

    def add(self, name: str, sentence: str, remedy: str = "", *, is_fatal: bool = False) -> None:
        self.items.append(Finding(name=name, sentence=sentence, remedy=remedy, is_fatal=is_fatal))


def check(cluster: Cluster, wanted: Wanted | None = None) -> Findings:
    """Look at a namespace.

    Args:
        cluster: With the namespace.
        wanted: A job that is to run there; None to look at what any job needs.

    Returns:
        What was found, the fatal things first.

    Raises:
        BackendError: The cluster cannot be reached, or does not know this user.
    """
    looks: list[Callable[[Cluster, _Notes, Wanted | None], None]] = [_operator, _namespace, _limits]
    if wanted is not None:
        looks += [_claims, _named, _nodes, _queue]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kale_dist preflight") as pool:
        rights = pool.submit(granted, cluster)
        notes = [_Notes() for _ in looks]
        running = [pool.submit(look, cluster, note, wanted) for look, note in zip(looks, notes, strict=True)]
        allowed = rights.result()
        for task in running:
            task.result()
    found = [*_rights(cluster, allowed), *(item for note in notes for item in note.items)]
    found.sort(key=lambda item: not item.is_fatal)
    return Findings(
        namespace=cluster.namespace,
        items=tuple(found),
        granted=allowed,
        pod_security=next((note.pod_security for note in notes if note.pod_security), ""),
        cpu_limit_needed=any(note.cpu_limit_needed for note in notes),
    )


def granted(cluster: Cluster) -> frozenset[str]:
    """Which of `roles.RIGHTS` this user has, as `verb resource`.

    Raises:
        BackendError: The cluster cannot be asked.
    """
    asked = [(right.group, right.resource, verb) for right in roles.RIGHTS for verb in right.verbs]
    doing = Doing(verb="create", resource="selfsubjectrulesreviews")
    try:
        review = cluster.authorization.create_self_subject_rules_review(
            client.V1SelfSubjectRulesReview(spec=client.V1SelfSubjectRulesReviewSpec(namespace=cluster.namespace)),
            _request_timeout=_TIMEOUT_S,
        )
        rules = review.status.resource_rules if review.status is not None else []
        open_ones = [one for one in dict.fromkeys(asked) if not any(_covers(rule, *one) for rule in rules)]
        # Authorizers other than RBAC need not tell their rules, and one of them may allow it all the same.
        is_complete = review.status is not None and not review.status.incomplete
        refused = {one for one in open_ones if is_complete or not _may(cluster, *one)}
    except Exception as error:
        raise refusals.explain(error, doing=doing) from error
    return frozenset(f"{verb} {resource}" for group, resource, verb in asked if (group, resource, verb) not in refused)


def _covers(rule: Any, group: str, resource: str, verb: str) -> bool:
    """Whether a rule allows it for objects of any name."""
    whole, _, part = resource.partition("/")
    spelt = {"*", resource, f"*/{part}" if part else whole}
    return (
        not rule.resource_names
        and bool({"*", verb} & set(rule.verbs or ()))
        and bool({"*", group} & set(rule.api_groups or ()))
        and bool(spelt & set(rule.resources or ()))
    )


def _may(cluster: Cluster, group: str, resource: str, verb: str) -> bool:
    whole, _, part = resource.partition("/")
    attributes = client.V1ResourceAttributes(
        namespace=cluster.namespace, group=group, resource=whole, subresource=part or None, verb=verb
    )
    review = cluster.authorization.create_self_subject_access_review(
        client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)),
        _request_timeout=_TIMEOUT_S,
    )
    return bool(review.status and review.status.allowed)


def _rights(cluster: Cluster, allowed: frozenset[str]) -> Iterable[Finding]:
    missing = []
    for right in roles.RIGHTS:
        verbs = [verb for verb in right.verbs if f"{verb} {right.resource}" not in allowed]
        if verbs:
            missing.append((right, verbs))
    needed = [(right, verbs) for right, verbs in missing if right.is_needed]
    who = cluster.identity or "This user"
    role = roles.role_yaml(cluster.namespace, cluster.identity)
    grant = f"Somebody who administers it can grant all that kale_dist needs, by 'kubectl apply -f -' of:\n\n{role}"
    for number, (right, verbs) in enumerate(needed):
        sentence = f"{who} may not {', '.join(verbs)} {right.resource} in the namespace {cluster.namespace!r}"
        last = number == len(needed) - 1
        yield Finding(
            name="rights", sentence=f"{sentence}. {right.without}", remedy=grant if last else "", is_fatal=True
        )
    ways = [way for way in _BYTES if set(way) <= allowed]
    for right, verbs in missing:
        if right.is_needed:
            continue
        without = right.without
        if right.resource in ("pods/portforward", "pods/exec") and not ways:
            if right.resource == "pods/exec":
                continue
            without = (
                "And exec is forbidden, too: nothing can be sent to pods or fetched from them; snapshots over 600 kB and "
                "weights need a store (store=)"
            )
        sentence = f"{who} may not {', '.join(verbs)} {right.resource} in the namespace {cluster.namespace!r}"
        remedy = f"kale-dist doctor --on kubernetes --namespace {cluster.namespace} prints the Role that grants it"
        yield Finding(name="rights", sentence=f"{sentence}. {without}", remedy=remedy)


# -- the single checks -----------------------------------------------------------------------------------------------


def _operator(cluster: Cluster, notes: _Notes, _: Wanted | None) -> None:
    try:
        served = cluster.custom.get_api_resources("kubeflow.org", "v1", _request_timeout=_TIMEOUT_S)
        kinds = {resource.name for resource in served.resources}
    except Exception as error:
        if getattr(error, "status", None) != refusals.NOT_FOUND:
            raise refusals.explain(error, doing=Doing(verb="list", resource="the kinds of kubeflow.org/v1")) from error
        kinds = set()
    if refusals.JOBS not in kinds:
        notes.add("operator", "The cluster has no PyTorchJobs: the operator is not installed", _INSTALL, is_fatal=True)
        return
    deployments = _readable(
        lambda: client.AppsV1Api(cluster.api).list_deployment_for_all_namespaces(
            label_selector=_OPERATOR_LABEL, _request_timeout=_TIMEOUT_S
        )
    )
    there = [] if deployments is None else deployments.items
    if there and not any(item.status.ready_replicas or _has_just_changed(item) for item in there):
        place = there[0].metadata
        sentence = f"The Training Operator (deployment {place.name} in {place.namespace}) is not running"
        remedy = f"kubectl -n {place.namespace} describe pods -l {_OPERATOR_LABEL} says why; jobs wait until then"
        notes.add("operator", sentence, remedy)


def _has_just_changed(deployment: Any) -> bool:
    """Whether it was ready a moment ago, as one that is started anew, or whose probe was late on a busy node."""
    now = dt.datetime.now(dt.UTC)
    changes = (item.last_transition_time for item in deployment.status.conditions or () if item.type == "Available")
    return any(change is not None and now - change < _FLAP for change in changes)


def _namespace(cluster: Cluster, notes: _Notes, wanted: Wanted | None) -> None:
    name = cluster.namespace
    found = _lookup(lambda: cluster.core.read_namespace(name, _request_timeout=_TIMEOUT_S))
    if found is _MISSING:
        remedy = f"Correct it, or make it: kubectl create namespace {name}"
        notes.add("namespace", f"There is no namespace {name!r}", remedy, is_fatal=True)
    if found is _MISSING or found is None:
        return
    if found.metadata.deletion_timestamp is not None:
        notes.add("namespace", f"The namespace {name!r} is being deleted", "Use another one", is_fatal=True)
    notes.pod_security = (found.metadata.labels or {}).get(_ENFORCE, "")
    if wanted is not None and wanted.has_host_path and notes.pod_security in ("restricted", "baseline"):
        sentence = f'The namespace enforces Pod Security "{notes.pod_security}", which forbids volumes hostpath://'
        notes.add("pod-security", sentence, "Use a claim", is_fatal=True)


def _limits(cluster: Cluster, notes: _Notes, wanted: Wanted | None) -> None:
    if wanted is None:
        return
    name = cluster.namespace
    quotas = _readable(lambda: cluster.core.list_namespaced_resource_quota(name, _request_timeout=_TIMEOUT_S))
    ranges = _readable(lambda: cluster.core.list_namespaced_limit_range(name, _request_timeout=_TIMEOUT_S))
    quota_items, range_items = (quotas.items if quotas else []), (ranges.items if ranges else [])
    notes.items += capacity.quotas(quota_items, wanted)
    notes.items += capacity.sizes(range_items, wanted)
    notes.cpu_limit_needed = capacity.needs_cpu_limit(quota_items, range_items, wanted)


def _claims(cluster: Cluster, notes: _Notes, wanted: Wanted | None) -> None:
    if wanted is None:
        return
    core, namespace = cluster.core, cluster.namespace
    for name, read_only in wanted.claims:
        claim = _lookup(
            functools.partial(
                core.read_namespaced_persistent_volume_claim, name, namespace, _request_timeout=_TIMEOUT_S
            )
        )
        if claim is None:
            continue
        if claim is _MISSING:
            remedy = f"Correct volumes=, or make it; 'kubectl -n {namespace} get pvc' lists those there are"
            notes.add("claim", f"There is no claim {name!r} in the namespace {namespace!r}", remedy, is_fatal=True)
            continue
        modes = set(claim.status.access_modes or claim.spec.access_modes or ())
        if claim.metadata.deletion_timestamp is not None:
            remedy = "Use another one"
            notes.add("claim", f"The claim {name!r} is being deleted", remedy, is_fatal=True)
        elif claim.status.phase == "Lost":
            notes.add("claim", f"The claim {name!r} has lost its volume", "Make it anew", is_fatal=True)
        elif claim.status.phase == "Pending" and not _binds_late(cluster, claim.spec.storage_class_name):
            remedy = f"Pods wait for it; 'kubectl -n {namespace} describe pvc {name}' says why"
            notes.add("claim", f"The claim {name!r} has no volume yet", remedy)
        if wanted.number_of_pods == 1:
            continue
        if modes == {"ReadWriteOncePod"}:
            sentence = (
                f"The claim {name!r} is for a single pod (ReadWriteOncePod), and there are {wanted.number_of_pods}"
            )
            notes.add("claim", sentence, "Use a claim that is ReadWriteMany", is_fatal=True)
        elif modes == {"ReadWriteOnce"}:
            sentence = f"The claim {name!r} is ReadWriteOnce: all {wanted.number_of_pods} pods have to be on one node"
            notes.add("claim", sentence, "If they do not fit on one, use a claim that is ReadWriteMany")
        elif modes == {"ReadOnlyMany"} and not read_only:
            sentence = f"The claim {name!r} is ReadOnlyMany, and pods may not be able to write to it"
            notes.add("claim", sentence, "Mount it for reading only")


def _binds_late(cluster: Cluster, name: str | None) -> bool:
    """Whether volumes of this storage class are made only when a pod needs them. Taken for true where it is not known."""
    found = _readable(
        lambda: client.StorageV1Api(cluster.api).read_storage_class(name, _request_timeout=_TIMEOUT_S) if name else None
    )
    return found is None or found.volume_binding_mode == "WaitForFirstConsumer"


def _named(cluster: Cluster, notes: _Notes, wanted: Wanted | None) -> None:
    """Objects that the pods name."""
    if wanted is None:
        return
    core, namespace = cluster.core, cluster.namespace
    scheduling = client.SchedulingV1Api(cluster.api)
    accounts = [] if wanted.service_account == "default" else [wanted.service_account]
    classes = [wanted.priority_class] if wanted.priority_class else []
    kinds: tuple[tuple[str, Iterable[str], Callable[[str], Any], bool], ...] = (
        ("service account", accounts, lambda name: core.read_namespaced_service_account(name, namespace), True),
        ("Secret", wanted.secrets, lambda name: core.read_namespaced_secret(name, namespace), True),
        ("ConfigMap", wanted.config_maps, lambda name: core.read_namespaced_config_map(name, namespace), True),
        (
            "image pull secret",
            wanted.image_pull_secrets,
            lambda name: core.read_namespaced_secret(name, namespace),
            False,
        ),
        ("priority class", classes, scheduling.read_priority_class, True),
    )
    for kind, names, read, is_fatal in kinds:
        for name in names:
            if _lookup(functools.partial(read, name)) is _MISSING:
                where = "" if kind == "priority class" else f" in the namespace {namespace!r}"
                remedy = "Correct its name, or make it" if is_fatal else "Without it the image may not be pulled"
                notes.add("missing", f"There is no {kind} {name!r}{where}", remedy, is_fatal=is_fatal)


def _nodes(cluster: Cluster, notes: _Notes, wanted: Wanted | None) -> None:
    found = _readable(lambda: cluster.core.list_node(limit=_MANY_NODES, _request_timeout=_TIMEOUT_S))
    if found is not None and wanted is not None and len(found.items) < _MANY_NODES:
        notes.items += capacity.nodes(found.items, wanted)


def _queue(cluster: Cluster, notes: _Notes, wanted: Wanted | None) -> None:
    if wanted is None or not wanted.queue:
        return
    place = ("kueue.x-k8s.io", "v1beta1", cluster.namespace, "localqueues", wanted.queue)
    found = _lookup(lambda: cluster.custom.get_namespaced_custom_object(*place, _request_timeout=_TIMEOUT_S))
    if found is _MISSING:
        sentence = f"The namespace {cluster.namespace!r} has no Kueue queue {wanted.queue!r} that can be seen"
        notes.add("queue", sentence, "Without Kueue and this queue the job may stay suspended for ever")


_MISSING: Any = object()


def _lookup(read: Callable[[], Any]) -> Any:
    """An object; `_MISSING` if it is not there, None if this user may not know."""
    try:
        return read()
    except client.ApiException as error:
        if error.status == refusals.NOT_FOUND:
            return _MISSING
        return None
    except Exception:  # noqa: BLE001 - what cannot be learnt here shows when the job runs
        return None


def _readable(read: Callable[[], Any]) -> Any:
    """What is read; None if this user may not, or if it is not there."""
    found = _lookup(read)
    return None if found is _MISSING else found
