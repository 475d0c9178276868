"""A job's picture where pictures cannot be replaced."""

import os
import pathlib
import subprocess
import sys

import pytest

import kale_dist as kd
from kale_dist.notebook import live

SESSION = """
import kale_dist as kd

def speak():
    print("spoken")

job = kd.launch(speak, number_of_processes=1)
status = job.wait()
job
job.delete()
"""


def speak():
    print("spoken")


def test_without_a_kernel_the_state_is_printed_once(capsys):
    job = kd.launch(speak, number_of_processes=1)
    job.wait()
    live.show(job)
    out = capsys.readouterr().out
    assert out.count(job.ref) == 1
    assert "succeeded" in out
    assert "[0] spoken" in out
    assert "\x1b" not in out
    job.delete()


def test_a_deleted_job_says_so(capsys):
    job = kd.launch(speak, number_of_processes=1)
    job.wait()
    job.delete()
    live.show(job)
    assert capsys.readouterr().out == f"<Job {job.ref} deleted>\n"


@pytest.mark.nightly
def test_an_ipython_terminal_prints_text(tmp_path):
    command = [
        sys.executable,
        "-m",
        "IPython",
        "--simple-prompt",
        "--no-banner",
        "--no-confirm-exit",
        "--colors=NoColor",
    ]
    environment = os.environ | {"IPYTHONDIR": str(tmp_path), "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    found = subprocess.run(
        command, input=SESSION, capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert "Succeeded" in found.stdout, found
    assert "[0] spoken" in found.stdout
    assert "<div" not in found.stdout
