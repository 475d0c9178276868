"""Bytes that travel between notebook and ranks: blobs named by their content, and files of many buffers.

A *blob* is a run of bytes whose name is its SHA-256. The name is enough to check the bytes, two equal blobs are one,
and a blob never changes: it is written under a temporary name, made read-only and renamed, and never truncated, so
that a process which has mapped it keeps what it mapped.

A *bundle* is one file with a JSON header and buffers at 64-byte boundaries, such as an outcome:

    8 bytes   b"KALEDST1"
    8 bytes   length of the header, little endian
    header    JSON: {"header": the caller's header, "sizes": [bytes of each buffer]}
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
import sys
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
_BLOB_MODE = 0o444
_CHECKED_BYTES = 16 << 20
"""With more lines the file begins again: those of deleted blobs stay in it."""


def digest_of(buffers: Iterable[Buffer]) -> str:
    """SHA-256 of the buffers one after another, in hexadecimal. Large buffers are hashed without holding the GIL."""
    hasher = hashlib.sha256()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.hexdigest()


class Store(Protocol):
    """Stores blobs. Every method may raise `StoreError`."""

    def put(self, buffers: Sequence[Buffer]) -> str:
        """Store the buffers, one after another, as one blob.

        Args:
            buffers: Read twice, in order; the sequence may make its items on access.

        Returns:
            The blob's digest.
        """

    def exists(self, digest: str) -> bool:
        """Whether the store has this blob."""

    def open(self, digest: str) -> memoryview:
        """The blob's bytes, writable; the caller's changes are private.

        Raises:
            StoreError: There is no such blob.
        """

    def list(self) -> Sequence[str]:
        """Digests of all blobs."""


class _Checked:
    """Which files of blobs have the bytes of their names: this machine has written, received or read them.

    A file is the same as long as its inode, its size and the time of its last change are.
    """

    file: pathlib.Path | None = None
    """Tells later processes. It is the user's own: others may write into a folder of blobs."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def add(self, path: pathlib.Path) -> None:
        """Remember that this file has the bytes of its name."""
        self._known.add(state := _state_of(path))
        if self.file is not None:
            with contextlib.suppress(OSError), self.file.open("a") as file:
                if file.tell() > _CHECKED_BYTES:
                    file.truncate(0)
                file.write(f"{state}\n")

    def has(self, path: pathlib.Path) -> bool:
        """Whether this file has the bytes of its name, which are read where that is not known."""
        state = _state_of(path)
        if state not in self._known and self.file is not None and self.file.exists():
            self._known.update(self.file.read_text().splitlines())
        if state not in self._known and digest_of([map_file(path)]) == path.name:
            self.add(path)
        return state in self._known


def _state_of(path: pathlib.Path) -> str:
    return f"{path.name} {(found := path.stat()).st_ino} {found.st_size} {found.st_ctime_ns}"


checked = _Checked()


class FolderStore:
    """Blobs as read-only files in a folder. Several processes may use one folder at once.

    Args:
        root: The folder; made, for the user alone, when the first blob is put.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = pathlib.Path(root)

    def path(self, digest: str) -> pathlib.Path:
        """The path of a blob's file, whether it exists or not.

        Raises:
            StoreError: `digest` is not a digest.
        """
        if len(digest) != hashlib.sha256().digest_size * 2 or not _DIGEST_CHARACTERS.issuperset(digest):
            raise StoreError(f"{digest!r} is not the name of a blob: 64 hexadecimal digits are.")
        return self.root / digest

    def put(self, buffers: Sequence[Buffer]) -> str:
        """Store the buffers as one blob, unless the folder has it already. One that is damaged there is replaced.

        Raises:
            StoreError: The disk is full, or the folder cannot be written.
        """
        digest = digest_of(buffers)
        if not self.exists(digest):
            _write_file(self.path(digest), buffers, _BLOB_MODE)
            self.received(digest)
        return digest

    def received(self, digest: str) -> None:
        """Remember that the file of a blob, which has been written here, has its bytes."""
        checked.add(self.path(digest))

    def exists(self, digest: str) -> bool:
        """Whether the folder has this blob, undamaged: a file that this machine has not written is read once."""
        path = self.path(digest)
        return path.is_file() and checked.has(path)

    def open(self, digest: str) -> memoryview:
        """Map the blob copy-on-write.

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
        """Remove a blob if it exists; processes that have mapped it keep their map."""
        self.path(digest).unlink(missing_ok=True)


class MemoryStore:
    """Blobs in this process's memory: for a dry run, which counts bytes and writes nothing."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def put(self, buffers: Sequence[Buffer]) -> str:
        """Store a copy of the buffers."""
        digest = digest_of(buffers)
        if digest not in self._blobs:
            self._blobs[digest] = b"".join(buffers)
        return digest

    def exists(self, digest: str) -> bool:
        """Whether the store has this blob."""
        return digest in self._blobs

    def open(self, digest: str) -> memoryview:
        """A private copy of the blob.

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
    """Write a bundle atomically; an existing file is replaced.

    Args:
        path: The file; its folder is created if needed.
        header: A JSON object.
        buffers: The buffers, which are not copied.
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
        The header, and the buffers. Writes to the buffers do not change the file.

    Raises:
        StoreError: The file does not exist or cannot be read.
        SnapshotDamagedError: The file is not a bundle, or is cut short.
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


def sync(path: pathlib.Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk: power may fail then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: pathlib.Path) -> None:
    """The same for the names in a folder, where it may be opened and its file system can do that."""
    with contextlib.suppress(OSError):
        sync(folder)


@contextlib.contextmanager
def fresh(path: pathlib.Path, *, lasting: bool = True) -> Iterator[pathlib.Path]:
    """Yield a temporary path beside a file, which replaces the file at the end of the block, but not after an error.

    Then it outlives a power failure, unless it is not `lasting`.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
        if lasting:
            sync(temporary)
        temporary.replace(path)
        if lasting:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def map_file(path: str | os.PathLike[str]) -> memoryview:
    """Map a whole file copy-on-write until the last view of it is gone. No descriptor stays open.

    Raises:
        StoreError: The file does not exist or cannot be mapped.
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
    # At the interpreter's exit tensors may outlive finalizers, so the kernel removes the map then.
    weakref.finalize(array, _libc.munmap, address, size).atexit = False
    return memoryview(array).cast("B")


_MAP_FAILED = ctypes.c_void_p(-1).value
# Without this flag a private, writable map counts as memory, and the kernel may refuse to map a large model.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _write_file(
    path: pathlib.Path, pieces: Iterable[Buffer], mode: int, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Write a file atomically; after a failure nothing is left."""
    written = 0
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with fresh(path, lasting=mode != _BLOB_MODE) as temporary, temporary.open("xb", buffering=0) as file:
            os.fchmod(file.fileno(), 0o600)
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    count = file.write(view[:_WRITE_BYTES])
                    written += count
                    view = view[count:]
                    on_progress()
            os.fchmod(file.fileno(), mode)
    except OSError as error:
        _refuse(path, pieces, written, error)


def _refuse(path: pathlib.Path, pieces: Iterable[Buffer], written: int, error: OSError) -> NoReturn:
    """Raise the `StoreError` for a file that could not be written."""
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
    """Pack blobs into one zip file. The same blobs give the same bytes.

    Raises:
        StoreError: The store lacks a blob.
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
    """Unpack blobs into a folder store, and check each against its digest.

    Args:
        data: The bytes from `pack_blobs`, or a file with them.
        folder: The root of the `FolderStore`.

    Raises:
        SnapshotDamagedError: The data is not a zip file, or a blob does not have its digest.
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
