"""Makes an image: layers on top of a base, into a registry by its HTTP API without running anything, or into an engine.

The base's layers are mounted where the new image lies in the same registry, copied where it lies in another one, and only
what the registry lacks is sent. User, entry point and command of the base stay. Packages are one layer; a recipe's own
files, which change more often, are another one where there are both. Only Debian packages need a container to run: apt-get
does in one of the base, in a Docker engine, which keeps what changed.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import posixpath
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kale_dist.blobs import FolderStore
from kale_dist.errors import ImageError
from kale_dist.image import auth, cache, manifest, packages
from kale_dist.image import base as bases
from kale_dist.image.base import Base, Facts
from kale_dist.image.layer import Entry, Layer, make_layer
from kale_dist.image.reference import Reference
from kale_dist.image.registry import ImageManifest, Registry
from kale_dist.spec.recipe import Recipe

if TYPE_CHECKING:
    from kale_dist.engine import Engine

Say = Callable[[str], None]
Progress = Callable[[int, int], None]

_HISTORY = "kale-dist: packages and files of a recipe"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""What a runtime takes where an image says nothing."""

_AT_ONCE = 6
"""Requests. Registries limit what one client may ask for in a second."""

_APT = (
    "export DEBIAN_FRONTEND=noninteractive; apt-get update && apt-get install --yes --no-install-recommends {packages} && "
    "rm -rf /var/lib/apt/lists/*"
)
_SHOWN_LINES = 20
_SMALL_BYTES = 1 << 20
_MIB = 1 << 20


def build(
    recipe: Recipe,
    *,
    target: Reference,
    registry: Registry,
    base: Base,
    base_registry: Registry,
    image: ImageManifest,
    facts: Facts,
    blobs_dir: pathlib.Path,
    say: Say,
    progress: Progress = lambda _done, _total: None,
) -> str:
    """Make the recipe's image and push it; gives the digest of its manifest, the same for the same recipe and base.

    Args:
        recipe: What goes on top of the base.
        target: Where the image goes, with its tag.
        registry: Of `target`.
        base: The base image.
        base_registry: Where the base lies; may be `registry`.
        image: The base's manifest and configuration.
        facts: What the base has.
        blobs_dir: Where the recipe's files lie, by digest.
        say: Takes a line for the user.
        progress: Takes bytes done and bytes in all, of what is being copied or sent at the time.

    Raises:
        ConfigError: There are packages, and uv is not installed.
        ImageError: The packages cannot be installed, or a registry refuses.
    """
    repository = target.repository
    with cache.working_folder() as folder, ThreadPoolExecutor(_AT_ONCE, "kale-dist-push") as threads:
        below = {str(layer["digest"]): int(layer["size"]) for layer in image.manifest["layers"]}

        def bring(digest: str) -> bool:
            # Mounting what is there already would be as quick, but costs a right that may be missing.
            return registry.has_blob(repository, digest) or (
                registry.host == base_registry.host and registry.mount(repository, digest, base.reference.repository)
            )

        brought = {digest: threads.submit(bring, digest) for digest in below}
        layers, facts = _layers(
            recipe, facts, folder, blobs_dir, lambda digest: registry.has_blob(repository, digest), say
        )
        settings = image.config.get("config") or {}
        there = dict(line.partition("=")[::2] for line in settings.get("Env") or ())
        manifest_bytes, config_bytes = manifest.put_on_top(
            image.manifest, image.config, layers, history=_HISTORY, environment=_environment(recipe, facts, there),
            labels=base.labels(recipe),
        )  # fmt: skip
        config_digest = manifest.digest_of(config_bytes)
        configured = threads.submit(registry.upload, repository, config_bytes, config_digest, look=False)
        for layer in layers:
            if not registry.has_blob(repository, layer.digest):
                if layer.size > _SMALL_BYTES:
                    say(f"Pushing a layer of {layer.size / _MIB:.1f} MiB to {registry.host}/{repository}.")
                with layer.path.open("rb") as packed:
                    registry.upload(repository, packed, layer.digest, progress=progress, look=False)
        for digest in (digest for digest, is_there in brought.items() if not is_there.result()):
            say(
                f"Copying a layer of the base ({below[digest] / _MIB:.1f} MiB) from {base_registry.host} to {registry.host}."
            )
            with tempfile.TemporaryFile(dir=folder) as file:
                for block in base_registry.blob(base.reference.repository, digest):
                    file.write(block)
                registry.upload(repository, file, digest, progress=progress, look=False)
        configured.result()
        kind = manifest.media_type(json.loads(manifest_bytes))
        return registry.put_manifest(repository, target.tag, manifest_bytes, kind)


def build_in_engine(
    engine: Engine, recipe: Recipe, *, base: Base, facts: Facts, tag: str, blobs_dir: pathlib.Path, say: Say
) -> str:
    """Make the recipe's image in an engine that has the base; gives what the engine calls it.

    Raises:
        ConfigError: There are packages, and uv is not installed.
        ImageError: The packages cannot be installed; for Debian packages with apt-get's last lines.
        BackendError: The engine refuses.
    """
    from kale_dist.engine import explained

    with cache.working_folder() as folder, explained(f"making the image {tag}"):
        layers, facts = _layers(recipe, facts, folder, blobs_dir, lambda _digest: False, say)
        found = bases.have(engine, str(base.reference), platform=recipe.platform, say=say)
        settings = found.get("Config") or {}
        there = dict(line.partition("=")[::2] for line in settings.get("Env") or ())
        made = {
            "Image": found["Id"], "Labels": base.labels(recipe),
            "Env": [f"{name}={value}" for name, value in _environment(recipe, facts, there).items()],
        }  # fmt: skip
        entrypoint, command = settings.get("Entrypoint") or [], settings.get("Cmd") or []
        # An engine makes no container without either; the image gets this one.
        kept = {"Entrypoint": entrypoint, "Cmd": command if command or entrypoint else ["python3"]}
        name, _, version = tag.rpartition(":")
        started = {"Entrypoint": ["sleep"], "Cmd": ["infinity"]} if recipe.apt else kept
        container = engine.api.create_container_from_config(made | started)["Id"]
        try:
            if recipe.apt:
                engine.api.start(container)
                _install_debian(engine, container, recipe.apt, tag, say)
            for layer in layers:
                with layer.path.open("rb") as file:
                    engine.api.put_archive(container, "/", file)
            return str(engine.api.commit(container, repository=name, tag=version, conf=kept)["Id"])
        finally:
            engine.api.remove_container(container, force=True, v=True)


def push(engine: Engine, target: Reference, say: Say) -> str:
    """Have the engine push an image; gives the digest of its manifest.

    Raises:
        ImageError: The registry refuses.
    """
    import docker.errors

    from kale_dist import engine as engines

    shown = auth.find(target.registry, repository=target.repository)
    say(f"Pushing {target}.")
    doing, digest = f"pushing {target}", ""
    with engines.explained(doing):
        for event in engine.api.push(
            target.name, tag=target.tag, stream=True, decode=True, auth_config=auth.for_engine(shown) or {}
        ):
            if "error" in event:
                meaning = engines.explain(docker.errors.DockerException(str(event["error"])), doing)
                raise ImageError(str(meaning), meaning.retryable)
            digest = str((event.get("aux") or {}).get("Digest", digest))
    if not digest:
        raise ImageError(f"The engine pushed {target} without saying its digest. Push it again.", retryable=True)
    return digest


def _install_debian(engine: Engine, container: str, packages: Sequence[str], tag: str, say: Say) -> None:
    """Run apt-get as root in a container, whose other settings stay as they are."""
    # As variables of the command alone, the user's proxies (with their passwords) do not become the image's.
    proxies = engine.api._proxy_configs.get_environment() if engine.api._proxy_configs else {}  # noqa: SLF001 - docker-py's own builds ask it so
    program = ["sh", "-c", _APT.format(packages=shlex.join(packages))]
    made = engine.api.exec_create(container, program, user="0", environment=proxies)["Id"]
    rest, lines = b"", list[str]()
    for piece in engine.api.exec_start(made, stream=True):
        *whole, rest = (rest + piece).split(b"\n")
        for line in filter(None, (text.decode(errors="replace").strip() for text in whole)):
            lines.append(line)
            say(line)
    if engine.api.exec_inspect(made)["ExitCode"]:
        said = "".join(f"\n  {line}" for line in [*lines, rest.decode(errors="replace")][-_SHOWN_LINES:])
        raise ImageError(
            f"The Debian packages of the image {tag} could not be installed. The base has to be a Debian or Ubuntu whose "
            f"release has them, and the engine's containers need a way to its servers. apt-get's last lines:{said}"
        )


def _layers(
    recipe: Recipe,
    facts: Facts,
    folder: pathlib.Path,
    blobs_dir: pathlib.Path,
    is_there: Callable[[str], bool],
    say: Say,
) -> tuple[list[Layer], Facts]:
    """The new layers, the packages' first, and what the image has with them."""
    layers = []
    if recipe.packages:
        try:
            installed = packages.install(recipe, facts, folder, say=say)
        except OSError as error:
            raise cache.no_room(folder, error) from error
        if installed is not None:
            layers.append(_packed(installed, folder, is_there))
            facts = installed.facts
            for note in installed.notes:
                say(note)
    if recipe.files:
        layers.append(make_layer(_files(recipe, facts, blobs_dir), folder / "files"))
    return layers, facts


def _packed(installed: packages.Packages, folder: pathlib.Path, is_there: Callable[[str], bool]) -> Layer:
    """The layer of packages; where the registry has it from before, its name is enough."""
    place = cache.folder() / "packed" / f"{installed.key}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = Layer(**json.loads(place.read_bytes()), path=place)
        if is_there(known.digest):
            return known
    layer = make_layer(installed.entries, folder / "packages")
    cache.write(place, json.dumps({"digest": layer.digest, "size": layer.size, "diff_id": layer.diff_id}).encode())
    return layer


def _files(recipe: Recipe, facts: Facts, blobs_dir: pathlib.Path) -> list[Entry]:
    """The recipe's own files, where they really lie."""
    store = FolderStore(blobs_dir)
    entries = []
    for file in recipe.files:
        blob = store.path(file.digest)
        if not blob.is_file():
            raise ImageError(
                f"The bytes of {file.path} are no longer on this machine ({blob}). Give the recipe its `files=` again."
            )
        entries.append(Entry(path=facts.place(posixpath.normpath(file.path)), content=blob, executable=file.executable))
    return entries


def _environment(recipe: Recipe, facts: Facts, there: Mapping[str, str]) -> dict[str, str]:
    """The variables that the recipe changes, and the PATH to the packages' scripts, behind the base's own."""
    changed = dict(recipe.environment)
    path = changed.get("PATH", there.get("PATH", _PATH))
    if facts.folders and packages.SCRIPTS not in path.split(":"):
        changed["PATH"] = f"{path}:{packages.SCRIPTS}"
    return changed
