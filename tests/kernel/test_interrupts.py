"""The stop button ends the waiting; pressed twice, the job. In a script Ctrl-C ends the job."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from own_files import own_files

START = (
    "def slow():\n    import time\n    print('ready', flush=True)\n    time.sleep(600)\n"
    "job = kd.launch(slow, number_of_processes=2)\nnext(job.logs(follow=True))\nprint(job.name)"
)


@pytest.fixture
def job(kernel):
    name = kernel.good(START)
    # The interrupts of one test are not the first ones of the next.
    kernel.good("from kale_dist.job import interrupts; interrupts._last = '', 0.0")
    yield name
    kernel.good("job.cancel(); job.wait(100); None")


def interrupted(kernel, code, **options):
    message = kernel.send(code, **options)
    time.sleep(0.5)
    kernel.interrupt()
    return kernel.finish(message, timeout=60)


WAITS = ("job.wait()", "list(job.logs(follow=True))", "job.stream_logs()", "job.exception()")


@pytest.mark.parametrize("code", ["job.result()", *(pytest.param(wait, marks=pytest.mark.nightly) for wait in WAITS)])
def test_the_first_interrupt_ends_the_wait_and_says_how_to_cancel(kernel, job, code):
    reply = interrupted(kernel, code)
    assert reply.error.startswith("KeyboardInterrupt")
    assert own_files(reply.traceback) == []
    assert reply.err.count("\n") == 1
    assert "job.cancel()" in reply.err
    assert job in reply.err
    assert kernel.good("print(job.status.state.value)") == "running"


def test_a_second_interrupt_in_any_wait_cancels(kernel, job):
    interrupted(kernel, "job.wait()")
    reply = interrupted(kernel, "job.result()")
    assert reply.error.startswith("KeyboardInterrupt")
    assert "is cancelled" in reply.err
    said = kernel.good("print(job.wait(100).cause.value)")
    assert said.splitlines()[-1] == "user"


@pytest.mark.parametrize("distance_s", [0.4, pytest.param(2.5, marks=pytest.mark.nightly)])
def test_a_second_interrupt_after_the_cell_cancels(kernel, job, distance_s):
    message = kernel.send("job.wait()")
    time.sleep(0.5)
    kernel.interrupt()
    time.sleep(distance_s)
    kernel.interrupt()
    reply = kernel.finish(message)
    assert reply.error.startswith("KeyboardInterrupt")
    while "is cancelled" not in reply.err:
        found = kernel.client.get_iopub_msg(timeout=30)
        reply.err += found["content"].get("text", "")
    assert kernel.good("print(job.wait(30).cause.value)").split()[-1] == "user"
    # The kernel is as it was: an interrupt ends a cell, and nothing where there is none.
    kernel.interrupt()
    assert interrupted(kernel, "time.sleep(60)").error.startswith("KeyboardInterrupt")


@pytest.mark.nightly
def test_an_interrupt_of_another_cell_cancels_nothing(kernel, job):
    interrupted(kernel, "job.wait()")
    assert interrupted(kernel, "time.sleep(60)").error.startswith("KeyboardInterrupt")
    # The person who ends a loop may press twice, too.
    kernel.interrupt()
    kernel.good(START.replace("job", "other"))
    assert "keeps running" in interrupted(kernel, "other.wait()").err
    kernel.good("other.cancel(); other.wait(100); None")
    assert kernel.good("print(job.status.state.value)") == "running"


@pytest.mark.nightly
def test_a_second_interrupt_of_an_idle_kernel_long_after_cancels_nothing(kernel, job):
    interrupted(kernel, "job.wait()")
    time.sleep(10.2)
    kernel.interrupt()
    handler = (
        "import signal; print(job.status.state.value, get_ipython().kernel.saved_sigint_handler is signal.SIG_IGN)"
    )
    assert kernel.good(handler) == "running True"


def test_a_second_interrupt_long_after_is_a_first_one(kernel, job):
    interrupted(kernel, "job.wait()")
    kernel.good("interrupts._last = interrupts._last[0], interrupts._last[1] - 10.1")
    reply = interrupted(kernel, "job.wait()")
    assert "keeps running" in reply.err
    assert kernel.good("print(job.status.state.value)") == "running"


def test_where_nobody_can_type_the_first_interrupt_cancels(kernel, job):
    reply = interrupted(kernel, "job.wait()", allow_stdin=False)
    assert "is cancelled" in reply.err
    assert kernel.good("print(job.wait(100).state.value)").splitlines()[-1] == "cancelled"


@pytest.mark.parametrize("wait", ["job.wait()", pytest.param("job.stream_logs()", marks=pytest.mark.nightly)])
def test_in_a_script_the_first_interrupt_cancels(tmp_path, wait):
    script = tmp_path / "script.py"
    script.write_text(
        "import kale_dist as kd, time\n"
        "def slow():\n    print('ready', flush=True)\n    time.sleep(600)\n"
        "job = kd.launch(slow, number_of_processes=2, name='from-a-script', detach=True)\n"
        "next(job.logs(follow=True))\n"
        f"print('waiting', flush=True)\n{wait}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGINT
    assert "local://from-a-script is cancelled" in errors

    import kale_dist

    attached = kale_dist.attach("from-a-script")
    assert attached.wait(100).cause.value == "user"
    attached.delete()
