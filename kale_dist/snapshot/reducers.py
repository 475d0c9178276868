"""The functions that the pickles of kale_dist call when they are loaded: they make functions, storages, optimizers, loaders.

A pickle names these functions, so their names and arguments are a part of the format (`wire.VERSION`). What they
need beyond their arguments (which globals, which buffers, which device) is in the `Loading` of the load in progress.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import multiprocessing
import multiprocessing.context
import operator
import pathlib
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from kale_dist.errors import SnapshotDamagedError
from kale_dist.snapshot import folders
from kale_dist.snapshot.identity import storage_id
from kale_dist.snapshot.origin import MAPPED_BYTES
from kale_dist.wire import context


class References:
    """Numbers for the functions and classes that are sent by value, the same on both sides.

    A function of a cell has no module from which a rank could import it, so the rank makes a second one from its code.
    Were that second one sent back by value, the notebook would get a third, with globals of its own. Its number is sent
    back instead, and means the notebook's own object there. Objects are held, so that an address means one object only.
    """

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._indices: dict[int, int] = {}

    def add(self, index: int, value: object) -> None:
        """Give an object its number."""
        self._objects[index] = value
        self._indices[id(value)] = index

    def index_of(self, value: object) -> int | None:
        """The number of this very object, or None."""
        return self._indices.get(id(value))

    def resolve(self, index: int) -> Any:
        """The object of a number.

        Raises:
            LookupError: No object has it.
        """
        try:
            return self._objects[index]
        except KeyError:
            raise LookupError(f"no function or class of the snapshot has the number {index}") from None

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._objects.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """What the functions of this module need during one load."""

    storage: Callable[[int], memoryview]
    """The bytes of a tensor storage by its number; each call gives memory of its own."""
    main: dict[str, Any]
    """Globals of functions that came from the notebook's `__main__`."""
    references: References
    """Receives the functions and classes that are made."""
    resolve: Callable[[int], Any]
    """Returns the object of a number in a result."""
    device: str = "cpu"
    """Where tensors go that were on an accelerator: "cpu", or a device of the loading process."""
    returned: pathlib.Path | None = None
    """Where the files of folders go that a function returned."""
    made: dict[int, int] = dataclasses.field(default_factory=dict)
    """Receives the number of each storage that is made, by `storage_id`."""


IS_COUNTED = "_wrapped_by_lr_sched"
"""The mark of an optimizer's `step` that counts for its schedulers; they wrap a `step` without, or warn."""

SCHEDULERS = "_schedulers"
MILESTONES = "_milestones"
"""Where a scheduler that is made of others keeps these, and the steps at which the next one takes over."""

LOADERS_ITERATOR = "_iterator"
"""Where a DataLoader keeps the iterator of persistent workers."""

_current: contextvars.ContextVar[Loading] = contextvars.ContextVar("loading")


@contextlib.contextmanager
def loading(surroundings: Loading) -> Iterator[None]:
    """Make `surroundings` the ones of the loads in this block."""
    token = _current.set(surroundings)
    try:
        yield
    finally:
        _current.reset(token)


# -- functions, classes, modules -------------------------------------------------------------------------------------


def make(index: int, module: str, qualname: str, constructor: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Make a function or class that was sent by value; register its number, and its name in `__main__`."""
    now = _current.get()
    # A class that its own metaclass or base keeps in a registry is in the pickle twice; made again, it would register
    # itself again.
    with contextlib.suppress(LookupError):
        return now.references.resolve(index)
    made = constructor(*args)
    now.references.add(index, made)
    if isinstance(made, type):
        made.__qualname__ = qualname
    if module == "__main__" and qualname.isidentifier():
        now.main.setdefault(qualname, made)
    return made


def make_code(file: str, constructor: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    """Make a code object whose function was defined in `file`, a cell or a script."""
    return constructor(*args).replace(co_filename=file)


def make_function(code: types.CodeType, kind: str, module: str, closure: tuple[types.CellType, ...] | None) -> Any:
    """Make a function of which only the code is sent.

    Args:
        code: The function's code.
        kind: Which globals it gets: "main", "import" (an importable module's) or "value" (a module without a file).
        module: The name of that module.
        closure: Empty cells, which pickle fills later.
    """
    if kind == "main":
        namespace = _current.get().main
    elif kind == "value":
        namespace = make_module(module).__dict__
    else:
        namespace = importlib.import_module(module).__dict__
    return types.FunctionType(code, namespace, None, None, closure)


def make_cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:  # noqa: FBT001 - pickles call by position
    """Wrap a function in `functools.lru_cache`; the notebook's cached values are not sent."""
    return functools.lru_cache(maxsize, typed)(function)


def make_cached_property(function: Callable[[Any], Any], name: str | None) -> Any:
    """Make a `functools.cached_property`; in Python 3.11 it gets a new lock."""
    made = functools.cached_property(function)
    made.attrname = name
    return made


def make_new_type(name: str, module: str, supertype: Any) -> Any:
    """Make a `typing.NewType`."""
    made = typing.NewType(name, supertype)  # type: ignore[misc] # its checker wants a literal
    made.__module__ = module
    return made


def make_compiled(context: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Apply `torch.compile` to a function again; torch compiles it at its first call."""
    return context(function)


def set_weak_items(weak: weakref.WeakKeyDictionary[Any, Any], items: dict[Any, Any]) -> None:
    """Fill a dictionary with weak keys; a key stays only if another object refers to it."""
    weak.update(items)


def make_module(name: str) -> types.ModuleType:
    """The module without a file of this name; empty when it is first made."""
    return sys.modules.setdefault(name, types.ModuleType(name))


def set_module_state(module: types.ModuleType, state: dict[str, Any]) -> None:
    """Fill a module without a file."""
    module.__dict__.update(state)


def resolve(index: int) -> Any:
    """The receiving side's own object for a number of the snapshot."""
    return _current.get().resolve(index)


def make_folder(number: int, name: str, files: dict[str, memoryview]) -> folders.Folder:
    """Write the files of a folder that a function returned; by the number, because several may have one name."""
    parent = _current.get().returned
    if parent is None or pathlib.PurePath(name).name != name:
        raise SnapshotDamagedError(f"A returned folder has no place here: {name!r}")
    return folders.unpack(parent / str(number) / name, files)


def there(name: str, path: str) -> Any:
    """An object that this process has in its `__main__`; with a path, a part of that module."""
    value = _current.get().main[name]
    return operator.attrgetter(path)(value) if path else value


# -- tensors ---------------------------------------------------------------------------------------------------------


def _torch() -> Any:
    """Import torch late; much of what is used here has no types."""
    return importlib.import_module("torch")


def make_storage(index: int, accelerated: bool) -> Any:  # noqa: FBT001 - pickles call by position
    """Make a storage: mapped copy-on-write if it is large, or on the load's device if it came from an accelerator.

    Returns:
        A `torch.UntypedStorage`.
    """
    torch = _torch()
    now = _current.get()
    view = now.storage(index)
    device = now.device if accelerated else "cpu"
    if device == "cpu" and view.nbytes >= MAPPED_BYTES:
        storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        _mapped.add(storage.data_ptr())
    else:
        storage = torch.UntypedStorage(view.nbytes, device=device)
        if view.nbytes:
            source = torch.frombuffer(view, dtype=torch.uint8)
            torch.empty(0, dtype=torch.uint8, device=device).set_(storage).copy_(source)
    now.made[storage_id(storage)] = index
    return storage


def make_typed_storage(storage: Any, dtype: Any) -> Any:
    """The typed view of a storage that torch's own reducers expect."""
    return _torch().storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def set_tensor_hooks(tensor: Any, hooks: tuple[list[Any], list[Any]]) -> None:
    """Register the hooks that a tensor had."""
    for register, functions in zip(
        (tensor.register_hook, tensor.register_post_accumulate_grad_hook), hooks, strict=True
    ):
        for function in functions:
            register(function)


def same(value: Any) -> Any:
    """Return the argument: for objects that are pickled as another one."""
    return value


def make_generator(state: bytes, accelerated: bool, seed: int) -> Any:  # noqa: FBT001 - pickles call by position
    """Make a `torch.Generator` in the original's state; on the CPU in place of an accelerator, it keeps only the seed."""
    import torch

    device = _current.get().device if accelerated else "cpu"
    generator = torch.Generator(device)
    if accelerated and device == "cpu":
        return generator.manual_seed(seed)
    return generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def make_device() -> Any:
    """The load's device, for a `torch.device` of a GPU."""
    return _torch().device(_current.get().device)


_mapped: set[int] = set()


def copy_out_on_resize() -> None:
    """Let tensors in a mapped file be resized: they are first copied to ordinary memory.

    Torch refuses to resize memory that is not its own. Only for ranks: it patches `torch.Tensor`.
    """
    import torch

    set_tensor = torch.Tensor.set_

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def resize(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            # A resize that fails has changed the tensor's shape already.
            shape = tensor.storage_offset(), tensor.size(), tensor.stride()
            try:
                return method(tensor, *args, **kwargs)
            except RuntimeError as error:
                given = [value if isinstance(value, torch.UntypedStorage) else None for value in args]
                copied = [_copy_out(storage) for storage in (tensor.untyped_storage(), *given)]
                if "not resizable" not in str(error) or all(copy is None for copy in copied):
                    raise
            if copied[0] is not None:
                with torch.no_grad():
                    set_tensor(tensor, copied[0], *shape)
            moved = [old if new is None else new for new, old in zip(copied[1:], args, strict=True)]
            return method(tensor, *moved, **kwargs)

        resize.kale_dist = True  # type: ignore[attr-defined]
        return resize

    for name in ("resize_", "resize_as_", "set_"):
        method = getattr(torch.Tensor, name)
        if not hasattr(method, "kale_dist"):
            setattr(torch.Tensor, name, wrap(method))


def _copy_out(storage: Any) -> Any:
    """A copy in ordinary memory of a storage in a mapped file; None for other storages."""
    return None if storage is None or storage.data_ptr() not in _mapped else storage.clone()


# -- objects rebuilt without their constructor -----------------------------------------------------------------------


def make_bare(cls: type) -> Any:
    """An instance without attributes."""
    return object.__new__(cls)


def make_error(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception with these `args`, even if its constructor takes other arguments."""
    error = cls.__new__(cls, *args)
    error.args = args
    return error


def set_attributes(instance: Any, attributes: dict[str, Any]) -> None:
    """Restore attributes without the class's own `__setattr__`."""
    instance.__dict__.update(attributes)


def set_optimizer_state(optimizer: Any, attributes: dict[str, Any]) -> None:
    """Fill an optimizer, and hook its class's `step` as torch does (once a class).

    Wrappers around optimizers, such as Lookahead, often do not call torch's constructor; `defaults` is set for them.
    """
    import torch

    torch.optim.Optimizer.__setstate__(optimizer, {"defaults": {}, **attributes})


def set_scheduler_state(scheduler: Any, attributes: dict[str, Any]) -> None:
    """Fill a learning-rate scheduler, and let its optimizer count steps for it, as its constructor did."""
    scheduler.__dict__.update(attributes)
    optimizer = attributes.get("optimizer")
    if optimizer is None or hasattr(optimizer.step, IS_COUNTED):
        return
    reference = weakref.ref(optimizer)
    function = optimizer.step.__func__

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        stepped: Any = reference()
        note_step(stepped)
        return function.__get__(stepped, type(stepped))(*args, **kwargs)

    setattr(step, IS_COUNTED, True)
    optimizer.step = step


def note_step(optimizer: Any) -> None:
    """Tell torch's schedulers that their optimizer has made a step; they warn where none came before theirs."""
    optimizer._opt_called = True  # noqa: SLF001


def set_parametrized_state(module: Any, attributes: dict[str, Any]) -> None:
    """Fill a module with parametrizations (weight norm, spectral norm) and give it its generated class again."""
    from torch.nn.utils import parametrize

    module.__dict__.update(attributes)
    parametrize._inject_new_class(module)  # noqa: SLF001 - torch's own deepcopy of such a module does the same
    for name in module.parametrizations:
        parametrize._inject_property(module, name)  # noqa: SLF001


class SilentWriter:
    """Replaces TensorBoard's writer in ranks other than 0, whose points would mix with those of rank 0."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


def make_summary_writer(kind: Callable[[str], Any], folder: str) -> Any:
    """Make TensorBoard's `SummaryWriter` for the notebook's folder; a silent one in ranks other than 0."""
    return SilentWriter() if context.context().rank else kind(folder)


def make_context(method: str | None) -> Any:
    """The `multiprocessing` context of a start method; None is the default one."""
    if method is None:
        return multiprocessing.context._default_context  # noqa: SLF001 - has no public name
    return multiprocessing.get_context(method)


def ipython() -> Any:
    """Replaces the notebook's `get_ipython` in a rank, which has no shell."""
    return None
