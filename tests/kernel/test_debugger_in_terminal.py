"""`breakpoint()` in a rank, debugged in a terminal: that of `kale-dist launch`, of a script, and of `kale-dist debug`."""

import contextlib
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from waiting import until

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def step(k):
    x = torch.arange(4.) * k
    if dist.get_rank() == 1:
        breakpoint()
        x = x + 1
    dist.all_reduce(x)
    return x.sum().item()
print("sum", step(2), flush=True)
"""
NOTEBOOKS_SCRIPT = """\
import kale_dist as kd
def step(k):
    breakpoint()
    return k + 1
if __name__ == "__main__":
    job = kd.launch(step, 2, number_of_processes=1)
    print("result", job.result())
"""


class Terminal:
    """A program in a terminal of its own.

    Args:
        words: Its command line.
        folder: Where it is started.
    """

    def __init__(self, words, folder):
        self._screen, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}, preexec_fn=_take_terminal,  # noqa: PLW1509 - nothing but an ioctl
        )  # fmt: skip
        os.close(theirs)
        self.text = ""
        self._seen = 0

    def expect(self, pattern, timeout=60):
        """Read until the pattern comes after what was found last."""
        deadline = time.monotonic() + timeout
        while not (found := re.search(pattern, self.text[self._seen :])):
            assert time.monotonic() < deadline, self.text
            if select.select([self._screen], [], [], 0.1)[0]:
                try:
                    data = os.read(self._screen, 1 << 16)
                except OSError:
                    data = b""
                assert data, self.text
                self.text += data.decode(errors="replace").replace("\r\n", "\n")
        self._seen += found.end()

    def type(self, *lines):
        for line in lines:
            self.expect(r"\(rank \d\) ")
            os.write(self._screen, f"{line}\n".encode())

    def press(self, character):
        os.write(self._screen, character)

    def interrupt(self, answer):
        """Press ctrl-c until the program answers: readline loses a signal that comes between its prompt and its first `select`."""
        before = self._seen
        for _ in range(3):
            self.press(b"\x03")
            self._seen = before
            with contextlib.suppress(AssertionError):
                return self.expect(answer, timeout=15)
        raise AssertionError(self.text)

    def end(self, timeout=60):
        """The exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None or select.select([self._screen], [], [], 0)[0]:
            assert time.monotonic() < deadline, self.text
            if select.select([self._screen], [], [], 0.1)[0]:
                try:
                    data = os.read(self._screen, 1 << 16)
                except OSError:
                    break
                self.text += data.decode(errors="replace").replace("\r\n", "\n")
        return self.process.wait(timeout)

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._screen)


def _take_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "notebook.py").write_text(NOTEBOOKS_SCRIPT)
    made = []

    def start(*words):
        made.append(Terminal(words, tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.close()


LAUNCH = ("-m", "kale_dist.cli", "launch", "train.py", "-n", "2")


def test_launch_debugs_a_rank_in_its_terminal(terminal):
    shell = terminal(*LAUNCH)
    shell.type("p x", "!x.mul_(100)", "c")
    assert shell.end() == 0
    assert "tensor([0., 2., 4., 6.])" in shell.text
    assert shell.text.count("sum 1216.0") == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [(LAUNCH, 128 + signal.SIGINT), pytest.param(("notebook.py",), -signal.SIGINT, marks=pytest.mark.nightly)],
)
def test_ctrl_c_at_the_prompt_of_a_script_ends_the_job(terminal, words, code):
    shell = terminal(*words)
    shell.expect(r"\(rank \d\) ")
    shell.interrupt("is cancelled")
    assert shell.end() == code
    assert "is cancelled" in shell.text
    assert "still waits" not in shell.text
    assert len(re.findall(r"\(rank \d\) ", shell.text)) == 1


@pytest.mark.nightly
def test_ctrl_d_is_q(terminal):
    shell = terminal(*LAUNCH)
    shell.expect(r"\(rank 1\) ")
    shell.press(b"\x04")
    assert shell.end() == 1
    assert "`q` at a breakpoint has ended the rank" in shell.text
    assert "x = x + 1" in shell.text.partition("Traceback")[2]
    assert "bdb.py" not in shell.text


def test_debug_opens_a_job_of_another_terminal_and_ctrl_c_leaves_it(terminal, tmp_path):
    script = NOTEBOOKS_SCRIPT.replace("print(", "print(job.ref, flush=True); import time; time.sleep(6); print(")
    (tmp_path / "notebook.py").write_text(script)
    first = terminal("notebook.py")
    first.expect(r"local://\S+\n")
    ref = re.search(r"local://\S+(?=\n)", first.text)[0]
    _at_breakpoint(ref)
    left = terminal("-m", "kale_dist.cli", "debug", ref)
    left.expect(r"\(rank 0\) ")
    left.interrupt("still waits")
    left.end()
    assert "still waits in breakpoint()" in left.text
    again = terminal("-m", "kale_dist.cli", "debug", ref, "--rank", "0")
    again.type("k = 6", "c")
    assert again.end() == 0
    assert first.end() == 0
    assert "result 7" in first.text


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("lines", "result"),
    [("p k\nk = 6\n", 7), ("", 3), ("for _ in range(2):\n    k += 10", 23), ("k = 8\nc\nk = 90\n", 9), ("k = (\n", 3)],
)
def test_debug_takes_the_lines_of_a_pipe_and_its_end_means_continue(terminal, tmp_path, lines, result):
    script = NOTEBOOKS_SCRIPT.replace("print(", "print(job.ref, flush=True); import time; time.sleep(6); print(")
    (tmp_path / "notebook.py").write_text(script)
    first = terminal("notebook.py")
    first.expect(r"local://\S+\n")
    ref = re.search(r"local://\S+(?=\n)", first.text)[0]
    _at_breakpoint(ref)
    command = [sys.executable, "-m", "kale_dist.cli", "debug", ref]
    ended = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, first.end()) == (0, 0), ended.stderr
    assert f"result {result}" in first.text
    assert ("2\n" in ended.stdout) == ("p k" in lines)


def _at_breakpoint(ref):
    import kale_dist as kd

    job = kd.attach(ref)
    until(lambda: job.status.at_breakpoints)


@pytest.mark.nightly
def test_a_job_that_is_cancelled_elsewhere_ends_the_prompt(terminal):
    shell = terminal(*LAUNCH, "--name", "debugged")
    shell.expect(r"\(rank 1\) ")
    other = terminal("-m", "kale_dist.cli", "cancel", "debugged")
    assert other.end() == 0
    assert shell.end() != 0
    assert "cancelled" in shell.text


@pytest.mark.nightly
def test_without_a_terminal_launch_passes_breakpoints_over(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, *LAUNCH], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=100,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "Rank 1 has passed over breakpoint()" in found.stderr
