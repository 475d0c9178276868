"""What a real registry cannot be made to do: be busy, lie, send elsewhere, lose an answer."""

import hashlib
import json
import pickle
import re

import pytest

from kale_dist.errors import ImageError
from kale_dist.image import manifest as manifests
from kale_dist.image.auth import Credentials
from kale_dist.image.registry import Registry

DATA = bytes(range(256)) * 8192
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
HEAD = {"Docker-Content-Digest": DIGEST, "Content-Type": manifests.OCI_MANIFEST, "Content-Length": "7"}
ADA = Credentials(username="ada", password="correct-horse")


def in_turn(*answers):
    """One answer after another; the last for all that follow."""
    left = list(answers)
    return lambda _request: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_registry_is_waited_for(scripted, status):
    fake, host = scripted(in_turn((status, {"Retry-After": "0"}, b""), (status, {}, b""), (200, HEAD, b"")))
    with Registry(host) as registry:
        assert registry.head("a", "1") == DIGEST
    assert len(fake.seen) == 3


def test_a_registry_that_wants_a_long_wait_is_not_waited_for(scripted):
    body = json.dumps(
        {"errors": [{"code": "TOOMANYREQUESTS", "message": "You have reached\x1b[31m your limit\n"}]}
    ).encode()
    fake, host = scripted(in_turn((429, {"Retry-After": "3600"}, body)))
    with Registry(host) as registry, pytest.raises(ImageError) as caught:
        registry.manifest("a", "1")
    assert re.search(r"busy \(429\) and asks to wait 3600 s\. Wait, log in", str(caught.value))
    assert caught.value.retryable
    assert len(fake.seen) == 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "pattern"),
    [
        (
            403,
            b'{"errors": [{"code": "DENIED", "message": "not yours"}]}',
            "403 DENIED not yours.*do not allow it.*docker login",
        ),
        (500, b"<html>panic</html>", r"refused to read the manifest of a:1: 500\. Try again later"),
        (500, b"\xff\xfe" * 100, "500"),
        (405, b'{"errors": []}', "405"),
        (404, b'{"errors": [{"code": null}]}', "404. Check the name"),
        (404, b'[["x"]]', "404"),
        (418, b'{"errors": "x"}', "418"),
    ],
)
def test_a_refusal_says_what_and_why_and_what_to_do(scripted, status, body, pattern):
    _, host = scripted(in_turn((status, {}, body)))
    with Registry(host) as registry, pytest.raises(ImageError, match=pattern):
        registry.manifest("a", "1")


@pytest.mark.parametrize("served", [DATA[:-1] + b"x", DATA + b"x"], ids=["changed", "longer"])
def test_a_damaged_blob_is_an_error_after_its_last_byte(scripted, served):
    _, host = scripted(in_turn((200, {}, served)))
    with Registry(host) as registry, pytest.raises(ImageError, match=f"have the digest sha256:.*not {DIGEST}"):
        list(registry.blob("a", DIGEST))


def test_a_manifest_that_is_not_what_was_asked_for_is_an_error(scripted):
    _, host = scripted(in_turn((200, {"Content-Type": manifests.OCI_MANIFEST}, b"{}")))
    with Registry(host) as registry, pytest.raises(ImageError, match=f"not {DIGEST}"):
        registry.manifest("a", DIGEST)


@pytest.mark.parametrize(
    ("kind", "body", "pattern"),
    [
        (manifests.OCI_MANIFEST, b"{" + b" " * (10 << 20) + b"}", "more than 4 MiB"),
        (manifests.OCI_MANIFEST, b"[]", "no JSON object"),
        (manifests.OCI_MANIFEST, b"[" * 100_000, "no JSON object"),
        (manifests.OCI_MANIFEST, b"<html>", "Is it a registry"),
        (manifests.OCI_MANIFEST, b"{}", "not an image that can be run"),
        (manifests.OCI_MANIFEST, b'{"config": {}}', "not an image that can be run"),
        (manifests.OCI_MANIFEST, b'{"config": {"digest": "../../x"}}', "is no digest"),
        (
            manifests.OCI_MANIFEST,
            b'{"config": {"mediaType": "application/vnd.cncf.helm.config.v1+json"}}',
            "helm.config",
        ),
        (
            "application/vnd.docker.distribution.manifest.v1+prettyjws",
            b'{"schemaVersion": 1}',
            "unknown kind of manifest",
        ),
        (manifests.OCI_INDEX, b'{"manifests": []}', "only for: none"),
        (manifests.OCI_INDEX, b'{"manifests": null}', "not an image that can be run"),
        (
            manifests.OCI_INDEX,
            b'{"manifests": [{"platform": {"os": "linux", "architecture": "amd64"}}]}',
            "names no digest",
        ),
        (manifests.OCI_INDEX, b'{"manifests": ["x", 1, {"platform": 3}]}', "only for: none"),
    ],
)
def test_a_manifest_that_is_none_is_an_error_and_no_traceback(scripted, kind, body, pattern):
    _, host = scripted(in_turn((200, {"Content-Type": kind}, body)))
    with Registry(host) as registry, pytest.raises(ImageError, match=pattern):
        registry.image("a", "1")


def test_credentials_are_not_sent_to_where_a_blob_has_been_moved(scripted):
    storage, elsewhere = scripted(in_turn((200, {}, DATA)))

    def answer(request):
        if "Authorization" not in request.headers:
            return 401, {"WWW-Authenticate": 'Basic realm="x"'}, b""
        return 307, {"Location": f"http://{elsewhere.replace('localhost', '127.0.0.1')}/signed?key=1"}, b""

    fake, host = scripted(answer)
    with Registry(host, credentials=ADA) as registry:
        assert b"".join(registry.blob("a", DIGEST)) == DATA
    assert [(method, path, "Authorization" in headers) for method, path, headers in fake.seen] == [
        ("GET", f"/v2/a/blobs/{DIGEST}", False),
        ("GET", f"/v2/a/blobs/{DIGEST}", True),
    ]
    ((method, path, headers),) = storage.seen
    assert (method, path) == ("GET", "/signed?key=1")
    assert "Authorization" not in headers


@pytest.mark.parametrize(
    ("location", "pattern"),
    [
        ("ftp://localhost/x", "HTTP cannot reach"),
        ("http://user:hidden@[::1", "HTTP cannot reach"),
        ("file:///etc/passwd", "HTTP cannot reach"),
        ("http://localhost:99999/x", "HTTP cannot reach"),
        ("http://user:hidden@localhost:1/x", "localhost:1 cannot be reached"),
        ("", "refused to"),
        ("/v2/again", "refused to"),
    ],
)
def test_redirects_that_lead_nowhere_end(scripted, location, pattern):
    fake, host = scripted(in_turn((302, {"Location": location}, b"")))
    with Registry(host) as registry, pytest.raises(ImageError, match=pattern) as caught:
        list(registry.blob("a", DIGEST))
    assert len(fake.seen) <= 6
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("realm", ["ftp://localhost/t", "http://[", "http://localhost:99999/t"])
def test_a_token_server_that_is_none_is_named(scripted, realm):
    _, host = scripted(in_turn((401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="s"'}, b"")))
    with Registry(host) as registry, pytest.raises(ImageError, match="HTTP cannot reach"):
        registry.head("a", "1")


@pytest.mark.parametrize(
    "answer",
    [
        (200, {}, b"{}"),
        (200, {}, b'{"token": "a\\r\\nX-Evil: 1"}'),
        (200, {}, b'{"token": ["x"]}'),
        (200, {}, b'"token"'),
        (200, {}, b'{"token": "x", "expires_in": "soon"}'),
        (404, {}, b""),
    ],
)
def test_a_token_that_is_none_is_an_error(scripted, answer):
    _, realm = scripted(in_turn(answer))
    challenge = f'Bearer realm="http://{realm}/token",service="s"'
    _, host = scripted(in_turn((401, {"WWW-Authenticate": challenge}, b"")))
    with Registry(host) as registry, pytest.raises(ImageError, match="gave none"):
        registry.head("a", "1")


def test_an_ended_token_is_renewed_within_an_upload_and_an_identity_token_is_exchanged(scripted):
    forms, valid = [], {"token": ""}

    def give(request):
        forms.append(request.rfile.read(int(request.headers["Content-Length"])).decode())
        valid["token"] = f"t{len(forms)}"
        return 200, {}, json.dumps({"access_token": valid["token"], "expires_in": 3600}).encode()

    _, realm = scripted(give)
    arrived = bytearray()

    def answer(request):
        if request.headers.get("Authorization") != f"Bearer {valid['token']}":
            return 401, {"WWW-Authenticate": f'Basic realm="x", Bearer realm="http://{realm}/t",service="s"'}, b""
        if request.command == "HEAD":
            return 404, {}, b""
        if request.command == "POST":
            valid["token"] = "revoked by the registry"
            return 202, {"Location": "/v2/a/blobs/uploads/1?state=x"}, b""
        arrived.extend(b"".join(request.blocks()))
        return (202 if request.command == "PATCH" else 201), {"Location": "/v2/a/blobs/uploads/1?state=y"}, b""

    fake, host = scripted(answer)
    with Registry(host, credentials=Credentials(token="identity")) as registry:
        registry.upload("a", lambda: [DATA])
    assert bytes(arrived) == DATA
    assert all("refresh_token=identity" in form and "service=s" in form for form in forms)
    assert fake.seen[-1][:2] == ("PUT", f"/v2/a/blobs/uploads/1?state=y&digest={DIGEST}")


def test_a_proxy_that_limits_requests_is_named(scripted):
    def answer(request):
        for _ in request.blocks():
            pass
        status = {"HEAD": 404, "POST": 202, "PATCH": 413}[request.command]
        return status, {"Location": "/v2/a/blobs/uploads/1"}, b"<html>nginx</html>"

    _, host = scripted(answer)
    with Registry(host) as registry, pytest.raises(ImageError, match=r"413\. A proxy .* have its limit raised"):
        registry.upload("a", lambda: [DATA])


def test_a_registry_without_digests_in_its_answers_is_asked_for_the_whole_manifest(scripted):
    body = b'{"config": {}, "layers": []}'
    _, host = scripted(in_turn((200, {}, body)))
    with Registry(host) as registry:
        found = registry.head("a", "1")
    assert found == manifests.digest_of(body)


def test_a_proxy_is_used_with_its_password_except_for_this_machine_and_what_is_left_out(scripted, monkeypatch):
    fake, proxy = scripted(in_turn((200, HEAD, b"")))
    _, near = scripted(in_turn((200, HEAD, b"")))
    monkeypatch.setenv("http_proxy", f"http://ada:a%40b@{proxy}")
    monkeypatch.setenv("no_proxy", "left-out.invalid")
    with Registry("registry.invalid", insecure=True) as registry:
        assert registry.head("a", "1") == DIGEST
    with Registry(near) as registry:
        assert registry.head("a", "1") == DIGEST
    with Registry("left-out.invalid", insecure=True) as registry, pytest.raises(ImageError, match="cannot be reached"):
        registry.head("a", "1")
    ((method, path, headers),) = fake.seen
    assert (method, path) == ("HEAD", "http://registry.invalid/v2/a/manifests/1")
    assert "Basic YWRhOmFAYg==" in headers.values()


def test_a_connection_that_ends_while_a_manifest_is_pushed_is_tried_again(scripted):
    bodies = []

    def answer(request):
        bodies.append(request.rfile.read(int(request.headers["Content-Length"])))
        return None if len(bodies) == 1 else (201, {}, b"")

    _, host = scripted(answer)
    with Registry(host) as registry:
        assert registry.put_manifest("a", "1", b"{}", manifests.OCI_MANIFEST) == manifests.digest_of(b"{}")
    assert bodies == [b"{}", b"{}"]
