"""The notebook that trains one model with every strategy runs, and the repository's copy has outputs of a run."""

import os
import pathlib
import subprocess
import sys

import nbformat
import pytest

import kale_dist as kd

pytestmark = pytest.mark.nightly
STRATEGIES = pathlib.Path(__file__).parents[2] / "notebooks" / "strategies.ipynb"


def executed(folder, *options):
    output = folder / "out.ipynb"
    ended = subprocess.run(
        [sys.executable, "-m", "kale_dist.cli", "run", str(STRATEGIES), "-o", str(output), *options],
        capture_output=True, text=True, check=False, timeout=850,
        env=os.environ | {"PYTHONPATH": str(STRATEGIES.parents[1])},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return nbformat.read(output, as_version=4)


def kinds(notebook):
    """Each cell's source, and what its outputs are."""
    return [
        (cell.source, [(output.output_type, sorted(output.get("data", {}))) for output in cell.get("outputs", [])])
        for cell in notebook.cells
        if "injected-parameters" not in cell.metadata.get("tags", [])
    ]


def test_a_quick_run_gives_what_the_repositorys_copy_has(tmp_path):
    kept = nbformat.read(STRATEGIES, as_version=4)
    nbformat.validate(kept)
    quick = executed(tmp_path, "-p", "epochs", "1", "-p", "chosen", '["ddp", "fsdp", "local-sgd"]')
    assert kinds(quick) == kinds(kept)
    assert "2 of 3 have the losses of ddp" in str(quick)
    source = "\n".join(cell.source for cell in kept.cells)
    # The dictionary names each class by its word, or makes one.
    assert all(f'"{one.word}"' in source or f"{one.__name__}(" in source for one in kd.strategies.ALL)


@pytest.mark.timeout(900)
def test_all_learn_the_digits(tmp_path):
    notebook = executed(tmp_path)
    assert "6 of 9 have the losses of ddp" in str(notebook)
    (table,) = (
        output.data["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "megabytes" in output.get("data", {}).get("text/plain", "")
    )
    accuracies = [float(line.split()[-1]) for line in table.splitlines()[1:]]
    assert len(accuracies) == 9
    assert min(accuracies) >= 0.9
