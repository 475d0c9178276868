"""A rank, from the fork to its end. The only code that runs the user's function, on all backends.

Its agent gets three messages over the control socket: `Received` for the assignment, `Running` before the call, `Done` once the outcome
is written. Then it waits for `Go`, because others may still need its store or its end of a connection.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import hashlib
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from kale_dist import wire
from kale_dist.errors import ContractError
from kale_dist.errors.local_variables import FrameLocals
from kale_dist.snapshot import loading, sources
from kale_dist.snapshot.changes import Arrived, roots_of_call
from kale_dist.snapshot.given_models import GivenModels, Returned, modules_in
from kale_dist.snapshot.reducers import References
from kale_dist.wire import STACKS_SIGNAL, Assignment, JobFiles, context
from kale_dist.wire.blobs import FolderStore
from kale_dist.wire.messages import Done, Received, Running
from kale_dist.wording import listed
from kale_dist.worker.pod import mpi
from kale_dist.worker.rank import joint_saving, process_state, rank_gpus, stand_ins, trainers
from kale_dist.worker.rank.control import Control

if TYPE_CHECKING:
    from kale_dist.snapshot.loading import Loaded
    from kale_dist.worker.rank.process_group import KeptGroup

LIVE = "kale_dist.worker.rank.live_rank"
"""The module whose function runs the cells of live ranks."""

ATEXIT_S = 5.0
"""Seconds for threads and `atexit` callbacks to end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptors:
    """What a rank gets from the agent, in the order in which they are sent."""

    stdout: int
    stderr: int
    events: int
    stacks: int
    control: int


def run(descriptors: Descriptors) -> NoReturn:
    """Be a rank: wait for an assignment, carry it out, and end the process."""
    os.setsid()
    _reset_signals()
    _take_output(descriptors)
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=descriptors.stacks, all_threads=True, chain=False)
    control = Control(descriptors.control)
    received = control.receive_assignment()
    if received is None:
        os._exit(0)
    control.send(Received())
    assignment, store = received
    code = _carry_out(control, descriptors.events, assignment, store)
    if assignment.order.mpi and not code:
        atexit.register(mpi.leave)
    _end(code)


def _carry_out(control: Control, events: int, assignment: Assignment, store: int | None) -> int:
    """Run the job's function and report how that went; gives the exit code once the agent lets this rank go."""
    report, joined = _Report(control, assignment), None
    try:
        _settle(assignment, events, control)
        loaded, joined = _prepare(assignment, store, report)
        control.send(Running())
        report.succeed(_run(loaded, joined, control, assignment))
    except BaseException as raised:  # noqa: BLE001 - anything that the user's code raises is the outcome
        report.fail(raised)
    context.flush()
    _flush_output()
    return report.send(joined)


class _Report:
    """A rank's outcome: a file for the notebook, and a message for the agent."""

    def __init__(self, control: Control, assignment: Assignment) -> None:
        from kale_dist.snapshot import outcome

        self.references = References()
        """Of the snapshot, once it is loaded."""
        order, rank, attempt = assignment.order, assignment.rank, assignment.attempt.number
        self._control, self._order = control, order
        self._outcome = outcome
        self._path = JobFiles(order.folder).outcome(attempt, rank)
        self._signer = outcome.Signer(key=bytes.fromhex(order.key), job=order.object, attempt=attempt, rank=rank)
        self._error: BaseException | None = None
        self._shown: dict[int, FrameLocals] = {}

    def succeed(self, value: Any) -> None:
        """Write what the function returned."""
        self._outcome.write_success(self._path, signer=self._signer, value=value, references=self.references)

    def fail(self, raised: BaseException) -> None:
        """Print and write an error; where that fails, because a disk is full, the reason still reaches the agent."""
        try:
            self._error = error = stand_ins.clearer(raised)
            self._shown = sources.locals_of(error, show=self._order.debugging.show_locals)
            # The log is read by more people and programs than the error itself: it has no texts.
            _print_error(error, sources.locals_of(error, show="summary") if self._shown else None)
            self._outcome.write_failure(
                self._path, signer=self._signer, error=error, references=self.references, shown=self._shown
            )
        except BaseException as second:  # noqa: BLE001 - as above
            self._error = self._error or second
            _print_error(second)

    def give_up(self, error: BaseException) -> None:
        """End this rank, whose main thread hangs."""
        self.fail(error)
        self.send(None)
        os._exit(1)

    def send(self, joined: KeptGroup | None) -> int:
        """Tell the agent, and wait until this rank may go; gives its exit code."""
        error, failure = self._error, dict[str, Any]()
        if error is not None:
            failure = {
                "ok": False, "error_type": sources.type_name(error), "error_text": _safe_text(error)[:4000],
                "where": sources.last_line(error), "node": os.environ.get(wire.PodVariable.NODE, ""),
                "is_not_started": isinstance(error, ContractError) and joined is None,
            }  # fmt: skip
        exchanges = joined.exchanges() if joined is not None and self._order.cuda else ()
        shown = "\n".join(map(str, self._shown.values()))
        weights, copies = joined.report if joined is not None else ("", "")
        self._control.send(Done(locals=shown, exchanges=tuple(exchanges), weights=weights, copies=copies, **failure))
        self._control.wait_for_go()
        return 0 if self._error is None else 1


def _prepare(assignment: Assignment, store: int | None, report: _Report) -> tuple[Loaded, KeptGroup | None]:
    """Load the function and join the group; in an image without torch there is none, and all the rest is the same."""
    from kale_dist.worker.rank import process_group

    order = assignment.order
    joined = process_group.KeptGroup(assignment) if loading.has_torch() else None
    loaded = loading.load(
        FolderStore(pathlib.Path(order.store)), order.snapshot, modules=JobFiles(order.folder).modules
    )
    report.references = loaded.references
    if joined is not None:
        joined.open(store, report.give_up)
    return loaded, joined


def _run(loaded: Loaded, joined: KeptGroup | None, control: Control, assignment: Assignment) -> Any:
    """Run a training, the cells of live ranks or the user's function; gives the value that goes back."""
    module = getattr(loaded.fn, "__module__", "")
    if module.startswith("kale_dist.worker.training."):
        trainers.leave_bars_out()
        loaded.kwargs["origin"] = loaded.origin
        value = _call(loaded)
        if joined is not None:
            joined.advise(trained=False)
        return value
    if joined is not None:
        joint_saving.begin(joined.store)
    if module == LIVE:
        from kale_dist.worker.rank.live_rank import LiveRank

        attempt = assignment.attempt
        loaded.kwargs["rank"] = LiveRank(
            control,
            joined,
            assignment.order,
            attempt=attempt.number,
            store_port=attempt.port,
            references=loaded.references,
        )
    arrived = None
    if not assignment.rank and module != LIVE:
        roots = roots_of_call(loaded.fn, loaded.args, loaded.kwargs)
        covered = map(id, modules_in(loaded.args, loaded.kwargs))
        arrived = Arrived(lambda: roots, covered=set(covered), origin=loaded.origin)
    models = GivenModels(loaded, assignment.rank)
    value = _call(loaded)
    changes, stay = (None, []) if arrived is None else arrived.changes()
    if joined is not None:
        value = models.with_weights(value, has_trained=joined.has_trained)
    if changes is not None and changes.places:
        returned = value if isinstance(value, Returned) else Returned(value=value)
        value = dataclasses.replace(returned, changes=(changes,))
    if joined is not None:
        is_trained = isinstance(value, Returned) and (value.is_trained or any(one.tensors for one in value.changes))
        joined.advise(trained=is_trained, weights=models.fingerprint)
    if stay:
        said = f"Changed by the function, and left behind in the ranks: {listed(stay, 5)}. Return what you need."
        context.log(said, warns=True)
    return value


def _settle(assignment: Assignment, events: int, control: Control) -> None:
    """All that has to be as it should before anything is unpickled."""
    order, rank, local_rank = assignment.order, assignment.rank, assignment.local_rank
    files = JobFiles(order.folder)
    if order.version != wire.VERSION:
        raise ContractError(f"The notebook speaks contract version {order.version}, this worker {wire.VERSION}")
    if order.process is not None:
        process_state.apply(order.process, files.modules)
    else:
        sys.path.insert(0, str(files.modules))
    process_state.set_torchrun_environment(assignment)
    if not order.cuda:
        rank_gpus.hide()
    if order.mpi:
        mpi.join(order, assignment.attempt.number, rank)
    process_state.set_threads(assignment)
    process_state.set_seeds(assignment.attempt.seed + rank)
    device = rank_gpus.claim(local_rank, assignment.local_world_size, order.gpus_each) if order.cuda else "cpu"
    if order.process is not None and loading.has_torch():
        process_state.set_default_device(order.process.torch_flags, device)
    place = context.Context(
        rank=rank,
        local_rank=local_rank,
        world_size=assignment.attempt.world_size,
        local_world_size=assignment.local_world_size,
        device=device,
        job=order.job,
        attempt=assignment.attempt.restarts,
        max_restarts=order.policy.max_restarts,
        in_job=True,
        folder=files.folder,
        owner=hashlib.sha256(b"parts\n" + bytes.fromhex(order.key)).hexdigest(),
        resume=FolderStore(pathlib.Path(order.store)).path(order.resume) if order.resume and rank == 0 else None,
    )
    context.activate(place, events, control.is_asked_to_save, attempt=assignment.attempt.number)
    wait_s = order.debugging.breakpoint_wait_s
    stand_ins.install(cuda=order.cuda, agent=control, breakpoint_wait_s=wait_s)


def _call(loaded: Loaded) -> Any:
    """Call the user's function; `sys.exit()` and `sys.exit(0)` are a return without a value, as in a script."""
    try:
        return loaded.fn(*loaded.args, **loaded.kwargs)
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return None
        raise
    finally:
        joint_saving.end()
        if (debugger := sys.modules.get("kale_dist.worker.rank.debugger")) is not None:
            debugger.leave()


def _reset_signals() -> None:
    """What a fresh Python has, independent of how the forkserver was started."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _take_output(descriptors: Descriptors) -> None:
    """Put stdout and stderr, of Python and C, on the pipes, flushed at each line's end."""
    os.dup2(descriptors.stdout, 1)
    os.dup2(descriptors.stderr, 2)
    os.close(descriptors.stdout)
    os.close(descriptors.stderr)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    libc = ctypes.CDLL(None)
    line_buffered = 1
    for name in ("stdout", "stderr"):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, line_buffered, ctypes.c_size_t(0))


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
    ctypes.CDLL(None).fflush(None)


def _print_error(error: BaseException, shown: Mapping[int, FrameLocals] | None = None) -> None:
    """The traceback into the rank's own output, as the notebook will show it; of `sys.exit`, what Python prints."""
    text = ""
    with contextlib.suppress(Exception):
        if not isinstance(error, SystemExit):
            text = sources.format_error(error, shown)
        elif not isinstance(error.code, int):
            text = f"{error.code}\n"
    # The function may have put another stream there, as one that keeps the ranks quiet.
    for stream in {id(one): one for one in (sys.stderr, sys.__stderr__)}.values():
        with contextlib.suppress(Exception):
            stream.write(text)  # type: ignore[union-attr]


def _safe_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception whose text cannot be read is still reported
        return "(its text cannot be read)"


def _end(code: int) -> NoReturn:
    """Let threads and `atexit` callbacks (trackers, writers) finish for a while, then leave without destructors."""
    limit = threading.Timer(ATEXIT_S, os._exit, (code,))
    limit.daemon = True
    limit.start()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - what Python itself calls before atexit
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001 - there is no public name
    _flush_output()
    os._exit(code)
