"""Ranks that are lost on the real cluster and started again in their pods."""

import time

import pytest
from on_cluster import IMAGE, run_kubectl
from slow_steps import train_slowly

import kale_dist as kd
from kale_dist import backends
from kale_dist.contract import StateName

EPOCHS = 8


@pytest.fixture(scope="module", autouse=True)
def jobs_end(kubeconfig):
    yield
    backends.get("kubernetes").close()


def train(seconds_per_step, **options):
    """A training of which every number follows from the seeds; gives the job and its model."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job = kd.distribute(
        model, loader, torch.nn.MSELoss(), optimizer, train_slowly, epochs=EPOCHS, train_args=seconds_per_step, seed=1,
        number_of_processes=2, threads=1, **options,
    )  # fmt: skip
    return job, model


def test_a_training_whose_second_pod_loses_its_rank_ends_as_if_nothing_had_happened(namespace):
    import torch

    job, model = train(
        0.15, max_restarts=1, on="kubernetes", image=IMAGE, resources={"cpu": 0.2, "memory_gib": 1},
        cluster={"namespace": namespace},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (job.status.checkpoint_epoch or 0) >= 2:
        assert time.monotonic() < deadline, (job.status, [str(line) for line in job.logs()])
        time.sleep(0.1)
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
