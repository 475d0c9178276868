"""What ranks do with packages that were sent to them. The pods have no pytest."""

import importlib.metadata
import importlib.resources
import subprocess
import sys
import time

import kale_dist as kd


def uses_packages():
    """What a rank finds of `of_a_notebook`: everything that an installation would give it."""
    import fastkit
    import minekit
    import torch

    here = [sys.executable, "-c", "import fastkit, minekit; print(fastkit.times(minekit.answer()))"]
    loader = torch.utils.data.DataLoader(
        range(2), num_workers=1, collate_fn=fastkit_times, multiprocessing_context="spawn"
    )
    return {
        "compiled": fastkit.times(21),
        "editable": minekit.answer(),
        "data": importlib.resources.files("fastkit").joinpath("data/words.txt").read_text(),
        "version": importlib.metadata.version("fastkit"),
        "points": [point.load()() for point in importlib.metadata.entry_points(group="minekit.plugins")],
        "script": subprocess.run(["fastkit-hello"], capture_output=True, text=True, check=True).stdout,
        "subprocess": subprocess.run(here, capture_output=True, text=True, check=True).stdout,
        "spawned": list(loader),
    }


def fastkit_times(batch):
    import fastkit

    return fastkit.times(batch[0])


USED = {
    "compiled": 42, "editable": 41, "data": "alpha beta", "version": "1.0", "points": [41], "script": "hello of fastkit\n",
    "subprocess": "82\n", "spawned": [0, 2],
}  # fmt: skip


def uses_them_after_a_pod_is_lost():
    used = uses_packages()
    if not kd.context().attempt:
        print("ready", flush=True)
        time.sleep(600)
    return used


def versions_of_what_torch_has_imported():
    import torch
    import typing_extensions

    return typing_extensions.MARK, importlib.metadata.version("typing-extensions"), torch.ones(2).sum().item()
