"""How often a step has the host wait for the GPU; `test_on_simulated_gpus.py` runs it with `SIMCUDA_SYNCS`."""

import os
import pathlib
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd

SYNCS = pathlib.Path(os.environ["SIMCUDA_SYNCS"])
GUIDE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "gpus.md"

pytestmark = pytest.mark.filterwarnings("ignore:.*has never run on GPUs")

OPTIONS = {
    "`ddp`": {},
    "`ddp`, `accumulate=2`": {"accumulate": 2},
    "`ddp`, `clip_norm=`": {"clip_norm": 1.0},
    '`ddp`, `precision="bf16"`': {"precision": "bf16"},
    '`ddp`, `precision="fp16"`': {"precision": "fp16"},
    '`ddp`, `compress="powersgd"`': {"strategy": kd.strategies.DDP(compress="powersgd")},
    "`fsdp`": {"strategy": "fsdp"},
    "`local-sgd`": {"strategy": "local-sgd"},
    "`gossip`": {"strategy": "gossip"},
    "`tensor`": {"strategy": "tensor"},
    "`pipeline`": {"strategy": "pipeline"},
}  # fmt: skip


def waits(steps, options):
    """What two ranks wait for in a training of one epoch with so many steps: the work of this step, and events of the step before."""
    before = SYNCS.stat().st_size if SYNCS.exists() else 0
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(steps * 4, 8), torch.randint(4, (steps * 4,)))
    loader = DataLoader(samples, 4 if options.get("strategy") in ("tensor", "pipeline") else 2, pin_memory=True)
    job = kd.distribute(model, loader, nn.CrossEntropyLoss(), optimizer, number_of_processes=2, on="local", **options)
    try:
        job.result()
    finally:
        job.delete()
    with SYNCS.open() as file:
        file.seek(before)
        lines = file.readlines()
    events = sum(" event.synchronize |" in line for line in lines)
    return len(lines) - events, events


def promised():
    rows = re.findall(r"^\| (`.*?) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE.read_text(), re.MULTILINE)
    return {name: (float(of_this), float(before)) for name, of_this, before in rows}


def test_the_guide_has_a_row_for_each():
    assert promised().keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_the_host_waits_as_often_as_the_guide_says(name):
    few, many = waits(40, OPTIONS[name]), waits(140, OPTIONS[name])
    # What is waited for at the begin, at checkpoints and at the ends of epochs is in both.
    found = tuple((more - less) / (2 * 100) for less, more in zip(few, many, strict=True))
    assert found == pytest.approx(promised()[name], abs=0.1), (few, many)
