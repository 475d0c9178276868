"""Make docs/pictures in a real JupyterLab: a training of digits half way, one that failed, jobs compared, and the form.

Run it with `.venv/bin/python docs/make_picture.py` after `make test`. It needs Debian's chromium.
"""

from __future__ import annotations

import pathlib
import sys
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
HALF_WAY = """() => Number(document.querySelector('.kd-job [role=progressbar]')?.ariaValueNow) >= 62"""


def keep(page: Any, cell: Any, name: str, *, left_out: int = 8) -> None:
    """A picture of a cell with what is below it, without some pixels at its left."""
    cell.evaluate("cell => cell.scrollIntoView()")
    file = PICTURES / name
    box = cell.bounding_box()
    page.screenshot(path=file, clip={**box, "x": box["x"] + left_out, "width": box["width"] - left_out})
    Image.open(file).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Make all pictures."""
    PICTURES.mkdir(exist_ok=True)
    with jupyter_lab.lab_and_browser() as (server, browser):
        context = browser.new_context(viewport={"width": 960, "height": 1100}, device_scale_factor=1.5)
        content = jupyter_lab.new_notebook([CALL, FAILS, COMPARED, SWEPT, "kd.form()"])
        notebook = jupyter_lab.Notebook(server, context, "digits.ipynb", content)
        notebook.value(SETUP)
        job = notebook.run_cell(0)
        notebook.page.wait_for_function(HALF_WAY, timeout=120_000)
        # One pointer for all charts.
        job.locator(".kd-frame").first.hover(position={"x": 220, "y": 60})
        keep(notebook.page, job, "job.png")
        notebook.value("job.cancel(); job.wait()")
        failed = notebook.run_cell(1)
        failed.locator(".kd-job[data-state=failed]").wait_for(timeout=120_000)
        notebook.page.wait_for_timeout(1000)
        keep(notebook.page, failed, "failed.png")
        compared = notebook.run_cell(2)
        compared.get_by_role("group", name="Comparison of jobs").wait_for(timeout=300_000)
        keep(notebook.page, compared.locator(".jp-OutputArea-output").last, "compare.png", left_out=0)
        swept = notebook.run_cell(3)
        swept.get_by_role("group", name="Sweep lr").get_by_text("10 of 10 trials").wait_for(timeout=300_000)
        keep(notebook.page, swept.locator(".jp-OutputArea-output").last, "sweep.png", left_out=0)
        form = notebook.run_cell(4)
        form.get_by_label("Epochs").fill("8")
        form.get_by_label("Processes").fill("2")
        form.get_by_text("number_of_processes=2").wait_for()
        keep(notebook.page, form, "form.png")
        notebook.close()


if __name__ == "__main__":
    main()
