import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from registries import PASSWORD, USER, CuttingProxy, TokenServer, make_certificate, registry_program

from kale_dist.errors import ImageError
from kale_dist.image import for_job
from kale_dist.image import manifest as manifests
from kale_dist.image.auth import Credentials
from kale_dist.image.layer import Layer
from kale_dist.image.registry import Registry

ADA = Credentials(username=USER, password=PASSWORD)
NO_DIGEST = f"sha256:{'0' * 64}"


def digest_of(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def push(registry, repository, tag="1", *, docker=False, platform=("linux", "amd64"), layer=b"layer"):
    """A small image; gives the digest of its manifest."""
    config = {"os": platform[0], "architecture": platform[1], "config": {"Env": ["A=1"], "User": "me"}}
    config |= {"rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]}, "history": [{"created_by": "base"}]}
    body = json.dumps(config).encode()
    for blob in (layer, body):
        assert registry.upload(repository, blob) == (digest_of(blob), len(blob))
    kinds = (
        ("DOCKER_MANIFEST", "DOCKER_CONFIG", "DOCKER_LAYER") if docker else ("OCI_MANIFEST", "OCI_CONFIG", "OCI_LAYER")
    )
    kind, config_kind, layer_kind = (getattr(manifests, name) for name in kinds)
    manifest = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": {"mediaType": config_kind, "size": len(body), "digest": digest_of(body)},
        "layers": [{"mediaType": layer_kind, "size": len(layer), "digest": digest_of(layer)}],
    }
    return registry.put_manifest(repository, tag, json.dumps(manifest).encode(), kind)


def push_index(registry, repository, tag, images):
    entries = [
        {
            "mediaType": manifests.OCI_MANIFEST,
            "size": 1,
            "digest": digest,
            "platform": platform,
        }
        for digest, platform in images
    ]
    body = {"schemaVersion": 2, "mediaType": manifests.OCI_INDEX, "manifests": entries}
    return registry.put_manifest(repository, tag, json.dumps(body).encode(), manifests.OCI_INDEX)


def test_the_registry_beside_the_cluster_has_an_image_that_can_be_read(registry_host):
    with Registry(registry_host) as registry:
        image = registry.image("kale-dist/torch-cpu", "2.13.0")
        assert registry.head("kale-dist/torch-cpu", "2.13.0") == image.digest
        assert registry.head("kale-dist/torch-cpu", image.digest) == image.digest
        assert len(image.manifest["layers"]) == len(image.config["rootfs"]["diff_ids"])


def test_the_variables_of_an_image_are_read_without_a_pull_or_are_none(own_registry):
    with Registry(own_registry) as registry:
        push(registry, "team/variables")
    assert for_job.variables_of(f"{own_registry}/team/variables:1") == {"A": "1"}
    assert for_job.variables_of(f"{own_registry}/no/such:1") == {}
    assert for_job.variables_of("not a name") == {}


def test_what_is_not_there_is_none_or_an_error_that_names_it(own_registry):
    with Registry(own_registry) as registry:
        assert registry.head("no/such", "1") == ""
        assert not registry.has_blob("no/such", NO_DIGEST)
        with pytest.raises(ImageError, match=r"no/such:1: 404 MANIFEST_UNKNOWN"):
            registry.image("no/such", "1")
        with pytest.raises(ImageError, match="404 BLOB_UNKNOWN"):
            list(registry.blob("no/such", NO_DIGEST))


@pytest.mark.parametrize("size", [0, 1, 5, (1 << 20) + 1, 3 << 20])
def test_a_blob_comes_back_as_it_was_put_there(own_registry, size):
    data = os.urandom(size)
    with Registry(own_registry) as registry:
        for blob in (data, lambda: [data[:1], data[1:]]):
            assert registry.upload("blobs", blob) == (digest_of(data), size)
            assert b"".join(registry.blob("blobs", digest_of(data))) == data


def test_a_blob_goes_to_other_repositories_by_name(own_registry):
    data = os.urandom(2 << 20)
    with Registry(own_registry) as registry:
        registry.upload("first", data)
        assert registry.mount("second/one", digest_of(data), "first")
        assert registry.has_blob("second/one", digest_of(data))
        assert not registry.mount("second/one", NO_DIGEST, "first")


def blocks_of(data):
    return lambda: (data[start : start + (1 << 20)] for start in range(0, len(data), 1 << 20))


def test_an_upload_that_was_cut_begins_again(own_registry):
    data = os.urandom(6 << 20)
    proxy = CuttingProxy(own_registry, cut=(1,), whole=False)
    with proxy.serving() as host, Registry(host) as registry:
        assert registry.upload("cut/part", blocks_of(data)) == (digest_of(data), len(data))
        assert b"".join(registry.blob("cut/part", digest_of(data))) == data
    assert proxy.received == len(data) + (1 << 20)


def test_an_upload_that_is_cut_each_time_ends_with_an_error_that_allows_another_try(own_registry):
    data = os.urandom(2 << 20)
    proxy = CuttingProxy(own_registry, cut=range(1, 100), whole=True)
    with proxy.serving() as host, Registry(host) as registry:
        with pytest.raises(ImageError, match=r"cut/always.*the connection to localhost:[0-9]+ ended") as caught:
            registry.upload("cut/always", blocks_of(data))
        assert caught.value.retryable
        proxy.cut.clear()
        registry.upload("cut/always", blocks_of(data))


def test_a_name_and_password_are_enough_and_wrong_ones_are_told_from_none(password_registry):
    with Registry(password_registry, credentials=ADA) as registry:
        digest = push(registry, "private/one")
        assert registry.image("private/one", "1").digest == digest
    with Registry(password_registry) as registry, pytest.raises(ImageError, match=r"401.*docker login localhost:"):
        registry.head("private/one", "1")
    wrong = Credentials(username=USER, password="not-it-at-all")
    with Registry(password_registry, credentials=wrong) as registry, pytest.raises(ImageError, match="401") as caught:
        registry.head("private/one", "1")
    assert "not-it-at-all" not in str(caught.value)


def test_tokens_are_got_once_for_each_access_and_a_mount_asks_for_both_repositories(token_registry):
    host, server = token_registry
    server.asked.clear()
    with Registry(host, credentials=ADA) as registry:
        push(registry, "team/one")
        registry.image("team/one", "1")
        assert registry.mount("team/two", digest_of(b"layer"), "team/one")
    asked = [tuple(scopes) for scopes in server.asked]
    assert len(asked) == len(set(asked)) == 3
    assert ("repository:team/two:pull,push", "repository:team/one:pull") in asked


def test_without_or_with_wrong_credentials_the_token_server_is_named(token_registry):
    host, _ = token_registry
    with Registry(host) as registry, pytest.raises(ImageError, match=r"refuses anonymous use \(401\).*docker login"):
        registry.head("team/one", "1")
    with (
        Registry(host, credentials=Credentials(username=USER, password="wrong")) as registry,
        pytest.raises(ImageError, match="refuses the credentials"),
    ):
        registry.head("team/one", "1")


def test_a_registry_with_its_own_authority_is_trusted_where_it_is_named(tls_registry, tmp_path, monkeypatch):
    host, ca_file = tls_registry
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with (
        Registry(host, credentials=ADA, insecure=False) as registry,
        pytest.raises(ImageError, match=r"not trusted.*certs\.d"),
    ):
        registry.head("secure", "1")
    folder = tmp_path / "docker" / "certs.d" / host
    folder.mkdir(parents=True)
    (folder / "ca.crt").symlink_to(ca_file)
    with Registry(host, credentials=ADA, insecure=False) as registry:
        digest = push(registry, "secure")
    (folder / "ca.crt").unlink()
    monkeypatch.setenv("SSL_CERT_FILE", ca_file)
    with Registry(host, credentials=ADA, insecure=False) as registry:
        assert registry.head("secure", "1") == digest


def test_tls_where_there_is_none_and_none_where_there_is_are_told(own_registry, tls_registry):
    with (
        Registry(own_registry, insecure=False) as registry,
        pytest.raises(ImageError, match=r"does not speak TLS.*http://"),
    ):
        registry.head("x", "1")
    with (
        Registry(tls_registry[0], insecure=True) as registry,
        pytest.raises(ImageError, match="HTTP request to an HTTPS server"),
    ):
        registry.image("x", "1")


def test_a_damaged_certificate_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "docker" / "certs.d" / "registry.test"
    folder.mkdir(parents=True)
    (folder / "ca.crt").write_text("not a certificate")
    with pytest.raises(ImageError, match=r"ca\.crt for registry.test .*cannot be used"):
        Registry("registry.test")


def test_a_client_certificate_without_its_key_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "docker" / "certs.d" / "registry.test"
    folder.mkdir(parents=True)
    (folder / "client.cert").write_text("")
    with pytest.raises(ImageError, match=r"client\.cert for registry.test \(with its key beside it"):
        Registry("registry.test")


def test_of_an_index_the_right_platform_is_taken_and_a_missing_one_names_those_there_are(own_registry):
    with Registry(own_registry) as registry:
        amd = push(registry, "many", "amd")
        arm = push(registry, "many", "arm", platform=("linux", "arm64"), layer=b"arm layer")
        unknown = {"os": "unknown", "architecture": "unknown"}
        platforms = [
            (amd, unknown),
            (arm, {"os": "linux", "architecture": "arm64", "variant": "v8"}),
            (amd, {"os": "linux", "architecture": "amd64"}),
        ]
        index = push_index(registry, "many", "all", platforms)
        assert registry.head("many", "all") == index
        assert registry.image("many", "all").digest == amd
        assert registry.image("many", "all", "linux/arm64").digest == arm
        assert registry.image("many", index, "linux/arm64/v8").digest == arm
        with pytest.raises(ImageError, match=r"no image for linux/s390x, only for: linux/arm64/v8, linux/amd64\."):
            registry.image("many", "all", "linux/s390x")
        with pytest.raises(ImageError, match="many:arm is for linux/arm64, not for linux/amd64"):
            registry.image("many", "arm")


@pytest.mark.parametrize("docker", [False, True], ids=["oci", "docker"])
def test_a_layer_on_top_keeps_the_kind_of_the_base_and_its_settings(own_registry, docker):
    layer = Layer(digest=digest_of(b"top"), size=3, diff_id=digest_of(b"top tar"))
    with Registry(own_registry) as registry:
        push(registry, "append", docker=docker)
        base = registry.image("append", "1")
        told = {"environment": {"A": "2", "B": "x=y"}, "labels": {"k": "v"}}
        made = [manifests.put_on_top(base.manifest, base.config, [layer], history="uv", **told) for _ in range(2)]
        assert made[0] == made[1]
        manifest, config = made[0]
        registry.upload("append", b"top")
        registry.upload("append", config)
        registry.put_manifest("append", "2", manifest, manifests.media_type(base.manifest))
        whole = registry.image("append", "2")
    assert manifests.media_type(whole.manifest) == manifests.media_type(base.manifest)
    assert [entry["digest"] for entry in whole.manifest["layers"]] == [digest_of(b"layer"), layer.digest]
    kinds = [entry["mediaType"] for entry in (*whole.manifest["layers"], whole.manifest["config"])]
    assert {"docker" in kind for kind in kinds} == {docker}
    assert whole.config["rootfs"]["diff_ids"] == [digest_of(b"layer"), layer.diff_id]
    assert whole.config["config"] == {"Env": ["A=2", "B=x=y"], "User": "me", "Labels": {"k": "v"}}
    assert [entry["created_by"] for entry in whole.config["history"]] == ["base", "uv"]


@pytest.mark.parametrize("digest", ["", "sha256:0", "md5:" + "0" * 32, f"{NO_DIGEST}/../x", NO_DIGEST.upper()])
def test_digests_that_are_none_are_refused_before_anything_is_sent(digest):
    with Registry("localhost:1") as registry:
        for call in (registry.has_blob, lambda *names: list(registry.blob(*names))):
            with pytest.raises(ImageError, match="is no digest"):
                call("a", digest)


def test_a_registry_that_is_down_is_named_and_may_be_tried_again():
    with (
        Registry("localhost:1") as registry,
        pytest.raises(ImageError, match="localhost:1 cannot be reached") as caught,
    ):
        registry.head("a", "1")
    assert caught.value.retryable
    with (
        Registry("no-such-host.invalid") as registry,
        pytest.raises(ImageError, match=r"no-such-host\.invalid cannot be reached"),
    ):
        registry.head("a", "1")


def test_credentials_are_not_sent_to_a_token_server_without_encryption(registry_folder, monkeypatch):
    server = TokenServer(registry_folder / "plain-tokens")
    make_certificate(registry_folder / "tls-token")
    monkeypatch.setenv("SSL_CERT_FILE", str(registry_folder / "tls-token" / "ca.crt"))
    with (
        server.serving(),
        registry_program(registry_folder / "tls-token", auth=server.settings(), tls=True) as host,
        Registry(host, credentials=ADA, insecure=False) as registry,
        pytest.raises(ImageError, match=r"gave none \(status 404\)"),
    ):
        registry.head("a", "1")
    assert server.asked == []


def test_threads_share_a_registry(token_registry):
    host, _ = token_registry
    with Registry(host, credentials=ADA) as registry, ThreadPoolExecutor(4) as pool:
        blobs = [os.urandom(2 << 20) for _ in range(8)]
        list(pool.map(lambda data: registry.upload("threads/a", blocks_of(data)), blobs))
        found = list(pool.map(lambda data: b"".join(registry.blob("threads/a", digest_of(data))), blobs))
    assert found == blobs
