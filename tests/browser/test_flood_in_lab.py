"""A thousand lines a second and 256 ranks: page and kernel stay usable."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.nightly

WORK = """
import kale_dist as kd, time
from kale_dist.wire import RankStateName
from fake_backend import FakeBackend

def flood(lines):
    began = time.monotonic()
    for number in range(lines):
        print("line", number, "of rank", kd.context().rank)
        while number / 500 > time.monotonic() - began:
            time.sleep(0.005)

def crowd(run):
    for rank in range(256):
        run.event("rank", rank=rank, state=RankStateName.RUNNING)
    step = 0
    while not run.cancelled.is_set():
        step += 1
        for rank in range(256):
            run.event("progress", rank=rank, epoch=1, epochs=9, step=step, steps=10**6, samples_per_s=100.0)
        time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def notebook(open_notebook):
    made = open_notebook("flood.ipynb", cells=[WORK])
    made.run_cell(0)
    yield made
    assert not made.errors


def test_every_line_of_a_flood_is_counted_and_few_are_in_the_page(notebook):
    page, frames = notebook.page, []
    view = notebook.show("job = kd.launch(flood, 2500, number_of_processes=2, name='flood')\njob")
    client = page.context.new_cdp_session(page)
    client.send("Network.enable")
    client.on("Network.webSocketFrameReceived", lambda frame: frames.append(len(frame["response"]["payloadData"])))
    expect(view.locator(".kd-line").nth(200)).to_be_attached()
    # More of them are there as soon as somebody reads back.
    view.get_by_role("button", name="Follow").click()
    expect(view.locator(".kd-line").nth(900)).to_be_attached()
    view.get_by_role("button", name="Follow").click()
    # While it goes on, the kernel answers and so does the page.
    assert notebook.value("print(6 * 7)") == "42"
    view.get_by_label("Search the log").fill("line 42 of")
    expect(view.locator(".kd-line")).to_have_count(2)
    view.get_by_label("Search the log").fill("")
    expect(view).to_have_attribute("data-state", "succeeded")
    expect(view.get_by_text("5,000 lines")).to_be_visible()
    assert view.locator(".kd-line").count() == 1000
    assert len(frames) < 5000 / 5, "lines travel together"
    notebook.photograph("flood", view)


def test_256_ranks_are_counted_and_folded_and_stay_open(notebook):
    view = notebook.show(
        "job = kd.launch(time.sleep, 1, number_of_processes=256, on=FakeBackend(crowd), name='crowd')\njob"
    )
    fold = view.get_by_text("256 ranks: 256 running")
    expect(fold).to_be_visible()
    fold.click()
    row = view.get_by_role("row").nth(5)
    before = row.inner_text()
    expect(row).not_to_have_text(before)
    expect(view.get_by_text("and 192 more ranks")).to_be_visible()
    assert notebook.value("print(6 * 7)") == "42"
    notebook.photograph("crowd", view)
    notebook.value("job.cancel()")
    expect(view).to_have_attribute("data-state", "cancelled")
