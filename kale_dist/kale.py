"""Kale's own names: in a notebook that was written for `kale.distributed.pytorch` only the import line changes.

from kale_dist.kale import DistributedConfig, PyTorchJob, distribute
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist import config
from kale_dist.calls import verbs
from kale_dist.errors import ConfigError
from kale_dist.job import records
from kale_dist.job.handle import Job
from kale_dist.job.spec.place_settings import TTL_S, Kubernetes
from kale_dist.wording import show

_POLICIES = {"activeDeadlineSeconds": "timeout_s", "backoffLimit": "max_restarts"}
_CONTAINER = "pytorch"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DistributedConfig:
    """Settings of all pods in Kale's form; objects of Kubernetes are dicts as in a pod's YAML.

    `kd.Kubernetes(...)` takes the same settings, and more, in fewer words.
    """

    env: Mapping[str, str] | Sequence[Mapping[str, Any]] = ()
    """Variables: a dict, or a list as in a container; a `secretKeyRef` is taken, too."""
    env_from: Sequence[Mapping[str, Any]] = ()
    """Secrets and ConfigMaps of which all keys become variables."""
    requests: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Resource requests of each process: `{"cpu": "2", "memory": "4Gi"}`."""
    limits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    affinity: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    run_policy: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The PyTorchJob's: `{"activeDeadlineSeconds": 3600, "backoffLimit": 2, "ttlSecondsAfterFinished": 600}`."""

    def arguments(self, number_of_processes: int | None) -> dict[str, Any]:
        """The equivalent arguments of `kale_dist.distribute`.

        Args:
            number_of_processes: The call's argument; None for its default.

        Raises:
            ConfigError: A value is not valid on a cluster.
        """
        environment, secrets = _variables(self.env)
        policy = dict(self.run_policy)
        arguments = {ours: policy.pop(theirs) for theirs, ours in _POLICIES.items() if theirs in policy}
        ttl_s = policy.pop("ttlSecondsAfterFinished", TTL_S)
        patch: dict[str, Any] = {"runPolicy": policy} if policy else {}
        if self.env_from:
            container = {"name": _CONTAINER, "envFrom": list(self.env_from)}
            kinds = ("Master",) if number_of_processes == 1 else ("Master", "Worker")
            template = {"template": {"spec": {"containers": [container]}}}
            patch["pytorchReplicaSpecs"] = dict.fromkeys(kinds, template)
        place = Kubernetes(
            # A replica of Kale is one process.
            processes_per_pod=1,
            resources=_resources(self.requests, self.limits),
            annotations=self.annotations,
            labels=self.labels,
            node_selector=self.node_selector,
            affinity=self.affinity or None,
            tolerations=self.tolerations or None,
            secret_environment=secrets,
            ttl_s=ttl_s,
            patch={"spec": patch} if patch else None,
        )
        return {**arguments, "environment": environment, "on": place}


def distribute(*args: Any, config: DistributedConfig | None = None, **kwargs: Any) -> Job[Any]:
    """Call `kale_dist.distribute`, on the cluster unless `on` names another place.

    Args:
        *args: As `kale_dist.distribute`.
        config: Settings of all pods.
        **kwargs: As `kale_dist.distribute`.

    Returns:
        The job.
    """
    if config is not None:
        kwargs = {**config.arguments(kwargs.get("number_of_processes")), **kwargs}
    return verbs.distribute(*args, **{"on": _word(), **kwargs})


def PyTorchJob(name: str) -> Job[Any]:  # noqa: N802 - Kale's name
    """The job of this name, also after a restart of the kernel.

    Args:
        name: `job.name`, or a full reference.

    Raises:
        JobNotFoundError: There is no such job.
    """
    if "://" in str(name):
        return verbs.attach(name)
    word = _word()
    # A job of this machine may be in another namespace than the configured one.
    mine = [ref for ref in records.refs(word) if ref.rpartition("/")[2] == name]
    return verbs.attach(mine[-1] if mine else f"{word}://{name}")


def _word() -> str:
    return config.load().on or "kubernetes"


def _resources(requests: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Combine requests and limits: for memory and devices, the limit is the request, as on every cluster."""
    found = {**requests, **limits}
    if "cpu" in limits:
        found |= {"cpu": requests.get("cpu", limits["cpu"]), "cpu_limit": limits["cpu"]}
    return {name: str(value) if name == "memory" else value for name, value in found.items()}


def _variables(env: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Split variables into those with values, and those from Secrets as `secret/key`."""
    if isinstance(env, Mapping):
        return dict(env), {}
    plain, secrets = {}, {}
    for one in env:
        given = one if isinstance(one, Mapping) else {}
        if secret := (given.get("valueFrom") or {}).get("secretKeyRef"):
            secrets[one["name"]] = f"{secret['name']}/{secret['key']}"
        elif "name" in given and "value" in given:
            plain[one["name"]] = one["value"]
        else:
            remedy = "Write {'name': 'A', 'value': '1'}, or a valueFrom with a secretKeyRef"
            raise ConfigError("env", f"{show(one)} is not a variable that pods can be given here", remedy)
    return plain, secrets
