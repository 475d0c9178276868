"""Passes over a loader that are broken off, taken together, or kept from one epoch to the next."""

import itertools

import pytest
import torch
import trainings
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from kale_dist.errors import KaleDistError


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


def data(rows=24):
    torch.manual_seed(5)
    return TensorDataset(torch.randn(rows, 3), torch.randn(rows, 2))


def fit(step, *, world, stream=False, workers=0, epochs=2):
    """Weights after training, with a global batch of 4 whatever the number of ranks."""
    torch.manual_seed(2)
    model = nn.Linear(3, 2)
    loader = DataLoader(Stream() if stream else data(), 4 // world, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result = trainings.fit(model, loader, optimizer, criterion=nn.MSELoss(), train_step=step, epochs=epochs)
    return result.metrics, [p.detach().clone() for p in model.parameters()]


def learn(model, criterion, optimizer, *batches):
    optimizer.zero_grad()
    sum(criterion(model(x), y) for x, y in batches).backward()
    optimizer.step()


def one_in_another(model, loader, criterion, optimizer, device, args):
    steps = 0
    for batch in loader:
        learn(model, criterion, optimizer, batch, next(iter(loader)))
        steps += 1
    return {"steps": steps}


def two_in_step(model, loader, criterion, optimizer, device, args):
    steps = 0
    for first, second in zip(loader, loader, strict=True):
        learn(model, criterion, optimizer, first, second)
        steps += 1
    return {"steps": steps}


def broken_off(model, loader, criterion, optimizer, device, args):
    steps = 0
    for batch in itertools.chain(itertools.islice(loader, 2), itertools.islice(loader, 5)):
        learn(model, criterion, optimizer, batch)
        steps += 1
    return {"steps": steps}


def make_kept():
    """A step that goes on where it was in the epoch before."""
    kept = []

    def forever(loader):
        while True:
            yield from loader

    def step(model, loader, criterion, optimizer, device, args):
        if not kept:
            kept.append(forever(loader))
        for batch in itertools.islice(kept[0], 4):
            learn(model, criterion, optimizer, batch)
        return {"steps": 4}

    return step


def leave_on_one(model, loader, criterion, optimizer, device, args):
    """Rank 1 begins a new pass after one batch, which leaves the ranks at batches of equal numbers."""
    for number, batch in enumerate(loader):
        if number == 1 and torch.distributed.get_rank() == 1:
            break
        learn(model, criterion, optimizer, batch)
    for batch in loader:
        learn(model, criterion, optimizer, batch)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["one in another", "two in step", "broken off", "kept"])
def test_all_ways_to_iterate_equal_one_process(ranks, way, stream, workers):
    steps = {"one in another": one_in_another, "two in step": two_in_step, "broken off": broken_off}

    def job(world):
        return fit(steps.get(way) or make_kept(), world=world, stream=stream, workers=workers)

    metrics, whole = ranks(1, job, 1)[0]
    for other_metrics, weights in ranks(2, job, 2):
        assert other_metrics == metrics == {"steps": {"broken off": 7, "kept": 4}.get(way, 6)}
        for here, there in zip(weights, whole, strict=True):
            torch.testing.assert_close(here, there)


def test_a_pass_begun_anew_on_one_rank_only_is_told(ranks):
    with pytest.raises(KaleDistError, match="left the loop over its loader on 1 of 2 ranks only"):
        ranks(2, lambda: fit(leave_on_one, world=2))


@pytest.mark.parametrize("way", ["skip", "leave"])
def test_ranks_that_do_different_things_are_told(ranks, way):
    def job():
        import torch.distributed as dist

        model = nn.Linear(3, 2)

        def step(model, loader, criterion, optimizer, device, args):
            for number, (x, y) in enumerate(loader):
                if number == 1 and dist.get_rank() == 1:
                    if way == "leave":
                        break
                    continue
                learn(model, nn.MSELoss(), optimizer, (x, y))

        trainings.fit(model, DataLoader(data(), 2), criterion=None, train_step=step)

    problem = "left the loop over its loader" if way == "leave" else "made no backward pass in batch 2"
    with pytest.raises(KaleDistError, match=problem):
        ranks(2, job)


def test_all_ranks_may_skip_or_leave_together(ranks):
    def job():
        model = nn.Linear(3, 2)

        def step(model, loader, criterion, optimizer, device, args):
            for number, (x, y) in enumerate(loader):
                if number == 1:
                    continue
                if number == 3:
                    break
                learn(model, nn.MSELoss(), optimizer, (x, y))
            return {"loss": 1.0}

        result = trainings.fit(model, DataLoader(data(), 2), criterion=None, train_step=step, epochs=2)
        return result.metrics, model.weight.detach().clone()

    (metrics, first), (_, second) = ranks(2, job)
    assert metrics == {"loss": 1.0}
    assert first.equal(second)
