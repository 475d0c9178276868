"""The pure part: who gets how many, and the sentence."""

import pytest

from kale_dist.errors import ConfigError
from kale_dist.worker.training.data import sharding
from kale_dist.worker.training.data.sharding import describe, divide


def division(samples, batch, world, **options):
    options = {"drop_last": False, "aligned": True, "split": False, **options}
    return divide("train_data_loader", samples, batch, world, **options)


def test_the_sentence():
    plan = division(1437, 32, 2)
    assert describe("train", plan) == "train: 1,437 samples, 2 ranks x 719/718, batch 32 x 2 = 64, last batch 15 + 14"


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (division(64, 16, 2), "train: 64 samples, 2 ranks x 32, batch 16 x 2 = 32"),
        (division(10, 4, 1), "train: 10 samples, 1 rank x 10, batch 4, last batch 2"),
        (division(64, 16, 3, split=True), "train: 64 samples, 3 ranks x 24/20, batch 6 + 5 + 5 = 16"),
        (
            division(13, 2, 3),
            (
                "train: 13 samples, 3 ranks x 5/4, batch 2 x 3 = 6, last batch 1 + 0 + 0, 2 ranks without one repeat a"
                " sample with weight 0"
            ),
        ),
        (division(13, 2, 3, aligned=False), "train: 13 samples, 3 ranks x 5/4, batch 2 x 3 = 6, last batch 1 + 0 + 0"),
    ],
)
def test_sentences(plan, sentence):
    assert describe("train", plan) == sentence


def test_what_drop_last_leaves_out_is_said():
    plan = division(70, 16, 2, drop_last=True)
    assert describe("train", plan, dropped=6) == (
        "train: 64 samples, 2 ranks x 32, batch 16 x 2 = 32, 6 left out by drop_last"
    )


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", [1, 2, 5, 23, 64])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_sample_is_dealt_once(world, samples, aligned):
    plan = division(samples, 4, world, aligned=aligned)
    assert sum(plan.share(rank) for rank in range(world)) == samples
    order = list(range(samples))
    chunks = [order[i : i + plan.chunk] for i in range(0, samples, plan.chunk)]
    dealt = [sharding.part(chunk, rank, world) for chunk in chunks for rank in range(world)]
    assert [i for part in dealt for i in part] == order
    sizes = [plan.portion(step, rank) for step in range(plan.steps) for rank in range(world)]
    assert sizes == [len(part) for part in dealt]


def test_drop_last_that_leaves_nothing_is_refused():
    with pytest.raises(ConfigError, match="train_data_loader: drop_last=True leaves no batch: 40 samples are fewer"):
        division(40, 32, 2, drop_last=True)
