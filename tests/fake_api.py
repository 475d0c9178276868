"""A small API server that answers as a test tells it, for what the real one cannot be made to do."""

import contextlib
import http.server
import json
import sys
import threading


def status(code, message, reason="", **details):
    """The body of a refusal, as Kubernetes writes it."""
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "message": message,
        "reason": reason,
        "details": details,
    }


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        # A client may end in the middle of an answer.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class FakeApi:
    """Answers by method and path, each a list of (code, body, headers) of which the last one stays.

    Its clock shows `now`, in seconds since 1970; None: that of this machine.
    """

    def __init__(self):
        self.answers = {}
        self.asked = []
        self.now = None
        review = {"kind": "SelfSubjectReview", "status": {"userInfo": {"username": "somebody"}}}
        self.answer("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", 201, review)
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self):
                length = int(self.headers.get("Content-Length") or 0)
                path = self.path.partition("?")[0]
                fake.asked.append((self.command, path, self.rfile.read(length)))
                waiting = fake.answers.get((self.command, path)) or [(404, status(404, f"{path} not scripted"), {})]
                code, body, headers = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                if not isinstance(body, bytes):
                    self.send_header("Content-Type", "application/json")
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def date_time_string(self, timestamp=None):
                return super().date_time_string(fake.now if timestamp is None else timestamp)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_one

            def log_message(self, *_):
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, method, path, code, body=b"", **headers):
        """One more answer to such a request."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.setdefault((method, path), []).append((code, body, named))

    def kubeconfig(self, path):
        """A kubeconfig that leads here."""
        user = {"name": "u", "user": {"token": "t"}}
        context = {"name": "fake", "context": {"cluster": "c", "user": "u", "namespace": "team"}}
        cluster = {"name": "c", "cluster": {"server": self.url}}
        path.write_text(
            json.dumps({"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "fake"})
        )
        return path

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
