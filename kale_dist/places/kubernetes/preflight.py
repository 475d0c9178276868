"""Asks the cluster, before anything is created there, what would keep a job from running.

Dry runs (`dry_run="All"`) ask the cluster itself: of the job's object, of its Secret, and, where this user may create pods, of
one pod of each kind as the controller would make it. They answer for rights, schema, names, the quota of one pod, limit ranges,
Pod Security, service accounts and priority classes. What they do not look at is looked up here, where it may be read: claims,
Secrets, a pod that no node can hold, and pods that a quota never allows together. What else may keep pods waiting, the scheduler
and the quotas say when the job runs.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kubernetes import client

from kale_dist.errors import BackendError
from kale_dist.image import for_job
from kale_dist.job.backend import Trouble
from kale_dist.job.spec import quantities
from kale_dist.job.spec.job_spec import Request, Settled, Topology
from kale_dist.job.spec.resources import Resources
from kale_dist.places.kubernetes import objects, queue, roles
from kale_dist.places.kubernetes.client import Cluster
from kale_dist.places.kubernetes.explain import api, sentences
from kale_dist.places.kubernetes.explain.api import Doing
from kale_dist.places.kubernetes.self_pod import NODE_REQUIRED
from kale_dist.places.manifests import Kind, PodGroup, input_secret, kind_of, train_runtime
from kale_dist.places.manifests.kubeflow_jobs import INIT_REQUESTS
from kale_dist.places.manifests.object_settings import ObjectSettings, input_secret_name
from kale_dist.snapshot import loading
from kale_dist.wire import InputFiles

_TIMEOUT_S = 10.0
_AT_ONCE = 8
_MANY_NODES = 500
_ENFORCE = "pod-security.kubernetes.io/enforce"
_RESTRICTED = "restricted"

_NOT_OURS = frozenset(("rights", "forbidden", "object-exists", "busy", "server-error", "refused", "credentials"))
"""Refusals of a pod's dry run that show nothing of the controller's pods: this user's rights, and a busy cluster."""

_TOLD_ELSEWHERE = frozenset(("rights", "job-exists", "object-exists"))
"""Missing rights are reported with all others; a name that is taken has its own error class, at the submission."""

_ONLY_WARN = frozenset(("webhook", "webhook-unreachable", "quota"))
"""Refusals that may not hold for the controller's pods: a webhook sees this user and a pod without an owner; a quota empties."""

HOST_LABEL = "kubernetes.io/hostname"
_WORDS = {"cpu": "cores", "memory": "of memory"}
"""The words after an amount of a resource."""

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
    questions: tuple[Callable[[], Iterable[Finding]], ...] = (
        *(functools.partial(_dry_run, cluster, kind, *each) for each in _made(cluster, spec, kind, job, groups)),
        functools.partial(_claims, cluster, groups),
        functools.partial(_named, cluster, job, groups),
        functools.partial(_runtime, cluster, job),
        functools.partial(_python, spec),
        functools.partial(_never, cluster, spec, namespace.quotas, groups),
    )
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="kale_dist checks") as pool:
        found = [item for items in pool.map(lambda ask: list(ask()), questions) for item in items]
    # A dry run says of one pod what the sum says of all, and Trainer's webhook that there is no such runtime.
    names = {item.name for item in found}
    told = {"quota": "quota-sum", "quota-too-small": "quota-sum", "webhook": "runtime"}
    found = [item for item in found if told.get(item.name) not in names]
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


def _made(
    cluster: Cluster, spec: Settled, kind: Kind, job: Mapping[str, Any], groups: Sequence[PodGroup]
) -> Iterator[tuple[str, Any, Callable[..., Any]]]:
    """The job's object, its Secret and one pod of each kind, with their resource and what creates each."""
    core = cluster.core
    create: Any = cluster.custom.create_namespaced_custom_object_with_http_info
    yield kind.plural, job, lambda place, body, **how: create(*kind.api, place, kind.plural, body, **how)
    secret = input_secret(spec, ObjectSettings(), {}, {InputFiles.KEY: b"0" * 32})
    yield "secrets", secret, core.create_namespaced_secret_with_http_info
    if _lookup(functools.partial(may, cluster, "", "pods", "create")) is True:
        for group in groups:
            pod = _example_pod(job, group)
            if spec.cluster.runtime_version:
                pod["spec"] = train_runtime.secured(pod["spec"])
            yield "pods", pod, core.create_namespaced_pod_with_http_info


def _dry_run(cluster: Cluster, kind: Kind, resource: str, body: Any, create: Callable[..., Any]) -> Iterator[Finding]:
    """What the cluster says of an object, or of a pod as the controller would make it."""
    is_pod, name = resource == "pods", body["metadata"]["name"]
    doing = Doing(verb="create", resource=resource, namespace=cluster.namespace, name=name, kind=kind.word)
    try:
        answer = create(cluster.namespace, body, dry_run="All", _request_timeout=_TIMEOUT_S)
    except Exception as error:
        seen, answers = api.look_up(error, doing), bool(api.status_of(error))
        if not (is_pod or answers or seen.name in _TOLD_ELSEWHERE):
            raise api.explain(error, doing) from error
        # What cannot be asked of a pod here shows when the job runs.
        if is_pod and answers and seen.name not in _NOT_OURS:
            yield Finding(name=seen.name, trouble=seen.trouble, is_fatal=seen.name not in _ONLY_WARN)
        elif not is_pod and seen.name not in _TOLD_ELSEWHERE:
            trouble = dataclasses.replace(seen.trouble, sentence=f"Cannot {doing}: {seen.words}")
            yield Finding(name=seen.name, trouble=trouble, is_fatal=seen.name not in ("busy", "server-error"))
        return
    yield from _warnings(answer)
    if resource == kind.plural:
        yield from _ignored_queue(cluster, kind, queue.queue_of(body), answer[0])


def _ignored_queue(cluster: Cluster, kind: Kind, name: str, taken: Any) -> Iterator[Finding]:
    """Kueue suspends what names a queue as soon as it is created; it does not know every kind."""
    is_free = bool(name) and not kind.is_suspended(taken)
    if is_free and _lookup(functools.partial(_read_queue, cluster, name)) not in (None, _MISSING):
        yield _found("queue-ignored", is_fatal=False, object=name, **sentences.facts_of(kind))


def _read_queue(cluster: Cluster, name: str) -> Any:
    where = ("kueue.x-k8s.io", "v1beta1", cluster.namespace, "localqueues", name)
    return cluster.custom.get_namespaced_custom_object(*where)


def _example_pod(job: Mapping[str, Any], group: PodGroup) -> dict[str, Any]:
    template = copy.deepcopy(group.template)
    meta = template.setdefault("metadata", {})
    meta |= {"name": f"{job['metadata']['name']}-{group.role}-0", "namespace": job["metadata"]["namespace"]}
    spec = {**template["spec"], "restartPolicy": "Never"}
    if group.put_before:
        spec["initContainers"] = [*spec.get("initContainers", ()), *group.put_before]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def _warnings(answer: Any) -> Iterator[Finding]:
    """The API server's warnings about an object that it accepts: unknown fields, Pod Security that only warns."""
    values = [value for name, value in (answer[2] or {}).items() if name.lower() == "warning"]
    for text in re.findall(r'299 - "((?:\\.|[^"\\])*)"', " ".join(values)):
        said = sentences.cut(text.replace('\\"', '"'))
        trouble = Trouble(sentence=f"The API server says: {said}")
        yield Finding(name="warning", trouble=trouble, is_fatal=False)


# -- sizes, nodes and names ----------------------------------------------------------------------------------------------


def _never(cluster: Cluster, spec: Settled, quotas: Sequence[Any], groups: Sequence[PodGroup]) -> Iterator[Finding]:
    """What can never be, whoever ends: pods that a quota does not allow together, and a pod that is larger than every node."""
    largest: dict[str, float] = {}
    together = {"pods": float(spec.topology.fewest_pods)}
    # A range of processes runs as soon as its lower number has room.
    spare = spec.topology.number_of_pods - spec.topology.fewest_pods
    for group in groups:
        pods = group.pods - (spare if group is groups[-1] else 0)
        for key, amount in _requests(group).items():
            largest[key] = max(largest.get(key, 0.0), amount)
            together[key] = together.get(key, 0.0) + amount * pods
    for quota in quotas:
        for name, text in (quota.spec.hard or {}).items():
            needed = together.get(name.removeprefix("requests."), 0.0)
            if needed > quantities.amount(text):
                facts = {"limited": quantities.amount(text), "requested": needed}
                texts = {key: f"{name}={quantities.amount_text(name, amount)}" for key, amount in facts.items()}
                meta = quota.metadata
                yield _found(
                    "quota-sum", "quota-too-small", is_fatal=True, quota=meta.name, namespace=meta.namespace, **texts
                )
    nodes = () if spec.cluster.wait_for_nodes else _list_nodes(cluster) or ()
    for key, needed in largest.items() if 0 < len(nodes) < _MANY_NODES else ():
        most = max(quantities.amount((node.status.allocatable or {}).get(key, "0")) for node in nodes)
        if needed > most:
            facts = {"wanted": needed, "largest": most}
            texts = {name: quantities.amount_text(key, amount) for name, amount in facts.items()}
            yield _found("nodes-too-small", is_fatal=True, resource=_WORDS.get(key, f"of {key}"), **texts)


def _requests(group: PodGroup) -> dict[str, float]:
    """What a pod asks for of each resource."""
    sums: dict[str, float] = {}
    for container in group.template["spec"]["containers"]:
        resources = container.get("resources") or {}
        for key, text in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            sums[key] = sums.get(key, 0.0) + quantities.amount(text)
    return sums


def _list_nodes(cluster: Cluster) -> Sequence[Any] | None:
    """The nodes, not all of very many; None if this user may not list them."""
    found = _lookup(lambda: cluster.core.list_node(limit=_MANY_NODES, _request_timeout=_TIMEOUT_S).items)
    return None if found is _MISSING else found


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


def _claims(cluster: Cluster, groups: Sequence[PodGroup]) -> Iterator[Finding]:
    core, namespace = cluster.core, cluster.namespace
    pods = sum(group.pods for group in groups)
    volumes = [volume for group in groups for volume in group.template["spec"].get("volumes") or ()]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]
    for name in dict.fromkeys(claims):
        read = functools.partial(core.read_namespaced_persistent_volume_claim, name, namespace)
        claim, problem, why = _lookup(functools.partial(read, _request_timeout=_TIMEOUT_S)), "", ""
        if claim is _MISSING:
            problem = "missing"
        elif claim is not None and (claim.metadata.deletion_timestamp is not None or claim.status.phase == "Lost"):
            problem = "claim-lost"
            why = "it has lost its volume" if claim.status.phase == "Lost" else "it is being deleted"
        elif claim is not None and pods > 1:
            modes = set(claim.status.access_modes or claim.spec.access_modes or ())
            one_node = "" if all(_is_held(group.template["spec"]) for group in groups) else "claim-one-node"
            problem = {("ReadWriteOncePod",): "claim-one-pod", ("ReadWriteOnce",): one_node}.get(tuple(modes), "")
        if problem:
            facts = {"object": name, "claims": name, "namespace": namespace, "pods": str(pods), "why": why}
            is_fatal = problem != "claim-one-node"
            yield _found("claim", problem, is_fatal=is_fatal, kind="persistentvolumeclaim", **facts)


def _is_held(pod: Mapping[str, Any]) -> bool:
    """Whether a pod names the one node that it may run on."""
    required = ((pod.get("affinity") or {}).get("nodeAffinity") or {}).get(NODE_REQUIRED) or {}
    terms = required.get("nodeSelectorTerms") or ()
    return HOST_LABEL in (pod.get("nodeSelector") or {}) or any(term.get("matchFields") for term in terms)


def _named(cluster: Cluster, job: Mapping[str, Any], groups: Sequence[PodGroup]) -> Iterator[Finding]:
    """Secrets, ConfigMaps and a queue that the job names."""
    core, namespace, queue_name = cluster.core, cluster.namespace, queue.queue_of(job)
    named = [("queue-missing", "queue", queue_name)] if queue_name else []
    for pod in (group.template["spec"] for group in groups):
        variables = [entry.get("valueFrom") or {} for each in pod["containers"] for entry in each.get("env") or ()]
        for holder, word, field in (
            *((volume, "secret", "secretName") for volume in pod.get("volumes") or ()),
            *((volume, "configMap", "name") for volume in pod.get("volumes") or ()),
            *((variable, "secretKeyRef", "name") for variable in variables),
        ):
            if word in holder and not holder[word].get("optional"):
                named.append(("missing", word.removesuffix("KeyRef").lower(), holder[word][field]))
        named += [("pull-secret-missing", "secret", secret["name"]) for secret in pod.get("imagePullSecrets") or ()]
    reads = {"secret": core.read_namespaced_secret, "configmap": core.read_namespaced_config_map}
    own = input_secret_name(job["metadata"]["name"])
    for entry, kind, name in dict.fromkeys(named):
        is_queue = kind == "queue"
        read = (
            functools.partial(_read_queue, cluster) if is_queue else functools.partial(reads[kind], namespace=namespace)
        )
        if name != own and _lookup(functools.partial(read, name)) is _MISSING:
            yield _found("missing", entry, is_fatal=entry == "missing", kind=kind, object=name, namespace=namespace)


def _python(spec: Settled) -> Iterator[Finding]:
    """Compare the image's Python, as its registry names it, with the notebook's."""
    variables = {} if spec.image == NOT_MADE_YET or not spec.cuda else for_job.variables_of(spec.image)
    version, here = variables.get("PYTHON_VERSION", ""), loading.python_version()
    if version and version.split(".")[:2] != here.split("."):
        yield _found("image-python", is_fatal=False, image=spec.image, version=version, here=here)


def _runtime(cluster: Cluster, job: Mapping[str, Any]) -> Iterator[Finding]:
    """The runtime that a TrainJob names; only few users may read those of the whole cluster."""
    wanted = job["spec"].get("runtimeRef")
    there = objects.runtimes(cluster) if wanted else ()
    name = f"{'TrainingRuntime/' * (wanted['kind'] == 'TrainingRuntime')}{wanted['name']}" if wanted else ""
    if there and name not in there:
        yield _found("runtime", "runtime-missing", is_fatal=True, object=name, there=", ".join(there))


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
