"""Images built in the Docker engine: for recipes that run commands, and for users who prefer it.

BuildKit builds where docker's command line has it, else the engine's classic builder. The log comes line by line as it
is written; a build that fails shows the last lines, and one that is interrupted leaves nothing running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kale_dist import engine as engines
from kale_dist.engine import Engine
from kale_dist.errors import ImageError
from kale_dist.image import auth, buildkit, docker_base, docker_context, docker_errors, docker_settings
from kale_dist.image.reference import Reference
from kale_dist.recipe import Recipe

_STEP = re.compile(r"Step (?P<number>\d+)/(?P<of>\d+) : (?P<instruction>.*)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CACHED = " ---> Using cache"
_CHATTER = (" ---> ", "Removing intermediate container ", "Successfully built ", "Successfully tagged ")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """An image that was built."""

    digest: str
    """Of its manifest in the registry, `sha256:...`; empty: it was not pushed."""
    image_id: str
    """What the engine calls it."""
    size: int
    """Bytes on the engine's disk, unpacked, those of the base included."""


def build(
    recipe: Recipe,
    *,
    base: str,
    tag: str,
    blobs_dir: pathlib.Path,
    labels: Mapping[str, str],
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
    push: bool = True,
    python: str = "",
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
        progress: Gets how much is done and of how much: bytes while the base is pulled and the image is pushed, steps
            while it is built. Each of the three begins anew.
        push: Whether it goes to the registry; else it stays in the engine.
        python: The minor that the base's Python must have, such as `3.11`, beside a torch; empty: neither is asked for.
        credentials: What the registry is shown; None: what docker is configured for.

    Raises:
        ConfigError: The recipe cannot be built by Docker; the text says why and what can.
        ImageError: The build failed, with the last lines of its log; or the base or the registry refused.
        BackendError: There is no engine, or this user may not use it.
    """
    with _connected() as engine, engines.explained(f"building {tag}"):
        found = _base(engine, base, recipe.platform, say, progress)
        docker_base.check_platform(base, found, recipe.platform)
        docker_base.check_python(engine, base, str(found["Id"]), recipe, python, say)
        image_id = _build(engine, recipe, base, found, tag, blobs_dir, labels, say, progress)
        size = int(engine.api.inspect_image(image_id)["Size"])
        digest = _push(engine, tag, credentials, say, progress) if push else ""
    return Built(digest=digest, image_id=image_id, size=size)


def _base(
    engine: Engine, base: str, platform: str, say: Callable[[str], None], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """What the engine knows of the base, which it has in the end."""
    import docker

    try:
        try:
            found = engine.api.inspect_image(base)
        except docker.errors.ImageNotFound:
            say(f"pulling {base}")
            reference = Reference.parse(base)
            shown = auth.find(reference.registry, repository=reference.repository)
            name = reference.name if not reference.digest else str(reference.with_digest(reference.digest))
            stream = engine.api.pull(
                name,
                tag=None if reference.digest else reference.target,
                stream=True,
                decode=True,
                auth_config=_shown(shown),
                platform=platform or None,
            )
            _follow(stream, f"pulling {base}", progress)
            found = engine.api.inspect_image(base)
    except docker.errors.APIError as error:
        raise _transfer_failed(str(error.explanation or error), f"pulling {base}") from error
    return dict(found)


def _build(
    engine: Engine,
    recipe: Recipe,
    base: str,
    found: Mapping[str, Any],
    tag: str,
    blobs_dir: pathlib.Path,
    labels: Mapping[str, str],
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> str:
    program = None if engine.is_podman else buildkit.find()
    settings: Mapping[str, bytes] = {}
    if recipe.packages:
        settings = docker_settings.collect(buildkit=program is not None, own_index=bool(recipe.index_urls))
    text = docker_context.dockerfile(
        recipe,
        base,
        user=str(found["Config"].get("User") or ""),
        settings=tuple(settings),
        buildkit=program is not None,
    )
    files = docker_context.entries(recipe, text, {} if program else settings, blobs_dir)
    if program is None:
        return _build_classically(engine, recipe, files, tag, labels, say, progress)
    ended = buildkit.build(
        program,
        docker_context.pack(files),
        tag=tag,
        labels=labels,
        secrets=settings,
        fresh=recipe.rebuild,
        platform=recipe.platform,
        host=engine.url if engine.url.startswith("unix://") else "",
        say=say,
        progress=progress,
    )
    if not ended.image_id:
        raise docker_errors.build_failed(tag, "BuildKit", list(ended.log), ended.cause)
    return ended.image_id


def _build_classically(
    engine: Engine,
    recipe: Recipe,
    files: tuple[docker_context.Entry, ...],
    tag: str,
    labels: Mapping[str, str],
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> str:
    import docker

    reader = _Reader(say, progress)
    image_id = ""
    try:
        stream = engine.api.build(
            fileobj=docker_context.pack(files),
            custom_context=True,
            tag=tag,
            labels=dict(labels),
            platform=recipe.platform or None,
            nocache=recipe.rebuild,
            rm=True,
            forcerm=True,
            use_config_proxy=True,
            decode=True,
        )
        for event in stream:
            if "error" in event:
                raise docker_errors.build_failed(tag, "Docker's classic builder", reader.log, str(event["error"]))
            image_id = event.get("aux", {}).get("ID", image_id)
            reader.read(str(event.get("stream", "")))
    except docker.errors.APIError as error:
        said = str(error.explanation or error)
        raise docker_errors.build_failed(tag, "Docker's classic builder", reader.log, said) from error
    return image_id


class _Reader:
    """Turns the stream of the classic builder, which breaks anywhere, into lines."""

    def __init__(self, say: Callable[[str], None], progress: Callable[[int, int], None]) -> None:
        self.log: list[str] = []
        self._say = say
        self._progress = progress
        self._begun = ""

    def read(self, text: str) -> None:
        """Take the next piece."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            # Of a line that was overwritten, what it was in the end.
            self._line(_COLOUR.sub("", line).rstrip().rpartition("\r")[2])

    def _line(self, line: str) -> None:
        if step := _STEP.fullmatch(line):
            self._progress(int(step["number"]), int(step["of"]))
            line = f"[{step['number']}/{step['of']}] {buildkit.shortened(step['instruction'])}"
        if line == _CACHED:
            line = "  found in the cache"
        if line.strip() and not line.startswith(_CHATTER):
            self.log.append(line)
            self._say(line)


def _push(
    engine: Engine,
    tag: str,
    credentials: auth.Credentials | None,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> str:
    import docker

    reference = Reference.parse(tag)
    shown = credentials or auth.find(reference.registry, repository=reference.repository)
    say(f"pushing {tag}")
    try:
        stream = engine.api.push(
            reference.name, tag=reference.tag, stream=True, decode=True, auth_config=_shown(shown) or {}
        )
        digest = _follow(stream, f"pushing {tag}", progress)
    except docker.errors.APIError as error:
        raise _transfer_failed(str(error.explanation or error), f"pushing {tag}") from error
    if not digest:
        raise ImageError(f"the engine pushed {tag} without saying its digest. Push it again", retryable=True)
    return digest


def _follow(stream: Iterator[dict[str, Any]], doing: str, progress: Callable[[int, int], None]) -> str:
    """Sum up a transfer's layers; gives the digest of the manifest, where the engine says it."""
    layers: dict[str, tuple[int, int]] = {}
    digest = ""
    for event in stream:
        if "error" in event:
            raise _transfer_failed(str(event["error"]), doing)
        detail = event.get("progressDetail") or {}
        # Unpacking after a download counts anew, and would take the sum back.
        if detail.get("total") and event.get("status") in {"Downloading", "Pushing"}:
            layers[event["id"]] = (min(detail["current"], detail["total"]), detail["total"])
            progress(sum(done for done, _ in layers.values()), sum(total for _, total in layers.values()))
        digest = (event.get("aux") or {}).get("Digest", digest)
    return digest


def _shown(credentials: auth.Credentials | None) -> dict[str, str] | None:
    """Credentials as the engine takes them."""
    if credentials is None:
        return None
    names = {"username": credentials.username, "password": credentials.password}
    names |= {"identitytoken": credentials.token, "registrytoken": credentials.bearer}
    return {name: value for name, value in names.items() if value}


@contextlib.contextmanager
def _connected() -> Iterator[Engine]:
    """A connection of our own, whose answers are closed in the end: that is what stops an engine that still builds."""
    answers: list[Any] = []
    with contextlib.closing(engines.connect()) as connected:
        connected.api.hooks["response"].append(lambda answer, **_: answers.append(answer))
        try:
            yield connected
        finally:
            for answer in answers:
                answer.close()


def _transfer_failed(said: str, doing: str) -> ImageError:
    """The error for a pull or push that the engine ended with these words."""
    import docker

    meaning = engines.explain(docker.errors.DockerException(said), doing)
    return ImageError(str(meaning), meaning.retryable)
