"""Where a registry has what, and what a token has to allow for it."""

from __future__ import annotations

from kale_dist.errors import ConfigError
from kale_dist.image.reference import is_digest, is_repository, is_tag


def check_repository(repository: str) -> None:
    """Refuse what would lead elsewhere."""
    if not is_repository(repository):
        problem = f"{repository[:80]!r} is not the path of a repository"
        raise ConfigError("repository", problem, "Give lower-case parts with / between them: team/train")


def manifest_path(repository: str, reference: str) -> str:
    """Where a manifest is, by tag or digest."""
    check_repository(repository)
    if not (is_tag(reference) or is_digest(reference)):
        raise ConfigError("reference", f"{reference[:80]!r} is neither tag nor digest", "Give '1.0' or 'sha256:...'")
    return f"/v2/{repository}/manifests/{reference}"


def blob_path(repository: str, digest: str) -> str:
    """Where a blob is."""
    check_repository(repository)
    if not is_digest(digest):
        raise ConfigError("digest", f"{digest[:80]!r} is no digest", "Give sha256: and 64 lower-case hex digits")
    return f"/v2/{repository}/blobs/{digest}"


def upload_path(repository: str) -> str:
    """Where uploads begin."""
    check_repository(repository)
    return f"/v2/{repository}/blobs/uploads/"


def pull_access(repository: str) -> tuple[str, ...]:
    """What a token has to allow for reading."""
    return (f"repository:{repository}:pull",)


def push_access(repository: str) -> tuple[str, ...]:
    """What a token has to allow for writing."""
    return (f"repository:{repository}:pull,push",)


def shown(repository: str, reference: str) -> str:
    """A name for messages."""
    return f"{repository}{'@' if is_digest(reference) else ':'}{reference}"
