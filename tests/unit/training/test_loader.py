"""Every kind of loader: each sample once, in step, and its lengths this rank's share."""

import collections
import contextlib
import io
import itertools
import random

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler
from trainings import fit

from kale_dist.errors import ConfigError


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size
        self.label = "numbers"

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    def __init__(self, size, shuffle=False, sized=False):
        self.size, self.shuffle = size, shuffle
        if sized:
            self.__class__ = SizedStream

    def __iter__(self):
        items = list(range(self.size))
        if self.shuffle:
            random.shuffle(items)
            items = [items[i] for i in torch.randperm(len(items)).tolist()]
        info = get_worker_info()
        if info is not None:
            items = items[info.id :: info.num_workers]
        return iter(torch.tensor([float(i)]) for i in items)


class SizedStream(Stream):
    def __len__(self):
        return self.size


class Endless(Sampler):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        generator = torch.Generator().manual_seed(4)
        while True:
            yield from torch.randperm(self.size, generator=generator).tolist()


class Unsized(Sampler):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Halved(DistributedSampler):
    """A distributed sampler of the user's."""


def observe(make_loader, epochs=2, stop_after=None, use="train", **options):
    """What each epoch gave this rank, what its lengths were, and what the log said."""
    import contextlib
    import io

    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    loader = make_loader()
    seen, lengths, steps = [], [], []

    def look(model, loader, optimizer=None):
        mine, count = [], 0
        for batch in loader:
            count += 1
            mine.extend(int(v) for v in batch.flatten())
            if optimizer is not None:
                optimizer.zero_grad()
                model(batch.reshape(-1, 1)).mean().backward()
                optimizer.step()
            if count == stop_after:
                break
        seen.append(mine)
        steps.append(count)
        found = []
        for part in (loader, loader.sampler, loader.dataset):
            try:
                found.append(len(part))
            except TypeError:
                found.append(None)
        lengths.append(tuple(found))

    def train_step(model, loader, criterion, optimizer, device, args):
        if use == "train":
            look(model, loader, optimizer)

    def eval_step(model, loader, criterion, device, args):
        look(model, loader)

    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        evaluation = {"eval_data_loader": loader, "eval_step": eval_step} if use == "eval" else {}
        train_loader = loader if use == "train" else DataLoader(Numbers(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        fit(
            model,
            train_loader,
            optimizer,
            criterion=None,
            train_step=train_step,
            epochs=epochs,
            **evaluation,
            **options,
        )
    return seen, lengths, steps, log.getvalue()


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


EACH_ONCE = {
    "sequential": lambda: DataLoader(Numbers(23), 4),
    "shuffled": lambda: DataLoader(Numbers(23), 4, shuffle=True),
    "generator": lambda: DataLoader(Numbers(23), 4, shuffle=True, generator=generator()),
    "workers": lambda: DataLoader(Numbers(23), 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Numbers(23), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "sampler": lambda: DataLoader(Numbers(23), 4, sampler=RandomSampler(range(23))),
    "unsized": lambda: DataLoader(Numbers(23), 4, sampler=Unsized(23)),
    "collate": lambda: DataLoader(Numbers(23), 4, collate_fn=torch.stack),
    "no batches": lambda: DataLoader(Numbers(23), batch_size=None),
    "list": lambda: DataLoader([torch.tensor([float(i)]) for i in range(23)], 4, shuffle=True),
    "distributed": lambda: DataLoader(
        Numbers(23), 4, sampler=DistributedSampler(Numbers(23), num_replicas=1, rank=0, seed=5)
    ),
    "distributed for two": lambda: DataLoader(
        Numbers(23), 4, sampler=DistributedSampler(Numbers(23), num_replicas=2, rank=0, seed=5)
    ),
    "stream": lambda: DataLoader(Stream(23), 4),
    "shuffled stream": lambda: DataLoader(Stream(23, shuffle=True), 4),
    "stream with workers": lambda: DataLoader(Stream(23, shuffle=False), 4, num_workers=2),
    "persistent stream": lambda: DataLoader(Stream(23), 4, num_workers=2, persistent_workers=True),
    "stream of items": lambda: DataLoader(Stream(23), batch_size=None),
    "sized stream": lambda: DataLoader(Stream(23, sized=True), 4),
    "batch sampler": lambda: DataLoader(Numbers(23), batch_sampler=BatchSampler(RandomSampler(range(23)), 3, False)),
    "smaller than the world": lambda: DataLoader(Numbers(1), 4),
    "smaller stream": lambda: DataLoader(Stream(1), 4),
}


@pytest.mark.parametrize("use", ["train", pytest.param("eval", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", list(EACH_ONCE))
def test_each_sample_once_an_epoch(ranks, kind, use):
    results = ranks(2, observe, EACH_ONCE[kind], 2, None, use)
    size = 1 if kind.startswith("smaller") else 23
    for epoch in range(2):
        given = collections.Counter(i for seen, *_ in results for i in seen[epoch])
        assert set(given) == set(range(size))
        # Only where there are fewer samples than ranks is one given again, with weight 0 (or a whole batch).
        repeats = sum(given.values()) - size
        assert repeats <= (4 if use == "train" or size == 1 else 0)
        if use == "train":
            assert results[0][2][epoch] == results[1][2][epoch]
    if use == "eval" and size > 1:
        assert max(given.values()) == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("shuffled", [(3, 12, 12), (3, 11, 11)]),
        ("workers", [(3, 12, 12), (3, 11, 11)]),
        ("distributed", [(3, 12, 12), (3, 11, 11)]),
        # The repeated sample counts in the lengths, as a step divides by them.
        ("smaller than the world", [(1, 1, 1)] * 2),
        ("sized stream", [(3, None, 12), (3, None, 11)]),
        ("stream", [(None, None, None)] * 2),
    ],
)
def test_lengths_are_this_ranks_share(ranks, kind, expected):
    results = ranks(2, observe, EACH_ONCE[kind])
    assert [lengths[-1] for _, lengths, _, _ in results] == expected


def test_the_log_says_how(ranks):
    first, second = ranks(2, observe, lambda: DataLoader(Numbers(1437), 32, shuffle=True), 1)
    assert first[3].splitlines()[0] == "train: 1,437 samples, 2 ranks x 719/718, batch 32 x 2 = 64, last batch 15 + 14"
    assert second[3] == ""


def test_shuffled_streams_differ_from_epoch_to_epoch(ranks):
    results = ranks(2, observe, EACH_ONCE["shuffled stream"])
    assert results[0][0][0] != results[0][0][1]


def test_epochs_differ_and_the_seed_of_a_distributed_sampler_is_honoured(ranks):
    (seen, *_), _ = ranks(2, observe, EACH_ONCE["distributed"])
    for epoch in range(2):
        order = torch.randperm(23, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
        assert seen[epoch][:4] == order[:4]


def test_weighted_sampler_draws_once_for_all(ranks):
    def loader():
        weights = [1.0] * 10 + [0.0] * 10
        return DataLoader(Numbers(20), 3, sampler=WeightedRandomSampler(weights, 18, generator=generator()))

    results = ranks(2, observe, loader, 1)
    drawn = list(WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 18, generator=generator()))
    expected = [[i for start in range(0, 18, 6) for i in drawn[start + 3 * r : start + 3 * r + 3]] for r in (0, 1)]
    # The loader's own seed is drawn from another generator, so the order is that of one process.
    assert [seen[0] for seen, *_ in results] == expected
    assert [lengths[0] for _, lengths, *_ in results] == [(3, 9, 10), (3, 9, 10)]


def test_endless_sampler_left_by_the_step(ranks):
    results = ranks(2, observe, lambda: DataLoader(Numbers(8), 2, sampler=Endless(8)), 1, 6)
    assert [steps for _, _, steps, _ in results] == [[6], [6]]
    assert collections.Counter(i for seen, *_ in results for i in seen[0]) == collections.Counter(list(range(8)) * 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_drop_last(ranks, workers):
    results = ranks(2, observe, lambda: DataLoader(Numbers(23), 4, drop_last=True, num_workers=workers))
    assert [steps for _, _, steps, _ in results] == [[2, 2], [2, 2]]
    assert "16 samples, 2 ranks x 8, batch 4 x 2 = 8, 7 left out by drop_last" in results[0][3]


def test_drop_last_evaluating_leaves_out_what_one_process_would(ranks):
    results = ranks(2, observe, lambda: DataLoader(Numbers(23), 4, drop_last=True), 1, None, "eval")
    assert sorted(i for seen, *_ in results for i in seen[0]) == list(range(20))


def test_split_batches(ranks):
    def job():
        return observe(lambda: DataLoader(Numbers(24), 8), epochs=1, split_batches=True)

    results = ranks(2, job)
    assert results[0][0][0][:4] == [0, 1, 2, 3]
    assert results[1][0][0][:4] == [4, 5, 6, 7]
    assert results[0][2] == [3]


def test_a_samplers_own_part_is_not_divided_again(ranks):
    def loader():
        return DataLoader(Numbers(22), 4, sampler=Halved(Numbers(22), num_replicas=2, rank=0, shuffle=False))

    results = ranks(2, observe, loader, 1)
    assert [seen[0] for seen, *_ in results] == [list(range(0, 22, 2)), list(range(1, 22, 2))]
    assert "Halved is already distributed and is taken as it is" in results[0][3]


def test_a_sampler_for_another_number_of_ranks_is_refused(ranks):
    def loader():
        return DataLoader(Numbers(22), 4, sampler=Halved(Numbers(22), num_replicas=4, rank=0))

    with pytest.raises(ConfigError, match="train_data_loader: its Halved is made for 4 ranks, and there are 2"):
        ranks(2, observe, loader, 1)


@pytest.mark.parametrize("make", [lambda: DataLoader(Stream(6), 4), lambda: DataLoader(Numbers(6), 4)])
def test_shard_false_leaves_the_data_to_the_dataset(ranks, make):
    def job():
        return observe(make, epochs=1, shard=False)

    assert [seen[0] for seen, *_ in ranks(2, job)] == [list(range(6))] * 2


def test_eval_sharding_none_gives_everything_to_everyone(ranks):
    def job():
        return observe(lambda: DataLoader(Numbers(9), 4), epochs=1, use="eval", eval_sharding="none")

    results = ranks(2, job)
    assert [seen[0] for seen, *_ in results] == [list(range(9))] * 2
    assert "eval: not sharded, every rank takes all samples" in results[0][3]


class Doubling(DataLoader):
    """A loader class of the user's."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2


def test_a_loader_stays_what_it_is(ranks):
    def job():
        loader = Doubling(Numbers(8), 2, sampler=SequentialSampler(range(8)))
        found = []

        def step(model, given, criterion, optimizer, device, args):
            found.append(
                (
                    given is loader,
                    type(given) is Doubling,
                    isinstance(given.dataset, Numbers),
                    isinstance(given.sampler, SequentialSampler),
                    isinstance(given.batch_sampler, BatchSampler),
                    given.dataset.label,
                    given.dataset[7].item(),
                    given.batch_size,
                    [int(v) for batch in given for v in batch.flatten()],
                )
            )

        fit(nn.Linear(1, 1), loader, criterion=None, train_step=step)
        return found[0]

    same = (True, True, True, True, True, "numbers", 7.0, 2)
    assert ranks(2, job) == [(*same, [0, 2, 8, 10]), (*same, [4, 6, 12, 14])]


def test_spawned_workers_get_the_dataset(ranks):
    def job():
        data = TensorDataset(torch.arange(12.0)[:, None])
        loader = DataLoader(data, 3, num_workers=1, multiprocessing_context="forkserver")
        seen = []

        def step(model, loader, *_):
            seen.extend(int(v) for (batch,) in loader for v in batch.flatten())

        fit(nn.Linear(1, 1), loader, criterion=None, train_step=step)
        return seen

    assert ranks(2, job) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


def test_workers_of_ranks_augment_differently_from_one_generator(ranks):
    def loader():
        class Noisy(Numbers):
            def __getitem__(self, index):
                return torch.randint(2**24, (1,)).float()

        return DataLoader(Noisy(4), 1, num_workers=1, generator=generator())

    (first, *_), (second, *_) = ranks(2, observe, loader, 1)
    assert set(first[0]).isdisjoint(second[0])


class Huge(Sampler):
    """As minGPT's: far more samples than are ever taken."""

    def __len__(self):
        return 10**10

    def __iter__(self):
        return itertools.cycle(range(12))


def test_a_sampler_with_a_huge_length_is_drawn_in_pieces(ranks):
    def job():
        taken = []

        def step(model, loader, criterion, optimizer, device, args):
            for number, (x,) in enumerate(loader):
                taken.append(x.flatten().tolist())
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                if number == 2:
                    break

        loader = DataLoader(TensorDataset(torch.arange(12.0)[:, None]), 2, sampler=Huge(), drop_last=True)
        fit(nn.Linear(1, 1), loader, criterion=None, train_step=step)
        return taken

    first, second = ranks(2, job)
    assert first == [[0, 1], [4, 5], [8, 9]]
    assert second == [[2, 3], [6, 7], [10, 11]]


def test_single_items_on_several_ranks_are_said_to_alternate(ranks):
    def job():
        said, loader = io.StringIO(), DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=None)
        step = lambda model, loader, *_: [model(x).sum().backward() for (x,) in loader] and 0.0  # noqa: E731
        with contextlib.redirect_stdout(said):
            fit(nn.Linear(1, 1), loader, criterion=None, train_step=step)
        return said.getvalue()

    assert "each rank gets every second item" in ranks(2, job)[0]
    assert "needs shard=False" in ranks(2, job)[0]
