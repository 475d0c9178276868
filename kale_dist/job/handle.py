"""The user's handle on a job: a future with a log, metrics and, for training, the model."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import os
import pathlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kale_dist import errors, trackers
from kale_dist.job import debugging, interrupts, job_watch, weights
from kale_dist.job.backend import Backend, JobRef, PlaceEvent
from kale_dist.job.outcomes import OutcomeReader
from kale_dist.job.spec.checks import whole
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.status import JobStatus
from kale_dist.snapshot.folders import Folder, holds_folder
from kale_dist.wire import MEASURED_SOURCES, JobFiles, LogLine, MetricRow, RankStateName, StateName
from kale_dist.wire.blobs import fresh
from kale_dist.wording import no_attribute

if TYPE_CHECKING:
    import torch

R = TypeVar("R")

_QUICK_S = 1.0
"""A cell of a notebook with a person that waits for a job for longer shows the job below it."""

_SHOWN_LINES = 1000
"""A printed log shows its last lines: a notebook with a million of them would not open again."""

_KALE_STATES = {
    StateName.PENDING: "Created",
    StateName.STARTING: "Created",
    StateName.RUNNING: "Running",
    StateName.SUCCEEDED: "Succeeded",
    StateName.FAILED: "Failed",
    StateName.CANCELLED: "Failed",
}
_COUNTED = {RankStateName.SUCCEEDED: "succeeded", RankStateName.FAILED: "failed"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """The parts of a job that only the library itself uses."""

    files: JobFiles
    """The job's files on this machine."""
    key: bytes | None
    """The job's secret. It names the job for good: a name may be used again after a deletion."""
    targets: weights.Targets | None
    """The notebook's objects that the job trains; None if they are not known here."""
    after_wait: list[Callable[[], None]]
    """Called in the caller's thread whenever a wait for the job has ended, before it returns."""
    plan: Callable[[], str]
    """What was submitted, as text."""
    checkpoint: Callable[[], pathlib.Path]
    """The file of the last checkpoint, fetched if it is elsewhere."""
    model_state: Callable[[], dict[str, Any]]
    """The trained weights of a job that has succeeded; the notebook's model is left alone."""
    reasons: job_watch.Reasons
    """Prints why the job waits."""
    lines: Callable[[], Iterator[LogLine]]
    """The log's lines until the job has ended; unlike `logs`, it leaves it to the caller what an interrupt does."""


class Job(Generic[R]):
    """A job, running or ended. Made by `distribute`, `launch`, `attach` and `jobs`, not by hand.

    Weights are written into the notebook's own model, optimizer and scheduler by the first `wait`, `result` or `model`
    after the job's success, in the thread that calls it; never before, never twice, never from a failed job.

    Args:
        backend: Where it runs.
        ref: Its reference there.
        spec: What was submitted.
        outcomes: Reads what its ranks return.
        targets: The notebook's objects that it trains; None after `attach` from another process.
        display: Shows a job as live output of a cell; `as_object` returns what marimo shows.
        again: Submits the same call as a new job, which resumes from a checkpoint if it gets one.
        track: Begins or continues to write its metrics to trackers.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        ref: JobRef,
        spec: JobSpec,
        outcomes: OutcomeReader,
        targets: weights.Targets | None = None,
        display: Callable[..., Any],
        again: Callable[[Job[R], pathlib.Path | None], Job[R]],
        track: Callable[[Job[R], Sequence[trackers.Tracker]], None],
    ) -> None:
        self._backend = backend
        self._ref = ref
        self._spec = spec
        self._outcomes = outcomes
        self._loading = threading.RLock()
        self._trained: weights.TrainedObjects | None = None
        self._has_put = False
        """Whether what the ranks have changed, besides weights, is in the notebook's objects."""
        self._display = display
        self._cell_of_card: int | None = None
        self._again = again
        self._track = track
        self._watcher = job_watch.watcher(backend)
        self._prompts = debugging.Prompts(backend, ref, "cell" if spec.kind == "live" else "job")
        self._inside = Inside(
            files=outcomes.files,
            key=outcomes.key,
            targets=targets,
            after_wait=[],
            plan=lambda: backend.plan(spec).text,
            checkpoint=self._checkpoint,
            model_state=lambda: outcomes.model_state(backend.status(ref).attempt),
            reasons=job_watch.Reasons(backend, ref),
            lines=functools.partial(backend.logs, ref, follow=True, on_status=self._prompts.open),
        )

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def ref(self) -> str:
        """What `attach` takes: `local://name`."""
        return str(self._ref)

    @property
    def name(self) -> str:
        """The job's name."""
        return self._spec.name

    @property
    def spec(self) -> JobSpec:
        """What was submitted."""
        return self._spec

    @property
    def status(self) -> JobStatus:
        """The status now. Does not wait.

        Raises:
            JobNotFoundError: The job was deleted.
        """
        return self._backend.status(self._ref)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What the ranks reported so far, one row each: `pandas.DataFrame(job.metrics)` makes a table.

        A row has `time` (seconds since 1970), `epoch` and `step` (or None), `rank` (None for an average over ranks),
        `source` (`train`, `eval`, `averaged`, `report`, ...) and the reported names. Rows of `train` also have the learning
        rate (`lr`), `samples_per_s` and, of several processes, `bytes_sent` and `collective_s` (monitoring.md). Where your step
        began again within an epoch, its row has `from_batch`, the first batch that its numbers are of.
        """
        rows: list[dict[str, Any]] = []
        measured: dict[str, Any] = {}
        for row in self.status.metrics:
            place = _place(row)
            place |= {"from_batch": row.from_batch} if row.from_batch else {}
            # What was measured of a training step is sent just before what the step returned, if it returned something.
            is_measured = row.source in MEASURED_SOURCES
            is_of_same_place = measured and (row.epoch, row.step) == (measured["epoch"], measured["step"])
            if measured and not (is_of_same_place and (is_measured or row.source.split()[0] == "train")):
                rows.append(measured)
                measured = {}
            if is_measured:
                measured |= place | dict(row.values) | {"source": "train"}
            else:
                rows.append(measured | place | dict(row.values))
                measured = {}
        return Rows([*rows, measured] if measured and self.done() else rows)

    @property
    def usage(self) -> list[dict[str, Any]]:
        """What each rank used and waited for so far, as rows like those of `metrics`, of the source `usage`.

        They have what is known of `memory_gib`, `gpu_percent`, `gpu_memory_gib`, `data_percent` and `exchange_percent` (shares
        of the time in which the rank waited for data, and in the exchange with others) and `samples_per_s` of the rank: the most
        memory and the means since its row before. A rank has at most 600 rows, with ever longer distances, unless the job's
        first pod was lost.
        """
        return [_place(row) | dict(row.values) for moment in self.status.history for row in moment.rows()]

    def done(self) -> bool:
        """Whether the job has ended, well or badly."""
        return self.status.is_final

    # -- waiting and results ------------------------------------------------------------------------------------------

    @errors.short_refusals
    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait for the job's end. After a success the notebook's model has its weights.

        A failed job does not raise here: one line with the reason is printed, and `result()` raises. Why the job waits
        for its pods is printed on stderr, each reason once, unless a widget shows it.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Returns:
            The final status.

        Raises:
            WaitTimeoutError: The time was over first; the job keeps running.
            KeyboardInterrupt: In a notebook the job keeps running, and a second interrupt within 10 s cancels it;
                elsewhere the first one does.
        """
        status = self._wait(timeout)
        if status.state is StateName.SUCCEEDED:
            self._fill_notebook()
        else:
            reason = status.reason.rstrip(".")
            print(f"{self.ref} {status.state.value}: {reason}. job.result() raises the error.")  # noqa: T201 - for the user
        return status

    @errors.short_refusals
    def result(self, timeout: float | None = None) -> R:
        """What rank 0 returned: of `launch`, the function's value; of `distribute`, a `TrainingResult`.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Raises:
            JobFailedError: A rank failed; the cause is its own exception.
            JobTimeoutError: The job ran into its time limit or stalled.
            JobCancelledError: It was cancelled.
            WaitTimeoutError: The time was over first; the job runs on.
            ResultUnavailableError: The result cannot be read here.
        """
        self._succeed(timeout)
        value: R = self._outcomes.value(0, self.status.attempt)
        return value

    @errors.short_refusals
    def results(self, timeout: float | None = None) -> list[R]:
        """What every rank returned, by rank; None for one that was lost and that the others could do without.

        Raises as `result` does.
        """
        self._succeed(timeout)
        status = self.status
        return [
            None if replica.state is RankStateName.LOST else self._outcomes.value(replica.rank, status.attempt)  # type: ignore[misc]
            for replica in status.replicas
        ]

    @errors.short_refusals
    def exception(self, timeout: float | None = None) -> errors.JobError | None:
        """The error that `result` would raise, or None after a success. Waits as `result` does.

        Raises:
            WaitTimeoutError: The time was over first; the job runs on.
        """
        status = self._wait(timeout)
        return None if status.state is StateName.SUCCEEDED else self._outcomes.error(status)

    # -- training -----------------------------------------------------------------------------------------------------

    @property
    @errors.short_refusals
    def model(self) -> torch.nn.Module:
        """The notebook's own model with the trained weights; after `attach` elsewhere, one built from the snapshot.

        Waits for the job's end. Where the module's structure changed in the rank, it is a new object and a warning
        gives the reason. Of `launch`, the model among the function's arguments; several are a `ModuleList` in their order.

        Raises:
            JobError: As `result`, and `ResultUnavailableError` if the function of `launch` got no model.
        """
        model: torch.nn.Module = self._trained_objects().model
        return model

    @property
    @errors.short_refusals
    def optimizer(self) -> torch.optim.Optimizer:
        """The notebook's own optimizer with its state after training. Waits and raises as `model` does.

        Raises:
            ResultUnavailableError: `model` is a new object, whose parameters no optimizer has yet, or no process had all
                of the optimizer's state.
        """
        self._check_trains()
        self._succeed(None)
        if getattr(self._outcomes.trained(self.status.attempt), "parts", ""):
            problem = f"No process had all of the optimizer's state of {self.ref}: it is in parts, as its weights are"
            raise errors.ResultUnavailableError(f"{problem}. Another job continues with it by resume_from=", self.ref)
        optimizer: torch.optim.Optimizer | None = self._trained_objects().optimizer
        if optimizer is None:
            raise errors.ResultUnavailableError(
                f"The model of {self.ref} is a new object, whose parameters no optimizer has yet. Make one from "
                "job.model.parameters() and give it job.result().optimizer_state",
                self.ref,
            )
        return optimizer

    @errors.short_refusals
    def state_dict(self, *, partial: bool = False) -> dict[str, Any]:
        """This job's weights, even if the model has changed since.

        Of `launch`, those of the model among the function's arguments; of several, `0.` and `1.` come before the names.

        Args:
            partial: Do not wait: take the last checkpoint of a training that runs, has failed, or ended with a loss that is nan.

        Returns:
            Names to tensors of the caller's own, on the CPU.

        Raises:
            ResultUnavailableError: There is no checkpoint yet, or nothing was trained.
            JobError: As `result`, unless `partial`.
        """
        is_partial = partial and ((status := self.status).state is not StateName.SUCCEEDED or status.is_nan)
        if is_partial or self._spec.kind == "live":
            self._check_trains()
        if is_partial:
            return self._outcomes.checkpoint_state(self._checkpoint())
        self._succeed(None)
        return self._outcomes.model_state(self.status.attempt)

    @errors.short_refusals
    def best_state_dict(self, *, partial: bool = False) -> dict[str, Any]:
        """The weights of the best epoch, which `kd.callbacks.ModelCheckpoint` has kept; `job.result().best_epoch` names it.

        Args:
            partial: Do not wait: the best up to the last checkpoint of a job that runs or has failed.

        Returns:
            Names to tensors of the caller's own, on the CPU.

        Raises:
            ResultUnavailableError: There is none.
            JobError: As `result`, unless `partial`.
        """
        self._check_trains()
        if partial and self.status.state is not StateName.SUCCEEDED:
            return self._outcomes.checkpoint_state(self._checkpoint(), best=True)
        self._succeed(None)
        return self._outcomes.kept_state("best_state", self.status.attempt)

    @errors.short_refusals
    def averaged_state_dict(self) -> dict[str, Any]:
        """The averaged weights of `kd.callbacks.EMA` or `SWA`. Waits for the job's end.

        Returns:
            Names to tensors of the caller's own, on the CPU.

        Raises:
            ResultUnavailableError: There are none.
            JobError: As `result`.
        """
        self._check_trains()
        self._succeed(None)
        return self._outcomes.kept_state("averaged_state", self.status.attempt)

    @errors.short_refusals
    def save(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        partial: bool = False,
        value: bool = False,
        replace: bool = True,
    ) -> pathlib.Path:
        """Write what was trained to a file: the weights, as `torch.save` writes a `state_dict`.

        Of `launch` without a model among the function's arguments, rank 0's value; of a `Folder`, a copy.

        Args:
            path: The file; None for `model.pt`, or `result.pt` for a value, in the working folder. It is replaced at once, or
                left as it is. The copy of a folder must not exist yet.
            replace: Whether a file that exists may be replaced.
            partial: Do not wait: the last checkpoint of a training that runs or has failed.
            value: Whether to write what rank 0 returned although there are weights.

        Returns:
            The absolute path.

        Raises:
            ConfigError: There is no such folder, or the file, or a returned folder's copy, exists already.
            JobError: As `result` and `state_dict`; the value has folders in it.
        """
        import torch

        if partial:
            self._check_trains()
        target = None
        if path is not None and (self._spec.kind == "training" or not pathlib.Path(path).expanduser().is_dir()):
            target = _writable(path, replace=replace)
        has_weights = not value and (self._spec.kind == "training" or self._has_models())
        found = self.state_dict(partial=partial) if has_weights else self.result()
        if found is None:
            raise errors.ResultUnavailableError(f"Rank 0 of {self.ref} returned nothing that could be saved", self.ref)
        if isinstance(found, Folder):
            return found.save(path or found.path.name)
        if holds_folder(found):
            problem = f"Rank 0 of {self.ref} returned a value with folders in it: a file would only have their paths"
            remedy = "Save each folder of job.result() with .save(path), and the rest by yourself"
            raise errors.ResultUnavailableError(f"{problem}. {remedy}", self.ref)
        target = target or _writable(path or ("model.pt" if has_weights else "result.pt"), replace=replace)
        try:
            with fresh(target) as temporary:
                torch.save(found, temporary)
        except OSError as error:
            raise errors.StoreError(f"{target} cannot be written: {error.strerror}") from error
        return target

    # -- the log ------------------------------------------------------------------------------------------------------

    def logs(self, ranks: Sequence[int] | int | None = None, *, follow: bool = False, tail: int | None = None) -> Log:
        """Lines of the ranks' output, from the first; `str(line)` has the rank in front, and printing all shows them.

        Args:
            ranks: Only these ranks; None for all, and the agent's lines.
            follow: Whether to wait for more until the job has ended.
            tail: Only the last lines of those there are now, this many (and with `follow` all that come later).

        Returns:
            Lines in the order in which they were written.

        Raises:
            ConfigError: The job has no such rank, or `tail` is no number of lines.
            JobNotFoundError: The job was deleted.
        """
        wanted = check_lines(ranks, tail, self._spec.topology.number_of_processes)
        read = functools.partial(self._backend.logs, self._ref, ranks=wanted, tail=tail)
        return Log(self._passed_on(read(follow=follow, on_status=self._prompts.open)), read)

    @errors.short_refusals
    def stream_logs(self) -> None:
        """Print the log until the job has ended, each line after its rank, and a line for the metrics of each epoch."""
        from kale_dist.job.view import plain

        printing = threading.Lock()
        shown = 0

        def log(line: object) -> None:
            # In one piece: another thread prints, too.
            print(f"{line}\n", end="", flush=True)  # noqa: T201 - this is what it is for

        def show(status: JobStatus) -> None:
            nonlocal shown
            with printing:
                for row in status.metrics[shown:]:
                    if row.source in ("train", "eval", "averaged"):
                        log(plain.metrics_line(row))
                # Fewer than before where a restart has taken some back.
                shown = len(status.metrics)

        unsubscribe = self.subscribe(show)
        try:
            with self._interruptible(), self._inside.reasons.printed():
                for line in self._inside.lines():
                    log(line)
            show(self.status)
        finally:
            unsubscribe()

    def events(self) -> list[PlaceEvent]:
        """Return the cluster's events of the job and its pods, oldest first: why they wait, where they run. Elsewhere none.

        Raises:
            JobNotFoundError: The job was deleted.
            BackendError: You may not read events.
        """
        return list(self._backend.events(self._ref))

    def track(self, track: Any) -> None:
        """Write what the job has reported, and what it reports from now on, to experiment trackers.

        One that has tracked the job before, as by `distribute(..., track=...)`, continues where it stopped.

        Args:
            track: As for `distribute`.

        Raises:
            ConfigError: There is no such tracker, or its package is not installed here.
        """
        self._track(self, trackers.resolve(track))

    def debug(self, rank: int | None = None) -> None:
        """Debug the ranks that wait in `breakpoint()`: pdb's prompt opens here. Returns when they have left it.

        A cell that waits for the job opens the prompt by itself. An interrupt leaves the prompt, and the rank waits on. Where
        standard input is a pipe or a file, its lines are typed, and its end means to continue.

        Args:
            rank: Only this rank; None for all that wait, one after the other.

        Raises:
            ConfigError: The job has no such rank, or nothing can be typed here.
            BackendError: No such rank waits in `breakpoint()`.
        """
        ranks = check_lines(rank, None, self._spec.topology.number_of_processes)
        if not interrupts.can_read():
            problem = "nothing can be typed here: there is no standard input, and no cell with a person at it"
            raise errors.ConfigError("debug", problem, f"Type in a terminal: kale-dist debug {self.ref}")
        status = self.status
        if not any(ranks is None or one.rank in ranks for one in status.at_breakpoints):
            who = f"No rank of {self.ref} waits" if rank is None else f"Rank {rank} of {self.ref} does not wait"
            raise errors.BackendError(f"{who} in breakpoint() now: {status.state.value}")
        with contextlib.suppress(KeyboardInterrupt):
            self._prompts.open(status, ranks, is_wait=False)

    # -- ending -------------------------------------------------------------------------------------------------------

    def cancel(self, *, save: bool = True) -> None:
        """End the job without waiting for it. A job that has ended is left as it is.

        Args:
            save: Whether ranks that can save first, in the `grace_s` of the call. A second cancel ends them at once.
        """
        self._backend.cancel(self._ref, save=save)
        self._prompts.close()

    def retry(self, *, resume: bool = False) -> Job[R]:
        """Submit the same call again with the same snapshot, not with what the notebook has changed since.

        Args:
            resume: Whether the training resumes from the last checkpoint, instead of from the beginning.

        Returns:
            The new job. This one is left as it is.

        Raises:
            BackendError: The job still runs, or it was submitted from another machine.
            ResultUnavailableError: There is no checkpoint to resume from, or nothing left to train.
        """
        status = self.status
        if not status.is_final:
            raise errors.BackendError(
                f"{self.ref} has not ended yet. Cancel it first, or call distribute() or launch() again"
            )
        if not resume:
            return self._again(self, None)
        self._check_trains()
        if status.state is StateName.SUCCEEDED:
            remedy = "To train more epochs, call distribute(..., epochs=..., resume_from=job)"
            raise errors.ResultUnavailableError(f"{self.ref} has nothing left to do. {remedy}", self.ref)
        return self._again(self, self._checkpoint())

    def delete(self) -> None:
        """Cancel if need be; remove log, results and the parts of its snapshot that no other job needs. A store keeps its files."""
        self._backend.delete(self._ref)

    # -- Kale's names -------------------------------------------------------------------------------------------------

    def get(self) -> dict[str, Any]:
        """The job as its cluster has it: the custom resource. Elsewhere an equal one is made of what is known.

        `job.get()["status"]["replicaStatuses"]["Master"]` has `active`, `succeeded` and `failed` on every backend.

        Raises:
            JobNotFoundError: The job was deleted.
        """
        return dict(self._backend.describe(self._ref)) or resource(self._spec, self.status)

    def get_job_status(self) -> str:
        """One of `Created`, `Running`, `Restarting`, `Succeeded`, `Failed`; empty if there is no such job any more."""
        try:
            status = self.status
        except errors.JobNotFoundError:
            return ""
        return state_of(status)

    # -- display ------------------------------------------------------------------------------------------------------

    def subscribe(self, callback: Callable[[JobStatus], None]) -> Callable[[], None]:
        """Call `callback` with every new status, in a thread of the library. Returns a function that ends the subscription."""
        return self._watcher.subscribe(self._ref, callback)

    def __getattr__(self, name: str) -> Any:
        # A property whose own error is an AttributeError comes here, too.
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)
        raise no_attribute("a job", name, dir(type(self)))

    def __repr__(self) -> str:
        """One line: reference, state, and the reason if there is one."""
        try:
            status = self.status
        except errors.JobNotFoundError:
            return f"<Job {self.ref} deleted>"
        return f"<Job {self.ref} {status.state.value}{': ' + status.reason if status.reason else ''}>"

    def _ipython_display_(self) -> None:
        """Show the job below the cell, kept up to date while it runs."""
        if self._cell_of_card is None or self._cell_of_card != interrupts.running_cell():
            self._cell_of_card = interrupts.running_cell()
            self._display(self)

    def _display_(self) -> Any:
        """What marimo shows for the job."""
        return self._display(self, as_object=True)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """A picture of the job as it is now, as text and as HTML."""
        from kale_dist.job import view

        try:
            status = self.status
        except errors.JobNotFoundError:
            return {"text/plain": repr(self)}
        tail, now = list(self._backend.logs(self._ref, tail=view.LOG_LINES)), time.time()
        return {"text/plain": view.text(status, tail, now), "text/html": view.html(status, tail, now)}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _interruptible(self) -> contextlib.AbstractContextManager[None]:
        return interrupts.passing_on(self.ref, self.cancel)

    def _wait(self, timeout: float | None) -> JobStatus:
        job_watch.check_timeout(timeout)
        try:
            with self._interruptible():
                is_long = timeout is None or timeout > _QUICK_S
                in_cell = interrupts.is_interactive() and interrupts.running_cell() is not None
                if is_long and in_cell and self._cell_of_card is None:
                    with contextlib.suppress(errors.WaitTimeoutError):
                        status = self._watcher.wait(self._ref, _QUICK_S, self._attend)
                        # Its card has the line and the variables.
                        if status.state is not StateName.FAILED:
                            return status
                    timeout = None if timeout is None else timeout - _QUICK_S
                    self._ipython_display_()
                return self._watcher.wait(self._ref, timeout, self._attend)
        finally:
            with contextlib.suppress(errors.KaleDistError):
                self._inside.reasons.print(self.status)
            for callback in tuple(self._inside.after_wait):
                with contextlib.suppress(Exception):
                    callback()

    def _attend(self, status: JobStatus) -> None:
        """Do what a wait does at each status: print why the job waits, open the prompts of ranks at breakpoints."""
        self._inside.reasons.print(status)
        self._prompts.open(status)

    def _succeed(self, timeout: float | None) -> None:
        """Wait for a success, or raise what stood in its way."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        self._fill_notebook()

    def _check_trains(self) -> None:
        if self._spec.kind != "training":
            raise errors.ResultUnavailableError(
                f"{self.ref} was not started by distribute(), which alone keeps an optimizer, checkpoints and best weights. What "
                "a function of launch() returned is in job.result()",
                self.ref,
            )

    def _checkpoint(self) -> pathlib.Path:
        self._check_trains()
        status = self.status
        succeeded = status.attempt if status.state is StateName.SUCCEEDED else None
        return self._outcomes.checkpoint(status.checkpoint_epoch, succeeded, is_final=status.is_final)

    def _fill_notebook(self) -> None:
        """Write the weights into the notebook's objects, if the job trains some that are known here."""
        # A handle from `attach` has no model in the notebook; one is built only when `model` is read.
        targets = self._inside.targets
        if targets is None:
            return
        is_training = self._spec.kind == "training"
        try:
            self._put_changes(targets)
            if targets.model is None:
                return
            if is_training or ((given := self._outcomes.models(self.status.attempt)) and given.is_trained):
                self._load()
        except errors.ResultUnavailableError as error:
            if is_training:
                raise
            # The function's value may be there all the same.
            if targets.model is not None:
                errors.warn(f"The notebook's model is as it was. {error}")

    def _put_changes(self, targets: weights.Targets) -> None:
        """Write what the ranks have changed, besides weights, into the notebook's objects: once."""
        with self._loading:
            if not self._has_put and targets.objects():
                changes, self._has_put = self._outcomes.changes(self.status.attempt), True
                result = self._outcomes.value(0, self.status.attempt)
                has_model = self._spec.kind != "training" or result.model is None
                for warning in weights.put_changes(targets, changes, self.ref, has_model=has_model):
                    errors.warn(warning)

    def _has_models(self) -> bool:
        """Whether the function of a job that has succeeded got models; waits for its end."""
        self._succeed(None)
        return self._outcomes.models(self.status.attempt) is not None

    def _trained_objects(self) -> weights.TrainedObjects:
        if self._spec.kind == "live":
            self._check_trains()
        self._succeed(None)
        objects = self._load()
        if objects.problem:
            raise errors.ResultUnavailableError(
                f"The weights of {self.ref} were not loaded into the model: {objects.problem.rstrip('.')}. "
                "job.state_dict() has them",
                self.ref,
            )
        return objects

    def _load(self) -> weights.TrainedObjects:
        """Load the weights into the notebook's objects, once, in the thread that asks."""
        with self._loading:
            if self._trained is None:
                # Its signature is checked before code of the snapshot runs.
                result = self._outcomes.trained(self.status.attempt)
                mine = self._inside.targets
                known = mine or self._outcomes.rebuilt_targets()
                targets = self._outcomes.made(known, getattr(result, "parts", ""))
                if targets is not mine:
                    weights.put_changes(targets, self._outcomes.changes(self.status.attempt), self.ref)
                self._trained = weights.load(targets, result, self.ref, check=targets is mine)
                for warning in self._trained.warnings:
                    errors.warn(warning)
            return self._trained

    def _passed_on(self, lines: Iterator[LogLine]) -> Iterator[LogLine]:
        with self._interruptible():
            yield from lines


class Rows(list[dict[str, Any]]):
    """Rows of metrics, which answer a name with what to write instead."""

    def __getitem__(self, at: Any) -> Any:
        """A row by its number."""
        if isinstance(at, str):
            raise TypeError(
                f"job.metrics is a list of rows. Write [row[{at!r}] for row in job.metrics if {at!r} in row]"
            )
        return super().__getitem__(at)


class Log(Iterator[LogLine]):
    """The lines of a job's log, read one by one. Printed, or at the end of a cell, it shows the last 1,000 there are by then.

    Args:
        lines: The lines to come.
        read: Reads the lines that there are from the first again.
    """

    def __init__(self, lines: Iterator[LogLine], read: Callable[[], Iterator[LogLine]]) -> None:
        self._lines = lines
        self._read = read

    def __next__(self) -> LogLine:
        return next(self._lines)

    def __repr__(self) -> str:
        last: deque[LogLine] = deque(maxlen=_SHOWN_LINES)
        count = 0
        for line in self._read():
            last.append(line)
            count += 1
        missing = count - len(last)
        before = [f"(and {missing:,} lines before these; `for line in job.logs()` gives all)"] if missing else []
        return "\n".join([*before, *map(str, last)])


def state_of(status: JobStatus) -> str:
    """One of `Created`, `Running`, `Restarting`, `Succeeded`, `Failed`."""
    restarting = status.attempt > 0 and status.state in (StateName.PENDING, StateName.STARTING)
    return "Restarting" if restarting else _KALE_STATES[status.state]


def resource(spec: JobSpec, status: JobStatus) -> dict[str, Any]:
    """The custom resource by which a cluster would show a job; rank 0 is its master.

    Args:
        spec: What was submitted.
        status: The job's status now.
    """
    state = state_of(status)
    counts = {"Master": Counter[str](), "Worker": Counter[str]()}
    for replica in status.replicas:
        ended = _COUNTED.get(replica.state) or ("active" if state in ("Running", "Restarting") else "")
        if ended:
            counts["Master" if replica.rank == 0 else "Worker"][ended] += 1
    conditions = [
        {"type": name, "status": "True", "reason": f"PyTorchJob{name}", "message": status.reason * (name == state)}
        for name in dict.fromkeys(("Created", state))
    ]
    found: dict[str, Any] = {
        "conditions": conditions,
        "replicaStatuses": {kind: dict(count) for kind, count in counts.items() if kind == "Master" or count},
    }
    for name, moment in (("startTime", status.started), ("completionTime", status.ended)):
        if moment is not None:
            found[name] = dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    topology = spec.topology
    replicas = {"Master": 1, "Worker": topology.number_of_processes - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": spec.name},
        "spec": {"pytorchReplicaSpecs": {kind: {"replicas": count} for kind, count in replicas.items() if count}},
        "status": found,
    }


def _place(row: MetricRow) -> dict[str, Any]:
    return {"time": row.time, "epoch": row.epoch, "step": row.step, "rank": row.rank, "source": row.source}


def _writable(path: str | os.PathLike[str], *, replace: bool) -> pathlib.Path:
    target = pathlib.Path(path).expanduser().absolute()
    if target.is_dir() or not target.parent.is_dir():
        problem = f"{target} is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        raise errors.ConfigError("path", problem, "Name a file in a folder that exists, such as model.pt")
    if target.exists() and not replace:
        raise errors.ConfigError(
            "path", f"{target} exists", "Name another file, or have it replaced: kale-dist fetch --force"
        )
    return target


def inside(job: Job[Any]) -> Inside:
    """The parts of a job that only the library itself uses."""
    return job._inside  # noqa: SLF001 - ours: the one way in


def check_lines(ranks: Any, tail: Any, number_of_processes: int) -> tuple[int, ...] | None:
    """Check which lines of a log are asked for; returns the ranks, None for all.

    Raises:
        ConfigError: There is no such rank, or `tail` is no number of lines.
    """
    whole(0, remedy="Give a number of lines, or None for all").or_(None)("tail", tail)
    if ranks is None:
        return None
    asked = (ranks,) if isinstance(ranks, int) else ranks
    there = range(number_of_processes)
    for rank in asked if isinstance(asked, Iterable) else (ranks,):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank not in there:
            remedy = f"Its ranks are 0 to {there[-1]}" if len(there) > 1 else "Its only rank is 0"
            raise errors.ConfigError("ranks", f"the job has no rank {rank!r}", remedy)
    return tuple(asked)
