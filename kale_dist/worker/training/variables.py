"""The local variables of a step in the middle of its loop: kept with a checkpoint, and set again after a restart.

A checkpoint within an epoch is taken in the loader's `__next__`, with the step's frame below. After a restart the step is called
again and runs to its first batch, which is the one after the checkpoint. There its variables get the values that they had.

That is exact only where the step gets there by itself, so a checkpoint is refused, and the log says why, unless

- the request for the batch comes from the same frames and instructions as the first one of the pass,
- it comes from a `for` over the loader, over `enumerate` or `tqdm` of it, or over a generator of which the same holds, and no
  loop around it can have moved on since the pass began,
- each variable that may be read before it is set again is unchanged, comes back anyway, or is made of values that can be kept.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import dis
import functools
import gc
import hashlib
import inspect
import io
import pickle
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from kale_dist.snapshot.sources import is_users
from kale_dist.worker.training.result import load_state

MOST_BYTES = 64 << 20
"""A step whose variables hold more tensors than that gets no checkpoint within an epoch: all ranks exchange them."""

_MOST_VALUES = 200_000
_PICKLED_BYTES = 16 << 20
_DEPTH = 16
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS: dict[str, Any] = {
    "list": list, "tuple": tuple, "set": set, "deque": collections.deque, "dict": dict, "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict, "Counter": collections.Counter,
}  # fmt: skip
_WITH_STATE = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
_DISPLAYS = ("tqdm",)
_HERE = __name__.rpartition(".")[0]
_READY_MADE = f"{_HERE}.supervised"
"""The module of the steps that are used where a call gives none: they count as the user's."""
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_ENDS = frozenset(
    ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE",
     "JUMP_BACKWARD_NO_INTERRUPT")
)  # fmt: skip
"""Instructions after which the next one does not follow."""

_MISSING = object()
_KEPT_AS_IS = ("-",)


class Unkept(Exception):  # noqa: N818 - it never leaves this package
    """Why a checkpoint here could not be resumed from exactly; how a sentence about the step ends."""


class Variables:
    """Those of the frames between the loader's `__next__` and the training loop, in one pass.

    Args:
        root: The code of the loop's function that calls the step.
        known: Objects whose states a checkpoint holds anyway.
        passing: The iterator that gives the batches.
    """

    def __init__(self, root: types.CodeType, known: Iterable[Any], passing: Any) -> None:
        self._root = root
        known = list(known)
        self._known = {id(one) for one in (*known, passing)}
        modules = [one for one in known if isinstance(one, torch.nn.Module)]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._storages = {_address(tensor) for tensor in tensors if not torch.nn.parameter.is_lazy(tensor)}
        self._passing = passing
        self._holders: list[Any] | None = None
        self._made = _place(root)
        self._frames: list[tuple[types.FrameType, int]] = []
        self._first: dict[str, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """The step requests the first batch of the pass."""
        self._frames = _place(self._root)
        keeper = _Keeper(self._known, self._storages, None)
        keeper.keep_all(self._frames)
        self._first = keeper.seen

    def state(self) -> dict[str, Any]:
        """The variables, as values that a checkpoint can hold.

        Raises:
            Unkept: They cannot be kept, or the step would not come here by itself.
        """
        frames = _place(self._root)
        if not frames:
            raise Unkept("reads its loader in another thread")
        if len(frames) != len(self._frames) or any(
            one is not first or lasti != began
            for (one, lasti), (first, began) in zip(frames, self._frames, strict=True)
        ):
            raise Unkept("reads its loader at several places")
        if self._holders is None:
            self._holders = self._check(frames)
        keeper = _Keeper(self._known | {id(one) for one in self._holders}, self._storages, self._first)
        return {
            "frames": _signature(frames),
            "counts": [one.__reduce__()[1][1] for one in self._holders],
            "values": keeper.keep_all(frames),
            "made": sorted(keeper.made)[:5],
        }

    def load(self, state: dict[str, Any]) -> bool:
        """Set what `state` returned, where the step requests its first batch; returns False where it is at another place."""
        frames = _place(self._root)
        if _signature(frames) != [tuple(one) for one in state["frames"]]:
            return False
        holders = self._check(frames)
        if len(holders) != len(state["counts"]):
            return False
        loader = _Loader()
        bound = []
        for (frame, _), saved in zip(frames, state["values"], strict=True):
            now = frame.f_locals
            bound.append((frame, now, [(name, loader.load(node, now.get(name, _MISSING))) for name, node in saved]))
        # From here nothing is expected to fail: all variables are set, or none.
        for act in loader.acts:
            act()
        for frame, now, values in bound:
            for name, value in values:
                now[name] = value
            if sys.version_info < (3, 13):
                # There `f_locals` is a copy; this is how debuggers set a variable.
                ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
        for one, count in zip(holders, state["counts"], strict=True):
            _set_count(one, count)
        return True

    def _check(self, frames: list[tuple[types.FrameType, int]]) -> list[Any]:
        """Return the `enumerate` objects between the pass and the step, inner first.

        Raises:
            Unkept: Something else is between them that has a position of its own, or a loop around them.
        """
        held: list[Any] = _holders(self._passing)
        for number, (frame, lasti) in enumerate(frames):
            made = next((at for one, at in self._made if one is frame), None) if not number else None
            _check_place(frame.f_code, lasti, made)
            if not frame.f_code.co_flags & _SUSPENDS:
                return held
            if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                raise Unkept("is asynchronous")
            for one in gc.get_objects():
                if type(one) is types.GeneratorType and one.gi_frame is frame:
                    held += _holders(one)
        raise Unkept("is a generator")


# -- where the step is -------------------------------------------------------------------------------------------------


def _place(root: types.CodeType) -> list[tuple[types.FrameType, int]]:
    """The frames under ours with their positions, innermost first; empty where they do not lead to the loop."""
    frame, found = inspect.currentframe(), []
    while frame is not None and frame.f_code is not root:
        module = str(frame.f_globals.get("__name__", ""))
        is_ours = module.startswith((_HERE, "torch.")) and module != _READY_MADE
        if not is_ours or frame.f_code.co_flags & _SUSPENDS:
            found.append((frame, _offset(frame.f_code, frame.f_lasti)))
        frame = frame.f_back
    return found if frame is not None else []


def _offset(code: types.CodeType, lasti: int) -> int:
    """The offset of an instruction; a frame that has called another one stands at what the interpreter caches behind it."""
    offsets = [one.offset for one in _facts(code)[0]]
    return offsets[max(0, bisect.bisect_right(offsets, lasti) - 1)]


def _signature(frames: list[tuple[types.FrameType, int]]) -> list[tuple[str, str, int]]:
    return [(frame.f_code.co_qualname, _digest(frame.f_code), lasti) for frame, lasti in frames]


@functools.cache
def _digest(code: types.CodeType) -> str:
    constants = [one for one in code.co_consts if isinstance(one, (*_PLAIN, bytes))]
    return hashlib.sha256(repr((code.co_code, constants, code.co_names, code.co_varnames)).encode()).hexdigest()[:16]


def _holders(iterator: Any) -> list[Any]:
    """The `enumerate` objects that hold an iterator, inner first.

    Raises:
        Unkept: Another iterator holds it.
    """
    holders = [one for one in gc.get_referrers(iterator) if hasattr(type(one), "__next__") or type(one) is tuple]
    # `zip` and `map` hold a tuple of their iterators.
    holders += [two for one in holders if type(one) is tuple for two in gc.get_referrers(one)]
    held = {id(one): one for one in holders if hasattr(type(one), "__next__") and not _is_passing(one)}
    others = [one for one in held.values() if type(one) is not enumerate]
    if others or len(held) > 1:
        raise Unkept(f"reads its loader through {type((others or [*held.values()])[0]).__name__}()")
    if not held:
        return []
    (one,) = held.values()
    if not _can_set_counts():
        raise Unkept("reads its loader through enumerate()")
    return [one, *_holders(one)]


def _is_passing(one: Any) -> bool:
    """Whether an iterator is torch's or ours, or a generator, whose frame is looked at by itself."""
    return isinstance(one, types.GeneratorType) or type(one).__module__.startswith((_HERE, "torch."))


def _set_count(one: Any, count: int) -> None:
    """Have an `enumerate` object go on from a number; it keeps that behind the head that every object has."""
    ctypes.c_ssize_t.from_address(id(one) + object.__basicsize__).value = count


@functools.cache
def _can_set_counts() -> bool:
    if sys.implementation.name != "cpython":
        return False
    one: enumerate[object] = enumerate(())
    _set_count(one, 7)
    return bool(one.__reduce__()[1][1] == 7)  # noqa: PLR2004 - what was set


def _check_place(code: types.CodeType, lasti: int, made: int | None) -> None:
    """Raise `Unkept` unless a frame is at a loop that starts anew when its function is called again.

    Args:
        code: The frame's.
        lasti: Offset of the instruction that requests a batch.
        made: Offset at which the pass was made, if that was in this frame.
    """
    instructions, _, loops = _facts(code)
    at = next(one for one in instructions if one.offset == lasti)
    if at.opname not in ("FOR_ITER", "SEND"):
        raise Unkept("reads its loader by something else than a for loop")
    for one in instructions:
        if one.opname in ("LIST_APPEND", "SET_ADD", "MAP_ADD"):
            around = sorted((start for start, end in loops.items() if start <= one.offset <= end), reverse=True)
            # The collection is below so many iterators on the stack of values, which cannot be kept.
            if lasti in around[: (one.arg or 0) - 1]:
                raise Unkept("reads its loader in a comprehension")
    around = [start for start, end in loops.items() if start < lasti <= end]
    if around:
        # Straight from where the pass is made to its loop: the loops around have not moved on since.
        between = [one for one in instructions if made is not None and made < one.offset < lasti]
        jumps = {_target(one) for one in instructions if one.offset < lasti} - {None}
        is_straight = made is not None and made < lasti and all(_target(one) is None for one in between)
        if not is_straight or jumps & {one.offset for one in (*between, at)}:
            raise Unkept("reads its loader in a loop inside another one")


def _target(one: dis.Instruction) -> int | None:
    return int(one.argval) if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs else None


@functools.cache
def _facts(code: types.CodeType) -> tuple[list[dis.Instruction], dict[int, frozenset[str]], dict[int, int]]:
    """A code's instructions, the variables that may be read after each before they are set, and its loops.

    Variables that functions inside share always count. Loops are the offsets of their first and last instructions.
    """
    instructions = list(dis.get_instructions(code))
    index = {one.offset: number for number, one in enumerate(instructions)}
    handlers = [(one.start, one.end, one.target) for one in dis.Bytecode(code).exception_entries]  # type: ignore[attr-defined]
    loops: dict[int, int] = {}
    follows: list[list[int]] = []
    for number, one in enumerate(instructions):
        next_ones = [] if one.opname in _ENDS else [number + 1]
        if (target := _target(one)) is not None:
            next_ones.append(index[target])
            if target <= one.offset:
                loops[target] = max(loops.get(target, 0), one.offset)
        next_ones += [index[target] for start, end, target in handlers if start <= one.offset < end]
        follows.append([following for following in next_ones if following < len(instructions)])
    before: list[frozenset[str]] = [frozenset()] * len(instructions)
    is_changing = True
    while is_changing:
        is_changing = False
        for number in range(len(instructions) - 1, -1, -1):
            live = frozenset[str]().union(*(before[following] for following in follows[number]))
            for what, name in reversed(_uses(instructions[number])):
                live = live | {name} if what == "LOAD" else live - {name}
            if any(start <= instructions[number].offset < end for start, end, _ in handlers):
                # What an exception leads to sees the variable as it was before.
                live = live.union(*(before[following] for following in follows[number][1:]))
            if live != before[number]:
                before[number], is_changing = live, True
    names = frozenset((*code.co_cellvars, *code.co_freevars))
    if {"locals", "vars", "eval", "exec"} & set(code.co_names):
        names |= frozenset(code.co_varnames)
    after = {
        one.offset: names | (before[number + 1] if number + 1 < len(before) else frozenset())
        for number, one in enumerate(instructions)
    }
    return instructions, after, loops


def _uses(one: dis.Instruction) -> list[tuple[str, str]]:
    """What an instruction does to which local variables, in its order."""
    what = re.findall("(LOAD|STORE|DELETE)_FAST", one.opname)
    return list(zip(what, one.argval if isinstance(one.argval, tuple) else (one.argval,), strict=False))


# -- values ------------------------------------------------------------------------------------------------------------


class _Keeper:
    """Makes trees of tuples, plain values and tensors of a step's values.

    Args:
        known: Identities of objects that come back anyway.
        storages: Addresses of the weights' memory.
        first: What `seen` was at the first request; None at the first request itself.
    """

    def __init__(
        self, known: Collection[int], storages: Collection[int], first: dict[str, tuple[Any, Any]] | None
    ) -> None:
        self.seen: dict[str, tuple[Any, Any]] = {}
        self.made: set[str] = set()
        """Paths of objects, such as files, that the step makes anew and nothing can be said of."""
        self._known, self._storages, self._first = known, storages, first
        self._tokens: dict[int, int] = {}
        self._as_is: set[int] = set()
        self._memory: dict[int, str] = {}
        self._alive: list[Any] = []
        self._bytes = self._count = 0

    def keep_all(self, frames: Iterable[tuple[types.FrameType, int]]) -> list[list[tuple[str, Any]]]:
        """Return the trees of each frame's variables that may be read, by name, but of those that come back anyway."""
        kept = []
        for number, (frame, lasti) in enumerate(frames):
            now, found = frame.f_locals, []
            is_display = str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DISPLAYS
            for name in () if is_display else sorted(_facts(frame.f_code)[1][lasti]):
                path = f"{number}.{name}"
                if name in now:
                    found.append((name, self.keep(now[name], path, 0)))
                elif path in (self._first or ()):
                    raise Unkept(f"deletes {name}")
            if sys.version_info < (3, 13):
                # The copy would hold the tensors of this batch.
                now.clear()
            kept.append([(name, node) for name, node in found if node != _KEPT_AS_IS])
        return kept

    def keep(self, value: Any, path: str, depth: int) -> Any:
        """Return the tree of a value; at the first request only note what it is."""
        try:
            return self._keep(value, path, depth)
        except Unkept:
            if self._first is not None:
                raise
            return _KEPT_AS_IS

    def _keep(self, value: Any, path: str, depth: int) -> Any:
        self._count += 1
        kind = type(value)
        if kind in _PLAIN:
            self.seen[path] = value, None
            # Also what has not changed: what the step does before its loop may depend on the weights.
            return ("=", value)
        if id(value) in self._known or isinstance(value, types.ModuleType | type | torch.dtype | torch.device):
            return self._constant(value, path)
        if kind.__module__.partition(".")[0] in _DISPLAYS:
            return _KEPT_AS_IS
        if depth > _DEPTH or self._count > _MOST_VALUES:
            raise self._unkept("holds too many values in", value, path)
        if (token := self._tokens.get(id(value))) is not None:
            return ("r", token) if token not in self._as_is else self._constant(value, path)
        token = self._tokens[id(value)] = len(self._tokens)
        # An address is not given to another object meanwhile.
        self._alive.append(value)
        node = self._mutable(value, path, token, depth)
        if node == _KEPT_AS_IS:
            self._as_is.add(token)
        return node

    def _mutable(self, value: Any, path: str, token: int, depth: int) -> Any:
        kind = type(value)
        self.seen[path] = value, None
        if isinstance(value, Tensor):
            return self._tensor(value, path, token)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            return self._array(value, path, token)
        if (name := kind.__name__) in _CONTAINERS and kind is _CONTAINERS[name]:
            return self._container(value, name, path, token, depth)
        if isinstance(value, tuple) and hasattr(kind, "_fields") and self._is_same_kind(value, path):
            return ("fields", token, [self.keep(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)])
        if isinstance(value, _WITH_STATE) and self._is_same_kind(value, path):
            inner = _Keeper((), (), {})
            inner._bytes = self._bytes
            state = inner.keep(value.state_dict(), path, depth + 1)
            self._bytes = inner._bytes
            return ("state", token, state)
        if isinstance(value, torch.Generator):
            return ("generator", token, value.get_state())
        if isinstance(value, types.FunctionType) and self._is_same_kind(value, path):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            filled = [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
            return ("cells", token, [(name, self.keep(one, f"{path}.{name}", depth + 1)) for name, one in filled])
        owner = getattr(value, "__self__", None)
        if isinstance(value, types.MethodType | types.BuiltinMethodType) and self._is_same_kind(value, path):
            return _KEPT_AS_IS if owner is None else ("self", token, self.keep(owner, f"{path}.__self__", depth + 1))
        if _has_open_fields(value) and self._is_same_kind(value, path):
            parts = [(name, self.keep(one, f"{path}.{name}", depth + 1)) for name, one in vars(value).items()]
            return ("object", token, parts)
        return self._opaque(value, path, token)

    def _before(self, path: str) -> tuple[Any, Any]:
        return (self._first or {}).get(path, (_MISSING, None))

    def _constant(self, value: Any, path: str) -> Any:
        """What every run of the step gets by itself, if it is the same as at the first request."""
        self.seen[path] = value, None
        if self._first is not None and self._before(path)[0] is not value:
            raise self._unkept("carries", value, path)
        return _KEPT_AS_IS

    def _is_same_kind(self, value: Any, path: str) -> bool:
        """Whether the step called again has an object of this class there, whose fields can be set."""
        return self._first is None or type(self._before(path)[0]) is type(value)

    def _unkept(self, does: str, value: Any, path: str) -> Unkept:
        return Unkept(f"{does} {path.partition('.')[2]} ({type(value).__name__}) from batch to batch")

    def _tensor(self, value: Tensor, path: str, token: int) -> Any:
        if self._first is None:
            return _KEPT_AS_IS
        is_parameter = isinstance(value, torch.nn.Parameter)
        is_odd = value.layout is not torch.strided or isinstance(value, DTensor) or value.is_quantized
        if is_odd or value.grad_fn is not None or (value.requires_grad and value.grad is not None and not is_parameter):
            raise self._unkept("carries", value, path)
        address = _address(value)
        if value.numel() and (address in self._storages or self._memory.setdefault(address, path) != path):
            raise self._unkept("carries, with memory that others share,", value, path)
        self._bytes += value.nbytes
        if self._bytes > MOST_BYTES:
            raise self._unkept(f"carries more than {MOST_BYTES >> 20} MiB of tensors, with", value, path)
        if is_parameter and self._before(path)[0] is not value:
            raise self._unkept("carries", value, path)
        kept = value.detach().cpu().as_subclass(Tensor)
        kept = kept.clone() if kept.data_ptr() == value.data_ptr() else kept
        return ("tensor", token, kept, bool(value.requires_grad), is_parameter, str(value.device))

    def _array(self, value: Any, path: str, token: int) -> Any:
        if self._first is None:
            return _KEPT_AS_IS
        owner = value
        while type(owner.base) is type(value):
            owner = owner.base
        self._alive.append(owner)
        self._bytes += value.nbytes
        if self._memory.setdefault(id(owner), path) != path or self._bytes > MOST_BYTES:
            raise self._unkept("carries", value, path)
        try:
            return ("array", token, torch.from_numpy(value.copy()))
        except (TypeError, ValueError):  # of a kind that no tensor has
            raise self._unkept("carries", value, path) from None

    def _container(self, value: Any, name: str, path: str, token: int, depth: int) -> Any:
        if isinstance(value, dict):
            # A key has to be plain: its order and its place in the present dict are found by it.
            if any(type(key) not in _PLAIN for key in value):
                raise self._unkept("carries", value, path)
            items = [(key, self.keep(one, f"{path}[{key!r}]", depth + 1)) for key, one in value.items()]
            return ("dict", token, name, items, getattr(value, "default_factory", None) is not None)
        if isinstance(value, set):
            if any(type(one) not in _PLAIN for one in value):
                raise self._unkept("carries", value, path)
            # Between attempts the order of a set of texts may differ, as hashes do.
            return ("set", token, list(value))
        items = [self.keep(one, f"{path}[{i}]", depth + 1) for i, one in enumerate(value)]
        return (name, token, items, value.maxlen if name == "deque" else None)

    def _opaque(self, value: Any, path: str, token: int) -> Any:
        """An object without open fields: it must not have changed, as far as its pickled form tells."""
        is_file = isinstance(value, io.IOBase)
        if hasattr(type(value), "__next__") and not is_file:
            raise self._unkept("carries", value, path)
        mark = None if is_file else _pickled(value)
        self.seen[path] = value, mark
        first, was = self._before(path)
        if self._first is not None and (mark != was or (mark is None and first is not value)):
            raise self._unkept("carries", value, path)
        if mark is None:
            self.made.add(f"{path.partition('.')[2]} ({type(value).__name__})")
            return _KEPT_AS_IS
        return ("same", token, mark)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True


def _has_open_fields(value: Any) -> bool:
    """Whether an object's fields are all of it: of a class of the job's own code, or a module."""
    if isinstance(value, torch.nn.Module):
        return True
    kind = type(value)
    if not hasattr(value, "__dict__") or hasattr(kind, "__next__") or isinstance(value, tuple(_CONTAINERS.values())):
        return False
    if any("__slots__" in vars(one) and vars(one)["__slots__"] for one in kind.__mro__):
        return False
    if kind.__module__ in ("__main__", _READY_MADE) or kind is types.SimpleNamespace:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ not in sys.builtin_module_names and (file is None or is_users(file))


def _pickled(value: Any) -> str | None:
    """A digest of a pickled object; None where it cannot be pickled."""
    digest, size = hashlib.sha256(), 0

    class Sink:
        def write(self, data: Any) -> int:
            nonlocal size
            size += len(data)
            if size > _PICKLED_BYTES:
                raise Unkept(f"holds a large {type(value).__name__}")
            digest.update(data)
            return len(data)

    try:
        pickle.dump(value, Sink(), protocol=4)
    except Unkept:
        raise
    except Exception:  # noqa: BLE001 - whatever it raises, it cannot be pickled
        return None
    return digest.hexdigest()


def _address(tensor: Any) -> int:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage().data_ptr()) if local.layout is torch.strided else id(local)


class _Loader:
    """Makes values of the trees of a `_Keeper`. What it changes in place is changed by its `acts`, after all was read."""

    def __init__(self) -> None:
        self.acts: list[Callable[[], Any]] = []
        self._loaded: dict[int, Any] = {}
        self._taken: set[int] = set()

    def load(self, node: Any, now: Any) -> Any:
        """Return the value of a tree: the present one, to be changed in place, where others may refer to it.

        Args:
            node: The tree.
            now: What the step called again has at its place.

        Raises:
            KeyError, TypeError, AttributeError: It has something else there.
        """
        if node[0] == "-":
            if now is _MISSING:
                raise KeyError("a value that was unchanged is not there")
            return now
        if node[0] == "=":
            return node[1]
        if node[0] == "r":
            return self._loaded[node[1]]
        # Two present names of one object may have been two objects then.
        if id(now) in self._taken:
            now = _MISSING
        self._taken.add(id(now))
        value = self._loaded[node[1]] = self._begin(node, now)
        self._fill(node, value, now)
        return self._loaded[node[1]]

    def _begin(self, node: Any, now: Any) -> Any:
        """The object of a node, without what is in it."""
        kind = node[0]
        if kind in ("list", "set", "deque", "dict"):
            name = node[2] if kind == "dict" else kind
            if type(now) is _CONTAINERS[name]:
                return now
            if kind == "dict" and node[4]:
                raise TypeError("a dict's factory cannot be made")
            return collections.deque(maxlen=node[3]) if kind == "deque" else _CONTAINERS[name]()
        if kind in ("same", "object", "state", "generator", "cells", "self", "fields") and now is _MISSING:
            raise KeyError("an object is not there")
        return now

    def _fill(self, node: Any, value: Any, now: Any) -> None:
        kind, token, *rest = node
        match kind:
            case "tensor":
                tensor, requires_grad, is_parameter, device = rest
                if is_parameter:
                    if now.shape != tensor.shape:
                        raise TypeError("a parameter has another shape")
                    self.acts.append(functools.partial(_copy, now, tensor))
                else:
                    target = now.device if isinstance(now, Tensor) else torch.device(device)
                    self._loaded[token] = tensor.to(target).requires_grad_(requires_grad)
            case "array":
                self._loaded[token] = rest[0].numpy().copy()
            case "list" | "deque":
                items = [self.load(one, _item(now, i)) for i, one in enumerate(rest[0])]
                self.acts.append(functools.partial(load_state, value, items))
            case "tuple" | "fields":
                items = [self.load(one, _item(now, i)) for i, one in enumerate(rest[0])]
                self._loaded[token] = tuple(items) if kind == "tuple" else type(now)(*items)
            case "set":
                self.acts.append(functools.partial(load_state, value, rest[0]))
            case "dict":
                present = now if isinstance(now, dict) else {}
                pairs = {key: self.load(one, present.get(key, _MISSING)) for key, one in rest[1]}
                self.acts.append(functools.partial(load_state, value, pairs))
            case "object":
                fields = vars(now)
                pairs = {name: self.load(one, fields.get(name, _MISSING)) for name, one in rest[0]}
                self.acts.append(functools.partial(load_state, fields, pairs))
            case "cells":
                cells = dict(zip(now.__code__.co_freevars, now.__closure__ or (), strict=True))
                for name, one in rest[0]:
                    content = self.load(one, cells[name].cell_contents)
                    self.acts.append(functools.partial(setattr, cells[name], "cell_contents", content))
            case "self":
                self.load(rest[0], now.__self__)
            case "state":
                inner = _Loader()
                state = inner.load(rest[0], _MISSING)
                for act in inner.acts:
                    act()
                if state:
                    self.acts.append(functools.partial(now.load_state_dict, state))
            case "same":
                if _pickled(now) != rest[0]:
                    raise TypeError("an object has another value")
            case "generator":
                self.acts.append(functools.partial(now.set_state, rest[0]))
            case _:
                raise KeyError(kind)


def _item(now: Any, index: int) -> Any:
    return now[index] if isinstance(now, list | tuple | collections.deque) and index < len(now) else _MISSING


def _copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
