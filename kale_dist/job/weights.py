"""Loads a job's weights into the notebook's own objects: all of them or, if they do not fit, none."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kale_dist.errors import warn
from kale_dist.snapshot.changes import Arrived, Changes, held, put, roots_of_call, shown
from kale_dist.snapshot.given_models import models_in, together
from kale_dist.snapshot.origin import Origin
from kale_dist.wording import listed

if TYPE_CHECKING:
    import torch

    from kale_dist.snapshot.given_models import Adapter
    from kale_dist.worker.training.settings import Training

_NAMED = 3
"""Names that a message lists before it counts the rest."""

_lock = threading.Lock()
_last_loaded: dict[int, tuple[weakref.ref[torch.nn.Module], str]] = {}
"""The id of each model to the reference of the job that was last loaded into it. By id, because models may compare equal."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """The notebook's objects that a job trains, and how they looked when its snapshot was taken."""

    model: Any
    """A module; None where the ranks make it, until the notebook asks for it."""
    optimizer: Any
    scheduler: Any
    """A learning-rate scheduler, or None."""
    loaded_before: str = ""
    """The job whose weights the model had when the snapshot was taken; empty if none."""
    state: tuple[Any, ...] = ()
    """The objects of `state=`, whose state comes back, too."""
    objects: Callable[[], Mapping[str, Any]] = dict
    """Gives the objects of which more comes back than their state, by name."""
    arrived: Arrived | None = None
    """These objects as they were when the snapshot was taken; None in another process."""
    functions: Training | None = None
    """The call whose functions make the model."""

    def made(self) -> Targets:
        """Make the model, if that is left to do, and what belongs to it."""
        if self.functions is None:
            return self
        from kale_dist.worker.training.parts import with_objects

        made = with_objects(self.functions)
        named = {"model": made.model, "optimizer": made.optimizer, "scheduler": made.scheduler}
        return remember(made.model, named, None, made.optimizer, made.scheduler, made.state)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainedObjects:
    """The objects that a successful job returns to its user."""

    model: Any
    optimizer: Any
    """None if the model is a new object, because the notebook's optimizer has the parameters of the old one."""
    problem: str = ""
    """Why the weights were not loaded into the model, as a clause; empty if they were."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user, a sentence each."""


def of_training(training: Training, origin: Origin | None = None) -> Targets:
    """The notebook's objects of a call.

    Args:
        training: The call's.
        origin: Where its snapshot has what they contain; None in another process than the notebook's.
    """
    objects = training.objects()
    if not training.makes_model:
        return remember(training.model, objects, origin, training.optimizer, training.scheduler, training.state)
    found = remember(None, {name: value for name, value in objects.items() if value is not training.model}, origin)
    return dataclasses.replace(found, functions=training)


def of_function(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: Origin | None = None
) -> Targets:
    """The notebook's objects of a call of `launch`; with `origin` as in `of_training`."""
    models = models_in(args, kwargs)
    return remember(together(models) if models else None, roots_of_call(function, args, kwargs), origin)


def put_changes(targets: Targets, changes: Sequence[Changes], ref: str, *, has_model: bool = True) -> list[str]:
    """Write what the ranks have changed, besides weights, into the notebook's objects.

    Args:
        targets: The objects.
        changes: What has changed.
        ref: The job's reference.
        has_model: Whether the model is among them: one whose structure has changed comes back as another object.

    Returns:
        Warnings for the user: what the notebook had changed meanwhile, and what could not be written.
    """
    paths, notes = [path for one in changes for path, _ in one.places], []
    mine = [] if targets.arrived is None or not paths else [path for path, _ in targets.arrived.differing()]
    lost = [shown(one) for one in mine if any(one[: len(path)] == path[: len(one)] for path in paths)]
    if lost:
        notes.append(f"What {ref} has changed was written over what changed here after it had started: {_few(lost)}")
    objects = {name: value for name, value in targets.objects().items() if has_model or name != "model"}
    if problems := put(objects, changes, arrived=targets.arrived):
        notes.append(f"{ref} has changed what could not be written here: {listed(problems, _NAMED)}")
    return notes


def load(targets: Targets, trained: Any, ref: str, *, check: bool) -> TrainedObjects:
    """Load the outcome of a training into the notebook's objects.

    Args:
        targets: The objects.
        trained: Rank 0's `TrainingResult`.
        ref: The job's reference.
        check: Whether to warn of changes to the model since the job's start.
    """
    if trained.model is not None:
        warning = f"{ref} gives a new model object, the notebook's own is as it was: {trained.reason}"
        return TrainedObjects(model=trained.model, optimizer=None, warnings=(warning,))
    if trained.model_state is None:
        # The values were read from a folder of parts.
        return TrainedObjects(model=targets.model, optimizer=None)
    overwritten = changes(targets) if check else ""
    if found := [name for name, value in trained.model_state.items() if _is_nan(value)]:
        text = f"Weights of {ref} are nan ({_few(found)}), and go into the notebook's model now"
        warn(f"{text}. If distribute() wrote a checkpoint before, job.state_dict(partial=True) has its weights")
    adapters = getattr(trained, "adapters", ())
    problem = _add_adapters(targets.model, adapters, trained.model_state) if adapters else ""
    problem = problem or mismatch(targets.model, trained.model_state)
    how = "were not loaded into the notebook's model, which is as it was"
    if not problem:
        how = "were loaded only in part into the notebook's model"
        try:
            load_model(targets.model, trained.model_state, ref)
            _activate(targets.model, adapters)
        except Exception as error:  # noqa: BLE001 - of the user's modules
            problem = f"load_state_dict raised {type(error).__name__}: {error}"
    if problem:
        warning = f"The weights of {ref} {how}: {problem.rstrip('.')}. job.state_dict() has them"
        return TrainedObjects(model=None, optimizer=None, problem=problem, warnings=(warning,))
    notes = []
    if overwritten:
        notes.append(f"The weights of {ref} were loaded into the notebook's model although {overwritten}")
    for word, value, state in (
        ("optimizer", targets.optimizer, trained.optimizer_state),
        ("scheduler", targets.scheduler, trained.scheduler_state),
        *((type(value).__name__, value, state) for value, state in zip(targets.state, trained.state, strict=False)),
    ):
        load_one = load_optimizer if word == "optimizer" else _load_state
        if value is not None and state is not None and (problem := load_one(value, state)):
            notes.append(f"The {word} state of {ref} was not loaded into the notebook's {word}: {problem}")
    return TrainedObjects(model=targets.model, optimizer=targets.optimizer, warnings=tuple(notes))


def remember(
    model: Any,
    objects: Mapping[str, Any],
    origin: Origin | None,
    optimizer: Any = None,
    scheduler: Any = None,
    state: Sequence[Any] = (),
) -> Targets:
    """Record how objects are now, so that `changes` can later detect changes.

    Args:
        model: A module, or a dict of modules by name; None if there is none yet.
        objects: Those of which more comes back than their state, by name.
        origin: Where the snapshot has what they contain; None: changes are not looked for.
        optimizer: Its optimizer, or a dict of them.
        scheduler: A learning-rate scheduler, or None.
        state: The objects of `state=`.
    """
    if model is not None:
        # Torch is there, too.
        from kale_dist.worker.training.result import one_model, one_optimizer

        model, optimizer = one_model(model), one_optimizer(optimizer)
    there, optimizers = held(objects), optimizer.named.values() if hasattr(optimizer, "named") else [optimizer]
    covered = [*optimizers, scheduler, *state]
    return Targets(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loaded_before=_last_job(model),
        state=tuple(state),
        objects=there,
        arrived=None if origin is None else Arrived(there, covered={*map(id, covered)}, origin=origin),
    )


def changes(targets: Targets) -> str:
    """Which changes since the job's start a load overwrites, as a clause; empty if none."""
    last = _last_job(targets.model)
    if last != targets.loaded_before:
        return f"{last} was loaded into it after this job had started"
    own = {id(value) for value in targets.model.state_dict(keep_vars=True).values()}
    differing = () if targets.arrived is None else targets.arrived.differing()
    changed = [shown(path) for path, value in differing if id(value) in own]
    return f"{_few(changed)} changed after the job had started" if changed else ""


def mismatch(module: torch.nn.Module, state: Mapping[str, Any]) -> str:
    """Why a state dict does not fit a module, as a clause with the first differences; empty if it fits."""
    import torch

    mine = module.state_dict()
    if mine.keys() != state.keys():
        return f"the keys differ: {_few(mine.keys() ^ state.keys())}"
    wrong = []
    for name, value in mine.items():
        other = state[name]
        if not isinstance(value, torch.Tensor):
            continue
        if torch.nn.parameter.is_lazy(value):
            wrong.append(f"{name} has no shape yet in the notebook")
        elif value.layout is torch.strided and value.numel() > 1 and 0 in value.stride():
            wrong.append(f"{name} is expanded in the notebook, and cannot be written")
        elif (tuple(value.shape), value.dtype) != (tuple(other.shape), other.dtype):
            wrong.append(f"{name} is {_describe(value)} in the notebook and {_describe(other)} in the job")
    return "; ".join(wrong[:_NAMED])


def _add_adapters(module: torch.nn.Module, adapters: Sequence[Adapter], state: Mapping[str, Any]) -> str:
    """Put PEFT's adapters into the models as the function did in the ranks; returns why the state does not fit, as a clause."""
    import torch

    missing = []
    try:
        for one in adapters:
            here = (getattr(module.get_submodule(one.place), "peft_config", None) or {}).get(one.name)
            if here is None:
                missing.append(one)
            elif other := _differing(json.loads(json.dumps(here.to_dict(), default=list)), json.loads(one.config)):
                return f"its adapter {one.name!r} has {other}"
        if not missing:
            return ""
        peft: Any = importlib.import_module("peft")
        hollow: dict[int, Any] = {id(one): one.detach().to("meta") for one in module.buffers()}
        for weight in module.parameters():
            hollow[id(weight)] = torch.nn.Parameter(weight.detach().to("meta"), weight.requires_grad)
        # First into a copy without values: a model that does not fit stays as it is.
        known = {*hollow, *map(id, hollow.values())}
        with warnings.catch_warnings():
            # Such as that a model is altered for a second time.
            warnings.simplefilter("ignore")
            for target in (copy.deepcopy(module, hollow), module):
                for one in missing:
                    model, made = target.get_submodule(one.place), peft.get_peft_config(json.loads(one.config))
                    if isinstance(model, peft.PeftModel):
                        model.add_adapter(one.name, made)
                    else:
                        peft.get_peft_model(model, made, one.name)
                for name, value in target.state_dict(keep_vars=True).items():
                    # PEFT and trainers choose the dtype of an adapter by device and arguments.
                    if name in state and id(value) not in known and isinstance(value, torch.Tensor):
                        value.data = value.data.to(state[name].dtype)
                if problem := mismatch(target, state):
                    return problem
    except Exception as error:  # noqa: BLE001 - of another package, which may have another version here
        return f"the function added adapters, which cannot be added here: {type(error).__name__}: {error}"
    return ""


_OF_A_PLACE = ("inference_mode", "base_model_name_or_path", "revision", "auto_mapping")
"""What a configuration of PEFT says of where it is used, and not of what the adapter computes."""


def _differing(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """The first setting in which two configurations differ, as a clause; empty if none."""
    for name in sorted({*here, *there}.difference(_OF_A_PLACE)):
        # PEFT keeps names in sets, whose order differs between processes.
        mine, theirs = (
            sorted(one, key=str) if isinstance(one, list) else one for one in (here.get(name), there.get(name))
        )
        if mine != theirs:
            return f"{name}={mine} here and {theirs} in the job"
    return ""


def _activate(module: torch.nn.Module, adapters: Sequence[Adapter]) -> None:
    """Have the adapters active that were active in the rank."""
    for place in {one.place for one in adapters}:
        active = [one.name for one in adapters if one.place == place and one.is_active]
        for part in module.get_submodule(place).modules():
            layer: Any = part
            now, known = getattr(layer, "active_adapters", None), getattr(layer, "scaling", None)
            if isinstance(now, list) and isinstance(known, dict) and set(now) != {*active} & {*known}:
                layer.set_adapter([name for name in active if name in known])


def load_model(module: torch.nn.Module, state: Mapping[str, Any], ref: str) -> None:
    """Copy a job's weights into a module that they fit (`mismatch`). Devices, ties and `requires_grad` stay.

    Args:
        module: The notebook's model.
        state: The job's `state_dict()`.
        ref: The job's reference.
    """
    with _lock:
        module.load_state_dict(state)
        identity = id(module)
        _last_loaded[identity] = (weakref.ref(module, lambda _: _last_loaded.pop(identity, None)), ref)


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> str:
    """Put a job's optimizer state into the notebook's optimizer, if it fits.

    Returns:
        Why it does not fit, as a clause; empty if it was loaded.
    """
    mine = [len(group["params"]) for group in optimizer.param_groups]
    other = [len(group["params"]) for group in state["param_groups"]]
    if mine != other:
        return f"its parameter groups have {mine} parameters in the notebook and {other} in the job"
    return _load_state(optimizer, state)


def _load_state(target: Any, state: Mapping[str, Any]) -> str:
    """Call `load_state_dict`, which may be the user's own; returns why it failed, as a clause, or an empty text."""
    from kale_dist.worker.training.result import load_state

    try:
        load_state(target, state)
    except Exception as error:  # noqa: BLE001 - the model has its weights by now: that must not be undone or repeated
        return f"load_state_dict raised {type(error).__name__}: {error}"
    return ""


def _last_job(model: torch.nn.Module) -> str:
    reference, ref = _last_loaded.get(id(model), (None, ""))
    return ref if reference is not None and reference() is model else ""


def _is_nan(value: Any) -> bool:
    # Tensors without a shape yet, and some layouts, cannot be asked.
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        return bool(value.isnan().any())
    return False


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _few(found: Any) -> str:
    return listed(sorted(found), _NAMED)
