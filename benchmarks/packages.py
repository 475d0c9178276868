"""Packages that an image lacks, in two pods: sent by `packages="here"`, against a layer of the image, a raw copy, and none at all.

    python benchmarks/packages.py [rounds [names [large]]]

needs a cluster (kubeconfig, `KALE_DIST_NAMESPACE`, `KALE_DIST_IMAGE`), here the packages `names` (`einops,scikit-learn`), and for the
layer a registry (`KALE_DIST_REGISTRY`) with an index. Rounds are interleaved and take turns at being first; the table gives medians
and ratios of the same run, in new pods each time:

- from the call to the first step of two ranks that have imported the packages: with none of them, sent, as a layer that is there;
- `large` MB that do not compress, as four packages and as four tensors of a call's argument: from the call to the ranks' start.
"""

from __future__ import annotations

import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import kale_dist as kd

SMALL: dict[str, Any] = {"resources": {"cpu": 0.2, "memory": "3Gi"}}


def first_step(names: tuple[str, ...]) -> float:
    """Import modules, meet, and take a step; gives the time."""
    import importlib

    import torch.distributed as dist

    for name in names:
        importlib.import_module(name)
    model = torch.nn.Linear(32, 10)
    model(torch.ones(8, 32)).sum().backward()
    dist.all_reduce(model.weight.grad)
    return time.time()


def starts(tensors: list[torch.Tensor]) -> float:
    """Do nothing with what has come; gives the time."""
    del tensors
    return time.time()


def timed(fn: Callable[..., float], argument: Any, **place: Any) -> float:
    """Seconds from a call to what its last rank returns."""
    began = time.time()
    job = kd.launch(fn, argument, number_of_processes=2, on=kd.Kubernetes(**SMALL, **place))
    ended = max(job.results(600))
    job.delete()
    return ended - began


def make_large(folder: pathlib.Path, size: int) -> list[str]:
    """Install four packages of random bytes into a folder of `sys.path`; gives their names."""
    names = [f"large{number}" for number in range(4)]
    for name in names:
        info = folder / f"{name}-1.dist-info"
        info.mkdir()
        (folder / f"{name}.bin").write_bytes(os.urandom(size // 4))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "RECORD").write_text(f"{name}.bin,,\n{name}-1.dist-info/METADATA,,\n{name}-1.dist-info/RECORD,,\n")
    sys.path.insert(0, str(folder))
    return names


def main(rounds: int, names: str, large_mb: int) -> None:
    """Print the table."""
    wanted, modules = names.split(","), tuple(name.replace("scikit-learn", "sklearn") for name in names.split(","))
    folder = tempfile.TemporaryDirectory()
    large = make_large(pathlib.Path(folder.name), large_mb * 1_000_000)
    contestants: dict[str, Callable[[], float]] = {
        "first step, none": lambda: timed(first_step, ()),
        "first step, sent": lambda: timed(first_step, modules, packages=f"here: {names}"),
        f"{large_mb} MB, tensors": lambda: timed(starts, [torch.rand(large_mb * 62_500) for _ in range(4)]),
        f"{large_mb} MB, packages": lambda: timed(starts, [], packages=f"here: {','.join(large)}"),
    }
    if os.environ.get("KALE_DIST_REGISTRY"):
        contestants["first step, a layer"] = lambda: timed(first_step, modules, packages=wanted)
    for contestant in contestants.values():
        contestant()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants) if number % 2 else list(reversed(contestants))
        for name in order:
            seconds[name].append(contestants[name]())
    first, raw = (statistics.median(seconds[name]) for name in ("first step, none", f"{large_mb} MB, tensors"))
    for name, each in seconds.items():
        median, base = statistics.median(each), first if name.startswith("first") else raw
        print(
            f"{name:25} {median:6.1f} s  {median / base:4.2f} times, {median - base:+.1f} s  {[round(one, 1) for one in each]}"
        )


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(int(given.get(1, 5)), given.get(2, "einops,scikit-learn"), int(given.get(3, 290)))
