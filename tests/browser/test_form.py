"""The launcher form, used as a person uses it: chosen, checked, written into a cell, executed, run."""

import json

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.nightly
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
IMAGE = "registry.example.com:5000/a-team-with-a-long-name/and-a-project/pytorch-cuda-with-extras:2.13-tag"
END_IN_VIEW = "input => input.scrollLeft + input.clientWidth >= input.scrollWidth - 1"


def test_a_training_is_chosen_checked_written_and_run(open_notebook):
    notebook = open_notebook("form.ipynb", cells=["import kale_dist as kd\nkd.form()"])
    page, press = notebook.page, notebook.page.keyboard.press
    form = notebook.run_cell(0).get_by_role("form", name="Distributed training")
    # The cell imports torch, which takes a while on a busy machine.
    form.wait_for(timeout=90_000)
    call, problem, field = form.get_by_label("The call"), form.locator(".kd-problem"), form.get_by_label
    buttons = [form.get_by_role("button", name=name) for name in ("Write into a new cell", "Copy", "Run")]

    # Nothing is there yet: it says what it looks for, and no button takes a call that is none.
    expect(form.get_by_text("The notebook lacks a model, a DataLoader and an optimizer")).to_be_visible()
    for button in buttons:
        expect(button).to_be_disabled()
    notebook.run(NAMES)
    form.scroll_into_view_if_needed()
    form.get_by_role("button", name="Refresh").click()
    expect(form.get_by_role("status").filter(has_text="Refreshed")).to_be_visible()

    # It offers the notebook's names and guesses which belong together.
    assert field("Model").locator("option").all_text_contents() == ["small", "large"]
    assert field("Training data").input_value() == "train_loader"
    assert field("Evaluation data").input_value() == "test_loader"
    expect(call).to_contain_text("small, train_loader, criterion, optimizer,")
    expect(problem).to_be_hidden()

    # It checks as one types.
    field("Epochs").fill("0")
    expect(problem).to_contain_text("epochs")
    expect(field("Epochs")).to_have_attribute("aria-invalid", "true")
    for button in buttons:
        expect(button).to_be_disabled()
    notebook.photograph("form-problem", form)
    field("Epochs").fill("2")
    expect(problem).to_be_hidden()
    field("Model").select_option("large")
    expect(problem).to_contain_text("optimizer")
    field("Optimizer").select_option("other_optimizer")
    expect(problem).to_be_hidden()

    # What only other places know appears with them; a long image shows its tag.
    expect(field("Image")).to_be_hidden()
    field("Where").select_option("docker")
    for name, text in (("Image", IMAGE), ("Packages", "einops, timm"), ("Memory each", "64Ti")):
        field(name).fill(text)
    expect(problem).to_contain_text("no machine has 64Ti of memory. Did you mean '64Gi'?")
    expect(field("Memory each")).to_have_attribute("aria-invalid", "true")
    expect(call).to_contain_text(f"on=kd.Docker(\n        image='{IMAGE}',\n        packages=['einops', 'timm'],")
    # The page scrolls it in the frame after a change.
    page.wait_for_function(END_IN_VIEW, arg=field("Image").element_handle())
    for theme, width in (("JupyterLab Light", 1000), ("JupyterLab Dark", 480)):
        notebook.dress(theme, width)
        form.scroll_into_view_if_needed()
        assert notebook.fits(form)
        page.wait_for_function(END_IN_VIEW, arg=field("Image").element_handle())
        notebook.photograph(f"form-{theme.split()[1].lower()}-{width}", form)
        assert notebook.accessibility_problems(".kd-form") == ""
    notebook.dress("JupyterLab Light", 1000)
    field("Where").select_option("local")
    expect(field("Image")).to_be_hidden()
    expect(problem).to_be_hidden()

    # By keyboard, the call is written into a new cell and executed.
    field("Loss").focus()
    press("ArrowUp")
    expect(call).to_contain_text("large, train_loader, None, other_optimizer,")
    press("c")
    expect(call).to_contain_text("large, train_loader, criterion, other_optimizer,")
    field("Processes").fill("1")
    field("Name", exact=True).focus()
    page.keyboard.type("written")
    expect(call).to_contain_text("name='written'")
    press("Tab")
    expect(field("Resume from")).to_be_focused()
    press("Tab")
    expect(call).to_be_focused()
    press("Tab")
    expect(buttons[0]).to_be_focused()
    text = call.inner_text()
    press("Enter")
    written = notebook.cell(1).locator(".cm-content")
    expect(written).to_be_focused()
    expect(written.locator(".cm-line")).to_have_text(text.split("\n"))
    press("Control+Enter")
    job = notebook.cell(1).locator(".kd-job")
    expect(job).to_have_attribute("data-state", "succeeded", timeout=60_000)
    count = "sum(row['source'] in ('train', 'eval') for row in job.metrics)"
    assert notebook.value(f"print(job.wait().state.value, job.model is large, {count})") == "succeeded True 4"

    # Run makes the call at once, and shows the job in the form.
    form.scroll_into_view_if_needed()
    field("Name", exact=True).fill("at-once")
    expect(call).to_contain_text("at-once")
    buttons[2].click()
    expect(form.get_by_text("Started as `job`: local://at-once")).to_be_visible()
    expect(form.locator(".kd-job")).to_have_attribute("data-state", "succeeded", timeout=60_000)
    notebook.photograph("form-ran", form)

    # Without a kernel the saved notebook shows the call.
    notebook.command("docmanager:save")
    kept = json.loads(notebook.path.read_text())["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]
    assert any("name='at-once'" in one["state"]["value"] for one in kept["state"].values())
    assert not notebook.errors
