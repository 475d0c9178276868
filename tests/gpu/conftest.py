"""A suite of its own: `make gpu` runs it where there is a GPU, and other runs of pytest collect nothing here."""

import gc
import json
import os
import pathlib
import shutil
import tempfile

import pytest

SUITE = os.environ.get("KALE_DIST_GPU_SUITE", "")
if not SUITE:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: cannot run on a CPU, not even dry")
    config.addinivalue_line("markers", "real(why): cannot run on a simulated GPU (tests/simcuda), either")
    if SUITE:
        folder = pathlib.Path(tempfile.mkdtemp(prefix="kd-", dir="/tmp"))
        for name in ("state", "run"):
            (folder / name).mkdir(mode=0o700)
        os.environ |= {"XDG_STATE_HOME": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder / "run")}
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_runtest_setup(item):
    if SUITE == "cpu" and item.get_closest_marker("gpu"):
        pytest.skip("needs a GPU")
    real = item.get_closest_marker("real")
    if real and os.environ.get("SIMCUDA_DEVICES"):
        pytest.skip(f"needs a real GPU: {real.args[0]}")


@pytest.fixture(scope="session", autouse=True)
def no_agent_is_left():
    yield
    from kale_dist.places import local

    local.shared().close()


@pytest.fixture(autouse=True)
def the_gpu_is_free():
    """Each test gives back what it has taken of the GPU."""
    yield
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def figures(request):
    """A function that keeps numbers for `gpu.json`, under the test's name."""

    def keep(**numbers):
        line = {f"{request.node.name}.{name}": value for name, value in numbers.items()}
        path = os.environ.get("KALE_DIST_GPU_FIGURES")
        if path:
            with pathlib.Path(path).open("a") as file:
                file.write(json.dumps(line) + "\n")

    return keep


@pytest.fixture
def two_ranks(monkeypatch):
    """Calls in this test get two processes with one GPU together."""
    from kale_dist.calls import request

    if SUITE == "cuda":
        monkeypatch.setenv("KALE_DIST_SHARED_GPU", "hosts")
        monkeypatch.setattr(request, "_this_machine", lambda _: request.Machine(cores=16, gpus=2))
