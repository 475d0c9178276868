"""What a cache on this machine keeps: whole or not at all, and what has a digest only as it was."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import tempfile


def write_atomically(path: pathlib.Path, data: bytes) -> None:
    """Keep something in a cache: whole or not at all, and not where there is no room, for it can be found out again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = pathlib.Path(file.name)
            try:
                file.write(data)
                file.flush()
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise


class ByDigest:
    """Small pieces of content, such as manifests, under their digests.

    Args:
        folder: Where they are kept; None: nothing is kept.
    """

    def __init__(self, folder: pathlib.Path | None) -> None:
        self._folder = folder

    def get(self, digest: str) -> bytes | None:
        """What has this digest; None if it is not kept, or has been changed.

        Args:
            digest: `sha256:...`; of another algorithm nothing is kept.
        """
        path = self._path(digest)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:
            return None
        return data if f"sha256:{hashlib.sha256(data).hexdigest()}" == digest else None

    def put(self, digest: str, data: bytes) -> None:
        """Keep what has this digest."""
        if path := self._path(digest):
            write_atomically(path, data)

    def _path(self, digest: str) -> pathlib.Path | None:
        algorithm, _, name = digest.partition(":")
        return self._folder / name if self._folder is not None and algorithm == "sha256" else None
