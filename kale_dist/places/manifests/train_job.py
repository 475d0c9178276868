"""A job as a TrainJob of Kubeflow Trainer (v2): its pods are those of a runtime, changed where a TrainJob may. Pure.

What the pods have beyond their image, command, environment and resources are patches of the runtime (`runtimePatches`; before
Trainer 2.2 `podTemplateOverrides`). They cannot change everything: what a runtime alone decides is refused. With a runtime of
`train_runtime` a TrainJob has what the other kinds have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec.job_spec import Settled
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.manifests import train_runtime
from kale_dist.places.manifests.kind import Kind, ObjectState, PodGroup
from kale_dist.places.manifests.object_settings import COMPLETION_INDEX, ObjectSettings, object_name
from kale_dist.places.manifests.pod_template import pod_template
from kale_dist.places.manifests.train_runtime import API_GROUP, API_VERSION, MOST_RESTARTS, OF_CLUSTER, STEP

DEFAULT_RUNTIME = "torch-distributed"
OLD, SECURE, NEWEST = "2.1", "2.2", "2.3"
"""Versions of Trainer that differ: in the second a TrainJob can change what processes may do and has a deadline, in the third it can change
how long a pod has to end. As `kd.Kubernetes(trainer=...)` has them."""

MAKE_RUNTIME = "kale-dist runtime | kubectl apply -f -"
_MANAGER = "kale-dist.dev/manager"
_GRACE, _DEADLINE = "terminationGracePeriodSeconds", "activeDeadlineSeconds"
_PATCHED = (
    "serviceAccountName", "imagePullSecrets", "securityContext", "nodeSelector", "tolerations", "affinity", "volumes", _GRACE
)  # fmt: skip
"""Fields of a pod that a patch may set, the last one from Trainer 2.3 on; `podTemplateOverrides` have no `securityContext`."""

_OF_THE_RUNTIME = {
    **dict.fromkeys(train_runtime.SETTINGS, ""),
    "gang": "Leave it out and give a runtime (runtime=) a `podGroupPolicy`, or use queue=",
    "ttl_s": "Leave it out, and delete ended jobs with `kale-dist delete --finished --on kubernetes`; or give kind='job'",
}
"""What only a runtime can say, with what to do; empty where `kale-dist runtime` has an option for it."""


class TrainJob(Kind):
    """One replicated job, whose pods are those of an indexed Job."""

    word = "train"
    name = "TrainJob"
    group, version, plural = API_GROUP, API_VERSION, "trainjobs"
    container = STEP
    controller = "Kubeflow Trainer"
    find_controller = "kubectl get pods -A -l app.kubernetes.io/name=trainer"
    install = (
        "helm install kubeflow-trainer oci://ghcr.io/kubeflow/charts/kubeflow-trainer --namespace kubeflow-system "
        "--create-namespace --version 2.4.0 --set runtimes.defaultEnabled=true"
    )
    is_automatic = True

    def body(self, spec: Settled, settings: ObjectSettings) -> dict[str, Any]:
        """Runtime, trainer and patches."""
        options, topology = spec.cluster, spec.topology
        if not settings.command:
            _check(spec)
        # `TrainingRuntime/` comes before the name of one of the namespace.
        kind, _, name = (options.runtime or DEFAULT_RUNTIME).rpartition("/")
        template = pod_template(
            spec, settings, container=self.container, first_pod=0, index=f"metadata.annotations['{COMPLETION_INDEX}']",
            ranks=min(topology.number_of_processes, topology.processes_per_pod),
        )  # fmt: skip
        main, served = template["spec"]["containers"][0], options.trainer or NEWEST
        # A patch cannot set the pod's own. The object's counts on while pods are made again.
        has_deadline, lives = _DEADLINE in template["spec"] and served != OLD, spec.policy.max_restarts + 1
        deadline = {_DEADLINE: template["spec"][_DEADLINE] * lives} if has_deadline else {}
        return {
            "runtimeRef": {"name": name, "kind": kind or OF_CLUSTER, "apiGroup": API_GROUP},
            **deadline,
            "trainer": {
                "numNodes": topology.number_of_pods,
                "image": main["image"],
                "command": main["command"],
                "env": main["env"],
                "resourcesPerNode": main["resources"],
            },
            **_patches(template, served),
        }

    def check_range(self, spec: Settled) -> None:
        """Refuse a range where the cluster was asked and the runtime would keep pods that wait when the head has ended.

        Raises:
            ConfigError: It is another runtime than those of `kale-dist runtime`, or a lost pod is not made again.
        """
        super().check_range(spec)
        if spec.cluster.trainer and not spec.cluster.runtime_version:
            problem = "a range needs a runtime that ends the pods which still wait when a TrainJob has ended"
            remedy = f"Have an administrator make it ({MAKE_RUNTIME}), give kind='job', or give one number"
            raise ConfigError("number_of_processes", problem, remedy)

    def end(self, spec: Settled, *, head_leaves: bool) -> dict[str, Any]:
        """Nothing where the head's exit code fails the job, by the runtime; elsewhere the failed pods would be started again."""
        return {} if head_leaves and spec.cluster.runtime_version else super().end(spec, head_leaves=head_leaves)

    def trainer_of(self, taken: Mapping[str, Any]) -> str:
        """The version of Trainer, as `kd.Kubernetes(trainer=...)` has it, by what a cluster keeps of an object's fields; empty if it keeps too little."""
        if "runtimePatches" in taken["spec"]:
            return NEWEST if _GRACE in _patch_of(taken["spec"])["spec"] else SECURE
        return OLD if "podTemplateOverrides" in taken["spec"] else ""

    def pod_groups(self, made: Mapping[str, Any]) -> list[PodGroup]:
        """Return the pods without what only their runtime sets."""
        trainer, patch = made["spec"]["trainer"], _patch_of(made["spec"])
        main = {**patch["spec"]["containers"][0], "resources": trainer.get("resourcesPerNode", {})}
        main |= {key: trainer[key] for key in ("image", "command", "env")}
        template = {"metadata": patch["metadata"], "spec": {**patch["spec"], "containers": [main]}}
        return [PodGroup(role=STEP, pods=int(trainer["numNodes"]), template=template, restart_policy="")]

    def pod_names(self, spec: Settled, life: int = 1) -> tuple[str, ...]:
        """`x-node-0-0`, `x-node-0-1`, ..., which are also their host names; five characters are appended."""
        name = object_name(spec.name, life)
        return tuple(f"{name}-{STEP}-0-{index}" for index in range(spec.topology.number_of_pods))

    def replaces_pods(self, spec: Settled) -> bool:
        """As often as its runtime's `backoffLimit` allows, six times in a job if it says nothing; a killed container in its own pod."""
        return spec.policy.max_restarts > 0

    def state(self, made: Mapping[str, Any]) -> ObjectState:
        """Read from its conditions how it ended or was resumed, and from its jobs whether it runs."""
        status = made.get("status") or {}
        conditions = {item["type"]: item for item in status.get("conditions") or ()}
        resumed = conditions.get("Suspended", {})
        held = [conditions[word] for word in ("Complete", "Failed") if conditions.get(word, {}).get("status") == "True"]
        is_running = not held and any(job.get("active") or job.get("ready") for job in status.get("jobsStatus") or ())
        return dataclasses.replace(
            ObjectState.of(held[0] if held else {}, status),
            is_running=is_running,
            is_known=bool(status),
            started=resumed.get("lastTransitionTime") if resumed.get("status") == "False" else None,
        )

    def reporters_of(self, name: str) -> tuple[tuple[str, str], ...]:
        """Pods are refused to its Job, and a Job to its JobSet."""
        return ((self.name, name), ("JobSet", name), ("Job", f"{name}-{STEP}-0"))


def _check(spec: Settled) -> None:
    """Refuse what only a runtime can say, and more restarts than it gives."""
    options = spec.cluster
    for field, other in _OF_THE_RUNTIME.items():
        value = getattr(options, field)
        if value not in (getattr(ClusterOptions(), field), None):
            command = f"kale-dist runtime --name gold {train_runtime.option(field)} {value} | kubectl apply -f -"
            remedy = f"Leave it out and make a runtime that has it, `{command}`, for runtime='gold'; or give kind='job'"
            raise ConfigError(field, "a TrainJob takes this from its runtime", other or remedy)
    named, restarts = f"the runtime {options.runtime}", spec.policy.max_restarts
    if options.runtime_version and options.mount_service_account_token:
        raise ConfigError("mount_service_account_token", f"{named} mounts no token", "Leave it out, or give kind='job'")
    if options.runtime_version and restarts > MOST_RESTARTS:
        problem = f"{restarts}, and {named} makes a lost pod again at most {MOST_RESTARTS} times"
        raise ConfigError("max_restarts", problem, f"Give at most {MOST_RESTARTS}, or kind='job'")


def _patches(template: Mapping[str, Any], served: str) -> dict[str, Any]:
    """The changes of the runtime's pods, in the form of a version of Trainer.

    In one of them a container mounts a volume at one path only. Those that follow add a path each: they are merged by paths.
    """
    pod, main = template["spec"], template["spec"]["containers"][0]
    without = {OLD: ("securityContext", _GRACE), SECURE: (_GRACE,)}.get(served, ())
    fields = {field: pod[field] for field in _PATCHED if field in pod and field not in without}
    first: dict[str, Any] = {}
    more = [mount for mount in main["volumeMounts"] if first.setdefault(mount["name"], mount) is not mount]
    own = {"name": STEP, "volumeMounts": [*first.values()], "securityContext": main["securityContext"]}
    container = {field: value for field, value in own.items() if field not in without}
    patched = [{"metadata": template["metadata"], "spec": {**fields, "containers": [container]}}]
    patched += [{"spec": {"containers": [{"name": STEP, "volumeMounts": [mount]}]}} for mount in more]
    if served == OLD:
        return {"podTemplateOverrides": [{"targetJobs": [{"name": STEP}], **one} for one in patched]}
    replicated = [{"name": STEP, "template": {"spec": {"template": one}}} for one in patched]
    changes = enumerate({"template": {"spec": {"replicatedJobs": [one]}}} for one in replicated)
    named = ((f"{_MANAGER}-{number}".removesuffix("-0"), change) for number, change in changes)
    return {"runtimePatches": [{"manager": name, "trainingRuntimeSpec": change} for name, change in named]}


def _patch_of(spec: Mapping[str, Any]) -> Any:
    """What `_patches` has made, in an object that may come from the API."""
    for override in spec.get("podTemplateOverrides", ()):
        if any(target["name"] == STEP for target in override["targetJobs"]):
            return override
    for patch in spec["runtimePatches"]:
        if patch["manager"] == _MANAGER:
            return patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    raise KeyError("runtimePatches")
