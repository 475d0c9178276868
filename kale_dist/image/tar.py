"""A tar, piece by piece and never whole in memory: of an image's layer, and of what goes into a container."""

from __future__ import annotations

import dataclasses
import pathlib
import tarfile
from collections.abc import Iterable, Iterator

_BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TarEntry:
    """One file or folder of a tar."""

    path: str
    """Absolute, where the tar is unpacked; its parent is no symbolic link there."""
    content: pathlib.Path | bytes | None
    """A file on this machine, the bytes themselves, or None for a folder."""
    mode: int = 0o644
    owner: tuple[int, int] = (0, 0)
    """User and group."""
    mtime: int = 0
    """When the file was written, in seconds since 1970."""

    @property
    def size(self) -> int:
        """Bytes of its content."""
        return self.content.stat().st_size if isinstance(self.content, pathlib.Path) else len(self.content or b"")


def tar(entries: Iterable[TarEntry]) -> Iterator[bytes]:
    """The bytes of a tar of these entries; equal entries give equal bytes."""
    for entry in entries:
        header = tarfile.TarInfo(entry.path.lstrip("/"))
        header.mode, header.mtime = entry.mode, entry.mtime
        header.uid, header.gid = entry.owner
        header.type = tarfile.DIRTYPE if entry.content is None else tarfile.REGTYPE
        header.size = entry.size
        yield header.tobuf(tarfile.PAX_FORMAT)
        if isinstance(entry.content, pathlib.Path):
            with entry.content.open("rb", buffering=0) as source:
                yield from iter(lambda: source.read(_BLOCK_BYTES), b"")
        else:
            yield entry.content or b""
        yield bytes(-header.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
