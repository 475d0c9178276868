"""Small bases for tests, shaped as real ones are: files and links as tars, pushed to a registry as images."""

import gzip
import hashlib
import io
import json
import tarfile

from kale_dist.image import media

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


ZSTD = b"\x28\xb5\x2f\xfd"
SITE = "/usr/local/lib/python3.11/site-packages"


def link(target):
    return ("link", target)


def make_tar(files):
    """A tar of path to text, bytes, a link, or None for a directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            if content is None:
                entry.type = tarfile.DIRTYPE
                archive.addfile(entry)
            elif isinstance(content, tuple):
                entry.type = {"link": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE}[content[0]]
                entry.linkname = content[1]
                archive.addfile(entry)
            else:
                data = content.encode() if isinstance(content, str) else content
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def digest_of(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def push(registry, repository, tag, layers, *, docker=False, pack=None, **settings):
    """Push an image of these layers; `settings` replace fields of the configuration's `config`, or `architecture`."""
    config = json.loads(json.dumps(CONFIG))
    config["architecture"] = settings.pop("architecture", "amd64")
    config["config"] |= settings
    tars = [layer if isinstance(layer, bytes) else make_tar(layer) for layer in layers]
    config["rootfs"] = {"type": "layers", "diff_ids": [digest_of(tar) for tar in tars]}
    body = json.dumps(config).encode()
    # Without a time in it: the same layer is the same blob.
    pack = pack or (lambda tar: gzip.compress(tar, mtime=0))
    blobs = [pack(tar) for tar in tars]
    for blob in (*blobs, body):
        registry.upload(repository, blob, digest_of(blob))
    kind, config_kind, layer_kind = (
        (media.DOCKER_MANIFEST, media.DOCKER_CONFIG, media.DOCKER_LAYER)
        if docker
        else (media.OCI_MANIFEST, media.OCI_CONFIG, media.OCI_LAYER)
    )
    manifest = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": {"mediaType": config_kind, "size": len(body), "digest": digest_of(body)},
        "layers": [{"mediaType": layer_kind, "size": len(blob), "digest": digest_of(blob)} for blob in blobs],
    }
    return registry.put_manifest(repository, tag, json.dumps(manifest).encode(), kind)


def package(site, name, version, *, requires=(), files=None):
    """Files of an installed package in a site directory, with a record."""
    files = {f"{name.replace('-', '_')}/__init__.py": f"version = {version!r}\n"} if files is None else files
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata = (
        "\n".join([*headers, *(f"Requires-Dist: {one}" for one in requires)]) + "\n\nA long description.\nName: no\n"
    )
    record = "".join(f"{path},sha256=x,1\n" for path in (*files, f"{folder}/METADATA", f"{folder}/RECORD"))
    texts = {**files, f"{folder}/METADATA": metadata, f"{folder}/RECORD": record}
    return {f"{site}/{path}": text for path, text in texts.items()}


GLIBC = b"\x7fELF GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\nCopyright"
SYSTEM = {
    "bin": link("usr/bin"),
    "lib": link("usr/lib"),
    "usr/lib/x86_64-linux-gnu/libc.so.6": GLIBC,
    "usr/bin/sh": "sh",
}
TORCH = {"requires": ["numpy>=1.20", 'nvidia-cublas-cu12; platform_system == "Linux"', 'opt; extra == "more"']}


def plain(site="usr/local/lib/python3.11/site-packages", torch="2.6.0"):
    """As `python:3.11-slim`: Python built from source, in /usr/local."""
    home = site.split("/lib/python")[0]
    return [
        SYSTEM,
        {
            f"{home}/bin/python3": link("python3.11"),
            f"{home}/bin/python3.11": b"\x7fELF",
            f"{home}/lib/python3.11/os.py": "",
            f"{home}/include/python3.11/patchlevel.h": '#define PY_VERSION      "3.11.9"\n',
        },
        {**package(site, "torch", torch, **TORCH), **package(site, "numpy", "1.26.4")},
    ]


def debian():
    """Debian's own Python; pip writes to /usr/local, Debian's packages lie in /usr."""
    site = "usr/local/lib/python3.11/dist-packages"
    return [
        {
            **SYSTEM,
            "usr/bin/python3": link("python3.11"),
            "usr/bin/python3.11": b"\x7fELF",
            "usr/lib/python3.11/os.py": "",
            "usr/lib/python3/dist-packages": None,
            **package("usr/lib/python3/dist-packages", "six", "1.16.0", files={"six.py": ""}),
            "usr/lib/python3/dist-packages/old-1.0.egg-info": "Metadata-Version: 1.1\nName: old\nVersion: 1.0\n",
            "var/lib/dpkg/status": "Package: bash\nVersion: 5.2\n\nPackage: python3.11\nStatus: ok\nVersion: 3.11.2-6\n",
        },
        {**package(site, "torch", "2.6.0", **TORCH), **package(site, "numpy", "1.26.4")},
    ]


def venv():
    """A virtual environment first on the PATH, over a plain Python."""
    site = "opt/venv/lib/python3.11/site-packages"
    return [
        *plain()[:2],
        {
            "opt/venv/bin/python3": link("/usr/local/bin/python3.11"),
            "opt/venv/pyvenv.cfg": "home = /usr/local/bin\ninclude-system-site-packages = false\nversion = 3.11.9\n",
            "opt/venv/lib64": link("lib"),
            **package(site, "torch", "2.6.0", **TORCH),
            **package(site, "numpy", "1.26.4"),
        },
    ]


def conda():
    """Miniconda's: its Python says its version in conda's own records."""
    site = "opt/conda/lib/python3.11/site-packages"
    return [
        SYSTEM,
        {
            "opt/conda/bin/python": link("python3.11"),
            "opt/conda/bin/python3": link("python3.11"),
            "opt/conda/bin/python3.11": b"\x7fELF",
            "opt/conda/lib/python3.1": link("python3.11"),
            "opt/conda/lib/python3.11/os.py": "",
            "opt/conda/conda-meta/python-3.11.7-h955ad1f_0.json": "{}",
            **package(site, "numpy", "1.26.4"),
            f"{site}/torch/version.py": "__all__ = ['x']\n__version__ = '2.6.0'\n",
        },
    ]


SHAPES = {
    "plain": (plain, {}),
    "debian": (debian, {}),
    "venv": (venv, {"Env": ["PATH=/opt/venv/bin:/usr/local/bin:/usr/bin"]}),
    "conda": (conda, {"Env": ["PATH=/opt/conda/bin:/usr/bin"]}),
}


def read_layer(registry, repository, image, number=-1):
    """Path to bytes of one layer of an image."""
    blob = b"".join(registry.blob(repository, image.manifest["layers"][number]["digest"]))
    found = {}
    if blob.startswith(ZSTD):
        import zstandard

        blob = zstandard.ZstdDecompressor().decompressobj().decompress(blob)
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        for member in archive:
            found["/" + member.name] = archive.extractfile(member).read()
    return found
