"""Makes an image: layers on top of a base, into a registry by its HTTP API without running anything, or into an engine.

The base's layers are mounted where the new image lies in the same registry, copied where it lies in another one, and only
what the registry lacks is sent. User, entry point and command of the base stay. Packages are one layer; a recipe's own
files, which change more often, are another one where there are both. Only Debian packages need a container to run: apt-get
does in one of the base, in a Docker engine, which keeps what changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import posixpath
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kale_dist.errors import ImageError
from kale_dist.image import auth, cache, manifest, packages
from kale_dist.image.base_image import Base, ImageFacts
from kale_dist.image.layer import Layer, ahead, in_order, packed
from kale_dist.image.reference import Reference
from kale_dist.image.registry import ImageManifest, Registry
from kale_dist.image.tar import TarEntry, tar
from kale_dist.job import records
from kale_dist.job.spec.recipe import Recipe
from kale_dist.wire.blobs import FolderStore

if TYPE_CHECKING:
    from kale_dist.image.engine import Engine

Log = Callable[[str], None]
Progress = Callable[[int, int], None]

_HISTORY = "kale-dist: packages and files of a recipe"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH of a container whose image sets none."""

_AT_ONCE = 6
"""Concurrent requests; registries limit the rate of one client."""

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
    facts: Callable[[], ImageFacts],
    log: Log,
    progress: Progress,
) -> str:
    """Build the recipe's image and push it; returns its manifest's digest, the same for the same recipe and base.

    Args:
        recipe: What to add to the base.
        target: The new image's repository and tag.
        registry: The registry of `target`.
        base: The base image.
        base_registry: The registry of the base; may be `registry`.
        facts: Inspects the base; called after the registry has found its image for the recipe's platform.
        log: Takes a line for the user.
        progress: Called with the bytes done and the total bytes of the transfer in progress.

    Raises:
        ConfigError: There are packages, and uv is not installed.
        ImageError: The packages cannot be installed, or a registry refuses.
    """
    there, repository = base.reference.repository, target.repository
    # What a digest names never changes.
    kept = cache.folder("bases") / f"{base.digest.replace(':', '-')}-{recipe.platform.replace('/', '-')}.json"
    try:
        image = ImageManifest(**json.loads(kept.read_bytes()))
    except (OSError, ValueError, TypeError):
        image = base_registry.image(there, base.reference.target, recipe.platform)
        cache.write(kept, json.dumps(dataclasses.asdict(image)).encode())
    known = facts()
    with _working_folder() as folder, ThreadPoolExecutor(_AT_ONCE, "kale-dist-push") as threads:

        def bring(digest: str) -> bool:
            # To mount a blob that the repository has would be as quick, but may need more rights.
            return registry.has_blob(repository, digest) or (
                registry.host == base_registry.host and registry.mount(repository, digest, there)
            )

        below = {str(layer["digest"]): int(layer["size"]) for layer in image.manifest["layers"]}
        brought = {digest: threads.submit(bring, digest) for digest in below}
        contents, known = _contents(recipe, known, folder, log)
        layers, pushed = list[Layer](), list[Future[tuple[str, int]]]()
        for entries, name in contents:
            if sum(entry.size for entry in entries) < _SMALL_BYTES:
                hasher = hashlib.sha256()
                data = b"".join(packed(tar(entries), hasher))
                digest = manifest.digest_of(data)
                layers.append(Layer(digest=digest, size=len(data), diff_id=f"sha256:{hasher.hexdigest()}"))
                pushed.append(threads.submit(registry.upload, repository, data))
            else:
                layers.append(_pushed(entries, name, registry, repository, log, progress))
        has = manifest.variables(image.config.get("config") or {})
        manifest_bytes, config_bytes = manifest.put_on_top(
            image.manifest, image.config, layers, history=_HISTORY, environment=_environment(recipe, known, has),
            labels=base.labels,
        )  # fmt: skip
        pushed.append(threads.submit(registry.upload, repository, config_bytes))
        for digest, size in below.items():
            if not brought[digest].result():
                log(
                    f"Copying a layer of the base ({size / _MIB:.1f} MiB) from {base_registry.host} to {registry.host}."
                )
                registry.upload(
                    repository,
                    lambda: _with_progress(base_registry.blob(there, digest), size, progress),  # noqa: B023 - called here
                )
        for one in pushed:
            one.result()
        kind = manifest.media_type(json.loads(manifest_bytes))
        return registry.put_manifest(repository, target.tag, manifest_bytes, kind)


def build_in_engine(engine: Engine, recipe: Recipe, *, base: Base, facts: ImageFacts, tag: str, log: Log) -> str:
    """Build the recipe's image in a Docker engine; returns the engine's image ID.

    Raises:
        ConfigError: There are packages, and uv is not installed.
        ImageError: The packages cannot be installed; for Debian packages with apt-get's last lines.
        BackendError: The engine refuses.
    """
    from kale_dist.image.engine import ensure_image, explained

    with _working_folder() as folder, explained(f"making the image {tag}"):
        contents, facts = _contents(recipe, facts, folder, log)
        found = ensure_image(engine, str(base.reference), platform=recipe.platform, log=log)
        settings = found.get("Config") or {}
        there = manifest.variables(settings)
        made = {
            "Image": found["Id"], "Labels": base.labels,
            "Env": [f"{name}={value}" for name, value in _environment(recipe, facts, there).items()],
        }  # fmt: skip
        entrypoint, command = settings.get("Entrypoint") or [], settings.get("Cmd") or []
        # An engine creates no container without one of the two, so the image gets a command.
        kept = {"Entrypoint": entrypoint, "Cmd": command if command or entrypoint else ["python3"]}
        name, _, version = tag.rpartition(":")
        started = {"Entrypoint": ["sleep"], "Cmd": ["infinity"]} if recipe.apt else kept
        container = engine.api.create_container_from_config(made | started)["Id"]
        try:
            if recipe.apt:
                engine.api.start(container)
                _install_debian(engine, container, recipe.apt, tag, log)
            for entries, _ in contents:
                engine.api.put_archive(container, "/", tar(entries))
            return str(engine.api.commit(container, repository=name, tag=version, conf=kept)["Id"])
        finally:
            engine.api.remove_container(container, force=True, v=True)


def push(engine: Engine, target: Reference, log: Log) -> str:
    """Push an image from the engine; returns the digest of its manifest.

    Raises:
        ImageError: The registry refuses.
    """
    import docker.errors

    from kale_dist.image import engine as engines

    shown = auth.for_engine(target) or {}
    log(f"Pushing {target}.")
    doing, digest = f"pushing {target}", ""
    with engines.explained(doing):
        for event in engine.api.push(target.name, tag=target.tag, stream=True, decode=True, auth_config=shown):
            if "error" in event:
                meaning = engines.explain(docker.errors.DockerException(str(event["error"])), doing)
                raise ImageError(str(meaning), meaning.retryable)
            digest = str((event.get("aux") or {}).get("Digest", digest))
    if not digest:
        raise ImageError(f"The engine pushed {target} without saying its digest. Push it again.", retryable=True)
    return digest


def _install_debian(engine: Engine, container: str, packages: Sequence[str], tag: str, log: Log) -> None:
    """Run apt-get as root in a running container."""
    # As variables of the command alone, the user's proxies (with their passwords) do not become the image's.
    proxies = engine.api._proxy_configs.get_environment() if engine.api._proxy_configs else {}  # noqa: SLF001 - docker-py's own builds ask it so
    program = ["sh", "-c", _APT.format(packages=shlex.join(packages))]
    made = engine.api.exec_create(container, program, user="0", environment=proxies)["Id"]
    rest, lines = b"", list[str]()
    for piece in engine.api.exec_start(made, stream=True):
        *whole, rest = (rest + piece).split(b"\n")
        for line in filter(None, (text.decode(errors="replace").strip() for text in whole)):
            lines.append(line)
            log(line)
    if engine.api.exec_inspect(made)["ExitCode"]:
        shown = "".join(f"\n  {line}" for line in [*lines, rest.decode(errors="replace")][-_SHOWN_LINES:])
        raise ImageError(
            f"The Debian packages of the image {tag} could not be installed. The base has to be a Debian or Ubuntu whose "
            f"release has them, and the engine's containers need a way to its servers. apt-get's last lines:{shown}"
        )


def _working_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for one build."""
    with cache.writing(cache.folder()):
        return tempfile.TemporaryDirectory(dir=cache.folder(), prefix="building-")


def _contents(
    recipe: Recipe, facts: ImageFacts, folder: str, log: Log
) -> tuple[list[tuple[list[TarEntry], str]], ImageFacts]:
    """The new layers as (entries, hash of the content), the packages' first; and the facts about the image with them."""
    contents = []
    if recipe.packages:
        with cache.writing(Path(folder)):
            installed = packages.install(recipe, facts, Path(folder), log=log)
        if installed is not None:
            contents.append((in_order(installed.entries), installed.key))
            facts = installed.facts
    if recipe.files:
        entries = in_order(_files(recipe, facts))
        contents.append((entries, hashlib.sha256(repr(entries).encode()).hexdigest()))
    return contents, facts


def _pushed(
    entries: Sequence[TarEntry], name: str, registry: Registry, repository: str, log: Log, progress: Progress
) -> Layer:
    """Push a layer of these entries, packed while it is sent, unless the registry has it from an earlier build."""
    place = cache.folder("packed") / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = Layer(**json.loads(place.read_bytes()))
        if registry.has_blob(repository, known.digest):
            return known
    size, hasher = sum(entry.size for entry in entries), hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        nonlocal hasher
        hasher = hashlib.sha256()
        return ahead(packed(_with_progress(tar(entries), size, progress), hasher))

    log(f"Pushing a layer of {size / _MIB:.1f} MiB to {registry.host}/{repository}; it is packed while it is sent.")
    digest, length = registry.upload(repository, blocks)
    layer = Layer(digest=digest, size=length, diff_id=f"sha256:{hasher.hexdigest()}")
    cache.write(place, json.dumps(dataclasses.asdict(layer)).encode())
    return layer


def _with_progress(blocks: Iterable[bytes], size: int, progress: Progress) -> Iterator[bytes]:
    """Yield the same blocks, and report after each how many of `size` bytes are done."""
    done = 0
    for block in blocks:
        yield block
        done += len(block)
        progress(done, size)


def _files(recipe: Recipe, facts: ImageFacts) -> list[TarEntry]:
    """The layer's entries for the recipe's own files, at paths without symbolic links."""
    store = FolderStore(records.blobs_dir())
    entries = []
    for file in recipe.files:
        blob = store.path(file.digest)
        if not blob.is_file():
            raise ImageError(
                f"The bytes of {file.path} are no longer on this machine ({blob}). Give the recipe its `files=` again."
            )
        path, mode = facts.real_path(posixpath.normpath(file.path)), 0o755 if file.executable else 0o644
        entries.append(TarEntry(path=path, content=blob, mode=mode))
    return entries


def _environment(recipe: Recipe, facts: ImageFacts, there: Mapping[str, str]) -> dict[str, str]:
    """The recipe's variables, and a PATH that ends with the packages' scripts."""
    changed = dict(recipe.environment)
    path = changed.get("PATH", there.get("PATH", _PATH))
    if facts.folders and packages.SCRIPTS not in path.split(":"):
        changed["PATH"] = f"{path}:{packages.SCRIPTS}"
    return changed
