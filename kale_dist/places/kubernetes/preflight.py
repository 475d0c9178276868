"""Asks the cluster, before anything is created there, what would keep a job from running.

Three dry runs (`dry_run="All"`) ask the cluster itself: of the job's object, of its Secret, and, where this user may create
pods, of one pod of each kind as the controller would make it. They answer for rights, schema, names, the quota of one pod,
limit ranges, Pod Security, service accounts and priority classes. They do not look at sums over pods, claims, Secrets and
nodes: those are looked up here, where they may be read. What may not be read shows when the job runs.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kubernetes import client

from kale_dist.errors import BackendError
from kale_dist.image import for_job
from kale_dist.job.backend import Trouble
from kale_dist.job.spec import quantities
from kale_dist.job.spec.job_spec import Request, Settled, Topology
from kale_dist.job.spec.resources import Resources
from kale_dist.places import manifests
from kale_dist.places.kubernetes import objects, queue, roles
from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.explain import api, sentences
from kale_dist.places.kubernetes.explain.api import Doing
from kale_dist.places.kubernetes.self_pod import NODE_REQUIRED
from kale_dist.places.manifests import Kind, ObjectSettings, PodGroup, kind_of
from kale_dist.places.manifests.kubeflow_jobs import INIT_REQUESTS
from kale_dist.snapshot import loading
from kale_dist.wire import InputFiles

_TIMEOUT_S = 10.0
_AT_ONCE = 8
_MANY_NODES = 500
_MANY_PODS = 5000
_ROUNDING = 1e-6
_ENFORCE = "pod-security.kubernetes.io/enforce"
_RESTRICTED = "restricted"

_NOT_OURS = frozenset(("rights", "forbidden", "object-exists", "busy", "server-error", "refused", "credentials"))
"""Refusals of a pod's dry run that show nothing of the controller's pods: this user's rights, and a busy cluster."""

_ONLY_WARN = frozenset(("webhook", "webhook-unreachable", "quota"))
"""Refusals that may not hold for the controller's pods: a webhook sees this user and a pod without an owner; a quota empties."""

HOST_LABEL = "kubernetes.io/hostname"
_WORDS = {"cpu": "cores", "memory": "of memory"}
"""The words after an amount of a resource."""

_STAYING = frozenset(("DaemonSet", "Node", "ReplicaSet", "StatefulSet"))
"""Owners of pods that do not end by themselves, as those of jobs do."""

_SECRETS = ("secrets", "count/secrets")

NOT_MADE_YET = "made-first"
"""Stands for the image in dry runs: an API server wants one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One trouble that the checks found."""

    name: str
    """A word for tests and `kale-dist doctor`, such as `quota`."""
    trouble: Trouble
    is_fatal: bool
    """Whether the job cannot run. Otherwise it runs with less, or waits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Namespace:
    """What decides about a job's form in a namespace."""

    granted: frozenset[str]
    """What this user may do there: a verb and a resource, such as `get pods/log`."""
    pod_security: str = ""
    """Level that it enforces; empty if none, or if it may not be read."""
    quotas: tuple[Any, ...] = ()
    """`V1ResourceQuota` objects that hold for all pods."""
    free_cores: float = math.inf
    """Cores that a container may ask for without a limit: 0 where a quota demands a limit, else the one that a LimitRange gives."""
    refuses_init: bool = False
    """Whether a LimitRange wants containers to be larger than the init container of the operator."""

    @property
    def forbids_master(self) -> bool:
        """Whether workers beside a master would be refused, because of the operator's init container."""
        return self.pod_security == _RESTRICTED or self.refuses_init


def look_at_namespace(cluster: Cluster, kind: Kind) -> Namespace:
    """Ask for rights, Pod Security and quotas at once.

    Args:
        cluster: With the namespace.
        kind: What the job would be.

    Raises:
        BackendError: The cluster cannot be reached, or does not know this user; or there is no such namespace.
    """
    core, name = cluster.core, cluster.namespace
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kale_dist checks") as pool:
        rights = pool.submit(granted, cluster, kind)
        namespace = pool.submit(_lookup, lambda: core.read_namespace(name, _request_timeout=_TIMEOUT_S))
        quotas = pool.submit(
            _lookup, lambda: core.list_namespaced_resource_quota(name, _request_timeout=_TIMEOUT_S).items
        )
        ranges = pool.submit(_lookup, lambda: core.list_namespaced_limit_range(name, _request_timeout=_TIMEOUT_S).items)
    found = namespace.result()
    if found is _MISSING:
        trouble = sentences.of("namespace-missing", missing=name)
        raise BackendError(f"{trouble}")
    # A quota of a scope holds for some pods only.
    all_quotas = [quota for quota in quotas.result() or () if not quota.spec.scopes and not quota.spec.scope_selector]
    demands = any("limits.cpu" in (quota.spec.hard or {}) for quota in all_quotas)
    limits = [item for found in ranges.result() or () for item in found.spec.limits or () if item.type == "Container"]
    gives = [quantities.amount(item.default["cpu"]) for item in limits if "cpu" in (item.default or {})]
    labels = {} if found is None else found.metadata.labels or {}
    return Namespace(
        granted=rights.result(),
        pod_security=labels.get(_ENFORCE, ""),
        quotas=tuple(all_quotas),
        free_cores=min(gives, default=0.0 if demands else math.inf),
        refuses_init=any(
            quantities.amount(item.min[key]) > quantities.amount(asked)
            for item in limits
            for key, asked in INIT_REQUESTS.items()
            if key in (item.min or {})
        ),
    )


def check(cluster: Cluster, spec: Settled, namespace: Namespace) -> tuple[Finding, ...]:
    """Look whether a job could run.

    Args:
        cluster: With the namespace.
        spec: The job, settled.
        namespace: From `look_at_namespace`.

    Returns:
        What was found, the fatal things first.

    Raises:
        BackendError: The cluster cannot be reached.
    """
    kind = kind_of(spec)
    job = kind.make(spec, ObjectSettings(submitter=cluster.identity))
    groups = kind.pod_groups(job)
    waits = bool(getattr(spec.cluster, "wait_for_nodes", False))
    # A range of processes runs as soon as its lower number has room.
    spare = spec.topology.number_of_pods - spec.topology.fewest_pods
    least = [*groups[:-1], dataclasses.replace(groups[-1], pods=max(0, groups[-1].pods - spare))]
    questions: tuple[Callable[[], list[Finding]], ...] = (
        functools.partial(_dry_runs, cluster, spec, kind, job),
        functools.partial(_dry_pods, cluster, job, groups),
        functools.partial(_claims, cluster, groups),
        functools.partial(_named, cluster, job, groups),
        functools.partial(_runtime, cluster, job),
        *((functools.partial(_python, spec),) if spec.cuda else ()),
        *(() if waits else (functools.partial(_nodes, cluster, least),)),
    )
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kale_dist checks") as pool:
        found = [item for task in [pool.submit(ask) for ask in questions] for item in task.result()]
    sums = list(quota_sums(namespace.quotas, kind, groups))
    # The dry run of one pod shows less of the same.
    found = [item for item in found if not (sums and item.name in ("quota", "quota-too-small"))] + sums
    # So does Trainer's webhook of a runtime that does not exist.
    has_no_runtime = any(item.name == "runtime" for item in found)
    found = [item for item in found if not (has_no_runtime and item.name == "webhook")]
    missing = missing_rights(cluster, kind, namespace.granted, connects=bool(spec.keep_warm_s) or spec.kind == "live")
    # What a job does without, its plan shows.
    names_policies = spec.cluster.network_policy is not False
    found += [item for item in missing if names_policies or roles.POLICIES.resource not in item.trouble.sentence]
    # The pods of both kinds may be refused alike.
    by_name = {(item.name, item.trouble.sentence): item for item in found}
    return tuple(sorted(by_name.values(), key=lambda item: not item.is_fatal))


# -- rights --------------------------------------------------------------------------------------------------------------


def granted(cluster: Cluster, kind: Kind) -> frozenset[str]:
    """Which of `roles.rights` this user has, as `verb resource`.

    Raises:
        BackendError: The cluster cannot be asked.
    """
    asked = [(right.group, right.resource, verb) for right in roles.rights(kind) for verb in right.verbs]
    with api.asking("create", "selfsubjectrulesreviews"):
        review = cluster.authorization.create_self_subject_rules_review(
            client.V1SelfSubjectRulesReview(spec=client.V1SelfSubjectRulesReviewSpec(namespace=cluster.namespace))
        )
        rules = review.status.resource_rules if review.status is not None else []
        open_ones = [one for one in dict.fromkeys(asked) if not any(_covers(rule, *one) for rule in rules)]
        # Authorizers other than RBAC need not list their rules, and one of them may still allow it.
        is_complete = review.status is not None and not review.status.incomplete
        refused = {one for one in open_ones if is_complete or not may(cluster, *one)}
    return frozenset(f"{verb} {resource}" for group, resource, verb in asked if (group, resource, verb) not in refused)


def may(cluster: Cluster, group: str, resource: str, verb: str) -> bool:
    """Whether this user may do something in the namespace."""
    whole, _, part = resource.partition("/")
    attributes = client.V1ResourceAttributes(
        namespace=cluster.namespace, group=group, resource=whole, subresource=part or None, verb=verb
    )
    review = cluster.authorization.create_self_subject_access_review(
        client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes))
    )
    return bool(review.status and review.status.allowed)


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


def missing_rights(
    cluster: Cluster, kind: Kind, allowed: frozenset[str], *, connects: bool = False
) -> Iterator[Finding]:
    """The rights that this user lacks, with what does not work without each. Warm pods and live ranks need a connection to pods."""
    missing = [
        (right, verbs)
        for right in roles.rights(kind)
        if (verbs := [verb for verb in right.verbs if f"{verb} {right.resource}" not in allowed])
    ]
    grants = f"'kale-dist doctor --on kubernetes --namespace {cluster.namespace}' prints the Role that grants it."
    role = roles.role_yaml(cluster.namespace, cluster.identity, roles.rights(kind))
    granted = f"An administrator can grant all that kale_dist needs, by 'kubectl apply -f -' of:\n\n{role}"
    for right, verbs in missing:
        who, what = cluster.identity or "You", f"{', '.join(verbs)} {right.resource}"
        sentence = f"{who} may not {what} in the namespace {cluster.namespace!r}"
        remedy = f"{right.without}. {grants}"
        is_needed = right.is_needed or (connects and right.resource == "pods/portforward")
        if is_needed:
            remedy, granted = f"{right.without}. {granted}", "The Role above grants it, too"
        yield Finding(name="rights", trouble=Trouble(sentence=sentence, remedy=remedy), is_fatal=is_needed)


# -- dry runs ------------------------------------------------------------------------------------------------------------


def _dry_runs(cluster: Cluster, spec: Settled, kind: Kind, job: dict[str, Any]) -> list[Finding]:
    """The object and its Secret, as they would be created."""
    namespace, settings = cluster.namespace, ObjectSettings()
    secret: Any = manifests.input_secret(spec, settings, {}, {InputFiles.KEY: b"0" * 32})
    create_job = functools.partial(
        cluster.custom.create_namespaced_custom_object_with_http_info, *kind.api, namespace, kind.plural, job
    )
    create_secret = functools.partial(cluster.core.create_namespaced_secret_with_http_info, namespace, secret)
    found = []
    for resource, name, create in (
        (kind.plural, job["metadata"]["name"], create_job),
        ("secrets", secret["metadata"]["name"], create_secret),
    ):
        doing = Doing(verb="create", resource=resource, namespace=namespace, name=name, kind=kind.word)
        try:
            answer = create(dry_run="All")
            found += _warnings(answer)
            found += _ignored_queue(cluster, kind, queue.queue_of(job), answer[0]) if resource == kind.plural else []
        except Exception as error:
            seen = api.look_up(error, doing)
            # Missing rights are reported with all others; a name that is taken has its own error class, at the submission.
            if seen.name in ("rights", "job-exists", "object-exists"):
                continue
            if not api.status_of(error):
                raise api.explain(error, doing) from error
            trouble = dataclasses.replace(seen.trouble, sentence=f"Cannot {doing}: {seen.words}")
            found.append(Finding(name=seen.name, trouble=trouble, is_fatal=seen.name not in ("busy", "server-error")))
    return found


def _ignored_queue(cluster: Cluster, kind: Kind, name: str, taken: Any) -> list[Finding]:
    """Kueue suspends what names a queue as soon as it is created; it does not know every kind."""
    if (
        not name
        or kind.is_suspended(taken)
        or _lookup(functools.partial(_read_queue, cluster, name)) in (None, _MISSING)
    ):
        return []
    return [_found("queue-ignored", is_fatal=False, object=name, **sentences.facts_of(kind))]


def _read_queue(cluster: Cluster, name: str) -> Any:
    where = ("kueue.x-k8s.io", "v1beta1", cluster.namespace, "localqueues", name)
    return cluster.custom.get_namespaced_custom_object(*where)


def _dry_pods(cluster: Cluster, job: Mapping[str, Any], groups: Sequence[PodGroup]) -> list[Finding]:
    """One pod of each kind, as the controller would make it."""
    if _lookup(functools.partial(may, cluster, "", "pods", "create")) is not True:
        return []
    found = []
    for pod in _example_pods(job, groups):
        doing = Doing(verb="create", resource="pods", namespace=cluster.namespace, name=pod["metadata"]["name"])
        try:
            found += _warnings(
                cluster.core.create_namespaced_pod_with_http_info(
                    cluster.namespace, pod, dry_run="All", _request_timeout=_TIMEOUT_S
                )
            )
        except Exception as error:  # noqa: BLE001 - what cannot be checked here shows when the job runs
            seen = api.look_up(error, doing)
            if api.status_of(error) and seen.name not in _NOT_OURS:
                found.append(Finding(name=seen.name, trouble=seen.trouble, is_fatal=seen.name not in _ONLY_WARN))
    return found


def _example_pods(job: Mapping[str, Any], groups: Sequence[PodGroup]) -> Iterator[Any]:
    for group in groups:
        template = copy.deepcopy(group.template)
        meta = template.setdefault("metadata", {})
        meta |= {"name": f"{job['metadata']['name']}-{group.role}-0", "namespace": job["metadata"]["namespace"]}
        spec = {**template["spec"], "restartPolicy": "Never"}
        if group.put_before:
            spec["initContainers"] = [*spec.get("initContainers", ()), *group.put_before]
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _warnings(answer: Any) -> list[Finding]:
    """The API server's warnings about an object that it accepts: unknown fields, Pod Security that only warns."""
    headers = answer[2] or {}
    values = [value for name, value in headers.items() if name.lower() == "warning"]
    texts = [part.split('"')[1] for value in values for part in value.split("299 - ") if part.count('"') >= 2]  # noqa: PLR2004 - a pair
    return [
        Finding(name="warning", trouble=Trouble(sentence=f"The API server says: {sentences.cut(text)}"), is_fatal=False)
        for text in texts
    ]


# -- sums, nodes and names -----------------------------------------------------------------------------------------------


def sums_of(groups: Sequence[PodGroup]) -> dict[str, float]:
    """What all pods of a job ask for together, of each resource."""
    together: dict[str, float] = {}
    for group in groups:
        for key, amount in _amounts(group).items():
            together[key] = together.get(key, 0.0) + amount * group.pods
    return together


def _amounts(group: PodGroup, *, limits: bool = False) -> dict[str, float]:
    """What a pod asks for of each resource, or its limits."""
    sums: dict[str, float] = {}
    for container in group.template["spec"]["containers"]:
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **({} if limits else resources.get("requests") or {})}
        for key, text in asked.items():
            sums[key] = sums.get(key, 0.0) + quantities.amount(text)
    return sums


def quota_sums(quotas: Sequence[Any], kind: Kind, groups: Sequence[PodGroup]) -> Iterator[Finding]:
    """Quotas that the job exceeds: all of its pods together, which no dry run sums up."""
    once = (f"count/{kind.plural}.{kind.group}", *_SECRETS)
    asked = dict.fromkeys(once, 1.0)
    counted = ("pods", "count/pods", *(("services", "count/services") if kind.services_a_pod else ()))
    for group in groups:
        requests, limits = _amounts(group), _amounts(group, limits=True)
        amounts = {
            **dict.fromkeys(counted, 1.0),
            **requests,
            **{f"requests.{key}": amount for key, amount in requests.items()},
            **{f"limits.{key}": amount for key, amount in limits.items()},
        }
        for key, amount in amounts.items():
            asked[key] = asked.get(key, 0.0) + amount * group.pods
    for quota in quotas:
        hard, used = quota.status.hard or quota.spec.hard or {}, quota.status.used or {}
        for key, text in hard.items():
            need, limit, taken = asked.get(key, 0.0), quantities.amount(text), quantities.amount(used.get(key, "0"))
            if not need or taken + need <= limit:
                continue
            allowed, is_used, needed = (quantities.amount_text(key, number) for number in (limit, taken, need))
            name, what = "quota-too-small" if need > limit else "quota", key.removeprefix("count/")
            yield _found(
                # What this library makes itself is refused at once, and not only a pod.
                name, is_fatal=need > limit or key in once, quota=quota.metadata.name, namespace=quota.metadata.namespace,
                limited=f"{what}={allowed}", used=is_used, requested=f"{what}={needed}",
            )  # fmt: skip


def _nodes(cluster: Cluster, groups: Sequence[PodGroup]) -> list[Finding]:
    """What the job asks for and the nodes can never hold; empty for the many users who may not list nodes."""
    found = _list_nodes(cluster)
    if found is None or len(found) >= _MANY_NODES:
        return []
    never = list(node_sums([node.status.allocatable or {} for node in found], groups))
    list_pods = functools.partial(cluster.core.list_pod_for_all_namespaces, limit=_MANY_PODS)
    pods = None if never else _lookup(lambda: list_pods(_request_timeout=_TIMEOUT_S).items)
    return never if pods is None or pods is _MISSING else list(_no_room(found, pods, groups))


def _list_nodes(cluster: Cluster) -> Sequence[Any] | None:
    """The nodes, not all of very many; None if this user may not list them."""
    found = _lookup(lambda: cluster.core.list_node(limit=_MANY_NODES, _request_timeout=_TIMEOUT_S).items)
    return None if found is _MISSING else found


def _no_room(nodes: Sequence[Any], pods: Sequence[Any], groups: Sequence[PodGroup]) -> Iterator[Finding]:
    """The resource of which the nodes hold too little for all pods of the job, beside the pods that do not end by themselves."""
    free = {
        node.metadata.name: {key: quantities.amount(text) for key, text in (node.status.allocatable or {}).items()}
        for node in nodes
    }
    for pod in pods:
        owners = {owner.kind for owner in pod.metadata.owner_references or ()}
        if pod.spec.node_name in free and owners & _STAYING and pod.status.phase == "Running":
            for container in pod.spec.containers:
                for key, text in ((container.resources and container.resources.requests) or {}).items():
                    left = free[pod.spec.node_name]
                    left[key] = left.get(key, 0.0) - quantities.amount(text)
    for key in sums_of(groups):
        asked = sorted((_amounts(group).get(key, 0.0) for group in groups for _ in range(group.pods)), reverse=True)
        room = [left.get(key, 0.0) for left in free.values()]
        placed = 0
        for amount in asked:
            number = next((number for number, left in enumerate(room) if left >= amount - _ROUNDING), None)
            if number is not None:
                room[number] -= amount
                placed += 1
        if placed < len(asked):
            texts = {"wanted": sum(asked), "largest": max(0.0, sum(left.get(key, 0.0) for left in free.values()))}
            facts = {name: quantities.amount_text(key, amount) for name, amount in texts.items()}
            facts |= {"pods": str(len(asked)), "placed": str(placed), "resource": _WORDS.get(key, f"of {key}")}
            yield _found("no-room", is_fatal=False, **facts)


def node_sums(allocatable: Sequence[Mapping[str, str]], groups: Sequence[PodGroup]) -> Iterator[Finding]:
    """What a job asks for that the nodes can never hold, even when they are empty."""
    largest_pod: dict[str, float] = {}
    together = sums_of(groups)
    for group in groups:
        for key, amount in _amounts(group).items():
            largest_pod[key] = max(largest_pod.get(key, 0.0), amount)
    for key, needed in largest_pod.items():
        have = [quantities.amount(node.get(key, "0")) for node in allocatable]
        for name, wanted, there in (
            ("nodes-too-small", needed, max(have, default=0.0)),
            ("cluster-too-small", together[key], sum(have)),
        ):
            if wanted > there:
                texts = {"wanted": quantities.amount_text(key, wanted), "largest": quantities.amount_text(key, there)}
                yield _found(name, is_fatal=True, resource=_WORDS.get(key, f"of {key}"), **texts)
                break


_SHARE = 0.9
"""Of a node, for pods: others have to fit on it, too."""


def fit_gpus(cluster: Cluster, request: Request, quotas: Sequence[Any]) -> tuple[Resources, str]:
    """`fitted` for a call on a cluster, with the quotas of its namespace."""
    nodes = [node.status.allocatable or {} for node in _list_nodes(cluster) or ()]
    return fitted(request.resources, request.topology, nodes, quotas)


def fitted(
    given: Resources, ranks: Topology, allocatable: Sequence[Mapping[str, str]], quotas: Sequence[Any]
) -> tuple[Resources, str]:
    """Cores and memory of ranks with GPUs where the call gives none: the defaults, or less where nodes or quotas have less.

    Args:
        given: What the call gives.
        ranks: How many there are, and in how many pods.
        allocatable: What each node has.
        quotas: Those of the namespace.

    Returns:
        What ranks ask for, and a sentence about what was chosen; empty if nothing was.
    """
    asked = given.filled(cuda=True)
    nodes = [node for node in allocatable if asked.gpu_resource in node]
    chosen: dict[str, Any] = {}
    for field, key, unit in (("cpu", "cpu", 1.0), ("memory_gib", "memory", float(1 << 30))):
        if getattr(given, field) is None:
            in_nodes = [quantities.amount(node.get(key, "0")) * _SHARE / ranks.processes_per_pod for node in nodes]
            hard = [(quota.status.hard or {}, quota.status.used or {}) for quota in quotas]
            in_quotas = [
                (quantities.amount(limits[name]) - quantities.amount(used.get(name, "0"))) / ranks.number_of_processes
                for limits, used in hard
                for name in (key, f"requests.{key}", f"limits.{key}")
                if name in limits
            ]
            room = min([*([max(in_nodes)] if in_nodes else []), *in_quotas], default=math.inf) / unit
            # What is far too little stays the default, so that the refusal names what is missing.
            share = math.floor(room * 4) / 4 if math.isfinite(room) else room
            chosen[field] = min(getattr(asked, field), share or math.inf)
    if not chosen:
        return given, ""
    texts = {"cpu": "{:g} cores", "memory_gib": "{:g} GiB"}
    what = " and ".join(texts[field].format(value) for field, value in chosen.items())
    note = f"Each process with a GPU asks for {what}; resources={{'cpu': ..., 'memory': ...}} says otherwise."
    most = max((int(quantities.amount(node[asked.gpu_resource])) for node in nodes), default=0)
    if ranks.processes_per_pod == 1 < min(most, ranks.number_of_processes):
        note += f" The largest node has {most} GPUs: processes_per_pod={most} puts them into one pod, which is faster."
    return dataclasses.replace(given, **chosen), note


def _claims(cluster: Cluster, groups: Sequence[PodGroup]) -> list[Finding]:
    core, namespace = cluster.core, cluster.namespace
    pods = sum(group.pods for group in groups)
    volumes = [volume for group in groups for volume in group.template["spec"].get("volumes") or ()]
    found = []
    for name in dict.fromkeys(
        volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume
    ):
        read = functools.partial(core.read_namespaced_persistent_volume_claim, name, namespace)
        claim = _lookup(functools.partial(read, _request_timeout=_TIMEOUT_S))
        if claim is None:
            continue
        facts = {"object": name, "namespace": namespace, "pods": str(pods), "kind": "persistentvolumeclaim"}
        facts["claims"] = name
        problem = ""
        if claim is _MISSING:
            problem = "missing"
        elif claim.metadata.deletion_timestamp is not None or claim.status.phase == "Lost":
            problem = "claim-lost"
            facts["why"] = "it has lost its volume" if claim.status.phase == "Lost" else "it is being deleted"
        elif pods > 1:
            modes = set(claim.status.access_modes or claim.spec.access_modes or ())
            one_node = "" if all(_is_held(group.template["spec"]) for group in groups) else "claim-one-node"
            problem = {("ReadWriteOncePod",): "claim-one-pod", ("ReadWriteOnce",): one_node}.get(tuple(modes), "")
        if problem:
            found.append(_found("claim", problem, is_fatal=problem != "claim-one-node", **facts))
    return found


def _is_held(pod: Mapping[str, Any]) -> bool:
    """Whether a pod names the one node that it may run on."""
    required = ((pod.get("affinity") or {}).get("nodeAffinity") or {}).get(NODE_REQUIRED) or {}
    terms = required.get("nodeSelectorTerms") or ()
    return HOST_LABEL in (pod.get("nodeSelector") or {}) or any(term.get("matchFields") for term in terms)


def _named(cluster: Cluster, job: Mapping[str, Any], groups: Sequence[PodGroup]) -> list[Finding]:
    """Secrets, ConfigMaps and a queue that the job names."""
    core, namespace = cluster.core, cluster.namespace
    own = manifests.input_secret_name(job["metadata"]["name"])
    secrets: list[str] = []
    config_maps: list[str] = []
    pull_secrets: list[str] = []
    for pod in (group.template["spec"] for group in groups):
        for volume in pod.get("volumes") or ():
            if "secret" in volume and not volume["secret"].get("optional"):
                secrets.append(volume["secret"]["secretName"])
            if "configMap" in volume and not volume["configMap"].get("optional"):
                config_maps.append(volume["configMap"]["name"])
        for variable in (entry for each in pod["containers"] for entry in each.get("env") or ()):
            source = (variable.get("valueFrom") or {}).get("secretKeyRef")
            if source and not source.get("optional"):
                secrets.append(source["name"])
        pull_secrets += [secret["name"] for secret in pod.get("imagePullSecrets") or ()]
    queue_name = queue.queue_of(job)
    kinds: tuple[tuple[str, str, Sequence[str], Callable[[str], Any]], ...] = (
        ("missing", "secret", [name for name in secrets if name != own],
         lambda name: core.read_namespaced_secret(name, namespace)),
        ("missing", "configmap", config_maps, lambda name: core.read_namespaced_config_map(name, namespace)),
        ("pull-secret-missing", "secret", pull_secrets, lambda name: core.read_namespaced_secret(name, namespace)),
        ("queue-missing", "queue", [queue_name] if queue_name else [], functools.partial(_read_queue, cluster)),
    )  # fmt: skip
    return [
        _found("missing", entry, is_fatal=entry == "missing", kind=kind, object=name, namespace=namespace)
        for entry, kind, names, read in kinds
        for name in dict.fromkeys(names)
        if _lookup(functools.partial(read, name)) is _MISSING
    ]


def _python(spec: Settled) -> list[Finding]:
    """Compare the image's Python, as its registry names it, with the notebook's."""
    variables = {} if spec.image == NOT_MADE_YET else for_job.variables_of(spec.image)
    version, here = variables.get("PYTHON_VERSION", ""), loading.python_version()
    if not version or version.split(".")[:2] == here.split("."):
        return []
    return [_found("image-python", is_fatal=False, image=spec.image, version=version, here=here)]


def _runtime(cluster: Cluster, job: Mapping[str, Any]) -> list[Finding]:
    """The runtime that a TrainJob names; only few users may read those of the whole cluster."""
    wanted = job["spec"].get("runtimeRef")
    there = objects.runtimes(cluster) if wanted else ()
    if not there or not wanted:
        return []
    prefix = "TrainingRuntime/" if wanted["kind"] == "TrainingRuntime" else ""
    name = f"{prefix}{wanted['name']}"
    return (
        []
        if name in there
        else [_found("runtime", "runtime-missing", is_fatal=True, object=name, there=", ".join(there))]
    )


def _found(name: str, entry: str = "", *, is_fatal: bool, **facts: str) -> Finding:
    """A finding, with the words of an entry of the table; without one, of that of its own name."""
    return Finding(name=name, trouble=sentences.of(entry or name, **facts), is_fatal=is_fatal)


_MISSING: Any = object()


def _lookup(read: Callable[[], Any]) -> Any:
    """The object that is read; `_MISSING` if it does not exist, None if this user may not read it."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - what cannot be checked here shows when the job runs
        return _MISSING if api.status_of(error) == api.NOT_FOUND else None
