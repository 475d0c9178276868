"""The verbs: they put the steps of a call in order, and only that.

Checks, then the agent's start in the background, then the snapshot, specification, plan and submission. When a call
returns, the snapshot is complete and nothing has started.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import string
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kale_dist import backends, checks, names, records, snapshot, training_checks, weights
from kale_dist.backends.base import Backend, JobRef, Plan, WarmsUp
from kale_dist.blobs import FolderStore, MemoryStore, Store
from kale_dist.checks import Machine, Run
from kale_dist.errors import ConfigError, KaleDistWarning
from kale_dist.job import Job
from kale_dist.notebook import live
from kale_dist.outcomes import OutcomeReader
from kale_dist.snapshot import Captured
from kale_dist.spec import JobSpec, Volume
from kale_dist.strategies import AllReduce, Strategy

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from kale_dist.training.result import TrainingResult

R = TypeVar("R")

_SUFFIX_LENGTH = 5
_GIB = 1 << 30

_jobs: weakref.WeakValueDictionary[str, Job[Any]] = weakref.WeakValueDictionary()
"""Reference to the handle that this process already has, which knows the notebook's own objects."""
_jobs_lock = threading.Lock()
