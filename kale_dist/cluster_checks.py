"""Arguments of a call that are about containers and clusters, as users write them, checked and in one form. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kale_dist import names
from kale_dist.errors import ConfigError
from kale_dist.manifests import PodSettings, pod_names, pytorch_job
from kale_dist.manifests.quantities import cores, memory_gib
from kale_dist.spec import ClusterOptions, JobSpec, Resources
from kale_dist.wording import closest, shorten, show

_MADE_UP = "xxxxx"
_OWN_DOMAINS = ("app.kubernetes.io/", "kale-dist.dev/", "training.kubeflow.org/", "kueue.x-k8s.io/queue-name")
_PAIRS = ("labels", "annotations", "node_selector")
_JSON = ("tolerations", "affinity", "patch")
_FLAGS = ("gang", "mount_service_account_token")
_TEXTS = ("namespace", "context", "priority_class", "service_account", "image_pull_policy", "scheduler", "queue")
_MAX_IMAGE_LENGTH = 511
_CLUSTER_ONLY = {
    "cluster": 'Leave it out, or run on a cluster with on="kubernetes"',
    "store": "Leave it out: bytes travel by the engine, and results stay in the containers until the job is deleted",
}
"""Arguments that only a cluster understands, and what to do instead."""


def resources(value: Any) -> Resources:
    """What a rank asks for, from a `Resources` or a dict of its fields.

    In a dict, other resources stand beside the fields, by the names that the cluster gives them (`{"rdma/hca": 1}`).
    Numbers have the unit of their field's name; quantities of Kubernetes are taken as `memory="2Gi"`, `shm="512Mi"`
    and `cpu="500m"`. A unit of which it is not clear what is meant (`"2 GB"`) is refused.

    Raises:
        ConfigError: A field or its value is wrong.
    """
    if value is None:
        return Resources()
    if isinstance(value, Resources):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError("resources", f"{show(value)} is not a dict", "Write it as {'cpu': 2, 'memory_gib': 4}")
    fields = [field.name for field in dataclasses.fields(Resources) if field.name != "extended"]
    found: dict[str, Any] = {}
    extended: dict[str, str] = {}
    gpu_resource = value.get("gpu_resource", Resources().gpu_resource)
    for key, given in value.items():
        if key in ("memory", "shm"):
            _set_once(found, f"{key}_gib", _quantity(key, given))
        elif key in ("cpu", "cpu_limit") and isinstance(given, str):
            _set_once(found, key, _quantity(key, given))
        elif key in fields:
            _set_once(found, key, given)
        elif key == gpu_resource:
            _set_once(found, "gpus", given)
        elif isinstance(key, str) and "/" in key:
            whole = isinstance(given, int) and not isinstance(given, bool)
            extended[key] = str(given) if whole else given
        else:
            known = ", ".join(fields)
            near = closest(key, fields)
            remedy = f"{near}Use {known}, or a name of the cluster such as 'rdma/hca'"
            raise ConfigError("resources", f"there is no resource {show(key)}", remedy)
    return Resources(**found, extended=tuple(sorted(extended.items())))


def cluster_options(value: Any) -> ClusterOptions:
    """Where and how pods run, from a `ClusterOptions` or a dict of its fields.

    In a dict, pairs are dicts, `tolerations`, `affinity` and `patch` are lists, dicts or YAML text, and
    `secret_environment` is `{"VARIABLE": "secret/key"}`.

    Raises:
        ConfigError: A field or its value is wrong.
    """
    if value is None:
        return ClusterOptions()
    if isinstance(value, ClusterOptions):
        options = value
    elif isinstance(value, Mapping):
        fields = [field.name for field in dataclasses.fields(ClusterOptions)]
        for key in value:
            if key not in fields:
                remedy = f"{closest(key, fields)}Use one of: {', '.join(fields)}"
                raise ConfigError("cluster", f"there is no option {show(key)}", remedy)
        options = ClusterOptions(**{key: _option(key, given) for key, given in value.items() if given is not None})
    else:
        raise ConfigError("cluster", f"{show(value)} is not a dict", "Write it as {'namespace': 'team-a'}")
    for field in ("labels", "annotations"):
        for key, _ in getattr(options, field):
            if key.startswith(_OWN_DOMAINS):
                remedy = "Use `queue`" if key.startswith("kueue") else "Use another key"
                raise ConfigError(f"cluster.{field}", f"{key} is set by kale_dist", remedy)
    return options


def image(value: Any) -> str:
    """An image's reference; empty for None.

    Raises:
        ConfigError: This is no reference.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError("image", f"{show(value)} is not text", "Write it as 'registry.example.com/team/train:1'")
    if names.is_image(value) and len(value) <= _MAX_IMAGE_LENGTH:
        return value
    remedy = "Write it as 'registry.example.com/team/train:1'"
    bare = re.sub(r"^[a-z-]+://", "", value.strip())
    for better in (bare, bare.lower()):
        if better != value and names.is_image(better):
            remedy = f"Write {better!r}"
            break
    raise ConfigError("image", f"{shorten(value)} is not an image's reference", remedy)


def check_fits(spec: JobSpec) -> None:
    """Make the manifest of a job that is not complete yet, so that a wrong patch costs nothing.

    Raises:
        ConfigError: Names of pods get too long, variables are given twice, GPUs are missing, or the patch cannot be
            applied.
    """
    longest = max(pod_names(spec, master=True), key=len)
    if len(longest) > names.MAX_LABEL_LENGTH:
        problem = f"the pod's name {longest!r} has {len(longest)} characters, more than {names.MAX_LABEL_LENGTH}"
        raise ConfigError("name", problem, "Shorten the name")
    variables = [variable for variable, _ in spec.environment]
    variables += [variable for variable, _, _ in spec.cluster.secret_environment]
    for variable in variables:
        if variables.count(variable) > 1:
            problem = f"{variable} is in `environment`, too"
            raise ConfigError("cluster.secret_environment", problem, "Leave it out of one of them")
    if spec.cuda and spec.resources.gpus == 0:
        raise ConfigError("resources.gpus", "0, and cuda=True needs one for each process", "Give 1, or leave it out")
    master = True if spec.cluster.master is None else spec.cluster.master
    pytorch_job(
        spec, PodSettings(namespace=spec.cluster.namespace or _MADE_UP, image=spec.image or _MADE_UP, master=master)
    )


def check_docker(given: Mapping[str, Any]) -> None:
    """Refuse what a Docker engine has nothing of.

    Args:
        given: The call's arguments by name.

    Raises:
        ConfigError: The first one that only a cluster understands.
    """
    for argument, remedy in _CLUSTER_ONLY.items():
        if given[argument] is not None:
            raise ConfigError(argument, f"{show(given[argument])} means nothing to a Docker engine", remedy)
    asked = resources(given["resources"])
    if asked.extended:
        problem = f"{asked.extended[0][0]} cannot be asked of a Docker engine"
        raise ConfigError("resources", problem, 'Leave it out, or run on a cluster with on="kubernetes"')
    if given["cuda"] is True and asked.gpus == 0:
        raise ConfigError("resources.gpus", "0, and cuda=True needs one for each process", "Give 1, or leave it out")


def _set_once(found: dict[str, Any], field: str, value: Any) -> None:
    if field in found:
        raise ConfigError(f"resources.{field}", "it is given twice", "Leave one of the two out")
    found[field] = value


def _quantity(key: str, given: Any) -> float:
    """Cores or GiB of a text; memory without a unit is refused, because people mean GiB and Kubernetes bytes."""
    memory = key in ("memory", "shm")
    if not isinstance(given, str) or (memory and given.strip().isdecimal()):
        remedy = f"Write it with its unit, such as '2Gi', or as {key}_gib=2"
        raise ConfigError(f"resources.{key}", f"the unit of {show(given)} is not said", remedy)
    try:
        return memory_gib(given) if memory else cores(given)
    except ValueError as error:
        raise ConfigError(f"resources.{key}", f"{show(given)} is not a quantity", str(error)) from None


def _option(key: str, given: Any) -> Any:
    """One field of `ClusterOptions` in its own form."""
    argument = f"cluster.{key}"
    if key in _PAIRS or key == "secret_environment":
        if not isinstance(given, Mapping):
            example = "{'VARIABLE': 'secret/key'}" if key == "secret_environment" else "{'key': 'value'}"
            raise ConfigError(argument, f"{show(given)} is not a dict", f"Write it as {example}")
        if key in _PAIRS:
            return tuple(sorted(given.items(), key=str))
        for value in given.values():
            if not isinstance(value, str) or value.count("/") != 1:
                raise ConfigError(argument, f"{show(value)} names no key of a Secret", "Write it as 'secret/key'")
        return tuple(sorted((name, *value.split("/")) for name, value in given.items()))
    if key in _JSON:
        return _canonical(key, given)
    if key == "image_pull_secrets":
        listed = (given,) if isinstance(given, str) else given
        if not isinstance(listed, Sequence):
            raise ConfigError(argument, f"{show(given)} is not a list", "Write it as ['secret']")
        return tuple(listed)
    if key in _TEXTS and not isinstance(given, str):
        raise ConfigError(argument, f"{show(given)} is not text", f"Write {str(given)!r}, if that is its name")
    if (key in _FLAGS or key == "master") and not isinstance(given, bool):
        raise ConfigError(argument, f"{show(given)} is neither True nor False", "Give a bool")
    return given


def _canonical(key: str, given: Any) -> str:
    """Dicts, lists or YAML text as JSON with sorted keys."""
    argument = f"cluster.{key}"
    if isinstance(given, str):
        try:
            import yaml

            given = yaml.safe_load(given)
        except ModuleNotFoundError:
            problem = "to read it as text needs the package PyYAML"
            raise ConfigError(
                argument, problem, "Give a dict or a list, or pip install 'kale-dist[kubernetes]'"
            ) from None
        except yaml.YAMLError as error:
            problem = f"it cannot be read as YAML: {' '.join(str(error).split())}"
            raise ConfigError(argument, problem, "Give a dict or a list") from None
    if key == "tolerations" and isinstance(given, Mapping):
        given = [given]
    wanted, what = {
        "tolerations": ((list, tuple), "list"), "affinity": ((Mapping,), "dict"), "patch": ((list, tuple, Mapping), "dict or a list")
    }[key]  # fmt: skip
    if not isinstance(given, wanted):
        raise ConfigError(argument, f"{show(given)} is not a {what}", "Write it as in a pod's YAML")
    if key == "tolerations" and not all(isinstance(item, Mapping) for item in given):
        raise ConfigError(
            argument, f"{show(given)} is not a list of dicts", "Write it as [{'key': 'gpu', 'operator': 'Exists'}]"
        )
    try:
        return json.dumps(given, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        problem = f"it cannot be written as JSON: {error}"
        raise ConfigError(argument, problem, "Use dicts, lists, text, numbers, True, False and None") from None
