"""Ranks in an image without torch, such as one of TensorFlow."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import cloudpickle
import pytest
from plain_jobs import give_back, where
from pod_jobs import PodJob

import kale_dist


@pytest.fixture
def bare_python(tmp_path):
    """A Python with cloudpickle and this library alone."""
    place = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    site = next(place.glob("lib/python3*/site-packages"))
    for package in (kale_dist, cloudpickle):
        folder = pathlib.Path(package.__file__).parent
        (site / folder.name).symlink_to(folder)
    return str(place / "bin" / "python")


def test_a_function_that_needs_no_torch_runs_without_it(tmp_path, bare_python):
    job = PodJob(tmp_path, where, ranks=2, processes_per_agent=1)
    job.python = bare_python
    job.put_input().start_all()
    try:
        assert job.end() == [0, 0], job.text()
        assert [job.outcome(rank).value for rank in range(2)] == [(False, 0, 2), (False, 1, 2)]
        assert "hello from 1" in job.text()
    finally:
        job.close()


def test_a_call_with_tensors_says_that_the_image_has_no_torch(tmp_path, bare_python):
    import torch

    job = PodJob(tmp_path, give_back, torch.ones(2), ranks=1)
    job.python = bare_python
    job.put_input().start_all()
    try:
        job.end()
        assert "The image has no torch. Give one that has, with image=" in job.text()
        assert job.state()["state"] == "failed"
    finally:
        job.close()
