"""Requirements as users have them: lists, and the text of a requirements file, in one spelling.

Requirements, indexes and other files of requirements are taken; other options of pip are refused by name.
"""

from __future__ import annotations

import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kale_dist.errors import ConfigError
from kale_dist.wording import shorten

PYPI = "https://pypi.org/simple"

_OWN = "kale-dist"
"""kale_dist itself is sent with every call and need not be in an image."""

_COMMENT = re.compile(r"(^|\s)#.*$", re.MULTILINE)
_OPTION = re.compile(r"(--?[A-Za-z][A-Za-z-]*?)(?:\s*=\s*|\s+|(?<=^-[a-z])|$)(.*)")
_PATH = re.compile(r"\.{0,2}(?:[/\\]|$)|~|[A-Za-z]:\\|file:", re.IGNORECASE)
_SECRET = re.compile(r"(?<=://)[^/@\s]+@")
_REMEDY = (
    "Write 'einops', 'einops>=0.8,<1' or 'name @ https://...'. Files of this machine and options of pip cannot be part of an "
    "image's recipe: your own modules are sent anyway, indexes go into index_urls=, a file goes into requirements= (without "
    "hashes: `uv export --no-hashes`), and other settings into pip's own configuration"
)


def canonical(argument: str, listed: Iterable[str]) -> tuple[str, ...]:
    """Requirements, sorted and in one spelling.

    Args:
        argument: The argument's name, for messages.
        listed: Requirements as pip takes them on its command line.

    Raises:
        ConfigError: An entry is not a requirement, refers to this machine or holds a password.
    """
    found = [_requirement(argument, text) for text in listed]
    return tuple(sorted({str(requirement) for requirement in found if requirement.name != _OWN}))


def read(source: str | pathlib.Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parse a requirements file, or the text of one: the packages, and the URLs of the indexes that it names.

    Args:
        source: A path, or the text itself: anything that has more than one line or is a requirement. `-r` within it names
            other files, relative to it.

    Raises:
        ConfigError: A file cannot be read, or a line cannot be taken; names file and line.
    """
    if isinstance(source, pathlib.Path) or _is_path(source):
        lines = _of_file(pathlib.Path(source).expanduser(), "requirements", ())
    else:
        lines = _of_text(source, pathlib.Path(), "requirements", ())
    packages, first, more = set[str](), "", []
    for where, line in lines:
        option = _OPTION.match(line)
        if option is None:
            packages.update(canonical(where, [line]))
        elif option[1] in ("-i", "--index-url"):
            first = option[2].strip("\"'")
            check_url(where, first)
        elif option[1] == "--extra-index-url":
            more.append(option[2].strip("\"'"))
            check_url(where, more[-1])
        else:
            raise ConfigError(where, f"{option[1]} cannot be part of an image's recipe", _REMEDY)
    # Without a first one pip would ask its default, which a recipe has to name to be the same everywhere. It comes last, as with uv.
    urls = (*more, first or PYPI) if first or more else ()
    return tuple(sorted(packages)), tuple(dict.fromkeys(urls))


def hide_credentials(text: str) -> str:
    """A text with the user and password of each URL in it replaced by `***`."""
    return _SECRET.sub("***@", text)


def check_url(argument: str, url: str) -> None:
    """Check that a text is the URL of a package index.

    Raises:
        ConfigError: It is not a URL, or it holds a password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname)
    except ValueError:
        valid = False
    if not valid or re.search(r"[\s\0]", url):
        problem = f"{shorten(hide_credentials(url))} is not a URL of an index"
        raise ConfigError(argument, problem, f"Write it as '{PYPI}'")
    _check_secret(argument, str(parts.hostname), url)


def _of_file(path: pathlib.Path, argument: str, within: tuple[pathlib.Path, ...]) -> Iterator[tuple[str, str]]:
    if path.resolve() in within:
        raise ConfigError(argument, f"{path} is read within itself", "Take out one `-r`")
    if path.suffix in {".toml", ".yml", ".yaml", ".lock", ".json"}:
        remedy = "Export one: `pip freeze`, `uv export --no-hashes`, `poetry export --without-hashes`"
        raise ConfigError(argument, f"{path} is not a requirements file", remedy)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        remedy = "Name a requirements file, or give its text"
        raise ConfigError(argument, f"{path} cannot be read: {why}", remedy) from None
    yield from _of_text(text, path.parent, str(path), (*within, path.resolve()))


def _of_text(text: str, folder: pathlib.Path, name: str, within: tuple[pathlib.Path, ...]) -> Iterator[tuple[str, str]]:
    """The lines that are not blank or comments, as (place, line); a `-r` line is replaced by the lines of its file."""
    # A line that is carried on counts as one, with the number of its first.
    joined = re.sub(
        r"((?:.*\\\r?\n)+)(.*)",
        lambda found: re.sub(r"\\\r?\n", " ", found[1]) + found[2] + "\n" * found[1].count("\n"),
        text,
    )
    for number, raw in enumerate(joined.splitlines(), 1):
        line, where = _COMMENT.sub("", raw).strip(), f"{name}, line {number}"
        option = _OPTION.match(line)
        if option and option[1] in ("-r", "--requirement"):
            yield from _of_file(folder / option[2].strip("\"'"), where, within)
        elif line:
            yield where, line


def _requirement(argument: str, text: str) -> Requirement:
    """Parse one requirement; its name comes out in canonical spelling."""
    shown, stripped = shorten(hide_credentials(text)), text.strip()
    try:
        requirement = Requirement(stripped)
        link = urllib.parse.urlsplit(requirement.url or "https://")
    except ValueError as error:
        reason = hide_credentials(str(error).splitlines()[0].rstrip("."))
        if stripped.startswith("-") or re.search(r"\s--[a-z]", text):
            reason = "it has an option of pip"
        elif not stripped or _PATH.match(stripped):
            reason = "it is on this machine" if stripped else "it is empty"
        raise ConfigError(argument, f"{shown} is not a requirement ({reason})", _REMEDY) from None
    requirement.name = canonicalize_name(requirement.name)
    is_archive = not requirement.url and re.search(r"\.(?:whl|tar\.gz|zip)$", stripped.lower())
    if is_archive or link.scheme.removeprefix("git+") in {"", "file"}:
        raise ConfigError(argument, f"{shown} is on this machine, and an image is not", _REMEDY)
    if not link.scheme.endswith("ssh"):
        _check_secret(argument, requirement.name, requirement.url or "")
    return requirement


def _check_secret(argument: str, name: str, url: str) -> None:
    if _SECRET.search(url):
        remedy = "Leave it out: pip finds it in ~/.netrc or a keyring"
        raise ConfigError(argument, f"the URL of {name} holds a user name or a password", remedy)


def _is_path(text: str) -> bool:
    """Whether a text of one line is a path rather than a requirement (`requirements.txt` could be either)."""
    if len(text.strip().splitlines()) > 1 or "\0" in text or "://" in text or text.lstrip().startswith(("-", "#")):
        return False
    return text.rstrip().endswith((".txt", ".in", ".toml", ".yml", ".yaml", ".lock")) or "/" in text
