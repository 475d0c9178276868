"""The launcher form: a training is chosen from the notebook's names, checked as you type, and written as a call.

The call that it shows does the same as its Run button: what was begun in the form can go on in a cell.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import textwrap
import threading
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anywidget
import traitlets
from IPython import get_ipython

from kale_dist import config, places, strategies, wording
from kale_dist.calls import request, signatures, training_checks, verbs
from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.job.spec import quantities
from kale_dist.job.spec.resources import DEFAULT_CPU, DEFAULT_MEMORY_GIB
from kale_dist.notebook.widget import STATIC, JobWidget

LOOKS_FOR = (
    "a model (a torch.nn.Module), a DataLoader, an optimizer, a loss, and, if you have them, step functions "
    "train_step(model, data_loader, criterion, optimizer, device, args)"
)

OBJECTS = {
    "model": "Model", "train_data_loader": "Training data", "criterion": "Loss", "optimizer": "Optimizer",
    "train_step": "Training step", "eval_data_loader": "Evaluation data", "eval_step": "Evaluation step",
    "train_args": "Arguments of the step",
}  # fmt: skip
"""Fields whose values are names of the notebook, and their labels. The first five are positional in a call."""

_POSITIONAL = tuple(OBJECTS)[:5]
_NOTHING = {
    "criterion": "none", "train_step": "ready-made", "eval_data_loader": "none", "eval_step": "ready-made",
    "train_args": "none",
}  # fmt: skip
_ARGS = dict, argparse.Namespace, types.SimpleNamespace
"""What arguments of a step are; the notebook's own `Out` is a dict, too."""

_PLACES = {"docker": "Docker", "kubernetes": "Kubernetes"}
"""Values of `on` whose settings the form has, and their classes."""

_OF_CLUSTERS = ("namespace", "queue", "kind")
_USUAL_LOSSES = ("CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss", "L1Loss")

_COMMA = re.compile(r",(?![^\[]*\])(?=\s*[A-Za-z0-9])")
"""What separates requirements: no comma within extras (`a[b,c]`) or within versions (`a>=1,<2`)."""

_RANKS = 2
"""What advice is given for while no number of processes is chosen: more than one."""


# -- what the notebook has -------------------------------------------------------------------------------------------


def find(namespace: Mapping[str, Any]) -> dict[str, list[str]]:
    """What of a notebook's names each field of the form could be, the most likely first.

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
        elif isinstance(value, _ARGS) and name != "Out":
            found["train_args"].append(name)
        elif inspect.isfunction(value):
            _sort_function(name, value, found)
    used = _owner(namespace, found["model"], found["optimizer"])
    found["model"].sort(key=lambda name: name != used)
    for field, words in (("train_data_loader", ("train",)), ("eval_data_loader", ("eval", "test", "val"))):
        found[field].sort(key=lambda name, words=words: not any(word in name.lower() for word in words))  # type: ignore[misc]
    return found


def missing(found: Mapping[str, Sequence[str]]) -> list[str]:
    """What a training needs and the notebook does not have."""
    words = {"model": "a model", "train_data_loader": "a DataLoader", "optimizer": "an optimizer"}
    return [word for field, word in words.items() if not found[field]]


def _sort_function(name: str, function: Any, found: dict[str, list[str]]) -> None:
    given = [parameter.name for parameter in signatures.parameters_of(function)]
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


# -- what is chosen, and the call that is made of it ----------------------------------------------------------------


def guess(found: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The likeliest choice: field to text; empty where there is nothing, or where there is a choice of none."""
    chosen = {field: next(iter(found[field]), "") for field in OBJECTS}
    if chosen["eval_data_loader"] == chosen["train_data_loader"]:
        chosen["eval_data_loader"] = ""
    if not chosen["eval_data_loader"]:
        chosen["eval_step"] = ""
    return {**chosen, "train_args": "", "epochs": "1", "on": _default_place()}


def arguments(choice: Mapping[str, str], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `distribute` for a choice, with the notebook's objects in the place of their names.

    Raises:
        ConfigError: A setting of the place is wrong.
    """
    given: dict[str, Any] = {field: namespace.get(choice.get(field, "")) for field in OBJECTS}
    given["criterion"] = given["criterion"] or _made_loss(choice.get("criterion", ""))
    on, settings = _chosen_place(choice)
    place = {"on": on} if settings or on != _default_place() else {}
    return {**given, **_numbers(choice), **request.gathered({**place, **settings})}


def code(choice: Mapping[str, str]) -> str:
    """The call that a choice stands for, as a cell's text."""
    positional = [choice.get(field) or "None" for field in _POSITIONAL]
    if positional[-1] == "None":
        positional.pop()
    named = [f"{field}={choice[field]}" for field in tuple(OBJECTS)[5:] if choice.get(field)]
    named += [f"{field}={value!r}" for field, value in _numbers(choice).items()]
    on, settings = _chosen_place(choice)
    if settings:
        inside = "".join(f"        {field}={value!r},\n" for field, value in settings.items())
        named.append(f"on=kd.{_PLACES[on]}(\n{inside}    )")
    elif on != _default_place():
        named.append(f"on={on!r}")
    lines = [f"    {', '.join(positional)},", *(f"    {one}," for one in named)]
    return "job = kd.distribute(\n" + "\n".join(lines) + "\n)\njob"


def _chosen_place(choice: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Where the training runs, and the settings of that place by keyword; what is left empty is left out."""
    on = choice.get("on") or _default_place()
    given = {field: text.strip() for field, text in choice.items() if text.strip()}
    if on not in _PLACES:
        return on, {}
    packages = [part.strip() for part in _COMMA.split(given.get("packages", "")) if part.strip()]
    mounts = [part.partition("=") for part in given.get("volumes", "").split(",") if part.strip()]
    found: dict[str, Any] = {
        "image": given.get("image"),
        "packages": packages[0] if packages in (["auto"], ["here"]) else packages,
        "resources": {field: wording.parse(given[field]) for field in ("cpu", "memory", "gpus") if field in given},
        "volumes": {path.strip(): source.strip() for path, _, source in mounts},
        "keep_warm": given.get("keep_warm"),
        **{field: given.get(field) for field in (_OF_CLUSTERS if on == "kubernetes" else ())},
    }
    return on, {field: value for field, value in found.items() if value}


def _losses(namespace: Mapping[str, Any]) -> list[str]:
    """Torch's usual losses, as a call in this notebook would make them."""
    import torch

    prefix = "nn" if namespace.get("nn") is torch.nn and namespace.get("torch") is not torch else "torch.nn"
    return [f"{prefix}.{name}()" for name in _USUAL_LOSSES]


def _made_loss(text: str) -> Any:
    """The loss of `_losses` that a text makes; None for anything else."""
    import torch

    name = text.removesuffix("()").rpartition(".")[2]
    return getattr(torch.nn, name)() if text.endswith("()") and name in _USUAL_LOSSES else None


def _calls_criterion(step: Any) -> bool:
    """Whether a step calls the loss that it is given, and does nothing else with it, such as looking whether there is one."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step)))
        name = list(inspect.signature(step).parameters)[_POSITIONAL.index("criterion")]
    except (OSError, SyntaxError, TypeError, ValueError, IndexError):
        return False
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return 0 < uses == sum(isinstance(called, ast.Name) and called.id == name for called in calls)


def _lacks(choice: Mapping[str, str], namespace: Mapping[str, Any]) -> dict[str, str]:
    """What a choice lacks that a call finds only when it is too late: the field, and a sentence; empty if nothing."""
    if not choice.get("criterion") and _calls_criterion(namespace.get(choice.get("train_step", ""))):
        text = f"criterion: {choice['train_step']} calls the loss that it is given. Choose one"
        return {"field": "criterion", "text": text}
    on, settings = _chosen_place(choice)
    configured, in_pod = config.load(), "KUBERNETES_SERVICE_HOST" in os.environ
    known = configured.image or configured.registry or (on in _PLACES and configured.place(on).image)  # type: ignore[union-attr]
    if on in _PLACES and "image" not in settings and not known and not (in_pod and on == "kubernetes"):
        text = "image: processes there need an image with PyTorch and Python as here, such as registry/torch:2.13. Name one"
        return {"field": "image", "text": text}
    return {}


def _default_place() -> str:
    return config.load().on or "local"


def _numbers(choice: Mapping[str, str]) -> dict[str, Any]:
    """What is neither an object nor a setting of a place, in its own type; what is left empty is left out."""
    found: dict[str, Any] = {}
    for field in ("epochs", "number_of_processes"):
        if choice.get(field, "").strip():
            found[field] = wording.parse(choice[field].strip())
    if choice.get("cuda"):
        found["cuda"] = choice["cuda"] == "yes"
    if choice.get("strategy"):
        found["strategy"] = choice["strategy"]
    return found | {field: choice[field].strip() for field in ("name", "resume_from") if choice.get(field, "").strip()}


def advice(choice: Mapping[str, str], namespace: Mapping[str, Any]) -> str:
    """Return the sentence of `strategies.recommend` on the chosen model; empty where something is missing or wrong."""
    model, optimizer = (namespace.get(choice.get(field, "")) for field in ("model", "optimizer"))
    number, memory = (choice.get(field, "").strip() for field in ("number_of_processes", "memory"))
    try:
        ranks, gib = int(number or _RANKS), quantities.memory_gib(memory) if memory else None
        return strategies.recommend(model, optimizer, ranks, gib).sentence
    except ValueError:
        return ""


# -- the widget ------------------------------------------------------------------------------------------------------


class LauncherForm(anywidget.AnyWidget):
    """The form's model.

    Args:
        namespace: The notebook's names, as they are whenever the form is used.
    """

    _esm = "".join((STATIC / f"{name}.js").read_text() for name in ("page", "form"))
    _css = STATIC / "widget.css"

    identity = traitlets.Unicode().tag(sync=True)
    fields: traitlets.List[dict[str, Any]] = traitlets.List().tag(sync=True)
    choice = traitlets.Dict().tag(sync=True)
    problem = traitlets.Dict().tag(sync=True)
    code = traitlets.Unicode().tag(sync=True)
    advice = traitlets.Unicode().tag(sync=True)
    """Which strategy suits the model."""
    claims: traitlets.List[str] = traitlets.List().tag(sync=True)
    claims_note = traitlets.Unicode().tag(sync=True)
    """In the place of claims: that they are asked for, that there are none, or why they are not known."""
    job_view = traitlets.Unicode().tag(sync=True)

    def __init__(self, namespace: dict[str, Any]) -> None:
        identity = uuid.uuid4().hex
        self._namespace = namespace
        self._job: JobWidget | None = None
        self._asked_for_claims = False
        found = find(namespace)
        choice = guess(found)
        # Whole from its first message: a page that opens meanwhile asks for the state, and may miss what follows.
        super().__init__(
            identity=identity,
            model_id=identity,
            fields=_fields(found, namespace),
            choice=choice,
            **self._judged(choice),
        )
        self.observe(self._changed, names="choice")
        self.on_msg(self._receive)

    def __repr__(self) -> str:
        """What front ends without widgets show: how to get them, and the call that the form would make, or what it lacks."""
        return (
            f"The form needs a page with widgets: {wording.GET_WIDGETS}, and reload the page. Without it:\n\n"
            f"{self.problem.get('text') or self.code}"
        )

    def _changed(self, _change: Any) -> None:
        if self.choice.get("on") == "kubernetes" and not self._asked_for_claims:
            self._ask_for_claims()
        self._judge()

    def _judge(self) -> None:
        """Show the call, and what is wrong with it."""
        with self.hold_sync():
            for name, value in self._judged(self.choice).items():
                setattr(self, name, value)

    def _judged(self, choice: Mapping[str, str]) -> dict[str, Any]:
        """Values of `code`, `advice` and `problem` for a choice."""
        about = advice(choice, self._namespace)
        return {"code": code(choice), "advice": about, "problem": self._problem(choice)}

    def _problem(self, choice: Mapping[str, str]) -> dict[str, str]:
        lacks = missing(find(self._namespace))
        if lacks:
            listed = ", ".join(lacks[:-1]) + (" and " if lacks[1:] else "") + lacks[-1]
            text = (
                f"The notebook lacks {listed}. The form looks for {LOOKS_FOR}. "
                "Run the cells that make them, then press Refresh"
            )
            return {"field": "", "text": text}
        try:
            verbs.check(**arguments(choice, self._namespace))
        except ConfigError as error:
            return {"field": _field(error.argument), "text": str(error)}
        except KaleDistError as error:
            return {"field": "", "text": str(error)}
        return _lacks(choice, self._namespace)

    def _ask_for_claims(self) -> None:
        self._asked_for_claims = True
        self.claims_note = "Asking the cluster"
        threading.Thread(target=self._list_claims, name="kale_dist claims", daemon=True).start()

    def _list_claims(self) -> None:
        """Claims of the cluster, to choose from."""
        try:
            found = list(places.get("kubernetes").volumes())
            note = "" if found else "The namespace has none"
        except KaleDistError as error:
            found, note = [], str(error)
        with self.hold_sync():
            self.claims, self.claims_note = found, note

    def _receive(self, _widget: Any, message: Mapping[str, Any], _buffers: Any) -> None:
        actions: dict[Any, Callable[[], str]] = {"look": self._look, "run": self._run}
        asked = message.get("ask")
        if asked in actions:
            self.send({"said": actions[asked]()})

    def _look(self) -> str:
        """Look through the notebook's names again; what was chosen stays, if it is still there."""
        found = find(self._namespace)
        kept = {
            field: value
            for field, value in self.choice.items()
            if value and (field not in OBJECTS or value in found[field] or _made_loss(value) is not None)
        }
        self.fields = _fields(found, self._namespace)
        self.choice = {**guess(found), **kept}
        if self._asked_for_claims:
            self._ask_for_claims()
        self._judge()
        return "Refreshed"

    def _run(self) -> str:
        """Make the call; the job is `job` in the notebook."""
        try:
            job = verbs.distribute(**arguments(self.choice, self._namespace))
        except KaleDistError as error:
            return str(error)
        self._namespace["job"] = job
        self._job = JobWidget(job)
        self._job.start()
        self.job_view = self._job.model_id or ""
        return f"Started as `job`: {job.ref}"


def form() -> LauncherForm:
    """A form for `distribute`: it finds models, loaders, optimizers, losses and steps among the notebook's names.

    It checks as you type, shows the call that it would make, writes it into a new cell, or makes it.

    Raises:
        ConfigError: This is no notebook.
    """
    shell: Any = get_ipython()
    if shell is None:
        raise ConfigError("form", "this is no notebook of Jupyter's", "Call distribute() itself")
    return LauncherForm(shell.user_ns)


def _fields(found: Mapping[str, Sequence[str]], namespace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the page shows, in its order."""
    found = {**found, "criterion": [*found["criterion"], *_losses(namespace)]}
    kinds = [["", "the first that it serves"], *([kind, kind] for kind in ("pytorch", "train", "job", "mpi"))]
    elsewhere = list(_PLACES)
    strategies_of_calls = [[one.word, one.word] for one in strategies.ALL if one.word and one is not strategies.DDP]
    choices = {
        name: [*([["", _NOTHING[name]]] if name in _NOTHING else []), *([one, one] for one in found[name])]
        for name in OBJECTS
    }
    return [
        *({"name": name, "label": label, "options": choices[name]} for name, label in OBJECTS.items()),
        {"name": "epochs", "label": "Epochs", "is_number": True},
        {"name": "number_of_processes", "label": "Processes", "is_number": True, "hint": "one for each core"}
        | {"hint_elsewhere": "two"},
        {"name": "on", "label": "Where", "options": [[name, name] for name in places.NAMES]},
        {
            "name": "cuda",
            "label": "GPUs",
            "options": [["", "used if available"], ["yes", "one for each process"], ["no", "not used"]],
        },
        {"name": "strategy", "label": "Strategy", "options": [["", "ddp"], *strategies_of_calls]},
        {"name": "name", "label": "Name", "hint": "from the model's class"},
        {"name": "resume_from", "label": "Resume from", "hint": "a job, or a file"},
        {"name": "keep_warm", "label": "Keep warm", "hint": "not: ends with its job", "only": elsewhere},
        {"name": "image", "label": "Image", "hint": "registry/name:tag", "only": elsewhere, "is_wide": True},
        {"name": "packages", "label": "Packages", "hint": "einops, timm==1.0", "only": elsewhere, "is_wide": True},
        {"name": "cpu", "label": "Cores each", "hint": f"{DEFAULT_CPU:g}", "only": elsewhere},
        {"name": "memory", "label": "Memory each", "hint": f"{DEFAULT_MEMORY_GIB:g}Gi", "only": elsewhere},
        {"name": "gpus", "label": "GPUs each", "hint": "0", "is_number": True, "only": elsewhere},
        {"name": "namespace", "label": "Namespace", "hint": "the configured one", "only": ["kubernetes"]},
        {"name": "queue", "label": "Queue", "hint": "none", "only": ["kubernetes"]},
        {"name": "kind", "label": "Kind", "options": kinds, "only": ["kubernetes"]},
        {"name": "volumes", "label": "Volumes", "hint": "/data=digits", "only": elsewhere, "is_wide": True},
    ]


def _field(argument: str) -> str:
    """The form's field for the argument that an error names."""
    first, _, rest = argument.partition(".")
    if first == "resources":
        return {"memory_gib": "memory"}.get(rest, rest) or "cpu"
    return first
