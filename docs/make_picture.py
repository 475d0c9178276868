"""Make docs/pictures: a training of digits below its cell, half way, and the form, in a real JupyterLab.

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
    total = 0.0
    for number, (x, y) in enumerate(data_loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
        time.sleep(0.06)  # or else it is over before it can be looked at
        if number % 6 == 0:
            print(f"batch {number}: loss {loss.item():.3f}")
    return {"loss": total / len(data_loader.dataset)}
"""
CALL = """job = kd.distribute(
    model, train_loader, criterion, optimizer, train_step,
    eval_data_loader=test_loader, epochs=8, number_of_processes=2, seed=0, name="train-digits",
)
job"""
HALF_WAY = """() => Number(document.querySelector('.kd-job [role=progressbar]')?.ariaValueNow) >= 62"""


def keep(page: Any, cell: Any, name: str) -> None:
    """A picture of a cell with what is below it."""
    cell.evaluate("cell => cell.scrollIntoView()")
    page.mouse.move(0, 0)
    file = PICTURES / name
    box = cell.bounding_box()
    page.screenshot(path=file, clip={**box, "x": box["x"] + 8, "width": box["width"] - 8})
    Image.open(file).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Make all pictures."""
    PICTURES.mkdir(exist_ok=True)
    with jupyter_lab.lab_and_browser() as (server, browser):
        context = browser.new_context(viewport={"width": 960, "height": 1100}, device_scale_factor=2)
        content = jupyter_lab.new_notebook([CALL, "kd.form()"])
        notebook = jupyter_lab.Notebook(server, context, "digits.ipynb", content)
        notebook.value(SETUP)
        job = notebook.run_cell(0)
        notebook.page.wait_for_function(HALF_WAY, timeout=120_000)
        keep(notebook.page, job, "job.png")
        notebook.value("job.cancel()")
        form = notebook.run_cell(1)
        form.get_by_label("Epochs").fill("8")
        form.get_by_label("Processes").fill("2")
        form.get_by_text("number_of_processes=2").wait_for()
        keep(notebook.page, form, "form.png")
        notebook.close()


if __name__ == "__main__":
    main()
