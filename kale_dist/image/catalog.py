"""The images that this library has made, as the registry has them: what they are made of."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import re
from typing import Any, Self

from kale_dist.errors import ImageError
from kale_dist.image.base import BASE_DIGEST_LABEL, BASE_LABEL, RECIPE_LABEL
from kale_dist.image.connection import RefusedError
from kale_dist.image.manifest import INDEXES, media_type
from kale_dist.image.registry import Registry
from kale_dist.recipe import TAG_PREFIX, Recipe

_TAG = re.compile(rf"{TAG_PREFIX}[0-9a-f]{{20}}")
_ABSENT = 404
_REQUESTS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """An image that was made from a recipe."""

    tag: str
    digest: str
    """`sha256:...` of its manifest, or of the index that names it."""
    platform: str
    """Such as `linux/amd64`."""
    layers: tuple[tuple[str, int], ...]
    """(digest, bytes as they are sent) of each, the base's first."""
    recipe: Recipe | None
    """None: it does not say, or was made by a version that said it otherwise."""
    base: str = ""
    """Reference of what it was built on; empty: it does not say."""
    base_digest: str = ""

    @property
    def size(self) -> int:
        """Bytes of all layers as they are sent."""
        return sum(size for _, size in self.layers)

    def to_json(self) -> dict[str, Any]:
        """A plain object."""
        return {**dataclasses.asdict(self), "size": self.size}

    @classmethod
    def of(cls, tag: str, digest: str, manifest: dict[str, Any], config: dict[str, Any]) -> Self:
        """From what the registry has."""
        labels = (config.get("config") or {}).get("Labels") or {}
        return cls(
            tag=tag,
            digest=digest,
            platform="/".join(str(config.get(key) or "unknown") for key in ("os", "architecture")),
            layers=tuple((str(layer["digest"]), int(layer["size"])) for layer in manifest.get("layers") or ()),
            recipe=_recipe(labels.get(RECIPE_LABEL, "")),
            base=str(labels.get(BASE_LABEL, "")),
            base_digest=str(labels.get(BASE_DIGEST_LABEL, "")),
        )


def images(registry: Registry, repository: str) -> tuple[Made, ...]:
    """All images of recipes, by tag.

    Args:
        registry: Where.
        repository: Its path there: `team/kale-dist`.

    Raises:
        ImageError: The registry refuses.
    """
    tags = [tag for tag in registry.tags(repository) if _TAG.fullmatch(tag)]
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        found = pool.map(lambda tag: _look_up(registry, repository, tag), tags)
        return tuple(made for made in found if made)


def image(registry: Registry, repository: str, tag: str) -> Made:
    """One image.

    Args:
        registry: Where.
        repository: Its path there.
        tag: `kd-...`, as `images` gives it.

    Raises:
        ImageError: There is none, or the registry refuses.
    """
    made = _look_up(registry, repository, tag) if _TAG.fullmatch(tag) else None
    if made is None:
        raise ImageError(
            f"There is no image {tag!r} in {registry.host}/{repository}. `kale-dist image list` shows those there are."
        )
    return made


def _look_up(registry: Registry, repository: str, tag: str) -> Made | None:
    """An image; None if it is gone."""
    try:
        manifest, digest = registry.manifest(repository, tag)
        if media_type(manifest) in INDEXES:
            inner = next((entry for entry in manifest.get("manifests") or () if _runs(entry)), None)
            if inner is None:
                return None
            manifest, _ = registry.manifest(repository, str(inner["digest"]))
        config = json.loads(b"".join(registry.blob(repository, str(manifest["config"]["digest"]))))
        return Made.of(tag, digest, manifest, config)
    except RefusedError as error:
        # Another process may delete it between the list and the look.
        if error.status == _ABSENT:
            return None
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageError(
            f"What {registry.host}/{repository}:{tag} names is no image that this library has made ({error!r}). "
            f"Delete the tag, or set another registry."
        ) from error


def _runs(entry: dict[str, Any]) -> bool:
    """Whether an entry of an index is an image, and not what is said about one."""
    return (entry.get("platform") or {}).get("os") != "unknown"


def _recipe(text: Any) -> Recipe | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return Recipe.from_json(json.loads(text))
    return None
