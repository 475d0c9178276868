"""Faults of ranks, agents, disks and notebooks on one machine."""

import contextlib
import importlib
import itertools
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch
from fault_work import (
    adds_up,
    counts,
    counts_wide,
    crashes_under_faulthandler,
    dies_on_one,
    large,
    raises,
    waits,
    writes_cut_characters,
)
from recorded import events_in
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

import kale_dist as kd
from kale_dist.errors import ImageError, JobNotFoundError, StoreError, WaitTimeoutError
from kale_dist.image.registry import Registry
from kale_dist.job import records
from kale_dist.worker.training import checkpoint

# -- ranks -----------------------------------------------------------------------------------------------------------


def rank_dies(scene, how, named):
    job = scene.launch(dies_on_one, how)
    scene.fails(job, "died", "Rank 1", named, "last words of one")
    assert job.status.failed_rank == 1


def segfault_under_faulthandler(scene):
    job = scene.launch(crashes_under_faulthandler, number_of_processes=1)
    scene.fails(job, "died", "SIGSEGV")
    text = "\n".join(line.text for line in job.logs())
    assert "Fatal Python error: Segmentation fault" in text
    assert "crashes_under_faulthandler" in text


def rank_raises(scene, how, kind):
    job = scene.launch(raises, how)
    scene.fails(job, "error", kind.__name__)
    assert isinstance(job.exception().__cause__, kind)


class KillsItsWorker(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 20 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4), torch.ones(1)


def loader_worker_dies(scene):
    model = nn.Linear(4, 1)
    loader = DataLoader(KillsItsWorker(), 4, num_workers=1)
    job = scene.follow(
        kd.distribute(model, loader, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), number_of_processes=2)
    )
    scene.fails(job, "error", "DataLoader worker")


def rank_is_stopped(scene):
    job = scene.launch(adds_up, 10_000, ready=2, stall_warn_s=3.0, stall_timeout_s=6.0)
    scene.stop(job.status.replicas[1].pid)
    scene.fails(job, "stalled", "stall_timeout_s", "ank 1")


def rank_is_stopped_for_a_while(scene):
    job = scene.launch(adds_up, 60, ready=2)
    scene.stop(pid := job.status.replicas[1].pid)
    time.sleep(2)
    assert not job.done()
    scene.go_on(pid)
    scene.succeeds(job, 120.0, 120.0)


def characters_are_cut(scene):
    job = scene.launch(writes_cut_characters, number_of_processes=1)
    scene.succeeds(job)
    assert [line.text for line in job.logs(ranks=0)] == ["café", r"cut: \xe2\x82"]


# -- the agent -------------------------------------------------------------------------------------------------------


def agent_of(job):
    return records.read(job.name).agent_pid


def agent_dies(scene):
    job = scene.launch(waits, ready=2)
    os.kill(agent_of(job), signal.SIGKILL)
    scene.fails(job, "agent-died", "agent")
    again = scene.launch(counts, 3)
    assert agent_of(again) != agent_of(job)
    scene.succeeds(again, 3, 3)
    assert not again.status.notes


def fork_server_dies(scene):
    job = scene.launch(waits, ready=2)
    children = pathlib.Path(f"/proc/{agent_of(job)}/task/{agent_of(job)}/children").read_text().split()
    [server] = [int(pid) for pid in children if b"forkserver" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(server, signal.SIGKILL)
    scene.fails(job, "died", "forks ranks")
    scene.succeeds(scene.launch(counts, 3), 3, 3)


def agent_is_stopped(scene):
    job = scene.launch(counts, 200, 0.01)
    scene.until(lambda: sum(1 for _ in job.logs()) > 20, job)
    scene.stop(agent := agent_of(job))
    later, unwanted = scene.launch(counts, 5), scene.launch(waits)
    unwanted.cancel()
    with pytest.raises(WaitTimeoutError):
        job.wait(3)
    scene.go_on(agent)
    scene.succeeds(job, 200, 200)
    scene.succeeds(later, 5, 5)
    assert scene.end_of(unwanted).state.value == "cancelled"
    for rank in (0, 1):
        assert [int(line.text) for line in job.logs(ranks=rank)] == list(range(200))


# -- disks -----------------------------------------------------------------------------------------------------------


def fill(disk, free_mib):
    """Leave so much on a small disk."""
    ballast = disk / "ballast"
    there = os.statvfs(disk)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, there.f_bavail * there.f_frsize - (free_mib << 20))
    return ballast


def keep_state_on(scene, disk):
    (disk / "state").mkdir()
    scene.patch.setenv("XDG_STATE_HOME", str(disk / "state"))


def log_fills_the_disk(scene):
    disk = scene.small_disk(80)
    keep_state_on(scene, disk)
    ballast = fill(disk, 4)
    job = scene.launch(counts_wide, 300_000, number_of_processes=1, stall_timeout_s=2.0)
    scene.until(lambda: "cannot be written" in job.status.reason, job)
    time.sleep(2.5)
    assert not job.done()
    ballast.unlink()
    scene.succeeds(job, 300_000)
    assert [int(line.text[:6]) for line in job.logs(ranks=0)] == list(range(300_000))
    scene.check()


def snapshot_finds_no_room(scene):
    disk = scene.small_disk(8)
    keep_state_on(scene, disk)
    with pytest.raises(StoreError, match="the disk is full"):
        kd.launch(len, os.urandom(16 << 20), name="too-large")
    assert kd.jobs() == []
    job = scene.launch(len, b"abc", name="too-large")
    scene.succeeds(job, 3, 3)
    scene.check()


def result_finds_no_room(scene):
    disk = scene.small_disk(24)
    keep_state_on(scene, disk)
    ballast = fill(disk, 8)
    job = scene.launch(large, 16 << 20, number_of_processes=1)
    assert str(disk) in scene.fails(job, "error", "the disk is full")
    ballast.unlink()
    scene.check()


def filling(model, loader, criterion, optimizer, device, args):
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        file = kd.context().files.checkpoint
        if number == 5 and kd.context().rank == 0:
            while not file.exists():
                time.sleep(0.01)
            # What a full disk does, without privileges.
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size // 2, resource.RLIM_INFINITY))
    return {"loss": 0.0}


def checkpoint_finds_no_room(scene):
    model = nn.Linear(512, 512)
    loader = DataLoader(TensorDataset(torch.randn(96, 512), torch.randint(512, (96,))), 4)
    job = scene.follow(kd.distribute(
        model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), filling,
        number_of_processes=2, threads=1, checkpoint_every="4 steps", max_restarts=3,
    ))  # fmt: skip
    files = records.files(job.name)
    said = str(job.exception(scene.bound_s))
    assert str(files.checkpoint) in said
    assert "could not be written; its disk has" in said
    events = events_in(files.events.read_bytes())
    assert [one["step"] for one in events if one["event"] == "checkpoint"] == [4]
    assert checkpoint.read(files.checkpoint).resume.steps == 4
    assert job.state_dict(partial=True).keys() == model.state_dict().keys()
    assert [one.name for one in files.folder.iterdir() if "checkpoint" in one.name] == ["checkpoint"]
    # The disk would be as full for the next attempt.
    assert job.status.attempt == 0


def shared_memory_is_full(scene):
    script = """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        model = torch.nn.Linear(1 << 19, 1)
        loader = DataLoader(TensorDataset(torch.ones(8, 1 << 19), torch.ones(8, 1)), 4, num_workers=1)
        job = kd.distribute(
            model, loader, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), number_of_processes=2
        )
        print(job.wait(60).reason)
        job.delete()
    """
    small = 'mount -t tmpfs -o size=2m tmpfs /dev/shm || exit 77; exec "$@"'
    process = scene.notebook(script, "unshare", "--mount", "sh", "-c", small, "sh")
    out, errors = process.communicate(timeout=scene.bound_s)
    if process.returncode in (1, 77) and "permitted" in errors:
        pytest.skip("only root can have a /dev/shm of its own")
    assert process.returncode == 0, errors
    assert "shared memory" in out, out


def registry_finds_no_room(scene):
    scene.patch.syspath_prepend(str(pathlib.Path(__file__).parents[1] / "images"))
    from registries import PROGRAM, registry_program

    if PROGRAM is None:
        pytest.skip("the program docker-registry is not installed")
    disk = scene.small_disk(12)
    with registry_program(disk / "registry") as host, Registry(host) as registry:
        with pytest.raises(ImageError, match=host) as refused:
            registry.upload("team/large", os.urandom(16 << 20))
        assert "no space" in str(refused.value) or "500" in str(refused.value), refused.value
        shutil.rmtree(disk / "registry" / "data")
        assert registry.upload("team/small", b"layer")[1] == 5


# -- notebooks -------------------------------------------------------------------------------------------------------


def leaves_its_pid(folder):
    """A rank that is found again, whatever becomes of its job."""
    pathlib.Path(folder, str(os.getpid())).touch()
    waits()


def notebook_is_killed(scene):
    script = """
        job = kd.launch(waits, number_of_processes=2, name="of-the-killed")
        while sum(line.text == "ready" for line in job.logs()) < 2: time.sleep(0.05)
        print(*[one.pid for one in job.status.replicas], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    said = scene.said_by(scene.notebook(script), -signal.SIGKILL)
    job = scene.follow(kd.attach("of-the-killed"))
    status = scene.end_of(job)
    assert (status.state.value, status.cause.value) == ("cancelled", "kernel-ended")
    assert [line.text for line in job.logs() if line.rank is not None] == ["ready"] * 2
    scene.until(lambda: not any(pathlib.Path("/proc", pid).exists() for pid in said.split()))


def two_notebooks(scene):
    job = scene.launch(waits, ready=2, name="of-two")
    script = """
        job = kd.attach("of-two")
        print(*[line.text for line in job.logs()], flush=True)
        job.cancel()
        print(job.wait(60).cause.value)
    """
    others = [scene.notebook(script) for _ in range(2)]
    for other in others:
        said = scene.said_by(other).split()
        assert (said[:2], said[-1]) == (["ready", "ready"], "user")
    assert scene.end_of(job).cause.value == "user"


POINTS = (
    "before kale_dist.calls.starting:capture",
    "after kale_dist.calls.starting:capture",
    "before kale_dist.job.records:create",
    "before kale_dist.job.records:write",
    "after kale_dist.job.records:write",
    "before kale_dist.places.agent_client:AgentClient.take",
    "after kale_dist.places.agent_client:AgentClient.take",
    "before kale_dist.calls.starting:handle",
    "after kale_dist.calls.starting:handle",
    "before kale_dist.job.tracking:begin",
)
"""Where a submission on this machine can be stopped: functions that it goes through, in their order."""


@contextlib.contextmanager
def breaking_at(point, act):
    """While it is open, something happens before or after a function is called, once."""
    when, _, path = point.partition(" ")
    module, _, path = path.partition(":")
    owner = importlib.import_module(module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    real, left = getattr(owner, name), [act]

    def broken(*arguments, **options):
        if when == "before" and left:
            left.pop()()
        given = real(*arguments, **options)
        if left:
            left.pop()()
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, broken)
        yield


def interrupted_at_each_step(scene):
    # After a moment the agent has what it was sent.
    for point, after_s in itertools.product(POINTS, (0, 0.05)):

        def interrupt(after_s=after_s):
            time.sleep(after_s)
            raise KeyboardInterrupt

        with breaking_at(point, interrupt), pytest.raises(KeyboardInterrupt):
            kd.launch(leaves_its_pid, scene.folder, number_of_processes=2, name="stopped")
        check_that_nothing_is_left(scene, point)


def check_that_nothing_is_left(scene, point):
    """The job is not there, or can be cancelled and deleted; its name is free, and no rank of it runs."""
    with contextlib.suppress(JobNotFoundError):
        job = kd.attach("stopped")
        job.cancel()
        job.wait(scene.bound_s)
        job.delete()
    # The agent takes orders in their turn: ranks of the job before would have begun by now.
    again = kd.launch(counts, 1, number_of_processes=2, name="stopped")
    assert again.results(scene.bound_s) == [1, 1], point
    again.delete()
    left = [path for path in scene.folder.glob("[0-9]*") if pathlib.Path("/proc", path.name).exists()]
    assert not left, point


def killed_at_each_step(scene):
    script = """
        from on_this_machine import breaking_at, leaves_its_pid
        with breaking_at({point!r}, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            kd.launch(leaves_its_pid, folder, number_of_processes=2, name="stopped")
    """
    for point in POINTS:
        scene.said_by(scene.notebook(script.format(point=point)), -signal.SIGKILL)
        check_that_nothing_is_left(scene, point)


# -- the clock -------------------------------------------------------------------------------------------------------

# libfaketime breaks time.sleep() of Python 3.11: it shifts the monotonic clock as well, or has sleeps refused.
CLOCK = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *at) {
  int failed = syscall(SYS_clock_gettime, clock, at);
  if (clock == CLOCK_REALTIME) at->tv_sec -= 3600;
  return failed;
}
"""


def an_hour_behind(scene):
    """The variable that sets the clock of a process back an hour."""
    if not shutil.which("cc"):
        pytest.skip("a shifted clock needs a C compiler")
    library = scene.folder / "clock.so"
    (scene.folder / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, scene.folder / "clock.c"], check=True)
    return {"LD_PRELOAD": str(library)}


def clock_is_an_hour_behind(scene):
    job = scene.launch(counts, 30, 0.1, timeout_s=60, name="of-now")
    script = """
        now = kd.attach("of-now")
        print(now.results(60), len(list(now.logs())))
        mine = kd.launch(counts, 3, number_of_processes=2, timeout_s=60)
        print(mine.results(60), 3000 < now.status.created - mine.status.created < 4000)
        mine.delete()
    """
    said = scene.said_by(scene.notebook(script, **an_hour_behind(scene)))
    assert said == "[30, 30] 60\n[3, 3] True\n"
    scene.succeeds(job, 30, 30)
