"""Commands on a cluster: a script written for torchrun, with its own module, in two pods; events of a job."""

import json
import sys

import pytest
from assistants import serving
from on_cluster import IMAGE

import kale_dist as kd
from kale_dist.cli import main

pytestmark = pytest.mark.usefixtures("jobs_end")

TRAIN = """
import os, sys
import torch.distributed as dist
import beside

dist.init_process_group("gloo")
names = [None] * dist.get_world_size()
dist.all_gather_object(names, os.uname().nodename)
print(beside.NAME, open(sys.argv[1]).read(), len(set(names)))
dist.barrier()
if dist.get_rank() == 1:
    sys.exit(3)
dist.barrier()
"""


@pytest.mark.nightly
def test_a_script_runs_in_pods_and_its_exit_code_is_that_of_the_command(namespace, tmp_path, monkeypatch, capsys):
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    (tmp_path / "base.yaml").write_text("lr: 0.5")
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    small = json.dumps({"cpu": 0.1, "memory": "1Gi"})
    pods = ["--set", "image", IMAGE, "--set", "namespace", namespace, "--set", "resources", small]
    assert main(["launch", "train.py", "-n", "2", "--on", "kubernetes", *pods, "--", "base.yaml"]) == 3
    out = capsys.readouterr()
    assert out.out.splitlines() == ["beside lr: 0.5 2"] * 2
    assert "Rank 1 failed: SystemExit: 3" in out.err


def test_events_of_a_job_are_what_the_cluster_says_of_its_pods(plain, capsys):
    job = kd.launch(len, [1], number_of_processes=1, on=plain)
    assert job.result(180) == 1
    about = {(event.about.partition("/")[0], event.reason) for event in job.events()}
    assert {("pod", "Scheduled"), ("pod", "Started")} <= about
    assert main(["events", job.ref]) == 0
    assert "Scheduled" in capsys.readouterr().out
    job.delete()


def test_an_assistant_is_told_what_a_cluster_says_and_trains_there(namespace, plain_image, tmp_path):
    (tmp_path / "train.py").write_text("import os\nprint('of', os.environ['WORLD_SIZE'])\n")
    settings = {"image": plain_image, "namespace": namespace, "resources": {"cpu": 0.1, "memory": "256Mi"}}
    with serving(tmp_path) as assistant:
        calls = {"path": "train.py", "on": "kubernetes", "number_of_processes": 2}
        refused = assistant.refusal("plan", **calls, settings=settings | {"namespace": "no-such-namespace"})
        assert "There is no namespace no-such-namespace" in refused
        assert "Pod train" not in assistant.ask("plan", **calls, settings=settings)
        ref = assistant.submit(**calls, settings=settings)
        assert ref.startswith(f"kubernetes://{namespace}/train-")
        while "Succeeded on 2 ranks" not in (now := assistant.ask("status", ref=ref, wait_s=50)):
            assert " pending" in now or " starting" in now or " running" in now
        assert assistant.ask("logs", ref=ref).count("of 2") == 2
        bad = assistant.submit(**calls, settings=settings | {"image": "localhost:5000/no-such-image:1"})
        while "needs you" not in (now := assistant.ask("status", ref=bad, wait_s=5)):
            assert " pending" in now
        assert "was not found in its registry. Push it there" in assistant.ask("explain", ref=bad)
        assert "Cancelled" in assistant.stop(bad)
