"""The tour runs, and the outputs that the repository's copy has are those of a run."""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest

TOUR = pathlib.Path(__file__).parents[2] / "notebooks" / "tour.ipynb"


def kinds(notebook):
    """Each cell, and what kinds of output it has. Text that arrives in two parts is one output."""
    return [
        (
            cell.source,
            [
                kind
                for kind, _ in itertools.groupby(
                    (output.output_type, output.get("name", ""), sorted(output.get("data", {})))
                    for output in cell.get("outputs", [])
                )
            ],
        )
        for cell in notebook.cells
    ]


def shown(notebook):
    """All outputs as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.fixture(scope="module")
def kept():
    return nbformat.read(TOUR, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour")
    ended = subprocess.run(
        [sys.executable, "-m", "kale_dist.cli", "run", str(TOUR), "-o", str(folder / "out.ipynb")],
        capture_output=True, text=True, check=False, timeout=250,
        env=os.environ | {"PYTHONPATH": str(TOUR.parents[1]), "XDG_STATE_HOME": str(folder)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return nbformat.read(folder / "out.ipynb", as_version=4)


def test_the_repositorys_copy_has_outputs_of_these_cells(kept, executed):
    nbformat.validate(kept)
    assert kinds(kept) == kinds(executed)
    counts = [cell.execution_count for cell in kept.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_it_tells_nothing_of_the_machine_it_ran_on(kept):
    assert re.findall(r"(?:/home|/root|/tmp|/work|/Users)/\S*", shown(kept)) == []


@pytest.mark.parametrize("which", ["kept", "executed"])
def test_it_shows_what_there_is(which, request):
    notebook = request.getfixturevalue(which)
    text = shown(notebook)
    assert float(re.search(r"^accuracy here: (0\.\d+)$", text, re.MULTILINE)[1]) >= 0.9
    assert len(re.findall(r"^epoch \d: loss [\d.]+, accuracy [\d.]+$", text, re.MULTILINE)) == 8
    assert "[2.5, 2.5]" in text
    assert "[1] process 1 has 3.0" in text
    assert "[(0, 3.0, 1437), (1, 3.0, 1437)]" in text
    assert re.search(r"^average-\S+ +succeeded", text, re.MULTILINE)
    assert "job = kd.distribute(" in text
    assert 'return table[f"process {rank}"]' in text
    assert "KeyError('process 1')" in text
    assert "einops==0.8.1" in text
    pictures = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    states = [re.search(r"succeeded|cancelled|failed|running", picture)[0] for picture in pictures]
    assert states == ["succeeded"] * 3 + ["cancelled"]
    assert any("<svg" in picture for picture in pictures)
