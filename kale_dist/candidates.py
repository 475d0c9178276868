"""What of a notebook's names a training could be made of, and the call that is written of a choice. Reads, and no more."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist import config, placing, training_checks
from kale_dist.notebook import parameters

LOOKS_FOR = (
    "a model (a torch.nn.Module), a DataLoader, an optimizer, a loss, and, if you have them, step functions "
    "train_step(model, data_loader, criterion, optimizer, device, args)"
)

OBJECTS = (
    "model", "train_data_loader", "criterion", "optimizer", "train_step", "eval_data_loader", "eval_step",
)  # fmt: skip
"""Fields whose values are names of the notebook; the first five are positional in a call."""

_POSITIONAL = OBJECTS[:5]
_CLASSES = {"docker": "Docker", "kubernetes": "Kubernetes"}
_FLAGS = {"yes": True, "no": False}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Names of the notebook by what they could be, the most likely first."""

    model: tuple[str, ...] = ()
    train_data_loader: tuple[str, ...] = ()
    criterion: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    train_step: tuple[str, ...] = ()
    eval_data_loader: tuple[str, ...] = ()
    eval_step: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """What a training needs and the notebook does not have."""
        words = {"model": "a model", "train_data_loader": "a DataLoader", "optimizer": "an optimizer"}
        return tuple(word for field, word in words.items() if not getattr(self, field))


def find(namespace: Mapping[str, Any]) -> Candidates:
    """Look through a notebook's names.

    Args:
        namespace: Name to object. Names that begin with an underscore are passed over.
    """
    import torch
    from torch.utils.data import DataLoader

    found: dict[str, list[str]] = {field: [] for field in OBJECTS}
    for name, value in namespace.items():
        if name.startswith("_") or isinstance(value, type):
            continue
        if isinstance(value, torch.nn.Module):
            # A loss is a module that has no parameters, or one of torch's own.
            is_loss = type(value).__module__ == "torch.nn.modules.loss" or "loss" in type(value).__name__.lower()
            found["criterion" if is_loss else "model"].append(name)
        elif isinstance(value, DataLoader):
            found["train_data_loader"].append(name)
            found["eval_data_loader"].append(name)
        elif isinstance(value, torch.optim.Optimizer):
            found["optimizer"].append(name)
        elif inspect.isfunction(value):
            _sort_function(name, value, found)
    used = _owner(namespace, found["model"], found["optimizer"])
    found["model"].sort(key=lambda name: name != used)
    for field, words in (("train_data_loader", ("train",)), ("eval_data_loader", ("eval", "test", "val"))):
        found[field].sort(key=lambda name, words=words: not any(word in name.lower() for word in words))  # type: ignore[misc]
    return Candidates(**{field: tuple(names) for field, names in found.items()})


def guess(candidates: Candidates) -> dict[str, str]:
    """The likeliest choice: field to text; empty where there is nothing, or where there is a choice of none."""
    chosen = {field: next(iter(getattr(candidates, field)), "") for field in OBJECTS}
    if chosen["eval_data_loader"] == chosen["train_data_loader"]:
        chosen["eval_data_loader"] = ""
    if not chosen["eval_data_loader"]:
        chosen["eval_step"] = ""
    return {**chosen, "epochs": "1", "on": config.load().on or "local"}


def arguments(choice: Mapping[str, str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `distribute` for a choice, with the notebook's objects in the place of their names.

    Raises:
        ConfigError: A setting of the place is wrong.
    """
    given: dict[str, Any] = {field: namespace.get(choice.get(field, "")) for field in OBJECTS}
    return {**given, **placing.gathered({**_settings(choice), **_place(choice)})}


def code(choice: Mapping[str, str]) -> str:
    """The call that a choice stands for, as a cell's text."""
    positional = [choice.get(field) or "None" for field in _POSITIONAL]
    while positional and positional[-1] == "None" and len(positional) > len(_POSITIONAL) - 1:
        positional.pop()
    named = [f"{field}={choice[field]}" for field in OBJECTS[5:] if choice.get(field)]
    settings, place = _settings(choice), _place(choice)
    if place and choice.get("on") in _CLASSES:
        settings.pop("on", None)
        said = ", ".join(f"{field}={value!r}" for field, value in place.items())
        named.append(f"on=kd.{_CLASSES[choice['on']]}({said})")
    named += [f"{field}={value!r}" for field, value in settings.items()]
    lines = [f"    {', '.join(positional)},", *(f"    {one}," for one in named)]
    return "job = kd.distribute(\n" + "\n".join(lines) + "\n)\njob"


def _settings(choice: Mapping[str, str]) -> dict[str, Any]:
    """Everything of the call but the objects, in its own type; what is left empty is left out."""
    found: dict[str, Any] = {}
    for field in ("epochs", "number_of_processes"):
        if choice.get(field, "").strip():
            found[field] = parameters.parse(choice[field].strip())
    if choice.get("on") and choice["on"] != (config.load().on or "local"):
        found["on"] = choice["on"]
    if choice.get("cuda") in _FLAGS:
        found["cuda"] = _FLAGS[choice["cuda"]]
    if choice.get("name", "").strip():
        found["name"] = choice["name"].strip()
    return found


def _place(choice: Mapping[str, str]) -> dict[str, Any]:
    """What is set of the place; empty on this machine, where the form hides these fields."""
    found: dict[str, Any] = {}
    if choice.get("on") not in _CLASSES:
        return found
    if choice.get("image", "").strip():
        found["image"] = choice["image"].strip()
    if choice.get("packages", "").strip():
        listed = [part.strip() for part in choice["packages"].split(",") if part.strip()]
        found["packages"] = "auto" if listed == ["auto"] else listed
    if choice.get("processes_per_pod", "").strip():
        found["processes_per_pod"] = parameters.parse(choice["processes_per_pod"].strip())
    resources = {
        field: parameters.parse(choice[field].strip())
        for field in ("cpu", "memory", "gpus")
        if choice.get(field, "").strip()
    }
    if resources:
        found["resources"] = resources
    if choice.get("volumes", "").strip():
        found["volumes"] = dict(_pair(part) for part in choice["volumes"].split(",") if part.strip())
    return found


def _pair(text: str) -> tuple[str, str]:
    path, _, source = text.strip().partition("=")
    return path.strip(), source.strip()


def _sort_function(name: str, function: Any, found: dict[str, list[str]]) -> None:
    try:
        given = [parameter.name for parameter in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return
    for field, wanted in training_checks.STEP_ARGUMENTS.items():
        if len(given) == len(wanted) and ("loader" in " ".join(given) or "step" in name or "epoch" in name):
            found[field].append(name)
            return
    if len(given) == 2 and ("loss" in name or "criterion" in name):  # noqa: PLR2004 - output and target
        found["criterion"].append(name)


def _owner(namespace: Mapping[str, Any], models: Sequence[str], optimizers: Sequence[str]) -> str:
    """The model whose parameters an optimizer has."""
    for optimizer in optimizers:
        parameters_of = {id(p) for group in namespace[optimizer].param_groups for p in group["params"]}
        for name in models:
            if any(id(p) in parameters_of for p in namespace[name].parameters()):
                return name
    return ""
