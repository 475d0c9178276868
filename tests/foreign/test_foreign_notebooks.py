"""Notebooks as other people write them, run whole in a real kernel: only the last cells know kale_dist."""

from __future__ import annotations

import pathlib
import textwrap

import nbclient
import nbformat
import pytest

CLASSIFIER = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from sklearn.datasets import load_digits
# ---
class Digits(Dataset):
    def __init__(self, train=True):
        data = load_digits()
        keep = slice(0, 1437) if train else slice(1437, None)
        self.x = torch.tensor(data.images[keep] / 16, dtype=torch.float32).unsqueeze(1)
        self.y = torch.tensor(data.target[keep])
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(128, 10)
    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(torch.flatten(self.dropout(x), 1)), dim=1)
# ---
train_loader = DataLoader(Digits(True), batch_size=32, shuffle=True, num_workers=2)
test_loader = DataLoader(Digits(False), batch_size=200)
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
log_interval = 10
# ---
def train(model, train_loader, criterion, optimizer, device, args):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % log_interval == 0:
            print('Train: [{}/{} ({:.0f}%)]\\tLoss: {:.6f}'.format(batch_idx * len(data), len(train_loader.dataset),
                  100. * batch_idx / len(train_loader), loss.item()))

def test(model, test_loader, criterion, device, args):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction='sum').item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    return {"test_loss": test_loss / len(test_loader.dataset), "accuracy": correct / len(test_loader.dataset)}
# ---
import kale_dist as kd
job = kd.distribute(model, train_loader, F.nll_loss, optimizer, train, eval_data_loader=test_loader, eval_step=test,
                    scheduler=scheduler, epochs=4, number_of_processes=2, seed=1)
job.wait()
assert job.model is model
here = test(job.model, test_loader, None, "cpu", {})
there = [row for row in job.metrics if row["source"] == "eval"][-1]
assert here["accuracy"] > 0.8, here
assert abs(here["accuracy"] - there["accuracy"]) < 1e-6, (here, there)
assert abs(here["test_loss"] - there["test_loss"]) < 1e-4, (here, there)
assert abs(optimizer.param_groups[0]["lr"] - 0.7 ** 4) < 1e-9, optimizer.param_groups[0]["lr"]
"""

TEXT_MODEL = """
import collections, math, re
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.nn.utils.rnn import pad_sequence
from textprep import clean, STOPWORDS
# ---
SENTENCES = [("what a wonderful film", 1), ("i loved the wonderful acting", 1), ("a joy from start to end", 1),
             ("dreadful and dull film", 0), ("i hated the dull acting", 0), ("a bore from start to end", 0)] * 40
tokenize = lambda text: [word for word in clean(text).split() if word not in STOPWORDS]
vocabulary = {"<pad>": 0}
for text, _ in SENTENCES:
    for word in tokenize(text):
        vocabulary.setdefault(word, len(vocabulary))
def collate(batch):
    ids = [torch.tensor([vocabulary[word] for word in tokenize(text)]) for text, _ in batch]
    return pad_sequence(ids, batch_first=True), torch.tensor([label for _, label in batch])
loader = DataLoader(SENTENCES, batch_size=8, shuffle=True, collate_fn=collate)
# ---
class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=64):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div)
        pe[0, :, 1::2] = torch.cos(position * div)
        self.register_buffer("pe", pe)
    def forward(self, x):
        return x + self.pe[:, : x.size(1)]

class Classifier(nn.Module):
    def __init__(self, words, d_model=32):
        super().__init__()
        self.embed = nn.Embedding(words, d_model, padding_idx=0)
        self.position = PositionalEncoding(d_model)
        layer = nn.TransformerEncoderLayer(d_model, 2, 64, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(d_model, 2)
    def forward(self, ids):
        mask = ids == 0
        x = self.encoder(self.position(self.embed(ids)), src_key_padding_mask=mask)
        return self.out(x.masked_fill(mask.unsqueeze(-1), 0).sum(1))
    def loss(self, ids, labels):
        return nn.functional.cross_entropy(self(ids), labels)

model = Classifier(len(vocabulary))
history = collections.Counter()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
# ---
def run_epoch(net, data_loader, criterion, opt, device, args):
    net.train()
    total, seen = 0.0, 0
    for ids, labels in data_loader:
        opt.zero_grad()
        loss = net.loss(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), args["max_norm"])
        opt.step()
        history["steps"] += 1
        total += loss.item() * len(labels)
        seen += len(labels)
    return total / seen
# ---
import kale_dist as kd
job = kd.distribute(model, loader, None, optimizer, run_epoch, epochs=3, number_of_processes=2, train_args={"max_norm": 1.0}, seed=0)
trained = job.model
right = sum(trained(collate([pair])[0]).argmax().item() == pair[1] for pair in SENTENCES[:6])
assert right == 6, right
assert history["steps"] == 3 * 15
rows = [row for row in job.metrics if row["source"] == "train"]
assert len(rows) == 3 and rows[-1]["loss"] < rows[0]["loss"], rows
"""

GAN = """
import torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler
# ---
real_data = TensorDataset(torch.randn(512, 2) * 0.5 + torch.tensor([2.0, -1.0]))
G = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
# ---
def train_gan(generator, discriminator, epochs, lr=2e-3):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    g, d = DDP(generator), DDP(discriminator)
    opt_g = torch.optim.Adam(g.parameters(), lr=lr, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(d.parameters(), lr=lr, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    sampler = DistributedSampler(real_data)
    loader = DataLoader(real_data, batch_size=64, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = g(torch.randn(len(real), 4))
            loss_d = bce(d(real), torch.ones(len(real), 1)) + bce(d(fake.detach()), torch.zeros(len(real), 1))
            opt_d.zero_grad(); loss_d.backward(); opt_d.step()
            loss_g = bce(d(fake), torch.ones(len(real), 1))
            opt_g.zero_grad(); loss_g.backward(); opt_g.step()
        kd.report(epoch=epoch, loss_g=loss_g.item(), loss_d=loss_d.item())
    print(f"rank {rank} done")
    dist.destroy_process_group()
    return {"rank": rank, "generator": generator}
# ---
import kale_dist as kd
before = {name: value.clone() for name, value in G.state_dict().items()}
job = kd.launch(train_gan, G, D, epochs=20, number_of_processes=2)
results = job.results()
assert [r["rank"] for r in results] == [0, 1]
first, second = (r["generator"].state_dict() for r in results)
assert all(torch.equal(first[k], second[k]) for k in first)
assert any(not torch.equal(first[k], before[k]) for k in first)
assert all(torch.equal(first[k], G.state_dict()[k]) for k in first)
with torch.no_grad():
    center = results[0]["generator"](torch.randn(500, 4)).mean(0)
assert center[0] > 0.5 and center[1] < 0, center
assert sum(row["source"] == "report" for row in job.metrics) == 40
assert [line.text for line in job.logs(ranks=[1]) if "done" in line.text] == ["rank 1 done"]
"""

HELPERS = {
    "textprep.py": """
        import json
        from pathlib import Path

        STOPWORDS = set(json.loads((Path(__file__).parent / "stopwords.json").read_text()))

        def clean(text):
            import textprep_rules
            return textprep_rules.lower(text)
    """,
    "textprep_rules.py": """
        import textprep

        def lower(text):
            assert textprep.STOPWORDS
            return text.lower()
    """,
    "stopwords.json": '["a", "the", "and"]',
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(CLASSIFIER, id="classifier"),
        pytest.param(TEXT_MODEL, id="text-model"),
        pytest.param(GAN, id="gan"),
    ],
)
def test_foreign_notebook_runs(source: str, tmp_path: pathlib.Path) -> None:
    for name, text in HELPERS.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in source.split("# ---")]
    book = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert all(cell.execution_count for cell in book.cells)
