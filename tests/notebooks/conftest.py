"""A kernel and a person who types at its prompts, for the notebooks that ask for input."""

import os
import pathlib
import queue
import time

import jupyter_client
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def client(tmp_path):
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


@pytest.fixture
def typed(client):
    """Executes a cell, and types lines at its prompts; gives what it has printed. Only the named error is allowed."""

    def run(source, lines, error=""):
        message, out = client.execute(source, allow_stdin=True), ""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                client.get_stdin_msg(timeout=0.02)
                client.input(lines.pop(0))
            except queue.Empty:
                pass
            try:
                found = client.get_iopub_msg(timeout=0.05)
            except queue.Empty:
                continue
            if found["parent_header"].get("msg_id") == message:
                content = found["content"]
                assert found["msg_type"] != "error" or content["ename"] == error, content["evalue"]
                out += content.get("text", "") + content.get("evalue", "")
                if found["msg_type"] == "status" and content["execution_state"] == "idle":
                    return out
        raise AssertionError(out)

    return run
