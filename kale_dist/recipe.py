"""What an image is made of: a base and what goes on top of it. Pure: no I/O, no clock, no environment."""

from __future__ import annotations

import dataclasses
from typing import Any, Self


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageFile:
    """A file that is added to an image."""

    path: str
    """Absolute, in the image."""
    digest: str
    """Of its bytes, which lie in this user's blobs: lower-case hex of SHA-256."""
    executable: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """An image to be made, or found where it was made before."""

    base: str = ""
    """Reference of the image that it is built on; empty: the one that the job would use without a recipe."""
    platform: str = "linux/amd64"
    packages: tuple[str, ...] = ()
    """Requirements as pip takes them, sorted: `einops==0.8`."""
    apt: tuple[str, ...] = ()
    """Debian packages, sorted: they need a builder that runs commands."""
    files: tuple[ImageFile, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    index_urls: tuple[str, ...] = ()
    """Where packages come from; empty: what pip is configured for here. Credentials come from netrc or a keyring."""
    allow_torch_change: bool = False
    """Whether packages may replace the base's torch."""
    builder: str = ""
    """`layers` (no daemon), `docker`, or empty: layers, unless something needs commands."""
    rebuild: bool = False
    """Whether it is built although it is there. Not part of its identity."""

    def to_json(self) -> dict[str, Any]:
        """A plain object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_json`, for what `json.loads` gives (lists for tuples)."""
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        values["files"] = tuple(ImageFile(**file) for file in data["files"])
        values["environment"] = tuple((name, value) for name, value in data["environment"])
        return cls(**values)
