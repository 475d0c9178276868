import asyncio
import functools
import inspect

import numpy as np
import pytest
import torch
from fake_backend import FakeBackend
from torch.utils.data import DataLoader, TensorDataset

import kale_dist
from kale_dist import strategies
from kale_dist.calls import checks, request, training_checks
from kale_dist.calls.request import Function, Machine
from kale_dist.errors import ConfigError
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


def refused(check, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        check(*args, **kwargs)
    return caught.value


def checked(**changes):
    given = arguments(**changes)
    training = Training(**{**given, "strategy": strategies.resolve(given.get("strategy"))})
    training_checks.check(training)
    return training


def refused_training(**changes):
    return refused(checked, **changes)


def run(machine=Machine(cores=4, gpus=0), **changes):  # noqa: B008 - frozen
    return request.checked(changes, Function(fn=print, label="print"), machine)


def asked(machine=Machine(cores=4, gpus=0), **changes):  # noqa: B008 - frozen
    return run(machine, **changes).request


def refused_run(machine=Machine(cores=4, gpus=0), **changes):  # noqa: B008 - frozen
    return refused(run, machine, **changes)


def test_good_arguments_pass():
    checked()
    made = run(number_of_processes=2, name="x", environment={"B": "2", "A": "1"}, timeout_s=3)
    assert (made.request.topology.number_of_processes, made.request.environment) == (2, (("A", "1"), ("B", "2")))
    assert (made.request.policy.timeout_s, made.warnings, made.backend.name) == (3, (), "local")


def test_more_threads_than_cores_of_any_machine_are_refused():
    assert "more than any machine has cores" in str(refused_run(threads=1_000_000))


# -- the objects of a training ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "said"),
    [(None, "None"), (Net, "Make one: Net()"), (lambda x: x, "not a torch.nn.Module"), ("net", "'net'")],
)
def test_a_model_is_a_module(model, said):
    error = refused_training(model=model)
    assert error.argument == "model"
    assert said in str(error)


def test_a_wrapped_model_is_to_be_unwrapped():
    assert "model.module" in refused_training(model=torch.nn.DataParallel(Net())).remedy
    with torch.device("meta"):
        hollow = Net()
    refused = refused_training(model=hollow)
    assert "on the meta device" in refused.problem
    assert "to_empty" in refused.remedy


@pytest.mark.parametrize("argument", ["train_data_loader", "eval_data_loader"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: iter(a_loader()), "without iter()"),
        (lambda: enumerate(a_loader()), "without iter()"),
        (lambda: (batch for batch in a_loader()), "without iter()"),
        (lambda: [1, 2], "it is a list"),
        (lambda: tuple(a_loader()), "it is a tuple"),
        (lambda: a_loader().dataset, "Wrap it: DataLoader(dataset"),
        (lambda: DataLoader, "is a class"),
        (lambda: torch.zeros(()), "not a torch.utils.data.DataLoader"),
        (lambda: "loader", "'loader'"),
    ],
)
def test_a_loader_is_a_data_loader(argument, make, said):
    error = refused_training(**{argument: make()})
    assert error.argument == argument
    assert said in str(error)


class Restless(DataLoader):
    """As timm's MultiEpochsDataLoader."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()


def prepared(kind, base):
    """A class as Accelerate makes it of another."""
    return type(kind, (base,), {"__module__": "accelerate.data_loader"})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: (torch.zeros(4, 2), torch.zeros(4)), "DataLoader(TensorDataset(X, y), batch_size=32"),
        (lambda: [np.zeros((4, 2)), np.zeros(4)], "with torch.as_tensor()"),
        (lambda: torch.zeros(4, 2), "DataLoader(TensorDataset(X), batch_size=32"),
        (lambda: Restless(a_loader().dataset), "keeps an iterator of its own ('iterator')"),
        (lambda: DataLoader([], batch_size=2), "its dataset has 0 samples"),
        (lambda: DataLoader([1, 2, 3], batch_size=4, drop_last=True), "3 samples are fewer than one batch of 4"),
        (lambda: prepared("DataLoaderShard", DataLoader)([1, 2]), "before accelerator.prepare()"),
    ],
)
def test_a_loader_that_cannot_be_divided_is_refused_with_a_remedy(make, said):
    assert said in str(refused_training(train_data_loader=make()))


def test_an_optimizer_that_accelerate_has_prepared_is_refused():
    net = Net()
    optimizer = prepared("AcceleratedOptimizer", torch.optim.SGD)(net.parameters(), lr=0.1)
    assert "or leave Accelerate its loop" in str(refused_training(model=net, optimizer=optimizer))


class ItsOwnLoss(Net):
    def forward(self, input_ids, labels=None):
        pass


def test_a_model_that_gives_its_loss_needs_no_criterion():
    assert checked(model=ItsOwnLoss(), criterion=None).criterion is None


def as_in_the_examples(args, model, device, train_loader, optimizer, epoch):
    pass


def test_a_step_with_its_arguments_in_another_order_is_refused_by_name():
    error = refused_training(train_step=as_in_the_examples)
    assert "as_in_the_examples(args, model, device, train_loader, optimizer, epoch)" in error.problem
    call = "return as_in_the_examples(args, model, device, data_loader, optimizer, args['epoch'])"
    assert error.remedy.endswith(f"{call}, with train_args={{'epoch': ...}}")


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


def test_what_a_step_of_others_has_a_default_for_is_left_out_of_the_call_that_fits_it():
    error = refused_training(train_step=of_the_references)
    assert "(model, criterion, optimizer, data_loader, device, args['epoch'], args), with" in error.remedy


def of_the_tutorial(dataloader, model, loss_fn, optimizer):
    pass


def test_a_step_with_fewer_arguments_is_refused_with_the_call_that_fits_it():
    error = refused_training(train_step=of_the_tutorial)
    assert "return of_the_tutorial(data_loader, model, criterion, optimizer)" in error.remedy


def test_no_training_loader_is_refused_and_no_evaluation_loader_is_fine():
    assert "it is None" in str(refused_training(train_data_loader=None))
    checked(eval_data_loader=None)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda net: torch.optim.SGD(Net().parameters(), lr=0.1), "2 of its 2 parameters are not the model's"),
        (lambda net: torch.optim.SGD([*net.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1), "1 of its 3"),
        (lambda net: torch.optim.SGD, "Make one: SGD(model.parameters(), lr=0.1)"),
        (lambda net: [torch.optim.SGD(net.parameters())], "Pass several as a dict"),
        (lambda net: {"a": torch.optim.SGD(Net().parameters())}, "2 of its 2 parameters are not the model's"),
        (lambda net: None, "it is missing"),
        (lambda net: torch.optim.LBFGS(net.parameters()), "Write a train_step that calls optimizer.step(closure)"),
    ],
)
def test_an_optimizer_is_over_the_models_parameters(make, said):
    net = Net()
    error = refused_training(model=net, optimizer=make(net))
    assert error.argument == "optimizer"
    assert said in str(error)


def pair(**changes):
    nets = {"generator": Net(), "critic": Net()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    return {"model": nets, "optimizer": optimizers, "train_step": step6, **changes}


def test_several_models_and_optimizers_pass_as_dicts():
    given = pair()
    made = checked(**given)
    assert (made.model, made.optimizer) == (given["model"], given["optimizer"])


@pytest.mark.parametrize(
    ("changes", "argument", "said"),
    [
        ({"train_step": None}, "train_step", "it gets the dicts as they were given"),
        ({"accumulate": 2}, "accumulate", "there are 2"),
        ({"clip_norm": 1.0}, "clip_norm", "do it in train_step"),
        ({"model": {"a.b": Net()}}, "model", "'a.b' cannot name"),
        ({"model": {"a": 3}}, "model", "3 is not a torch.nn.Module"),
        ({"model": {}}, "model", "an empty dict"),
        ({"state": Net()}, "state", "Write it as state=["),
        ({"state": [3]}, "state", "3 has no state_dict"),
    ],
)
def test_what_several_models_cannot_do_is_refused(changes, argument, said):
    error = refused_training(**pair(**changes))
    assert error.argument == argument
    assert said in str(error)


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
    ("argument", "step", "said"),
    [
        ("train_step", step5, "def train_step(model, data_loader, criterion, optimizer, device, args)"),
        ("train_step", lambda model, loader: None, "(model, loader)"),
        ("train_step", lambda a, b, c, d, e, f, g: None, "6 arguments"),
        ("train_step", lambda *, a, b, c, d, e, f: None, "6 arguments"),
        ("train_step", 3, "3 cannot be called"),
        ("train_step", async_step, "asynchronous"),
        ("train_step", yielding_step, "yield"),
        ("train_step", functools.partial(yielding_step), "yield"),
        ("eval_step", step6, "def eval_step(model, data_loader, criterion, device, args)"),
        ("eval_step", "x", "cannot be called"),
    ],
)
def test_steps_of_the_wrong_kind_name_the_expected_signature(argument, step, said):
    error = refused_training(**{argument: step, "eval_data_loader": a_loader()})
    assert error.argument == argument
    assert said in str(error)


def test_an_evaluation_step_needs_a_loader():
    assert "eval_data_loader" in str(refused_training(eval_step=step5))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"criterion": torch.nn.CrossEntropyLoss}, "Make one: CrossEntropyLoss()"),
        ({"criterion": None}, "ready-made train_step"),
        (
            {"criterion": None, "train_step": step6, "eval_data_loader": "loader"},
            "or write your own eval_step(model, data_loader, criterion, device, args)",
        ),
        ({"criterion": "mse"}, "cannot be called"),
    ],
)
def test_a_criterion_is_there_where_it_is_called(changes, said):
    if "eval_data_loader" in changes:
        changes["eval_data_loader"] = a_loader()
    error = refused_training(**changes)
    assert error.argument == "criterion"
    assert said in str(error)
    checked(criterion=None, train_step=step6)


def test_a_scheduler_belongs_to_the_optimizer():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    other = torch.optim.SGD(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    checked(model=net, optimizer=optimizer, scheduler=scheduler)
    assert "another optimizer" in str(refused_training(model=net, optimizer=other, scheduler=scheduler))
    assert refused_training(scheduler=torch.optim.lr_scheduler.StepLR).argument == "scheduler"
    assert refused_training(scheduler=0.1).argument == "scheduler"


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("epochs", 0, "0 is less than 1"), ("epochs", True, "True"), ("epochs", 1.5, "1.5"), ("epochs", "3", "'3'"),
        ("accumulate", 0, "0"), ("accumulate", None, "None"), ("checkpoint_every", -1, "-1"),
        ("precision", "bf61", "Did you mean 'bf16'?"), ("precision", 16, "16"), ("precision", "fp32", "fp32"),
        ("clip_norm", 0, "0"), ("clip_norm", -1.0, "-1.0"), ("clip_norm", float("nan"), "nan"), ("clip_norm", True, "True"),
        ("clip_norm", "1", "'1'"), ("split_batches", "no", "'no'"), ("shard", 0, "0"), ("shard", None, "None"),
        ("eval_sharding", "sample", "Did you mean 'samples'?"), ("eval_sharding", None, "None"),
        ("strategy", "dpp", "Did you mean 'ddp'?"), ("strategy", DDP, "kd.strategies.DDP()"), ("strategy", 4, "there is no strategy 4"),
    ],
)  # fmt: skip
def test_settings_say_argument_value_and_remedy(argument, value, said):
    error = refused_training(**{argument: value})
    assert error.argument == argument
    assert said in str(error)
    assert error.remedy


def test_settings_that_may_be_left_to_the_ranks_or_out():
    checked(precision="fp16")
    checked(precision="fp16", train_step=step6)
    checked(checkpoint_every=None)


# -- what all calls share --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -3, True, False, "2", 2.0])
def test_the_number_of_processes_is_a_whole_positive_number(value):
    error = refused_run(number_of_processes=value)
    assert error.argument == "number_of_processes"
    assert repr(value) in str(error)


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


def test_processes_that_the_memory_cannot_hold_are_refused():
    small = Machine(cores=2, memory_bytes=8 << 30)
    error = refused_run(small, number_of_processes=1000)
    assert error.argument == "number_of_processes"
    assert "27.3 GiB" in error.problem
    assert "at most 292" in error.remedy
    assert asked(small, number_of_processes=200).topology.number_of_processes == 200
    # Half a GiB of weights, and as much for their gradients.
    net = torch.nn.utils.skip_init(torch.nn.Linear, 1 << 14, 1 << 13, bias=False)
    given = arguments(model=net, number_of_processes=8)
    defaults = {name: one.default for name, one in inspect.signature(kale_dist.distribute).parameters.items()}
    large = {**defaults, **given}
    with pytest.raises(ConfigError, match="at most 7, or run on a cluster"):
        request.checked(large, machine=small)
    with_gpus = Machine(cores=8, gpus=8, memory_bytes=8 << 30)
    assert request.checked(large, machine=with_gpus).request.cuda


def test_cuda_needs_gpus_and_one_for_each_process():
    assert "no GPU" in str(refused_run(cuda=True))
    error = refused_run(Machine(cores=8, gpus=2), cuda=True, number_of_processes=3)
    assert (error.argument, "there are 2" in str(error)) == ("number_of_processes", True)
    assert refused_run(cuda="yes").argument == "cuda"


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("locl", "Did you mean 'local'?"), ("LOCAL", "Did you mean 'local'?"), ("kubernets", "Did you mean 'kubernetes'?"),
        ("dokcer", "Did you mean 'docker'?"), ("k8s", "Use one of: 'local', 'docker', 'kubernetes'"), ("", "no place ''"),
        (FakeBackend, "no place"), (3, "3"), (["local"], "no place"), (kale_dist.Docker, "no place"),
    ],
)  # fmt: skip
def test_an_unknown_backend_names_those_there_are(on, said):
    error = refused_run(on=on)
    assert error.argument == "on"
    assert said in str(error)


def test_a_backend_object_is_taken():
    backend = FakeBackend()
    assert run(on=backend).backend is backend


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"A": 1}, "Write '1'"), ({"A=B": "1"}, "'A=B'"), ({"": "1"}, "name"), ({3: "1"}, "3"), ({"A": "\0"}, "NUL"),
        ({"RANK": "0"}, "set in each rank"), ({"NCCL_DEBUG": "INFO"}, "os.environ['NCCL_DEBUG']"), (["A"], "dict"), ("A", "dict"),
    ],
)  # fmt: skip
def test_variables_are_text_and_can_still_be_set(environment, said):
    error = refused_run(environment=environment)
    assert error.argument == "environment"
    assert said in str(error)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("threads", 0), ("threads", "1"), ("seed", -1), ("seed", 1.0), ("seed", 2**31), ("seed", True), ("detach", 1),
        ("timeout_s", 0), ("timeout_s", "1h"), ("stall_warn_s", -1), ("stall_timeout_s", False), ("name", "Upper"),
        ("max_restarts", -1), ("max_restarts", True), ("max_restarts", 1.0), ("max_restarts", None), ("max_restarts", "2"),
    ],
)  # fmt: skip
def test_other_arguments_name_themselves(argument, value):
    error = refused_run(**{argument: value})
    assert error.argument == argument
    assert repr(value) in str(error) or str(value) in str(error)


# -- what launch calls -----------------------------------------------------------------------------------------------


def takes_two(a, b=1):
    pass


@pytest.mark.parametrize(
    ("fn", "args", "kwargs"),
    [(takes_two, (1,), {}), (print, (1, 2), {}), (functools.partial(takes_two, 1), (), {"b": 2}), (dict, (), {"a": 1})],
)
def test_functions_that_can_be_called_so_pass(fn, args, kwargs):
    checks.check_function(fn, args, kwargs, kale_dist.launch)


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "said"),
    [
        (3, (), {}, "launch(train, 3), not launch(train(3))"), (None, (), {}, "None cannot be called"),
        (takes_two, (), {}, "missing a required argument: 'a'"), (takes_two, (1, 2, 3), {}, "takes_two(a, b=1)"),
        (takes_two, (1,), {"c": 3}, "unexpected keyword argument 'c'"),
        (takes_two, (1,), {"number_of_process": 3}, "Did you mean 'number_of_processes'?"), (async_step, (), {}, "asynchronous"),
        (yielding_step, (), {}, "yield"),
    ],
)  # fmt: skip
def test_functions_that_cannot_be_called_so_are_refused(fn, args, kwargs, said):
    error = refused(checks.check_function, fn, args, kwargs, kale_dist.launch)
    assert error.argument == "fn"
    assert said in str(error)


def gan(steps, seed=0, name="x"):
    return steps, seed, name


def test_arguments_that_both_launch_and_the_function_have_are_refused():
    for given in ({"seed": 5}, {"name": "abc"}, {"seed": None}, {"fn": gan, "name": "abc"}):
        args = () if "fn" in given else (gan, 30)
        error = refused(kale_dist.launch, *args, **given)
        assert error.argument in given
        assert "functools.partial(gan," in error.remedy
    assert refused(kale_dist.render, gan, 30, seed=5).argument == "seed"


def test_what_is_bound_already_cannot_be_meant():
    bound = functools.partial(gan, seed=5)
    assert kale_dist.render(bound, 30, seed=7, on="local", number_of_processes=1).spec.seed == 7
    plan = kale_dist.render(gan, 1, 2, "as-given", name="of-the-job", number_of_processes=1)
    assert plan.spec.name == "of-the-job"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("num_processes", "`number_of_processes`"), ("nproc_per_node", "`processes_per_pod`"), ("num_nodes", "`number_of_processes`"),
        ("num_workers", "`number_of_processes`"), ("env", "`environment`"), ("backend", "`on`"), ("gpus", "cuda=True"),
        ("gradient_accumulation_steps", "`accumulate`"), ("max_grad_norm", "`clip_norm`"), ("epoch", "`epochs`"), ("max_epochs", "`epochs`"),
        ("image", "on=kd.Kubernetes(image=...)"), ("packages", "on=kd.Kubernetes(packages=...)"), ("cluster", "kd.Docker(...)"),
        ("number_of_process", "Did you mean 'number_of_processes'?"), ("xyzzy", "help("),
    ],
)  # fmt: skip
def test_words_of_other_libraries_are_answered_with_ours(word, said):
    error = refused(kale_dist.distribute, None, None, None, None, **{word: 2})
    assert (error.argument, said in error.remedy) == (word, True)
    assert said in refused(kale_dist.render, Net(), None, None, None, **{word: 2}).remedy
    if word != "xyzzy":
        assert said in refused(kale_dist.launch, takes_two, 1, **{word: 2}).remedy


def test_a_word_of_another_library_is_answered_before_what_is_missing():
    error = refused(kale_dist.distribute, Net(), train_loader=a_loader(), loss_fn=torch.nn.CrossEntropyLoss())
    assert (error.argument, error.remedy) == ("train_loader", "Use `train_data_loader`")
    assert refused(kale_dist.distribute, Net(), a_loader(), step=len).remedy == "Use `train_step`"
    assert refused(kale_dist.distribute, Net(), a_loader(), torch.nn.CrossEntropyLoss()).problem == "it is missing"


def test_a_step_of_its_own_needs_no_criterion():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = lambda model, data_loader, criterion, optimizer, device, args: 0.5  # noqa: E731
    plan = kale_dist.render(net, a_loader(), optimizer=optimizer, train_step=step, number_of_processes=2)
    assert plan.spec.topology.number_of_processes == 2


def trains(steps, epochs=1):
    pass


def test_a_misspelt_argument_of_the_function_is_answered_with_its_own_and_those_of_distribute_are_said_to_be_so():
    assert "max_epochs: Use `epochs`. It is trains(" in refused(kale_dist.launch, trains, 1, max_epochs=2).remedy
    assert "step: Did you mean 'steps'? It is trains(" in refused(kale_dist.launch, trains, step=2).remedy
    said = refused(kale_dist.launch, takes_two, 1, max_epochs=2).remedy
    assert said == "max_epochs: `epochs` is an argument of distribute(). It is takes_two(a, b=1)"


def test_several_models_are_a_training_for_render_and_check():
    nets = {"one": Net(), "two": Net()}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    step = lambda model, data_loader, criterion, optimizer, device, args: 0.5  # noqa: E731
    plan = kale_dist.render(nets, a_loader(), None, optimizers, step, number_of_processes=2)
    assert plan.spec.topology.number_of_processes == 2
    error = refused(kale_dist.render, list(nets.values()), a_loader(), None, None)
    assert error.argument == "model"
    assert "Pass several as a dict" in error.remedy


def test_a_mistake_costs_no_input_or_output(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(ConfigError):
        kale_dist.distribute(Net, a_loader(), torch.nn.CrossEntropyLoss(), None)
    with pytest.raises(ConfigError):
        kale_dist.launch(takes_two, number_of_processes=0)
    with pytest.raises(ConfigError, match="incomplete"):
        kale_dist.render(Net())
    assert not (tmp_path / "state").exists()
