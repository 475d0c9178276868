"""A model made without its values: each tensor's own are those that the constructor would have given it."""

import numpy as np
import pytest
import torch
from torch import nn

from kale_dist.worker.training.construction import Construction


class Kinds(nn.Module):
    """Tensors that come about in different ways."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.recurrent = nn.LSTM(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.scaled = nn.Parameter(torch.randn(3, 4) * torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("frequencies", 1 / 10 ** (torch.arange(0, 4, 2).float() / 4), persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)).bool())
        self.register_buffer("table", torch.from_numpy(np.arange(3.0)))
        self.rates = torch.linspace(0, 1, 3).tolist()
        if torch.rand(1).item() > 0:
            self.chosen = nn.Parameter(torch.full((2,), 3.0))
        self.apply(self._init)
        nn.init.trunc_normal_(self.layers[0].weight, a=-0.1, b=0.1)
        nn.init.orthogonal_(self.layers[1].weight)
        self.layers[2].weight.data.mul_(0.5)

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def test_tensors_get_the_values_of_the_constructor_one_by_one():
    torch.manual_seed(3)
    plain, after = Kinds(), torch.rand(1)
    torch.manual_seed(3)
    construction = Construction(Kinds)
    assert torch.equal(torch.rand(1), after), "draws after it are those after the constructor"
    made = construction.made
    assert made.rates == plain.rates
    assert made.head.weight is made.embedding.weight
    tensors = [*made.named_parameters(), *made.named_buffers()]
    assert all(one.is_meta for _, one in tensors)
    expected = dict([*plain.named_parameters(), *plain.named_buffers()])
    assert {name for name, _ in tensors} == expected.keys()
    for name, one in tensors[::-1]:
        value = construction.value(one)
        assert torch.equal(value, expected[name]), name
        assert value.dtype == expected[name].dtype


@pytest.mark.nightly
def test_a_model_of_transformers_gets_its_values_too():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    make = lambda: transformers.AutoModelForCausalLM.from_config(config)  # noqa: E731
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    construction = Construction(make)
    expected = dict([*plain.named_parameters(), *plain.named_buffers()])
    for name, one in [*construction.made.named_parameters(), *construction.made.named_buffers()]:
        assert torch.equal(construction.value(one), expected[name]), name
