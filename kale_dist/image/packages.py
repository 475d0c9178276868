"""Packages for an image: resolved against what its base has, fetched as wheels, unpacked as its Python wants them.

pip resolves and fetches, as a program, with the settings, proxies and credentials that this user has given it; it is
wherever Python is, and it is the only one that can be told what is installed elsewhere: the base's inventory is laid
before it as bare metadata, so it takes what is met as met, also what is in no index (`torch 2.13.0+cpu`). The wheels are
unpacked by the library `installer`, which writes launchers, records and data files for another interpreter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.exceptions import InstallerError
from installer.sources import WheelContentElement, WheelFile
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import parse_wheel_filename

from kale_dist.errors import ImageError
from kale_dist.image.installed import Distribution, canonical, read_metadata
from kale_dist.image.inventory import Inventory
from kale_dist.image.kept import write_atomically
from kale_dist.image.layer import Entry
from kale_dist.image.package_errors import explain, explain_source, missing_requirement
from kale_dist.image.pip_program import Pip, PipError
from kale_dist.recipe import Recipe

_SOURCE_BUILDS = 20
"""Packages of one recipe that are made from their source here, at most."""

_FRESH_S = 24 * 3600
"""How long a resolution is taken again for the same packages on the same base."""

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wheel:
    """A package that an image lacks."""

    name: str
    """Canonical."""
    version: str
    path: pathlib.Path
    """On this machine."""


def resolve(
    recipe: Recipe, inventory: Inventory, *, cache_dir: pathlib.Path, folder: pathlib.Path, say: Callable[[str], None]
) -> tuple[Wheel, ...]:
    """Find and fetch what the recipe's packages need beyond what the base has.

    Args:
        recipe: Its packages, index URLs, and whether torch may change.
        inventory: What the base has.
        cache_dir: Where wheels and resolutions are kept.
        folder: A folder on the same disk that does not exist yet, for what is needed on the way; whoever called removes it.
        say: Takes a line for the user.

    Returns:
        Sorted by name.

    Raises:
        ImageError: A package does not exist, has no wheel for the base, conflicts, or would change the base's torch.
    """
    if not recipe.packages:
        return ()
    remembered = cache_dir / "resolutions" / f"{_key(recipe, inventory)}.json"
    wheels = None if recipe.rebuild else _recall(remembered, cache_dir)
    if wheels is None:
        try:
            folder.mkdir()
            wheels = _resolve_anew(recipe, inventory, folder, cache_dir, say)
        except OSError as error:
            raise ImageError(
                f"Packages for the image could not be kept on this machine: {error}. Make room in the folder for caches "
                f"({cache_dir}), or set XDG_CACHE_HOME to one that has some, and call again."
            ) from error
        _remember(remembered, wheels)
    torch = inventory.find("torch")
    changed = next((wheel for wheel in wheels if wheel.name == "torch"), None)
    if torch is not None and changed is not None and not recipe.allow_torch_change:
        raise ImageError(
            f"The packages would replace the base image's torch {torch.version} by {changed.version}. "
            f"Give `allow_torch_change=True` if that is meant, or versions that work with torch {torch.version}."
        )
    if wheels:
        size = sum(wheel.path.stat().st_size for wheel in wheels) / _MIB
        say(
            f"Packages for the image ({size:.1f} MiB): "
            + ", ".join(f"{wheel.name} {wheel.version}" for wheel in wheels)
        )
    else:
        say("The base image has all packages that were asked for.")
    return wheels


def _key(recipe: Recipe, inventory: Inventory) -> str:
    """Names what the outcome of a resolution depends on."""
    installed = [(distribution.name, distribution.version) for distribution in inventory.distributions]
    base = (inventory.python_version, inventory.platform, inventory.libc, installed)
    indexes = (
        recipe.index_urls,
        [os.environ.get(name) for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")],
    )
    facts = (recipe.packages, recipe.allow_torch_change, base, indexes)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _recall(path: pathlib.Path, cache_dir: pathlib.Path) -> tuple[Wheel, ...] | None:
    """What was resolved lately, if all its wheels are still there."""
    try:
        if time.time() - path.stat().st_mtime > _FRESH_S:
            return None
        names = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wheels = tuple(_wheel(cache_dir / "wheels" / name) for name in names)
    return wheels if all(wheel.path.is_file() for wheel in wheels) else None


def _remember(path: pathlib.Path, wheels: Sequence[Wheel]) -> None:
    names = [f"{wheel.path.parent.name}/{wheel.path.name}" for wheel in wheels]
    write_atomically(path, json.dumps(names).encode())


def _wheel(path: pathlib.Path) -> Wheel:
    name, version, _, _ = parse_wheel_filename(path.name)
    return Wheel(name=canonical(name), version=str(version), path=path)


def _resolve_anew(
    recipe: Recipe, inventory: Inventory, folder: pathlib.Path, cache_dir: pathlib.Path, say: Callable[[str], None]
) -> tuple[Wheel, ...]:
    """Ask pip, making wheels of packages that exist as source only."""
    fetched = folder / "wheels"
    fetched.mkdir()
    with Pip(inventory, folder, index_urls=recipe.index_urls, say=say) as pip:
        digests = _fetch(pip, recipe, inventory, fetched, say)
    return tuple(sorted((_keep(path, cache_dir, digests) for path in fetched.iterdir()), key=lambda wheel: wheel.name))


def _fetch(
    pip: Pip, recipe: Recipe, inventory: Inventory, fetched: pathlib.Path, say: Callable[[str], None]
) -> dict[str, str]:
    """Resolve, and put the wheels into a folder; gives SHA-256 by name, of those that pip has compared with theirs."""
    pip.lay_installed(
        (distribution.name, distribution.version, _kept_requirements(distribution, inventory))
        for distribution in inventory.distributions
    )
    constraints = () if recipe.allow_torch_change else tuple(_torch_constraints(inventory))
    built: set[str] = set()
    while True:
        try:
            found = pip.resolve(recipe.packages, constraints)
            break
        except PipError as error:
            missing = missing_requirement(error.output)
            name = canonical(Requirement(missing).name) if missing else ""
            if not missing or name in built or len(built) >= _SOURCE_BUILDS:
                raise explain(error.output, inventory) from None
            built.add(name)
            _build(pip, name, missing, inventory, say)
    links, digests = [], {}
    for item in found:
        metadata, link = item["metadata"], item["download_info"]
        name = canonical(metadata["name"])
        url = link["url"]
        if not url.split("#")[0].endswith(".whl"):
            url = _build(pip, name, f"{name} @ {_source_url(link)}", inventory, say).as_uri()
        digest = (link.get("archive_info") or {}).get("hashes", {}).get("sha256")
        if digest and url == link["url"]:
            digests[name] = digest
        links.append(f"{name} @ {url}" + (f"#sha256={digest}" if name in digests else ""))
    if links:
        try:
            pip.download(links, fetched)
        except PipError as error:
            raise explain(error.output, inventory) from None
    return digests


def _source_url(link: dict[str, object]) -> str:
    """Of a package that is fetched from a repository or an archive, as a requirement has it."""
    version_control = link.get("vcs_info")
    if isinstance(version_control, dict):
        return f"{version_control['vcs']}+{link['url']}@{version_control['commit_id']}"
    return str(link["url"])


def _build(pip: Pip, name: str, requirement: str, inventory: Inventory, say: Callable[[str], None]) -> pathlib.Path:
    """A wheel from source; only one that runs anywhere is of use in an image."""
    try:
        wheel = pip.build(name, requirement)
    except PipError as error:
        raise explain_source(requirement, error.output, pip.explain_missing(requirement), inventory) from None
    if not wheel.name.endswith("-none-any.whl"):
        raise ImageError(
            f"{requirement} has no wheel for {inventory.libc} on {inventory.platform} with Python {inventory.python_minor}, "
            f'only source with parts that must be compiled there. Use `builder="docker"`, with the compiler and libraries '
            f"it needs in `apt=`, another version, or a base image that has it."
        )
    say(f"{requirement} exists as source only; made a wheel of it here.")
    return wheel


def _keep(path: pathlib.Path, cache_dir: pathlib.Path, digests: Mapping[str, str]) -> Wheel:
    """Move a wheel to where wheels are kept, by content."""
    digest = digests.get(_wheel(path).name)
    if digest is None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    place = cache_dir / "wheels" / digest / path.name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    return _wheel(place)


def _kept_requirements(distribution: Distribution, inventory: Inventory) -> Iterator[str]:
    """A base package's requirements without those that the base itself does not meet: the base is taken as it is."""
    for text in distribution.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if "extra" in str(requirement.marker or "") or _is_met(requirement, inventory):
            yield text


def _is_met(requirement: Requirement, inventory: Inventory) -> bool:
    installed = inventory.find(requirement.name)
    return installed is not None and requirement.specifier.contains(installed.version, prereleases=True)


def _torch_constraints(inventory: Inventory) -> Iterator[str]:
    """What keeps the base's torch as it is, and working: itself, and its requirements as far as the base meets them."""
    torch = inventory.find("torch")
    if torch is None:
        return
    yield f"torch=={torch.version}"
    for text in _kept_requirements(torch, inventory):
        requirement = Requirement(text)
        if requirement.specifier and _is_met(requirement, inventory) and "extra" not in str(requirement.marker or ""):
            yield f"{requirement.name}{requirement.specifier}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unpacked:
    """Packages as files of an image."""

    entries: tuple[Entry, ...] = ()
    """All files, without bytecode."""
    distributions: tuple[Distribution, ...] = ()
    """What is installed by them."""


def unpack(wheels: Sequence[Wheel], inventory: Inventory, folder: pathlib.Path) -> Unpacked:
    """Unpack wheels as they lie in the image.

    Args:
        wheels: What is installed.
        inventory: Where it goes, and which interpreter its scripts name.
        folder: An empty folder; it gets the image's paths below it.

    Raises:
        ImageError: A wheel is damaged.
    """
    site = inventory.site_directory
    distributions = []
    for wheel in wheels:
        places = {
            "purelib": site,
            "platlib": site,
            "scripts": inventory.scripts_directory,
            "data": inventory.prefix,
            "headers": f"{inventory.prefix}/include/python{inventory.python_minor}/{wheel.name}",
        }
        destination = SchemeDictionaryDestination(
            places, inventory.python, "posix", destdir=str(folder), overwrite_existing=True
        )
        try:
            with _Sources.open(wheel.path) as source:
                install(source, destination, additional_metadata={"INSTALLER": b"kale-dist\n"})
                _, _, requires = read_metadata(source.read_dist_info("METADATA"))
                metadata = source.dist_info_dir
        except OSError as error:
            raise ImageError(
                f"{wheel.path.name} could not be unpacked to {folder}: {error.strerror or error}. "
                f"Make room there, or set XDG_CACHE_HOME to a folder that has some, and call again."
            ) from error
        except (zipfile.BadZipFile, InstallerError, ValueError, KeyError, AssertionError) as error:
            raise ImageError(
                f"The wheel {wheel.path.name} cannot be unpacked: {error}. Ask whoever published it for a sound one, "
                f"or take another version."
            ) from error
        distributions.append(
            Distribution(name=wheel.name, version=wheel.version, requires=requires, folder=site, metadata=metadata)
        )
    return Unpacked(entries=tuple(_entries(folder)), distributions=tuple(distributions))


class _Sources(WheelFile):
    """A wheel without the bytecode that some are published with by mistake."""

    def get_contents(self) -> Iterator[WheelContentElement]:
        """All other files."""
        return (element for element in super().get_contents() if "__pycache__" not in element[0][0].split("/"))


def _entries(folder: pathlib.Path) -> Iterator[Entry]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = pathlib.Path(root, name)
            inside = "/" + path.relative_to(folder).as_posix()
            yield Entry(path=inside, content=path, executable=bool(path.stat().st_mode & 0o100))
