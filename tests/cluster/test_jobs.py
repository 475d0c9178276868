"""Jobs on the real cluster, as their users see them: called from here, run by pods, and nothing left in the end."""

import json
import os
import subprocess
import sys
import textwrap
import time

import flat
import pytest
from on_cluster import call_in, make_claim, run_kubectl
from rank_work import dies_on_1, fails_on_1, prints_much, size_and_more, summed, waits

import kale_dist as kd
from kale_dist.contract import FailureCause, StateName
from kale_dist.errors import BackendError, ConfigError, JobCancelledError, JobExistsError, JobFailedError

pytestmark = pytest.mark.usefixtures("jobs_end")


@pytest.fixture
def on(namespace):
    """Arguments that send a call to the cluster."""
    return call_in(namespace, cpu=0.2)


def left_in(namespace, name):
    kinds = "pytorchjobs,secrets,pods,services"
    listed = json.loads(run_kubectl("-n", namespace, "get", kinds, "-o", "json"))["items"]
    return [item["kind"] for item in listed if item["metadata"]["name"].startswith(name)]


def wait_for_line(job, text, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not any(text in line.text for line in job.logs()):
        assert time.monotonic() < deadline, (job.status, [str(line) for line in job.logs()])
        assert not job.done(), job.status
        time.sleep(0.2)


def in_new_process(code, tmp_path):
    """Run a script as on another machine: with a state folder of its own."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONWARNINGS": "default"}
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_model_is_trained_by_two_pods_and_comes_back(on, namespace):
    import torch

    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    before = model.weight.detach().clone()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = flat.distribute(model, loader, torch.nn.MSELoss(), optimizer, epochs=8, seed=1, **on)
    assert job.wait().state is StateName.SUCCEEDED, list(job.logs())
    assert job.model is model
    assert not torch.equal(model.weight, before)
    assert torch.allclose(model.weight, torch.ones(1, 4), atol=0.2)
    losses = [row["loss"] for row in job.metrics if row["source"] == "train"]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert [replica.rank for replica in job.status.replicas] == [0, 1]
    job.delete()
    assert left_in(namespace, job.name) == []


def test_results_and_every_rank_s_lines_are_seen_from_another_machine_too(on, namespace, tmp_path):
    job = flat.launch(summed, 2, **on)
    assert job.results() == [6.0, 6.0]
    texts = {(line.rank, line.text) for line in job.logs()}
    assert {(0, "rank 0 has 3.0"), (1, "rank 1 has 3.0")} <= texts
    told = in_new_process(
        f"""
        import kale_dist as kd
        from kale_dist import backends
        job = kd.attach({job.ref!r})
        print(job.wait(60).state, job.results())
        print(*sorted(line.text for line in job.logs(ranks=[1])))
        print([found.name for found in kd.jobs(on="kubernetes", namespace={namespace!r})])
        backends.get("kubernetes").close()
        """,
        tmp_path,
    )
    assert "succeeded [6.0, 6.0]" in told
    assert "rank 1 has 3.0" in told
    assert job.name in told.splitlines()[-1]
    with pytest.raises(JobExistsError):
        flat.launch(summed, 2, name=job.name, **on)
    job.delete()


def test_the_first_failing_rank_s_own_exception_comes_back(on):
    job = flat.launch(fails_on_1, **on)
    with pytest.raises(JobFailedError, match="no such column") as caught:
        job.result(120)
    assert isinstance(caught.value.__cause__, KeyError)
    assert job.status.failed_rank == 1
    job.delete()


def test_a_killed_rank_ends_all_pods_and_is_named(on):
    job = flat.launch(dies_on_1, **on)
    status = job.wait(120)
    assert (status.state, status.cause, status.failed_rank) == (StateName.FAILED, FailureCause.DIED, 1)
    assert "SIGKILL" in status.reason
    job.delete()


def test_cancelling_ends_the_pods_and_keeps_the_log(on, namespace):
    job = flat.launch(waits, **on)
    wait_for_line(job, "ready")
    job.cancel()
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(60)
    job.cancel()
    assert any(line.text == "ready" for line in job.logs())
    deadline = time.monotonic() + 60
    while "Running" in run_kubectl("-n", namespace, "get", "pods", "-o", "jsonpath={.items[*].status.phase}"):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    job.delete()
    assert left_in(namespace, job.name) == []


def test_deleting_a_running_job_leaves_nothing(on, namespace):
    job = flat.launch(waits, **on)
    job.delete()
    assert left_in(namespace, job.name) == []


def test_200_mb_go_up_and_come_back_where_nothing_is_shared(on):
    import torch

    weights = torch.arange(50_000_000, dtype=torch.float32)
    roomy = {**on, "resources": {"cpu": 0.2, "memory_gib": 3}}
    with pytest.warns(kd.errors.KaleDistWarning, match="191 MiB"):
        job = flat.launch(size_and_more, weights, **roomy)
    assert job.wait(240).state is StateName.SUCCEEDED, list(job.logs())
    back = job.results()
    assert len(back) == 2
    assert all(torch.equal(value, weights + 1) for value in back)
    assert any("The snapshot was sent" in line.text for line in job.logs())
    job.delete()


def test_a_claim_keeps_what_was_sent_for_the_next_run(on, namespace):
    import torch

    make_claim(namespace, "kept")
    weights = torch.arange(1_000_000, dtype=torch.float32)
    said = []
    for _ in range(2):
        with pytest.warns(kd.errors.KaleDistWarning, match="4 MiB"):
            job = flat.launch(size_and_more, weights, store="pvc://kept/team", **on)
        assert all(torch.equal(value, weights + 1) for value in job.results(120))
        said.append(" ".join(line.text for line in job.logs() if line.rank is None))
        job.delete()
    assert "The snapshot was sent" in said[0]
    assert "nothing had to be sent" in said[1]


def test_a_flood_of_lines_arrives_whole_and_in_order(on):
    job = flat.launch(prints_much, **on)
    assert job.wait(180).state is StateName.SUCCEEDED
    for rank in range(2):
        numbered = [line.text for line in job.logs(ranks=[rank]) if line.text.startswith("line ")]
        assert numbered == [f"line {number:06} of rank {rank}" for number in range(100_000)]
        assert sum(line.text.count("x") for line in job.logs(ranks=[rank]) if "xxxx" in line.text) == 3_000_000
    job.delete()


def test_two_processes_in_one_pod(on):
    job = flat.launch(summed, 1, **on, processes_per_pod=2)
    assert job.results(120) == [3.0, 3.0]
    assert "Worker" not in str(flat.render(summed, 1, **on, processes_per_pod=2))
    job.delete()


def test_what_render_prints_can_be_applied(on, namespace):
    text = str(flat.render(summed, 2, **on, name="rendered"))
    run_kubectl("-n", namespace, "apply", "--dry-run=server", "-f", "-", text=text)
    assert "kind: PyTorchJob" in text


def test_an_image_that_is_not_there_is_explained_while_the_job_waits(on):
    job = flat.launch(summed, 2, **{**on, "image": "localhost:5000/kale-dist/nothing:1"})
    deadline = time.monotonic() + 90
    while "localhost:5000/kale-dist/nothing:1" not in job.status.reason:
        assert time.monotonic() < deadline, job.status
        time.sleep(0.5)
    assert job.status.state is StateName.PENDING
    job.delete()


def test_a_job_that_does_not_start_in_time_fails_and_frees_its_pods(on, namespace):
    options = {"namespace": namespace, "pending_timeout_s": 6, "node_selector": {"disk": "none-has-this"}}
    job = flat.launch(summed, 2, **{**on, "cluster": options})
    status = job.wait(90)
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.TIMEOUT)
    assert "pending_timeout_s of 6 s" in status.reason
    job.delete()


def test_without_an_image_the_call_says_where_to_name_one(on, monkeypatch, tmp_path):
    monkeypatch.setenv("KALE_DIST_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match="KALE_DIST_IMAGE"):
        flat.launch(summed, 2, **{**on, "image": None})


def test_a_namespace_that_is_not_there_is_refused_at_the_call(on):
    with pytest.raises(BackendError, match="no-such-namespace"):
        flat.launch(summed, 2, **{**on, "cluster": {"namespace": "no-such-namespace"}})


def test_ten_jobs_at_once(on):
    one = {**on, "number_of_processes": 1, "resources": {"cpu": 0.05, "memory_gib": 0.7}}
    jobs = [flat.launch(summed, number, **one) for number in range(10)]
    assert [job.result(280) for job in jobs] == [float(number) for number in range(10)]
    for job in jobs:
        job.delete()
