"""Runs cells as a live rank, one after another in one process until it is asked to end. Variables and process group stay.

The notebook sends its messages (`ToLive`) to all ranks of a job at once, and a rank answers each numbered one with an `Answer`, which
becomes an event. It starts with an answer of number 0. Interrupts and cuts are for one number, so that none hits the cell after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import queue
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any

from kale_dist.errors import SnapshotError
from kale_dist.snapshot import loading, outcome, sources
from kale_dist.snapshot.reducers import References
from kale_dist.wire import JobFiles, Order, context
from kale_dist.wire.blobs import FolderStore
from kale_dist.wire.messages import Answer, Cell, CellFailed, EndLive, Give, Interrupt, Load, Numbered, Repair, ToLive
from kale_dist.worker.agent.hang_watch import Frame, Sample, waits
from kale_dist.worker.pod import transfers
from kale_dist.worker.rank import cell, joint_saving, repair, stand_ins, trainers
from kale_dist.worker.rank.control import Control

CUT_AFTER_S = 0.5
"""After an interrupt: Python code has ended by then, and what has not waits in a collective."""

LOOK_EACH_S = 0.2
"""How often a rank looks whether it waits for one that has failed: twice in a row, and it is freed."""

_IDLE_LOOK_S = 1.0
_MAX_TEXT = 20_000


def serve(idle_s: float | None = None, rank: LiveRank | None = None) -> None:
    """Run cells until the rank is asked to end: the function of the job.

    Args:
        idle_s: Seconds without a cell after which the agent ends the job; None for never.
        rank: The rank, which `rank_main` puts in.
    """
    if rank is not None:
        rank.serve(idle_s)


class LiveRank:
    """One rank that runs cells.

    Args:
        control: The connection to its agent.
        group: The rank's kept process group; None without torch.
        order: The job.
        attempt: The attempt's number.
        store_port: MASTER_PORT, whose connections outlive a cut.
        references: Functions and classes that came from the notebook.
    """

    def __init__(
        self, control: Control, group: Any, order: Order, *, attempt: int, store_port: int, references: References
    ) -> None:
        self._control = control
        self._group = group
        self._order = order
        self._attempt = attempt
        self._store_port = store_port
        self._references = references
        self._names: dict[str, Any] = sys.modules["__main__"].__dict__
        self._rank = context.context().rank
        self._main = threading.main_thread().ident or 0
        self._messages: queue.SimpleQueue[Numbered | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held by the listener while it interrupts or cuts, and by the main thread while a cell begins or ends."""
        self._last = 0, ""
        """Number and name of the last numbered message."""
        self._running = 0
        """The number of the cell that runs; 0 for none."""
        self._interrupted = 0
        """The number of the cell that a signal is to end."""
        self._ended = 0
        """The number of the last cell that has ended."""
        self._failed = 0
        """The number of the last cell that has failed in another rank."""
        self._stopped = 0
        """The number of the last cell that was to be interrupted."""
        self._before: Sample | None = None
        self._cut_at: float | None = None
        self._is_cut = self._is_freed = False

    def serve(self, idle_s: float | None) -> None:
        """Run cells until the rank is asked to end, or its agent is gone."""
        here, pid = context.context(), os.getpid()
        self._names.update(rank=here.rank, world_size=here.world_size, local_rank=here.local_rank, device=here.device)
        signal.signal(signal.SIGINT, self._raise)
        threading.Thread(target=self._listen, name="kale_dist live", daemon=True).start()
        self._control.send(Answer(idle_s=idle_s))
        while (message := self._messages.get()) is not None:
            answer = dataclasses.replace(self._carry_out(message), number=message.number, name=message.name)
            if os.getpid() != pid:
                # The cell has forked, and its child has gone on to here.
                os._exit(0)
            self._control.send(answer)

    # -- the listener's thread ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (
            received := self._control.receive_live(
                LOOK_EACH_S if self._cut_at or self._failed > self._ended else _IDLE_LOOK_S
            )
        ) is not None:
            for message in received:
                self._take(message)
            with self._lock:
                self._look()
        self._messages.put(None)

    def _take(self, message: ToLive) -> None:
        if message.attempt not in (None, self._attempt):
            return
        match message:
            case EndLive():
                self._messages.put(None)
            case Numbered(number=number, name=name) if number > self._last[0]:
                self._last = number, name
                if message.is_for(self._rank):
                    self._messages.put(message)
            case Numbered(number=number, name=name) if name != self._last[1]:
                self._control.send(Answer(number=number, name=name, ok=False, is_refused=True))
            # The cell that the next two are for may be about to begin.
            case CellFailed():
                with self._lock:
                    self._failed = max(self._failed, message.number)
            case Interrupt():
                with self._lock:
                    self._stopped = max(self._stopped, message.number)
                    if self._running and self._running == message.number:
                        self._interrupt(CUT_AFTER_S)

    def _look(self) -> None:
        """Free the main thread if it waits for a rank that has failed; cut its connections if a signal has not ended its wait."""
        if self._failed and self._failed == self._running:
            used_s = time.clock_gettime(time.pthread_getcpuclockid(self._main))
            before, self._before = self._before, _sample(sys._current_frames()[self._main].f_code, used_s)  # noqa: SLF001 - documented
            if before is not None and not self._is_freed and waits(before, self._before):
                self._is_freed = True
                self._interrupt(0.0)
        if self._cut_at is not None and time.monotonic() >= self._cut_at:
            self._cut_at = None
            self._is_cut = True
            repair.cut(self._store_port)

    def _interrupt(self, cut_after_s: float) -> None:
        self._interrupted = self._running
        self._cut_at = time.monotonic() + cut_after_s
        signal.pthread_kill(self._main, signal.SIGINT)

    # -- the main thread ----------------------------------------------------------------------------------------------

    def _raise(self, *_: object) -> None:
        # Between cells it would hit the code that waits for the next one.
        if self._running and self._running == self._interrupted:
            self._interrupted = 0
            raise KeyboardInterrupt

    def _carry_out(self, message: Numbered) -> Answer:
        try:
            match message:
                case Cell():
                    return self._run_cell(message)
                case Load():
                    return Answer(loaded=tuple(self._load(message.snapshot)))
                case Repair():
                    self._group.guarded(repair.renew)(self._group.store, message.repair)
                    return Answer(repaired=message.repair)
                case Give():
                    self._give(message.expression, message.name)
                    return Answer(gives=True)
        except Exception as error:  # noqa: BLE001 - the notebook has to get an answer
            return self._failure(error)
        return Answer()

    def _run_cell(self, message: Cell) -> Answer:
        sources.install({message.file: (message.source, message.label)})
        before = dict(self._names)
        stand_ins.first_rank = min(message.ranks or [0])
        is_of_all = self._group is not None and len(message.ranks) in (0, context.context().world_size)
        joint_saving.begin(self._group.store if is_of_all else None, f"cell {message.number}")
        try:
            with self._lock:
                self._running, self._interrupted, self._before = message.number, 0, None
                self._cut_at, self._is_cut, self._is_freed = None, False, False
            try:
                if self._stopped == message.number:
                    raise KeyboardInterrupt
                value = cell.execute(message.source, message.file, self._names)
                stand_ins.show_figures()
                answer = Answer(value=_shown(value))
            finally:
                self._leave()
        except BaseException as raised:  # noqa: BLE001 - whatever a cell raises ends the cell, and not the rank
            self._leave()
            error = stand_ins.clearer(raised)
            # A connection that another rank has cut ends a wait with an error of gloo's.
            is_freed = self._is_freed or (self._failed == message.number and _is_of_collective(error))
            answer = dataclasses.replace(self._failure(error), is_freed=is_freed)
        else:
            if value is not None:
                self._names["_"] = value
        trainers.end_cell()
        joint_saving.end()
        sys.stdout.flush()
        sys.stderr.flush()
        context.flush()
        names = sorted(
            name
            for name, value in list(self._names.items())
            if name[:1] != "_" and before.get(name, before) is not value
        )
        answer = dataclasses.replace(answer, is_cut=self._is_cut, names=tuple(names))
        with contextlib.suppress(Exception):
            return dataclasses.replace(answer, counts=repair.counts() if self._group is not None else {})
        return answer

    def _failure(self, error: BaseException) -> Answer:
        shown = sources.locals_of(error, show=self._order.debugging.show_locals)
        text = str(error) if isinstance(error, SnapshotError) else sources.format_error(error, shown)
        return Answer(
            ok=False, error_type=sources.type_name(error), traceback=text[-_MAX_TEXT:],
            is_interrupted=isinstance(error, KeyboardInterrupt),
        )  # fmt: skip

    def _leave(self) -> None:
        """The cell has ended: what is meant for it does nothing from here on."""
        with self._lock:
            self._ended = max(self._ended, self._running)
            self._running, self._cut_at = 0, None
        if (debugger := sys.modules.get("kale_dist.worker.rank.debugger")) is not None:
            debugger.leave()

    def _load(self, digest: str) -> list[str]:
        """Put what a snapshot has into the ranks' names; gives the names."""
        order, store = self._order, FolderStore(pathlib.Path(self._order.store))

        def bring(blob: str) -> None:
            # What puts it there has checked it.
            if not store.path(blob).exists():
                transfers.fetch(order, bytes.fromhex(order.key), store, blob)

        bring(digest)
        for blob in loading.blobs_of(store, digest):
            bring(blob)
        modules = pathlib.Path(order.folder, f"modules-{digest[:16]}")
        loading.stage_modules(store, digest, modules)
        return loading.load_names(store, digest, modules, self._names, self._references)

    def _give(self, expression: str, name: str) -> None:
        value = eval(expression, self._names)  # noqa: S307 - that is what the notebook asks for
        signer = outcome.Signer(
            key=bytes.fromhex(self._order.key), job=f"{self._order.job} {name}", attempt=self._attempt, rank=self._rank
        )
        path = JobFiles(self._order.folder).outcome(self._attempt, self._rank)
        outcome.write_success(path, signer=signer, value=value, references=self._references)


def _shown(value: Any) -> dict[str, str] | None:
    """What the notebook shows of a cell's last expression, by MIME type."""
    if value is None:
        return None
    bundle = stand_ins.bundle_of(value)
    plain = {"text/plain": repr(value)[:_MAX_TEXT]}
    return plain | (bundle if sum(map(len, bundle.values())) <= stand_ins.MAX_PICTURE_BYTES else {})


def _sample(code: types.CodeType, used_s: float = 0.0) -> Sample:
    """A look at a thread that executes some code, and has used so much processor time."""
    frame = Frame(file=code.co_filename, line=0, function=code.co_name)
    return Sample(frames=(frame,), cpu_ticks=round(used_s * 100), moves=0)


def _is_of_collective(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and _sample(frames[-1].f_code).may_wait
