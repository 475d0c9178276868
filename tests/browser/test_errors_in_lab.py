"""What a mistake in a call looks like below its cell."""

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_a_wrong_argument_is_one_sentence_below_the_users_line(open_notebook, theme):
    notebook = open_notebook(f"mistake-{theme[-5:].strip()}.ipynb")
    notebook.dress(theme, 1000)
    notebook.value("import kale_dist as kd\ndef work():\n    print('never')")
    cell = notebook.run("job = kd.launch(work, number_of_processes=-1)\njob.wait()")
    shown = cell.locator(".jp-OutputArea-output")
    expect(shown).to_contain_text(
        "ConfigError: number_of_processes: -1 is neither a whole number of 1 or more nor a range of two"
    )
    expect(shown).to_contain_text("----> 1 job = kd.launch(work, number_of_processes=-1)")
    expect(shown).not_to_contain_text("kale_dist/")
    notebook.photograph(f"mistake-{theme[-5:].strip().lower()}", shown)
    assert not notebook.errors
