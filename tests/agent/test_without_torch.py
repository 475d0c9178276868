"""Ranks in an image without torch, such as one of TensorFlow."""

from __future__ import annotations

from plain_jobs import give_back, where


def test_a_function_that_needs_no_torch_runs_without_it(make_bare):
    job = make_bare(where, ranks=2).put_input().start_all()
    assert job.end() == [0, 0], job.text()
    assert [job.outcome(rank).value for rank in range(2)] == [(False, 0, 2), (False, 1, 2)]
    assert "hello from 1" in job.text()


def test_a_call_with_tensors_says_that_the_image_has_no_torch(make_bare):
    import torch

    job = make_bare(give_back, torch.ones(2), ranks=1).put_input().start_all()
    job.end()
    assert "The image has no torch. Give one that has, with image=" in job.text()
    assert job.state()["state"] == "failed"
