"""Group A: versions, the fork server beside a driver, the probe, and how long a job takes to start."""

import pathlib
import platform
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from gpu_jobs import CUDA, launch

import kale_dist as kd
from kale_dist.places import local
from kale_dist.places import machine_gpus as gpus_here
from kale_dist.worker.agent import processes


def forkserver():
    """Process id of the fork server of this process's agent."""
    agent = str(local.shared()._client.pid)
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit() and (folder / "status").exists():
            status = (folder / "status").read_text()
            is_server = b"forkserver" in (folder / "cmdline").read_bytes()
            if f"\nPPid:\t{agent}\n" in status and is_server:
                return int(folder.name)
    raise AssertionError("no fork server")


@pytest.mark.real("nvidia-smi")
def test_a1_versions(figures):
    found = {"torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda}
    if CUDA:
        found |= {
            "gpu": torch.cuda.get_device_name(0), "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "archs": torch.cuda.get_arch_list(),
        }  # fmt: skip
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        found["driver"] = asked.stdout.strip()
    found["missing"] = [name for name in ("all_gather_single", "reduce_scatter_single") if not hasattr(dist, name)]
    figures(**found)


def fork_state():
    return {"bad_fork": torch.cuda._is_in_bad_fork(), "device": kd.context().device, "count": torch.cuda.device_count()}


def uuid():
    asked = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True)  # fmt: skip
    return asked.stdout.split()[0]


@pytest.mark.parametrize(
    "visible", ["as it is", pytest.param("by uuid", marks=[pytest.mark.gpu, pytest.mark.real("nvidia-smi")])]
)
def test_a2_the_fork_server_has_one_thread_and_nothing_of_cuda(visible, monkeypatch):
    if visible == "by uuid":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid())
    (state,) = launch(fork_state)
    assert not state["bad_fork"]
    assert not CUDA or (state["device"], state["count"] >= 1) == ("cuda:0", True)
    server = forkserver()
    assert processes.thread_count(server) == 1
    open_files = [str(file.readlink()) for file in pathlib.Path(f"/proc/{server}/fd").iterdir()]
    assert not [name for name in open_files if "nvidia" in name]
    assert "libcuda.so" not in pathlib.Path(f"/proc/{server}/maps").read_text()


@pytest.mark.gpu
def test_a3_the_probe_finds_the_gpu_and_names_what_is_wrong(monkeypatch, figures):
    began = time.monotonic()
    count, why = gpus_here.usable()
    figures(first_s=time.monotonic() - began)
    assert (count, why) == (torch.cuda.device_count(), "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "77")
    count, why = gpus_here.usable()
    assert count == 0
    assert why
    figures(why_without=why)


def started():
    """In a rank: when it began, the memory of a context on the GPU, and the rank's own memory."""
    now = time.time()
    used = 0
    if CUDA:
        before = torch.cuda.mem_get_info()[0]
        torch.ones(8, 8, device=kd.context().device).sum().item()
        used = before - torch.cuda.mem_get_info()[0]
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    return now, used >> 20, sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) >> 10


@pytest.mark.real("memory of a context")
def test_a4_cold_and_warm_start(figures):
    local.shared().close()
    agents = set()
    for name in ("cold", "warm", "warmer"):
        began = time.time()
        ((now, context_mib, pss_mib),) = launch(started)
        figures(**{f"{name}_s": now - began, f"{name}_context_mib": context_mib, f"{name}_rank_pss_mib": pss_mib})
        # Less than what a pod gets unless it asks for something else.
        assert pss_mib + context_mib < 16 << 10
        assert context_mib > 0 or not CUDA
        agents.add(local.shared()._client.pid)
        time.sleep(1.0)  # spare ranks are forked after a start
    assert len(agents) == 1, "a warm start uses the agent of the cold one"


NOTEBOOK = """
import torch, kale_dist as kd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(4, 2).cuda()
before = model(torch.randn(3, 4, device="cuda")).sum().item()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.long)), 8)
weights = [p.detach().clone() for p in model.parameters()]
job = kd.distribute(model, loader, nn.CrossEntropyLoss(), optimizer, epochs=2, number_of_processes=1, cuda=True)
job.wait()
assert all(p.is_cuda for p in model.parameters())
assert any((p != q).any() for p, q in zip(model.parameters(), weights))
assert optimizer.state[next(model.parameters())]["exp_avg"].is_cuda
"""


@pytest.mark.gpu
def test_a5_a_kernel_that_has_used_cuda():
    """Weights and the optimizer's state come back to the GPU, in a real kernel where there is nbclient."""
    try:
        import nbclient
        import nbformat
    except ImportError:
        subprocess.run([sys.executable, "-c", NOTEBOOK], check=True, timeout=50)
        return
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)])
    nbclient.NotebookClient(book, timeout=50).execute()
