"""What an image is made of: a base and what goes on top of it. Pure: no I/O, no clock, no environment."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec.checks import FLAG, TEXT, check_fields, keep, pairs, setting, texts
from kale_dist.wording import show

TAG_PREFIX = "kd-"
"""What tags of images that this library makes begin with."""

_FORMAT = 3
"""Part of every digest: raised where the same recipe would make another image."""

_TAG_DIGITS = 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageFile:
    """A file that is added to an image."""

    path: str
    """Absolute, in the image."""
    digest: str = ""
    """Of its bytes, which lie in this user's blobs: lower-case hex of SHA-256. Empty: they are still in `source`."""
    executable: bool = False
    source: str = ""
    """The file on this machine, until its bytes are in the blobs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, init=False)
class Recipe:
    """An image to be made, or found where it was made before.

    Args:
        base: Reference of the image that it is built on; empty: the one that the job would use without a recipe.
        packages: Requirements as pip takes them: `["einops==0.8"]`.
        apt: Debian packages. They are installed in a container of this machine's Docker engine.
        files: `{"/opt/x.txt": "x.txt"}`: path in the image to file on this machine.
        environment: `{"NAME": "value"}`, set in every process that is started in the image.
        index_urls: Where packages come from, each from the first that has it; empty: what pip is configured for here. Credentials come
            from netrc.
        allow_torch_change: Whether packages may replace the base's torch.
        platform: Operating system and processor of the cluster.
        rebuild: Whether the image is built although it is there.

    Raises:
        ConfigError: A value is of another type. Its content is checked by the call that uses the recipe.
    """

    base: str = setting("", TEXT)
    platform: str = setting("linux/amd64", TEXT)
    packages: tuple[str, ...] = ()
    """Sorted and in one spelling, once a call has taken them."""
    apt: tuple[str, ...] = ()
    """Sorted."""
    files: tuple[ImageFile, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    index_urls: tuple[str, ...] = ()
    """In the place of pip's default index."""
    allow_torch_change: bool = setting(False, FLAG)  # noqa: FBT003 - a default
    rebuild: bool = setting(False, FLAG)  # noqa: FBT003 - a default
    """Not part of its identity."""

    def __init__(
        self,
        *,
        base: str = "",
        platform: str = "linux/amd64",
        packages: Iterable[str] = (),
        apt: Iterable[str] = (),
        files: Mapping[str, str | pathlib.PurePath] | Iterable[ImageFile] = (),
        environment: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        index_urls: Iterable[str] = (),
        allow_torch_change: bool = False,
        rebuild: bool = False,
    ) -> None:
        keep(
            self,
            base=base,
            platform=platform,
            packages=texts("packages", packages, "['einops==0.8']"),
            apt=texts("apt", apt, "['libsndfile1']"),
            files=_files(files),
            environment=pairs("environment", environment, "{'NAME': 'value'}"),
            index_urls=texts("index_urls", index_urls, "['https://pypi.example.com/simple']"),
            allow_torch_change=allow_torch_change,
            rebuild=rebuild,
        )
        check_fields(self)

    @property
    def adds_something(self) -> bool:
        """Whether the image differs from its base."""
        return bool(self.packages or self.apt or self.files or self.environment)

    def digest(self, base_digest: str, python: str) -> str:
        """Name of what this recipe makes of a base: equal recipes on equal bases have equal ones.

        The base counts by its digest, not by its name.

        Args:
            base_digest: `sha256:...` of the base's manifest.
            python: The minor that the image's Python must have, such as `3.11`; empty for any.

        Returns:
            Lower-case hex of SHA-256.
        """
        made_of = dataclasses.asdict(self)
        del made_of["rebuild"]
        made_of |= {"format": _FORMAT, "base": base_digest, "python": python}
        made_of["files"] = [[file.path, file.digest, file.executable] for file in self.files]
        text = json.dumps(made_of, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def tag(self, base_digest: str, python: str) -> str:
        """What its image is called in the registry: `kd-` and the first 20 digits of the digest."""
        return TAG_PREFIX + self.digest(base_digest, python)[:_TAG_DIGITS]


def _files(value: Any) -> tuple[ImageFile, ...]:
    if isinstance(value, Mapping):
        made = []
        for path, source in value.items():
            if not isinstance(path, str) or not isinstance(source, (str, pathlib.PurePath)):
                problem = f"{show(path)}: {show(source)} is not a path in the image and a file of this machine"
                raise ConfigError("files", problem, "Write it as {'/opt/x.txt': 'x.txt'}")
            made.append(ImageFile(path=path, source=str(source)))
        return tuple(made)
    listed = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(item, ImageFile) for item in listed):
        raise ConfigError("files", f"{show(value)} is not a dict", "Write it as {'/opt/x.txt': 'x.txt'}")
    return listed
