"""Results that a job has left in its store, for a notebook that could not take them from the pods."""

from __future__ import annotations

import pathlib
import shutil

from kale_dist.backends.kubernetes import preparation, reader_pod, self_pod, submission
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.errors import StoreError
from kale_dist.spec import JobSpec
from kale_dist.url_store import UrlStore


def copy(cluster: Cluster, spec: JobSpec, name: str, path: pathlib.Path) -> bool:
    """Copy an outcome or the checkpoint from the job's store, if this process sees that store.

    Args:
        cluster: Where the job ran.
        spec: The job.
        name: Such as `outcome-0-1`.
        path: Where to; a file that is there is replaced when all has come.

    Returns:
        False where the store is a claim that this process's pod does not mount, or where there is none.

    Raises:
        StoreError: The store has no such file, or cannot be read.
    """
    kept = f"jobs/{spec.name}/{name}"
    claim, _ = submission.claim_of(spec)
    if spec.store and not claim:
        UrlStore(spec.store).get_file(kept, path)
        return True
    folder = preparation.claim_here(spec, self_pod.find(cluster)) if claim else None
    if folder is None:
        return False
    part = path.with_name(f".{name}.part")
    try:
        shutil.copyfile(folder / kept, part)
        part.replace(path)
    except OSError as error:
        raise StoreError(f"{folder / kept} could not be copied to {path}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return True


def last_attempt(cluster: Cluster, spec: JobSpec) -> int:
    """The last attempt of which the job's store has an outcome of rank 0; 0 if it has none.

    Raises:
        StoreError: The store cannot be read.
        BackendError: It cannot be reached from here.
    """
    names = [f"outcome-{attempt}-0" for attempt in range(spec.policy.max_restarts, 0, -1)]
    claim, _ = submission.claim_of(spec)
    if not names or not spec.store:
        return 0
    folder = preparation.claim_here(spec, self_pod.find(cluster)) if claim else None
    if not claim:
        store = UrlStore(spec.store)
        there = {name for name in names if store.exists(f"jobs/{spec.name}/{name}")}
    elif folder is not None:
        there = {name for name in names if (folder / "jobs" / spec.name / name).exists()}
    else:
        with reader_pod.reading(cluster, spec) as reader:
            there = set(reader.names())
    return next((int(name.split("-")[1]) for name in names if name in there), 0)


def fetch(cluster: Cluster, spec: JobSpec, name: str, folder: pathlib.Path) -> None:
    """Bring an outcome or the checkpoint of an ended job here, by a reader pod where nothing else will do.

    A reader takes seconds to start, so it brings the outcomes of the other ranks, too.

    Args:
        cluster: Where the job ran.
        spec: The job.
        name: Such as `outcome-0-1`.
        folder: Where to.

    Raises:
        StoreError: The store has no such file.
        BackendError: The store cannot be reached from here; the message says how to get at the files.
    """
    if not spec.store or copy(cluster, spec, name, folder / name):
        return
    attempt = name.rpartition("-")[0]
    with reader_pod.reading(cluster, spec) as reader:
        there = reader.names()
        if name not in there:
            claim, _ = submission.claim_of(spec)
            raise StoreError(f"The claim {claim!r} has no {name} of {spec.name}")
        for other in there:
            if other == name or (attempt and other.rpartition("-")[0] == attempt and not (folder / other).exists()):
                reader.fetch(other, folder / other)
