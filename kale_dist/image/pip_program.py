"""pip as a program that resolves and fetches for another machine's Python.

The packages of the interpreter that runs it must not count as installed, those of the image must. So it runs isolated,
without this interpreter's site directories, with a folder of bare metadata in front; and what requirements' markers ask
about the machine and the Python's version is answered for the image.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from kale_dist.errors import ImageError
from kale_dist.image.inventory import Inventory

_MINIMUM = (23, 3)
"""The first pip whose dry run takes the platform of another machine."""

_START = """
import gc, json, os, platform, runpy, sys
installed, library, machine, version, mark = sys.argv[1:]
sys.path[:0] = [installed]
sys.path.append(library)
platform.machine = lambda: machine
platform.python_version = lambda: version
platform.python_version_tuple = lambda: tuple(version.split("."))
commands = os.fdopen(os.dup(0), encoding="utf-8")
with open(os.devnull) as nothing:
    os.dup2(nothing.fileno(), 0)
gc.disable()
try:
    import pip._internal.cli.main, pip._internal.commands.download, pip._internal.commands.install
    import pip._internal.network.session as session
    session.user_agent = lambda: "pip/" + pip.__version__
except ImportError:
    pass
gc.freeze()
gc.enable()
for command in commands:
    sys.argv[1:] = json.loads(command)
    try:
        runpy.run_module("pip", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code
    sys.stderr.flush()
    print("" if code else mark, flush=True)
    if code:
        sys.exit(code)
"""
"""Reads commands as lines of JSON and marks the end of each; the first that fails is the last.

Starting pip takes longer than what it does for a few packages: its modules are imported while the first command is made
ready, and what they consist of is not looked through for garbage, of which there is none. Nor does it run programs (rustc,
lsb_release) to tell the index about this machine, which the packages are not for. A command that failed may be tried
again with other packages in a folder that pip has looked into, and would not look into again.
"""

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64", "386": "i686", "arm": "armv7l"}
"""Architectures of images that Python calls otherwise."""

_OLDEST_GLIBC = {"x86_64": 5, "i686": 5}
_OLDEST_GLIBC_ELSEWHERE = 17
_LEGACY = {
    "x86_64": ("manylinux2014", "manylinux2010", "manylinux1"),
    "i686": ("manylinux2014", "manylinux2010", "manylinux1"),
}

_MISLEADING = frozenset({
    "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_REQUIRE_VIRTUALENV", "PIP_NO_BINARY",
    "PIP_ONLY_BINARY", "PIP_REQUIREMENT", "PIP_DRY_RUN", "PIP_REPORT", "PIP_PLATFORM", "PIP_ABI", "PIP_QUIET", "PIP_DEST",
    "PIP_WHEEL_DIR", "PIP_FORCE_REINSTALL", "PIP_IGNORE_INSTALLED", "PIP_UPGRADE", "PIP_REQUIRE_HASHES",
})  # fmt: skip
"""Settings that say where packages go on this machine."""

_QUIET = ("--no-input", "--disable-pip-version-check", "--no-color", "--progress-bar", "off")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")
_SECRET = re.compile(r"(?<=://)[^/@\s]+@")


class PipError(Exception):
    """pip ended with an error.

    Args:
        output: All that it printed, without credentials.
    """

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


class Pip:
    """pip for one image; use it in a `with`.

    Args:
        inventory: What the image has.
        folder: An empty folder for what it needs on the way.
        index_urls: Where packages come from, the first in the place of the default; empty: as pip is configured here.
        say: Takes a line for the user.

    Raises:
        ImageError: This Python has no pip, or one that is too old.
    """

    def __init__(
        self, inventory: Inventory, folder: pathlib.Path, *, index_urls: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._inventory = inventory
        self._folder = folder
        self._say = say
        self._told: set[str] = set()
        self._process: subprocess.Popen[str] | None = None
        self._mark = ""
        self._sources = folder / "from-source"
        self._sources.mkdir()
        self._installed = folder / "installed"
        self._installed.mkdir()
        library = folder / "pip"
        library.mkdir()
        (library / "pip").symlink_to(_find())
        self._library = library
        self._index = [f"--index-url={url}" for url in index_urls[:1]] + [
            f"--extra-index-url={url}" for url in index_urls[1:]
        ]

    def lay_installed(self, metadata: Iterable[tuple[str, str, Iterable[str]]]) -> None:
        """Tell what is installed.

        Args:
            metadata: Name, version and requirements of each package.
        """
        for name, version, requires in metadata:
            place = self._installed / f"{name.replace('-', '_')}-{version}.dist-info"
            place.mkdir(exist_ok=True)
            lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            for requirement in requires:
                lines += [f"Provides-Extra: {extra}" for extra in _EXTRA.findall(requirement)]
                lines.append(f"Requires-Dist: {requirement}")
            (place / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def resolve(self, requirements: Sequence[str], constraints: Sequence[str]) -> list[dict[str, Any]]:
        """What has to be installed for these requirements, as pip's report has it.

        Raises:
            PipError: There is no solution.
        """
        report, limits = self._folder / "report.json", self._folder / "constraints.txt"
        limits.write_text("".join(f"{line}\n" for line in constraints), encoding="utf-8")
        self._run_for_image(
            "install", "--dry-run", f"--report={report}", f"--constraint={limits}", f"--find-links={self._sources}",
            *self._index, *_target(self._inventory), "--", *requirements,
        )  # fmt: skip
        installs: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
        return installs

    def explain_missing(self, requirement: str) -> str:
        """What pip tells of its search for one requirement, in full."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            arguments = ("--no-deps", f"--dest={folder}", *self._index, *_target(self._inventory), "--", requirement)
            try:
                return self._run_for_image("download", "-vv", *arguments)
            except PipError as error:
                return error.output

    def download(self, links: Sequence[str], folder: pathlib.Path) -> None:
        """Fetch wheels.

        Args:
            links: Each `name @ url`, with `#sha256=...` where that is known.
            folder: Where the wheels go.

        Raises:
            PipError: One could not be fetched.
        """
        listed = self._folder / "links.txt"
        listed.write_text("".join(f"{link}\n" for link in links), encoding="utf-8")
        self._run_for_image(
            "download",
            "--no-deps",
            f"--dest={folder}",
            f"--requirement={listed}",
            *self._index,
            *_target(self._inventory),
        )

    def build(self, name: str, requirement: str) -> pathlib.Path:
        """Make a wheel from a package's source, with this machine's Python; the next `resolve` finds it.

        Returns:
            The wheel.

        Raises:
            PipError: There is no source, or it cannot be built.
        """
        before = set(self._sources.iterdir())
        command = [sys.executable, "-m", "pip", "wheel", *_QUIET, "--no-deps", f"--wheel-dir={self._sources}"]
        self._run([*command, f"--no-binary={name}", *self._index, "--", requirement])
        made = sorted(set(self._sources.iterdir()) - before)
        if not made:
            raise PipError(f"{requirement} gave no wheel.")
        return made[0]

    def _tell(self, line: str) -> None:
        """Say a line that explains why it takes long; what is in pip's cache by then is not said again."""
        if line.startswith("Downloading ") and ".metadata" not in line and line not in self._told:
            self._told.add(line)
            self._say(line)

    def _run_for_image(self, *arguments: str) -> str:
        """Run pip as if it were in the image: one process for what goes well."""
        process = self._process or self._start_for_image()
        if process.stdin is not None:
            # It may have ended: then its output tells why.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps([*arguments[:1], *_QUIET, *arguments[1:]]) + "\n")
                process.stdin.flush()
        lines: list[str] = []
        for line in self._lines(process):
            lines.append(line.removesuffix(self._mark))
            if line.endswith(self._mark):
                return "\n".join(lines)
        self.close()
        raise PipError("\n".join(lines))

    def _start_for_image(self) -> subprocess.Popen[str]:
        self._mark = secrets.token_hex()
        known = (str(self._installed), str(self._library), _machine(self._inventory), self._inventory.python_version)
        command = [sys.executable, "-I", "-S", "-c", _START, *known, self._mark]
        self._process = self._start(command, subprocess.PIPE)
        return self._process

    def close(self) -> None:
        """End what runs. Calling it again does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            # What was not written any more is of no use to a process that has ended.
            with contextlib.suppress(BrokenPipeError):
                process.__exit__(None, None, None)

    def __enter__(self) -> Self:
        self._start_for_image()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, command: Sequence[str]) -> str:
        """All that a program prints until it ends."""
        with self._start(command, subprocess.DEVNULL) as process:
            try:
                output = "\n".join(self._lines(process))
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise PipError(output)
        return output

    def _start(self, command: Sequence[str], stdin: int) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=self._folder,
            encoding="utf-8",
            errors="replace",
        )

    def _lines(self, process: subprocess.Popen[str]) -> Iterator[str]:
        """What it prints; lines about large downloads and builds are said at once."""
        for line in process.stdout or ():
            shown = _SECRET.sub("***@", line.rstrip())
            self._tell(shown.strip())
            yield shown


def _find() -> pathlib.Path:
    """The folder of this Python's pip."""
    found = importlib.util.find_spec("pip")
    if found is None or found.origin is None:
        raise ImageError(
            "Packages for an image are resolved by pip, and this Python has none. "
            "Install it with `python -m ensurepip --upgrade` (or `uv pip install pip`)."
        )
    version = importlib.metadata.version("pip")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _MINIMUM:
        raise ImageError(
            f"Packages for an image are resolved by pip {'.'.join(map(str, _MINIMUM))} or newer, and this Python has "
            f"{version}. Upgrade it with `python -m pip install --upgrade pip`."
        )
    return pathlib.Path(found.origin).parent


def _machine(inventory: Inventory) -> str:
    """The image's architecture as Python calls it."""
    architecture = inventory.platform.split("/")[1]
    return _MACHINES.get(architecture, architecture)


def _target(inventory: Inventory) -> list[str]:
    """Options that describe the image's Python; platforms with the newest C library first, as pip prefers them."""
    machine = _machine(inventory)
    family, _, version = inventory.libc.partition(" ")
    major, minor = (int(part) for part in version.split("."))
    if family == "manylinux":
        oldest = _OLDEST_GLIBC.get(machine, _OLDEST_GLIBC_ELSEWHERE)
        tags = [f"manylinux_{major}_{step}" for step in range(minor, oldest - 1, -1)]
        tags += _LEGACY.get(machine, ("manylinux2014",))
    else:
        tags = [f"{family}_{major}_{step}" for step in range(minor, -1, -1)]
    abi = f"cp{inventory.python_minor.replace('.', '')}"
    options = [
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={inventory.python_version}",
        f"--abi={abi}",
    ]
    return options + [f"--platform={tag}_{machine}" for tag in (*tags, "linux")]
