"""Names what cannot be pickled by the path to it, with a remedy: `train_step -> closure log -> _io.TextIOWrapper`.

The pickler knows the object that it met last, but not how it came there. The search walks from the call's arguments
over everything that pickling would follow (variables, attributes, items), breadth first, so that it finds a shortest path.
It pickles nothing and does not look into tensors and arrays, so it is quick for any call.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import dis
import functools
import inspect
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from cloudpickle import cloudpickle as internals

from kale_dist.errors import NotSerializableError
from kale_dist.snapshot.pickling import is_importable
from kale_dist.snapshot.sources import type_name

SEARCH_S = 5.0
"""After this time the search gives up, and the error names the object without its path."""

_FEW = 100
"""Larger collections are data."""

_MANY = 10_000
"""So many objects are looked at for what belongs to one process."""

_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), types.ModuleType, types.BuiltinFunctionType)
_ARRAYS = frozenset({"Tensor", "Parameter", "ndarray", "DataFrame", "Series"})

Step = tuple[str, object]
"""A label such as "closure log" and the object that it leads to."""

_Node = tuple[str, object, Any]
"""A step, and the node of the step before it or None."""


def roots_of_call(fn: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> list[Step]:
    """The first steps of paths from a call: its arguments by their parameters' names, and the function by its name."""
    names: list[str] = []
    with contextlib.suppress(ValueError, TypeError):
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, parameter in inspect.signature(fn).parameters.items() if parameter.kind in kinds]
    positional = list(args)
    names += [f"argument {number}" for number in range(len(names) + 1, len(positional) + 1)]
    return [*kwargs.items(), *zip(names, positional, strict=False), (getattr(fn, "__name__", type(fn).__name__), fn)]


def explain(error: BaseException, culprit: object, roots: Iterable[Step]) -> NotSerializableError:
    """The error with the path to the object that could not be pickled.

    Args:
        error: The pickler's exception.
        culprit: The object that the pickler met last.
        roots: First steps of paths.
    """
    if isinstance(error.__cause__, RecursionError) or isinstance(error, RecursionError):
        return NotSerializableError(
            ("the call", type_name(culprit)),
            "its objects are nested too deeply (a chain of links, such as a linked list or a graph of nodes)",
            "Keep the links as indices into a list, or raise sys.setrecursionlimit before the call.",
        )
    found = _find(culprit, roots) or [("the call", None), ("(something in it)", culprit)]
    known = next((number for number, (_, value) in enumerate(found, 1) if find_remedy(value)), len(found))
    last = found[known - 1][1]
    remedy = find_remedy(last) or OTHER
    problem = remedy.problem or f"{type(error).__name__}: {error}".rstrip(".")
    return NotSerializableError((*(label for label, _ in found[:known]), type_name(last)), problem, remedy.remedy)


def check_of_one_process(roots: Iterable[Step], left_out: Collection[str] = ()) -> None:
    """Refuse what a call names itself and what counts on the process that made it alone, such as a Trainer.

    Looked at are functions, methods, collections and what they hold. What lies deeper is left: a model may hold the trainer that trained
    it, and not need it.

    Args:
        roots: The call's function and arguments.
        left_out: Globals of functions that are not sent with them.

    Raises:
        NotSerializableError: The message has the path to it and a remedy.
    """
    found: list[tuple[tuple[str, ...], object]] = [((label,), one) for label, one in roots]
    made: set[str] = set(left_out)
    seen: dict[int, object] = {}
    refused: list[tuple[str, NotSerializableError]] = []
    # It grows while it is gone through.
    for path, value in found:
        if id(value) in seen or len(seen) > _MANY:
            continue
        seen[id(value)] = value
        if isinstance(value, _LEAVES):
            continue
        if (remedy := find_remedy(value)) in _OF_ONE_PROCESS:
            error = NotSerializableError((*path, type_name(value)), remedy.problem, remedy.remedy)
            refused.append((path[-1].removeprefix("global "), error))
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial) or (
            isinstance(value, dict | list | tuple) and len(value) <= _FEW
        ):
            made.update(_assigned(value.__code__) if isinstance(value, types.FunctionType) else ())
            found.extend(((*path, label), inner) for label, inner in children(value))
    # Of a global that the call itself makes, the notebook's is not used.
    for name, error in refused:
        if name not in made:
            raise error


def is_of_one_process(value: object) -> bool:
    """Whether an object counts on the process that made it alone, such as a Trainer."""
    return find_remedy(value) in _OF_ONE_PROCESS


def _assigned(code: types.CodeType) -> Iterator[str]:
    """Names of globals that code assigns."""
    yield from (one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _assigned(inner)


def _find(culprit: object, roots: Iterable[Step]) -> list[Step]:
    """A shortest path from a root to the object; empty if the search finds none in time."""
    deadline = time.thread_time() + SEARCH_S
    waiting: collections.deque[_Node] = collections.deque((label, value, None) for label, value in roots)
    # The objects are kept alive, so that an id stays unique.
    seen: dict[int, object] = {}
    while waiting and time.thread_time() < deadline:
        node = waiting.popleft()
        label, value, before = node
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if value is culprit:
            path = [(label, value)]
            while before is not None:
                label, value, before = before
                path.insert(0, (label, value))
            return path
        waiting.extend((label, inner, node) for label, inner in children(value))
    return []


def children(value: object) -> Iterator[Step]:
    """Yield the objects that pickling an object would follow, with labels; none if the object's own code raises."""
    if isinstance(value, _LEAVES) or type(value).__name__ in _ARRAYS:
        return
    try:
        yield from list(_children(value))
    except Exception:  # noqa: BLE001 - properties and attributes of the user's objects may raise anything
        return


def _children(value: Any) -> Iterator[Step]:
    match value:
        case types.FunctionType():
            yield from _of_function(value)
        case types.MethodType():
            yield "self", value.__self__
            yield f"method {value.__name__}", value.__func__
        case type():
            if not is_importable(value):
                yield from ((f"attribute {name}", item) for name, item in vars(value).items())
                yield from ((f"base {base.__name__}", base) for base in value.__bases__)
        case staticmethod() | classmethod():
            yield "function", value.__func__
        case property():
            yield from (("getter", f) for f in (value.fget, value.fset, value.fdel) if f is not None)
        case _:
            yield from _items(value)
            yield from _attributes(value)
            yield f"class {type(value).__name__}", type(value)


def _items(value: Any) -> Iterator[Step]:
    """Yield the items of a collection, or the parts of a partial function."""
    match value:
        case dict():
            yield from ((f"[{_short(key)}]", item) for key, item in value.items())
            yield from ((f"key {_short(key)}", key) for key in value)
        case list() | tuple() | collections.deque():
            yield from ((f"[{number}]", item) for number, item in enumerate(value))
        case set() | frozenset():
            yield from (("item", item) for item in value)
        case functools.partial():
            yield "partial's function", value.func
            yield from ((f"partial's argument {number}", item) for number, item in enumerate(value.args, 1))
            yield from ((f"partial's argument {name}", item) for name, item in value.keywords.items())


def _of_function(function: types.FunctionType) -> Iterator[Step]:
    if is_importable(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"closure {name}", cell.cell_contents
        except ValueError:
            continue
    names = internals._extract_code_globals(function.__code__)  # noqa: SLF001
    yield from ((f"global {name}", function.__globals__[name]) for name in names if name in function.__globals__)
    yield from (("a default", item) for item in function.__defaults__ or ())
    yield from ((f"default {name}", item) for name, item in (function.__kwdefaults__ or {}).items())
    yield from ((f"attribute {name}", item) for name, item in vars(function).items())
    yield from ((f"annotation {name}", item) for name, item in function.__annotations__.items())


def _attributes(value: Any) -> Iterator[Step]:
    """Yield attributes from the object's dictionary and slots; a module's submodules and parameters by their names."""
    attributes = dict(getattr(value, "__dict__", None) or {})
    for name in ("_modules", "_parameters", "_buffers"):
        inner = attributes.get(name)
        if isinstance(inner, dict) and hasattr(value, "named_modules"):
            del attributes[name]
            yield from ((f"attribute {key}", item) for key, item in inner.items())
    yield from ((f"attribute {name}", item) for name, item in attributes.items())
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in {"__dict__", "__weakref__"} and hasattr(value, name):
                yield f"attribute {name}", getattr(value, name)


def _short(key: object) -> str:
    text = repr(key) if isinstance(key, (str, int, float, bytes, tuple)) else type(key).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004 - what fits into a line of an error


# -- what to do about it ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Explains why some classes cannot be pickled, and what to do."""

    types: tuple[str, ...]
    """Qualified names of classes; their subclasses count, too."""
    problem: str
    remedy: str


OTHER = Remedy(
    types=(),
    problem="",
    remedy="Make it inside the function, or leave it out: give its class a __getstate__ that drops it.",
)

_OF_ONE_PROCESS = (
    Remedy(
        types=("transformers.trainer.Trainer", "lightning.pytorch.trainer.trainer.Trainer", "pytorch_lightning.trainer.trainer.Trainer"),
        problem="a Trainer belongs to the process that made it, and counts on that one alone",
        remedy="Make the Trainer inside the function that the ranks run, from its model, data and arguments; what comes back is the model, "
        "its metrics or its state.",
    ),
    Remedy(
        types=("accelerate.accelerator.Accelerator", "accelerate.state.PartialState", "accelerate.state.AcceleratorState",
               "lightning.fabric.fabric.Fabric", "lightning_fabric.fabric.Fabric"),
        problem="it belongs to the process that made it, and counts on that one alone",
        remedy="Make it inside the function that the ranks run.",
    ),
    Remedy(
        types=("accelerate.optimizer.AcceleratedOptimizer", "accelerate.scheduler.AcceleratedScheduler", "accelerate.data_loader.DataLoaderAdapter",
               *(f"{package}.wrappers._Fabric{kind}" for package in ("lightning.fabric", "lightning_fabric")
                 for kind in ("DataLoader", "Module", "Optimizer"))),
        problem="it was prepared for the one process of the notebook",
        remedy="Pass the objects as they were before prepare() or setup(), of a Trainer its dataset, and prepare them inside the function.",
    ),
)  # fmt: skip
"""What pickles, and would then work in each rank as if it were the only one."""

_REMEDIES = (
    *_OF_ONE_PROCESS,
    Remedy(
        types=(
            "concurrent.futures._base.Executor", "multiprocessing.pool.Pool", "threading.Thread", "concurrent.futures._base.Future",
            "multiprocessing.process.BaseProcess", "subprocess.Popen", "asyncio.events.AbstractEventLoop",
        ),
        problem="a thread, a process or a pool of them lives in the notebook's process alone",
        remedy="Start it inside the function, so that each rank has its own.",
    ),
    Remedy(
        types=("logging.Handler", "logging.LoggerAdapter", "logging.LogRecord"),
        problem="a logger's handler holds a stream and a lock of the notebook's process",
        remedy="Use the logger by name (logging.getLogger) and add handlers inside the function; what a rank prints or "
        "logs to stderr is in the job's log.",
    ),
    Remedy(
        types=(
            "sqlite3.Connection", "sqlite3.Cursor", "psycopg2.extensions.connection", "psycopg.Connection",
            "pymysql.connections.Connection", "mysql.connector.connection.MySQLConnection", "sqlalchemy.engine.base.Engine",
            "sqlalchemy.engine.base.Connection", "sqlalchemy.orm.session.Session", "pymongo.mongo_client.MongoClient",
            "redis.client.Redis", "duckdb.DuckDBPyConnection", "_duckdb.DuckDBPyConnection", "h5py._hl.files.File",
            "h5py._hl.dataset.Dataset", "lmdb.Environment",
        ),
        problem="an open database belongs to the process that opened it",
        remedy="Keep the address or path, and connect inside the function (in a dataset: at the first __getitem__), so that "
        "each rank has a connection of its own.",
    ),
    Remedy(
        types=("socket.socket", "ssl.SSLSocket", "ssl.SSLContext", "selectors.BaseSelector", "multiprocessing.connection._ConnectionBase"),
        problem="a network connection belongs to the process that opened it",
        remedy="Connect inside the function, so that each rank has a connection of its own.",
    ),
    Remedy(
        types=(
            "torch.cuda.streams.Stream", "torch.cuda.streams.Event", "torch.cuda.graphs.CUDAGraph", "torch.Stream", "torch.Event",
            "torch._C._CudaStreamBase", "torch._C._CudaEventBase", "torch._C._CUDAGraph", "torch.cuda.memory.MemPool",
            "_ctypes._Pointer", "_ctypes.CFuncPtr",
        ),
        problem="a handle of CUDA or of a C library means something in the notebook's process alone",
        remedy="Make it inside the function, on the rank's own device.",
    ),
    Remedy(
        types=("_io._IOBase", "_io.TextIOWrapper", "io.IOBase", "mmap.mmap", "tempfile._TemporaryFileWrapper", "zipfile.ZipFile", "tarfile.TarFile"),
        problem="an open file belongs to the process that opened it",
        remedy="Open it inside the function, from its path; in a dataset, at the first __getitem__.",
    ),
    Remedy(
        types=("builtins.generator", "builtins.coroutine", "builtins.async_generator", "builtins.frame", "builtins.traceback"),
        problem="a running generator or coroutine cannot be copied",
        remedy="Pass the function that makes it, make a list of its items, or make the object that has it, such as a trainer, inside the function.",
    ),
    Remedy(
        types=(
            "queue.Queue", "_queue.SimpleQueue", "multiprocessing.queues.Queue", "multiprocessing.queues.SimpleQueue",
            "threading.Event", "threading.Condition", "threading.Semaphore", "threading.Barrier", "_thread.lock", "_thread.RLock",
            "multiprocessing.synchronize.SemLock", "threading.local", "_thread._local",
        ),
        problem="a lock, or what is built on one, works within one process",
        remedy="Make it inside the function. In a class, leave it out in __getstate__ and make a new one in __setstate__; ranks "
        "wait for each other with torch.distributed.barrier().",
    ),
    Remedy(
        types=("weakref.ReferenceType", "weakref.WeakMethod", "weakref.ProxyType", "weakref.CallableProxyType", "weakref.finalize",
               "weakref.WeakKeyDictionary", "weakref.WeakValueDictionary"),
        problem="a weak reference does not keep what it points to, so a copy would point to nothing",
        remedy="Keep the object itself, or leave the reference out in __getstate__.",
    ),
    Remedy(
        types=("torch.jit._script.RecursiveScriptModule", "torch.jit._script.ScriptModule", "torch.ScriptFunction", "torch.jit.ScriptFunction"),
        problem="a compiled TorchScript program has no pickle",
        remedy="Pass the module it was made from, and call torch.jit.script inside the function.",
    ),
)  # fmt: skip


def find_remedy(value: object) -> Remedy | None:
    """The remedy for an object, by its class or a base of its class; None if there is none."""
    if isinstance(value, type):
        return None
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__}
    return next((remedy for remedy in _REMEDIES if not names.isdisjoint(remedy.types)), None)
