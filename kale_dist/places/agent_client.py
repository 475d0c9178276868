"""The notebook's side of an agent: starts one, gives it jobs, and learns when a job's files change.

Another process of the user, which has no `AgentClient`, reaches an agent by `send(address, cancel_message(job))`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Self

from kale_dist import wire
from kale_dist.errors import BackendUnavailableError
from kale_dist.snapshot import loading
from kale_dist.wire import CANCEL_GRACE_S, Op, Order
from kale_dist.worker.agent import processes

LOAD_ONLY_PREFIXES = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "LD_", "MALLOC_", "GLIBC_", "PYTHON", "TORCH", "PYTORCH_", "GLOO_",
)  # fmt: skip
"""Variables that libraries read once, when they are loaded: a forked rank would not see a change.

Those of CUDA and NCCL are read when they begin to work, which is in the rank."""

READ_EARLY = (*LOAD_ONLY_PREFIXES, "CUDA_", "KALE_DIST_", "LANG", "LC_", "NCCL_", "NVIDIA_")
"""Variables that stand in a pod's own object, because something reads them before the pod has its order. They are no secrets."""

_TAKE_S = 60.0
"""Seconds in which a new agent confirms its first order; it takes 0.2 s on an idle machine."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The part of a process's state that an agent gets only when it starts: another state needs another agent."""

    environment: tuple[tuple[str, str], ...]
    """Variables with one of `LOAD_ONLY_PREFIXES`, sorted."""
    interpreter: str
    torch_version: str
    torch_file: str
    """Path and modification time of torch's `version.py`."""

    @classmethod
    def now(cls, environment: Mapping[str, str] | None = None) -> Self:
        """The fingerprint of this process.

        Args:
            environment: To look at instead of `os.environ`.
        """
        names = os.environ if environment is None else environment
        version, file = loading.installed_torch()
        return cls(
            environment=tuple(sorted((n, v) for n, v in names.items() if n.startswith(LOAD_ONLY_PREFIXES))),
            interpreter=sys.executable,
            torch_version=version,
            torch_file=file,
        )

    def changes(self, now: Fingerprint) -> tuple[str, ...]:
        """The differences of `now`, each as a short clause without the variables' values."""
        before, after = dict(self.environment), dict(now.environment)
        found = [f"{name} was set" for name in sorted(after.keys() - before.keys())]
        found += [f"{name} was removed" for name in sorted(before.keys() - after.keys())]
        found += [f"{name} was changed" for name in sorted(before.keys() & after.keys()) if before[name] != after[name]]
        if self.interpreter != now.interpreter:
            found.append(f"the interpreter is now {now.interpreter}")
        if self.torch_version != now.torch_version:
            found.append(f"torch {self.torch_version} became {now.torch_version}")
        elif self.torch_file != now.torch_file:
            found.append("torch was installed again")
        return tuple(found)


class AgentClient:
    """One agent process, as the notebook sees it. Safe to use from several threads.

    The callbacks run in the client's thread, so they must be quick.

    Args:
        on_wake: Called with a job's name when files of that job have changed, at most every 20 ms a job.
        on_end: Called once when the connection ends, for any reason.
    """

    def __init__(
        self, on_wake: Callable[[str], None] = lambda _: None, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._on_wake = on_wake
        self._on_end = on_end
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._sent: set[str] = set()
        self._taken: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._owner = os.getpid()
        self.fingerprint = Fingerprint.now()
        """The fingerprint of this process when it started the agent."""
        self.pid = 0
        """Process id of the agent; 0 before `start`."""
        self.start_time = 0
        """When the agent's process began, in clock ticks since boot: process ids are used again."""
        self.address = f"kale-dist-{secrets.token_hex(16)}"
        """Where other processes reach the agent."""
        self.disk_problems: dict[str, str] = {}
        """Why ranks of a job wait for the disk of its folder, by the job's name: a status that cannot be written there."""
        self.last_words = ""
        """What the agent had written to its stderr when it ended; empty unless the agent itself failed."""

    def start(self) -> None:
        """Start the agent and return; it imports torch in the background.

        Raises:
            BackendUnavailableError: No process can be started.
        """
        ours, theirs = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - the thread closes it
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "kale_dist.worker", "agent"),
                    *("--connection", str(theirs.fileno()), "--address", self.address),
                    *("--kernel-pid", str(os.getpid()), "--kernel-start", str(processes.start_time(os.getpid()))),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd="/",
                env=agent_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            errors.close()
            raise BackendUnavailableError(
                f"The agent that runs jobs on this machine could not be started: {error}", retryable=True
            ) from error
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.start_time = processes.start_time(self.pid)
        self._socket = ours
        threading.Thread(target=self._listen, args=(errors,), name="kale_dist agent client", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the agent runs and can be sent messages."""
        return self._socket is not None and self._process is not None and self._process.poll() is None

    def take(self, order: Order) -> None:
        """Send the agent a job's order and return at once. The job's folder has to exist.

        Raises:
            BackendUnavailableError: The agent has ended (`retryable`: a new one may take the job).
        """
        self._sent.add(order.job)
        self._send({"op": Op.TAKE, "order": order})

    def may_have(self, job: str) -> bool:
        """Whether an order of this job was sent to the agent, which still runs."""
        return job in self._sent and self.alive

    def wait_until_taken(self, job: str) -> None:
        """Wait until the agent has confirmed an order: from then on the job runs even if this process ends.

        Raises:
            BackendUnavailableError: The agent does not confirm it (`retryable`).
        """
        with self._changed:
            self._changed.wait_for(lambda: job in self._taken or not self.alive, _TAKE_S)
            if job in self._taken:
                return
        raise BackendUnavailableError("The agent that runs jobs on this machine has not started", retryable=True)

    def cancel(self, job: str, grace_s: float = CANCEL_GRACE_S, *, save: bool = False) -> None:
        """End a job as `cancel_message` describes. A job that has ended is left as it is.

        Raises:
            BackendUnavailableError: The agent has ended, and with it the job.
        """
        self._send(cancel_message(job, grace_s, save=save))

    def stop(self) -> None:
        """Have the agent end with its last job, until which it still sends wakes. Without an agent, nothing happens."""
        with contextlib.suppress(BackendUnavailableError):
            self._send({"op": Op.STOP})

    def close(self, timeout_s: float = 5.0) -> None:
        """Have the agent end with its last job, wait for that a moment, and close the connection.

        Args:
            timeout_s: Seconds to wait at most.
        """
        self.stop()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        connection = self._socket
        if connection is None or os.getpid() != self._owner:
            raise BackendUnavailableError("The agent that runs jobs on this machine is not running", retryable=True)
        try:
            with self._lock:
                connection.sendall(wire.encode_json(dict(message)))
        except OSError as error:
            raise BackendUnavailableError(
                f"The agent that runs jobs on this machine has ended: {error}", retryable=True
            ) from error

    def _listen(self, errors: IO[bytes]) -> None:
        """Read messages until the connection ends. Runs in the client's thread."""
        connection, process = self._socket, self._process
        if connection is None or process is None:
            return
        pending = b""
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                whole, _, pending = (pending + data).rpartition(b"\n")
                for message in wire.decode_json_lines(whole):
                    self._handle(message)
        # The agent closes its connection just before it ends; without a wait it would stay a zombie.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        with errors:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4000))
            self.last_words = errors.read(4000).decode(errors="backslashreplace")
        self._socket = None
        with self._changed:
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            connection.close()
        self._on_end()

    def _handle(self, message: Mapping[str, Any]) -> None:
        job = message.get("job", "")
        match message.get("op"):
            case Op.TAKEN:
                with self._changed:
                    self._taken.add(job)
                    self._changed.notify_all()
            case Op.WAKE:
                self.disk_problems[job] = message.get("disk_problem", "")
                self._on_wake(job)


def agent_environment() -> dict[str, str]:
    """The environment of an agent: this process's, in which kale_dist and cloudpickle can be imported."""
    environment = dict(os.environ)
    folders = [str(folder) for folder in processes.import_folders()]
    folders += [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(folders))
    return environment


def cancel_message(job: str, grace_s: float = CANCEL_GRACE_S, *, save: bool = False) -> dict[str, Any]:
    """The message that ends a job, for `send`: one more checkpoint if wanted, SIGTERM to its ranks, SIGKILL after `grace_s`."""
    return {"op": Op.CANCEL, "job": job, "grace_s": grace_s, "save": save}


def send(address: str, message: Mapping[str, Any], timeout_s: float = 5.0) -> bool:
    """Send one message to an agent from any process of the same user.

    Args:
        address: From the job's record.
        message: Such as `cancel_message(job)`.
        timeout_s: Seconds to wait at most.

    Returns:
        Whether the agent has received it; False if the agent has ended.
    """
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(wire.socket_address(address))
            # The name of an agent that has ended is free.
            if processes.peer_of(connection)[1] != os.geteuid():
                return False
            connection.sendall(wire.encode_json(dict(message)))
            # The agent closes the connection once it has read all messages.
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 12):
                connection.settimeout(max(0.01, deadline - time.monotonic()))
        except OSError:
            return False
    return True
