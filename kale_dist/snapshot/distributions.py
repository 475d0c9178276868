"""The installed distributions of a Python, and what identifies each. Reads metadata, and none of their files. No torch."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.metadata
import itertools
import json
import operator
import platform
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import Distribution

PRELOADED = frozenset({"dill", "mpmath", "numpy", "sympy", "tqdm", "typing-extensions"})
"""What a fork server has imported with torch before the packages of a job are there."""

SHEBANG = b"#!kale_dist: python\n"
"""The first line of a packed script, in whose place a pod puts its own Python."""

_INSTALLERS = (
    "direct_url.json",
    "INSTALLER",
    "RECORD",
    "RECORD.jws",
    "RECORD.p7s",
    "REQUESTED",
    "uv_build.json",
    "uv_cache.json",
)
"""Files of metadata that differ between installations of the same wheel."""

_COMPARED: Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, Distribution]:
    """All distributions by canonical name; of two with one name the one that an import finds."""
    found: dict[str, Distribution] = {}
    for one in importlib.metadata.distributions():
        # One that was only partly removed has no name.
        with contextlib.suppress(KeyError, TypeError, OSError):
            found.setdefault(canonical(one.metadata["Name"]), one)
    return found


def rows(distribution: Distribution) -> list[tuple[str, ...]]:
    """Path, hash and size of each line of RECORD, without caches of bytecode; empty where there is none."""
    listed = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    return [(row[0], *row[1:3]) for row in listed if len(row) > 2 and not row[0].endswith(".pyc")]  # noqa: PLR2004 - its columns


def is_written_by_installer(path: str) -> bool:
    """Whether a file of metadata differs between installations of the same wheel."""
    return ".dist-info/" in path and path.rpartition("/")[2] in _INSTALLERS


def identity(distribution: Distribution) -> str:
    """A digest of what a distribution's wheel has put among the packages; empty without a RECORD with hashes, or for an editable one.

    Scripts and data outside are left out: installers write them differently.
    """
    listed = rows(distribution)
    kept = sorted(row for row in listed if not row[0].startswith(("../", "/")) and not is_written_by_installer(row[0]))
    if not listed or not all(row[1] for row in kept) or is_editable(distribution):
        return ""
    named = canonical(distribution.metadata["Name"]), distribution.version, kept
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]


def is_editable(distribution: Distribution) -> bool:
    """Whether a project is installed as a link to its folder."""
    try:
        return bool(json.loads(distribution.read_text("direct_url.json") or "{}")["dir_info"]["editable"])
    except (ValueError, KeyError, TypeError):
        return False


def accepts(specifier: str, version: str) -> bool:
    """Whether a version is within a specifier, such as `>=1.24,!=2.0.*`, by the numbers of its release alone.

    What is written otherwise than in these forms counts as not accepted.
    """
    return all(_accepts(part, _release(version)) for part in specifier.split(",") if part)


def _accepts(part: str, version: tuple[int, ...]) -> bool:
    match = re.fullmatch(r"(~=|[<>=!]=|[<>])=?v?(\d+(?:\.\d+)*)(\.\*)?[^,]*", part)
    if match is None:
        return False
    sign, given, is_prefix = match[1], tuple(map(int, match[2].split("."))), bool(match[3])
    if sign == "~=":
        return version[: len(given) - 1] == given[:-1] and version >= given
    if is_prefix:
        return _COMPARED[sign](version[: len(given)], given)
    filled = zip(*itertools.zip_longest(version, given, fillvalue=0), strict=True)
    return _COMPARED[sign](*filled)


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return _release(version)[:2]


def this_platform() -> str:
    """What compiled packages of this Python run on, such as `linux x86_64`."""
    return f"{sys.platform} {platform.machine().lower()}"
