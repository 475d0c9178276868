"""The live view of a job in a real marimo, whose notebooks are Python files."""

import importlib.util
import subprocess
import sys

import jupyter_lab
import notebook_parts
import pytest
from playwright.sync_api import expect
from waiting import until

pytestmark = pytest.mark.nightly

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import time
    import torch
    import kale_dist as kd
    return kd, time, torch


@app.cell
def _(kd, time):
    def work(steps):
        for step in range(1, steps + 1):
            print(f"step {step}", flush=True)
            kd.report(loss=1 / step)
            time.sleep(0.1)

    job = kd.launch(work, 600, number_of_processes=2, name="in-marimo")
    job
    return (job,)


@app.function
def ratio(x):
    y = 0
    return x / y


@app.cell
def _(kd):
    failed = kd.launch(ratio, 1, number_of_processes=1, name="fails-in-marimo")
    failed
    return


@app.cell
def _(kd, torch):
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), 2)
    trained = kd.distribute(model, data, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), number_of_processes=1)
    print("the same:", trained.model is model, trained.result().epochs)
    with kd.live(2, name="live-in-marimo") as live:
        live.run("x = rank + 1")
        print("pulled:", live.pull("x"))
    return


@app.cell
def _(job):
    job.wait()
    return
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A notebook of marimo with all cells run."""
    if importlib.util.find_spec("marimo") is None:
        notebook_parts.missing("marimo is not installed")
    folder = tmp_path_factory.mktemp("marimo")
    file = folder / "notebook.py"
    file.write_text(NOTEBOOK)
    words = ["marimo", "edit", str(file), "--headless", "--no-token", "--skip-update-check"]
    with jupyter_lab.running(words, folder, "health") as (address, enter):
        server = jupyter_lab.Server(address, address, folder, enter)
        expect.set_options(timeout=20_000)
        with jupyter_lab.browse(server, folder) as browser:
            opened = browser.new_page(viewport={"width": 1100, "height": 2400})
            opened.goto(address)
            expect(opened.get_by_text("kd.launch(work")).to_be_visible()
            opened.keyboard.press("Control+Shift+r")
            yield opened


def card(page, name):
    return page.locator(f".kd-job[aria-label^='Job {name}']")


def test_the_card_is_live_in_both_themes(page):
    view = card(page, "in-marimo")
    expect(view).to_have_attribute("data-state", "running")
    expect(view.get_by_text("[1] step 3", exact=True)).to_be_visible()
    expect(view.get_by_role("img", name="loss: ")).to_be_visible()
    before = view.locator(".kd-count").inner_text()
    until(lambda: view.locator(".kd-count").inner_text() != before, 10)
    jupyter_lab.SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.evaluate("dark => document.body.classList.toggle('dark', dark)", theme == "dark")
        view.screenshot(path=jupyter_lab.SCREENSHOTS / f"marimo-{theme}.png")


def test_errors_name_the_cell_by_its_place(page):
    view = card(page, "fails-in-marimo")
    expect(view.get_by_text("in cell 3:3 in ratio")).to_be_visible()
    expect(view.get_by_text('File "cell 3", line 3, in ratio')).to_be_visible()


def test_weights_come_back_and_live_ranks_run(page):
    expect(page.get_by_text("the same: True 1")).to_be_visible()
    expect(page.get_by_text("pulled: [1, 2]")).to_be_visible()


def test_the_stop_button_ends_the_wait_and_the_cards_button_the_job(page):
    view = card(page, "in-marimo")
    page.get_by_test_id("interrupt-button").click()
    expect(page.get_by_text("in-marimo keeps running. To cancel it").first).to_be_visible()
    expect(view).to_have_attribute("data-state", "running")
    view.get_by_role("button", name="Cancel").click()
    view.get_by_role("button", name="Yes, cancel the job").click()
    expect(view).to_have_attribute("data-state", "cancelled")
    expect(view.get_by_role("button", name="Retry")).to_be_visible()


def test_the_example_runs_as_a_script():
    file = jupyter_lab.ROOT / "notebooks" / "in_marimo.py"
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "accuracy on 297 other digits: 0." in ended.stdout
