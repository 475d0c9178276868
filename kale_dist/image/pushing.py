"""An image's way into a registry: what is there is asked for all at once, and only what is lacking is sent."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kale_dist.image import media
from kale_dist.image.early_upload import EarlyUpload
from kale_dist.image.layer import Layer
from kale_dist.image.reference import Reference
from kale_dist.image.registry import ImageManifest, Registry

AT_ONCE = 6
"""Requests. Registries limit what one client may ask for in a second."""

_SMALL_BYTES = 1 << 20
"""Up to here a layer is sent beside the others, without a word."""

_MIB = 1 << 20


def bring(
    threads: ThreadPoolExecutor,
    *,
    registry: Registry,
    repository: str,
    base_registry: Registry,
    base: Reference,
    image: ImageManifest,
) -> dict[str, Future[bool]]:
    """Have a base's layers in another repository, as far as that takes no bytes.

    Args:
        threads: Ask for it.
        registry: Where the new image goes.
        repository: Where in it.
        base_registry: Where the base lies; may be `registry`.
        base: The base.
        image: The base's manifest.

    Returns:
        By digest, whether it is there.
    """

    def ask(digest: str) -> bool:
        # Mounting what is there already would be as quick, but costs a right that may be missing.
        return registry.has_blob(repository, digest) or (
            registry.host == base_registry.host and registry.mount(repository, digest, base.repository)
        )

    return {digest: threads.submit(ask, digest) for digest in _by_digest(image)}


def push(
    *,
    registry: Registry,
    repository: str,
    tag: str,
    manifest: bytes,
    config: bytes,
    layers: Sequence[Layer],
    threads: ThreadPoolExecutor,
    brought: Mapping[str, Future[bool]],
    base_registry: Registry,
    base: Reference,
    image: ImageManifest,
    folder: pathlib.Path,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
    early: EarlyUpload | None = None,
) -> tuple[str, int]:
    """Push an image that has layers on top of a base.

    Args:
        registry: Where it goes.
        repository: Where in it.
        tag: Its name there.
        manifest: Of the image.
        config: Of the image.
        layers: What is new; a layer's file may be gone where the registry has it.
        threads: Ask the registry.
        brought: What `bring` gave.
        base_registry: Where the base lies; may be `registry`.
        base: The base.
        image: The base's manifest.
        folder: For layers of the base on their way from one registry to another.
        say: Takes a line for the user.
        progress: Takes bytes done and bytes in all, of the layer that is sent.
        early: The upload of the first of `layers`, which began when it was made.

    Returns:
        The manifest's digest, and the bytes of layers that the registry lacked.

    Raises:
        ImageError: A registry refuses.
    """

    def offer(layer: Layer) -> tuple[bool, int]:
        """Whether it is there now, and how many bytes had to be sent."""
        if registry.has_blob(repository, layer.digest):
            if early is not None and layer is layers[0]:
                early.cancel()
            return True, 0
        if layer.size > _SMALL_BYTES:
            return False, 0
        with layer.path.open("rb") as file:
            registry.upload(repository, file, layer.digest, look=False)
        return True, layer.size

    below = _by_digest(image)
    configured = threads.submit(registry.upload, repository, config, media.digest_of(config), look=False)
    offered = [threads.submit(offer, layer) for layer in layers]
    absent = [digest for digest, is_there in brought.items() if not is_there.result()]
    configured.result()
    sent = 0
    for digest in absent:
        _copy(registry, repository, base_registry, base, digest, below[digest], folder, say, progress)
        sent += below[digest]
    for layer, (is_there, size) in zip(layers, (one.result() for one in offered), strict=True):
        sent += size
        if not is_there:
            say(f"Pushing a layer of {layer.size / _MIB:.1f} MiB to {registry.host}/{repository}.")
            begun = early.take(progress) if early is not None and layer is layers[0] else None
            with layer.path.open("rb") as file:
                registry.upload(repository, file, layer.digest, progress=progress, look=False, begun=begun)
            sent += layer.size
    return registry.put_manifest(repository, tag, manifest, media.media_type(json.loads(manifest))), sent


def _by_digest(image: ImageManifest) -> dict[str, int]:
    """Sizes of the base's layers; some bases have the same layer twice."""
    return {layer["digest"]: layer["size"] for layer in image.manifest["layers"]}


def _copy(
    registry: Registry,
    repository: str,
    base_registry: Registry,
    base: Reference,
    digest: str,
    size: int,
    folder: pathlib.Path,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> None:
    """Bring one layer of the base from its registry."""
    say(f"Copying a layer of the base image ({size / _MIB:.1f} MiB) from {base_registry.host} to {registry.host}.")
    with tempfile.TemporaryFile(dir=folder) as file:
        for block in base_registry.blob(base.repository, digest):
            file.write(block)
        registry.upload(repository, file, digest, progress=progress, look=False)
