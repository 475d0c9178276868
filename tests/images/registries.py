"""Registries for tests: the real program with and without accounts, tokens and TLS; a proxy that cuts; a scripted one."""

import base64
import contextlib
import http.client
import http.server
import itertools
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse

PROGRAM = shutil.which("docker-registry") or shutil.which("registry")

USER, PASSWORD = "ada", "correct-horse"
_HTPASSWD = "ada:$2b$05$VAMiiKWzPsbuvn9VqZkGy.B1gix82gsYCixy8dckoQYalgpg0S9V2"
"""Bcrypt of the password above."""

_STARTS_WITHIN_S = 20.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_certificate(folder, name="localhost"):
    """An authority of its own, and a certificate of it for `name`: paths of ca.crt, server.crt, server.key."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / file for file in ("ca.crt", "server.crt", "server.key")]
    if all(path.exists() for path in paths):
        return paths

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    (folder / "server.ext").write_text(
        f"subjectAltName=DNS:{name}\nbasicConstraints=CA:FALSE\nauthorityKeyIdentifier=keyid\n"
    )
    # Python 3.13 trusts no authority that does not say that it signs certificates.
    signs = ("-addext", "keyUsage=critical,keyCertSign")
    authority = ("-subj", "/CN=test authority", *signs, "-days", "2")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", *authority)
    openssl("req", *curve, "-keyout", "server.key", "-out", "server.csr", "-subj", f"/CN={name}")
    signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "server.ext"]
    openssl("x509", "-req", "-in", "server.csr", *signing, "-out", "server.crt")
    return paths


@contextlib.contextmanager
def registry_program(folder, *, auth="", tls=False):
    """Run the real program; gives its host. `auth` is the YAML below `auth:`, on one line."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    http_settings = {"addr": f"127.0.0.1:{port}"}
    if tls:
        _, certificate, key = make_certificate(folder)
        # As one that takes itself to be reached without TLS, because a proxy usually ends it.
        http_settings["host"] = f"http://localhost:{port}"
        http_settings["tls"] = {"certificate": str(certificate), "key": str(key)}
    settings = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": http_settings,
        "log": {"level": "error"},
    }
    if auth:
        settings["auth"] = auth
    # JSON is YAML.
    (folder / "registry.yml").write_text(json.dumps(settings))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "serve", str(folder / "registry.yml")], stdout=log, stderr=log)
    try:
        _wait_for(port, process, folder / "log")
        yield f"localhost:{port}"
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(port, process, log):
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the registry does not start: {log.read_text()}")


def htpasswd(folder):
    """Settings of a registry with the account above."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "htpasswd").write_text(_HTPASSWD)
    return {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}


class _Quiet(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle(self):
        with contextlib.suppress(ConnectionError):
            super().handle()

    def blocks(self):
        """The body, in blocks of 1 MiB at most, whether its length is said before or not."""
        left = int(self.headers.get("Content-Length", 0))
        chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        while left or chunked:
            if not left:
                left = int(self.rfile.readline(), 16)
                chunked = left > 0
            while left:
                block = self.rfile.read(min(left, 1 << 20))
                left -= len(block)
                yield block
            if "Transfer-Encoding" in self.headers:
                self.rfile.readline()


@contextlib.contextmanager
def _serving(handler):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class TokenServer:
    """Gives signed tokens for what is asked for, to those who know the account above, and counts."""

    service = "registry.test"

    def __init__(self, folder, life_s=300):
        self.folder = folder
        self.life_s = life_s
        self.asked = []
        make_certificate(folder)

    @contextlib.contextmanager
    def serving(self):
        outer = self

        class Handler(_Quiet):
            def do_GET(self):
                outer.answer(self)

        with _serving(Handler) as port:
            self.port = port
            yield self

    def settings(self):
        return {
            "token": {
                "realm": f"http://localhost:{self.port}/token",
                "service": self.service,
                "issuer": "tests",
                "rootcertbundle": str(self.folder / "ca.crt"),
            }
        }

    def answer(self, request):
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(request.path).query)
        scopes = query.get("scope", [])
        self.asked.append(scopes)
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        ok = request.headers.get("Authorization") == expected
        body = json.dumps({"token": self._token(scopes), "expires_in": self.life_s} if ok else {}).encode()
        request.send_response(200 if ok else 401)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _token(self, scopes):
        parts = [scope.split(":") for scope in scopes]
        access = [{"type": kind, "name": name, "actions": actions.split(",")} for kind, name, actions in parts]
        der = "".join(line for line in (self.folder / "server.crt").read_text().splitlines() if "-----" not in line)
        now = int(time.time())
        claims = {"iss": "tests", "sub": USER, "aud": self.service, "exp": now + self.life_s, "nbf": now - 10}
        claims |= {"iat": now, "jti": str(now), "access": access}
        head = {"typ": "JWT", "alg": "ES256", "x5c": [der]}
        signed = f"{_url64(json.dumps(head).encode())}.{_url64(json.dumps(claims).encode())}"
        command = ["openssl", "dgst", "-sha256", "-sign", str(self.folder / "server.key")]
        signature = subprocess.run(command, input=signed.encode(), capture_output=True, check=True).stdout
        return f"{signed}.{_url64(_raw_signature(signature))}"


def _url64(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _raw_signature(der):
    """The two numbers of an ECDSA signature, 32 bytes each, as JWT wants them."""
    first = 4 + der[3]
    numbers = der[4:first], der[first + 2 : first + 2 + der[first + 1]]
    return b"".join(int.from_bytes(number).to_bytes(32) for number in numbers)


class CuttingProxy:
    """Stands before a registry and cuts the connection within chosen PATCH requests, after their first MiB.

    Args:
        host: Of the registry.
        cut: Numbers of the PATCH requests that are cut, from 1.
        whole: Whether it takes in a whole request before it passes it on, as nginx does.
    """

    def __init__(self, host, cut, *, whole):
        self.host = host
        self.cut = set(cut)
        self.whole = whole
        self.patches = 0
        self.received = 0
        """Bytes of bodies that came from the client."""

    @contextlib.contextmanager
    def serving(self):
        outer = self

        class Handler(_Quiet):
            def __getattr__(self, name):
                if name.startswith("do_"):
                    return lambda: outer.forward(self)
                raise AttributeError(name)

        with _serving(Handler) as port:
            yield f"localhost:{port}"

    def forward(self, request):
        self.patches += request.command == "PATCH"
        cutting = request.command == "PATCH" and self.patches in self.cut
        upstream = http.client.HTTPConnection(self.host, timeout=30)
        with contextlib.closing(upstream):
            if not (cutting and self.whole):
                upstream.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
                for name, value in request.headers.items():
                    upstream.putheader(name, value)
                upstream.endheaders()
            for block in itertools.islice(request.blocks(), 1 if cutting else None):
                self.received += len(block)
                if not (cutting and self.whole):
                    upstream.send(b"%x\r\n%b\r\n" % (len(block), block) if request.command == "PATCH" else block)
            if cutting:
                request.close_connection = True
                request.connection.shutdown(socket.SHUT_RDWR)
                return
            if request.command == "PATCH":
                upstream.send(b"0\r\n\r\n")
            answer = upstream.getresponse()
            body = answer.read()
            request.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() != "transfer-encoding":
                    request.send_header(name, value)
            request.end_headers()
            if request.command != "HEAD":
                request.wfile.write(body)


class ScriptedRegistry:
    """Does what a test says: `answer(request)` gives (status, headers, body), or None once it has dealt with it itself."""

    def __init__(self, answer):
        self._answer = answer
        self.seen = []
        """(method, path, headers) of each request."""

    @contextlib.contextmanager
    def serving(self):
        outer = self

        class Handler(_Quiet):
            def __getattr__(self, name):
                if name.startswith("do_"):
                    return lambda: outer.handle(self)
                raise AttributeError(name)

        with _serving(Handler) as port:
            self.port = port
            yield f"localhost:{port}"

    def handle(self, request):
        self.seen.append((request.command, request.path, dict(request.headers)))
        answer = self._answer(request)
        if answer is None:
            request.close_connection = True
            return
        status, headers, body = answer
        if request.command in ("PATCH", "PUT") or (
            request.command == "POST" and request.headers["Content-Length"] != "0"
        ):
            request.close_connection = True
            headers = {"Connection": "close", **headers}
        request.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
