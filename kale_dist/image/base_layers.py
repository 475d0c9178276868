"""What of a base image's layers tells about its Python: read from the tar streams, kept by layer, merged as a runtime does.

Nothing is unpacked. A layer is streamed once from the registry and all but a few small files are passed over; what
remains is a few hundred kilobytes, kept by the layer's digest, so that images that share layers share the reading.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, Protocol, Self, cast

from kale_dist.errors import ImageError
from kale_dist.image import zstd
from kale_dist.image.kept import write_atomically

_TEXTS = re.compile(
    r"(^|/)pyvenv\.cfg$|\.dist-info/(METADATA|RECORD)$|\.egg-info$|\.egg-info/(PKG-INFO|installed-files\.txt)$"
    r"|(^|/)torch/version\.py$|/include/python3\.\d+/patchlevel\.h$|^lib/apk/db/installed$"
)
"""Files whose text is kept."""

_NAMES = re.compile(r"(^|/)bin/python3?(\.\d+)?$|/lib(64)?/python3\.\d+/os\.py$|/conda-meta/python-3[^/]*\.json$")
"""Files of which it is kept that they are there."""

_C_LIBRARY = re.compile(r"(^|/)libc(\.so\.6|-2\.\d+\.so)$")
_C_LIBRARY_VERSION = re.compile(rb"stable release version (2\.\d+)")
_TEXT_LIMIT = 32 << 20
_READ_BYTES = 1 << 16
_PIECE_BYTES = 1 << 14
_FORMAT = 1
_LINKS_FOLLOWED = 40
"""As many as Linux follows in one path."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Scan:
    """What was kept of one layer. Paths have no leading slash."""

    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    """Path to text; empty for files of which only the name matters, the version for the C library."""
    links: dict[str, str] = dataclasses.field(default_factory=dict)
    """Symbolic links, to what they say."""
    folders: list[str] = dataclasses.field(default_factory=list)
    """Directories, all of them: one may stand in the place of a link of a layer below."""
    removed: list[str] = dataclasses.field(default_factory=list)
    """What whiteouts remove of the layers below, whole directories too."""
    emptied: list[str] = dataclasses.field(default_factory=list)
    """Directories whose content in the layers below is hidden."""

    @classmethod
    def of(cls, blocks: Iterator[bytes], name: str) -> Self:
        """Read a layer to its end.

        Args:
            blocks: The layer's bytes as the registry has them: a tar, plain or compressed.
            name: The layer's digest, for errors.

        Raises:
            ImageError: The layer is no tar, is damaged, or compressed in a way that cannot be read here.
        """
        scan = cls()
        stream = cast("IO[bytes]", _Unpacked(blocks, name))
        try:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=_READ_BYTES) as archive:
                for member in archive:
                    scan._see(archive, member)
        except (tarfile.TarError, zlib.error, zstd.DamagedError, EOFError) as error:
            raise ImageError(
                f"Layer {name} of the base image cannot be read as a tar: {error}. "
                f"Push the base image again, or name another one."
            ) from error
        for _ in blocks:  # the registry's client compares the digest when it has seen the last block
            pass
        return scan

    def _see(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Keep of one member what is worth keeping."""
        path = posixpath.normpath("/" + member.name).lstrip("/")
        folder, name = posixpath.split(path)
        if name == ".wh..wh..opq":
            self.emptied.append(folder)
        elif name.startswith(".wh."):
            self.removed.append(posixpath.join(folder, name[4:]))
        elif member.issym():
            self.links[path] = member.linkname
        elif member.isdir():
            self.folders.append(path)
        elif member.islnk():
            source = posixpath.normpath("/" + member.linkname).lstrip("/")
            if source in self.texts or _NAMES.search(path):
                self.texts[path] = self.texts.get(source, "")
        elif _TEXTS.search(path) and member.size <= _TEXT_LIMIT:
            text = _read(archive, member).decode("utf-8", "replace")
            self.texts[path] = text.split("\n\n", 1)[0] if path.endswith(("METADATA", "PKG-INFO")) else text
        elif path == "var/lib/dpkg/status":
            stanzas = _read(archive, member).decode("utf-8", "replace").split("\n\n")
            self.texts[path] = "\n\n".join(stanza for stanza in stanzas if stanza.startswith("Package: python3."))
        elif _C_LIBRARY.search(path) and member.size <= _TEXT_LIMIT:
            found = _C_LIBRARY_VERSION.search(_read(archive, member))
            self.texts[path] = found[1].decode() if found else ""
        elif _NAMES.search(path):
            self.texts[path] = ""

    def save(self, path: pathlib.Path) -> None:
        """Keep it on this machine; a disk that has no room only means that it is read again."""
        data = gzip.compress(json.dumps([_FORMAT, dataclasses.asdict(self)]).encode(), compresslevel=1, mtime=0)
        write_atomically(path, data)

    @classmethod
    def load(cls, path: pathlib.Path) -> Self | None:
        """What was kept there; None if nothing was, or if it cannot be read."""
        try:
            version, data = json.loads(gzip.decompress(path.read_bytes()))
            return cls(**data) if version == _FORMAT else None
        except (OSError, EOFError, ValueError, TypeError, zlib.error):
            return None


class Tree:
    """The layers of an image, one over another."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._folders: set[str] = set()
        self.links: dict[str, str] = {}
        """Symbolic links, without a leading slash, to what they say."""

    def add(self, scan: Scan) -> None:
        """Put a layer over those that are there."""
        # What is not a directory in the new layer hides all below its path; a directory hides only a link.
        over = {*scan.removed, *scan.texts, *scan.links}
        trees = {*over, *scan.emptied}
        folders = set(scan.folders)
        self._texts = {path: text for path, text in self._texts.items() if path not in over and not _below(path, trees)}
        self.links = {
            path: target
            for path, target in self.links.items()
            if path not in over and path not in folders and not _below(path, trees)
        }
        self._folders = {path for path in self._folders if path not in over and not _below(path, trees)}
        self._texts.update(scan.texts)
        self.links.update(scan.links)
        self._folders |= folders
        for path in scan.texts:
            self._folders.update(_ancestors(path))

    def real(self, path: str) -> str:
        """The absolute path with every symbolic link on it followed; empty if they run in a circle."""
        return follow(path, self.links)

    def text(self, path: str) -> str | None:
        """Of a file; None where there is none of those that are kept."""
        return self._texts.get(self.real(path).lstrip("/"))

    def has_folder(self, path: str) -> bool:
        """Whether this directory is there."""
        return self.real(path).lstrip("/") in self._folders

    def under(self, folder: str) -> Iterator[tuple[str, str]]:
        """Paths relative to a directory, and texts, of all that was kept below it, in order."""
        real = self.real(folder)
        prefix = f"{real.strip('/')}/" if real != "/" else ""
        for path in sorted(self._texts):
            if path.startswith(prefix):
                yield path.removeprefix(prefix), self._texts[path]


def follow(path: str, links: dict[str, str]) -> str:
    """An absolute path with its symbolic links followed, all within the image.

    Args:
        path: Absolute.
        links: Symbolic links, without a leading slash, to what they say.

    Returns:
        The real path; empty where links run in a circle.
    """
    todo, done, followed = [part for part in path.split("/") if part][::-1], "", 0
    while todo:
        part = todo.pop()
        if part in {".", ".."}:
            done = posixpath.dirname(done) if part == ".." else done
            continue
        here = f"{done}/{part}" if done else part
        target = links.get(here)
        if target is None:
            done = here
            continue
        followed += 1
        if followed > _LINKS_FOLLOWED:
            return ""
        done = "" if target.startswith("/") else done
        todo.extend([step for step in target.split("/") if step][::-1])
    return f"/{done}"


def _ancestors(path: str) -> Iterator[str]:
    """The directories above a path, the nearest first; the root, an empty path, last."""
    while path:
        path = posixpath.dirname(path)
        yield path


def _below(path: str, folders: set[str]) -> bool:
    """Whether the path is below one of these."""
    return any(folder in folders for folder in _ancestors(path))


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """A member's bytes; it is a regular file."""
    file = archive.extractfile(member)
    return file.read() if file is not None else b""


class _Decompressor(Protocol):
    """What zlib and zstandard have in common."""

    eof: bool
    unused_data: bytes

    def decompress(self, data: bytes, /) -> bytes:
        """The plain bytes of some more."""
        ...


class _Unpacked:
    """A layer's plain tar, whatever it is compressed with, as a file that can only be read on."""

    def __init__(self, blocks: Iterator[bytes], name: str) -> None:
        self._blocks = blocks
        self._name = name
        self._buffer = bytearray()
        self._decompressor: _Decompressor | None = None
        self._started = False

    def read(self, size: int) -> bytes:
        """The next bytes; fewer than asked for only at the end."""
        while len(self._buffer) < size:
            block = next(self._blocks, b"")
            if not block:
                break
            if not self._started:
                self._started = True
                self._decompressor = _decompressor(block, self._name)
            self._buffer += self._unpack(block)
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _unpack(self, block: bytes) -> bytes:
        """The plain bytes of one block; gzip may be several streams one after another."""
        if self._decompressor is None:
            return block
        plain = bytearray()
        # Small pieces: zeros pack a thousand to one, and what a piece gives is held in memory.
        for start in range(0, len(block), _PIECE_BYTES):
            piece = block[start : start + _PIECE_BYTES]
            while piece:
                plain += self._decompressor.decompress(piece)
                piece = self._decompressor.unused_data if self._decompressor.eof else b""
                following = _decompressor(piece, self._name) if piece else None
                if following is None:
                    break
                self._decompressor = following
        return bytes(plain)


def _decompressor(block: bytes, name: str) -> Any:
    """For what begins with this block; None for a plain tar. Media types are not asked: builders get them wrong."""
    if block.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(wbits=31)
    if not block.startswith(b"\x28\xb5\x2f\xfd"):
        return None
    if (made := zstd.decompressor()) is not None:
        return made
    raise ImageError(
        f"Layer {name} of the base image is compressed with zstd, which this Python cannot read. "
        f"Install it with `pip install zstandard`, or name a base image whose layers are compressed with gzip."
    )
