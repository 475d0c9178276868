"""What the Docker engine is sent to build from: a Dockerfile and the recipe's files, as one tar that is never whole.

The text is written for the builder that will read it. BuildKit mounts what only the build needs: pip's settings with
the passwords in them, certificates, caches. The classic builder can only copy, into a layer that stays; there such
settings go in without secrets or not at all.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import shlex
import tarfile
from collections.abc import Iterator, Mapping

from kale_dist.blobs import FolderStore
from kale_dist.errors import ConfigError, ImageError
from kale_dist.recipe import Recipe

_PIECE_BYTES = 1 << 20
_MOUNTED = "/dev/shm/kale-dist"  # noqa: S108 - in memory: elsewhere the folder that is mounted on would stay in the image
_COPIED = "/tmp/.kale-dist"  # noqa: S108 - a folder of the build's own container
_KEPT = "/tmp/.kale-dist-kept"  # noqa: S108 - a file of the build's own container
_UNNAMEABLE = "\n\r\0"

CERTIFICATES = "certificates.pem"
PIP_SETTINGS = "pip.conf"
NETRC = "netrc"
"""Names of the settings that are mounted as secrets, or copied."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file of the context."""

    name: str
    size: int
    """Bytes."""
    path: pathlib.Path | None
    """Where its bytes lie; None: they are `text`."""
    text: bytes = b""
    executable: bool = False


def dockerfile(recipe: Recipe, base: str, *, user: str, settings: tuple[str, ...], buildkit: bool) -> str:
    """The Dockerfile of a recipe: the same text for the same arguments.

    Args:
        recipe: What goes on top of the base.
        base: Reference of the base.
        user: Whom the base runs as, who will also be the user of the image; empty: root.
        settings: Which of `CERTIFICATES`, `PIP_SETTINGS` and `NETRC` there are.
        buildkit: Whether it may mount.

    Raises:
        ConfigError: The recipe cannot be written as a Dockerfile.
    """
    lines = [f"FROM {base}"]
    if user:
        lines.append("USER root")
    if recipe.apt:
        lines.append(_apt(recipe.apt, buildkit=buildkit))
    if recipe.packages:
        if not buildkit:
            lines.append(f"COPY pip {_COPIED}")
        lines.append(_pip(recipe, settings, buildkit=buildkit))
    for number, file in enumerate(recipe.files):
        # The builder reads the text of the list as it reads a quoted word.
        paths = json.dumps([f"files/{number}", _literal(file.path, "files").replace("'", "\\'")], ensure_ascii=False)
        lines.append(f"COPY {paths}")
    for name, value in recipe.environment:
        lines.append(f'ENV {name}="{_literal(value, "environment")}"')
    if user:
        lines.append(f"USER {user}")
    return "\n".join(lines) + "\n"


def entries(recipe: Recipe, text: str, settings: Mapping[str, bytes], blobs_dir: pathlib.Path) -> tuple[Entry, ...]:
    """What the context holds.

    Args:
        recipe: Whose packages and files they are.
        text: The Dockerfile.
        settings: Files that are copied beside the requirements, by name; with BuildKit none.
        blobs_dir: Folder of the blobs that the recipe's files lie in.

    Raises:
        ImageError: A file of the recipe is not in the folder.
    """
    small = {"Dockerfile": text.encode()}
    if recipe.packages:
        small["pip/requirements.txt"] = "".join(f"{line}\n" for line in recipe.packages).encode()
        small |= {f"pip/{name}": content for name, content in settings.items()}
    found = [Entry(name=name, size=len(content), path=None, text=content) for name, content in small.items()]
    store = FolderStore(blobs_dir)
    for number, file in enumerate(recipe.files):
        path = store.path(file.digest)
        if not path.is_file():
            raise ImageError(
                f"the bytes of {file.path!r} are not in {blobs_dir} any more, so that the image cannot be built. "
                "Make the recipe again from the file"
            )
        found.append(Entry(name=f"files/{number}", size=path.stat().st_size, path=path, executable=file.executable))
    return tuple(found)


def pack(files: tuple[Entry, ...]) -> Iterator[bytes]:
    """The files as a tar, piece by piece; equal files give equal bytes, so that the engine's cache holds."""
    for file in files:
        header = tarfile.TarInfo(file.name)
        header.size = file.size
        header.mode = 0o755 if file.executable else 0o644
        yield header.tobuf(tarfile.PAX_FORMAT)
        with io.BytesIO(file.text) if file.path is None else file.path.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                yield piece
        yield bytes(-file.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _apt(packages: tuple[str, ...], *, buildkit: bool) -> str:
    install = (
        f"apt-get update && DEBIAN_FRONTEND=noninteractive "
        f"apt-get install --yes --no-install-recommends {' '.join(packages)}"
    )
    if buildkit:
        return f"RUN {_cache('/var/cache/apt')} {_cache('/var/lib/apt/lists')} {install}"
    return f"RUN {install} && apt-get clean && rm -rf /var/lib/apt/lists/*"


def _pip(recipe: Recipe, settings: tuple[str, ...], *, buildkit: bool) -> str:
    mounts: list[str] = []
    folder, cache = _COPIED, ""
    if buildkit:
        folder, cache = f"{_MOUNTED}/settings", f"{_MOUNTED}/cache"
        mounts = [f"--mount=type=bind,source=pip,target={_MOUNTED}/pip", _cache(cache)]
        mounts += [f"--mount=type=secret,id={name},target={folder}/{name}" for name in settings]
    variables = ["PIP_BREAK_SYSTEM_PACKAGES=1", "PIP_ROOT_USER_ACTION=ignore", "PIP_DISABLE_PIP_VERSION_CHECK=1"]
    for name, variable in ((CERTIFICATES, "PIP_CERT"), (PIP_SETTINGS, "PIP_CONFIG_FILE"), (NETRC, "NETRC")):
        if name in settings:
            variables.append(f"{variable}={folder}/{name}")
    options = ["--progress-bar=off", "--no-compile", f"--cache-dir={cache}" if buildkit else "--no-cache-dir"]
    options.append(f"--requirement={f'{_MOUNTED}/pip' if buildkit else _COPIED}/requirements.txt")
    for number, url in enumerate(recipe.index_urls):
        options.append(f"--{'extra-' if number else ''}index-url={shlex.quote(url)}")
    steps = [f"env {' '.join(variables)} python3 -m pip install {' '.join(options)}"]
    if not recipe.allow_torch_change:
        # pip's list says the version even of a torch that was installed from a file.
        steps = [
            f"(python3 -m pip list --format=freeze | grep -i '^torch==' > {_KEPT} || true)",
            f"{steps[0]} --constraint={_KEPT}",
        ]
    steps.append(f"rm -rf {_KEPT} {_COPIED}")
    return " ".join(["RUN", *mounts, " && ".join(steps)])


def _cache(folder: str) -> str:
    return f"--mount=type=cache,target={folder},sharing=locked"


def _literal(text: str, argument: str) -> str:
    if any(char in text for char in _UNNAMEABLE):
        raise ConfigError(
            argument,
            f"{text!r} has a line break or a NUL in it, and no line of a Dockerfile can say that",
            'Leave it out, or build with builder="layers"',
        )
    return "".join(f"\\{char}" if char in '\\$"' else char for char in text)
