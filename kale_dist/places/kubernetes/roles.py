"""The permissions that a user of this library needs in a namespace, and what does not work without each. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kale_dist.places.manifests import POLICY_API, Kind

_SERVICE_ACCOUNT = "system:serviceaccount:"

CONNECT = frozenset(("create pods/portforward", "get pods/portforward"))
"""Rights without which results come by the first pod's log."""

WHO_READS_LOGS = "which all who may read logs in the namespace can read (the built-in role view may)"

NAME = "kale-dist"
"""Name of the Role and of its binding."""


@dataclasses.dataclass(frozen=True, slots=True)
class Right:
    """Verbs on one resource that are granted together."""

    resource: str
    """With its subresource, such as `pods/log`."""
    verbs: tuple[str, ...]
    without: str
    """What is lost without it; a sentence without its full stop."""
    _: dataclasses.KW_ONLY
    group: str = ""
    """API group; empty for the core."""
    is_needed: bool = False
    """Whether no job can run without it."""


_SERVICES = Right(
    "services",
    ("create", "delete"),
    "No job of more than one pod can be submitted: its pods find each other by a Service",
    is_needed=True,
)

POLICIES = Right(
    POLICY_API[2],
    ("create", "delete"),
    "All pods of the cluster can connect to a job's pods, in which torch asks nobody who they are",
    group=POLICY_API[0],
)

_RUNTIMES = Right(
    "trainingruntimes",
    ("list",),
    "TrainJobs do not take the runtime kale-dist of the namespace by themselves, and go without what it has",
    group="trainer.kubeflow.org",
)

_FOR_ALL = (
    POLICIES,
    Right("secrets", ("create",), "No job can be submitted: its code and its key are sent in a Secret", is_needed=True),
    Right(
        "pods",
        ("get", "list", "watch"),
        "You cannot see which pod a job waits for or why one failed, and nothing can be fetched from pods",
        is_needed=True,
    ),
    Right("pods/log", ("get",), "Logs come from the first pod through port-forward, and only while it runs"),
    Right(
        "pods/portforward",
        ("create", "get"),
        "Nothing can be sent to pods or fetched from them: snapshots over 500 kB and weights need a store (store=), a "
        "chatty log arrives with gaps, and there are no warm pods (keep_warm) and live ranks. Small results are printed into "
        f"the first pod's log, {WHO_READS_LOGS}",
    ),
    Right(
        "events",
        ("get", "list", "watch"),
        "Pods that are refused, wait for volumes or cannot pull images are explained less well or not at all",
    ),
    Right(
        "secrets",
        ("get", "delete"),
        "Results cannot be read from another machine, and the Secret of a job is deleted only by the garbage collector",
    ),
    Right("persistentvolumeclaims", ("get",), "A claim that is missing is noticed only when pods wait for it"),
    Right(
        "resourcequotas",
        ("list", "watch"),
        "A quota that is exhausted is noticed only when pods are refused, and a job that waits for it starts up to a "
        "minute late",
    ),
    Right(
        "limitranges", ("list",), "A limit of cores that the namespace demands is noticed only when pods are refused"
    ),
    Right(
        "namespaces",
        ("get",),
        'Whether the namespace enforces Pod Security "restricted" is not known before pods are refused; give '
        "master=False there",
    ),
)
"""The rights that jobs of any kind need."""


def rights(kind: Kind) -> tuple[Right, ...]:
    """The least Role for a kind of job; without those that are needed no job runs."""
    return (
        Right(
            kind.plural,
            ("create", "get", "list", "watch"),
            "No job can be submitted or followed",
            is_needed=True,
            group=kind.group,
        ),
        Right(
            kind.plural,
            ("patch", "delete"),
            "Jobs cannot be deleted, a job that loses a pod does not resume, and only jobs whose first pod can be "
            "reached can be cancelled",
            group=kind.group,
        ),
        *((_SERVICES,) if kind.makes_services else ()),
        *((_RUNTIMES,) if kind.group == _RUNTIMES.group else ()),
        *_FOR_ALL,
    )


def role_yaml(namespace: str, identity: str, rights: Iterable[Right]) -> str:
    """A Role with these rights and its binding, for `kubectl apply -f -`.

    Args:
        namespace: Where; empty for a ClusterRole and its binding.
        identity: The user or service account as the API server names it; empty for a placeholder.
        rights: What it grants.
    """
    verbs: dict[tuple[str, str], list[str]] = {}
    for right in rights:
        known = verbs.setdefault((right.group, right.resource), [])
        known += [verb for verb in right.verbs if verb not in known]
    kind = "Role" if namespace else "ClusterRole"
    namespace_line = [f"  namespace: {namespace}"] if namespace else []
    lines = [
        "apiVersion: rbac.authorization.k8s.io/v1",
        f"kind: {kind}",
        "metadata:",
        f"  name: {NAME}",
        *namespace_line,
    ]
    lines.append("rules:")
    for (group, resource), allowed in verbs.items():
        lines.append(f'- {{apiGroups: ["{group}"], resources: ["{resource}"], verbs: [{", ".join(allowed)}]}}')
    lines += ["---", "apiVersion: rbac.authorization.k8s.io/v1", f"kind: {kind}Binding", "metadata:"]
    lines += [f"  name: {NAME}", *namespace_line]
    lines.append(f"roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: {kind}, name: {NAME}}}")
    lines += ["subjects:", f"- {_identity(identity, namespace)}"]
    return "\n".join(lines) + "\n"


def _identity(identity: str, namespace: str) -> str:
    if identity.startswith(_SERVICE_ACCOUNT):
        owner, _, name = identity.removeprefix(_SERVICE_ACCOUNT).partition(":")
        return f'{{kind: ServiceAccount, name: "{name}", namespace: "{owner}"}}'
    if not identity:
        return f'{{kind: ServiceAccount, name: default, namespace: "{namespace or "default"}"}}'
    quoted = identity.replace("\\", "\\\\").replace('"', '\\"')
    return f'{{apiGroup: rbac.authorization.k8s.io, kind: User, name: "{quoted}"}}'
