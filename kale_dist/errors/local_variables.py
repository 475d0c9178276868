"""Describes the local variables of a frame in a few words each. Never raises, and computes nothing on a GPU.

Numbers are shown as they are, tensors and arrays by shape, dtype, device and range, everything else by type and length: texts
and reprs may hold secrets. No torch, no numpy: what they have made is recognised if they are imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

MAX_BYTES = 2000
"""Characters of all frames of an error together."""

MAX_NAMES = 20
"""Names of one frame."""

MAX_CHARACTERS = 120
"""Characters of one text or repr."""

MAX_NUMBERS = 100_000
"""The range of a larger tensor or array is left out, as it would take long."""

_MAX_BITS = 64
_LEFT_OUT = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FrameLocals:
    """The local variables of one frame of an error."""

    where: str
    """`Cell In[3]:5 in step`."""
    values: Mapping[str, str]
    """Name to description, the names of the failing line first."""

    def __str__(self) -> str:
        """A line for the frame, and one for each variable."""
        return "\n".join([self.where, *(f"    {name} = {value}" for name, value in self.values.items())])

    __repr__ = __str__


def of_frame(frame: types.FrameType, line: int, *, limit: int, full: bool) -> dict[str, str]:
    """Describe the local variables of a frame, the names of its line first.

    Args:
        frame: The frame.
        line: The number of the line that it is at.
        limit: How many bytes names and descriptions may have together.
        full: Whether texts and reprs are shown.
    """
    code, names = frame.f_code, frame.f_locals
    in_line = set(re.findall(r"\w+", linecache.getline(code.co_filename, line, frame.f_globals)))
    # The globals of a script or a cell are its locals, too: only those count that it uses itself.
    wanted = [name for name in list(names) if names is not frame.f_globals or name in code.co_names]
    wanted = [name for name in wanted if name.isidentifier() and not name.startswith("__")]
    found: dict[str, str] = {}
    for name in sorted(wanted, key=lambda name: name not in in_line):
        value = names.get(name)
        if issubclass(type(value), _LEFT_OUT):
            continue
        text = describe(value, full=full)
        limit -= len(f"    {name} = {text}\n".encode("utf-8", "replace"))
        if limit < 0 or len(found) == MAX_NAMES:
            break
        found[name] = text
    return found


def describe(value: Any, *, full: bool = False) -> str:
    """Describe a value in a few words.

    Args:
        value: Anything.
        full: Whether to show the text or repr of what is no number, tensor or array.
    """
    kind = type(value)
    try:
        return _describe(value, kind, full=full)
    except BaseException:  # noqa: BLE001 - the user's own __len__ or __repr__ may raise anything
        return f"{type.__getattribute__(kind, '__name__')} (cannot be shown)"


@contextlib.contextmanager
def short_tensors() -> Iterator[None]:
    """Within the block, reprs of objects that hold tensors describe these: torch's own repr reads what is on a GPU."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.Tensor.__repr__
    torch.Tensor.__repr__ = lambda tensor, **_: _of_tensor(tensor, torch)
    try:
        yield
    finally:
        torch.Tensor.__repr__ = before


def _describe(value: Any, kind: type, *, full: bool) -> str:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _of_tensor(value, torch)
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return _of_array(value, numpy)
    if numpy is not None and issubclass(kind, numpy.number | numpy.bool_):
        return str(value.item())
    if kind in (bool, float, complex, type(None)) or (kind is int and value.bit_length() <= _MAX_BITS):
        return repr(value)
    if full:
        text = repr(value)
        return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text):,} characters)"
    # `hasattr` would also find what the class of the class has, as with enums.
    length = f" of {len(value)}" if any("__len__" in vars(base) for base in kind.__mro__) else ""
    return f"{kind.__name__}{length}"


def _of_tensor(value: Any, torch: Any) -> str:
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001 - a subclass's own code is not called
        text = f"{type(value).__name__} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} {value.device}"
        is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        # Complex numbers have no range, and FSDP takes the memory of parameters away that are not in use.
        if is_plain and value.device.type == "cpu" and not value.is_complex() and 0 < value.numel() <= MAX_NUMBERS:
            with contextlib.suppress(Exception):
                if value.untyped_storage().nbytes():
                    return text + _range(value.detach().double().numpy())
        return text


def _of_array(value: Any, numpy: Any) -> str:
    text = f"{type(value).__name__} {value.shape} {value.dtype}"
    is_plain = type(value) is numpy.ndarray and value.dtype.kind in "biuf"
    return text + _range(value.astype(float)) if is_plain and 0 < value.size <= MAX_NUMBERS else text


def _range(numbers: Any) -> str:
    """The least and the greatest number of an array of floats, and how many are not finite."""
    finite = numbers[abs(numbers) < math.inf]
    ends = dict.fromkeys(f"{end:.4g}" for end in (finite.min(), finite.max())) if finite.size else ()
    missing = numbers.size - finite.size
    return (f", {' to '.join(ends)}" if ends else "") + (f", {missing:,} not finite" if missing else "")
