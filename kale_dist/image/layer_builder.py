"""Makes an image without a container engine: a layer on top of a base, straight through the registry's HTTP API.

Nothing of the base is unpacked or run. Its layers are mounted where the new image lies in the same registry, copied
where it lies in another one, and only what the registry lacks is sent. User, entry point and command of the base stay.
Packages are one layer; a recipe's own files, which change more often, are another one where there are both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
import posixpath
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kale_dist.blobs import FolderStore
from kale_dist.errors import ConfigError, ImageError
from kale_dist.image import base_image, media, replacement, zstd
from kale_dist.image import inventory as inventories
from kale_dist.image.early_upload import EarlyUpload
from kale_dist.image.installed import Distribution
from kale_dist.image.inventory import Inventory
from kale_dist.image.kept import write_atomically
from kale_dist.image.layer import Entry, Layer, make_layer
from kale_dist.image.pushing import AT_ONCE, bring, push
from kale_dist.image.reference import Reference
from kale_dist.image.registry import ImageManifest, Registry
from kale_dist.recipe import ZSTD, Recipe

if TYPE_CHECKING:
    from kale_dist.image.packages import Wheel

_EARLY_BYTES = 4 << 20
"""Packages of which a registry is told before they are unpacked."""

_HISTORY = "kale-dist: packages and files of a recipe"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """An image that was made and pushed."""

    digest: str
    """`sha256:...` of its manifest."""
    size: int
    """Bytes of what is new on top of the base, compressed."""
    sent: int
    """Bytes that the registry lacked."""


def build(
    recipe: Recipe,
    *,
    registry: Registry,
    repository: str,
    tag: str,
    base: Reference,
    base_registry: Registry,
    blobs_dir: pathlib.Path,
    cache_dir: pathlib.Path,
    labels: Mapping[str, str],
    say: Callable[[str], None],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    python: str = "",
) -> Built:
    """Make the recipe's image and push it. The same recipe on the same base gives the same digest.

    Args:
        recipe: What goes on top of the base.
        registry: Where the image goes.
        repository: Where in it.
        tag: Its name there.
        base: The base image.
        base_registry: Where the base lies; may be `registry`.
        blobs_dir: Where the recipe's files lie, by digest.
        cache_dir: Where manifests, inventories and wheels are kept.
        labels: Of the image, besides those that say what it is made of.
        say: Takes a line for the user.
        progress: Takes bytes done and bytes in all, of what is being read, copied or sent at the time.
        python: The minor that the base's Python must have, such as `3.11`; empty for any.

    Raises:
        ConfigError: There are packages, and what unpacks them is not installed here; or what writes zstd is not.
        ImageError: The base does not fit, the packages cannot be had, or a registry refuses.
    """
    if recipe.apt:
        raise ImageError(
            f"Debian packages ({', '.join(recipe.apt)}) need a builder that runs commands in the image, and the one without "
            f'a daemon runs none. Use `builder="docker"`, or a base image that has them.'
        )
    if recipe.compression == ZSTD:
        # Known before anything is fetched.
        zstd.compressor()
    manifests = cache_dir / "manifests"
    image = base_registry.image(base.repository, base.target, recipe.platform, cache_dir=manifests)

    def read(*, files: bool) -> Inventory:
        return inventories.read(
            base_registry, image, base.repository, cache_dir=cache_dir, say=say, progress=progress, files=files
        )

    inventory = read(files=False)
    _check(recipe, base, inventory, python)
    with contextlib.ExitStack() as ended:
        folder = ended.enter_context(_working_folder(cache_dir))
        threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kale-dist-push")
        ended.callback(threads.shutdown, cancel_futures=True)
        wheels: Sequence[Wheel] = ()
        if recipe.packages:
            wheels = _packages().resolve(recipe, inventory, cache_dir=cache_dir, folder=folder / "pip", say=say)
        gone = replacement.replaced(inventory, [wheel.name for wheel in wheels])
        if gone:
            say("Replaced in the base image: " + ", ".join(f"{one.name} {one.version}" for one in gone))
            if not all(one.files for one in gone):
                inventory = read(files=True)
                gone = replacement.replaced(inventory, [wheel.name for wheel in wheels])
        brought = bring(
            threads, registry=registry, repository=repository, base_registry=base_registry, base=base, image=image
        )
        layers: list[Layer] = []
        early: EarlyUpload | None = None
        installed: tuple[Distribution, ...] = ()
        if wheels:
            place = cache_dir / "packed" / f"{_key(recipe, wheels, inventory, image)}.json"
            packed = _recall(place)
            is_there = packed is not None and registry.has_blob(repository, packed.layer.digest)
            if packed is None or recipe.rebuild or not is_there:
                if not is_there:
                    early = ended.enter_context(registry.early_upload(repository))
                    if sum(wheel.path.stat().st_size for wheel in wheels) > _EARLY_BYTES:
                        early.begin()
                packed = _pack(recipe, wheels, inventory, gone, folder, early)
                _remember(place, packed)
            layers.append(packed.layer)
            installed = packed.distributions
            for sentence in replacement.broken(inventory, installed):
                say(sentence)
        if recipe.files or not wheels:
            layers.append(make_layer(_files(recipe, inventory, blobs_dir), folder / "files", recipe.compression))
        after = replacement.with_installed(inventory, installed)
        manifest, config = _compose(recipe, image, layers, after, labels)
        digest, sent = push(
            registry=registry, repository=repository, tag=tag, manifest=manifest, config=config, layers=layers,
            threads=threads, brought=brought, base_registry=base_registry, base=base, image=image, folder=folder, say=say,
            progress=progress, early=early,
        )  # fmt: skip
    return Built(digest=digest, size=sum(layer.size for layer in layers), sent=sent)


@contextlib.contextmanager
def _working_folder(cache_dir: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder for what is needed on the way."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=cache_dir, prefix="building-")
    except OSError as error:
        raise ImageError(
            f"An image cannot be made in {cache_dir}: {error.strerror or error}. Make room there, or set XDG_CACHE_HOME "
            f"to a folder that has some and that you can write to, and call again."
        ) from error
    with folder as name:
        yield pathlib.Path(name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Packed:
    """Packages as a layer."""

    layer: Layer
    """Its file may be gone: then the registry has it."""
    distributions: tuple[Distribution, ...]
    """What is installed by it."""


def _pack(
    recipe: Recipe,
    wheels: Sequence[Wheel],
    inventory: Inventory,
    gone: Sequence[Distribution],
    folder: pathlib.Path,
    early: EarlyUpload | None,
) -> _Packed:
    """Unpack wheels as they lie in the image, hide what they replace, and make a layer of it, which travels meanwhile."""
    unpacked = _packages().unpack(wheels, inventory, folder / "root")
    hidden = replacement.removals(inventory, gone, [entry.path for entry in unpacked.entries]) if gone else ()
    grown = early.grown if early is not None else lambda _path, _size: None
    layer = make_layer((*unpacked.entries, *hidden), folder / "packages", recipe.compression, grown=grown)
    # Now, while the layer travels, and not when all waits for it.
    for name in ("root", "pip"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return _Packed(layer=layer, distributions=unpacked.distributions)


def _packages() -> types.ModuleType:
    """What only recipes with packages need is imported for them alone."""
    try:
        from kale_dist.image import packages
    except ModuleNotFoundError as error:
        problem = f"packages of an image are unpacked with the package {error.name}, which is not installed"
        raise ConfigError("packages", problem, "pip install 'kale-dist[images]'") from error
    return packages


def _key(recipe: Recipe, wheels: Sequence[Wheel], inventory: Inventory, image: ImageManifest) -> str:
    """Names what the bytes of a layer of packages depend on."""
    contents = [(wheel.path.parent.name, wheel.path.name) for wheel in wheels]
    layout = (inventory.python, inventory.site_directory, inventory.scripts_directory, inventory.prefix)
    facts = (
        contents,
        recipe.compression,
        layout,
        image.config["rootfs"]["diff_ids"],
        importlib.metadata.version("installer"),
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _remember(place: pathlib.Path, packed: _Packed) -> None:
    """Keep what a layer of packages is called: a registry that has it needs no second one."""
    data = dataclasses.asdict(packed)
    data["layer"]["path"] = ""
    write_atomically(place, json.dumps(data).encode())


def _recall(place: pathlib.Path) -> _Packed | None:
    """What was kept; None if nothing was, or if it cannot be read."""
    try:
        data = json.loads(place.read_bytes())
        layer = Layer(**{**data["layer"], "path": place.with_suffix(".gone")})
        distributions = tuple(Distribution.from_json(one) for one in data["distributions"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return _Packed(layer=layer, distributions=distributions)


def _check(recipe: Recipe, base: Reference, inventory: Inventory, python: str) -> None:
    """Refuse a base on which the job could not run, before any package is fetched for it."""
    if inventory.platform != "/".join(recipe.platform.split("/")[:2]):
        raise ImageError(
            f"The base image {base} is for {inventory.platform}, and the image is to be for {recipe.platform}. "
            f"Name a base image for that platform."
        )
    if python:
        base_image.check_python(str(base), inventory.python_version, inventory.python, python)
    if inventory.find("torch") is None:
        base_image.check_torch(str(base), inventory.python_version, inventory.python, recipe)


def _files(recipe: Recipe, inventory: Inventory, blobs_dir: pathlib.Path) -> list[Entry]:
    """The recipe's own files, where they really lie: a base's `/bin` is often a link to `/usr/bin`."""
    store = FolderStore(blobs_dir)
    entries = []
    for file in recipe.files:
        blob = store.path(file.digest)
        if not blob.is_file():
            raise ImageError(
                f"The bytes of {file.path} are not on this machine any more ({blob}). Give the recipe its `files=` again."
            )
        folder, name = posixpath.split(file.path)
        path = posixpath.join(inventory.place(folder), name)
        entries.append(Entry(path=path, content=blob, executable=file.executable))
    return entries


def _compose(
    recipe: Recipe, image: ImageManifest, layers: Sequence[Layer], after: Inventory, labels: Mapping[str, str]
) -> tuple[bytes, bytes]:
    """Manifest and configuration of the image."""
    diff_ids = (*image.config["rootfs"]["diff_ids"], *(layer.diff_id for layer in layers))
    identity = dataclasses.replace(recipe, rebuild=False).to_json()
    made_of = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    told = {base_image.RECIPE_LABEL: made_of, inventories.LABEL: after.to_label(diff_ids), **labels}
    manifest, config = image.manifest, image.config
    for layer in layers:
        manifest_bytes, config_bytes = media.append_layer(
            manifest, config, layer, history=_HISTORY, environment=recipe.environment, labels=told
        )
        manifest, config = json.loads(manifest_bytes), json.loads(config_bytes)
    return manifest_bytes, config_bytes
