"""Fully sharded data parallelism: equal to one process, whole states back, and errors in words where ranks differ."""

import random
import time

import pytest
import torch
import trainings
from one_process import Case, WithLoss, compare, compare_in_notebook
from strategy_jobs import call
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


class Policy(nn.Module):
    """A unit and the model return weights, or views of them."""

    def __init__(self, below=False):
        super().__init__()
        torch.manual_seed(6)
        self.body = nn.Linear(6, 4)
        self.log_std = nn.Parameter(torch.zeros(1, 4))
        self.scales = nn.ModuleList([Policy()] if below else [])
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x):
        mean = self.body(x)
        spread = self.log_std.expand_as(mean)
        for scale in self.scales:
            more, others, factor = scale(x)
            mean, spread = mean + more * factor, spread + others
        return mean, spread, self.factor


class Policies(Case):
    """A continuous policy, which is evaluated between `backward()` and `step()`, and after it, with and without gradients."""

    def model(self):
        return Policy(below=True).double()

    def optimizer(self, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.seen = []
        optimizer.register_step_pre_hook(lambda *_: self.look(model))
        return optimizer

    def look(self, model):
        with torch.set_grad_enabled(len(self.seen) % 3 > 0):
            self.seen.append(sum(one.sum() for one in model(torch.ones(2, 6, dtype=torch.float64))).item())

    def loss(self, model, x, y):
        self.look(model)
        mean, spread, factor = model(x)
        # What an evaluation sees is a part of the loss, and so it is compared. A weight is used beside the forward, too.
        fit = ((mean - y[:, None]) ** 2 / (2 * (2 * spread).exp()) + spread).mean() * factor.square()
        return fit + model.log_std.square().mean() + sum(self.seen[-2:])


UNITS = {case.__name__: case for case in (Stacked, StackedAccumulated, Encoded, Policies)}
PLAIN_BYTES = 8 * (7 * 10 + 11 * 8 + 9 * 4)


def test_two_ranks_equal_one_process_and_send_what_the_formula_says():
    numbers = compare(FSDP(), names=("PlainSgd", "MomentumAccumulatedClipped", "TiedAdamClippedInStep"))
    # 50 steps, two ranks, each 3 (n-1)/n P, of which 1 (n-1)/n for a unit that stays gathered until its backward pass.
    assert numbers["PlainSgd"]["bytes_sent"] == 50 * 2 * 2 * PLAIN_BYTES / 2


@pytest.mark.nightly
def test_a_forward_that_calls_a_method_of_its_model_equals_one_process():
    compare(FSDP(), names=("Encoded",), cases=UNITS)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [FSDP(), FSDP(units=("scales.*",))], ids=repr)
def test_a_forward_that_returns_weights_or_views_of_them_equals_one_process(strategy):
    compare(strategy, names=("Policies",), cases=UNITS)


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
    return trainings.fit(model or Stack(spare=True), loader(), train_step=step, strategy=strategy, **options)


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


NUMBERS = {
    "norm(2).item()": lambda ps: sum(p.grad.norm(2).item() ** 2 for p in ps) ** 0.5,
    "stack of norms": lambda ps: torch.norm(torch.stack([p.grad.detach().norm(2) for p in ps]), 2).item(),
    "abs().sum().item()": lambda ps: sum(p.grad.abs().sum().item() for p in ps),
    "float(pow(2).sum())": lambda ps: sum(float(p.grad.pow(2).sum()) for p in ps),
    "sum of sums": lambda ps: sum(p.grad.pow(2).sum() for p in ps).item(),
    "dot": lambda ps: sum(torch.dot(p.grad.flatten(), p.data.flatten()).item() for p in ps),
    "dot of slices": lambda ps: sum(torch.dot(p.grad.flatten()[::1], (p.data - 1).flatten()[::1]).item() for p in ps),
    "max": lambda ps: max(p.abs().max().item() for p in ps),
    "mean": lambda ps: sum(p.mean().item() for p in ps),
    "std": lambda ps: sum(p.std().item() for p in ps),
    "var": lambda ps: sum(p.grad.var().item() for p in ps),
    "share of zeros": lambda ps: sum((p.grad.abs() < 1e-2).double().mean().item() for p in ps),
    "count": lambda ps: sum((p.grad.abs() > 1e-2).sum().item() for p in ps),
    "int": lambda ps: float(sum(int((p > 0).sum()) for p in ps)),
    "numel": lambda ps: float(sum(p.numel() for p in ps)),
    "norm of cat": lambda ps: torch.cat([p.grad.flatten() for p in ps]).norm().item(),
    "parameters_to_vector": lambda ps: nn.utils.parameters_to_vector(ps).norm().item(),
    "largest": lambda ps: max(torch.linalg.vector_norm(p.grad, float("inf")).item() for p in ps),
    "get_total_norm": lambda ps: nn.utils.get_total_norm([p.grad for p in ps]).item(),
    "foreach": lambda ps: sum(x.item() for x in torch._foreach_norm([p.grad for p in ps])),
    "norm of weights": lambda ps: sum(p.data.norm().item() for p in ps),
    "sum of weights": lambda ps: sum(p.sum().item() for p in ps),
    "if": lambda ps: float(sum(1 for p in ps if (p.grad > 0.05).any())),
    "median": lambda ps: sum(p.median().item() for p in ps),
    "topk": lambda ps: sum(p.grad.flatten().topk(2).values.sum().item() for p in ps),
    "element": lambda ps: ps[0][0, 0].item(),
    "row": lambda ps: ps[0][5].sum().item(),
}
"""What steps read of weights and gradients, as numbers."""


def reads_numbers_and_clips(model, data, criterion, optimizer, device, args):
    """Reads all of `NUMBERS`, and clips as one does by hand."""
    for x, y in data:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        weights = list(model.parameters())
        found = {name: read(weights) for name, read in NUMBERS.items()}
        factor = 0.1 / (sum(p.grad.data.norm(2).item() ** 2 for p in weights) ** 0.5 + 1e-6)
        for p in weights:
            p.grad.data.mul_(min(factor, 1))
        optimizer.step()
    return found


def in_a_rank_reading_numbers(strategy):
    model = Stack().double()
    made = loader(16).dataset
    data = DataLoader(TensorDataset(made.tensors[0].double(), made.tensors[1]), 4 if strategy else 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if strategy is None:
        return reads_numbers_and_clips(model, data, nn.CrossEntropyLoss(), optimizer, None, None), model.state_dict()
    seen = {}

    def step(*given):
        seen.update(reads_numbers_and_clips(*given))

    return seen, trainings.fit(model, data, optimizer, train_step=step, strategy=strategy).model_state


def test_numbers_that_a_step_reads_are_those_of_the_whole_model():
    expected, weights = in_a_rank_reading_numbers(None)
    (first, state), (second, _) = launched(in_a_rank_reading_numbers, FSDP(units=("layers.*",)))
    assert first == second == pytest.approx(expected)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value)
    from torch.distributed.tensor import DTensor

    assert torch.ops.aten._local_scalar_dense.default not in DTensor._op_dispatcher._custom_op_handlers


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("layer", "layers.1"),
        ("no backward", "no backward pass"),
        ("left", "left the loop"),
    ],
)
def test_ranks_that_differ_get_an_error_in_words(kind, words):
    with pytest.raises(JobFailedError) as caught:
        launched(differ, kind)
    said = f"{caught.value}{caught.value.__cause__}"
    assert "do not compute the same" in said
    assert words in said


def copies_the_model(model, data, *_):
    import copy

    for _batch in data:
        copy.deepcopy(model)


def averages_with_whole_tensors(model, data, *_):
    kept = [torch.zeros(p.shape) for p in model.parameters()]
    for _batch in data:
        with torch.no_grad():
            for mean, p in zip(kept, model.parameters(), strict=True):
                mean.sub_(0.1 * (mean - p))


def reads_arrays(model, data, *_):
    for _batch in data:
        next(model.parameters()).detach().numpy()


def calls_a_part(model, data, *_):
    for x, _y in data:
        model.head(x).sum().backward()


def penalizes_a_gradient(model, data, *_):
    for x, _y in data:
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        slope.square().sum().backward()


def reads_whole_arrays(model, data, *_):
    for _batch in data:
        found = next(model.parameters()).detach().full_tensor().numpy().shape
    assert found == (6, 6)


class Caching(Stack):
    """Its forward adds a buffer."""

    def forward(self, x):
        self.register_buffer("seen", torch.ones(1))
        return super().forward(x)


def fit_caching():
    return fit(None, FSDP(), Caching())


@pytest.mark.nightly
def test_a_model_whose_structure_changes_comes_back():
    first, _ = launched(fit_caching)
    assert type(first.model) is Caching
    assert first.model.seen.tolist() == [1.0]


def fit_with_whole_numbers():
    model = Stack()
    model.table = nn.Parameter(torch.arange(6), requires_grad=False)
    return fit(None, FSDP(), model)


@pytest.mark.nightly
def test_a_parameter_of_whole_numbers_comes_back():
    first, _ = launched(fit_with_whole_numbers)
    assert first.model_state["table"].tolist() == [0, 1, 2, 3, 4, 5]


class ShortRows(Stack):
    """Its forward shortens what it reads."""

    def forward(self, x):
        with torch.no_grad():
            self.layers[0][0].weight.data[:1] *= 0.5
        return super().forward(x)


class NewWeight(Stack):
    """Its forward puts another tensor into the place of a weight."""

    def forward(self, x):
        self.layers[0][0].weight = nn.Parameter(self.layers[0][0].weight * 0.5)
        return super().forward(x)


class Averaging(Stack):
    """A method of it changes weights, as that of a teacher which is an average."""

    def average(self):
        for p in self.head.parameters():
            p.data = p.data * 0.9


def averages(model, data, criterion, optimizer, *_):
    for x, y in data:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        model.average()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "step", "said"),
    [
        (ShortRows, None, "forward() changes layers.0.0.weight"),
        (NewWeight, None, "forward() changes a weight of the model"),
        (Averaging, averages, "average() changes head.weight"),
    ],
)
def test_a_model_that_changes_its_weights_is_told_that_they_would_be_lost(make, step, said):
    with pytest.raises(JobFailedError) as caught:
        launched(fit, step, FSDP(), make())
    assert f"The model's {said}" in str(caught.value)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("step", "remedy"),
    [
        (copies_the_model, "callbacks=[kd.callbacks.EMA()]"),
        (averages_with_whole_tensors, "callbacks=[kd.callbacks.EMA()]"),
        (reads_arrays, ".full_tensor()"),
        (calls_a_part, "FSDP(units=('encoder',)) for a call of model.encoder(x)"),
        (penalizes_a_gradient, "Use strategy='ddp' or 'tensor'"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_torchs_errors_about_parts_get_a_remedy(step, remedy):
    with pytest.raises(JobFailedError) as caught:
        launched(fit, step, FSDP())
    assert remedy in str(caught.value)


class Average:
    """An average of weights, as many keep it in a notebook."""

    def __init__(self):
        self.kept = {}

    def state_dict(self):
        return dict(self.kept)

    def load_state_dict(self, state):
        self.kept = dict(state)


AVERAGE = Average()


def reads_parts_by_the_way(model, data, criterion, optimizer, *_):
    """Keeps an average of parts, and calls `backward()` of a sum over parts, at another pace on each rank."""
    for x, y in data:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        (sum(p.pow(2).sum() for p in model.parameters() if p.grad is not None) * 1e-4).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            AVERAGE.kept[name] = AVERAGE.kept.get(name, 0.0) * 0.9 + p.detach() * 0.1
        time.sleep(random.SystemRandom().uniform(0, 0.1))


@pytest.mark.nightly
def test_notices_of_a_rank_wait_for_no_other_rank():
    job = kd.launch(fit, reads_parts_by_the_way, FSDP(), epochs=20, number_of_processes=2, threads=1, timeout_s=60)
    job.result()
    assert "left behind in the ranks: test_fsdp.AVERAGE" in "\n".join(map(str, job.logs()))


def averages_by_callback():
    model = Stack()
    averaged = fit(None, FSDP(), model, callbacks=[kd.callbacks.EMA(0.9)]).averaged_state
    return averaged and {name: value.shape for name, value in averaged.items()}


@pytest.mark.nightly
def test_the_remedies_train():
    first, _ = launched(averages_by_callback)
    assert first == {name: value.shape for name, value in Stack().state_dict().items()}
    assert launched(fit, reads_whole_arrays, FSDP())[0].epochs == 1


class Lamb(torch.optim.SGD):
    """By its name one that needs whole weights."""


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
        lambda: call(FSDP(), model=with_scalar()),
        lambda: call(FSDP(), model=with_two_dtypes()),
        lambda: call(FSDP(), model=with_hook()),
        lambda: call(FSDP(), model=nn.Sequential(nn.LazyLinear(4))),
        lambda: call(FSDP(units=("boody.*",))),
        lambda: call(FSDP(units=("0",)), model=tied()),
        lambda: call(FSDP(), precision="fp16"),
        lambda: call(FSDP(), optimizer=torch.optim.Adafactor),
        lambda: call(FSDP(), model=nn.Sequential(nn.EmbeddingBag(6, 4, sparse=True))),
        lambda: FSDP(units="block"),
        lambda: FSDP(units=()),
        lambda: FSDP(compile="yes"),
        lambda: FSDP(plan={}),
        lambda: call(FSDP(), optimizer=Lamb),
        lambda: call(FSDP(), model=nn.ModuleList([WithLoss()])),
    ],
)
def test_what_cannot_be_sharded_is_refused_at_the_call(make, refusal):
    assert refusal(make).argument in ("strategy", "precision")
