"""What the objects of Kubeflow's Training Operator and MPI Operator have in common: replica types, a run policy, conditions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kale_dist.manifests.kind import Kind, ObjectState, PodGroup, last_condition
from kale_dist.manifests.pod_template import pod_template
from kale_dist.manifests.settings import REPLICA_INDEX_LABEL, PodSettings
from kale_dist.spec import JobSpec


class KubeflowJob(Kind):
    """An object with a run policy and replica types, the head's first."""

    replicas_field: ClassVar[str]
    """The field of its `spec` that holds them."""

    def pod_groups(self, made: Mapping[str, Any]) -> list[PodGroup]:
        """Each replica type. The API fills in a number that is left out."""
        return [
            PodGroup(
                role=role.lower(), pods=int(replica.get("replicas", 1)), template=replica.get("template", {}),
                restart_policy=replica.get("restartPolicy", ""),
            )
            for role, replica in made["spec"][self.replicas_field].items()
        ]  # fmt: skip

    def state(self, made: Mapping[str, Any]) -> ObjectState:
        """Its last condition."""
        condition, status = last_condition(made), made.get("status") or {}
        word, message = condition.get("type"), str(condition.get("message") or "")
        was_suspended = any(item.get("type") == "Suspended" for item in status.get("conditions") or ())
        finished: Any = {"Succeeded": "succeeded", "Failed": "failed"}.get(str(word), "")
        return ObjectState(
            finished=finished,
            message=message if word == "Failed" else "",
            is_running=word == "Running",
            is_known=bool(condition),
            # The operator writes it after it has made the pods, on a busy cluster long after: it says which pods are of an
            # earlier run only if the job was suspended.
            started=status.get("startTime") if was_suspended else None,
            ended=status.get("completionTime") or (condition.get("lastTransitionTime") if finished else None),
        )

    def suspension(self, *, value: bool) -> dict[str, Any]:
        """In its run policy."""
        return {"spec": {"runPolicy": {"suspend": value}}}

    def policy(self, made: Mapping[str, Any]) -> Mapping[str, Any]:
        """The run policy."""
        return (made.get("spec") or {}).get("runPolicy") or {}

    def replica(
        self,
        spec: JobSpec,
        settings: PodSettings,
        role: str,
        *,
        first_pod: int,
        pods: int,
        ranks: int,
        has_index: bool = True,
    ) -> dict[str, Any]:
        """One replica type.

        Args:
            spec: The job.
            settings: What the backend has settled.
            role: Its name, in lower case.
            first_pod: Number of the type's first pod.
            pods: How many it has.
            ranks: Ranks of each of them.
            has_index: Whether the controller labels them with their index.
        """
        index = f"metadata.labels['{REPLICA_INDEX_LABEL}']" if has_index else ""
        template = pod_template(
            spec, settings, container=self.container, first_pod=first_pod, ranks=ranks, index=index, role=role
        )
        return {"replicas": pods, "restartPolicy": "Never", "template": template}


def run_policy(spec: JobSpec) -> dict[str, Any]:
    """Neither a deadline nor retries of the operator's: both delete pods and their logs."""
    cluster = spec.cluster
    policy: dict[str, Any] = {"cleanPodPolicy": "None"}
    if cluster.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = cluster.ttl_s
    if cluster.gang:
        policy["schedulingPolicy"] = {
            "minAvailable": cluster.min_available or spec.topology.number_of_pods,
            **({"priorityClass": cluster.priority_class} if cluster.priority_class else {}),
        }
    return policy
