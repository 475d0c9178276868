"""The handle on live ranks: a job that runs cells one after another in the same processes.

The ranks' side, with the messages, is `worker/rank/live_rank.py`. What a handle has to know of the ranks (which names are theirs, the
last cell's number, whether their group is broken) it reads in the job's events, so that one made by `attach` goes on where another stopped.
"""

from __future__ import annotations

import ast
import builtins
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import io
import itertools
import queue
import secrets
import sys
import threading
import time
import traceback
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

from kale_dist.errors import CellError, ConfigError, JobFailedError, WaitTimeoutError, log, note, short_refusals, warn
from kale_dist.job import interrupts, records
from kale_dist.job.backend import JobRef
from kale_dist.job.handle import Job, check_lines, inside
from kale_dist.job.reader import EventReader, LogReader
from kale_dist.job.status import JobStatus
from kale_dist.job.view import facts
from kale_dist.snapshot import unpicklable
from kale_dist.snapshot.capture import capture
from kale_dist.snapshot.pickler import CapturePickler
from kale_dist.snapshot.reducers import References
from kale_dist.snapshot.sources import cell_label
from kale_dist.wire import StateName, visible
from kale_dist.wire.blobs import FolderStore
from kale_dist.wire.events import Event
from kale_dist.wire.messages import Answer, Cell, EndLive, Give, Interrupt, Load, Repair, Restart, Typed

MOST_REPAIRS = 100
"""Each repair of the process group keeps descriptors and threads of the one before."""

_LOOK_S = 0.1
_PIECE_BYTES = 8 << 20
"""What one thread compares at a time of the notebook's data."""

_STOP_S = 10.0
_DOUBLE_CLICK_S = 1.0
"""A stop this soon after another is the same: a second one costs all variables."""

_DEAF_S = 3.0
"""How long a cell may go on after an interrupt until that is logged."""

_OF_RANKS = frozenset(("rank", "world_size", "local_rank", "device"))
"""Names that each rank has of its own from the start."""


class Values:
    """The values of a cell's last expression, by rank. Shown, equal ones are folded into one: `ranks 0-3: 2`.

    Args:
        bundles: By rank, the value by MIME type.
    """

    def __init__(self, bundles: Mapping[int, Mapping[str, str]]) -> None:
        self._bundles = dict(sorted(bundles.items()))

    def __getitem__(self, rank: int) -> str:
        """The text of one rank's value; empty for None."""
        return self._bundles[rank].get("text/plain", "")

    def _folded(self) -> list[tuple[str, Mapping[str, str]]]:
        shown = {rank: bundle for rank, bundle in self._bundles.items() if bundle}
        return [(_named(ranks), shown[ranks[0]]) for ranks in _grouped(shown)]

    def __repr__(self) -> str:
        return "\n".join(_line(*one) for one in self._folded())

    def _ipython_display_(self) -> None:
        for ranks, bundle in self._folded():
            if bundle.keys() == {"text/plain"} or not hasattr(interrupts.shell(), "kernel"):
                print(_line(ranks, bundle))  # noqa: T201 - the value of a cell
                continue
            print(f"{ranks}:", flush=True)  # noqa: T201 - above what follows
            interrupts.shell().display_pub.publish(dict(bundle))


class LiveJob(Job[None]):
    """Live ranks, made by `kd.live`: cells run one after another in the same processes, and variables and process group stay.

    In all else it is a job. As a context manager it stops at the end of the block.

    Args:
        **parts: As for `Job`.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        files = inside(self).files
        self._log = LogReader(files)
        self._log.tail(0)
        self._events = EventReader(files.events)
        self._answers: dict[str, dict[int, Answer]] = {}
        """The ranks' answers by the name of the message, of those that this process waits for."""
        self._others: dict[int, Answer] = {}
        """The same of the last message, if another process has sent it."""
        self._reading = threading.Lock()
        self._number = self._repairs = self._attempt = 0
        self._is_broken = False
        """Whether the process group has to be repaired before the next cell."""
        self._owned: set[str] = set()
        """Names that cells have bound: those of the ranks win."""
        self._sent: dict[str, tuple[str, object]] = {}
        """Names that came from the notebook: the fingerprint and the object of each."""
        self._noted: set[str] = set()
        self._references = References()
        # An Event breaks where two interrupts come at once.
        self._woken = queue.SimpleQueue[None]()
        self._interrupted_at = float("-inf")
        self._backend.listen(_weakly(self._wake))
        self._cell: Any = None
        """The message of the notebook's last cell that used the ranks: what they warn of later is shown in its output."""
        self._warned = 0
        if interrupts.is_interactive():
            self.subscribe(_weakly(self._warn_in_cell))

    # -- what users do with it ----------------------------------------------------------------------------------------

    @short_refusals
    def run(self, source: str, ranks: Sequence[int] | int | None = None) -> Values | None:
        """Run a cell in the ranks. Their output appears while it runs, each line after its rank.

        Names that the cell reads and that the ranks do not have come from the notebook. The stop button interrupts the cell; pressed
        twice within 10 s, it ends the ranks.

        Args:
            source: The cell's text.
            ranks: Only these ranks; None for all.

        Returns:
            The values of its last expression; None if there are none.

        Raises:
            CellError: It raised an exception in a rank. The ranks and their variables stay.
            JobError: The ranks have ended.
            ConfigError: There are no such ranks, or this is not Python.
        """
        wanted = self._check_ranks(ranks)
        try:
            tree = ast.parse(source)
            # What only a compiler sees, such as `return` outside of a function.
            compile(tree, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise ConfigError("source", f"it is not Python{where}: {error.args[0]}", "Correct the cell") from None
        self._prepare()
        self._send_what_is_read(tree)
        cell = Cell(ranks=wanted, source=source, file=f"<live {self._number + 1}>", label=_label())
        if self._interrupted_at > float("-inf"):
            log("The cell was interrupted before it ran")
            raise KeyboardInterrupt
        answers = self._ask(cell)
        self._check_cell(answers)
        values = {rank: answer.value or {} for rank, answer in answers.items()}
        return Values(values) if any(values.values()) else None

    @short_refusals
    def push(self, **values: Any) -> None:
        """Put objects of the notebook into the ranks' names, in the place of what is there.

        Args:
            **values: The objects by name.

        Raises:
            CellError: They cannot be loaded there.
            NotSerializableError: An object cannot be sent.
            JobError: The ranks have ended.
        """
        self._prepare()
        self._owned -= values.keys()
        self._send(values, {name: _fingerprint(value) for name, value in values.items()})

    @short_refusals
    def pull(self, expression: str, ranks: int | Sequence[int] | None = None) -> Any:
        """Bring a value from the ranks: of a name, or of any expression.

        Args:
            expression: What to evaluate there.
            ranks: One rank, for its value alone; several or None (all), for a list by rank.

        Raises:
            CellError: It raised an exception there, or cannot be pickled.
            JobError: The ranks have ended.
        """
        wanted = self._check_ranks(ranks)
        self._prepare()
        answers = self._ask(Give(ranks=wanted, expression=expression))
        self._check_cell(answers)
        name = next(iter(answers.values())).name
        found = {rank: self._outcomes.given(rank, self._attempt, name, self._references) for rank in sorted(answers)}
        return found[ranks] if isinstance(ranks, int) else list(found.values())

    @short_refusals
    def restart(self) -> LiveJob:
        """Start the ranks again, in the same pods: new processes without variables.

        Returns:
            This job. If it has ended, a new one that was started in the same way.

        Raises:
            BackendError: It cannot be reached.
        """
        status = self.status
        if not status.is_final:
            self._backend.send(self._ref, -1, Restart(attempt=status.attempt))
            # A job that was cancelled just before ends.
            self._until(lambda now: now.is_final or (now.attempt > status.attempt and now.state is StateName.RUNNING))
        if not self.done():
            return self
        new = self.retry()
        assert isinstance(new, LiveJob)  # noqa: S101 - for mypy
        new.wait_until_ready()
        return new

    @short_refusals
    def stop(self) -> JobStatus:
        """End the ranks, and return the job's last status. A cell that still runs in another thread is ended, too."""
        # Ranks that are starting receive nothing.
        if self.status.state is StateName.RUNNING:
            self._backend.send(self._ref, -1, EndLive(attempt=self.status.attempt))
            with contextlib.suppress(WaitTimeoutError):
                self._watcher.wait(self._ref, _STOP_S)
        if not self.done():
            self.cancel()
            self._watcher.wait(self._ref)
        return self.status

    def wait_until_ready(self) -> None:
        """Wait until all ranks can run cells.

        Raises:
            JobError: They have ended.
        """
        self._until(lambda status: status.state is StateName.RUNNING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    # -- messages -----------------------------------------------------------------------------------------------------

    def _ask(self, message: Cell | Load | Repair | Give, blobs: Iterable[str] = ()) -> dict[int, Answer]:
        """Send ranks a message, with its number, and wait for their answers."""
        self._number += 1
        name, ranks = secrets.token_hex(8), message.ranks or self._all
        numbered = dataclasses.replace(message, number=self._number, name=name, attempt=self._attempt)
        found = self._answers[name] = {}
        is_stopped = False
        try:
            self._backend.send(self._ref, -1, numbered, blobs)
        except KeyboardInterrupt:
            # It may not have been sent; one that comes twice does nothing.
            self._backend.send(self._ref, -1, numbered, blobs)
            is_stopped = True
        attempt = self._attempt

        def is_answered(_: JobStatus) -> bool:
            self._read_events()
            # Where one rank cannot repair its group, the others wait for it.
            is_over = any(one.is_refused or (isinstance(message, Repair) and not one.ok) for one in found.values())
            return is_over or found.keys() >= set(ranks) or self._attempt != attempt

        self._until(is_answered, is_stopped=is_stopped)
        del self._answers[name]
        if self._attempt != attempt:
            raise CellError(f"The ranks of {self.ref} were started again meanwhile: their variables are lost", self.ref)
        if any(one.is_refused for one in found.values()):
            raise CellError(f"Another notebook has run a cell in {self.ref} meanwhile. Run this cell again", self.ref)
        return found

    def _until(self, condition: Callable[[JobStatus], bool], *, is_stopped: bool = False) -> None:
        """Wait, and show what the ranks write meanwhile. An interrupt goes to the cell in the ranks.

        Args:
            condition: Ends the wait.
            is_stopped: Whether an interrupt has come before.

        Raises:
            JobFailedError: The ranks have ended before.
            KeyboardInterrupt: A second interrupt has ended them.
        """
        logged_at = float("-inf")
        while True:
            try:
                if is_stopped and self._pass_on_interrupt():
                    break
                is_stopped = False
                status = self.status
                is_met = condition(status)
                self._show()
                if is_met:
                    return
                if status.is_final:
                    raise self._ended(status)
                self._attend(status)
                if time.monotonic() - _DEAF_S > self._interrupted_at > logged_at:
                    logged_at = self._interrupted_at
                    log(
                        "The cell has not ended: C code cannot be interrupted. Stop it twice within 10 s to end the ranks"
                    )
                with contextlib.suppress(queue.Empty):
                    self._woken.get(timeout=_LOOK_S)
            except KeyboardInterrupt:
                # Passed on above, so that one that comes meanwhile repeats that.
                is_stopped = True
        raise KeyboardInterrupt

    def _pass_on_interrupt(self) -> bool:
        """Interrupt the cell in the ranks, or end them if it is the second time; returns whether they end."""
        now = time.monotonic()
        if now - self._interrupted_at < _DOUBLE_CLICK_S:
            return False
        status = self.status
        if now - self._interrupted_at < interrupts.SECOND_WITHIN_S or status.state is not StateName.RUNNING:
            self.cancel()
            log(f"{self.ref} is cancelled")
            return True
        interrupt = Interrupt(number=self._number, attempt=self._attempt)
        for replica in status.replicas:
            at = replica.breakpoint
            self._backend.send(self._ref, replica.rank, Typed(prompt=at.prompt, text="q") if at else interrupt)
        self._interrupted_at = now
        return False

    def _show(self) -> None:
        for line in self._log.read():
            print(line, flush=True)  # noqa: T201 - the ranks' output, in the cell
        for callback in tuple(inside(self).after_wait):
            callback()

    def _wake(self, ref: JobRef) -> None:
        if ref == self._ref and self._woken.empty():
            self._woken.put(None)

    def _warn_in_cell(self, status: JobStatus) -> None:
        new, self._warned = status.warnings[self._warned :], len(status.warnings)
        if new and self._cell:
            # A line that a thread prints would be shown in another cell.
            kernel = interrupts.shell().kernel
            content = {"name": "stderr", "text": "".join(f"[kale-dist] {status.ref}: {text}\n" for text in new)}
            kernel.session.send(kernel.iopub_socket, "stream", content, parent=self._cell)

    def _read_events(self) -> None:
        with self._reading:
            for event in self._events.read():
                self._take_event(event)

    def _take_event(self, event: Event) -> None:
        if event.attempt > self._attempt:
            # Other processes: they have nothing of what those before had.
            self._attempt, self._repairs, self._is_broken = event.attempt, 0, False
            self._owned, self._sent = set(), {}
        answer, rank = event.what, event.rank
        if not isinstance(answer, Answer) or rank is None or event.attempt != self._attempt:
            return
        own = self._answers.get(answer.name)
        if answer.is_refused:
            if own is not None:
                own[rank] = answer
            return
        if answer.number > self._number:
            # From another process, as before a restart of the kernel: what it has sent is not overwritten.
            self._number, self._others = answer.number, {}
            self._owned.update(answer.loaded)
        answers = own if own is not None else self._others if answer.number == self._number else {}
        answers[rank] = answer
        self._owned.update(answer.names)
        self._is_broken = self._is_broken or _breaks(answers.values())
        if answer.repaired:
            self._repairs, self._is_broken = answer.repaired, False

    def _prepare(self) -> None:
        """Wait for the ranks, and repair their process group if a cell has left it broken."""
        self._interrupted_at = float("-inf")
        if interrupts.is_interactive():
            self._cell = interrupts.shell().kernel.get_parent()
        self.wait_until_ready()
        self._read_events()
        if not self._is_broken:
            return
        if self._repairs >= MOST_REPAIRS:
            raise CellError(
                f"The process group of {self.ref} has been repaired {MOST_REPAIRS} times, and each time takes descriptors. Restart"
                " the ranks: %distribute restart, or live.restart(). Variables are lost with them",
                self.ref,
            )
        why = "the connections of NCCL are not repaired in place"
        if not self.spec.cuda:
            answers = self._ask(Repair(repair=self._repairs + 1))
            if all(answer.ok for answer in answers.values()):
                return
            why = "this torch's process group cannot be repaired in place"
        self.restart()
        raise CellError(
            f"After the last error the ranks of {self.ref} were started again, because {why}: their variables are lost. Run the "
            "cells again that make them",
            self.ref,
        )

    def _check_ranks(self, ranks: Sequence[int] | int | None) -> tuple[int, ...]:
        return check_lines(ranks, None, self.spec.topology.number_of_processes) or self._all

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self.spec.topology.number_of_processes))

    # -- names --------------------------------------------------------------------------------------------------------

    def _send_what_is_read(self, tree: ast.AST) -> None:
        """Send the notebook's names that a cell reads, unless they are the ranks' own, or are there and have not changed."""
        namespace = sys.modules["__main__"].__dict__
        hidden = getattr(interrupts.shell(), "user_ns_hidden", {})
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        known = sorted(
            name
            for name in read & namespace.keys()
            if name[:1] != "_"
            and name not in _OF_RANKS
            and not (name in hidden or hasattr(builtins, name))
            # The notebook's Trainer is of no use in ranks, whose cell makes their own.
            and not (unpicklable.is_of_one_process(namespace[name]) and _is_made_first(name, tree))
        )
        for name in known:
            if name in self._owned and name not in self._noted and not isinstance(namespace[name], types.ModuleType):
                self._noted.add(name)
                log(f"`{name}` is the ranks' own; the notebook's is put there with live.push({name}={name})")
        prints = {name: _fingerprint(namespace[name]) for name in known if name not in self._owned}
        if new := {name: namespace[name] for name in prints if self._sent.get(name, ("",))[0] != prints[name]}:
            self._send(new, prints)
            if pushed := [name for name, value in new.items() if not isinstance(value, types.ModuleType)]:
                note(f"From the notebook: {', '.join(pushed)}{self._size}")

    def _send(self, values: Mapping[str, Any], prints: Mapping[str, str]) -> None:
        there = {
            name: value for name, (_, value) in self._sent.items() if name not in self._owned and name not in values
        }
        if self.spec.topology.number_of_processes > 1:
            unpicklable.check_of_one_process(values.items(), self._owned)
        with records.keeping_blobs():
            snapshot = capture(
                max, (), dict(values), store=FolderStore(records.blobs_dir()), label="names", roots=list(values.items()),
                references=self._references, left_out=self._owned, there=there,
            )  # fmt: skip
            snapshot.check_counts("The cell", self.spec.topology.number_of_processes)
            for note in snapshot.notes:
                warn(note)
            self._check_cell(self._ask(Load(snapshot=snapshot.digest), snapshot.blobs))
        self._size = f" ({facts.size(snapshot.size_bytes)})" if snapshot.size_bytes >= 1 << 20 else ""
        self._sent |= {name: (prints[name], value) for name, value in values.items()}

    # -- errors -------------------------------------------------------------------------------------------------------

    def _check_cell(self, answers: Mapping[int, Answer]) -> None:
        """Raise what a cell has raised: of the ranks that differ the first one's error, and a line for the others."""
        failed = {rank: answer for rank, answer in answers.items() if not answer.ok}
        if not failed:
            return
        own = {rank: answer for rank, answer in failed.items() if not answer.is_freed} or failed
        if all(answer.is_interrupted for answer in own.values()) or self._interrupted_at > float("-inf"):
            self._interrupted_at = float("-inf")
            log(f"The cell was interrupted in {_named(failed)}. The ranks and their variables stay")
            raise KeyboardInterrupt
        # The answers stand in the order in which they came.
        first, texts = next(iter(own)), {rank: answer.traceback.rstrip() for rank, answer in own.items()}
        groups = sorted(_grouped(texts), key=lambda ranks: first not in ranks)
        lines = [texts[first]]
        lines += [f"{_named(ranks).capitalize()}: {texts[ranks[0]].splitlines()[-1]}" for ranks in groups[1:]]
        if freed := [rank for rank in failed if rank not in own]:
            lines.append(f"{_named(freed).capitalize()} waited in a collective, and went on")
        last = texts[first].splitlines()[-1]
        raise CellError(f"{_named(groups[0]).capitalize()}: {last}\n\n" + "\n".join(lines), self.ref)

    def _ended(self, status: JobStatus) -> JobFailedError:
        at = time.strftime("%H:%M", time.localtime(status.ended)) if status.ended else ""
        reason = status.reason or (status.notes[-1] if status.notes else "they were told to")
        return JobFailedError(
            f"The live ranks of {self.ref} have ended{f' at {at}' if at else ''}: {reason}. Their variables are lost. "
            "live.restart() or `%distribute restart` starts others",
            self.ref,
        )


def _is_made_first(name: str, tree: ast.AST) -> bool:
    """Whether a statement of a cell assigns a name before any reads it."""
    for statement in getattr(tree, "body", ()):
        uses = [type(node.ctx) for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        if uses:
            return isinstance(statement, ast.Assign) and ast.Load not in uses
    return False


def _line(ranks: str, bundle: Mapping[str, str]) -> str:
    text = visible(bundle["text/plain"], keeps_colours=True)
    return f"{ranks}:{chr(10) if chr(10) in text else ' '}{text}"


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A method that does not keep its object."""
    found = weakref.WeakMethod(method)
    return lambda *given: (one := found()) and one(*given)


def _breaks(answers: Collection[Answer]) -> bool:
    """Whether a cell with these answers so far has left the process group unusable."""
    if any(answer.is_cut or answer.is_freed or answer.is_interrupted for answer in answers):
        return True
    counts = [answer.counts for answer in answers if answer.counts is not None]
    names = {name for one in counts for name in one}
    differ = any(len({one[name] for one in counts if name in one}) > 1 for name in names)
    return differ and any(not answer.ok for answer in answers)


def _fingerprint(value: object) -> str:
    """Return a digest that changes when an object of the notebook changes.

    Of a function or class with what it uses; of other objects without that, because they would be sent in the place of the ranks'
    own whenever a global of their class changes.
    """
    file = io.BytesIO()
    left_out = () if isinstance(value, type | types.FunctionType) else None
    pickler = CapturePickler(file, left_out=left_out)
    try:
        pickler.dump(value)
    except Exception:  # noqa: BLE001 - sending it raises the reason
        return secrets.token_hex(8)
    digest = hashlib.sha256(file.getvalue())
    pieces = [buffer.raw() for buffer in pickler.buffers] + [piece for storage in pickler.storages for piece in storage]
    cut = [piece[at : at + _PIECE_BYTES] for piece in pieces for at in range(0, len(piece), _PIECE_BYTES)]
    # A checksum of all bytes, because neither numpy nor `tensor.data` counts changes. This one takes a third of SHA-256's time.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digest.update(repr(list(pool.map(zlib.crc32, cut))).encode())
    return digest.hexdigest()


def _label() -> str:
    """What IPython calls the cell that calls this library; empty outside of a notebook."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return next(filter(None, (cell_label(frame.f_code.co_filename) for frame in frames)), "")


def _grouped(values: Mapping[int, object]) -> list[list[int]]:
    """Ranks with equal values together, in the order of their first ranks."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(repr(values[rank]), []).append(rank)
    return list(groups.values())


def _named(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0-3`, `ranks 0, 2-3`."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        first, *rest = [rank for _, rank in run]
        parts.append(f"{first}-{rest[-1]}" if rest else str(first))
    text = ", ".join(parts)
    return f"rank{'' if text.isdigit() else 's'} {text}"
