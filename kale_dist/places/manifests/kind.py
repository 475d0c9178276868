"""What this library has to know of a kind of object: how a job is written as one, and how its state is read. Pure.

Each kind is a class, whose instance stands in `kale_dist.places.manifests.KINDS`. Everything
else (head and relays, logs, explanations, results, cancelling, lost pods, rights, dry runs) is the same for all kinds and
asks the kind of a job for what differs. To add a kind:

1. Write its class: derive from `Kind`, fill in the class variables, and write `body`, `pod_groups` and `pod_names`;
   the rest only where the kind differs from what is here.
2. Make each pod's template with `pod_template`. It labels the pods with the object's name (`OBJECT_LABEL`) and with the
   number of their type's first pod (`FIRST_POD_LABEL`), by which they are found and numbered, and gives the agents the same.
   `index` is the field of the pod that holds its index in its type: a label or an annotation that the controller sets.
   Pod 0 is the head, in which rank 0 runs; the others are relays.
3. Put the instance into `KINDS`, and its word into `OBJECT_KINDS` of `job/spec/place_settings.py`.
4. Add its golden jobs to `tests/unit/golden_jobs.py`, its states to `tests/unit/test_kinds.py`, and its word to
   `tests/cluster/test_kinds_on_cluster.py`.
"""

from __future__ import annotations

import abc
import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from kale_dist.errors import ConfigError
from kale_dist.job.spec.job_spec import Settled
from kale_dist.places.manifests.object_settings import (
    OBJECT_LABEL,
    QUEUE_LABEL,
    RUN_LABEL,
    SPEC_ANNOTATION,
    SUBMITTED_BY_ANNOTATION,
    ObjectSettings,
    input_secret_name,
    object_name,
    own_labels,
)
from kale_dist.places.manifests.patching import apply_patch
from kale_dist.places.manifests.pod_template import roles_of

POLICY_API = ("networking.k8s.io", "v1", "networkpolicies")
"""Group, version and plural of NetworkPolicies."""

Finished = Literal["", "succeeded", "failed"]
_ENDS: Mapping[str, Finished] = {"Succeeded": "succeeded", "Complete": "succeeded", "Failed": "failed"}
"""The conditions of an ended object."""

_LARGEST_ANNOTATION = 200_000
"""Characters; all annotations of an object together may have 256 KiB."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ObjectState:
    """Holds what an object reports of its job. The head's word comes before it."""

    finished: Finished = ""
    message: str = ""
    """The controller's words about a failure."""
    is_running: bool = False
    is_known: bool = False
    """Whether the controller has looked at it."""
    started: str | None = None
    """When it began or was resumed, as the API writes a time. Pods that were made before belong to an earlier life."""
    ended: str | None = None

    @classmethod
    def of(cls, condition: Mapping[str, Any], status: Mapping[str, Any]) -> Self:
        """Whether, how and when it has ended, by a condition that holds and its status."""
        finished: Finished = _ENDS.get(str(condition.get("type")), "")
        return cls(
            finished=finished,
            message=str(condition.get("message") or "") if finished == "failed" else "",
            ended=status.get("completionTime") or (condition.get("lastTransitionTime") if finished else None),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PodGroup:
    """The pods of one replica type."""

    role: str
    """In lower case, such as `worker`."""
    pods: int
    template: dict[str, Any]
    """To be read only."""
    restart_policy: str = "Never"
    put_before: tuple[Mapping[str, Any], ...] = ()
    """Init containers that the controller adds to it."""


class Kind(abc.ABC):
    """A kind of object that runs a job on a cluster."""

    word: ClassVar[str]
    """As `kd.Kubernetes(kind=...)` has it."""
    name: ClassVar[str]
    """Such as `PyTorchJob`."""
    group: ClassVar[str]
    version: ClassVar[str]
    plural: ClassVar[str]
    container: ClassVar[str]
    """The name that the controller wants for the container that counts."""
    roles: ClassVar[tuple[str, ...]] = ()
    """Those that `kd.Kubernetes(roles=...)` may name; empty where all pods are alike."""
    controller: ClassVar[str]
    """Who makes the pods, for sentences."""
    find_controller: ClassVar[str]
    """A command by which an administrator looks at the controller."""
    install: ClassVar[str]
    """What an administrator does to have it, as an imperative without its full stop."""
    is_automatic: ClassVar[bool] = False
    """Whether a job may become one without a `kind` in its call."""
    makes_services: ClassVar[bool] = False
    """Whether this library creates Services for it, for which a user needs the right."""
    services_a_pod: ClassVar[bool] = False
    """Whether each pod has a Service of its own."""
    clashes_with: ClassVar[str] = ""
    """Another version of the same name, of another controller, which cannot be served beside it."""

    @property
    def api(self) -> tuple[str, str]:
        """Group and version."""
        return self.group, self.version

    # -- the object -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def body(self, spec: Settled, settings: ObjectSettings) -> dict[str, Any]:
        """The object's `spec`."""

    @abc.abstractmethod
    def pod_groups(self, made: Mapping[str, Any]) -> Sequence[PodGroup]:
        """The pods of an object, that of the head first. Raises KeyError or TypeError if it is no object of this kind."""

    @abc.abstractmethod
    def pod_names(self, spec: Settled, life: int = 1) -> tuple[str, ...]:
        """Names of a job's pods by their number; where the controller appends something, what comes before it."""

    def head_host(self, spec: Settled, life: int = 1) -> str:
        """Host name of pod 0 within the namespace: its own Service's, or a name in the Service of the object's name."""
        pod = self.pod_names(spec, life)[0]
        return pod if self.services_a_pod else f"{pod}.{object_name(spec.name, life)}"

    def beside(self, spec: Settled, settings: ObjectSettings, owner: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
        """Services to create after the object; `owner` is what `owner_of` gives for it."""
        del spec, settings, owner
        return ()

    def make(self, spec: Settled, settings: ObjectSettings | None = None) -> dict[str, Any]:
        """The object to create. The same arguments give the same object, with its keys in the same order.

        Args:
            spec: The job.
            settings: Of the object; None for the first.

        Raises:
            ConfigError: There is no such job of this kind, or the patch cannot be applied or changes what the job depends on.
        """
        settings = settings or ObjectSettings()
        for role in roles_of(spec):
            if role not in self.roles:
                there = f"It has: {', '.join(self.roles)}" if self.roles else "Its pods are all alike: use resources="
                raise ConfigError("roles", f"a {self.name} has no role {role!r}", there)
        if spec.topology.sizes:
            self.check_range(spec)
        made = {
            "apiVersion": "/".join(self.api),
            "kind": self.name,
            "metadata": _metadata(spec, settings),
            "spec": self.body(spec, settings),
        }
        if not spec.cluster.patch or settings.command:
            return made
        patched = apply_patch(made, json.loads(spec.cluster.patch))
        self._check_patched(made, patched)
        return patched

    def _check_patched(self, before: dict[str, Any], after: Any) -> None:
        """Refuse patches after which the job could not be found, or would not be this job."""

        def refuse(problem: str) -> ConfigError:
            return ConfigError("patch", problem, "Leave that out of the patch")

        try:
            changed = [key for key in ("apiVersion", "kind") if before[key] != after[key]]
            changed += [
                f"metadata.{key}" for key in ("name", "namespace") if before["metadata"][key] != after["metadata"][key]
            ]
            old, new = ({group.role: group for group in self.pod_groups(made)} for made in (before, after))
            if {role: group.pods for role, group in old.items()} != {role: group.pods for role, group in new.items()}:
                changed.append("the number of replicas")
            if any(group.restart_policy != old[role].restart_policy for role, group in new.items() if role in old):
                changed.append("restartPolicy")
            without = [
                role
                for role, group in new.items()
                if self.container not in {container["name"] for container in group.template["spec"]["containers"]}
            ]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            problem = f"after it the object is no {self.name} any more ({type(error).__name__}: {error})"
            raise refuse(problem) from None
        if changed:
            raise refuse(f"it changes {changed[0]}, on which the job depends")
        if without:
            raise refuse(f"it removes the container {self.container!r} of the {without[0]}, in which the ranks run")

    def check_range(self, spec: Settled) -> None:
        """Refuse a range of processes whose pods cannot come and go.

        Raises:
            ConfigError: A lost pod is not made again.
        """
        if not self.replaces_pods(spec):
            problem = (
                f"a range needs pods that are made again when they are lost, and a lost pod of this {self.name} is not"
            )
            raise ConfigError("number_of_processes", problem, "Give one number, or kind='job'")

    def replaces_pods(self, spec: Settled) -> bool:
        """Whether the controller makes a relay's pod again that is lost, so that the head may wait for it."""
        del spec
        return False

    def returns_head(self, spec: Settled) -> bool:
        """Whether it makes the head's pod again, too: the job's store has what the next head resumes from, and counts the restarts."""
        return spec.saves and bool(spec.store) and self.replaces_pods(spec)

    def order(self, spec: Settled) -> Mapping[str, Any]:
        """Return what its agents have to know beyond what all orders have: fields of `wire.Order`."""
        del spec
        return {}

    # -- its state ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def state(self, made: Mapping[str, Any]) -> ObjectState:
        """Return what an object of the API reports of its job."""

    def suspension(self, *, value: bool) -> dict[str, Any]:
        """The merge patch by which the controller ends the pods, or makes them again."""
        return {"spec": {"suspend": value}}

    def end(self, spec: Settled, *, head_leaves: bool) -> dict[str, Any]:
        """The merge patch by which the controller ends an ended job's pods, and makes none any more.

        Args:
            spec: The job.
            head_leaves: Whether the head ends by itself, with a failure, so that its log can stay.
        """
        del spec, head_leaves
        return self.suspension(value=True)

    def is_suspended(self, made: Mapping[str, Any]) -> bool:
        """Whether the object is to have no pods."""
        return bool((made.get("spec") or {}).get("suspend"))

    def number_of_pods(self, made: Mapping[str, Any]) -> int:
        """How many pods it is to have."""
        return sum(group.pods for group in self.pod_groups(made))

    def reporters_of(self, name: str) -> Sequence[tuple[str, str]]:
        """Return kind and name of the objects whose events show why pods are not made, for the object of this name."""
        return ((self.name, name),)


def last_condition(made: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last condition that holds; empty if there is none."""
    conditions = (made.get("status") or {}).get("conditions") or ()
    return next((item for item in reversed(conditions) if item.get("status") == "True"), {})


# -- what stands beside the object, and what all of them have -----------------------------------------------------------


def _spec_annotation(spec: Settled) -> str:
    """The specification as JSON, for `attach` from another machine.

    The digests of the blobs and the packages are left out where there are so many that an annotation could not hold them; they are in
    the job's order, too.
    """
    shown = spec.to_json()
    text = json.dumps(shown, separators=(",", ":"))
    less = {**shown, "blobs": (), "offer": {}}
    return text if len(text) <= _LARGEST_ANNOTATION else json.dumps(less, separators=(",", ":"))


def input_secret(
    spec: Settled, settings: ObjectSettings, owner: Mapping[str, Any], data: Mapping[str, bytes]
) -> dict[str, Any]:
    """The Secret that a job's pods wait for. It is deleted with the job's object.

    Args:
        spec: The job.
        settings: As for the object.
        owner: From `owner_of`.
        data: Bytes by the names of `wire.InputFiles`.
    """
    name = input_secret_name(object_name(spec.name, settings.life))
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {**_beside("v1", "Secret", spec, owner, name), "type": "Opaque", "data": encoded}


def headless_service(spec: Settled, settings: ObjectSettings, owner: Mapping[str, Any]) -> dict[str, Any]:
    """The Service that gives the pods of a job their host names, also before they are ready.

    Args:
        spec: The job.
        settings: As for the object.
        owner: From `owner_of`.
    """
    name = object_name(spec.name, settings.life)
    body = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {OBJECT_LABEL: name}}
    return {**_beside("v1", "Service", spec, owner, name), "spec": body}


def network_policy(spec: Settled, settings: ObjectSettings, owner: Mapping[str, Any]) -> dict[str, Any]:
    """The NetworkPolicy that lets only a job's own pods connect to its pods, for torch's store and gloo ask nobody who they are.

    Arguments as for `headless_service`.
    """
    name, port = object_name(spec.name, settings.life), spec.cluster.metrics_port
    own = {"podSelector": {"matchLabels": {OBJECT_LABEL: name}}}
    ingress = [{"from": [own]}, *([{"ports": [{"port": port, "protocol": "TCP"}]}] if port else [])]
    body = {**own, "policyTypes": ["Ingress"], "ingress": ingress}
    return {**_beside("/".join(POLICY_API[:2]), "NetworkPolicy", spec, owner, name), "spec": body}


def owner_of(made: Mapping[str, Any]) -> dict[str, Any]:
    """The reference by which other objects belong to an object that was created; empty before it has a UID."""
    meta = made["metadata"]
    if "uid" not in meta:
        return {}
    return {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
        "blockOwnerDeletion": False,
    }


def _beside(api: str, kind: str, spec: Settled, owner: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The beginning of an object that stands beside the job's own."""
    owners = {"ownerReferences": [dict(owner)]} if owner else {}
    metadata = {"name": name, "namespace": spec.cluster.namespace, "labels": own_labels(spec.name), **owners}
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _metadata(spec: Settled, settings: ObjectSettings) -> dict[str, Any]:
    """Name, labels and annotations of a job's object."""
    cluster, is_errand = spec.cluster, bool(settings.command)
    labels = {
        **own_labels(spec.name, is_errand=is_errand),
        **({QUEUE_LABEL: cluster.queue} if cluster.queue else {}),
        **({RUN_LABEL: str(settings.life)} if settings.life > 1 else {}),
        **dict(cluster.labels),
    }
    described = {} if is_errand else {SPEC_ANNOTATION: _spec_annotation(spec)}
    submitter = {SUBMITTED_BY_ANNOTATION: settings.submitter} if settings.submitter else {}
    annotations = {**dict(cluster.annotations), **submitter, **described}
    name = object_name(spec.name, settings.life)
    return {"name": name, "namespace": cluster.namespace, "labels": labels, "annotations": annotations}
