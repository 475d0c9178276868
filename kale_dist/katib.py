"""A sweep as a Katib Experiment: what Katib calls things, the Secret with the call, and what a trial's pod runs.

    python -m kale_dist.katib FILE SNAPSHOT        in the pod, with the parameters in KALE_DIST_PARAMETERS

The pod makes the call with the parameters that Katib has chosen, prints the job's log, and a line for each value of the
metric as Katib's collector reads it: `2026-01-01T00:00:00Z kale-eval-accuracy=0.93`.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import json
import math
import os
import pathlib
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kale_dist import blobs, kfp
from kale_dist.errors import ConfigError
from kale_dist.manifests.pod_template import CONTAINER_SECURITY, identity_of, pod_security
from kale_dist.manifests.settings import INPUT_BYTES
from kale_dist.manifests.yaml_text import to_yaml
from kale_dist.resources import resources as resources_of
from kale_dist.runtime import loading
from kale_dist.snapshot.capture import capture
from kale_dist.status import JobStatus, values_of

if TYPE_CHECKING:
    import optuna

VARIABLE = "KALE_DIST_PARAMETERS"
_MOUNT, _FILE = "/kale-dist", "call.zip"
_CONTAINER = "trial"
_MAX_VALUES = 1000
_ALGORITHMS = {"RandomSampler": "random", "GridSampler": "grid", "CmaEsSampler": "cmaes", "QMCSampler": "sobol"}
_TPE = {False: "tpe", True: "multivariate-tpe"}
_SIMPLE = re.compile(r"[^\s\"\\$](?:[^\"\\$\x00-\x1f\x7f]*[^\s\"\\$\x00-\x1f\x7f])?")
"""Texts that stay what they are in the template, which is JSON, and in a variable of Kubernetes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What a sweep searches, and how."""

    name: str
    metric: str
    direction: str
    trials: int
    parallel: int
    failures: int
    """The Experiment fails after so many failed trials."""
    distributions: Mapping[str, optuna.distributions.BaseDistribution]
    """What each trial asks for."""
    sampler: optuna.samplers.BaseSampler
    pruner: optuna.pruners.BasePruner


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Parameter:
    """A parameter as Katib has it."""

    type: str
    space: dict[str, Any]
    read: Callable[[str], Any] | dict[str, Any]
    """Its value from Katib's text: a number's type, or each text's value."""


def distributions_of(trials: Sequence[optuna.trial.FrozenTrial]) -> dict[str, optuna.distributions.BaseDistribution]:
    """What all of these trials have asked for.

    Args:
        trials: Those whose call has returned.

    Raises:
        ConfigError: There is none, or they differ.
    """
    if not trials:
        problem = "no trial has begun yet, and only a trial asks for parameters"
        raise ConfigError("sweep", problem, "Export it once `sweep.trials` has a trial with a job")
    first = trials[0]
    for other in trials:
        for name in {**first.distributions, **other.distributions}:
            if first.distributions.get(name) != other.distributions.get(name):
                problem = f"trials {first.number} and {other.number} did not ask for the same {name!r}"
                remedy = (
                    "Ask for all parameters in every trial, with the same limits: Katib's spaces have no conditions"
                )
                raise ConfigError("sweep", problem, remedy)
    return dict(first.distributions)


def export(
    call: Callable[..., Any],
    search: Search,
    *,
    image: str,
    namespace: str | None,
    service_account: str | None,
    resources: Any,
) -> str:
    """The Experiment and the Secret with its call, as YAML. `Sweep.to_katib` says what the arguments are.

    Raises:
        ConfigError: Katib cannot search so, or the call is too large.
        NotSerializableError: The call cannot be sent.
    """
    if not isinstance(image, str) or not image:
        raise ConfigError(
            "image", f"{image!r} is not the name of an image", "Name one with torch, kale-dist and Optuna"
        )
    asked = resources_of(resources).of_container()
    parameters = _parameters(search)
    algorithm = _algorithm(search, parameters)
    stopping = _early_stopping(search.pruner)
    store = blobs.MemoryStore()
    readers = {name: parameter.read for name, parameter in parameters.items()}
    label = getattr(call, "__name__", "call")
    snapshot = capture(call, (search.metric, readers), {}, store=store, label=label).snapshot
    packed = blobs.pack_blobs(store, snapshot.blobs)
    if len(packed) > INPUT_BYTES:
        problem = f"with all that it uses it takes {len(packed):,} bytes, and a Secret has room for {INPUT_BYTES:,}"
        raise ConfigError("call", problem, "Make or load its data inside the call, not before")
    place = {"namespace": namespace} if namespace else {}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{search.name}-call", **place},
        "type": "Opaque",
        "immutable": True,
        "data": {_FILE: base64.b64encode(packed).decode()},
    }
    container = {
        "name": _CONTAINER,
        "image": image,
        # Katib's collector joins these words with spaces into a line for a shell.
        "command": ["python", "-m", "kale_dist.katib", f"{_MOUNT}/{_FILE}", snapshot.digest],
        "env": [
            *({"name": name, "value": value} for name, value in identity_of("/tmp").items()),  # noqa: S108 - in the pod
            {"name": VARIABLE, "value": json.dumps({name: f"${{trialParameters.{name}}}" for name in parameters})},
        ],
        **({"resources": asked} if asked else {}),
        "volumeMounts": [{"name": "call", "mountPath": _MOUNT, "readOnly": True}],
        "securityContext": CONTAINER_SECURITY,
    }
    pod = {
        "restartPolicy": "Never",
        **({"serviceAccountName": service_account} if service_account else {}),
        "securityContext": pod_security(None),
        "containers": [container],
        "volumes": [{"name": "call", "secret": {"secretName": f"{search.name}-call"}}],
    }
    metric = _metric(search.metric)
    trials = search.trials
    if algorithm == "grid":
        # Katib refuses more trials than there are combinations.
        trials = min(trials, math.prod(len(one.space["list"]) for one in parameters.values()))
    experiment = {
        "apiVersion": "kubeflow.org/v1beta1",
        "kind": "Experiment",
        "metadata": {"name": search.name, **place},
        "spec": {
            "objective": {
                "type": search.direction,
                "objectiveMetricName": metric,
                "metricStrategies": [{"name": metric, "value": "latest"}],
            },
            "algorithm": {"algorithmName": algorithm},
            **stopping,
            "maxTrialCount": trials,
            "parallelTrialCount": min(search.parallel, trials),
            "maxFailedTrialCount": min(search.failures, trials),
            "parameters": [
                {"name": name, "parameterType": one.type, "feasibleSpace": one.space}
                for name, one in parameters.items()
            ],
            "metricsCollectorSpec": {"collector": {"kind": "StdOut"}},
            "trialTemplate": {
                "primaryContainerName": _CONTAINER,
                "trialParameters": [{"name": name, "reference": name} for name in parameters],
                "trialSpec": {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "spec": {
                        "backoffLimit": 0,
                        # A proxy beside the trial would keep the pod from ending.
                        "template": {"metadata": {"labels": {"sidecar.istio.io/inject": "false"}}, "spec": pod},
                    },
                },
            },
        },
    }
    return to_yaml(secret, experiment)


def _metric(name: str) -> str:
    """The metric's name as the collector finds it, which takes letters, digits, `_` and `-` for a name.

    The collector reads the whole log, in which a rank may print `loss=0.5` of its own.
    """
    return "kale-" + re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def _algorithm(search: Search, parameters: Mapping[str, _Parameter]) -> str:
    """Katib's name of the sampler."""
    kind = type(search.sampler).__name__
    found = _TPE[bool(search.sampler._multivariate)] if kind == "TPESampler" else _ALGORITHMS.get(kind)  # type: ignore[attr-defined] # noqa: SLF001 - there is no other way to ask
    if found is None:
        remedy = f"Use one of these samplers of Optuna's, which Katib has: TPESampler, {', '.join(_ALGORITHMS)}"
        raise ConfigError("sampler", f"Katib has nothing like {kind}", remedy)
    if found == "cmaes" and any(
        one.type not in ("double", "int") or "distribution" in one.space for one in parameters.values()
    ):
        problem = "Katib's CMA-ES wants numbers without a step and without a logarithmic scale"
        raise ConfigError("sampler", problem, "Use optuna.samplers.TPESampler")
    if found == "cmaes" and len(parameters) == 1:
        raise ConfigError("sampler", "Katib's CMA-ES wants more than one parameter", "Use optuna.samplers.TPESampler")
    return found


def _early_stopping(pruner: optuna.pruners.BasePruner) -> dict[str, Any]:
    """Katib's rule that comes nearest to a pruner."""
    kind = type(pruner).__name__
    if kind == "NopPruner":
        return {}
    if kind != "MedianPruner":
        remedy = "Use optuna.pruners.MedianPruner, or NopPruner for none"
        raise ConfigError("pruner", f"Katib has nothing like {kind}", remedy)
    inner: Any = pruner
    settings = {"min_trials_required": max(1, inner._n_startup_trials), "start_step": inner._n_warmup_steps + 1}  # noqa: SLF001 - likewise
    listed = [{"name": name, "value": str(value)} for name, value in settings.items()]
    return {"earlyStopping": {"algorithmName": "medianstop", "algorithmSettings": listed}}


def _parameters(search: Search) -> dict[str, _Parameter]:
    """The search space."""
    is_grid = type(search.sampler).__name__ == "GridSampler"
    grid: dict[str, Sequence[Any]] = search.sampler._search_space if is_grid else {}  # type: ignore[attr-defined] # noqa: SLF001 - likewise
    found = {}
    for name, distribution in search.distributions.items():
        if not re.fullmatch(r"[\w./ -]+", name, re.ASCII):
            problem = f"a parameter of Katib's cannot be called {name!r}"
            raise ConfigError("sweep", problem, "Use letters, digits, _ and -")
        found[name] = _parameter(name, distribution, grid.get(name))
    if not found:
        raise ConfigError("sweep", "its trials ask for no parameter", "Ask for one, as with trial.suggest_float")
    return found


def _parameter(name: str, distribution: Any, grid: Sequence[Any] | None) -> _Parameter:
    if hasattr(distribution, "choices"):
        choices = distribution.choices if grid is None else grid
        texts = {str(choice): choice for choice in choices}
        if len(texts) < len(choices) or not all(map(_SIMPLE.fullmatch, texts)):
            problem = f"Katib's choices are plain texts, and those of {name!r} are {choices!r}"
            remedy = 'Choose among different texts without quotes, backslashes and "$", and look the value up in a dict'
            raise ConfigError("sweep", problem, remedy)
        return _Parameter(type="categorical", space={"list": list(texts)}, read=texts)
    read = int if isinstance(distribution.low, int) else float
    values = grid
    if values is None and distribution.step not in (None, 1 if read is int else None):
        # Most of Katib's algorithms pass over a step.
        low, high, step = map(_exact, (distribution.low, distribution.high, distribution.step))
        count = int((high - low) // step) + 1
        if count > _MAX_VALUES:
            remedy = f"Take a larger step, or none: up to {_MAX_VALUES} values can be listed"
            raise ConfigError("sweep", f"{name!r} has {count:,} values, and Katib passes over steps", remedy)
        values = [low + index * step for index in range(count)]
    if values is not None:
        return _Parameter(type="discrete", space={"list": [_number(value) for value in values]}, read=read)
    limits = {"min": _number(distribution.low), "max": _number(distribution.high)}
    scale = {"distribution": "logUniform"} if distribution.log else {}
    return _Parameter(
        type="int" if read is int else "double", space={**limits, **scale}, read=_whole if read is int else read
    )


def _whole(text: str) -> int:
    """An int that some of Katib's algorithms write as `3.0`."""
    return int(float(text))


def _number(value: float | decimal.Decimal) -> str:
    """All digits and no exponent, which older collectors of Katib's do not read."""
    return format(_exact(value), "f")


def _exact(value: float | decimal.Decimal) -> decimal.Decimal:
    """The number that people see: 0.9, and not 0.8999999999999999."""
    return value if isinstance(value, decimal.Decimal) else decimal.Decimal(str(value))


# -- in the trial's pod ----------------------------------------------------------------------------------------------


def run(file: str, digest: str, given: Mapping[str, str]) -> None:
    """Make the call of a trial, and print what it reports until its job has ended.

    Args:
        file: The Secret's, with the call.
        digest: The snapshot's.
        given: What Katib has put in the places of the parameters.

    Raises:
        KaleDistError: The call returned no job.
        JobError: The job failed.
    """
    import optuna

    folder = pathlib.Path(tempfile.mkdtemp(prefix="kale-dist-"))
    # Nothing of a trial outlives its pod, where the home may be read-only.
    os.environ.setdefault("XDG_STATE_HOME", str(folder / "state"))
    store = blobs.FolderStore(folder / "blobs")
    blobs.unpack_blobs(pathlib.Path(file), store.root)
    loading.stage_modules(store, digest, folder / "modules")
    loaded = loading.load(store, digest, modules=folder / "modules")
    name, readers = loaded.args
    params = {
        key: readers[key][text] if isinstance(readers[key], dict) else readers[key](text) for key, text in given.items()
    }
    printing = threading.Lock()
    printed = 0

    def show(status: JobStatus) -> None:
        nonlocal printed
        with printing:
            for value in values_of(status, name)[printed:]:
                if math.isfinite(value):
                    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                    print(f"{now} {_metric(name)}={_number(value)}", flush=True)  # noqa: T201 - Katib reads it
                printed += 1

    # Katib ends a trial by SIGTERM.
    with kfp.in_pod(lambda: loaded.fn(optuna.trial.FixedTrial(params))) as job:
        unsubscribe = job.subscribe(show)
        job.stream_logs()
        unsubscribe()
        show(job.status)
        job.result()


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], json.loads(os.environ[VARIABLE]))
