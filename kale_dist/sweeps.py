"""Sweeps: one job for each trial of an Optuna study, several at once; bad trials are stopped early.

A thread asks the study for parameters, submits the trials' jobs and passes their metrics on. All state is in the study's
storage, so that a sweep of the same name continues where the one before was interrupted.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import pathlib
import queue
import threading
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kale_dist.calls import request, verbs
from kale_dist.errors import ConfigError, KaleDistError, WaitTimeoutError, short_refusals, warn
from kale_dist.job import interrupts, job_watch, records
from kale_dist.job.handle import Job
from kale_dist.job.spec import names
from kale_dist.job.spec.checks import whole
from kale_dist.job.status import JobStatus, values_of
from kale_dist.job.view.sweep import SweepPicture, TrialRow, sentence
from kale_dist.wire import StateName
from kale_dist.wording import show

if TYPE_CHECKING:
    import optuna

_DIRECTIONS = ("minimize", "maximize")
_MINIMISED = ("loss", "error")
_FAILURES = 3
"""A sweep ends after this many failed trials in a row, because what they share is probably broken."""

_JOB, _AGAIN, _REASON = "kale_dist:job", "kale_dist:again", "kale_dist:reason"
"""Attributes of a trial in the storage: its job's reference, whether its parameters were queued again, why it failed."""

_CANCEL_WAIT_S = 30.0
"""How long `cancel` waits for the jobs' cancellation; a script that ended at once would leave them running."""

_LOST = "its job was lost when the sweep was interrupted"


class SweepError(KaleDistError):
    """A sweep cannot continue, or has no result yet."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SweepTrial(TrialRow):
    """One trial: its parameters, and the job that ran with them."""

    @property
    def job(self) -> Job[Any]:
        """The trial's job.

        Raises:
            SweepError: The call ended before it returned a job.
            JobNotFoundError: The job was deleted.
        """
        if self.ref is None:
            raise SweepError(f"Trial {self.number} has no job: the call ended before it returned one")
        return verbs.attach(self.ref)

    @property
    def model(self) -> Any:
        """The trained model of the trial's job. Waits and raises as `Job.model` does."""
        return self.job.model


@short_refusals
def sweep(
    call: Callable[[optuna.Trial], Job[Any]],
    *more: Any,
    metric: str = "",
    trials: int = 20,
    parallel: int = 1,
    processes: int | None = None,
    direction: str | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    pruner: optuna.pruners.BasePruner | None = None,
    storage: str | optuna.storages.BaseStorage | None = None,
    name: str | None = None,
) -> Sweep:
    """Search good parameters: run a job for each trial of an Optuna study.

    Returns at once; the trials are submitted by a thread. Show the sweep as a cell's last value to watch it, and call
    `wait()` for the best trial. A sweep ends with the notebook's kernel; call it again with the same `name` and it continues:
    jobs that still run, as on a cluster, are followed again, and the parameters of those that were lost are tried again.

    Args:
        call: Takes Optuna's trial, asks it for parameters (`trial.suggest_float("lr", 1e-4, 1e-1, log=True)`), and returns
            the job of `distribute` or `launch`. It runs in a thread of its own, one trial after another.
        *more: Refused: the function itself asks for parameters.
        metric: What is optimised: `eval/accuracy`, `train/loss` or `report/NAME`, or a name alone from any of them. Its last
            value is the trial's; each of its values may prune the trial.
        trials: How many trials there are in all, those of an interrupted sweep included.
        parallel: Jobs that run at the same time.
        processes: Processes that all these jobs may have together; None for no limit. A job larger than this runs alone.
        direction: `minimize` or `maximize`. Needed, unless the metric's name shows that it is a loss or an error.
        sampler: A sampler of `optuna.samplers`; None for Optuna's default (TPE). One with a seed repeats itself when a sweep continues.
        pruner: A pruner of `optuna.pruners`; None for Optuna's default (the median of the other trials, after five of them).
        storage: A URL or storage of Optuna's; None for a file in the state folder.
        name: Names the sweep, to continue it later; None for a new one.

    Returns:
        The sweep.

    Raises:
        ConfigError: An argument is wrong, Optuna is not installed, or this sweep runs already.
    """
    if not callable(call):
        raise ConfigError("call", f"{show(call)} is not a function", "Give a function of a trial that returns a job")
    if more:
        problem = f"{show(more[0])} is no argument of a sweep, whose function asks its trial for parameters"
        raise ConfigError("call", problem, "Write in it: lr = trial.suggest_float('lr', 1e-4, 1e-1, log=True)")
    whole()("trials", trials)
    whole()("parallel", parallel)
    if processes is not None:
        whole()("processes", processes)
    if not isinstance(metric, str) or not metric:
        problem = "it is missing" if isinstance(metric, str) else f"{show(metric)} is not the name of a metric"
        raise ConfigError("metric", problem, "Name one, such as 'eval/loss'")
    source, _, rest = metric.partition("_")
    if source in ("train", "eval", "val") and rest:
        source = "eval" if source == "val" else source
        remedy = f"Write '{source}/{rest}' for what the step returns as {rest!r}, or 'report/{metric}' for kd.report()"
        raise ConfigError("metric", f"{metric!r} does not say where it comes from", remedy)
    if direction is None and any(word in metric.lower() for word in _MINIMISED):
        direction = "minimize"
    if not isinstance(direction, str) or direction not in _DIRECTIONS:
        problem = f"is needed for {metric!r}" if direction is None else f"{show(direction)} is not a direction"
        raise ConfigError("direction", problem, "Use 'minimize' or 'maximize'")
    if name is not None:
        names.check(name)
    chosen = name or f"sweep-{uuid.uuid4().hex[:5]}"
    study, opened, lock = _open(chosen, storage, direction, sampler, pruner)
    before = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
    if before >= trials:
        warn(
            f"name: the sweep {chosen!r} has {before} trials already, and trials={trials}: the call is not made again. Choose"
            " another name for a new search, or more trials"
        )
    return Sweep(call, study, opened, metric=metric, trials=trials, parallel=parallel, processes=processes, lock=lock)


def sweeps() -> list[str]:
    """Names of the sweeps whose storage is in the state folder, the oldest first."""
    files = sorted(_folder().glob("*.journal"), key=lambda file: file.stat().st_mtime)
    return [file.stem for file in files]


def read(name: str) -> SweepPicture:
    """The present state of a sweep of the state folder, whether it runs or not.

    Raises:
        ConfigError: There is no sweep of this name, or Optuna is not installed.
    """
    optuna = _optuna()
    if name not in sweeps():
        raise ConfigError("name", f"there is no sweep {name!r}", "`kale-dist sweeps` lists those there are")
    study = optuna.load_study(study_name=name, storage=_journal(name))
    with _lock_file(name).open("a") as file:
        return _picture(study, is_over=records.try_lock(file))


@dataclasses.dataclass(slots=True)
class _RunningTrial:
    """A trial whose job runs."""

    trial: optuna.Trial
    job: Job[Any]
    unsubscribe: Callable[[], None]
    values: list[float] = dataclasses.field(default_factory=list)
    """Values of the metric that were passed on to the study."""
    is_pruned: bool = False
    is_taken_over: bool = False
    """Whether an earlier sweep, which was interrupted, submitted the job."""


class Sweep:
    """A sweep that runs or has ended. Made by `sweep`, whose arguments it takes.

    It closes `lock`, which keeps other processes from running the same sweep, at its end.
    """

    def __init__(
        self,
        call: Callable[[optuna.Trial], Job[Any]],
        study: optuna.Study,
        storage: optuna.storages.BaseStorage,
        *,
        metric: str,
        trials: int,
        parallel: int,
        processes: int | None,
        lock: contextlib.ExitStack,
    ) -> None:
        self._call = call
        self.study = study
        """Optuna's study, for `optuna.visualization` and everything else that it offers."""
        self._storage = storage
        self._storage_id = storage.get_study_id_from_name(study.study_name)
        self._metric = metric
        self._trials = trials
        self._parallel = parallel
        self._processes = processes
        self._lock = lock
        self._running: dict[int, _RunningTrial] = {}
        self._best_job: Job[Any] | None = None
        self._changes: queue.SimpleQueue[tuple[int, JobStatus] | None] = queue.SimpleQueue()
        self._failed_in_a_row = 0
        self._is_cancelled = False
        self._is_enough = False
        self._leaves_jobs = False
        self._is_over = False
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._display: Any = None
        # Exhausted samplers, and a user's call, stop a study so; Optuna's own method works in its own loop only.
        study.stop = self._stop  # type: ignore[method-assign]
        study.set_user_attr("metric", metric)
        study.set_user_attr("trials", trials)
        threading.Thread(target=self._run, name=f"kale_dist {self.name}", daemon=True).start()

    @property
    def name(self) -> str:
        """The sweep's name: the study's."""
        return self.study.study_name

    @property
    def trials(self) -> tuple[SweepTrial, ...]:
        """All trials so far."""
        return tuple(map(_sweep_trial, self.study.get_trials(deepcopy=False)))

    @property
    def best(self) -> SweepTrial:
        """The best trial that is complete so far.

        Raises:
            SweepError: No trial is complete.
        """
        try:
            return _sweep_trial(self.study.best_trial)
        except ValueError:
            reasons = sorted({trial.reason for trial in self.trials if trial.reason})
            if pruned := sum(trial.state == "pruned" for trial in self.trials):
                reasons.append(f"{pruned} were pruned")
            why = f": {'; '.join(reasons)}" if reasons else ""
            raise SweepError(f"{self.name}: no trial has been completed{why}") from None

    def done(self) -> bool:
        """Whether the sweep has ended."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> SweepTrial:
        """Wait for the end of the sweep.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Returns:
            The best trial.

        Raises:
            SweepError: No trial was completed, or the sweep has ended early because trials fail.
            WaitTimeoutError: The time was over first; the sweep keeps running.
            KeyboardInterrupt: In a notebook the sweep keeps running, and a second interrupt within 10 s cancels it;
                elsewhere the first one does.
        """
        job_watch.check_timeout(timeout)
        with interrupts.passing_on(self.name, self.cancel):
            if not self._ended.wait(timeout):
                raise WaitTimeoutError(f"{self.name} has not ended within {timeout:g} s; it keeps running", self.name)
        if self._error is not None:
            raise self._error
        return self.best

    def cancel(self) -> None:
        """Cancel the running jobs and begin no more. A sweep of the same name tries their parameters again."""
        self._is_cancelled = True
        self._changes.put(None)
        self._ended.wait(_CANCEL_WAIT_S)

    def __repr__(self) -> str:
        """One line: the name, how many trials have ended, and the best value."""
        return f"<Sweep {self.name} {sentence(self._picture())}>"

    def _ipython_display_(self) -> None:
        """Show the sweep below the cell, kept up to date while it runs."""
        from IPython.display import display

        self._display = display(self._picture(), display_id=True)  # type: ignore[no-untyped-call]

    def _picture(self) -> SweepPicture:
        picture = _picture(self.study, is_over=self._is_over)
        if self._error is None:
            return picture
        kind = "" if isinstance(self._error, KaleDistError) else f"{type(self._error).__name__}: "
        return dataclasses.replace(picture, error=f"{kind}{self._error}")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._continue()
            while not self._is_cancelled:
                while self._has_room() and not self._is_cancelled:
                    self._begin()
                    self._draw()
                if not self._running:
                    break
                # None wakes this thread for a cancellation.
                if (change := self._changes.get()) is not None:
                    self._take(*change)
                self._draw()
        except Exception as error:  # noqa: BLE001 - `wait` raises it, in the caller's thread
            self._error = error
        finally:
            self._leave()

    def _leave(self) -> None:
        """Cancel the running jobs, or leave them to the next sweep of this name; then mark this sweep as ended."""
        try:
            for number, one in tuple(self._running.items()):
                if self._leaves_jobs:
                    self._forget(number)
                    continue
                with contextlib.suppress(KaleDistError):
                    one.job.cancel(save=False)
                self._again(number, "the sweep was cancelled" if self._error is None else "the sweep has failed")
        except Exception as error:  # noqa: BLE001 - the storage fails, and `wait` must not wait for ever
            self._error = self._error or error
        finally:
            self._lock.close()
            self._is_over = True
            # Before `wait` returns, because an executed notebook keeps the last picture.
            with contextlib.suppress(Exception):
                self._draw()
            self._ended.set()

    def _stop(self) -> None:
        """Begin no more trials; running ones continue to their end."""
        self._is_enough = True

    def _has_room(self) -> bool:
        if self._is_enough:
            return False
        trials = self.study.get_trials(deepcopy=False)
        begun = sum(not trial.user_attrs.get(_AGAIN) for trial in trials)
        if begun >= self._trials and not any(trial.state.name == "WAITING" for trial in trials):
            return False
        if not self._running:
            return True
        sizes = [one.job.spec.topology.number_of_processes for one in self._running.values()]
        # The size of the next job is not known; the largest of these is assumed.
        fits = self._processes is None or sum(sizes) + max(sizes) <= self._processes
        return fits and len(self._running) < self._parallel

    def _begin(self) -> None:
        """Ask the study for a trial, and submit its job."""
        optuna = _optuna()
        trial = self.study.ask()
        context = contextvars.copy_context()
        context.run(request.refuses_ranges.set, "each trial of a sweep needs one number")
        try:
            job: Any = context.run(self._call, trial)
        except optuna.TrialPruned:
            self.study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if not getattr(error, "retryable", False):
                self._fail(trial.number, reason)
                raise
            self._leaves_jobs = True
            self._again(trial.number, reason)
            raise SweepError(
                f"{self.name}: trial {trial.number} could not be submitted: {str(error).rstrip('.')}. Jobs that run are left"
                f" alone. Call sweep(..., name={self.name!r}) again to continue with them and with this trial"
            ) from error
        if not isinstance(job, Job):
            self._fail(trial.number, "the call returned no job")
            raise SweepError(f"{self.name}: the call returned {job!r}. Return the job of distribute() or launch()")
        trial.set_user_attr(_JOB, job.ref)
        self._subscribe(trial, job)

    def _subscribe(self, trial: optuna.Trial, job: Job[Any]) -> None:
        number = trial.number
        unsubscribe = job.subscribe(lambda status: self._changes.put((number, status)))
        self._running[number] = _RunningTrial(trial=trial, job=job, unsubscribe=unsubscribe)

    def _continue(self) -> None:
        """Take over an interrupted sweep's trials: follow running jobs, and queue the parameters of lost ones."""
        import optuna

        for frozen in self.study.get_trials(deepcopy=False):
            if frozen.state.name != "RUNNING":
                continue
            ref = frozen.user_attrs.get(_JOB)
            try:
                job = None if ref is None else verbs.attach(ref)
                is_lost = job is None or job.status.state in (StateName.CANCELLED, StateName.FAILED)
            except KaleDistError:
                job, is_lost = None, True
            if job is None or is_lost:
                self._again(frozen.number, _LOST)
            else:
                trial = optuna.Trial(self.study, self._id_of(frozen.number))
                self._subscribe(trial, job)
                self._running[frozen.number].values += frozen.intermediate_values.values()
                self._running[frozen.number].is_taken_over = True

    def _take(self, number: int, status: JobStatus) -> None:
        """Pass a job's new metrics and its end on to the study."""
        one = self._running.get(number)
        if one is None:
            return
        values = values_of(status, self._metric)
        for value in values[len(one.values) :]:
            if math.isfinite(value):
                one.trial.report(value, len(one.values))
            one.values.append(value)
            if not status.is_final and not one.is_pruned and one.trial.should_prune():
                one.is_pruned = True
                one.job.cancel(save=False)
        if status.is_final:
            self._end(number, one, status)

    def _end(self, number: int, one: _RunningTrial, status: JobStatus) -> None:
        optuna = _optuna()
        if status.state is StateName.CANCELLED and one.is_pruned:
            self._forget(number)
            self.study.tell(number, state=optuna.trial.TrialState.PRUNED)
        elif status.state is not StateName.SUCCEEDED and one.is_taken_over:
            # A local job ends shortly after the process that submitted it, as cancelled or with its agent lost.
            self._again(number, _LOST)
        elif status.state is not StateName.SUCCEEDED:
            self._fail(number, status.reason or status.state.value)
        elif not one.values:
            known = sorted({f"{row.source}/{key}" for row in status.metrics for key, _ in row.values})
            self._fail(number, f"it has not reported {self._metric!r}")
            raise SweepError(
                f"{self.name}: trial {number} has not reported the metric {self._metric!r}. It reported"
                f" {', '.join(known) or 'nothing: return a dict of numbers from the step, or call report()'}"
            )
        elif not math.isfinite(one.values[-1]):
            self._fail(number, f"{self._metric} ended at {one.values[-1]}")
        else:
            self._forget(number)
            self._failed_in_a_row = 0
            self.study.tell(number, one.values[-1])
            # `attach` returns the call's own handle, which knows the notebook's model, as long as one is alive.
            if self.study.best_trial.number == number:
                self._best_job = one.job

    def _fail(self, number: int, reason: str) -> None:
        self._mark_failed(number, reason)
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _FAILURES:
            raise SweepError(f"{self.name}: {_FAILURES} trials in a row have failed, the last because {reason}")

    def _again(self, number: int, reason: str) -> None:
        """Mark a trial as lost, and queue its parameters again."""
        self._note(number, _AGAIN, value=True)
        self._mark_failed(number, reason)
        # They are in the order in which they began.
        self.study.enqueue_trial(self.study.get_trials(deepcopy=False)[number].params)

    def _mark_failed(self, number: int, reason: str) -> None:
        self._forget(number)
        self._note(number, _REASON, reason)
        self.study.tell(number, state=_optuna().trial.TrialState.FAIL)

    def _note(self, number: int, key: str, value: Any) -> None:
        self._storage.set_trial_user_attr(self._id_of(number), key, value)

    def _id_of(self, number: int) -> int:
        """The number by which the storage knows a trial, also one of another process."""
        return self._storage.get_trial_id_from_study_id_trial_number(self._storage_id, number)

    def _forget(self, number: int) -> None:
        one = self._running.pop(number, None)
        if one is not None:
            one.unsubscribe()

    def _draw(self) -> None:
        if self._display is not None:
            # The interpreter may be about to end.
            with contextlib.suppress(RuntimeError):
                self._display.update(self._picture())


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("sweep", "needs Optuna, which is not installed", "Run: pip install optuna") from error
    return optuna


def _open(
    name: str, storage: Any, direction: str, sampler: Any, pruner: Any
) -> tuple[optuna.Study, optuna.storages.BaseStorage, contextlib.ExitStack]:
    """The study of a name, new or continued, its storage, and the lock that keeps other processes from running it."""
    optuna = _optuna()
    a_url = "Give a URL such as sqlite:///sweeps.db"
    for argument, value, base, remedy in (
        ("sampler", sampler, optuna.samplers.BaseSampler, "Give a sampler such as optuna.samplers.TPESampler()"),
        ("pruner", pruner, optuna.pruners.BasePruner, "Give a pruner such as optuna.pruners.MedianPruner()"),
        ("storage", storage, (str, optuna.storages.BaseStorage), a_url),
    ):
        if value is not None and not isinstance(value, base):
            shown = f"the class {value.__name__}" if isinstance(value, type) else show(value)
            raise ConfigError(argument, f"{shown} is not a {argument} of Optuna's", remedy)
    if storage is not None:
        # Opened before the lock's file is created.
        try:
            storage = optuna.storages.get_storage(storage)
        except Exception as error:
            problem = f"{show(storage)} cannot be opened: {(str(error) or type(error).__name__).splitlines()[0]}"
            raise ConfigError("storage", problem, a_url) from error
    with contextlib.ExitStack() as lock:
        if not records.try_lock(lock.enter_context(_lock_file(name).open("w"))):
            raise ConfigError("name", f"the sweep {name!r} runs already", "Wait for it, or choose another name")
        verbosity = optuna.logging.get_verbosity()
        # Optuna would log that the study was created.
        optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
        storage = _journal(name) if storage is None else storage
        try:
            study = optuna.create_study(
                storage=storage,
                study_name=name,
                direction=direction,
                sampler=sampler,
                pruner=pruner,
                load_if_exists=True,
            )
        finally:
            optuna.logging.set_verbosity(verbosity)
        if (was := study.direction.name.lower()) != direction:
            remedy = "Keep it, or choose another name"
            raise ConfigError("direction", f"the sweep {name!r} was begun with {was!r}", remedy)
        return study, storage, lock.pop_all()


def _folder() -> pathlib.Path:
    folder = records.state_dir() / "sweeps"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _lock_file(name: str) -> pathlib.Path:
    return _folder() / f"{name}.lock"


def _journal(name: str) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(_folder() / f"{name}.journal")))


def _sweep_trial(frozen: Any) -> SweepTrial:
    state = "failed" if frozen.state.name == "FAIL" else frozen.state.name.lower()
    if frozen.user_attrs.get(_AGAIN):
        state = "repeated"
    reported = frozen.intermediate_values
    return SweepTrial(
        number=frozen.number,
        params=dict(frozen.params),
        state=state,
        value=frozen.value if frozen.value is not None else (reported[max(reported)] if reported else None),
        reports=len(reported),
        ref=frozen.user_attrs.get(_JOB),
        reason=frozen.user_attrs.get(_REASON, ""),
    )


def _picture(study: Any, *, is_over: bool) -> SweepPicture:
    attributes = study.user_attrs
    return SweepPicture(
        name=study.study_name,
        metric=str(attributes.get("metric", "")),
        wanted=int(attributes.get("trials", 0)),
        is_maximised=study.direction.name == "MAXIMIZE",
        is_over=is_over,
        rows=tuple(map(_sweep_trial, study.get_trials(deepcopy=False))),
    )
