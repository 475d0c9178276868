"""Checks `save_to` of a call, where a job saves its model itself, and finds the path or URL that rank 0 writes to."""

from __future__ import annotations

import os
import pathlib
import urllib.parse
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec import names
from kale_dist.job.spec.volumes import Volume, VolumeKind, seen_here
from kale_dist.wording import closest, shorten, show

MOUNT = "/kale-dist/save-to"
"""Where pods see a claim that only `save_to` names."""

_LONGEST_NAME = 255
"""Bytes that Linux allows in the name of a file."""

_LASTING = (VolumeKind.CLAIM, VolumeKind.FOLDER, VolumeKind.HOST_PATH)
_EXAMPLE = "Write it as '/data/model.pt', 'pvc://claim/folder/model.pt' or a URL such as 's3://bucket/model.pt'"


def find(
    value: Any, volumes: tuple[Volume, ...], place: str, *, in_parts: bool = False
) -> tuple[str | None, tuple[Volume, ...]]:
    """Check where the model is to be saved.

    Args:
        value: As the user wrote it: a path, `pvc://claim/path`, a URL that fsspec opens, or None.
        volumes: Those of the job.
        place: `docker`, `kubernetes`, or another word for this machine.
        in_parts: Whether it is a folder that all ranks write their parts to, with a model that they make.

    Returns:
        The path or the URL that rank 0 writes to, and the job's volumes: one more if none of them has the claim.

    Raises:
        ConfigError: This is no such place, or what is written there would be lost with the container.
    """
    is_here = place not in ("docker", "kubernetes")
    if value is None:
        if in_parts and not is_here:
            problem = "it is left out, and each process has only a part of the model, which no other sees"
            remedy = "Name a folder in a volume, such as volumes={'/data': ...}, save_to='/data/net'"
            raise ConfigError("save_to", problem, remedy)
        return None, volumes
    if not isinstance(value, str | os.PathLike) or not os.fspath(value) or "\0" in str(value):
        raise ConfigError("save_to", f"{show(value)} names no file", _EXAMPLE)
    text = os.fspath(value).rstrip("/" if in_parts else "")
    if is_here:
        text = text.removeprefix("file://")
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "pvc":
        return _in_claim(text, rest, volumes, place)
    if separator and in_parts:
        problem = f"{shorten(text)} is a URL, and a model in parts is saved to a folder that all processes see"
        raise ConfigError("save_to", problem, "Name a folder in a volume, such as '/data/net'")
    if text.endswith("/"):
        raise ConfigError("save_to", f"{shorten(text)} is a folder", f"Name a file in it: {text + 'model.pt'!r}")
    if separator:
        _check_url(text, is_here=is_here)
        return text, volumes
    if not is_here:
        inside = _in_volume(text, volumes, place)
        if in_parts and (seen := seen_here(inside, volumes)) is not None:
            _check_folder(seen)
        return inside, volumes
    path = pathlib.Path(text).expanduser().absolute()
    if in_parts:
        _check_folder(path)
    if len(path.name.encode()) > _LONGEST_NAME:
        raise ConfigError("save_to", f"{shorten(path.name)} is too long for a file's name", "Give a shorter one")
    if (path.is_dir() and not in_parts) or not path.parent.is_dir():
        problem = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError("save_to", problem, "Name a file in a folder that exists, such as 'model.pt'")
    return str(path), volumes


def _check_folder(folder: pathlib.Path) -> None:
    """Refuse to replace a folder that no job has made, where this process sees it. Rank 0 looks before it trains, too."""
    from kale_dist.worker.training import parts

    if folder.exists() and (problem := parts.foreign(folder)):
        raise ConfigError("save_to", f"{folder} is there already: {problem}", "Name a folder that is not there yet")


def _in_claim(text: str, rest: str, volumes: tuple[Volume, ...], place: str) -> tuple[str, tuple[Volume, ...]]:
    """A file in a claim: at the path of a volume that has it, or else of one that is added."""
    if place != "kubernetes":
        problem = f"{shorten(text)} is a claim of a cluster, and the job does not run on one"
        raise ConfigError("save_to", problem, "Give a path, or run with on=kd.Kubernetes(...)")
    claim, _, inside = rest.partition("/")
    if not names.is_object_name(claim):
        raise ConfigError("save_to", f"{show(claim)} cannot be the name of a claim", _EXAMPLE)
    path = pathlib.PurePosixPath(inside)
    if not inside or inside.endswith("/") or ".." in path.parts:
        problem = f"{shorten(text)} names no file in the claim"
        raise ConfigError("save_to", problem, f"Write it as 'pvc://{claim}/folder/model.pt'")
    for volume in volumes:
        mine = volume.kind is VolumeKind.CLAIM and volume.source == claim and not volume.read_only
        if mine and path.is_relative_to(volume.sub_path):
            return str(volume.mount_path / path.relative_to(volume.sub_path)), volumes
    added = Volume(mount_path=MOUNT, source=claim, kind=VolumeKind.CLAIM)
    return str(MOUNT / path), (*volumes, added)


def _in_volume(text: str, volumes: tuple[Volume, ...], place: str) -> str:
    """A path in a container, which only a volume keeps."""
    path = pathlib.PurePosixPath(text)
    where = "pod" if place == "kubernetes" else "container"
    if not path.is_absolute() or ".." in path.parts:
        raise ConfigError("save_to", f"{shorten(text)} is not an absolute path of a {where}", _EXAMPLE)
    covering = [volume for volume in volumes if path != path.parent and path.is_relative_to(volume.mount_path)]
    volume = max(covering, key=lambda one: len(one.mount_path), default=None)
    example = "models" if place == "kubernetes" else "/home/me/models"
    remedy = f"Mount one that keeps it: volumes={{{str(path.parent)!r}: {example!r}}}"
    if volume is None or volume.kind not in _LASTING:
        problem = f"no volume covers {shorten(text)}, so the file would be lost with the {where}"
        raise ConfigError("save_to", problem, remedy)
    if volume.read_only:
        problem = f"the volume at {volume.mount_path!r} is read-only"
        raise ConfigError("save_to", problem, f"Leave out ':ro', or give another path. {remedy}")
    if str(path) == volume.mount_path:
        raise ConfigError("save_to", f"{shorten(text)} is a folder", f"Name a file in it: {text + '/model.pt'!r}")
    return str(path)


def _check_url(url: str, *, is_here: bool) -> None:
    """Refuse what no rank could write to. Which packages an image has shows only in its pods."""
    scheme = url.partition("://")[0]
    if scheme == "memory":
        raise ConfigError("save_to", "memory:// is lost with the process that writes there", _EXAMPLE)
    names.check_store("save_to", url)
    parts = urllib.parse.urlsplit(url)
    if not parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError("save_to", f"{scheme}:// is followed by no file's address alone", _EXAMPLE)
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError:
        if is_here:
            raise ConfigError("save_to", f"to write to {scheme}:// needs fsspec", "pip install fsspec") from None
        return
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        near = closest(scheme, fsspec.available_protocols())
        raise ConfigError("save_to", f"fsspec has no protocol {scheme!r}", f"{near}{_EXAMPLE}") from None
    except ImportError as error:
        # Pods have their own packages: rank 0 looks before it trains.
        if is_here:
            raise ConfigError("save_to", f"to write to {scheme}:// needs a package: {error}", "Install it") from None
