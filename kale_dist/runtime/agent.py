"""The agent: takes jobs, runs their ranks, writes their folders, ends with its notebook. One thread, no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import select
import shutil
import signal
import socket
import time
import traceback
from typing import Any

from kale_dist.contract import FailureCause, JobFiles, JobOrder, Op
from kale_dist.runtime import processes
from kale_dist.runtime.fork_pool import ForkPool
from kale_dist.runtime.inbox import Connection
from kale_dist.runtime.job_run import FAILURE_GRACE_S, JobRun
from kale_dist.runtime.job_writer import JobWriter
from kale_dist.runtime.loop import Loop, Timer

WAKE_INTERVAL_S = 0.02
"""Changes of one job are told at most this often."""

_REMEMBERED_CANCELS = 100


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What an agent is started with."""

    connection: int
    """Descriptor of the socket to the notebook's kernel."""
    socket_path: str
    """Where other processes reach the agent; its folder is the agent's own and is removed at its end."""
    kernel_pid: int
    kernel_start: int
    """When the kernel began, in clock ticks since boot."""


class Agent:
    """Serves one notebook kernel.

    Args:
        settings: See there.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = pathlib.Path(settings.socket_path).parent
        self._loop = Loop()
        self._pool = ForkPool(self._loop)
        self._jobs: dict[str, JobRun] = {}
        self._early_cancels: dict[str, None] = {}
        self._ended: dict[str, None] = {}
        self._wakes: dict[str, float] = {}
        self._wake_timers: dict[str, Timer] = {}
        self._connections: dict[int, Connection] = {}
        self._kernel = Connection(socket.socket(fileno=settings.connection))
        self._kernel.socket.set_inheritable(False)
        self._kernel_lives = True
        self._stopping = False
        self._is_killed = False

    def run(self) -> None:
        """Serve until there is nothing left to do, then leave no trace."""
        processes.become_subreaper()
        self._watch_signals()
        listener = self._listen()
        self._add(self._kernel)
        kernel = self._watch_kernel()
        if self._kernel_lives:
            self._pool.start()
        while not self._is_finished():
            self._loop.step()
        self._pool.close()
        processes.end_orphans(limit_s=2.0)
        for connection in list(self._connections.values()):
            self._drop(connection)
        listener.close()
        if kernel is not None:
            os.close(kernel)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._loop.close()

    def _is_finished(self) -> bool:
        if self._jobs or self._pool.is_clearing:
            return False
        return self._stopping or not self._kernel_lives

    # -- what the agent listens to ----------------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.settimeout(0)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        # The handler does nothing: the byte that Python writes wakes the loop.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

        def read() -> None:
            numbers = reader.recv(1 << 12)
            if signal.SIGCHLD in numbers:
                processes.reap_orphans()
            if signal.SIGTERM in numbers:
                self._is_killed = True
                self._stopping = True
                for job in list(self._jobs.values()):
                    job.cancel(
                        FailureCause.USER, "The agent that ran the job was told to end (SIGTERM)", FAILURE_GRACE_S
                    )

        self._loop.when_readable(reader.fileno(), read)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):
            pathlib.Path(self._settings.socket_path).unlink()
        listener.bind(self._settings.socket_path)
        pathlib.Path(self._settings.socket_path).chmod(0o600)
        listener.listen(64)
        listener.settimeout(0)
        (self._folder / "process").write_text(f"{os.getpid()} {processes.start_time(os.getpid())}")

        def accept() -> None:
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                peer, _ = listener.accept()
                self._add(Connection(peer))

        self._loop.when_readable(listener.fileno(), accept)
        return listener

    def _watch_kernel(self) -> int | None:
        """Watch the kernel's process; its connection alone would not do, as its children hold copies of it."""
        try:
            descriptor = os.pidfd_open(self._settings.kernel_pid)
        except ProcessLookupError:
            self._kernel_ended()
            return None
        if not processes.is_running(self._settings.kernel_pid, self._settings.kernel_start):
            self._kernel_ended()
            return descriptor

        def ended() -> None:
            if select.select([descriptor], [], [], 0)[0]:
                self._loop.forget(descriptor)
                self._kernel_ended()

        self._loop.when_readable(descriptor, ended)
        return descriptor

    def _kernel_ended(self) -> None:
        if not self._kernel_lives:
            return
        self._kernel_lives = False
        for job in list(self._jobs.values()):
            if not job.order.detach:
                job.cancel(FailureCause.KERNEL_ENDED, "The notebook's kernel ended", FAILURE_GRACE_S)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _add(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        self._connections[descriptor] = connection
        self._loop.when_readable(descriptor, lambda: self._serve(connection))

    def _serve(self, connection: Connection) -> None:
        connection.flush()
        self._loop.also_writable(connection.socket.fileno(), wanted=connection.has_unsent)
        for message in connection.receive():
            try:
                self._handle(connection, message)
            except (KeyError, TypeError, ValueError):
                # One message of another version must not end everybody's jobs.
                traceback.print_exc()
        if not connection.is_open:
            self._drop(connection)
            if connection is self._kernel and not self._stopping:
                self._kernel_ended()

    def _drop(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._loop.forget(descriptor)
            connection.close()

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        match message.get("op"):
            case Op.TAKE:
                self._take(connection, message.get("order") or {})
            case Op.CANCEL:
                self._cancel(str(message.get("job")), float(message.get("grace_s", 5.0)))
            case Op.STOP if connection is self._kernel:
                self._stopping = True

    def _take(self, connection: Connection, data: dict[str, Any]) -> None:
        order = JobOrder.from_json(data)
        name = order.job
        self._send(connection, {"op": Op.TAKEN, "job": name})
        if name in self._jobs:
            return
        self._ended.pop(name, None)
        try:
            writer = JobWriter(JobFiles(order.folder), order.attempt, self._loop, lambda: self._changed(name))
        except OSError:
            # Without a folder there is nowhere to say so; who deleted it wants no job.
            self._wake(name)
            return

        def ended() -> None:
            with contextlib.suppress(OSError):
                writer.close()
            self._job_ended(name)

        job = JobRun(order, self._loop, self._pool, writer, ended)
        self._jobs[name] = job
        if name in self._early_cancels:
            del self._early_cancels[name]
            job.cancel(FailureCause.USER, "The job was cancelled before it started", 0.0)
        else:
            job.start()

    def _cancel(self, name: str, grace_s: float) -> None:
        if name in self._jobs:
            self._jobs[name].cancel(FailureCause.USER, "The job was cancelled", max(0.0, grace_s))
        elif name not in self._ended:
            # The order may still be on its way, by another connection.
            self._early_cancels[name] = None
            while len(self._early_cancels) > _REMEMBERED_CANCELS:
                del self._early_cancels[next(iter(self._early_cancels))]

    def _job_ended(self, name: str) -> None:
        self._jobs.pop(name, None)
        self._ended[name] = None
        while len(self._ended) > _REMEMBERED_CANCELS:
            del self._ended[next(iter(self._ended))]
        self._wake(name)
        if not self._jobs:
            processes.end_orphans(limit_s=0.0, spare=self._pool.pid)

    # -- wakes ------------------------------------------------------------------------------------------------------

    def _changed(self, name: str) -> None:
        """Tell of a change, but not more often than every `WAKE_INTERVAL_S`."""
        if name in self._wake_timers:
            return
        wait_s = self._wakes.get(name, 0.0) + WAKE_INTERVAL_S - time.monotonic()
        if wait_s <= 0:
            self._wake(name)
        else:
            self._wake_timers[name] = self._loop.call_later(wait_s, lambda: self._wake(name))

    def _wake(self, name: str) -> None:
        timer = self._wake_timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if name in self._jobs:
            self._wakes[name] = time.monotonic()
        else:
            self._wakes.pop(name, None)
        for connection in list(self._connections.values()):
            self._send(connection, {"op": Op.WAKE, "job": name}, optional=name in self._jobs)

    def _send(self, connection: Connection, message: dict[str, Any], *, optional: bool = False) -> None:
        connection.send(message, optional=optional)
        if connection.is_open:
            self._loop.also_writable(connection.socket.fileno(), wanted=connection.has_unsent)


def main(settings: Settings) -> int:
    """Run an agent; gives the exit code."""
    Agent(settings).run()
    return 0
