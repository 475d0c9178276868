"""Local modules of a call: finds which files of the notebook's own code to send, without running any of it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.machinery
import inspect
import pathlib
import site
import stat
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from typing import Any

from kale_dist.errors import SnapshotError

MAX_DATA_BYTES = 64 << 20
"""Files beside code that are more than this together are not sent."""

_PARSING_TRIES = 20

_NEVER = frozenset({"kale_dist", "cloudpickle", "torch", "__main__", "__mp_main__"})
"""Top-level names that are in every rank."""

_FINDS_ITSELF = ("__file__", "__path__", "resources", "pkgutil", "__spec__", "getsourcefile", "getfile")
"""A module whose text contains one of these words may read files beside it."""

_HOME = frozenset({"__pycache__", "node_modules"})
"""Folders that are not sent, like hidden ones."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFile:
    """One file of local code or of data beside it."""

    path: str
    """The file's path in the rank, relative to the folder on `sys.path`."""
    source: pathlib.Path
    """The file on this machine."""
    mode: int

    def read(self) -> bytes:
        """Read the file.

        Raises:
            SnapshotError: The file cannot be read.
        """
        try:
            return self.source.read_bytes()
        except OSError as error:
            raise SnapshotError(
                f"{self.source} belongs to a local module that the call uses, and cannot be read: {error.strerror}."
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalModules:
    """The files to send, and notes for the user."""

    files: tuple[ModuleFile, ...]
    notes: tuple[str, ...]
    others: tuple[str, ...] = ()
    """Dotted names of imported modules that are not local: installed packages, the standard library, missing modules."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A script that is sent to the ranks."""

    path: pathlib.Path | None
    """The script's file; None for a module that is run by its name."""
    module: str = ""
    """The name of the module."""
    words: tuple[str, ...] = ()
    """The script's arguments. The files that they name are sent, too."""


def collect(names: Iterable[str], script: Script | None = None) -> LocalModules:
    """Collect the local modules among `names`, and those that they import, as whole packages.

    Args:
        names: Modules that a call refers to. Names that are not modules are ignored.
        script: A script to send, too, with the modules that it imports and the files that it names.
    """
    collector = _Collector(script.path.parent if script is not None and script.path is not None else None)
    waiting = sorted(set(names))
    if script is not None:
        waiting += [script.module] if script.path is None else collector.add_script(script.path, script.words)
    seen = set(waiting)
    while waiting:
        added = collector.add(waiting.pop())
        seen.update(added)
        waiting += added
    return LocalModules(
        files=tuple(sorted(collector.files.values(), key=lambda file: file.path)),
        notes=tuple(collector.notes),
        others=tuple(sorted(name for name in seen if not collector.has_taken(name))),
    )


class _Collector:
    def __init__(self, first: pathlib.Path | None) -> None:
        self._first = first
        self.files: dict[str, ModuleFile] = {}
        self.notes: list[str] = []
        self._compared: set[str] = set()
        self._taken: set[str] = set()
        self._foreign = _foreign_folders()

    def add(self, name: str) -> list[str]:
        """Add a module with its whole top-level package, and return the names that its files import."""
        top = name.partition(".")[0]
        if name in self._compared or not self._is_local(top):
            return []
        # The live module is compared by its own name, its package is taken once.
        self._compared.add(name)
        self.notes += notes_on_edits(name)
        spec = find_spec(top, self._first)
        if top in self._taken or spec is None:
            return []
        self._taken.add(top)
        if spec.submodule_search_locations is None:
            added = self._single(top, pathlib.Path(str(spec.origin)))
        else:
            folders = [pathlib.Path(place) for place in spec.submodule_search_locations]
            added = [file for folder in folders for file in self._package(top, folder)]
        return [found for file in added for found in _imports(_text(file.source), file.source)]

    def add_script(self, path: pathlib.Path, words: Iterable[str]) -> list[str]:
        """Add a script, and return the names that it imports.

        Files that its text or `words` name are sent, too, if they lie below its folder or the current one.
        """
        script = self._file("", path.parent, path)
        # An option and its value may be one word: --config=base.yaml.
        named = sorted({*_literals(path), *words, *(word.partition("=")[2] for word in words)})
        inside = [name for name in named if _plain(name) and ".." not in pathlib.PurePath(name).parts]
        folders = (path.parent.resolve(), pathlib.Path.cwd().resolve())
        data = (self._file("", folder, file) for folder in folders for name in inside for file in below(folder / name))
        self._keep([script], data, path)
        return list(_imports(_text(script.source), script.source))

    def has_taken(self, name: str) -> bool:
        """Whether a name is a local module, or a member of one."""
        return name.partition(".")[0] in self._taken

    def _is_local(self, top: str) -> bool:
        if top in _NEVER or top in sys.stdlib_module_names or top in sys.builtin_module_names:
            return False
        spec = find_spec(top, self._first)
        if spec is None:
            return False
        places = list(spec.submodule_search_locations or (spec.origin or "",))
        return all(place and pathlib.Path(place).exists() and not self._is_foreign(place) for place in places)

    def _is_foreign(self, place: str) -> bool:
        resolved = pathlib.Path(place).resolve()
        return any(folder in resolved.parents or folder == resolved for folder in self._foreign)

    def _package(self, top: str, folder: pathlib.Path) -> list[ModuleFile]:
        found = [self._file(top, folder, path) for path in _walk(folder)]
        code = [file for file in found if file.source.suffix in {".py", ".so"}]
        return self._keep(code, [file for file in found if file.source.suffix not in {".py", ".so"}], folder)

    def _single(self, top: str, path: pathlib.Path) -> list[ModuleFile]:
        places: list[pathlib.Path] = []
        if any(word in _text(path) for word in _FINDS_ITSELF):
            places = [path.parent / literal for literal in sorted(_literals(path)) if _plain(literal)]
        beside = (self._file("", path.parent, file) for place in places for file in below(place))
        if path.suffix == ".so":
            self.notes.append(f"{top} is a compiled module of yours ({path}): it runs only on machines like this one.")
        return self._keep([self._file("", path.parent, path)], beside, path)

    def _file(self, top: str, folder: pathlib.Path, path: pathlib.Path) -> ModuleFile:
        relative = pathlib.PurePosixPath(top, path.relative_to(folder).as_posix())
        return ModuleFile(path=str(relative), source=path, mode=0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)

    def _keep(self, code: list[ModuleFile], data: Iterable[ModuleFile], place: pathlib.Path) -> list[ModuleFile]:
        """Add code, and the files beside it unless they are too large; returns the files that are new."""
        found, size = {file.path: file for file in code}, 0
        # One by one: a folder with data may have millions of files.
        for file in data:
            if file.path not in found:
                found[file.path] = file
                size += file.source.stat().st_size
            if size > MAX_DATA_BYTES:
                self.notes.append(
                    f"{place} comes with more than {MAX_DATA_BYTES >> 20} MiB of other files: only code is sent to the ranks. "
                    "Put the files on a volume"
                )
                found = {file.path: file for file in code}
                break
        new = [file for file in found.values() if file.path not in self.files]
        self.files.update((file.path, file) for file in new)
        return new


def find_spec(name: str, first: pathlib.Path | None = None) -> importlib.machinery.ModuleSpec | None:
    """The spec of a top-level module, imported or not; nothing is executed.

    Args:
        name: The module's name.
        first: A folder that comes before all others, as a script's does.
    """
    own = importlib.machinery.PathFinder.find_spec(name, [str(first)]) if first is not None else None
    if own is not None and own.loader is not None:
        return own
    module = sys.modules.get(name)
    if isinstance(module, types.ModuleType):
        if isinstance(module.__spec__, importlib.machinery.ModuleSpec):
            return module.__spec__
        file = getattr(module, "__file__", None)
        return importlib.machinery.ModuleSpec(name, None, origin=file) if file else None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, None)
        except (ImportError, AttributeError, ValueError):
            continue
        if spec is not None:
            return spec
    return own


def _foreign_folders() -> frozenset[pathlib.Path]:
    """Folders of the standard library and of installed packages."""
    schemes = sysconfig.get_paths()
    folders = [schemes[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    folders += [entry for entry in sys.path if pathlib.PurePath(entry).name in {"site-packages", "dist-packages"}]
    return frozenset(pathlib.Path(folder).resolve() for folder in folders)


def _walk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Files below a folder, without hidden ones and caches."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _HOME:
            continue
        # A link to a folder may lead around in a circle.
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        elif path.is_file():
            yield path


def below(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a file itself, or the files below a folder."""
    if place.is_dir():
        yield from _walk(place)
    elif place.is_file():
        yield place


def _text(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.suffix == ".py" else ""


def _tree(text: str, path: pathlib.Path) -> ast.AST | None:
    """The syntax tree of a file's text; None if it is not Python."""
    for _ in range(_PARSING_TRIES):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        except SystemError:
            # Python 3.11 may raise it while another thread parses (https://github.com/python/cpython/issues/106905).
            continue
    raise SnapshotError(
        f"{path} could not be searched for imports, because another thread compiled all the time. Call again"
    )


def _literals(path: pathlib.Path) -> set[str]:
    """The string literals of a Python file."""
    tree = _tree(_text(path), path)
    nodes = ast.walk(tree) if tree is not None else ()
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _plain(literal: str) -> bool:
    """Whether a literal may be a relative path below the folder of its file."""
    parts = pathlib.PurePath(literal).parts if literal and "\0" not in literal and len(literal) < 256 else ()  # noqa: PLR2004 - longer than a file name may be
    return (
        bool(parts) and not pathlib.PurePath(literal).is_absolute() and not any(part.startswith(".") for part in parts)
    )


@functools.lru_cache(maxsize=256)
def _imports(text: str, path: pathlib.Path) -> tuple[str, ...]:
    """The absolute names in the import statements of a file's text, including those within functions. A call asks for the same as the one before."""
    return tuple(_imported(_tree(text, path)))


def _imported(tree: ast.AST | None) -> Iterator[str]:
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.args[0].value


# -- edited since its import -----------------------------------------------------------------------------------------


def notes_on_edits(name: str) -> list[str]:
    """A warning if the file of an imported module was edited since its import.

    The notebook then runs the old code, and the ranks run the new.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    # Other loaders (pytest's) compile something else than the file's text.
    if (
        not isinstance(module, types.ModuleType)
        or type(getattr(spec, "loader", None)) is not importlib.machinery.SourceFileLoader
    ):
        return []
    try:
        text = pathlib.Path(str(module.__file__)).read_bytes()
        written = _written(text, str(module.__file__))
    except (OSError, SyntaxError, ValueError) as error:
        return [f"{module.__file__} can no longer be compiled ({error}): the ranks' import of {name} will fail."]
    values = [one for value in vars(module).values() for one in (value, *_members(value, module))]
    functions = [_undecorated(one) for one in values]
    # Generated functions (dataclasses, named tuples) have code of no file.
    live = [one.__code__ for one in functions if isinstance(one, types.FunctionType)]
    if all(code in written for code in live if code.co_filename == module.__file__):
        return []
    note = (
        f"{module.__file__} was edited since {name} was imported: the ranks run the file as it is now, the notebook what it "
        f"was. To run the same code in both: importlib.reload({name}), or restart the kernel."
    )
    return [note]


@functools.lru_cache(maxsize=64)
def _written(text: bytes, path: str) -> frozenset[types.CodeType]:
    return frozenset(_codes(compile(text, path, "exec", dont_inherit=True)))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of all functions in a compiled file."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _undecorated(value: Any) -> Any:
    """The function behind decorators, a class method or a property."""
    try:
        return inspect.unwrap(getattr(value, "__func__", None) or getattr(value, "fget", None) or value)
    except Exception:  # noqa: BLE001 - any object may stand in a module, and its attributes may do anything
        return value


def _members(value: Any, module: types.ModuleType) -> Iterable[Any]:
    """The members of a class that a module defines; empty for other values."""
    return vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else ()
