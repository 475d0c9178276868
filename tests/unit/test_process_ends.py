"""A process that ends while a thread of it waits for the API server."""

import subprocess
import sys

import pytest

pytest.importorskip("kubernetes")

_SCRIPT = """
import json, os, socket, sys, threading, time
from kale_dist.places.kubernetes import client

listener = socket.create_server(("127.0.0.1", 0))
name = {"name": "x"}
config = {
    "clusters": [{**name, "cluster": {"server": f"http://127.0.0.1:{listener.getsockname()[1]}"}}],
    "users": [{**name, "user": {"token": "t"}}],
    "contexts": [{**name, "context": {"cluster": "x", "user": "x"}}],
    "current-context": "x",
}
with open(sys.argv[1], "w") as file:
    json.dump(config, file)
os.environ["KUBECONFIG"] = sys.argv[1]
threading.Thread(target=client.connect, daemon=True).start()
peer, _ = listener.accept()
peer.recv(1 << 16)

class Answer:
    def __del__(self, write=os.write, to=os.dup(peer.fileno()), sleep=time.sleep):
        # While the interpreter ends: the thread wakes and has to leave its frames.
        write(to, b"HTTP/1.1 500 x\\r\\nContent-Length: 0\\r\\n\\r\\n")
        sleep(0.5)

answer = Answer()
"""


@pytest.mark.nightly
def test_a_process_that_ends_while_it_connects_is_not_aborted(tmp_path):
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "config")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
