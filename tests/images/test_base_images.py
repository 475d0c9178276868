"""The Dockerfiles in images/: both are read, and the one that needs no GPU is built and run."""

import contextlib
import functools
import http.server
import os
import pathlib
import re
import subprocess
import sys
import threading
import uuid

import pytest

IMAGES = pathlib.Path(__file__).parents[2] / "images"
FOLDERS = sorted(path.parent.name for path in IMAGES.glob("*/Dockerfile"))

TRAINING = """
import getpass, os, sys, tempfile
import cloudpickle, numpy, torch
layer = torch.nn.Linear(4, 2)
layer(torch.ones(3, 4)).sum().backward()
pathlib = os.path.expanduser("~")
open(os.path.join(pathlib, "written"), "w").close()
tempfile.TemporaryFile().close()
print(os.getuid(), os.getgid(), getpass.getuser(), torch.__version__, numpy.__version__, cloudpickle.__version__)
print(os.path.exists(torch._utils.__cached__), torch.from_numpy(numpy.ones(2)).sum().item())
"""


def _lacking(what):
    if os.environ.get("KALE_DIST_REQUIRE_CLUSTER"):
        pytest.fail(f"{what}, and KALE_DIST_REQUIRE_CLUSTER is set")
    pytest.skip(what)


def instructions(folder):
    """Keyword and text of each instruction, in order."""
    text = (IMAGES / folder / "Dockerfile").read_text()
    joined = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def pins(folder):
    """Every distribution that the Dockerfile installs, with its version as it stands there."""
    installs = [text.split() for word, text in instructions(folder) if word == "RUN" and "pip install" in text]
    words = [word for text in installs for word in text[text.index("install") + 1 :]]
    return dict(re.fullmatch(r"([\w.-]+)(?:==(\S+))?", word).groups() for word in words if word[0].isalpha())


def test_there_is_an_image_for_each_kind_of_machine():
    assert FOLDERS == ["cpu", "cuda"]
    for folder in FOLDERS:
        assert f"| `{folder}` |" in (IMAGES / "README.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_dockerfile_is_pinned_and_ends_as_a_user(folder):
    found = instructions(folder)
    bases = [text for word, text in found if word == "FROM"]
    assert bases
    assert all(re.fullmatch(r"\S+(?::\d+\.\d+[\w.-]*|@sha256:[0-9a-f]{64})", base) for base in bases)
    assert None not in pins(folder).values()
    assert {"torch", "numpy", "cloudpickle"} == set(pins(folder))
    assert [text for word, text in found if word == "USER"][-1] == "1000:1000"
    for _, text in found:
        assert not re.search(r"\b(?:gcc|g\+\+|build-essential|nvcc|-devel)\b", text)
    assert all("--no-cache-dir" in text for word, text in found if "pip install" in text)


def test_all_images_hold_the_same_versions():
    assert len({tuple(sorted((name, v.partition("+")[0]) for name, v in pins(f).items())) for f in FOLDERS}) == 1


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def wheels(tmp_path):
    """The URL of a folder with the wheels that images/cpu needs, as pip gets them on this machine."""
    wanted = [f"{name}=={version}" for name, version in pins("cpu").items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version=3.11"]
    ended = subprocess.run([*command, f"--dest={tmp_path}", *wanted], capture_output=True, text=True, check=False)
    if ended.returncode:
        _lacking(f"pip cannot get {', '.join(wanted)} here: {ended.stderr[-200:]}")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()
    for path in tmp_path.iterdir():
        path.unlink()


@pytest.fixture
def engine():
    """A connection to an engine on this machine."""
    pytest.importorskip("docker")
    from kale_dist import engine as engines
    from kale_dist.errors import BackendUnavailableError

    try:
        found = engines.connect()
    except BackendUnavailableError as error:
        _lacking(f"no engine answers: {error}")
    with contextlib.closing(found):
        if not found.is_local:
            _lacking("the engine is on another machine")
        yield found


def test_the_image_for_processors_builds_and_trains_as_a_user(engine, wheels):
    tag = f"kale-dist-test/{uuid.uuid4().hex[:8]}"
    try:
        # The folder of wheels is served to the build: a context with them would be copied twice, 200 MB each.
        _, log = engine.client.images.build(
            path=str(IMAGES / "cpu"),
            tag=tag,
            rm=True,
            forcerm=True,
            network_mode="host",
            buildargs={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels},
        )
        assert any("Successfully installed" in part.get("stream", "") for part in log)
        output = engine.client.containers.run(tag, ["python3", "-c", TRAINING], remove=True, read_only=False)
        first, second = output.decode().splitlines()
        versions = pins("cpu")
        assert first == f"1000 1000 trainer {versions['torch']} {versions['numpy']} {versions['cloudpickle']}"
        assert second == "True 2.0"
        assert engine.client.images.get(tag).attrs["Size"] < 1.6e9
    finally:
        engine.client.images.remove(tag, force=True)
