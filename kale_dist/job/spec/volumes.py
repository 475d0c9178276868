"""Volumes: folders that ranks see, as users write them, checked and in one form. Pure.

    {"/data": "datasets"}                    the claim `datasets`; on Docker, the engine's volume of this name
    {"/data": "pvc://datasets/images:ro"}    its folder `images`, read-only
    {"/data": "/home/me/data"}               a folder of this machine (Docker only; begins with `/`, `.` or `~`)
    {"/data": "hostpath:///mnt/data"}        a folder of the node
    {"/config": "configmap://settings"}      the keys of a ConfigMap, as files
    {"/token": "secret://token"}             the keys of a Secret, as files
    {"/scratch": "emptydir://"}              an empty folder of each pod

A list of `Volume` objects, or of dicts of their fields, can set everything else that a volume can have.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec import names
from kale_dist.job.spec.checks import keep, number, one_of, text
from kale_dist.wording import shorten, show

_wrong = functools.partial(ConfigError, "volumes")
_READ_ONLY = ":ro"
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/usr", "/etc", "/var", "/run", "/opt", "/root")
"""Folders without which nothing in an image works. A folder within them that is none of the following may be mounted."""

_SYSTEM_TREES = (
    "/bin", "/sbin", "/lib", "/lib64", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64", "/usr/local/bin", "/usr/local/lib",
    "/dev", "/proc", "/sys", "/var/run", "/run/secrets", "/opt/venv", "/opt/conda", "/opt/python",
)  # fmt: skip
"""Folders of which no part can be replaced."""

_VOLUME_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,254}")
_PYTHON = re.compile(r"/(?:site-packages|dist-packages|lib(?:64)?/python[0-9.]*)(?:/|$)")
_DOCKER_REMEDY = "Name a folder of this machine, or a volume that `docker volume ls` lists"


class VolumeKind(enum.StrEnum):
    """What a volume is made of."""

    FOLDER = "folder"
    """A folder of this machine (Docker)."""
    CLAIM = "claim"
    """A PersistentVolumeClaim of the cluster, or a named volume of a Docker engine."""
    HOST_PATH = "host_path"
    EMPTY_DIR = "empty_dir"
    CONFIG_MAP = "config_map"
    SECRET = "secret"  # noqa: S105 - a kind, not a password


_SCHEMES = {
    "pvc": VolumeKind.CLAIM,
    "hostpath": VolumeKind.HOST_PATH,
    "configmap": VolumeKind.CONFIG_MAP,
    "secret": VolumeKind.SECRET,
    "emptydir": VolumeKind.EMPTY_DIR,
}
_PATH = text(lambda path: "\0" not in path, "{} is not text", "Write it as {'/data': 'claim'}")
_KIND = one_of(VolumeKind, "there is no kind {} of volume")
_SCHEME = one_of(
    _SCHEMES, "there is no kind {} of volume", f"Use one of: {', '.join(f'{scheme}://' for scheme in _SCHEMES)}"
)
_SIZE = number("a number above 0", "Give a number of GiB, which are 1024 MiB").or_(None)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A folder that all ranks see."""

    mount_path: str
    """Absolute path in the rank."""
    source: str = ""
    """The name of a claim, ConfigMap or Secret, a path of the node, or a folder of this machine (Docker); empty for an
    empty folder. Without a `kind` it can be all that a dict of volumes takes, such as `pvc://datasets/images:ro`."""
    kind: VolumeKind | None = None
    """None: a claim on a cluster; on Docker a folder if the source begins with `/`, `.` or `~`, else a named volume."""
    sub_path: str = ""
    """Folder within the volume that is mounted instead of its root. On a cluster the node creates one that is missing,
    and only root can write into it."""
    read_only: bool = False
    size_gib: float | None = None
    """Most that an empty folder may hold; None for the node's own limit."""
    in_memory: bool = False
    """Whether an empty folder is kept in memory."""

    def __post_init__(self) -> None:
        for path in (self.mount_path, self.source, self.sub_path):
            _PATH("volumes", path)
        if self.kind is not None:
            _KIND("volumes", self.kind)
            keep(self, kind=VolumeKind(self.kind))
        if not self.mount_path.startswith("/"):
            raise _wrong(f"{shorten(self.mount_path)} is not an absolute path", "Write it as '/data'")
        if ".." in pathlib.PurePosixPath(self.mount_path).parts:
            raise _wrong(f"{self.mount_path!r} goes up with '..'", "Write the path that it leads to")
        if not self.source and self.kind is not VolumeKind.EMPTY_DIR:
            raise _wrong(f"the source of {shorten(self.mount_path)} is empty", "Name a folder or a claim")
        if self.source and self.kind is VolumeKind.EMPTY_DIR:
            problem = f"the volume at {self.mount_path!r} is an empty folder and has a source, {self.source!r}"
            raise _wrong(problem, "Leave the source out, or give another kind")
        if self.sub_path.startswith("/") or ".." in pathlib.PurePosixPath(self.sub_path).parts:
            problem = f"{self.sub_path!r} does not lie within the volume at {self.mount_path!r}"
            raise _wrong(problem, "Write it as 'folder/in/it'")
        if self.kind is not VolumeKind.EMPTY_DIR and (self.in_memory or self.size_gib is not None):
            problem = f"the volume at {self.mount_path!r} has a size or lies in memory, as only an empty folder can"
            raise _wrong(problem, "Leave `size_gib` and `in_memory` out")
        _SIZE("volumes.size_gib", self.size_gib)


def seen_here(path: str, volumes: Sequence[Volume]) -> pathlib.Path | None:
    """Where this machine sees a path of a rank that a folder of it covers; None if none does."""
    for volume in volumes:
        if volume.kind is VolumeKind.FOLDER and pathlib.PurePosixPath(path).is_relative_to(volume.mount_path):
            return pathlib.Path(volume.source, pathlib.PurePosixPath(path).relative_to(volume.mount_path))
    return None


def of_pods(value: Any) -> tuple[Volume, ...]:
    """Volumes of a cluster's pods, from all forms of this module's docstring.

    Raises:
        ConfigError: A volume is not of these forms, or its path would hide what pods need.
    """
    return _one_each([_of_pod(volume) for volume in _listed(value)])


def of_containers(value: Any) -> tuple[Volume, ...]:
    """Volumes of a Docker engine's containers: folders of this machine and named volumes.

    Raises:
        ConfigError: A volume is not of these forms, or its path would hide what containers need.
    """
    return _one_each([_of_container(volume) for volume in _listed(value)])


def _listed(value: Any) -> list[Volume]:
    """`Volume` objects whose sources are still as they were written."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [_written(mount, source) for mount, source in value.items()]
    if isinstance(value, Sequence) and all(isinstance(item, Volume | Mapping) for item in value):
        return [item if isinstance(item, Volume) else _of_fields(item) for item in value]
    raise _wrong(f"{show(value)} is not a dict", "Write it as {'/data': 'claim'}")


def _written(mount: Any, source: Any) -> Volume:
    if isinstance(source, Mapping):
        return _of_fields({"mount_path": mount, **source})
    text = str(source) if isinstance(source, pathlib.PurePath) else source
    if isinstance(text, str) and text.removesuffix(_READ_ONLY) == "emptydir://":
        return Volume(mount_path=mount, kind=VolumeKind.EMPTY_DIR, read_only=text.endswith(_READ_ONLY))
    return Volume(mount_path=mount, source=text)


def _of_fields(fields: Mapping[str, Any]) -> Volume:
    known = one_of([field.name for field in dataclasses.fields(Volume)], "a volume has no {}")
    for name in fields:
        known("volumes", name)
    return Volume(**fields)


def _one_each(volumes: list[Volume]) -> tuple[Volume, ...]:
    mounts = [volume.mount_path for volume in volumes]
    for mount in mounts:
        if mounts.count(mount) > 1:
            raise _wrong(f"two volumes are mounted at {mount!r}", "Give each a path of its own")
    return tuple(volumes)


def _of_container(volume: Volume) -> Volume:
    kind, source, read_only = volume.kind, volume.source, volume.read_only
    if kind is None:
        if "://" in source:
            raise _wrong(f"{source!r} is a volume of a cluster, and a Docker engine has none of those", _DOCKER_REMEDY)
        read_only = read_only or source.endswith(_READ_ONLY)
        source = source.removesuffix(_READ_ONLY)
        kind = VolumeKind.FOLDER if source.startswith(("/", ".", "~")) else VolumeKind.CLAIM
    if kind not in (VolumeKind.FOLDER, VolumeKind.CLAIM):
        raise _wrong(f"a Docker engine has no volume of kind {kind.value!r} ({volume.mount_path!r})", _DOCKER_REMEDY)
    mount = _mountable(volume.mount_path)
    if kind is VolumeKind.FOLDER:
        try:
            source = str(pathlib.Path(source).expanduser().resolve())
        except (OSError, RuntimeError) as error:
            raise _wrong(f"{source!r}: {error}", "Write the whole path") from None
    elif not _VOLUME_NAME.fullmatch(source):
        problem = f"{show(source)} cannot be the name of a volume"
        raise _wrong(problem, f"A folder is written as {'./' + source!r}; names have letters, digits, '_', '.' and '-'")
    elif volume.sub_path:
        problem = f"a part of a named volume cannot be mounted: {volume.sub_path!r} in {source!r}"
        raise _wrong(problem, "Mount the whole volume")
    return dataclasses.replace(volume, mount_path=mount, kind=kind, source=source, read_only=read_only)


def _of_pod(volume: Volume) -> Volume:
    """One form for each volume; refuses what the cluster would refuse, or what would leave a pod without Python."""
    if volume.kind is None:
        volume = _parsed(volume)
    mount = _mountable(volume.mount_path)
    if volume.kind is VolumeKind.FOLDER:
        raise _wrong(f"{volume.source!r} is a folder of this machine", "Name a claim that holds the data")
    if volume.kind is VolumeKind.HOST_PATH:
        if not volume.source.startswith("/") or ".." in pathlib.PurePosixPath(volume.source).parts:
            raise _wrong(f"{volume.source!r} is not an absolute path of a node", "Write it as 'hostpath:///mnt/data'")
    elif volume.kind is not VolumeKind.EMPTY_DIR and not names.is_object_name(volume.source):
        what = "volume" if volume.kind is None else volume.kind.value.replace("_", " ")
        problem = f"{show(volume.source)} cannot be the name of a {what}"
        raise _wrong(problem, "Write lower-case letters, digits, dashes and dots, as `kubectl get` lists it")
    return dataclasses.replace(volume, mount_path=mount)


def _parsed(volume: Volume) -> Volume:
    """A volume whose source is the text of a dict: `claim`, `pvc://claim/folder:ro`, `hostpath:///folder`, ..."""
    text = volume.source.removesuffix(_READ_ONLY)
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "pvc", text
        if text.startswith(("/", ".", "~")):
            problem = f"{volume.source!r} is a folder of this machine, and pods do not see it"
            raise _wrong(problem, "Name a claim that holds the data, or a node's folder: 'hostpath:///...'")
        if "/" in text:
            raise _wrong(f"{volume.source!r} cannot be a claim", f"A folder in a claim is 'pvc://{text}'")
    _SCHEME("volumes", scheme)
    kind = _SCHEMES[scheme]
    name, _, sub_path = (rest, "", "") if kind is VolumeKind.HOST_PATH else rest.partition("/")
    return dataclasses.replace(
        volume,
        source=name,
        kind=kind,
        sub_path=sub_path.rstrip("/") or volume.sub_path,
        read_only=volume.read_only or volume.source.endswith(_READ_ONLY),
    )


def _mountable(path: str) -> str:
    """A path in a pod in one form; refuses one that would leave it without Python."""
    mount = re.sub("/+", "/", str(pathlib.PurePosixPath(path)))
    if ":" in mount or not mount.isprintable():
        raise _wrong(f"{show(mount)} cannot be a path in a pod", "Leave out ':' and control characters")
    hidden = hidden_by(mount)
    if hidden:
        raise _wrong(f"a volume at {mount!r} would hide {hidden}", "Mount it elsewhere, such as at '/data'")
    return mount


def hidden_by(mount: str) -> str:
    """What a volume at this path would hide from the pod; empty if nothing that matters."""
    if mount == "/":
        return "the whole image"
    if mount == "/kale-dist" or mount.startswith("/kale-dist/"):
        return "the job's own folders"
    if mount == "/tmp":  # noqa: S108 - a path in a pod
        return "the pods' own folder for temporary files, which they must not share"
    if mount == "/dev/shm":  # noqa: S108 - a path in a pod
        return "the pod's shared memory, whose size is `shm_gib` of the resources"
    if _PYTHON.search(mount):
        return "Python's packages"
    if mount in _SYSTEM or any(mount == tree or mount.startswith(f"{tree}/") for tree in _SYSTEM_TREES):
        return "programs or files of the system, Python perhaps among them"
    if any(tree.startswith(f"{mount}/") for tree in _SYSTEM_TREES):
        return "programs of the image, Python perhaps among them"
    return ""
