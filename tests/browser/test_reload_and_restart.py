"""What is left of a job's view when its page is loaded again, its kernel restarted, or there is no kernel at all."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.nightly

WORK = """
import kale_dist as kd, time

def work():
    for number in range(6000):
        kd.report(loss=1 / (number + 1))
        print("step", number, flush=True)
        time.sleep(0.1)
"""


def test_reload_restart_and_no_kernel(open_notebook):
    notebook = open_notebook("kept.ipynb", cells=[WORK])
    notebook.run_cell(0)
    page = notebook.page
    plain = notebook.show("plain = kd.launch(work, number_of_processes=1, name='plain')\nplain")
    kept = notebook.show("kept = kd.launch(work, number_of_processes=1, name='kept', detach=True)\nkept")
    expect(kept.get_by_text("[0] step 9", exact=True)).to_be_attached()

    # A page that is loaded again has the whole log, and goes on.
    notebook.command("docmanager:save")
    page.reload()
    notebook.ready()
    plain, kept = (notebook.cell(index).locator(".kd-job") for index in (1, 2))
    kept.scroll_into_view_if_needed()
    expect(kept.locator(".kd-line").first).to_have_text("[0] step 0")
    before = kept.locator(".kd-line").count()
    expect(kept.locator(".kd-line").nth(before + 20)).to_be_attached()
    plain.scroll_into_view_if_needed()
    expect(plain.locator(".kd-line").nth(before + 20)).to_be_attached()
    notebook.photograph("reloaded")

    # Without their kernel, views are pictures.
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    for index, name in ((1, "plain"), (2, "kept")):
        picture = notebook.cell(index).get_by_role("group", name=f"Job {name}")
        expect(picture.get_by_text("running").first).to_be_visible()
        expect(notebook.cell(index)).to_contain_text(f'As it was when it was last drawn. kd.attach("local://{name}")')
        expect(notebook.cell(index).get_by_role("button", name="Cancel")).to_have_count(0)
    notebook.photograph("restarted")
    notebook.ready()
    view = notebook.show("import kale_dist as kd\nplain = kd.attach('plain')\nplain")
    expect(view).to_have_attribute("data-state", "cancelled")
    expect(view.get_by_text("Cancelled after").first).to_contain_text("kernel, or the script, that started it ended")
    view = notebook.show("kept = kd.attach('kept')\nkept")
    expect(view).to_have_attribute("data-state", "running")
    expect(view.locator(".kd-line").first).to_have_text("[0] step 0")
    notebook.photograph("attached")
    notebook.value("kept.cancel()")
    expect(view).to_have_attribute("data-state", "cancelled")

    # The file opens without a kernel, and its HTML is that of the end.
    notebook.command("docmanager:save")
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
    page.goto(page.url.replace("/doc/", "/lab/").split("?")[0] + "?kernel=none&reset")
    notebook.ready(kernel=False)
    expect(notebook.cell(4).get_by_role("group", name="Job kept")).to_contain_text("cancelled")
    expect(notebook.cell(2).get_by_role("group", name="Job kept")).to_contain_text("running")
    notebook.photograph("no-kernel")
    expect(page.get_by_text("Error displaying widget")).to_have_count(0)
    assert re.search(r"Cancelled after", notebook.path.read_text())
    assert not notebook.errors
