"""The notebook on collectives in live ranks: with a person who types what it says, and without one."""

import os
import pathlib
import subprocess
import sys

import nbformat

ROOT = pathlib.Path(__file__).parents[2]
PATH = ROOT / "notebooks" / "live.ipynb"


def test_it_teaches_what_it_says(typed):
    notebook = nbformat.read(PATH, as_version=4)
    said = next(cell.source for cell in notebook.cells if "```text" in cell.source)
    lines = said.partition("```text\n")[2].partition("\n```")[0].splitlines()
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


def test_without_a_person_it_runs_to_its_end(tmp_path):
    found = subprocess.run(
        [sys.executable, "-m", "kale_dist.cli", "run", str(PATH), "-o", str(tmp_path / "executed.ipynb")],
        capture_output=True, text=True, check=False, timeout=250, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_repositorys_copy_has_no_outputs():
    for cell in nbformat.read(PATH, as_version=4).cells:
        assert cell.get("outputs", []) == []
