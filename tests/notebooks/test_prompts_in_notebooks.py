"""The notebooks on debugging and on live ranks: with a person who types what they say, and without one."""

import os
import pathlib
import subprocess
import sys

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]
DEBUGGING, LIVE = (ROOT / "notebooks" / name for name in ("debugging.ipynb", "live.ipynb"))


def lines_to_type(notebook):
    said = next(cell.source for cell in notebook.cells if "```text" in cell.source)
    return said.partition("```text\n")[2].partition("\n```")[0].splitlines()


def test_what_the_one_on_debugging_says_to_type_shows_the_bug(typed):
    notebook = nbformat.read(DEBUGGING, as_version=4)
    lines = lines_to_type(notebook)
    outputs = [typed(cell.source, lines) for cell in notebook.cells if cell.cell_type == "code"]
    assert lines == []
    wrong, debugged, right, error = outputs[1], outputs[2], outputs[4], outputs[5]
    assert float(wrong.rpartition(" ")[2]) > 1000
    assert 1.8 < float(debugged.partition("tensor(")[2].partition(")")[0]) < 2.5
    assert float(right.rpartition(" ")[2]) < 0.01
    assert "hidden = Tensor (3, 4) float32 cpu, 12 not finite" in error


@pytest.mark.nightly
def test_the_one_on_live_ranks_teaches_what_it_says(typed):
    notebook = nbformat.read(LIVE, as_version=4)
    lines = lines_to_type(notebook)
    outputs = [
        typed(cell.source, lines, "CellError" if "raises-exception" in cell.metadata.get("tags", ()) else "")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert lines == []
    assert "ranks 0-1: 3.0" in outputs[2]
    assert "ranks 0-1: ([0.0, 1.0], 1.0)" in outputs[3]
    wrong, debugged, right, failed, after, pulled = outputs[5:11]
    assert float(wrong.rpartition(" ")[2]) > 1000
    assert 1.5 < float(debugged.partition("tensor(")[2].partition(")")[0]) < 2.5
    assert float(right.rpartition(" ")[2]) < 0.01
    assert "Rank 1: ValueError: a bad batch" in failed
    assert float(after.rpartition(" ")[2]) < 0.01
    assert "[1.0, 1.0, 1.0, 1.0]" in pulled
    assert "has ended" in outputs[11]


@pytest.mark.nightly
@pytest.mark.parametrize("path", [DEBUGGING, LIVE], ids=["debugging", "live"])
def test_without_a_person_it_runs_to_its_end(tmp_path, path):
    found = subprocess.run(
        [sys.executable, "-m", "kale_dist.cli", "run", str(path), "-o", str(tmp_path / "executed.ipynb")],
        capture_output=True, text=True, check=False, timeout=250, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert path == LIVE or "Rank 1 has passed over breakpoint()" in found.stdout
    assert not [cell for cell in nbformat.read(path, as_version=4).cells if cell.get("outputs")]
