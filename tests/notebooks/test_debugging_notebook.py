"""The notebook on debugging: with a person who types what it says, and without one."""

import os
import pathlib
import subprocess
import sys

import nbformat

ROOT = pathlib.Path(__file__).parents[2]
PATH = ROOT / "notebooks" / "debugging.ipynb"


def test_what_it_says_to_type_shows_the_bug(typed):
    notebook = nbformat.read(PATH, as_version=4)
    said = next(cell.source for cell in notebook.cells if "```text" in cell.source)
    lines = said.partition("```text\n")[2].partition("\n```")[0].splitlines()
    outputs = [typed(cell.source, lines) for cell in notebook.cells if cell.cell_type == "code"]
    assert lines == []
    wrong, debugged, right, error = outputs[1], outputs[2], outputs[4], outputs[5]
    assert float(wrong.rpartition(" ")[2]) > 1000
    assert 1.8 < float(debugged.partition("tensor(")[2].partition(")")[0]) < 2.5
    assert float(right.rpartition(" ")[2]) < 0.01
    assert "hidden = Tensor (3, 4) float32 cpu, 12 not finite" in error


def test_without_a_person_it_runs_to_its_end(tmp_path):
    found = subprocess.run(
        [sys.executable, "-m", "kale_dist.cli", "run", str(PATH), "-o", str(tmp_path / "executed.ipynb")],
        capture_output=True, text=True, check=False, timeout=250, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Rank 1 has passed over breakpoint()" in found.stdout


def test_the_repositorys_copy_has_no_outputs():
    for cell in nbformat.read(PATH, as_version=4).cells:
        assert cell.get("outputs", []) == []
