"""Images that BuildKit makes in the Docker engine: for recipes that run commands, and for users who prefer it.

The engine is sent a folder with a Dockerfile and the recipe's files. What only the build needs (pip's settings with the
passwords in them, certificates, caches) is mounted, so that nothing of it stays in the image. A build that fails shows the
last lines of its log, and one that is interrupted leaves nothing running.
"""

from __future__ import annotations

import configparser
import dataclasses
import functools
import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kale_dist import engine as engines
from kale_dist.blobs import FolderStore
from kale_dist.engine import Engine
from kale_dist.errors import ConfigError, ImageError
from kale_dist.image import auth, packages
from kale_dist.image import base as bases
from kale_dist.image.reference import Reference
from kale_dist.recipe import Recipe

Say = Callable[[str], None]

_MOUNTED = "/dev/shm/kale-dist"  # noqa: S108 - in memory: elsewhere the folder that is mounted on would stay in the image
_KEPT = "/tmp/.kale-dist-kept"  # noqa: S108 - a file of the build's own container
_ASKING_S = 30.0
_ENDING_S = 2.0
"""It cancels at once, or hangs while it does (20.10 does both). Killed, the engine cancels for it."""
_FIRST_WITHOUT = 23
"""Major version of docker's command line from which on BuildKit is a plugin."""

_SHOWN_LINES = 40

_SECRETS = {"certificates.pem": "PIP_CERT", "pip.conf": "PIP_CONFIG_FILE", "netrc": "NETRC"}
"""Files that are mounted, and the variable that names each."""

_PREFIX = re.compile(r"#\d+ (?:\d+\.\d+ )?")
"""What BuildKit puts before a line: the step's number, and the seconds since its begin where the step wrote the line."""

_CHATTER = re.compile(
    r"#\d+ (?:sha256:|DONE |CACHED|copy /context|transferring |resolve |extracting |exporting |writing |naming |\[internal|"
    r"\.\.\.|preparing )"
)

_TROUBLES = (
    (r"no space left on device|disk quota exceeded", "the engine's disk is full", "`docker system df` shows what fills it; `docker builder prune` and `docker image prune` make room"),
    (r"CERTIFICATE_VERIFY_FAILED|certificate signed by unknown authority|x509: ", "a server showed a certificate that is not trusted", "For packages, set PIP_CERT to the file with your network's certificates: it is taken into the build. For a registry, put its certificate into /etc/docker/certs.d on the engine's machine"),
    (r"server gave HTTP response to HTTPS client", "the registry speaks plain HTTP, and the engine expects HTTPS", "Add it to `insecure-registries` in the engine's daemon.json"),
    (r"Temporary failure in name resolution|Name or service not known|Could not resolve|no such host|Network is unreachable|Connection timed out|i/o timeout|TLS handshake timeout|connection refused", "the build cannot reach the network that it needs", "Containers of this engine need DNS and a way out, or a proxy in ~/.docker/config.json; index_urls= names a mirror"),
    (r"toomanyrequests|429 Too Many Requests|rate limit", "the registry refuses further requests for now", "Wait, or log in with `docker login`"),
    (r"cannot install .*\btorch\b.*conflicting|constraint\) torch==", "the packages need another torch than the base has", "Choose versions that go with the base's torch, another base, or allow_torch_change=True"),
    (r"ResolutionImpossible|conflicting dependencies", "the packages contradict each other", "pip's own words are below: loosen one of them"),
    (r"No matching distribution found for (\S+)", "there is no {0} for the base's Python and platform", "Check name and version, and what the index has: `pip index versions` lists them"),
    (r"Unable to locate package (\S+)", "apt knows no package {0}", "Check the name for the base's release of Debian or Ubuntu"),
    (r"apt-get: (?:command )?not found", "the base has no apt-get", "Take a base that is Debian or Ubuntu, or one that has these packages"),
    (r"No module named pip", "the base's python3 has no pip", 'Take another base, or leave out builder="docker"'),
    (r"exit code: 137|non-zero code: 137|cannot allocate memory", "a step was killed, most likely for want of memory", "Give the engine's machine more memory"),
    (r"exec format error", "the base is for another processor than the engine's", "Take a base for the engine's platform, or install QEMU's binfmt handlers"),
    (r"error: command '?(?:\S*/)?(\S*(?:gcc|g\+\+|cc|clang|cmake|cargo|rustc))\b.* (?:failed|No such file)", "a package has to be compiled, and that failed ({0})", "Take a version that has wheels, or name compilers and headers in apt="),
)  # fmt: skip
"""What the last lines of a log mean: a pattern, the problem, the remedy. The first one counts."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """An image that was built."""

    digest: str
    """Of its manifest in the registry, `sha256:...`; empty: it was not pushed."""
    image_id: str
    """What the engine calls it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command line that builds with BuildKit."""

    command: tuple[str, ...]
    """How it is called, up to the options of a build."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it needs."""


def build(
    recipe: Recipe,
    *,
    base: str,
    tag: str,
    blobs_dir: pathlib.Path,
    labels: Mapping[str, str],
    say: Say,
    push: bool = True,
    credentials: auth.Credentials | None = None,
) -> Built:
    """Build a recipe's image in the engine, and push it.

    Args:
        recipe: What goes on top of the base.
        base: Reference of the base; it is pulled where the engine does not have it.
        tag: What the image is called: with registry, repository and tag.
        blobs_dir: Folder of the blobs that the recipe's files lie in.
        labels: Labels of the image.
        say: Gets each line of the log.
        push: Whether it goes to the registry; else it stays in the engine.
        credentials: What the registry is shown; None: what docker is configured for.

    Raises:
        ConfigError: There is no BuildKit, or the recipe cannot be written as a Dockerfile.
        ImageError: The build failed, with the last lines of its log; or the base or the registry refused.
        BackendError: There is no engine, or this user may not use it.
    """
    with bases.connected(recipe) as engine, engines.explained(f"building {tag}"):
        program = find()
        if program is None or engine.is_podman:
            what = "Podman has none" if engine.is_podman else "docker's command line here has none"
            raise ConfigError(
                "builder",
                f"Debian packages, and images with builder='docker', are built by BuildKit, and {what}",
                "Install docker's buildx plugin, or name a base image that has what is needed and leave out builder= and apt=",
            )
        found = bases.have(engine, base, platform=recipe.platform, say=say)
        has = f"{found['Os']}/{found['Architecture']}"
        if recipe.platform and not recipe.platform.startswith(has):
            raise ImageError(
                f"The base {base} is for {has}, and the image is to be for {recipe.platform}. Take a base for "
                f"{recipe.platform}, or say platform={has!r}."
            )
        secrets = _secrets(own_index=bool(recipe.index_urls)) if recipe.packages else {}
        text = _dockerfile(recipe, base, user=str(found["Config"].get("User") or ""), secrets=tuple(secrets))
        host = engine.url if engine.url.startswith("unix://") else ""
        with tempfile.TemporaryDirectory(prefix="kale-dist-") as name:
            folder = pathlib.Path(name)
            options = [f"--tag={tag}", "--progress=plain", f"--iidfile={folder / 'image'}"]
            options += [f"--label={key}={value}" for key, value in labels.items()]
            options += [f"--platform={recipe.platform}"] if recipe.platform else []
            options += ["--no-cache"] if recipe.rebuild else []
            for key, content in secrets.items():
                (folder / key).write_bytes(content)
                options.append(f"--secret=id={key},src={folder / key}")
            environment = os.environ | dict(program.environment) | ({"DOCKER_HOST": host} if host else {})
            _write_context(folder / "context", recipe, text, blobs_dir)
            log = _run([*program.command, *options, str(folder / "context")], environment, say)
            if not (folder / "image").is_file():
                raise _failed(tag, log)
            image_id = (folder / "image").read_text().strip()
        digest = _push(engine, tag, credentials, say) if push else ""
    return Built(digest=digest, image_id=image_id)


def find() -> Program | None:
    """The first `docker` on PATH that builds with BuildKit: with the buildx plugin, or so old that it needs none."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    paths = dict.fromkeys(path for folder in folders if (path := shutil.which("docker", path=folder)))
    return next(filter(None, map(_program, paths)), None)


# -- what is built ---------------------------------------------------------------------------------------------------


def _dockerfile(recipe: Recipe, base: str, *, user: str, secrets: tuple[str, ...]) -> str:
    """The Dockerfile of a recipe, whose image runs as the base's user: the same text for the same arguments."""
    lines = [f"FROM {base}"]
    if user:
        lines.append("USER root")
    if recipe.apt:
        install = "DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends"
        caches = f"{_cache('/var/cache/apt')} {_cache('/var/lib/apt/lists')}"
        lines.append(f"RUN {caches} apt-get update && {install} {' '.join(recipe.apt)}")
    if recipe.packages:
        lines.append(_pip(recipe, secrets))
    for number, file in enumerate(recipe.files):
        # The builder reads the text of the list as it reads a quoted word.
        paths = json.dumps([f"files/{number}", _literal(file.path, "files").replace("'", "\\'")], ensure_ascii=False)
        lines.append(f"COPY {paths}")
    for name, value in recipe.environment:
        lines.append(f'ENV {name}="{_literal(value, "environment")}"')
    if user:
        lines.append(f"USER {user}")
    return "\n".join(lines) + "\n"


def _pip(recipe: Recipe, secrets: tuple[str, ...]) -> str:
    folder, cache = f"{_MOUNTED}/settings", f"{_MOUNTED}/cache"
    mounts = [f"--mount=type=bind,source=pip,target={_MOUNTED}/pip", _cache(cache)]
    mounts += [f"--mount=type=secret,id={name},target={folder}/{name}" for name in secrets]
    variables = ["PIP_BREAK_SYSTEM_PACKAGES=1", "PIP_ROOT_USER_ACTION=ignore", "PIP_DISABLE_PIP_VERSION_CHECK=1"]
    variables += [f"{variable}={folder}/{name}" for name, variable in _SECRETS.items() if name in secrets]
    options = [
        "--progress-bar=off",
        "--no-compile",
        f"--cache-dir={cache}",
        f"--requirement={_MOUNTED}/pip/requirements.txt",
    ]
    for number, url in enumerate(recipe.index_urls):
        options.append(f"--{'extra-' if number else ''}index-url={shlex.quote(url)}")
    steps = [f"env {' '.join(variables)} python3 -m pip install {' '.join(options)}"]
    if not recipe.allow_torch_change:
        # pip's list says the version even of a torch that was installed from a file.
        steps = [
            f"(python3 -m pip list --format=freeze | grep -i '^torch==' > {_KEPT} || true)",
            f"{steps[0]} --constraint={_KEPT}",
            f"rm -f {_KEPT}",
        ]
    return " ".join(["RUN", *mounts, " && ".join(steps)])


def _cache(folder: str) -> str:
    return f"--mount=type=cache,target={folder},sharing=locked"


def _literal(text: str, argument: str) -> str:
    if any(char in text for char in "\n\r\0"):
        raise ConfigError(
            argument,
            f"{text!r} has a line break or a NUL in it, and no line of a Dockerfile can say that",
            'Leave it out, or build with builder="layers"',
        )
    return "".join(f"\\{char}" if char in '\\$"' else char for char in text)


def _write_context(folder: pathlib.Path, recipe: Recipe, text: str, blobs_dir: pathlib.Path) -> None:
    """Dockerfile and files in a folder; equal files have equal modes and times, so that the engine's cache holds."""
    (folder / "pip").mkdir(parents=True)
    (folder / "files").mkdir()
    (folder / "Dockerfile").write_text(text, encoding="utf-8")
    (folder / "pip" / "requirements.txt").write_text("".join(f"{line}\n" for line in recipe.packages), encoding="utf-8")
    store = FolderStore(blobs_dir)
    for number, file in enumerate(recipe.files):
        path, copied = store.path(file.digest), folder / "files" / str(number)
        if not path.is_file():
            raise ImageError(
                f"The bytes of {file.path!r} are not in {blobs_dir} any more, so that the image cannot be built. Make the "
                "recipe again from the file."
            )
        shutil.copyfile(path, copied)
        copied.chmod(0o755 if file.executable else 0o644)
        os.utime(copied, (0, 0))


def _secrets(*, own_index: bool) -> dict[str, bytes]:
    """What pip is configured for here, as files that the build can use. Folders of this machine mean nothing there."""
    configured = packages.pip_settings()
    found: dict[str, bytes] = {}
    certificates = packages.certificate_file(configured)
    if certificates:
        try:
            found["certificates.pem"] = pathlib.Path(certificates).read_bytes()
        except OSError as error:
            raise ImageError(
                f"pip is configured for the certificates in {certificates}, which cannot be read here: {error.strerror}. "
                "Set PIP_CERT to a file that can."
            ) from error
    kept: dict[str, str] = {}
    for name in ("index-url", "extra-index-url", "find-links", "proxy", "trusted-host", "timeout", "retries"):
        words = configured.get(name, "").split()
        if name in ("index-url", "extra-index-url", "find-links", "proxy"):
            words = [word for word in words if urllib.parse.urlsplit(word).scheme in {"http", "https"}]
        if words and not (own_index and name in ("index-url", "extra-index-url", "find-links")):
            kept[name] = "\n".join(words)
    if kept:
        written, stream = configparser.RawConfigParser(), io.StringIO()
        written["global"] = kept
        written.write(stream)
        found["pip.conf"] = stream.getvalue().encode()
    netrc = pathlib.Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    if netrc.is_file() and os.access(netrc, os.R_OK):
        found["netrc"] = netrc.read_bytes()
    return found


# -- the build -------------------------------------------------------------------------------------------------------


def _run(arguments: list[str], environment: Mapping[str, str], say: Say) -> list[str]:
    """Run a build; gives the lines of its log, without what BuildKit says of its own work."""
    # In a session of its own: an interrupt of the notebook's whole group would reach it before us, and unexplained.
    process = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
        start_new_session=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    log: list[str] = []
    try:
        for line in process.stdout or ():
            if line.strip() and not _CHATTER.match(line):
                # Of a line that was overwritten, what it was in the end.
                log.append(_PREFIX.sub("", line.rstrip()).rpartition("\r")[2])
                say(log[-1])
        process.wait()
    finally:
        if process.poll() is None:
            # On SIGINT it tells the engine to stop before it goes.
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
    return log


def _failed(tag: str, log: list[str]) -> ImageError:
    """The error for a build that failed: what its last lines mean, and those lines."""
    shown = log[-_SHOWN_LINES:]
    problem, remedy = "a step of it failed", "Its last lines are below"
    for pattern, meaning, advice in _TROUBLES:
        found = re.search(pattern, "\n".join(shown), re.IGNORECASE)
        if found is not None:
            problem, remedy = meaning.format(*(group or "" for group in found.groups())), advice
            break
    text = f"The image {tag} could not be built by BuildKit: {problem}. {remedy}"
    return ImageError("\n".join([text, *(f"  {line}" for line in shown)]))


@functools.lru_cache(maxsize=8)
def _program(path: str) -> Program | None:
    if _asked(path, "buildx", "version") is not None:
        # The engine's own builder, which has the context's name: others cannot reach a registry on its loopback.
        builder = _asked(path, "context", "show") or "default"
        return Program(command=(path, "buildx", "build", "--load", f"--builder={builder}"))
    major = (_asked(path, "version", "--format={{.Client.Version}}") or "").partition(".")[0]
    if major.isdecimal() and int(major) < _FIRST_WITHOUT:
        return Program(command=(path, "build"), environment=(("DOCKER_BUILDKIT", "1"),))
    return None


def _asked(*command: str) -> str | None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_ASKING_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


# -- its way to the registry -----------------------------------------------------------------------------------------


def _push(engine: Engine, tag: str, credentials: auth.Credentials | None, say: Say) -> str:
    """Have the engine push an image; gives the digest of its manifest."""
    import docker.errors

    reference = Reference.parse(tag)
    shown = credentials or auth.find(reference.registry, repository=reference.repository)
    say(f"Pushing {tag}.")
    doing, digest = f"pushing {tag}", ""
    stream: Iterator[dict[str, Any]] = engine.api.push(
        reference.name, tag=reference.tag, stream=True, decode=True, auth_config=auth.for_engine(shown) or {}
    )
    for event in stream:
        if "error" in event:
            meaning = engines.explain(docker.errors.DockerException(str(event["error"])), doing)
            raise ImageError(str(meaning), meaning.retryable)
        digest = (event.get("aux") or {}).get("Digest", digest)
    if not digest:
        raise ImageError(f"The engine pushed {tag} without saying its digest. Push it again.", retryable=True)
    return digest
