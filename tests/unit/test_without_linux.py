"""The notebook's half of jobs elsewhere, in a process from which Linux's own calls are taken away. No Mac was tried."""

import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]


def run(script, tmp_path):
    """Run a script without Linux's own calls; what it prints."""
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(TESTS)!r}]\nimport without_linux\n{script}"],
        capture_output=True, text=True, timeout=120, check=False, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.nightly
def test_what_is_taken_away_is_gone(tmp_path):
    said = run(
        "import ctypes, os, pathlib, select, sys\n"
        "print(sys.platform, hasattr(os, 'memfd_create'), hasattr(select, 'epoll'), hasattr(ctypes.CDLL(None), 'prctl'))\n"
        "print(pathlib.Path('/proc/self/status').exists())\n",
        tmp_path,
    )
    assert said.split() == ["darwin", "False", "False", "False", "False"]


@pytest.mark.nightly
def test_a_job_is_submitted_followed_shown_and_found_again(tmp_path):
    said = run(
        """
import trainings
import kale_dist as kd
from fake_backend import FakeBackend
from kale_dist.job import view
from kale_dist.notebook.widget import JobWidget

def script(run):
    run.line(0, "hello")
    run.returns(0, {"a": 1})

def work():
    return {"a": 1}

job = kd.launch(work, number_of_processes=1, on=FakeBackend(script))
print(job.result(), [line.text for line in job.logs()], "succeeded" in JobWidget(job).head)
""",
        tmp_path,
    )
    assert said == "{'a': 1} ['hello'] True\n"


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["Kubernetes", "Docker"])
def test_a_call_for_another_machine_is_specified_whole(tmp_path, place):
    pytest.importorskip(place.lower())
    said = run(
        "import trainings\nimport kale_dist as kd\n"
        f"print(kd.render(*trainings.classifying(), number_of_processes=2, on=kd.{place}(image='team/torch:2.13')))",
        tmp_path,
    )
    assert "train-linear-xxxxx" in said


def test_only_this_machine_is_refused_and_in_a_sentence(tmp_path):
    said = run(
        """
import kale_dist as kd
from kale_dist.cli import doctor_command
try:
    kd.launch(print, number_of_processes=1)
except kd.KaleDistError as error:
    print(error.argument, "Linux" in error.problem, "kd.Kubernetes" in error.remedy, sep="|")
print(doctor_command.examine()[0].verdict, doctor_command._python("kubernetes").verdict, sep="|")
print(list(kd.jobs()))
""",
        tmp_path,
    )
    assert said.splitlines() == ["on|True|True", "failed|warning", "[]"]
