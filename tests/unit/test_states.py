"""A job's status from its agents' events and the cluster's objects."""

import dataclasses

import pytest
from test_diagnosis import recorded

from kale_dist.backends.kubernetes import states
from kale_dist.backends.kubernetes.views import ContainerView, JobView, PodView
from kale_dist.contract import FailureCause, RankStateName, StateName
from kale_dist.spec import ClusterOptions, JobSpec, Topology
from kale_dist.status import JobStatus, ReplicaStatus

NOW = 1_000_000.0
CREATED = "1970-01-12T13:46:30Z"  # ten seconds before
RUNS = ContainerView(name="pytorch", state="running")


def spec(ranks=4, each=2, master=True):
    topology = Topology(number_of_processes=ranks, processes_per_pod=each)
    return JobSpec(
        name="x", label="x", kind="call", snapshot="none", topology=topology, cluster=ClusterOptions(master=master)
    )


def base(state=StateName.PENDING, ranks=4, **changes):
    return JobStatus(ref="x", state=state, replicas=tuple(ReplicaStatus(rank=rank) for rank in range(ranks)), **changes)


def job(*, run_policy=None, annotations=None, labels=None, status=None, created=CREATED):
    return {
        "metadata": {"name": "x", "uid": "j", "creationTimestamp": created, "annotations": annotations or {}, "labels": labels or {}},
        "spec": {"runPolicy": run_policy or {}, "pytorchReplicaSpecs": {"Master": {}, "Worker": {}}},
        "status": status or {},
    }  # fmt: skip


def pod(kind="master", index=0, container=RUNS, **changes):
    values = {"uid": f"{kind}{index}", "name": f"x-{kind}-{index}", "replica_type": kind, "index": index, "node": "n1"}
    return PodView(**{**values, "phase": "Running", "created": NOW - 9, "containers": (container,), **changes})


def ended(code, reason="Error", message="", at=NOW):
    return ContainerView(name="pytorch", state="terminated", exit_code=code, reason=reason, message=message, ended=at)


def view(*pods, of=None, **changes):
    return JobView(name="x", namespace="team", job=job() if of is None else of, pods=pods, **changes)


def overlay(status, seen, **options):
    return states.overlay(status, seen, spec(), NOW, **options)


def test_ranks_know_their_pods_and_nodes():
    status = overlay(base(), view(pod(), pod("worker", 0, node="n2")))
    assert [(rank.pod, rank.node) for rank in status.replicas] == [
        ("x-master-0", "n1"),
        ("x-master-0", "n1"),
        ("x-worker-0", "n2"),
        ("x-worker-0", "n2"),
    ]
    assert {rank.state for rank in status.replicas} == {RankStateName.STARTING}
    assert (status.state, status.reason) == (StateName.STARTING, "All 2 pods run")


def test_some_pods_run():
    status = overlay(base(), view(pod(), pod("worker", container=ContainerView(name="pytorch"), node="")))
    assert (status.state, status.reason) == (StateName.STARTING, "1 of 2 pods runs; pod x-worker-0 waits for a node")


def test_what_the_agents_say_of_a_running_job_stays():
    status = overlay(base(StateName.RUNNING, reason="epoch 2"), view(pod(), pod("worker")))
    assert (status.state, status.reason) == (StateName.RUNNING, "epoch 2")


def test_agents_that_nobody_can_read_run_all_the_same():
    old = NOW - 100
    status = overlay(base(), view(pod(created=old), pod("worker", created=old)))
    assert (status.state, status.reason) == (StateName.RUNNING, "All 2 pods run; what their ranks do cannot be read")


@pytest.mark.parametrize("state", [StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED])
def test_an_end_that_the_agents_have_told_stays(state):
    told = base(state, reason="as it was", cause=None if state is StateName.SUCCEEDED else FailureCause.ERROR)
    for seen in (view(pod(container=ended(3)), pod("worker")), view(is_deleted=True, of={}), view()):
        assert overlay(told, seen) == told


def test_agents_that_only_know_of_a_kill_are_told_by_whom():
    told = base(StateName.FAILED, reason="Pod 1 was lost.", cause=FailureCause.AGENT_DIED)
    seen = view(pod(), pod("worker", container=ended(137, "OOMKilled")))
    status = overlay(told, seen)
    assert status.reason.startswith("Pod x-worker-0 was killed because it needed more memory")
    assert status.reason.endswith("Pod 1 was lost.")
    assert overlay(status, seen) == status
    assert overlay(dataclasses.replace(told, cause=FailureCause.ERROR), seen).reason == "Pod 1 was lost."


def test_a_drained_node_explains_what_agents_take_for_a_cancel():
    told = base(StateName.CANCELLED, reason="The agent was told to end (SIGTERM)", cause=FailureCause.USER)
    gone = pod(container=ended(143), disruption="EvictionByEvictionAPI: evicting", is_gone=True)
    status = overlay(told, view(gone))
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.AGENT_DIED)
    assert "its node n1 was drained" in status.reason
    cancelled = job(annotations={"kale-dist.dev/cancelled": "ada"})
    assert overlay(told, view(gone, of=cancelled)) == told
    full = pod(
        container=ended(143), phase="Failed", reason="Evicted", message="Usage of EmptyDir volume exceeds the limit"
    )
    status = overlay(told, view(full))
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.AGENT_DIED)
    assert "was evicted from node n1: Usage of EmptyDir" in status.reason


@pytest.mark.parametrize("state", [StateName.CANCELLED, StateName.FAILED])
def test_a_pod_that_somebody_deleted_is_named_whatever_the_others_said_as_they_ended(state):
    told = base(state, reason="as it was", cause=FailureCause.AGENT_DIED)
    words = '{"state": "cancelled", "cause": "user", "message": "told to end"}'
    deleted = pod("worker", container=ended(143, message=words), is_ending=True)
    status = overlay(told, view(pod(container=ended(1, message=words)), deleted))
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.AGENT_DIED)
    assert status.reason.startswith("Pod x-worker-0 was deleted while it ran")
    suspended = job(run_policy={"suspend": True})
    assert overlay(told, view(deleted, of=suspended)) == told
    assert overlay(told, view(deleted, is_deleted=True)) == told


def test_a_node_that_is_slow_to_say_that_the_evicted_pod_has_ended_is_not_waited_for():
    ending = pod(disruption="EvictionByEvictionAPI: evicting", is_ending=True)
    told = base(StateName.CANCELLED, reason="The agent was told to end (SIGTERM)", cause=FailureCause.USER)
    assert states.is_unsure(told, view(ending))
    status = overlay(told, view(ending))
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.AGENT_DIED)
    assert "Pod x-master-0 was ended because its node n1 was drained" in status.reason
    verdict = {"state": "cancelled", "cause": "user"}
    assert "its node n1 was drained" in states.lost_pod(status, view(ending), verdict)
    # As long as the agents go on, nothing has ended yet.
    assert overlay(base(StateName.RUNNING, reason="epoch 2"), view(ending)).state is StateName.RUNNING
    assert overlay(told, view(pod(disruption=ending.disruption))) == told


def test_an_error_of_a_rank_counts_before_the_deletion_of_pods_that_followed():
    words = '{"state": "failed", "cause": "error", "rank": 1, "message": "Rank 1 failed: no"}'
    deleted = pod(container=ended(143, at=NOW - 5), is_ending=True)
    status = overlay(base(), view(deleted, pod("worker", container=ended(1, message=words))))
    assert status.reason == "Rank 1 failed: no"


def test_the_first_failing_pods_own_words_count():
    told = '{"state": "failed", "cause": "error", "rank": 2, "error_type": "ValueError", "message": "Rank 2 failed: no", "last_line": ""}'
    seen = view(pod(container=ended(1, at=NOW - 1)), pod("worker", container=ended(1, message=told)))
    status = overlay(base(), seen)
    assert (status.state, status.cause, status.reason, status.failed_rank) == (
        StateName.FAILED, FailureCause.ERROR, "Rank 2 failed: no", 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "message", ["{", "{}", "[1]", '{"state": "failed", "cause": "nonsense", "rank": "x"}', "{" * 5000]
)
def test_a_damaged_termination_message_is_no_trouble(message):
    status = overlay(base(), view(pod(container=ended(1, message=message)), pod("worker")))
    assert status.state is StateName.FAILED
    assert status.cause is FailureCause.AGENT_DIED


def test_a_kill_counts_before_the_exit_codes_that_follow_from_it():
    seen = view(pod(container=ended(1, at=NOW - 1)), pod("worker", container=ended(137, "OOMKilled", at=NOW)))
    status = overlay(base(StateName.RUNNING), seen)
    assert "more memory than its limit" in status.reason
    assert status.failed_rank == 2
    assert [rank.exit_code for rank in status.replicas] == [1, 1, 137, 137]


def test_pod_0_speaks_for_the_job():
    assert overlay(base(StateName.RUNNING), view(pod(container=ended(0)), pod("worker"))).state is StateName.SUCCEEDED
    assert overlay(base(StateName.RUNNING), view(pod(), pod("worker", container=ended(0)))).state is StateName.RUNNING


def test_workers_only_begin_with_worker_0():
    of = job()
    del of["spec"]["pytorchReplicaSpecs"]["Master"]
    seen = view(pod("worker", 0, container=ended(0)), pod("worker", 1), of=of)
    assert states.overlay(base(), seen, spec(master=False), NOW).state is StateName.SUCCEEDED


def test_a_deleted_pod_fails_the_job_and_is_not_taken_for_its_successor():
    status = overlay(base(StateName.RUNNING), view(pod(is_gone=True), pod(uid="again", created=NOW), pod("worker")))
    assert status.state is StateName.FAILED
    assert "Pod x-master-0 was deleted while it ran" in status.reason


def test_a_suspended_job_waits_and_begins_anew():
    old = (pod(is_gone=True, created=NOW - 500, container=ended(143)), pod("worker", is_gone=True, created=NOW - 500))
    suspended = view(*old, of=job(run_policy={"suspend": True}))
    assert overlay(base(StateName.RUNNING), suspended).state is StateName.PENDING
    resumed = view(*old, pod(uid="n"), pod("worker", uid="m"), of=job(status={"startTime": CREATED}))
    assert overlay(base(), resumed).state is StateName.STARTING


def test_pods_of_the_attempt_before_a_suspension_are_not_the_job_s_any_more():
    old = (pod(is_gone=True, container=ended(143)), pod("worker", is_gone=True, container=ended(143)))
    resumed = job(status={"startTime": CREATED}, annotations={"kale-dist.dev/attempt": "1"})
    found = overlay(base(), view(*old, pod(uid="n", attempt=1), pod("worker", uid="m", attempt=1), of=resumed))
    assert found.state is StateName.STARTING, found


@pytest.mark.parametrize(("verdict", "suspends", "annotations", "expected"), [
    (None, True, {}, True),
    ({"state": "cancelled", "cause": "user"}, True, {}, True),
    ({"state": "failed", "cause": "died"}, True, {}, True),
    ({"state": "failed", "cause": "raised"}, True, {}, False),
    ({"state": "succeeded", "cause": ""}, True, {}, False),
    ({"state": "cancelled", "cause": "user"}, False, {}, False),
    ({"state": "cancelled", "cause": "user"}, True, {"kale-dist.dev/cancelled": "ada"}, False),
])  # fmt: skip
def test_only_what_was_to_run_on_is_put_off(verdict, suspends, annotations, expected):
    of = job(run_policy={"suspend": suspends}, annotations=annotations)
    assert states.is_put_off(view(pod(), of=of), verdict) is expected


@pytest.mark.parametrize(("said", "expected"), [
    ("no quota left", "is queued in Kueue's queue gpus: no quota left"),
    (
        "insufficient quota for cpu in flavor default, request > maximum capacity (800m > 500m)",
        "asks for more than Kueue's queue gpus ever has: insufficient quota for cpu",
    ),
])  # fmt: skip
def test_a_queued_job_says_where_and_why(said, expected):
    from kale_dist.backends.kubernetes.views import EventView

    said = EventView(
        uid="e",
        kind="Workload",
        name="x",
        object_uid="w",
        is_warning=True,
        reason="Pending",
        message=said,
        time=1,
    )
    of = job(run_policy={"suspend": True}, labels={"kueue.x-k8s.io/queue-name": "gpus"})
    status = overlay(base(), view(of=of, events=(said,)))
    assert status.state is StateName.PENDING
    assert expected in status.reason


def test_a_cancelled_job_ends_with_its_pods():
    of = job(run_policy={"suspend": True}, annotations={"kale-dist.dev/cancelled": "ada"})
    status = overlay(base(StateName.RUNNING), view(pod(), pod("worker", is_gone=True), of=of))
    assert (status.state, status.reason) == (StateName.PENDING, "The job is being cancelled by ada")
    status = overlay(base(StateName.RUNNING), view(pod(is_gone=True), pod("worker", is_gone=True), of=of))
    assert (status.state, status.cause, status.reason) == (
        StateName.CANCELLED, FailureCause.USER, "The job was cancelled by ada",
    )  # fmt: skip


def test_a_deleted_job_is_cancelled():
    status = overlay(base(StateName.RUNNING), JobView(name="x", namespace="team", is_deleted=True))
    assert (status.state, status.cause) == (StateName.CANCELLED, FailureCause.USER)


def test_an_operator_that_does_nothing_is_told_after_a_while():
    assert overlay(base(), view(of=job())).reason == "None of 2 pods run"
    late = view(of=job(created="1970-01-12T13:46:00Z"))
    assert "The Training Operator has not looked at the job for 40 s" in overlay(base(), late).reason
    blind = dataclasses.replace(late, degraded=("Without the right to list and watch events ...",))
    status = overlay(base(), blind)
    assert "why cannot be seen without the right to list and watch events" in status.reason
    assert status.notes == blind.degraded


def test_what_was_seen_last_is_said_to_be_old():
    status = overlay(
        base(StateName.RUNNING, reason="epoch 2"), view(pod(), pod("worker"), healthy=False, problem="No answer.")
    )
    assert status.reason == "No answer. As last seen: epoch 2"
    nothing = JobView(name="x", namespace="team", healthy=False, problem="No answer.")
    assert overlay(base(), nothing).reason == "No answer."


def test_activity_is_added():
    assert overlay(base(), view(pod(), pod("worker")), activity="Sending.").reason == "All 2 pods run Sending."


def test_a_recorded_failure_names_the_failing_rank():
    seen, its_spec, now = recorded("oom")
    status = states.overlay(JobStatus(ref="oom", replicas=(ReplicaStatus(rank=0),)), seen, its_spec, now)
    assert (status.failed_rank, status.replicas[0].exit_code, status.ended) == (0, 137, now)
