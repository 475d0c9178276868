"""What `recommend` says: figures that can be checked by hand, and a sentence that fits the model."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import kale_dist as kd
from kale_dist.errors import ConfigError
from kale_dist.strategies.recommendation import balanced, blocks_of


def wide(layers=8, width=512):
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def adam(model):
    return torch.optim.Adam(model.parameters())


def estimate(found, word):
    return next(one for one in found.estimates if one.strategy == word)


def test_figures_are_those_of_the_formulas():
    model = wide()
    found = kd.strategies.recommend(model, adam(model), 4, 16)
    p = 8 * 512 * 512 * 4
    assert found.strategy == "ddp"
    assert found.parameters == 8 * 512 * 512
    # Weights, gradients, buffers of the exchange, two moments.
    assert estimate(found, "ddp").memory_bytes == 5 * p
    assert estimate(found, "ddp").sent_bytes == 2 * p * 3 // 4
    assert estimate(found, "fsdp").memory_bytes == 4 * p // 4 + 2 * 512 * 512 * 4
    assert estimate(found, "fsdp").sent_bytes == 3 * p * 3 // 4
    assert estimate(found, "pipeline").memory_bytes == p
    assert estimate(found, "pipeline").sent_bytes is None
    # Weights, two moments, the sum of gradients, the one that comes in, and the answer.
    assert estimate(found, "parameter-server").memory_bytes == 6 * p
    assert estimate(found, "local-sgd").sent_bytes == 2 * p * 3 // 4 // 8
    text = str(found)
    assert 'strategy="ddp"' in text
    assert "2(n-1)/n P" in text
    assert all(one.strategy in text for one in found.estimates)


def test_what_tensor_parallelism_does_not_divide_stays_whole_in_its_figure():
    model = nn.MultiheadAttention(64, 4)
    found = kd.strategies.recommend(model, adam(model), 2)
    assert estimate(found, "tensor").memory_bytes == 4 * sum(p.nbytes for p in model.parameters())


def test_a_small_model_is_not_to_be_distributed():
    model = nn.Linear(4, 2)
    found = kd.strategies.recommend(model, adam(model), 8, 16)
    assert found.strategy is None
    assert "Do not distribute this, it is too small" in found.sentence


@pytest.mark.parametrize(
    ("ranks", "memory_gib", "word", "said"),
    [
        (4, None, "ddp", "least of all that are exact"),
        (4, 4.0, "ddp", "least of all that are exact"),
        (4, 1.6, "fsdp", 'strategy="ddp" needs'),
        (2, 1.1, None, "Use more processes"),
        (4, 0.9, None, "every rank holds them all while it starts"),
    ],
)
def test_memory_decides(ranks, memory_gib, word, said):
    model = wide(64, 1024)
    # 256 MiB of weights.
    found = kd.strategies.recommend(model, adam(model), ranks, memory_gib)
    assert found.strategy == word
    assert said in str(found)


def test_one_process_is_told_how_many_it_takes():
    model = wide(64, 1024)
    found = kd.strategies.recommend(model, adam(model), 1, 2)
    assert found.strategy is None
    assert 'number_of_processes=2 and strategy="fsdp" would fit' in found.sentence
    assert "nothing to exchange" in kd.strategies.recommend(model, adam(model), 1).sentence


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), 3),
        (torch.optim.Adam, 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (torch.optim.AdamW, 2),
        (torch.optim.Adagrad, 1),
        (torch.optim.Adadelta, 2),
    ],
)
def test_the_state_that_an_optimizer_will_have_is_known_before_its_first_step(make, copies):
    model = wide(2)
    optimizer = make(model.parameters())
    p = 2 * 512 * 512 * 4
    before = estimate(kd.strategies.recommend(model, optimizer, 2), "ddp").memory_bytes
    assert before == pytest.approx((3 + copies) * p, rel=0.01)
    model(torch.randn(1, 512)).sum().backward()
    optimizer.step()
    assert estimate(kd.strategies.recommend(model, optimizer, 2), "ddp").memory_bytes == pytest.approx(before, rel=0.01)


def test_frozen_parameters_have_no_gradient_and_no_state():
    model = wide(2)
    model[0].requires_grad_(False)
    found = kd.strategies.recommend(model, adam(model), 2)
    one = 512 * 512 * 4
    assert found.parameters == 512 * 512
    assert estimate(found, "ddp").memory_bytes == 5 * one + one


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("model", None, 2, 4), "model"),
        ((nn.Linear, None, 2, 4), "model"),
        ((nn.LazyLinear(2), None, 2, 4), "model"),
        ((nn.Linear(2, 2), "adam", 2, 4), "optimizer"),
        ((nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=1), 0, 4), "number_of_processes"),
        ((nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=1), True, 4), "number_of_processes"),
        ((nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=1), 2, -1), "memory_gib"),
        ((nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=1), 2, float("nan")), "memory_gib"),
        ((nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=1), 2, "16Gi"), "memory_gib"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ConfigError) as caught:
        kd.strategies.recommend(*arguments)
    assert caught.value.argument == named


def test_it_needs_no_torch():
    code = "import sys, kale_dist as kd; kd.strategies.recommend; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_and_optimizers_by_name():
    models = {"generator": wide(2), "critic": wide(1)}
    found = kd.strategies.recommend(models, {name: adam(model) for name, model in models.items()}, 2)
    assert found.parameters == 3 * 512 * 512


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(10, 64)
        self.h = nn.ModuleList(nn.TransformerEncoderLayer(64, 2, 128) for _ in range(3))


class WithHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = Backbone()
        self.head = nn.Linear(64, 10)


def test_containers_and_a_backbone_are_opened_and_blocks_are_not():
    names = [block.name for block in blocks_of(WithHead())]
    assert names == ["transformer.tok", "transformer.h.0", "transformer.h.1", "transformer.h.2", "head"]


@pytest.mark.parametrize(
    ("sizes", "parts", "cuts"),
    [
        ([3, 1, 1, 1, 3], 3, [1, 4]),
        # An activation stays with its layer.
        ([5, 0, 5, 0], 2, [2]),
        ([1, 2, 3], 3, [1, 2]),
        ([0, 0, 0], 2, [2]),
        ([9], 1, []),
        ([100, 1, 1, 1], 2, [1]),
    ],
)
def test_cuts_are_balanced(sizes, parts, cuts):
    assert balanced(sizes, parts) == cuts
