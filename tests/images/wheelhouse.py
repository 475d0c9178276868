"""Packages for tests, and an index that serves them as PyPI does, on this machine."""

import base64
import contextlib
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile

_BACKEND = """
import pathlib, zipfile
NAME, VERSION, TAG = {name!r}, {version!r}, {tag!r}
def get_requires_for_build_wheel(settings=None):
    return []
def build_wheel(folder, settings=None, metadata=None):
    {failing}
    wheel = f"{{NAME}}-{{VERSION}}-{{TAG}}.whl"
    info = f"{{NAME}}-{{VERSION}}.dist-info"
    texts = {{
        f"{{NAME}}.py": "from_source = True",
        f"{{info}}/METADATA": f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: {{VERSION}}\\n",
        f"{{info}}/WHEEL": f"Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: {{TAG}}\\n",
    }}
    with zipfile.ZipFile(pathlib.Path(folder, wheel), "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
        archive.writestr(f"{{info}}/RECORD", "".join(f"{{path}},,\\n" for path in (*texts, f"{{info}}/RECORD")))
    return wheel
"""


class Wheelhouse:
    """A folder of packages with an index over it."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = []

    def wheel(self, name, version="1.0", *, tag="py3-none-any", requires=(), files=None, scripts=(), programs=None):
        """Put a wheel in: console scripts `name=module:function`, programs as files of `bin`."""
        files = {f"{name}/__init__.py": f"version = {version!r}\n"} if files is None else dict(files)
        info = f"{name}-{version}.dist-info"
        headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        files[f"{info}/METADATA"] = "\n".join([*headers, *(f"Requires-Dist: {one}" for one in requires)]) + "\n"
        pure = "true" if tag.endswith("any") else "false"
        files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
        if scripts:
            files[f"{info}/entry_points.txt"] = "[console_scripts]\n" + "\n".join(scripts) + "\n"
        for program, text in (programs or {}).items():
            files[f"{name}-{version}.data/{program}"] = text
        record = [f"{path},sha256={_url64(text)},{len(text.encode())}" for path, text in files.items()]
        path = self.folder / f"{name}-{version}-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for inside, text in files.items():
                archive.writestr(inside, text)
            archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")
        return path

    def source(self, name, version="1.0", *, tag="py3-none-any", failing=""):
        """Put a source archive in, whose own build backend makes a wheel with this tag, or runs a line that fails."""
        backend = _BACKEND.format(name=name, version=version, tag=tag, failing=failing or "pass")
        files = {
            "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
            "backend.py": backend,
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        }
        with tarfile.open(self.folder / f"{name}-{version}.tar.gz", "w:gz") as archive:
            for path, text in files.items():
                entry = tarfile.TarInfo(f"{name}-{version}/{path}")
                entry.size = len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))

    @contextlib.contextmanager
    def serving(self):
        """Serve it; gives the index's URL."""
        house = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                house.asked.append(self.path)
                body, kind = house.page(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body or b"")

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/simple/"
            server.shutdown()

    def page(self, path):
        """What the index answers: a page of links for `/simple/NAME/`, a file for `/files/NAME`."""
        kind, _, name = path.strip("/").partition("/")
        if kind == "files" and (self.folder / name).is_file():
            return (self.folder / name).read_bytes(), "application/octet-stream"
        named = [
            file.name
            for file in sorted(self.folder.iterdir())
            if file.name.split("-")[0].replace("_", "-").lower() == name and kind == "simple"
        ]
        links = "".join(
            f'<a href="/files/{file}#sha256={hashlib.sha256((self.folder / file).read_bytes()).hexdigest()}">{file}</a>\n'
            for file in named
        )
        return (f"<!DOCTYPE html><html><body>{links}</body></html>".encode() if named else None), "text/html"


def _url64(text):
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
