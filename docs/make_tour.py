"""Execute notebooks/tour.ipynb and keep its outputs in it.

Run it with `.venv/bin/python docs/make_tour.py` after `make test`, whenever the tour or what it shows has changed.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

import nbformat

TOUR = pathlib.Path(__file__).parents[1] / "notebooks" / "tour.ipynb"


def main() -> None:
    """Execute it where no other job is listed, and leave out when each cell ran."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "tour.ipynb")
        command = [sys.executable, "-m", "kale_dist.cli", "run", str(TOUR), "-o", str(output)]
        subprocess.run(command, check=True, env=os.environ | {"XDG_STATE_HOME": folder})
        notebook = nbformat.read(output, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, TOUR)


if __name__ == "__main__":
    main()
