"""What kale_dist takes from inside other packages is still there, and still does what we take it for.

One test for each row of "What we take from inside others" in docs/architecture.md, named after the file and the function that take it.
A failure says what has changed.
"""

import atexit
import concurrent.futures
import ctypes
import datetime as dt
import functools
import importlib
import inspect
import io
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.util
import queue
import sys
import tempfile
import threading
import types
import weakref

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from cloudpickle import cloudpickle as internals
from pod_jobs import free_ports
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.utils.data import DataLoader

pytestmark = pytest.mark.newest


def check(owner, *names):
    """Each name is there."""
    shown = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", type(owner).__name__)
    gone = [name for name in names if not hasattr(owner, name)]
    assert not gone, f"{shown} has no longer {', '.join(gone)}"


def takes(function, *names):
    """A function still has these arguments."""
    missing = [name for name in names if name not in inspect.signature(function).parameters]
    assert not missing, f"{function.__qualname__}() takes no longer {', '.join(missing)}"


def source_has(function, text):
    """A function of another package still reads a name where we have replaced it."""
    assert text in inspect.getsource(inspect.unwrap(function)), f"{function.__qualname__} does not use {text} any more"


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def divided(group):
    """A tensor divided over the one rank."""
    return distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])


# -- cloudpickle -------------------------------------------------------------------------------------------------------


def local_class():
    class Made:
        def double(self):
            return 2

    return Made


def test_pickler_class_tracker():
    for maker, index in ((internals._make_skeleton_class, 4), (internals._make_skeleton_enum, 5)):
        names = list(inspect.signature(maker).parameters)
        assert names[index] == "class_tracker_id", (
            f"cloudpickle finds a class that is there by {names[index]} of {maker.__name__}"
        )


def test_pickler_capturepickler_by_value():
    reduced = internals._dynamic_class_reduce(local_class())
    assert len(reduced) == 6, (
        f"cloudpickle reduces a class to {len(reduced)} parts, no longer to six with a state setter"
    )


def test_pickler_capturepickler_dynamic_function_reduce():
    number = 3
    reduced = cloudpickle.Pickler(io.BytesIO())._dynamic_function_reduce(lambda: number)
    assert len(reduced) == 6, (
        f"cloudpickle reduces a function to {len(reduced)} parts, no longer to six with a state setter"
    )
    assert "__globals__" in reduced[2][1], (
        "cloudpickle's state of a function has its globals no longer in its second part"
    )


def test_pickling_tensorpickler_function_getnewargs():
    number = 3
    given = cloudpickle.Pickler(io.BytesIO())._function_getnewargs(lambda: number)
    assert len(given) == 5, f"cloudpickle makes a function from {len(given)} arguments, no longer from five"
    assert isinstance(given[0], types.CodeType), (
        "the first argument from which cloudpickle makes a function is no longer its code"
    )
    assert isinstance(given[4][0], types.CellType), "the last one is no longer the variables of enclosing functions"


def test_pickling_tensorpickler_function_reduce():
    pickler = cloudpickle.Pickler(io.BytesIO())
    assert pickler._function_reduce(lambda: 1) is not NotImplemented, (
        "cloudpickle does not reduce a lambda by _function_reduce"
    )
    assert pickler._function_reduce(inspect.unwrap) is NotImplemented, "cloudpickle sends importable functions by value"
    compiled = torch.compile(local_class, backend="eager")
    check(compiled, "_torchdynamo_orig_callable")
    assert compiled._torchdynamo_orig_callable is local_class, "torch.compile keeps the original function elsewhere"


def test_pickling_is_importable():
    found = internals._lookup_module_and_qualname
    assert found(inspect.unwrap) is not None, "cloudpickle does not find a function of a module any more"
    assert found(functools.cache(lambda: 1)) is None, "cloudpickle takes a cached lambda for one that can be imported"


def test_unpicklable_of_function():
    names = internals._extract_code_globals((lambda: [pytest for _ in range(3)]).__code__)
    assert "pytest" in names, "cloudpickle does not find the globals of inner functions any more"


# -- objects of other trainers -----------------------------------------------------------------------------------------


@pytest.fixture
def training_arguments(tmp_path):
    pytest.importorskip("accelerate")
    return pytest.importorskip("transformers").TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])


@pytest.mark.nightly
def test_training_arguments_gpus(training_arguments):
    assert vars(training_arguments)["_n_gpu"] == training_arguments.n_gpu == 0


@pytest.mark.nightly
def test_training_arguments_devices(training_arguments):
    kept = vars(training_arguments)
    assert kept.keys() >= {"distributed_state", "_setup_devices"}, "what they know of their process is kept elsewhere"
    for name in ("distributed_state", "_n_gpu", "_setup_devices"):
        del kept[name]
    assert training_arguments._setup_devices.type == "cpu"
    assert kept["distributed_state"].num_processes == training_arguments.world_size == 1


@pytest.fixture
def accelerator_state():
    """The class, once there is an Accelerator that computes in bf16."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    yield accelerate.state.AcceleratorState
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.nightly
def test_training_arguments_shared(accelerator_state):
    assert accelerator_state._shared_state is accelerator_state().__dict__
    accelerator_state._reset_state(reset_partial_state=True)
    assert accelerator_state._shared_state == {}


@pytest.mark.nightly
def test_training_arguments_precision(accelerator_state):
    assert accelerator_state._shared_state["_mixed_precision"] == "bf16"


@pytest.mark.nightly
def test_training_arguments_settle_in_trainers():
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    trainer = importlib.import_module("transformers.trainer").Trainer
    source_has(trainer.__init__, "self.create_accelerator_and_postprocess()")
    assert list(inspect.signature(trainer.create_accelerator_and_postprocess).parameters) == ["self"]


@pytest.mark.nightly
def test_trainers_transformers():
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    trainer, callback = map(importlib.import_module, ("transformers.trainer", "transformers.trainer_callback"))
    assert isinstance(trainer.DEFAULT_CALLBACKS, list)
    source_has(trainer.Trainer.__init__, "DEFAULT_CALLBACKS")
    check(callback.TrainerCallback, "on_train_begin", "on_step_end", "on_prediction_step", "on_log")


@pytest.mark.nightly
def test_trainers_connector():
    lightning = pytest.importorskip("lightning.pytorch")
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    takes(trainer._logger_connector.log_metrics, "metrics", "step")
    source_has(type(trainer._logger_connector).update_train_step_metrics, "self.log_metrics(")
    source_has(type(trainer._logger_connector).log_eval_end_metrics, "self.log_metrics(")


def test_trainers_refuse_processes():
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.strategies.launchers import multiprocessing

    check(multiprocessing, "_MultiProcessingLauncher")
    source_has(DDPStrategy._configure_launcher, "_MultiProcessingLauncher(")


def test_settings_split_by_node():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset()
    assert stream._distributed is None
    assert split_dataset_by_node(stream, rank=0, world_size=2)._distributed is not None


@pytest.mark.nightly
def test_trainers_accelerate():
    here = pytest.importorskip("accelerate").Accelerator(cpu=True)
    here.log({"loss": 1.0}, step=1)
    check(here, "is_main_process", "trackers")


@pytest.mark.nightly
def test_trainers_bars():
    bar = pytest.importorskip("tqdm.std").tqdm
    source_has(bar.refresh, "self.display(")
    check(bar([], file=io.StringIO()), "desc", "n", "total", "pos")


# -- pickles of torch's objects ----------------------------------------------------------------------------------------


def test_unpicklable_remedies():
    from kale_dist.snapshot.unpicklable import _OF_ONE_PROCESS, _REMEDIES

    class Structure(ctypes.Structure):
        pass

    with tempfile.NamedTemporaryFile("w") as file, concurrent.futures.ThreadPoolExecutor() as executor:
        reader, writer = multiprocessing.Pipe()
        made = [file, file.file, executor, reader, writer, threading.Lock(), threading.RLock(), threading.local()]
        made += [
            queue.SimpleQueue(),
            concurrent.futures.Future(),
            ctypes.pointer(Structure()),
            ctypes.CDLL(None).getpid,
        ]
        classes = {kind for one in made for kind in type(one).__mro__}
        writer.close()
        reader.close()
    known = {
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in classes | {torch.jit.ScriptModule, torch.jit.RecursiveScriptModule}
    }
    # A build without CUDA has stand-ins for its classes.
    known |= {f"torch._C.{name}" for name in vars(torch._C)}
    wanted = {name for one in _REMEDIES if one not in _OF_ONE_PROCESS for name in one.types if "._" in f".{name}"}
    elsewhere = {"h5py._hl.files.File", "h5py._hl.dataset.Dataset", "_duckdb.DuckDBPyConnection"}
    gone = sorted(wanted - known - elsewhere)
    assert not gone, f"these classes have other names now: {', '.join(gone)}"


def test_unpicklable_attributes():
    check(nn.Linear(1, 1), "_modules", "_parameters", "_buffers")


def test_changes_attributes():
    check(nn.Linear(1, 1), "_modules", "_non_persistent_buffers_set")


def test_changes_of_base():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    check(optimizer, "_opt_called")


def test_identity_times_changed():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1, "Tensor._version does not count changes in place any more"
    assert tensor.detach()._version == tensor._version, "a detached tensor counts its changes apart from the original"


def test_identity_storage_id():
    tensor = torch.zeros(4)
    same, other = tensor[1:].untyped_storage()._cdata, torch.zeros(4).untyped_storage()._cdata
    assert same == tensor.untyped_storage()._cdata, "two views of a tensor do not share _cdata of their storage"
    assert same != other, "two storages have the same _cdata"


def test_pickler_hooks_of():
    tensor = torch.zeros(1, requires_grad=True)
    tensor.register_hook(len)
    tensor.register_post_accumulate_grad_hook(len)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name, None) or {}
        assert list(hooks.values()) == [len], f"hooks of a tensor are no longer in Tensor.{name}"


def test_pickling_tensorpickler_reduce_typed_storage():
    check(
        torch.storage.TypedStorage(wrap_storage=torch.zeros(1).untyped_storage(), dtype=torch.float32, _internal=True),
        "_untyped_storage",
    )


def scheduled():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)


def test_reducers_is_counted():
    optimizer, _ = scheduled()
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched"), (
        "a scheduler does not mark its optimizer's step by _wrapped_by_lr_sched"
    )


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_reducers_note_step():
    optimizer, _ = scheduled()
    optimizer.step()
    assert optimizer._opt_called, "an optimizer's step does not set _opt_called any more"


def chained():
    optimizer, first = scheduled()
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [first, torch.optim.lr_scheduler.ConstantLR(optimizer)], [3]
    )


def test_reducers_schedulers():
    assert len(chained()._schedulers) == 2, "SequentialLR keeps its schedulers elsewhere than in _schedulers"


def test_reducers_milestones():
    assert list(chained()._milestones) == [3], "SequentialLR keeps its milestones elsewhere than in _milestones"


def test_reducers_loaders_iterator():
    loader = DataLoader([1], num_workers=1, persistent_workers=True)
    assert vars(loader)["_iterator"] is None, "a DataLoader has no empty _iterator at first"
    iterator = iter(loader)
    assert vars(loader)["_iterator"] is iterator, "a DataLoader keeps persistent workers elsewhere than in _iterator"
    list(iterator)


def test_reducers_copy_out_on_resize():
    check(Tensor, "resize_", "resize_as_", "set_")
    original = Tensor.resize_
    Tensor.resize_ = lambda *_: "ours"
    try:
        assert torch.zeros(1).resize_(2) == "ours", "Tensor.resize_ cannot be replaced any more"
    finally:
        Tensor.resize_ = original


def test_reducers_make_context():
    default = multiprocessing.context._default_context
    assert isinstance(default, multiprocessing.context.BaseContext), "multiprocessing has no _default_context any more"


def test_reducers_set_parametrized_state():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    plain = nn.Linear.__new__(nn.Linear)
    plain.__dict__.update(module.__dict__)
    nn.utils.parametrize._inject_new_class(plain)
    nn.utils.parametrize._inject_property(plain, "weight")
    assert torch.equal(plain.weight, module.weight), (
        "torch's parametrize does not give a module its generated class any more"
    )


# -- Python and IPython ------------------------------------------------------------------------------------------------


def test_pickler_stand_in():
    autocall = pytest.importorskip("IPython.core.autocall")
    caller = autocall.ExitAutocall()
    shell = object()
    caller.set_ip(shell)
    assert caller._ip is shell, "IPython's exit keeps the shell elsewhere than in _ip"


def test_sources_cell_label():
    compilerop = pytest.importorskip("IPython.core.compilerop")
    compiler = compilerop.CachingCompiler()
    name = compiler.cache("1 + 1\n", 7)
    assert compiler._filename_map[name] == 7, "IPython keeps the numbers of cells elsewhere than in _filename_map"


def test_sources_install():
    source_has(inspect.findsource, "getsourcefile(object)")
    source_has(inspect.getsourcefile, "getfile(object)")


def test_rank_main_end():
    check(threading, "_shutdown")
    check(atexit, "_run_exitfuncs")
    check(weakref.finalize, "_registry")


def test_process_group_replace_spawn():
    takes(multiprocessing.util.spawnv_passfds, "path", "args", "passfds")
    from multiprocessing import popen_spawn_posix

    source_has(popen_spawn_posix.Popen, "util.spawnv_passfds(")


# -- other packages ----------------------------------------------------------------------------------------------------


def test_builder_install_debian():
    client = pytest.importorskip("docker").APIClient
    source_has(client.__init__, "self._proxy_configs = ")


def test_docker_place_bridge_init():
    client = pytest.importorskip("docker").APIClient
    source_has(client._get_raw_response_socket, "_sock")


def test_client_timedrest_request():
    rest = pytest.importorskip("kubernetes.client.rest")
    takes(rest.RESTClientObject.request, "_request_timeout")


def test_interrupts_is_interactive():
    kernelbase = pytest.importorskip("ipykernel.kernelbase")
    source_has(kernelbase.Kernel.raw_input, "self._allow_stdin")


def test_interrupts_take_next_while_idle():
    kernelbase = pytest.importorskip("ipykernel.kernelbase")
    source_has(kernelbase.Kernel.pre_handler_hook, "self.saved_sigint_handler = signal(")
    source_has(kernelbase.Kernel.post_handler_hook, "signal(SIGINT, self.saved_sigint_handler)")


def test_widget_has_subshells():
    pytest.importorskip("ipykernel", minversion="7")  # 6 has none
    kernelbase = pytest.importorskip("ipykernel.kernelbase")
    check(kernelbase.Kernel, "_supports_kernel_subshells")


def test_widget_of_no_cell():
    pytest.importorskip("ipykernel", minversion="7")
    kernelbase = pytest.importorskip("ipykernel.kernelbase")
    source_has(kernelbase.Kernel.__init__, "self._shell_parent")


# -- data and optimizers -----------------------------------------------------------------------------------------------


def test_training_checks_check_made_loader():
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    assert isinstance(iter(DataLoader([1])), _BaseDataLoaderIter), "iterators of DataLoaders have another base class"


def test_loader_get_iterator():
    source_has(DataLoader.__iter__, "self._get_iterator()")


def test_batches_batches_reset():
    source_has(DataLoader.__iter__, "self._iterator._reset(self)")


def test_stand_ins_was_fetching():
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    check(_MultiProcessingDataLoaderIter, "_try_get_data")


def test_optimizer_optimizercontrol_take_optimizer():
    optimizer, _ = scheduled()
    optimizer._patch_step_function()
    assert getattr(type(optimizer).step, "hooked", False), (
        "Optimizer._patch_step_function hooks the class's step no longer"
    )


def test_optimizer_optimizercontrol_wrap_scheduler_step():
    from torch.optim import lr_scheduler

    source_has(lr_scheduler._initial_mode, "_is_initial")


def test_optimizer_optimizercontrol_installed():
    source_has(nn.utils.clip_grad.clip_grad_norm_, "_get_total_norm(")
    check(torch.amp.GradScaler, "step")
    check(nn.Module, "zero_grad")


def test_resumption_load_module():
    state = nn.BatchNorm1d(2).state_dict()
    assert state._metadata[""]["version"] == 2, "a state dict has no longer the versions of its modules in _metadata"


def test_tensor_parameters_of():
    linear = nn.Linear(1, 1)
    assert linear._parameters["weight"] is linear.weight, "a module keeps its parameters elsewhere than in _parameters"


# -- a model that ranks make -------------------------------------------------------------------------------------------


def test_construction_imports():
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    check(_pytree, "tree_leaves", "tree_map", "tree_map_only", "tree_flatten", "tree_unflatten")

    class Seen(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Seen.count += 1
            return function(*args, **(kwargs or {}))

    with Seen():
        torch.ones(2)
    assert Seen.count, "TorchDispatchMode does not see operations any more"


def test_construction_construction_init():
    assert torch.zeros(1, device="meta").is_meta
    Tensor.is_meta = property(lambda _: False)
    try:
        assert not torch.zeros(1, device="meta").is_meta, "Tensor.is_meta cannot be replaced any more"
    finally:
        del Tensor.is_meta


def test_construction_construction_torch_dispatch():
    assert str(torch.ops.aten._to_copy.default) == "aten._to_copy.default", "torch names its operations otherwise"


def test_construction_schema():
    assert torch.ops.aten.add_.Tensor._schema.is_mutable, "an operation's _schema does not say that it writes any more"


# -- backward passes ---------------------------------------------------------------------------------------------------


def test_replica_backward_pass():
    seen = [torch._C._current_graph_task_id()]
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda _: seen.append(torch._C._current_graph_task_id()))
    tensor.sum().backward()
    tensor.sum().backward()
    assert seen[0] == -1, f"outside of a backward pass, its number is {seen[0]}, no longer -1"
    assert len(set(seen)) == 3, "two backward passes have the same number"


def test_replica_replica_begin():
    calls = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(lambda: calls.append(1)))
    tensor.sum().backward()
    assert calls, "torch does not call what is queued for the end of a backward pass any more"


def test_replica_is_returned():
    from torch.autograd.graph import get_gradient_edge

    will = []
    tensor = torch.ones(1, requires_grad=True)
    node = get_gradient_edge(tensor).node
    tensor.register_hook(lambda _: will.append(torch._C._will_engine_execute_node(node)))
    tensor.sum().backward()
    assert will == [True], "_will_engine_execute_node does not say that a backward pass adds to a gradient"


def test_replica_refuse_gradients():
    for function in (torch.autograd.grad, torch.autograd.backward):
        source_has(function, "_engine_run_backward(")
    takes(torch.autograd._engine_run_backward, "t_outputs", "args", "kwargs")
    source_has(torch.autograd.grad, "accumulate_grad=False")


def test_hang_watch_backward():
    frames = []
    tensor = torch.ones(1, requires_grad=True)

    def look(_):
        # A hook runs in the frame that waits for the backward pass.
        frame = sys._getframe(1)
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back

    tensor.register_hook(look)
    tensor.sum().backward()
    is_there = any(
        file.endswith("/torch/autograd/graph.py") and name == "_engine_run_backward" for file, name in frames
    )
    assert is_there, "backward() waits in another frame than _engine_run_backward of torch/autograd/graph.py"


def backward_is_replaced():
    """Whether `loss.backward()` calls what stands in the place of `Tensor.backward`."""
    before, calls = Tensor.backward, []
    Tensor.backward = lambda *_: calls.append(1)
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    finally:
        Tensor.backward = before
    return bool(calls)


def test_notices_otherloaders_watch():
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    assert "__iter__" in vars(DataLoader), "a DataLoader is iterated by another method"
    for workers in (0, 1):
        kind = type(iter(DataLoader([1], num_workers=workers)))
        assert kind.__next__ is _BaseDataLoaderIter.__next__, f"{kind.__name__} takes batches by another method"


def test_notices_ownlosses_watched():
    assert backward_is_replaced(), "Tensor.backward cannot be replaced any more"


def test_process_group_keptgroup_open():
    assert backward_is_replaced(), "Tensor.backward cannot be replaced any more"


def test_notices_note_layer():
    class Fails(nn.Module):
        def forward(self, x):
            return {}[x]

    with pytest.raises(KeyError) as caught:
        Fails()(3)
    frames = [
        entry.frame.f_locals for entry in caught.traceback if entry.frame.code.raw is nn.Module._call_impl.__code__
    ]
    assert frames, "a layer is not called through Module._call_impl any more"
    assert {"self", "args", "kwargs"} <= set(frames[-1]), "Module._call_impl has other local names"


def test_local_variables_short_tensors():
    before = Tensor.__repr__
    Tensor.__repr__ = lambda *_, **__: "short"
    try:
        assert repr([torch.zeros(1)]) == "[short]", "Tensor.__repr__ cannot be replaced any more"
    finally:
        Tensor.__repr__ = before


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_process_state_read_flags():
    with torch.device("meta"):
        pass
    torch.set_default_device("meta")
    try:
        chosen = torch._GLOBAL_DEVICE_CONTEXT.device_context.device
        assert chosen.type == "meta", "torch keeps the default device elsewhere"
    finally:
        torch.set_default_device(None)


def test_forkserver_forkserver_serve():
    assert importlib.import_module("torch._dynamo"), "torch._dynamo is gone"


def test_stand_ins_without_gpu():
    check(torch.cuda, "_lazy_init", "set_device")
    source_has(torch.cuda.current_device, "_lazy_init()")


def test_pipeline_pipeline_check_model():
    names = [kind.__name__ for kind in nn.BatchNorm2d.__mro__]
    assert "_BatchNorm" in names, "batch norms have no base class _BatchNorm any more"


def test_ghosts_ghosts_enter():
    whole = torch.zeros(2)
    assert whole[:1]._is_view(), "Tensor._is_view does not know a view any more"
    assert not whole._is_view(), "Tensor._is_view takes a whole tensor for a view"


def test_process_group_keptgroup_replace_functions():
    for name in ("init_process_group", "destroy_process_group"):
        assert getattr(dist, name) is getattr(c10d, name), f"torch.distributed.{name} comes from another module"
    for makes_groups in (c10d.init_process_group, c10d._new_group_with_tag):
        source_has(makes_groups, "_new_process_group_helper(")


def test_process_group_keptgroup_replace_store(monkeypatch):
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    takes(rendezvous._create_c10d_store, "hostname", "port")
    port, second = free_ports(), dt.timedelta(seconds=1)
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", str(port))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_torchelastic_use_agent_store", lambda: True)
    with pytest.raises(dist.DistNetworkError, match="timed out"):
        rendezvous._create_c10d_store("localhost", port, 0, 1, second)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(rendezvous, "_torchelastic_use_agent_store", lambda: False)
    store = rendezvous._create_c10d_store("localhost", port, 0, 1, second)
    store.set("name", "value")
    assert store.get("name") == b"value", "_create_c10d_store asks _torchelastic_use_agent_store no longer"


def waits_are_replaced():
    """Whether `wait()` of an asynchronous collective calls what stands in the place of `Work.wait`."""
    before, calls = dist.Work.wait, []
    dist.Work.wait = lambda work, *given: (calls.append(1), before(work, *given))
    try:
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    finally:
        dist.Work.wait = before
    return bool(calls)


def test_process_group_mark_waits(group):
    assert waits_are_replaced(), "Work.wait cannot be replaced any more"


def test_clock_clock_watching_collectives(group):
    assert waits_are_replaced(), "Work.wait cannot be replaced any more"


def test_process_group_show(group):
    c10d._update_default_pg(None)
    try:
        assert not dist.is_initialized(), "_update_default_pg(None) does not hide the process group any more"
    finally:
        c10d._update_default_pg(group)
    assert dist.is_initialized(), "_update_default_pg does not show a process group again"


def test_process_group_process_groups(group):
    assert group in c10d._world.pg_map, "torch keeps the list of process groups elsewhere than in _world.pg_map"


def test_process_group_collectives(group):
    backend = group._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    after = backend._get_sequence_number_for_group()
    assert after == before + 1, f"a collective raises a backend's sequence number by {after - before}, no longer by 1"


def test_process_group_log_backend(group):
    assert group._get_backend(torch.device("cpu")) is not None, "a process group has no backend for its device any more"


def test_repair_renew(group):
    from torch.distributed import ProcessGroup, _register_comm_hook
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    assert ProcessGroup.BackendType(9) is not None, "backend types from 7 on are no longer free"
    options = ProcessGroupGloo._Options()
    check(options, "_timeout", "_devices")
    check(group, "_register_backend")
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), static_graph=True)
    parameters, expect_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expect_sparse, names, model.static_graph)
    model.reducer._set_static_graph()
    check(model, "_static_graph_delay_allreduce_enqueued", "_comm_hooks")
    assert callable(_register_comm_hook), "torch.distributed has no _register_comm_hook any more"


# -- sharded tensors ---------------------------------------------------------------------------------------------------


def test_early_agreement_local_part(divided):
    divided._local_tensor.add_(1)
    assert divided.full_tensor().tolist() == [2, 2], "a DTensor keeps this rank's part elsewhere than in _local_tensor"


def test_fully_sharded_write_data(divided):
    check(Tensor.data, "__get__", "__set__")
    written = []
    DTensor.data = property(Tensor.data.__get__, lambda _, values: written.append(values))
    try:
        divided.data = divided.data
    finally:
        del DTensor.data
    assert len(written) == 1, "DTensor.data cannot be replaced any more"


def test_fully_sharded_read_scalars(divided):
    handlers = DTensor._op_dispatcher._custom_op_handlers
    scalar, read = torch.ops.aten._local_scalar_dense.default, []
    handlers[scalar] = lambda op, args, kwargs: read.append(args) or op(args[0].full_tensor())
    try:
        assert divided.sum().item() == 2, "DTensor reads numbers otherwise than by aten._local_scalar_dense"
    finally:
        del handlers[scalar]
    assert len(read) == 1, "DTensor takes no handler for an operation any more"


@pytest.fixture
def sharded(group):
    """A layer under `fully_shard`, over one rank."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))


def groups_of(sharded):
    state = sharded._get_fsdp_state()
    return list(getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group])


def test_fully_sharded_unit_init(sharded):
    (first,) = groups_of(sharded)
    check(first, "post_backward", "fsdp_params")
    check(sharded, "set_custom_all_gather", "set_custom_reduce_scatter")


def test_fully_sharded_unit_plain_within_forward(sharded):
    state, seen = sharded._get_fsdp_state(), []
    hook = sharded.register_forward_hook(lambda *_: seen.append(state._training_state.name), prepend=True)
    sharded(torch.ones(1, 2))
    hook.remove()
    assert [*seen, state._training_state.name] == ["FORWARD", "IDLE"], "FSDP tells by other words where a unit is"


def test_fully_sharded_unit_agreed(sharded):
    sharded.unshard()
    for parameter in groups_of(sharded)[0].fsdp_params:
        assert parameter._unsharded_param is not None, (
            "FSDP keeps gathered parameters elsewhere than in _unsharded_param"
        )


def test_fully_sharded_state_hooks(sharded):
    from kale_dist.worker.parallel.fully_sharded import _STATE_HOOKS

    check(sharded, *_STATE_HOOKS)
    sharded(torch.ones(1, 2))
    assert all(getattr(sharded, name) for name in _STATE_HOOKS), "FSDP hooks no longer to state_dict()"


def test_fully_sharded_unit_compared(sharded):
    (first,), seen = groups_of(sharded), []
    original = first.post_forward

    def post_forward(*given):
        whole = {id(p) for p in sharded.parameters()}
        seen.extend((id(one._unsharded_param) in whole, type(one.sharded_param)) for one in first.fsdp_params)
        return original(*given)

    first.post_forward = post_forward
    sharded(torch.ones(1, 2))
    assert seen == [(True, DTensor)] * 2, "FSDP ends a forward pass in another function, or keeps weights elsewhere"


def test_fully_sharded_unit_undo(sharded):
    state = sharded._get_fsdp_state()
    for name in ("_pre_forward_hook_handle", "_post_forward_hook_handle"):
        assert callable(getattr(state, name).remove), f"FSDP has no {name} any more"
