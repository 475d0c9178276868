"""Volumes as users write them for pods, checked and in one form. Pure.

    {"/data": "datasets"}                    the claim `datasets`
    {"/data": "pvc://datasets/images:ro"}    its folder `images`, read-only
    {"/data": "hostpath:///mnt/data"}        a folder of the node
    {"/config": "configmap://settings"}      the keys of a ConfigMap, as files
    {"/token": "secret://token"}             the keys of a Secret, as files
    {"/scratch": "emptydir://"}              an empty folder of each pod's own

Everything else a volume can have is written as a `Volume`.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kale_dist import names
from kale_dist.errors import ConfigError
from kale_dist.spec import Volume, VolumeKind
from kale_dist.wording import closest, show

_SCHEMES = {
    "pvc": VolumeKind.CLAIM,
    "hostpath": VolumeKind.HOST_PATH,
    "configmap": VolumeKind.CONFIG_MAP,
    "secret": VolumeKind.SECRET,
    "emptydir": VolumeKind.EMPTY_DIR,
}
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


def pod_volumes(volumes: Any) -> tuple[Volume, ...]:
    """Volumes of pods, from a dict as in this module's docstring or from `Volume` objects.

    Args:
        volumes: None for none.

    Raises:
        ConfigError: A volume is not of these forms, or its path would hide what pods need.
    """
    return _collected(volumes, _parse, _settle, example="{'/data': 'claim'}")


def container_volumes(volumes: Any) -> tuple[Volume, ...]:
    """Volumes of a Docker engine's containers.

    `{"/data": "/home/me/data"}` is a folder of this machine (its path begins with `/`, `.` or `~`), `{"/data": "datasets"}`
    a volume of the engine; with `:ro` behind it, either is read-only. `Volume` objects are taken, too.

    Args:
        volumes: None for none.

    Raises:
        ConfigError: A volume is not of these forms, or its path would hide what containers need.
    """
    return _collected(volumes, _parse_for_container, _settle_for_container, example="{'/data': '/data'}")


def _collected(
    volumes: Any, parse: Callable[[Any, Any], Volume], settle: Callable[[Volume], Volume], *, example: str
) -> tuple[Volume, ...]:
    """All volumes in one form, each at a path of its own."""
    if volumes is None:
        return ()
    if isinstance(volumes, Mapping):
        made = [parse(mount, source) for mount, source in volumes.items()]
    elif isinstance(volumes, Sequence) and all(isinstance(volume, Volume) for volume in volumes):
        made = list(volumes)
    else:
        raise ConfigError("volumes", f"{show(volumes)} is not a dict", f"Write it as {example}")
    done: dict[str, Volume] = {}
    for volume in made:
        settled = settle(volume)
        if settled.mount_path in done:
            problem = f"two volumes are mounted at {settled.mount_path!r}"
            raise ConfigError("volumes", problem, "Give each a path of its own")
        done[settled.mount_path] = settled
    return tuple(done.values())


def _parse_for_container(mount: Any, source: Any) -> Volume:
    if not isinstance(mount, str) or not isinstance(source, str | pathlib.Path):
        wrong = source if isinstance(mount, str) else mount
        raise ConfigError("volumes", f"{show(wrong)} is not text", "Write it as {'/data': '/data'}")
    text = str(source)
    read_only = text.endswith(_READ_ONLY)
    if "://" in text:
        problem = f"{text!r} is a volume of a cluster, and a Docker engine has none of those"
        raise ConfigError(
            "volumes", problem, "Name a folder of this machine, or a volume that `docker volume ls` lists"
        )
    return Volume(mount_path=mount, source=text.removesuffix(_READ_ONLY), read_only=read_only)


def _settle_for_container(volume: Volume) -> Volume:
    if volume.kind not in (None, VolumeKind.FOLDER, VolumeKind.CLAIM):
        problem = f"a Docker engine has no volume of kind {volume.kind.value!r} ({volume.mount_path!r})"
        raise ConfigError(
            "volumes", problem, "Name a folder of this machine, or a volume that `docker volume ls` lists"
        )
    mount = _mountable(volume.mount_path)
    kind = volume.kind
    if kind is None:
        kind = VolumeKind.FOLDER if volume.source.startswith(("/", ".", "~")) else VolumeKind.CLAIM
    if kind is VolumeKind.FOLDER:
        try:
            source = str(pathlib.Path(volume.source).expanduser().resolve())
        except (OSError, RuntimeError) as error:
            raise ConfigError("volumes", f"{volume.source!r}: {error}", "Write the whole path") from None
        return dataclasses.replace(volume, mount_path=mount, kind=kind, source=source)
    if not _VOLUME_NAME.fullmatch(volume.source):
        problem = f"{show(volume.source)} cannot be the name of a volume"
        remedy = f"A folder is written as {'./' + volume.source!r}; names have letters, digits, '_', '.' and '-'"
        raise ConfigError("volumes", problem, remedy)
    if volume.sub_path:
        problem = f"a part of a named volume cannot be mounted: {volume.sub_path!r} in {volume.source!r}"
        raise ConfigError("volumes", problem, "Mount the whole volume")
    return dataclasses.replace(volume, mount_path=mount, kind=kind)


def _parse(mount: Any, source: Any) -> Volume:
    if not isinstance(mount, str) or not isinstance(source, str):
        wrong = source if isinstance(mount, str) else mount
        raise ConfigError("volumes", f"{show(wrong)} is not text", "Write it as {'/data': 'claim'}")
    text = source.removesuffix(_READ_ONLY)
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "pvc", text
        if text.startswith(("/", ".", "~")):
            problem = f"{source!r} is a folder of this machine, and pods do not see it"
            raise ConfigError(
                "volumes", problem, "Name a claim that holds the data, or a node's folder: 'hostpath:///...'"
            )
        if "/" in text:
            raise ConfigError("volumes", f"{source!r} cannot be a claim", f"A folder in a claim is 'pvc://{text}'")
    kind = _SCHEMES.get(scheme)
    if kind is None:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise ConfigError(
            "volumes", f"there is no kind {scheme!r} of volume", f"{closest(scheme, _SCHEMES)}Use: {known}"
        )
    name, sub_path = (rest, "") if kind is VolumeKind.HOST_PATH else (rest.partition("/")[0], rest.partition("/")[2])
    read_only = source.endswith(_READ_ONLY)
    return Volume(mount_path=mount, source=name, kind=kind, sub_path=sub_path.rstrip("/"), read_only=read_only)


def _settle(volume: Volume) -> Volume:
    """One form for each volume; refuses what the cluster would refuse, or what would leave a pod without Python."""
    kind = volume.kind or VolumeKind.CLAIM
    if kind is VolumeKind.FOLDER:
        raise ConfigError(
            "volumes", f"{volume.source!r} is a folder of this machine", "Name a claim that holds the data"
        )
    mount = _mountable(volume.mount_path)
    if kind is VolumeKind.HOST_PATH:
        if not volume.source.startswith("/") or ".." in pathlib.PurePosixPath(volume.source).parts:
            problem = f"{volume.source!r} is not an absolute path of a node"
            raise ConfigError("volumes", problem, "Write it as 'hostpath:///mnt/data'")
    elif kind is not VolumeKind.EMPTY_DIR and not names.is_object_name(volume.source):
        problem = f"{show(volume.source)} cannot be the name of a {kind.value.replace('_', ' ')}"
        remedy = "Write lower-case letters, digits, dashes and dots, as `kubectl get` lists it"
        raise ConfigError("volumes", problem, remedy)
    return dataclasses.replace(volume, mount_path=mount, kind=kind)


def _mountable(path: str) -> str:
    """A path in a pod in one form; refuses one that would leave it without Python."""
    mount = re.sub("/+", "/", str(pathlib.PurePosixPath(path)))
    if ":" in mount or not mount.isprintable():
        raise ConfigError("volumes", f"{show(mount)} cannot be a path in a pod", "Leave out ':' and control characters")
    hidden = _hidden(mount)
    if hidden:
        raise ConfigError(
            "volumes", f"a volume at {mount!r} would hide {hidden}", "Mount it elsewhere, such as at '/data'"
        )
    return mount


def _hidden(mount: str) -> str:
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
