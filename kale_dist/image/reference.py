"""References of images, as docker reads and writes them: `registry/repository:tag@digest`. Pure."""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from kale_dist.errors import ConfigError

DOCKER_HUB = "docker.io"
_HUB_NAMES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")

_MAX_REPOSITORY = 255
_SCHEMES = ("docker-pullable://", "docker://", "containerd://")
"""Schemes that Kubernetes and skopeo put in front of a reference."""

_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(
    r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*)"
    r"(?::([0-9]{1,5}))?"
)
_MAX_PORT = 65535
_SHOWN = 80


def is_digest(text: str) -> bool:
    """Whether this is a digest that content is named by: `sha256:` and 64 lower-case hex digits."""
    return _DIGEST.fullmatch(text) is not None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The name of an image in a registry.

    Raises:
        ConfigError: A part of the reference is malformed; the message names the part and the reason.
    """

    registry: str
    """Host, with the port where it is not the usual one: `docker.io`, `localhost:5000`, `[::1]:5000`."""
    repository: str
    """Path within the registry: `library/python`."""
    tag: str = ""
    digest: str = ""
    """`sha256:...`; takes precedence over the tag."""

    def __post_init__(self) -> None:
        host = _HOST.fullmatch(self.registry)
        if host is None or not 0 < int(host[1] or 1) <= _MAX_PORT:
            raise _wrong(f"{_shown(self.registry)} is not the host of a registry")
        if len(self.repository) > _MAX_REPOSITORY:
            raise _wrong(f"the repository {_shown(self.repository)} has more than {_MAX_REPOSITORY} characters")
        if self.repository != self.repository.lower():
            raise _wrong(
                f"the repository {_shown(self.repository)} has upper-case letters; registries take lower-case ones"
            )
        if not all(map(_PART.fullmatch, self.repository.split("/"))):
            raise _wrong(f"{_shown(self.repository)} is not the path of a repository")
        if self.tag and not _TAG.fullmatch(self.tag):
            raise _wrong(f"{_shown(self.tag)} is not a tag")
        if self.digest and not is_digest(self.digest):
            raise _wrong(f"{_shown(self.digest)} is not a digest (sha256: and 64 lower-case hex digits)")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a reference as docker does: `python:3.11` is `docker.io/library/python:3.11`.

        Args:
            text: The reference, with or without the scheme that Kubernetes puts before it in a pod's status.

        Raises:
            ConfigError: The text is not a reference.
        """
        if not isinstance(text, str):
            raise _wrong(f"a {type(text).__name__} is not a reference")
        for scheme in _SCHEMES:
            text = text.removeprefix(scheme)
        if not text:
            raise _wrong("it is empty")
        if "://" in text:
            raise _wrong(f"{_shown(text)} is a URL; leave out the part before the host")
        name, _, digest = text.partition("@")
        if "@" in text and not digest:
            raise _wrong(f"{_shown(text)} ends where a digest should follow")
        head, slash, rest = name.partition("/")
        if slash and (head == "localhost" or any(char in head for char in ".:[")):
            registry, name = head, rest
        else:
            registry = DOCKER_HUB
        registry = DOCKER_HUB if registry in _HUB_NAMES else registry
        repository, colon, tag = name.partition(":")
        if colon and not tag:
            raise _wrong(f"{_shown(text)} ends where a tag should follow")
        if registry == DOCKER_HUB and "/" not in repository:
            repository = f"library/{repository}"
        return cls(registry=registry, repository=repository, tag=tag, digest=digest)

    def __str__(self) -> str:
        """The full reference, as docker, Kubernetes and every registry tool understand it."""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"{self.name}{tag}{digest}"

    @property
    def name(self) -> str:
        """Registry and repository, without tag and digest."""
        return f"{self.registry}/{self.repository}"

    @property
    def target(self) -> str:
        """The part that selects the image in its repository: the digest, else the tag, else `latest`."""
        return self.digest or self.tag or "latest"

    def with_digest(self, digest: str) -> Self:
        """The same repository with this digest and no tag, as a job pins it."""
        return dataclasses.replace(self, tag="", digest=digest)

    def with_tag(self, tag: str) -> Self:
        """The same repository with this tag and no digest."""
        return dataclasses.replace(self, tag=tag, digest="")


def _wrong(problem: str) -> ConfigError:
    remedy = (
        "Give a reference such as 'python:3.11-slim', 'localhost:5000/team/train:1' or 'quay.io/team/train@sha256:...'"
    )
    return ConfigError("image", problem, remedy)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
