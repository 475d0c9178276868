"""The local backend: ranks are processes of this machine, run by an agent that the notebook's process starts.

A job's folder holds everything about it, and the agent's messages only report that it has changed. So `attach` needs no
connection to the agent of another process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import time
from collections.abc import Iterable, Sequence

from kale_dist.errors import BackendError, BackendUnavailableError
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Plan
from kale_dist.job.reader import FolderBackend
from kale_dist.job.records import Record
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.status import JobStatus
from kale_dist.places import agent_client
from kale_dist.places.agent_client import AgentClient, Fingerprint
from kale_dist.places.orders import order_of
from kale_dist.wire import Op, Order, StateName, encode, messages, unseal
from kale_dist.wire.messages import ToAgent
from kale_dist.worker.agent import processes
from kale_dist.worker.rank import process_state

_FOREIGN_POLL_S = 0.1
_OWN_POLL_S = 1.0
"""How often a reader looks for changes without a message: its agent may have been killed."""

_DELETE_TIMEOUT_S = 15.0

_LONG_S = 3.0
"""A job that has not begun by then says why."""

_IMPORTS = "Its processes import torch first: this takes some seconds, and longer on a busy machine. The next jobs start at once"


class LocalBackend(FolderBackend):
    """Runs jobs on this machine. One instance serves a whole process (`shared()`); it is safe to use from threads."""

    name = "local"

    def __init__(self) -> None:
        super().__init__(lambda record: processes.is_running(record.agent_pid, record.agent_start))
        self._client: AgentClient | None = None
        self._note = ""

    def warm_up(self) -> None:
        """Start an agent, or another one if this process's environment has changed. Returns at once."""
        self._ready_client()

    def plan(self, spec: JobSpec) -> Plan:
        """The ranks' processes, and everything that they get, one line each."""
        return Plan(backend=self.name, spec=spec, text=_plan_text(spec))

    def submit(self, spec: JobSpec, key: bytes) -> JobRef:
        """Write the job's record and send its order to the agent. Returns before any rank has started."""
        ref = JobRef(self.name, spec.name)
        files = records.create(spec.name, key)
        try:
            self._send_order(spec, str(files.folder), key)
        except BaseException:
            self._take_back(ref)
            raise
        return ref

    def status(self, ref: JobRef) -> JobStatus:
        """The status in the job's files, with the reason if they cannot be written, or if the job is long in coming."""
        status, client = self._reader(ref).status(), self._client
        problem = client.disk_problems.get(ref.name) if client is not None else ""
        is_pending = status.state is StateName.PENDING and not (status.attempt or problem or status.reason)
        if is_pending and time.time() - (status.created or 0) > _LONG_S:
            problem = _IMPORTS
        return dataclasses.replace(status, reason=problem) if problem and not status.is_final else status

    def send(self, ref: JobRef, rank: int, message: ToAgent, blobs: Iterable[str] = ()) -> None:
        """Have the job's agent, of this process or of another one, pass a message on to a rank. Blobs are there already."""
        del blobs
        request = {"op": Op.SEND, "job": ref.name, "rank": rank, "message": json.loads(messages.encode(message))}
        if not agent_client.send(self._reader(ref).record().agent_socket, request):
            raise BackendError(f"The agent that runs {ref} has ended")

    def cancel(self, ref: JobRef, *, grace_s: float | None = None, save: bool = True) -> None:
        """Have the job's agent, of this process or of another one, end its ranks."""
        reader = self._reader(ref)
        if reader.status().is_final:
            return
        record = reader.record()
        grace_s = record.spec.policy.cancel_grace_s(save=save) if grace_s is None else grace_s
        client = self._client
        if client is not None and client.alive and client.pid == record.agent_pid:
            with contextlib.suppress(BackendUnavailableError):
                client.cancel(ref.name, grace_s, save=save)
        else:
            # The agent may not have the job's order yet.
            records.mark_cancelled(records.files(ref.name))
            agent_client.send(record.agent_socket, agent_client.cancel_message(ref.name, grace_s, save=save))

    def delete(self, ref: JobRef) -> None:
        """Cancel if need be, wait for the end, and remove the job's folder and the blobs no other job needs.

        Raises:
            JobNotFoundError: No such job.
            BackendError: The job does not end.
        """
        self._end(ref)
        records.delete(ref.name)
        self._forget(ref)
        self._notify(ref)

    def list(self) -> Sequence[JobRef]:
        """All jobs of this user on this machine, oldest first."""
        return [JobRef.parse(ref) for ref in records.refs(self.name)]

    def close(self) -> None:
        """Have the agent end with its last job. Another job starts a new agent."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _start_agent(self) -> AgentClient:
        client = AgentClient(on_wake=lambda job: self._notify(JobRef(self.name, job)), on_end=self._wake_all)
        client.start()
        return client

    def _ready_client(self) -> AgentClient:
        with self._lock:
            if self._client is None or not self._client.alive:
                self._client = self._start_agent()
            elif changes := self._client.fingerprint.changes(Fingerprint.now()):
                before, self._client = self._client, self._start_agent()
                before.stop()
                self._note = f"A new agent was started for this job: {'; '.join(changes)}"
            return self._client

    def _send_order(self, spec: JobSpec, folder: str, key: bytes) -> None:
        """Send the job's order to the agent, a new one if need be."""
        with self._lock:
            client = self._ready_client()
            # The log of an agent's first job has the reason why the agent is new.
            note, self._note = self._note, ""
            self._write_record(spec, client)
            client.take(_order(spec, folder, key, note))
            if spec.policy.detach:
                client.wait_until_taken(spec.name)

    def _end(self, ref: JobRef) -> None:
        """Cancel a job that has not ended, and wait for its end."""
        reader = self._reader(ref)
        self.cancel(ref, grace_s=1.0, save=False)
        deadline = time.monotonic() + _DELETE_TIMEOUT_S
        while not reader.status().is_final:
            if time.monotonic() > deadline:
                problem = f"{ref} has not ended within {_DELETE_TIMEOUT_S:.0f} s of its cancellation"
                raise BackendError(f"{problem}; try again", retryable=True)
            time.sleep(0.05)

    def _take_back(self, ref: JobRef) -> None:
        """Undo a submission that failed or was interrupted: no rank of it runs, and its name is free."""
        try:
            # An agent that has the order would go on, and refuse the next job of this name.
            if self._client is not None and self._client.may_have(ref.name):
                with contextlib.suppress(BackendError):
                    self._end(ref)
        finally:
            records.withdraw(ref.name)
            self._forget(ref)

    def _forget(self, ref: JobRef) -> None:
        with self._lock:
            self._readers.pop(ref.name, None)

    def _write_record(self, spec: JobSpec, client: AgentClient) -> None:
        records.write(Record(
            ref=str(JobRef(self.name, spec.name)), name=spec.name, created=time.time(), spec=spec,
            agent_pid=client.pid, agent_start=client.start_time, agent_socket=client.address,
            kernel_pid=os.getpid(), detach=spec.policy.detach,
        ))  # fmt: skip

    def _wake_all(self) -> None:
        """Have all jobs looked at: the agent has ended, and jobs may have ended with it."""
        with self._lock:
            running = list(self._readers)
        for job in running:
            self._notify(JobRef(self.name, job))

    def _attend(self, ref: JobRef) -> float:
        client = self._client
        own = client is not None and client.alive and client.pid == self._reader(ref).record().agent_pid
        return _OWN_POLL_S if own else _FOREIGN_POLL_S


@functools.cache
def shared() -> LocalBackend:
    """The backend of this process: one agent serves all its jobs."""
    return LocalBackend()


def _order(spec: JobSpec, folder: str, key: bytes, note: str) -> Order:
    inherited = process_state.capture(cuda=spec.cuda)
    environment = dict(inherited.environment)
    if not spec.cuda:
        # Ranks then hide GPUs from themselves, unless the call names those they see.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment |= {**dict(spec.environment), **unseal(key, spec.sealed)}
    return order_of(
        spec,
        folder=folder,
        store=str(records.blobs_dir()),
        key=key.hex(),
        note=note,
        process=dataclasses.replace(inherited, environment=tuple(sorted(environment.items()))),
    )


def _plan_text(spec: JobSpec) -> str:
    """A specification for people, as YAML."""
    world = spec.topology.number_of_processes
    policy = spec.policy
    training = spec.kind == "training"
    lines = [
        f"name: {spec.name}",
        "backend: local",
        f"runs: {json.dumps(spec.label)}",
        f"ranks: {world}",
        f"device: {'cuda, one GPU a rank' if spec.cuda else 'cpu'}",
        f"threads a rank: {spec.threads or 'cores // ranks'}",
        f"seed: {'random' if spec.seed is None else spec.seed}",
        f"snapshot: {spec.snapshot} # {spec.snapshot_bytes:,} bytes in {len(spec.blobs)} blobs",
        *([f"strategy: {type(spec.strategy).__name__} {json.dumps(encode(spec.strategy))}"] * training),
        f"time limits: {json.dumps({f: getattr(policy, f) for f in ('timeout_s', 'stall_warn_s', 'stall_timeout_s', 'grace_s')})}",
        f"outlives the notebook: {'yes' if policy.detach else 'no'}",
        *([f"restarts after a lost rank: {policy.max_restarts}"] if policy.max_restarts else []),
        "environment added:" if spec.environment or spec.secrets else "environment added: none",
        *(f"  {name}: {json.dumps(value)}" for name, value in spec.environment),
        *(f"  {name}: # sealed" for name, _ in spec.secrets),
        "folders:" if spec.volumes else "folders: those of this machine",
        *(f"  {volume.mount_path}: {json.dumps(volume.source)}" for volume in spec.volumes),
        "processes:",
        "  - python -P -m kale_dist.worker agent # one for all jobs of this notebook",
        *(f"  - env RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={world} python # forked ahead" for rank in range(world)),
    ]
    return "\n".join(lines) + "\n"
