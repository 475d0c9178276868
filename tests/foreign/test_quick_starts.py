"""Other people's trainers in `launch`, as their own quick starts have them: the weights are those of torchrun, and the card has seen them."""

import os
import subprocess
import sys

import pytest
import quick_starts
import torch

import kale_dist as kd

pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

NEEDS = {"sft": "trl", "dpo": "trl", "grpo": "trl", "hugging_face": "transformers"}


@pytest.mark.parametrize("case", quick_starts.CASES)
def test_the_weights_are_those_of_torchrun(case, tmp_path, jobs, monkeypatch):
    pytest.importorskip(NEEDS.get(case, case))
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "weights.pt"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        quick_starts.__file__,
        case,
        str(out),
    ]
    told = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert told.returncode == 0, told.stderr[-3000:]
    jobs.append(kd.launch(quick_starts.trained, case, number_of_processes=2, threads=1))
    found, expected = jobs[0].result(250), torch.load(out)
    assert found.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not differing
    rows = [row for row in jobs[0].metrics if row["source"] == "train" and "loss" in row]
    assert len(rows) >= 2
    if case == "grpo":
        before = quick_starts.language_model().state_dict()
        assert max((found[name] - value).abs().max() for name, value in before.items()) > 1e-3
    if case != "accelerate":
        assert all(one.progress.training == 1 and one.progress.share > 0.2 for one in jobs[0].status.replicas)
