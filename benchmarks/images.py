"""Images made without a build against `docker build` and push, and a container of ours against `docker run`.

Run it with `python benchmarks/images.py [rounds [change] [package] [step]]` where a Docker engine answers and a registry
takes what is pushed: REGISTRY names it (`localhost:5000`), KALE_DIST_IMAGE the base in it, with Python 3.11 or later and
torch. Docker has the base, and builds with BuildKit; the first line says how. Rounds are
interleaved and take turns at being first; the table gives medians and ratios of the same run. Every round brings
something that no cache has seen:

- a tiny change: one file of a kilobyte, new in each round;
- a package of 50 MB that does not compress, a new version in each round, from an index on this machine;
- from the call to the first step of two ranks that have met, in one container.

What was pushed stays in the registry, below `bench-images`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import ipaddress
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator

import kale_dist as kd
from kale_dist.image import engine
from kale_dist.image.resolve import resolve
from kale_dist.job import records
from kale_dist.job.spec.recipe import ImageFile, Recipe
from kale_dist.wire.blobs import FolderStore

HOST = os.environ.get("REGISTRY", "localhost:5000")
BASE = os.environ.get("KALE_DIST_IMAGE", f"{HOST}/kale-dist/torch-cpu:2.13.0")
REPOSITORY = "bench-images/made"
PACKAGE_BYTES = 50_000_000

FIRST_STEP = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 10))
model(torch.ones(8, 32)).sum().backward()
print("first step at", time.time(), flush=True)
dist.destroy_process_group()
"""


def take_first_step() -> float:
    """What `FIRST_STEP` does, as a function; gives the time."""
    import torch

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 10))
    model(torch.ones(8, 32)).sum().backward()
    return time.time()


class Index:
    """A package index with versions of one package of `PACKAGE_BYTES`, which gives digests and metadata as PyPI does."""

    def __init__(self, folder: pathlib.Path, url: str) -> None:
        self.url = url
        self._folder = folder / "bulky"
        self._folder.mkdir()
        (self._folder / "index.html").write_text("<!DOCTYPE html>\n")

    def add(self) -> str:
        """Make a new version, and name it."""
        version = f"1.0.{time.time_ns()}"
        info = f"bulky-{version}.dist-info"
        path = self._folder / f"bulky-{version}-py3-none-any.whl"
        metadata = f"Metadata-Version: 2.1\nName: bulky\nVersion: {version}\n"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("bulky/__init__.py", "")
            wheel.writestr("bulky/data.bin", os.urandom(PACKAGE_BYTES))
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
        path.with_name(f"{path.name}.metadata").write_text(metadata)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with (self._folder / "index.html").open("a") as page:
            page.write(f'<a href="{path.name}#sha256={digest}" data-core-metadata="true">{path.name}</a>\n')
        return f"bulky=={version}"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Write no log."""

    def end_headers(self) -> None:
        """A version that has just been added is there for all who ask."""
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[Index]:
    """Serve an index where this process and the engine's builds both reach it."""
    with contextlib.closing(engine.connect()) as connected:
        config = connected.client.networks.get("bridge").attrs["IPAM"]["Config"][0]
    # An engine that has just started does not list its own address.
    gateway = config.get("Gateway") or str(ipaddress.ip_network(config["Subnet"])[1])
    server = http.server.ThreadingHTTPServer((gateway, 0), functools.partial(_Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    # Plain HTTP from another address than the loopback has to be allowed.
    os.environ["PIP_TRUSTED_HOST"] = gateway
    try:
        yield Index(folder, f"http://{gateway}:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_layer(recipe: Recipe) -> float:
    """Make a recipe's image without a build; seconds until it is in the registry."""
    start = time.perf_counter()
    found = resolve(recipe, base=BASE, registry=f"{HOST}/bench-images", log=lambda _line: None)
    seconds = time.perf_counter() - start
    if not found.was_built:
        raise RuntimeError(f"{found.reference} was there before it was made")
    return seconds


def run(*command: str, **environment: str) -> str:
    """Run a program to its end, and give its output."""
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{command} failed: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.stdout


@functools.cache
def has_buildx() -> bool:
    """Whether the command line has the plugin, which is its only way to BuildKit from version 23 on."""
    return subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode == 0


def make_with_docker(text: str, context: pathlib.Path) -> float:
    """Build a Dockerfile as its users do; seconds until the image is in the registry."""
    (context / "Dockerfile").write_text(text)
    tag = f"{HOST}/{REPOSITORY}:docker-{uuid.uuid4().hex[:8]}"
    start = time.perf_counter()
    if has_buildx():
        run("docker", "buildx", "build", "--quiet", "--push", "--tag", tag, str(context))
    else:
        run("docker", "build", "--quiet", "--tag", tag, str(context), DOCKER_BUILDKIT="1")
        run("docker", "push", "--quiet", tag)
    seconds = time.perf_counter() - start
    subprocess.run(["docker", "image", "rm", "--force", tag], capture_output=True, check=False)
    return seconds


def change_by_layer() -> float:
    """A new file of a kilobyte, by a layer."""
    blob = FolderStore(records.blobs_dir()).put([os.urandom(1024)])
    return make_layer(Recipe(files=(ImageFile(path="/opt/change.bin", digest=blob),)))


def change_by_docker(folder: pathlib.Path) -> float:
    """A new file of a kilobyte, by docker."""
    context = folder / "context"
    (context / "change.bin").write_bytes(os.urandom(1024))
    return make_with_docker(f"FROM {BASE}\nCOPY change.bin /opt/change.bin\n", context)


def package_by_layer(index: Index) -> float:
    """A new version of the package, by a layer."""
    return make_layer(Recipe(packages=(index.add(),), index_urls=(index.url,)))


def package_by_docker(folder: pathlib.Path, index: Index) -> float:
    """A new version of the package, by docker."""
    options = f"--no-cache-dir --index-url {index.url} --trusted-host {os.environ['PIP_TRUSTED_HOST']}"
    return make_with_docker(f"FROM {BASE}\nRUN python3 -m pip install {options} {index.add()}\n", folder / "context")


def step_by_kale_dist() -> float:
    """Seconds from the call until both ranks have taken a step."""
    start = time.time()
    job = kd.launch(take_first_step, number_of_processes=2, on=kd.Docker(image=BASE))
    seconds = max(job.results()) - start
    job.delete()
    return seconds


def step_by_docker_run() -> float:
    """The same with `docker run`, torchrun and a script."""
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", "python3", "-c", FIRST_STEP]
    start = time.time()
    said = run("docker", "run", "--rm", BASE, *torchrun)
    return max(float(line.split()[-1]) for line in said.splitlines() if line.startswith("first step")) - start


def compare(title: str, contestants: dict[str, Callable[[], float]], rounds: int) -> None:
    """Let contestants take turns, after one round that does not count, and print medians with their ratio to the last."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for name in names:
        contestants[name]()
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken[name].append(contestants[name]())
    base = statistics.median(taken[names[-1]])
    print(f"\n{title}")
    print(f"{'':12} {'s':>8} {'x ' + names[-1]:>14}")
    for name in names:
        median = statistics.median(taken[name])
        print(
            f"{name:12} {median:8.2f} {median / base:14.2f}   {[round(value, 2) for value in taken[name]]}", flush=True
        )


def main(rounds: int, chosen: list[str]) -> None:
    """Measure and print."""
    how = "docker buildx" if has_buildx() else "docker build with DOCKER_BUILDKIT"
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, base {BASE}, BuildKit by {how}")
    with tempfile.TemporaryDirectory(prefix="bench-images-") as name:
        folder = pathlib.Path(name)
        for part in ("context", "index"):
            (folder / part).mkdir()
        # What is kept of bases and packages is the round that does not count.
        os.environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "XDG_STATE_HOME": f"{folder}/state"}
        os.environ |= {"UV_CACHE_DIR": f"{folder}/uv"}
        if "change" in chosen:
            compare(
                "A file of a kilobyte on top of the base, until it is in the registry",
                {"kale_dist": change_by_layer, "docker": lambda: change_by_docker(folder)},
                rounds,
            )
        if "package" in chosen:
            with serving(folder / "index") as index:
                compare(
                    f"A package of {PACKAGE_BYTES / 1e6:.0f} MB on top of the base, until it is in the registry",
                    {
                        "kale_dist": lambda: package_by_layer(index),
                        "docker": lambda: package_by_docker(folder, index),
                    },
                    rounds,
                )
    if "step" in chosen:
        compare(
            "From the call to the first step of two ranks in a container",
            {"kale_dist": step_by_kale_dist, "docker run": step_by_docker_run},
            rounds,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2:] or ["change", "package", "step"])
