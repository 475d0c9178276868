"""A job as a batch Job, which every cluster has without an operator. Pure.

Several pods are an indexed Job with a headless Service for their names; one pod is an ordinary Job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec.job_spec import Settled
from kale_dist.places.manifests.bootstrap import EXIT_CODE
from kale_dist.places.manifests.kind import Kind, ObjectState, PodGroup, headless_service, last_condition
from kale_dist.places.manifests.object_settings import COMPLETION_INDEX, ObjectSettings, object_name
from kale_dist.places.manifests.pod_template import pod_template
from kale_dist.wire import EXIT_BROKEN, EXIT_LOST_HEAD


class BatchJob(Kind):
    """A pod that fails is made again as often as the job may restart, and the others continue: the head decides what that means."""

    word = "job"
    name = "Job"
    group, version, plural = "batch", "v1", "jobs"
    container = "pytorch"
    controller = "Kubernetes' Job controller"
    find_controller = "kubectl -n kube-system get pods"
    install = "kubectl version  # every cluster has Jobs: this one's API server is not what it should be"
    is_automatic = True
    makes_services = True

    def body(self, spec: Settled, settings: ObjectSettings) -> dict[str, Any]:
        """Completions and a template."""
        if spec.cluster.gang:
            remedy = "Leave it out; with queue= Kueue starts all pods together"
            raise ConfigError("gang", "a Job's pods are scheduled one by one", remedy)
        topology = spec.topology
        pods, ranks = topology.number_of_pods, min(topology.number_of_processes, topology.processes_per_pod)
        index = f"metadata.annotations['{COMPLETION_INDEX}']" if pods > 1 else ""
        template = pod_template(spec, settings, container=self.container, first_pod=0, ranks=ranks, index=index)
        # The API gives the pods of a Job no policy by itself.
        template["spec"] = {"restartPolicy": "Never", **template["spec"]}
        if pods > 1:
            template["spec"]["subdomain"] = object_name(spec.name, settings.life)
        ttl = spec.cluster.ttl_s
        return {
            **self._limits(spec),
            # Pods of a range that still run or wait when the head has succeeded are deleted.
            **({"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if topology.sizes else {}),
            "completions": pods,
            "parallelism": pods,
            **({} if ttl is None else {"ttlSecondsAfterFinished": ttl}),
            "template": template,
        }

    def _limits(self, spec: Settled) -> dict[str, Any]:
        """Return how pods are distinguished, and which are made again: those that were evicted or killed, but none that has judged."""
        limit, is_one = spec.policy.max_restarts, spec.topology.number_of_pods == 1
        if is_one and not self.returns_head(spec):
            return {"backoffLimit": 0}
        made = {"backoffLimit": limit} if is_one else {"completionMode": "Indexed", "backoffLimitPerIndex": limit}
        if not limit:
            return made
        codes = {"containerName": self.container, "operator": "In"}
        rules = [
            {
                "action": "FailJob" if is_one else "FailIndex",
                "onExitCodes": {**codes, "values": [1, EXIT_BROKEN, EXIT_CODE]},
            },
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
        if self.returns_head(spec) and not is_one:
            # The head counts its losses.
            rules.append({"action": "Ignore", "onExitCodes": {**codes, "values": [EXIT_LOST_HEAD]}})
        return {**made, "podFailurePolicy": {"rules": rules}}

    def pod_groups(self, made: Mapping[str, Any]) -> list[PodGroup]:
        """All pods are alike."""
        spec = made["spec"]
        policy = spec["template"]["spec"].get("restartPolicy", "")
        pods = min(int(spec.get("completions", 1)), int(spec.get("parallelism", 1)))
        return [PodGroup(role="pod", pods=pods, template=spec["template"], restart_policy=policy)]

    def pod_names(self, spec: Settled, life: int = 1) -> tuple[str, ...]:
        """`x-0`, `x-1`, ..., which are also their host names; the controller appends five characters."""
        pods, name = spec.topology.number_of_pods, object_name(spec.name, life)
        return tuple(f"{name}-{index}" for index in range(pods)) if pods > 1 else (name,)

    def replaces_pods(self, spec: Settled) -> bool:
        """As often as the job may restart, and evicted ones as often as that happens."""
        return spec.policy.max_restarts > 0

    def beside(self, spec: Settled, settings: ObjectSettings, owner: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
        """The headless Service; one pod needs none."""
        has_relays = spec.topology.number_of_pods > 1
        return (headless_service(spec, settings, owner),) if has_relays else ()

    def end(self, spec: Settled, *, head_leaves: bool) -> dict[str, Any]:
        """The change that ends a Job: of several pods none may fail any more, as the others would run on; one pod ends its Job."""
        if not head_leaves:
            return self.suspension(value=True)
        return {"spec": {"maxFailedIndexes": 0}} if spec.topology.number_of_pods > 1 else {}

    def state(self, made: Mapping[str, Any]) -> ObjectState:
        """The state by the Job's conditions; its number of active pods shows whether it runs."""
        status, condition = made.get("status") or {}, last_condition(made)
        is_running, started = bool(status.get("active")), status.get("startTime")
        return dataclasses.replace(
            ObjectState.of(condition, status), is_running=is_running, is_known=bool(status), started=started
        )
