"""How a large snapshot reaches the pods: what each sends to others, how long it takes, and memory above the model itself.

    python benchmarks/large_snapshots.py [--pods 8] [--megabytes 256] [--tensors 16]

Pods are processes of this machine, each at a loopback address of its own; this process is the notebook and sends a model to the first
one. What a pod has sent is what it has written (`wchar` of /proc, which counts what `sendfile` sends) less the snapshot itself, in
snapshots. Memory is anonymous and shared memory (mapped files are the disk's cache): the most that was seen, less what was there before
the transfer; of ranks, what they have once they have read all of the model and then changed all of it, less a rank's with no model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from kale_dist import wire
from kale_dist.places.following.head_client import HeadClient
from kale_dist.snapshot import outcome
from kale_dist.snapshot.capture import capture
from kale_dist.wire import BlockReader, EventBlock, InputFiles, JobFiles, Order, PodVariable, Policy, Source
from kale_dist.wire.blobs import FolderStore
from kale_dist.worker.pod.pod import LISTEN_VARIABLE, TERMINATION_LOG_VARIABLE

KEY = secrets.token_bytes(32)
MIB = 1 << 20


def use(model: Any) -> list[int]:
    """What a rank does: memory with the model as it came, when all of it was read, and when all of it was changed."""
    import pathlib

    def own() -> int:
        fields = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
        return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))

    seen = [own()]
    sum(float(one.sum()) for one in model)
    seen.append(own())
    for one in model:
        one.add_(1)
    return [*seen, own()]


def process_memory(pid: int) -> int:
    """Memory of a process that is its own."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def written_bytes(pid: int) -> int:
    """What a process has written to files and connections."""
    lines = pathlib.Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


@contextlib.contextmanager
def peaks(pids: list[int]) -> Iterator[dict[int, int]]:
    """Watches processes during a block: the most memory of each, less what it had before."""
    before, found, ended = {pid: process_memory(pid) for pid in pids}, dict.fromkeys(pids, 0), threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            for pid in pids:
                with contextlib.suppress(OSError, KeyError):
                    found[pid] = max(found[pid], process_memory(pid) - before[pid])

    thread = threading.Thread(target=watch)
    thread.start()
    yield found
    ended.set()
    thread.join()


class Pods:
    """A job whose pods are processes here.

    Args:
        folder: Where they work.
        number: How many.
        given: What each rank gets.
    """

    def __init__(self, folder: pathlib.Path, number: int, given: Any) -> None:
        folder.mkdir()
        self.store = FolderStore(folder / "notebook")
        with peaks([os.getpid()]) as seen:
            snapshot = capture(use, (given,), {}, store=self.store, label="use")
        self.taken = seen[os.getpid()]
        self.blobs, self.size = snapshot.blobs, snapshot.size_bytes
        order = Order(
            job="j", object="j", number_of_processes=number, processes_per_agent=1, head="127.0.0.1",
            port=20_000 + secrets.randbelow(3000) * 3, snapshot=snapshot.digest, blobs=snapshot.blobs, source=Source.STREAM,
            collect_wait_s=60.0, outcomes_on_stdout=False, policy=Policy(stall_warn_s=None),
        )  # fmt: skip
        self.port = order.port
        place = folder / "input"
        place.mkdir()
        (place / InputFiles.KEY).write_bytes(KEY)
        (place / InputFiles.ORDER).write_bytes(wire.encode_json(order))
        self.files = JobFiles(folder / "0" / "work" / "job")
        self.client = HeadClient(lambda: socket.create_connection(("127.0.0.1", self.port + 2)), KEY)
        self.processes = [self._start(folder, pod) for pod in range(number)]
        self.running_at = 0.0
        self._follower = threading.Thread(target=self._follow)

    def _start(self, folder: pathlib.Path, pod: int) -> subprocess.Popen[bytes]:
        own = folder / str(pod)
        own.mkdir()
        environment = os.environ | {
            PodVariable.INPUT: str(folder / "input"), PodVariable.WORK: str(own / "work"),
            PodVariable.FIRST_POD: str(min(pod, 1)), PodVariable.REPLICA_INDEX: str(max(0, pod - 1)),
            LISTEN_VARIABLE: f"127.0.0.{pod + 1}", TERMINATION_LOG_VARIABLE: str(own / "said"), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        command = [sys.executable, "-P", "-m", "kale_dist.worker", "pod"]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=own)

    def _follow(self) -> None:
        reader = BlockReader()
        with self.client.stream(0, 0, 120.0) as (pieces, _):
            for piece in pieces:
                for block in reader.feed(piece):
                    if isinstance(block, EventBlock) and block.event["event"] == "state":
                        self.running_at = self.running_at or (block.event["state"] == "running") * time.monotonic()

    def wait_for_pods(self) -> None:
        """Return when the head answers and all have imported what they need."""
        for _ in range(1200):
            with contextlib.suppress(Exception):
                self.client.missing()
                if all(cpu_is_idle(process.pid) for process in self.processes):
                    break
            time.sleep(0.1)
        self._follower.start()

    def end(self) -> list[list[int]]:
        """What the ranks have returned, once all has ended."""
        self._follower.join()
        found = []
        for rank in range(len(self.processes)):
            signer = outcome.Signer(key=KEY, job="j", attempt=0, rank=rank)
            path = self.files.outcome(0, rank)
            found.append(outcome.read_outcome(path, signer=signer, resolve=lambda _: None).value)
        self.client.ack()
        for process in self.processes:
            process.wait(60)
        return found

    def kill(self) -> None:
        """End what is left."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def cpu_is_idle(pid: int) -> bool:
    """Whether a process and its children use no processor for a moment."""
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()

    def used() -> int:
        return sum(
            sum(map(int, pathlib.Path(f"/proc/{one}/stat").read_text().split()[13:15])) for one in [pid, *children]
        )

    before = used()
    time.sleep(0.2)
    return bool(children) and used() - before <= 1


def measure(asked: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Send a model to all pods; gives the figures."""
    count = asked.megabytes * MIB // 4 // asked.tensors
    pods = Pods(folder / "none", 1, [])
    try:
        pods.wait_for_pods()
        pods.client.upload(pods.store, pods.blobs)
        (bare,) = pods.end()
    finally:
        pods.kill()
    model = [torch.full((count,), number) + torch.rand(count) for number in range(asked.tensors)]
    pods = Pods(folder / "model", asked.pods, model)
    try:
        pods.wait_for_pods()
        pids = [process.pid for process in pods.processes]
        before = [written_bytes(pid) for pid in pids]
        with peaks([os.getpid(), *pids]) as seen:
            began = time.monotonic()
            pods.client.upload(pods.store, pods.blobs)
            uploaded = time.monotonic()
            while not pods.running_at:
                time.sleep(0.01)
        sent = [(written_bytes(pid) - was - pods.size) / pods.size for pid, was in zip(pids, before, strict=True)]
        ranks = pods.end()
    finally:
        pods.kill()
    return {
        "snapshot_mb": round(pods.size / 1e6), "sent": [round(max(0.0, one), 2) for one in sent],
        "upload_s": round(uploaded - began, 2), "to_all_running_s": round(pods.running_at - uploaded, 2),
        "notebook_taking_mib": pods.taken // MIB, "notebook_sending_mib": seen[os.getpid()] // MIB,
        "head_mib": seen[pids[0]] // MIB, "relays_mib": max((seen[pid] for pid in pids[1:]), default=0) // MIB,
        "rank_loaded_mib": max(one[0] - bare[0] for one in ranks) // MIB, "rank_read_mib": max(one[1] - bare[1] for one in ranks) // MIB,
        "rank_changed_above_model_mib": (max(one[2] - bare[2] for one in ranks) - pods.size) // MIB,
    }  # fmt: skip


def main() -> None:
    """Measure and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=16)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(asked, pathlib.Path(folder)), indent=1))


if __name__ == "__main__":
    main()
