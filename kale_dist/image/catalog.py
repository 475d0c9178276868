"""The images that this library has made, as the registry has them: what they are, and which ones can go."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

from kale_dist import records
from kale_dist.errors import ImageError, JobNotFoundError
from kale_dist.image import cache, media
from kale_dist.image.base_image import BASE_DIGEST_LABEL, BASE_LABEL, RECIPE_LABEL
from kale_dist.image.connection import RefusedError
from kale_dist.image.registry import Registry
from kale_dist.recipe import TAG_PREFIX, Recipe

_TAG = re.compile(rf"{TAG_PREFIX}[0-9a-f]{{20}}")
_ABSENT, _NOT_ALLOWED = 404, (403, 405, 501)
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
    last_use_s: float | None = None
    """When a call on this machine last used it, in seconds since 1970; None: never."""

    @property
    def size(self) -> int:
        """Bytes of all layers as they are sent."""
        return sum(size for _, size in self.layers)

    def to_json(self) -> dict[str, Any]:
        """A plain object."""
        return {**dataclasses.asdict(self), "size": self.size}

    @classmethod
    def of(
        cls, tag: str, digest: str, manifest: dict[str, Any], config: dict[str, Any], last_use_s: float | None
    ) -> Self:
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
            last_use_s=last_use_s,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """What was removed, and what was not."""

    deleted: tuple[Made, ...]
    kept: tuple[tuple[Made, str], ...]
    """With the reason, for those that are not simply in use."""


def images(registry: Registry, repository: str) -> tuple[Made, ...]:
    """All images of recipes, those that were used last first, and those that were never used from here last.

    Args:
        registry: Where.
        repository: Its path there: `team/kale-dist`.

    Raises:
        ImageError: The registry refuses.
    """
    tags = [tag for tag in registry.tags(repository) if _TAG.fullmatch(tag)]
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
        found = pool.map(lambda tag: _look_up(registry, repository, tag), tags)
        return tuple(sorted((made for made in found if made), key=lambda made: (-(made.last_use_s or 0), made.tag)))


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


def prune(
    registry: Registry, repository: str, *, unused_s: float, unknown: bool = False, say: Callable[[str], None]
) -> Pruned:
    """Delete images that no call on this machine has used for so long. The registry frees the bytes on its own terms.

    Those that a job on this machine was submitted with stay until the job is deleted, and those that somebody has
    tagged otherwise stay for good.

    Args:
        registry: Where.
        repository: Its path there.
        unused_s: Seconds.
        unknown: Whether those go, too, that were never used from here. Other machines may use them.
        say: Takes a line for each that is deleted.

    Raises:
        ImageError: The registry does not delete, or refuses otherwise.
    """
    limit = time.time() - unused_s
    jobs, named = _images_of_jobs(), _tagged_otherwise(registry, repository)
    deleted, kept = [], []
    for made in images(registry, repository):
        if made.last_use_s is not None and made.last_use_s >= limit:
            continue
        if made.digest in jobs:
            kept.append((made, f"the job {jobs[made.digest]} was submitted with it"))
        elif made.digest in named:
            kept.append((made, f"it is also tagged {named[made.digest]}"))
        elif made.last_use_s is None and not unknown:
            kept.append((made, "no call on this machine has used it, and others may"))
        else:
            _delete(registry, repository, made)
            cache.forget_use(f"{registry.host}/{repository}", made.tag)
            deleted.append(made)
            say(f"{made.tag} deleted")
    return Pruned(deleted=tuple(deleted), kept=tuple(kept))


def _look_up(registry: Registry, repository: str, tag: str) -> Made | None:
    """An image; None if it is gone."""
    try:
        manifest, descriptor = registry.manifest(repository, tag)
        if media.is_index(descriptor.media_type):
            inner = next((entry for entry in manifest.get("manifests") or () if _runs(entry)), None)
            if inner is None:
                return None
            manifest, _ = registry.manifest(repository, str(inner["digest"]))
        config = json.loads(b"".join(registry.blob(repository, str(manifest["config"]["digest"]))))
        last_use_s = cache.last_use(f"{registry.host}/{repository}", tag)
        return Made.of(tag, descriptor.digest, manifest, config, last_use_s)
    except RefusedError as error:
        # Somebody may delete it between the list and the look.
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


def _images_of_jobs() -> dict[str, str]:
    """Digests of the images of this machine's jobs, with a job of each."""
    found = {}
    for name in records.names():
        # Another process may delete a job between the list and the look.
        with contextlib.suppress(JobNotFoundError):
            record = records.read(name)
            found[record.spec.image.rpartition("@")[2]] = record.ref
    return found


def _tagged_otherwise(registry: Registry, repository: str) -> dict[str, str]:
    """Digests with a tag that is not ours: to delete a manifest deletes all of its tags."""
    others: Iterable[str] = (tag for tag in registry.tags(repository) if not _TAG.fullmatch(tag))
    heads = ((tag, registry.head(repository, tag)) for tag in others)
    return {head.digest: tag for tag, head in heads if head is not None}


def _delete(registry: Registry, repository: str, made: Made) -> None:
    try:
        registry.delete(repository, made.digest)
    except RefusedError as error:
        if error.status not in _NOT_ALLOWED:
            raise
        raise ImageError(
            f"The registry {registry.host} does not let images be deleted (HTTP {error.status}). Whoever runs it can allow "
            f"it (REGISTRY_STORAGE_DELETE_ENABLED=true for Docker's own, a right for this account elsewhere), or has a "
            f"policy of its own that removes old tags."
        ) from error
