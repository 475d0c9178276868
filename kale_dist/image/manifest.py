"""Manifests of images, and how layers are put on top of an image. Pure.

An image keeps the family of media types that it came with, Docker's or OCI's: some runtimes and registries know one only.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist.errors import ImageError
from kale_dist.image.layer import Layer

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"

INDEXES = (OCI_INDEX, DOCKER_INDEX)
MANIFESTS = (OCI_MANIFEST, DOCKER_MANIFEST)
CONFIGS = (OCI_CONFIG, DOCKER_CONFIG)

_VARIANTS = {"arm64": "v8"}
"""The variant of an architecture where an index names none."""


def media_type(manifest: Mapping[str, Any]) -> str:
    """A manifest's media type, as it declares it or else as its fields show it; empty if it is not an image."""
    media_type = manifest.get("mediaType")
    if isinstance(media_type, str) and media_type:
        return media_type
    if isinstance(manifest.get("manifests"), list):
        return OCI_INDEX
    return OCI_MANIFEST if isinstance(manifest.get("config"), dict) else ""


def choose(index: Mapping[str, Any], platform: str, what: str) -> Mapping[str, Any]:
    """The entry of an index for a platform.

    Args:
        index: The index.
        platform: `os/architecture` or `os/architecture/variant`.
        what: The image's name, for the message.

    Raises:
        ImageError: There is none; the message lists the platforms in the index.
    """
    wanted, there = (*platform.split("/"), "", "")[:3], []
    entries = index.get("manifests")
    for entry in entries if isinstance(entries, list) else ():
        found = entry.get("platform") if isinstance(entry, dict) else None
        if not isinstance(found, dict):
            continue
        name = tuple(str(found.get(key, "")) for key in ("os", "architecture", "variant"))
        # Attestations lie in an index as images for the platform unknown/unknown.
        if name[0] in ("", "unknown"):
            continue
        there.append("/".join(part for part in name if part))
        if name[:2] == wanted[:2] and (not wanted[2] or wanted[2] == (name[2] or _VARIANTS.get(name[1], ""))):
            return dict(entry)
    known = ", ".join(there) or "none"
    raise ImageError(f"{what} has no image for {platform}, only for: {known}. Choose one of these, or another image.")


def digest_of(data: bytes) -> str:
    """The name of these bytes in a registry: `sha256:...`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def variables(settings: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that an image's settings have."""
    return dict(line.partition("=")[::2] for line in settings.get("Env") or ())


def put_on_top(
    manifest: Mapping[str, Any],
    config: Mapping[str, Any],
    layers: Sequence[Layer],
    *,
    history: str,
    environment: Mapping[str, str],
    labels: Mapping[str, str],
) -> tuple[bytes, bytes]:
    """Add layers to an image. The same arguments give the same bytes.

    Args:
        manifest: The base's manifest; its layers stay unchanged, before the new ones.
        config: The base's configuration; its user, entry point, command and working folder stay.
        layers: The new layers, lowest first.
        history: One line that names what made the layers.
        environment: Variables to set; one that the base has already is replaced.
        labels: Labels to set; one that the base has already is replaced.

    Returns:
        The bytes of the new manifest, and of the configuration that it names.

    Raises:
        ImageError: The base is not an image.
    """
    if media_type(manifest) not in MANIFESTS or not isinstance(config.get("rootfs"), dict):
        raise ImageError(
            f"A layer cannot be put on something that is not an image: it says that it is {media_type(manifest)!r}."
        )
    docker = media_type(manifest) == DOCKER_MANIFEST
    made = copy.deepcopy(dict(config))
    made["rootfs"]["diff_ids"] = [*(made["rootfs"].get("diff_ids") or ()), *(layer.diff_id for layer in layers)]
    # The base's own date: a clock would give every build another digest.
    entry = {key: value for key, value in (("created", made.get("created")), ("created_by", history)) if value}
    made["history"] = [*(made.get("history") or ()), *(entry for _ in layers)]
    settings = made["config"] = dict(made.get("config") or {})
    if environment:
        settings["Env"] = [f"{name}={value}" for name, value in {**variables(settings), **environment}.items()]
    settings["Labels"] = {**(settings.get("Labels") or {}), **dict(sorted(labels.items()))}
    config_bytes = _encode(made)
    whole = copy.deepcopy(dict(manifest))
    # It would tie the new image to what the base was attached to.
    whole.pop("subject", None)
    whole["mediaType"] = DOCKER_MANIFEST if docker else OCI_MANIFEST
    kind = DOCKER_CONFIG if docker else OCI_CONFIG
    whole["config"] = {"mediaType": kind, "size": len(config_bytes), "digest": digest_of(config_bytes)}
    kind = DOCKER_LAYER if docker else OCI_LAYER
    whole["layers"] = [
        *(whole.get("layers") or ()),
        *({"mediaType": kind, "size": one.size, "digest": one.digest} for one in layers),
    ]
    return _encode(whole), config_bytes


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
