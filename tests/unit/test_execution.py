"""Notebooks executed by `kale-dist run`, as a program of its own."""

import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from own_files import own_files

from kale_dist.errors import ConfigError
from kale_dist.job import records
from kale_dist.runner.execution import run_notebook
from kale_dist.runner.kernel_jobs import Terminal

STORY = (
    "import kale_dist as kd\nprint('first cell')\nprint('no newline', end='')",
    """def train(steps):
    import time
    for step in range(steps):
        print('step', step, flush=True)
        time.sleep(0.01)

job = kd.launch(train, 40, number_of_processes=2, name='from-notebook')
job""",
    "job.wait()\nprint('after the job')",
    "print('\\x1b[31mcoloured\\x1b[0m')\nraise ValueError('on purpose')",
    "print('never')",
)


def write(path, *cells, **metadata):
    notebook = new_notebook(
        cells=[new_markdown_cell("# words"), *(new_code_cell(cell) for cell in cells)], metadata=metadata
    )
    nbformat.write(notebook, path)
    return path


def start(*words, **options):
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-m", "kale_dist.cli", "run", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A notebook with a job and a cell that fails: exit code, lines, errors, the executed notebook."""
    folder = tmp_path_factory.mktemp("story")
    path = write(
        folder / "story.ipynb", *STORY, kernelspec={"name": "not-installed", "display_name": "", "language": "python"}
    )
    running = start(path, "-o", folder / "new" / "out.ipynb")
    out, err = running.communicate(timeout=200)
    return running.returncode, out.splitlines(), err, nbformat.read(folder / "new" / "out.ipynb", as_version=4)


@pytest.mark.newest
def test_a_failing_cell_ends_it_with_1_and_its_traceback_comes_last(story):
    code, _, errors, _ = story
    assert code == 1
    assert "story.ipynb, cell 5 of 6 failed:" in errors
    assert "ValueError: on purpose" in errors
    assert "\x1b" not in errors
    assert "out.ipynb" in errors.splitlines()[-1]


@pytest.mark.nightly
def test_a_mistake_in_a_call_ends_with_the_users_line_and_one_sentence(tmp_path):
    path = write(tmp_path / "a.ipynb", "import kale_dist as kd\nkd.launch(print, number_of_processes=-1)")
    running = start(path, "-o", tmp_path / "out.ipynb")
    _, errors = running.communicate(timeout=200)
    *before, sentence, _ = errors.splitlines()
    assert running.returncode == 1
    assert sentence.startswith("ConfigError: number_of_processes: -1 is neither a whole number of 1 or more")
    assert "----> 2 kd.launch(print, number_of_processes=-1)" in before
    assert own_files(errors) == []
    (kept,) = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[1].outputs
    assert own_files("".join(kept["traceback"])) == []


def test_what_cells_print_and_what_ranks_log_comes_in_whole_lines_and_in_order(story):
    lines = story[1]
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] step {step}" for step in range(40)
        ]
    order = [
        lines.index(line)
        for line in ("first cell", "no newline", "[0] step 0", "[0] step 39", "after the job", "coloured")
    ]
    assert order == sorted(order)
    assert "never" not in lines
    ended = next(index for index, line in enumerate(lines) if "local://from-notebook: Succeeded" in line)
    assert lines.index("[1] step 39") < ended < lines.index("after the job")


@pytest.mark.newest
def test_the_executed_notebook_is_kept_with_the_jobs_last_state(story):
    cells = story[3].cells
    (picture,) = cells[2].outputs
    assert "succeeded" in picture["data"]["text/html"]
    assert "step 39" in picture["data"]["text/html"]
    assert cells[4].outputs[-1]["ename"] == "ValueError"
    assert cells[5].outputs == []
    assert cells[5].execution_count is None


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly)]
)
def test_a_signal_ends_the_cell_and_its_job_and_keeps_the_notebook(tmp_path, number, code):
    path = write(
        tmp_path / "a.ipynb",
        "import kale_dist as kd, time\ndef wait():\n    print('waiting', flush=True)\n    time.sleep(60)\n"
        f"job = kd.launch(wait, number_of_processes=1, name='interrupted-{code}')\njob.wait()",
        "print('never')",
    )
    running = start(path, "-o", tmp_path / "out.ipynb", start_new_session=True)
    assert running.stdout.readline() == "[0] waiting\n"
    os.killpg(running.pid, number)
    out, err = running.communicate(timeout=200)
    assert running.returncode == code
    assert f"local://interrupted-{code}: Cancelled" in out
    assert "never" not in out
    assert "KeyboardInterrupt" in err, err
    outputs = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[1].outputs
    assert outputs[-1]["ename"] == "KeyboardInterrupt"


LEFT_BEHIND = """
import time
job = kd.launch(time.sleep, 600, number_of_processes=1, name='left-behind')
while not job.status.started:
    time.sleep(0.01)
print('the end')
"""


@pytest.mark.nightly
def test_a_log_that_a_cell_streams_is_shown_once_and_a_job_that_nobody_waits_for_ends_with_the_notebook(tmp_path):
    cells = (
        STORY[0],
        STORY[1].replace("job = ", "print('[0] of my own')\njob = ").replace("from-notebook", "streamed"),
        "job.stream_logs()\nprint('[0] step 3')\nprint('[0] of my own')",
        LEFT_BEHIND,
    )
    running = start(write(tmp_path / "n.ipynb", *cells), "-o", tmp_path / "out.ipynb")
    out, err = running.communicate(timeout=200)
    assert (running.returncode, err) == (0, "")
    assert re.search("local://left-behind: Cancelled.*kernel", out)
    lines = out.splitlines()
    steps = [f"[0] step {step}" for step in range(40)]
    assert sorted(line for line in lines if line.startswith("[0] step")) == sorted([*steps, "[0] step 3"])
    assert sum(line.startswith("[1] step") for line in lines) == 40
    assert lines.count("[0] of my own") == 2
    assert "the end" in lines
    kept = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[3].outputs
    streamed = "".join(output.text for output in kept)
    assert [line for line in streamed.splitlines() if line.startswith("[0] step")] == [*steps, "[0] step 3"]


@pytest.mark.newest
def test_the_kernels_death_is_told(tmp_path):
    path = write(tmp_path / "a.ipynb", "print('last words', flush=True)", "import os\nos._exit(3)")
    running = start(path, cwd=tmp_path)
    out, err = running.communicate(timeout=200)
    assert running.returncode == 1
    assert "last words" in out
    assert "cell 3 of 3 failed: the kernel died" in err
    assert (tmp_path / "a.executed.ipynb").exists()


def test_cells_run_in_the_notebooks_folder_with_this_interpreter(tmp_path):
    (tmp_path / "deep").mkdir()
    path = write(tmp_path / "deep" / "a.ipynb", "import os, sys\nprint(os.getcwd(), sys.executable)")
    running = start(path, "-o", tmp_path / "out.ipynb", cwd="/")
    out, err = running.communicate(timeout=200)
    assert (running.returncode, err) == (0, "")
    assert out.splitlines() == [f"{tmp_path / 'deep'} {sys.executable}", f"Executed notebook: {tmp_path / 'out.ipynb'}"]


@pytest.mark.parametrize(
    "content", [None, "", "{}", "[1]", "no json", '{"cells": 3, "nbformat": 4, "nbformat_minor": 5}']
)
def test_what_is_no_notebook_is_refused_before_anything_starts(tmp_path, content):
    path = tmp_path / "a.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"a\.ipynb"):
        run_notebook(path, output=tmp_path / "out.ipynb")
    assert not (tmp_path / "out.ipynb").exists()


def test_other_languages_are_refused(tmp_path):
    path = write(tmp_path / "a.ipynb", "1", kernelspec={"name": "ir", "display_name": "R", "language": "R"})
    with pytest.raises(ConfigError, match="written in R"):
        run_notebook(path, output=tmp_path / "out.ipynb")


@pytest.mark.parametrize("output", ["a.ipynb", ".", "a.ipynb/out.ipynb", "/proc/out.ipynb"])
def test_outputs_that_cannot_be(tmp_path, output):
    path = write(tmp_path / "a.ipynb", "1")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="output"):
        run_notebook(path, output=tmp_path / output)
    assert path.read_bytes() == before


def test_what_is_no_dict_is_refused(tmp_path):
    path = write(tmp_path / "a.ipynb", "a = 1")
    with pytest.raises(ConfigError, match=r"^parameters: .* is not a dict\. Write it as"):
        run_notebook(path, output=tmp_path / "out.ipynb", parameters=["a"])
    assert not (tmp_path / "out.ipynb").exists()


@pytest.mark.parametrize(
    ("given", "said"), [({"kernel": "nosuch"}, "Installed kernels: "), ({"timeout_s": 0}, "more than 0")]
)
def test_kernels_and_times_that_cannot_be(tmp_path, given, said):
    with pytest.raises(ConfigError, match=said):
        run_notebook(write(tmp_path / "a.ipynb", "1"), output=tmp_path / "out.ipynb", **given)


def test_a_cell_that_takes_too_long_fails_and_an_installed_kernel_is_used(tmp_path):
    path = write(tmp_path / "a.ipynb", "print('here', flush=True)\nimport time\ntime.sleep(60)")
    said = io.StringIO()
    found = run_notebook(path, output=tmp_path / "out.ipynb", kernel="python3", timeout_s=3, stream=said)
    assert found.failure == "cell 2 of 2 failed: it took more than 3 s"
    assert (found.interrupted, said.getvalue()) == (False, "here\n")


def test_the_place_of_jobs_that_name_none_is_set_for_the_kernel(tmp_path):
    said = io.StringIO()
    path = write(tmp_path / "a.ipynb", "import os\nprint(os.environ['KALE_DIST_ON'])")
    assert run_notebook(path, output=tmp_path / "out.ipynb", on="docker", stream=said).failure == ""
    assert said.getvalue() == "docker\n"


def test_a_reader_that_leaves_does_not_end_the_program():
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    terminal = Terminal(stream)
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    terminal.line("x" * 100_000)
    terminal.line("y")
    with contextlib.suppress(BrokenPipeError):
        stream.close()
    assert stream.closed


def test_a_stream_that_lacks_the_bars_characters_gets_the_text():
    raw = io.BytesIO()
    terminal = Terminal(io.TextIOWrapper(raw, encoding="ascii"))
    terminal.line("▕█▏ 10 %")
    assert raw.getvalue().endswith(b" 10 %\n")


@pytest.fixture(autouse=True, scope="module")
def tidy():
    yield
    for name in ("from-notebook", "interrupted", "streamed", "left-behind"):
        records.delete(name)
