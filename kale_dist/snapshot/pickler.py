"""The notebook's pickler: numbers objects that are sent by value, and records which modules and sources the call needs."""

from __future__ import annotations

import dis
import importlib.machinery
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import IO, Any

from cloudpickle import cloudpickle as internals

from kale_dist.snapshot import reducers, training_arguments
from kale_dist.snapshot.pickling import TensorPickler

_CLASS_TRACKER = {internals._make_skeleton_class: 4, internals._make_skeleton_enum: 5}  # noqa: SLF001
"""Position of the argument by which cloudpickle's class makers find a class that exists in this process already."""

_SHARING = tuple(f"accelerate.state.{kind}State" for kind in ("Partial", "Accelerator", "Gradient"))
"""Classes of which all objects share a state, that of their process."""


class CapturePickler(TensorPickler):
    """Pickles a call.

    Args:
        file: Receives the pickle.
        own_devices: Whether a `torch.device` of a GPU becomes the rank's own, whichever it is here.
        originals: Numbers of what was sent before; None for none.
        left_out: Globals of functions that are not sent with them; None for all.
        there: Objects that the ranks have in their `__main__`, by name: they are referred to.
    """

    def __init__(
        self,
        file: IO[bytes],
        *,
        own_devices: bool = False,
        originals: reducers.References | None = None,
        left_out: Collection[str] | None = (),
        there: Mapping[str, object] = types.MappingProxyType({}),
    ) -> None:
        super().__init__(file)
        self._left_out = left_out
        # In `distribute` a step may call an Accelerator of the notebook, which does nothing there, and needs no state of a rank's.
        self._shares_state = not own_devices
        self._there = dict(_places(there))
        if own_devices and (torch := sys.modules.get("torch")):
            self._reducers[torch.device] = _reduce_device
        self.originals = reducers.References() if originals is None else originals
        """The notebook's own functions and classes, by their numbers."""
        self.modules: set[str] = set()
        """Names of modules that the call refers to."""
        self.codes: list[types.CodeType] = []
        """Code of functions that are sent by value."""
        self.classes: list[type] = []
        """Classes that are sent by value."""
        self.counted: set[str] = set()
        """Classes of arguments that have computed something with the notebook's one process."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object; pickle calls this for every object that is not a plain builtin one."""
        if (place := self._there.get(id(obj))) is not None:
            return reducers.there, place
        if isinstance(obj, types.ModuleType):
            self.last = obj
            return self._reduce_module(obj)
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and (hooks := hooks_of(obj)):
            return (*obj.__reduce_ex__(5)[:2], hooks, None, None, reducers.set_tensor_hooks)
        if isinstance(obj, (type, types.FunctionType)):
            if reduced is NotImplemented and without_file(obj.__module__):
                reduced = self._by_value(obj)
            if isinstance(reduced, tuple) and len(reduced) == 6:  # noqa: PLR2004 - cloudpickle's by-value reductions, with a state setter
                return self._number(obj, reduced)
        if reduced is NotImplemented:
            self._note_module(getattr(obj, "__module__", None))
        return reduced

    def _choose(self, kind: type) -> Callable[[Any], Any] | None:
        if training_arguments.base_of(kind) is not None:
            # What is left out of them was the only reference to it.
            self._note_module("accelerate")
            if any(
                base.__module__.startswith("trl.") and hasattr(base, "generation_batch_size") for base in kind.__mro__
            ):
                self.counted.add(kind.__name__)
        if self._shares_state and f"{kind.__module__}.{kind.__qualname__}" in _SHARING:
            return lambda _: (training_arguments.make_sharing, (kind,))
        return super()._choose(kind)

    def _by_value(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            return self._dynamic_function_reduce(obj)
        return internals._dynamic_class_reduce(obj)  # noqa: SLF001

    def _number(self, obj: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Reduce a function or class so that it has the same number in the notebook and in the ranks."""
        constructor, args, state, _, _, setter = reduced
        if isinstance(obj, type):
            self.classes.append(obj)
            tracker = _CLASS_TRACKER.get(constructor)
            if tracker is not None:
                # In the notebook itself, a load by this id would find the notebook's class and overwrite its methods.
                args = (*args[:tracker], None, *args[tracker + 1 :])
        index = self.originals.index_of(obj)
        if index is None:
            index = len(self.originals)
            self.originals.add(index, obj)
        module = getattr(obj, "__module__", None) or ""
        return reducers.make, (index, module, obj.__qualname__, constructor, args), state, None, None, setter

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        """Reduce a function as cloudpickle does, but so that functions of one module share its globals in the rank."""
        self.codes.append(func.__code__)
        self.modules.update(imports_of(func.__code__, func.__globals__.get("__package__") or ""))
        constructor, args, state, *rest = super()._dynamic_function_reduce(func)
        name, kind = namespace_of(func)
        attributes, slots = state
        slots["__globals__"] = {
            key: _stand_in(key, value)
            for key, value in slots["__globals__"].items()
            if self._left_out is not None and key not in self._left_out
        }
        if not kind:
            return (constructor, args, state, *rest)
        if kind == "import":
            self._note_module(name)
            slots["__globals__"] = {}
        return (reducers.make_function, (func.__code__, kind, name, args[-1]), (attributes, slots), *rest)

    def _reduce_module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        if name != "__main__" and without_file(name) and sys.modules.get(name) is module:
            state = {key: value for key, value in vars(module).items() if not key.startswith("__")}
            return reducers.make_module, (name,), state, None, None, reducers.set_module_state
        self._note_module(name)
        return NotImplemented

    def _note_module(self, name: object) -> None:
        if isinstance(name, str):
            self.modules.add(name)


def _places(there: Mapping[str, object]) -> Iterator[tuple[int, tuple[str, str]]]:
    """Objects by their addresses, to the names in `__main__` and, of a module's parameters, the paths by which ranks find them."""
    for name, value in there.items():
        # Functions, classes and Python's own small objects are found in other ways.
        if isinstance(value, type | types.FunctionType | types.ModuleType):
            continue
        for kind in ("named_modules", "named_parameters", "named_buffers"):
            for path, part in getattr(value, kind, dict)() if hasattr(type(value), "named_parameters") else ():
                yield id(part), (name, path)
        yield id(value), (name, "")


def hooks_of(value: Any) -> tuple[list[Any], ...]:
    """The user's hooks on a tensor's gradient, before and after accumulation, which torch's own pickle leaves out.

    Hooks of installed packages (`wandb.watch`) are left out, because they may not work in another process.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or not value.is_leaf:
        return ()
    kinds = value._backward_hooks, value._post_accumulate_grad_hooks  # noqa: SLF001 - torch has no public names
    found = tuple([hook for hook in (hooks or {}).values() if not _is_installed(hook)] for hooks in kinds)
    return found if any(found) else ()


def _is_installed(function: Any) -> bool:
    file = getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def without_file(name: object) -> bool:
    """Whether a module was made in this process without a file, so that ranks cannot import it."""
    module = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
    if module is None or getattr(module, "__file__", None) or hasattr(module, "__path__"):
        return False
    loader = getattr(getattr(module, "__spec__", None), "loader", None) or getattr(module, "__loader__", None)
    return (
        loader is None
        and name not in sys.builtin_module_names
        and importlib.machinery.FrozenImporter.find_spec(str(name)) is None
    )


def namespace_of(func: types.FunctionType) -> tuple[str, str]:
    """The module whose globals a function has, and its kind: "main", "value" or "import"; two "" if there is none."""
    name = func.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if name == "__mp_main__":
        module, name = sys.modules.get("__main__"), "__main__"
    if module is None or getattr(module, "__dict__", None) is not func.__globals__:
        return "", ""
    if name == "__main__":
        return name, "main"
    return str(name), "value" if without_file(name) else "import"


def imports_of(code: types.CodeType, package: str) -> Iterator[str]:
    """Yield the modules that import statements in a code object and in its inner functions name."""
    instructions = list(dis.get_instructions(code))
    for position, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            # The two instructions before put level and names on the stack.
            level, names = (instructions[position - back].argval for back in (2, 1))
            base = instruction.argval
            if isinstance(level, int) and level and package:
                parents = package.split(".")[: len(package.split(".")) - level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            yield base
            if isinstance(names, tuple):
                yield from (f"{base}.{name}" for name in names if name != "*")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from imports_of(constant, package)


def _stand_in(name: str, value: Any) -> Any:
    """A function without effect in place of IPython's `get_ipython` and `exit`, which refer to the whole shell."""
    if name not in {"get_ipython", "exit", "quit"}:
        return value
    shell = getattr(value, "__self__", None) or getattr(value, "_ip", None)
    if shell is not None and type(shell).__module__.partition(".")[0] in {"IPython", "ipykernel"}:
        return reducers.ipython
    return value


def _reduce_device(device: Any) -> Any:
    return (reducers.make_device, ()) if device.type == "cuda" else NotImplemented
