"""Where a job runs: `Local`, `Docker` and `Kubernetes`, made once in a cell and passed to each call as `on=`. Pure.

They take what is easiest to write (dicts, lists, `"2Gi"`, YAML text), check it, and keep it in one form.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kale_dist.errors import ConfigError
from kale_dist.job.spec import names, volumes
from kale_dist.job.spec.checks import (
    FLAG,
    TEXT,
    Check,
    check_fields,
    keep,
    number,
    one_of,
    pairs,
    setting,
    text,
    texts,
    whole,
)
from kale_dist.job.spec.recipe import Recipe
from kale_dist.job.spec.resources import Resources, resources
from kale_dist.job.spec.volumes import Volume
from kale_dist.wire import encode, fields_of
from kale_dist.wording import closest, install, seconds, show

T = TypeVar("T")
_Pairs = Mapping[str, str] | Sequence[tuple[str, str]] | None

OBJECT_KINDS = ("pytorch", "train", "job", "mpi", "tf")
"""What a job on a cluster can be; `manifests.KINDS` has each of them."""

_OWN_PORTS = range(23456, 23459)
"""Ports that the agents of a job's pods use, from `manifests.settings.PORT` on."""
_OWN_DOMAINS = ("app.kubernetes.io/", "kale-dist.dev/", "training.kubeflow.org/", "kueue.x-k8s.io/queue-name")
TTL_S = 7 * 86400
"""How long an ended job stays on a cluster unless its call gives `ttl_s`."""

PENDING_TIMEOUT_S = 86_400.0
"""A day: what `pending_timeout_s` is unless it is given."""


def _choice(*words: str) -> Check:
    remedy = f"Use one of: {', '.join(map(repr, words))}; or leave it out"
    return text(lambda value: not value or value in words, "it cannot be {}", remedy)


def _whole(least: int, most: int = 2**31 - 1) -> Check:
    return whole(least, most, "Leave it out").or_(None)


_WAIT = number("a number of seconds", "Give 0 or more", may_be_0=True)
_LIST = "['einops==0.8'], or 'auto', or 'here'"
_OBJECT = names.OBJECT_NAME.or_("")
_TAKES_NONE = "It takes none: processes on this machine use its packages, folders and GPUs as they are"


def _remedy(cls: type, name: str, fields: Iterable[str]) -> str:
    example = {"cpu": 2, "memory": "4Gi", "gpus": 1}.get(name)
    if example and "resources" in fields:
        return f"Use resources={ {name: example} }, for each process"
    return closest(name, fields).strip() or f"help(kale_dist.{cls.__name__}) lists its arguments"


def _suggests(cls: type[T]) -> type[T]:
    """Answer arguments that a class does not have with those that were probably meant; show only those that are set."""
    made: Callable[..., None] = cls.__init__

    @functools.wraps(made)
    def checked(self: T, **given: Any) -> None:
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in given:
            if name not in fields:
                remedy = _remedy(cls, name, fields) if fields else _TAKES_NONE
                raise ConfigError(str(name), f"{cls.__name__} has no argument of this name", remedy)
        # None means the same as leaving an argument out, unless it means something itself.
        made(self, **{name: value for name, value in given.items() if value is not None or "None" in fields[name].type})

    def shown(self: T) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return f"{cls.__name__}({', '.join(f'{field.name}={value!r}' for field, value in _set(self, fields))})"

    cls.__init__ = checked  # type: ignore[assignment]
    cls.__repr__ = shown  # type: ignore[assignment]
    return cls


def _set(place: Any, fields: Sequence[dataclasses.Field[Any]]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Fields that differ from their defaults, with their values."""
    for field in fields:
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(place, field.name)
        # The comparison of an array gives no single truth value.
        if type(value) is not type(default) or value != default:
            yield field, value


@_suggests
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """Processes on this machine. They see its folders, packages and GPUs as they are, and share its memory."""


@_suggests
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Docker:
    """A container of a Docker or Podman engine, which has all processes of a job."""

    image: str | Recipe | None = None
    """Any image with PyTorch (the notebook's major version) and this Python's minor version, or a `Recipe` of one, which
    is built if it is not there. None: the configured one."""
    packages: Sequence[str] | None = None
    """What the image is to have beyond that: requirements such as `["einops==0.8"]`, or `"auto"` for the packages that
    the call imports, as they are installed here. `"here"` changes no image: the packages of this Python are sent where the image
    lacks them, `"here: scikit-learn, mine"` these and what they require."""
    requirements: str | pathlib.PurePath | None = None
    """Packages as a requirements file: its path, or its text."""
    resources: Resources = dataclasses.field(default_factory=Resources)
    """What the container gets for each process: `Resources`, or a dict such as `{"cpu": 2, "memory": "4Gi", "gpus": 1}`."""
    keep_warm: str | float | None = None
    """How long the container waits for the next call that fits, such as `"10 min"`; None: it ends with its job."""
    volumes: tuple[Volume, ...] = ()
    """`{"/data": "/home/me/data"}` mounts a folder of this machine, `{"/data": "datasets"}` a volume of the engine; with
    `:ro` at the end they are read-only."""

    if TYPE_CHECKING:
        # What it takes is wider than what it keeps.
        def __init__(
            self,
            *,
            image: str | Recipe | Mapping[str, Any] | None = None,
            packages: Sequence[str] | str | None = None,
            requirements: str | pathlib.PurePath | None = None,
            resources: Resources | Mapping[str, Any] | None = None,
            keep_warm: str | float | None = None,
            volumes: Mapping[str, Any] | Sequence[Volume | Mapping[str, Any]] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        check_fields(self)
        keep(self, **_container_settings(self), volumes=volumes.of_containers(self.volumes))
        if self.resources.extended:
            problem = f"{self.resources.extended[0][0]} cannot be asked of a Docker engine"
            raise ConfigError("resources", problem, "Leave it out, or run on a cluster with on=kd.Kubernetes(...)")


@_suggests
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Where and how pods run."""

    kind: str = setting("", _choice(*OBJECT_KINDS))
    """What the job is on the cluster: `"pytorch"` (PyTorchJob of Kubeflow's Training Operator), `"train"` (TrainJob of
    Kubeflow Trainer v2), `"job"` (a batch Job, which needs no operator), `"mpi"` (MPIJob of the MPI Operator) or `"tf"` (TFJob of
    the Training Operator, for `launch`). Empty: the first of the first three that the cluster serves; where a TrainJob can have all
    that a PyTorchJob has, and the call asks for nothing else, the TrainJob."""
    runtime: str = setting("", names.RUNTIME.or_(""))
    """The runtime of a TrainJob: name of a ClusterTrainingRuntime, or `TrainingRuntime/name` for one of the namespace. Empty:
    `kale-dist` if there is one that `kale-dist runtime` printed, else `torch-distributed`."""
    trainer: str = setting("", _choice("2.1", "2.2", "2.3"))
    """The first version of Kubeflow Trainer whose TrainJobs have the fields that this cluster's have. Empty: what the cluster serves;
    without a cluster `2.3`."""
    runtime_version: int = setting(0, whole(0))
    """The version of `kale-dist runtime` that printed the TrainJob's runtime, 0 for a runtime of others. Looked up where there is a cluster."""
    servers: int = setting(0, _whole(0))
    """Parameter servers of a TFJob, beside the processes of the call."""
    namespace: str = setting("", names.NAMESPACE.or_(""))
    """Namespace of the job. Empty: the configured one, that of the kubeconfig's context, or the notebook's own pod's."""
    context: str = setting("", TEXT)
    """Context of the kubeconfig; empty for its current one."""
    cluster_secret: str = setting("", _OBJECT)
    """Name of a Secret in your own namespace that holds the kubeconfig of another cluster, where the job then runs."""
    roles: str = ""
    """Resources by role, over those of `resources`: `{"worker": {"gpus": 1}}`. A PyTorchJob has `master` and `worker`; kinds
    whose pods are all alike have none. Kept as JSON."""
    master: bool | None = setting(None, FLAG.or_(None))
    """One master and workers, or workers only. None: with a master, unless the namespace forbids what it needs."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of the job and its pods: `{"team": "vision"}`. Annotations and the node selector are written in the same way."""
    annotations: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: str = ""
    """A list as in a pod, or its YAML: `[{"key": "gpu", "operator": "Exists"}]`. Kept as JSON, as are the next one and
    `patch`."""
    affinity: str = ""
    """A dict as in a pod, or its YAML."""
    priority_class: str = setting("", _OBJECT)
    runtime_class: str = setting("", _OBJECT)
    """How pods are run: `nvidia` where GPUs need it."""
    service_account: str = setting("", _OBJECT)
    mount_service_account_token: bool = setting(False, FLAG)  # noqa: FBT003 - a default
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets with which images are pulled, or one name."""
    image_pull_policy: str = setting("", _choice("Always", "IfNotPresent", "Never"))
    scheduler_name: str = setting("", _OBJECT)
    queue: str = setting("", _OBJECT)
    """Kueue's local queue."""
    gang: bool = setting(False, FLAG)  # noqa: FBT003 - a default
    """Whether all pods are scheduled together or none is."""
    min_available: int | None = setting(None, _whole(1))
    """How many pods have to be there before any starts, with `gang`; None for all."""
    secret_environment: tuple[tuple[str, str, str], ...] = ()
    """Variables whose values come from Secrets: `{"VARIABLE": "secret/key"}`."""
    run_as_user: int | None = setting(None, _whole(-1))
    """User and group of the processes; None: the notebook pod's own in a pod, else 1000. -1: left to the cluster."""
    ttl_s: int | None = setting(TTL_S, _whole(0))
    """Seconds after its end when the cluster deletes the job with its pods, their logs and its Secret (snapshot and key); None
    for never. What this machine has fetched and what is in a store stays. TrainJobs have none."""
    pending_timeout_s: float | None = setting(
        PENDING_TIMEOUT_S, number("a number of seconds", "Give seconds, or None for no limit").or_(None)
    )
    """Seconds from submission after which a job that has not started fails; None for never. Left out, that is a day, and 5
    minutes if it waits for what only a person can mend, such as an image that does not exist."""
    wait_for_nodes: bool = setting(False, FLAG)  # noqa: FBT003 - a default
    """Whether to submit a job that no node of today could ever run: an autoscaler or a person will add nodes."""
    input_wait_s: float = setting(600.0, _WAIT)
    collect_wait_s: float = setting(600.0, _WAIT)
    metrics_port: int | None = setting(None, _whole(1024, 65535))
    """Port of the first pod at which Prometheus finds `/metrics`, such as 9090, with the usual `prometheus.io/` annotations; None for none."""
    network_policy: bool | None = setting(None, FLAG.or_(None))
    """Whether a NetworkPolicy lets only the job's own pods, and Prometheus at `metrics_port`, connect to its pods. None: if you may
    make one. True: the call is refused if you may not. False: for ports that your code opens to others."""
    patch: str = ""
    """A dict that is merged into the object strategically, as `kubectl patch` does it. Applied last."""

    def __post_init__(self) -> None:
        keep(
            self,
            labels=_pairs("labels", self.labels),
            annotations=_pairs("annotations", self.annotations),
            node_selector=_pairs("node_selector", self.node_selector),
            tolerations=_json("tolerations", self.tolerations, is_list=True),
            affinity=_json("affinity", self.affinity),
            patch=_json("patch", self.patch),
            roles=_roles(self.roles),
            image_pull_secrets=_secrets(self.image_pull_secrets),
            secret_environment=_secret_environment(self.secret_environment),
        )
        check_fields(self)
        if self.runtime and self.kind not in ("", "train"):
            raise ConfigError("runtime", f"kind={self.kind!r} has no runtimes", "Leave it out, or give kind='train'")
        if self.servers and self.kind != "tf":
            problem = "parameter servers are TensorFlow's, and this job is not a TFJob"
            raise ConfigError("servers", problem, "Add kind='tf', or leave `servers` out")
        if self.metrics_port in _OWN_PORTS:
            remedy = "Give a port such as 9090, or leave it out"
            raise ConfigError("metrics_port", f"{self.metrics_port} is a port of the job's own", remedy)
        if self.min_available is not None and not self.gang:
            raise ConfigError("min_available", "it means nothing without `gang`", "Set `gang`, or leave it out")


@_suggests
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Kubernetes(ClusterOptions):
    """Pods of a cluster, as a Kubeflow PyTorchJob or another kind of object. Beside the following it takes all of `ClusterOptions`."""

    image: str | Recipe | None = None
    """The pods' image, given as for `Docker`. None: the configured one, else that of the notebook's own pod."""
    packages: Sequence[str] | None = None
    """Packages added to the image, as for `Docker`."""
    requirements: str | pathlib.PurePath | None = None
    """Packages as a requirements file, as for `Docker`."""
    resources: Resources = dataclasses.field(default_factory=Resources)
    """What each process asks for: `Resources`, or a dict such as `{"cpu": 2, "memory": "4Gi", "gpus": 1, "rdma/hca": 1}`."""
    processes_per_pod: int | None = setting(None, whole(1).or_(None))
    """Processes in one pod; None for 1."""
    keep_warm: str | float | None = None
    """How long the pods wait for the next call that fits, such as `"10 min"`; None: they end with their job."""
    volumes: tuple[Volume, ...] = ()
    """`{"/data": "claim"}`, or `"pvc://claim/folder"`, `"hostpath:///folder"`, `"configmap://name"`, `"secret://name"`,
    `"emptydir://"`, read-only with `":ro"` at the end; or a list of `Volume` objects."""
    store: str = ""
    """Where snapshots, checkpoints and results are stored that do not fit into the request: `"pvc://claim/folder"`, or a
    URL that fsspec opens. Empty: the notebook sends and fetches them itself."""

    if TYPE_CHECKING:
        # What it takes is wider than what it keeps.
        def __init__(
            self,
            *,
            image: str | Recipe | Mapping[str, Any] | None = None,
            packages: Sequence[str] | str | None = None,
            requirements: str | pathlib.PurePath | None = None,
            resources: Resources | Mapping[str, Any] | None = None,
            processes_per_pod: int | None = None,
            keep_warm: str | float | None = None,
            volumes: Mapping[str, Any] | Sequence[Volume | Mapping[str, Any]] | None = None,
            store: str | None = None,
            kind: str | None = None,
            runtime: str | None = None,
            trainer: str | None = None,
            runtime_version: int = 0,
            servers: int = 0,
            namespace: str | None = None,
            context: str | None = None,
            cluster_secret: str | None = None,
            roles: Mapping[str, Resources | Mapping[str, Any]] | None = None,
            master: bool | None = None,
            labels: _Pairs = (),
            annotations: _Pairs = (),
            node_selector: _Pairs = (),
            tolerations: Sequence[Mapping[str, Any]] | Mapping[str, Any] | str | None = None,
            affinity: Mapping[str, Any] | str | None = None,
            priority_class: str | None = None,
            runtime_class: str | None = None,
            service_account: str | None = None,
            mount_service_account_token: bool = False,
            image_pull_secrets: Sequence[str] | str = (),
            image_pull_policy: str | None = None,
            scheduler_name: str | None = None,
            queue: str | None = None,
            gang: bool = False,
            min_available: int | None = None,
            secret_environment: Mapping[str, str] | Sequence[tuple[str, str, str]] = (),
            run_as_user: int | None = None,
            ttl_s: int | None = ...,
            pending_timeout_s: float | None = ...,
            wait_for_nodes: bool = False,
            input_wait_s: float = ...,
            collect_wait_s: float = ...,
            metrics_port: int | None = None,
            network_policy: bool | None = None,
            patch: Mapping[str, Any] | str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        ClusterOptions.__post_init__(self)
        for field in ("labels", "annotations"):
            for key, _ in getattr(self, field):
                if key.startswith(_OWN_DOMAINS):
                    remedy = "Use `queue`" if key.startswith("kueue") else "Use another key"
                    raise ConfigError(field, f"{key} is set by kale_dist", remedy)
        keep(
            self, **_container_settings(self), volumes=volumes.of_pods(self.volumes),
            store=names.check_store("store", self.store),
        )  # fmt: skip
        if self.keep_warm is not None and self.kind in ("mpi", "tf"):
            problem = f"pods of kind={self.kind!r} run one job, because its processes connect to each other outside of kale_dist"
            raise ConfigError("keep_warm", problem, "Leave it out, or leave `kind` out")

    @property
    def options(self) -> ClusterOptions:
        """The part of it that a `JobSpec` keeps together."""
        return ClusterOptions(**fields_of(self, ClusterOptions))


Place = Local | Docker | Kubernetes
"""What `on=` takes beside the words for them."""

KINDS: Mapping[str, type[Place]] = {"local": Local, "docker": Docker, "kubernetes": Kubernetes}
"""The words that `on=` takes for a place."""


def settings_of(place: Place) -> dict[str, Any]:
    """What is set of a place: name to value."""
    return {field.name: value for field, value in _set(place, dataclasses.fields(place))}


def word_of(place: Place) -> str:
    """`local`, `docker` or `kubernetes`."""
    return next(word for word, kind in KINDS.items() if type(place) is kind)


def filled(place: T, configured: T) -> T:
    """A place whose unset settings are those of a configured one of its kind."""
    fields = dataclasses.fields(place)  # type: ignore[arg-type]
    mine = {field.name for field, _ in _set(place, fields)}
    changes = {field.name: value for field, value in _set(configured, fields) if field.name not in mine}
    return dataclasses.replace(place, **changes) if changes else place  # type: ignore[type-var]


# -- one form --------------------------------------------------------------------------------------------------------


def _container_settings(place: Docker | Kubernetes) -> dict[str, Any]:
    """What containers of either kind have, in one form."""
    packages, warm_s = place.packages, seconds(place.keep_warm)
    if place.keep_warm is not None and not (warm_s and warm_s > 0):
        remedy = "Give how long they wait for the next call, such as '10 min', or leave it out"
        raise ConfigError("keep_warm", f"{show(place.keep_warm)} is not a time", remedy)
    return {
        "image": image_of(place.image),
        "packages": packages if packages is None or isinstance(packages, str) else texts("packages", packages, _LIST),
        "resources": resources(place.resources),
        "keep_warm": warm_s,
    }


def image_of(value: Any) -> str | Recipe | None:
    """An image's reference, or a recipe from one or from a dict of its arguments."""
    if value is None or isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        of_recipes = one_of([field.name for field in dataclasses.fields(Recipe)], "a recipe has no {}")
        for name in value:
            of_recipes("image", name)
        return Recipe(**value)
    if isinstance(value, str):
        return names.check_image("image", value)
    remedy = "Write it as 'registry.example.com/team/train:1' or as kale_dist.Recipe(packages=[...])"
    raise ConfigError("image", f"{show(value)} is neither text nor a Recipe", remedy)


def _pairs(field: str, given: Any) -> tuple[tuple[str, str], ...]:
    """Keys and values of labels, annotations or a node selector, from a dict or from pairs."""
    of_labels = () if field == "annotations" else (names.LABEL_VALUE,)
    return tuple(sorted(pairs(field, given, "{'key': 'value'}", names.KEY, *of_labels)))


def _roles(given: Any) -> str:
    """Resources by role as JSON: of each role only what is set."""
    if isinstance(given, str):
        # As it is kept.
        with contextlib.suppress(ValueError, AttributeError):
            if not given or all(isinstance(one, dict) for one in json.loads(given).values()):
                return given
    if not isinstance(given, Mapping) or not all(isinstance(role, str) for role in given):
        raise ConfigError("roles", f"{show(given)} is not a dict", "Write it as {'worker': {'memory': '4Gi'}}")
    checked = {}
    for role, value in given.items():
        try:
            checked[role] = encode(resources(value))
        except ConfigError as error:
            raise ConfigError(error.argument.replace("resources", f"roles.{role}", 1), *error.args[1:]) from None
    return json.dumps(checked, sort_keys=True, separators=(",", ":")) if checked else ""


def _secrets(given: Any) -> tuple[str, ...]:
    listed = texts("image_pull_secrets", (given,) if isinstance(given, str) else given, "['secret']")
    for secret in listed:
        names.OBJECT_NAME("image_pull_secrets", secret)
    return listed


def _secret_environment(given: Any) -> tuple[tuple[str, str, str], ...]:
    """Variable, Secret and key, from a dict or from these."""
    if isinstance(given, list | tuple):
        given = [(one[0], "/".join(map(str, one[1:]))) if isinstance(one, list | tuple) else one for one in given]
    example = "{'VARIABLE': 'secret/key'}"
    named = pairs("secret_environment", given, example, names.VARIABLE, names.SECRET_KEY)
    parts = ((variable, value.partition("/")) for variable, value in named)
    return tuple(sorted((variable, secret, key) for variable, (secret, _, key) in parts))


def _json(field: str, given: Any, *, is_list: bool = False) -> str:
    """A dict, or a list of dicts, as JSON with sorted keys; from these, or from JSON or YAML text."""
    if given is None or (isinstance(given, str) and not given):
        return ""
    if isinstance(given, str):
        given = _parsed(field, given)
    if is_list and isinstance(given, Mapping):
        given = [given]
    if is_list and not (isinstance(given, list | tuple) and all(isinstance(item, Mapping) for item in given)):
        remedy = "Write it as [{'key': 'gpu', 'operator': 'Exists'}]"
        raise ConfigError(field, f"{show(given)} is not a list of dicts", remedy)
    if not is_list and not isinstance(given, Mapping):
        raise ConfigError(field, f"{show(given)} is not a dict", "Write it as in a pod's YAML")
    try:
        return json.dumps(given, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        remedy = "Use dicts, lists, text, numbers, True, False and None"
        raise ConfigError(field, f"it cannot be written as JSON: {error}", remedy) from None


def _parsed(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        import yaml

        return yaml.safe_load(text)
    except ModuleNotFoundError:
        remedy = f"Give a dict or a list, or {install('kubernetes')}"
        raise ConfigError(field, "to read it as text needs the package PyYAML", remedy) from None
    except yaml.YAMLError as error:
        problem = f"it cannot be read as YAML: {' '.join(str(error).split())}"
        raise ConfigError(field, problem, "Give a dict or a list") from None
