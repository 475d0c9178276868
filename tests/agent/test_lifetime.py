"""Who outlives whom: kernel, agent, ranks."""

from __future__ import annotations

import pathlib
import subprocess
import textwrap

from agent_jobs import RunningJob, named, survivors

from kale_dist.places.agent_client import cancel_message, send

SCRIPT = """
import os, pathlib, sys, time
sys.path[:0] = {path!r}
from agent_jobs import Jobs, RunningJob
from kale_dist.places.agent_client import AgentClient

def sleep():
    print("asleep")
    time.sleep(600)

client = AgentClient()
client.start()
order = Jobs(pathlib.Path({root!r}), client).order(sleep, job="one", detach=True)
client.take(order)
job = RunningJob(order)
job.until(lambda: job.state()["state"] == "running")
print(client.pid, client.address, *job.pids().values(), order.key, order.snapshot, flush=True)
time.sleep(600)
"""


def read_job(root):
    from kale_dist.wire import Order

    return RunningJob(
        Order(
            job="one",
            object="one",
            number_of_processes=2,
            processes_per_agent=2,
            folder=str(root / "jobs/one"),
            store="",
            snapshot="",
            key="",
        )
    )


def test_a_detached_job_can_be_cancelled_from_elsewhere(bare_python, tmp_path):
    here = pathlib.Path(__file__)
    text = SCRIPT.format(root=str(tmp_path), path=[str(here.parents[number]) for number in range(3)])
    kernel = subprocess.Popen([bare_python, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True)
    agent, path, *ranks, _, _ = kernel.stdout.readline().split()
    there = named(map(int, [agent, *ranks]))
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    assert send(path, cancel_message("one"))
    assert read_job(tmp_path).wait()["cause"] == "user"
    assert survivors(there, 30) == []
    assert not send(path, cancel_message("one"))
