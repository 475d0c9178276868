"""The base of a job's image: pins it by its digest, and inspects what it contains.

A container of the base runs `PROGRAM` with the Python that a job would run with, and answers in JSON: its version, where it
looks for packages, its platform, and the packages it has. The answer is kept by the image's digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from kale_dist.errors import BackendError, BackendUnavailableError, ConfigError, ImageError
from kale_dist.image import cache
from kale_dist.image.reference import Reference
from kale_dist.image.registry import Registry
from kale_dist.job.spec.recipe import Recipe
from kale_dist.wire import decode

if TYPE_CHECKING:
    from kale_dist.image.engine import Engine

BASE_LABEL = "org.opencontainers.image.base.name"
BASE_DIGEST_LABEL = "org.opencontainers.image.base.digest"

FOLDER = "/opt/kale-dist"
"""The folder of an image in which packages are installed."""

OLDEST_PYTHON = (3, 11)
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures of images, as Python calls them."""

_MARK = "KALE-DIST-BASE "
_ASKING_S = 60
_NO_PYTHON = re.compile(r"executable file not found|no such file or directory|not found in \$PATH", re.IGNORECASE)
_OTHER_PROCESSOR = re.compile(r"exec format error", re.IGNORECASE)

PROGRAM = r"""
import json, os, platform, re, site, sys
found, links = {}, {}
try:
    import importlib.metadata, importlib.util
    for one in importlib.metadata.distributions():
        try:
            name, version, requires = one.metadata["Name"], one.version, list(one.requires or ())
        except Exception:
            continue
        key = re.sub(r"[-_.]+", "-", name or "").lower()
        if key and version and key not in found:
            found[key] = {"name": key, "version": version, "requires": requires}
    spec = None if "torch" in found else importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
            said = re.search(r"__version__\s*(?::\s*\w+)?\s*=\s*['\"]([^'\"]+)", file.read())
        if said:
            found["torch"] = {"name": "torch", "version": said.group(1), "requires": []}
except (ImportError, OSError):
    pass
for parent in ("/", "/usr", "/usr/local", "/var", "/opt"):
    for name in os.listdir(parent) if os.path.isdir(parent) else ():
        path = os.path.join(parent, name)
        if os.path.islink(path) and os.path.isdir(path):
            links[path] = os.path.realpath(path)
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (ValueError, OSError):
    libc = "musl 1.2"
own = "/opt/kale-dist"
folders = sorted(n for n in os.listdir(own) if n.startswith("site-packages")) if os.path.isdir(own) else []
print("\n" + "KALE-DIST-BASE " + json.dumps({
    "python": platform.python_version(), "executable": sys.executable, "machine": platform.machine(), "libc": libc,
    "site": os.path.realpath(site.getsitepackages()[0]),
    "folders": folders, "links": sorted(links.items()), "distributions": [found[key] for key in sorted(found)],
}))
"""
"""The inspection program. It also runs on Python 3.6, so that an old base can report its version."""

COMMAND = ("python3", "-c", PROGRAM)
"""The command of the inspecting container, in place of the image's entry point."""

ENVIRONMENT = {"PYTHONSAFEPATH": "1"}
"""Variables of the inspecting container, so that modules in the image's working folder are not imported."""

Ask = Callable[[str], bytes]
"""Runs `COMMAND` in the image of a reference; returns its output, or the runtime's message if the container did not start.

It raises `ImageError` if no container can run within a minute.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """A package that is installed in an image."""

    name: str
    """Lower case, with dashes."""
    version: str
    requires: tuple[str, ...] = ()
    """Requirements in the package's own metadata."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageFacts:
    """What the inspection of an image found."""

    python: str
    """`3.11.9`."""
    executable: str
    """The path of the image's `python3`."""
    site: str
    """The first site directory of that Python, with symbolic links resolved."""
    machine: str
    """`x86_64`."""
    libc: str
    """`glibc 2.36`, `musl 1.2`."""
    folders: tuple[str, ...] = ()
    """Names of the package folders in `FOLDER` from earlier builds, oldest first."""
    links: tuple[tuple[str, str], ...] = ()
    """Symbolic links to folders near the root, and where they lead: `("/bin", "/usr/bin")`."""
    distributions: tuple[Distribution, ...] = ()
    """Sorted by name."""

    @property
    def minor(self) -> str:
        """The minor version of Python, such as `3.11`."""
        return ".".join(self.python.split(".")[:2])

    def find(self, name: str) -> Distribution | None:
        """The installed package of this name, in any spelling; None if there is none."""
        wanted = canonicalize_name(name)
        return next((one for one in self.distributions if one.name == wanted), None)

    def real_path(self, path: str) -> str:
        """An absolute path with the image's symbolic links resolved: a base's `/bin` is often a link."""
        for link, target in sorted(self.links, reverse=True):
            if path.startswith(f"{link}/"):
                return target + path.removeprefix(link)
        return path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """An image to build on, pinned."""

    reference: Reference
    """The image as this machine reaches it: by digest if it is in a registry."""
    digest: str
    """The digest of the manifest, or the engine's image ID if the image is in no registry."""
    named: str
    """The user's name for the image, by digest if it has one: what a cluster's nodes run."""

    @property
    def labels(self) -> dict[str, str]:
        """Labels for images that are built on this base."""
        return {BASE_LABEL: str(self.reference), BASE_DIGEST_LABEL: self.digest}


def name_of(recipe: Recipe, base: str) -> Reference:
    """The base image: the recipe's own, else `base`.

    Raises:
        ConfigError: There is no base, or its name is malformed.
    """
    text = recipe.base or base
    if not text:
        remedy = (
            "Name one with Python and torch: Recipe(base='registry/name:tag'), or `image = ...` of the configuration"
        )
        raise ConfigError("base", "the recipe names no image that it is built on, and there is no other", remedy)
    return Reference.parse(text)


def pin(recipe: Recipe, named: Reference, reachable: Reference, registry: Registry, *, in_engine: bool = False) -> Base:
    """Resolve a base's name to the image that it means now.

    Args:
        recipe: What is built on the base.
        named: The base as the user named it.
        reachable: The base as this machine reaches it.
        registry: The registry of `reachable`.
        in_engine: Whether the image is made in this machine's engine. The engine's own copy of the base then comes first,
            as with `docker build`; so it does for Debian packages, which the engine installs.

    Raises:
        ImageError: The registry refuses, or does not have the base.
        BackendError: Docker is needed and cannot be used.
    """

    def pinned(digest: str) -> Base:
        return Base(reference=reachable.with_digest(digest), digest=digest, named=str(named.with_digest(digest)))

    if named.digest:
        return pinned(named.digest)
    if in_engine or recipe.apt:
        from kale_dist.image.engine import find_image

        with connected(recipe) as engine:
            there = find_image(engine, str(reachable))
        if there is not None:
            known = {entry.rpartition("@")[2] for entry in there.get("RepoDigests") or () if _is_of(entry, reachable)}
            if known:
                return pinned(min(known))
            return Base(reference=reachable, digest=str(there["Id"]), named=str(reachable))
    digest = registry.head(reachable.repository, reachable.target)
    if not digest:
        raise ImageError(
            f"The base image {named} is not in the registry {reachable.registry}. Correct its name, or push it there."
        )
    return pinned(digest)


def facts_of(
    base: Base, recipe: Recipe, *, ask: Ask | None, python: str = "", log: Callable[[str], None]
) -> ImageFacts:
    """Inspect a base, once on this machine, and refuse a base on which the job could not run.

    Args:
        base: The image.
        recipe: What is built on the base, and for which platform.
        ask: Runs the base to inspect it; None uses this machine's Docker engine.
        python: The minor version that the base's Python must have, such as `3.11`; empty for any.
        log: Takes a line for the user.

    Raises:
        ImageError: The base has no python3, no torch, another processor, the wrong Python, or cannot be inspected.
    """
    # Another version of the program may find more.
    version = hashlib.sha256(PROGRAM.encode()).hexdigest()[:8]
    kept = cache.folder("bases") / f"{base.digest.replace(':', '-')}-{recipe.platform.replace('/', '-')}-{version}"
    try:
        facts = parse_answer(kept.read_bytes(), base.named)
    except (OSError, ImageError):
        log(f"Inspecting the base image {base.reference}, once on this machine.")
        answer = ask(base.named) if ask is not None else ask_engine(str(base.reference), recipe.platform, log)
        facts = parse_answer(answer, base.named)
        cache.write(kept, answer)
    _check(facts, base, recipe, python)
    return facts


def parse_answer(answer: bytes, image: str) -> ImageFacts:
    """Parse the output of an image's inspecting container.

    Raises:
        ImageError: The program did not run; the message gives the reason.
    """
    text = answer.decode(errors="replace")
    line = next((line for line in reversed(text.splitlines()) if line.startswith(_MARK)), "")
    if line:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return decode(ImageFacts, json.loads(line.removeprefix(_MARK)))
    if _OTHER_PROCESSOR.search(text):
        raise ImageError(
            f"The base image {image} is made for another processor than that of the machine that was asked to run it. "
            f"Name a base for this one (platform=), or call where that processor is."
        )
    if _NO_PYTHON.search(text):
        raise ImageError(f"The base image {image} has no python3 on its PATH. Name a base image with Python and torch.")
    words = " ".join(text.split())[-400:] or "it printed nothing"
    raise ImageError(f"The base image {image} could not be inspected: {words}. Check that its python3 runs.")


def _check(facts: ImageFacts, base: Base, recipe: Recipe, python: str) -> None:
    wanted = MACHINES.get(recipe.platform.split("/")[1], "")
    if wanted and facts.machine != wanted:
        raise ImageError(
            f"The base image {base.named} is for {facts.machine}, and the image is to be for {recipe.platform}. Name a base "
            f"for that platform, or say platform= for the base's own."
        )
    if tuple(int(part) for part in facts.minor.split(".")) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise ImageError(
            f"The base image {base.named} has Python {facts.python}, and kale_dist needs {oldest} or later. Name a newer one."
        )
    if python and facts.minor != python:
        raise ImageError(
            f"The base image {base.named} has Python {facts.python} ({facts.executable}), and this notebook has {python}: "
            f"what it sends could not be read there. Name a base image with Python {python}."
        )
    if not any(map(facts.find, _FRAMEWORKS)) and not any(names(package, _FRAMEWORKS) for package in recipe.packages):
        raise ImageError(
            f"The base image {base.named} has no torch for its {facts.executable} (Python {facts.python}). Name a base image "
            f"with torch, or add torch to `packages=`."
        )


_FRAMEWORKS = ("torch", "tensorflow", "tensorflow-cpu")
"""One of them is in every image: functions of `launch` that use TensorFlow need no torch."""


def names(package: str, projects: Iterable[str]) -> bool:
    """Whether a requirement of a recipe is for one of these projects, and not for one whose name only begins so."""
    return re.match(rf"({'|'.join(projects)})(?![a-z0-9._-])", package) is not None


# -- this machine's engine -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(recipe: Recipe | None = None) -> Iterator[Engine]:
    """A connection to the Docker engine.

    Args:
        recipe: Its Debian packages are named in the error if no engine answers.

    Raises:
        ConfigError: The package `docker` is not installed.
        ImageError: No engine answers, and the recipe's Debian packages need one.
        BackendUnavailableError: No engine answers.
    """
    from kale_dist.image import engine

    try:
        made = engine.connect()
    except BackendUnavailableError as error:
        if recipe is None or not recipe.apt:
            raise
        raise ImageError(
            f"Debian packages ({', '.join(recipe.apt)}) are installed by a container of a Docker engine: "
            f"{str(error).rstrip('.')}. Or name a base image that has them, and leave out `apt`."
        ) from error
    answers: list[Any] = []
    with contextlib.closing(made):
        made.api.hooks["response"].append(lambda answer, **_: answers.append(answer))
        try:
            yield made
        finally:
            # docker-py leaves streams open, even after they were read to the end.
            for answer in answers:
                answer.close()


def ask_engine(image: str, platform: str, log: Callable[[str], None]) -> bytes:
    """Inspect an image in a container of this machine's Docker engine, which pulls the image first if needed.

    Raises:
        ImageError: There is no engine, or it cannot run the image.
    """
    from kale_dist.image import engine as engines

    try:
        with connected() as engine, engines.explained(f"inspecting the image {image}"):
            engines.ensure_image(engine, image, platform=platform, log=log)
            container = engine.api.create_container_from_config(
                {
                    "Image": image, "Entrypoint": list(COMMAND), "Cmd": [],
                    "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
                    "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "json-file", "Config": {}}},
                }
            )["Id"]  # fmt: skip
            try:
                return _run(engine, container)
            finally:
                with contextlib.suppress(Exception):
                    engine.api.remove_container(container, force=True, v=True)
    except BackendError as error:
        raise ImageError(
            f"The base image {image} could not be inspected, because no container of it could run: "
            f"{str(error).rstrip('.')}. A call with on='kubernetes' inspects it in a pod.",
            error.retryable,
        ) from error


def _run(engine: Engine, container: str) -> bytes:
    import docker.errors

    try:
        engine.api.start(container)
    except docker.errors.APIError as error:
        words = str(error.explanation or error)
        if _NO_PYTHON.search(words) or _OTHER_PROCESSOR.search(words):
            return words.encode()
        raise
    engine.api.wait(container, timeout=_ASKING_S)
    return bytes(engine.api.logs(container))


# -- inside ----------------------------------------------------------------------------------------------------------


def _is_of(entry: str, base: Reference) -> bool:
    """Whether an entry of the engine's `RepoDigests` belongs to the base's repository."""
    with contextlib.suppress(ConfigError):
        return Reference.parse(entry).name == base.name
    return False
