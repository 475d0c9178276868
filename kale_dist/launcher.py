"""The launcher form: a training is chosen from the notebook's names, checked as one types, and written as a call.

Whatever the form does, the call that it shows does the same: nobody is locked into the form.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anywidget
import traitlets
from IPython import get_ipython

from kale_dist import backends, calls, candidates
from kale_dist.backends.base import OffersVolumes
from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.notebook.widget import JobWidget

_STATIC = pathlib.Path(__file__).parent / "notebook" / "static"

_LABELS = {
    "model": "Model", "train_data_loader": "Training data", "criterion": "Loss", "optimizer": "Optimizer",
    "train_step": "Training step", "eval_data_loader": "Evaluation data", "eval_step": "Evaluation step",
}  # fmt: skip
_NOTHING = {
    "criterion": "none", "train_step": "ready-made", "eval_data_loader": "none", "eval_step": "ready-made",
}  # fmt: skip
_PARTS_OF = {"cpu": "resources", "memory": "resources", "gpus": "resources"}
"""Fields that are parts of an argument, which is what errors name."""


class LauncherForm(anywidget.AnyWidget):
    """The form's model.

    Args:
        namespace: The notebook's names; it is looked at anew whenever the form is used.
    """

    _esm = _STATIC / "form.js"
    _css = _STATIC / "form.css"

    fields: traitlets.List[dict[str, Any]] = traitlets.List().tag(sync=True)
    choice = traitlets.Dict().tag(sync=True)
    problem = traitlets.Dict().tag(sync=True)
    code = traitlets.Unicode().tag(sync=True)
    claims: traitlets.List[str] = traitlets.List().tag(sync=True)
    claims_said = traitlets.Unicode().tag(sync=True)
    """In the place of claims: that they are asked for, that there are none, or why they are not known."""
    job_view = traitlets.Unicode().tag(sync=True)

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__()
        self._namespace = namespace
        self._job: JobWidget | None = None
        self._asked_for_claims = False
        found = candidates.find(namespace)
        self.fields = _fields(found)
        self.choice = candidates.guess(found)
        self._judge()
        self.observe(self._changed, names="choice")
        self.on_msg(self._receive)

    def __repr__(self) -> str:
        """What front ends without widgets show: the call that the form would make, or what it lacks."""
        return self.problem.get("text") or self.code

    def _changed(self, _change: Any) -> None:
        if self.choice.get("on") == "kubernetes" and not self._asked_for_claims:
            self._ask_for_claims()
        self._judge()

    def _judge(self) -> None:
        """Show the call, and what is wrong with it."""
        missing = candidates.find(self._namespace).missing
        with self.hold_sync():
            self.code = candidates.code(self.choice)
            if missing:
                self.problem = {
                    "field": "",
                    "text": f"The notebook lacks {_listed(missing)}. The form looks for {candidates.LOOKS_FOR}. "
                    "Run the cells that make them, then press Look again",
                }
                return
            try:
                calls.check(**candidates.arguments(self.choice, self._namespace))
            except ConfigError as error:
                self.problem = {"field": _field(error.argument), "text": str(error)}
            except KaleDistError as error:
                self.problem = {"field": "", "text": str(error)}
            else:
                self.problem = {}

    def _ask_for_claims(self) -> None:
        self._asked_for_claims = True
        self.claims_said = "The cluster is asked"
        threading.Thread(target=self._list_claims, name="kale_dist claims", daemon=True).start()

    def _list_claims(self) -> None:
        """Claims of the cluster, to choose from."""
        found: list[str] = []
        try:
            backend = backends.get("kubernetes")
            found = list(backend.volumes()) if isinstance(backend, OffersVolumes) else []
            said = "" if found else "The namespace has none"
        except KaleDistError as error:
            said = str(error)
        with self.hold_sync():
            self.claims, self.claims_said = found, said

    def _receive(self, _widget: Any, message: Mapping[str, Any], _buffers: Any) -> None:
        actions: dict[Any, Callable[[], str]] = {"look": self._look, "run": self._run}
        asked = message.get("ask")
        if asked in actions:
            self.send({"said": actions[asked]()})

    def _look(self) -> str:
        """Look through the notebook's names again; what was chosen stays, if it is still there."""
        found = candidates.find(self._namespace)
        kept = {
            field: value
            for field, value in self.choice.items()
            if value and (field not in candidates.OBJECTS or value in getattr(found, field))
        }
        self.fields = _fields(found)
        self.choice = {**candidates.guess(found), **kept}
        if self._asked_for_claims:
            self._ask_for_claims()
        self._judge()
        return "Looked again"

    def _run(self) -> str:
        """Make the call; the job is `job` in the notebook."""
        try:
            job = calls.distribute(**candidates.arguments(self.choice, self._namespace))
        except KaleDistError as error:
            return str(error)
        self._namespace["job"] = job
        self._job = JobWidget(job)
        self._job.start()
        self.job_view = self._job.model_id or ""
        return f"Started as `job`: {job.ref}"


def form() -> LauncherForm:
    """A form for `distribute`: it finds models, loaders, optimizers, losses and steps among the notebook's names.

    It checks while one types, shows the call that it would make, writes it into a new cell, or makes it.

    Raises:
        ConfigError: This is no notebook.
    """
    shell: Any = get_ipython()
    if shell is None:
        raise ConfigError("form", "this is no notebook", "Call distribute() itself")
    return LauncherForm(shell.user_ns)


def _fields(found: candidates.Candidates) -> list[dict[str, Any]]:
    """What the page shows, in its order."""
    selects = [
        {
            "name": name,
            "label": _LABELS[name],
            "kind": "select",
            "options": [
                *([["", _NOTHING[name]]] if name in _NOTHING else []),
                *([one, one] for one in getattr(found, name)),
            ],
        }
        for name in candidates.OBJECTS
    ]
    return [
        *selects,
        {"name": "epochs", "label": "Epochs", "kind": "number"},
        {"name": "number_of_processes", "label": "Processes", "kind": "number", "hint": "one for each core"}
        | {"hint_elsewhere": "two"},
        {"name": "on", "label": "Where", "kind": "select", "options": [[name, name] for name in backends.NAMES]},
        {
            "name": "cuda",
            "label": "GPUs",
            "kind": "select",
            "options": [["", "if there are"], ["yes", "one for each process"], ["no", "no"]],
        },
        {"name": "image", "label": "Image", "kind": "text", "hint": "registry/name:tag", "elsewhere": True},
        {"name": "packages", "label": "Packages", "kind": "text", "hint": "einops==0.8, or auto", "elsewhere": True},
        {"name": "cpu", "label": "Cores each", "kind": "text", "hint": "1", "elsewhere": True},
        {"name": "memory", "label": "Memory each", "kind": "text", "hint": "2Gi", "elsewhere": True},
        {"name": "volumes", "label": "Volumes", "kind": "text", "hint": "/data=claim", "elsewhere": True},
        {"name": "name", "label": "Name", "kind": "text", "hint": "made from the model's"},
    ]


def _field(argument: str) -> str:
    """The form's field for the argument that an error names."""
    first, _, rest = argument.partition(".")
    if first == "resources":
        return {"memory_gib": "memory"}.get(rest, rest) or "cpu"
    return first


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + (" and " if words[1:] else "") + words[-1]
