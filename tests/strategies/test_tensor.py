"""Tensor parallelism: equal to one process, with and without a plan; what cannot be divided is refused."""

import copy

import pytest
import torch
import trainings
from one_process import Case, TiedAdamClippedInStep, compare, compare_in_notebook
from strategy_jobs import call
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.strategies import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")


class Attention(nn.Module):
    """Attention whose forward takes as many heads as there are, with one weight for query, key and value."""

    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, time, _ = x.shape
        parts = [one.view(batch, time, -1, self.size).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, -1))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = Attention(width, 4)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))


class Transformer(nn.Module):
    """A language model with tied weights, padding, and an encoder layer of torch's."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8, padding_idx=0)
        self.place = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.embedding(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.encoder(hidden))


class Attentive(TiedAdamClippedInStep):
    def model(self):
        torch.manual_seed(7)
        return Transformer().double()


class AttentiveAccumulated(Attentive):
    """Also with a state of the optimizer from before the call."""

    accumulate = 2
    clip_norm = 0.5
    clips_in_step = None

    def optimizer(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model(torch.ones(1, 5, dtype=torch.int64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


class Wide(Case):
    """Widths that four divides."""

    def model(self):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)).double()


class Penalised(Case):
    """A loss that contains the gradient of the model by its input, as that of a GAN with a gradient penalty does."""

    def loss(self, model, x, y):
        given = x.clone().requires_grad_()
        scores = model(given)
        (slope,) = torch.autograd.grad(scores.square().sum(), given, create_graph=True)
        return nn.functional.cross_entropy(scores, y) + slope.square().sum(1).mean()


class Copied(Case):
    """A loss against a copy of the model with weights of its own, as that of a mean teacher."""

    def loss(self, model, x, y):
        teacher = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(0.5)
            wanted = teacher(x)
        scores = model(x)
        return nn.functional.cross_entropy(scores, y) + nn.functional.mse_loss(scores, wanted)


class Odd(Case):
    """A layer whose outputs two do not divide, as the one output of a critic."""

    def model(self):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 4)).double()


class Compiled(Case):
    """A model that the notebook has compiled."""

    def model(self):
        return torch.compile(super().model(), backend="eager")


class Tied(nn.Module):
    """Source, target and scores share one weight, as in the original Transformer; the head is registered before them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 12, bias=False)
        self.source, self.target = nn.Embedding(12, 8), nn.Embedding(12, 8, padding_idx=0)
        self.up, self.down, self.again = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.source.weight = self.target.weight = self.head.weight
        self.again.weight = self.down.weight

    def forward(self, x):
        hidden = self.source(x) + self.target(x.flip(1))
        up = torch.tanh(self.up(hidden))
        return self.head(hidden + self.down(up) + self.again(up.square()))


class SharedThrice(TiedAdamClippedInStep):
    """Layers whose weight was divided already, for the layer before."""

    def model(self):
        torch.manual_seed(9)
        return Tied().double()


ATTENTION = {case.__name__: case for case in (Attentive, AttentiveAccumulated, Wide)}
PLANNED = ("Attentive", "AttentiveAccumulated")
PLAN = {
    "blocks.*.attention.qkv": "columns/3",
    "blocks.*.attention.out": "rows",
    "blocks.*.up": "columns",
    "blocks.*.down": "rows",
}


@pytest.mark.nightly
def test_two_ranks_equal_one_process_and_send_what_the_formula_says():
    numbers = compare(Tensor(), names=("PlainSgd", "MomentumAccumulatedClipped", "TiedAdamClippedInStep"))
    # Outputs joined: 1/2 of 10 + 8 + 4 numbers a sample; gradients of the inputs of the last two layers summed: 10 + 8.
    samples = 10 * (4 * 4 + 3)
    assert numbers["PlainSgd"]["bytes_sent"] == 2 * samples * 8 * (22 / 2 + 18)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [{}, {"0": "columns", "2": "rows"}], ids=repr)
def test_losses_of_gradients_and_of_copies_equal_one_process(plan):
    compare(Tensor(plan=plan), names=("Penalised", "Copied"), cases={"Penalised": Penalised, "Copied": Copied})


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [{}, {"up": "columns", "down": "rows", "again": "rows"}], ids=repr)
def test_layers_that_share_a_weight_of_a_layer_before_them_equal_one_process(plan):
    compare(Tensor(plan=plan), names=("SharedThrice",), cases={"SharedThrice": SharedThrice})


@pytest.mark.nightly
def test_a_layer_whose_outputs_the_ranks_do_not_divide_stays_whole_and_the_log_says_so():
    compare(Tensor(), names=("Odd",), cases={"Odd": Odd})
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    data = DataLoader(TensorDataset(torch.randn(8, 6), torch.randn(8, 1)), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = kd.distribute(
        model, data, nn.MSELoss(), optimizer, strategy="tensor", number_of_processes=2, threads=1, on="local"
    )
    try:
        job.result()
        assert "Whole on each rank, as 2 ranks do not divide it or a plan says so: 1" in "\n".join(map(str, job.logs()))
    finally:
        job.delete()


@pytest.mark.nightly
def test_a_compiled_model_equals_one_process():
    compare(Tensor(), names=("Compiled",), cases={"Compiled": Compiled})


@pytest.mark.nightly
def test_a_plan_for_attention_equals_one_process():
    compare(Tensor(plan=PLAN), names=("AttentiveAccumulated",), cases=ATTENTION)


@pytest.mark.nightly
def test_a_plan_for_attention_sends_less():
    numbers = compare(Tensor(plan=PLAN), names=PLANNED, cases=ATTENTION)
    alone = compare(Tensor(activation_checkpointing=True), names=("Attentive",), cases=ATTENTION)
    assert numbers["Attentive"]["bytes_sent"] < alone["Attentive"]["bytes_sent"]


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [Tensor(), Tensor(plan=PLAN, activation_checkpointing=True)], ids=repr)
def test_four_ranks_equal_one_process(strategy):
    compare(strategy, number_of_processes=4, names=PLANNED, cases=ATTENTION)


@pytest.mark.nightly
@pytest.mark.real("Triton")
def test_compiled_blocks_equal_one_process():
    compare(Tensor(plan=PLAN, compile=True), names=("Attentive",), cases=ATTENTION)


@pytest.mark.nightly
def test_the_notebooks_own_objects_come_back_equal():
    compare_in_notebook(Tensor())


def fit(plan, misuse):
    """Runs in a rank: trains a Transformer; a plan that does not fit its forward is misused."""
    torch.manual_seed(7)
    model = Transformer()
    teacher = copy.deepcopy(model)
    data = torch.randint(0, 12, (16, 5), generator=torch.Generator().manual_seed(1))

    def step(model, loader, criterion, optimizer, device, args):
        for (x,) in loader:
            optimizer.zero_grad()
            criterion(model(x).flatten(0, 1), x.flatten()).backward()
            if misuse == "noise":
                import os

                model.blocks[0].norm.bias.grad.add_(float(os.environ["RANK"]))
            optimizer.step()
            for mean, weight in zip(teacher.parameters(), model.parameters(), strict=True):
                if misuse == "average":
                    mean.data.mul_(0.9).add_(weight.data, alpha=0.1)

    loader = DataLoader(TensorDataset(data), 4)
    trainings.fit(model, loader, train_step=step, strategy=Tensor(plan=plan))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plan", "misuse", "words"),
    [
        ({}, "average", "callbacks=[kd.callbacks.EMA()]"),
        ({"blocks.*.down": "rows"}, None, "blocks.0.down is planned as 'rows' and got an input of width 16, not 8"),
        ({}, "noise", "blocks.0.norm.bias is on every rank, and its gradients were not equal"),
    ],
)
def test_a_plan_that_does_not_fit_the_forward_is_an_error_in_words(plan, misuse, words):
    job = kd.launch(fit, plan, misuse, number_of_processes=2, threads=1)
    try:
        with pytest.raises(JobFailedError) as caught:
            job.results()
    finally:
        job.delete()
    assert words in f"{caught.value}{caught.value.__cause__}"


def own_step(model, data_loader, criterion, optimizer, device, args):
    """Never runs: the ready-made one takes no LBFGS."""


def two_ways():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: call(Tensor(plan={"body.0": "columns"}), 4),
        lambda: call(Tensor(), model=nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))),
        lambda: call(Tensor(), 1),
        lambda: call(Tensor(), model=nn.Sequential(nn.Conv2d(1, 2, 3))),
        lambda: call(Tensor(plan={"boddy.0": "rows"})),
        lambda: call(Tensor(plan={"body.1": "rows"})),
        lambda: call(Tensor(plan={"1": "rows"}), model=two_ways()),
        lambda: call(Tensor(plan={"0": "rows"}), model=nn.Sequential(nn.Embedding(4, 4))),
        lambda: call(Tensor(), optimizer=torch.optim.LBFGS, train_step=own_step),
        lambda: call(Tensor(), precision="fp16"),
        lambda: Tensor(plan={"0": "column"}),
        lambda: Tensor(plan=["0"]),
    ],
)
def test_what_cannot_be_divided_is_refused_at_the_call(make, refusal):
    assert refusal(make).argument in ("strategy", "precision")
