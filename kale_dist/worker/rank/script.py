"""Runs a script, or a module as `python -m` does, as this rank's `__main__`."""

from __future__ import annotations

import importlib.util
import io
import os
import pathlib
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType

from kale_dist.snapshot import loading
from kale_dist.wire import context


def run(script: str, arguments: tuple[str, ...], *, as_module: bool, in_place: bool) -> None:
    """Run a script as Python would: `__name__`, `__file__`, `sys.argv` and `sys.path` are those of `python script`.

    Args:
        script: The script's path, or the dotted name of a module.
        arguments: What follows it on the command line.
        as_module: Whether `script` is a module's name.
        in_place: Whether the script is run from where it is. Else it came with the snapshot, and the current folder
            becomes the one that holds the snapshot's files.

    Raises:
        ImportError: There is no such module.
    """
    files = context.context().files
    if not in_place and files is not None:
        os.chdir(files.modules)
    spec = _find(script) if as_module else None
    path = str(spec.origin) if spec is not None else str(pathlib.Path(script).absolute())
    code = _compile(path, spec)
    main = sys.modules["__main__"]
    main.__file__ = path
    # None for a script: multiprocessing then runs its file in a spawned child.
    main.__spec__ = spec
    main.__package__ = spec.parent if spec is not None else None
    main.__loader__ = spec.loader if spec is not None else SourceFileLoader("__main__", path)
    sys.argv[:] = [path if as_module else script, *arguments]
    folder = str(pathlib.Path.cwd() if as_module else pathlib.Path(path).parent)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    os.environ.pop(loading.MAIN_VARIABLE, None)
    if loading.has_torch():
        _hide_group()
    exec(code, main.__dict__)  # noqa: S102 - the user's own script


def _find(name: str) -> ModuleSpec:
    """Where a module comes from; for a package, its `__main__`."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        raise ImportError(f"No module named {name}", name=name)
    return spec


def _compile(path: str, spec: ModuleSpec | None) -> CodeType:
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    if spec is not None and get_code is not None:
        found = get_code(spec.name)
        if isinstance(found, CodeType):
            return found
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _hide_group() -> None:
    """Let `torch.distributed.is_initialized()` be false until the script has called `init_process_group`."""
    import torch.distributed as dist

    dist.destroy_process_group()
