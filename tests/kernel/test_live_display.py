"""The live picture of a job, as a front end receives it from a real kernel."""

import queue
import time

import pytest


@pytest.fixture(scope="module")
def kernel(kernel):
    """A kernel without the widget's package: jobs are pictures."""
    kernel.good("import sys; sys.modules['anywidget'] = None")
    return kernel


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


@pytest.fixture(scope="module")
def watched(kernel):
    """What came of one job that was displayed and not waited for, and the seconds it took."""
    kernel.good(CHATTY)
    kernel.good("kd.launch(chatter, 0, number_of_processes=1).wait()")
    began = time.monotonic()
    codes = ["job = kd.launch(chatter, 2.5, number_of_processes=2)\njob"]
    found = messages(kernel, codes, lambda message, _: is_final(message))
    return found, time.monotonic() - began


def test_one_picture_is_replaced_in_place(watched):
    first, *updates = pictures(watched[0])
    assert first["msg_type"] == "display_data"
    assert updates
    assert {one["msg_type"] for one in updates} == {"update_display_data"}
    identifier = first["content"]["transient"]["display_id"]
    assert {one["content"]["transient"]["display_id"] for one in updates} == {identifier}


def test_a_flood_of_lines_and_reports_is_drawn_at_most_four_times_a_second(watched):
    found, seconds = watched
    assert 3 <= len(pictures(found)) <= 4 * seconds + 2


def test_nothing_is_printed_from_threads(watched):
    assert [one for one in watched[0] if one["msg_type"] in ("stream", "error")] == []


def test_the_last_picture_has_the_end_of_the_log(watched):
    last = pictures(watched[0])[-1]["content"]["data"]
    for text in last.values():
        assert "succeeded" in text
        assert "the last line" in text
    assert set(last) == {"text/plain", "text/html"}


def test_the_last_picture_is_drawn_before_wait_returns(kernel):
    def idle(message, sent):
        return message["parent_header"].get("msg_id") == sent and message["content"].get("execution_state") == "idle"

    found = messages(
        kernel, ["job = kd.launch(chatter, 0.3, number_of_processes=1)\njob", "job.wait()\nprint('after')"], idle
    )
    printed = next(index for index, one in enumerate(found) if one["msg_type"] == "stream")
    assert any(is_final(one) for one in found[:printed])


def test_an_ended_job_is_one_still_picture(kernel):
    reply = kernel("job = kd.launch(chatter, 0, number_of_processes=1); job.wait(); job")
    (shown,) = reply.shown
    assert "succeeded" in shown["text/html"]
    threads = "import threading; print([t.name for t in threading.enumerate() if 'view' in t.name])"
    assert kernel.good(threads) == "[]"


def test_a_deleted_job_ends_its_picture(kernel, wait_until):
    kernel.good("job = kd.launch(time.sleep, 60, number_of_processes=1)\njob")
    kernel.good("job.delete()")
    code = "print(any('view' in t.name for t in threading.enumerate()))"
    wait_until(lambda: kernel.good(code) == "False", 5)
