"""Bases for tests: small images in a registry, and what they answer when they are asked what they have."""

import dataclasses
import gzip
import hashlib
import io
import json
import sys
import tarfile

from kale_dist.image import manifest as manifests
from kale_dist.image.base_image import Distribution, ImageFacts

CONFIG = {
    "os": "linux",
    "architecture": "amd64",
    "created": "2026-01-02T03:04:05Z",
    "config": {
        "User": "1000",
        "WorkingDir": "/home/me",
        "Entrypoint": ["tini", "--"],
        "Cmd": ["python3"],
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"],
        "Labels": {"maintainer": "me"},
    },
}
SITE = "/usr/local/lib/python3.11/site-packages"


def installed(name, version, *requires):
    return Distribution(name=name, version=version, requires=requires)


FACTS = ImageFacts(
    python="3.11.9",
    executable="/usr/local/bin/python3",
    site=SITE,
    machine="x86_64",
    libc="glibc 2.28",
    links=(("/bin", "/usr/bin"),),
    distributions=(
        installed("numpy", "1.26.4"),
        installed("scipy", "1.11.0", "numpy>=1.20,<2"),
        installed("torch", "2.6.0+cpu", "kdnvidia>=1", "numpy>=1.20", 'kdextra; extra == "more"'),
    ),
)

LIKE_THIS = dataclasses.replace(FACTS, python=".".join(map(str, sys.version_info[:3])))
"""The same with the Python that runs the tests."""


def answer(facts=FACTS):
    """What a container of such an image writes when it is asked."""
    return f"a warning of its Python\n\nKALE-DIST-BASE {json.dumps(dataclasses.asdict(facts))}\n".encode()


def digest_of(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def make_tar(files):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    return out.getvalue()


def push(registry, repository, tag, *, files=None, architecture="amd64", docker=False, **settings):
    """Push an image of one layer; `settings` replace fields of the configuration's `config`."""
    config = json.loads(json.dumps(CONFIG))
    config["architecture"] = architecture
    config["config"] |= settings
    tar = make_tar(files or {"etc/base": b"base"})
    config["rootfs"] = {"type": "layers", "diff_ids": [digest_of(tar)]}
    body, blob = json.dumps(config).encode(), gzip.compress(tar, mtime=0)
    for data in (blob, body):
        registry.upload(repository, data)
    kind, config_kind, layer_kind = (
        (manifests.DOCKER_MANIFEST, manifests.DOCKER_CONFIG, manifests.DOCKER_LAYER)
        if docker
        else (manifests.OCI_MANIFEST, manifests.OCI_CONFIG, manifests.OCI_LAYER)
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": {"mediaType": config_kind, "size": len(body), "digest": digest_of(body)},
        "layers": [{"mediaType": layer_kind, "size": len(blob), "digest": digest_of(blob)}],
    }
    return registry.put_manifest(repository, tag, json.dumps(manifest).encode(), kind)


def read_layer(registry, repository, image, number=-1):
    """Path to bytes of one layer's files."""
    blob = b"".join(registry.blob(repository, image.manifest["layers"][number]["digest"]))
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        return {f"/{member.name}": archive.extractfile(member).read() for member in archive if member.isfile()}
