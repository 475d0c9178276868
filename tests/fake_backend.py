"""For tests of code that uses kale_dist, and of backends: a backend without processes, and tests for every backend.

`FakeBackend` goes where a backend's name goes: `kd.launch(fn, on=FakeBackend())`. `BackendConformance` is a set of
pytest tests; a backend's own tests inherit from it. Blobs in memory are `blobs.MemoryStore`.
"""

# ruff: noqa: PT017 - the suite asserts as tests do, its tests' names are sentences, and pytest is not needed

from __future__ import annotations

import collections
import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kale_dist.errors import ConfigError, JobExistsError, JobNotFoundError
from kale_dist.job import records
from kale_dist.job.backend import Backend, JobRef, Plan
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.status import JobStatus, ReplicaStatus, reduce_events
from kale_dist.snapshot import outcome
from kale_dist.snapshot.reducers import References
from kale_dist.wire import FailureCause, JobFiles, LogLine, RankStateName, StateName, Stream
from kale_dist.wire.blobs import MemoryStore

__all__ = ["BackendConformance", "FakeBackend", "FakeRun", "MemoryStore"]


class FakeRun:
    """One job of a `FakeBackend`, for its script to act on.

    Args:
        ref: The job.
        spec: What was submitted.
        key: The job's secret bytes.
        files: The job's files.
    """

    def __init__(self, ref: JobRef, spec: JobSpec, key: bytes, files: JobFiles) -> None:
        self.spec = spec
        self.cancelled = threading.Event()
        """Set by `cancel`: a script that waits for it ends soon after."""
        self._key = key
        self._files = files
        self._changed = threading.Condition()
        self._lines: list[LogLine] = []
        self._status = JobStatus(
            ref=str(ref),
            created=time.time(),
            replicas=tuple(ReplicaStatus(rank=rank) for rank in range(spec.topology.number_of_processes)),
        )

    @property
    def status(self) -> JobStatus:
        """What is known now."""
        return self._status

    def event(self, kind: str, **fields: Any) -> None:
        """Let an event happen; fields as `contract` lists them."""
        with self._changed:
            self._status = reduce_events(self._status, [{"event": kind, "time": time.time(), "attempt": 0, **fields}])
            self._changed.notify_all()

    def line(self, rank: int | None, text: str) -> None:
        """Let a rank print a line; None for the agent."""
        stream = Stream.AGENT if rank is None else Stream.STDOUT
        with self._changed:
            made = LogLine(sequence=len(self._lines), time=time.time(), attempt=0, rank=rank, stream=stream, text=text)
            self._lines.append(made)
            self._changed.notify_all()

    def returns(self, rank: int, value: Any) -> None:
        """Let a rank return a value."""
        outcome.write_success(
            self._files.outcome(0, rank),
            signer=outcome.Signer(key=self._key, job=self.spec.name, attempt=0, rank=rank), value=value, references=References(),
        )  # fmt: skip
        self.event("outcome", rank=rank, ok=True)
        self.event("rank", rank=rank, state=RankStateName.SUCCEEDED, exit_code=0)

    def raises(self, rank: int, error: BaseException) -> None:
        """Let a rank fail with an exception."""
        outcome.write_failure(
            self._files.outcome(0, rank),
            signer=outcome.Signer(key=self._key, job=self.spec.name, attempt=0, rank=rank), error=error, references=References(),
        )  # fmt: skip
        name = type(error).__name__
        self.event("outcome", rank=rank, ok=False, error_type=name, error_text=str(error))
        self.event("rank", rank=rank, state=RankStateName.FAILED, exit_code=1)
        reason = f"Rank {rank} raised {name}: {error}"
        self.event("state", state=StateName.FAILED, reason=reason, cause=FailureCause.ERROR)

    def lines(self, wanted: Callable[[LogLine], bool], tail: int | None, *, follow: bool) -> Iterator[LogLine]:
        """The wanted lines, only the last `tail` of those so far; with `follow` until the end."""
        read = 0
        if tail is not None:
            read = len(self._lines)
            yield from collections.deque(filter(wanted, self._lines[:read]), maxlen=tail)
        while follow or tail is None:
            with self._changed:
                final = self._status.is_final or not follow
                fresh = self._lines[read:]
                if not fresh and not final:
                    self._changed.wait(0.1)
            yield from filter(wanted, fresh)
            read += len(fresh)
            if final:
                return

    def run(self, script: Callable[[FakeRun], None]) -> None:
        """Run a script to its end, and end the job if it has not done so itself."""
        self.event("state", state=StateName.RUNNING)
        try:
            script(self)
        except Exception as error:
            self.raises(0, error)
        if self.cancelled.is_set():
            self.event("state", state=StateName.CANCELLED, reason="Cancelled", cause=FailureCause.USER)
        self.event("state", state=StateName.SUCCEEDED)


class FakeBackend(Backend):
    """A backend whose jobs are scripts in threads of this process.

    Args:
        script: What every job does; None returns None on every rank.
        scripts: Scripts for some jobs, by label (the function's name, or `train Net`).
    """

    def __init__(
        self,
        script: Callable[[FakeRun], None] | None = None,
        scripts: Mapping[str, Callable[[FakeRun], None]] | None = None,
    ) -> None:
        self._script = script or _return_nothing
        self._scripts = dict(scripts or {})
        self._runs: dict[JobRef, FakeRun] = {}

    @property
    def name(self) -> str:
        """The word in front of its references."""
        return "fake"

    def plan(self, spec: JobSpec) -> Plan:
        """The spec as text."""
        return Plan(backend=self.name, spec=spec, text=f"{spec}\n")

    def submit(self, spec: JobSpec, key: bytes) -> JobRef:
        """Start the script."""
        ref = JobRef(self.name, spec.name)
        run = FakeRun(ref, spec, key, records.create(ref.record_name, key))
        self._runs[ref] = run
        threading.Thread(target=run.run, args=(self._scripts.get(spec.label, self._script),), daemon=True).start()
        return ref

    def status(self, ref: JobRef) -> JobStatus:
        """What the script's events add up to."""
        return self._run(ref).status

    def logs(
        self,
        ref: JobRef,
        *,
        follow: bool = False,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        on_status: Callable[[JobStatus], None] | None = None,
    ) -> Iterator[LogLine]:
        """What the script printed."""
        del on_status
        return self._run(ref).lines(lambda line: ranks is None or line.rank in ranks, tail, follow=follow)

    def cancel(self, ref: JobRef, *, grace_s: float = 5.0, save: bool = True) -> None:
        """Tell the script to end."""
        del grace_s
        self._run(ref).cancelled.set()

    def delete(self, ref: JobRef) -> None:
        """Cancel and forget."""
        self.cancel(ref)
        del self._runs[ref]
        records.delete(ref.record_name)

    def list(self) -> Sequence[JobRef]:
        """All jobs, oldest first."""
        return tuple(self._runs)

    def _run(self, ref: JobRef) -> FakeRun:
        run = self._runs.get(ref)
        if run is None:
            raise JobNotFoundError(f"There is no job {ref}")
        return run


def _return_nothing(run: FakeRun) -> None:
    for rank in range(run.spec.topology.number_of_processes):
        run.returns(rank, None)


class BackendConformance:
    """What every backend keeps. Inherit, and give two fixtures.

    `backend` is a backend without jobs; `spec_for(behaviour)` makes a new specification of two ranks, where the
    behaviour is `"succeed"` (each rank prints `rank N of 2`), `"fail"` (rank 1 raises `ValueError("boom")`), `"exit"`
    (rank 1 ends with exit code 3) or `"hang"` (prints `ready` and waits until it is cancelled).
    """

    timeout_s = 60.0
    """How long a job may take."""

    def test_a_job_goes_from_submit_to_success(self, backend: Any, spec_for: Any) -> None:
        ref = self._submit(backend, spec_for("succeed"))
        assert ref.backend == backend.name
        status = self._wait(backend, ref)
        assert status.state is StateName.SUCCEEDED, status
        assert status.ref == str(ref)
        assert [replica.rank for replica in status.replicas] == [0, 1]

    def test_logs_hold_every_rank_and_end_with_the_job(self, backend: Any, spec_for: Any) -> None:
        ref = self._submit(backend, spec_for("succeed"))
        texts = {(line.rank, line.text) for line in backend.logs(ref, follow=True)}
        assert {(0, "rank 0 of 2"), (1, "rank 1 of 2")} <= texts, (texts, backend.status(ref))
        assert backend.status(ref).is_final
        assert [line.text for line in backend.logs(ref, ranks=[1]) if "rank" in line.text] == ["rank 1 of 2"]
        whole = list(backend.logs(ref))
        assert list(backend.logs(ref, tail=1)) == list(backend.logs(ref, tail=1, follow=True)) == whole[-1:]
        assert list(backend.logs(ref, tail=0)) == []
        assert list(backend.logs(ref, tail=1000)) == whole

    def test_an_exception_and_an_exit_code_fail_the_job(self, backend: Any, spec_for: Any) -> None:
        for behaviour, cause in (("fail", FailureCause.ERROR), ("exit", FailureCause.DIED)):
            status = self._wait(backend, self._submit(backend, spec_for(behaviour)))
            assert (status.state, status.cause, status.failed_rank) == (StateName.FAILED, cause, 1), status
            assert status.reason

    def test_only_a_lost_rank_is_started_again(self, backend: Any, spec_for: Any) -> None:
        for behaviour, attempt in (("exit", 1), ("fail", 0)):
            spec = spec_for(behaviour)
            spec = dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, max_restarts=1))
            status = self._wait(backend, self._submit(backend, spec))
            assert (status.state, status.attempt, status.failed_rank) == (StateName.FAILED, attempt, 1), status

    def test_cancelling_twice_is_fine_and_after_the_end_too(self, backend: Any, spec_for: Any) -> None:
        ref = self._submit(backend, spec_for("hang"))
        assert any(line.text == "ready" for line in backend.logs(ref, follow=True)), backend.status(ref)
        backend.cancel(ref, grace_s=0.5)
        with contextlib.suppress(JobNotFoundError):
            backend.cancel(ref, grace_s=0.5)
        status = self._wait(backend, ref)
        assert (status.state, status.cause) == (StateName.CANCELLED, FailureCause.USER)
        backend.cancel(ref)
        assert backend.status(ref).state is StateName.CANCELLED

    def test_a_job_that_is_not_there_is_not_found(self, backend: Any) -> None:
        ref = JobRef(backend.name, "never-submitted")
        for call in (
            backend.status,
            lambda ref: list(backend.logs(ref)),
            lambda ref: list(backend.logs(ref, follow=True)),
            backend.cancel,
            backend.delete,
        ):
            try:
                call(ref)
            except JobNotFoundError as error:
                assert "never-submitted" in str(error)
            else:
                raise AssertionError("a job that is not there was found")

    def test_a_name_is_taken_until_its_job_is_deleted(self, backend: Any, spec_for: Any) -> None:
        spec = spec_for("succeed")
        ref = self._submit(backend, spec)
        try:
            self._submit(backend, spec)
        except JobExistsError as error:
            assert spec.name in str(error)
        else:
            raise AssertionError("two jobs got one name")
        self._wait(backend, ref)
        backend.delete(ref)

    def test_deleting_a_running_job_ends_it_and_leaves_nothing(self, backend: Any, spec_for: Any) -> None:
        spec = spec_for("hang")
        ref = self._submit(backend, spec)
        assert ref in backend.list()
        backend.delete(ref)
        assert ref not in backend.list()
        try:
            backend.status(ref)
        except JobNotFoundError:
            pass
        else:
            raise AssertionError("a deleted job was found")

    def test_jobs_are_listed_oldest_first(self, backend: Any, spec_for: Any) -> None:
        refs = [self._submit(backend, spec_for("succeed")) for _ in range(2)]
        listed = [ref for ref in backend.list() if ref in refs]
        assert listed == refs

    def test_equal_specs_make_equal_plans(self, backend: Any, spec_for: Any) -> None:
        spec = spec_for("succeed")
        again = JobSpec.from_json(spec.to_json())
        assert again == spec
        assert backend.plan(spec) == backend.plan(again)
        assert spec.name in str(backend.plan(spec))
        assert isinstance(backend, Backend)

    def test_a_bad_name_never_reaches_the_backend(self, spec_for: Any) -> None:
        spec = spec_for("succeed")
        for name in ("../escape", "UPPER", "", "a" * 64, "-dash", "dot.dot", "a/b", "ü"):
            try:
                dataclasses.replace(spec, name=name)
            except ConfigError as error:
                assert error.argument == "name"
            else:
                raise AssertionError(f"{name!r} was accepted")

    def _submit(self, backend: Any, spec: JobSpec) -> JobRef:
        ref: JobRef = backend.submit(spec, secrets.token_bytes(32))
        return ref

    def _wait(self, backend: Any, ref: JobRef) -> JobStatus:
        deadline = time.monotonic() + self.timeout_s
        while True:
            status: JobStatus = backend.status(ref)
            if status.is_final:
                return status
            assert time.monotonic() < deadline, f"{ref} did not end: {status}"
            time.sleep(0.02)
