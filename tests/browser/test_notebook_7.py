"""The live view of a job in Jupyter Notebook 7, which has JupyterLab's parts and a page for each notebook."""

import importlib.util

import jupyter_lab
import notebook_parts
import pytest
from playwright.sync_api import expect
from test_widget import WORK

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A Notebook 7, where other tests of this folder have a JupyterLab."""
    if importlib.util.find_spec("notebook") is None:
        notebook_parts.missing("notebook is not installed")
    with jupyter_lab.serve(tmp_path_factory.mktemp("notebook"), "notebook") as found:
        yield found


def test_a_job_is_watched_and_cancelled_below_its_cell(open_notebook):
    notebook = open_notebook("classic.ipynb")
    # It misses the part of JupyterLab whose settings this folder's tests have.
    its_own = list(notebook.errors)
    notebook.run(WORK)
    view = notebook.show("job = kd.launch(work, 600, 0.1, number_of_processes=2, name='classic')\njob")
    expect(view.get_by_text("[1] step 3 of rank 1")).to_be_visible()
    expect(view.get_by_role("img", name="loss: ")).to_be_visible()
    notebook.photograph("notebook-7")
    view.get_by_role("button", name="Cancel").click()
    view.get_by_role("button", name="Yes, cancel the job").click()
    expect(view).to_have_attribute("data-state", "cancelled")
    assert notebook.accessibility_problems(".kd-job") == ""
    assert notebook.errors == its_own
