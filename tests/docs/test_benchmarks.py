"""Benchmarks run by hand, so that nothing else notices when they use what is gone."""

import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.mark.nightly
@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_it_finds_all_that_it_imports(file):
    code = "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1])"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(file), str(FOLDER)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
