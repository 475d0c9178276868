"""A store at a URL that fsspec opens: object storage, a file share, a folder. For blobs and for results.

Blobs are stored by digest, everything else by name. fsspec and the package of the URL's protocol are imported when a
store is made; notebook and pods each need them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import tempfile
import urllib.parse
import uuid
from collections.abc import Iterator, Sequence

from kale_dist.errors import KaleDistError, StoreError
from kale_dist.wire import PodVariable
from kale_dist.wire.blobs import Buffer, digest_of, fresh, map_file

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_CHUNK_BYTES = 8 << 20
# In object storage an object appears when it is whole, and renaming would copy it.
_APPEARS_WHOLE = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "oci", "oss", "r2", "s3", "s3a"})


class UrlStore:
    """Blobs and files below a URL.

    All errors are `StoreError`s that name the URL, without user, password and query.

    Args:
        url: Such as `s3://bucket/folder` or `file:///mnt/share/kale`.

    Raises:
        StoreError: fsspec, or the package for this protocol, is not installed on this side; or the URL
            is malformed or has a query.
    """

    def __init__(self, url: str) -> None:
        self._shown = _without_secrets(url)
        if "?" in url:
            raise StoreError(
                f"The store {self._shown} has a query, after which no names can be added. Give what is secret in the way "
                "that the protocol's package has for it (environment variables or a file), and the address alone"
            )
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            raise StoreError(
                f"The store {self._shown} needs fsspec, which is not installed {_side()}. "
                f"{_install('fsspec and the package for this protocol')}, or give another place"
            ) from error
        try:
            self._fs, root = url_to_fs(url)
        except ImportError as error:
            raise StoreError(
                f"The store {self._shown} needs a package that is not installed {_side()}: {error}. "
                f"{_install('it')}, or give another place"
            ) from error
        except Exception as error:
            raise StoreError(f"The store {self._shown} cannot be opened {_side()}: {self._words(error)}") from error
        self._root = root.rstrip("/")
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        self._appears_whole = not _APPEARS_WHOLE.isdisjoint(protocols)

    def put(self, buffers: Sequence[Buffer]) -> str:
        """Store the buffers as one blob, unless the store has it already; returns its digest."""
        digest = digest_of(buffers)
        if not self.exists(digest):
            with self._writing(digest) as path, self._fs.open(path, "wb") as file:
                for buffer in buffers:
                    view = memoryview(buffer).cast("B")
                    for start in range(0, view.nbytes, _CHUNK_BYTES):
                        file.write(view[start : start + _CHUNK_BYTES])
        return digest

    def exists(self, name: str) -> bool:
        """Whether the store has a blob of this digest, or a file of this name."""
        path = self._path(name)
        with self._asking(f"look for {name}"):
            self._fs.invalidate_cache()
            # Many of fsspec's classes answer `exists` with False whatever has gone wrong.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._fs.info(path)
                return True
        return False

    def open(self, digest: str) -> memoryview:
        """The blob's bytes, writable, in a temporary copy on this machine's disk.

        Raises:
            StoreError: There is no such blob, or its bytes do not have its digest.
        """
        if not _DIGEST.fullmatch(digest):
            raise StoreError(f"{digest!r} is not the name of a blob: 64 hexadecimal digits are.")
        with tempfile.TemporaryDirectory(prefix="kale-dist-") as folder:
            path = pathlib.Path(folder, digest)
            self.get_file(digest, path)
            view = map_file(path)
        if digest_of([view]) != digest:
            raise StoreError(
                f"The blob {digest} in the store {self._shown} is damaged: its bytes have another digest. Delete it "
                "there and submit the job again"
            )
        return view

    def list(self) -> Sequence[str]:
        """Digests of all blobs."""
        with self._asking("list the blobs"):
            self._fs.invalidate_cache()
            try:
                names = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return ()
        return sorted(name for path in names if _DIGEST.fullmatch(name := path.rstrip("/").rpartition("/")[2]))

    def get_file(self, name: str, path: pathlib.Path) -> None:
        """Download a file atomically; an existing file is replaced.

        Args:
            name: The file's name in the store, with folders, such as `jobs/digits/outcome-0-0`; or a digest.
            path: Where to write it.

        Raises:
            StoreError: The store has no such file, or it cannot be read or written.
        """
        source = self._path(name)
        with self._asking(f"read {name}"), fresh(path) as temporary:
            self._fs.get_file(source, str(temporary))

    def put_file(self, name: str, path: pathlib.Path) -> None:
        """Upload a file; an existing one of this name is replaced.

        Args:
            name: The file's name in the store, as for `get_file`.
            path: The file.

        Raises:
            StoreError: The file cannot be read, or the store cannot be written.
        """
        with self._writing(name) as target:
            self._fs.put_file(str(path), target)

    def try_to_write(self, name: str) -> None:
        """Check that a file of this name could be written later. An existing one is not changed.

        Args:
            name: The file's name in the store, as for `get_file`.

        Raises:
            StoreError: The store cannot be written.
        """
        folder, _, last = self._path(name).rpartition("/")
        path = f"{folder}/.{last}.{uuid.uuid4().hex}.part"
        with self._asking(f"write {name}"):
            self._make(folder)
            self._fs.pipe_file(path, b"")
            # Some credentials allow to write objects but not to delete them.
            with contextlib.suppress(Exception):
                self._fs.rm_file(path)

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if any(part in {"", ".", ".."} for part in parts):
            raise StoreError(f"{name!r} is not a name in a store")
        return "/".join([self._root, *parts])

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[str]:
        """Yield the path to write to, so that the file appears whole under its name or not at all."""
        path = self._path(name)
        folder, _, last = path.rpartition("/")
        temporary = path if self._appears_whole else f"{folder}/.{last}.{uuid.uuid4().hex}.part"
        with self._asking(f"write {name}"):
            try:
                self._make(folder)
                yield temporary
                if temporary != path:
                    self._fs.mv(temporary, path)
            except BaseException:
                if temporary != path:
                    with contextlib.suppress(Exception):
                        self._fs.rm_file(temporary)
                raise

    def _make(self, folder: str) -> None:
        """Create a folder. Object storage has none, and would create a bucket for a misspelt name."""
        if not self._appears_whole:
            self._fs.makedirs(folder, exist_ok=True)

    @contextlib.contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        """Turn all errors of the block into `StoreError`s, because each protocol's package has its own."""
        try:
            yield
        except KaleDistError:
            raise
        except FileNotFoundError as error:
            raise StoreError(f"Could not {doing} in the store {self._shown} {_side()}: it is not there") from error
        except Exception as error:
            raise StoreError(
                f"Could not {doing} in the store {self._shown} {_side()}: {self._words(error)}. See that the address is "
                "right, and that you may read and write there"
            ) from error

    def _words(self, error: Exception) -> str:
        """An error's type and text, without the secrets in its URLs."""
        text = re.sub(r"\w[\w+.-]*://\S+", lambda found: _without_secrets(found[0]), str(error))
        return f"{type(error).__name__}: {text[:500]}"


def _without_secrets(url: str) -> str:
    """The URL without user, password, query and fragment."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return url.partition("?")[0].rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _in_pod() -> bool:
    return PodVariable.WORK in os.environ


def _side() -> str:
    return "in the pod" if _in_pod() else "on the notebook's side"


def _install(what: str) -> str:
    return f"Use an image with {what}" if _in_pod() else f"Install {what} (pip install fsspec s3fs, say)"
