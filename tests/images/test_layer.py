import gzip
import hashlib
import io
import os
import random
import subprocess
import tarfile

import pytest

from kale_dist.errors import ImageError
from kale_dist.image.layer import in_order, packed
from kale_dist.image.tar import TarEntry, tar


def pack(entries):
    """A layer's bytes, and the digest of the tar in it."""
    hasher = hashlib.sha256()
    return b"".join(packed(tar(in_order(entries)), hasher)), hasher.hexdigest()


@pytest.fixture
def entries(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"#!/bin/sh\n")
    program.chmod(0o4777)
    return [
        TarEntry(path="/usr/local/bin/program", content=program, mode=0o755),
        TarEntry(path="/opt/folder", content=None, mode=0o755),
        TarEntry(path="/opt/data", content=b"data"),
        TarEntry(path="/opt/\N{SNOWMAN} " + "long" * 60, content=b""),
    ]


def test_the_same_entries_give_the_same_bytes_whatever_their_order_time_and_owner(entries):
    first, plain = pack(entries)
    os.utime(entries[0].content, (1, 1))
    entries[0].content.chmod(0o600)
    assert pack(reversed(entries)) == (first, plain)
    assert plain == hashlib.sha256(gzip.decompress(first)).hexdigest()


def test_all_belongs_to_root_can_be_read_and_has_no_time(entries):
    with tarfile.open(fileobj=io.BytesIO(pack(entries)[0])) as archive:
        members = archive.getmembers()
        assert archive.extractfile("usr/local/bin/program").read() == b"#!/bin/sh\n"
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert all(member.uid == member.gid == member.mtime == 0 for member in members)
    modes = {member.name: member.mode for member in members}
    assert modes["usr/local/bin/program"] == 0o755
    assert modes["opt/data"] == 0o644
    assert modes["opt/folder"] == 0o755


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a//b", "/a/", "/", "", "/a\0b", "//etc/x"])
def test_a_path_that_would_be_unpacked_elsewhere_is_refused(path):
    with pytest.raises(ImageError, match="absolute path"):
        in_order([TarEntry(path=path, content=b"")])


MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, MIB - 1024, MIB - 512, MIB, 9 * MIB + 1])
@pytest.mark.parametrize(("unit", "most"), [("noise", 1.001), ("text", 0.1), ("both", 0.6)])
def test_what_does_not_compress_is_stored_and_what_does_is_packed_in_a_stream_that_gzip_reads(
    tmp_path, unit, size, most
):
    noise, text = (
        random.Random(1).randbytes(size),
        (b"def function(argument):\n    return argument\n" * (size // 9))[:size],
    )
    content = {"noise": noise, "text": text, "both": noise[: size // 2] + text[size // 2 :]}[unit]
    path = tmp_path / "content"
    path.write_bytes(content)
    layer, name = pack([TarEntry(path="/opt/content", content=path)])
    assert len(layer) < most * size + 2048
    plain = subprocess.run(["gzip", "--decompress", "--stdout"], input=layer, capture_output=True, check=True).stdout
    assert name == hashlib.sha256(plain).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        assert archive.extractfile("opt/content").read() == content


def test_a_path_that_is_there_twice_is_refused_by_name():
    with pytest.raises(ImageError, match="/opt/x would be"):
        in_order([TarEntry(path="/opt/x", content=b"1"), TarEntry(path="/opt/x", content=b"2")])
