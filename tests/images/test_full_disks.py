"""A disk that is really full: a small one is mounted, on which an image does not get ready."""

import os
import subprocess
import uuid

import bases
import pytest
from wheelhouse import Wheelhouse

from kale_dist.errors import ImageError
from kale_dist.image.layer_builder import build
from kale_dist.image.reference import Reference
from kale_dist.image.registry import Registry
from kale_dist.recipe import Recipe

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """A function that gives a disk its size in MiB, and the folder where it is mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this user cannot mount a disk: {mounted.stderr.decode().strip()}")

    def resize(mib):
        subprocess.run(["mount", "-o", f"remount,size={mib}m", folder], check=True)

    yield folder, resize
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def make(own_registry, disk, tmp_path, monkeypatch):
    """A function that makes an image with a package of 4 MiB that does not compress; caches lie on the small disk."""
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    (tmp_path / "house").mkdir()
    house, name = Wheelhouse(tmp_path / "house"), f"full/{uuid.uuid4().hex[:8]}"
    house.wheel("kdlarge", files={"kdlarge/__init__.py": "", "kdlarge/data.txt": os.urandom(2 * MIB).hex()})
    with house.serving() as url, Registry(own_registry) as registry:
        bases.push(registry, f"{name}/base", "1", bases.plain())

        def make():
            return build(
                Recipe(packages=("kdlarge",), index_urls=(url,)),
                registry=registry, repository=f"{name}/made", tag="kd-1",
                base=Reference.parse(f"{own_registry}/{name}/base:1"), base_registry=registry, blobs_dir=tmp_path / "blobs",
                cache_dir=disk[0] / "cache", labels={}, say=lambda _: None,
            )  # fmt: skip

        yield make


@pytest.mark.parametrize(
    ("mib", "words"),
    [
        (3, r"The disk is full: pip could not keep the packages for the image"),
        (6, r"kdlarge-1\.0-py3-none-any\.whl could not be unpacked to /.*/disk/cache/.*: No space left on device"),
        (9, r"The layer for the image could not be written to /.*/disk/cache/.*: No space left on device"),
    ],
    ids=["wheel", "unpacked", "layer"],
)
def test_a_full_disk_is_told_and_room_is_enough_to_go_on(make, disk, mib, words):
    folder, resize = disk
    resize(mib)
    with pytest.raises(ImageError, match=rf"{words}.* Make room .*XDG_CACHE_HOME"):
        make()
    assert not list((folder / "cache").glob("building-*"))
    resize(64)
    assert make().size > 2 * MIB
