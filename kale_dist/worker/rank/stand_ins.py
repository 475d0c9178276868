"""What a rank has in place of a notebook's pictures, terminal and GPU.

Pictures go to the notebook as events, and `breakpoint()` opens a prompt there (`debugger.py`). Code that needs a keyboard, or a GPU that the rank does not have, fails with
an error that says so.
"""

from __future__ import annotations

import base64
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from kale_dist.errors import ConfigError
from kale_dist.wire import PodVariable, context, events
from kale_dist.worker.agent import hardware_faults
from kale_dist.worker.rank import trainers
from kale_dist.worker.rank.control import Control

MAX_PICTURE_BYTES = 512 << 10
"""An event with more does not leave the rank."""

first_rank = 0
"""The rank that shows pictures: the first of those that run a cell."""

_INLINE = ("", "inline", "module://matplotlib_inline.backend_inline", "module://ipykernel.pylab.backend_inline")
"""Backends of matplotlib that draw in a notebook, which a rank is not."""

_METHODS = {
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "image/svg+xml": "_repr_svg_",
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
}


def install(*, cuda: bool, agent: Control, breakpoint_wait_s: float) -> None:
    """Put the stand-ins in place, before anything of the user's is loaded.

    Args:
        cuda: Whether the rank has a GPU.
        agent: Through which a person debugs the rank.
        breakpoint_wait_s: How long the agent waits for that person; 0 for not at all.
    """

    def stop(*_args: Any, header: str | None = None, **_options: Any) -> None:
        if os.environ.get("PYTHONBREAKPOINT") != "0":
            # pdb takes a while to import, and few ranks need it.
            from kale_dist.worker.rank import debugger

            debugger.stop(sys._getframe(1), agent, breakpoint_wait_s, header)  # noqa: SLF001 - the documented way to the caller

    vars(builtins).update(input=_input, display=display)
    sys.breakpointhook = stop
    if os.environ.get("MPLBACKEND", "") in _INLINE:
        os.environ["MPLBACKEND"] = "module://kale_dist.worker.rank.matplotlib_backend"
    actions: dict[str, Callable[[ModuleType], None]] = {
        "IPython.core.display_functions": lambda module: setattr(module, "display", display),
        "pdb": lambda module: setattr(module, "set_trace", stop),
        "tqdm.notebook": _plain_bars,
        **trainers.actions(),
    }
    for name in [name for name in actions if name in sys.modules]:
        _act(actions.pop(name), sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(actions))
    if not cuda and "torch" in sys.modules:
        _without_gpu()


def _act(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Do something to a module; where it fails, the import goes on."""
    with context.only_shown(f"What {module.__name__} does", errors=(Exception,)):
        action(module)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Does something to modules when they are imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        action = self._actions.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if action is not None else None
        if action is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            _act(action, module)

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


# -- pictures --------------------------------------------------------------------------------------------------------


def display(*values: Any, **_options: Any) -> None:
    """Show objects in the notebook, as IPython's function of this name does. The first rank sends pictures, the others print."""
    for value in values:
        bundle = bundle_of(value) if context.context().rank == first_rank else {}
        size = sum(map(len, bundle.values()))
        if not bundle or size > MAX_PICTURE_BYTES:
            print(value)  # noqa: T201 - what display does without a notebook
        if size > MAX_PICTURE_BYTES:
            limit = MAX_PICTURE_BYTES >> 10
            print(f"kale_dist: {size >> 10:,} KiB are too much to show (at most {limit} KiB): save it to a file")  # noqa: T201
        elif bundle:
            context.emit(events.Display(data={**bundle, "text/plain": repr(value)[:1000]}))


def show_figures() -> None:
    """Show the open figures of matplotlib, as a notebook does at the end of a cell."""
    if (pyplot := sys.modules.get("matplotlib.pyplot")) is not None and pyplot.get_fignums():
        pyplot.show()


def bundle_of(value: Any) -> dict[str, str]:
    """How an object is shown, by MIME type; empty for one that is only text."""
    if type(value).__module__.partition(".")[0] == "matplotlib" and hasattr(value, "savefig"):
        drawn = io.BytesIO()
        value.savefig(drawn, format="png", bbox_inches="tight")
        return {"image/png": base64.b64encode(drawn.getvalue()).decode()}
    found: dict[str, Any] = {}
    # Asked of the class: an object may make up attributes as it is asked for them.
    if hasattr(type(value), "_repr_mimebundle_"):
        made = value._repr_mimebundle_()
        found = dict((made[0] if isinstance(made, tuple) else made) or {})
    for kind, method in _METHODS.items():
        if kind not in found and hasattr(type(value), method):
            made = getattr(value, method)()
            found[kind] = made[0] if isinstance(made, tuple) else made
    as_text = {kind: _text(data) for kind, data in found.items() if data is not None and kind != "text/plain"}
    return {kind: text for kind, text in as_text.items() if text}


def _text(data: Any) -> str:
    if isinstance(data, bytes):
        return base64.b64encode(data).decode()
    return data if isinstance(data, str) else ""


def _plain_bars(module: Any) -> None:
    """Let tqdm's bars for notebooks, which need a kernel, be its bars for terminals, which the log shows."""
    from_terminal = sys.modules["tqdm.std"]
    given: Mapping[str, str] = {"tqdm_notebook": "tqdm", "tqdm": "tqdm", "trange": "trange", "tnrange": "trange"}
    for name, plain in given.items():
        setattr(module, name, getattr(from_terminal, plain))


# -- keyboard and GPU ------------------------------------------------------------------------------------------------


def _input(prompt: object = "", /) -> NoReturn:
    raise EOFError(
        f"input({str(prompt)!r}) has nothing to read from: a rank has no terminal. Ask in the notebook before the call, and"
        " pass the answer as an argument"
    )


class NoGpuError(ConfigError, RuntimeError):
    """The rank has no GPU. A `RuntimeError` as well, because torch's compiler asks for the GPU's name and catches that."""


_REMEDY = (
    "Write .to(device) with the device that the step is given (in launch: kale_dist.context().device) instead of .cuda() or"
    " .to(rank), or pass cuda=True where there are GPUs"
)
_NO_GPU = ("cuda", "this code asks for a GPU, and the rank has none", _REMEDY)


def clearer(error: BaseException) -> BaseException:
    """What the job reports in the place of an error of the user's code, or the error itself with a note.

    The error of `.to(0)` on a machine without a GPU, which torch raises where nothing can be put in place, in our words. A note
    to a name that is not registered, and, in a container, to a write that was refused: torch's own names neither file nor user.
    pdb's `q` has no words at all. A connection that a DataLoader worker's death has cut is named after the worker. What a worker raised begins
    with its own words.
    """
    if type(error).__name__ == "BdbQuit" and not error.args:
        error.args = ("`q` at a breakpoint has ended the rank",)
        frames = error.__traceback__
        while frames is not None:
            if frames.tb_next is not None and frames.tb_next.tb_frame.f_globals.get("__name__") == "bdb":
                frames.tb_next = None
            frames = frames.tb_next
    if isinstance(error, RuntimeError) and "Cannot access accelerator device" in str(error):
        return NoGpuError(*_NO_GPU).with_traceback(error.__traceback__)
    if isinstance(error, ConnectionError | EOFError) and _was_fetching(error):
        death = RuntimeError("A DataLoader worker died while it passed a batch on (often because memory ran out)")
        death.__cause__ = error
        return death.with_traceback(error.__traceback__)
    if " in DataLoader worker process " in str(error).partition("\n")[0]:
        said = str(error).rstrip().rpartition("\n")[2]
        error.args = (f"{said.partition(': ')[2] or said} (in a DataLoader worker)\n{error}",)
    if type(error).__name__.endswith("NotFound"):
        # As gymnasium's of an environment whose package nothing of the call refers to.
        error.add_note(
            "Ranks import the packages that the function uses. If an import in your notebook registers this name, put the"
            " import into the function, too."
        )
    if PodVariable.WORK in os.environ and "Permission denied" in str(error):
        error.add_note(
            f"The process is user {os.getuid()}, who may not do this here. On a cluster, give the user that the volume's "
            "folders belong to as kd.Kubernetes(run_as_user=...), or have their owner open them to this user"
        )
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, ConfigError)
    if is_torchs and (fault := hardware_faults.find(str(error))):
        error.add_note(f"{fault.sentence}. {fault.remedy}.")
    return error


def _was_fetching(error: BaseException) -> bool:
    """Whether a DataLoader met an error while it took a batch from a worker; one that a worker passed on comes from elsewhere."""
    return any(frame.f_code.co_name == "_try_get_data" for frame, _line in traceback.walk_tb(error.__traceback__))


def _without_gpu() -> None:
    """Give code that asks for a GPU one sentence, not an error from torch's inside that depends on its build."""
    import torch

    if torch.cuda.is_available():
        return

    def refusing() -> Callable[..., NoReturn]:
        def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise NoGpuError(*_NO_GPU)

        return refuse

    for name in ("_lazy_init", "set_device"):
        # Each has its own: torch.compile refuses to look at one function of two names.
        setattr(torch.cuda, name, refusing())
