"""What a place says of a run, from the cluster's objects."""

import dataclasses

import pytest

kubernetes = pytest.importorskip("kubernetes")

from test_explain import look_of  # noqa: E402

from kale_dist.job.backend import JobRef, PlacedJob  # noqa: E402
from kale_dist.job.spec.job_spec import JobSpec, Policy, Topology  # noqa: E402
from kale_dist.job.spec.place_settings import ClusterOptions  # noqa: E402
from kale_dist.places.kubernetes import look  # noqa: E402
from kale_dist.places.kubernetes.views import (  # noqa: E402
    ContainerView,
    EventView,
    JobView,
    PodView,
    QueuePosition,
    is_about,
    lives_of,
)
from kale_dist.places.manifests import KINDS  # noqa: E402
from kale_dist.places.manifests.object_settings import COMPLETION_INDEX, CONTAINER_ANNOTATION  # noqa: E402
from kale_dist.wire import FailureCause  # noqa: E402

NOW = 1_000_000.0
CREATED = "1970-01-12T13:46:30Z"  # ten seconds before
RUNS = ContainerView(name="pytorch", state="running")


def spec(max_restarts=0, **cluster):
    return JobSpec(
        name="x", label="x", kind="call", snapshot="none", topology=Topology(number_of_processes=4, processes_per_pod=2),
        cluster=ClusterOptions(**{"master": True, **cluster}), policy=Policy(max_restarts=max_restarts),
    )  # fmt: skip


def job(*, run_policy=None, annotations=None, labels=None, status=None, created=CREATED):
    return {
        "metadata": {"name": "x", "uid": "j", "creationTimestamp": created, "annotations": annotations or {}, "labels": labels or {}},
        "spec": {"runPolicy": run_policy or {}, "pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 1}}},
        "status": status or {},
    }  # fmt: skip


def pod(kind="master", index=0, container=RUNS, **changes):
    number = index + (kind == "worker")
    values = {"uid": f"{kind}{index}", "name": f"x-{kind}-{index}", "number": number, "node": "n1"}
    return PodView(**{**values, "phase": "Running", "created": NOW - 9, "containers": (container,), **changes})


def ended(code, reason="Error", message="", at=NOW):
    return ContainerView(name="pytorch", state="terminated", exit_code=code, reason=reason, message=message, ended=at)


def seen(*pods, of=None, asked=None, **changes):
    view = JobView(name="x", namespace="team", job=job() if of is None else of, pods=pods, **changes)
    return look.look(view, asked or spec(), NOW)


def test_parts_are_pods_by_their_numbers():
    found = seen(pod("worker", node="n2"), pod())
    assert [(part.number, part.name, part.state, part.node) for part in found.parts] == [
        (0, "x-master-0", "running", "n1"),
        (1, "x-worker-0", "running", "n2"),
    ]
    assert (found.trouble, found.finished, found.suspended, found.gone, found.fresh) == (None, "", "", False, True)


def test_a_pod_without_a_node_waits_for_one():
    found = seen(pod(), pod("worker", container=ContainerView(name="pytorch"), node=""))
    assert found.parts[1].state == "waiting"
    assert str(found.trouble) == "Pod x-worker-0 waits for a node"
    assert found.trouble.heals


UNSCHEDULED = {
    "node": "",
    "phase": "Pending",
    "scheduling": "Unschedulable: 0/1 nodes are available: 1 Insufficient cpu.",
}
INIT = ContainerView(name="init-pytorch", is_init=True, state="running")


def test_a_pod_that_lacks_something_is_named_and_not_the_one_that_waits_for_it():
    agent = ContainerView(name="pytorch")
    worker = pod("worker", phase="Pending", containers=(INIT, agent))
    assert "Pod x-master-0 waits: it asks for" in str(seen(pod(container=agent, **UNSCHEDULED), worker).trouble)
    assert "Pod x-master-0 is being prepared" in str(seen(pod(container=agent, phase="Pending"), worker).trouble)
    assert "Pod x-worker-0 waits until the master's name" in str(seen(pod(), worker).trouble)
    assert "Pod x-worker-0 waits: it asks for" in str(
        seen(pod(), pod("worker", container=agent, **UNSCHEDULED)).trouble
    )


@pytest.mark.parametrize(("waited_s", "is_healthy"), [(2, True), (90, False)])
def test_the_remedy_of_what_a_healthy_start_shows_too_is_told_only_if_it_lasts(waited_s, is_healthy):
    worker = pod("worker", phase="Pending", containers=(INIT, ContainerView(name="pytorch")), created=NOW - waited_s)
    text = str(seen(pod(), worker).trouble)
    assert text.startswith("Pod x-worker-0 waits until the master's name can be resolved")
    assert ("DNS" in text) is not is_healthy
    words = 'MountVolume.SetUp failed for volume "input" : secret "x-input" not found'
    event = EventView(
        uid="e",
        kind="Pod",
        name="x-master-0",
        object_uid="master0",
        reason="FailedMount",
        message=words,
        is_warning=True,
        time=NOW,
    )
    waiting = ContainerView(name="pytorch")
    text = str(seen(pod(container=waiting, phase="Pending", created=NOW - waited_s), events=(event,)).trouble)
    assert text.startswith("Pod x-master-0 waits: the Secret x-input with the job's input does not exist yet")
    assert ("submit it again" in text) is not is_healthy


def test_what_only_a_person_can_mend_comes_before_what_may_end_by_itself():
    absent = ContainerView(name="pytorch", state="waiting", reason="ErrImagePull", message="not found")
    found = seen(
        pod(container=ContainerView(name="pytorch"), **UNSCHEDULED), pod("worker", container=absent, phase="Pending")
    )
    assert found.trouble.needs_action
    assert "Pod x-worker-0" in str(found.trouble)


def test_a_worker_that_gave_up_names_what_the_first_pod_lacks():
    gave_up = dataclasses.replace(INIT, state="terminated", exit_code=1, reason="Error")
    worker = pod("worker", phase="Failed", containers=(gave_up, ContainerView(name="pytorch")))
    found = seen(pod(container=ContainerView(name="pytorch"), **UNSCHEDULED), worker)
    for told in (str(found.trouble), str(found.parts[1].trouble)):
        assert "pod x-master-0 waits: it asks for" in told
        assert "master=False" not in told
    assert "master=False" in str(seen(pod(), worker).trouble)


def test_a_first_pod_that_was_scheduled_when_the_worker_gave_up_is_still_named():
    gave_up = dataclasses.replace(INIT, state="terminated", exit_code=1, reason="Error")
    worker = pod("worker", phase="Failed", containers=(gave_up, ContainerView(name="pytorch")))
    said = UNSCHEDULED["scheduling"].removeprefix("Unschedulable: ")
    lacked = EventView(
        uid="e", kind="Pod", name="x-master-0", object_uid="master0", is_warning=True, reason="FailedScheduling", message=said, time=1,
    )  # fmt: skip
    told = str(seen(pod(), worker, events=(lacked,)).trouble)
    assert "pod x-master-0 waits: it asks for" in told
    assert "master=False" not in told


def test_a_pod_that_was_killed_for_memory_comes_before_those_that_ended_because_of_it():
    found = seen(pod(container=ended(1, at=NOW - 1)), pod("worker", container=ended(137, "OOMKilled", at=NOW)))
    assert "more memory than its limit" in found.trouble.sentence
    assert found.trouble.cause is FailureCause.DIED
    assert [part.lost for part in found.parts] == ["", "out of memory"]
    assert [part.exit_code for part in found.parts] == [1, 137]


def test_a_rank_s_own_error_comes_before_the_deletion_of_pods_that_followed():
    words = '{"state": "failed", "cause": "error", "failed_rank": 1, "reason": "Rank 1 failed: no"}'
    deleted = pod(container=ended(143, at=NOW - 5), is_ending=True)
    found = seen(deleted, pod("worker", container=ended(1, message=words)))
    assert found.trouble.sentence.startswith("Pod x-worker-0 ended with exit code 1")
    assert found.parts[1].message == words
    assert found.parts[0].lost == "deleted"


def test_pods_of_a_drained_node_and_evicted_ones_are_lost():
    drained = pod(container=ended(143), disruption="EvictionByEvictionAPI: evicting", is_gone=True)
    assert seen(drained, pod("worker")).parts[0].lost == "node lost"
    full = pod(container=ended(143), phase="Failed", reason="Evicted", message="The node was low on resource: memory")
    assert seen(full).parts[0].lost == "evicted"
    assert "was evicted from node n1: The node was low" in seen(full).trouble.sentence


def test_a_worker_that_was_deleted_is_told_and_not_taken_for_its_successor():
    old = pod("worker", uid="old", is_gone=True, container=ended(143))
    found = seen(pod(), old, pod("worker", uid="new", created=NOW))
    assert (found.parts[1].uid, found.parts[1].lost) == ("old", "deleted")
    assert "Pod x-worker-0 was deleted while it ran" in found.trouble.sentence


def test_a_worker_that_was_made_again_counts_where_its_head_waits_for_it():
    old = pod("worker", uid="old", is_gone=True, container=ended(143))
    new = pod("worker", uid="new", created=NOW, container=ContainerView(name="pytorch"), node="")
    found = seen(pod(), old, new, asked=spec(max_restarts=1))
    assert [part.uid for part in found.parts] == ["master0", "new"]
    assert [(part.uid, part.lost) for part in found.replaced] == [("old", "deleted")]
    assert str(found.trouble) == "Pod x-worker-0 waits for a node"
    assert found.replaces
    # Before it is made again, the lost one is all there is.
    found = seen(pod(), old, asked=spec(max_restarts=1))
    assert [part.uid for part in found.parts] == ["master0", "old"]
    assert found.replaced == ()
    # Where worker-0 is the head, the operator makes no pod again that has failed.
    assert not seen(pod("worker", number=0), asked=spec(max_restarts=1, master=False)).replaces


def test_a_head_that_the_operator_made_again_has_another_uid():
    found = seen(pod(uid="old", is_gone=True, container=ended(143)), pod(uid="new", created=NOW), pod("worker"))
    assert found.parts[0].uid == "new"


@pytest.mark.parametrize("message", ["{", "{}", "[1]", '{"state": "failed", "cause": "nonsense"}', "{" * 5000])
def test_a_damaged_termination_message_is_no_trouble(message):
    found = seen(pod(container=ended(1, message=message)), pod("worker"))
    assert found.trouble.cause is FailureCause.AGENT_DIED


def test_the_object_says_how_the_job_ended():
    for kind, word in (("Succeeded", "succeeded"), ("Failed", "failed")):
        conditions = [{"type": "Running", "status": "False"}, {"type": kind, "status": "True", "message": "no"}]
        found = seen(of=job(status={"conditions": conditions}))
        assert found.finished == word
    assert "Kubeflow's Training Operator says that the job failed: no" in str(found.trouble)
    assert look_of("deadline-job").finished == "failed"


def test_a_suspended_job_has_no_parts_and_begins_again_with_other_pods():
    old = (pod(is_gone=True, created=NOW - 500, container=ended(143)), pod("worker", is_gone=True, created=NOW - 500))
    suspended = seen(*old, of=job(run_policy={"suspend": True}))
    assert suspended.parts == ()
    assert "kubectl -n team patch pytorchjobs x" in suspended.suspended
    assert '{"spec":{"runPolicy":{"suspend":false}}}' in suspended.suspended
    resumed = seen(*old, pod(uid="n"), pod("worker", uid="m"), of=job(status={"startTime": CREATED}))
    assert [part.uid for part in resumed.parts] == ["n", "m"]
    assert resumed.suspended == ""


@pytest.mark.parametrize(("said", "expected"), [
    ("no quota left", "is queued in Kueue's queue gpus: no quota left"),
    (
        "insufficient quota for cpu in flavor default, request > maximum capacity (800m > 500m)",
        "asks for more than Kueue's queue gpus ever has: insufficient quota for cpu",
    ),
])  # fmt: skip
def test_a_queued_job_says_where_and_why(said, expected):
    event = EventView(
        uid="e", kind="Workload", name="x", object_uid="w", is_warning=True, reason="Pending", message=said, time=1
    )
    of = job(run_policy={"suspend": True}, labels={"kueue.x-k8s.io/queue-name": "gpus"})
    assert expected in seen(of=of, events=(event,)).suspended


@pytest.mark.parametrize(("position", "expected"), [
    (QueuePosition(number=3), "is queued in Kueue's queue gpus, at position 3. "),
    (QueuePosition(number=None, problem="LocalQueue gpus doesn't exist"),
     "is suspended: Kueue's queue gpus does not take it (LocalQueue gpus doesn't exist). Cancel it and correct queue="),
    (QueuePosition(number=2, of=4), "is queued in Kueue's queue gpus, at position 2 of the namespace's 4. "),
])  # fmt: skip
def test_a_queued_job_says_its_position(position, expected):
    of = job(run_policy={"suspend": True}, labels={"kueue.x-k8s.io/queue-name": "gpus"})
    found = seen(of=of, queue_position=position)
    assert expected in found.suspended
    assert found.queue_position == position.number
    assert seen(of=job()).queue_position is None


def test_why_a_follower_ended_a_run_is_seen_from_everywhere():
    of = job(run_policy={"suspend": True}, annotations={"kale-dist.dev/failed": "Pod x-worker-0 was evicted."})
    over = seen(pod(is_gone=True), pod("worker", is_gone=True), of=of)
    assert (over.finished, str(over.trouble), over.trouble.cause) == (
        "failed",
        "Pod x-worker-0 was evicted",
        FailureCause.LOST,
    )


def test_a_cancelled_job_is_seen_from_everywhere():
    of = job(run_policy={"suspend": True}, annotations={"kale-dist.dev/cancelled": "ada"})
    ending = seen(pod(), pod("worker", is_gone=True), of=of)
    assert (ending.finished, str(ending.trouble)) == ("", "The job was cancelled by ada")
    over = seen(pod(is_gone=True), pod("worker", is_gone=True), of=of)
    assert (over.finished, str(over.trouble)) == ("cancelled", "The job was cancelled by ada")


def test_a_deleted_job_is_gone():
    gone = JobView(name="x", namespace="team", is_deleted=True)
    found = look.look(gone, spec(), NOW)
    assert found.gone
    assert "was deleted from the namespace team" in found.trouble.sentence
    assert "60 s after its end" in look.look(gone, spec(ttl_s=60), NOW).trouble.sentence


def test_an_operator_that_does_nothing_is_told_after_a_while():
    assert seen(of=job()).trouble is None
    late = job(created="1970-01-12T13:46:00Z")
    assert "Kubeflow's Training Operator has not looked at the job for 40 s" in seen(of=late).trouble.sentence
    assert "may not list and watch events in the namespace team" in seen(of=late, lacks_events=True).trouble.sentence


def test_what_was_seen_last_is_said_to_be_old():
    waits = pod(container=ContainerView(name="pytorch"), node="")
    found = seen(waits, problem="No answer.")
    assert not found.fresh
    assert str(found.trouble) == "No answer. As last seen: Pod x-master-0 waits for a node"
    nothing = JobView(name="x", namespace="team", problem="No answer.")
    assert str(look.look(nothing, spec(), NOW).trouble) == "No answer"


def test_a_view_of_nothing_is_not_fresh():
    assert not look.look(dataclasses.replace(JobView(name="x")), spec(), NOW).fresh


def test_a_job_whose_pods_were_not_listed_yet_is_not_judged():
    conditions = [{"type": "Succeeded", "status": "True"}]
    assert not seen(of=job(status={"conditions": conditions}), is_complete=False).fresh


@pytest.mark.parametrize(("kind", "name", "time", "expected"), [
    ("PyTorchJob", "x", 10, True),
    ("Pod", "x-master-0", 10, True),
    ("Pod", "x-worker-0", 10, True),
    ("Workload", "pytorchjob-x-a5d2d", 10, True),
    ("Pod", "x-master-0", 4, False),
    ("PyTorchJob", "x-2", 10, False),
    ("Pod", "x-large-master-0", 10, False),
    ("Workload", "pytorchjob-x-large-a5d2d", 10, False),
    ("Workload", "job-x-a5d2d", 10, False),
    ("Deployment", "x", 10, False),
])  # fmt: skip
def test_events_of_other_jobs_are_told_apart(kind, name, time, expected):
    event = EventView(uid="e", kind=kind, name=name, object_uid="o", is_warning=False, reason="", message="", time=time)
    handle = PlacedJob(ref=JobRef("kubernetes", "team/x"), object="x", spec=spec(), place=(("created", "5.0"),))
    assert is_about(event, handle) is expected


# -- containers that are started again in their pods -------------------------------------------------------------------

FIRST, LATER, LAST = "1970-01-12T13:46:31Z", "1970-01-12T13:46:35Z", "1970-01-12T13:46:38Z"
RUNNING, BACK_OFF = (
    {"running": {"startedAt": LATER}},
    {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
)


def ends_with(code, began=FIRST):
    return {"terminated": {"exitCode": code, "reason": "Error", "startedAt": began, "finishedAt": LATER}}


def started_again(state, before, restarts=1, last=0, number=0):
    """The lives of a pod whose container was started again, as the kubelet tells them."""
    status = {"name": "node", "restartCount": restarts, "state": state, "lastState": before}
    data = {
        "metadata": {
            "name": f"x-node-0-{number}-abcde", "uid": f"p{number}", "creationTimestamp": CREATED,
            "annotations": {CONTAINER_ANNOTATION: "node"}, "labels": {COMPLETION_INDEX: str(number)},
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "node"}]},
        "status": {"phase": "Running", "containerStatuses": [status]},
    }  # fmt: skip
    return lives_of(data, last)


@pytest.mark.parametrize(
    ("state", "before", "restarts", "last", "lives"),
    [
        (RUNNING, ends_with(137), 1, 0, [("p0", "terminated", True), ("p0.1", "running", False)]),
        (BACK_OFF, ends_with(143), 1, 1, [("p0.1", "terminated", True), ("p0.2", "waiting", False)]),
        (ends_with(1, LATER), ends_with(137), 1, 1, [("p0", "terminated", True), ("p0.1", "terminated", False)]),
        # The kubelet has forgotten the life before.
        (ends_with(0, LATER), {}, 2, 0, [("p0.2", "terminated", False)]),
        # It has judged, and says so again in each life.
        (BACK_OFF, ends_with(1), 3, 1, [("p0.1", "terminated", False)]),
        (RUNNING, ends_with(70), 1, 0, [("p0", "terminated", False)]),
    ],
)
def test_the_lives_of_a_container_are_told_apart(state, before, restarts, last, lives):
    found = started_again(state, before, restarts, last)
    assert [(one.identity, one.main.state, one.is_past) for one in found] == lives


@pytest.mark.parametrize(("store", "uid", "state"), [("pvc://kept", "p0.1", "running"), ("", "p0", "ended")])
def test_a_head_that_was_killed_stands_for_the_job_unless_it_begins_again(store, uid, state):
    asked = dataclasses.replace(spec(1, kind="train", master=None), kind="training", store=store)
    made = job(status={"jobsStatus": [{"name": "node", "active": 1}]}) | {"spec": KINDS["train"].make(asked)["spec"]}
    head, worker = started_again(RUNNING, ends_with(137)), started_again(RUNNING, ends_with(137), number=1)
    found = seen(*head, *worker, of=made, asked=asked)
    assert [(part.number, part.uid, part.state) for part in found.parts] == [(0, uid, state), (1, "p1.1", "running")]
    assert found.parts[0].exit_code == (137 if state == "ended" else None)
