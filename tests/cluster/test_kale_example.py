"""A pipeline in the shape of Kale's own example: distribute, then find the job by its name and follow it to its end.

Only the import and the data differ from what was written for Kale: standalone steps with `args`, a metric that is an object,
the loop that waits for the master's replica status, streamed logs, and the loop that waits for a final state.
"""

import logging
import textwrap
import time

import pytest
import torch
from kale_work import Accuracy, eval_step, train_step
from kubernetes.client.rest import ApiException
from on_cluster import IMAGE
from torch.utils.data import DataLoader, TensorDataset

from kale_dist import kale as pytorch

pytestmark = pytest.mark.usefixtures("jobs_end")


def distribute_training():
    torch.manual_seed(0)
    x = torch.randn(240, 8)
    y = (x.sum(1) > 0).long()
    train_loader = DataLoader(TensorDataset(x[:192], y[:192]), batch_size=16, pin_memory=True)
    valid_loader = DataLoader(TensorDataset(x[192:], y[192:]), batch_size=48, pin_memory=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    for param in model[0].parameters():
        param.requires_grad = False
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job = pytorch.distribute(
        model,
        train_loader,
        torch.nn.CrossEntropyLoss(),
        optimizer,
        train_step,
        eval_data_loader=valid_loader,
        eval_step=eval_step,
        cuda=False,
        epochs=4,
        number_of_processes=3,
        train_args={"log_interval": 2, "metric": Accuracy()},
        eval_args={"metric": Accuracy()},
    )
    return job.name


def monitor(name):
    job = pytorch.PyTorchJob(name)
    while True:
        while True:
            cr = job.get()
            if job.get_job_status() not in ["", "Created", "Restarting"] and (
                cr.get("status", {}).get("replicaStatuses", {}).get("Master", {})
            ):
                break
            time.sleep(0.5)
        try:
            job.stream_logs()
            break
        except ApiException:
            pass


def delete(name):
    job = pytorch.PyTorchJob(name)
    while job.get_job_status() not in ["Succeeded", "Failed"]:
        time.sleep(0.5)
    state = job.get_job_status()
    job.delete()
    return state


@pytest.mark.nightly
@pytest.mark.timeout(280)
def test_the_example_runs_and_its_loops_end(namespace, monkeypatch, tmp_path, capsys):
    settings = tmp_path / "config.toml"
    settings.write_text(
        textwrap.dedent(f"""
            on = "kubernetes"
            [kubernetes]
            namespace = "{namespace}"
            image = "{IMAGE}"
            resources = {{cpu = 0.1, memory = "1Gi"}}
        """)
    )
    monkeypatch.setenv("KALE_DIST_CONFIG", str(settings))
    # What the example's `logging.basicConfig(level=logging.INFO)` does; pytest has a handler already.
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", root.level)
    root.setLevel(logging.INFO)
    name = distribute_training()
    monitor(name)
    out = capsys.readouterr().out
    assert "Loss = " in out
    assert "Accuracy = " in out
    assert delete(name) == "Succeeded"
