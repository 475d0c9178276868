"""Builds the simulated GPUs for the torch of this Python, once, and runs tests on them; see `simcuda/README.md`.

    python tests/simulated_gpus.py

prints the folder that belongs onto the PYTHONPATH. It takes a minute on two cores; the folder lies in ~/.cache, by torch's version and the sources' digest.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "simcuda" / "source" / "simcuda"
VERSION = importlib.metadata.version("torch")


def why_not():
    """Why there can be no simulated GPUs here; empty if there can."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11):
        return f"simulated GPUs are built for CPython 3.11, and this is {sys.version.split()[0]}"
    if not VERSION.startswith("2.13.") or not VERSION.endswith("+cpu"):
        return f"simulated GPUs use the inside of torch 2.13 for CPUs, and this is {VERSION}"
    if shutil.which("g++") is None:
        return "simulated GPUs need a C++ compiler (g++)"
    if not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
        return "simulated GPUs need Python's headers (Debian: python3-dev)"
    return ""


def folder():
    """Where the simulation for this torch lies, whether it is built or not."""
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in [pathlib.Path(__file__), *sorted(SOURCES.iterdir())] if path.is_file())
    )
    caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches / "kale-dist-simcuda" / f"{VERSION}-{digest.hexdigest()[:12]}"


def build():
    """Build what is missing, and return its folder. Another process that does so at the same time does no harm."""
    if (made := folder()).is_dir():
        return made
    import torch
    from torch.utils.cpp_extension import include_paths

    made.parent.mkdir(parents=True, exist_ok=True)
    part = pathlib.Path(tempfile.mkdtemp(dir=made.parent))
    shutil.copytree(SOURCES, part / "simcuda")
    libraries = pathlib.Path(torch.__file__).parent / "lib"
    command = [
        "g++", "-std=c++20", "-O1", "-g0", "-s", "-Wno-interference-size", "-shared", "-fPIC", "-fvisibility=hidden",
        "-DTORCH_EXTENSION_NAME=_sim", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_C10D_GLOO",
        *(f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))),
        SOURCES / "_sim.cpp", "-o", part / "simcuda" / f"_sim{sysconfig.get_config_var('EXT_SUFFIX')}",
        f"-L{libraries}", "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python",
    ]  # fmt: skip
    try:
        subprocess.run(["nice", *map(str, command)], check=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(part)
        raise
    # torch finds the simulation as it finds the backends of others: by an installed package's entry point.
    package = part / "simcuda-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: simcuda\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nsimcuda = simcuda:autoload\n")
    try:
        part.rename(made)
    except OSError:
        shutil.rmtree(part)
        if not made.is_dir():
            raise
    for old in made.parent.glob(f"{VERSION}-*"):
        if old != made and old.stat().st_mtime < made.stat().st_mtime - 7 * 24 * 3600:
            shutil.rmtree(old, ignore_errors=True)
    return made


def run(arguments, folder, gpus, root=ROOT, **environment):
    """Run tests where there are so many simulated GPUs: arguments of pytest, or of `tests/gpu/run.py`; `root` is the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "KALE_DIST_TEST"))}
    path = os.pathsep.join(filter(None, [str(build()), os.environ.get("PYTHONPATH")]))
    simulated = {"SIMCUDA_DEVICES": str(gpus), "KALE_DIST_GPU_DEVICES": os.devnull, "PYTHONPATH": path}
    # The warning that a strategy has never run on GPUs is an error elsewhere.
    untried = "ignore::kale_dist.errors.KaleDistWarning"
    how = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-W", untried]
    if arguments[0] == "--group":
        how = ["tests/gpu/run.py", "--out", folder]
    return subprocess.run(
        [sys.executable, *map(str, how), *arguments], cwd=root, env=kept | simulated | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(why_not()) if why_not() else print(build())
