"""What a job's ranks have changed of the objects that its call was given or uses, besides weights: it comes back by paths.

Notebook and ranks walk over the same objects and give each the same path, such as `model.blocks[0].alpha`. What differs from what
arrived is packed into a pickle of plain values, with its tensors beside it, and is written in place where that can be.
The snapshot has the bytes of what arrived: tensors and arrays are compared with it, and no copy is made.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import pickle
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from kale_dist.snapshot.identity import checksum, has_same_bytes, is_same_array, times_changed
from kale_dist.snapshot.origin import Origin, Stayed, is_own
from kale_dist.wording import listed

Path: TypeAlias = tuple[Any, ...]
"""The name of an object of the call, then names of attributes, keys and positions."""

Place: TypeAlias = tuple[Path, bool]
"""Where something has changed, and whether another object stands there now."""

_MANY = 10_000
"""Longer lists and dicts are not looked into: they count as changed by their length alone."""

_NESTED = 8
"""Tuples that are nested more deeply are looked into as lists are."""

_CALLED = 3
"""How far functions that call each other are followed."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

_DICTS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)

_SENT = (collections.deque, *_DICTS, complex, tuple, list, set, frozenset, int, float, bool, str)
"""The classes that a pickle of changes may name."""

_OF_PARTS, _OF_VALUES = ("list", "deque", "tuple", "dict"), ("set", "frozenset")
_OF_ATTRIBUTES, _OF_STATE = ("module", "optimizer", "own"), ("state", "optimizer")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What one rank has changed."""

    places: tuple[Place, ...]
    values: bytes
    """The pickled list of what these contain; objects that arrived are named by their paths, and tensors by their numbers."""
    tensors: tuple[Any, ...]
    """On the CPU; of arrays, their forms and bytes."""


class _Plain(NamedTuple):
    """A value in the place of an object's path."""

    kind: type
    value: Any


class _Seen(NamedTuple):
    """A number or a text of a dataset, or how many parts it has: it is looked at, and stays."""

    value: Any


class _Met(NamedTuple):
    """An object that a walk has met, and its parts by name, key or position."""

    value: Any
    parts: dict[Any, Any]
    owner: Any


class _Was(NamedTuple):
    """An object as it arrived."""

    get: Callable[[], Any]
    """Gives the object; None where it is gone."""
    kind: type
    mark: Any
    """What the object itself contains, beside its parts."""
    parts: dict[Any, _Plain | Path | None]


class _Stays(Exception):  # noqa: N818 - it ends no call
    """An object cannot be sent."""


class Arrived:
    """Objects of a call as they arrived.

    Args:
        roots: Gives the objects by the names of the call's arguments, and those that its functions use by their names.
        covered: What comes back by its own `state_dict`: modules, whose attributes are looked at all the same, and others.
        datasets: What stays, and is only looked at, beside torch's datasets.
        origin: Where the snapshot has their bytes; None outside of a job.
    """

    def __init__(
        self,
        roots: Callable[[], Mapping[str, Any]],
        *,
        covered: Collection[int] = (),
        datasets: Collection[int] = (),
        origin: Origin | None = None,
    ) -> None:
        self.roots, self._covered, self._datasets, self._origin = roots, covered, datasets, origin
        met = self._walk()
        self._paths = {id(one.value): path for path, one in met.items()}
        self._before = {
            path: _Was(
                _holding(one.value),
                type(one.value),
                self._mark(one.value),
                {name: self._token(part, self._paths) for name, part in one.parts.items()},
            )
            for path, one in met.items()
        }
        self._passed_over: set[Place] = set()

    @contextlib.contextmanager
    def passing_over(self) -> Iterator[None]:
        """Pass over what is put into the objects in this block, such as the marks of FSDP."""
        before = self._differing(leaves=False)[0].keys()
        yield
        self._passed_over |= self._differing(leaves=False)[0].keys() - before

    def changes(self, *, without: Collection[Place] = ()) -> tuple[Changes, list[str]]:
        """What differs from what arrived and can be sent, without these places; and the paths, as code, of what cannot be sent."""
        sent, stands, stay = self._sent()
        paths = {path for path, _ in without}
        sent = {place: content for place, content in sent.items() if place[0] not in paths}
        values, tensors = _pickled([*sent.values()], stands)
        return Changes(places=tuple(sent), values=values, tensors=tuple(map(_packed, tensors))), stay

    def digests(self) -> tuple[dict[str, int], list[str]]:
        """As `changes`, but of each path, as code, a number that is equal where ranks have changed it alike."""
        sent, stands, stay = self._sent()
        return {shown(path): digest(*_pickled(content, stands)) for (path, _), content in sent.items()}, stay

    def there(self) -> dict[Path, Any]:
        """What has arrived and is still there, by its path on arrival."""
        return {path: value for path, was in self._before.items() if path and (value := was.get()) is not None}

    def _sent(self) -> tuple[dict[Place, Any], dict[int, Path], list[str]]:
        """The contents of what can be sent, the path that each object stands for, and the paths of what cannot be sent."""
        found, stands = self._differing()
        sent, stay = dict[Place, Any](), list[str]()
        for (path, is_new), value in found.items():
            # A name of the notebook's that means another object now stays, and so do those of a module, and datasets.
            try:
                if (is_new and len(path) == 1) or "." in path[0] or id(value) in self._datasets:
                    raise _Stays  # noqa: TRY301 - as what cannot be pickled
                content = value if is_new else _contents(value)
                _pickled(content, stands)
                sent[path, is_new] = content
            except Exception:  # noqa: BLE001 - of the user's objects
                stay.append(shown(path))
        return sent, stands, stay

    def differing(self) -> list[tuple[Path, Any]]:
        """What differs from what arrived: where, and what is there now."""
        return [(path, value) for (path, _), value in self._differing()[0].items()]

    def _differing(self, *, leaves: bool = True) -> tuple[dict[Place, Any], dict[int, Path]]:
        """What differs, by its path on arrival and whether another object stands there; and the path that each object stands for."""
        met = self._walk()
        reached = {id(one.value) for one in met.values()}
        stands: dict[int, Path] = {}
        found: dict[Place, Any] = {}
        for at, one in met.items():
            # A name that means another object is told from an object that has changed.
            owner = stands.get(id(one.owner)) if len(at) > 1 else None
            if at and (known := self._known(one.value, owner, at[-1:], reached)) is not None:
                stands[id(one.value)] = known
        for at, one in met.items():
            with contextlib.suppress(Exception):
                if (path := stands.get(id(one.value)) if at else ()) is not None:
                    found |= dict(self._compared(path, one, stands, leaves=leaves))
        return {key: value for key, value in found.items() if key not in self._passed_over}, stands

    def _compared(
        self, path: Path, one: _Met, stands: Mapping[int, Path], *, leaves: bool
    ) -> Iterator[tuple[Place, Any]]:
        was, nature = self._before[path], _nature_of(one.value)
        parts = {name: self._token(part, stands) for name, part in one.parts.items()}
        # Of a dict that has only grown, what cannot be sent keeps nothing else there.
        has_grown = nature == "dict" and [*parts] == [*one.value] and [*parts][: len(was.parts)] == [*was.parts]
        if path and nature in _OF_PARTS and not (has_grown and parts):
            is_other = [*parts.items()] != [*was.parts.items()] or self._mark(one.value) != was.mark
            for name, token in parts.items() if is_other else ():
                # A later call may have others in these places: their values travel as well.
                if token not in (None, (*path, name)) and _fits(part := one.parts[name], part):
                    yield (token, False), part
        else:
            is_other = leaves and nature != "dict" and self._is_other(one.value, was.mark)
            for name, token in parts.items():
                if (name in was.parts or path) and (token is None or was.parts.get(name) != token):
                    yield ((*path, name), True), one.parts[name]
            for name in [name for name in was.parts if name not in parts] if path else ():
                # It is gone, or of a kind that is passed over.
                yield ((*path, name), True), _Inert()
        if is_other:
            yield (path, False), one.value

    def _known(self, value: Any, owner: Path | None, name: Path, reached: Collection[int]) -> Path | None:
        """The path on arrival of an object, or of the one in whose place it is, and which is gone, as after `x.mean = x.mean * 0.9`."""
        known = self._paths.get(id(value))
        if known is not None and self._before[known].get() is value:
            return known
        old = None if owner is None else self._before[owner].parts.get(name[0])
        if old is None or isinstance(old, _Plain) or id((was := self._before[old]).get()) in reached:
            return None
        is_container = _nature_of(value) in (*_OF_PARTS, *_OF_VALUES) and type(value) is was.kind
        return old if is_container or _fits(value, was.mark) else None

    def _walk(self) -> dict[Path, _Met]:
        """All objects by their paths, each once, owners before what they own."""
        found: dict[Path, _Met] = {}
        seen: set[int] = set()
        # A stack of its own: models may be nested more deeply than Python's.
        left: list[tuple[Path, Any, Any]] = [((), self.roots(), None)]
        while left:
            path, value, owner = left.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            parts: dict[Any, Any] = {}
            # Objects of the user's may raise whatever is asked of them: those are passed over.
            with contextlib.suppress(Exception):
                parts = dict(_seen(value) if id(value) in self._datasets else _parts(value, self._covered))
            found[path] = _Met(value, parts, owner)
            left += [((*path, name), part, value) for name, part in reversed(parts.items()) if not self._is_value(part)]
        return found

    def _is_value(self, part: Any) -> bool:
        """Whether a part is plain, or is not looked at: it is what it is."""
        is_covered = id(part) in self._covered and _nature_of(part) not in ("module", "optimizer", "tensor")
        return is_covered or _is_plain(part)

    def _token(self, part: Any, paths: Mapping[int, Path]) -> _Plain | Path | None:
        """What a part is: a value, an object that arrived, or a new one."""
        if _is_plain(part):
            return _Plain(type(part), part if type(part) in (str, bytes, int, bool) else repr(part))
        return _Plain(object, id(part)) if self._is_value(part) else paths.get(id(part))

    def _mark(self, value: Any) -> Any:
        with contextlib.suppress(Exception):
            if is_tensor(value):
                # Torch's reducers copy what is small, and outside of a job nothing has arrived.
                return (self._origin and self._origin.place(value)) or value.detach().clone()
            if _is_array(value):
                return value.copy() if self._origin is None else self._origin.array(value)
            if _nature_of(value) in _OF_VALUES:
                return frozenset(value) if len(value) <= _MANY else len(value)
            if _nature_of(value) in _OF_PARTS:
                return zlib.crc32(repr([*value]).encode()) if _is_of_values(value) else len(value)
            if _nature_of(value) == "tensor":
                # Sparse, expanded or of another class: it stays in the ranks, and is named.
                return times_changed(value)
            if _nature_of(value) in _OF_STATE and id(value) not in self._covered:
                return digest(*_pickled(value.state_dict(), {}))
        return None

    def _is_other(self, value: Any, mark: Any) -> bool:
        """Whether an object's own contents differ from those that arrived."""
        if id(value) in self._covered and _nature_of(value) == "tensor":
            return False
        if is_tensor(value):
            was = mark.tensor(self._origin.memory) if isinstance(mark, Stayed) and self._origin else mark
            return not has_same_bytes(value.detach().cpu(), was.detach().cpu())
        if _is_array(value):
            return not is_same_array(value, mark)
        return mark is not None and self._mark(value) != mark


def _parts(value: Any, covered: Collection[int] = ()) -> Iterator[tuple[Any, Any]]:
    """The parts of an object that are looked at, by key, position or name."""
    nature = _nature_of(value)
    if nature in _OF_PARTS:
        if len(value) <= _MANY and not _is_of_values(value):
            has_names = nature == "dict" and all(map(_is_plain, value))
            yield from value.items() if has_names else enumerate(value.values() if nature == "dict" else value)
    elif nature in _OF_ATTRIBUTES:
        for name, part in _attributes(value, is_covered=id(value) in covered):
            # All others, such as functions, are passed over.
            if _nature_of(part) != "other":
                yield name, part
    elif nature == "dataset":
        yield from _seen(value)


def _is_of_values(value: Any) -> bool:
    """Whether a list, deque or tuple has numbers and texts only: it is compared as a whole."""
    return _nature_of(value) != "dict" and {*map(type, value)} <= {*_PLAIN}


def _seen(dataset: Any) -> Iterator[tuple[str, Any]]:
    """What is looked at of a dataset, or of a loader that is not torch's, by name."""
    for name, part in () if _nature_of(dataset) == "other" else vars(dataset).items():
        if (nature := _nature_of(part)) in (*_OF_PARTS, *_OF_VALUES):
            yield name, _Seen(len(part))
        elif nature in ("plain", "dataset"):
            yield name, part if nature == "dataset" else _Seen(part)


def put(
    roots: Mapping[str, Any],
    several: Sequence[Changes],
    takes: Callable[[str], bool] = lambda _: True,
    arrived: Arrived | None = None,
) -> list[str]:
    """Write what came back into this process's own objects, in place where that can be.

    Args:
        roots: The objects by the names that the walk has given them.
        several: What came back, of one rank or more. Parts of a root that is not there any more are passed over.
        takes: Whether to write into a root of this name.
        arrived: The objects as they arrived, if that was here: paths lead to what was there then.

    Returns:
        A clause for each part that could not be written, and why.
    """
    at, problems, found = _Places(roots, arrived), list[str](), list[Any]()
    # All paths lead to what is there before anything is written.
    for changes in several:
        owners = [(at[path[:-1]], at[path], is_new) for path, is_new in changes.places]
        try:
            # First with objects that can do nothing: a pickle may call those that it is given, and fill them.
            _Unpickler(changes, collections.defaultdict(_Inert)).load()
            found += zip(changes.places, owners, _Unpickler(changes, at).load(), strict=False)
        except Exception as error:  # noqa: BLE001 - of a file that may be anything
            names = listed([shown(path) for path, _ in changes.places], 3)
            problems.append(f"{names} ({type(error).__name__}: {error})")
    for (path, _), (owner, own, is_new), value in found:
        if path[0] in roots and takes(path[0]):
            try:
                if is_new or not _is_written(own, value):
                    _set(owner, path[-1], value.to(own.device) if is_tensor(own) and is_tensor(value) else value)
            except Exception as error:  # noqa: BLE001 - of the user's objects
                problems.append(f"{shown(path)} ({type(error).__name__}: {error})")
    return problems


def _is_written(own: Any, value: Any) -> bool:
    """Write a value into an object, if it can take it."""
    if _nature_of(own) in _OF_STATE:
        load_state_dict(own, value)
    elif is_tensor(own) and _fits(own, value):
        with _torch().no_grad():
            own.copy_(value)
    elif _fits(own, value):
        own[...] = value
    elif type(own) is type(value) and hasattr(own, "clear"):
        own.clear()
        (own.extend if _nature_of(own) in ("list", "deque") else own.update)(value)
    else:
        return False
    return True


def load_state_dict(value: Any, state: Any) -> None:
    """Load an object's state. The groups of an optimizer stay the same objects: another optimizer may hold them, as SAM's does."""
    groups = [*value.param_groups] if _nature_of(value) == "optimizer" else []
    value.load_state_dict(state)
    for number, own in enumerate(groups):
        if own is not (loaded := value.param_groups[number]):
            own.clear()
            own.update(loaded)
            value.param_groups[number] = own


def _set(owner: Any, name: Any, value: Any) -> None:
    if _nature_of(owner) in _OF_PARTS:
        owner[name] = value
    elif _nature_of(owner) == "module":
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


class _Inert:
    """Stands for an object that a pickle may not touch."""

    __slots__ = ()

    def __setstate__(self, _: object) -> None:
        raise pickle.UnpicklingError("an object that arrived cannot be filled by it")


class _Places(dict[Path, Any]):
    """What is at each path; None if nothing is. Only parts that a walk meets have one: a path may come from somebody else's file."""

    def __init__(self, roots: Mapping[str, Any], arrived: Arrived | None) -> None:
        super().__init__({**({} if arrived is None else arrived.there()), (): roots})
        self._parts: dict[int, dict[Any, Any]] = {id(roots): dict(roots)}

    def __missing__(self, path: Path) -> Any:
        owner = self[path[:-1]]
        if id(owner) not in self._parts:
            with contextlib.suppress(Exception):
                self._parts[id(owner)] = dict(_parts(owner))
        return self.setdefault(path, self._parts.get(id(owner), {}).get(path[-1]))


def _contents(value: Any) -> Any:
    """Another object with an object's own contents: pickled, it is not named by its path."""
    if is_tensor(value):
        return value.detach()
    if _is_array(value):
        return value.view()
    if _nature_of(value) == "dict" and not all(map(_is_plain, value)):
        raise _Stays
    return value.state_dict() if _nature_of(value) in _OF_STATE else copy.copy(value)


def _pickled(value: Any, stands: Mapping[int, Path]) -> tuple[bytes, list[Any]]:
    """Pickle plain values, containers, tensors and arrays.

    Args:
        value: What is pickled.
        stands: The path of each object that arrived.

    Raises:
        _Stays: A part is none of these.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, stands)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, stands: Mapping[int, Path]) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Any] = []
        self._stands, self._numbers = stands, dict[int, int]()

    def persistent_id(self, value: Any) -> Path | int | None:
        if id(value) in self._stands:
            return self._stands[id(value)]
        if not (is_tensor(value) or _is_array(value) or _nature_of(value) == "number"):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SENT or (kind is type and value in _SENT):
            return NotImplemented
        if _nature_of(value) == "tuple" and not hasattr(kind, "_fields"):
            return tuple, ([*value],)
        raise _Stays


class _Unpickler(pickle.Unpickler):
    """Makes no objects but of the classes of `_SENT`: what it reads may come from somebody else's file."""

    def __init__(self, changes: Changes, places: Mapping[Any, Any]) -> None:
        super().__init__(io.BytesIO(changes.values))
        self._places = places
        self._tensors = [*map(_unpacked, changes.tensors)] if isinstance(places, _Places) else places

    def find_class(self, module: str, name: str) -> Any:
        found = {(kind.__module__, kind.__qualname__): kind for kind in _SENT}
        if (module, name) not in found:
            raise pickle.UnpicklingError(f"{module}.{name} is no plain value")
        return found[module, name]

    def persistent_load(self, found: Any) -> Any:
        return self._places[found] if isinstance(found, tuple) else self._tensors[found]


def _packed(value: Any) -> Any:
    """A tensor on the CPU, and of one that is trained, whether it is a parameter; of an array, or a number of NumPy's, its form and its bytes as one."""
    if is_tensor(value):
        whole, is_leaf = value.detach().cpu().resolve_conj().resolve_neg(), value.requires_grad and value.is_leaf
        return (isinstance(value, _torch().nn.Parameter), whole) if is_leaf else whole
    import numpy as np

    # A copy: torch warns of a tensor of memory that cannot be written.
    array, torch = np.array(value, order="C"), _torch()
    flat = array.reshape(-1).view(np.uint8)
    return array.dtype.str, array.shape, _is_array(value), flat if torch is None else torch.from_numpy(flat)


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, tuple):
        return packed
    if len(packed) == 2:  # noqa: PLR2004 - of a tensor
        return _torch().nn.Parameter(packed[1]) if packed[0] else packed[1].detach().requires_grad_()
    import numpy as np

    dtype, shape, is_array, flat = packed
    array = np.array(flat.numpy() if is_tensor(flat) else flat).view(dtype).reshape(shape)
    return array if is_array else array[()]


def shown(path: Path) -> str:
    """A path as code."""
    return str(path[0]) + "".join(
        f".{one}" if isinstance(one, str) and one.isidentifier() else f"[{one if str(one).isdigit() else repr(one)}]"
        for one in path[1:]
    )


def digest(values: bytes, tensors: Sequence[Any]) -> int:
    """A number that is equal for what `_pickled` has given for equal objects, in any rank."""
    sums = [checksum(one.detach()) if is_tensor(one) else zlib.crc32(one.tobytes()) for one in tensors]
    return zlib.crc32(repr([sums, [(one.shape, one.dtype) for one in tensors]]).encode(), zlib.crc32(values))


# -- names -------------------------------------------------------------------------------------------------------------


def used(function: Any, depth: int = _CALLED) -> Iterator[tuple[str, Any]]:
    """Names and values that a function and the notebook's functions that it calls find outside their own bodies.

    Args:
        function: The function. One that ranks import from a module finds what they have there, and not what the notebook has: such
            names have the module's in front.
        depth: How far functions that call each other are followed.
    """
    if not isinstance(function, types.FunctionType) or not depth or not _is_users(function.__module__):
        return
    found = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is not bound yet
            found[name] = cell.cell_contents
    prefix = f"{function.__module__}." if _is_imported(function) else ""
    for name, value in found.items():
        if type(value) is not types.FunctionType:
            yield f"{prefix}{name}", value
        elif value.__module__ in ("__main__", function.__module__):
            yield from used(value, depth - 1)


def _names(code: types.CodeType) -> list[str]:
    """The names that a function, and those within it, may find among its globals."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return [*code.co_names, *(name for one in inner for name in _names(one))]


def _is_imported(function: types.FunctionType) -> bool:
    """Whether a function is the one that its module has by its name: then it is sent by that name."""
    found: Any = None if function.__module__ == "__main__" else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def roots_of_step(step: Any) -> dict[str, Any]:
    """The objects that a step may change beside its arguments: those that it uses by name, and that which it is a method or a part of."""
    if isinstance(step, functools.partial):
        given = {f"argument {number}": value for number, value in enumerate(step.args, 1)} | step.keywords
        return roots_of_step(step.func) | given
    roots = dict(used(getattr(step, "__func__", step)))
    own = step if _nature_of(step) == "own" else getattr(step, "__self__", None)
    return roots if own is None or _nature_of(own) == "other" else roots | {type(own).__name__: own}


def roots_of_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The objects that a call of a function may change: its arguments, and those of `roots_of_step`."""
    roots = roots_of_step(function)
    with contextlib.suppress(TypeError, ValueError):
        return roots | inspect.signature(function).bind(*args, **kwargs).arguments
    return roots | {f"argument {number}": value for number, value in enumerate(args, 1)} | dict(kwargs)


def held(objects: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """A function that gives the objects that come back, as long as they are there, by their names: it keeps only those that it must."""
    holders = {name: _holding(value) for name, value in objects.items() if not (_is_plain(value) or "." in name)}
    return lambda: {name: value for name, get in holders.items() if (value := get()) is not None}


# -- kinds of objects --------------------------------------------------------------------------------------------------


def _torch() -> Any:
    """Torch, if this process has imported it: without it there are no tensors."""
    return sys.modules.get("torch")


def _nature_of(value: Any) -> str:
    kind: Any = type(value)
    # A metaclass of the user's may raise.
    with contextlib.suppress(Exception):
        return _nature(kind)
    return "other"


@functools.cache
def _nature(kind: type) -> str:
    """What the objects of a class are here. The class is asked, because an object of the user's may raise whatever it is asked."""
    torch, numpy = _torch(), sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or issubclass(kind, numpy.number | numpy.bool_)):
        return "array" if kind is numpy.ndarray else "number"
    if issubclass(kind, _PLAIN):
        return "plain"
    for base in (tuple, list, collections.deque, set, frozenset, dict):
        if issubclass(kind, base):
            return base.__name__
    if torch is not None:
        data = torch.utils.data
        known = ((torch.nn.Module, "module"), (torch.optim.Optimizer, "optimizer"), (torch.Tensor, "tensor"))
        for base, word in (*known, (data.Dataset, "dataset"), (data.DataLoader, "other")):
            if issubclass(kind, base):
                return word
    if issubclass(kind, type | types.ModuleType | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return "other"
    if callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None)):
        return "state"
    return "own" if _is_users(kind.__module__) or kind.__module__ in ("types", "argparse") else "other"


def _is_users(module: str) -> bool:
    """Whether a module belongs to the user, and not to an installed package. One that is not imported was sent by value."""
    if module == "__main__" or module not in sys.modules:
        return True
    file = getattr(sys.modules[module], "__file__", None) or "/lib/python"
    is_installed = any(part in file for part in ("site-packages", "dist-packages", "/lib/python"))
    return not is_installed and module.partition(".")[0] != "kale_dist"


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor that can be compared by its bytes."""
    return is_own(value) and str(value.layout) == "torch.strided" and not (value.is_quantized or 0 in value.stride())


def _is_array(value: Any) -> bool:
    return _nature_of(value) == "array" and not (value.dtype.hasobject or value.dtype.fields)


def _is_plain(value: Any, depth: int = _NESTED) -> bool:
    nature = _nature_of(value)
    if nature == "tuple":
        return depth > 0 and all(_is_plain(one, depth - 1) for one in value)
    return nature in ("plain", "number")


def _attributes(value: Any, *, is_covered: bool) -> Iterator[tuple[str, Any]]:
    torch, nature = _torch(), _nature_of(value)
    # An object may have slots in place of a dict.
    slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(value, name))
    own = vars(value) if hasattr(value, "__dict__") else {name: getattr(value, name) for name in slots}
    base: Collection[str] = ()
    if nature == "module":
        base, lasting = _of_base(torch.nn.Module), own["_buffers"].keys() - own["_non_persistent_buffers_set"]
        yield from own["_modules"].items()
        yield from ((name, part) for name, part in own["_buffers"].items() if not (is_covered and name in lasting))
        yield from () if is_covered else own["_parameters"].items()
    elif nature == "optimizer":
        base = _of_base(torch.optim.Optimizer)
    yield from ((name, part) for name, part in own.items() if name not in base)


@functools.cache
def _of_base(kind: type) -> frozenset[str]:
    """The attributes that torch's own classes keep for themselves; a scheduler adds the last two to an optimizer."""
    torch = _torch()
    one = torch.nn.Module() if kind is torch.nn.Module else torch.optim.SGD([torch.zeros(1, device="cpu")], 0.1)
    return frozenset(vars(one)) | {"step", "_opt_called"}


def _holding(value: Any) -> Callable[[], Any]:
    """A function that gives an object, which it keeps only if there is no other way."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _fits(value: Any, other: Any) -> bool:
    """Whether a value is a tensor or an array like another one, or like one that arrived."""
    is_alike = (is_tensor(value) or _is_array(value)) and getattr(other, "dtype", None) == value.dtype
    return bool(is_alike) and tuple(other.shape) == tuple(value.shape)
