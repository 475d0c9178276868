"""A live rank: runs cells one after another in the same process until it is told to end. Variables and process group stay.

The notebook sends messages `{"live": {...}}`, to all ranks of a job at once:

    attempt     the ranks that it is for: another attempt's do nothing
    number, name, and one of    `number` is higher than that of any message before, `name` is random
        source, file, label, ranks   run a cell in these ranks
        load                         put what a snapshot has into the ranks' names
        repair                       give the process groups new backends; the number of the repair
        give, ranks                  write the value of an expression into the rank's outcome file
    interrupt   number: end the cell of this number
    failed      number: the cell of this number has failed in another rank (from the agent)
    end         return from the job's function

A rank answers each numbered message with `{"cell": {number, name, ok, ...}}`, which becomes an event, and starts with one of number 0. A
message that comes twice does nothing. Interrupts and cuts are for one number, so that none hits the cell after it.
"""

from __future__ import annotations

import contextlib
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
from kale_dist.worker.agent.hang_watch import Frame, Sample, waits
from kale_dist.worker.pod import pod_input
from kale_dist.worker.rank import cell, repair, stand_ins
from kale_dist.worker.rank.control import Control

CUT_AFTER_S = 0.5
"""After an interrupt: Python code has ended by then, and what has not waits in a collective."""

LOOK_EACH_S = 0.2
"""How often a rank looks whether it waits for one that has failed: twice in a row, and it is freed."""

_IDLE_LOOK_S = 1.0
_MAX_TEXT = 20_000


def serve(idle_s: float | None = None, rank: LiveRank | None = None) -> None:
    """Run cells until the rank is told to end: the function of the job.

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
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
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
        """Run cells until the rank is told to end, or its agent is gone."""
        here, pid = context.context(), os.getpid()
        self._names.update(rank=here.rank, world_size=here.world_size, local_rank=here.local_rank, device=here.device)
        signal.signal(signal.SIGINT, self._raise)
        threading.Thread(target=self._listen, name="kale_dist live", daemon=True).start()
        self._control.say({"cell": {"number": 0, "name": "", "ok": True, "idle_s": idle_s}})
        while (message := self._messages.get()) is not None:
            answer = {"number": message["number"], "name": message["name"], **self._carry_out(message)}
            if os.getpid() != pid:
                # The cell has forked, and its child has gone on to here.
                os._exit(0)
            self._control.say({"cell": answer})

    # -- the listener's thread ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (
            heard := self._control.hear_live(
                LOOK_EACH_S if self._cut_at or self._failed > self._ended else _IDLE_LOOK_S
            )
        ) is not None:
            for message in heard:
                self._take(message)
            with self._lock:
                self._look()
        self._messages.put(None)

    def _take(self, message: dict[str, Any]) -> None:
        number = int(message.get("number") or 0)
        if message.get("attempt", self._attempt) != self._attempt:
            return
        if "end" in message:
            self._messages.put(None)
        elif number and number > self._last[0]:
            self._last = number, message["name"]
            if self._rank in (message.get("ranks") or [self._rank]):
                self._messages.put(message)
        elif number and message["name"] != self._last[1]:
            self._control.say({"cell": {"number": number, "name": message["name"], "ok": False, "is_refused": True}})
        with self._lock:
            # The cell that they are for may be about to begin.
            self._failed = max(self._failed, message.get("failed", 0))
            self._stopped = max(self._stopped, message.get("interrupt", 0))
            if self._running and message.get("interrupt") == self._running:
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

    def _carry_out(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if "source" in message:
                return self._run_cell(message)
            if "load" in message:
                return {"ok": True, "loaded": self._load(message["load"])}
            if "repair" in message:
                self._group.guarded(repair.renew)(self._group.store, int(message["repair"]))
                return {"ok": True, "repaired": message["repair"]}
            if "give" in message:
                self._give(str(message["give"]), message["name"])
                return {"ok": True, "gives": True}
        except Exception as error:  # noqa: BLE001 - the notebook has to get an answer
            return {"ok": False, **_described(error, self._order.debugging.show_locals)}
        return {"ok": True}

    def _run_cell(self, message: dict[str, Any]) -> dict[str, Any]:
        file = message["file"]
        sources.install({file: (message["source"], message["label"])})
        before = dict(self._names)
        stand_ins.first_rank = min(message.get("ranks") or [0])
        answer: dict[str, Any] = {"ok": True}
        try:
            with self._lock:
                self._running, self._interrupted, self._before = message["number"], 0, None
                self._cut_at, self._is_cut, self._is_freed = None, False, False
            try:
                if self._stopped == message["number"]:
                    raise KeyboardInterrupt
                value = cell.execute(message["source"], file, self._names)
                stand_ins.show_figures()
                answer["value"] = _shown(value)
            finally:
                self._leave()
        except BaseException as raised:  # noqa: BLE001 - whatever a cell raises ends the cell, and not the rank
            self._leave()
            error = stand_ins.clearer(raised)
            answer |= {"ok": False, **_described(error, self._order.debugging.show_locals)}
            # A connection that another rank has cut ends a wait with an error of gloo's.
            answer["is_freed"] = self._is_freed or (self._failed == message["number"] and _is_of_collective(error))
        else:
            if value is not None:
                self._names["_"] = value
        sys.stdout.flush()
        sys.stderr.flush()
        context.flush()
        answer["is_cut"] = self._is_cut
        answer["names"] = sorted(
            name
            for name, value in list(self._names.items())
            if name[:1] != "_" and before.get(name, before) is not value
        )
        with contextlib.suppress(Exception):
            answer["counts"] = repair.counts() if self._group is not None else {}
        return answer

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
                pod_input.fetch(order, bytes.fromhex(order.key), store, blob)

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


def _described(error: BaseException, show_locals: str) -> dict[str, Any]:
    shown = sources.locals_of(error, show=show_locals)
    text = str(error) if isinstance(error, SnapshotError) else sources.format_error(error, shown)
    return {
        "error_type": sources.type_name(error), "traceback": text[-_MAX_TEXT:],
        "is_interrupted": isinstance(error, KeyboardInterrupt),
    }  # fmt: skip


def _shown(value: Any) -> dict[str, str]:
    """What the notebook shows of a cell's last expression, by MIME type; empty for None."""
    if value is None:
        return {}
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
