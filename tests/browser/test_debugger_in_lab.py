"""`breakpoint()` typed at in JupyterLab's own input, the card of a rank that waits, and the local variables of an error."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.nightly

STEP = """
import kale_dist as kd, torch

def step(k, password):
    x = torch.arange(4.0) * k
    if kd.context().rank == 0:
        return x
    breakpoint()
    x[0] = float("nan")
    return x @ torch.ones(5)
"""


def test_a_rank_is_debugged_in_its_cell_and_its_error_has_local_variables(open_notebook):
    notebook = open_notebook(
        "debugger.ipynb", cells=[STEP, "job = kd.launch(step, 2, 'hunter2', number_of_processes=2)\njob"]
    )
    page = notebook.page
    notebook.run_cell(0)
    view = notebook.run_cell(1).locator(".kd-job")
    expect(view).to_contain_text("job.debug(rank=1)", timeout=90_000)
    notebook.photograph("debugger-card", view)
    waiting = notebook.start("job.wait()")
    box = page.locator(".jp-Stdin-input")
    expect(waiting).to_contain_text("-> x[0] = float(", timeout=30_000)
    for line, printed in (("p x", "tensor([0., 2., 4., 6.])"), ("p x.sum()", "tensor(12.)")):
        box.last.fill(line)
        box.last.press("Enter")
        expect(waiting).to_contain_text(printed)
    notebook.photograph("debugger-prompt", waiting)
    box.last.fill("c")
    box.last.press("Enter")
    expect(view).to_have_attribute("data-state", "failed", timeout=30_000)
    folded = view.get_by_text("Local variables")
    shown = view.get_by_text("1 not finite").first
    expect(shown).to_be_hidden()
    folded.click()
    expect(shown).to_be_visible()
    expect(view).to_contain_text("password = str of 7")
    expect(view).not_to_contain_text("hunter2")
    folded.scroll_into_view_if_needed()
    notebook.photograph("debugger-locals", view)
