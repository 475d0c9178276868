"""Whether the pods of a job fit into what a namespace allows and what nodes have. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Self

from kubernetes.utils.quantity import parse_quantity

from kale_dist.backends.kubernetes.findings import Finding
from kale_dist.manifests import input_secret_name
from kale_dist.manifests.settings import QUEUE_LABEL

_JOB_COUNT = "count/pytorchjobs.kubeflow.org"
_SERVICES = ("services", "count/services")
"""The operator makes one for each pod."""

_DIRECT = (_JOB_COUNT, "secrets", "count/secrets")
"""What this library makes itself: a full quota of these refuses the call, and not only a pod."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PodNeed:
    """Pods that are alike."""

    count: int
    requests: tuple[tuple[str, Decimal], ...]
    limits: tuple[tuple[str, Decimal], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a PyTorchJob needs to find in its namespace."""

    pods: tuple[PodNeed, ...]
    claims: tuple[tuple[str, bool], ...] = ()
    """(claim, whether it is mounted for reading only)."""
    secrets: tuple[str, ...] = ()
    """Named by volumes and variables, beside the job's own input."""
    config_maps: tuple[str, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    service_account: str = "default"
    priority_class: str = ""
    queue: str = ""
    has_host_path: bool = False
    has_master_and_workers: bool = False
    """Whether the operator puts its init container before the workers."""

    @property
    def number_of_pods(self) -> int:
        """How many pods there are."""
        return sum(need.count for need in self.pods)

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Self:
        """What a PyTorchJob needs, as `manifests.pytorch_job` makes it, the user's patch included."""
        own_secret = input_secret_name(job["metadata"]["name"])
        replicas = job["spec"]["pytorchReplicaSpecs"]
        pods = [(replica.get("replicas", 1), replica["template"]["spec"]) for replica in replicas.values()]
        claims: dict[str, bool] = {}
        secrets, config_maps = [], []
        has_host_path = False
        for volume in (volume for _, pod in pods for volume in pod.get("volumes") or ()):
            if claim := volume.get("persistentVolumeClaim"):
                name = claim["claimName"]
                claims[name] = claims.get(name, True) and _is_read_only(volume["name"], claim, [pod for _, pod in pods])
            elif "secret" in volume and not volume["secret"].get("optional"):
                secrets.append(volume["secret"]["secretName"])
            elif "configMap" in volume and not volume["configMap"].get("optional"):
                config_maps.append(volume["configMap"]["name"])
            has_host_path = has_host_path or "hostPath" in volume
        for variable in (entry for _, pod in pods for each in pod["containers"] for entry in each.get("env") or ()):
            source = (variable.get("valueFrom") or {}).get("secretKeyRef")
            if source and not source.get("optional"):
                secrets.append(source["name"])
        first = pods[0][1]
        return cls(
            pods=tuple(_need(count, pod) for count, pod in pods),
            claims=tuple(claims.items()),
            secrets=tuple(dict.fromkeys(name for name in secrets if name != own_secret)),
            config_maps=tuple(dict.fromkeys(config_maps)),
            image_pull_secrets=tuple(secret["name"] for secret in first.get("imagePullSecrets") or ()),
            service_account=first.get("serviceAccountName") or "default",
            priority_class=first.get("priorityClassName") or "",
            queue=(job["metadata"].get("labels") or {}).get(QUEUE_LABEL, ""),
            has_host_path=has_host_path,
            has_master_and_workers={"Master", "Worker"} <= replicas.keys(),
        )


def quotas(found: Iterable[Any], wanted: Wanted) -> list[Finding]:
    """Quotas of the namespace that the job exceeds.

    Args:
        found: `V1ResourceQuota` objects. Those of a scope are passed over: they hold for some pods only.
        wanted: The job.
    """
    asked = _totals(wanted)
    findings = []
    for quota in found:
        if quota.spec.scopes or quota.spec.scope_selector:
            continue
        hard, used = quota.status.hard or quota.spec.hard or {}, quota.status.used or {}
        for key, text in hard.items():
            need, limit, taken = asked.get(key, Decimal(0)), _amount(text), _amount(used.get(key, "0"))
            if not need or taken + need <= limit:
                continue
            name, of = quota.metadata.name, key.removeprefix("count/")
            sentence = (
                f"The quota {name!r} allows {_text(key, limit)} of {of}, of which {_text(key, taken)} is used, "
                f"and the job needs {_text(key, need)}"
            )
            never = need > limit
            remedy = "Ask for less, or have the administrator raise it" if never else "It waits until others end"
            if key in _DIRECT and not never:
                remedy = "Delete finished jobs (kale-dist delete), or have the administrator raise it"
            findings.append(Finding(name="quota", sentence=sentence, remedy=remedy, is_fatal=never or key in _DIRECT))
    return findings


def needs_cpu_limit(quotas_found: Iterable[Any], limit_ranges: Iterable[Any], wanted: Wanted) -> bool:
    """Whether pods are refused without a limit of cores of their own."""
    demanded = any(
        "limits.cpu" in (quota.spec.hard or {})
        for quota in quotas_found
        if not quota.spec.scopes and not quota.spec.scope_selector
    )
    given = False
    for item in _container_limits(limit_ranges):
        default = _amounts(item.default).get("cpu") or _amounts(item.max).get("cpu")
        if default is None:
            continue
        given = True
        # The default would be this pod's limit, and a limit below the request makes it invalid.
        if any(dict(need.requests).get("cpu", Decimal(0)) > default for need in wanted.pods):
            return True
    return demanded and not given


def sizes(limit_ranges: Iterable[Any], wanted: Wanted) -> list[Finding]:
    """LimitRanges that forbid the job's pods."""
    findings = []
    for limit_range in limit_ranges:
        for item in limit_range.spec.limits or ():
            if item.type not in ("Container", "Pod"):
                continue
            largest, least = _amounts(item.max), _amounts(item.min)
            for need in wanted.pods:
                requests, limits = dict(need.requests), dict(need.limits)
                for key, bound in largest.items():
                    asked = limits.get(key, requests.get(key, Decimal(0)))
                    if asked > bound:
                        findings.append(_size(limit_range, key, "at most", bound, asked))
                for key, bound in least.items():
                    if key in requests and requests[key] < bound:
                        findings.append(_size(limit_range, key, "at least", bound, requests[key]))
    return list(dict.fromkeys(findings))


def nodes(found: Sequence[Any], wanted: Wanted) -> list[Finding]:
    """What no node of the cluster has. Not fatal: more may be added by an autoscaler.

    Args:
        found: `V1Node` objects.
        wanted: The job.
    """
    usable = [_amounts(node.status.allocatable) for node in found if not node.spec.unschedulable]
    findings = []
    keys = {key for need in wanted.pods for key, amount in need.requests if amount}
    for key in sorted(keys):
        total = sum((amounts.get(key, Decimal(0)) for amounts in usable), Decimal(0))
        largest = max((amounts.get(key, Decimal(0)) for amounts in usable), default=Decimal(0))
        needed = max(dict(need.requests).get(key, Decimal(0)) for need in wanted.pods)
        together = sum((dict(need.requests).get(key, Decimal(0)) * need.count for need in wanted.pods), Decimal(0))
        if needed > largest:
            sentence = f"A pod needs {_text(key, needed)} of {key}, and the largest node has {_text(key, largest)}"
        elif together > total:
            sentence = (
                f"The pods need {_text(key, together)} of {key} together, and the cluster has {_text(key, total)}"
            )
        else:
            continue
        remedy = "Ask for less; otherwise the job waits until nodes are added"
        findings.append(Finding(name="nodes", sentence=sentence, remedy=remedy))
    return findings


# -- inside ----------------------------------------------------------------------------------------------------------


def _is_read_only(volume: str, claim: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> bool:
    mounts = [mount for pod in pods for each in pod["containers"] for mount in each.get("volumeMounts") or ()]
    return bool(claim.get("readOnly")) or all(mount.get("readOnly") for mount in mounts if mount["name"] == volume)


def _need(count: int, pod: Mapping[str, Any]) -> PodNeed:
    sums: dict[str, dict[str, Decimal]] = {"requests": {}, "limits": {}}
    for container in pod["containers"]:
        for kind, amounts in sums.items():
            for key, text in ((container.get("resources") or {}).get(kind) or {}).items():
                amounts[key] = amounts.get(key, Decimal(0)) + _amount(text)
    requests = sums["limits"] | sums["requests"]
    return PodNeed(count=count, requests=tuple(sorted(requests.items())), limits=tuple(sorted(sums["limits"].items())))


def _totals(wanted: Wanted) -> dict[str, Decimal]:
    """What the job counts for, by the keys that quotas have."""
    number = Decimal(wanted.number_of_pods)
    totals = dict.fromkeys(("pods", "count/pods", *_SERVICES), number)
    totals |= dict.fromkeys(_DIRECT, Decimal(1))
    for need in wanted.pods:
        for prefix, amounts in (("requests.", need.requests), ("limits.", need.limits)):
            for key, amount in amounts:
                totals[prefix + key] = totals.get(prefix + key, Decimal(0)) + amount * need.count
    for key in ("cpu", "memory"):
        totals[key] = totals.get(f"requests.{key}", Decimal(0))
    return totals


def _container_limits(limit_ranges: Iterable[Any]) -> Iterable[Any]:
    return (item for found in limit_ranges for item in found.spec.limits or () if item.type == "Container")


def _size(limit_range: Any, key: str, word: str, bound: Decimal, asked: Decimal) -> Finding:
    sentence = (
        f"The LimitRange {limit_range.metadata.name!r} allows {word} {_text(key, bound)} of {key}, and a pod of the "
        f"job has {_text(key, asked)}"
    )
    return Finding(name="size", sentence=sentence, remedy="Change resources= accordingly", is_fatal=True)


def _amounts(given: Mapping[str, Any] | None) -> dict[str, Decimal]:
    return {key: _amount(text) for key, text in (given or {}).items()}


def _amount(text: Any) -> Decimal:
    try:
        return Decimal(parse_quantity(text))  # type: ignore[no-untyped-call]
    except (ValueError, InvalidOperation):
        return Decimal(0)


def _text(key: str, amount: Decimal) -> str:
    """An amount as people read it: memory in GiB."""
    if "memory" in key or "storage" in key:
        gib = amount / (1 << 30)
        return f"{float(gib):.3g} GiB"
    return f"{float(amount):g}"
