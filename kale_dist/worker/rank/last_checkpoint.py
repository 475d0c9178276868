"""Finds the checkpoint of another package's trainer from which a launched function resumes."""

from __future__ import annotations

import json
import os
import pathlib
import re
import zipfile
from collections.abc import Iterator

from kale_dist.wire import context
from kale_dist.worker.rank import joint_saving

_FOLDER = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = "checkpoint-is-incomplete.txt"
"""With this file a Trainer of transformers marks what it had no time to finish."""


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The path of the newest whole checkpoint that a trainer has left in a folder; None if there is none, or no such folder.

    So one line resumes after a loss, and begins where there is nothing yet:

        trainer.train(resume_from_checkpoint=kd.last_checkpoint(output_dir))
        trainer.fit(model, loader, ckpt_path=kd.last_checkpoint(dirpath))

    It looks at names and files, not at whose they are: **a folder that holds last week's training gives last week's checkpoint.** Give each job
    a folder of its own, on a volume that all pods see.

    Whole is a folder `checkpoint-N` of transformers with its `trainer_state.json`, with no sign that it is unfinished, and with no fewer
    random states than there are ranks, or than one before it has; or a `*.ckpt` of Lightning, a file or folder that can be read to its end.
    In a job all ranks get rank 0's answer, and so have to call it.

    Args:
        folder: `output_dir` of transformers, `dirpath` of Lightning's ModelCheckpoint.
    """
    path = pathlib.Path(folder).expanduser()
    return joint_saving.of_first(lambda: _newest(path)) or None


def _newest(folder: pathlib.Path) -> str:
    found = _of_transformers(folder) or _of_lightning(folder)
    if found is not None and context.context().in_job:
        context.log(f"The newest whole checkpoint in {folder} is {found.name}")
    return str(found or "")


def _of_transformers(folder: pathlib.Path) -> pathlib.Path | None:
    found = {one: _random_states(one) for one in _finished(folder)}
    newest = sorted(found, key=lambda one: int(one.name.partition("-")[2]), reverse=True)
    for place, one in enumerate(newest):
        before = next((found[older] for older in newest[place + 1 :] if found[older]), 0)
        if found[one] >= min(context.context().world_size, before):
            return one
    return None


def _finished(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The checkpoints of transformers in a folder whose last file is written."""
    for one in folder.glob("checkpoint-*"):
        if _FOLDER.fullmatch(one.name) and not (one / _UNFINISHED).exists():
            try:
                json.loads((one / "trainer_state.json").read_bytes())
            except (OSError, ValueError):
                continue
            yield one


def _random_states(checkpoint: pathlib.Path) -> int:
    """For how many ranks there are random states, without a gap. Of a single process they have another name."""
    count = 0
    while zipfile.is_zipfile(checkpoint / f"rng_state_{count}.pth"):
        count += 1
    return count if count > 1 else int(zipfile.is_zipfile(checkpoint / "rng_state.pth"))


def _of_lightning(folder: pathlib.Path) -> pathlib.Path | None:
    """Of a folder with parts, Lightning writes `meta.pt` last."""
    found = (one for one in folder.glob("*.ckpt") if zipfile.is_zipfile(one if one.is_file() else one / "meta.pt"))
    return max(found, key=lambda one: one.stat().st_mtime, default=None)
