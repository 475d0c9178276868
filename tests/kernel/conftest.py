"""A real ipykernel, driven as a front end drives it."""

import contextlib
import dataclasses
import os
import pathlib
import queue
import re
import signal
import time

import jupyter_client
import notebook_parts
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass
class Reply:
    """What a cell gave back."""

    out: str = ""
    err: str = ""
    error: str = ""
    traceback: str = ""
    coloured: str = ""
    """The traceback as a front end gets it."""
    shown: list = dataclasses.field(default_factory=list)


class Kernel:
    """One kernel with one client.

    Args:
        folder: It is started there.
        packages: A folder of packages that it prefers to the installed ones.
    """

    def __init__(self, folder, packages=ROOT):
        environment = os.environ | {"PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"}
        self.hangs = False
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment, cwd=str(folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self):
        return self.manager.provisioner.pid

    def send(self, code, *, allow_stdin=True):
        """Start a cell and return its message id."""
        assert not self.hangs, "a cell of an earlier test did not end"
        return self.client.execute(code, allow_stdin=allow_stdin)

    def finish(self, message, timeout=60):
        """Collect a cell's output until it has ended."""
        reply = Reply()
        deadline = time.monotonic() + timeout
        while True:
            try:
                found = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                self.hangs = True
                raise AssertionError(f"the cell did not end: {reply}") from None
            if found["parent_header"].get("msg_id") != message:
                continue
            content = found["content"]
            match found["msg_type"]:
                case "stream":
                    reply.__dict__["out" if content["name"] == "stdout" else "err"] += content["text"]
                case "error":
                    reply.error = f"{content['ename']}: {content['evalue']}"
                    reply.coloured = "\n".join(content["traceback"])
                    reply.traceback = re.sub(r"\x1b\[[\d;]*m", "", reply.coloured)
                case "execute_result" | "display_data":
                    reply.shown.append(content["data"])
                case "status" if content["execution_state"] == "idle":
                    return reply

    def __call__(self, code, *, timeout=60, **options):
        return self.finish(self.send(code, **options), timeout)

    def good(self, code, **options):
        """Run a cell that has to succeed; its standard output."""
        reply = self(code, **options)
        assert not reply.error, reply.traceback
        return reply.out.strip()

    def interrupt(self):
        self.manager.interrupt_kernel()

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def close(self):
        self.client.stop_channels()
        with contextlib.suppress(Exception):
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def new_kernel(tmp_path):
    """Makes kernels that end with the test."""
    made = []

    def make():
        made.append(Kernel(tmp_path))
        return made[-1]

    yield make
    for kernel in made:
        kernel.close()


@pytest.fixture(scope="module")
def kernel(request, tmp_path_factory):
    """A kernel shared by the tests of a file, with kale_dist imported as kd. Its parameter is a version of cloudpickle."""
    packages = notebook_parts.cloudpickle(request.param) if hasattr(request, "param") else ROOT
    kernel = Kernel(tmp_path_factory.mktemp("notebook"), packages)
    kernel.good("import kale_dist as kd, torch, time, os")
    yield kernel
    kernel.close()


@pytest.fixture
def wait_until():
    """Waits for a condition, or fails with the time it took."""

    def wait(condition, timeout):
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < timeout, f"not within {timeout} s"
            time.sleep(0.02)
        return time.monotonic() - start

    return wait
