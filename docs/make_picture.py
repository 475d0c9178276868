"""Make docs/pictures/job.png: a training of digits below its cell, half way. Needs Debian's chromium.

Run it with `.venv/bin/python docs/make_picture.py` after `make test`.
"""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
import time
from typing import Any

import torch
from PIL import Image, ImageChops
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist import view

PICTURE = pathlib.Path(__file__).parent / "pictures" / "job.png"
WIDTH = 820
HALF_WAY = 0.62
PAGE = """<!doctype html><meta charset="utf-8">
<body style="margin:16px;background:#fff;font-family:system-ui,'DejaVu Sans',sans-serif">{}</body>"""


def train_step(
    model: nn.Module, data_loader: Any, criterion: Any, optimizer: Any, _device: Any, _args: Any
) -> dict[str, float]:
    """One epoch, slowed down so that there is a moment to look at."""
    total = 0.0
    for number, (x, y) in enumerate(data_loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y)
        time.sleep(0.02)
        if number % 12 == 0:
            print(f"batch {number}: loss {loss.item():.3f}")
    return {"loss": total / len(data_loader.dataset)}


def half_way() -> str:
    """A job's view while it runs, as HTML."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    job = kd.distribute(
        model,
        DataLoader(TensorDataset(images[:1437], labels[:1437]), batch_size=32, shuffle=True),
        nn.CrossEntropyLoss(),
        torch.optim.Adam(model.parameters(), lr=2e-3),
        train_step,
        eval_data_loader=DataLoader(TensorDataset(images[1437:], labels[1437:]), batch_size=60),
        epochs=8,
        number_of_processes=2,
        seed=0,
        name="train-digits",
    )
    try:
        while (status := job.status).fraction is None or status.fraction < HALF_WAY:
            if status.is_final:
                raise SystemExit(f"the job ended too soon: {status.reason}")
            time.sleep(0.05)
        return view.html(status, list(job.logs(tail=8)), time.time())
    finally:
        job.delete()


def photograph(html: str) -> None:
    """A picture of the HTML, without the empty space below it."""
    with tempfile.TemporaryDirectory() as folder:
        page, shot = pathlib.Path(folder) / "job.html", pathlib.Path(folder) / "shot.png"
        page.write_text(PAGE.format(html))
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=2"]
        size = [f"--window-size={WIDTH},1400", f"--screenshot={shot}"]
        subprocess.run(["chromium", *options, *size, page.as_uri()], check=True, capture_output=True)  # noqa: S607 - Debian's
        image = Image.open(shot).convert("RGB")
        box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
        bottom = box[3] + 32 if box else image.height
        PICTURE.parent.mkdir(exist_ok=True)
        image.crop((0, 0, image.width, bottom)).save(PICTURE, optimize=True)


if __name__ == "__main__":
    photograph(half_way())
