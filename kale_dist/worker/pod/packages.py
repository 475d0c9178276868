"""What a pod's image lacks of the notebook's packages, and their files laid out for the ranks. Blocks: for a thread. No torch.

The files are one tree, which is the user base of ranks and of what they start: it comes before the image's own packages, and after the
standard library. In warm pods it stays for the next job, which changes only what differs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pathlib
import platform
import shutil
import site
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterable, Mapping

from kale_dist.errors import ContractError
from kale_dist.snapshot import distributions, loading
from kale_dist.wire import Offer, Package
from kale_dist.wire.blobs import FolderStore, fresh
from kale_dist.wording import listed

_LAID = ".laid.json"
"""What the tree holds: blobs and files of each package. It is there only while the tree is whole."""
_SHOWN = 8
_ROOM = 1.1
"""Files take whole blocks of a disk."""


@functools.cache
def _of_image() -> dict[str, tuple[str, str]]:
    """Version and identity of what the image has, by name."""
    return {name: (one.version, distributions.identity(one)) for name, one in distributions.installed().items()}


def wanted(offer: Offer) -> list[Package]:
    """The packages of an offer that this image lacks, or has otherwise, and that can run here."""
    # Where the Python is another one, the job is refused for that.
    fits = distributions.minor(offer.python) == distributions.minor(loading.python_version())
    return [one for one in offer.packages if one.blobs and _differs(one, offer)] if fits else []


def _differs(package: Package, offer: Offer) -> bool:
    version, identity = _of_image().get(package.name, ("", ""))
    is_foreign = package.is_compiled and offer.platform != distributions.this_platform()
    if is_foreign or (package.identity and package.identity == identity):
        return False
    if package.links_torch and version.partition("+")[0] == package.version.partition("+")[0]:
        # That of the image was compiled for the image's torch.
        return False
    if not version or package.name not in distributions.PRELOADED:
        return True
    # The image's own is loaded already. It stays unless something needs another one.
    needed = (specifier for one in offer.packages for name, specifier in one.requires if name == package.name)
    return not all(distributions.accepts(specifier, version) for specifier in needed)


def blobs(offer: Offer) -> list[str]:
    """Digests of the wanted packages' blobs."""
    return [digest for one in wanted(offer) for digest in one.blobs]


def preloaded(offer: Offer) -> tuple[str, ...]:
    """Blobs of the wanted packages that the fork server has imported from the image by now: it has to start again for them."""
    return tuple(digest for one in wanted(offer) if one.name in distributions.PRELOADED for digest in one.blobs)


def library(root: pathlib.Path) -> pathlib.Path:
    """The folder of a tree in which Python looks for packages of a user whose base it is."""
    return pathlib.Path(sysconfig.get_path("purelib", "posix_user", vars={"userbase": str(root)}))


def variables(root: pathlib.Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which an environment's processes find a tree's packages and scripts."""
    path = {"PATH": f"{root}/bin:{environment.get('PATH', os.defpath)}"}
    if site.ENABLE_USER_SITE and not pathlib.Path(site.getusersitepackages()).exists():
        return {**path, "PYTHONUSERBASE": str(root)}
    # The image has packages of its user, or its Python is a virtual environment's, which has no users.
    return {**path, "PYTHONPATH": ":".join(filter(None, (str(library(root)), environment.get("PYTHONPATH"))))}


def search_path(root: pathlib.Path) -> list[str]:
    """`sys.path` of ranks, with a tree's packages before those of the image."""
    place = next((number for number, one in enumerate(sys.path) if one.endswith("-packages")), len(sys.path))
    return [*sys.path[:place], str(library(root)), *sys.path[place:]]


def lay_out(offer: Offer, store: FolderStore, root: pathlib.Path) -> str:
    """Check that what the image lacks can run here, and write its files; returns a sentence for the log, empty where it lacks nothing.

    Args:
        offer: What the notebook has.
        store: Has the blobs of all that is wanted.
        root: The tree.

    Raises:
        ContractError: Packages cannot run in this image, or there is no room for them.
    """
    todo = wanted(offer)
    _check(todo, offer)
    before, began, written = _taken_out(root, todo), time.monotonic(), 0
    new = [one for one in todo if one.name not in before]
    _check_room(root, sum(one.size_bytes for one in new))
    for one in new:
        files = sorted({path for digest in one.blobs for path in _unpack(store.path(digest), root)})
        written += len(files)
        before[one.name] = {"blobs": list(one.blobs), "files": files}
    if not todo:
        return ""
    with fresh(root / _LAID, lasting=False) as part:
        part.write_text(json.dumps(before))
    size, took_s = sum(one.size_bytes for one in new), time.monotonic() - began
    names = listed([f"{one.name} {one.version}" for one in todo], _SHOWN)
    done = (
        f"{size / 1e6:,.1f} MB in {written:,} files laid out in {took_s:.1f} s"
        if new
        else "all were laid out for an earlier job"
    )
    count = f"{len(todo)} packages" if len(todo) > 1 else "A package"
    differs = distributions.minor(torch := loading.torch_version()) != distributions.minor(offer.torch)
    stays = f". PyTorch stays the image's {torch}; the notebook has {offer.torch}" if torch and differs else ""
    return f"{count} of the notebook, which the image lacks or has otherwise: {names}; {done}{stays}"


def _check(todo: Iterable[Package], offer: Offer) -> None:
    """Refuse what would fail in the ranks, all at once."""
    problems: list[str] = []
    has, here = _of_image(), distributions.this_platform()
    torch = loading.torch_version()
    glibc = distributions.minor(platform.libc_ver()[1])
    foreign = [one for one in offer.packages if one.is_compiled and offer.platform != here and one.name not in has]
    if foreign:
        pinned = ", ".join(f'"{one.name}=={one.version.partition("+")[0]}"' for one in foreign)
        problems.append(
            f"{listed([one.name for one in foreign], _SHOWN)} have compiled parts of {offer.platform}, which cannot run on {here}. "
            f"packages=[{pinned}] adds them to the image"
        )
    for one in todo:
        named = f"{one.name} {one.version}"
        if (2, one.glibc) > glibc > ():
            problems.append(f"{named} needs glibc 2.{one.glibc}, and the image has {'.'.join(map(str, glibc))}")
        if one.links_torch and torch and distributions.minor(offer.torch) != distributions.minor(torch):
            problems.append(f"{named} is compiled for the notebook's torch {offer.torch}, and the image has {torch}")
        problems += [
            f"{named} requires torch{specifier}, and the image has {torch}"
            for name, specifier in one.requires
            if name == "torch" and torch and not distributions.accepts(specifier, torch)
        ]
        problems += [
            f"{named} ({path}) needs {name}, which the image lacks"
            for name, path in one.libraries
            if not _is_there(name)
        ]
    if problems:
        remedy = "Use an image that has what they need, or name the packages to send: packages='here: name, name'"
        raise ContractError(f"Packages of the notebook cannot run in the image: {'; '.join(problems)}. {remedy}")


def _is_there(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _check_room(root: pathlib.Path, size: int) -> None:
    root.mkdir(mode=0o755, parents=True, exist_ok=True)
    place = os.statvfs(root)
    if size * _ROOM > (free := place.f_bavail * place.f_frsize):
        raise ContractError(
            f"The packages of the notebook take {size / 1e6:,.0f} MB in {root}, and {free / 1e6:,.0f} MB are free. Give the pods more"
            " room (ephemeral-storage), or name the packages to send: packages='here: name, name'"
        )


def _taken_out(root: pathlib.Path, todo: Iterable[Package]) -> dict[str, dict[str, list[str]]]:
    """Remove from the tree what differs from what is wanted; returns what is left. A tree that is not whole goes."""
    laid, stays = root / _LAID, {one.name: list(one.blobs) for one in todo}
    if not laid.exists():
        shutil.rmtree(root, ignore_errors=True)
        return {}
    before: dict[str, dict[str, list[str]]] = json.loads(laid.read_bytes())
    gone = [name for name, one in before.items() if stays.get(name) != one["blobs"]]
    if gone or stays.keys() - before.keys():
        laid.unlink()
    paths = {path for name in gone for path in before.pop(name)["files"]}
    files = [root / path for path in paths - {path for one in before.values() for path in one["files"]}]
    for file in files:
        file.unlink(missing_ok=True)
    for folder in {file.parent for file in files}:
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        with contextlib.suppress(OSError):
            # An empty folder could still be imported.
            os.removedirs(folder)
    return before


def _unpack(archive: pathlib.Path, root: pathlib.Path) -> Iterable[str]:
    """Write the files of an archive into a tree; returns their paths there."""
    inside, made, paths = library(root), set[pathlib.Path](), list[str]()
    with tarfile.open(archive, "r|gz") as tar:
        for entry in tar:
            kind, _, rest = entry.name.partition("/")
            target = inside / rest if kind == "site" else root / entry.name
            content = tar.extractfile(entry)
            if content is None:
                continue
            if target.parent not in made:
                target.parent.mkdir(parents=True, exist_ok=True)
                made.add(target.parent)
            target.unlink(missing_ok=True)
            with open(target, "xb", opener=functools.partial(os.open, mode=entry.mode)) as file:
                if kind == "bin" and (first := content.readline()) != distributions.SHEBANG:
                    file.write(first)
                elif kind == "bin":
                    file.write(f"#!{sys.executable}\n".encode())
                shutil.copyfileobj(content, file)
            os.utime(target, (entry.mtime, entry.mtime))
            paths.append(str(target.relative_to(root)))
    return paths
