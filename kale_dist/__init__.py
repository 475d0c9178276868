"""One call trains a PyTorch model from a notebook on many processes: on this machine, in containers or on a cluster.

    import kale_dist as kd

    job = kd.distribute(model, train_loader, criterion, optimizer, train_step, epochs=5, number_of_processes=4)
    job.wait()
    model = job.model

The names below are imported when they are first used, so that `import kale_dist` costs next to nothing and a rank loads
only what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kale_dist import callbacks, strategies
    from kale_dist.calls.form import form
    from kale_dist.calls.verbs import attach, compare, distribute, jobs, launch, live, render
    from kale_dist.errors import KaleDistError
    from kale_dist.job.handle import Job
    from kale_dist.job.spec.place_settings import Docker, Kubernetes, Local
    from kale_dist.job.spec.recipe import Recipe
    from kale_dist.job.spec.resources import Resources
    from kale_dist.job.spec.volumes import Volume
    from kale_dist.runner.execution import run_notebook
    from kale_dist.snapshot.folders import Folder
    from kale_dist.sweeps import sweep
    from kale_dist.wire.context import context, report
    from kale_dist.worker.rank.joint_saving import leaving
    from kale_dist.worker.rank.last_checkpoint import last_checkpoint
    from kale_dist.worker.training.data.lazy_dataset import dataset
    from kale_dist.worker.training.data.shared import share
    from kale_dist.worker.training.parts import pretrained

__version__ = "0.1.0"

__all__ = [
    "Docker",
    "Folder",
    "Job",
    "KaleDistError",
    "Kubernetes",
    "Local",
    "Recipe",
    "Resources",
    "Volume",
    "__version__",
    "attach",
    "callbacks",
    "compare",
    "context",
    "dataset",
    "distribute",
    "form",
    "jobs",
    "last_checkpoint",
    "launch",
    "leaving",
    "live",
    "pretrained",
    "render",
    "report",
    "run_notebook",
    "share",
    "strategies",
    "sweep",
]

_HOMES = {
    "Docker": "job.spec.place_settings",
    "Folder": "snapshot.folders",
    "Job": "job.handle",
    "KaleDistError": "errors",
    "Kubernetes": "job.spec.place_settings",
    "Local": "job.spec.place_settings",
    "Recipe": "job.spec.recipe",
    "Resources": "job.spec.resources",
    "Volume": "job.spec.volumes",
    "attach": "calls.verbs",
    "callbacks": "",
    "compare": "calls.verbs",
    "context": "wire.context",
    "dataset": "worker.training.data.lazy_dataset",
    "distribute": "calls.verbs",
    "form": "calls.form",
    "jobs": "calls.verbs",
    "last_checkpoint": "worker.rank.last_checkpoint",
    "launch": "calls.verbs",
    "leaving": "worker.rank.joint_saving",
    "live": "calls.verbs",
    "pretrained": "worker.training.parts",
    "render": "calls.verbs",
    "report": "wire.context",
    "run_notebook": "runner.execution",
    "share": "worker.training.data.shared",
    "strategies": "",
    "sweep": "sweeps",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise importlib.import_module(f"{__name__}.wording").no_attribute(f"module {__name__!r}", name, __all__)
    # Without a home it is a module of the package itself.
    module = importlib.import_module(f"{__name__}.{home or name}")
    value = getattr(module, name) if home else module
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext kale_dist` calls."""
    importlib.import_module(f"{__name__}.cli.magics").load(shell)


def __dir__() -> list[str]:
    # Completion does not offer modules of the package that happen to be imported.
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
