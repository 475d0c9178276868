"""The agent of one notebook kernel: takes jobs, runs their ranks, writes their folders, ends with its notebook. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import traceback
from typing import Any

from kale_dist import wire
from kale_dist.wire import CANCEL_GRACE_S, FailureCause, JobFiles, Op, Order, messages
from kale_dist.worker.agent import processes
from kale_dist.worker.agent.attempt import FAILURE_GRACE_S, Site
from kale_dist.worker.agent.fork_pool import ForkPool
from kale_dist.worker.agent.job_run import JobRun
from kale_dist.worker.agent.writer import JobWriter

_MAX_MESSAGE_BYTES = 1 << 30
"""An order with a large environment may have some megabytes."""

_MAX_UNSENT_BYTES = 1 << 20
"""At most this much is buffered for a peer that does not read."""

_CANCELLED = "The job was cancelled"
_LOOK_EACH_S = 0.1
_KERNEL_ENDED = (
    "The notebook's kernel, or the script, that started it ended. Wait for the job there, or pass detach=True to distribute() or "
    "launch()"
)


class Agent:
    """Serves one notebook kernel.

    Args:
        forkserver: Socket and process id of a forkserver that was launched already.
        connection: Descriptor of the socket to the notebook's kernel.
        address: Where other processes of the user reach the agent: `wire.socket_address`.
        kernel_pid: Process id of the kernel.
        kernel_start: When it began, in clock ticks since boot.
    """

    def __init__(
        self,
        forkserver: tuple[socket.socket, int] | None,
        *,
        connection: int,
        address: str,
        kernel_pid: int,
        kernel_start: int,
    ) -> None:
        self._forkserver = forkserver
        self._connection = connection
        self._address = address
        self._kernel_pid = kernel_pid
        self._kernel_start = kernel_start
        self._loop = asyncio.get_running_loop()
        self._pool = ForkPool(self._loop)
        self._jobs: dict[str, JobRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._peers: set[asyncio.StreamWriter] = set()
        self._kernel_lives = True
        self._is_stopping = False
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Serve until there is nothing left to do, then leave no trace."""
        processes.become_subreaper()
        self._loop.set_exception_handler(self._broken)
        self._loop.add_signal_handler(signal.SIGCHLD, processes.reap_orphans)
        self._loop.add_signal_handler(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Its connection alone would not do, as the kernel's children hold copies of it.
        processes.watch(self._loop, self._kernel_pid, self._kernel_ended)
        if not processes.is_running(self._kernel_pid, self._kernel_start):
            self._kernel_ended()
        if self._forkserver is not None:
            self._pool.adopt(*self._forkserver)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(wire.socket_address(self._address))
        server = await asyncio.start_unix_server(self._receive, sock=listener, backlog=64, limit=_MAX_MESSAGE_BYTES)
        connection = socket.socket(fileno=self._connection)
        connection.set_inheritable(False)
        streams = await asyncio.open_unix_connection(sock=connection, limit=_MAX_MESSAGE_BYTES)
        receiving = asyncio.ensure_future(self._receive_kernel(*streams))
        await self._serve()
        self._pool.close()
        processes.end_orphans(limit_s=2.0)
        server.close()
        receiving.cancel()
        for peer in list(self._peers):
            peer.close()

    async def _serve(self) -> None:
        while not self._is_stopping and self._kernel_lives:
            self._news.clear()
            await self._news.wait()
        while self._jobs or self._pool.is_clearing:  # noqa: ASYNC110 - of two things, one has no event, and it is short
            await asyncio.sleep(_LOOK_EACH_S if self._jobs else 0.01)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error of our own: no job may wait forever because of it."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        reason = f"The agent that ran the job failed: {type(error).__name__}: {error}"
        for job in list(self._jobs.values()):
            job.fail(FailureCause.AGENT_DIED, reason)

    def _terminate(self) -> None:
        self._is_stopping = True
        self._news.set()
        for job in list(self._jobs.values()):
            reason = "The agent that ran the job received SIGTERM"
            job.cancel(FailureCause.USER, reason, job.order.policy.grace_s, save=True)

    def _kernel_ended(self) -> None:
        if self._kernel_lives:
            self._kernel_lives = False
            self._news.set()
            for job in list(self._jobs.values()):
                # One that is cancelled already saves to its end.
                if not job.order.policy.detach and not job.is_cancelled:
                    job.cancel(FailureCause.KERNEL_ENDED, _KERNEL_ENDED, FAILURE_GRACE_S)

    # -- messages ---------------------------------------------------------------------------------------------------

    async def _receive_kernel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._receive(reader, writer)
        if not self._is_stopping:
            self._kernel_ended()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do what a peer asks for until it leaves. Its messages are JSON, one a line."""
        pid, user = processes.peer_of(writer.get_extra_info("socket"))
        if user != os.geteuid() or not processes.is_beside(pid):
            writer.close()
            return
        self._peers.add(writer)
        # A line that is too long is a ValueError.
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                try:
                    for message in wire.decode_json_lines(line):
                        self._take_message(writer, message)
                except Exception:  # noqa: BLE001 - an odd message, or one of another version, must not end everybody's jobs
                    traceback.print_exc()
        self._peers.discard(writer)
        writer.close()

    def _take_message(self, peer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        match message.get("op"):
            case Op.TAKE:
                self._take(peer, message.get("order") or {})
            case Op.CANCEL:
                grace_s = max(0.0, float(message.get("grace_s", CANCEL_GRACE_S)))
                if (job := self._jobs.get(str(message.get("job")))) is not None:
                    job.cancel(FailureCause.USER, _CANCELLED, grace_s, save=bool(message.get("save")))
            case Op.SEND:
                if (job := self._jobs.get(str(message.get("job")))) is not None:
                    job.send(int(message["rank"]), messages.parse(message["message"]))
            case Op.STOP:
                self._is_stopping = True
                self._news.set()

    def _take(self, peer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
        order = wire.decode(Order, data)
        name = order.job
        _send(peer, {"op": Op.TAKEN, "job": name})
        if name in self._jobs:
            return
        files = JobFiles(order.folder)
        try:
            writer = JobWriter(files, self._loop, lambda: self._wake(name, writer.disk_problem))
        except OSError:
            # Without a folder there is nowhere to log it; who deleted it wants no job.
            self._wake(name)
            return
        self._jobs[name] = job = JobRun(Site(order=order, loop=self._loop, pool=self._pool, writer=writer))
        if files.cancelled.exists():
            job.cancel(FailureCause.USER, "The job was cancelled before it started", 0.0)
        else:
            job.start()
        task = asyncio.ensure_future(self._run(job, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: JobRun, writer: JobWriter) -> None:
        job.write_end(await job.run())
        writer.close(lambda: self._job_ended(job.order.job))

    def _job_ended(self, name: str) -> None:
        """The job's last event is written."""
        self._jobs.pop(name, None)
        self._wake(name)
        processes.end_orphans(limit_s=0.0, spare=self._pool.pid, job=name if self._jobs else "")

    def _wake(self, name: str, disk_problem: str = "") -> None:
        """Tell all listeners that a job's files have changed, or why they cannot; the writer's tick limits how often."""
        for peer in list(self._peers):
            # One that has not read the one before needs no other, but for the last.
            if name not in self._jobs or not peer.transport.get_write_buffer_size():
                _send(peer, {"op": Op.WAKE, "job": name, "disk_problem": disk_problem})


def _send(peer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message, unless the peer has read too few of those before it. Never waits."""
    if not peer.is_closing() and peer.transport.get_write_buffer_size() < _MAX_UNSENT_BYTES:
        peer.write(wire.encode_json(message))


def main(forkserver: tuple[socket.socket, int] | None, **settings: Any) -> int:
    """Run an agent; gives the exit code. Arguments as those of `Agent`."""

    async def run() -> None:
        await Agent(forkserver, **settings).run()

    asyncio.run(run())
    return 0
