"""Requirements as users have them: lists, and the text of a requirements file, in one spelling.

What pip's file format can say and a recipe cannot is refused by its name, with what to do instead.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kale_dist.errors import ConfigError
from kale_dist.wording import shorten

PYPI = "https://pypi.org/simple"

_OWN = "kale-dist"
"""Is sent with every call, and so need not be in an image."""

_MAX_NESTING = 8
_LINE_END = re.compile(r"\r\n|\r|\n")
_COMMENT = re.compile(r"(^|\s)#.*$")
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
_OPTION = re.compile(r"(--?[A-Za-z][A-Za-z-]*)(?:\s*=\s*|\s+|(?<=^-[a-z])|$)(.*)")
_PATH = re.compile(r"\.{0,2}(?:/|$)|~|[A-Za-z]:\\|\\\\|file:", re.IGNORECASE)
_ARCHIVE = re.compile(r"\.(whl|tar\.gz|tgz|zip|tar\.bz2|egg)($|\s|\[)", re.IGNORECASE)
_LOCAL_REMEDY = (
    "Your own modules are sent with the call anyway; a built package goes to an index, or to a URL as "
    "'name @ https://...'"
)
_LONG = {
    "-r": "--requirement", "-c": "--constraint", "-e": "--editable", "-i": "--index-url", "-f": "--find-links",
}  # fmt: skip
_REFUSED = {
    "--editable": _LOCAL_REMEDY,
    "--constraint": "Write the versions into the requirements themselves",
    "--find-links": "Name an index by index_urls, or a package by 'name @ https://...'",
    "--no-index": "Name an index by index_urls",
    "--hash": "Write the file without hashes (pip-compile --no-generate-hashes, uv export --no-hashes)",
    "--require-hashes": "Write the file without hashes (pip-compile --no-generate-hashes, uv export --no-hashes)",
    "--pre": "Name the version that is meant: 'name==1.0rc1'",
    "--trusted-host": "Set it in pip's own configuration: pip config set global.trusted-host HOST",
    "--config-settings": "Name a version that has a wheel",
    "--global-option": "Name a version that has a wheel",
    "--no-binary": "Name a version that has a wheel",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """What a requirements file says."""

    packages: tuple[str, ...]
    """Sorted, in one spelling, without duplicates."""
    index_urls: tuple[str, ...] = ()
    """Empty: pip's own."""


def canonical(argument: str, listed: Iterable[str]) -> tuple[str, ...]:
    """Requirements, sorted and in one spelling.

    Args:
        argument: What the user calls them, for messages.
        listed: As pip takes them on its command line.

    Raises:
        ConfigError: One is no requirement, means something on this machine or holds a password.
    """
    found: dict[str, Requirement] = {}
    for text in listed:
        requirement = _requirement(argument, text)
        if requirement.name != _OWN:
            found.setdefault(str(requirement), requirement)
    return tuple(sorted(found))


def read(source: str | pathlib.Path) -> Requirements:
    """What a requirements file, or the text of one, says.

    Args:
        source: A path, or text: anything that has more than one line or is a requirement. `-r` within it names
            other files, relative to it.

    Raises:
        ConfigError: A file cannot be read, or a line cannot be taken; names file and line.
    """
    lines: list[tuple[str, str]] = []
    if isinstance(source, pathlib.Path) or _is_path(source):
        lines += _of_file(pathlib.Path(source).expanduser(), "requirements", ())
    else:
        lines += _of_text(source, pathlib.Path(), "requirements", ())
    packages, first, more = [], "", []
    for where, line in lines:
        option = _OPTION.match(line)
        if option is None:
            packages.append((where, line))
        elif _long(option[1]) == "--index-url":
            first = _index_url(where, option[2])
        elif _long(option[1]) == "--extra-index-url":
            more.append(_index_url(where, option[2]))
    found = {str(requirement): requirement for requirement in (_requirement(where, line) for where, line in packages)}
    kept = {text: requirement for text, requirement in found.items() if requirement.name != _OWN}
    # Without a first one pip would ask its default, whose name a recipe has to say to be the same everywhere.
    urls = (first or PYPI, *more) if first or more else ()
    return Requirements(packages=tuple(sorted(kept)), index_urls=tuple(dict.fromkeys(urls)))


def check_url(argument: str, url: str) -> None:
    """Accept the URL of an index.

    Raises:
        ConfigError: It is none, or holds a password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname)
    except ValueError:
        valid = False
    if not valid or re.search(r"[\s\0]", url):
        raise ConfigError(
            argument, f"{shorten(_without_secret(url))} is not a URL of an index", f"Write it as '{PYPI}'"
        )
    if parts.username is not None or parts.password is not None:
        remedy = "Leave it out: pip finds it in ~/.netrc or a keyring"
        raise ConfigError(argument, f"the URL of {parts.hostname} holds a user name or a password", remedy)


def _of_file(path: pathlib.Path, argument: str, within: tuple[pathlib.Path, ...]) -> Iterator[tuple[str, str]]:
    if path.resolve() in within or len(within) >= _MAX_NESTING:
        raise ConfigError(argument, f"{path} is read within itself", "Take out one `-r`")
    if path.suffix in {".toml", ".yml", ".yaml", ".lock", ".json"}:
        remedy = "Export one: `pip freeze`, `uv export --no-hashes`, `poetry export --without-hashes`"
        raise ConfigError(argument, f"{path} is not a requirements file", remedy)
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(argument, reason, "Name a requirements file, or give its text") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(argument, f"{path}, line {line}, is not UTF-8", "Save it as UTF-8") from None
    yield from _of_text(text, path.parent, str(path), (*within, path.resolve()))


def _of_text(text: str, folder: pathlib.Path, name: str, within: tuple[pathlib.Path, ...]) -> Iterator[tuple[str, str]]:
    """Lines that say something, each with where it is; those of other files in the place of their `-r`."""
    begun, start = "", 1
    for number, raw in enumerate(_LINE_END.split(text), 1):
        start = start if begun else number
        line = raw if _COMMENT.match(raw) else f"{begun}{raw}"
        if line.endswith("\\") and not _COMMENT.search(raw):
            begun = line[:-1] + " "
            continue
        line, begun, where = _COMMENT.sub("", line).strip(), "", f"{name}, line {start}"
        if not line:
            continue
        if _VARIABLE.search(line):
            raise ConfigError(where, "it holds a variable such as ${NAME}", "Write what it stands for, but no password")
        option = _OPTION.match(line)
        long = _long(option[1]) if option else ""
        if option and long == "--requirement":
            yield from _of_file(folder / _unquoted(option[2]), where, within)
        elif option and long not in {"--index-url", "--extra-index-url"}:
            remedy = _REFUSED.get(long, "Take the line out, or set it in pip's own configuration")
            raise ConfigError(where, f"{option[1]} cannot be part of an image's recipe", remedy)
        else:
            yield where, line


def _requirement(argument: str, text: str) -> Requirement:
    """One requirement with its name in canonical spelling."""
    shown = shorten(_without_secret(text))
    if text.strip().startswith("-"):
        option = _long(text.split(maxsplit=1)[0].partition("=")[0])
        remedy = _REFUSED.get(option, "Give requirements alone, or a file of them by requirements=")
        raise ConfigError(argument, f"{shown} is an option of pip", remedy)
    if inner := re.search(r"\s--[a-z][a-z-]*", text):
        option = inner[0].strip()
        remedy = _REFUSED.get(option, "Give the requirement alone")
        raise ConfigError(argument, f"{shown} has the option {option}", remedy)
    stripped = text.strip()
    if (stripped and _PATH.match(stripped)) or (_ARCHIVE.search(stripped) and "://" not in stripped):
        raise ConfigError(argument, f"{shown} is on this machine, and an image is not", _LOCAL_REMEDY)
    if re.match(r"[a-z+]+://", stripped):
        raise ConfigError(argument, f"{shown} does not say what package it is", "Write it as 'name @ https://...'")
    try:
        requirement = Requirement(stripped)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0].rstrip(".") if stripped else "it is empty"
        problem = f"{shown} is not a requirement ({_without_secret(reason)})"
        raise ConfigError(argument, problem, "Write it as 'einops', 'einops==0.8' or 'einops>=0.8,<1'") from None
    requirement.name = canonicalize_name(requirement.name)
    if requirement.url:
        _check_link(argument, requirement.name, requirement.url)
    return requirement


def _check_link(argument: str, name: str, url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        raise ConfigError(argument, f"the URL of {name} is none", "Write it as 'name @ https://...'") from None
    if parts.scheme in {"", "file"} or parts.scheme.endswith("+file"):
        raise ConfigError(argument, f"{name} is on this machine, and an image is not", _LOCAL_REMEDY)
    if parts.password is not None or (parts.username is not None and not parts.scheme.endswith("ssh")):
        remedy = "Leave it out: pip finds it in ~/.netrc or a keyring"
        raise ConfigError(argument, f"the URL of {name} holds a user name or a password", remedy)


def _index_url(where: str, text: str) -> str:
    url = _unquoted(text)
    check_url(where, url)
    return url


def _long(option: str) -> str:
    return _LONG.get(option, option)


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _is_path(text: str) -> bool:
    """Whether a text of one line is meant as a path: `requirements.txt` could be a requirement, too."""
    if _LINE_END.search(text.strip()) or "\0" in text or "://" in text or text.lstrip().startswith(("-", "#")):
        return False
    return text.rstrip().endswith((".txt", ".in", ".toml", ".yml", ".yaml", ".lock")) or "/" in text


def _without_secret(text: str) -> str:
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", text)
