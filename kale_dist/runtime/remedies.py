"""What to do about the objects that usually cannot be pickled."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Why a kind of object cannot be pickled, and what to do."""

    types: tuple[str, ...]
    """Qualified names of classes; a name that ends with a dot stands for a package's classes of these names."""
    problem: str
    remedy: str


OTHER = Remedy(
    types=(),
    problem="",
    remedy="Make it inside the function, or leave it out: give its class a __getstate__ that drops it.",
)

_REMEDIES = (
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
            "ctypes._Pointer", "_ctypes._Pointer", "_ctypes.CFuncPtr",
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
        remedy="Pass the function that makes it, or make a list of its items.",
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


def name_of_type(value: object) -> str:
    """Qualified name of an object's class, such as "_io.TextIOWrapper"; for a class or a function, its own."""
    cls = value if isinstance(value, type) else type(value)
    return cls.__qualname__ if cls.__module__ in {"builtins", "__main__"} else f"{cls.__module__}.{cls.__qualname__}"


def find(value: object) -> Remedy | None:
    """The remedy for an object by its class or a base of it, or None."""
    if isinstance(value, type):
        return None
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__}
    return next((remedy for remedy in _REMEDIES if not names.isdisjoint(remedy.types)), None)
