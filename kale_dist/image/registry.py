"""A registry of images, through its HTTP API.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md, and what Docker's registry does beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, Self
from urllib.parse import quote

from urllib3.exceptions import HTTPError

from kale_dist.errors import ConfigError, ImageError
from kale_dist.image import manifest
from kale_dist.image.auth import Credentials
from kale_dist.image.connection import BLOCK_BYTES, Connection, RefusedError
from kale_dist.image.reference import is_digest, is_registry, is_repository, is_tag

Progress = Callable[[int, int], None]
"""Bytes sent, bytes in all; the first falls back after a cut."""

_OK, _ACCEPTED, _ABSENT = 200, 202, 404
_TRIES = 4
_BETWEEN_S = 0.1
_SINGLE_BYTES = 1 << 20
"""Up to here a blob goes with the request that names it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageManifest:
    """One image for one platform."""

    digest: str
    """Of the manifest: what a job pins."""
    manifest: dict[str, Any]
    """As in the registry: `config` and `layers`, the base's first."""
    config: dict[str, Any]
    """As in the registry: `architecture`, `os`, `config`, `rootfs`, `history`."""


class Registry:
    """A registry. Safe to use from threads; close it, or use it in a `with`.

    Every method may raise `ImageError`: not reached, refused (with the remedy), cut too often, or damaged content.

    Args:
        host: As in a reference: `docker.io`, `localhost:5000`.
        credentials: What `auth.find` gives; None for anonymous use.
        insecure: Whether without TLS; None: only on this very machine.

    Raises:
        ConfigError: `host` is none.
    """

    def __init__(
        self,
        host: str,
        *,
        credentials: Credentials | None = None,
        insecure: bool | None = None,
    ) -> None:
        if not is_registry(host):
            raise ConfigError("registry", f"{host[:80]!r} is not the host of a registry", "Give a host: localhost:5000")
        self.host = host
        self._connection = Connection(host, credentials, insecure=insecure)

    def close(self) -> None:
        """Close its connections. Calling it again does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- manifests ---------------------------------------------------------------------------------------------------

    def head(self, repository: str, reference: str) -> str:
        """The digest that a tag or digest names, without reading it; empty where there is nothing."""
        path = _manifest_path(repository, reference)
        accept = {"Accept": ", ".join(manifest.ACCEPTED)}
        answer = self._connection.send(
            "HEAD", path, doing=f"look up {_shown(repository, reference)}", access=_pull(repository),
            expect=(_OK, _ABSENT), headers=accept,
        )  # fmt: skip
        self._connection.done(answer)
        if answer.status == _ABSENT:
            return ""
        digest = answer.headers.get("Docker-Content-Digest", "")
        return digest if is_digest(digest) else self.manifest(repository, reference)[1]

    def manifest(self, repository: str, reference: str) -> tuple[dict[str, Any], str]:
        """A manifest or an index with its digest, by tag or digest; its bytes have been checked against the digest."""
        doing = f"read the manifest of {_shown(repository, reference)}"
        path = _manifest_path(repository, reference)
        accept = {"Accept": ", ".join(manifest.ACCEPTED)}
        answer = self._connection.send("GET", path, doing=doing, access=_pull(repository), headers=accept)
        data = self._connection.read(answer, doing)
        said = reference if is_digest(reference) else answer.headers.get("Docker-Content-Digest", "")
        digest = self._check(data, said, doing) if is_digest(said) else manifest.digest_of(data)
        return self._json(data, doing), digest

    def image(self, repository: str, reference: str, platform: str = "linux/amd64") -> ImageManifest:
        """The image for a platform, chosen from the index where there are several.

        Args:
            repository: Where it lies.
            reference: Tag or digest.
            platform: `os/architecture` or `os/architecture/variant`.

        Raises:
            ImageError: Also where there is none for this platform; the text names those there are.
        """
        what = f"{self.host}/{_shown(repository, reference)}"
        body, digest = self.manifest(repository, reference)
        if manifest.media_type(body) in manifest.INDEXES:
            chosen = manifest.choose(body, platform, what).get("digest")
            if not isinstance(chosen, str) or not is_digest(chosen):
                raise ImageError(f"The index of {what} names no digest for {platform}. It is damaged: push it again.")
            body, digest = self.manifest(repository, chosen)
        entry = body.get("config")
        entry = entry if isinstance(entry, dict) else {}
        kind = entry.get("mediaType", manifest.OCI_CONFIG if entry else "")
        if manifest.media_type(body) not in manifest.MANIFESTS or kind not in manifest.CONFIGS:
            found = kind or manifest.media_type(body) or "an unknown kind of manifest"
            raise ImageError(
                f"{what} is not an image that can be run: {found}. Name an image, or push it again with a newer tool."
            )
        config = self._config(repository, str(entry.get("digest")), what)
        wanted = tuple(platform.split("/"))[:2]
        there = (str(config.get("os") or wanted[0]), str(config.get("architecture") or wanted[1]))
        if there != wanted:
            raise ImageError(f"{what} is for {'/'.join(there)}, not for {platform}. Choose another image.")
        return ImageManifest(digest=digest, manifest=body, config=config)

    def put_manifest(self, repository: str, reference: str, body: bytes, media_type: str) -> str:
        """Put a manifest under a tag or its own digest; gives its digest."""
        doing = f"push {_shown(repository, reference)}"
        headers = {"Content-Type": media_type, "Content-Length": str(len(body))}
        answer = self._connection.send(
            "PUT", _manifest_path(repository, reference), doing=doing, access=_push(repository), expect=(201, 202),
            headers=headers, body=body,
        )  # fmt: skip
        self._connection.done(answer)
        digest = manifest.digest_of(body)
        said = answer.headers.get("Docker-Content-Digest", digest)
        if said != digest:
            raise self._damaged(doing, digest, said)
        return digest

    # -- blobs -------------------------------------------------------------------------------------------------------

    def blob(self, repository: str, digest: str) -> Iterator[bytes]:
        """A blob's bytes, in blocks of at most 1 MiB, checked against its digest after the last; a cut one is resumed."""
        path, doing = _blob_path(repository, digest), f"read {digest[:19]} of {repository}"
        hasher, at, cuts = hashlib.new(digest.partition(":")[0]), 0, 0
        while True:
            headers = {"Range": f"bytes={at}-"} if at else {}
            answer = self._connection.send(
                "GET", path, doing=doing, access=_pull(repository), expect=(_OK, 206), headers=headers
            )
            skip = at if answer.status == _OK else 0
            try:
                for block in answer.stream(BLOCK_BYTES, decode_content=False):
                    rest = block[skip:]
                    skip -= len(block) - len(rest)
                    at, cuts = at + len(rest), 0 if rest else cuts
                    hasher.update(rest)
                    yield rest
            except HTTPError as error:
                cuts += 1
                if cuts > _TRIES:
                    text = (
                        f"Could not {doing} at the registry {self.host}: the connection ended {cuts} times. Try again."
                    )
                    raise ImageError(text, retryable=True) from error
                time.sleep(_BETWEEN_S * cuts)
            else:
                break
            finally:
                answer.close()
        found = f"{hasher.name}:{hasher.hexdigest()}"
        if found != digest:
            raise self._damaged(doing, digest, found)

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether a repository has a blob."""
        answer = self._connection.send(
            "HEAD", _blob_path(repository, digest), doing=f"look for {digest[:19]} in {repository}",
            access=_pull(repository), expect=(_OK, _ABSENT),
        )  # fmt: skip
        self._connection.done(answer)
        return answer.status == _OK

    def mount(self, repository: str, digest: str, source_repository: str) -> bool:
        """Take a blob over from another repository of this registry, without its bytes.

        Returns:
            Whether it is in the repository now; False where the source lacks it or the registry does not do this.
        """
        _blob_path(source_repository, digest)
        path = f"/v2/{repository}/blobs/uploads/?mount={digest}&from={quote(source_repository, safe='')}"
        doing = f"take {digest[:19]} over from {source_repository} into {repository}"
        access = (*_push(repository), *_pull(source_repository))
        try:
            answer = self._connection.send(
                "POST", path, doing=doing, access=access, expect=(201, _ACCEPTED), headers={"Content-Length": "0"}
            )
        except RefusedError as error:
            # The source may be somebody else's: then the bytes have to be sent.
            if error.status in (401, 403, 404, 405):
                return False
            raise
        self._connection.done(answer)
        # Where it is not, the registry has begun an upload instead, which it forgets by itself.
        return answer.status != _ACCEPTED

    def upload(
        self,
        repository: str,
        file: IO[bytes] | bytes,
        digest: str,
        *,
        progress: Progress = lambda _done, _total: None,
        look: bool = True,
    ) -> None:
        """Put a blob into a repository, unless it is there. After a cut it is sent again from its beginning.

        Args:
            repository: Where it goes.
            file: Its bytes; a file has to be seekable.
            digest: `sha256:...` of them; the registry checks it.
            progress: Called with the bytes sent and the bytes in all.
            look: Whether to ask first if it is there.
        """
        _check_repository(repository)
        source = io.BytesIO(file) if isinstance(file, bytes) else file
        size = source.seek(0, io.SEEK_END)
        if not (look and self.has_blob(repository, digest)):
            for tries in range(1, _TRIES + 1):
                try:
                    self._send(repository, _Counted(source, size, progress), size, digest)
                    break
                except ImageError as error:
                    # A request that was cut may have arrived: its answer alone was lost.
                    if not error.retryable or (tries == _TRIES and not self.has_blob(repository, digest)):
                        raise
                    if self.has_blob(repository, digest):
                        break
                    time.sleep(_BETWEEN_S * 2**tries)
        progress(size, size)

    def _send(self, repository: str, body: _Counted, size: int, digest: str) -> None:
        """One try: begin an upload, send the bytes as one piece, as docker does, and name them."""
        doing, access = f"upload {digest[:19]} into {repository}", _push(repository)
        start = f"/v2/{repository}/blobs/uploads/"
        answer = self._connection.send(
            "POST", start, doing=doing, access=access, expect=(202,), headers={"Content-Length": "0"}
        )
        self._connection.done(answer)
        where = self._connection.absolute(answer.headers.get("Location") or start)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        single = size <= _SINGLE_BYTES
        body.seek(0)
        if not single:
            answer = self._connection.send(
                "PATCH",
                where,
                doing=doing,
                access=access,
                expect=(201, 202, 204),
                headers=headers,
                body=body,
                repeat=False,
            )
            self._connection.done(answer)
            where = self._connection.absolute(answer.headers.get("Location") or where, where)
        url = f"{where}{'&' if '?' in where else '?'}digest={digest}"
        try:
            answer = self._connection.send(
                "PUT", url, doing=doing, access=access, expect=(201, 204), repeat=False,
                headers=headers if single else {"Content-Length": "0"}, body=body if single else None,
            )  # fmt: skip
        except RefusedError as error:
            if error.code != "DIGEST_INVALID":
                raise
            text = f"{error} The bytes were damaged on their way."
            raise RefusedError(text, retryable=True, status=error.status, code=error.code) from error
        self._connection.done(answer)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _config(self, repository: str, digest: str, what: str) -> dict[str, Any]:
        doing = f"read the configuration of {what}"
        if not is_digest(digest):
            raise ImageError(f"The manifest of {what} names no configuration. It is damaged: push it again.")
        answer = self._connection.send("GET", _blob_path(repository, digest), doing=doing, access=_pull(repository))
        data = self._connection.read(answer, doing)
        self._check(data, digest, doing)
        return self._json(data, doing)

    def _json(self, data: bytes, doing: str) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ImageError(f"The registry {self.host} answered no JSON object to: {doing}. Is it a registry?")
        return value

    def _check(self, data: bytes, digest: str, doing: str) -> str:
        """The digest, if it is that of the bytes."""
        algorithm = digest.partition(":")[0]
        found = f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"
        if found != digest:
            raise self._damaged(doing, digest, found)
        return digest

    def _damaged(self, doing: str, wanted: str, found: str) -> ImageError:
        problem = f"Could not {doing} at the registry {self.host}: the bytes have the digest {found[:80]}, not {wanted}"
        text = f"{problem}. They were damaged there or on their way: try again, else push it again."
        return ImageError(text, retryable=True)


class _Counted(io.BufferedIOBase):
    """A file that tells how much of it has been read."""

    def __init__(self, file: IO[bytes], size: int, progress: Progress) -> None:
        self._file = file
        self._size = size
        self._progress = progress

    def read(self, size: int | None = -1, /) -> bytes:
        data = self._file.read(-1 if size is None else size)
        self._progress(self._file.tell(), self._size)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _check_repository(repository: str) -> None:
    """Refuse what would lead elsewhere."""
    if not is_repository(repository):
        problem = f"{repository[:80]!r} is not the path of a repository"
        raise ConfigError("repository", problem, "Give lower-case parts with / between them: team/train")


def _manifest_path(repository: str, reference: str) -> str:
    _check_repository(repository)
    if not (is_tag(reference) or is_digest(reference)):
        raise ConfigError("reference", f"{reference[:80]!r} is neither tag nor digest", "Give '1.0' or 'sha256:...'")
    return f"/v2/{repository}/manifests/{reference}"


def _blob_path(repository: str, digest: str) -> str:
    _check_repository(repository)
    if not is_digest(digest):
        raise ConfigError("digest", f"{digest[:80]!r} is no digest", "Give sha256: and 64 lower-case hex digits")
    return f"/v2/{repository}/blobs/{digest}"


def _pull(repository: str) -> tuple[str, ...]:
    """What a token has to allow for reading."""
    return (f"repository:{repository}:pull",)


def _push(repository: str) -> tuple[str, ...]:
    """What a token has to allow for writing."""
    return (f"repository:{repository}:pull,push",)


def _shown(repository: str, reference: str) -> str:
    return f"{repository}{'@' if is_digest(reference) else ':'}{reference}"
