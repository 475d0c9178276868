"""Forks ranks. Has torch imported and nothing of the user's, runs no tensor operation, and has a single thread.

The agent asks over a socket of whole messages; with each request come the descriptors of the new rank. The server
answers when it is ready, when a rank was forked and when one has ended. An ended rank stays as a zombie until the agent
has dealt with what is left of its process group, so that the group's number cannot be taken by others meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import io
import os
import select
import signal
import socket
import sys
import time
import traceback
import weakref
from typing import Any, cast

from kale_dist import wire
from kale_dist.snapshot import loading
from kale_dist.worker.agent import processes
from kale_dist.worker.agent.forkserver_launch import MAX_MESSAGE_BYTES
from kale_dist.worker.rank import process_state, rank_main

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch.nn.parallel",
    "torch.utils.data",
    "cloudpickle",
    "kale_dist.snapshot.loading",
    "kale_dist.snapshot.outcome",
    "kale_dist.worker.rank.process_group",
    "kale_dist.worker.training.loop",
    "kale_dist.worker.parallel.data_parallel",
)
"""What a rank needs before its first step; each takes long the first time."""

PRELOADED_WITHOUT_TORCH = ("cloudpickle", "kale_dist.snapshot.loading", "kale_dist.snapshot.outcome")
"""The same in an image without torch, such as one with TensorFlow."""


class ForkServer:
    """Serves one agent until it ends.

    Args:
        agent: Socket (SOCK_SEQPACKET) to the agent.
    """

    def __init__(self, agent: socket.socket) -> None:
        self._agent = agent
        self._unsent: collections.deque[bytes] = collections.deque()
        """What the agent had no room for: this process never waits for it to read."""
        self._poll = select.poll()
        self._poll.register(agent, select.POLLIN)
        self._ranks: dict[int, int] = {}
        """Descriptors of live ranks' pidfds, and their process ids."""

    def serve(self) -> None:
        """Import, report that, and fork on request. Returns when the agent has closed its end."""
        start = time.monotonic()
        # Imports make next to no garbage, and the search for it takes a quarter of their time.
        gc.disable()
        for module in PRELOADED if loading.has_torch() else PRELOADED_WITHOUT_TORCH:
            importlib.import_module(module)
        _import_optional("numpy")
        if "torch" in sys.modules:
            # As long as torch itself, at the first step of an optimizer.
            _import_optional("torch._dynamo")
        _spare_ranks_the_finalizers()
        _do_first_calls()
        # Each rank empties this cache, which takes 6 ms while it has the folders of the imports above.
        sys.path_importer_cache.clear()
        # Pages that the collector would write to in each rank stay shared.
        gc.freeze()
        gc.enable()
        self._send({"ready": True, "seconds": time.monotonic() - start})
        while True:
            for descriptor, events in self._poll.poll():
                if descriptor in self._ranks:
                    self._report_end(descriptor)
                    continue
                if events & select.POLLOUT:
                    self._flush()
                if events & ~select.POLLOUT and not self._serve_request():
                    return

    def _serve_request(self) -> bool:
        """Do what one message asks for; False at the end of messages."""
        data, descriptors, _, _ = socket.recv_fds(self._agent, MAX_MESSAGE_BYTES, 8)
        if not data:
            return False
        for message in wire.decode_json_lines(data):
            if "fork" in message:
                self._fork(message["fork"], descriptors)
            elif "reap" in message:
                os.waitpid(message["reap"], 0)
        return True

    def _fork(self, number: int, descriptors: list[int]) -> None:
        server = os.getpid()
        try:
            threads = processes.thread_count(server)
            if threads != 1:
                self._refuse(
                    number,
                    descriptors,
                    f"the forkserver has {threads} threads, so a forked rank could hang: a module that is imported "
                    "at the start of Python (a .pth file, sitecustomize) starts one",
                )
                return
            pid = os.fork()
        except OSError as error:
            self._refuse(number, descriptors, str(error))
            return
        if pid == 0:
            self._become_rank(server, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            watch = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._send({"refused": number, "error": str(error)})
            return
        self._ranks[watch] = pid
        self._poll.register(watch, select.POLLIN)
        self._send({"forked": number, "pid": pid})

    def _refuse(self, number: int, descriptors: list[int], why: str) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        self._send({"refused": number, "error": why})

    def _become_rank(self, server: int, descriptors: list[int]) -> None:
        """The child's side of the fork: never returns."""
        try:
            processes.die_with_parent(server)
            self._agent.close()
            for watch in self._ranks:
                os.close(watch)
            rank_main.run(rank_main.Descriptors(*descriptors))
        except BaseException:  # noqa: BLE001 - nothing may escape into the server's own frames
            traceback.print_exc()
        finally:
            os._exit(wire.EXIT_BROKEN)

    def _report_end(self, watch: int) -> None:
        pid = self._ranks.pop(watch)
        self._poll.unregister(watch)
        os.close(watch)
        # It gives nothing only with WNOHANG.
        ended = cast("os.waitid_result", os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT))
        by_signal = ended.si_code != os.CLD_EXITED
        self._send({"ended": pid, "status": ended.si_status, "by_signal": by_signal})

    def _send(self, message: dict[str, Any]) -> None:
        self._unsent.append(wire.encode_json(message))
        self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._agent.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent.popleft()
        self._poll.modify(self._agent, select.POLLIN | (select.POLLOUT if self._unsent else 0))


def _spare_ranks_the_finalizers() -> None:
    """Torch would take each of its operators back at the end of each rank, for 50 ms and nothing."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):  # no public way
        finalizer.atexit = False


def _do_first_calls() -> None:
    """Make the calls that take longer the first time, which each rank would pay for before its first step."""
    wire.readers_of(wire.Assignment)
    # Torch keeps the stack of a seeding, with its source lines, for a GPU that may be used later.
    process_state.set_seeds(0)
    if torch := sys.modules.get("torch"):
        # Each DataLoader records its batches and each checkpoint is saved: torch imports more for both.
        with torch.profiler.record_function("first"):
            torch.save(None, io.BytesIO())


def _import_optional(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise


def main(connection: int, agent: int) -> int:
    """Run a forkserver.

    Args:
        connection: Descriptor of the socket to the agent.
        agent: Its process id.

    Returns:
        The exit code.
    """
    processes.die_with_parent(agent)
    # The agent alone decides when this process ends; a terminal's signals are not for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    peer = socket.socket(fileno=connection)
    peer.set_inheritable(False)
    try:
        ForkServer(peer).serve()
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except Exception as error:  # noqa: BLE001 - sent to the agent, which reports it to the user
        traceback.print_exc()
        peer.sendall(wire.encode_json({"broken": f"{type(error).__name__}: {error}"[:2000]}))
        return 1
    sys.stdout.flush()
    return 0
