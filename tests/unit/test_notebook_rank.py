"""A notebook as the work of one rank, on this machine: what its rank gives back, however it ends."""

import contextlib
import io
import json
import time
import uuid

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

import kale_dist as kd
from kale_dist import backends, in_cluster
from kale_dist.backends.base import JobRef
from kale_dist.contract import LogLine, Stream
from kale_dist.errors import JobFailedError
from kale_dist.notebook.terminal import Terminal
from kale_dist.runtime import notebook_rank


@pytest.fixture
def start():
    """A function that starts a job which executes a notebook of these cells."""
    jobs = []

    def made(*cells, arguments=None, settings=None):
        source = nbformat.writes(new_notebook(cells=list(map(new_code_cell, cells)))).encode()
        job = kd.launch(
            notebook_rank.notebook, in_cluster._library(), source, "my notebook.ipynb", arguments or {}, settings or {},
            number_of_processes=1,
        )  # fmt: skip
        jobs.append(job)
        return job

    yield made
    for job in jobs:
        job.delete()


def read(bundle):
    executed, summary = notebook_rank.split(bundle)
    return nbformat.reads(executed.decode(), as_version=4).cells, json.loads(summary)


def test_a_notebook_is_executed_by_a_whole_library_with_settings_of_its_caller(start):
    job = start(
        "import os\nimport kale_dist as kd\nprint(os.environ['KALE_DIST_QUEUE'], 'RANK' in os.environ)",
        "kd.launch(len, 'abc', number_of_processes=1).result()",
        arguments={"name": "named-outside"},
        settings={"KALE_DIST_QUEUE": "team"},
    )
    cells, summary = read(job.result(100))
    assert cells[0].outputs[0].text == "team False\n"
    assert cells[1].outputs[0].data["text/plain"] == "3"
    assert [cell["state"] for cell in summary["cells"]] == ["succeeded", "succeeded"]
    assert [end["ref"] for end in summary["jobs"]] == ["local://named-outside"]
    kd.attach("local://named-outside").delete()


def test_after_a_failure_the_checkpoint_has_the_notebook(start):
    job = start("print('here')", "1 / 0")
    with pytest.raises(JobFailedError, match="cell 2 of 2 failed"):
        job.result(100)
    cells, summary = read(job.files.checkpoint.read_bytes())
    assert cells[0].outputs[0].text == "here\n"
    assert cells[1].outputs[0].ename == "ZeroDivisionError"
    assert "1 / 0" in summary["failure"]


def test_a_cancelled_job_leaves_the_notebook_as_far_as_it_came(start):
    job = start("print('here')", "import time\nprint('waiting', flush=True)\ntime.sleep(100)")
    lines = job.logs(follow=True)
    assert any(line.text == "waiting" for line in lines)
    backends.get("local").cancel(JobRef.parse(job.ref), grace_s=in_cluster.CANCEL_GRACE_S)
    began = time.monotonic()
    assert job.exception(60) is not None
    assert time.monotonic() - began < in_cluster.CANCEL_GRACE_S
    cells, summary = read(job.files.checkpoint.read_bytes())
    assert cells[1].outputs[-1].ename == "KeyboardInterrupt"
    assert summary["interrupted"]


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_pod_s_log_is_shown_as_the_notebook_s_own_with_one_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        (0, Stream.STDOUT, "▕██    ▏ 30 % · Epoch 1 of 2 · train-x"),
        (0, Stream.STDOUT, "[1] a line of a rank"),
        (0, Stream.STDERR, "the rank's own words"),
        (0, Stream.STDOUT, "▕████  ▏ 70 % · Epoch 2 of 2 · train-x"),
        (0, Stream.STDOUT, "local://train-x: Succeeded after 3 s"),
        (None, Stream.STDOUT, "Rank 0 failed: NotebookFailedError"),
        (None, Stream.STDOUT, "of the agent \x1b[31m"),
    ]
    lines = [
        LogLine(sequence=number, time=0.0, attempt=0, rank=rank, stream=stream, text=text)
        for number, (rank, stream, text) in enumerate(rows)
    ]
    screen = Screen()
    in_cluster._show(iter(lines), Terminal(screen))
    written = screen.getvalue().replace("\r\x1b[K", "<")
    assert written == (
        "<▕██    ▏ 30 % · Epoch 1 of 2 · train-x<[1] a line of a rank\n▕██    ▏ 30 % · Epoch 1 of 2 · train-x"
        "<▕████  ▏ 70 % · Epoch 2 of 2 · train-x<local://train-x: Succeeded after 3 s\n[kale-dist] of the agent \n"
    )


CELL = {"number": 1, "source": "1 / 0", "state": "failed", "seconds": 0.5, "error": "ZeroDivisionError"}
SAID = {"failure": "cell 1 of 1 failed", "interrupted": False, "cells": [CELL], "jobs": [], "output": ""}
NOTEBOOK = nbformat.writes(new_notebook()).encode()


@pytest.fixture
def failed_with(monkeypatch, tmp_path):
    """A function that gives how a notebook's pod has failed which had saved these bytes, the notebook, and what is said."""

    launch = kd.launch

    def made(saved):
        (tmp_path / "n.ipynb").write_bytes(NOTEBOOK)

        def does_not_start(*_, **__):
            job = launch(saves_and_fails, saved, number_of_processes=1, name=f"damaged-{uuid.uuid4().hex[:6]}")
            with contextlib.suppress(JobFailedError):
                job.result(60)
            return job

        monkeypatch.setattr(in_cluster.calls, "launch", does_not_start)
        screen = io.StringIO()
        output = tmp_path / "out.ipynb"
        found = in_cluster.run_notebook(tmp_path / "n.ipynb", output=output, terminal=Terminal(screen))
        return found, output.read_bytes(), screen.getvalue()

    return made


def saves_and_fails(saved):
    kd.context().files.checkpoint.write_bytes(saved)
    raise ValueError("the pod was ended")


def test_what_a_pod_had_saved_comes_back_after_a_failure(failed_with):
    saved = nbformat.writes(new_notebook(cells=[new_code_cell("1 / 0")])).encode()
    found, notebook, said = failed_with(notebook_rank.join(saved, json.dumps(SAID).encode()))
    assert notebook == saved
    assert (found.failure, [cell.error for cell in found.cells]) == ("cell 1 of 1 failed", ["ZeroDivisionError"])
    assert "left out" not in said


@pytest.mark.parametrize(
    "saved",
    [
        b"",
        b"\x80\x04\x95 a pickle",
        notebook_rank.join(NOTEBOOK, b"[1, 2]"),
        notebook_rank.join(NOTEBOOK, b"[" * 100_000),
        notebook_rank.join(NOTEBOOK, json.dumps({**SAID, "cells": [{**CELL, "by": "somebody"}]}).encode()),
        notebook_rank.join(NOTEBOOK, json.dumps({**SAID, "cells": ["x"]}).encode()),
        notebook_rank.join(NOTEBOOK, json.dumps({**SAID, "cells": [{**CELL, "seconds": None}]}).encode()),
        notebook_rank.join(NOTEBOOK, json.dumps({**SAID, "jobs": [{"ref": "local://x"}]}).encode()),
        notebook_rank.join(b"no notebook", json.dumps(SAID).encode()),
    ],
)
def test_a_damaged_or_forged_checkpoint_is_left_out_with_a_note(failed_with, saved):
    found, notebook, said = failed_with(saved)
    assert notebook == NOTEBOOK
    assert found.failure.startswith("its pod: Failed")
    assert found.cells == found.jobs == ()
    assert said.count("left out: it is damaged, or somebody else wrote it") == 1
