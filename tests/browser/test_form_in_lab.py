"""The launcher form, used as a person uses it: chosen, checked, written into a cell, executed."""

import pytest
from playwright.sync_api import expect

NAMES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd

torch.manual_seed(0)
inputs = torch.randn(96, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
train_loader = DataLoader(data, batch_size=8)
test_loader = DataLoader(data, batch_size=32)
small, large = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
other_optimizer = torch.optim.Adam(large.parameters(), lr=0.01)
"""


@pytest.fixture(scope="module")
def notebook(open_notebook):
    made = open_notebook("form.ipynb", cells=["import kale_dist as kd\nkd.form()"])
    yield made
    assert not made.errors


@pytest.fixture(scope="module")
def form(notebook):
    """The form, in a notebook that has what a training needs."""
    view = notebook.run_cell(0).get_by_role("form", name="Distributed training")
    view.wait_for()
    # Nothing is there yet: it says what it looks for.
    expect(view.get_by_text("The notebook lacks a model, a DataLoader and an optimizer")).to_be_visible()
    expect(view.get_by_role("button", name="Run")).to_be_disabled()
    notebook.photograph("form-empty", view)
    notebook.run(NAMES)
    view.scroll_into_view_if_needed()
    view.get_by_role("button", name="Look again").click()
    expect(view.get_by_role("status").filter(has_text="Looked again")).to_be_visible()
    return view


def call(form):
    return form.get_by_label("The call")


def problem(form):
    return form.locator(".kd-problem")


def test_it_offers_the_notebooks_names_and_guesses_which_belong_together(form):
    assert form.get_by_label("Model").locator("option").all_text_contents() == ["small", "large"]
    assert form.get_by_label("Training data").input_value() == "train_loader"
    assert form.get_by_label("Evaluation data").input_value() == "test_loader"
    assert form.get_by_label("Training step").locator("option").all_text_contents() == ["ready-made"]
    expect(call(form)).to_contain_text("small, train_loader, criterion, optimizer,")
    expect(problem(form)).to_be_hidden()


def test_it_checks_as_one_types_and_shows_the_call(notebook, form):
    epochs = form.get_by_label("Epochs")
    epochs.fill("0")
    expect(problem(form)).to_contain_text("epochs")
    expect(epochs).to_have_attribute("aria-invalid", "true")
    expect(form.get_by_role("button", name="Write into a new cell")).to_be_disabled()
    notebook.photograph("form-problem", form)
    epochs.fill("2")
    expect(problem(form)).to_be_hidden()
    expect(epochs).to_have_attribute("aria-invalid", "false")
    expect(call(form)).to_contain_text("epochs=2")
    # The optimizer of another model.
    form.get_by_label("Model").select_option("large")
    expect(problem(form)).to_contain_text("optimizer")
    form.get_by_label("Optimizer").select_option("other_optimizer")
    expect(problem(form)).to_be_hidden()
    expect(call(form)).to_contain_text("large, train_loader, criterion, other_optimizer,")


def test_what_only_other_places_know_appears_with_them(form):
    expect(form.get_by_label("Image")).to_be_hidden()
    form.get_by_label("Where").select_option("docker")
    for name, text in (("Image", "team/torch:2"), ("Memory each", "2Gi"), ("Volumes", "/data=digits")):
        form.get_by_label(name).fill(text)
    expect(call(form)).to_contain_text("volumes={'/data': 'digits'}")
    expect(call(form)).to_contain_text("resources={'memory': '2Gi'}")
    for name in ("Image", "Memory each", "Volumes"):
        form.get_by_label(name).fill("")
    form.get_by_label("Where").select_option("local")
    expect(form.get_by_label("Image")).to_be_hidden()
    expect(problem(form)).to_be_hidden()


def test_by_keyboard_the_call_is_written_into_a_new_cell_and_executed(notebook, form):
    press = notebook.page.keyboard.press
    form.get_by_label("Loss").focus()
    press("ArrowUp")
    expect(call(form)).to_contain_text("large, train_loader, None, other_optimizer,")
    press("c")
    expect(call(form)).to_contain_text("large, train_loader, criterion, other_optimizer,")
    form.get_by_label("Processes").focus()
    notebook.page.keyboard.type("1")
    form.get_by_label("Name").focus()
    notebook.page.keyboard.type("written")
    expect(call(form)).to_contain_text("name='written'")
    press("Tab")
    expect(call(form)).to_be_focused()
    press("Tab")
    expect(form.get_by_role("button", name="Write into a new cell")).to_be_focused()
    text = call(form).inner_text()
    press("Enter")
    written = notebook.cell(1).locator(".cm-content")
    expect(written).to_be_focused()
    expect(written.locator(".cm-line")).to_have_text(text.split("\n"))
    press("Control+Enter")
    job = notebook.cell(1).locator(".kd-job")
    expect(job).to_have_attribute("data-state", "succeeded", timeout=60_000)
    expect(job).to_have_attribute("aria-label", "Job written, succeeded")
    assert notebook.value("print(job.wait().state.value, job.model is large, len(job.metrics))") == "succeeded True 4"
    form.scroll_into_view_if_needed()
    notebook.photograph("form-written")


def test_run_makes_the_call_and_shows_the_job_in_the_form(notebook, form):
    form.get_by_label("Name").fill("at-once")
    expect(call(form)).to_contain_text("at-once")
    form.get_by_role("button", name="Run").click()
    expect(form.get_by_text("Started as `job`: local://at-once")).to_be_visible()
    expect(form.locator(".kd-job")).to_have_attribute("data-state", "succeeded", timeout=60_000)
    assert notebook.value("print(job.name, job.wait().state.value)") == "at-once succeeded"


@pytest.mark.parametrize("width", [1000, 480])
@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_it_is_accessible_and_fits_in_every_theme_and_width(notebook, form, theme, width):
    notebook.dress(theme, width)
    form.scroll_into_view_if_needed()
    assert form.evaluate("view => view.scrollWidth <= view.clientWidth + 1")
    notebook.photograph(f"form-{theme.split()[1].lower()}-{width}", form)
    assert notebook.accessibility_problems(".kd-form") == ""
