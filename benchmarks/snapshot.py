"""Taking and loading a snapshot beside what one would write by hand: cloudpickle, SHA-256, one file.

    python benchmarks/snapshot.py [megabytes] [rounds]

Each measurement is a fresh process; the two ways take turns. Prints seconds, and the extra memory as a share of the
model: the peak of anonymous and shared memory during the snapshot, less what was there before.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Self

WAYS = ("kale_dist", "cloudpickle + sha256 + write")


def resident_bytes() -> int:
    """Memory of this process that is its own: not files that it has mapped."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


class Peak:
    """Watches `resident_bytes` from a thread while a block runs."""

    def __enter__(self) -> Self:
        self.before = self.most = resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, resident_bytes())

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        """The highest value seen, less the first one."""
        return self.most - self.before


def measure(way: str, megabytes: int) -> dict[str, float]:
    """One snapshot in this process: seconds to save and to load, extra memory as a share of the model."""
    import torch

    count = max(1, megabytes // 4)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(count)])
    size = sum(p.nbytes for p in model.parameters())

    def train(model: torch.nn.Module) -> int:
        return len(list(model.parameters()))

    with tempfile.TemporaryDirectory() as folder:
        save, load = (kale_dist_way if way == WAYS[0] else plain_way)(train, model, pathlib.Path(folder))
        with Peak() as peak:
            started = time.perf_counter()
            save()
            saved = time.perf_counter() - started
        started = time.perf_counter()
        load()
        loaded = time.perf_counter() - started
    return {"save_s": saved, "load_s": loaded, "extra": peak.extra_bytes / size}


def kale_dist_way(fn: Any, model: Any, folder: pathlib.Path) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Capture into a folder store, load from it."""
    from kale_dist.snapshot import loading
    from kale_dist.snapshot.capture import capture
    from kale_dist.wire import blobs

    store, taken = blobs.FolderStore(folder), list[Any]()

    def save() -> None:
        taken.append(capture(fn, (model,), {}, store=store, label="train"))

    return save, lambda: loading.load(store, taken[0].digest, fill_main=False)


def plain_way(fn: Any, model: Any, folder: pathlib.Path) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Pickle, hash, write; read, unpickle."""
    import hashlib
    import pickle

    import cloudpickle

    path = folder / "snapshot"

    def save() -> None:
        data = cloudpickle.dumps((fn, (model,), {}))
        hashlib.sha256(data).hexdigest()
        path.write_bytes(data)

    return save, lambda: pickle.loads(path.read_bytes())


def main() -> None:
    """Take turns and print medians."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3  # noqa: PLR2004
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            command = [sys.executable, __file__, "measure", way, str(megabytes)]
            results[way].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    print(f"model of {megabytes} MB, median of {rounds}: save s, load s, extra memory / model")
    for way, rows in results.items():
        numbers = [statistics.median(row[name] for row in rows) for name in ("save_s", "load_s", "extra")]
        print(f"{way:32} {numbers[0]:8.2f} {numbers[1]:8.3f} {numbers[2]:8.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main()
