"""`resume_from=`: finds the checkpoint that a call names, and checks that the call's objects can continue from it."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from kale_dist.errors import ConfigError, JobNotFoundError, ResultUnavailableError, SnapshotDamagedError
from kale_dist.job import records
from kale_dist.job.handle import Job, inside
from kale_dist.job.spec import names
from kale_dist.wire import JobFiles
from kale_dist.wording import show
from kale_dist.worker.training.settings import Training

_ARGUMENT = "resume_from"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """What a call continues from, checked."""

    origin: str
    """The job's reference, or the file's path."""
    path: pathlib.Path
    sentences: tuple[str, ...]
    """The checkpoint to continue from, and the settings that this call changes."""
    options: tuple[Mapping[str, Any], ...]
    """Of the optimizer's parameter groups once they are restored; empty where the call's own count."""
    schedule: Mapping[str, Any]
    """The scheduler's state, likewise."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """A checkpoint that a call resumes from."""

    origin: str
    """The job's reference, or the file's path."""
    path: pathlib.Path
    is_path: bool = False
    """Whether the user gave a path: then others may have made the file."""

    @classmethod
    def of(cls, given: Any, attach: Callable[[str], Job[Any]]) -> Earlier | None:
        """Find the checkpoint that `resume_from` names.

        Args:
            given: None, a job, a job's name or reference, or the path of a checkpoint.
            attach: Finds a job by its reference.

        Raises:
            ConfigError: It is something else, or there is no checkpoint.
            JobNotFoundError: There is no such job.
        """
        if given is None:
            return None
        is_path = isinstance(given, os.PathLike) or (
            isinstance(given, str) and "://" not in given and (os.sep in given or "." in given)
        )
        if is_path:
            from kale_dist.worker.training.parts import REST

            path = pathlib.Path(given).expanduser().absolute()
            # A job's folder has its checkpoint in it.
            path = next((one for one in (JobFiles(path).checkpoint, path / REST) if one.is_file()), path)
            if not path.is_file():
                raise ConfigError(_ARGUMENT, f"there is no file {path}", "Give a checkpoint, a job or a job's name")
            return cls(origin=str(path), path=path, is_path=True)
        if not isinstance(given, str | Job):
            remedy = "Give a job, a job's name, or the path of a checkpoint"
            raise ConfigError(_ARGUMENT, f"{show(given)} is none of a job, a name and a path", remedy)
        try:
            job = attach(reference_of(given, _ARGUMENT)) if isinstance(given, str) else given
            return cls(origin=job.ref, path=inside(job).checkpoint())
        except (ConfigError, JobNotFoundError, ResultUnavailableError) as error:
            problem = error.problem if isinstance(error, ConfigError) else f"{error}".rstrip(".")
            raise ConfigError(_ARGUMENT, problem, "Give a job with a checkpoint, or leave it out") from None

    def check(self, training: Training, world_size: int | None) -> Continued:
        """Check that a call can continue from here.

        Args:
            training: What the call trains, checked.
            world_size: On how many ranks; None if it is not known yet, and counts as unchanged.

        Raises:
            ConfigError: It cannot.
        """
        from kale_dist.worker.training import checkpoint
        from kale_dist.worker.training.contents import Given
        from kale_dist.worker.training.differences import Differences, misfit
        from kale_dist.worker.training.trained import Trained

        try:
            found = checkpoint.read(self.path)
        except (SnapshotDamagedError, OSError):
            problem = f"{self.path} is not a checkpoint that this version of kale_dist has written"
            remedy = (
                "Give a job, or the `checkpoint` of its folder. Weights alone go into the model by load_state_dict()"
            )
            raise ConfigError(_ARGUMENT, problem, remedy) from None
        if found.epoch >= training.epochs:
            problem = f"{self.origin} has done {found.epoch} epochs, and epochs={training.epochs} counts them, too"
            raise ConfigError(_ARGUMENT, problem, f"Give epochs= more than {found.epoch}")
        position = None if found.resume is None else found.resume.position
        batches = None if position is None else position.batches
        where = f"in epoch {found.epoch + 1}, after {batches:,} batches" if batches else f"after epoch {found.epoch}"
        begun = f"The training of {self.origin} continues {where}, to epoch {training.epochs}."
        if bool(found.parts) != training.in_parts:
            kinds = ("one file", "a folder of parts")
            problem = f"the checkpoint of {self.origin} is {kinds[bool(found.parts)]}, and those of this call are {kinds[training.in_parts]}"
            raise ConfigError(_ARGUMENT, problem, "Give model= and strategy= as for the earlier job")
        own = not self.is_path or self.path.resolve().is_relative_to(records.jobs_dir().resolve())
        if found.parts and not own and self.path.parent.resolve() != pathlib.Path(found.parts).resolve():
            problem = f"{self.path} names the folder {found.parts}, in which it does not lie"
            raise ConfigError(_ARGUMENT, problem, "Give the job that has written it, or the folder itself")
        if training.makes_model:
            # Ranks compare the rest: they have the objects.
            return Continued(origin=self.origin, path=self.path, sentences=(begun,), options=(), schedule={})
        trained = Trained.of(training)
        before = 1 if found.resume is None else found.resume.given.world_size
        given = Given.of(training, trained, world_size or before)
        if problem := misfit(found, trained, given):
            remedy = "Make model and optimizer as for the earlier job, or take its weights alone: job.state_dict(partial=True)"
            raise ConfigError(_ARGUMENT, f"the checkpoint of {self.origin} does not fit: {problem}", remedy)
        differences = Differences(found, given)
        groups = (found.optimizer or {}).get("param_groups", ()) if differences.has_optimizer else ()
        return Continued(
            origin=self.origin, path=self.path, sentences=(begun, *differences.sentences),
            options=tuple({**group, **wins} for group, wins in zip(groups, differences.options, strict=False)),
            schedule=differences.schedule,
        )  # fmt: skip


def reference_of(name: str, argument: str) -> str:
    """The reference of a job that is given by its name, wherever it runs; the argument is where it was given."""
    if "://" in name:
        return name
    names.check(name)
    found = [record.ref for record in records.all_records() if record.spec.name == name]
    if len(found) > 1:
        raise ConfigError(argument, f"there are several jobs {name!r}: {', '.join(found)}", "Give one of these")
    return found[0] if found else name
