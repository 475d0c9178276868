"""Jobs that are suspended while they run, as Kueue does to make room for others, and that are resumed or cancelled."""

import json
import time

import flat
import pytest
from on_cluster import IMAGE, make_claim, run_kubectl, wait_for
from slow_steps import (
    rank_and_world_size,
    train_slowly,
    waits_and_says_its_attempt,
    waits_for_its_second_attempt,
    waits_for_its_third_attempt,
)

import kale_dist as kd
from kale_dist.contract import StateName

pytestmark = pytest.mark.usefixtures("jobs_end")

EPOCHS = 6


@pytest.fixture
def on(namespace):
    resources = {"cpu": 0.2, "memory_gib": 1}
    return {"on": "kubernetes", "image": IMAGE, "resources": resources, "cluster": {"namespace": namespace}}


def suspend(job, namespace, *, value=True, **replica):
    """Suspend or resume a job, and change all of its replicas' pods."""
    change = {"spec": {"runPolicy": {"suspend": value}}}
    if replica:
        change["spec"]["pytorchReplicaSpecs"] = {kind: {"template": replica} for kind in ("Master", "Worker")}
    run_kubectl("-n", namespace, "patch", "pytorchjob", job.name, "--type=merge", "-p", json.dumps(change))


def no_pods(namespace, job):
    selector = f"training.kubeflow.org/job-name={job.name}"
    return not json.loads(run_kubectl("-n", namespace, "get", "pods", "-l", selector, "-o", "json"))["items"]


def wait_for_no_pods(namespace, job):
    wait_for(job, lambda _: no_pods(namespace, job))


@pytest.mark.parametrize("keeps", [True, False])
def test_a_training_goes_on_when_it_is_resumed_or_begins_anew(on, namespace, keeps):
    import torch

    options = {}
    if keeps:
        make_claim(namespace, "kept")
        options = {"store": "pvc://kept/runs", "max_restarts": 1}
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    job = flat.distribute(
        model, loader, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), train_slowly, epochs=EPOCHS,
        train_args=0.3, seed=1, number_of_processes=2, threads=1, **options, **on,
    )  # fmt: skip
    wait_for(job, lambda status: (status.checkpoint_epoch or 0) >= 2)
    suspend(job, namespace)
    wait_for(job, lambda status: status.state is StateName.PENDING and "is suspended" in status.reason)
    assert '"suspend":false' in job.status.reason
    wait_for_no_pods(namespace, job)
    assert not job.done()
    suspend(job, namespace, value=False)
    status = job.wait(150)
    log = [str(line) for line in job.logs()]
    assert (status.state, status.attempt) == (StateName.SUCCEEDED, 1), (status, log)
    assert sum("was suspended while it ran" in line for line in log) == 1, log
    assert any(("goes on behind epoch" if keeps else "Attempt 2: the training begins anew") in line for line in log), (
        log
    )
    assert any("max_restarts" in note for note in status.notes) is not keeps, status.notes
    assert [row["epoch"] for row in job.metrics if row["source"] == "train"] == list(range(1, EPOCHS + 1))
    assert job.model is model
    job.delete()


def test_a_job_may_be_suspended_twice(on, namespace):
    job = flat.launch(waits_for_its_third_attempt, number_of_processes=2, **on)
    for attempt in (0, 1):
        wait_for(job, lambda status, attempt=attempt: (status.state, status.attempt) == (StateName.RUNNING, attempt))
        suspend(job, namespace)
        wait_for_no_pods(namespace, job)
        suspend(job, namespace, value=False)
    assert job.results(150) == [2, 2], [str(line) for line in job.logs()]
    job.delete()


def test_a_job_that_is_suspended_before_its_ranks_run_begins_when_it_is_resumed(on, namespace):
    nowhere = {"kale-dist.test/place": "nowhere"}
    path = "/spec/pytorchReplicaSpecs/Worker/template/spec/nodeSelector"
    cluster = {"namespace": namespace, "patch": [{"op": "add", "path": path, "value": nowhere}]}
    job = flat.launch(rank_and_world_size, number_of_processes=2, **{**on, "cluster": cluster})
    for awaited in ("create", "condition=Ready"):
        run_kubectl("-n", namespace, "wait", f"--for={awaited}", f"pod/{job.name}-master-0", "--timeout=90s")
    # Its agent takes up the job's input then, which nothing outside shows.
    time.sleep(3)
    suspend(job, namespace)
    wait_for_no_pods(namespace, job)
    assert not job.done(), job.status
    suspend(job, namespace, value=False, spec={"nodeSelector": None})
    assert job.results(150) == [(0, 2), (1, 2)], [str(line) for line in job.logs()]
    job.delete()


def test_a_job_whose_template_was_put_back_knows_its_attempt_all_the_same(on, namespace):
    job = flat.launch(waits_for_its_second_attempt, number_of_processes=2, **on)
    wait_for(job, lambda status: status.state is StateName.RUNNING)
    suspend(job, namespace)
    wait_for_no_pods(namespace, job)
    suspend(job, namespace, value=False)
    wait_for(job, lambda _: not no_pods(namespace, job))
    # As Kueue does whenever it suspends a job.
    suspend(job, namespace, metadata={"annotations": None})
    wait_for_no_pods(namespace, job)
    time.sleep(1)
    suspend(job, namespace, value=False)
    first, second = job.results(150)
    assert first == second >= 1, [str(line) for line in job.logs()]
    job.delete()


def test_a_job_that_nobody_followed_when_it_was_suspended_is_found_again(on, namespace):
    job = flat.launch(waits_for_its_second_attempt, number_of_processes=1, detach=True, **on)
    wait_for(job, lambda status: status.state is StateName.RUNNING)
    kd.backends.get("kubernetes").close()
    suspend(job, namespace)
    selector = f"training.kubeflow.org/job-name={job.name}"
    run_kubectl("-n", namespace, "wait", "--for=delete", "pods", "-l", selector, "--timeout=90s")
    again = kd.attach(job.ref)
    wait_for(again, lambda status: status.attempt == 1)
    suspend(job, namespace, value=False)
    assert again.results(150) == [1], [str(line) for line in again.logs()]
    again.delete()


def test_a_suspended_job_can_be_cancelled(on, namespace):
    job = flat.launch(waits_and_says_its_attempt, number_of_processes=2, **on)
    wait_for(job, lambda status: status.state is StateName.RUNNING)
    suspend(job, namespace)
    wait_for(job, lambda status: "is suspended" in status.reason)
    job.cancel()
    assert job.wait(90).state is StateName.CANCELLED
    wait_for_no_pods(namespace, job)
    # As Kueue would, as soon as there is room.
    suspend(job, namespace, value=False)
    run_kubectl("-n", namespace, "wait", "--for=condition=Failed", f"pytorchjob/{job.name}", "--timeout=90s")
    assert "had ended while it was suspended" in run_kubectl("-n", namespace, "logs", f"{job.name}-master-0")
    assert job.status.state is StateName.CANCELLED
    job.delete()
