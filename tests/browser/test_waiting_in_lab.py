"""Cancel while a cell waits for the job: by subshells, where the kernel has them."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.nightly

WORK = """
import kale_dist as kd, time

def work():
    for number in range(6000):
        print("step", number, flush=True)
        time.sleep(0.1)
"""
LAUNCH = "job = kd.launch(work, number_of_processes=1)\njob"


@pytest.fixture(params=["python3", "kernel6"])
def kernel(request):
    return request.getfixturevalue("kernel_6") if request.param == "kernel6" else request.param


def test_cancel_while_a_cell_waits(open_notebook, kernel):
    notebook = open_notebook(
        f"wait-{kernel}.ipynb", cells=[WORK, LAUNCH, "job.wait()", "'the cell after'"], kernel=kernel
    )
    for index in range(3):
        notebook.run_cell(index)
    view, waiting = notebook.cell(1).locator(".kd-job"), notebook.cell(2)
    view.wait_for(timeout=60_000)
    view.scroll_into_view_if_needed()
    # The cell that waits was queued before the view could say anything to the kernel.
    expect(view.get_by_text("[0] step 5", exact=True)).to_be_visible()
    view.get_by_role("button", name="Cancel").click()
    view.get_by_role("button", name="Yes, cancel the job").click()
    if kernel == "kernel6":
        expect(view.get_by_role("status")).to_contain_text("stop the cell first")
        notebook.photograph("stop-first", view)
        notebook.command("notebook:interrupt-kernel")
        expect(waiting).to_contain_text("keeps running")
    expect(view).to_have_attribute("data-state", "cancelled", timeout=20_000)
    notebook.wait_idle()
    if kernel == "python3":
        expect(waiting).to_contain_text("cancelled")
    expect(view.locator(".kd-line").first).to_have_text(re.compile(r"^\[0\] step 0$"))
    assert not notebook.errors


def test_a_cell_that_only_waits_shows_the_job_live_below_itself(open_notebook, kernel):
    cell = "job = kd.launch(work, number_of_processes=1)\njob.result()"
    notebook = open_notebook(f"only-wait-{kernel}.ipynb", cells=[WORK, cell], kernel=kernel)
    for index in range(2):
        notebook.run_cell(index)
    view = notebook.cell(1).locator(".kd-job")
    view.wait_for(timeout=60_000)
    expect(view).to_have_attribute("data-state", "running")
    view.scroll_into_view_if_needed()
    for step in (5, 15):
        expect(view.get_by_text(f"[0] step {step}", exact=True)).to_be_visible()
    assert view.count() == 1
    notebook.photograph(f"only-waits-{kernel}", view)
    notebook.command("notebook:interrupt-kernel")
    expect(notebook.cell(1)).to_contain_text("keeps running")
    notebook.run("job.cancel()")
    expect(view).to_have_attribute("data-state", "cancelled", timeout=20_000)
