"""Bytes on their way between notebook and ranks: blobs named by their content, and single files of many buffers.

A *blob* is a run of bytes whose name is its SHA-256. The name is enough to check the bytes, two equal blobs are one,
and a blob never changes: it is written under a temporary name, made read-only and renamed, and never truncated, so
that a process which has mapped it keeps what it mapped.

A *bundle* is one file with a JSON header and buffers at 64-byte boundaries; outcomes are written so:

    8 bytes   b"KALEDST1"
    8 bytes   length of the header, little endian
    header    JSON: {"header": what the caller gave, "sizes": [bytes of each buffer]}
    buffers   each padded to a multiple of 64 bytes, as the header is
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import json
import mmap
import os
import pathlib
import secrets
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from kale_dist.errors import SnapshotDamagedError, StoreError

Buffer = bytes | bytearray | memoryview
"""One run of bytes. A memoryview has to be contiguous and of format "B"."""

ALIGNMENT = 64
"""Buffers in a bundle start at multiples of this, as torch's own memory does."""

_MAGIC = b"KALEDST1"
_DIGEST_CHARACTERS = frozenset("0123456789abcdef")
# Linux writes at most this much in one call; smaller pieces also let other threads have the disk in between.
_WRITE_BYTES = 64 << 20
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def digest_of(buffers: Iterable[Buffer]) -> str:
    """SHA-256 of the buffers one after another, in hexadecimal. Large buffers are hashed without holding the GIL."""
    hasher = hashlib.sha256()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.hexdigest()


class Store(Protocol):
    """Where blobs are kept. Every method may raise `StoreError`."""

    def put(self, buffers: Sequence[Buffer]) -> str:
        """Keep the buffers, one after another, as one blob.

        Args:
            buffers: Read twice, in order; a sequence that makes its items when asked for them is welcome.

        Returns:
            The blob's digest.
        """
        ...

    def exists(self, digest: str) -> bool:
        """Whether the store has this blob."""
        ...

    def open(self, digest: str) -> memoryview:
        """The blob's bytes, writable; what is written there stays private to the caller.

        Raises:
            StoreError: There is no such blob.
        """
        ...

    def list(self) -> Sequence[str]:
        """Digests of all blobs."""
        ...


class FolderStore:
    """Blobs as read-only files in a folder. Several processes may use one folder at once.

    Args:
        root: The folder; made, for the user alone, when the first blob is put.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = pathlib.Path(root)

    def path(self, digest: str) -> pathlib.Path:
        """The file of a blob, whether it is there or not.

        Raises:
            StoreError: This is no digest.
        """
        if len(digest) != hashlib.sha256().digest_size * 2 or not _DIGEST_CHARACTERS.issuperset(digest):
            raise StoreError(f"{digest!r} is not the name of a blob: 64 hexadecimal digits are.")
        return self.root / digest

    def put(self, buffers: Sequence[Buffer]) -> str:
        """Keep the buffers as one blob; a blob that is there already is not written again.

        Raises:
            StoreError: The disk is full, or the folder cannot be written.
        """
        digest = digest_of(buffers)
        path = self.path(digest)
        if not path.exists():
            _write_file(path, buffers, 0o444)
        return digest

    def exists(self, digest: str) -> bool:
        """Whether the folder has this blob."""
        return self.path(digest).exists()

    def open(self, digest: str) -> memoryview:
        """The blob, mapped copy-on-write.

        Raises:
            StoreError: There is no such blob.
        """
        return map_file(self.path(digest))

    def list(self) -> Sequence[str]:
        """Digests of all blobs."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self.root.iterdir() if _DIGEST_CHARACTERS.issuperset(path.name))
        return ()

    def delete(self, digest: str) -> None:
        """Remove a blob; processes that have mapped it keep it. One that is not there is fine."""
        self.path(digest).unlink(missing_ok=True)


class MemoryStore:
    """Blobs in this process's memory: for a dry run, which counts bytes and writes nothing."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def put(self, buffers: Sequence[Buffer]) -> str:
        """Keep a copy of the buffers."""
        digest = digest_of(buffers)
        if digest not in self._blobs:
            self._blobs[digest] = b"".join(buffers)
        return digest

    def exists(self, digest: str) -> bool:
        """Whether it was put."""
        return digest in self._blobs

    def open(self, digest: str) -> memoryview:
        """A private copy.

        Raises:
            StoreError: There is no such blob.
        """
        try:
            return memoryview(bytearray(self._blobs[digest]))
        except KeyError:
            raise StoreError(f"The store in memory has no blob {digest}.") from None

    def list(self) -> Sequence[str]:
        """Digests of all blobs."""
        return sorted(self._blobs)


# -- bundles ---------------------------------------------------------------------------------------------------------


def write_bundle(
    path: str | os.PathLike[str],
    header: dict[str, Any],
    buffers: Sequence[Buffer],
    *,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Write one file with a header and buffers, under a temporary name first; a file that is there is replaced.

    Args:
        path: Where to; its folder has to be there.
        header: Anything that JSON can say.
        buffers: Written from where they are, without a copy.
        on_progress: Called after each piece of a large file.

    Raises:
        StoreError: The disk is full, or the folder cannot be written.
    """
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    encoded = json.dumps({"header": header, "sizes": sizes}).encode()
    start = _MAGIC + len(encoded).to_bytes(8, "little") + encoded
    pieces: list[Buffer] = [start, _padding(len(start))]
    for buffer, size in zip(buffers, sizes, strict=True):
        pieces += [buffer, _padding(size)]
    _write_file(pathlib.Path(path), pieces, 0o600, on_progress)


def open_bundle(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[memoryview]]:
    """Map a bundle copy-on-write.

    Returns:
        The header, and the buffers: writable, and the file does not change when they are written to.

    Raises:
        StoreError: There is no such file, or it cannot be read.
        SnapshotDamagedError: It is not a bundle, or it is cut short.
    """
    data = map_file(path)
    try:
        return _parsed(data)
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotDamagedError(f"{os.fspath(path)} is damaged: {error}.") from error


def _parsed(data: memoryview) -> tuple[dict[str, Any], list[memoryview]]:
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("its first bytes are not a bundle's")
    start = len(_MAGIC) + 8
    length = int.from_bytes(data[len(_MAGIC) : start], "little")
    described = json.loads(bytes(data[start : start + length]))
    header, sizes = described["header"], described["sizes"]
    if not isinstance(header, dict) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("its header is not a bundle's")
    offset = start + length
    buffers = []
    for size in sizes:
        offset += -offset % ALIGNMENT
        if offset + size > len(data):
            raise ValueError(f"{offset + size:,} bytes are announced, {len(data):,} are there")
        buffers.append(data[offset : offset + size])
        offset += size
    return header, buffers


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


# -- files -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fresh(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A name beside a file, for its next version: it takes the file's place at the end of the block, but not after an error."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def map_file(path: str | os.PathLike[str]) -> memoryview:
    """Map a whole file copy-on-write; the map goes when the last view of it does. No descriptor stays open.

    Raises:
        StoreError: There is no such file, or it cannot be mapped.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - paths may be str
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return memoryview(bytearray())
            # Python's own mmap keeps a descriptor for each map: a model of a thousand tensors would use them all up.
            address = _libc.mmap(
                None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE, file.fileno(), 0
            )
            if address == _MAP_FAILED:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))  # noqa: TRY301 - one place words the error
    except OSError as error:
        raise StoreError(f"{os.fspath(path)} cannot be read: {error.strerror}.") from error
    array = (ctypes.c_ubyte * size).from_address(address)
    # At the interpreter's end tensors may outlive the finalizers, so the map is left to the kernel then.
    weakref.finalize(array, _libc.munmap, address, size).atexit = False
    return memoryview(array).cast("B")


_MAP_FAILED = ctypes.c_void_p(-1).value
# Without it a private, writable map counts as memory, and a large model may be refused where nothing is written to it.
_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _write_file(
    path: pathlib.Path, pieces: Iterable[Buffer], mode: int, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Write a file under a temporary name, then rename it; on failure nothing is left."""
    temporary = ""
    written = 0
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    count = os.write(descriptor, view[:_WRITE_BYTES])
                    written += count
                    view = view[count:]
                    on_progress()
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        pathlib.Path(temporary).rename(path)
    except OSError as error:
        if temporary:
            pathlib.Path(temporary).unlink(missing_ok=True)
        _refuse(path, pieces, written, error)
    except BaseException:
        pathlib.Path(temporary).unlink(missing_ok=True)
        raise


def _refuse(path: pathlib.Path, pieces: Iterable[Buffer], written: int, error: OSError) -> NoReturn:
    """Say why a file could not be written, and what to do."""
    if error.errno not in _FULL_DISK:
        raise StoreError(f"{path} could not be written: {error.strerror}.") from error
    needed = sum(memoryview(piece).nbytes for piece in pieces)
    place = os.statvfs(path.parent)
    free = place.f_bavail * place.f_frsize
    why = {errno.EDQUOT: "your quota is used up", errno.EFBIG: "files may not be that large here (ulimit -f)"}
    raise StoreError(
        f"{path} could not be written: {why.get(error.errno or 0, 'the disk is full')}. It needs {needed:,} bytes, "
        f"{written:,} were written, {free:,} are free on the disk. Free some space, delete old jobs with "
        "`kale-dist delete`, or set XDG_STATE_HOME to a folder on a larger disk."
    ) from error


# -- packed blobs ----------------------------------------------------------------------------------------------------


def pack_blobs(store: Store, digests: Iterable[str]) -> bytes:
    """Blobs as one zip file. The same blobs give the same bytes.

    Raises:
        StoreError: The store lacks one.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for digest in sorted(set(digests)):
            entry = zipfile.ZipInfo(digest, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o444 << 16
            archive.writestr(entry, store.open(digest))
    return file.getvalue()


def unpack_blobs(data: bytes | pathlib.Path, folder: pathlib.Path) -> None:
    """Put packed blobs into a folder store, each checked against its name.

    Args:
        data: What `pack_blobs` gave, or a file with it.
        folder: Root of a `FolderStore`.

    Raises:
        SnapshotDamagedError: It is no zip file, or a blob in it has another digest than its name.
        StoreError: The folder cannot be written.
    """
    store = FolderStore(folder)
    try:
        with zipfile.ZipFile(io.BytesIO(data) if isinstance(data, bytes) else data) as archive:
            for entry in archive.infolist():
                content = archive.read(entry)
                if digest_of([content]) != entry.filename:
                    raise SnapshotDamagedError(
                        f"The packed snapshot is damaged: the bytes under {entry.filename[:80]!r} have another digest."
                    )
                store.put([content])
    except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
        raise SnapshotDamagedError(f"The packed snapshot is damaged: {error}.") from error
    except OSError as error:
        raise StoreError(f"The packed snapshot could not be read: {error.strerror}.") from error
