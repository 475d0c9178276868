import inspect
import os
import pathlib
import pickle
import subprocess
import sys
import traceback

import pytest

from kale_dist import errors
from kale_dist.job.spec.checks import whole

ROOT = pathlib.Path(__file__).parents[2]

SAMPLES = {
    "ConfigError": ("epochs", "0 is less than 1", "Give an int of 1 or more"),
    "NotSerializableError": (("train_step", "closure log", "_io.TextIOWrapper"), "an open file", "Open it inside"),
    "RemoteError": ("mod.Odd", "text", "Traceback ..."),
    "BackendError": ("refused", True),
    "ImageError": ("absent", True),
    "BackendUnavailableError": ("gone", True),
    "JobError": ("bad", "local://x"),
}


def all_errors():
    return [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.KaleDistError)]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind):
    error = kind(*SAMPLES.get(kind.__name__, ("message",)))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_tree_and_drawn_in_it(kind):
    assert kind.__name__.endswith("Error")
    assert kind.__name__ in (errors.__doc__ or "")


def test_builtin_parents_are_what_callers_expect():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.WaitTimeoutError, TimeoutError)
    assert errors.BackendError("x", retryable=True).retryable
    assert errors.JobError("x", "local://j").ref == "local://j"


def test_messages_name_argument_value_and_remedy():
    text = str(errors.ConfigError("epochs", "0 is less than 1", "Give an int of 1 or more"))
    assert text == "epochs: 0 is less than 1. Give an int of 1 or more"
    path = errors.NotSerializableError(
        ("train_step", "closure log", "_io.TextIOWrapper"), "it is open", "Open it there"
    )
    assert str(path).startswith("train_step -> closure log -> _io.TextIOWrapper cannot be sent")


def test_where_there_is_no_shell_a_notebooks_traceback_is_the_whole_one():
    with pytest.raises(errors.ConfigError) as caught:
        whole()("epochs", 0)
    text = "".join(caught.value._render_traceback_())
    assert text == "".join(traceback.format_exception(caught.value))
    assert "kale_dist/job/spec/checks.py" in text


def test_a_refusal_in_a_script_shows_the_users_line_and_at_most_one_of_ours(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import kale_dist as kd\n\nkd.launch(print, number_of_processes=-1)\n")
    said = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).stderr
    frames = [line.strip() for line in said.splitlines() if line.startswith("  File ")]
    assert frames[0].startswith(f'File "{script}", line 3')
    assert len(frames) <= 2
    assert said.splitlines()[-1].startswith(
        "kale_dist.errors.ConfigError: number_of_processes: -1 is neither a whole number"
    )
