"""What a real registry cannot be made to do: be busy, lie, send elsewhere, go on with half a chunk."""

import hashlib
import json
import pickle
import re
import socket

import pytest

from kale_dist.errors import ImageError
from kale_dist.image import media
from kale_dist.image.auth import Credentials
from kale_dist.image.registry import Registry

DATA = bytes(range(256)) * 8192
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
HEAD = {"Docker-Content-Digest": DIGEST, "Content-Type": media.OCI_MANIFEST, "Content-Length": "7"}
ADA = Credentials(username="ada", password="correct-horse")


def in_turn(*answers):
    """One answer after another; the last for all that follow."""
    left = list(answers)
    return lambda _request: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_registry_is_waited_for(scripted, status):
    fake, host = scripted(in_turn((status, {"Retry-After": "0"}, b""), (status, {}, b""), (200, HEAD, b"")))
    with Registry(host) as registry:
        assert registry.head("a", "1").digest == DIGEST
    assert len(fake.seen) == 3


def test_a_registry_that_wants_a_long_wait_is_not_waited_for(scripted):
    body = json.dumps(
        {"errors": [{"code": "TOOMANYREQUESTS", "message": "You have reached\x1b[31m your limit\n"}]}
    ).encode()
    fake, host = scripted(in_turn((429, {"Retry-After": "3600"}, body)))
    with Registry(host) as registry, pytest.raises(ImageError) as caught:
        registry.manifest("a", "1")
    assert re.search(
        r"429 TOOMANYREQUESTS You have reached \[31m your limit\. .*log in.*wait 3600 s", str(caught.value)
    )
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
        (405, b'{"errors": []}', "whoever runs it has to"),
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
    _, host = scripted(in_turn((200, {"Content-Type": media.OCI_MANIFEST}, b"{}")))
    with Registry(host) as registry, pytest.raises(ImageError, match=f"not {DIGEST}"):
        registry.manifest("a", DIGEST)


@pytest.mark.parametrize(
    ("kind", "body", "pattern"),
    [
        (media.OCI_MANIFEST, b"{" + b" " * (10 << 20) + b"}", "more than 4 MiB"),
        (media.OCI_MANIFEST, b"[]", "no JSON object"),
        (media.OCI_MANIFEST, b"[" * 100_000, "no JSON object"),
        (media.OCI_MANIFEST, b"<html>", "Is it a registry"),
        (media.OCI_MANIFEST, b"{}", "no image that can be run"),
        (media.OCI_MANIFEST, b'{"config": {}}', "no image that can be run"),
        (media.OCI_MANIFEST, b'{"config": {"digest": "../../x"}}', "names no configuration"),
        (media.OCI_MANIFEST, b'{"config": {"mediaType": "application/vnd.cncf.helm.config.v1+json"}}', "helm.config"),
        ("application/vnd.docker.distribution.manifest.v1+prettyjws", b'{"schemaVersion": 1}', "newer tool"),
        (media.OCI_INDEX, b'{"manifests": []}', "only for: none"),
        (media.OCI_INDEX, b'{"manifests": null}', "only for: none"),
        (
            media.OCI_INDEX,
            b'{"manifests": [{"platform": {"os": "linux", "architecture": "amd64"}}]}',
            "names no digest",
        ),
        (media.OCI_INDEX, b'{"manifests": ["x", 1, {"platform": 3}]}', "only for: none"),
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
        ("ftp://localhost/x", "no place for HTTP"),
        ("file:///etc/passwd", "no place for HTTP"),
        ("http://user:hidden@[::1", "no place for HTTP"),
        ("http://localhost:99999/x", "no place for HTTP"),
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


@pytest.mark.parametrize("realm", ["", "x", "ftp://localhost/t", "http://[", "http://localhost:99999/t", "http:///t"])
def test_a_token_server_that_is_none_is_named(scripted, realm):
    _, host = scripted(in_turn((401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="s"'}, b"")))
    with Registry(host) as registry, pytest.raises(ImageError, match="names no usable server for its tokens"):
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
        arrived.extend(request.rfile.read(int(request.headers["Content-Length"])))
        return (202 if request.command == "PATCH" else 201), {"Location": "/v2/a/blobs/uploads/1?state=y"}, b""

    fake, host = scripted(answer)
    with Registry(host, credentials=Credentials(token="identity")) as registry:
        registry.upload("a", DATA, DIGEST)
    assert bytes(arrived) == DATA
    assert all("refresh_token=identity" in form and "service=s" in form for form in forms)
    assert fake.seen[-1][:2] == ("PUT", f"/v2/a/blobs/uploads/1?state=y&digest={DIGEST}")


class Session:
    """An upload as the specification has it: half a chunk is kept, and the registry says how much there is."""

    def __init__(self, cut_after, limit=1 << 40, single=False):
        self.cut_after, self.limit, self.single = cut_after, limit, single
        self.data = bytearray()
        self.sizes = []

    def __call__(self, request):
        size = int(request.headers.get("Content-Length", 0))
        where = {"Location": "/v2/a/blobs/uploads/1", "Range": f"0-{max(len(self.data) - 1, 0)}"}
        if request.command == "HEAD":
            return 404, {}, b""
        if request.command == "POST":
            self.data.clear()
            return 202, where, b""
        if request.command == "GET":
            return 204, where, b""
        if request.command == "PATCH":
            return self.patch(request, size)
        self.data += request.rfile.read(size)
        return (201 if bytes(self.data) == DATA * (len(self.data) // len(DATA)) else 400), {}, b""

    def patch(self, request, size):
        self.sizes.append(size)
        if size > self.limit:
            while size:
                size -= len(request.rfile.read(min(size, 1 << 20)))
            return 413, {}, b"<html>nginx</html>"
        begin = int(request.headers.get("Content-Range", "0-").partition("-")[0])
        if begin != len(self.data):
            return 416, {}, b""
        if self.single and begin:
            request.rfile.read(size)
            return 400, {}, b'{"errors": [{"code": "UNSUPPORTED"}]}'
        cut, self.cut_after = self.cut_after, None
        self.data += request.rfile.read(size if cut is None else cut)
        if cut is not None:
            request.connection.shutdown(socket.SHUT_RDWR)
            return None
        return 202, {"Location": "/v2/a/blobs/uploads/1", "Range": f"0-{len(self.data) - 1}"}, b""


@pytest.mark.parametrize("cut_after", [0, 1, 2, 1_000_000, len(DATA) - 1])
def test_a_cut_within_a_chunk_is_gone_on_with_where_the_registry_kept_it(scripted, cut_after):
    session = Session(cut_after)
    _, host = scripted(session)
    with Registry(host) as registry:
        registry.upload("a", DATA, DIGEST)
    assert bytes(session.data) == DATA
    # "0-0" is what registries say of no byte and of one: then the upload begins again.
    sizes = [len(DATA)] * 3 if cut_after == 1 else [len(DATA), len(DATA) - cut_after]
    assert session.sizes == sizes


@pytest.mark.parametrize("kept", ["0-0", "0-99999999", "x"])
def test_a_registry_that_keeps_no_bytes_or_more_than_were_sent_does_not_hold_the_upload_for_ever(scripted, kept):
    def answer(request):
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        status = {"HEAD": 404, "PATCH": 202, "POST": 202, "PUT": 400}[request.command]
        return status, {"Location": "/v2/a/blobs/uploads/1", "Range": kept}, b""

    _, host = scripted(answer)
    with Registry(host) as registry, pytest.raises(ImageError, match="upload sha256:"):
        registry.upload("a", DATA, DIGEST)


def test_a_proxy_that_limits_requests_gets_smaller_ones(scripted):
    session = Session(None, limit=10 << 20)
    _, host = scripted(session)
    data = DATA * 10
    with Registry(host) as registry:
        registry.upload("a", data, f"sha256:{hashlib.sha256(data).hexdigest()}")
    assert bytes(session.data) == data
    assert session.sizes == [20 << 20, 8 << 20, 8 << 20, 4 << 20]


def test_a_registry_that_takes_one_chunk_only_gets_one(scripted):
    session = Session(None, single=True)
    _, host = scripted(session)
    data = DATA * 33
    with Registry(host) as registry:
        registry.upload("a", data, f"sha256:{hashlib.sha256(data).hexdigest()}")
    assert bytes(session.data) == data
    assert session.sizes == [64 << 20, 2 << 20, 66 << 20]


def test_a_download_that_is_cut_goes_on_where_it_ended(scripted):
    def answer(request):
        begin = int(request.headers.get("Range", "bytes=0-")[6:-1])
        part = DATA[begin : begin + 700_000]
        request.send_response_only(206 if begin else 200)
        request.send_header("Content-Length", str(len(DATA) - begin))
        request.end_headers()
        request.wfile.write(part)

    fake, host = scripted(answer)
    with Registry(host) as registry:
        assert b"".join(registry.blob("a", DIGEST)) == DATA
    assert [headers.get("Range", "") for _, _, headers in fake.seen] == ["", "bytes=700000-", "bytes=1400000-"]


def test_pages_of_tags_are_followed(scripted):
    pages = {"n=500": (["b", "a"], '</v2/a/tags/list?last=b>; rel="next"'), "last=b": (["c"], "")}

    def answer(request):
        tags, link = pages[request.path.partition("?")[2]]
        return 200, {"Link": link} if link else {}, json.dumps({"name": "a", "tags": tags}).encode()

    _, host = scripted(answer)
    with Registry(host) as registry:
        assert registry.tags("a") == ("a", "b", "c")


def test_a_registry_without_digests_in_its_answers_is_asked_for_the_whole_manifest(scripted):
    body = b'{"config": {}, "layers": []}'
    _, host = scripted(in_turn((200, {}, body)))
    with Registry(host) as registry:
        found = registry.head("a", "1")
    assert (found.digest, found.size, found.media_type) == (media.digest_of(body), len(body), media.OCI_MANIFEST)


def test_a_proxy_is_used_with_its_password_except_for_this_machine_and_what_is_left_out(scripted, monkeypatch):
    fake, proxy = scripted(in_turn((200, HEAD, b"")))
    _, near = scripted(in_turn((200, HEAD, b"")))
    monkeypatch.setenv("http_proxy", f"http://ada:a%40b@{proxy}")
    monkeypatch.setenv("no_proxy", "left-out.invalid")
    with Registry("registry.invalid", insecure=True) as registry:
        assert registry.head("a", "1").digest == DIGEST
    with Registry(near) as registry:
        assert registry.head("a", "1").digest == DIGEST
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
        assert registry.put_manifest("a", "1", b"{}", media.OCI_MANIFEST) == media.digest_of(b"{}")
    assert bodies == [b"{}", b"{}"]
