"""Checks of the arguments that only `distribute` takes. Nothing is read but the arguments themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from kale_dist import callbacks, strategies, wording
from kale_dist.calls.signatures import check_takes, describe, parameters_of, title
from kale_dist.errors import ConfigError
from kale_dist.job.spec.checks import FLAG, Check, number, one_of, whole
from kale_dist.job.spec.job_spec import Request
from kale_dist.snapshot.pickler import hooks_of
from kale_dist.snapshot.reducers import LOADERS_ITERATOR
from kale_dist.wording import show
from kale_dist.worker.training.settings import SPLIT_BY_NODE, Training, can_be_state

STEP_ARGUMENTS = {
    "train_step": ("model", "data_loader", "criterion", "optimizer", "device", "args"),
    "eval_step": ("model", "data_loader", "criterion", "device", "args"),
}
"""What the two step functions are called with, in this order. These are Kale's."""

_ROLES = {
    "model": ("model", "models", "net", "nets", "network"),
    "data_loader": (
        "data_loader", "dataloader", "loader", "train_loader", "trainloader", "train_dataloader", "train_data_loader",
        "test_loader", "val_loader", "eval_loader", "eval_data_loader", "dl", "train_dl",
    ),
    "criterion": ("criterion", "loss_fn", "loss_func", "loss_function", "loss_f"),
    "optimizer": ("optimizer", "optimizers", "opt", "opts", "optim"),
    "device": ("device",),
    "args": ("args", "train_args", "eval_args", "config", "cfg", "opt", "opts"),
    "epoch": ("epoch", "epochs"),
}  # fmt: skip
"""What the arguments of steps are called, by what they are; `opt` may be either."""

_UNPREPARED = (
    "Pass the objects as they were before accelerator.prepare(), which distribute() replaces; or leave Accelerate its loop"
    " and run the function that calls it with launch()"
)


_AN_OPTIMIZER = "Pass an optimizer such as torch.optim.SGD(model.parameters(), lr=0.1)"
_SEVERAL = "Pass several as a dict, such as {'generator': one, 'critic': another}; train_step gets that dict"
_A_LOADER = "Make one: DataLoader(dataset, batch_size=32)"
_PLAIN = {
    **dict.fromkeys(("epochs", "accumulate"), whole(1)),
    "checkpoint_every": Check(
        lambda value: wording.interval(value) is not None if isinstance(value, str) else whole(1).test(value),
        "{} is neither a number of epochs of 1 or more nor how often to write one",
        "Use 'auto', a number of epochs such as 1, '500 steps', '10 min', or None for none",
    ).or_(None),
    **dict.fromkeys(("stop_on_nan", "split_batches", "shard"), FLAG),
    "precision": one_of(("bf16", "fp16"), "there is no precision {}", "Use 'bf16', 'fp16' or None").or_(None),
    "clip_norm": number("a positive number", "Give a number such as 1.0, or None").or_(None),
    "eval_sharding": one_of(
        ("samples", "none"),
        remedy="Use 'samples' (each rank evaluates its share) or 'none' (every rank evaluates all)",
    ),
}


def check(training: Training) -> None:
    """Check what is to be trained, and how.

    Raises:
        ConfigError: The first thing that is wrong.
    """
    if training.makes_model:
        _check_functions(training)
    for one in _each("model", training.model):
        _check_model(one)
    _check_loader("train_data_loader", training.train_data_loader)
    if training.eval_data_loader is not None:
        _check_loader("eval_data_loader", training.eval_data_loader)
    steps = ("train_step",) if training.eval_data_loader is None else ("train_step", "eval_step")
    ready_made = next((step for step in steps if getattr(training, step) is None), "")
    _check_criterion(training.criterion, training.model, needed_by=ready_made)
    for one in () if training.makes_model else _each("optimizer", training.optimizer):
        _check_optimizer(one, training.model, training.criterion, is_ready_made=ready_made == "train_step")
    if isinstance(training.model, dict) or isinstance(training.optimizer, dict):
        _check_several(training, ready_made)
    _check_state(training.state)
    _check_step("train_step", training.train_step)
    _check_step("eval_step", training.eval_step)
    if training.eval_step is not None and training.eval_data_loader is None:
        raise ConfigError("eval_step", "it was given without eval_data_loader", "Give both, or neither")
    if not training.makes_model:
        _check_scheduler(training.scheduler, training.optimizer)
    for name, one in _PLAIN.items():
        one(name, getattr(training, name))
    _check_callbacks(training)


def check_on(training: Training, request: Request) -> None:
    """Check whether this can be trained at the place, and on the number of processes, that the request names.

    Raises:
        ConfigError: It cannot.
    """
    if request.cluster.kind == "tf":
        problem = "'tf' is for functions that use TensorFlow, and distribute() trains with torch"
        raise ConfigError("kind", problem, "Use kd.launch(function, on=...) for Keras, or leave `kind` out")
    size, per_pod = request.topology.number_of_processes, request.topology.processes_per_pod
    layout = training.strategy.layout(0, size)
    if layout.agree == "epoch" and any(isinstance(one, callbacks.EMA) for one in training.callbacks):
        problem = f"EMA averages after each step, and with {training.strategy.word!r} ranks have equal weights only after epochs"
        raise ConfigError("callbacks", problem, "Use SWA, which averages after epochs, or another strategy")
    if len(layout.replicas) < size:
        for name, parameter in (pair for one in _each("model", training.model) for pair in one.named_parameters()):
            if hooks_of(parameter):
                problem = (
                    f"{name} has a hook on its gradient, and with {training.strategy.word!r} no rank has all of that"
                )
                raise ConfigError("strategy", problem, "Use strategy='ddp'")
    if not training.makes_model:
        training.strategy.check(_conditions(training, size, per_pod, cuda=request.cuda))


def gpu_of(training: Training) -> str:
    """The device of the first of the models' tensors that is on a GPU; empty if none is."""
    tensors = (one for model in _each("model", training.model) for one in model.parameters())
    return next((str(one.device) for one in tensors if one.device.type == "cuda"), "")


def sizes(training: Training, asked: Sequence[int], per_pod: int | None, *, cuda: bool) -> tuple[int, ...]:
    """Those of some world sizes that a training's strategy can have.

    Args:
        training: What is trained, and how.
        asked: The sizes, ascending.
        per_pod: Processes of one pod; None where all are on one machine.
        cuda: Whether the call asks for GPUs.

    Raises:
        ConfigError: It can have none of them; the message gives the reason for the largest.
    """
    if training.makes_model:
        return tuple(asked)
    found: list[int] = []
    for size in asked:
        try:
            training.strategy.check(_conditions(training, size, per_pod or size, cuda=cuda))
        except ConfigError:
            if size == asked[-1] and not found:
                raise
        else:
            found.append(size)
    return tuple(found)


def _conditions(training: Training, size: int, per_pod: int, *, cuda: bool) -> strategies.Conditions:
    return strategies.Conditions(
        number_of_processes=size, processes_per_pod=per_pod, cuda=cuda, model=training.model,
        optimizer=training.optimizer, precision=training.precision,
    )  # fmt: skip


def rank_bytes(training: Training) -> int:
    """Bytes of weights and gradients, of which each process has its own."""
    from torch.nn.parameter import is_lazy

    parameters = (one for model in _each("model", training.model) for one in model.parameters() if not is_lazy(one))
    return sum(2 * one.numel() * one.element_size() for one in parameters)


def _check_functions(given: Training) -> None:
    """Check a training whose ranks make the model by a function, or refuse a class in the place of a model."""
    optimizer = given.optimizer
    if not callable(optimizer):
        if isinstance(given.model, type):
            problem = f"{given.model.__name__} is a class"
            remedy = f"Make one, with its arguments: {given.model.__name__}(...)"
            raise ConfigError("model", problem, remedy)
        problem = f"{show(optimizer)} has no parameters of the model, which the processes make"
        remedy = "Give a function of them: lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        raise ConfigError("optimizer", problem, remedy)
    if given.scheduler is not None and not callable(given.scheduler):
        remedy = "Give a function of it: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
        raise ConfigError("scheduler", "its optimizer is not that of the model, which the processes make", remedy)
    word = given.strategy.word
    if word not in ("ddp", "fsdp"):
        problem = f"{word!r} takes a model, and here the processes make it"
        raise ConfigError("strategy", problem, "Use 'fsdp' or 'ddp', or give a model in the place of a function")
    keeps = [one for one in given.callbacks if isinstance(one, callbacks.Average | callbacks.ModelCheckpoint)]
    if keeps and given.in_parts:
        problem = f"{type(keeps[0]).__name__} keeps whole weights, and no process has them"
        raise ConfigError("callbacks", problem, "Leave it out, or use strategy='ddp'")


def _check_model(model: Any) -> None:
    import torch

    if isinstance(model, list | tuple):
        raise ConfigError("model", f"it is a {type(model).__name__}, not one model", _SEVERAL)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError("model", f"{show(model)} is not a torch.nn.Module", "Pass the model object")
    if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise ConfigError("model", f"it is wrapped in {type(model).__name__}", "Pass model.module instead")
    if not hasattr(model, "_parameters"):
        name = type(model).__name__
        raise ConfigError("model", f"{name}.__init__ does not call its base's", "Begin it with super().__init__()")
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        problem = f"its parameter {empty!r} is on the meta device, which keeps no values"
        raise ConfigError("model", problem, "Give it values: model.to_empty(device='cpu') and its own initialisation")


def _each(argument: str, value: Any) -> Iterator[Any]:
    """The objects of a dict by name, or the one there is; none of a model that the ranks make."""
    if argument == "model" and Training.is_made_by(value):
        return
    if not isinstance(value, dict):
        yield value
        return
    for name, one in value.items():
        if not isinstance(name, str) or not name or "." in name:
            raise ConfigError(argument, f"{name!r} cannot name one of several", "Use text without dots")
        if one is None:
            raise ConfigError(argument, f"{name!r} is None", f"Leave {name!r} out")
        yield one
    if not value:
        raise ConfigError(argument, "it is an empty dict", "Name at least one")


def _check_several(given: Training, ready_made: str) -> None:
    """Refuse what cannot be done to several models or optimizers without a word from the step."""
    if ready_made:
        problem = "is left out, and the ready-made one trains one model with one optimizer"
        raise ConfigError(ready_made, problem, "Write one; it gets the dicts as they were given")
    alone = {"accumulate": given.accumulate != 1, "clip_norm": given.clip_norm is not None}
    for argument, is_given in (*alone.items(), ("precision", given.precision == "fp16")):
        if is_given and isinstance(given.optimizer, dict):
            problem = f"{getattr(given, argument)!r} is for one optimizer, and there are {len(given.optimizer)}"
            raise ConfigError(argument, problem, "Leave it out, and do it in train_step")


def _check_state(state: Any) -> None:
    if not isinstance(state, list | tuple):
        raise ConfigError("state", f"{show(state)} is not a list", "Write it as state=[ema_model, history]")
    for value in state:
        if not can_be_state(value):
            problem = f"{show(value)} has no state_dict, and is not a list, dict or set"
            raise ConfigError("state", problem, "Keep what has to come back in one of these, and name that")


def _check_callbacks(given: Training) -> None:
    if not isinstance(given.callbacks, list | tuple):
        remedy = "Write it as callbacks=[kd.callbacks.EarlyStopping()]"
        raise ConfigError("callbacks", f"{show(given.callbacks)} is not a list", remedy)
    for one in given.callbacks:
        if isinstance(one, callbacks.Callback):
            continue
        if isinstance(one, type) or not callable(one):
            what = f"{one.__name__} is a class" if isinstance(one, type) else f"{show(one)} is no callback"
            remedy = f"Give objects such as {', '.join(f'kd.callbacks.{name}()' for name in callbacks.__all__)}, or functions"
            raise ConfigError("callbacks", what, remedy)
        check_takes("callbacks", one, ("epoch", "metrics", "model"), title(one))
    averages = [one for one in given.callbacks if isinstance(one, callbacks.Average)]
    if len(averages) > 1:
        raise ConfigError("callbacks", "there are several averages of the weights", "Give one EMA or SWA")
    if sum(isinstance(one, callbacks.ModelCheckpoint) for one in given.callbacks) > 1:
        raise ConfigError("callbacks", "there are several ModelCheckpoint", "Give one: one state is the best")
    evaluates = [one for one in averages if one.evaluate]
    for name, one in callbacks.monitors(given.callbacks).items():
        if given.eval_data_loader is None and not name.startswith("train/"):
            problem = f"{type(one).__name__}(monitor={name!r}) needs an evaluation, and there is no eval_data_loader"
            raise ConfigError("callbacks", problem, f"Give one, or monitor='train/{name.partition('/')[2]}'")
        if name.startswith("averaged/") and not evaluates:
            remedy = "Add kd.callbacks.EMA(evaluate=True), or monitor='eval/...'"
            raise ConfigError("callbacks", f"monitor={name!r}: no averaged weights are evaluated", remedy)
    if evaluates and given.eval_data_loader is None:
        problem = f"{type(evaluates[0]).__name__}(evaluate=True) needs an evaluation, and there is no eval_data_loader"
        raise ConfigError("callbacks", problem, "Give one, or leave out evaluate")
    for one in averages:
        if isinstance(one, callbacks.SWA) and isinstance(given.epochs, int) and one.first(given.epochs) > given.epochs:
            problem = f"SWA(start={one.start}) begins after the last of {given.epochs} epochs"
            raise ConfigError("callbacks", problem, "Give an earlier epoch, or a share such as 0.75")


def _check_loader(argument: str, loader: Any) -> None:
    from torch.utils.data import DataLoader, Dataset

    if isinstance(loader, DataLoader):
        _check_made_loader(argument, loader)
        return
    if loader is None:
        raise ConfigError(argument, "it is None", _A_LOADER)
    if isinstance(loader, type):
        raise ConfigError(argument, f"{loader.__name__} is a class", _A_LOADER)
    if hasattr(loader, "__next__"):
        problem = f"{show(loader)} is an iterator, which can be read only once and on one process"
        remedy = "Pass the DataLoader itself, without iter(). Put a generator of your own into an IterableDataset, and that into one"
        raise ConfigError(argument, problem, remedy)
    if isinstance(loader, Dataset) or type(loader).__module__.startswith("datasets."):
        raise ConfigError(argument, f"{show(loader)} is a dataset", "Wrap it: DataLoader(dataset, batch_size=32)")
    arrays = loader if isinstance(loader, list | tuple) else [loader]
    if arrays and all(getattr(array, "shape", ()) for array in arrays):
        names = "X" if len(arrays) == 1 else "X, y"
        what = f"it is a {type(loader).__name__} of {len(arrays)} arrays" if arrays is loader else "it is an array"
        remedy = f"Make one of it: DataLoader(TensorDataset({names}), batch_size=32, shuffle=True)"
        remedy += "" if all(hasattr(array, "grad_fn") for array in arrays) else ", with torch.as_tensor() of each array"
        raise ConfigError(argument, f"{what}, not a torch.utils.data.DataLoader", remedy)
    if isinstance(loader, list | tuple):
        remedy = "Make one of it: DataLoader(the_list, batch_size=32) for samples, batch_size=None for ready batches"
        raise ConfigError(argument, f"it is a {type(loader).__name__}, not a torch.utils.data.DataLoader", remedy)
    kind = type(loader)
    shown = f"it is a {kind.__module__}.{kind.__name__}, which" if kind.__name__ == "DataLoader" else show(loader)
    raise ConfigError(argument, f"{shown} is not a torch.utils.data.DataLoader", _A_LOADER)


def _check_made_loader(argument: str, loader: Any) -> None:
    from torch.utils.data import IterableDataset
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    name = type(loader).__name__
    if _is_prepared(loader):
        raise ConfigError(argument, f"it is a {name} of Accelerate's, which divides its data already", _UNPREPARED)
    kept = [
        key for key, value in vars(loader).items() if isinstance(value, _BaseDataLoaderIter) and key != LOADERS_ITERATOR
    ]
    if kept:
        problem = f"{name} keeps an iterator of its own ({kept[0]!r}), whose data cannot be divided over processes"
        remedy = "Pass a plain DataLoader; persistent_workers=True keeps its workers from one epoch to the next"
        raise ConfigError(argument, problem, remedy)
    if type(getattr(loader.dataset, SPLIT_BY_NODE, None)).__module__.startswith("datasets."):
        raise ConfigError(
            argument,
            "split_dataset_by_node has given its dataset the part of one rank, and each rank would read a share of that",
            "Leave the split out: the data is divided over the ranks. Or make it in the ranks, of kd.context().rank",
        )
    if isinstance(loader.dataset, IterableDataset):
        return
    try:
        batches, samples = len(loader), len(loader.dataset)
    except (TypeError, NotImplementedError, OverflowError):
        return  # Its sampler or dataset has no length.
    except ValueError as error:
        remedy = "Use a sampler that has one, such as PyTorch Geometric's DynamicBatchSampler with num_steps="
        raise ConfigError(argument, f"it has no length: {str(error).rstrip('.')}", remedy) from error
    if not batches and samples and loader.drop_last:
        problem = f"drop_last=True leaves no batch: {samples:,} samples are fewer than one batch of {loader.batch_size}"
        raise ConfigError(argument, problem, "Use a smaller batch size, or drop_last=False")
    if not batches:
        raise ConfigError(argument, f"it gives no batch: its dataset has {samples:,} samples", "Check the dataset")


def _is_prepared(value: Any) -> bool:
    """Whether Accelerate has prepared this object."""
    return any(kind.__module__.partition(".")[0] == "accelerate" for kind in type(value).__mro__)


def _check_criterion(criterion: Any, model: Any, *, needed_by: str) -> None:
    if isinstance(criterion, type):
        raise ConfigError("criterion", f"{criterion.__name__} is a class", f"Make one: {criterion.__name__}()")
    if criterion is None and needed_by and not Training.is_made_by(model) and not makes_loss(model):
        signature = f"{needed_by}({', '.join(STEP_ARGUMENTS[needed_by])})"
        raise ConfigError(
            "criterion",
            f"it is None, and the ready-made {needed_by} calls it",
            f"Pass a loss function such as nn.CrossEntropyLoss(), or write your own {signature}",
        )
    if any(one.name in _ROLES["data_loader"] for one in parameters_of(criterion)):
        problem = f"{describe(criterion)} takes a loader, as a step does"
        raise ConfigError("criterion", problem, f"Pass it as train_step={title(criterion)}, and a loss function here")
    if criterion is not None and not callable(criterion):
        raise ConfigError("criterion", f"{show(criterion)} cannot be called", "Pass one such as nn.CrossEntropyLoss()")


def makes_loss(model: Any) -> bool:
    """Whether a model takes `labels` and gives a loss with its output, as those of Hugging Face do."""
    # A model of PEFT's without a `task_type` passes on whatever it is given.
    inner = model.get_base_model() if hasattr(type(model), "get_base_model") else model
    return any(one.name == "labels" for part in (model, inner) for one in parameters_of(getattr(part, "forward", None)))


def _check_optimizer(optimizer: Any, model: Any, criterion: Any, *, is_ready_made: bool) -> None:
    import torch

    if optimizer is None:
        raise ConfigError("optimizer", "it is missing", _AN_OPTIMIZER)
    if isinstance(optimizer, type):
        remedy = f"Make one: {optimizer.__name__}(model.parameters(), lr=0.1)"
        raise ConfigError("optimizer", f"{optimizer.__name__} is a class", remedy)
    if isinstance(optimizer, list | tuple):
        raise ConfigError("optimizer", f"it is a {type(optimizer).__name__}, not one optimizer", _SEVERAL)
    if not isinstance(optimizer, torch.optim.Optimizer):
        problem, parts = f"{show(optimizer)} is not a torch.optim.Optimizer", getattr(optimizer, "__dict__", {})
        within = next((name for name, one in parts.items() if isinstance(one, torch.optim.Optimizer)), "")
        remedy = f"Pass the optimizer in it, its .{within}, and use the object itself by its name in train_step"
        beside = f"{_AN_OPTIMIZER}; train_step may use this object by its name" if parts else _AN_OPTIMIZER
        raise ConfigError("optimizer", problem, remedy if within else beside)
    if _is_prepared(optimizer):
        raise ConfigError("optimizer", f"it is an {type(optimizer).__name__}, prepared by Accelerate", _UNPREPARED)
    if any(kind.__module__.startswith("opacus.") for kind in type(optimizer).__mro__):
        problem = f"it is Opacus' {type(optimizer).__name__}: the privacy that ranks spend would not be counted, and their noise is too much"
        remedy = "Run the loop with launch(), where make_private gets the model in Opacus' DifferentiallyPrivateDistributedDataParallel"
        raise ConfigError("optimizer", problem, remedy)
    if is_ready_made and isinstance(optimizer, torch.optim.LBFGS):
        problem = "LBFGS computes the loss several times in a step, and the ready-made train_step does it once"
        raise ConfigError("optimizer", problem, "Write a train_step that calls optimizer.step(closure)")
    modules = [*_each("model", model), *([criterion] if isinstance(criterion, torch.nn.Module) else ())]
    mine = {id(parameter): parameter for one in modules for parameter in one.parameters()}
    if is_ready_made and not any(parameter.requires_grad for parameter in mine.values()):
        problem = f"all of its {len(mine)} parameters are frozen, so there is nothing to train"
        raise ConfigError("model", problem, "Unfreeze what is to be trained: model.head.requires_grad_(True)")
    trained = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(1 for identity in trained if identity not in mine)
    if foreign:
        problem = f"of its {len(trained)} parameters the model has {len(trained) - foreign}: what the others learn would be lost"
        remedy = "Was the model created again or replaced? Create the optimizer again from model.parameters()"
        if foreign < len(trained):
            remedy = "Pass another module, too, as model={'net': model, 'other': module}, or make a tensor its nn.Parameter. Where a layer was replaced, create the optimizer again"
        raise ConfigError("optimizer", problem, remedy)


def _check_step(argument: str, step: Any) -> None:
    if step is None:
        return
    _check_order(argument, step)
    check_takes(argument, step, STEP_ARGUMENTS[argument], argument)


def _check_order(argument: str, step: Any) -> None:
    """Refuse a step that takes as many arguments as it is given, but others or in another order, by their names."""
    expected = STEP_ARGUMENTS[argument]
    taken = [p for p in parameters_of(step) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in taken]
    found = [[role for role, words in _ROLES.items() if name.lower() in words] for name in names]
    places = [*expected, *[""] * len(names)]
    roles = [place if place in fit else fit[0] if fit else None for fit, place in zip(found, places, strict=False)]
    wrong = [name for name, role, place in zip(names, roles, expected, strict=False) if role not in (None, place)]
    if not wrong or (len(names) < len(expected) and not set(roles) <= set(expected)):
        return
    # What a step gets besides comes from `args`; what has a default, and all after it, can be left out.
    given = [role if role in expected else f"args[{p.name!r}]" for p, role in zip(taken, roles, strict=True)]
    while taken[len(given) - 1].default is not inspect.Parameter.empty and given[-1] not in expected:
        given.pop()
    others = [f"{p.name!r}: ..." for p, value in zip(taken, given, strict=False) if value not in expected]
    passed, call = ", ".join(given), ", ".join(expected)
    source = f", with {argument.replace('step', 'args')}={{{', '.join(others)}}}" if others else ""
    raise ConfigError(
        argument,
        f"{describe(step)} has other arguments than ({call}), with which it is called, or another order",
        f"Write it as def {argument}({call}), or wrap it: def {argument}({call}): return {title(step)}({passed}){source}",
    )


def _check_scheduler(scheduler: Any, optimizer: Any) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        remedy = "Pass a scheduler such as torch.optim.lr_scheduler.StepLR(optimizer, 10)"
        raise ConfigError("scheduler", f"{show(scheduler)} is not a learning-rate scheduler", remedy)
    theirs = getattr(scheduler, "optimizer", optimizer)
    if theirs is not None and not any(theirs is one for one in _each("optimizer", optimizer)):
        raise ConfigError("scheduler", "it schedules another optimizer", "Make it from the optimizer you pass")
