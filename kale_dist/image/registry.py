"""A registry of images, through its HTTP API.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md, and what Docker's registry does beside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from urllib3.exceptions import HTTPError

from kale_dist.errors import ImageError
from kale_dist.image import manifest
from kale_dist.image.connection import BLOCK_BYTES, Connection
from kale_dist.image.reference import is_digest

_OK, _CREATED, _ACCEPTED, _ABSENT = 200, 201, 202, 404
_ACCEPT = {"Accept": ", ".join((*manifest.MANIFESTS, *manifest.INDEXES))}
_TRIES = 4
"""How often the bytes of a blob are sent at most."""

_BETWEEN_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageManifest:
    """One image for one platform."""

    digest: str
    """The manifest's digest, which a job pins."""
    manifest: dict[str, Any]
    """The manifest itself: `config` and `layers`, the base's first."""
    config: dict[str, Any]
    """The image's configuration: `architecture`, `os`, `config`, `rootfs`, `history`."""


class Registry(Connection):
    """A registry. Safe to use from threads; close it, or use it in a `with`.

    Every method may raise `ImageError`: not reached, refused (with the remedy), cut too often, or damaged content. Names of
    repositories, tags and digests are those of a `Reference`, which has checked them.
    """

    # -- manifests ---------------------------------------------------------------------------------------------------

    def head(self, repository: str, reference: str) -> str:
        """The digest of the manifest under a tag or digest, without reading the manifest; empty if there is none."""
        answer = self.done(self.send(
            "HEAD", f"/v2/{repository}/manifests/{reference}", doing=f"look up {_shown(repository, reference)}",
            access=_pull(repository), expect=(_OK, _ABSENT), headers=_ACCEPT,
        ))  # fmt: skip
        if answer.status == _ABSENT:
            return ""
        digest = answer.headers.get("Docker-Content-Digest", "")
        return digest if is_digest(digest) else self.manifest(repository, reference)[1]

    def manifest(self, repository: str, reference: str) -> tuple[dict[str, Any], str]:
        """A manifest or an index with its digest, by tag or digest."""
        doing = f"read the manifest of {_shown(repository, reference)}"
        digest = reference if is_digest(reference) else ""
        return self._json(repository, f"/v2/{repository}/manifests/{reference}", digest, doing, _ACCEPT)

    def image(self, repository: str, reference: str, platform: str = "linux/amd64") -> ImageManifest:
        """The image for a platform, chosen from the index if the tag has one.

        Args:
            repository: The image's repository.
            reference: Tag or digest.
            platform: `os/architecture` or `os/architecture/variant`.

        Raises:
            ImageError: Also if there is none for this platform; the message lists the platforms in the index.
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
        named = str(entry.get("digest"))
        doing = f"read the configuration of {what}"
        config, _ = self._json(repository, _blob_path(repository, named), named, doing, {})
        wanted = tuple(platform.split("/"))[:2]
        there = (str(config.get("os") or wanted[0]), str(config.get("architecture") or wanted[1]))
        if there != wanted:
            raise ImageError(f"{what} is for {'/'.join(there)}, not for {platform}. Choose another image.")
        return ImageManifest(digest=digest, manifest=body, config=config)

    def put_manifest(self, repository: str, reference: str, body: bytes, media_type: str) -> str:
        """Upload a manifest under a tag or its own digest; returns its digest."""
        self.done(self.send(
            "PUT", f"/v2/{repository}/manifests/{reference}", doing=f"push {_shown(repository, reference)}",
            access=_push(repository), expect=(_CREATED, _ACCEPTED), body=body,
            headers={"Content-Type": media_type, "Content-Length": str(len(body))},
        ))  # fmt: skip
        return manifest.digest_of(body)

    # -- blobs -------------------------------------------------------------------------------------------------------

    def blob(self, repository: str, digest: str) -> Iterator[bytes]:
        """Yield a blob's bytes in blocks of at most 1 MiB, and check the digest after the last one."""
        hasher, doing = hashlib.sha256(), f"read {digest[:19]} of {repository}"
        answer = self.send("GET", _blob_path(repository, digest), doing=doing, access=_pull(repository))
        try:
            for block in answer.stream(BLOCK_BYTES, decode_content=False):
                hasher.update(block)
                yield block
        except HTTPError as error:
            raise self.explain(error, doing, self.origin) from error
        finally:
            answer.close()
        self._check(hasher, digest, doing)

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether a repository has a blob."""
        answer = self.done(self.send(
            "HEAD", _blob_path(repository, digest), doing=f"look for {digest[:19]} in {repository}",
            access=_pull(repository), expect=(_OK, _ABSENT),
        ))  # fmt: skip
        return answer.status == _OK

    def mount(self, repository: str, digest: str, source_repository: str) -> bool:
        """Mount a blob from another repository of this registry, without sending its bytes.

        Returns:
            Whether the blob is in the repository now. False if the source lacks it, the credentials may not read it, or
            the registry does not support mounting: then the bytes have to be sent.
        """
        answer = self.done(self.send(
            "POST", f"/v2/{repository}/blobs/uploads/?mount={digest}&from={quote(source_repository, safe='')}",
            doing=f"take {digest[:19]} over from {source_repository} into {repository}",
            access=(*_push(repository), *_pull(source_repository)),
            expect=(_CREATED, _ACCEPTED, 401, 403, _ABSENT, 405), headers={"Content-Length": "0"},
        ))  # fmt: skip
        # Otherwise the registry may have begun an upload instead, which expires.
        return answer.status == _CREATED

    def upload(self, repository: str, blob: bytes | Callable[[], Iterable[bytes]]) -> tuple[str, int]:
        """Upload a blob. After a lost connection its bytes are sent again from the first, `_TRIES` times at most.

        Args:
            repository: Where to put the blob.
            blob: The bytes, or a function that yields them in blocks from the start.

        Returns:
            The blob's digest and its size in bytes.
        """
        tries = 1
        while True:
            where = self._begin_upload(repository)
            try:
                return self._send_blob(repository, where, blob)
            except ImageError as error:
                if not error.retryable or tries == _TRIES:
                    raise
            time.sleep(_BETWEEN_S * 2**tries)
            tries += 1

    def _begin_upload(self, repository: str) -> str:
        """Begin an upload; returns the URL that takes the bytes. Repeated by the connection as any other request."""
        start = f"/v2/{repository}/blobs/uploads/"
        answer = self.done(self.send(
            "POST", start, doing=f"upload into {repository}", access=_push(repository), expect=(_ACCEPTED,),
            headers={"Content-Length": "0"},
        ))  # fmt: skip
        return self.absolute(answer.headers.get("Location") or start)

    def _send_blob(self, repository: str, where: str, blob: bytes | Callable[[], Iterable[bytes]]) -> tuple[str, int]:
        """Send the bytes once, as one piece as docker does, and then their digest."""
        hasher, size = hashlib.sha256(), 0

        def counted(blocks: Iterable[bytes]) -> Iterator[bytes]:
            nonlocal hasher, size
            hasher, size = hashlib.sha256(), 0
            for block in blocks:
                hasher.update(block)
                size += len(block)
                yield block

        once: dict[str, Any] = {"doing": f"upload into {repository}", "access": _push(repository), "repeat": False}
        headers = {"Content-Type": "application/octet-stream"}
        if isinstance(blob, bytes):
            rest = b"".join(counted([blob]))
        else:
            rest, sent = b"", lambda: counted(blob())
            accepted = (_CREATED, _ACCEPTED, 204)
            answer = self.done(self.send("PATCH", where, expect=accepted, headers=headers, body=sent, **once))
            where = self.absolute(answer.headers.get("Location") or where, where)
        digest = f"sha256:{hasher.hexdigest()}"
        url = f"{where}{'&' if '?' in where else '?'}digest={digest}"
        headers["Content-Length"] = str(len(rest))
        self.done(self.send("PUT", url, expect=(_CREATED, 204), headers=headers, body=rest, **once))
        return digest, size

    # -- inside ------------------------------------------------------------------------------------------------------

    def _json(
        self, repository: str, path: str, digest: str, doing: str, headers: Mapping[str, str]
    ) -> tuple[dict[str, Any], str]:
        """Read a JSON object; returns it with its digest, which is checked if `digest` is given."""
        data = self.read(self.send("GET", path, doing=doing, access=_pull(repository), headers=headers), doing)
        self._check(hashlib.sha256(data), digest or manifest.digest_of(data), doing)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ImageError(f"The registry {self.host} answered no JSON object to: {doing}. Is it a registry?")
        return value, manifest.digest_of(data)

    def _check(self, hasher: hashlib._Hash, digest: str, doing: str) -> None:
        found = f"sha256:{hasher.hexdigest()}"
        if found != digest:
            raise ImageError(
                f"Could not {doing} at the registry {self.host}: the bytes have the digest {found}, not {digest}. They were "
                f"damaged there or on their way: try again, else push it again.",
                retryable=True,
            )


def _blob_path(repository: str, digest: str) -> str:
    if not is_digest(digest):
        raise ImageError(f"A manifest of {repository} names {digest[:80]!r}, which is no digest. Push the image again.")
    return f"/v2/{repository}/blobs/{digest}"


def _pull(repository: str) -> tuple[str, ...]:
    """The scope for reading a repository."""
    return (f"repository:{repository}:pull",)


def _push(repository: str) -> tuple[str, ...]:
    """The scope for writing to a repository."""
    return (f"repository:{repository}:pull,push",)


def _shown(repository: str, reference: str) -> str:
    return f"{repository}{'@' if is_digest(reference) else ':'}{reference}"
