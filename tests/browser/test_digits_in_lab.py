"""The example of the README, run cell by cell in JupyterLab."""

import pathlib

import nbformat
import pytest

pytestmark = pytest.mark.nightly

DIGITS = pathlib.Path(__file__).parents[2] / "notebooks" / "digits.ipynb"


def test_the_curve_moves_while_digits_are_trained(open_notebook):
    nodes = nbformat.read(DIGITS, as_version=4)
    for cell in nodes.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.source = cell.source.replace(
                "    model.train()\n", "    import time; time.sleep(0.3)\n    model.train()\n"
            )
    notebook = open_notebook("digits.ipynb", content=nodes)
    *now, later = [index for index, cell in enumerate(nodes.cells) if cell.cell_type == "code"][:6]
    for index in now:
        notebook.run_cell(index)
    view = notebook.page.locator(".kd-job")
    view.wait_for(timeout=60_000)
    view.scroll_into_view_if_needed()
    curve = ".kd-job svg[aria-label^='loss'] path[stroke^='#']"
    first = notebook.page.locator(curve).first.get_attribute("d", timeout=60_000)
    notebook.page.wait_for_function(
        "([curve, before]) => document.querySelector(curve).getAttribute('d') !== before", arg=[curve, first]
    )
    view.evaluate("view => view.scrollIntoView()")
    notebook.photograph("digits-running")
    notebook.page.wait_for_selector(".kd-job[data-state='succeeded']", timeout=60_000)
    view.evaluate("view => view.scrollIntoView()")
    notebook.page.wait_for_function(
        "() => { const log = document.querySelector('.kd-lines'); "
        "return log.scrollTop > 0 && log.scrollTop + log.clientHeight >= log.scrollHeight - 2; }"
    )
    notebook.photograph("digits-succeeded")
    for index in range(later, len(nodes.cells)):
        notebook.run_cell(index)
    notebook.wait_idle()
    assert notebook.page.locator(".jp-Cell >> text=/test accuracy: 0.9/").count() == 1
    assert not notebook.errors
