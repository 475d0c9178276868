"""A CUDA that is not there, for tests: SIMCUDA_DEVICES=2 makes a CPU-only torch show two GPUs.

torch loads this as a backend (entry point `torch.backends`) at the end of `import torch`. Without SIMCUDA_DEVICES it does
nothing. See `_sim.cpp` for what is simulated. CUDA_VISIBLE_DEVICES is obeyed, when CUDA starts.

SIMCUDA_MIB: memory of each GPU (1024). SIMCUDA_SYNCS=FILE: appends a line of Python's stack for each wait of the host.
"""

import os
import pathlib
import sys


def _visible(count):
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return count
    number = 0
    for one in asked.split(","):
        if not one.strip().isdigit() or int(one) >= count:
            break
        number += 1
    return number


def autoload():
    devices = int(os.environ.get("SIMCUDA_DEVICES", "0"))
    if devices:
        _install(devices)


def _install(devices):
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from simcuda import _sim

    _sim.install(devices, int(os.environ.get("SIMCUDA_MIB", "1024")) << 20)
    C, cuda = torch._C, torch.cuda
    torch.version.cuda = "13.0"

    def count():
        if not _sim.is_initialized():
            _sim.set_count(_visible(devices))
        return _sim.count()

    def init():
        count()
        _sim.init()
        cuda.default_generators = tuple(_sim.default_generator(n) for n in range(count()))
        cuda.random.default_generators = cuda.default_generators

    def nothing(*_, **__):
        return None

    def index(device=None):
        return cuda._utils._get_device_index(device, optional=True)

    functions = {
        "_cuda_getDeviceCount": count, "_cuda_init": init, "_cuda_setDevice": lambda n: (_lazy(), _sim.set_device(n))[1],
        "_cuda_getDevice": _sim.device, "_cuda_exchangeDevice": _sim.exchange_device,
        "_cuda_maybeExchangeDevice": lambda n: _sim.exchange_device(n),  # noqa: PLW0108
         "_cuda_isInBadFork": _sim.is_in_bad_fork,
        "_cuda_synchronize": lambda: C._accelerator_synchronizeDevice(_sim.device()), "_cuda_emptyCache": nothing,
        "_cuda_getCompiledVersion": lambda: 13000, "_cuda_getArchFlags": lambda: "sm_80 sm_90",
        "_cuda_canDeviceAccessPeer": lambda *_: True, "_cuda_ipc_collect": nothing, "_cuda_resetPeakMemoryStats": _sim.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": nothing, "_cuda_set_sync_debug_mode": nothing, "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_getCurrentRawStream": lambda n: 0, "_cuda_hasPrimaryContext": lambda n: _sim.is_initialized(),
        "_cuda_setMemoryFraction": lambda share, n: None, "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_clearCublasWorkspaces": nothing,
    }  # fmt: skip
    for name, function in functions.items():
        setattr(C, name, function)

    def _lazy():
        cuda._lazy_init()

    cuda._cudart = object()
    cuda._is_compiled = lambda: True
    cuda._queued_calls.clear()
    for name in ("_device_count_nvml", "_device_count_amdsmi", "_raw_device_count_nvml"):
        if hasattr(cuda, name):
            setattr(cuda, name, count if name == "_device_count_nvml" else lambda: -1)
    cuda.device_count = count
    cuda.is_available = lambda: count() > 0
    cuda._is_in_bad_fork = _sim.is_in_bad_fork
    # Functions of their own: torch's compiler keeps a table of them.
    cuda._exchange_device = lambda n: _sim.exchange_device(n)  # noqa: PLW0108
    cuda._maybe_exchange_device = lambda n: _sim.exchange_device(n)  # noqa: PLW0108
    cuda.get_device_name = lambda device=None: "SimCUDA"
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_arch_list = lambda: ["sm_80", "sm_90"]
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda._check_bf16_tensor_supported = lambda device: True
    cuda.can_device_access_peer = lambda *_: True

    class Properties:
        name, major, minor, multi_processor_count, is_integrated = "SimCUDA", 9, 0, 4, False
        total_memory = _sim.limit()
        gcnArchName = warp_size = max_threads_per_multi_processor = None
        uuid = "00000000-0000-0000-0000-000000000000"

    cuda.get_device_properties = lambda device=None: (_lazy(), Properties)[1]

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **given):
            if "stream_id" in given:
                return super().__new__(cls, **given)
            _lazy()
            return super().__new__(cls, device=torch.device("cuda", index(device)), priority=priority)

        @property
        def cuda_stream(self):
            return self.stream_id

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            # Not of this class: torch.Event.elapsed_time takes no subclass.
            return torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking)

    def wrap(stream):
        return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event
    Stream.__module__ = Event.__module__ = "torch.cuda.streams"
    Stream.__qualname__, Event.__qualname__ = "Stream", "Event"
    cuda.current_stream = lambda device=None: (_lazy(), wrap(C._accelerator_getStream(index(device))))[1]
    cuda.default_stream = lambda device=None: (_lazy(), Stream(stream_id=0, device_index=index(device), device_type=1))[
        1
    ]

    def set_stream(stream):
        if stream is not None:
            C._accelerator_setStream(stream)
            _sim.set_device(stream.device_index)

    cuda.set_stream = set_stream

    def synchronize(device=None):
        _lazy()
        C._accelerator_synchronizeDevice(index(device))

    cuda.synchronize = synchronize

    memory = {
        "memory_allocated": lambda device=None: _sim.used(index(device)),
        "memory_reserved": lambda device=None: _sim.used(index(device)),
        "max_memory_allocated": lambda device=None: _sim.peak(index(device)),
        "max_memory_reserved": lambda device=None: _sim.peak(index(device)),
        "reset_peak_memory_stats": lambda device=None: _sim.reset_peak(index(device)),
        "mem_get_info": lambda device=None: (_sim.limit() - _sim.used(index(device)), _sim.limit()),
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.current": _sim.used(index(device)), "allocated_bytes.all.peak": _sim.peak(index(device)),
            "reserved_bytes.all.current": _sim.used(index(device)), "active_bytes.all.peak": _sim.peak(index(device)),
            "reserved_bytes.all.peak": _sim.peak(index(device)), "num_alloc_retries": 0, "num_ooms": 0,
        },
        "empty_cache": nothing,
    }  # fmt: skip
    for name, function in memory.items():
        for module in (cuda, cuda.memory):
            setattr(module, name, function)

    # What StorageMethods.cpp does for CUDA only in a build for CUDA.
    U, original_resize = torch.UntypedStorage, torch.UntypedStorage.resize_

    def resize_(self, size):
        if self.device.type != "cuda":
            return original_resize(self, size)
        _sim.resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    U.resize_ = resize_
    original_new = U.__new__

    def new(cls, *args, device=None, **kwargs):
        if device is None or torch.device(device).type != "cuda":
            return original_new(cls, *args, **({"device": device} if device is not None else {}), **kwargs)
        _lazy()
        number = args[0] if args else 0
        if isinstance(number, int):
            return torch.empty(number, dtype=torch.uint8, device=device).untyped_storage()
        raise NotImplementedError("simcuda: a storage from a sequence")

    U.__new__ = staticmethod(new)

    class Options:
        def __init__(self, is_high_priority_stream=False):
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = c10d.default_pg_timeout
            self.global_ranks_in_group, self.group_name = [], ""
            self.split_from, self.split_color, self.config = None, -1, type("Config", (), {})()

    class ProcessGroupNCCL(_sim.NCCLBase):
        def __init__(self, store, rank, size, options=None):
            options = options or Options()
            inner = dist.ProcessGroupGloo(dist.PrefixStore("simcuda", store), rank, size, options._timeout)
            super().__init__(inner, rank, size, options)

    ProcessGroupNCCL.Options = Options
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    cuda.nccl.version = lambda: (2, 28, 0)

    if path := os.environ.get("SIMCUDA_SYNCS"):

        def write(what):
            frame, stack = sys._getframe(), []
            while frame is not None and len(stack) < 12:
                name = frame.f_code.co_filename
                if "/torch/" not in name and "simcuda" not in name:
                    stack.append(f"{name}:{frame.f_lineno}")
                frame = frame.f_back
            with pathlib.Path(path).open("a") as file:
                file.write(f"{os.getpid()} {what} | {' < '.join(stack)}\n")

        _sim.on_sync(write)
