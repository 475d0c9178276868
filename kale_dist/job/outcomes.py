"""Reads the outcomes of a job's ranks in the notebook: values, exceptions, weights, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pathlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kale_dist import errors
from kale_dist.errors.local_variables import FrameLocals
from kale_dist.job import records, weights
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.job.spec.volumes import seen_here
from kale_dist.job.status import JobStatus
from kale_dist.job.view import facts
from kale_dist.snapshot import loading, outcome
from kale_dist.snapshot.changes import Changes
from kale_dist.snapshot.given_models import Returned
from kale_dist.snapshot.origin import BlobRanges, Stayed
from kale_dist.wire import FailureCause, JobFiles, StateName, blobs

if TYPE_CHECKING:
    from kale_dist.snapshot.reducers import References
    from kale_dist.worker.training.settings import Training

_TIME_CAUSES = (FailureCause.TIMEOUT, FailureCause.STALLED)


class OutcomeReader:
    """Reads the outcomes of one job, each once. Safe to use from threads.

    Args:
        ref: The job's reference.
        spec: What was submitted.
        files: Where the outcomes lie on this machine.
        key: The job's secret bytes; None if this user may not read them: then no result can be read.
        store: Where the snapshot's blobs are.
        originals: The notebook's own classes and functions in the snapshot; None in another process, which loads them
            from the snapshot when a result needs them.
        fetch: Fetches a file of the job by its name; None if all files are on this machine.
    """

    def __init__(
        self,
        *,
        ref: str,
        spec: JobSpec,
        files: JobFiles,
        key: bytes | None,
        store: blobs.Store,
        originals: References | None = None,
        fetch: Callable[[str], None] | None = None,
    ) -> None:
        self.files = files
        self._fetch = fetch
        self._ref = ref
        self._spec = spec
        self.key = key
        self._store = store
        self._originals = originals
        self._lock = threading.RLock()
        self._read: dict[tuple[int, int], outcome.Outcome] = {}
        self._loaded: loading.Loaded | None = None

    def value(self, rank: int, attempt: int) -> Any:
        """What a rank returned.

        Raises:
            ResultUnavailableError: It cannot be read here; the message gives the reason.
        """
        value = self._outcome(rank, attempt).value
        return value.value if isinstance(value, Returned) else value

    def given(self, rank: int, attempt: int, name: str, originals: References) -> Any:
        """A value that a live rank has written.

        Args:
            rank: The rank.
            attempt: The attempt of the ranks.
            name: That of the message which asked for it.
            originals: The notebook's own functions and classes that the ranks were sent.

        Raises:
            ResultUnavailableError: It cannot be read here.
        """
        path = self.files.outcome(attempt, rank)
        self._bring(path)
        at_head = attempt - records.life(self.files).first_attempt
        signer = outcome.Signer(key=self._verified_key(), job=f"{self._spec.name} {name}", attempt=at_head, rank=rank)
        return outcome.read_outcome(path, signer=signer, resolve=originals.resolve).value

    def models(self, attempt: int) -> Returned | None:
        """Rank 0's value and the models that its function got, as they came; None of a function that got no model."""
        value = self._outcome(0, attempt).value
        return value if isinstance(value, Returned) and value.model_state is not None else None

    def changes(self, attempt: int) -> tuple[Changes, ...]:
        """What the ranks have changed, besides weights, of the objects that they got."""
        value = self._outcome(0, attempt).value
        return value.changes if isinstance(value, Returned) or self._spec.kind == "training" else ()

    def trained(self, attempt: int) -> Any:
        """The argument of `weights.load`: rank 0's `TrainingResult`, or the models of a function's arguments.

        Raises:
            ResultUnavailableError: There are no weights, or those that stayed in the snapshot are not on this machine.
        """
        value = self._outcome(0, attempt).value
        if self._spec.kind == "training":
            return value
        if not isinstance(value, Returned) or value.model_state is None:
            raise errors.ResultUnavailableError(
                f"The function of {self._ref} got no model as an argument, or in a list, tuple or dict of one, so launch() brings "
                "none back. What it returned is in job.result()",
                self._ref,
            )
        if value.problem:
            problem = f"The model of {self._ref} did not come back, because {value.problem}"
            raise errors.ResultUnavailableError(
                f"{problem.rstrip('.')}. Let the function return what you need, such as a state dict: job.result() has it, and "
                "job.save(value=True) writes it",
                self._ref,
            )
        memory, state = BlobRanges(self._store), copy.copy(value.model_state)
        for name, one in state.items():
            if isinstance(one, Stayed):
                if not self._store.exists(one.range[0]):
                    raise errors.ResultUnavailableError(
                        f"{name} of {self._ref} did not change and stayed in the job's snapshot, whose bytes are missing or "
                        "damaged on this machine. Read the model where the job was submitted, or let the function return "
                        "model.state_dict(), which comes back whole. job.result() has the function's value",
                        self._ref,
                    )
                state[name] = one.tensor(memory)
        return dataclasses.replace(value, model_state=state)

    def error(self, status: JobStatus) -> errors.JobError:
        """The error of a job that has ended badly, with the first failing rank's own exception as its cause."""
        sentence = f"{self._ref} {status.state.value}: {status.reason or 'no reason is known'}"
        if status.state is StateName.CANCELLED:
            kept = facts.kept_checkpoint(status)
            return errors.JobCancelledError(f"{sentence}. {kept}" if kept else sentence, self._ref)
        cause, traceback, frames = self._cause(status)
        if isinstance(cause, ModuleNotFoundError) and self._spec.image:
            sentence += ". packages='here' sends all packages of this machine that the image lacks; packages=['name'] makes an image with those named"
        elif isinstance(cause, FileNotFoundError) and self._spec.image:
            sentence += ". A job sees the files of its image and of its volumes=, and not those of this machine"
        kind = errors.JobTimeoutError if status.cause in _TIME_CAUSES else errors.JobFailedError
        error = kind(f"{sentence}\n\n{traceback}" if traceback else sentence, self._ref)
        error.__cause__ = cause
        error.locals = frames
        return error

    def model_state(self, attempt: int) -> dict[str, Any]:
        """A copy of the trained weights."""
        result = self.trained(attempt)
        if parts := getattr(result, "parts", ""):
            raise self._in_parts(parts)
        return _copy(result.model.state_dict() if result.model_state is None else result.model_state)

    def kept_state(self, field: str, attempt: int) -> dict[str, Any]:
        """A copy of the weights that a callback has kept.

        Args:
            field: Of the `TrainingResult`: `best_state` or `averaged_state`.
            attempt: Of the job's success.

        Raises:
            ResultUnavailableError: There are none.
        """
        state = getattr(self.value(0, attempt), field)
        if state is None:
            what, callback = "best epoch", "kd.callbacks.ModelCheckpoint(monitor=..., mode=...)"
            if field == "averaged_state":
                what, callback = "averaged weights", "kd.callbacks.EMA() or SWA(), which may begin after the last epoch"
            raise errors.ResultUnavailableError(
                f"{self._ref} has no {what}: that needs callbacks=[...] with {callback}", self._ref
            )
        return _copy(state)

    def checkpoint_state(self, path: pathlib.Path, *, best: bool = False) -> dict[str, Any]:
        """The weights of the last checkpoint.

        Args:
            path: As `checkpoint` gives it.
            best: Those of the best epoch up to it.

        Raises:
            ResultUnavailableError: There is none.
        """
        from kale_dist.worker.training import checkpoint

        last = checkpoint.read(path)
        if last.parts:
            raise self._in_parts(last.parts)
        if not best:
            return last.model
        if not (kept := (last.callbacks.get("best") or {}).get("model")):
            problem = f"The last checkpoint of {self._ref} has no best epoch"
            raise errors.ResultUnavailableError(f"{problem}: that needs kd.callbacks.ModelCheckpoint(...)", self._ref)
        return _copy(kept)

    def checkpoint(self, epoch: int | None, succeeded: int | None, *, is_final: bool) -> pathlib.Path:
        """The file of the last checkpoint, fetched if it is elsewhere.

        Args:
            epoch: The epoch of the last checkpoint, as far as the job's status shows it.
            succeeded: The attempt that has succeeded; None if none has.
            is_final: Whether there is no later checkpoint than that of `epoch`.

        Raises:
            ResultUnavailableError: There is none.
            BackendError: Its place cannot be reached.
        """
        self._spec.check_version(self._ref)
        path = self.files.checkpoint
        with contextlib.suppress(errors.ResultUnavailableError):
            # Of a model in parts, it came with the outcome: the pods are gone.
            if succeeded is not None and (rest := getattr(self.trained(succeeded), "rest", b"")):
                with blobs.fresh(path) as part:
                    part.write_bytes(rest)
                return path
        from kale_dist.worker.training import checkpoint

        is_here = False
        with contextlib.suppress(errors.SnapshotDamagedError, OSError):
            is_here = is_final and checkpoint.read(path).epoch == epoch
        if not is_here and (epoch is not None or self._spec.store):
            self._bring(path)
        found = [path for path in (self.files.checkpoint, self.files.older_checkpoint) if path.exists()]
        for path in found:
            with contextlib.suppress(errors.SnapshotDamagedError, OSError):
                checkpoint.read(path)
                if path != found[0]:
                    errors.log(f"{found[0]} is damaged. The checkpoint before it is used")
                return path
        if found:
            raise errors.ResultUnavailableError(f"The checkpoint of {self._ref} is damaged: {found[0]}", self._ref)
        why = "It has not come to the first one (checkpoint_every)"
        if not self._spec.saves:
            why = "It was called with checkpoint_every=None"
        problem = f"{self._ref} has written no checkpoint. {why}"
        if epoch is not None:
            problem = (
                f"The checkpoint of {self._ref} is gone with its pods{'' if self._spec.store else ', because it had no store='}. After a success, the model "
                "and the optimizer that the notebook gave it have all that was learnt: another call continues with them"
            )
        raise errors.ResultUnavailableError(problem, self._ref)

    def rebuilt_targets(self) -> weights.Targets:
        """The models, and of a training optimizer and scheduler, built from the snapshot, for a process that is not the notebook's.

        Raises:
            ResultUnavailableError: Blobs of the snapshot are gone.
        """
        try:
            loaded = self._load()
        except errors.StoreError as error:
            raise errors.ResultUnavailableError(
                f"The model of {self._ref} cannot be built, because blobs of its snapshot are gone ({error}). "
                "job.state_dict() has the weights",
                self._ref,
            ) from error
        if self._spec.kind != "training":
            return weights.of_function(loaded.fn, loaded.args, loaded.kwargs)
        training: Training = loaded.args[0]
        return weights.of_training(training)

    def made(self, targets: weights.Targets, parts: str) -> weights.Targets:
        """The notebook's objects of a job; where the ranks made the model, one with the values of its parts.

        Args:
            targets: The objects as far as they are there.
            parts: The folder, as ranks see it; empty where the model came back whole.

        Raises:
            ResultUnavailableError: The folder cannot be seen from here.
        """
        if not parts:
            return targets.made()
        from kale_dist.worker.training import parts as folders

        folder = seen_here(parts, self._spec.volumes) or pathlib.Path(parts)
        if not (folder / ".metadata").exists():
            raise self._in_parts(parts)
        errors.log(f"The model of {self._ref} is made here: {folders.size(folder) / 1e9:.2f} GB, from {folder}")
        made = targets.made()
        folders.load(folder, folders.weights_of(made.model), None)
        return made

    def _in_parts(self, parts: str) -> errors.ResultUnavailableError:
        return errors.ResultUnavailableError(
            f"No process had all weights of {self._ref}: they are parts of a folder that its processes see as {parts}. Where this "
            f"process sees it, too, job.model makes the model; another job continues with kd.pretrained(function, {parts!r})",
            self._ref,
        )

    def _verified_key(self) -> bytes:
        """The job's secret, without which no result is loaded."""
        if self.key is None:
            raise errors.ResultUnavailableError(
                f"Results of {self._ref} cannot be verified, because the job's key is not on this machine ({self.files.key}). "
                "Its status and its log can be read. kale_dist.attach(..., trust=True) reads the key from the job's Secret or container, "
                "if you may: only if you trust who submitted the job, whose code a result can run",
                self._ref,
            )
        return self.key

    def _outcome(self, rank: int, attempt: int) -> outcome.Outcome:
        self._spec.check_version(self._ref)
        key = self._verified_key()
        with self._lock:
            found = self._read.get((rank, attempt))
            if found is None:
                # A head counts its attempts from 0 and signs with its object's name.
                life, path = records.life(self.files), self.files.outcome(attempt, rank)
                if not path.exists():
                    self._bring(path)
                signed_by = life.object or self._spec.name
                signer = outcome.Signer(key=key, job=signed_by, attempt=attempt - life.first_attempt, rank=rank)
                found = self._read[rank, attempt] = outcome.read_outcome(path, signer=signer, resolve=self._resolve)
            return found

    def _bring(self, path: pathlib.Path) -> None:
        if self._fetch is not None:
            self._fetch(path.name)

    def _cause(self, status: JobStatus) -> tuple[BaseException, str, tuple[FrameLocals, ...]]:
        """The exception of the rank that failed first, its formatted traceback, and its local variables."""
        if status.failed_rank is not None and status.cause not in _TIME_CAUSES:
            try:
                found = self._outcome(status.failed_rank, status.attempt)
            except errors.KaleDistError:
                pass
            else:
                if found.error is not None:
                    # A traceback without frames would only repeat the reason.
                    return found.error, found.traceback if "\n  File " in found.traceback else "", found.locals
        return errors.RankError(status.reason), "", ()

    def _resolve(self, index: int) -> object:
        if self._originals is not None:
            return self._originals.resolve(index)
        return self._load().references.resolve(index)

    def _load(self) -> loading.Loaded:
        self._spec.check_version(self._ref)
        with self._lock:
            if self._loaded is None:
                # Without `fill_main`, which would overwrite the user's own names.
                modules = self.files.modules if self.files.modules.is_dir() else None
                self._loaded = loading.load(self._store, self._spec.snapshot, modules=modules, fill_main=False)
            return self._loaded


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if hasattr(value, "detach") else value for name, value in state.items()}
