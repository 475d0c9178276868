"""Datasets that are built in the ranks, where their files are."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset

from kale_dist.errors import ConfigError, warn
from kale_dist.wire import context

_UNKNOWN = 1 << 31
"""The length where it is not known: samplers only ask whether there are samples, and the ranks ask again."""


class LazyDataset(Dataset[Any]):
    """A dataset that a function builds when it is first needed. `kd.dataset` makes it.

    Attributes that it does not have are those of the dataset that was built.
    """

    def __init__(self, build: Callable[[], Any], length: int | None) -> None:
        self._build = build
        self._length = length
        self._built: Any = None
        self._problem = ""

    def __len__(self) -> int:
        """Samples. Where the dataset cannot be built, the length that was given, or else a large number and a warning."""
        if context.context().in_job:
            return len(self._sized())
        if self._length is not None:
            return self._length
        if self._built is None and not self._problem:
            try:
                self._sized()
            except OSError as error:
                self._problem = f"{type(error).__name__}: {error}"
                warn(
                    f"The dataset cannot be built here ({self._problem}), only in the processes that train: its length is "
                    "not known here. If something is computed from it, such as the steps of a schedule, say length="
                )
        return _UNKNOWN if self._problem else len(self._sized())

    def __getitem__(self, index: Any) -> Any:
        return self._sized()[index]

    def __getattr__(self, name: str) -> Any:
        # Pickle asks for names that begin with two underscores before there are any attributes.
        if name.startswith("_") and name != "__getitems__":
            raise AttributeError(name)
        if not context.context().in_job and (self._problem or self._built is None):
            raise AttributeError(f"{name}: the dataset is built in the processes that train")
        return getattr(self._sized(), name)

    def __getstate__(self) -> dict[str, Any]:
        return {"_build": self._build, "_length": self._length, "_built": None, "_problem": ""}

    def _sized(self) -> Any:
        """The dataset, built at the first call."""
        if self._built is None:
            built = self._build()
            _check(built, self._length)
            self._built = built
        return self._built


def dataset(build: Callable[[], Any], *, length: int | None = None) -> LazyDataset:
    """A dataset that is built in the processes that train, from files that only they see.

        loader = DataLoader(kd.dataset(lambda: ImageFolder("/data/train", transform)), batch_size=64, shuffle=True)

    Args:
        build: Makes the dataset: map-style, with a length.
        length: Its samples, for what the notebook computes from `len(loader)`, such as a schedule. Left out: known here
            only if the dataset can be built here.

    Returns:
        A dataset for a `DataLoader`.

    Raises:
        ConfigError: An argument is wrong.
    """
    given: Any = build
    if not callable(given):
        remedy = "Pass a function that makes it: kd.dataset(lambda: ImageFolder('/data/train'))"
        raise ConfigError("build", f"it is a {type(given).__name__}, not a function", remedy)
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ConfigError("length", f"{length!r} is not a whole number of 1 or more", "Give the number of samples")
    return LazyDataset(build, length)


def _check(built: Any, length: int | None) -> None:
    if isinstance(built, IterableDataset) or not hasattr(built, "__getitem__") or not hasattr(built, "__len__"):
        remedy = "A stream reads nothing before it is iterated: give it to the DataLoader as it is"
        raise ConfigError(
            "build", f"it made a {type(built).__name__}, which has no length and no samples by index", remedy
        )
    found = len(cast("Sized", built))
    if length is not None and found != length:
        raise ConfigError(
            "length", f"it is {length:,}, and the dataset that was built has {found:,} samples", "Correct it"
        )
