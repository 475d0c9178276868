import asyncio
import functools

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import kale_dist
from kale_dist import strategies
from kale_dist.calls import request, signatures, training_checks
from kale_dist.calls.options import Options
from kale_dist.calls.request import Function, Machine
from kale_dist.strategies import DDP
from kale_dist.worker.training.settings import Training


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def a_loader():
    return DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)), batch_size=2)


def arguments(**changes):
    model = changes.get("model", Net())
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else Net().parameters()
    given = {
        "model": model, "train_data_loader": a_loader(), "criterion": torch.nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(parameters, lr=0.1),
    }  # fmt: skip
    return {**given, **changes}


@pytest.fixture
def refused(refusal):
    return lambda check, *args, **kwargs: refusal(lambda: check(*args, **kwargs))


def checked(**changes):
    given = arguments(**changes)
    training = Training(**{**given, "strategy": strategies.resolve(given.get("strategy"))})
    training_checks.check(training)
    return training


@pytest.fixture
def refused_training(refused):
    return lambda **changes: refused(checked, **changes)


def run(machine=Machine(cores=4, gpus=0), **changes):  # noqa: B008 - frozen
    return request.checked(Function(fn=print, label="print"), Options(**changes), machine)


def asked(machine=Machine(cores=4, gpus=0), **changes):  # noqa: B008 - frozen
    return run(machine, **changes).request


@pytest.fixture
def refused_run(refused):
    return lambda machine=Machine(cores=4, gpus=0), **changes: refused(run, machine, **changes)  # noqa: B008 - frozen


def test_good_arguments_pass():
    checked()
    made = run(number_of_processes=2, name="x", environment={"B": "2", "A": "1"}, timeout_s=3)
    assert (made.request.topology.number_of_processes, made.request.secrets) == (2, (("A", "1"), ("B", "2")))
    assert (made.request.policy.timeout_s, made.warnings, made.backend.name) == (3, (), "local")


def test_more_threads_than_cores_of_any_machine_are_refused(refused_run):
    assert refused_run(threads=1_000_000).argument == "threads"


# -- the objects of a training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, Net, "net"])
def test_a_model_is_a_module(model, refused_training):
    error = refused_training(model=model)
    assert error.argument == "model"


def test_a_wrapped_model_is_to_be_unwrapped(refused_training):
    assert refused_training(model=torch.nn.DataParallel(Net())).argument == "model"
    with torch.device("meta"):
        hollow = Net()
    assert refused_training(model=hollow).argument == "model"


@pytest.mark.parametrize("argument", ["train_data_loader", "eval_data_loader"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(a_loader()),
        lambda: enumerate(a_loader()),
        lambda: (batch for batch in a_loader()),
        lambda: [1, 2],
        lambda: tuple(a_loader()),
        lambda: a_loader().dataset,
        lambda: DataLoader,
        lambda: torch.zeros(()),
        lambda: "loader",
    ],
)
def test_a_loader_is_a_data_loader(argument, make, refused_training):
    error = refused_training(**{argument: make()})
    assert error.argument == argument


class Restless(DataLoader):
    """As timm's MultiEpochsDataLoader."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()


class Endless:
    """A batch sampler that cannot tell its length, as PyTorch Geometric's."""

    def __iter__(self):
        return iter([[0], [1]])

    def __len__(self):
        raise ValueError("The length of 'Endless' is undefined.")


class OneRanksPart(IterableDataset):
    """As `split_dataset_by_node` makes one."""

    _distributed = type("DistributedConfig", (), {"__module__": "datasets.iterable_dataset"})()

    def __iter__(self):
        return iter([1, 2])


def prepared(kind, base):
    """A class as Accelerate makes it of another."""
    return type(kind, (base,), {"__module__": "accelerate.data_loader"})


@pytest.mark.parametrize(
    "make",
    [
        lambda: (torch.zeros(4, 2), torch.zeros(4)),
        lambda: [np.zeros((4, 2)), np.zeros(4)],
        lambda: torch.zeros(4, 2),
        lambda: Restless(a_loader().dataset),
        lambda: DataLoader([], batch_size=2),
        lambda: DataLoader([1, 2, 3], batch_size=4, drop_last=True),
        lambda: prepared("DataLoaderShard", DataLoader)([1, 2]),
        lambda: DataLoader([1, 2], batch_sampler=Endless()),
        lambda: DataLoader(OneRanksPart()),
        type("Dataset", (), {"__module__": "datasets.arrow_dataset", "shape": (16, 2)}),
    ],
)
def test_a_loader_that_cannot_be_divided_is_refused_with_a_remedy(make, refused_training):
    assert refused_training(train_data_loader=make()).argument == "train_data_loader"


class OnOneMachine(TensorDataset):
    _distributed = False


def test_a_dataset_of_the_users_may_have_an_attribute_of_the_same_name():
    data = OnOneMachine(*a_loader().dataset.tensors)
    assert checked(train_data_loader=DataLoader(data, batch_size=2)).train_data_loader.dataset is data


def test_an_optimizer_that_accelerate_has_prepared_is_refused(refused_training):
    net = Net()
    optimizer = prepared("AcceleratedOptimizer", torch.optim.SGD)(net.parameters(), lr=0.1)
    assert refused_training(model=net, optimizer=optimizer).argument == "optimizer"


def test_an_optimizer_of_opacus_is_refused(refused_training):
    net = Net()
    private = type("DPOptimizer", (torch.optim.SGD,), {"__module__": "opacus.optimizers.optimizer"})
    assert refused_training(model=net, optimizer=private(net.parameters(), lr=0.1)).argument == "optimizer"


class ItsOwnLoss(Net):
    def forward(self, input_ids, labels=None):
        pass


def test_a_model_that_gives_its_loss_needs_no_criterion():
    assert checked(model=ItsOwnLoss(), criterion=None).criterion is None


def as_in_the_examples(args, model, device, train_loader, optimizer, epoch):
    pass


def test_a_step_with_its_arguments_in_another_order_is_refused_by_name(refused_training):
    assert refused_training(train_step=as_in_the_examples).argument == "train_step"


@pytest.mark.parametrize(
    "step",
    [
        lambda models, loader, criterion, opts, device, args: 0,
        lambda net, train_loader, loss_fn, optimizer, device, opt: 0,
    ],
)
def test_steps_may_call_options_and_optimizers_opt(step):
    assert checked(train_step=step).train_step is step


def of_the_references(model, criterion, optimizer, data_loader, device, epoch, args, model_ema=None, scaler=None):
    pass


def test_what_a_step_of_others_has_a_default_for_is_left_out_of_the_call_that_fits_it(refused_training):
    assert refused_training(train_step=of_the_references).argument == "train_step"


def of_the_tutorial(dataloader, model, loss_fn, optimizer):
    pass


def test_a_step_with_fewer_arguments_is_refused_with_the_call_that_fits_it(refused_training):
    assert refused_training(train_step=of_the_tutorial).argument == "train_step"


def test_no_training_loader_is_refused_and_no_evaluation_loader_is_fine(refused_training):
    assert refused_training(train_data_loader=None).argument == "train_data_loader"
    checked(eval_data_loader=None)


class Makes:
    """Makes optimizers when the step needs them, as Pyro's."""

    def __init__(self):
        self.options = {"lr": 0.1}


@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(Net().parameters(), lr=0.1),
        lambda net: torch.optim.SGD([*net.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1),
        lambda net: torch.optim.SGD,
        lambda net: [torch.optim.SGD(net.parameters())],
        lambda net: {"a": torch.optim.SGD(Net().parameters())},
        lambda net: None,
        lambda net: torch.optim.LBFGS(net.parameters()),
        lambda net: Makes(),
        lambda net: {"a": None},
    ],
)
def test_an_optimizer_is_over_the_models_parameters(make, refused_training):
    net = Net()
    error = refused_training(model=net, optimizer=make(net))
    assert error.argument == "optimizer"


def pair(**changes):
    nets = {"generator": Net(), "critic": Net()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    return {"model": nets, "optimizer": optimizers, "train_step": step6, **changes}


def test_several_models_and_optimizers_pass_as_dicts():
    given = pair()
    made = checked(**given)
    assert (made.model, made.optimizer) == (given["model"], given["optimizer"])


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"train_step": None}, "train_step"),
        ({"accumulate": 2}, "accumulate"),
        ({"clip_norm": 1.0}, "clip_norm"),
        ({"model": {"a.b": Net()}}, "model"),
        ({"model": {"a": 3}}, "model"),
        ({"model": {}}, "model"),
        ({"state": Net()}, "state"),
        ({"state": [3]}, "state"),
    ],
)
def test_what_several_models_cannot_do_is_refused(changes, argument, refused_training):
    error = refused_training(**pair(**changes))
    assert error.argument == argument


def test_the_criterions_parameters_may_be_trained_too():
    net, criterion = Net(), torch.nn.BCEWithLogitsLoss()
    criterion.scale = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()])
    assert checked(model=net, criterion=criterion, optimizer=optimizer).optimizer is optimizer


def test_a_part_of_the_parameters_may_be_trained():
    net = Net()
    optimizer = torch.optim.SGD([net.bias])
    assert checked(model=net, optimizer=optimizer).optimizer is optimizer


def step6(model, data_loader, criterion, optimizer, device, args):
    pass


def step5(model, data_loader, criterion, device, args):
    pass


@pytest.mark.parametrize(
    "step",
    [step6, functools.partial(step6), lambda *everything: None, lambda m, d, c, o, dev, a, extra=1: None, Net],
    ids=["six", "partial", "star", "default", "callable class"],
)
def test_steps_of_the_right_arity_pass(step):
    if step is Net:

        class Step:
            def __call__(self, model, data_loader, criterion, optimizer, device, args):
                pass

        step = Step()
    assert checked(train_step=step).train_step is step


async def async_step(model, data_loader, criterion, optimizer, device, args):
    await asyncio.sleep(0)


def yielding_step(model, data_loader, criterion, optimizer, device, args):
    yield 1


@pytest.mark.parametrize(
    ("argument", "step"),
    [
        ("train_step", step5),
        ("train_step", lambda model, loader: None),
        ("train_step", lambda a, b, c, d, e, f, g: None),
        ("train_step", lambda *, a, b, c, d, e, f: None),
        ("train_step", 3),
        ("train_step", async_step),
        ("train_step", yielding_step),
        ("train_step", functools.partial(yielding_step)),
        ("eval_step", step6),
        ("eval_step", "x"),
    ],
)
def test_steps_of_the_wrong_kind_name_the_expected_signature(argument, step, refused_training):
    error = refused_training(**{argument: step, "eval_data_loader": a_loader()})
    assert error.argument == argument


def test_an_evaluation_step_needs_a_loader(refused_training):
    assert refused_training(eval_step=step5).argument == "eval_step"


@pytest.mark.parametrize(
    "changes",
    [
        {"criterion": torch.nn.CrossEntropyLoss},
        {"criterion": None},
        {"criterion": None, "train_step": step6, "eval_data_loader": "loader"},
        {"criterion": "mse"},
    ],
)
def test_a_criterion_is_there_where_it_is_called(changes, refused_training):
    if "eval_data_loader" in changes:
        changes["eval_data_loader"] = a_loader()
    error = refused_training(**changes)
    assert error.argument == "criterion"
    checked(criterion=None, train_step=step6)


def test_a_scheduler_belongs_to_the_optimizer(refused_training):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    other = torch.optim.SGD(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    checked(model=net, optimizer=optimizer, scheduler=scheduler)
    assert refused_training(model=net, optimizer=other, scheduler=scheduler).argument == "scheduler"
    assert refused_training(scheduler=torch.optim.lr_scheduler.StepLR).argument == "scheduler"
    assert refused_training(scheduler=0.1).argument == "scheduler"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("epochs", 0), ("epochs", True), ("epochs", 1.5), ("epochs", "3"),
        ("accumulate", 0), ("accumulate", None), ("checkpoint_every", -1),
        ("precision", "bf61"), ("precision", 16), ("precision", "fp32"),
        ("clip_norm", 0), ("clip_norm", -1.0), ("clip_norm", float("nan")), ("clip_norm", True),
        ("clip_norm", "1"), ("split_batches", "no"), ("stop_on_nan", 1), ("shard", 0), ("shard", None),
        ("eval_sharding", "sample"), ("eval_sharding", None),
        ("strategy", "dpp"), ("strategy", DDP), ("strategy", 4),
    ],
)  # fmt: skip
def test_settings_say_argument_value_and_remedy(argument, value, refused_training):
    assert refused_training(**{argument: value}).argument == argument


def test_settings_that_may_be_left_to_the_ranks_or_out():
    checked(precision="fp16")
    checked(precision="fp16", train_step=step6)
    checked(checkpoint_every=None)


# -- what all calls share --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -3, True, False, "2", 2.0])
def test_the_number_of_processes_is_a_whole_positive_number(value, refused_run):
    assert refused_run(number_of_processes=value).argument == "number_of_processes"


def test_more_processes_than_cores_are_warned_of():
    assert "5 processes share 4 cores" in run(number_of_processes=5).warnings[0]
    assert not run(number_of_processes=4).warnings


def test_no_number_means_all_there_is():
    assert asked().topology.number_of_processes == 4
    assert asked(Machine(cores=4, gpus=3), cuda=True).topology.number_of_processes == 3


def test_gpus_are_used_if_they_are_there_and_enough_and_that_is_said():
    two = Machine(cores=8, gpus=2)
    made = run(two)
    assert (made.request.cuda, made.request.topology.number_of_processes) == (True, 2)
    assert "2 of 2 GPUs" in made.notes[0]
    assert "1 of 2 GPUs" in run(two, number_of_processes=1).notes[0]
    crowd = run(two, number_of_processes=3)
    assert not crowd.request.cuda
    assert "3 processes train on the CPU" in crowd.warnings[0]
    plain = run(two, cuda=False)
    assert (plain.request.cuda, plain.request.topology.number_of_processes, plain.notes, plain.warnings) == (
        False,
        8,
        (),
        (),
    )
    assert not asked().cuda


def test_processes_that_the_memory_cannot_hold_are_refused(refused_run, refusal):
    small = Machine(cores=2, memory_bytes=8 << 30)
    assert refused_run(small, number_of_processes=1000).argument == "number_of_processes"
    assert asked(small, number_of_processes=200).topology.number_of_processes == 200
    # Half a GiB of weights, and as much for their gradients.
    net = torch.nn.utils.skip_init(torch.nn.Linear, 1 << 14, 1 << 13, bias=False)
    large, eight = checked(model=net), Options(number_of_processes=8)
    refusal(lambda: request.checked(large, eight, small))
    with_gpus = Machine(cores=8, gpus=8, memory_bytes=8 << 30)
    assert request.checked(large, eight, with_gpus).request.cuda


def test_cuda_needs_gpus_and_one_for_each_process(refused_run):
    assert refused_run(cuda=True).argument == "cuda"
    two = Machine(cores=8, gpus=2)
    assert refused_run(two, cuda=True, number_of_processes=3).argument == "number_of_processes"
    assert refused_run(cuda="yes").argument == "cuda"


@pytest.mark.parametrize(
    "on",
    [
        "locl", "LOCAL", "kubernets",
        "dokcer", "k8s", "",
        FakeBackend, 3, ["local"], kale_dist.Docker,
    ],
)  # fmt: skip
def test_an_unknown_backend_names_those_there_are(on, refused_run):
    error = refused_run(on=on)
    assert error.argument == "on"


def test_a_backend_object_is_taken():
    backend = FakeBackend()
    assert run(on=backend).backend is backend


@pytest.mark.parametrize(
    "environment",
    [
        {"A": 1}, {"A=B": "1"}, {"": "1"}, {3: "1"}, {"A": "\0"},
        {"RANK": "0"}, {"OMP_NUM_THREADS": "1"}, ["A"], "A",
    ],
)  # fmt: skip
def test_variables_are_text_and_can_still_be_set(environment, refused_run):
    error = refused_run(environment=environment)
    assert error.argument == "environment"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("threads", 0), ("threads", "1"), ("seed", -1), ("seed", 1.0), ("seed", 2**31), ("seed", True), ("detach", 1),
        ("timeout_s", 0), ("timeout_s", "1h"), ("stall_warn_s", -1), ("stall_timeout_s", False), ("name", "Upper"),
        ("max_restarts", -1), ("max_restarts", True), ("max_restarts", 1.0), ("max_restarts", "2"),
        ("grace_s", -1), ("grace_s", 601), ("grace_s", float("inf")), ("grace_s", None), ("grace_s", "1 min"), ("grace_s", True),
    ],
)  # fmt: skip
def test_other_arguments_name_themselves(argument, value, refused_run):
    assert refused_run(**{argument: value}).argument == argument


# -- what launch calls -----------------------------------------------------------------------------------------------


def takes_two(a, b=1):
    pass


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [(takes_two, (1,), {}), (print, (1, 2), {}), (functools.partial(takes_two, 1), (), {"b": 2}), (dict, (), {"a": 1})],
)
def test_functions_that_can_be_called_so_pass(fn, args, kwargs):
    signatures.check_function(fn, args, kwargs, kale_dist.launch)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [
        (3, (), {}), (None, (), {}), ("train.py", (), {}),
        (takes_two, (), {}), (takes_two, (1, 2, 3), {}),
        (takes_two, (1,), {"c": 3}),
        (takes_two, (1,), {"number_of_process": 3}), (async_step, (), {}),
        (yielding_step, (), {}),
    ],
)  # fmt: skip
def test_functions_that_cannot_be_called_so_are_refused(fn, args, kwargs, refused):
    error = refused(signatures.check_function, fn, args, kwargs, kale_dist.launch)
    assert error.argument == "fn"


def gan(steps, seed=0, name="x"):
    return steps, seed, name


def test_arguments_that_both_launch_and_the_function_have_are_refused(refused):
    for given in ({"seed": 5}, {"name": "abc"}, {"seed": None}, {"fn": gan, "name": "abc"}):
        args = () if "fn" in given else (gan, 30)
        assert refused(kale_dist.launch, *args, **given).argument in given
    assert refused(kale_dist.render, gan, 30, seed=5).argument == "seed"


def test_what_is_bound_already_cannot_be_meant():
    bound = functools.partial(gan, seed=5)
    assert kale_dist.render(bound, 30, seed=7, on="local", number_of_processes=1).spec.seed == 7
    plan = kale_dist.render(gan, 1, 2, "as-given", name="of-the-job", number_of_processes=1)
    assert plan.spec.name == "of-the-job"


@pytest.mark.parametrize(
    "word",
    [
        "num_processes", "nproc_per_node", "num_nodes", "num_workers", "env", "backend", "gpus", "gradient_accumulation_steps",
        "max_grad_norm", "epoch", "max_epochs", "image", "packages", "cluster", "number_of_process", "xyzzy",
    ],
)  # fmt: skip
def test_words_of_other_libraries_are_answered_with_ours(word, refused):
    error = refused(kale_dist.distribute, None, None, None, None, **{word: 2})
    assert error.argument == word
    assert refused(kale_dist.render, Net(), None, None, None, **{word: 2}).remedy == error.remedy
    refused(kale_dist.launch, takes_two, 1, **{word: 2})


def test_a_word_of_another_library_is_answered_before_what_is_missing(refused):
    error = refused(kale_dist.distribute, Net(), train_loader=a_loader(), loss_fn=torch.nn.CrossEntropyLoss())
    assert error.argument == "train_loader"
    assert refused(kale_dist.distribute, Net(), a_loader(), step=len).argument == "step"
    missing = refused(kale_dist.distribute, Net(), a_loader(), torch.nn.CrossEntropyLoss())
    assert missing.argument == "optimizer"


def test_a_step_of_its_own_needs_no_criterion():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = lambda model, data_loader, criterion, optimizer, device, args: 0.5  # noqa: E731
    plan = kale_dist.render(net, a_loader(), optimizer=optimizer, train_step=step, number_of_processes=2)
    assert plan.spec.topology.number_of_processes == 2


def trains(steps, epochs=1):
    pass


@pytest.mark.parametrize(
    ("fn", "args", "word"), [(trains, (1,), "max_epochs"), (trains, (), "step"), (takes_two, (1,), "max_epochs")]
)
def test_a_misspelt_argument_of_the_function_is_answered_with_its_own(fn, args, word, refused):
    """The words say whether it is one of the function's own arguments, or one that only distribute has."""
    assert refused(kale_dist.launch, fn, *args, **{word: 2}).argument == "fn"


def test_several_models_are_a_training_for_render_and_check(refused):
    nets = {"one": Net(), "two": Net()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    step = lambda model, data_loader, criterion, optimizer, device, args: 0.5  # noqa: E731
    plan = kale_dist.render(nets, a_loader(), None, optimizers, step, number_of_processes=2)
    assert plan.spec.topology.number_of_processes == 2
    assert refused(kale_dist.render, list(nets.values()), a_loader(), None, None).argument == "model"


def test_a_mistake_costs_no_input_or_output(tmp_path, monkeypatch, refusal):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    refusal(lambda: kale_dist.distribute(Net, a_loader(), torch.nn.CrossEntropyLoss(), None))
    refusal(lambda: kale_dist.launch(takes_two, number_of_processes=0))
    refusal(lambda: kale_dist.render(Net()))
    assert not (tmp_path / "state").exists()
