"""BuildKit, run by docker's command line: the engine builds with it only in a session, which docker-py cannot hold.

Taken is the first `docker` on PATH that can: one with the buildx plugin, or one before version 23, which needed none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import IO

_ASKING_S = 30.0
_ENDING_S = 2.0
"""It cancels at once, or hangs while it does (20.10 does both). Killed, the engine cancels for it."""
_FIRST_WITHOUT = 23
"""Major version of docker's command line from which on BuildKit is a plugin."""

_SHOWN = 110
"""Characters of an instruction."""

_LINE = re.compile(r"#(?P<vertex>\d+) (?P<said>.*)")
_OUTPUT = re.compile(r"\d+\.\d+ ?(?P<text>.*)")
_STEP = re.compile(r"\[(?:\S+ )?(?P<number>\d+)/(?P<of>\d+)\] (?P<instruction>.*)")
_CHATTER = re.compile(
    r"sha256:|DONE |copy /context|transferring |resolve |extracting |exporting |writing |naming |\[|\.\.\.|preparing "
)
_CAUSE = re.compile(r"(?:ERROR|error|failed to|executor failed|process \")")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command line that builds with BuildKit."""

    command: tuple[str, ...]
    """How it is called, up to the options of a build."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it needs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a build ended."""

    image_id: str
    """Empty: it failed."""
    log: tuple[str, ...]
    """What its steps wrote."""
    cause: str
    """What it failed of, in BuildKit's words."""


def find() -> Program | None:
    """The command line to build with; None where there is none, or where the user has set `DOCKER_BUILDKIT=0`."""
    if os.environ.get("DOCKER_BUILDKIT") == "0":
        return None
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    paths = dict.fromkeys(path for folder in folders if (path := shutil.which("docker", path=folder)))
    return next(filter(None, map(_program, paths)), None)


def build(
    program: Program,
    context: Iterable[bytes],
    *,
    tag: str,
    labels: Mapping[str, str],
    secrets: Mapping[str, bytes],
    fresh: bool,
    platform: str,
    host: str,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Ended:
    """Build one image in the engine.

    An interrupt ends the build before it is passed on.

    Args:
        program: From `find`.
        context: A tar, with the Dockerfile in it.
        tag: What the image is called in the engine.
        labels: Labels of the image.
        secrets: Files that steps may mount, by name.
        fresh: Whether no step is taken from the cache.
        platform: `linux/amd64` and the like.
        host: The engine, as DOCKER_HOST says it; empty: the one that docker's command line is set to.
        say: Gets each line of the log.
        progress: Gets the step that has begun and their number.
    """
    with tempfile.TemporaryDirectory(prefix="kale-dist-") as name:
        folder = pathlib.Path(name)
        arguments = [*program.command, f"--tag={tag}", "--progress=plain", f"--iidfile={folder / 'image'}"]
        arguments += [f"--label={key}={value}" for key, value in labels.items()]
        arguments += [f"--platform={platform}"] if platform else []
        arguments += ["--no-cache"] if fresh else []
        for key, content in secrets.items():
            (folder / key).write_bytes(content)
            arguments.append(f"--secret=id={key},src={folder / key}")
        environment = os.environ | dict(program.environment) | ({"DOCKER_HOST": host} if host else {})
        log, cause = _run([*arguments, "-"], environment, context, _Reader(say, progress))
        made = folder / "image"
        return Ended(image_id=made.read_text().strip() if made.is_file() else "", log=log, cause=cause)


def shortened(instruction: str) -> str:
    """An instruction of a Dockerfile, as one line of a log shows it."""
    text = re.sub(r"--mount=\S+ ", "", instruction)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _Reader:
    """Turns the plain progress of BuildKit into what the steps wrote."""

    def __init__(self, say: Callable[[str], None], progress: Callable[[int, int], None]) -> None:
        self.log: list[str] = []
        self.rest: list[str] = []
        self._say = say
        self._progress = progress
        self._steps: set[str] = set()
        self._over = False

    def read(self, line: str) -> None:
        """Take the next line."""
        found = _LINE.fullmatch(line)
        # After the first rule everything is said a second time, as a summary.
        self._over = self._over or line == "------"
        if found is None or self._over:
            self.rest.append(line)
            return
        said = found["said"]
        if output := _OUTPUT.fullmatch(said):
            # Of a line that was overwritten, what it was in the end.
            self._keep(output["text"].rpartition("\r")[2])
        elif step := _STEP.fullmatch(said):
            self._steps.add(found["vertex"])
            self._progress(int(step["number"]), int(step["of"]))
            self._keep(f"[{step['number']}/{step['of']}] {shortened(step['instruction'])}")
        elif said == "CACHED":
            if found["vertex"] in self._steps:
                self._keep("  found in the cache")
        elif said.startswith("ERROR"):
            self.rest.append(said)
        elif not _CHATTER.match(said):
            self._keep(said)

    def cause(self) -> str:
        """The line that says what failed."""
        named = [line for line in self.rest if _CAUSE.match(line)]
        return (named or [line for line in self.rest if line.strip()] or [""])[-1]

    def _keep(self, line: str) -> None:
        self.log.append(line)
        self._say(line)


def _run(
    arguments: list[str], environment: Mapping[str, str], context: Iterable[bytes], reader: _Reader
) -> tuple[tuple[str, ...], str]:
    # In a session of its own: an interrupt of the notebook's whole group would reach it before us, and unexplained.
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    if process.stdin is None or process.stdout is None:
        raise AssertionError
    failures: list[Exception] = []
    feeder = threading.Thread(
        target=_feed, args=(process.stdin, context, failures), name="kale-dist-build", daemon=True
    )
    feeder.start()
    try:
        for line in process.stdout:
            reader.read(line.decode(errors="replace").rstrip())
        process.wait()
    finally:
        _end(process)
        feeder.join()
        process.stdout.close()
    if failures:
        raise failures[0]
    return tuple(reader.log), reader.cause()


def _feed(stream: IO[bytes], context: Iterable[bytes], failures: list[Exception]) -> None:
    try:
        with contextlib.suppress(BrokenPipeError), stream:
            for piece in context:
                stream.write(piece)
    except Exception as error:  # noqa: BLE001 - it is raised again in the caller's thread
        failures.append(error)


def _end(process: subprocess.Popen[bytes]) -> None:
    """On SIGINT it tells the engine to stop before it goes."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@functools.lru_cache(maxsize=8)
def _program(path: str) -> Program | None:
    if _asked(path, "buildx", "version") is not None:
        # The engine's own builder, which has the context's name: others cannot reach a registry on its loopback.
        builder = _asked(path, "context", "show") or "default"
        return Program(command=(path, "buildx", "build", "--load", f"--builder={builder}"))
    version = _asked(path, "version", "--format={{.Client.Version}}") or ""
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < _FIRST_WITHOUT:
        return Program(command=(path, "build"), environment=(("DOCKER_BUILDKIT", "1"),))
    return None


def _asked(*command: str) -> str | None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_ASKING_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None
