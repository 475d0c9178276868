"""A job as a TrainJob of Kubeflow Trainer (v2): its pods are those of a runtime, changed where a TrainJob may. Pure.

What the pods have beyond their image, command, environment and resources are patches of the runtime (`runtimePatches`; before
Trainer 2.2 `podTemplateOverrides`). They cannot change everything: what a runtime alone decides is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec.job_spec import Settled
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.manifests.kind import Kind, ObjectState, PodGroup
from kale_dist.places.manifests.object_settings import COMPLETION_INDEX, ObjectSettings, object_name
from kale_dist.places.manifests.pod_template import pod_template

_API_GROUP = "trainer.kubeflow.org"
_STEP = "node"
"""Trainer's name for the replicated job whose pods train, and for the container in each."""

DEFAULT_RUNTIME = "torch-distributed"
_MANAGER = "kale-dist.dev/manager"
_PATCHED = (
    "serviceAccountName", "imagePullSecrets", "securityContext", "nodeSelector", "tolerations", "affinity", "volumes"
)  # fmt: skip
"""Fields of a pod that a patch may set; `podTemplateOverrides` have no `securityContext`."""

_OF_THE_RUNTIME = ("priority_class", "runtime_class", "scheduler_name", "image_pull_policy", "gang", "ttl_s")


class TrainJob(Kind):
    """One replicated job, whose pods are those of an indexed Job."""

    word = "train"
    name = "TrainJob"
    group, version, plural = _API_GROUP, "v1alpha1", "trainjobs"
    container = _STEP
    controller = "Kubeflow Trainer"
    find_controller = "kubectl get pods -A -l app.kubernetes.io/name=trainer"
    install = (
        "kubectl apply --server-side -k 'github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.1.0', and then "
        "the runtimes by -k 'github.com/kubeflow/trainer.git/manifests/overlays/runtimes?ref=v2.1.0'"
    )
    is_automatic = True

    def body(self, spec: Settled, settings: ObjectSettings) -> dict[str, Any]:
        """Runtime, trainer and patches."""
        options, topology = spec.cluster, spec.topology
        if not settings.command:
            for field in _OF_THE_RUNTIME:
                if getattr(options, field) not in (getattr(ClusterOptions(), field), None):
                    problem = "a TrainJob takes this from its runtime"
                    raise ConfigError(
                        field, problem, "Leave it out and set it in a runtime (runtime=), or give kind='job'"
                    )
        # `TrainingRuntime/` comes before the name of one of the namespace.
        kind, _, name = (options.runtime or DEFAULT_RUNTIME).rpartition("/")
        template = pod_template(
            spec, settings, container=self.container, first_pod=0, index=f"metadata.annotations['{COMPLETION_INDEX}']",
            ranks=min(topology.number_of_processes, topology.processes_per_pod),
        )  # fmt: skip
        main = template["spec"]["containers"][0]
        return {
            "runtimeRef": {"name": name, "kind": kind or "ClusterTrainingRuntime", "apiGroup": _API_GROUP},
            "trainer": {
                "numNodes": topology.number_of_pods,
                "image": main["image"],
                "command": main["command"],
                "env": main["env"],
                "resourcesPerNode": main["resources"],
            },
            **_patches(template, has_security=options.runtime_field != "podTemplateOverrides"),
        }

    def pod_groups(self, made: Mapping[str, Any]) -> list[PodGroup]:
        """Return the pods without what only their runtime sets."""
        trainer, patch = made["spec"]["trainer"], _patch_of(made["spec"])
        main = {**patch["spec"]["containers"][0], "resources": trainer.get("resourcesPerNode", {})}
        main |= {key: trainer[key] for key in ("image", "command", "env")}
        template = {"metadata": patch["metadata"], "spec": {**patch["spec"], "containers": [main]}}
        return [PodGroup(role=_STEP, pods=int(trainer["numNodes"]), template=template, restart_policy="")]

    def pod_names(self, spec: Settled, life: int = 1) -> tuple[str, ...]:
        """`x-node-0-0`, `x-node-0-1`, ..., which are also their host names; five characters are appended."""
        name = object_name(spec.name, life)
        return tuple(f"{name}-{_STEP}-0-{index}" for index in range(spec.topology.number_of_pods))

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
        return ((self.name, name), ("JobSet", name), ("Job", f"{name}-{_STEP}-0"))


def _patches(template: Mapping[str, Any], *, has_security: bool) -> dict[str, Any]:
    pod, main = template["spec"], template["spec"]["containers"][0]
    fields = [field for field in _PATCHED if field in pod and (has_security or field != "securityContext")]
    container = {"name": main["name"], "volumeMounts": main["volumeMounts"]}
    if has_security:
        container["securityContext"] = main["securityContext"]
    patched = {
        "metadata": template["metadata"],
        "spec": {**{field: pod[field] for field in fields}, "containers": [container]},
    }
    if not has_security:
        return {"podTemplateOverrides": [{"targetJobs": [{"name": _STEP}], **patched}]}
    replicated = {"name": _STEP, "template": {"spec": {"template": patched}}}
    runtime = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    return {"runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": runtime}]}


def _patch_of(spec: Mapping[str, Any]) -> Any:
    """What `_patches` has made, in an object that may come from the API."""
    for override in spec.get("podTemplateOverrides", ()):
        if any(target["name"] == _STEP for target in override["targetJobs"]):
            return override
    for patch in spec["runtimePatches"]:
        if patch["manager"] == _MANAGER:
            return patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    raise KeyError("runtimePatches")
