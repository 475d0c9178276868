"""Make docs/pictures/restarts.png: the loss of a training of digits that loses a rank twice, over the same one undisturbed.

Run it with `.venv/bin/python docs/make_curve.py`.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time
from typing import Any

import matplotlib.pyplot as plt
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd

PICTURE = pathlib.Path(__file__).parent / "pictures" / "restarts.png"
EPOCHS = 3
LOST = (56, 112)
"""The steps after which rank 1 is killed, one in each attempt."""


LINE = re.compile(r"(\d+) (\d+) ([\d.e-]+)")


def train_step(
    model: nn.Module, data_loader: Any, criterion: Any, optimizer: Any, _device: Any, lost: tuple[int, ...]
) -> dict[str, float]:
    """Train an epoch; rank 0 prints its attempt, the step and its loss."""
    place, total = kd.context(), 0.0
    first = next(model.parameters())
    for x, y in data_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
        step = int(optimizer.state[first]["step"])
        if place.rank == 0:
            print(place.attempt, step, loss.item())
        time.sleep(0.05)  # a step of a model that is worth a restart
        if place.rank == 1 and place.attempt < len(lost) and step == lost[place.attempt]:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"loss": total / len(data_loader)}


def losses(lost: tuple[int, ...]) -> list[dict[int, float]]:
    """Train; returns the losses of each attempt by their steps."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    job = kd.distribute(
        model, DataLoader(TensorDataset(images, labels), batch_size=20, shuffle=True), nn.CrossEntropyLoss(),
        torch.optim.Adam(model.parameters(), lr=2e-3), train_step, train_args=lost, epochs=EPOCHS,
        number_of_processes=2, seed=0, max_restarts=len(lost), checkpoint_every="20 steps",
    )  # fmt: skip
    try:
        job.result()
        attempts: list[dict[int, float]] = [{} for _ in range(len(lost) + 1)]
        for line in job.logs():
            if line.rank == 0 and (found := LINE.fullmatch(line.text)):
                attempts[int(found[1])][int(found[2])] = float(found[3])
        return attempts
    finally:
        job.delete()


def main() -> None:
    """Train twice, and draw both."""
    (whole,), attempts = losses(()), losses(LOST)
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    axes.plot(list(whole), list(whole.values()), color="0.82", linewidth=6, label="undisturbed")
    for number, attempt in enumerate(attempts):
        axes.plot(list(attempt), list(attempt.values()), linewidth=3 - number, label=f"attempt {number + 1}")
    for number, step in enumerate(LOST):
        again = min(attempts[number + 1])
        axes.axvline(step, color="tab:red", linestyle="--", linewidth=1, label=None if number else "rank 1 is killed")
        axes.axvspan(again, step, color="tab:red", alpha=0.1, linewidth=0, label=None if number else "repeated")
    epoch = max(whole) // EPOCHS
    for number in range(EPOCHS + 1):
        axes.axvline(number * epoch, color="0.6", linestyle=":", linewidth=1, label=None if number else "epochs")
    axes.set(xlabel="step", ylabel="loss of rank 0", ylim=(0, None), xlim=(0, max(whole) + 1))
    axes.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=150)
    Image.open(PICTURE).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    worst = max(abs(whole[step] - value) for attempt in attempts for step, value in attempt.items())
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB; largest difference of a loss {worst}")


if __name__ == "__main__":
    main()
