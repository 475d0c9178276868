"""Who lives, who belongs to whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kale_dist.snapshot import loading
from kale_dist.worker.agent import processes


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_process_is_named_by_pid_and_start(sleeper):
    start = processes.start_time(sleeper.pid)
    assert start > 0
    assert processes.is_running(sleeper.pid, start)
    assert not processes.is_running(sleeper.pid, start + 1)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not processes.is_running(sleeper.pid, start)
    sleeper.wait()
    assert processes.start_time(sleeper.pid) == 0
    assert processes.cpu_ticks(sleeper.pid) == 0


def test_members_of_a_group_and_children():
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); sys.stdin.read()"
    leader = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    member = int(leader.stdout.readline())
    assert processes.live_members(leader.pid) == [member]
    assert processes.children(leader.pid) == [member]
    processes.signal_group(leader.pid, signal.SIGKILL)
    leader.wait()
    leader.stdin.close()
    leader.stdout.close()
    processes.signal_group(leader.pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (40, "SIG40")])
def test_signals_have_names(number, name):
    assert processes.signal_name(number) == name


def test_a_child_dies_with_its_parent():
    script = (
        "import os, sys, time\n"
        "from kale_dist.worker.agent import processes\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    processes.die_with_parent(parent)\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    start = processes.start_time(child)
    watch = os.pidfd_open(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    import select

    assert select.select([watch], [], [], 5)[0]
    os.close(watch)
    assert not processes.is_running(child, start)


def test_torch_is_found_without_being_imported():
    script = "import sys; from kale_dist.snapshot import loading; print(*loading.installed_torch()); assert 'torch' not in sys.modules"
    version, file, written = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    here, place = loading.installed_torch()
    assert (version, file) == (here, place.split()[0])
    assert int(written) > 0
