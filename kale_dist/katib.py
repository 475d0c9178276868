"""Exports a sweep as a Katib Experiment with a Secret that holds the call, and runs a trial in its pod.

    python -m kale_dist.katib FILE SNAPSHOT        in the pod, with the parameters in KALE_DIST_PARAMETERS

The pod makes the call with the parameters that Katib has chosen, prints the job's log, and a line for each value of the
metric as Katib's collector reads it: `2026-01-01T00:00:00Z kale-eval-accuracy=0.93`.
"""

from __future__ import annotations

import base64
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

from kale_dist import kfp
from kale_dist.errors import ConfigError
from kale_dist.job.spec.resources import resources as resources_of
from kale_dist.job.status import JobStatus, values_of
from kale_dist.places.manifests.pod_template import CONTAINER_SECURITY, identity_of, pod_security
from kale_dist.places.manifests.settings import INPUT_BYTES
from kale_dist.places.manifests.yaml_text import to_yaml
from kale_dist.snapshot import loading
from kale_dist.snapshot.capture import capture
from kale_dist.wire import blobs

if TYPE_CHECKING:
    import optuna

VARIABLE = "KALE_DIST_PARAMETERS"
_MOUNT, _FILE = "/kale-dist", "call.zip"
_CONTAINER = "trial"
_MAX_VALUES = 1000
_ALGORITHMS = {"TPESampler": "tpe", "RandomSampler": "random", "QMCSampler": "sobol"}
_SIMPLE = re.compile(r"[^\s\"\\$](?:[^\"\\$\x00-\x1f\x7f]*[^\s\"\\$\x00-\x1f\x7f])?")
"""Texts that need no escaping in the template, which is JSON, and in a variable of Kubernetes."""


def distributions_of(trials: Sequence[optuna.trial.FrozenTrial]) -> dict[str, optuna.distributions.BaseDistribution]:
    """The parameters and their distributions that all of these trials have asked for.

    Args:
        trials: The trials whose call has returned.

    Raises:
        ConfigError: There is no trial, or their parameters differ.
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
    study: optuna.Study,
    distributions: Mapping[str, optuna.distributions.BaseDistribution],
    *,
    metric: str,
    trials: int,
    parallel: int,
    failures: int,
    image: str,
    namespace: str | None,
    service_account: str | None,
    resources: Any,
) -> str:
    """The Experiment and the Secret with its call, as YAML.

    Arguments are those of `sweep` and `Sweep.to_katib`, the study with name, direction, sampler and pruner, the
    `distributions` of the parameters, and after how many `failures` of trials the Experiment fails.

    Raises:
        ConfigError: Katib cannot do this search, or the call is too large.
        NotSerializableError: The call cannot be sent.
    """
    if not isinstance(image, str) or not image:
        raise ConfigError(
            "image", f"{image!r} is not the name of an image", "Name one with torch, kale-dist and Optuna"
        )
    asked = resources_of(resources).of_container()
    parameters = _parameters(distributions)
    algorithm = _algorithm(study.sampler)
    stopping = _early_stopping(study.pruner)
    name = study.study_name
    store = blobs.MemoryStore()
    label = getattr(call, "__name__", "call")
    snapshot = capture(call, (metric, dict(distributions)), {}, store=store, label=label)
    packed = blobs.pack_blobs(store, snapshot.blobs)
    if len(packed) > INPUT_BYTES:
        problem = f"with all that it uses it takes {len(packed):,} bytes, and a Secret has room for {INPUT_BYTES:,}"
        raise ConfigError("call", problem, "Make or load its data inside the call, not before")
    place = {"namespace": namespace} if namespace else {}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-call", **place},
        "type": "Opaque",
        "data": {_FILE: base64.b64encode(packed).decode()},
    }
    container = {
        "name": _CONTAINER,
        "image": image,
        # Katib's collector joins these words with spaces into a line for a shell.
        "command": ["python", "-m", "kale_dist.katib", f"{_MOUNT}/{_FILE}", snapshot.digest],
        "env": [
            *({"name": one, "value": value} for one, value in identity_of("/tmp").items()),  # noqa: S108 - in the pod
            {"name": VARIABLE, "value": json.dumps({one: f"${{trialParameters.{one}}}" for one in distributions})},
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
        "volumes": [{"name": "call", "secret": {"secretName": f"{name}-call"}}],
    }
    experiment = {
        "apiVersion": "kubeflow.org/v1beta1",
        "kind": "Experiment",
        "metadata": {"name": name, **place},
        "spec": {
            "objective": {
                "type": study.direction.name.lower(),
                "objectiveMetricName": _metric(metric),
                "metricStrategies": [{"name": _metric(metric), "value": "latest"}],
            },
            "algorithm": {"algorithmName": algorithm},
            **stopping,
            "maxTrialCount": trials,
            "parallelTrialCount": min(parallel, trials),
            "maxFailedTrialCount": min(failures, trials),
            "parameters": parameters,
            "metricsCollectorSpec": {"collector": {"kind": "StdOut"}},
            "trialTemplate": {
                "primaryContainerName": _CONTAINER,
                "trialParameters": [{"name": one, "reference": one} for one in distributions],
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
    """The metric's name for Katib's collector, which knows letters, digits, `_` and `-` in names.

    The prefix is needed because the collector reads the whole log, in which a rank may print `loss=0.5`, too.
    """
    return "kale-" + re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def _algorithm(sampler: optuna.samplers.BaseSampler) -> str:
    """Katib's name of the sampler."""
    kind = type(sampler).__name__
    if kind not in _ALGORITHMS:
        remedy = f"Use one of these samplers of Optuna's, which Katib has: {', '.join(_ALGORITHMS)}"
        raise ConfigError("sampler", f"there is no export of {kind} to Katib", remedy)
    return _ALGORITHMS[kind]


def _early_stopping(pruner: optuna.pruners.BasePruner) -> dict[str, Any]:
    """Katib's early stopping in place of a pruner."""
    kind = type(pruner).__name__
    if kind == "NopPruner":
        return {}
    if kind != "MedianPruner":
        remedy = "Use optuna.pruners.MedianPruner, or NopPruner for none"
        raise ConfigError("pruner", f"Katib has nothing like {kind}", remedy)
    inner: Any = pruner
    settings = {"min_trials_required": max(1, inner._n_startup_trials), "start_step": inner._n_warmup_steps + 1}  # noqa: SLF001 - Optuna has no public names
    listed = [{"name": name, "value": str(value)} for name, value in settings.items()]
    return {"earlyStopping": {"algorithmName": "medianstop", "algorithmSettings": listed}}


def _parameters(distributions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The search space as Katib's list of parameters."""
    for name in distributions:
        if not re.fullmatch(r"[\w./ -]+", name, re.ASCII):
            problem = f"a parameter of Katib's cannot be called {name!r}"
            raise ConfigError("sweep", problem, "Use letters, digits, _ and -")
    if not distributions:
        raise ConfigError("sweep", "its trials ask for no parameter", "Ask for one, as with trial.suggest_float")
    spaces = {name: _space(name, one) for name, one in distributions.items()}
    return [{"name": name, "parameterType": kind, "feasibleSpace": space} for name, (kind, space) in spaces.items()]


def _space(name: str, distribution: Any) -> tuple[str, dict[str, Any]]:
    """Katib's type of a parameter, and the space of its values."""
    if hasattr(distribution, "choices"):
        texts = [str(choice) for choice in distribution.choices]
        if len(set(texts)) < len(texts) or not all(map(_SIMPLE.fullmatch, texts)):
            problem = f"Katib's choices are plain texts, and those of {name!r} are {distribution.choices!r}"
            remedy = 'Choose among different texts without quotes, backslashes and "$", and look the value up in a dict'
            raise ConfigError("sweep", problem, remedy)
        return "categorical", {"list": texts}
    is_int = isinstance(distribution.low, int)
    if distribution.step not in (None, 1 if is_int else None):
        # Most of Katib's algorithms ignore a step.
        low, high, step = map(_exact, (distribution.low, distribution.high, distribution.step))
        count = int((high - low) // step) + 1
        if count > _MAX_VALUES:
            remedy = f"Take a larger step, or none: up to {_MAX_VALUES} values can be listed"
            raise ConfigError("sweep", f"{name!r} has {count:,} values, and Katib passes over steps", remedy)
        return "discrete", {"list": [_number(low + index * step) for index in range(count)]}
    limits = {"min": _number(distribution.low), "max": _number(distribution.high)}
    return "int" if is_int else "double", limits | ({"distribution": "logUniform"} if distribution.log else {})


def _value(distribution: Any, text: str) -> Any:
    """Parse a parameter's value from Katib's text. Some of its algorithms write a whole number as `3.0`."""
    if hasattr(distribution, "choices"):
        return next(choice for choice in distribution.choices if str(choice) == text)
    return int(float(text)) if isinstance(distribution.low, int) else float(text)


def _number(value: float | decimal.Decimal) -> str:
    """A number without an exponent, which Katib's older collectors do not read."""
    return format(_exact(value), "f")


def _exact(value: float | decimal.Decimal) -> decimal.Decimal:
    """The number as Python prints it: 0.9, and not 0.8999999999999999."""
    return value if isinstance(value, decimal.Decimal) else decimal.Decimal(str(value))


# -- in the trial's pod ----------------------------------------------------------------------------------------------


def run(file: str, digest: str, given: Mapping[str, str]) -> None:
    """Make a trial's call in its pod, and print the metric until the job has ended.

    Args:
        file: The Secret's file, with the packed snapshot of the call.
        digest: The snapshot's digest.
        given: The texts that Katib has put in place of the parameters.

    Raises:
        KaleDistError: The call returned no job.
        JobError: The job failed.
    """
    import optuna

    folder = pathlib.Path(tempfile.mkdtemp(prefix="kale-dist-"))
    # The pod's home may be read-only, and no state of a trial outlives the pod.
    os.environ.setdefault("XDG_STATE_HOME", str(folder / "state"))
    store = blobs.FolderStore(folder / "blobs")
    blobs.unpack_blobs(pathlib.Path(file), store.root)
    loading.stage_modules(store, digest, folder / "modules")
    loaded = loading.load(store, digest, modules=folder / "modules")
    name, distributions = loaded.args
    params = {key: _value(distributions[key], text) for key, text in given.items()}
    printing = threading.Lock()
    printed = 0

    def show(status: JobStatus) -> None:
        nonlocal printed
        with printing:
            for value in values_of(status, name)[printed:]:
                if math.isfinite(value):
                    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                    print(f"{now} {_metric(name)}={_number(value)}\n", end="", flush=True)  # noqa: T201 - Katib reads it
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
