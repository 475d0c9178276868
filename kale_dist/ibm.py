"""IBM's names: `train_comp(...)` and its `distribution_specification`, as the component "Train Model Job" takes them.

    from kale_dist.ibm import train_comp

    job = train_comp(train_model, {"epochs": 3}, pvc_name="datasets",
                     distribution_specification={"distribution_type": "PyTorch", "number_of_workers": 2, "worker_cpus": "8"})

The component builds the same objects from a dict, in a pipeline. Here they are those of the library's own calls.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kale_dist.calls import signatures, verbs
from kale_dist.errors import ConfigError, short_refusals
from kale_dist.job.handle import Job
from kale_dist.job.spec import names
from kale_dist.job.spec.checks import Check, whole
from kale_dist.job.spec.place_settings import Kubernetes, settings_of
from kale_dist.job.spec.resources import Resources
from kale_dist.job.spec.volumes import Volume, VolumeKind
from kale_dist.wording import closest, show

R = TypeVar("R")

_KINDS = {"Job": "job", "PyTorch": "pytorch", "MPI": "mpi", "TF": "tf"}
"""IBM's `distribution_type` to the `kind` of `kd.Kubernetes`."""

_KEYS = (
    "distribution_type", "number_of_workers", "worker_cpus", "worker_memory", "launcher_cpus", "launcher_memory", "base_image",
    "node_selector", "namespace", "cluster_configuration_secret", "pvc_name", "pvc_size", "train_mount", "cpus", "gpus", "memory",
)  # fmt: skip

_NOT_HERE = {
    "tensorboard_s3_address": "Write from the function: SummaryWriter('s3://...'), with the credentials as variables",
    "remote_host": "Put a kubeconfig into a Secret, and give its name as cluster_configuration_secret",
}


@short_refusals
def train_comp(
    train_specification: Callable[..., R] | str,
    train_parameters: Mapping[str, Any] | None = None,
    *,
    train_dataset_dir: str = "",
    validation_dataset_dir: str = "",
    model_dir: str = "",
    model_name: str = "",
    distribution_specification: Mapping[str, Any] | None = None,
    place: Kubernetes | None = None,
    **settings: Any,
) -> Job[R]:
    """Run a function as IBM's component does: as an ordinary job, or with the distribution that a dict describes.

    Args:
        train_specification: The function itself, not its text, which the component takes.
        train_parameters: Its arguments by name. The values `"train_dataset_dir"`, `"validation_dataset_dir"` and
            `"model_dir"` are replaced by the paths below.
        train_dataset_dir: A path in the pods.
        validation_dataset_dir: A path in the pods.
        model_dir: A path in the pods, where the function writes its model.
        model_name: Prefix of the job's name.
        distribution_specification: The dict that `arguments` describes.
        place: Other settings of the pods.
        **settings: Settings of the component: `base_image`, `node_selector`, `namespace`, `pvc_name`, `pvc_size`,
            `train_mount`, `cpus`, `gpus`, `memory`, `cluster_configuration_secret`.

    Returns:
        The job; `job.result()` is what the function returned on rank 0.

    Raises:
        ConfigError: A key or a value is wrong; nothing was started.
        SnapshotError: Something cannot be sent.
        BackendError: The cluster refused.
    """
    if isinstance(train_specification, str):
        remedy = "Pass the function itself, train_comp(train_model, ...), without func_to_component_text"
        raise ConfigError("train_specification", "it is a text", remedy)
    paths = {
        "train_dataset_dir": train_dataset_dir,
        "validation_dataset_dir": validation_dataset_dir,
        "model_dir": model_dir,
    }
    given = dict(train_parameters or {})
    for name, value in given.items():
        if isinstance(value, str) and value in paths:
            if not paths[value]:
                raise ConfigError(
                    "train_parameters", f"{name} is {value!r}, which was not given", f"Add {value}='/path'"
                )
            given[name] = paths[value]
    signatures.check_function(train_specification, (), given, verbs.launch)
    options = arguments(distribution_specification, place=place, **settings)
    if model_name:
        options["name"] = names.make(model_name, time.strftime("%Y%m%d%H%M%S"))
    return verbs.launch(functools.partial(train_specification, **given), **options)


def arguments(
    distribution_specification: Mapping[str, Any] | None = None, *, place: Kubernetes | None = None, **settings: Any
) -> dict[str, Any]:
    """The arguments of `kd.distribute` and `kd.launch` that are equivalent to IBM's dict.

    Args:
        distribution_specification: `distribution_type` (`"Job"`, `"PyTorch"`, `"MPI"` or `"TF"`), `number_of_workers`,
            `worker_cpus`, `worker_memory`, and with MPI `launcher_cpus` and `launcher_memory`. Those of `settings` may
            be in it, too. None: one process in an ordinary job.
        place: Other settings of the pods.
        **settings: `base_image`, `node_selector` (`key: value`, or a dict), `namespace`,
            `cluster_configuration_secret` (a Secret with a kubeconfig), `pvc_name` (mounted at
            `train_mount`, which is `/train`), `pvc_size` (without `pvc_name`: an empty folder of this size in each pod),
            `cpus`, `memory` and `gpus` of each worker.

    Raises:
        ConfigError: A key or a value is wrong.
    """
    given = _checked(distribution_specification, settings)
    kind = _kind(given)
    gpus = _number("gpus", given.get("gpus") or 0, whole(0, remedy="Give the GPUs of each worker"))
    workers = _number("number_of_workers", given.get("number_of_workers", 1), whole())
    per_pod = max(1, gpus)
    settings = {
        "kind": kind,
        "image": given.get("base_image") or None,
        "namespace": given.get("namespace") or None,
        "cluster_secret": given.get("cluster_configuration_secret") or None,
        "node_selector": _selector(given.get("node_selector")),
        "resources": _resources(
            given.get("worker_cpus") or given.get("cpus"), given.get("worker_memory") or given.get("memory"), gpus
        ),
        "processes_per_pod": per_pod if per_pod > 1 else None,
        "volumes": _volumes(given),
    }
    if launcher := {
        ours: given[theirs]
        for ours, theirs in (("cpu", "launcher_cpus"), ("memory", "launcher_memory"))
        if given.get(theirs)
    }:
        if kind != "mpi":
            theirs = "launcher_cpus" if "cpu" in launcher else "launcher_memory"
            raise ConfigError(theirs, f"a job of type {given['distribution_type']} has no launcher", "Leave it out")
        settings["roles"] = {"launcher": launcher}
    settings = {name: value for name, value in settings.items() if value}
    return {
        "number_of_processes": workers * per_pod,
        "cuda": bool(gpus),
        "on": Kubernetes(**settings) if place is None else _merged(place, settings),
    }


# -- inside ----------------------------------------------------------------------------------------------------------


def _checked(specification: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the dict and the keyword settings, and check their names."""
    if specification is not None and not isinstance(specification, Mapping):
        remedy = "Write it as {'distribution_type': 'PyTorch', 'number_of_workers': 2}"
        raise ConfigError("distribution_specification", f"{show(specification)} is not a dict", remedy)
    found: dict[str, Any] = {}
    for name, value in [*(specification or {}).items(), *settings.items()]:
        if name in _NOT_HERE:
            raise ConfigError(name, "it has no equivalent here", _NOT_HERE[name])
        if name not in _KEYS:
            remedy = closest(name, _KEYS).strip() or f"Known are: {', '.join(_KEYS)}"
            raise ConfigError(str(name), "the specification has no such key", remedy)
        if name in found:
            raise ConfigError(name, "it is in the dict and an argument, too", "Leave it out of one of them")
        found[name] = value
    return found


def _kind(given: Mapping[str, Any]) -> str:
    word = given.get("distribution_type", "Job")
    if word not in _KINDS:
        near = next((known for known in _KINDS if str(word).lower().removesuffix("job") == known.lower()), "")
        remedy = f"Did you mean {near!r}?" if near else f"Use one of: {', '.join(map(repr, _KINDS))}"
        raise ConfigError("distribution_type", f"there is no type {show(word)}", remedy)
    return _KINDS[word]


def _number(name: str, value: Any, check: Check) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    check(name, number)
    return int(number)


def _resources(cpus: Any, memory: Any, gpus: int) -> Resources | None:
    """The resources of each process; IBM's are a worker's, which has a process for each of its GPUs."""
    if not cpus and not memory and not gpus:
        return None
    whole = Resources(cpu=cpus or None, memory=memory or None)
    share = max(1, gpus)
    cores = None if whole.cpu is None else whole.cpu / share
    return Resources(
        cpu=cores,
        cpu_limit=cores,
        memory_gib=None if whole.memory_gib is None else whole.memory_gib / share,
        gpus=1 if gpus else None,
    )


def _selector(value: Any) -> dict[str, str] | None:
    if not value or isinstance(value, Mapping):
        return dict(value) if value else None
    key, separator, text = str(value).partition(":")
    if not separator:
        remedy = "Write it as 'nvidia.com/gpu.product: \"Tesla-V100\"', or as a dict"
        raise ConfigError("node_selector", f"{show(value)} is not a key with a value", remedy)
    return {key.strip(): text.strip().strip("\"'")}


def _volumes(given: Mapping[str, Any]) -> list[Volume] | None:
    mount = given.get("train_mount") or "/train"
    if given.get("pvc_name"):
        return [Volume(mount_path=mount, source=given["pvc_name"], kind=VolumeKind.CLAIM)]
    if given.get("pvc_size"):
        size = Resources(memory=given["pvc_size"]).memory_gib
        return [Volume(mount_path=mount, kind=VolumeKind.EMPTY_DIR, size_gib=size)]
    return None


def _merged(place: Kubernetes, settings: Mapping[str, Any]) -> Kubernetes:
    """Merge the dict's settings into a place; a setting in both is an error."""
    for name in settings_of(place):
        if name in settings:
            raise ConfigError("place", f"{name} is in the dict, too", "Leave it out of one of them")
    return dataclasses.replace(place, **settings)
