"""Fully sharded data parallelism: equal to one process, whole states back, and errors in words where ranks differ."""

import pytest
import torch
from one_process import Case, WithLoss, compare, compare_in_notebook
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.strategies import FSDP

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")


class Stack(nn.Module):
    """A model of two units and a rest."""

    def __init__(self, spare=False):
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 4)
        self.spare = nn.Linear(6, 4) if spare else None

    def forward(self, x, skip=False, spare=False):
        hidden = self.layers[0](x)
        if not skip:
            hidden = self.layers[1](hidden)
        out = self.head(hidden)
        return out + nn.functional.linear(x, self.spare.weight) if spare else out


class Stacked(Case):
    """Units of their own, and a state of the optimizer from before the call."""

    def model(self):
        return Stack().double()

    def optimizer(self, model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


class Encoding(nn.Module):
    """A model whose `forward` calls a method of its own, and then uses a weight of the same unit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(6, 6)
        self.last = nn.Parameter(torch.randn(6, 4) / 2)

    def encode(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x):
        return self.encode(x) @ self.last


class Encoded(Case):
    def model(self):
        return Encoding().double()


class StackedAccumulated(Stacked):
    accumulate = 2
    clip_norm = 0.1


UNITS = {case.__name__: case for case in (Stacked, StackedAccumulated, Encoded)}
PLAIN_BYTES = 8 * (7 * 10 + 11 * 8 + 9 * 4)


def test_two_ranks_equal_one_process_and_send_what_the_formula_says():
    numbers = compare(FSDP(), names=("PlainSgd", "MomentumAccumulatedClipped", "TiedAdamClippedInStep"))
    # 50 steps, two ranks, each 3 (n-1)/n P.
    assert numbers["PlainSgd"]["bytes_sent"] == 50 * 2 * 3 * PLAIN_BYTES / 2


def test_a_forward_that_calls_a_method_of_its_model_equals_one_process():
    compare(FSDP(), names=("Encoded",), cases=UNITS)


@pytest.mark.nightly
def test_units_equal_one_process_with_recomputed_activations():
    compare(FSDP(units=("layers.*",), activation_checkpointing=True), names=("StackedAccumulated",), cases=UNITS)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [FSDP(), FSDP(units="whole", activation_checkpointing=True)], ids=repr)
def test_four_ranks_equal_one_process(strategy):
    compare(strategy, number_of_processes=4)
    compare(strategy, number_of_processes=4, names=tuple(UNITS), cases=UNITS)


@pytest.mark.nightly
@pytest.mark.real("Triton")
def test_compiled_units_equal_one_process():
    compare(FSDP(units=("layers.*",), compile=True), names=("Stacked",), cases=UNITS)


@pytest.mark.nightly
def test_the_notebooks_own_objects_come_back_equal():
    compare_in_notebook(FSDP())


def loader(samples=22):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (samples,), generator=generator)), 4)


def fit(step, strategy, model=None, **options):
    """In a rank: train a model by a step."""
    from kale_dist.worker.training.loop import train
    from kale_dist.worker.training.settings import Training

    model = model or Stack(spare=True)
    return train(
        Training(
            model=model,
            train_data_loader=loader(),
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            train_step=step,
            strategy=strategy,
            **options,
        )
    )


def launched(function, *args, ranks=2):
    job = kd.launch(function, *args, number_of_processes=ranks, threads=1)
    try:
        return job.results()
    finally:
        job.delete()


def what_a_step_sees(strategy):
    """Runs in a rank: facts about the objects in a step, and about those captured before it."""
    import os

    model = Stack(spare=True)
    captured = list(model.parameters())
    rank = int(os.environ["RANK"])
    facts = {}

    def step(model, data, criterion, optimizer, device, args):
        for number, (x, y) in enumerate(data):
            optimizer.zero_grad()
            # Only rank 1 uses the spare weight, and no rank its bias.
            criterion(model(x, spare=rank == 1 and number == 1), y).backward()
            if number == 1:
                facts["used by one"] = model.spare.weight.grad is not None
                facts["used by none"] = model.spare.bias.grad is None
            optimizer.step()
        facts["is a Stack"] = isinstance(model, Stack)
        facts["keys"] = list(model.state_dict())
        facts["captured is nan"] = all(bool(one.isnan().all()) for one in captured)
        facts["held"] = sum(one.to_local().numel() for one in model.parameters())

    def evaluate(model, data, criterion, device, args):
        return {"batches": float(sum(1 for x, _ in data if model(x) is not None))}

    result = fit(step, strategy, model, eval_data_loader=DataLoader(loader(9).dataset, 3), eval_step=evaluate)
    facts["class afterwards"] = type(model) is Stack
    return facts, result.model_state if rank == 0 else None


def test_a_step_sees_its_own_model_in_parts_and_captured_weights_are_nan():
    (facts, state), (other, _) = launched(what_a_step_sees, FSDP(units=("layers.*",)))
    assert facts["keys"] == list(Stack(spare=True).state_dict())
    for name in ("is a Stack", "captured is nan", "used by one", "used by none", "class afterwards"):
        assert facts[name] is True, name
        assert other[name] is True, name
    whole = sum(one.numel() for one in Stack(spare=True).parameters())
    assert facts["held"] + other["held"] == whole
    assert {name: one.shape for name, one in state.items()} == {
        name: one.shape for name, one in Stack(spare=True).state_dict().items()
    }


def differ(kind):
    """Runs in a rank: ranks do different things; gives the error."""
    import os

    rank = int(os.environ["RANK"])

    def step(model, data, criterion, optimizer, device, args):
        for number, (x, y) in enumerate(data):
            is_odd = rank == 1 and number == 1
            if kind == "left" and is_odd:
                break
            if kind == "no backward" and is_odd:
                continue
            out = model(x, skip=kind == "layer" and is_odd)
            criterion(out, y).backward()
            optimizer.step()

    fit(step, FSDP(units=("layers.*",)), Stack())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("layer", "layers.1"),
        pytest.param("no backward", "no backward pass", marks=pytest.mark.nightly),
        pytest.param("left", "left the loop", marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_differ_get_an_error_in_words(kind, words):
    with pytest.raises(JobFailedError) as caught:
        launched(differ, kind)
    said = f"{caught.value}{caught.value.__cause__}"
    assert "do not compute the same" in said
    assert words in said


def call(model=None, strategy=None, **options):
    """A call that is refused before anything starts."""
    model = model or WithLoss()
    options.setdefault(
        "optimizer", torch.optim.SGD(model.parameters(), lr=0.1) if isinstance(model, nn.Module) else None
    )
    return kd.distribute(
        model,
        loader(),
        nn.CrossEntropyLoss(),
        strategy=strategy or FSDP(),
        number_of_processes=2,
        on="local",
        **options,
    )


def with_scalar():
    model = WithLoss()
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def with_hook():
    model = WithLoss()
    model.body[0].weight.register_hook(lambda gradient: gradient * 2)
    return model


def with_two_dtypes():
    model = WithLoss()
    model.body[0].double()
    return model


def tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: call(with_scalar()),
        lambda: call(with_two_dtypes()),
        lambda: call(with_hook()),
        lambda: call(nn.Sequential(nn.LazyLinear(4))),
        lambda: call(strategy=FSDP(units=("boody.*",))),
        lambda: call(tied(), FSDP(units=("0",))),
        lambda: call(precision="fp16"),
        lambda: call(model := WithLoss(), optimizer=torch.optim.Adafactor(model.parameters())),
        lambda: call(nn.Sequential(nn.EmbeddingBag(6, 4, sparse=True))),
        lambda: FSDP(units="block"),
        lambda: FSDP(units=()),
        lambda: FSDP(compile="yes"),
        lambda: FSDP(plan={}),
    ],
)
def test_what_cannot_be_sharded_is_refused_at_the_call(make, refusal):
    assert refusal(make).argument in ("strategy", "precision")
