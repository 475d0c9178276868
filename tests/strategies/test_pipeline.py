"""A pipeline trains as one process does, each rank holds its stage only, and what cannot be cut is named."""

import contextlib
import copy
import os
import re

import pytest
import torch
from one_process import CASES, Case, compare, compare_in_notebook
from strategy_jobs import call
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import KaleDistError
from kale_dist.strategies import Pipeline
from kale_dist.worker.parallel.ghosts import Ghosts, ghost, owners_of, units_of

LETTERS, WIDTH, LENGTH = 12, 8, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x, mask):
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.wide(x)


class Gpt(nn.Module):
    """The head is the embedding, positions are the parent's own parameter, and so is a residual connection."""

    def __init__(self, blocks=4):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets=None):
        x = self.embedding(tokens) + self.positions
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = x + 0.1 * block(x, mask)
        scores = self.head(self.norm(x))
        if targets is None:
            return scores
        return {"scores": scores, "loss": nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())}


class GptAdamClippedInStep(Case):
    """`clip_grad_norm_` in the step counts tied weights once."""

    clips_in_step = 0.5

    def model(self):
        torch.manual_seed(4)
        return Gpt().double()

    def data(self, shards):
        tokens = torch.randint(
            0, LETTERS, (self.batch * 4 + self.ragged, LENGTH), generator=torch.Generator().manual_seed(1)
        )
        return TensorDataset(tokens, tokens.roll(1, 1))

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def loss(self, model, x, y):
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


class GptAccumulated(GptAdamClippedInStep):
    """Shared parameters within accumulation windows; the model computes its loss itself."""

    clips_in_step = None
    clip_norm = 0.5
    accumulate = 3

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    def loss(self, model, x, y):
        return model(x, targets=y)["loss"]


class TwoCalls(GptAdamClippedInStep):
    """Two calls of the model before one backward pass, and a third that is not differentiated."""

    def loss(self, model, x, y):
        with torch.no_grad():
            still = model(y)
        return (model(x) - model(y)).square().mean() + (model(x) - still).square().mean()


GPTS = {case.__name__: case for case in (GptAdamClippedInStep, GptAccumulated, TwoCalls)}


@pytest.mark.nightly
def test_two_stages_equal_one_process_and_send_what_the_formula_says():
    names = ("MomentumAccumulatedClipped", "GptAdamClippedInStep")
    numbers = compare(Pipeline(micro_batches=3), names=names, cases={**CASES, **GPTS})
    samples, backwards, number = 10 * (4 * 4 + 3), 50, 8
    activations = samples * LENGTH * WIDTH * number
    output = samples * LENGTH * LETTERS * number
    # Both stages use the tied weights; stage 1 has no gradient for the positions, which it holds all the same.
    shared = (2 * LETTERS + LENGTH) * WIDTH * number
    assert numbers["GptAdamClippedInStep"]["bytes_sent"] == 2 * activations + output + backwards * shared


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:number_of_processes")
def test_a_loss_of_the_model_shared_weights_in_a_window_and_two_calls_equal_one_process():
    names = ("LossOfTheModel", "GptAccumulated", "TwoCalls")
    compare(Pipeline(micro_batches=3), names=names, cases={**CASES, **GPTS})


@pytest.mark.nightly
@pytest.mark.real("Triton")
def test_compiled_stages_equal_one_process():
    compare(Pipeline(compile=True, activation_checkpointing=True), names=("GptAdamClippedInStep",), cases=GPTS)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:number_of_processes")
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_four_stages_equal_one_process(micro_batches):
    names = ("PlainSgd", "MomentumAccumulatedClipped", *GPTS)
    compare(Pipeline(micro_batches=micro_batches), 4, names=names, cases={**CASES, **GPTS})
    compare(
        Pipeline(cut=["blocks.1", "blocks.2", "norm"], micro_batches=micro_batches), 4, names=tuple(GPTS), cases=GPTS
    )


@pytest.mark.nightly
def test_the_notebooks_own_objects_come_back_equal():
    compare_in_notebook(Pipeline(cut=["2"], micro_batches=2), case_class=CASES["MomentumAccumulatedClipped"])


@pytest.mark.nightly
def test_a_training_that_loses_a_rank_resumes_and_ends_as_one_process():
    """With evaluation, a scheduler and metrics; each rank holds its own stage and nothing else."""
    case = GptAdamClippedInStep()
    model = case.model()
    optimizer = case.optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    # A state from before the call is there too.
    case.loss(model, *case.data(1)[:4]).backward()
    optimizer.step()
    expected = copy.deepcopy(model)
    plain = torch.optim.Adam(expected.parameters(), lr=0.01)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    its_scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.8)
    loader = DataLoader(case.data(1), 4)
    expected_losses = []
    for _ in range(3):
        for x, y in loader:
            plain.zero_grad()
            case.loss(expected, x, y).backward()
            plain.step()
        its_scheduler.step()
        with torch.no_grad():
            expected_losses.append(
                sum(case.loss(expected, x, y).item() * len(y) for x, y in loader) / len(loader.dataset)
            )

    def train_step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            case.loss(model, x, y).backward()
            optimizer.step()
        if kd.context().attempt == 0 and kd.context().rank == 1 and optimizer.param_groups[0]["lr"] < 0.007:
            os._exit(3)
        held = sum(p.untyped_storage().nbytes() for p in model.parameters())
        print("holds", held, "of", sum(p.nbytes for p in model.parameters()), "states", len(optimizer.state))
        return 0.0

    def eval_step(model, loader, criterion, device, args):
        with torch.no_grad():
            total = sum(case.loss(model, x, y).item() * len(y) for x, y in loader)
        return {"loss": total / len(loader.dataset)}

    job = kd.distribute(
        model, loader, None, optimizer, train_step, eval_data_loader=DataLoader(case.data(1), 4), eval_step=eval_step,
        epochs=3, scheduler=scheduler, strategy=Pipeline(cut=["blocks.2"]), number_of_processes=2, max_restarts=1,
        threads=1, checkpoint_every=1, on="local",
    )  # fmt: skip
    try:
        result = job.result()
        text = [line.text for line in job.logs()]
    finally:
        job.delete()
    assert any("resumes after epoch 2" in line for line in text)
    assert abs(result.metrics["eval_loss"] - expected_losses[-1]) <= 1e-10
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert (mine - other).abs().max() <= 1e-8
    assert model.head.weight is model.embedding.weight
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.8**3)
    held = [line.split() for line in text if line.startswith("holds")]
    number = len(list(model.blocks[0].parameters()))
    own = LETTERS * WIDTH + LENGTH * WIDTH + 2 * sum(p.numel() for p in model.blocks[0].parameters())
    # Tied weights and positions are in both stages, and a parameter of the other stage takes one number.
    wanted = {(own, 2 + 2 * number), (own + 2 * WIDTH, 4 + 2 * number)}
    elsewhere = {own: 2 + 2 * number, own + 2 * WIDTH: 2 * number}
    found = {(int(words[1]) // 8, int(words[-1])) for words in held}
    assert found == {(numbers + elsewhere[numbers], states) for numbers, states in wanted}
    assert all(int(words[1]) < 0.6 * int(words[3]) for words in held)


@pytest.mark.nightly
def test_bf16_and_checkpointing_combine():
    losses = {}

    def train_step(model, loader, criterion, optimizer, device, args):
        seen = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = model(x, targets=y)["loss"]
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return {"first": seen[0], "last": seen[-1]}

    for strategy in (Pipeline(cut=2, activation_checkpointing=True), "ddp"):
        torch.manual_seed(4)
        model = Checkpointed()
        tokens = torch.randint(0, LETTERS, (64, LENGTH), generator=torch.Generator().manual_seed(1))
        job = kd.distribute(
            model, DataLoader(TensorDataset(tokens, tokens), 8), None, torch.optim.Adam(model.parameters(), lr=0.01), train_step,
            epochs=2, strategy=strategy, number_of_processes=2 if strategy != "ddp" else 1, precision="bf16", threads=1,
            on="local",
        )  # fmt: skip
        try:
            losses[str(strategy)] = job.result().metrics
        finally:
            job.delete()
    one, other = losses.values()
    assert one["last"] == pytest.approx(other["last"], rel=0.05)
    assert one["last"] < one["first"]


class Checkpointed(Gpt):
    def forward(self, tokens, targets=None):
        x = self.embedding(tokens) + self.positions
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)
        scores = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())}


# -- what cannot be cut ----------------------------------------------------------------------------------------------


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))


class Skip(Four):
    def forward(self, x):
        early = self.a(x)
        return self.d(self.c(self.b(early)) + early)


class WeightOfAnother(Four):
    def forward(self, x):
        return self.d(self.c(self.b(self.a(x)))) @ self.a.weight


class TwoTensors(Four):
    def __init__(self):
        super().__init__()
        self.c = nn.Bilinear(4, 4, 4)

    def forward(self, x):
        early = self.a(x)
        return self.d(self.c(self.b(early), early))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, several):
        return self.inner(several[0])


class Tuple(Four):
    def __init__(self):
        super().__init__()
        self.b, self.c = nn.LSTM(4, 4), First()

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


class OtherOrder(Four):
    def forward(self, x):
        return self.d(self.b(self.c(self.a(x))))


class Again(Four):
    def forward(self, x):
        return self.a(self.d(self.c(self.b(self.a(x)))))


class NeverCalled(Four):
    def forward(self, x):
        return self.b(self.a(x))


class Fine(Four):
    def forward(self, x):
        x = self.b(self.a(x)).view(2, 2, 4)
        x = x.transpose(0, 1).reshape(4, 4)
        return self.d(x + self.c(x)) + x


class OwnNameForAWeight(Four):
    def __init__(self):
        super().__init__()
        self.first = self.a.weight

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x)))) @ self.first


class Layers(nn.Sequential):
    def __init__(self):
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        super().__init__(nn.Linear(4, 4), nn.TransformerEncoder(layer, 2), nn.Linear(4, 4))


class InPlace(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))


def through_stages(make, cuts):
    """One batch through all stages, one after another in this process; what the last one gives, and the plain model."""
    torch.manual_seed(0)
    plain = make()
    x = torch.randn(4, 4)
    known, arrived = [], None
    stages = len(cuts) + 1
    for stage in range(stages):
        model = copy.deepcopy(plain)
        units = units_of(model, cuts)
        for name, parameter in model.named_parameters():
            if stage not in owners_of(model, units, stages)[name]:
                parameter.data = ghost(parameter, float("nan"), parameter.device)
        with contextlib.ExitStack() as stack:
            ghosts = Ghosts(model, units, stage, stages, torch.device("cpu"), stack)
            outcome, known = ghosts.run((x,), {}, known=known, arrived=arrived, with_gradient=True, check=True)
        assert all("forward" not in vars(unit.module) for unit in units)
        arrived = outcome.detach().requires_grad_()
    return outcome, plain(x)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Skip, "stage 1 uses a of an earlier stage, beside the one tensor that crosses the cut at c"),
        (WeightOfAnother, "stage 1 uses a.weight of an earlier stage"),
        (TwoTensors, "more than one tensor crosses the cut at c"),
        (Tuple, "a tuple crosses the cut at c"),
        (OtherOrder, "b was called in stage 1, and its weights are in stage 0"),
        (Again, "a was called in stage 1, and its weights are in stage 0"),
        (NeverCalled, "ended without calling c, where stage 1 begins"),
    ],
)
def test_a_forward_that_cannot_be_cut_is_named(make, said):
    with pytest.raises(KaleDistError, match=said):
        through_stages(make, ["c"])


class UNet(nn.Module):
    """Its last layers use what its first ones gave."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.d, self.e = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        first = self.a(x)
        second = self.b(first)
        return self.e(torch.cat([first, self.d(torch.cat([second, self.c(second)], -1))], -1))


@pytest.mark.parametrize("cut", ["c", "d"])
def test_a_model_that_no_cut_divides_evenly_is_told_so(cut):
    with pytest.raises(KaleDistError, match=r"no cut divides it evenly: use strategy='fsdp'"):
        through_stages(UNet, [cut])


@pytest.mark.parametrize(
    ("make", "cuts"),
    [
        (Fine, ["c"]),
        (Fine, ["b", "c"]),
        (InPlace, ["2"]),
        (InPlace, ["1", "3"]),
        (OwnNameForAWeight, ["c"]),
        (Layers, ["1.layers.1"]),
    ],
)
def test_a_forward_that_can_be_cut_gives_the_same(make, cuts):
    found, expected = through_stages(make, cuts)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_hook_that_computes_a_weight_of_a_stages_first_module_gives_it_a_gradient():
    seen = []

    def make():
        model = Fine()
        model.c.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        return model

    through_stages(make, ["c"])
    assert seen == [True] * 3


class Caching(nn.Linear):
    """Its forward adds a buffer, as rotary embeddings do."""

    def __init__(self, persistent):
        super().__init__(4, 4)
        self.persistent = persistent

    def forward(self, x):
        if not hasattr(self, "factor"):
            self.register_buffer("factor", torch.full((4,), 2.0, device=x.device), persistent=self.persistent)
        return super().forward(x) * self.factor


@pytest.mark.filterwarnings("ignore:.*gives a new model object")
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_buffers_that_a_stages_forward_adds_come_back_with_all_weights(persistent):
    torch.manual_seed(0)
    model = nn.Sequential(Caching(persistent), Caching(persistent))
    expected = copy.deepcopy(model)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 4))
    options = {"strategy": "pipeline", "number_of_processes": 2, "timeout_s": 60}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = kd.distribute(model, DataLoader(data, 8), nn.MSELoss(), optimizer, **options)
    try:
        found = job.model.state_dict()
    finally:
        job.delete()
    nn.functional.mse_loss(expected(data.tensors[0]), data.tensors[1]).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    torch.testing.assert_close(found, expected.state_dict())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*has never run on GPUs")
def test_a_skip_connection_ends_the_job_with_its_name():
    torch.manual_seed(0)
    model = Skip()
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 4)), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = kd.distribute(
        model, loader, nn.MSELoss(), optimizer, strategy=Pipeline(cut=["c"]), number_of_processes=2, on="local"
    )
    try:
        with pytest.raises(KaleDistError, match="a skip connection over the cut"):
            job.result()
    finally:
        job.delete()


def copying_step(model, data_loader, criterion, optimizer, device, args):
    copy.deepcopy(model)


def step_in_hooks(model, data_loader, criterion, optimizer, device, args):
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    for x, y in data_loader:
        criterion(model(x), y).backward()


def hand_made_sgd(model, data_loader, criterion, optimizer, device, args):
    for x, y in data_loader:
        criterion(model(x), y).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*has never run on GPUs")
@pytest.mark.parametrize(
    ("step", "said"),
    [
        (copying_step, "make other copies before the call"),
        (step_in_hooks, "Step after backward()"),
        (hand_made_sgd, "Leave out weights whose grad is None"),
    ],
)
def test_a_step_that_a_stage_cannot_take_is_told_what_to_do(step, said):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 4)), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = kd.distribute(
        model, loader, nn.MSELoss(), optimizer, step, strategy="pipeline", number_of_processes=2, on="local",
        timeout_s=60,
    )  # fmt: skip
    try:
        with pytest.raises(KaleDistError, match=re.escape(said)):
            job.result()
    finally:
        job.delete()


# -- refused at the call ---------------------------------------------------------------------------------------------


def sequence(*modules):
    return nn.Sequential(*(modules or [nn.Linear(4, 4) for _ in range(5)]))


@pytest.mark.parametrize(
    ("settings", "model", "ranks"),
    [
        ({"cut": 4}, sequence(), 2),
        (
            {"cut": 2},
            sequence(),
            4,
        ),
        ({"cut": ["1", "3"]}, sequence(), 2),
        ({"cut": ["blocks.7"]}, Gpt(), 2),
        ({"cut": ["3", "1"]}, sequence(), 3),
        ({"cut": ["1", "1"]}, sequence(), 3),
        ({"cut": ["0"]}, sequence(), 2),
        ({"cut": ["blocks.1", "blocks.1.wide"]}, Gpt(), 3),
        ({}, nn.Linear(4, 4), 2),
        ({}, sequence(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)), 2),
        ({}, sequence(nn.Linear(4, 4), nn.LazyLinear(4)), 2),
    ],
)
def test_what_cannot_be_cut_is_refused_at_the_call(settings, model, ranks, refusal):
    assert refusal(lambda: call(Pipeline(**settings), ranks, model=model, features=4)).argument == "strategy"


def own_step(model, data_loader, criterion, optimizer, device, args):
    """Never runs: the ready-made one takes no LBFGS."""


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": torch.optim.LBFGS, "train_step": own_step},
        {"precision": "fp16"},
    ],
)
def test_trainings_that_need_the_whole_model_are_refused_at_the_call(options, refusal):
    refusal(lambda: call("pipeline", model=sequence(), features=4, **options))


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batches": 0},
        {"micro_batches": 2.5},
        {"cut": 0},
        {"cut": True},
        {"cut": []},
        {"cut": [1, 2]},
        {"compile": 1},
        {"chunks": 4},
    ],
)
def test_settings_check_themselves(settings, refusal):
    assert refusal(lambda: Pipeline(**settings)).argument == "strategy"
