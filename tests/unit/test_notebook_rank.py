"""A notebook as the work of one rank, on this machine: what comes back of it, however it ends."""

import io
import json
import sys
import time
import uuid

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

import kale_dist as kd
from kale_dist import places
from kale_dist.errors import ImageError
from kale_dist.job.backend import JobRef
from kale_dist.job.handle import inside
from kale_dist.runner import in_cluster
from kale_dist.wire import payload
from kale_dist.worker.rank import notebook_rank


def encoded(*cells):
    return nbformat.writes(new_notebook(cells=list(map(new_code_cell, cells)))).encode()


@pytest.fixture
def start():
    """A function that starts a job which executes a notebook of these cells."""
    jobs = []

    def made(*cells, options=None, settings=None):
        job = kd.launch(
            notebook_rank.notebook, payload.library(), encoded(*cells), "my notebook.ipynb", options or {}, settings or {},
            number_of_processes=1,
        )  # fmt: skip
        jobs.append(job)
        return job

    yield made
    for job in jobs:
        job.delete()


def cells_of(executed):
    return nbformat.reads(executed.decode(), as_version=4).cells


@pytest.mark.nightly
def test_a_notebook_is_executed_by_a_whole_library_with_settings_of_its_caller(start):
    job = start(
        "import os\nimport kale_dist as kd\nprint(os.environ['KALE_DIST_QUEUE'], os.environ['KALE_DIST_ON'], 'RANK' in os.environ)",
        "kd.launch(len, 'abc', number_of_processes=1, name='in-rank').result()",
        options={"on": "local"},
        settings={"KALE_DIST_QUEUE": "team"},
    )
    executed, summary = job.result(100)
    cells, summary = cells_of(executed), json.loads(summary)
    assert cells[0].outputs[0].text == "team local False\n"
    assert cells[1].outputs[0].data["text/plain"] == "3"
    assert [cell["state"] for cell in summary["cells"]] == ["succeeded", "succeeded"]
    assert [end["ref"] for end in summary["jobs"]] == ["local://in-rank"]
    kd.attach("local://in-rank").delete()


def test_after_a_failing_cell_the_notebook_and_its_error_come_back(start):
    executed, summary = start("print('here')", "1 / 0").result(100)
    cells = cells_of(executed)
    assert cells[0].outputs[0].text == "here\n"
    assert cells[1].outputs[0].ename == "ZeroDivisionError"
    assert "1 / 0" in json.loads(summary)["failure"]


def test_a_cancelled_job_leaves_the_notebook_as_far_as_it_came(start):
    job = start("print('here')", "import time\nprint('waiting', flush=True)\ntime.sleep(100)")
    lines = job.logs(follow=True)
    assert any(line.text == "waiting" for line in lines)
    places.get("local").cancel(JobRef.parse(job.ref), grace_s=in_cluster.NOTEBOOK_GRACE_S)
    began = time.monotonic()
    assert job.exception(60) is not None
    assert time.monotonic() - began < in_cluster.NOTEBOOK_GRACE_S
    assert cells_of(inside(job).files.checkpoint.read_bytes())[1].outputs[-1].ename == "KeyboardInterrupt"


@pytest.fixture
def run_with(monkeypatch, tmp_path):
    """A function that runs a notebook in a pod that does this instead."""
    launch = kd.launch

    def made(fn, *args):
        def launched(place, *_):
            assert place == {"namespace": "team", "image": "x/y:1"}
            return launch(fn, *args, number_of_processes=1, name=f"pod-{uuid.uuid4().hex[:6]}")

        monkeypatch.setattr(in_cluster, "_launch", launched)
        (tmp_path / "n.ipynb").write_bytes(encoded())
        output, said = tmp_path / "out.ipynb", io.StringIO()
        pod = {"namespace": "team", "image": "x/y:1"}
        found = in_cluster.run_notebook(tmp_path / "n.ipynb", output=output, pod=pod, stream=said)
        return found, output.read_bytes(), said.getvalue()

    return made


def returns(executed, summary):
    print("what a cell prints")
    print("what the process says of itself", file=sys.stderr)
    return executed, summary


def test_what_a_pod_returns_is_the_executed_notebook_and_how_it_went(run_with):
    cell = {"number": 1, "source": "1 / 0", "state": "failed", "seconds": 0.5, "error": "ZeroDivisionError"}
    summary = {"failure": "cell 1 of 1 failed", "interrupted": False, "cells": [cell], "jobs": [], "output": "there"}
    executed = encoded("1 / 0")
    found, notebook, said = run_with(returns, executed, json.dumps(summary).encode())
    assert notebook == executed
    assert (found.failure, found.output.name) == ("cell 1 of 1 failed", "out.ipynb")
    assert [cell.error for cell in found.cells] == ["ZeroDivisionError"]
    assert "what a cell prints" in said.splitlines()
    assert "what the process says" not in said


def saves_and_fails(saved):
    kd.context().files.checkpoint.write_bytes(saved)
    raise ValueError("the pod was ended")


def test_what_a_pod_had_saved_comes_back_after_its_failure(run_with):
    saved = encoded("1 / 0")
    found, notebook, said = run_with(saves_and_fails, saved)
    assert notebook == saved
    assert found.failure.startswith("its pod: Failed")
    assert "left out" not in said


@pytest.mark.parametrize("saved", [b"", b"\x80\x04\x95 a pickle", b"[" * 100_000, b'{"cells": 3}', b"[1, 2]"])
def test_what_is_no_notebook_is_left_out_with_a_note(run_with, saved):
    _, notebook, said = run_with(saves_and_fails, saved)
    assert notebook == encoded()
    assert said.count("The file that the pod saved is not a notebook") == 1


def lacks_something():
    raise ImageError("The pod's image lacks what executes notebooks")


def test_an_image_that_cannot_execute_notebooks_is_said_in_one_sentence(run_with):
    with pytest.raises(ImageError, match="lacks what executes notebooks"):
        run_with(lacks_something)
