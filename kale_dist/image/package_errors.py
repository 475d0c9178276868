"""What pip's refusals mean for an image, in its own words where they explain, with a remedy."""

from __future__ import annotations

import re

from kale_dist.errors import ImageError
from kale_dist.image.inventory import Inventory

_MISSING = re.compile(r"^ERROR: No matching distribution found for (?P<requirement>.+?)$", re.MULTILINE)
_VERSIONS = re.compile(
    r"^ERROR: Could not find a version that satisfies .*\(from versions: (?P<versions>.*)\)$", re.MULTILINE
)
_CONFLICT = re.compile(r"^The conflict is caused by:\n(?P<cause>.+?)(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
_UNREACHABLE = re.compile(
    r"Retrying \(Retry|Max retries exceeded|Could not fetch URL (?!.*404 Client Error)|ConnectionError|"
    r"Temporary failure in name resolution|HTTP error (?:401|403|5\d\d)|(?:401|403|5\d\d) (?:Client|Server) Error"
)
_FULL = "No space left on device"
_SHOWN_VERSIONS = 8
_SHOWN_LINES = 20
_SHOWN_CHARACTERS = 400


def missing_requirement(output: str) -> str:
    """The requirement for which pip found no wheel; empty where it failed for another reason."""
    found = _MISSING.search(output)
    if found is None or _UNREACHABLE.search(output):
        return ""
    # pip adds what asked for it: `NAME>=1 (from other==2)`.
    return re.sub(r"\s+\(from .*\)$", "", found["requirement"]).strip()


def explain(output: str, inventory: Inventory) -> ImageError:
    """The error for what pip printed.

    Args:
        output: All of it.
        inventory: Of the base.
    """
    conflict = _CONFLICT.search(output)
    if conflict is not None:
        cause = "; ".join(line.strip() for line in conflict["cause"].splitlines() if line.strip())
        torch = inventory.find("torch")
        if torch is not None and re.search(r"\btorch\b", cause):
            remedy = (
                f"The constraints are what the base image's torch {torch.version} needs: choose versions that work with it, "
                f"a base image with another torch, or `allow_torch_change=True`."
            )
        else:
            remedy = "Loosen or change the versions that were asked for."
        return ImageError(f"The packages for the image conflict: {cause}. {remedy}")
    if _FULL in output:
        return ImageError(
            "The disk is full: pip could not keep the packages for the image. Make room in the folders for temporary files "
            "(TMPDIR) and for caches (XDG_CACHE_HOME), and call again."
        )
    if _UNREACHABLE.search(output):
        return _unreachable(output)
    found = _MISSING.search(output)
    if found is not None:
        return _no_wheel(found["requirement"], output, inventory)
    lines = [line for line in output.splitlines() if line.strip()][-_SHOWN_LINES:]
    return ImageError("pip could not resolve the packages for the image:\n" + "\n".join(lines))


def explain_source(requirement: str, output: str, search: str, inventory: Inventory) -> ImageError:
    """The error for a package that has no wheel, and from whose source none could be made.

    Args:
        requirement: What was asked for.
        output: What pip printed when it was to build it.
        search: What pip told of its search for a wheel.
        inventory: Of the base.
    """
    if not _MISSING.search(output):
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"error", line, re.IGNORECASE)] or lines
        return ImageError(
            f"{requirement} exists as source only, and could not be built here: {' | '.join(errors[-6:])[:1200]}. "
            f'Use `builder="docker"`, with the compiler and libraries it needs in `apt=`, another version, or a base '
            f"image that has it."
        )
    if _UNREACHABLE.search(search):
        return _unreachable(search)
    if re.search(r"404 Client Error|\(404\)|404 Not Found", search) and _offered(search) == []:
        name = re.split(r"[\s=<>!~\[;@(]", requirement, maxsplit=1)[0]
        return ImageError(
            f"No package is called {name!r} in the indexes that pip uses here. Look at its spelling (the name to install is "
            f"not always the name to import), or name its index in `index_urls=`."
        )
    if "none of the wheel's tags" in search or "is not a supported wheel" in search:
        return _unfitting(requirement, inventory)
    return _no_wheel(requirement, search, inventory)


def _unreachable(output: str) -> ImageError:
    lines = [line.strip() for line in output.splitlines() if _UNREACHABLE.search(line)]
    return ImageError(
        f"The package index could not be reached, or refused: {lines[-1][:_SHOWN_CHARACTERS]}. "
        f"Look at the network, at pip's configuration (`pip config list`) and at its credentials, and call again.",
        retryable=True,
    )


def _offered(output: str) -> list[str]:
    """Versions that pip names as there."""
    found = _VERSIONS.search(output)
    return [] if found is None or found["versions"] == "none" else found["versions"].split(", ")


def _unfitting(requirement: str, inventory: Inventory) -> ImageError:
    return ImageError(
        f"{requirement} has wheels, but none for Python {inventory.python_minor} with {inventory.libc} on "
        f"{inventory.platform}, which is the base image, and no source. Take another version of it, or another base image."
    )


def _no_wheel(requirement: str, output: str, inventory: Inventory) -> ImageError:
    versions = _offered(output)
    if versions:
        return ImageError(
            f"There is no {requirement} that fits the base image (Python {inventory.python_minor}, {inventory.libc}, "
            f"{inventory.platform}). There are: {', '.join(versions[-_SHOWN_VERSIONS:])}. Ask for one of these."
        )
    return ImageError(
        f"There is no {requirement} in the indexes that pip uses here that fits the base image (Python "
        f"{inventory.python_minor}, {inventory.libc}, {inventory.platform}). Look at its spelling and version, or name its "
        f"index in `index_urls=`."
    )
