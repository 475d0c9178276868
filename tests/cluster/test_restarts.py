"""Ranks that are lost on the real cluster: started again in their pods, or in new ones where a pod was lost."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import flat
import pytest
from on_cluster import IMAGE, Network, make_claim, run_kubectl, wait_for
from slow_steps import (
    fills_memory,
    says_much_in_its_first_attempt,
    train_slowly,
    waits_and_says_its_attempt,
    waits_for_its_second_attempt,
)

import kale_dist as kd
from kale_dist import manifests
from kale_dist.backends.kubernetes import lost_pods, restarts, roles
from kale_dist.contract import FailureCause, StateName
from kale_dist.errors import BackendError

pytestmark = pytest.mark.usefixtures("jobs_end")

EPOCHS = 8
SMALL = {"cpu": 0.2, "memory_gib": 1}


def train(seconds_per_step, **options):
    """A training of which every number follows from the seeds; gives the job and its model."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job = flat.distribute(
        model, loader, torch.nn.MSELoss(), optimizer, train_slowly, epochs=EPOCHS, train_args=seconds_per_step, seed=1,
        number_of_processes=2, threads=1, **options,
    )  # fmt: skip
    return job, model


def runs_in_its_first_attempt(namespace):
    """A job that waits until it is lost, and may be made again once."""
    job = flat.launch(
        waits_for_its_second_attempt, on="kubernetes", image=IMAGE, resources=SMALL, number_of_processes=2,
        max_restarts=1, cluster={"namespace": namespace},
    )  # fmt: skip
    wait_for(job, lambda status: status.state is StateName.RUNNING)
    return job


def own_words(job):
    return [line.text for line in job.logs() if line.rank is None]


def left_of(job, namespace, kinds="pytorchjobs,pods,secrets,services"):
    """What the cluster has of a job."""
    deadline = time.monotonic() + 60
    while True:
        listed = json.loads(run_kubectl("-n", namespace, "get", kinds, "-o", "json"))["items"]
        left = [item["metadata"]["name"] for item in listed if job.name in item["metadata"]["name"]]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def test_a_training_whose_second_pod_loses_its_rank_ends_as_if_nothing_had_happened(namespace):
    import torch

    job, model = train(
        0.15, max_restarts=1, on="kubernetes", image=IMAGE, resources=SMALL,
        cluster={"namespace": namespace},
    )  # fmt: skip
    wait_for(job, lambda status: (status.checkpoint_epoch or 0) >= 2)
    kill = f"kill -9 {job.status.replicas[1].pid}"
    run_kubectl("-n", namespace, "exec", f"{job.name}-worker-0", "--", "sh", "-c", kill)
    status = job.wait()
    log = [str(line) for line in job.logs()]
    assert (status.state, status.attempt) == (StateName.SUCCEEDED, 1), (status, log)
    rows = [row for row in job.metrics if row["source"] == "train"]
    assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
    assert sum("Rank 1 was killed by SIGKILL" in line and "attempt 2 of 2" in line for line in log) == 1
    assert any("goes on behind epoch" in line for line in log)
    undisturbed, same = train(0.0)
    assert undisturbed.wait().state is StateName.SUCCEEDED
    for name, value in same.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, atol=1e-6), name
    again = [row["loss"] for row in undisturbed.metrics if row["source"] == "train"]
    assert [row["loss"] for row in rows] == pytest.approx(again, rel=1e-4)
    job.delete()


WATCHES = """
import sys, kale_dist as kd
job = kd.attach(sys.argv[1])
print("attached", flush=True)
print(job.wait(150).state, job.status.attempt, *(line.text for line in job.logs()), sep="\\n")
"""


@contextlib.contextmanager
def watching_elsewhere(ref, state_home, program=WATCHES, **environment):
    """Another machine, as far as records go, that follows a job to its end."""
    watching = subprocess.Popen(
        [sys.executable, "-c", program, ref], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_STATE_HOME": str(state_home), **environment},
    )  # fmt: skip
    try:
        assert watching.stdout.readline() == "attached\n"
        yield watching
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()


def test_a_training_that_loses_a_pod_goes_on_in_new_ones_from_the_store_s_last_checkpoint(namespace, tmp_path):
    import torch

    make_claim(namespace, "kept")
    job, model = train(
        0.3, max_restarts=1, on="kubernetes", image=IMAGE, resources=SMALL, store="pvc://kept/runs",
        cluster={"namespace": namespace},
    )  # fmt: skip
    wait_for(job, lambda status: (status.checkpoint_epoch or 0) >= 3)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")
    wait_for(job, lambda status: status.attempt == 1 and status.state is StateName.RUNNING)
    elsewhere = subprocess.Popen(
        [sys.executable, "-c", WATCHES, job.ref], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert elsewhere.stdout.readline() == "attached\n"
    status = job.wait(150)
    log = [str(line) for line in job.logs()]
    assert (status.state, status.attempt) == (StateName.SUCCEEDED, 1), (status, log)
    assert sum(f"{job.name}-worker-0 was deleted" in line and "attempt 2 of 2" in line for line in log) == 1, log
    assert any("goes on behind epoch" in line for line in log), log
    rows = [row for row in job.metrics if row["source"] == "train"]
    assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
    undisturbed, same = train(0.0)
    assert undisturbed.wait().state is StateName.SUCCEEDED
    trained = job.model
    assert trained is model
    for name, value in same.state_dict().items():
        assert torch.allclose(trained.state_dict()[name], value, atol=1e-6), name
    seen, _ = elsewhere.communicate(timeout=160)
    assert seen.splitlines()[:2] == ["succeeded", "1"]
    assert any("goes on behind epoch" in line for line in seen.splitlines())
    there = [str(found.ref) for found in kd.jobs(on="kubernetes", namespace=namespace)]
    assert there == [job.ref], there
    job.delete()
    assert left_of(job, namespace) == []


def test_a_training_without_a_store_begins_anew_and_says_why(namespace):
    job, _ = train(
        0.1, max_restarts=1, on="kubernetes", image=IMAGE, resources=SMALL, cluster={"namespace": namespace, "ttl_s": 30},
    )  # fmt: skip
    wait_for(job, lambda status: (status.checkpoint_epoch or 0) >= 1)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-master-0", "--wait=false")
    status = job.wait(150)
    assert (status.state, status.attempt) == (StateName.SUCCEEDED, 1), (status, [str(line) for line in job.logs()])
    assert any("begins anew: without a store no checkpoint outlives the pods" in note for note in status.notes)
    assert [row["epoch"] for row in job.metrics if row["source"] == "train"] == list(range(1, EPOCHS + 1))
    # Neither the job that was submitted nor the one that went on stays longer than asked for.
    assert left_of(job, namespace) == []
    job.delete()


def test_pods_are_replaced_no_more_often_than_asked_for(namespace):
    job = flat.launch(
        waits_and_says_its_attempt, on="kubernetes", image=IMAGE, resources=SMALL, number_of_processes=2,
        max_restarts=1, cluster={"namespace": namespace},
    )  # fmt: skip
    for attempt, pod in enumerate((f"{job.name}-worker-0", f"{job.name}-r1-worker-0")):
        deadline = time.monotonic() + 120
        while not any(line.text == f"attempt {attempt} is here" and line.rank == 1 for line in job.logs()):
            assert time.monotonic() < deadline, job.status
            time.sleep(0.2)
        run_kubectl("-n", namespace, "delete", "pod", pod, "--wait=false")
    status = job.wait(120)
    assert (status.state, status.attempt) == (StateName.FAILED, 1)
    assert f"{job.name}-r1-worker-0 was deleted" in status.reason
    running = json.loads(run_kubectl("-n", namespace, "get", "pods", "-o", "json"))["items"]
    assert not [
        pod["metadata"]["name"] for pod in running
        if pod["status"]["phase"] in ("Pending", "Running") and "deletionTimestamp" not in pod["metadata"]
    ]  # fmt: skip
    job.delete()
    assert left_of(job, namespace) == []


def test_a_job_that_goes_on_in_new_pods_can_be_cancelled(namespace):
    job = flat.launch(
        waits_and_says_its_attempt, on="kubernetes", image=IMAGE, resources=SMALL, number_of_processes=2,
        max_restarts=3, cluster={"namespace": namespace},
    )  # fmt: skip
    wait_for(job, lambda status: status.state is StateName.RUNNING)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")
    wait_for(job, lambda status: status.attempt == 1 and status.state is StateName.RUNNING)
    job.cancel()
    status = job.wait(60)
    assert (status.state, status.cause) == (StateName.CANCELLED, FailureCause.USER), status
    job.delete()
    assert left_of(job, namespace) == []


def test_a_lack_of_memory_is_not_tried_again(namespace):
    job = flat.launch(
        fills_memory, on="kubernetes", image=IMAGE, resources={"cpu": 0.2, "memory_gib": 0.5}, number_of_processes=2,
        max_restarts=2, cluster={"namespace": namespace},
    )  # fmt: skip
    status = job.wait(120)
    assert (status.state, status.attempt) == (StateName.FAILED, 0), status
    assert "memory" in status.reason
    job.delete()


SUBMITS = """
import os, signal, sys, kale_dist as kd
sys.path.insert(0, sys.argv[1])
from slow_steps import ends_in_first_attempt
job = kd.launch(
    ends_in_first_attempt, number_of_processes=2, max_restarts=2, on=kd.Kubernetes(
        image=sys.argv[2], resources={"cpu": 0.2, "memory_gib": 1}, store="pvc://results", namespace=sys.argv[3],
    ),
)
print(job.ref, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_results_of_a_later_attempt_are_found_when_nobody_followed_and_the_pods_are_gone(namespace, tmp_path):
    make_claim(namespace, "results")
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    here = os.path.dirname(__file__)  # noqa: PTH120 - a text is wanted
    ended = subprocess.run(
        [sys.executable, "-c", SUBMITS, here, IMAGE, namespace],
        capture_output=True, text=True, env=environment, check=False, timeout=120,
    )  # fmt: skip
    ref = ended.stdout.strip()
    name = ref.rpartition("/")[2]
    assert name, ended.stderr
    run_kubectl("-n", namespace, "wait", "--for=condition=Succeeded", f"pytorchjob/{name}", "--timeout=120s")
    selector = f"training.kubeflow.org/job-name={name}"
    run_kubectl("-n", namespace, "delete", "pods", "-l", selector, "--grace-period=0", "--force", "--wait=true")
    reads = f"import kale_dist as kd; job = kd.attach({ref!r}); print(job.results(120)); job.delete()"
    found = subprocess.run(
        [sys.executable, "-c", reads], capture_output=True, text=True, env=environment, check=False, timeout=200
    )
    assert found.stdout.strip() == "[1, 1]", found.stderr


def test_two_machines_that_follow_a_job_agree_how_it_goes_on(namespace, tmp_path):
    job = flat.launch(
        waits_for_its_second_attempt, on="kubernetes", image=IMAGE, resources=SMALL, number_of_processes=2,
        max_restarts=2, cluster={"namespace": namespace},
    )  # fmt: skip
    with watching_elsewhere(job.ref, tmp_path) as elsewhere:
        wait_for(job, lambda status: status.state is StateName.RUNNING)
        run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")
        status = job.wait(150)
        assert (status.state, status.attempt) == (StateName.SUCCEEDED, 1), (status, [str(line) for line in job.logs()])
        seen, _ = elsewhere.communicate(timeout=160)
    assert seen.splitlines()[:2] == ["succeeded", "1"], seen
    listed = json.loads(run_kubectl("-n", namespace, "get", "pytorchjobs", "-o", "json"))["items"]
    assert sorted(item["metadata"]["name"] for item in listed) == [job.name, f"{job.name}-r1"]
    job.delete()


def test_lines_of_pods_before_the_new_ones_are_read_or_their_loss_is_said(namespace, kubeconfig, tmp_path):
    job = flat.launch(
        says_much_in_its_first_attempt, 5_000, on="kubernetes", image=IMAGE, resources=SMALL, number_of_processes=3,
        max_restarts=1, cluster={"namespace": namespace},
    )  # fmt: skip
    wait_for(job, lambda _: sum(line.text == "ready" for line in job.logs()) == 3)
    network = Network(kubeconfig, tmp_path / "config")
    config = {"KALE_DIST_KUBECONFIG": str(tmp_path / "config")}
    with watching_elsewhere(job.ref, tmp_path, **config) as elsewhere, contextlib.closing(network):
        folder = tmp_path / "kale-dist" / "jobs"
        deadline = time.monotonic() + 60
        while b"".join(path.read_bytes() for path in folder.glob("*/log")).count(b"ready") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        network.cut()
        for pod in ("master-0", "worker-0", "worker-1"):
            run_kubectl("-n", namespace, "exec", f"{job.name}-{pod}", "-c", "pytorch", "--", "touch", "/tmp/go")
        wait_for(job, lambda _: sum(line.text == "all said" for line in job.logs()) == 3)
        lost = f"{job.name}-worker-0"
        run_kubectl("-n", namespace, "delete", "pod", lost, "--force", "--grace-period=0")
        status = job.wait(150)
        assert (status.state, status.attempt) == (StateName.SUCCEEDED, 1), (status, own_words(job))
        network.mend()
        seen, _ = elsewhere.communicate(timeout=160)
    all_lines = [f"line {number:05}" for number in range(5_000)]
    for rank in range(3):
        assert [line.text for line in job.logs(ranks=[rank]) if line.text.startswith("line")] == all_lines
    told = seen.splitlines()
    assert told[:2] == ["succeeded", "1"]
    # There, the two pods that had ended were read afterwards; the third one was gone.
    assert sorted(text for text in told if text.startswith("line")) == sorted(all_lines * 2)
    assert sum("The log of pod 1 breaks off behind its first" in text for text in told) == 1, told[-40:]
    assert not any("of pod 0 breaks off" in text or "of pod 2 breaks off" in text for text in told)
    job.delete()


ONLY_WATCHES = """
import sys, time, kale_dist as kd
job = kd.attach(sys.argv[1])
print("attached", flush=True)
while "only watches" not in job.status.reason:
    time.sleep(0.1)
print(job.status.state, job.status.reason, flush=True)
print(job.wait(150).state, job.status.attempt)
"""


def test_who_has_not_the_job_s_key_watches_and_has_nothing_go_on(namespace, make_user, tmp_path, monkeypatch):
    begin, may_begin = restarts.begin, threading.Event()

    def begins_late(*arguments):
        if not may_begin.is_set():
            raise BackendError("The API server does not answer", retryable=True)
        return begin(*arguments)

    monkeypatch.setattr(restarts, "begin", begins_late)
    job = runs_in_its_first_attempt(namespace)
    other = str(make_user(namespace, lambda identity: roles.role_yaml(namespace, identity)))
    with watching_elsewhere(job.ref, tmp_path, ONLY_WATCHES, KALE_DIST_KUBECONFIG=other) as elsewhere:
        run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")
        said = elsewhere.stdout.readline()
        assert said.startswith("running "), said
        assert f"{job.name}-worker-0 was deleted" in said
        assert "who submitted it" in said
        time.sleep(3)
        listed = json.loads(run_kubectl("-n", namespace, "get", "pytorchjobs", "-o", "json"))["items"]
        mine = [item for item in listed if item["metadata"]["name"].startswith(job.name)]
        assert [item["metadata"]["name"] for item in mine] == [job.name]
        assert not mine[0]["spec"]["runPolicy"].get("suspend")
        may_begin.set()
        status = job.wait(150)
        assert (status.state, status.attempt) == (StateName.SUCCEEDED, 1), (status, own_words(job))
        seen, _ = elsewhere.communicate(timeout=160)
    assert seen == "succeeded 1\n"
    job.delete()


ATTACHES = "import sys, kale_dist as kd; job = kd.attach(sys.argv[1]); print(job.status.state)"
CANCELS = "import sys, kale_dist as kd; job = kd.attach(sys.argv[1]); job.cancel(); print(job.wait(90).state)"


def test_a_machine_that_knew_only_the_first_pods_cancels_those_that_go_on(namespace, tmp_path):
    def elsewhere(program):
        return subprocess.run(
            [sys.executable, "-c", program, job.ref], capture_output=True, text=True, check=False, timeout=120,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        )  # fmt: skip

    job = flat.launch(
        waits_and_says_its_attempt, on="kubernetes", image=IMAGE, resources=SMALL, number_of_processes=2,
        max_restarts=1, cluster={"namespace": namespace},
    )  # fmt: skip
    assert elsewhere(ATTACHES).returncode == 0
    wait_for(job, lambda status: status.state is StateName.RUNNING)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")
    wait_for(job, lambda status: status.attempt == 1 and status.state is StateName.RUNNING)
    cancelled = elsewhere(CANCELS)
    assert cancelled.stdout.splitlines()[-1:] == ["cancelled"], (cancelled.stdout, cancelled.stderr)
    status = job.wait(30)
    assert (status.state, status.cause) == (StateName.CANCELLED, FailureCause.USER), status
    job.delete()


def test_a_cluster_that_does_not_answer_for_a_moment_is_asked_for_new_pods_again(namespace, monkeypatch):
    begin, refused = restarts.begin, []

    def begins_late(cluster, spec, *arguments):
        refused.append(time.monotonic())
        if len(refused) == 3:
            # It gets as far as the object, without the Secret that the pods wait for.
            run = begin(cluster, spec, *arguments)
            cluster.core.delete_namespaced_secret(manifests.input_secret_name(f"{spec.name}-r{run.number}"), namespace)
        raise BackendError("The API server does not answer", retryable=True)

    monkeypatch.setattr(restarts, "begin", begins_late)
    job = runs_in_its_first_attempt(namespace)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")
    status = job.wait(120)
    assert (status.state, status.attempt, len(refused)) == (StateName.SUCCEEDED, 1, 3), status
    job.delete()


def test_a_job_that_gets_no_new_pods_fails_with_the_reason_and_goes_after_its_time(namespace, monkeypatch):
    # A quota may be left by others: that is waited for.
    monkeypatch.setattr(lost_pods, "ASKING_S", 15.0)
    job = flat.launch(
        waits_for_its_second_attempt, on="kubernetes", image=IMAGE, resources=SMALL, number_of_processes=2,
        max_restarts=1, cluster={"namespace": namespace, "ttl_s": 45},
    )  # fmt: skip
    wait_for(job, lambda status: status.state is StateName.RUNNING)
    quota = {
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"},
        "spec": {"hard": {"count/pytorchjobs.kubeflow.org": "1"}},
    }  # fmt: skip
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(quota))
    run_kubectl("-n", namespace, "wait", "--for=jsonpath={.status.used}", "resourcequota/one", "--timeout=30s")
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")
    status = job.wait(120)
    assert status.state is StateName.FAILED
    assert f"{job.name}-worker-0" in status.reason
    assert "New pods could not be had" in status.reason
    assert "quota" in status.reason
    policy = json.loads(run_kubectl("-n", namespace, "get", "pytorchjob", job.name, "-o", "json"))["spec"]["runPolicy"]
    assert policy["ttlSecondsAfterFinished"] >= 45
    job.delete()
