"""Does a strategy train as one process does? The same float64 training, alone in this process and on ranks of a job.

To plug in a strategy, add it to `EXACT` of test_equality.py, or write a test of your own:

    from one_process import CASES, compare

    def test_mine_equals_one_process():
        compare(kd.strategies.Mine(option=1), number_of_processes=2)

`compare` runs all cases, or those that are named, in one local job (about a second beside the training itself), each by
`training.loop.train` with the strategy. It compares the loss of each step, the weights and the state of the optimizer that
rank 0's result holds, and whether tied weights still are. Models are made in the ranks: a case is a class below, with
`model()`, `data()`, `optimizer(model)` and `step`; add a case where your strategy needs another model (a plan, a cut).
Conditions, as the documentation states them: no dropout, no BatchNorm in training, a loss that averages over samples.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd

LOSSES, WEIGHTS = 1e-10, 1e-8
"""Largest differences of losses and of weights and states. Adam magnifies rounding, hence the second."""


class Case:
    """A training of 50 steps. Its name is that of the class."""

    epochs = 10
    batch = 4
    """Of one shard; the one process takes as much as all shards together."""
    steps = 5
    ragged = 3
    """Samples of each shard in the last batch, one more on the first shard."""
    accumulate = 1
    clip_norm = None
    clips_in_step = None

    def model(self):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def data(self, shards):
        samples = self.batch * shards * (self.steps - 1) + self.ragged * shards + (shards > 1)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        return TensorDataset(x, torch.randint(0, 4, (samples,), generator=generator))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, x, y):
        return nn.functional.cross_entropy(model(x), y)


class PlainSgd(Case):
    """Nothing but a ragged end."""


class MomentumAccumulatedClipped(Case):
    """Five batches are a window of three and one of two, clipped by the call."""

    accumulate = 3
    clip_norm = 0.5

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


class MomentumAccumulated(Case):
    """Linear in the gradient, with windows of three batches and of two."""

    accumulate = 3

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


class TiedLanguageModel(nn.Module):
    """Tokens in, scores of tokens out; the embedding is the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.embedding(x)
        hidden = hidden + self.second(torch.tanh(self.first(hidden)))
        return self.head(self.norm(hidden))


class TiedAdamClippedInStep(Case):
    """Tied weights, Adam, and `clip_grad_norm_` by a name that was imported earlier."""

    clips_in_step = 0.5

    def model(self):
        torch.manual_seed(4)
        return TiedLanguageModel().double()

    def data(self, shards):
        samples = len(super().data(shards))
        tokens = torch.randint(0, 12, (samples, 5), generator=torch.Generator().manual_seed(1))
        return TensorDataset(tokens, tokens.roll(1, 1))

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(self, model, x, y):
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


class WithLoss(nn.Module):
    """A model whose loss is a method."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))

    def forward(self, x):
        return self.body(x)

    def loss(self, x, y):
        return nn.functional.cross_entropy(self(x), y)


class LossOfTheModel(Case):
    """The loss is `model.loss(x, y)`, of a model that the step has by another name than its argument."""

    def model(self):
        torch.manual_seed(5)
        return WithLoss().double()

    def optimizer(self, model):
        self.captured = model
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(self, model, x, y):
        return self.captured.loss(x, y)


CASES = {case.__name__: case for case in (PlainSgd, MomentumAccumulatedClipped, TiedAdamClippedInStep, LossOfTheModel)}

clip = nn.utils.clip_grad_norm_


def alone(case, shards):
    """The training in plain PyTorch: losses of all steps, weights, state of the optimizer."""
    model = case.model()
    optimizer = case.optimizer(model)
    loader = DataLoader(
        case.data(shards), case.batch * shards, shuffle=True, generator=torch.Generator().manual_seed(2)
    )
    losses = []
    for _ in range(case.epochs):
        batches = list(loader)
        for start in range(0, len(batches), case.accumulate):
            window = batches[start : start + case.accumulate]
            samples = sum(len(y) for _, y in window)
            optimizer.zero_grad()
            for x, y in window:
                loss = case.loss(model, x, y)
                losses.append(loss.item())
                (loss * len(y) / samples).backward()
            if case.clip_norm or case.clips_in_step:
                clip(model.parameters(), case.clip_norm or case.clips_in_step)
            optimizer.step()
    return losses, model.state_dict(), optimizer.state_dict()


def on_ranks(strategy, names, shards, cases=None):
    """Runs in each rank of a job: for each case its losses with their samples, and rank 0's result."""
    from kale_dist.worker.training.loop import train
    from kale_dist.worker.training.settings import Training

    found = {}
    for name in names:
        case = (cases or CASES)[name]()
        model = case.model()
        optimizer = case.optimizer(model)
        seen = []

        def step(model, loader, criterion, optimizer, device, args, case=case, seen=seen):
            for x, y in loader:
                optimizer.zero_grad()
                loss = case.loss(model, x, y)
                seen.append((loss.item(), len(y)))
                loss.backward()
                if case.clips_in_step:
                    clip(model.parameters(), case.clips_in_step)
                optimizer.step()
            return {"loss": sum(loss for loss, _ in seen[-case.steps :]) / case.steps}

        result = train(
            Training(
                model=model,
                train_data_loader=DataLoader(
                    case.data(shards), case.batch, shuffle=True, generator=torch.Generator().manual_seed(2)
                ),
                criterion=None,
                optimizer=optimizer,
                train_step=step,
                epochs=case.epochs,
                accumulate=case.accumulate,
                clip_norm=case.clip_norm,
                strategy=strategy,
            )
        )
        found[name] = seen, result.model_state, result.optimizer_state, result.strategy
    return found


def compare(strategy, number_of_processes=2, names=tuple(CASES), *, losses=LOSSES, weights=WEIGHTS, cases=None):
    """Train with a strategy and alone, and compare.

    Args:
        strategy: Settings of `kd.strategies`.
        number_of_processes: Ranks of the job.
        names: Of `cases`.
        losses: Largest difference of the loss of any step.
        weights: Largest difference of any weight and any number of the optimizer's state.
        cases: Classes by name, if not `CASES`.

    Returns:
        The strategy's numbers for each case, such as `bytes_sent`.
    """
    layouts = [strategy.layout(rank, number_of_processes) for rank in range(number_of_processes)]
    shards = layouts[0].shards
    readers = [rank for rank, one in enumerate(layouts) if one.shard is not None and one.peers[0] == rank]
    job = kd.launch(on_ranks, strategy, tuple(names), shards, cases, number_of_processes=number_of_processes, threads=1)
    try:
        job.wait()
        ranks = job.results()
    except Exception as error:
        error.add_note("\n".join(line.text for line in job.logs())[-4000:])
        raise
    finally:
        job.delete()
    numbers = {}
    for name in names:
        expected, model, optimizer = alone((cases or CASES)[name](), shards)
        columns = zip(*(ranks[rank][name][0] for rank in readers), strict=True)
        found = [sum(loss * n for loss, n in step) / sum(n for _, n in step) for step in columns]
        assert len(found) == len(expected) == 50, (name, len(found))
        largest = max(abs(one - other) for one, other in zip(found, expected, strict=True))
        assert largest <= losses, f"{name}: a loss differs by {largest:.2g}"
        _, model_state, optimizer_state, numbers[name] = ranks[0][name]
        _compare_tensors(f"{name}: weights", model_state, model, weights)
        _compare_tensors(f"{name}: optimizer", optimizer_state["state"], optimizer["state"], weights)
        assert optimizer_state["param_groups"] == optimizer["param_groups"], name
        ties = [[key for key, one in state.items() if _shares(one, state)] for state in (model_state, model)]
        assert ties[0] == ties[1], f"{name}: ties"
    return numbers


def _shares(tensor, state):
    """Whether another entry of a state has the same memory."""
    return sum(one.data_ptr() == tensor.data_ptr() for one in state.values()) > 1


def _compare_tensors(what, found, expected, tolerance):
    """Compare states of any nesting of dicts."""
    assert list(found) == list(expected), f"{what}: {list(found)} and {list(expected)}"
    for key, value in expected.items():
        mine = found[key]
        if isinstance(value, dict):
            _compare_tensors(f"{what} {key}", mine, value, tolerance)
        elif isinstance(value, torch.Tensor):
            assert type(mine) in (torch.Tensor, nn.Parameter), f"{what} {key} is a {type(mine).__name__}"
            assert mine.shape == value.shape, f"{what} {key}: {mine.shape} and {value.shape}"
            largest = (mine - value).abs().max().item()
            assert largest <= tolerance, f"{what} {key} differs by {largest:.2g}"
        else:
            assert mine == value, f"{what} {key}: {mine} and {value}"


def compare_in_notebook(strategy, number_of_processes=2, case_class=MomentumAccumulatedClipped, on="local"):
    """Train by `kd.distribute`; compare the notebook's model and optimizer afterwards."""
    shards = strategy.layout(0, number_of_processes).shards
    case = case_class()
    own = case.model()
    optimizer = case.optimizer(own)
    expected_losses, model, optimizer_state = alone(case_class(), shards)

    def train_step(model, loader, criterion, _, device, args):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = case.loss(own, x, y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
        return {"loss": total / len(loader.dataset)}

    loader = DataLoader(case.data(shards), case.batch, shuffle=True, generator=torch.Generator().manual_seed(2))
    job = kd.distribute(
        own,
        loader,
        None,
        optimizer,
        train_step,
        epochs=case.epochs,
        accumulate=case.accumulate,
        clip_norm=case.clip_norm,
        strategy=strategy,
        number_of_processes=number_of_processes,
        threads=1,
        on=on,
    )
    try:
        job.wait()
        result = copy.copy(job.result())
    finally:
        job.delete()
    _compare_tensors("weights", own.state_dict(), model, WEIGHTS)
    _compare_tensors("optimizer", optimizer.state_dict()["state"], optimizer_state["state"], WEIGHTS)
    sizes = [case.batch * shards] * (case.steps - 1)
    sizes.append(len(loader.dataset) - sum(sizes))
    pairs = list(zip(expected_losses[-case.steps :], sizes, strict=True))
    assert abs(result.metrics["loss"] - sum(loss * n for loss, n in pairs) / sum(sizes)) <= LOSSES
    return result
