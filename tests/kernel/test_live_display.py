"""The live picture of a job, as a front end receives it from a real kernel."""

import queue
import time

import pytest

pytestmark = pytest.mark.newest

CHATTY = """
def chatter(seconds):
    import time
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print("chatter", flush=True)
        kd.report(loss=0.5)
        time.sleep(0.005)
    print("the last line", flush=True)
"""


@pytest.fixture(scope="module")
def kernel(kernel):
    """A kernel without the widget's package: jobs are pictures."""
    kernel.good("import sys; sys.modules['anywidget'] = None")
    kernel.good(CHATTY)
    return kernel


def messages(kernel, codes, until):
    """Run cells; everything a front end then receives until `until` of the last message is true."""
    sent = [kernel.send(code) for code in codes]
    found, deadline = [], time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            message = kernel.client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        found.append(message)
        if until(message, sent[-1]):
            return found
    raise AssertionError(f"not within 60 s: {[one['msg_type'] for one in found]}")


def pictures(found):
    return [one for one in found if one["msg_type"] in ("display_data", "update_display_data")]


def is_final(message):
    return message["msg_type"] == "update_display_data" and "succeeded" in message["content"]["data"]["text/plain"]


def test_the_last_picture_is_drawn_before_wait_returns(kernel):
    def idle(message, sent):
        return message["parent_header"].get("msg_id") == sent and message["content"].get("execution_state") == "idle"

    found = messages(
        kernel, ["job = kd.launch(chatter, 0.3, number_of_processes=1)\njob", "job.wait()\nprint('after')"], idle
    )
    # A slow machine says on stderr what the job waits for.
    printed = next(index for index, one in enumerate(found) if one["content"].get("name") == "stdout")
    first, *updates = pictures(found[:printed])
    assert first["msg_type"] == "display_data"
    (last,) = [one for one in updates if is_final(one)]
    assert last["content"]["transient"]["display_id"] == first["content"]["transient"]["display_id"]
    shown = last["content"]["data"]
    assert set(shown) == {"text/plain", "text/html"}
    assert all("the last line" in text for text in shown.values())
    assert found[printed]["content"]["text"] == "after\n"


def test_an_ended_job_is_one_still_picture(kernel):
    reply = kernel("job = kd.launch(chatter, 0, number_of_processes=1); job.wait(); job")
    (shown,) = reply.shown
    assert "succeeded" in shown["text/html"]


def test_a_cell_that_only_waits_shows_the_job_once_below_itself(kernel):
    reply = kernel("job = kd.launch(chatter, 2, number_of_processes=1); job.result(); job.wait(); job")
    (shown,) = reply.shown
    assert job_name(kernel) in shown["text/plain"]


def test_an_error_within_a_second_has_its_card_and_the_sentence_once(kernel):
    kernel("def bad():\n    wanted = 'here'\n    raise ValueError('no ' + 'such thing ' * 30)")
    kernel.good("job = kd.launch(bad, number_of_processes=1)\nwhile not job.done(): time.sleep(0.05)")
    reply = kernel("job.result()")
    (shown,) = reply.shown
    assert "wanted" in shown["text/html"]
    assert "ValueError" in reply.error
    reply = kernel("job.wait()")
    (status,) = reply.shown
    assert reply.out.count("such thing") == 30
    assert status["text/plain"].startswith(f"<JobStatus local://{job_name(kernel)} failed: Rank 0 failed")
    assert status["text/plain"].count("such thing") < 10


@pytest.mark.nightly
def test_in_an_executed_notebook_only_what_is_asked_for_is_shown(kernel):
    assert not kernel("kd.launch(chatter, 2, number_of_processes=1).result()", allow_stdin=False).shown


@pytest.mark.nightly
def test_a_cell_that_waits_for_a_job_shown_before_does_not_show_it_again(kernel):
    kernel("job = kd.launch(chatter, 2, number_of_processes=1)\njob")
    assert not kernel("job.result()").shown


def test_a_look_that_hardly_waits_shows_nothing(kernel):
    kernel("job = kd.launch(chatter, 2, number_of_processes=1)")
    reply = kernel("job.wait(timeout=0)")
    assert not reply.shown
    assert reply.error.startswith("WaitTimeoutError")
    kernel("job.cancel()")


def job_name(kernel):
    return kernel.good("print(job.name)")


@pytest.mark.nightly
def test_a_cell_that_runs_again_says_that_its_first_job_still_runs_and_how_to_cancel_it(kernel):
    cell = "job = kd.launch(chatter, 30, number_of_processes=1)"
    assert not kernel(cell).err
    first = job_name(kernel)
    said = kernel(cell).err
    kernel.good("job.cancel()")
    (remedy,) = [part for part in said.split() if part.startswith("kd.attach")]
    assert first in remedy
    kernel.good(remedy)
    kernel.good("job.wait()")
    assert not kernel(cell + "; job.cancel()").err


@pytest.mark.nightly
def test_jobs_of_a_loop_in_one_cell_are_no_mistake(kernel):
    assert not kernel("jobs = [kd.launch(chatter, 30, number_of_processes=1) for _ in range(2)]").err
    kernel.good("for job in jobs: job.cancel(); job.wait()")
