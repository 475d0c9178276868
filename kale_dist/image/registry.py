"""A registry of images, through its HTTP API.

https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md, and what Docker's registry does beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Self
from urllib.parse import quote

from kale_dist.errors import ConfigError, ImageError
from kale_dist.image import media
from kale_dist.image.auth import Credentials
from kale_dist.image.connection import Connection, RefusedError
from kale_dist.image.download import check, damaged, download
from kale_dist.image.early_upload import EarlyUpload
from kale_dist.image.kept import ByDigest
from kale_dist.image.reference import is_digest, is_registry
from kale_dist.image.registry_paths import (
    blob_path,
    check_repository,
    manifest_path,
    pull_access,
    push_access,
    shown,
    upload_path,
)
from kale_dist.image.upload import Progress, Upload
from kale_dist.image.upload_session import Begun, Session

_OK, _ACCEPTED, _ABSENT, _NOT_ALLOWED = 200, 202, 404, 405
_PAGE = 500
_MAX_PAGES = 1000
_NEXT = re.compile(r'<([^>]*)>\s*;\s*rel="?next"?')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Descriptor:
    """What names content in a registry."""

    digest: str
    """`sha256:...`"""
    size: int
    """Bytes."""
    media_type: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageManifest:
    """One image for one platform."""

    descriptor: Descriptor
    """Of the manifest: its digest is what a job pins."""
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
        insecure: Whether without TLS; None: only on this very machine, and not where `ca_file` is given.
        ca_file: A PEM file that is trusted besides the system's authorities (`SSL_CERT_FILE` counts) and docker's
            `certs.d`.

    Raises:
        ConfigError: `host` is none.
    """

    def __init__(
        self,
        host: str,
        *,
        credentials: Credentials | None = None,
        insecure: bool | None = None,
        ca_file: str | None = None,
    ) -> None:
        if not is_registry(host):
            raise ConfigError("registry", f"{host[:80]!r} is not the host of a registry", "Give a host: localhost:5000")
        self.host = host
        self._connection = Connection(host, credentials, insecure=insecure, ca_file=ca_file)

    def close(self) -> None:
        """Close its connections. Calling it again does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def head(self, repository: str, reference: str) -> Descriptor | None:
        """What a tag or digest names, without reading it; None where there is nothing."""
        doing = f"look up {shown(repository, reference)}"
        answer = self._connection.send(
            "HEAD",
            manifest_path(repository, reference),
            doing=doing,
            access=pull_access(repository),
            expect=(_OK, _ABSENT),
            headers={"Accept": ", ".join(media.ACCEPTED)},
        )
        self._connection.done(answer)
        if answer.status == _ABSENT:
            return None
        digest, size = answer.headers.get("Docker-Content-Digest", ""), answer.headers.get("Content-Length", "")
        if not is_digest(digest) or not size.isdecimal():
            return self.manifest(repository, reference)[1]
        return Descriptor(digest=digest, size=int(size), media_type=_kind(answer.headers.get("Content-Type")))

    def manifest(
        self, repository: str, reference: str, *, cache_dir: pathlib.Path | None = None
    ) -> tuple[dict[str, Any], Descriptor]:
        """A manifest or an index, by tag or digest; its bytes have been checked against the digest.

        Args:
            repository: Where it lies.
            reference: Tag or digest.
            cache_dir: Where what is named by a digest is kept; it is not asked for again.
        """
        doing = f"read the manifest of {shown(repository, reference)}"
        path, kept = manifest_path(repository, reference), ByDigest(cache_dir)
        if is_digest(reference) and (known := kept.get(reference)) is not None:
            body = self._json(known, doing)
            return body, Descriptor(digest=reference, size=len(known), media_type=media.media_type(body))
        answer = self._connection.send(
            "GET",
            path,
            doing=doing,
            access=pull_access(repository),
            headers={"Accept": ", ".join(media.ACCEPTED)},
        )
        data = self._connection.read(answer, doing)
        wanted = reference if is_digest(reference) else answer.headers.get("Docker-Content-Digest", "")
        digest = check(self.host, data, wanted, doing) if is_digest(wanted) else media.digest_of(data)
        body = self._json(data, doing)
        kind = _kind(answer.headers.get("Content-Type"))
        if kind not in media.ACCEPTED:
            kind = media.media_type(body)
        if kind == media.media_type(body):
            kept.put(digest, data)
        return body, Descriptor(digest=digest, size=len(data), media_type=kind)

    def image(
        self,
        repository: str,
        reference: str,
        platform: str = "linux/amd64",
        *,
        cache_dir: pathlib.Path | None = None,
    ) -> ImageManifest:
        """The image for a platform, chosen from the index where there are several.

        Args:
            repository: Where it lies.
            reference: Tag or digest.
            platform: `os/architecture` or `os/architecture/variant`.
            cache_dir: Where manifests and configurations are kept by digest, so that they are read once; None: nowhere.

        Raises:
            ImageError: Also where there is none for this platform; the text names those there are.
        """
        what = f"{self.host}/{shown(repository, reference)}"
        body, descriptor = self.manifest(repository, reference, cache_dir=cache_dir)
        if media.is_index(descriptor.media_type):
            chosen = media.choose(body, platform, what).get("digest")
            if not isinstance(chosen, str) or not is_digest(chosen):
                raise ImageError(f"The index of {what} names no digest for {platform}. It is damaged: push it again.")
            body, descriptor = self.manifest(repository, chosen, cache_dir=cache_dir)
        entry = body.get("config")
        entry = entry if isinstance(entry, dict) else {}
        kind = entry.get("mediaType", media.OCI_CONFIG if entry else "")
        if descriptor.media_type not in media.MANIFESTS or kind not in media.CONFIGS:
            found = kind or descriptor.media_type or "an unknown kind of manifest"
            raise ImageError(
                f"{what} is no image that can be run: {found}. Name an image, or push it again with a newer tool."
            )
        config = self._config(repository, str(entry.get("digest")), what, ByDigest(cache_dir))
        wanted = media.split_platform(platform)
        there = (str(config.get("os") or wanted[0]), str(config.get("architecture") or wanted[1]))
        if there != wanted[:2]:
            raise ImageError(f"{what} is for {'/'.join(there)}, not for {platform}. Choose another image.")
        return ImageManifest(descriptor=descriptor, manifest=body, config=config)

    def blob(self, repository: str, digest: str, *, start: int = 0) -> Iterator[bytes]:
        """A blob's bytes, in blocks of at most 1 MiB. A cut stream is gone on with.

        Args:
            repository: Where it lies.
            digest: Its name. The bytes are checked against it after the last; whoever uses them before has to be ready
                for an error then. Not checked with a `start`.
            start: How many bytes are left out at the beginning.
        """
        path, doing = blob_path(repository, digest), f"read {digest[:19]} of {repository}"
        return download(self._connection, path, digest=digest, start=start, access=pull_access(repository), doing=doing)

    def has_blob(self, repository: str, digest: str) -> bool:
        """Whether a repository has a blob."""
        answer = self._connection.send(
            "HEAD",
            blob_path(repository, digest),
            doing=f"look for {digest[:19]} in {repository}",
            access=pull_access(repository),
            expect=(_OK, _ABSENT),
        )
        self._connection.done(answer)
        return answer.status == _OK

    def mount(self, repository: str, digest: str, source_repository: str) -> bool:
        """Take a blob over from another repository of this registry, without its bytes.

        Returns:
            Whether it is in the repository now; False where the source lacks it or the registry does not do this.
        """
        blob_path(source_repository, digest)
        path = f"{upload_path(repository)}?mount={digest}&from={quote(source_repository, safe='')}"
        doing = f"take {digest[:19]} over from {source_repository} into {repository}"
        access = (*push_access(repository), *pull_access(source_repository))
        try:
            answer = self._connection.send(
                "POST", path, doing=doing, access=access, expect=(201, _ACCEPTED), headers={"Content-Length": "0"}
            )
        except RefusedError as error:
            # The source may be somebody else's: then the bytes have to travel.
            if error.status in (401, 403, _ABSENT, _NOT_ALLOWED):
                return False
            raise
        self._connection.done(answer)
        if answer.status == _ACCEPTED and "Location" in answer.headers:
            # The registry has begun an upload instead, which nobody goes on with.
            with contextlib.suppress(ImageError):
                self._connection.done(
                    self._connection.send(
                        "DELETE", answer.headers["Location"], doing=doing, access=access, expect=(_OK, 202, 204)
                    )
                )
        return answer.status != _ACCEPTED

    def upload(
        self,
        repository: str,
        file: BinaryIO | bytes,
        digest: str,
        *,
        progress: Progress = lambda _done, _total: None,
        look: bool = True,
        begun: Begun | None = None,
    ) -> None:
        """Put a blob into a repository, unless it is there. A cut upload is gone on with where the registry allows it.

        Args:
            repository: Where it goes.
            file: Its bytes; a file has to be seekable.
            digest: `sha256:...` of them; the registry checks it.
            progress: Called with the bytes sent and the bytes in all.
            look: Whether to ask first if it is there; False where that is known, or as quickly sent as asked.
            begun: What an early upload has sent of it.
        """
        source = io.BytesIO(file) if isinstance(file, bytes) else file
        size = source.seek(0, io.SEEK_END)
        if not (look and self.has_blob(repository, digest)):
            Upload(
                self._connection,
                repository,
                source,
                size=size,
                digest=digest,
                access=push_access(repository),
                progress=progress,
                begun=begun,
            ).run()
        progress(size, size)

    def early_upload(self, repository: str) -> EarlyUpload:
        """The upload of a blob that is still being written, and has no digest yet."""
        check_repository(repository)
        doing = f"upload a layer into {repository}"
        return EarlyUpload(Session(self._connection, repository, push_access(repository), doing))

    def put_manifest(self, repository: str, reference: str, body: bytes, media_type: str) -> str:
        """Put a manifest under a tag or its own digest; gives its digest."""
        doing = f"push {shown(repository, reference)}"
        answer = self._connection.send(
            "PUT",
            manifest_path(repository, reference),
            doing=doing,
            access=push_access(repository),
            expect=(201, 202),
            headers={"Content-Type": media_type, "Content-Length": str(len(body))},
            body=lambda: (body,),
        )
        self._connection.done(answer)
        digest = media.digest_of(body)
        said = answer.headers.get("Docker-Content-Digest", digest)
        if said != digest:
            raise damaged(self.host, doing, digest, said)
        return digest

    def tags(self, repository: str) -> tuple[str, ...]:
        """The repository's tags, sorted; none where it does not exist."""
        check_repository(repository)
        path, doing = f"/v2/{repository}/tags/list?n={_PAGE}", f"list the tags of {repository}"
        return self._list(path, "tags", doing, pull_access(repository))

    def repositories(self, prefix: str = "") -> tuple[str, ...]:
        """The registry's repositories whose path begins so, sorted. Large public registries refuse to list them."""
        found = self._list(f"/v2/_catalog?n={_PAGE}", "repositories", "list the repositories", ("registry:catalog:*",))
        return tuple(name for name in found if name.startswith(prefix))

    def delete(self, repository: str, digest: str) -> None:
        """Delete a manifest, and with it all its tags. Nothing happens where it is not there.

        Blobs stay until the registry's own collection of garbage.
        """
        blob_path(repository, digest)
        answer = self._connection.send(
            "DELETE",
            manifest_path(repository, digest),
            doing=f"delete {shown(repository, digest)}",
            access=(f"repository:{repository}:delete,pull,push",),
            expect=(_OK, 202, 204, _ABSENT),
        )
        self._connection.done(answer)

    def _config(self, repository: str, digest: str, what: str, kept: ByDigest) -> dict[str, Any]:
        doing = f"read the configuration of {what}"
        if not is_digest(digest):
            raise ImageError(f"The manifest of {what} names no configuration. It is damaged: push it again.")
        path, data = blob_path(repository, digest), kept.get(digest)
        if data is None:
            answer = self._connection.send("GET", path, doing=doing, access=pull_access(repository))
            data = self._connection.read(answer, doing)
            check(self.host, data, digest, doing)
            kept.put(digest, data)
        return self._json(data, doing)

    def _list(self, path: str, key: str, doing: str, access: tuple[str, ...]) -> tuple[str, ...]:
        names: set[str] = set()
        for _ in range(_MAX_PAGES):
            answer = self._connection.send("GET", path, doing=doing, access=access, expect=(_OK, _ABSENT))
            data = self._connection.read(answer, doing)
            if answer.status == _ABSENT:
                break
            names.update(str(name) for name in self._json(data, doing).get(key) or ())
            following = _NEXT.search(answer.headers.get("Link", ""))
            if following is None:
                break
            path = self._connection.absolute(following[1])
        return tuple(sorted(names))

    def _json(self, data: bytes, doing: str) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ImageError(f"The registry {self.host} answered no JSON object to: {doing}. Is it a registry?")
        return value


def _kind(content_type: str | None) -> str:
    return (content_type or "").partition(";")[0].strip()
