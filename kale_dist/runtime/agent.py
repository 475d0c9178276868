"""The agent of one notebook kernel: takes jobs, runs their ranks, writes their folders, ends with its notebook. No torch."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import traceback
from typing import Any

from kale_dist import contract
from kale_dist.contract import FailureCause, JobFiles, Op, Order
from kale_dist.runtime import processes
from kale_dist.runtime.fork_pool import ForkPool
from kale_dist.runtime.job_run import FAILURE_GRACE_S, JobRun
from kale_dist.runtime.writer import JobWriter

_REMEMBERED = 100
"""Jobs that have ended, and cancels that came before their jobs."""

_MAX_UNSENT_BYTES = 1 << 20
"""At most this much is buffered for a peer that does not read."""

_LOOK_EACH_S = 0.1


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
        forkserver: Socket and process id of a forkserver that was launched already.
    """

    def __init__(self, settings: Settings, forkserver: tuple[socket.socket, int] | None = None) -> None:
        self._settings = settings
        self._forkserver = forkserver
        self._folder = pathlib.Path(settings.socket_path).parent
        self._loop = asyncio.get_running_loop()
        self._pool = ForkPool(self._loop)
        self._jobs: dict[str, JobRun] = {}
        self._early_cancels: dict[str, None] = {}
        self._ended: dict[str, None] = {}
        self._peers: set[_Peer] = set()
        self._kernel: _Peer | None = None
        self._kernel_lives = True
        self._is_stopping = False
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Serve until there is nothing left to do, then leave no trace."""
        processes.become_subreaper()
        self._loop.set_exception_handler(self._broken)
        self._loop.add_signal_handler(signal.SIGCHLD, processes.reap_orphans)
        self._loop.add_signal_handler(signal.SIGTERM, self._told_to_end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        kernel = self._watch_kernel()
        if self._forkserver is not None:
            self._pool.adopt(*self._forkserver)
        server = await self._loop.create_unix_server(lambda: _Peer(self), sock=self._listen(), backlog=64)
        connection = socket.socket(fileno=self._settings.connection)
        connection.set_inheritable(False)
        self._kernel = kernel_peer = _Peer(self)
        await self._loop.create_connection(lambda: kernel_peer, sock=connection)
        await self._serve()
        self._pool.close()
        processes.end_orphans(limit_s=2.0)
        server.close()
        for peer in list(self._peers):
            peer.close()
        if kernel is not None:
            self._loop.remove_reader(kernel)
            os.close(kernel)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self) -> None:
        while not self._is_stopping and self._kernel_lives:
            self._news.clear()
            await self._news.wait()
        while self._jobs or self._pool.is_clearing:  # noqa: ASYNC110 - of two things, one has no event, and it is short
            await asyncio.sleep(_LOOK_EACH_S if self._jobs else 0.01)

    def _listen(self) -> socket.socket:
        path = pathlib.Path(self._settings.socket_path)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o600)
        (self._folder / "process").write_text(f"{os.getpid()} {processes.start_time(os.getpid())}")
        return listener

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error of our own: no job may wait forever because of it."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        told = f"The agent that ran the job failed: {type(error).__name__}: {error}"
        for job in list(self._jobs.values()):
            job.fail(FailureCause.AGENT_DIED, told)

    def _told_to_end(self) -> None:
        self._is_stopping = True
        self._news.set()
        for job in list(self._jobs.values()):
            job.cancel(FailureCause.USER, "The agent that ran the job received SIGTERM", FAILURE_GRACE_S)

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
            self._loop.remove_reader(descriptor)
            self._kernel_ended()

        self._loop.add_reader(descriptor, ended)
        return descriptor

    def _kernel_ended(self) -> None:
        if self._kernel_lives:
            self._kernel_lives = False
            self._news.set()
            for job in list(self._jobs.values()):
                if not job.order.detach:
                    job.cancel(FailureCause.KERNEL_ENDED, "The notebook's kernel ended", FAILURE_GRACE_S)

    # -- messages ---------------------------------------------------------------------------------------------------

    def peer_came(self, peer: _Peer) -> None:
        """A connection was made."""
        self._peers.add(peer)

    def peer_left(self, peer: _Peer) -> None:
        """A connection has ended."""
        self._peers.discard(peer)
        if peer is self._kernel and not self._is_stopping:
            self._kernel_ended()

    def take_message(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Do what a peer asks for."""
        match message.get("op"):
            case Op.TAKE:
                self._take(peer, message.get("order") or {})
            case Op.CANCEL:
                self._cancel(str(message.get("job")), float(message.get("grace_s", 5.0)))
            case Op.STOP if peer is self._kernel:
                self._is_stopping = True
                self._news.set()

    def _take(self, peer: _Peer, data: dict[str, Any]) -> None:
        order = Order.from_json(data)
        name = order.job
        peer.send({"op": Op.TAKEN, "job": name})
        if name in self._jobs:
            return
        self._ended.pop(name, None)
        try:
            writer = JobWriter(JobFiles(order.folder), self._loop, lambda: self._wake(name))
        except OSError:
            # Without a folder there is nowhere to say so; who deleted it wants no job.
            self._wake(name)
            return
        job = JobRun(order, self._loop, self._pool, writer, lambda: writer.close(lambda: self._job_ended(name)))
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
            _remember(self._early_cancels, name)

    def _job_ended(self, name: str) -> None:
        """The job's last event is written."""
        self._jobs.pop(name, None)
        _remember(self._ended, name)
        self._wake(name)
        if not self._jobs:
            processes.end_orphans(limit_s=0.0, spare=self._pool.pid)

    def _wake(self, name: str) -> None:
        """Tell everybody who listens that a job's files have changed; the writer's tick limits how often."""
        for peer in list(self._peers):
            peer.send({"op": Op.WAKE, "job": name}, optional=name in self._jobs)


class _Peer(asyncio.Protocol):
    """One connection: messages are JSON, one a line."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio calls it."""
        self._transport = transport  # type: ignore[assignment] # a socket's transport can write
        self._agent.peer_came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio calls it."""
        del exc
        self._transport = None
        self._agent.peer_left(self)

    def data_received(self, data: bytes) -> None:
        """As asyncio calls it."""
        self._parts.append(data)
        # Joined only at a line end: an order of some megabytes arrives in many pieces.
        if b"\n" not in data:
            return
        whole, _, rest = b"".join(self._parts).rpartition(b"\n")
        self._parts = [rest]
        for message in contract.decode_json_lines(whole):
            try:
                self._agent.take_message(self, message)
            except (KeyError, TypeError, ValueError):
                # One message of another version must not end everybody's jobs.
                traceback.print_exc()

    def send(self, message: dict[str, Any], *, optional: bool = False) -> None:
        """Send a message; an optional one only if the peer has read those before it. Never waits."""
        if self._transport is not None:
            unsent = self._transport.get_write_buffer_size()
            if unsent < _MAX_UNSENT_BYTES and not (optional and unsent):
                self._transport.write(contract.encode_json(message))

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()


def _remember(names: dict[str, None], name: str) -> None:
    names[name] = None
    while len(names) > _REMEMBERED:
        del names[next(iter(names))]


def main(settings: Settings, forkserver: tuple[socket.socket, int] | None) -> int:
    """Run an agent; gives the exit code."""

    async def run() -> None:
        await Agent(settings, forkserver).run()

    asyncio.run(run())
    return 0
