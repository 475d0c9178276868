"""What of the notebook's process a rank takes over."""

import os
import pathlib
import resource
import subprocess
import sys
import textwrap

import pytest
import torch

from kale_dist.worker.rank import process_state
from kale_dist.worker.rank.process_state import capture as capture_process


def test_environment_folder_path_and_limits_are_as_here(tmp_path, monkeypatch):
    monkeypatch.setenv("KALE_TEST", "a=b\nc")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "relative", "/absolute", *sys.path])
    monkeypatch.setattr(sys, "argv", ["script.py", "--flag"])
    old = os.umask(0o027)
    try:
        state = capture_process(cuda=False)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(old)
    assert dict(state.environment) == dict(os.environ)
    assert state.cwd == str(tmp_path)
    assert state.sys_path[:3] == (str(tmp_path), str(tmp_path / "relative"), "/absolute")
    assert state.argv == ("script.py", "--flag")
    assert state.umask == 0o027
    assert (resource.RLIMIT_NOFILE, *resource.getrlimit(resource.RLIMIT_NOFILE)) in state.limits


def test_the_arguments_of_the_kernel_are_not_those_of_the_users_parser(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/lib/ipykernel_launcher.py", "-f", "kernel-1.json"])
    assert capture_process(cuda=False).argv == ("/lib/ipykernel_launcher.py",)


def test_a_deleted_folder_gives_one_that_is_there(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert capture_process(cuda=False).cwd == str(pathlib.Path.home())
    os.chdir(tmp_path)


@pytest.fixture
def flags():
    before = process_state.read_flags(cuda=True)
    yield
    process_state.apply_flags(before)
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.usefixtures("flags")
def test_torchs_settings_go_over_and_cuda_is_not_initialised():
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    taken = process_state.read_flags(cuda=True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    process_state.apply_flags([*taken, ("backends.unknown.flag", True), ("nothing", 1)])
    assert torch.get_default_dtype() is torch.float64
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.benchmark
    assert process_state.read_flags(cuda=True) == taken
    assert len(process_state.read_flags(cuda=False)) < len(taken)
    assert not torch.cuda.is_initialized()


def test_without_torch_there_are_no_flags_and_torch_is_not_imported():
    script = "import sys\nfrom kale_dist.worker.rank.process_state import capture\nassert capture(cuda=True).torch_flags == ()\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_ranks_log_is_as_loud_as_in_the_notebook():
    script = """
        import logging, sys
        from kale_dist.runtime import process_state
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        flags = process_state.capture(cuda=True).torch_flags
        assert flags == (("logging_level", logging.INFO),), flags
        logging.getLogger().handlers.clear()
        logging.getLogger().setLevel(logging.WARNING)
        process_state.apply_flags(flags)
        logging.getLogger("steps").info("Loss = 0.5")
        assert "torch" not in sys.modules
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, capture_output=True, text=True)
    assert ended.stderr == "INFO:steps:Loss = 0.5\n"
