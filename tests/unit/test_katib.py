"""Sweeps as Experiments of Katib: the golden file, what Katib cannot do, and a trial as its pod runs it."""

import base64
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

import kale_dist as kd
from kale_dist import katib

optuna = pytest.importorskip("optuna", reason="needs Optuna")

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "katib" / "experiment.yaml"

DEFAULT_FILTER = r"([\w|-]+)\s*=\s*([+-]?\d*(\.\d+)?([Ee][+-]?\d+)?)"
"""Katib's: what its collector looks for in the output of a trial, unless the Experiment says otherwise."""

OLD_FILTER = r"([\w|-]+)\s*=\s*((-?\d+)(\.\d+)?)"
"""The same in versions that know no exponent."""

FLOAT, INT = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
CHOICE = optuna.distributions.CategoricalDistribution

SPACE = {
    "lr": FLOAT(1e-5, 1.0, log=True),
    "dropout": FLOAT(0.0, 0.5),
    "momentum": FLOAT(0.0, 0.9, step=0.3),
    "layers": INT(1, 4),
    "width": INT(32, 128, step=32),
    "act": CHOICE(["relu", "leaky relu", None, True]),
}


def search(**changes):
    return {
        "name": "digits", "metric": "eval/accuracy", "direction": "maximize", "trials": 12, "parallel": 2, "failures": 3,
        "distributions": SPACE, "sampler": optuna.samplers.TPESampler(),
        "pruner": optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1), **changes,
    }  # fmt: skip


def tell(lr, dropout, momentum, layers, width, act):
    print("act is", repr(act))
    print("score=0.53")
    for value in (lr, 0.00001, float("nan"), lr * dropout + momentum + layers + width):
        kd.report(score=value)


def call(trial):
    """Uses globals, and so cannot be sent as text alone."""
    names = {name: suggest(trial, name, distribution) for name, distribution in SPACE.items()}
    return kd.launch(tell, **names, number_of_processes=1)


def suggest(trial, name, distribution):
    return trial._suggest(name, distribution)


def export(made=None, *, call=call, **options):
    given = {"namespace": "team-a", "service_account": "trainer", "resources": {"cpu": 2, "memory": "4Gi", "gpus": 1}}
    made = made or search()
    of_study = {name: made.pop(name) for name in ("direction", "sampler", "pruner")}
    study = optuna.create_study(study_name=made.pop("name"), **of_study)
    image = {"image": "registry.example.com/team/kale:1"}
    return katib.export(call, study, made.pop("distributions"), **{**image, **given, **made, **options})


def spec_of(text):
    return list(yaml.safe_load_all(text))[1]["spec"]


def test_the_golden_file_is_what_is_written():
    # YAML quotes what could be a number.
    text = re.sub(r"call\.zip: '?[\w+/=]+'?", "call.zip: THE CALL", export())
    text = re.sub(r"'?\b[0-9a-f]{64}\b'?", "THE SNAPSHOT", text)
    if os.environ.get("KALE_DIST_UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_trial_prints_its_metric_as_katib_reads_it(tmp_path):
    secret, experiment = yaml.safe_load_all(export(search(metric="score")))
    (file,) = secret["data"]
    tmp_path.joinpath(file).write_bytes(base64.b64decode(secret["data"][file]))
    # As Katib's controller fills in a template, and its webhook wraps a container.
    text = json.dumps(experiment["spec"]["trialTemplate"]["trialSpec"])
    chosen = {"lr": "0.25", "dropout": "0.5", "momentum": "0.3", "layers": "2.0", "width": "64", "act": "leaky relu"}
    for name, value in chosen.items():
        text = text.replace(f"${{trialParameters.{name}}}", value)
    (container,) = json.loads(text)["spec"]["template"]["spec"]["containers"]
    line = " ".join(container["command"]).replace("/kale-dist/", f"{tmp_path}/")
    line = line.replace("python", sys.executable, 1)
    environment = os.environ | {one["name"]: one["value"] for one in container["env"]}
    script = f"{line} 1>{tmp_path}/metrics.log 2>&1 && echo completed > {tmp_path}/mark"
    subprocess.run(["sh", "-c", script], env=environment | {"XDG_STATE_HOME": str(tmp_path)}, check=False, timeout=120)
    log = tmp_path.joinpath("metrics.log").read_text()
    assert tmp_path.joinpath("mark").exists(), log
    assert "act is 'leaky relu'" in log
    assert "score=0.53" in log
    for pattern in (DEFAULT_FILTER, OLD_FILTER):
        values = [match[2] for match in re.finditer(pattern, log) if match[1] == "kale-score"]
        assert list(map(float, values)) == [0.25, 0.00001, 66.425]
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ kale-score=0\.25$", log, re.MULTILINE)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (optuna.samplers.RandomSampler, "random"),
        (optuna.samplers.QMCSampler, "sobol"),
    ],
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_samplers_have_katibs_names(make, name):
    assert spec_of(export(search(sampler=make())))["algorithm"] == {"algorithmName": name}


def test_no_pruner_is_no_early_stopping():
    assert "earlyStopping" not in spec_of(export(search(pruner=optuna.pruners.NopPruner())))


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": optuna.samplers.NSGAIISampler()},
        {"pruner": optuna.pruners.ThresholdPruner(upper=1)},
        {"distributions": {}},
        {"distributions": {"x{y}": FLOAT(0, 1)}},
        {"distributions": {"größe": FLOAT(0, 1)}},
        {"distributions": {"x": CHOICE(['say "hi"'])}},
        {"distributions": {"x": CHOICE(["$(HOME)"])}},
        {"distributions": {"x": CHOICE([1, "1"])}},
        {"distributions": {"x": INT(0, 100_000, step=2)}},
    ],
)
def test_what_katib_cannot_do_is_refused(changes, refusal):
    refusal(lambda: export(search(**changes)))


def test_a_call_that_is_too_large_is_refused(refusal):
    data = os.urandom(700_000)

    def large(trial):
        return len(data)

    refusal(lambda: export(call=large))


def trial(number, **distributions):
    params = {name: one.low for name, one in distributions.items()}
    made = optuna.trial.create_trial(params=params, distributions=distributions, value=1.0)
    made.number = number
    return made


def test_trials_that_ask_for_different_things_are_refused(refusal):
    refusal(lambda: katib.distributions_of([]))
    both = {"x": FLOAT(0, 1), "y": INT(0, 1)}
    assert katib.distributions_of([trial(0, **both), trial(1, **both)]) == both
    refusal(lambda: katib.distributions_of([trial(0, **both), trial(1, x=both["x"])]))
    refusal(lambda: katib.distributions_of([trial(0, **both), trial(1, **(both | {"x": FLOAT(0, 2)}))]))
