"""`kale-dist run` with parameters, tags and a summary; notebooks that other tools wrote."""

import json
import os
import pathlib
import subprocess
import sys

import nbformat
import pytest
from nbformat import v3
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import kale_dist as kd
from kale_dist import wording
from kale_dist.cli import main
from kale_dist.errors import ConfigError
from kale_dist.job import records
from kale_dist.runner import documents

TRAINING = """
import kale_dist as kd
def work(text, times):
    print(text * times)
    return kd.context().world_size
job = kd.launch(work, word, times, number_of_processes=2, name="scripted")
print("world size", job.result())
"""


def run(*words, cwd, **environment):
    """Run the command; gives exit code, standard output and error."""
    ended = subprocess.run(
        [sys.executable, "-m", "kale_dist.cli", "run", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=120, cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])} | environment,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def cell(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def write(path, *cells):
    nbformat.write(new_notebook(cells=[new_markdown_cell("# words"), *cells]), path)
    return path


def sources(notebook):
    return [cell.source for cell in notebook.cells]


def test_a_run_with_everything(tmp_path):
    notebook = write(
        tmp_path / "n.ipynb",
        cell("word = 'a'\ntimes: int = 1", "parameters"),
        cell(TRAINING, "block:train", "prev:load"),
        cell("raise SystemError('never')", "skip"),
        cell("print('end')"),
    )
    code, out, err = run(
        notebook, "-p", "times", "3", "-p", "word", "no", "-o", "out.ipynb", "--json", "made/run.json", cwd=tmp_path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert {"[0] nonono", "[1] nonono"} <= set(lines)
    assert lines.index("world size 2") < lines.index("end")
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    assert executed.cells[2].source == "times = 3\nword = 'no'"
    assert executed.cells[2].metadata.tags == ["injected-parameters"]
    assert sources(nbformat.read(notebook, as_version=4))[2] == TRAINING
    said = json.loads((tmp_path / "made" / "run.json").read_text())
    assert (said["result"], said["notebook"], said["output"]) == ("succeeded", str(notebook), "out.ipynb")
    assert [one["state"] for one in said["cells"]] == ["succeeded", "succeeded", "succeeded", "skipped", "succeeded"]
    assert said["cells"][2]["seconds"] > 0
    assert [(one["ref"], one["state"]) for one in said["jobs"]] == [("local://scripted", "succeeded")]
    records.delete("scripted")


@pytest.mark.nightly
def test_a_failure_is_in_the_summaries_with_its_traceback(tmp_path):
    notebook = write(
        tmp_path / "n.ipynb",
        cell("import kale_dist as kd\ndef bad():\n    raise ValueError('\\x1b[31m<on> \\x00purpose')"),
        cell("kd.launch(bad, number_of_processes=1, name='scripted-bad').result()"),
        cell("print('never')"),
    )
    code, _, err = run(notebook, "--json", "run.json", cwd=tmp_path)
    assert code == 1
    assert "cell 3 of 4 failed" in err
    assert "<on>" in err
    said = json.loads((tmp_path / "run.json").read_text())
    assert said["result"] == "failed"
    assert [one["state"] for one in said["cells"]] == ["succeeded", "failed", "not run"]
    assert "purpose" in said["cells"][1]["error"]
    assert said["jobs"][0]["state"] == "failed"
    records.delete("scripted-bad")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("0.1", 0.1), ("1e-3", 0.001), ("True", True), ("false", False), ("null", None), ("None", None), ('{"a": [true, null]}', {"a": [True, None]}), ('"3"', "3"),
        ("abc", "abc"), ("'3'", "3"), ("[1, 2]", [1, 2]), ("{'a': 1}", {"a": 1}), ("", ""), ("1 +", "1 +"),
        ("__import__('os')", "__import__('os')"), ("ä b", "ä b"), ("(" * 5000, "(" * 5000),
    ],
)  # fmt: skip
def test_values_of_the_command_line(text, value):
    assert wording.parse(text) == value


@pytest.mark.parametrize(
    ("tag", "source"),
    [
        ("parameters", "lr = 1\n"),
        ("pipeline-parameters", "a, (lr, *rest) = 1, (2, 3)"),
        ("parameters", "lr: float = 1"),
    ],
)
def test_parameters_are_put_behind_their_cell_and_replace_those_of_an_earlier_run(tag, source):
    notebook = new_notebook(cells=[cell("x"), cell(source, tag), cell("lr")])
    documents.inject(notebook, {"lr": 0.5})
    documents.inject(notebook, {"lr": 0.25})
    assert sources(notebook) == ["x", source, "lr = 0.25", "lr"]
    nbformat.validate(notebook)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"learning_rat": 1}, "Did you mean 'learning_rate'"),
        ({"import": 1}, "cannot be a name"),
        ({"a b": 1}, "cannot be a name"),
        ({"learning_rate": object()}, "cannot be written into a cell"),
        ({"learning_rate": float("nan")}, "cannot be written into a cell"),
    ],
)
def test_wrong_parameters_are_refused(values, said):
    notebook = new_notebook(cells=[cell("learning_rate = 1\nprint(other := 2)", "parameters")])
    with pytest.raises(ConfigError, match=said):
        documents.inject(notebook, values)
    assert len(notebook.cells) == 1


def test_a_notebook_without_parameters_says_how_it_would_have_some():
    with pytest.raises(ConfigError, match="Tag the cell"):
        documents.inject(new_notebook(cells=[cell("a = 1")]), {"a": 2})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "x", "1"], "no cell of parameters"),
        (["--json", "."], "is a folder"),
        (["--json", "n.ipynb"], "is the notebook itself"),
        (["--kernel", "nosuch"], "there is no kernel 'nosuch'"),
        (["--image", "somewhere/x:1"], "Add --in-cluster"),
        (["--keep"], "Add --in-cluster"),
        (["--pod", "resources", "{}"], "Add --in-cluster"),
        (["--in-cluster", "-p", "x", "1"], "no cell of parameters"),
    ],
)
def test_mistakes_in_the_command_start_nothing(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "n.ipynb", cell("print('ran')"))
    assert main(["run", "n.ipynb", *words]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "ran" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["n.ipynb"]


@pytest.mark.nightly
def test_notebooks_of_other_times_and_without_metadata(tmp_path):
    old = v3.new_notebook(worksheets=[v3.new_worksheet(cells=[v3.new_code_cell("print('from nbformat', 3)")])])
    (tmp_path / "old.ipynb").write_text(v3.writes_json(old))
    bare = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 2}
    bare["cells"].append(
        {"cell_type": "code", "source": "print('bare')", "metadata": {"tags": None}, "outputs": [], "execution_count": None}
    )  # fmt: skip
    (tmp_path / "bare.ipynb").write_text(json.dumps(bare))
    assert run("old.ipynb", cwd=tmp_path)[:2] == (0, "from nbformat 3\nExecuted notebook: old.executed.ipynb\n")
    assert run("bare.ipynb", cwd=tmp_path)[:2] == (0, "bare\nExecuted notebook: bare.executed.ipynb\n")


CODE = {"cell_type": "code", "source": "print('ran')", "metadata": {}, "outputs": [], "execution_count": None}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("metadata", "cell"),
    [
        ({"kernelspec": None}, {}),
        ({"kernelspec": {"name": "gone", "language": None}, "language_info": "python"}, {}),
        (None, {}),
        ({}, {"metadata": None, "outputs": None}),
        ({}, {"source": None}),
    ],
)
def test_what_a_notebook_leaves_out_or_has_as_null_says_nothing(tmp_path, capsys, metadata, cell):
    path = tmp_path / "n.ipynb"
    cells = [CODE | cell, CODE]
    path.write_text("\ufeff" + json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 2}))
    execution = kd.run_notebook(path, output=tmp_path / "out.ipynb")
    assert execution.failure == ""
    assert capsys.readouterr().out == "ran\n" * (1 if cell.get("source", "") is None else 2)
    nbformat.validate(nbformat.read(execution.output, as_version=4))


@pytest.mark.parametrize(
    ("notebook", "said"),
    [
        (
            {"cells": [], "metadata": {"language_info": {"name": "R"}}, "nbformat": 4, "nbformat_minor": 4},
            "written in R",
        ),
        ({"cells": [], "metadata": {"kernelspec": {"name": "ir", "language": "R"}}, "nbformat": 4}, "written in R"),
        ({"cells": [], "metadata": {}, "nbformat": 9, "nbformat_minor": 0}, "Unsupported nbformat version 9"),
        ({"cells": [3], "metadata": {}, "nbformat": 4, "nbformat_minor": 0}, "is not a notebook"),
        ([], "is not a notebook"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, notebook, said):
    (tmp_path / "n.ipynb").write_text(json.dumps(notebook))
    with pytest.raises(ConfigError, match=said):
        kd.run_notebook(tmp_path / "n.ipynb", output=tmp_path / "out.ipynb")
    assert not (tmp_path / "out.ipynb").exists()


def test_cells_as_people_write_them(tmp_path, capsys):
    source = "%matplotlib inline\nimport asyncio\nx = 1\n%timeit -n 1 -r 1 x\nprint(await asyncio.sleep(0, 'slept'))"
    execution = kd.run_notebook(write(tmp_path / "n.ipynb", cell(source)), output=tmp_path / "out.ipynb")
    assert execution.failure == ""
    assert "slept" in capsys.readouterr().out.splitlines()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("x = (1,\ny = 2", "SyntaxError"),
        ("print('\ud800')", "surrogates not allowed"),
        ("input()", "StdinNotImplemented"),
    ],
)
def test_a_cell_that_cannot_run_fails_the_run(tmp_path, source, error):
    text = {"cells": [CODE, CODE | {"source": source}], "metadata": {}, "nbformat": 4, "nbformat_minor": 2}
    (tmp_path / "n.ipynb").write_text(json.dumps(text))
    execution = kd.run_notebook(tmp_path / "n.ipynb", output=tmp_path / "out.ipynb")
    assert execution.failure.startswith("cell 2 of 2 failed")
    assert error in execution.failure
    assert [one.state for one in execution.cells] == ["succeeded", "failed"]
    assert nbformat.read(execution.output, as_version=4).cells[1].source == source


def test_a_notebook_that_cannot_be_saved_any_more_is_no_success(tmp_path):
    folder = tmp_path / "deep"
    path = write(tmp_path / "n.ipynb", cell(f"import shutil\nshutil.rmtree({str(folder)!r})"))
    execution = kd.run_notebook(path, output=folder / "out.ipynb")
    assert "No such file" in execution.failure


@pytest.mark.nightly
def test_a_notebook_of_50_mb(tmp_path):
    cells = [cell(f"print({number})") for number in range(20)]
    path = write(tmp_path / "large.ipynb", new_markdown_cell("x" * 50_000_000), *cells)
    code, out, err = run(path, cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines()[:-1] == [str(number) for number in range(20)]
    assert (tmp_path / "large.executed.ipynb").stat().st_size > 50_000_000


def test_from_python_with_what_the_command_line_has(tmp_path, capsys):
    path = write(tmp_path / "n.ipynb", cell("times = 1", "parameters"), cell("print('x' * times)"))
    execution = kd.run_notebook(path, parameters={"times": 4}, output=tmp_path / "deep" / "out.ipynb")
    assert capsys.readouterr().out == "xxxx\n"
    assert execution.failure == ""
    assert [one.state for one in execution.cells] == ["succeeded"] * 3
    assert execution.output.exists()
