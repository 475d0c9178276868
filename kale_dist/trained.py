"""What a job has trained, in the notebook's own objects: written into them once, by whoever asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kale_dist import weights
from kale_dist.errors import ResultUnavailableError, warn
from kale_dist.outcomes import OutcomeReader
from kale_dist.runtime.given_models import Returned
from kale_dist.spec import JobSpec


class Trained:
    """Loads a job's weights. They are written in the thread that asks.

    Args:
        ref: The job's reference.
        spec: What was submitted.
        outcomes: Reads what its ranks return.
        targets: The notebook's objects that it trains; None after `attach` from another process.
        attempt: Tells which attempt has succeeded; asked when the weights are loaded.
    """

    def __init__(
        self,
        ref: str,
        spec: JobSpec,
        outcomes: OutcomeReader,
        targets: weights.Targets | None,
        attempt: Callable[[], int],
    ) -> None:
        self.targets = targets
        self._ref = ref
        self._spec = spec
        self._outcomes = outcomes
        self._attempt = attempt
        self._lock = threading.RLock()
        self._objects: weights.TrainedObjects | None = None

    def check(self) -> None:
        """Find out whether the job trains anything.

        Raises:
            ResultUnavailableError: It is one of `launch`.
        """
        if self._spec.kind != "training":
            raise ResultUnavailableError(
                f"{self._ref} was started by launch(), which trains no model of its own. What the function returned is "
                "in job.result()",
                self._ref,
            )

    def fill_notebook(self) -> None:
        """Write the weights into the notebook's objects, if the job trains some that are known here."""
        # A handle from `attach` has no model in the notebook; one is only built for whoever asks for it.
        if self.targets is not None and (self._spec.kind == "training" or self._has_models()):
            self._load()

    def _has_models(self) -> bool:
        """Whether models that a function was given have changed."""
        try:
            return isinstance(self._outcomes.trained(self._attempt()), Returned)
        except ResultUnavailableError:
            return False

    def objects(self) -> weights.TrainedObjects:
        """The trained objects of a job that has succeeded.

        Raises:
            ResultUnavailableError: The weights do not fit the notebook's model any more.
        """
        objects = self._load()
        if objects.problem:
            raise ResultUnavailableError(
                f"The weights of {self._ref} do not fit the notebook's model any more: {objects.problem}. "
                "job.state_dict() has them",
                self._ref,
            )
        return objects

    def _load(self) -> weights.TrainedObjects:
        with self._lock:
            if self._objects is None:
                targets = self.targets or self._outcomes.rebuilt_targets()
                result = self._outcomes.trained(self._attempt())
                self._objects = weights.load(targets, result, self._ref, check=self.targets is not None)
                for warning in self._objects.warnings:
                    warn(warning)
            return self._objects
