"""What can be known of GPUs without one: devices in a snapshot, switches that ranks take over, which GPU is whose."""

import ast
import inspect
import json
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

import kale_dist
from kale_dist import strategies
from kale_dist.calls import request, training_checks
from kale_dist.calls.options import Options
from kale_dist.calls.request import Function
from kale_dist.cli import doctor_command
from kale_dist.errors import ContractError, JobFailedError
from kale_dist.places import local
from kale_dist.places import machine_gpus as gpus_here
from kale_dist.snapshot import loading
from kale_dist.snapshot.capture import capture
from kale_dist.wire import blobs, context
from kale_dist.wire.messages import Done
from kale_dist.worker.agent import ending, hardware_faults
from kale_dist.worker.agent.near_rank import End
from kale_dist.worker.agent.usage import Gpu
from kale_dist.worker.rank import process_group as group
from kale_dist.worker.rank import process_state, stand_ins
from kale_dist.worker.rank import rank_gpus as gpus
from kale_dist.worker.training.contents import Given
from kale_dist.worker.training.loop import Session
from kale_dist.worker.training.rank_group import Group
from kale_dist.worker.training.settings import Training
from kale_dist.worker.training.trained import Trained

PACKAGE = pathlib.Path(kale_dist.__file__).parent
GPUS_PAGE = PACKAGE.parent / "docs" / "gpus.md"


def run(script, **environment):
    """What a script prints; it has a process of its own, because torch's switches cannot all be set back."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=False, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


# -- the notebook's default device and switches ------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_default_device_does_not_crash_the_snapshot_of_a_tensor_on_a_gpu():
    run("""
        import torch
        from kale_dist.snapshot.pickling import DeviceMemory
        torch.set_default_device("meta")
        storage = torch.arange(6, dtype=torch.uint8, device="cpu").untyped_storage()
        assert b"".join(map(bytes, DeviceMemory(storage))) == bytes(range(6))
    """)


_FACTORIES = {
    f"torch.{name}"
    for name in (
        "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint",
        "randn", "randperm", "scalar_tensor", "tensor", "zeros",
    )
}  # fmt: skip


def test_every_tensor_that_the_library_makes_says_on_which_device():
    silent = [
        f"{path.name}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in _FACTORIES
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]
    assert not silent


@pytest.mark.nightly
def test_a_training_in_a_notebook_with_a_default_device_is_as_any_other(tmp_path):
    """The ranks of a job on the CPU make their tensors there."""
    printed = run(
        """
        import torch, kale_dist as kd
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        def train_step(model, data_loader, criterion, optimizer, device, args):
            assert torch.ones(()).device.type == "cpu"
            for inputs, targets in data_loader:
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()
            return {"loss": 0.5}
        model = nn.Linear(3, 2)
        data = DataLoader(TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)), 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Without a driver CUDA's own name is as far as a notebook gets.
        torch.set_default_device("cuda")
        job = kd.distribute(model, data, nn.CrossEntropyLoss(), optimizer, train_step, number_of_processes=2, cuda=False)
        print(job.result().metrics["loss"])
        """,
        XDG_STATE_HOME=str(tmp_path),
    )
    assert "0.5" in printed


@pytest.mark.parametrize(
    "switch",
    [
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        *(
            pytest.param(switch, marks=pytest.mark.nightly)
            for switch in (
                "torch.set_float32_matmul_precision('high')",
                "torch.backends.fp32_precision = 'tf32'",
                "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
                "torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
                "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
                "torch.backends.cuda.matmul.allow_tf32 = True",
                "torch.backends.cudnn.allow_tf32 = False",
            )
        ),
    ],
)
def test_each_switch_of_precision_is_taken_over(switch):
    taken = run(f"""
        import json, torch
        from kale_dist.worker.rank import process_state
        {switch}
        print(json.dumps(process_state.read_flags(cuda=True)))
    """)
    run(f"""
        import json, torch
        from kale_dist.worker.rank import process_state
        before = process_state.read_flags(cuda=True)
        wanted = [tuple(flag) for flag in json.loads({taken!r})]
        assert dict(wanted) != dict(before)
        process_state.apply_flags(wanted)
        assert dict(process_state.read_flags(cuda=True)) == dict(wanted)
        # Torch refuses to compute once old and new switches differ.
        torch.ones(2, 2) @ torch.ones(2, 2)
    """)


@pytest.mark.nightly
def test_an_accelerator_as_default_device_becomes_the_ranks_own():
    flags = run("""
        import json, torch
        from kale_dist.worker.rank import process_state
        assert "default_device" not in dict(process_state.read_flags(cuda=True))
        torch.set_default_device("cuda:3")
        print(json.dumps(process_state.read_flags(cuda=False)))
        assert not torch.cuda.is_initialized()
    """)
    flags = [tuple(flag) for flag in json.loads(flags)]
    assert ("default_device", "cuda:3") in flags
    run(f"""
        import torch
        from kale_dist.worker.rank import process_state
        process_state.apply_flags({flags!r})
        process_state.set_default_device({flags!r}, "cuda:1")
        assert torch._GLOBAL_DEVICE_CONTEXT.device_context.device == torch.device("cuda:1")
        process_state.set_default_device([], "cuda:1")
    """)


# -- devices in a snapshot ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own_devices", "expected"), [(True, "cuda:1"), (False, "cuda:3")])
def test_a_gpu_that_a_training_names_is_the_ranks_own_and_one_of_a_function_stays(own_devices, expected):
    store = blobs.MemoryStore()
    devices = torch.device("cuda:3"), torch.device("cpu"), torch.device("meta")
    taken = capture(print, devices, {}, store=store, label="x", own_devices=own_devices)
    loaded = loading.load(store, taken.digest, fill_main=False, device="cuda:1").args
    assert list(map(str, loaded)) == [expected, "cpu", "meta"]


def test_in_a_training_without_gpus_a_captured_one_is_the_cpu():
    store = blobs.MemoryStore()
    taken = capture(print, (torch.device("cuda"),), {}, store=store, label="x", own_devices=True)
    assert loading.load(store, taken.digest, fill_main=False).args == (torch.device("cpu"),)


# -- which GPU is whose ------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """A torch that sees so many GPUs."""

    def see(count, why=""):
        chosen = []
        monkeypatch.setattr(gpus, "why_not", lambda: why)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return see


@pytest.mark.parametrize(("rank", "each", "own"), [(0, 1, "cuda:0"), (3, 1, "cuda:3"), (1, 2, "cuda:2")])
def test_each_rank_has_the_first_of_its_gpus(cuda, rank, each, own):
    chosen = cuda(4)
    assert gpus.claim(rank, 4 // each, each) == own
    assert chosen == [own]


def test_two_ranks_never_share_a_gpu_unsaid(cuda):
    chosen = cuda(1)
    with pytest.raises(ContractError, match=r"2 processes need 2 GPUs here, and torch sees 1\b.*MIG"):
        gpus.claim(0, 2, 1)
    assert not chosen


def test_without_a_gpu_a_rank_says_why(cuda):
    cuda(0, "the driver is too old")
    with pytest.raises(ContractError, match="the driver is too old"):
        gpus.claim(0, 1, 1)


@pytest.fixture
def devices(monkeypatch, tmp_path):
    """A machine with a device file, whose GPUs answer the probe as they are told to."""
    file = tmp_path / "nvidiactl"
    file.touch()
    monkeypatch.setattr(gpus_here, "_DEVICES", (str(file),))
    return lambda answer: monkeypatch.setattr(gpus_here, "usable", lambda: answer)


def checked(**given):
    return request.checked(Function(fn=print, label="print"), Options(**given))


def test_gpus_that_do_not_work_are_not_chosen_and_the_reason_is_said(devices, refusal):
    devices((0, "GPU 0 (Tesla V100): no kernel image is available"))
    call = checked(number_of_processes=1)
    assert not call.request.cuda
    assert "no kernel image" in call.warnings[0]
    assert not checked(number_of_processes=1, cuda=False).warnings
    assert refusal(lambda: checked(number_of_processes=1, cuda=True)).argument == "cuda"


def test_the_doctor_warns_of_gpus_that_a_call_does_not_use(devices):
    devices((0, "GPU 0 (Tesla V100): no kernel image is available"))
    warned = next(check for check in doctor_command.examine() if check.name == "GPUs")
    assert warned.verdict is doctor_command.Grade.WARNING
    assert "no kernel image" in warned.sentence


def test_gpus_that_work_are_chosen(devices):
    devices((2, ""))
    assert checked().request.topology.number_of_processes == 2


def test_the_probe_answers_here(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    count, why = gpus_here.usable()
    assert bool(count) != bool(why)


def test_a_probe_that_fails_names_the_gpu(cuda, monkeypatch):
    cuda(1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    monkeypatch.setattr(torch, "ones", lambda *_, **__: raised(RuntimeError("CUDA error: no kernel image\nmore")))
    assert gpus.probe() == (0, "GPU 0 (Tesla V100): CUDA error: no kernel image")


def raised(error):
    raise error


def test_memory_that_others_hold_is_said_of_the_gpu_it_is_on(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    driver = types.SimpleNamespace(
        read=lambda: (
            Gpu(percent=0, used_bytes=60 << 30, total_bytes=80 << 30),
            Gpu(percent=0, used_bytes=1 << 30, total_bytes=80 << 30),
        )
    )
    monkeypatch.setattr(gpus_here, "Driver", lambda: driver)
    assert gpus_here.memory_notes(1) == ()
    (note,) = gpus_here.memory_notes(2)
    assert "GPU 0, rank 1's, has 60.0 of 80.0 GiB in use" in note


def test_ranks_of_a_job_without_cuda_see_no_gpu_unless_the_call_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def seen():
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    try:
        assert kale_dist.launch(seen, number_of_processes=1, cuda=False).result() == ""
        given = {"CUDA_VISIBLE_DEVICES": "1"}
        assert kale_dist.launch(seen, number_of_processes=1, cuda=False, environment=given).result() == "1"
    finally:
        local.shared().close()


# -- calls -------------------------------------------------------------------------------------------------------------


def test_variables_of_nccl_can_be_set_as_the_page_of_gpus_says():
    examples = [line for line in GPUS_PAGE.read_text().splitlines() if "environment={" in line]
    assert any("NCCL_" in line for line in examples)
    for name in ("NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING"):
        assert checked(number_of_processes=1, environment={name: "1"}).request.environment == ((name, "1"),)


def test_a_model_on_a_gpu_that_trains_on_the_cpu_is_mentioned(monkeypatch):
    net = nn.Linear(2, 1)
    training = Training(
        model=net, train_data_loader=DataLoader([(torch.ones(2), torch.ones(1))] * 4), criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
    )  # fmt: skip
    one, machine = Options(number_of_processes=1), request.Machine(cores=2)
    assert not request.checked(training, one, machine).notes
    monkeypatch.setattr(training_checks, "gpu_of", lambda _: "cuda:0")
    assert "cuda:0" in request.checked(training, one, machine).notes[0]
    assert not request.checked(training, Options(number_of_processes=1, cuda=False), machine).notes


def test_flags_without_torch_have_no_device():
    process_state.set_default_device([("logging_level", 10)], "cuda:0")
    assert torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("machine", "given", "limit_s"),
    [
        (request.Machine(cores=4, gpus=2), {}, 1800.0),
        (request.Machine(cores=4, gpus=2), {"stall_timeout_s": 5.0}, 5.0),
        (request.Machine(cores=4, gpus=2), {"number_of_processes": 1}, None),
        (request.Machine(cores=4), {}, None),
    ],
)
def test_functions_on_several_gpus_have_a_limit_for_stalls(machine, given, limit_s):
    call = request.checked(Function(fn=print, label="print"), Options(**given), machine)
    assert call.request.policy.stall_timeout_s == limit_s


# -- ranks that connect, and ranks that wait ---------------------------------------------------------------------------


@pytest.mark.nightly
def test_ranks_that_do_not_connect_give_up_in_time():
    """Here the second rank comes as far as the store, and no further; the group is gloo's, as there is no NCCL."""
    run("""
        import os, threading
        from kale_dist.wire import Assignment, Attempt, Member, Order
        from kale_dist.worker.rank import process_group
        order = Order(job="one", object="one", number_of_processes=2, processes_per_agent=2, snapshot="", cuda=True)
        file = os.memfd_create("store")
        attempt = Attempt(number=0, members=(Member(agent=0, first_rank=0, processes=2),), port=1, seed=0)
        kept = process_group.KeptGroup(Assignment(order=order, attempt=attempt, rank=0))
        kept.backend = "gloo"
        process_group.CONNECT_S = 0.5
        given_up, errors = threading.Event(), []
        def give_up(error):
            errors.append(error)
            given_up.set()
        opening = threading.Thread(target=kept.open, args=(file, give_up), daemon=True)
        opening.start()
        from torch.distributed import FileStore, PrefixStore
        while kept.store is None:
            pass
        assert not given_up.wait(1.5), "the limit counts from when all ranks are there"
        store = PrefixStore("kale_dist/0", FileStore(f"/proc/self/fd/{file}", 2))
        assert store.add("here", 1) == 2
        store.set("all", "")
        assert given_up.wait(30)
        assert "NCCL_SOCKET_IFNAME" in str(errors[0])
        os._exit(0)
    """)


@pytest.mark.parametrize(("ranks", "mib", "is_small"), [(8, 64, True), (1, 64, False), (2, 8192, False)])
def test_small_shared_memory_is_said(monkeypatch, ranks, mib, is_small):
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=mib << 20))
    assert ("--shm-size" in group.small_shm(ranks)) is is_small


@pytest.mark.nightly
def test_a_rank_that_burns_time_in_a_collective_that_another_left_is_found(tmp_path, monkeypatch):
    """On a GPU the wait for a collective is a busy one, in the user's own frame."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def wait():
        place = kale_dist.context()
        context.mark_exchanges([0, 2 - place.rank])
        while not place.rank:
            pass

    try:
        job = kale_dist.launch(wait, number_of_processes=2, cuda=False)
        with pytest.raises(JobFailedError):
            job.result()
        assert job.status.cause == "left"
    finally:
        local.shared().close()


# -- what CUDA and NCCL say --------------------------------------------------------------------------------------------

SAID = {
    "ecc": "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported",
    "launch-failure": "CUDA error: unspecified launch failure",
    "duplicate-gpu": "NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
    "nccl-oom": "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.28.9\nFailed to CUDA calloc async 608 bytes",
    "nccl-shm": "NCCL error: unhandled system error\nError while creating shared memory segment /dev/shm/nccl-X (size 9637888)",
    "nccl-interface": "NCCL error: internal error\nLast error:\nBootstrap : no socket interface found",
    "nccl-peer": "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9\nncclRemoteError: A call failed",
    "nccl-usage": "NCCL error in: x.cpp:1, invalid argument (run with NCCL_DEBUG=WARN for details)\nncclInvalidArgument",
    "nccl-system": "NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO for details)\nncclSystemError: System call",
    "nccl-other": "NCCL error in: x.cpp:1, internal error - please report this issue to the NCCL developers\nncclInternalError",
    "out-of-memory": "CUDA out of memory. Tried to allocate 90.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 78.48 GiB is free.",
    "no-kernel-image": "CUDA error: no kernel image is available for execution on the device",
    "driver-too-old": "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver",
    "no-driver": "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
    "busy": "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "device-assert": "CUDA error: device-side assert triggered",
    "illegal-access": "CUDA error: an illegal memory access was encountered",
    "same-device": "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!",
    "forked": "CUDA error: initialization error. CUDA kernel errors might be reported later. Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
    "invalid-ordinal": "CUDA error: invalid device ordinal",
    "bus-error": "DataLoader worker (pid 7) is killed by signal: Bus error. Unexpected bus error encountered in worker. "
    "This might be caused by insufficient shared memory (shm).",
    "gloo-sizes": "what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 84 vs 72.",
    "watchdog": "[Rank 1] Some NCCL operations have failed or timed out. ProcessGroupNCCL watchdog thread terminated with exception",
}  # fmt: skip

_ENDS = "[TC][rank=12] Aborting process on rank 12 due to "
BACKENDS = {
    "the former one, in its log": "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.",
    "the former one ends": "[E ProcessGroupNCCL.cpp:1610] [Rank 0] Terminating the process after attempting to dump debug info, due to collective timeout or exception.",
    "the former one raises": "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600044 milliseconds before timing out.",
    "nccl2 raises": "Watchdog caught collective operation timeout: NCCL operation timed out",
    "nccl2 raises later": "NCCL operation timed out",
    "nccl2 ends": f"{_ENDS}timeout - timeout watchdog detected operation timeout",
    "nccl2 ends later": f"{_ENDS}timeout - collective operation timed out",
    "nccl2 is closed": "Work timed out during finalize",
    "nccl2 ends for nccl-peer": f"{_ENDS}error - nccl hit async error: remote process exited or there was a network error",
    "nccl2 ends for nccl-system": f"{_ENDS}error - nccl hit async error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "nccl2 ends for nccl-other": f"{_ENDS}error - nccl hit async error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
}  # fmt: skip
"""What torch's two NCCL backends say when they have waited for too long, or met an error; of nccl2 (torch 2.15) as read in its library."""


@pytest.mark.parametrize("case", BACKENDS)
def test_what_both_nccl_backends_say_is_known_and_may_be_restarted(case):
    fault = hardware_faults.find(BACKENDS[case])
    assert (fault.name, fault.may_restart) == (case.partition(" ends for ")[2] or "watchdog", True)


def test_the_log_says_which_nccl_backend_there_is_from_torch_2_15_on(monkeypatch, capsys):
    monkeypatch.setattr(context, "_not_shown", set())
    nccl2 = types.SimpleNamespace(_get_backend=lambda device: type("ProcessGroupNCCL2", (), {})())
    for version in ("2.9.1", "2.15.0+cu130"):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        group._log_backend(nccl2, "cuda:0")
    assert capsys.readouterr().out == "The NCCL backend is torch 2.15.0+cu130's ProcessGroupNCCL2\n"
    group._log_backend(object(), "cuda:0")
    assert "The NCCL backend cannot be shown" in capsys.readouterr().out


@pytest.mark.parametrize("name", SAID)
def test_what_cuda_and_nccl_say_is_known(name):
    assert hardware_faults.find(SAID[name]).name == name


def test_every_trouble_has_a_text_here_and_other_errors_are_none():
    assert set(SAID) == {fault.name for fault in hardware_faults.TABLE}
    for other in (
        "bad",
        "[gloo] Connection closed by peer [127.0.0.1]:1234",
        "mat1 and mat2 shapes cannot be multiplied",
    ):
        assert hardware_faults.find(other) is None


def failed(rank, name, **more):
    done = Done(ok=False, error_type="torch.AcceleratorError", error_text=SAID[name], **more)
    return types.SimpleNamespace(rank=rank, done=done, end=None)


def aborted(rank, name):
    return types.SimpleNamespace(rank=rank, done=None, end=End(signal="SIGABRT", tail=(SAID[name],)))


@pytest.mark.parametrize(
    ("failures", "rank", "may_restart"),
    [
        ([failed(0, "ecc", node="node-7")], 0, True),
        ([failed(0, "nccl-peer"), failed(1, "ecc", node="node-7")], 1, True),
        ([aborted(0, "watchdog"), failed(1, "out-of-memory", node="node-7")], 1, False),
        ([failed(0, "nccl-peer"), failed(1, "duplicate-gpu", node="node-7")], 1, False),
        ([aborted(0, "watchdog"), failed(1, "illegal-access", node="node-7")], 1, False),
    ],
)
def test_the_rank_whose_gpu_failed_is_to_blame_and_its_node_is_named(failures, rank, may_restart):
    verdict = ending.blame(failures)
    assert (verdict.rank, verdict.may_restart) == (rank, may_restart)
    assert "node-7" in verdict.reason


def test_an_error_of_a_gpu_says_what_to_do_beside_its_own_text():
    error = stand_ins.clearer(torch.OutOfMemoryError(SAID["out-of-memory"]))
    assert "batch_size" in error.__notes__[0]
    assert not hasattr(stand_ins.clearer(ValueError(SAID["out-of-memory"])), "__notes__")


@pytest.mark.parametrize(
    ("strategy", "is_untried"), [("ddp", False), ("fsdp", False), ("tensor", True), ("pipeline", True)]
)
def test_strategies_that_have_not_run_on_gpus_are_named(strategy, is_untried):
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    training = Training(
        model=net, train_data_loader=DataLoader([(torch.ones(4), torch.ones(4))] * 4), criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1), strategy=strategies.resolve(strategy),
    )  # fmt: skip
    call = request.checked(training, Options(), request.Machine(cores=2, gpus=2))
    assert any("never run on GPUs" in warning for warning in call.warnings) is is_untried


# -- what ranks send each other ----------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU; only its copy on the CPU may be pickled."""

    is_cuda = True

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, _):
        raise AssertionError("sent from a GPU")


def test_ranks_send_their_own_states_from_the_cpu_and_to_rank_0_alone(monkeypatch):
    net = nn.Linear(1, 1)
    values = {name: one.default for name, one in inspect.signature(kale_dist.distribute).parameters.items()}
    values |= {"model": net, "train_data_loader": DataLoader([1.0]), "optimizer": torch.optim.SGD(net.parameters())}
    values |= {"criterion": nn.MSELoss(), "strategy": kale_dist.strategies.LocalSGD()}
    training = Training(**{name: one for name, one in values.items() if name in Training.__dataclass_fields__})
    trained = Trained.of(training)
    ranks = Group(torch.device("cpu"))
    ranks.world_size = 2
    monkeypatch.setattr(torch.distributed, "all_gather_object", None)
    sent = []

    def gather_object(value, values, **_):
        sent.append(pickle.loads(pickle.dumps(value)))
        if values is not None:
            values[:] = sent * 2

    monkeypatch.setattr(torch.distributed, "gather_object", gather_object)
    held = []
    for ranks.rank in (0, 1):
        progress = types.SimpleNamespace(values={}, stopped="")
        own = {"momentum": [torch.ones(2).as_subclass(OnGpu)]}
        session = types.SimpleNamespace(
            group=ranks,
            trained=trained,
            setup=types.SimpleNamespace(given=Given.of(training, trained, 2)),
            progress=progress,
            changes=list,
            control=types.SimpleNamespace(scaler=None, real_steps=2),
            strategy=types.SimpleNamespace(own_state=lambda own=own: own),
            loaders=types.SimpleNamespace(train=types.SimpleNamespace(seed=1)),
        )
        found = Session.resume(session, None, None)
        held.append(len(found.strategy))
        assert found.strategy[0]["momentum"][0].equal(torch.ones(2))
    assert held == [2, 1]
