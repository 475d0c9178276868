"""The one pickler of kale_dist: cloudpickle's, with tensors' memory out of band and reducers for torch's objects.

Snapshots and outcomes are both written with it. Memory of tensors is not copied: the pickle holds a number in its
place, and `storages` lists the memory in the order of the numbers.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import multiprocessing.context
import pathlib
import pickle
import sys
import types
import typing
import weakref
from collections.abc import Callable, Sequence
from typing import IO, Any

import cloudpickle
from cloudpickle import cloudpickle as internals

from kale_dist.snapshot import reducers, training_arguments
from kale_dist.snapshot.identity import storage_id
from kale_dist.wire.blobs import Buffer

CHUNK_BYTES = 32 << 20
"""Memory of accelerators is copied in pieces of this size."""

_PARAMETRIZE, _GENERATED = "torch.nn.utils.parametrize", "Parametrized"
"""Where torch makes a class for each module with parametrizations, and how it names them."""

Reduced = Any
"""What a reducer returns: a tuple for pickle, or NotImplemented."""


class _Token:
    """Stands for an object that is pickled once, however often the pickler meets it."""

    __slots__ = ("reduced",)

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self.reduced = reduced


class DeviceMemory(Sequence[Buffer]):
    """Memory on an accelerator as a sequence of buffers of `CHUNK_BYTES`, each copied when it is accessed."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.nbytes: int = storage.nbytes()

    def __len__(self) -> int:
        return (self.nbytes + CHUNK_BYTES - 1) // CHUNK_BYTES

    def __getitem__(self, index: Any) -> Any:
        import torch

        if not 0 <= index < len(self):
            raise IndexError(index)
        whole = torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)
        piece = whole[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        return _view(torch.empty(piece.numel(), dtype=torch.uint8, device="cpu").copy_(piece).untyped_storage())


class TensorPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
    """Pickles with protocol 5 and everything large out of band.

    Args:
        file: Receives the pickle.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.storages: list[Sequence[Buffer]] = []
        self.storage_ids: list[int] = []
        """By `identity.storage_id`, those of `storages`."""
        self.last: object = None
        """The object that the pickler met last: after a failure, the one that cannot be pickled."""
        self._tokens: dict[int, tuple[_Token, object]] = {}
        self._reducers: dict[type, Callable[[Any], Reduced] | None] = {_Token: lambda token: token.reduced}
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, obj: Any) -> Reduced:
        """Reduce an object; pickle calls this for every object that is not a plain builtin one."""
        self.last = obj
        kind = type(obj)
        try:
            reduce = self._reducers[kind]
        except KeyError:
            reduce = self._reducers[kind] = self._choose(kind)
        return super().reducer_override(obj) if reduce is None else reduce(obj)

    def _choose(self, kind: type) -> Callable[[Any], Reduced] | None:
        """Our reducer for a type, or None. A class with its own pickling methods keeps them."""
        if issubclass(kind, multiprocessing.context.BaseContext):
            return lambda context: (reducers.make_context, (getattr(context, "_name", None),))
        if issubclass(kind, BaseException) and _is_plain_error(kind):
            return _reduce_error
        if kind in _STANDARD:
            return _STANDARD[kind]
        if f"{kind.__module__}.{kind.__qualname__}" in _SUMMARY_WRITERS:
            return _reduce_summary_writer
        if training_arguments.base_of(kind) is not None:
            return training_arguments.reduce
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        if kind is torch.Tensor:
            return _reduce_tensor
        if issubclass(kind, torch.UntypedStorage):
            return self._reduce_storage
        if issubclass(kind, torch.storage.TypedStorage):
            return self._reduce_typed_storage
        if issubclass(kind, torch.Generator):
            return _reduce_generator
        scheduler = torch.optim.lr_scheduler.LRScheduler
        for base, reduce in (
            (torch.optim.Optimizer, _reduce_optimizer),
            (scheduler, _reduce_scheduler),
            (torch.utils.data.DataLoader, _reduce_loader),
        ):
            if issubclass(kind, base) and not _pickles_itself(kind, base):
                return reduce
        if issubclass(kind, torch.nn.Module):
            if kind.__module__ == _PARAMETRIZE and kind.__name__.startswith(_GENERATED):
                return _reduce_parametrized
            takes_arguments = kind.__new__ is not object.__new__ and not hasattr(kind, "__getnewargs__")
            if takes_arguments and not (_pickles_itself(kind, torch.nn.Module) or hasattr(kind, "__getnewargs_ex__")):
                return _reduce_bare
        return None

    def _token(self, original: object, key: int, make: Callable[[], tuple[Any, ...]]) -> _Token:
        """The token of a key, created on first use. It keeps the original alive, so that the key stays unique."""
        if key not in self._tokens:
            self._tokens[key] = (_Token(make()), original)
        return self._tokens[key][0]

    def _reduce_storage(self, storage: Any) -> Reduced:
        # Several Python objects may stand for one storage; its C++ address is what tied weights share.
        return reducers.same, (self._token(storage, -storage_id(storage), lambda: self._number_storage(storage)),)

    def _number_storage(self, storage: Any) -> tuple[Any, ...]:
        index, accelerated = len(self.storages), storage.device.type != "cpu"
        self.storage_ids.append(storage_id(storage))
        if accelerated:
            _synchronize(storage.device)
            self.storages.append(DeviceMemory(storage))
        else:
            self.storages.append((_view(storage),) if storage.nbytes() else ())
        return reducers.make_storage, (index, accelerated)

    def _reduce_typed_storage(self, storage: Any) -> Reduced:
        return reducers.make_typed_storage, (storage._untyped_storage, storage.dtype)  # noqa: SLF001

    def _function_reduce(self, obj: types.FunctionType) -> Reduced:
        """Reduce a function as cloudpickle does, but a compiled one (`torch.compile`) as its original."""
        reduced = super()._function_reduce(obj)
        original = getattr(obj, "_torchdynamo_orig_callable", None)
        if reduced is NotImplemented or original is None:
            return reduced
        settings = inspect.getclosurevars(obj).nonlocals.get("self")
        return reduced if settings is None else (reducers.make_compiled, (settings, original))

    def _function_getnewargs(self, func: types.FunctionType) -> tuple[Any, ...]:
        """Arguments as cloudpickle's, but functions that share a variable of an enclosing function keep sharing it."""
        code, base_globals, name, defaults, _ = super()._function_getnewargs(func)
        return code, base_globals, name, defaults, self._cells(func)

    def _cells(self, func: types.FunctionType) -> tuple[_Token, ...] | None:
        if func.__closure__ is None:
            return None
        return tuple(self._token(cell, id(cell), lambda: (types.CellType, ())) for cell in func.__closure__)


def _reduce_tensor(tensor: Any) -> Reduced:
    make, args, *rest = tensor.__reduce_ex__(5)
    if type(args[0]).__name__ == "UntypedStorage":
        # Of uint16, float8 and others, torch reads only what its own files have in the place of a storage.
        args = types.SimpleNamespace(_untyped_storage=args[0]), *args[1:]
    return make, args, *rest


def _view(storage: Any) -> memoryview:
    """A view of a storage's bytes in main memory, without a copy; it keeps the storage alive."""
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    array.storage = storage  # holds the memory
    return memoryview(array).cast("B")


def _synchronize(device: Any) -> None:
    """Wait for kernels that still write to a device's memory, which other threads read on other streams."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pickles_itself(kind: type, base: type) -> bool:
    """Whether a class defines pickling methods beyond those of torch's base class."""
    return any(
        getattr(kind, name) is not getattr(base, name) for name in ("__getstate__", "__reduce_ex__", "__reduce__")
    )


def _is_plain_error(kind: type[BaseException]) -> bool:
    """Whether an exception has its own constructor, which pickle would call with `args` that it may not accept."""
    return (
        isinstance(kind.__init__, types.FunctionType)
        and kind.__reduce__ is BaseException.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
    )


def _reduce_error(error: BaseException) -> Reduced:
    return reducers.make_error, (type(error), error.args), dict(error.__dict__), None, None, reducers.set_attributes


def _reduce_code(code: types.CodeType) -> Reduced:
    """Reduce code with the file name that tracebacks, `inspect.getsource` and `breakpoint()` show; cloudpickle 3.1.3 leaves it out."""
    made, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return reducers.make_code, (code.co_filename, made, args)


def _reduce_cached(cached: Any) -> Reduced:
    if is_importable(cached):
        return NotImplemented
    parameters = cached.cache_parameters()
    return reducers.make_cached, (cached.__wrapped__, parameters["maxsize"], parameters["typed"])


def _reduce_new_type(new: Any) -> Reduced:
    made = reducers.make_new_type, (new.__name__, new.__module__, new.__supertype__)
    return NotImplemented if is_importable(new) else made


def is_importable(value: Any) -> bool:
    """Whether an object that pickles by name can be imported by that name; one that was made in a cell cannot."""
    return internals._lookup_module_and_qualname(value) is not None  # noqa: SLF001


_STANDARD: dict[type, Callable[[Any], Reduced]] = {
    types.CodeType: _reduce_code,
    type(functools.cache(len)): _reduce_cached,
    functools.cached_property: lambda one: (reducers.make_cached_property, (one.func, one.attrname)),
    typing.NewType: _reduce_new_type,
    weakref.WeakKeyDictionary: lambda weak: (
        weakref.WeakKeyDictionary,
        (),
        dict(weak),
        None,
        None,
        reducers.set_weak_items,
    ),
}
"""What cloudpickle reduces without its file name, and wrappers of the standard library that do not pickle around functions of
cells. `singledispatch` uses weak keys."""


_SUMMARY_WRITERS = ("torch.utils.tensorboard.writer.SummaryWriter", "tensorboardX.writer.SummaryWriter")


def _reduce_summary_writer(writer: Any) -> Reduced:
    folder = str(getattr(writer, "log_dir", None) or writer.logdir)
    return reducers.make_summary_writer, (
        type(writer),
        folder if "://" in folder else str(pathlib.Path(folder).absolute()),
    )


def _reduce_generator(generator: Any) -> Reduced:
    state = bytes(generator.get_state().numpy())
    return reducers.make_generator, (state, generator.device.type != "cpu", generator.initial_seed())


def _bare(kind: type, attributes: dict[str, Any], set_state: Callable[..., None] = reducers.set_attributes) -> Reduced:
    """Reduce to an instance without attributes, which `set_state` then fills."""
    return reducers.make_bare, (kind,), attributes, None, None, set_state


def _reduce_optimizer(optimizer: Any) -> Reduced:
    attributes = dict(optimizer.__dict__)
    # A scheduler replaces `step` by a wrapper around a weak reference; its own reducer puts a new one there.
    if hasattr(attributes.get("step"), reducers.IS_COUNTED):
        del attributes["step"]
    return _bare(type(optimizer), attributes, reducers.set_optimizer_state)


def _reduce_scheduler(scheduler: Any) -> Reduced:
    return _bare(type(scheduler), dict(scheduler.__dict__), reducers.set_scheduler_state)


def _reduce_loader(loader: Any) -> Reduced:
    # The iterator of persistent workers holds processes and queues of the notebook.
    return _bare(type(loader), {**loader.__dict__, reducers.LOADERS_ITERATOR: None})


def _reduce_bare(module: Any) -> Reduced:
    """Reduce a module whose class has its own `__new__`, which pickle would call without arguments (`ema_pytorch`)."""
    return _bare(type(module), dict(module.__dict__))


def _reduce_parametrized(module: Any) -> Reduced:
    return _bare(type(module).__bases__[0], dict(module.__dict__), reducers.set_parametrized_state)
