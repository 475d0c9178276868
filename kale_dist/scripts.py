"""Runs existing scripts as jobs, as torchrun would: `kale-dist launch train.py`."""

from __future__ import annotations

import ast
import functools
import importlib
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kale_dist.calls import request, signatures, starting, verbs
from kale_dist.calls.options import Options
from kale_dist.calls.request import Call, Function
from kale_dist.errors import ConfigError, KaleDistError, warn
from kale_dist.job.handle import Job
from kale_dist.snapshot import datasets, modules
from kale_dist.wire import StateName
from kale_dist.wording import closest, parse
from kale_dist.worker.rank import script as on_a_rank

_FAILED = 1
BY_SIGNAL = 128
"""Added to the number of the signal that ended a program, this is a shell's exit code for the program."""


def launch(script: str = "", arguments: Sequence[str] = (), *, as_module: bool = False, **options: Any) -> Job[None]:
    """Run a script on every rank, as torchrun does; arguments and errors are those of `prepare`.

    Raises:
        SnapshotError: A file cannot be read.
        BackendError: The backend refused.
    """
    return starting.start(prepare(script, arguments, as_module=as_module, **options))


def prepare(script: str = "", arguments: Sequence[str] = (), *, as_module: bool = False, **options: Any) -> Call:
    """The checked call that runs a script on every rank. Nothing is started, and nothing of the script runs.

    On this machine the script runs from where it is. In containers and on a cluster it is sent, with the local modules
    that it imports and the files that its text or its arguments name, and runs in a folder that has all of these.

    Args:
        script: The script's path, or the dotted name of a module.
        arguments: The script's arguments on the command line.
        as_module: Whether `script` is a module's name, as for `python -m`.
        **options: Arguments of `kale_dist.launch`, and of the place where it runs.

    Raises:
        ConfigError: There is no such script, or an argument is wrong.
    """
    if not script:
        raise ConfigError(
            "script", "it is missing", "Give the path of a script; a function is what kale_dist.launch(fn) takes"
        )
    path = None if as_module else _check_script(script)
    if as_module:
        _add_to_path(pathlib.Path.cwd())
        _check_module(script)
    label = path.stem if path is not None else script
    given = request.gathered(options)
    signatures.check_words(given, verbs.launch)
    settings = Options(**given)
    in_place = request.where(settings.on)[0].name == "local"
    files = modules.Script(path=path, module=script if as_module else "", words=tuple(arguments))
    function = Function(
        fn=on_a_rank.run,
        args=(script if in_place or path is None else path.name, tuple(arguments)),
        kwargs={"as_module": as_module, "in_place": in_place},
        label=label,
        script=None if in_place else files,
    )
    checked = request.checked(function, settings)
    if not in_place:
        _warn_of_paths(arguments, [volume.mount_path for volume in checked.request.volumes])
    return checked


def call(target: str, arguments: Sequence[str] = (), **options: Any) -> Job[Any]:
    """Call a module's function on every rank.

    Args:
        target: `module:function`; the current folder is searched for the module, too.
        arguments: The function's arguments: `--lr 0.1` is `lr=0.1`, `--fast` is `fast=True`, other words go by position. Numbers,
            lists and the like are Python literals.
        **options: Arguments of `kale_dist.launch`, and of the place where it runs.

    Raises:
        ConfigError: There is no such function, or an argument is wrong; nothing was started.
        SnapshotError: Something cannot be sent.
        BackendError: The backend refused.
    """
    _add_to_path(pathlib.Path.cwd())
    fn = _function(target)
    args, kwargs = _words(arguments)
    signatures.check_function(fn, args, kwargs, verbs.launch)
    return verbs.launch(functools.partial(fn, *args, **kwargs), **request.gathered(options))


def exit_code(job: Job[Any]) -> int:
    """The exit code of an ended job, as its script would have returned it.

    Returns:
        0 after success; the failed rank's argument of `sys.exit`; 128 plus the number of the signal that ended it; else 1.
    """
    status = job.status
    if status.state is StateName.SUCCEEDED:
        return 0
    if status.failed_rank is None or status.state is StateName.CANCELLED:
        return _FAILED
    try:
        cause = getattr(job.exception(), "__cause__", None)
    except KaleDistError:
        cause = None
    if isinstance(cause, SystemExit):
        return cause.code & 0xFF or _FAILED if isinstance(cause.code, int) else _FAILED
    rank = next((one for one in status.replicas if one.rank == status.failed_rank), None)
    if rank is None:
        return _FAILED
    if rank.signal and rank.signal in signal.Signals.__members__:
        return BY_SIGNAL + signal.Signals[rank.signal]
    return rank.exit_code or _FAILED


# -- inside ----------------------------------------------------------------------------------------------------------


def _check_script(script: str) -> pathlib.Path:
    path = pathlib.Path(script)
    if path.is_dir():
        main = path / "__main__.py"
        remedy = f"Name a file in it, such as {main}" if main.exists() else "Name a file in it"
        raise ConfigError("script", f"{script!r} is a folder", remedy)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else pathlib.Path()
        # By their stems: all of them end in ".py".
        near = closest(path.stem, (one.stem for one in folder.glob("*.py"))).replace("'? ", ".py'? ")
        where = f"It was looked for in {folder.absolute()}"
        raise ConfigError("script", f"there is no file {script!r}", f"{near}{where}")
    _check_text(path)
    return path.absolute()


def _check_text(path: pathlib.Path) -> None:
    """Refuse a script that is not Python, which would fail on every rank, minutes later on a cluster."""
    try:
        ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise ConfigError(
            "script", f"{path} is not Python code that this interpreter can read ({line}{error.msg})", "Correct it"
        ) from None
    except ValueError as error:
        raise ConfigError("script", f"{path} is no Python ({error})", "Name a .py file") from None
    except OSError as error:
        raise ConfigError("script", f"{path} cannot be read: {error.strerror}", "Look at its permissions") from None


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    if pathlib.Path(name).is_file():
        raise ConfigError("script", f"{name!r} is a file, and -m takes the name of a module", "Leave out -m")
    if not all(part.isidentifier() for part in name.split(".")):
        remedy = "Write it with dots, as package.train, or leave out -m for a file"
        raise ConfigError("script", f"{name!r} cannot be the name of a module", remedy)
    if modules.find_spec(top) is None:
        remedy = f"It was looked for in {pathlib.Path.cwd()} and among the installed packages"
        raise ConfigError("script", f"there is no module {top!r}", remedy)


def _add_to_path(folder: pathlib.Path) -> None:
    """Put a folder first on `sys.path`, as Python does with a script's folder."""
    text = str(folder)
    sys.path[:] = [text, *(entry for entry in sys.path if entry != text)]
    importlib.invalidate_caches()


def _function(target: str) -> Callable[..., Any]:
    name, _, path = target.partition(":")
    if not path or not all(part.isidentifier() for part in [*name.split("."), *path.split(".")]):
        remedy = "Write it as module:function, such as train:main"
        raise ConfigError("script", f"{target!r} names no function of a module", remedy)
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        remedy = f"It was looked for in {pathlib.Path.cwd()} and among the installed packages"
        raise ConfigError("script", f"{name} cannot be imported: there is no module {error.name!r}", remedy) from None
    for step in path.split("."):
        names = [one for one in vars(found) if not one.startswith("_")] if hasattr(found, "__dict__") else []
        try:
            found = getattr(found, step)
        except AttributeError:
            remedy = closest(step, names).strip() or f"It has: {', '.join(names[:8])}"
            raise ConfigError("script", f"{name} has no {step!r}", remedy) from None
    if not callable(found):
        raise ConfigError("script", f"{target} is no function", "Name a function")
    return found  # type: ignore[no-any-return]


def _words(words: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Parse the words of a command line as a function's arguments."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            args.append(parse(word))
            continue
        name, is_given, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not name.isidentifier() or name in kwargs:
            problem = "it is given twice" if name in kwargs else "it cannot be the name of an argument"
            raise ConfigError(word, problem, "Write arguments of the function as --name value")
        if is_given:
            kwargs[name] = parse(value)
        elif rest and not rest[0].startswith("--"):
            kwargs[name] = parse(rest.pop(0))
        else:
            kwargs[name] = True
    return tuple(args), kwargs


def _warn_of_paths(arguments: Sequence[str], mounts: Sequence[str]) -> None:
    """Warn of arguments that are absolute paths on this machine and that no volume provides where the script runs."""
    values = [word.partition("=")[2] or word for word in arguments]
    there = [value for value in values if value.startswith("/") and pathlib.Path(value).exists()]
    for path in datasets.uncovered(there, mounts):
        warn(
            f"{path} is on this machine, and the script will not see it where it runs. Name it relative to the current "
            "folder to have it sent, or mount a volume there"
        )
