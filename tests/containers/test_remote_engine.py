"""An engine on another machine, as far as one machine can show it: it is reached over TCP, and sees no folder of ours."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import uuid

import flat
import pytest
from container_work import user_and_bytes, waits_a_little

from kale_dist import places
from kale_dist.errors import BackendUnavailableError, ConfigError


class Relay:
    """Carries bytes between a TCP port and the engine's socket, and can cut all connections."""

    def __init__(self, path, port=0):
        self.path = path
        self._server = socket.create_server(("127.0.0.1", port))
        self._open = set()
        self.port = self._server.getsockname()[1]
        self.url = f"tcp://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near):
        with near, socket.socket(socket.AF_UNIX) as far, contextlib.suppress(OSError):
            far.connect(self.path)
            self._open |= {near, far}
            back = threading.Thread(target=self._copy, args=(far, near), daemon=True)
            back.start()
            self._copy(near, far)
            back.join()
            self._open -= {near, far}

    def _copy(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def cut(self):
        for end in tuple(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()


@pytest.fixture
def relay(engine, monkeypatch):
    if not engine.is_local:
        pytest.skip("the engine is remote already")
    made = Relay(engine.url.removeprefix("unix://"))
    monkeypatch.setenv("DOCKER_HOST", made.url)
    yield made
    places.get("docker").close()
    made.close()


def test_bytes_travel_by_the_api_and_a_broken_connection_is_taken_up(relay, plain_image):
    weights = os.urandom(9_000_000)
    name = f"test-{uuid.uuid4().hex[:8]}"
    job = flat.launch(
        user_and_bytes, weights, 2.0, number_of_processes=2, on="docker", image=plain_image, name=name,
    )  # fmt: skip
    for _ in job.logs(follow=True):
        relay.cut()
        break
    relay.cut()
    assert job.results(timeout=120) == [(1000, weights), (1000, weights)]
    job.delete()


ELSEWHERE = """
import hashlib, os, sys
sys.path.insert(0, os.environ["WORK"])
import kale_dist as kd
from container_work import user_and_bytes
weights = os.urandom(9_000_000)
job = kd.launch(user_and_bytes, weights, 0.0, number_of_processes=2, name=sys.argv[2], on=kd.Docker(image=sys.argv[1]))
assert job.results(timeout=120) == [(1000, weights)] * 2
print(job.status.state)
job.delete()
"""


def test_nothing_of_the_notebooks_disk_is_seen_by_the_engine(relay, plain_image, tmp_path):
    """The notebook's process has a disk of its own for all that it writes, which no other process sees."""
    place = tmp_path / "own"
    place.mkdir()
    script = f'mount -t tmpfs none {place} && mkdir {place}/tmp && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", ELSEWHERE]
    own = {"HOME": place, "TMPDIR": place / "tmp", "XDG_STATE_HOME": place / "state", "XDG_CACHE_HOME": place / "cache"}
    environment = os.environ | {key: str(value) for key, value in own.items()} | {"WORK": os.path.dirname(__file__)}  # noqa: PTH120 - a text is wanted
    if subprocess.run([*command[:5], "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a disk of its own")
    ended = subprocess.run(
        [*command, plain_image, f"test-{uuid.uuid4().hex[:8]}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout.split()[-1:]) == (0, ["succeeded"]), ended.stderr
    assert not list(place.iterdir())


def test_a_folder_of_this_machine_is_refused_there(relay, plain_image, tmp_path):
    with pytest.raises(ConfigError, match="is on another one") as caught:
        flat.launch(waits_a_little, 0, on="docker", image=plain_image, volumes={"/data": str(tmp_path)})
    assert "docker volume ls" in caught.value.remedy
    assert relay.url in str(caught.value)


def test_an_engine_that_goes_away_is_told_and_its_job_is_found_again(relay, plain_image):
    name = f"test-{uuid.uuid4().hex[:8]}"
    job = flat.launch(waits_a_little, 1.0, number_of_processes=1, on="docker", image=plain_image, name=name)
    places.get("docker").close()
    relay.close()
    with pytest.raises(BackendUnavailableError, match="No Docker engine answers"):
        flat.launch(waits_a_little, 0, number_of_processes=1, on="docker", image=plain_image)
    assert "No Docker engine answers" in job.status.reason
    with pytest.raises(BackendUnavailableError, match="No Docker engine answers"):
        job.delete()
    with contextlib.closing(Relay(relay.path, relay.port)):
        assert job.result(timeout=60) == 0
        job.delete()
        places.get("docker").close()
