"""What ranks use: memory read of real processes, GPUs as the driver tells of them, the status and its pictures."""

import os
import signal
import subprocess
import sys
import time

import pytest

import kale_dist as kd
from kale_dist.job import view
from kale_dist.job.status import JobStatus, ReplicaStatus, Usage, reduce_events
from kale_dist.job.view import facts
from kale_dist.wire import RankStateName, StateName
from kale_dist.worker.agent import processes
from kale_dist.worker.agent import usage as uses
from kale_dist.worker.agent.usage import Driver, Gpu

MIB = 1 << 20
GIB = 1 << 30

# -- memory ----------------------------------------------------------------------------------------------------------

_FAMILY = """
import ctypes, os, sys, time
held = bytearray(b"x") * (100 << 20)
children = []
for extra in (0, 30):
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(15, b") R 1 (\\n", 0, 0, 0)
        own = bytearray(b"x") * (extra << 20)
        os.write(1, b".")
        time.sleep(60)
    children.append(pid)
os.write(1, b"." + (" %d %d " % tuple(children)).encode() + b"\\n")
time.sleep(60)
"""


@pytest.fixture
def family():
    leader = subprocess.Popen([sys.executable, "-c", _FAMILY], stdout=subprocess.PIPE, start_new_session=True)
    told = b""
    while told.count(b".") < 3 or b"\n" not in told:
        told += os.read(leader.stdout.fileno(), 100)
    yield leader.pid, [int(word) for word in told.replace(b".", b"").split()]
    os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    leader.stdout.close()


def test_what_helpers_share_with_their_leader_counts_once(family):
    leader, helpers = family
    found = processes.groups([leader])
    assert found[leader][0] == leader
    assert sorted(found[leader][1:]) == sorted(helpers)
    assert 100 * MIB < uses.used_bytes(leader, ()) < 130 * MIB
    assert 130 * MIB < uses.used_bytes(leader, helpers) < 160 * MIB


def test_a_process_that_is_gone_uses_nothing():
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert processes.groups([gone.pid]) == {gone.pid: [gone.pid]}
    assert uses.used_bytes(gone.pid, [gone.pid]) == 0


@pytest.mark.parametrize(
    ("file", "text", "limit"),
    [
        ("memory.max", "2147483648\n", 2 * GIB),
        ("memory.max", "max\n", None),
        ("memory.max", "", None),
        ("memory/memory.limit_in_bytes", "1048576\n", MIB),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("something.else", "1", None),
    ],
)
def test_limits_of_containers(tmp_path, file, text, limit):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert uses.limit_bytes(tmp_path) == limit


# -- GPUs ------------------------------------------------------------------------------------------------------------


class Library:
    """Stands for libnvidia-ml: fills what its callers hand it, as the real one does. Some functions may be missing."""

    def __init__(self, *gpus, missing=(), code=0):
        self.gpus = gpus
        self.missing = missing
        self.code = code

    def __getattr__(self, name):
        if name in self.missing:
            raise AttributeError(name)
        return getattr(self, "_" + name.partition("_v")[0])

    def _nvmlInit(self):
        return self.code

    def _nvmlDeviceGetCount(self, count):
        count._obj.value = len(self.gpus)
        return self.code

    def _nvmlDeviceGetHandleByIndex(self, index, device):
        device._obj.value = index.value + 1
        return self.gpus[index.value].get("lost", 0)

    def _nvmlDeviceGetUtilizationRates(self, device, rates):
        percent = self.gpus[device.value - 1]["percent"]
        rates._obj.gpu = percent or 0
        return 3 if percent is None else 0

    def _nvmlDeviceGetMemoryInfo(self, device, info):
        info._obj.total, info._obj.used = 80 * GIB, self.gpus[device.value - 1]["used"]
        return 0


def test_gpus_are_read():
    busy, part = {"percent": 97, "used": 61 * GIB}, {"percent": None, "used": 0}
    assert Driver(Library(busy, part)).read() == (
        Gpu(percent=97, used_bytes=61 * GIB, total_bytes=80 * GIB),
        Gpu(percent=None, used_bytes=0, total_bytes=80 * GIB),
    )


def test_a_gpu_that_has_failed_keeps_its_place():
    gpus = Driver(Library({"lost": 15}, {"percent": 1, "used": 5})).read()
    assert [(gpu.percent, gpu.used_bytes) for gpu in gpus] == [(None, None), (1, 5)]


def test_a_library_without_its_driver_or_its_functions():
    assert Driver(Library(code=9)).read() == ()
    (gpu,) = Driver(Library({"percent": 1, "used": 5}, missing=["nvmlDeviceGetUtilizationRates"])).read()
    assert (gpu.percent, gpu.used_bytes) == (None, 5)


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"),
    [
        (None, 0, 0),
        (None, 1, 1),
        (None, 2, None),
        ("1", 0, 1),
        ("1,0", 1, 0),
        ("", 0, None),
        ("-1", 0, None),
        ("1,7,0", 1, None),
        ("MIG-x", 0, None),
        ("²", 0, None),
    ],
)
def test_which_gpu_a_rank_was_given(visible, local_rank, index):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert uses.assigned_gpu(2, environment, local_rank) == index
    assert uses.assigned_gpu(0, environment, local_rank) is None


# -- the status and its pictures -------------------------------------------------------------------------------------


def reduced(*events):
    start = JobStatus(ref="local://j", replicas=tuple(ReplicaStatus(rank=rank) for rank in range(2)))
    return reduce_events(start, events)


def test_the_last_usage_of_a_rank_counts_until_it_starts_again():
    first = {"event": "usage", "rank": 1, "attempt": 0, "time": 5.0, "memory_bytes": 100, "node": "n1"}
    status = reduced(first, {**first, "memory_bytes": 200, "gpu_percent": 7})
    assert status.replicas[1].usage == Usage(memory_bytes=200, gpu_percent=7, node="n1", time=5.0)
    assert status.replicas[0].usage is None
    again = reduce_events(status, [{"event": "state", "state": "starting", "attempt": 1}, first])
    assert again.replicas[1].usage is None


@pytest.mark.parametrize(
    "damage",
    [
        {"memory_bytes": "x"},
        {"memory_bytes": []},
        {"rank": 9},
        {"rank": "x"},
        {"rank": -1},
        {"time": "x"},
        {"rank": None},
    ],
)
def test_damaged_usage_changes_nothing(damage):
    event = {"event": "usage", "rank": 0, "attempt": 0, "memory_bytes": 1}
    assert reduced({**event, **damage}) == reduced()


@pytest.mark.parametrize(
    ("amounts", "text"),
    [
        ((0,), "0 MiB"),
        ((300 * MIB,), "300 MiB"),
        ((300 * MIB, 512 * MIB), "300 of 512 MiB"),
        ((GIB * 3 // 2, None), "1.5 GiB"),
        ((300 * MIB, 4 * GIB), "0.3 of 4.0 GiB"),
        ((61 * GIB, 141 * GIB), "61 of 141 GiB"),
        ((1500 * GIB,), "1.5 TiB"),
    ],
)
def test_amounts_of_memory_have_a_unit(amounts, text):
    assert facts.size(*amounts) == text


def picture(usage, state=RankStateName.RUNNING, **where):
    replicas = (ReplicaStatus(rank=0, state=state, usage=usage, **where), ReplicaStatus(rank=1, state=state))
    status = JobStatus(ref="kubernetes://ns/j", state=StateName.RUNNING, replicas=replicas)
    return view.text(status), view.html(status)


USED = Usage(
    memory_bytes=GIB * 3 // 2, memory_limit_bytes=4 * GIB, gpu_percent=97, gpu_memory_bytes=61 * GIB,
    gpu_memory_limit_bytes=80 * GIB, node="agent's",
)  # fmt: skip


@pytest.mark.parametrize("state", [RankStateName.RUNNING, RankStateName.FAILED, RankStateName.SUCCEEDED])
def test_rows_show_memory_gpu_and_node(state):
    text, html = picture(USED, state, pod="p", node="node-7")
    for shown in (text, html):
        for words in ("memory", "GPU", "node-7", "1.5 of 4.0 GiB", "97 %, 61.0 of 80.0 GiB"):
            assert words in shown


@pytest.mark.parametrize(
    ("usage", "absent"), [(None, ("memory", "GPU", "node")), (Usage(memory_bytes=1), ("GPU", "node"))]
)
def test_columns_in_which_nothing_is_known_are_left_out(usage, absent):
    for shown in picture(usage):
        assert not [title for title in absent if title in shown]


@pytest.mark.parametrize("node", ["<b>x</b>", "\x1b[31mred", "a\nb", "\u202e"])
def test_a_node_is_only_text(node):
    text, html = picture(USED, pod="p", node=node)
    assert "<b>" not in html
    assert not {"\x1b", "\u202e"} & set(text + html)
    assert len(text.splitlines()) == len(picture(USED, pod="p", node="n")[0].splitlines())


# -- the local backend -----------------------------------------------------------------------------------------------


def hold(mib):
    held = b"x" * ((mib if kd.context().rank else 0) << 20)
    print("ready", flush=True)
    time.sleep(600)
    return len(held)


def test_a_rank_that_holds_200_mb_shows_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    job = kd.launch(hold, 200, number_of_processes=2)
    deadline = time.monotonic() + 60

    def used():
        return [replica.usage.memory_bytes if replica.usage else 0 for replica in job.status.replicas]

    while not (all(used()) and used()[1] - used()[0] > 150 * MIB):
        assert time.monotonic() < deadline, job.status.replicas
        time.sleep(0.1)
    assert job.status.replicas[0].usage.node == os.uname().nodename
    assert [line for line in view.text(job.status).splitlines() if "memory" in line]
    (events,) = tmp_path.glob("**/events")
    assert b'"usage"' not in events.read_bytes()
    job.delete()
