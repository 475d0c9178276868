"""Pods as processes of this machine, each at a loopback address of its own, read through their standard output."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import fsspec
from recorded import whole

import kale_dist
from kale_dist import wire
from kale_dist.places.following.head_client import HeadClient
from kale_dist.snapshot import outcome
from kale_dist.snapshot.capture import capture
from kale_dist.wire import (
    BlockReader,
    EventBlock,
    Foreign,
    InputFiles,
    JobFiles,
    LineBlock,
    Order,
    OutcomePart,
    PodVariable,
    Policy,
    Source,
)
from kale_dist.wire.blobs import FolderStore, pack_blobs
from kale_dist.worker.pod.pod import LISTEN_VARIABLE, TERMINATION_LOG_VARIABLE


def free_ports() -> int:
    """The first of three ports in a row that nobody listens on."""
    while True:
        port = 20_000 + secrets.randbelow(10_000) * 3 % 30_000
        try:
            for number in range(port, port + 3):
                socket.create_server(("", number)).close()
        except OSError:
            continue
        return port


class Pod:
    """One pod's process and what it has written."""

    def __init__(self, number: int, folder: pathlib.Path, job: PodJob, environment: dict[str, str]) -> None:
        self.number = number
        self.folder = folder
        self.address = f"127.0.0.{number + 1}"
        self.termination_log = folder / "termination"
        self.items: list[Any] = []
        self.job = job
        folder.mkdir(exist_ok=True)
        told = {
            PodVariable.INPUT: str(job.input),
            PodVariable.WORK: str(folder / "work"),
            PodVariable.FIRST_POD: "0" if number == 0 else "1",
            PodVariable.REPLICA_INDEX: str(max(0, number - 1)),
            LISTEN_VARIABLE: self.address,
            TERMINATION_LOG_VARIABLE: str(self.termination_log),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.process = subprocess.Popen(
            [job.python, *job.command],
            env=os.environ | told | environment,
            stdout=subprocess.PIPE,
            cwd=folder,
        )
        self._reader = BlockReader()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            self.items.extend(self._reader.feed(data))

    def end(self, timeout_s: float = 240.0) -> int:
        """Wait for the end of the process and of its output; the exit code."""
        code = self.process.wait(timeout_s)
        self._thread.join(10)
        return code

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """A signed request to the pod's server."""
        digest = "" if method != "POST" else contract_digest(body or b"")
        headers = {wire.MAC_HEADER: wire.sign_request(self.job.key, method, path, digest), wire.BODY_HEADER: digest}
        if method == "PUT":
            headers[wire.SIZE_HEADER] = str(len(body))
        peer = http.client.HTTPConnection(self.address, self.job.order.port + 2, timeout=30)
        try:
            peer.request(method, path, body, headers)
            answer = peer.getresponse()
            return answer.status, answer.read()
        finally:
            peer.close()

    @property
    def last_words(self) -> dict[str, Any]:
        return json.loads(self.termination_log.read_bytes())

    def pids(self) -> dict[int, int]:
        found = [whole(item.event) for item in self.items if isinstance(item, EventBlock)]
        return {event["rank"]: event["pid"] for event in found if event["event"] == "rank" and event["pid"]}


def contract_digest(body: bytes) -> str:
    from kale_dist.wire.blobs import digest_of

    return digest_of([body])


class PodJob:
    """A job whose pods are started one by one."""

    def __init__(
        self, root: pathlib.Path, function: Callable[..., Any], *args: Any, ranks: int, **options: Any
    ) -> None:
        self.python = sys.executable
        self.command = ["-P", "-m", "kale_dist.worker", "pod"]
        self.root = root / f"t-{secrets.token_hex(4)}"
        self.root.mkdir()
        self.store = FolderStore(self.root / "notebook")
        snapshot = capture(function, args, {}, store=self.store, label=function.__name__)
        self.key = secrets.token_bytes(32)
        self.input = self.root / "input"
        values: dict[str, Any] = {
            "job": self.root.name, "object": self.root.name, "number_of_processes": ranks, "processes_per_agent": 1, "head": "127.0.0.1",
            "port": free_ports(), "snapshot": snapshot.digest, "blobs": snapshot.blobs, "source": Source.INPUT,
            "collect_wait_s": 20.0, "replaces_pods": True,
        }  # fmt: skip
        limits = {field.name: options.pop(field.name) for field in dataclasses.fields(Policy) if field.name in options}
        self.order = Order(policy=Policy(**{"stall_warn_s": None, **limits}), **values | options)
        self.pods: list[Pod] = []

    @property
    def number_of_pods(self) -> int:
        return -(-self.order.number_of_processes // self.order.processes_per_agent)

    def put_input(self) -> PodJob:
        """What the Secret would bring, all at once."""
        parts = self.root / "parts"
        parts.mkdir()
        (parts / InputFiles.KEY).write_bytes(self.key)
        (parts / InputFiles.ORDER).write_bytes(wire.encode_json(self.order))
        if self.order.source is Source.INPUT:
            (parts / InputFiles.SNAPSHOT).write_bytes(pack_blobs(self.store, self.order.blobs))
        parts.rename(self.input)
        return self

    def start(self, number: int, container_of: Pod | None = None, **environment: str) -> Pod:
        """A new pod of this number, or another container of one whose container has ended."""
        folder = self.root / f"pod-{number}-{len(self.pods)}" if container_of is None else container_of.folder
        pod = Pod(number, folder, self, environment)
        self.pods.append(pod)
        return pod

    def start_all(self) -> PodJob:
        for number in range(self.number_of_pods):
            self.start(number)
        return self

    def end(self) -> list[int]:
        """Exit codes of all pods, once they have ended."""
        return [pod.end() for pod in self.pods]

    def close(self) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.process.send_signal(signal.SIGKILL)
            pod.end()
            pod.process.stdout.close()

    # -- what the notebook sees --------------------------------------------------------------------------------------

    def items(self, kind: type) -> list[Any]:
        return [item for pod in self.pods for item in pod.items if isinstance(item, kind)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [whole(item.event) for item in self.items(EventBlock) if item.event["event"] == kind]

    def state(self) -> dict[str, Any]:
        states = self.events("state")
        return states[-1] if states else {"state": "pending"}

    def text(self) -> str:
        return "\n".join(str(line) for item in self.items(LineBlock) for line in item.lines())

    def outcome(self, rank: int, attempt: int = 0) -> outcome.Outcome:
        """From the head's stdout; as a notebook without a connection reads it."""
        parts = [item for item in self.items(OutcomePart) if (item.rank, item.attempt) == (rank, attempt)]
        assert [part.index for part in parts] == list(range(parts[0].count))
        return self.read_outcome(rank, b"".join(part.data for part in parts), attempt)

    def read_outcome(self, rank: int, data: bytes, attempt: int = 0) -> outcome.Outcome:
        path = JobFiles(self.root).outcome(attempt, rank)
        path.write_bytes(data)
        return outcome.read_outcome(
            path,
            signer=outcome.Signer(key=self.key, job=self.order.job, attempt=attempt, rank=rank),
            resolve=lambda index: None,
        )

    def until(self, condition: Callable[[], Any], timeout_s: float = 240.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.02)
        plain = [item.text for item in self.items(Foreign)]
        raise AssertionError(f"not in {timeout_s} s; state: {self.state()}; log: {self.text()}; plain: {plain}")

    def until_running(self) -> None:
        self.until(lambda: self.state()["state"] == "running")


def make_bare_python(folder: pathlib.Path) -> str:
    """A Python with cloudpickle, fsspec and this library alone."""
    place = folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    site = next(place.glob("lib/python3*/site-packages"))
    for package in (kale_dist, cloudpickle, fsspec):
        package_folder = pathlib.Path(package.__file__).parent
        (site / package_folder.name).symlink_to(package_folder)
    return str(place / "bin" / "python")


def making_pod_jobs(folder, python):
    """Yield a function that makes such jobs, and end them."""
    made = []

    def make_job(function, *args, **options):
        made.append(PodJob(folder, function, *args, **options))
        made[-1].python = python
        return made[-1]

    yield make_job
    for job in made:
        job.close()


class WarmJob:
    """A job in warm pods, as its notebook sees it by connections."""

    def __init__(self, pods: PodJob, function: Callable[..., Any], *args: Any, job_id: str, **options: Any) -> None:
        self.pods, self.id = pods, job_id
        self.key = secrets.token_bytes(32)
        self.store = FolderStore(pods.root / "notebook")
        snapshot = capture(function, args, {}, store=self.store, label=function.__name__)
        self.order = dataclasses.replace(
            pods.order, job=f"job-{job_id}", object=f"job-{job_id}", idle_s=0.0, snapshot=snapshot.digest,
            blobs=snapshot.blobs, source=Source.STREAM, outcomes_on_stdout=False, **options,
        )  # fmt: skip
        self.client = self.client_of(self.key)
        self.items: list[Any] = []

    def client_of(self, key: bytes, prefix: str | None = None) -> HeadClient:
        def connect() -> socket.socket:
            return socket.create_connection((self.pods.pods[0].address, self.order.port + 2))

        return HeadClient(connect, key, f"/jobs/{self.id}" if prefix is None else prefix)

    def described(self) -> dict[str, Any]:
        sealed = wire.seal(self.pods.key, {"key": self.key.hex()})
        return {"id": self.id, "sealed": sealed, "order": wire.encode(self.order)}

    def offer(self) -> list[str]:
        """Send what is missing, then the order; gives what was missing."""
        head = self.client_of(self.pods.key, "")
        missing = head.offer(self.described(), b"")
        if not missing.get("missing"):
            return missing
        head.upload(self.store, missing["missing"])
        assert head.offer(self.described(), b"") == {"missing": []}
        return missing["missing"]

    def follow(self) -> dict[str, Any]:
        """Read its stream to the end; gives its last event."""
        reader = BlockReader()
        with self.client.stream(0, 0, 60.0) as (pieces, _):
            for piece in pieces:
                self.items.extend(reader.feed(piece))
        return self.events("state")[-1]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [
            whole(item.event) for item in self.items if isinstance(item, EventBlock) and item.event["event"] == kind
        ]

    def text(self) -> str:
        return "\n".join(str(line) for item in self.items if isinstance(item, LineBlock) for line in item.lines())

    def outcome(self, rank: int, key: bytes | None = None, job: str | None = None) -> outcome.Outcome:
        path = self.pods.root / f"{self.id}-{rank}"
        self.client.fetch_file(f"outcome-0-{rank}", path)
        signer = outcome.Signer(key=key or self.key, job=job or self.order.job, attempt=0, rank=rank)
        return outcome.read_outcome(path, signer=signer, resolve=lambda index: None)
