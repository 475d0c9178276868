"""Every error of kale_dist, and why they form one tree.

Catch `KaleDistError` to catch all of them. Below it the tree follows the steps of a call, so that the class alone shows how
far the call came: nothing was touched (`ConfigError`), the snapshot could not be
taken (`SnapshotError`), the place to run refused (`BackendError`), or the job itself ended badly (`JobError`).

    KaleDistError
      ConfigError (ValueError)        an argument; nothing has been read, written or started
      SnapshotError
        NotSerializableError          names the path to the object that cannot be pickled
        SnapshotDamagedError          a digest does not match
      StoreError                      bytes could not be kept or found (full disk, missing blob)
      ContractError                   Python, torch or contract version differ between notebook and worker
      ImageError                      an image cannot be made, found or used; `.retryable` as below
      BackendError                    `.retryable`: whether the same call may succeed later
        BackendUnavailableError
        JobNotFoundError
        JobExistsError
      JobError                        `.ref` names the job, `.locals` has the local variables of the rank's last frames
        JobFailedError                its cause is the first failing rank's own exception
        JobTimeoutError               the job ran into `timeout_s` or `stall_timeout_s`
        JobCancelledError
        CellError                     a cell failed in live ranks, which go on
        WaitTimeoutError (TimeoutError)   only the waiting ended; the job keeps running
        ResultUnavailableError        there is, or there can be, no result to read
      RankError                       in the place of an exception, where a rank died without one
      RemoteError                     in the place of an exception that could not be pickled or loaded

Messages name what failed, which object, on which side (notebook or worker), and what to do next. They hold no secrets.
All of them survive pickling: their fields are in `args`. A notebook shows them below the user's own lines, without the
library's; `%xmode --show` brings those back, and plain Python shows them always.

A problem that does not stop a call is a `KaleDistWarning`, issued through Python's `warnings`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from kale_dist.errors import tracebacks
from kale_dist.errors.local_variables import FrameLocals

P = ParamSpec("P")
R = TypeVar("R")


class KaleDistError(Exception):
    """Root of all errors that kale_dist raises on purpose."""

    def __str__(self) -> str:
        """The message, which is the first argument; further arguments are fields."""
        return str(self.args[0]) if self.args else ""

    def _render_traceback_(self) -> list[str]:
        """The traceback for IPython: the user's own lines and the message, without the library's lines."""
        return tracebacks.for_notebook(self)


class KaleDistWarning(UserWarning):
    """A problem of a call that continues."""


def warn(sentence: str) -> None:
    """Issue a `KaleDistWarning` that points at the user's own line, however deep in the library it is called."""
    warnings.warn(sentence, KaleDistWarning, stacklevel=_users_frame()[1])


def users_line() -> tuple[str, int]:
    """File and number of the user's own line, however deep in the library this is called."""
    frame, _ = _users_frame()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _users_frame() -> tuple[types.FrameType | None, int]:
    """The innermost frame that is not this library's, and how many frames deeper the caller's is."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("kale_dist."):
        frame, level = frame.f_back, level + 1
    return frame, level


def log(line: str) -> None:
    """Print a line of this library on stderr."""
    # In one write, because another thread may print, too.
    print(f"[kale-dist] {line}\n", end="", file=sys.stderr, flush=True)  # noqa: T201 - for the user


def note(line: str) -> None:
    """Print a line that is good news below a cell, on stdout: JupyterLab shows stderr as if something had failed."""
    print(f"[kale-dist] {line}\n", end="", flush=True)  # noqa: T201 - for the user


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print the block's warnings as lines: commands and magics have no line of the user's code to point at."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for warning in caught:
        if issubclass(warning.category, KaleDistWarning):
            log(str(warning.message))
        else:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)


class ConfigError(KaleDistError, ValueError):
    """An argument of a call is wrong. Raised before any input or output.

    Args:
        argument: Name of the argument as the caller wrote it.
        problem: What is wrong with it, with the value.
        remedy: What to do instead.
    """

    def __init__(self, argument: str, problem: str, remedy: str) -> None:
        super().__init__(argument, problem, remedy)
        self.argument = argument
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        """The argument, and a sentence each for the problem and the remedy."""
        return f"{self.argument}: {self.problem}. {self.remedy}"


def short_refusals(verb: Callable[P, R]) -> Callable[P, R]:
    """Remove this library's frames from a verb's refusals and from Ctrl-C, so that a traceback ends at the caller's own line."""

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except (ConfigError, BackendError, KeyboardInterrupt) as error:
            error.__traceback__ = None
            raise

    return call


class SnapshotError(KaleDistError):
    """The call could not be turned into a snapshot, or a snapshot could not be loaded."""


class NotSerializableError(SnapshotError):
    """Something in the call cannot be pickled.

    Args:
        path: Steps from the call to the culprit, such as `("train_step", "closure log", "_io.TextIOWrapper")`.
        problem: Why it cannot be pickled.
        remedy: What to do instead.
    """

    def __init__(self, path: tuple[str, ...], problem: str, remedy: str) -> None:
        super().__init__(path, problem, remedy)
        self.path = path
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        """The path with arrows, the problem, the remedy."""
        return f"{' -> '.join(self.path)} cannot be sent to another process: {self.problem}. {self.remedy}"


class SnapshotDamagedError(SnapshotError):
    """Bytes of a snapshot do not have the digest that names them."""


class StoreError(KaleDistError):
    """A store could not keep or find bytes."""


class ContractError(KaleDistError):
    """Notebook and worker have different versions of Python, torch or the contract."""


class ImageError(KaleDistError):
    """An image cannot be made, found or used.

    Args:
        message: What failed, at which registry or builder, and what to do.
        retryable: Whether the same call may succeed later without a change.
    """

    def __init__(self, message: str, retryable: bool = False) -> None:  # noqa: FBT001, FBT002 - exceptions pickle by position
        super().__init__(message, retryable)
        self.retryable = retryable


class BackendError(KaleDistError):
    """A backend refused or failed.

    Args:
        message: What failed and what to do.
        retryable: Whether the same call may succeed later without a change.
    """

    def __init__(self, message: str, retryable: bool = False) -> None:  # noqa: FBT001, FBT002 - exceptions pickle by position
        super().__init__(message, retryable)
        self.retryable = retryable


class BackendUnavailableError(BackendError):
    """The backend cannot be reached or is not installed."""


class JobNotFoundError(BackendError):
    """No job has this reference."""


class JobExistsError(BackendError):
    """A job of this name is there already."""


class JobError(KaleDistError):
    """A job ended badly or cannot give what was asked.

    Args:
        message: What happened and what to do.
        ref: The job's reference, as text.
    """

    def __init__(self, message: str, ref: str = "") -> None:
        super().__init__(message, ref)
        self.ref = ref
        self.locals: tuple[FrameLocals, ...] = ()
        """The local variables of the last frames of the rank's own exception: descriptions by name, outermost frame first."""


class JobFailedError(JobError):
    """The job failed. `__cause__` is the first failing rank's own exception."""


class JobTimeoutError(JobError):
    """The job ran into its own time limit, or made no progress for `stall_timeout_s`."""


class JobCancelledError(JobError):
    """The job was cancelled."""


class CellError(JobError):
    """A cell failed in live ranks. They and their variables stay, unless the message says otherwise."""


class WaitTimeoutError(JobError, TimeoutError):
    """The wait ended before the job did. The job keeps running."""


class ResultUnavailableError(JobError, AttributeError):
    """The job has no result that can be read here; the message gives the reason. `hasattr(job, "model")` is False then."""


class RankError(KaleDistError):
    """A rank died without a Python exception: killed by a signal, or ended by `os._exit`."""


class RemoteError(KaleDistError):
    """Stands for an exception of a rank that could not be pickled there or loaded here.

    Args:
        type_name: Qualified name of the exception's class.
        text: Its `str()`.
        traceback: The formatted traceback of the rank.
    """

    def __init__(self, type_name: str, text: str, traceback: str) -> None:
        super().__init__(type_name, text, traceback)
        self.type_name = type_name
        self.text = text
        self.traceback = traceback

    def __str__(self) -> str:
        """Type name and text, as Python prints an exception."""
        return f"{self.type_name}: {self.text}"
