"""What a base image has already: its Python, where that one looks for packages, and which are installed.

It is read from the layers' tar headers and a few small files, never by running the image. An image that was made by
this library says it itself in a label, which is believed only while the image has the very layers it was written for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from kale_dist.image.base_layers import Scan, Tree, follow
from kale_dist.image.installed import Distribution, canonical, distributions_of
from kale_dist.image.kept import write_atomically
from kale_dist.image.python_layout import layout_of, libc_of
from kale_dist.image.registry import ImageManifest, Registry

LABEL = "dev.kale-dist.inventory"
"""Of the images that this library makes."""

_FORMAT = 1
"""Of what is kept on this machine: another one where the same image would now give another inventory."""

_LINK_DEPTH = 3
"""Links deeper in the image than this lead nowhere that files of a recipe go."""

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What an image has. All paths are absolute; those of directories have no symbolic link in them."""

    python: str
    """The first `python3` on the image's PATH, as it is called there."""
    python_version: str
    """With the patch, which is 0 where it cannot be found out: `3.11.9`."""
    site_directory: str
    """Where pip would install to."""
    scripts_directory: str
    prefix: str
    """Where a package's data files go."""
    site_directories: tuple[str, ...]
    """All directories in which Python looks for packages, the first wins."""
    distributions: tuple[Distribution, ...]
    """Sorted by name."""
    platform: str
    """`linux/amd64`."""
    libc: str
    """`manylinux 2.36` for glibc 2.36, `musllinux 1.2` for musl 1.2."""
    user: str = ""
    workdir: str = ""
    links: tuple[tuple[str, str], ...] = ()
    """Symbolic links near the root, such as `("bin", "usr/bin")`, to what they say."""

    @property
    def python_minor(self) -> str:
        """Such as `3.11`."""
        return ".".join(self.python_version.split(".")[:2])

    def find(self, name: str) -> Distribution | None:
        """The installed package of this name, or None.

        Args:
            name: In any spelling.
        """
        wanted = canonical(name)
        return next((one for one in self.distributions if one.name == wanted), None)

    def place(self, path: str) -> str:
        """Where a file really lies that is put at this path.

        Args:
            path: Absolute, in the image.
        """
        return follow(path, dict(self.links)) or path

    def without_files(self) -> Self:
        """The same without the packages' files, which are most of it."""
        kept = tuple(dataclasses.replace(distribution, files=()) for distribution in self.distributions)
        return dataclasses.replace(self, distributions=kept)

    def to_label(self, diff_ids: Sequence[str]) -> str:
        """Text for the label of the image that has these layers, given by their `sha256:...` of the plain tars."""
        data = dataclasses.asdict(self.without_files())
        return json.dumps({"layers": _layers_digest(diff_ids), "inventory": data}, separators=(",", ":"))

    @classmethod
    def from_label(cls, text: str, diff_ids: Sequence[str]) -> Self | None:
        """The inventory a label holds; None if it was written for other layers, or by another version."""
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            label = json.loads(text)
            if label["layers"] != _layers_digest(diff_ids):
                return None
            data: dict[str, Any] = label["inventory"]
            distributions = tuple(Distribution.from_json({**one, "files": ()}) for one in data["distributions"])
            links = tuple((path, target) for path, target in data["links"])
            folders = tuple(data["site_directories"])
            return cls(**{**data, "distributions": distributions, "links": links, "site_directories": folders})
        return None


def _layers_digest(diff_ids: Sequence[str]) -> str:
    """Tells the layers a label was written for: a label is inherited by images that others build on ours."""
    return hashlib.sha256("\n".join(diff_ids).encode()).hexdigest()


def read(
    registry: Registry,
    image: ImageManifest,
    repository: str,
    *,
    cache_dir: pathlib.Path,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] | None = None,
    files: bool = False,
) -> Inventory:
    """Find out what an image has.

    Args:
        registry: Where its layers are.
        image: Its manifest and configuration.
        repository: Where in the registry.
        cache_dir: Where what was read of each layer is kept, in `layers/`, and what came of it, in `inventories/`.
        say: Takes a line for the user.
        progress: Takes the bytes that have been read and those that there are.
        files: Whether each package's files are wanted too; then a label is not enough.

    Raises:
        ImageError: The image has no Python, or a layer cannot be read.
    """
    settings = image.config.get("config") or {}
    diff_ids = (image.config.get("rootfs") or {}).get("diff_ids") or []
    label = (settings.get("Labels") or {}).get(LABEL)
    if label and not files and (known := Inventory.from_label(label, diff_ids)) is not None:
        return known
    place = cache_dir / "inventories" / f"{image.descriptor.digest.replace(':', '-')}-{_FORMAT}.json"
    if not files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if (kept := Inventory.from_label(place.read_text(encoding="utf-8"), diff_ids)) is not None:
                return kept
    tree = Tree()
    for scan in _scans(registry, image, repository, cache_dir, say, progress):
        tree.add(scan)
    inventory = inventory_of(tree, image.config)
    write_atomically(place, inventory.to_label(diff_ids).encode())
    return inventory if files else inventory.without_files()


def _scans(
    registry: Registry,
    image: ImageManifest,
    repository: str,
    cache_dir: pathlib.Path,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] | None,
) -> Iterator[Scan]:
    """What every layer tells, the lowest first; streamed from the registry where it is not kept here."""
    layers = image.manifest["layers"]
    kept = {layer["digest"]: cache_dir / "layers" / f"{layer['digest'].replace(':', '-')}.json.gz" for layer in layers}
    scans = {digest: scan for digest, path in kept.items() if (scan := Scan.load(path)) is not None}
    missing = [layer for layer in layers if layer["digest"] not in scans]
    total = sum(layer["size"] for layer in missing)
    if missing:
        say(
            f"Reading what the base image has: {len(missing)} of its {len(layers)} layers, {total / _MIB:.0f} MiB "
            f"from {registry.host}; once on this machine."
        )
    done = 0

    def counted(blocks: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal done
        for block in blocks:
            done += len(block)
            if progress is not None:
                progress(done, total)
            yield block

    for layer in layers:
        digest = layer["digest"]
        if digest not in scans:
            scans[digest] = Scan.of(counted(registry.blob(repository, digest)), digest)
            scans[digest].save(kept[digest])
        yield scans[digest]


def inventory_of(tree: Tree, config: dict[str, Any]) -> Inventory:
    """What an image has, from its merged layers.

    Args:
        tree: The layers.
        config: The image's configuration, as the registry has it.

    Raises:
        ImageError: There is no Python on its PATH.
    """
    settings = config.get("config") or {}
    environment = dict(setting.split("=", 1) for setting in settings.get("Env") or [] if "=" in setting)
    layout = layout_of(tree, environment)
    return Inventory(
        python=layout.python,
        python_version=layout.version,
        site_directory=layout.site_directory,
        scripts_directory=layout.scripts_directory,
        prefix=layout.prefix,
        site_directories=layout.site_directories,
        distributions=distributions_of(tree, layout.site_directories),
        platform=f"{config.get('os') or 'linux'}/{config.get('architecture') or 'amd64'}",
        libc=libc_of(tree),
        user=settings.get("User") or "",
        workdir=settings.get("WorkingDir") or "",
        links=tuple(sorted((path, target) for path, target in tree.links.items() if path.count("/") < _LINK_DEPTH)),
    )
