"""Layers that travel while they are packed: nothing is sent twice, and nothing half is left in the registry."""

import hashlib
import os
import time
import uuid

import bases
import pytest
from registries import Relay
from wheelhouse import Wheelhouse

from kale_dist.image.layer_builder import build
from kale_dist.image.reference import Reference
from kale_dist.image.registry import Registry
from kale_dist.recipe import Recipe

MIB = 1 << 20


def digest_of(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Growing:
    """A file that is written piece by piece."""

    def __init__(self, path, data):
        self._path = path
        self._data = data
        path.touch()

    def grow(self, upload, size):
        with self._path.open("ab") as file:
            file.write(self._data[file.tell() : size])
        upload.grown(self._path, size)

    def finish(self, registry, upload, repository):
        self.grow(upload, len(self._data))
        begun = upload.take(lambda _done, _total: None)
        with self._path.open("rb") as file:
            registry.upload(repository, file, digest_of(self._data), look=False, begun=begun)
        return begun


@pytest.fixture
def repository():
    return f"early/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def half(registry_folder, repository):
    """A function that gives the uploads that have begun in a repository, and neither ended nor been given up."""

    def half():
        folder = registry_folder / "own" / "data" / "docker" / "registry" / "v2" / "repositories" / repository
        # Of one that is given up the program leaves an empty folder.
        return list(folder.glob("_uploads/*/startedat"))

    return half


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_there_travels_before_the_rest_is_written(own_registry, repository, tmp_path, half):
    data, relay = os.urandom(9 * MIB), Relay(own_registry)
    file = Growing(tmp_path / "file", data)
    with relay.serving() as host, Registry(host) as registry:
        with registry.early_upload(repository) as upload:
            file.grow(upload, 3 * MIB)
            wait_for(lambda: relay.received > 3 * MIB)
            file.grow(upload, 5 * MIB)
            wait_for(lambda: relay.received > 5 * MIB)
            assert relay.received < 6 * MIB
            assert file.finish(registry, upload, repository).have == len(data)
        assert b"".join(registry.blob(repository, digest_of(data))) == data
    assert relay.received < len(data) + MIB
    assert half() == []


def test_a_large_one_goes_in_chunks(own_registry, repository, tmp_path, half):
    data = os.urandom(MIB) * 150
    file = Growing(tmp_path / "file", data)
    with Registry(own_registry) as registry:
        with registry.early_upload(repository) as upload:
            file.grow(upload, 70 * MIB)
            assert file.finish(registry, upload, repository).have == 128 * MIB
        assert b"".join(registry.blob(repository, digest_of(data))) == data
    assert half() == []


def test_what_is_cut_is_sent_by_the_ordinary_upload(own_registry, repository, tmp_path):
    data, relay = os.urandom(9 * MIB), Relay(own_registry)
    file = Growing(tmp_path / "file", data)
    with relay.serving() as host, Registry(host) as registry:
        with registry.early_upload(repository) as upload:
            file.grow(upload, 3 * MIB)
            wait_for(lambda: relay.received > 3 * MIB)
            relay.cut()
            file.finish(registry, upload, repository)
        assert b"".join(registry.blob(repository, digest_of(data))) == data


def test_a_registry_that_wants_lengths_gets_the_ordinary_upload(repository, tmp_path, scripted):
    data, kept = os.urandom(3 * MIB), []

    def answer(request):
        if request.command == "POST":
            return 202, {"Location": f"/v2/uploads/{len(kept)}"}, b""
        if request.command == "PATCH":
            length = request.headers.get("Content-Length")
            if length is None:
                return 411, {"Connection": "close"}, b""
            kept.append(request.rfile.read(int(length)))
            return 202, {"Location": "/v2/uploads/kept", "Range": f"0-{int(length) - 1}"}, b""
        return {"PUT": 201, "DELETE": 204}[request.command], {}, b""

    fake, host = scripted(answer)
    file = Growing(tmp_path / "file", data)
    with Registry(host) as registry, registry.early_upload(repository) as upload:
        assert file.finish(registry, upload, repository) is None
    assert kept == [data]
    assert [method for method, _, _ in fake.seen] == ["POST", "PATCH", "DELETE", "POST", "PATCH", "PUT"]


def test_one_that_nobody_takes_is_forgotten(own_registry, repository, tmp_path, half):
    relay = Relay(own_registry)
    file = Growing(tmp_path / "file", os.urandom(9 * MIB))
    with relay.serving() as host, Registry(host) as registry, registry.early_upload(repository) as upload:
        file.grow(upload, 3 * MIB)
        wait_for(lambda: relay.received > 3 * MIB)
        assert len(half()) == 1
    assert half() == []


# -- whole images ----------------------------------------------------------------------------------------------------


@pytest.fixture
def make(own_registry, repository, tmp_path, monkeypatch):
    """A function that makes an image with a package of 3 MiB; gives what was built, and the bytes that were sent."""
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
    (tmp_path / "house").mkdir()
    house = Wheelhouse(tmp_path / "house")
    house.wheel("kdlarge", files={"kdlarge/__init__.py": "", "kdlarge/data.txt": os.urandom(3 * MIB).hex()})
    with house.serving() as url:

        def make(cache="cache", say=lambda _line: None, **recipe):
            relay = Relay(own_registry)
            with relay.serving() as host, Registry(host) as registry:
                bases.push(registry, f"{repository}/base", "1", bases.plain())
                before = relay.received
                built = build(
                    Recipe(packages=("kdlarge",), index_urls=(url,), **recipe),
                    registry=registry, repository=repository, tag="kd-1",
                    base=Reference.parse(f"{host}/{repository}/base:1"), base_registry=registry,
                    blobs_dir=tmp_path / "blobs", cache_dir=tmp_path / cache, labels={}, say=say,
                )  # fmt: skip
                return built, relay.received - before

        yield make


def test_a_layer_that_is_packed_is_sent_once_and_again_never(make, half):
    built, sent = make()
    assert built.sent == built.size > 3 * MIB
    assert built.size < sent < built.size + MIB // 4
    for again in (make(), make(rebuild=True)):
        assert (again[0].digest, again[0].sent) == (built.digest, 0)
        assert again[1] < MIB // 4
    assert half() == []


def test_a_layer_that_turns_out_to_be_there_is_given_up(make, half):
    """Another machine has made it: here its digest is known only when it is packed."""
    built, _ = make()
    again, sent = make(cache="another")
    assert (again.digest, again.sent) == (built.digest, 0)
    assert sent < built.size + MIB // 4
    assert half() == []


def test_an_interrupted_build_leaves_no_half_upload(make, half):
    def interrupt(line):
        if line.startswith("Pushing a layer"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(say=interrupt)
    assert half() == []
    assert make()[0].sent > 3 * MIB
