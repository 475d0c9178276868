"""What tests of the agent share: a client with its agent, and jobs made of plain functions."""

from __future__ import annotations

import dataclasses
import pathlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from recorded import events_in

from kale_dist.job.reader import LogReader
from kale_dist.places.agent_client import AgentClient
from kale_dist.snapshot import outcome
from kale_dist.snapshot.capture import capture
from kale_dist.wire import JobFiles, LogLine, Order, Policy, StateName
from kale_dist.wire.blobs import FolderStore
from kale_dist.worker.agent import processes
from kale_dist.worker.rank.process_state import capture as capture_process

FINAL = (StateName.SUCCEEDED, StateName.FAILED, StateName.CANCELLED)


class RunningJob:
    """A job in a folder, read as everybody else would read it."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.files = JobFiles(order.folder)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        if not self.files.events.exists():
            return []
        found = events_in(self.files.events.read_bytes())
        return [event for event in found if kind is None or event["event"] == kind]

    def state(self) -> dict[str, Any]:
        states = self.events("state")
        return states[-1] if states else {"state": "pending"}

    def wait(self, timeout_s: float = 200.0) -> dict[str, Any]:
        return self.until(lambda: self.state()["state"] in FINAL and self.state(), timeout_s)

    def until(self, condition: Callable[[], Any], timeout_s: float = 200.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.01)
        raise AssertionError(f"not in {timeout_s} s; events: {self.events()}; log: {self.log_text()}")

    def log(self) -> list[LogLine]:
        if not self.files.log.is_file():
            return []
        return list(LogReader(self.files).read())

    def log_text(self, rank: int | None = None) -> str:
        return "\n".join(line.text for line in self.log() if rank is None or line.rank == rank)

    def outcome(self, rank: int = 0, attempt: int = 0) -> outcome.Outcome:
        return outcome.read_outcome(
            self.files.outcome(attempt, rank),
            signer=outcome.Signer(key=bytes.fromhex(self.order.key), job=self.order.job, attempt=attempt, rank=rank),
            resolve=lambda index: None,
        )

    def pids(self) -> dict[int, int]:
        return {event["rank"]: event["pid"] for event in self.events("rank") if event["pid"]}


class Jobs:
    """Makes jobs below a folder and hands them to an agent."""

    def __init__(self, root: pathlib.Path, client: AgentClient) -> None:
        self.root = root
        self.client = client
        self.store = FolderStore(root / "blobs")

    def order(self, function: Callable[..., Any], *args: Any, ranks: int = 2, **options: Any) -> Order:
        name = options.pop("job", f"t-{secrets.token_hex(4)}")
        folder = self.root / "jobs" / name
        folder.mkdir(parents=True, mode=0o700)
        snapshot = capture(function, args, {}, store=self.store, label=function.__name__).digest
        limits = {field.name: options.pop(field.name) for field in dataclasses.fields(Policy) if field.name in options}
        return Order(
            policy=Policy(**limits),
            job=name,
            object=name,
            number_of_processes=ranks,
            processes_per_agent=ranks,
            folder=str(folder),
            store=str(self.store.root),
            snapshot=snapshot,
            key=secrets.token_hex(32),
            process=options.pop("process", None) or capture_process(cuda=False),
            **options,
        )

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> RunningJob:
        order = self.order(function, *args, **options)
        self.client.take(order)
        return RunningJob(order)


def is_alive(pid: int) -> bool:
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def descriptors(pid: int) -> int:
    return len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))


def named(pids):
    """Processes and when they began: process ids are used again."""
    return {pid: processes.start_time(pid) for pid in pids}


def survivors(began, limit_s):
    """Those of `named` processes that live for longer than that, each with its name, state, parent and command line."""
    deadline = time.monotonic() + limit_s
    while left := [pid for pid, start in began.items() if processes.is_running(pid, start)]:
        if time.monotonic() > deadline:
            return [_described(pid) for pid in left]
        time.sleep(0.01)
    return []


def _described(pid):
    folder = pathlib.Path("/proc", str(pid))
    try:
        state = " ".join((folder / "stat").read_text().split()[:4])
        return f"{state}: {(folder / 'cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')}"
    except OSError as error:
        return f"{pid}: {error}"


def all_running(job: RunningJob):
    return job.until(lambda: job.state()["state"] == "running" and job.pids())


def add_ranks(start):
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(total)
    return total.item()
