"""Checks the arguments of a call that describe its image, as users write them, and brings them into one form.

Files are looked at and read; nothing is written, and no registry, engine or index is asked.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import posixpath
import re
from typing import TYPE_CHECKING, Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec import names, place_settings
from kale_dist.job.spec.checks import NO_NUL, pairs, text, texts
from kale_dist.job.spec.recipe import ImageFile, Recipe
from kale_dist.wording import needing, shorten, show

if TYPE_CHECKING:
    from types import ModuleType

AUTO, HERE = "auto", "here"

_APT = text(
    re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9]+)?(?:=[A-Za-z0-9.+:~-]+)?").fullmatch,
    "{} cannot be the name of a Debian package",
    "Write its name as `apt-get install` takes it: 'libsndfile1' or 'git=1:2.39.5-0+deb12u2'",
)
_PLATFORM = text(
    re.compile(r"linux/[a-z0-9]+(?:/v[0-9]+)?").fullmatch,
    "{} is not a platform",
    "Write 'linux/amd64' or 'linux/arm64'",
)
_NEVER_BELOW = ("/proc", "/sys", "/dev")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageWanted:
    """Holds the image that a call names, or the recipe by which it is made."""

    image: str = ""
    """A reference, if the image is there; else empty."""
    recipe: Recipe | None = None
    """What the image is made of, if it is made. Its files may still be `source` files of this machine."""
    auto: bool = False
    """Whether the packages that the call imports belong to the recipe, too."""
    here: tuple[str, ...] | None = None
    """Names of this machine's packages that are sent where the image lacks them; empty for all that were asked for; None for none."""


def check(image: Any, packages: Any, requirements: Any) -> ImageWanted:
    """Bring `image`, `packages` and `requirements` into one form.

    Args:
        image: A reference, a `Recipe`, or None.
        packages: Requirements, `"auto"`, `"here"`, `"here: name, name"`, or None.
        requirements: A path of a requirements file, its text, or None.

    Raises:
        ConfigError: One of them is wrong.
    """
    auto = isinstance(packages, str) and packages == AUTO
    if auto:
        _parser("packages")
    named, packages = _here(packages)
    listed = _packages(None if auto else packages)
    image = place_settings.image_of(image) or ""
    if not isinstance(image, Recipe):
        if packages is None and requirements is None:
            return ImageWanted(image=image, here=named)
        image = Recipe(base=image)
    recipe = dataclasses.replace(image, packages=(*image.packages, *listed))
    if requirements is not None:
        packages, urls = _parser("requirements").read(_source(requirements))
        urls = tuple(dict.fromkeys((*recipe.index_urls, *urls)))
        recipe = dataclasses.replace(recipe, packages=(*recipe.packages, *packages), index_urls=urls)
    recipe = _checked(recipe)
    if not (recipe.adds_something or auto):
        return ImageWanted(image=recipe.base, here=named)
    return ImageWanted(recipe=recipe, auto=auto, here=named)


def _here(packages: Any) -> tuple[tuple[str, ...] | None, Any]:
    """The names that `"here: name, name"` gives, which are installed here, and what `packages` says beside that."""
    word, _, names = packages.partition(":") if isinstance(packages, str) else ("", "", "")
    if word.strip() != HERE:
        return None, packages
    given = tuple(name for part in names.split(",") if (name := part.strip()))
    with needing("images", "packages", "to send packages"):
        from kale_dist.image import here
    here.named(given)
    return given, None


def _packages(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        text = value.strip()
        is_short = 0 < len(text) < 80  # noqa: PLR2004 - still a line
        remedy = f"Write it as {[text] if is_short else ['einops==0.8']}, or 'auto', or 'here'"
        problem = f"{shorten(value)} is text, not a list"
        if value.lower() == AUTO:
            remedy = "Write it as 'auto'"
        elif value.strip().lower().startswith(HERE):
            remedy = "Write it as 'here', or as 'here: scikit-learn, mine'"
        elif "\n" in text or text.endswith(".txt"):
            remedy = "Give a file of requirements or its text by requirements="
        raise ConfigError("packages", problem, remedy)
    given = texts("packages", value, "['einops==0.8'], or 'auto', or 'here'")
    if any(one.partition(":")[0].strip() == HERE for one in given):
        remedy = "Write 'here', or 'here: scikit-learn, mine', as text and not in a list"
        raise ConfigError("packages", f"{list(given)} names {HERE!r} as a package", remedy)
    return given


def _source(requirements: Any) -> str | pathlib.Path:
    if isinstance(requirements, os.PathLike):
        return pathlib.Path(os.fsdecode(requirements))
    if isinstance(requirements, str):
        return requirements
    remedy = "Give the path of a requirements file or its text; a list goes to packages="
    raise ConfigError("requirements", f"{show(requirements)} is neither a path nor text", remedy)


def _checked(recipe: Recipe) -> Recipe:
    """A recipe in one form."""
    _PLATFORM("platform", recipe.platform)
    for package in recipe.apt:
        _APT("apt", package)
    if recipe.base:
        names.check_image("image", recipe.base)
    packages = recipe.packages
    if packages or recipe.index_urls:
        parser = _parser("packages")
        packages = parser.canonical("packages", packages)
        for url in recipe.index_urls:
            parser.check_url("index_urls", url)
    return dataclasses.replace(
        recipe,
        packages=packages,
        apt=tuple(sorted(set(recipe.apt))),
        files=_files(recipe.files),
        environment=_environment(recipe.environment),
    )


def _files(files: tuple[ImageFile, ...]) -> tuple[ImageFile, ...]:
    found: dict[str, ImageFile] = {}
    for file in map(_file, files):
        if file.path in found:
            raise ConfigError("files", f"{file.path!r} is given twice", "Leave one of the two out")
        found[file.path] = file
    for path in found:
        for parent in pathlib.PurePosixPath(path).parents:
            if str(parent) in found:
                raise ConfigError("files", f"{str(parent)!r} is a file, and {path!r} lies in it", "Rename one of them")
    return tuple(found[path] for path in sorted(found))


def _file(file: ImageFile) -> ImageFile:
    path = file.path
    remedy = "Write the whole path of the file in the image, such as '/opt/x.txt'"
    if not path.startswith("/") or path.endswith("/") or not path.isprintable() or ".." in path.split("/"):
        raise ConfigError("files", f"{shorten(path)} is not the path of a file in an image", remedy)
    path = "/" + posixpath.normpath(path).lstrip("/")
    if path == "/" or any(path == folder or path.startswith(f"{folder}/") for folder in _NEVER_BELOW):
        raise ConfigError("files", f"nothing can be put at {path!r} in an image", remedy)
    if not file.source:
        if not re.fullmatch(r"[0-9a-f]{64}", file.digest):
            problem = f"{path!r} has neither a file of this machine nor the digest of one"
            raise ConfigError("files", problem, "Write it as {'/opt/x.txt': 'x.txt'}")
        return dataclasses.replace(file, path=path)
    source = pathlib.Path(file.source)
    try:
        source = source.expanduser()
        mode = source.stat().st_mode if source.is_file() else None
        readable = mode is not None and os.access(source, os.R_OK)
    except (OSError, ValueError, RuntimeError):
        mode, readable = None, False
    if mode is None and source.is_dir():
        remedy = "Name the files in it; data that jobs read belongs into a volume"
        raise ConfigError("files", f"{file.source!r} is a folder", remedy)
    if mode is None or not readable:
        what = "cannot be read" if mode is not None else "is not a file of this machine"
        raise ConfigError("files", f"{shorten(file.source)} {what}", "Name a file that this process can read")
    return dataclasses.replace(file, path=path, source=str(source.absolute()), executable=bool(mode & 0o111))


def _environment(environment: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    seen: dict[str, str] = {}
    for name, value in pairs("environment", environment, "{'NAME': 'value'}", names.VARIABLE, NO_NUL):
        names.FREE_VARIABLE("environment", name)
        if seen.setdefault(name, value) != value:
            raise ConfigError("environment", f"{name} is given twice", "Leave one of the two out")
    return tuple(sorted(seen.items()))


def _parser(argument: str) -> ModuleType:
    """The module that reads requirements, which needs the package `packaging`."""
    with needing("images", argument, "to make an image"):
        from kale_dist.image import requirements
    return requirements
