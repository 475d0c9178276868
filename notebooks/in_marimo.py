"""Train on handwritten digits, in marimo: `marimo edit notebooks/in_marimo.py`. As a script it trains, too."""

import marimo

__generated_with = "0.25.2"

app = marimo.App()


@app.cell
def _():
    import marimo as mo
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import kale_dist as kd

    return DataLoader, TensorDataset, kd, load_digits, mo, nn, torch


@app.cell
def _(mo):
    mo.md("""
    # Train on every core, in marimo

    The model and the step are defined in cells, and one call trains them on two processes.
    """)
    return


@app.cell
def _(DataLoader, TensorDataset, load_digits, torch):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True)
    return images, labels, loader


@app.cell
def _(nn):
    class Digits(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

        def forward(self, x):
            return self.layers(x)

    return (Digits,)


@app.cell
def _(mo):
    epochs = mo.ui.slider(5, 40, value=15, label="epochs")
    epochs
    return (epochs,)


@app.cell
def _(Digits, epochs, kd, loader, nn, torch):
    # The model is made here, so that a change of the slider trains a new one.
    torch.manual_seed(0)
    model = Digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    job = kd.distribute(
        model, loader, nn.CrossEntropyLoss(), optimizer, epochs=epochs.value, number_of_processes=2, seed=0
    )
    job
    return job, model


@app.cell
def _(images, job, labels, mo, model, torch):
    # What waits has a cell of its own, so that the card above is there meanwhile.
    assert job.model is model
    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"accuracy on 297 other digits: {accuracy:.3f}")
    assert accuracy > 0.85
    mo.md(f"**Accuracy on 297 other digits: {accuracy:.3f}**")
    return


if __name__ == "__main__":
    app.run()
