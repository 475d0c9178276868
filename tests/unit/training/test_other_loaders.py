"""Loaders beside those of the call: said where they are not divided, refused where that loses data, right with `kd.share`."""

import contextlib
import copy
import io
import itertools
import re
import types

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from trainings import fit, labelled

import kale_dist as kd


def numbers(count):
    return TensorDataset(torch.arange(count).double()[:, None])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(23).double()[:, None])


class DividedStream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(torch.distributed.get_rank(), 24, 2).double()[:, None])


unlabelled, holder = DataLoader(numbers(24), 4), types.SimpleNamespace(loader=DataLoader(numbers(24), 4))


def train(model, loader, criterion, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return 0.5


def by_global(model, loader, criterion, optimizer, device, args):
    assert len(list(unlabelled)) == 6
    return train(model, loader, criterion, optimizer)


def by_attribute(model, loader, criterion, optimizer, device, args):
    assert len(list(holder.loader)) == 6
    return train(model, loader, criterion, optimizer)


def by_arguments(model, loader, criterion, optimizer, device, args):
    assert len(list(args["validation"])) == 6
    return train(model, loader, criterion, optimizer)


def made_here(model, loader, criterion, optimizer, device, args):
    for _ in DataLoader(numbers(24), 4):
        pass
    return train(model, loader, criterion, optimizer)


def by_closure():
    inner = DataLoader(numbers(24), 4)

    def step(model, loader, criterion, optimizer, device, args):
        assert len(list(inner)) == 6
        return train(model, loader, criterion, optimizer)

    return step


def evaluating(model, loader, criterion, device, args):
    assert len(list(unlabelled)) == 6
    return sum(1.0 for _ in loader)


def divided_already(model, loader, criterion, optimizer, device, args):
    own = DataLoader(numbers(24), 4, sampler=DistributedSampler(numbers(24)))
    for loaders in (zip(loader, own, strict=False), zip(loader, DataLoader(DividedStream(), 2), strict=False)):
        for _ in loaders:
            pass
    assert kd.share(own) is own
    assert kd.share(loader) is loader
    return train(model, loader, criterion, optimizer)


def said(ranks, world, **options):
    def call():
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            fit(epochs=2, **options)
        return log.getvalue()

    return [line for line in ranks(world, call)[0].splitlines() if "divided" in line]


STEPS = {
    "unlabelled": {"train_step": by_global},
    "holder.loader": {"train_step": by_attribute},
    "inner": {"train_step": by_closure()},
    "train_args['validation']": {"train_step": by_arguments, "train_args": {"validation": DataLoader(numbers(24), 4)}},
    "The loader at LINE in made_here": {"train_step": made_here},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_loader_that_is_not_divided_is_said_once_by_its_path_or_its_line(ranks, name):
    (line,) = said(ranks, 2, **STEPS[name])
    shown, _, rest = line.partition(" is not divided: ")
    assert re.sub(r"\S+:\d+", "LINE", shown) == name
    assert "kd.share(...)" in rest


def test_what_an_evaluation_iterates_is_said_too(ranks):
    evaluation = {"eval_data_loader": DataLoader(labelled(8), 2), "eval_step": evaluating}
    (line,) = said(ranks, 2, **evaluation)
    assert line.startswith("unlabelled is not divided")


def test_nothing_is_said_of_one_rank_or_of_what_is_divided(ranks):
    assert not said(ranks, 1, train_step=by_global)
    assert not said(ranks, 2, train_step=divided_already)


def zipped(model, loader, criterion, optimizer, device, args):
    for (x, y), _ in zip(loader, unlabelled, strict=False):
        criterion(model(x), y).backward()
    return 0.5


def taken(model, loader, criterion, optimizer, device, args):
    iterator = itertools.cycle(unlabelled)
    for x, y in loader:
        next(iterator)
        criterion(model(x), y).backward()
    return 0.5


def several_a_batch(model, loader, criterion, optimizer, device, args):
    iterator = iter(unlabelled)
    for _ in loader:
        next(iterator), next(iterator)
    return 0.5


@pytest.mark.parametrize("step", [zipped, taken])
def test_one_that_is_taken_in_turn_is_refused(ranks, refusal, step):
    assert refusal(lambda: ranks(2, lambda: fit(train_step=step))).argument == "train_step"
    assert ranks(1, lambda: fit(train_step=step).epochs) == [1]


def test_one_that_is_taken_otherwise_is_only_said(ranks):
    assert len(said(ranks, 2, train_step=several_a_batch)) == 1


# -- kd.share ----------------------------------------------------------------------------------------------------------


def shared(model, loader, criterion, optimizer, device, args):
    """Train on both, and note what was read of the second."""
    read = []
    for (x, y), (u, v) in zip(loader, kd.share(args["other"]), strict=True):
        read += (u[:, 0] * 1000).round().int().tolist()
        optimizer.zero_grad()
        (criterion(model(x), y) + criterion(model(u), v)).backward()
        optimizer.step()
    args["read"].append(read)
    return 0.5


def train_on_two(size, seed, split=False):
    torch.manual_seed(5)
    x = torch.randn(48, 3, dtype=torch.double)
    u = torch.arange(48).double()[:, None].expand(48, 3) / 1000
    y = torch.randint(0, 2, (48,))
    model = nn.Linear(3, 2).double()
    order = torch.Generator().manual_seed(seed)
    other = DataLoader(TensorDataset(u, y), size, shuffle=True, generator=order)
    args = {"other": other, "read": []}
    loader = DataLoader(TensorDataset(x, y), size)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    fit(model, loader, optimizer, train_step=shared, train_args=args, epochs=3, split_batches=split)
    return args["read"], nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("split", [False, True])
def test_a_shared_loader_trains_as_one_process_does(ranks, split):
    (one, expected), *_ = ranks(1, train_on_two, 8, 7)
    (first, weights), (second, others) = ranks(2, train_on_two, 8 if split else 4, 7, split)
    assert (weights - expected).abs().max() < 1e-12
    assert torch.equal(weights, others)
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [[*range(48)]] * 3
    assert one[0] != one[1]
    assert [[*map(sorted, zip(a[::4], b[::4], strict=True))] for a, b in zip(first, second, strict=True)] == [
        [sorted(pair) for pair in zip(a[::8], a[4::8], strict=True)] for a in one
    ]


MAKE = {
    "sequential": lambda: DataLoader(numbers(23), 4),
    "shuffled": lambda: DataLoader(numbers(23), 4, shuffle=True),
    "workers": lambda: DataLoader(numbers(23), 4, shuffle=True, num_workers=1, persistent_workers=True),
    "batches": lambda: DataLoader(numbers(23), batch_sampler=BatchSampler(RandomSampler(range(23)), 4, False)),
    "distributed for one": lambda: DataLoader(numbers(23), 4, sampler=DistributedSampler(numbers(23), 1, 0)),
    "stream": lambda: DataLoader(Stream(), 4),
    "stream with workers": lambda: DataLoader(Stream(), 4, num_workers=1),
    "fewer than ranks": lambda: DataLoader(numbers(1), 4),
}


def read(make):
    """What this rank reads of its share in two passes, and of a share of the same loader that is made again."""
    torch.manual_seed(torch.distributed.get_rank())
    loader = make()
    before, mine = copy.copy(vars(loader)), kd.share(loader)
    assert mine is not loader
    assert (mine.batch_size, mine.num_workers) == (loader.batch_size, loader.num_workers)
    assert kd.share(mine) is mine
    passes = [list(once) for once in (mine, mine, kd.share(loader))]
    assert vars(loader) == before
    parts = [[batch[0] if isinstance(batch, list) else batch for batch in once] for once in passes]
    return [(torch.cat(once).flatten().int().tolist(), len(once)) for once in parts]


@pytest.mark.parametrize("kind", MAKE)
def test_any_loader_is_shared_with_equally_many_batches(ranks, kind):
    first, second = ranks(2, read, MAKE[kind])
    for (mine, steps), (others, theirs) in zip(first, second, strict=True):
        assert steps == theirs
        assert set(mine) | set(others) == set(range(1 if kind == "fewer than ranks" else 23))
    if kind in ("shuffled", "workers"):
        assert len({tuple(mine) for mine, _ in first}) == 3


def test_outside_of_ranks_it_is_the_loader_itself(refusal):
    assert kd.share(unlabelled) is unlabelled
    assert refusal(lambda: kd.share([1, 2])).argument == "loader"
