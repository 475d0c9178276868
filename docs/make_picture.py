"""Make docs/pictures in a real JupyterLab: trainings of digits in several states, a sweep, the form.

Run it with `.venv/bin/python docs/make_picture.py` after `make test`, with the names of some pictures for these alone. It needs
Debian's chromium. What a cluster says is played.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

from PIL import Image

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import jupyter_lab

PICTURES = pathlib.Path(__file__).parent / "pictures"
COLOURS = 128
SETUP = """
import time
import kale_dist as kd
import torch
from fake_backend import FakeBackend
from kale_dist.wire import StateName
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train_loader = DataLoader(TensorDataset(images[:1437], labels[:1437]), batch_size=32, shuffle=True)
test_loader = DataLoader(TensorDataset(images[1437:], labels[1437:]), batch_size=60)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

def train_step(model, data_loader, criterion, optimizer, device, args):
    total, right = 0.0, 0
    for number, (x, y) in enumerate(data_loader):
        optimizer.zero_grad()
        scores = model(x)
        loss = criterion(scores, y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
        right += (scores.argmax(1) == y).sum().item()
        time.sleep(args or 0.06)  # or else it is over before it can be looked at
        if number % 6 == 0:
            print(f"batch {number}: loss {loss.item():.3f}")
    return {"loss": total / len(data_loader.dataset), "accuracy": right / len(data_loader.dataset)}

def broken_step(model, data_loader, criterion, optimizer, device, args):
    for x, y in data_loader:
        loss = criterion(model(x), y) * args["weight"]
        loss.backward()
        optimizer.step()

def full(run):
    reason = ("Pod digits-master-0 waits: it asks for 8 nvidia.com/gpu and no node has that many free (0/3 nodes are available: "
        "3 Insufficient nvidia.com/gpu). Ask for fewer GPUs a pod (processes_per_pod=, gpus in resources=), or wait until other jobs end.")
    run.event("state", state=StateName.PENDING, reason=reason)
    run.cancelled.wait()

cluster = FakeBackend(full)
"""
CALL = """job = kd.distribute(
    model, train_loader, criterion, optimizer, train_step,
    eval_data_loader=test_loader, epochs=8, number_of_processes=2, seed=0, name="train-digits",
)
job"""
FAILS = """job = kd.distribute(
    model, train_loader, criterion, optimizer, broken_step,
    number_of_processes=2, train_args={}, name="train-broken",
)
job"""
COMPARED = """jobs = []
for lr in (0.0003, 0.001, 0.01):
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    adam = torch.optim.Adam(network.parameters(), lr=lr)
    jobs.append(kd.distribute(
        network, train_loader, criterion, adam, train_step, eval_data_loader=test_loader, epochs=8, train_args=0.001, seed=0,
        name=f"digits-{len(jobs) + 1}",
    ))
    jobs[-1].wait()
kd.compare(*jobs)"""
SWEPT = """def call(trial):
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    adam = torch.optim.Adam(network.parameters(), lr=trial.suggest_float("lr", 1e-4, 1.0, log=True))
    return kd.distribute(
        network, train_loader, criterion, adam, train_step, eval_data_loader=test_loader, epochs=2, train_args=0.001, seed=0,
    )

sweep = kd.sweep(call, metric="eval/accuracy", direction="maximize", trials=10, name="lr")
sweep.wait()
sweep"""
PENDING = """job = kd.distribute(
    model, train_loader, criterion, optimizer, number_of_processes=2, on=cluster, name="digits",
)
job"""
HALF_WAY = """() => Number(document.querySelector('.kd-job [role=progressbar]')?.ariaValueNow) >= 62"""


def keep(page: Any, cell: Any, name: str, *, left_out: int = 8) -> None:
    """A picture of a cell with what is below it, without some pixels at its left."""
    cell.evaluate("cell => cell.scrollIntoView()")
    file = PICTURES / name
    box = cell.bounding_box()
    page.screenshot(path=file, clip={**box, "x": box["x"] + left_out, "width": box["width"] - left_out})
    Image.open(file).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        file, optimize=True
    )
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def widget(name: str, code: str) -> Callable[[jupyter_lab.Notebook], None]:
    """Draws a job's view, once it has this state."""
    state, _, _ = name.partition("-")

    def draw(notebook: jupyter_lab.Notebook) -> None:
        cell = notebook.start(code)
        cell.locator(f".kd-job[data-state={state}]").wait_for(timeout=300_000)
        notebook.page.wait_for_timeout(1000)
        keep(notebook.page, cell, f"{name.rpartition('-')[2]}.png")
        notebook.value("job.cancel(); job.wait(); job.delete()")

    return draw


def output(name: str, code: str, sign: str) -> Callable[[jupyter_lab.Notebook], None]:
    """Draws what is below a cell, once it has this text."""

    def draw(notebook: jupyter_lab.Notebook) -> None:
        cell = notebook.start(code)
        cell.get_by_text(sign).first.wait_for(timeout=300_000)
        keep(notebook.page, cell.locator(".jp-OutputArea-output").last, f"{name}.png", left_out=0)

    return draw


def half_way(notebook: jupyter_lab.Notebook) -> None:
    """Draws a training that runs, with the pointer on a chart."""
    cell = notebook.start(CALL)
    notebook.page.wait_for_function(HALF_WAY, timeout=300_000)
    # One pointer for all charts.
    cell.locator(".kd-frame").first.hover(position={"x": 220, "y": 60})
    keep(notebook.page, cell, "job.png")
    notebook.value("job.cancel(); job.wait(); job.delete()")


def used(notebook: jupyter_lab.Notebook) -> None:
    """Draws what the ranks of a training use and wait for."""
    cell = notebook.start(CALL.replace("epochs=8", "epochs=16"))
    cell.get_by_text("Memory, GPUs and waiting").click(timeout=300_000)
    notebook.page.wait_for_function(HALF_WAY, timeout=300_000)
    use = cell.locator(".kd-history")
    use.evaluate("use => use.scrollIntoView()")
    keep(notebook.page, use, "usage.png", left_out=-8)
    notebook.value("job.cancel(); job.wait(); job.delete()")


def filled_form(notebook: jupyter_lab.Notebook) -> None:
    """Draws the form of a call with Docker that resumes from a job of `compare`."""
    cell = notebook.start("kd.form()")
    cell.get_by_label("Where").select_option("docker")
    filled = {
        "Epochs": "16",
        "Processes": "2",
        "Image": "team/torch:2.13",
        "Resume from": "digits-3",
        "Keep warm": "10 min",
    }
    for label, text in filled.items():
        cell.get_by_label(label).fill(text)
    cell.get_by_role("button", name="Run").and_(cell.locator(":enabled")).wait_for()
    cell.get_by_text("keep_warm='10 min'").click()
    keep(notebook.page, cell, "form.png")


PICTURES_OF: dict[str, Callable[[jupyter_lab.Notebook], None]] = {
    "job": half_way,
    "usage": used,
    "failed": widget("failed", FAILS),
    "pending": widget("pending", PENDING),
    "compare": output("compare", COMPARED, "The same in all"),
    "jobs": output("jobs", "kd.jobs()", "digits-3"),
    "sweep": output("sweep", SWEPT, "10 of 10 trials"),
    "form": filled_form,
}


def main() -> None:
    """Make all pictures, or those that are named."""
    PICTURES.mkdir(exist_ok=True)
    with jupyter_lab.lab_and_browser() as (server, browser):
        context = browser.new_context(viewport={"width": 960, "height": 1100}, device_scale_factor=1.5)
        notebook = jupyter_lab.Notebook(server, context, "digits.ipynb", jupyter_lab.new_notebook([]))
        notebook.page.set_default_timeout(120_000)
        notebook.value(SETUP)
        notebook.page.add_style_tag(content=".jp-cell-toolbar { display: none !important; }")
        for name in sys.argv[1:] or PICTURES_OF:
            PICTURES_OF[name](notebook)
        notebook.close()


if __name__ == "__main__":
    main()
