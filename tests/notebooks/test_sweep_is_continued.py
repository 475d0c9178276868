"""The sweep of notebooks/sweep.ipynb, killed half-way and continued."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import nbformat
import pytest

from kale_dist import sweeps

pytest.importorskip("optuna", reason="needs Optuna")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = pathlib.Path(__file__).parents[2]


def ended(picture):
    return {row.number: row for row in picture.rows if row.state in ("complete", "pruned")}


def test_no_trial_is_lost_and_a_third_is_pruned(tmp_path):
    cells = nbformat.read(ROOT / "notebooks" / "sweep.ipynb", as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert code.count("trials=12,") == 1
    script = tmp_path / "sweep.py"
    script.write_text(code.replace("trials=12,", "trials=12, name='digits',").replace("plt.show()", ""))
    command = [sys.executable, script]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    process = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 400
    while "digits" not in sweeps.sweeps() or len(ended(sweeps.read("digits"))) < 5:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = sweeps.read("digits")
    assert len(ended(before)) < 12
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert again.returncode == 0, again.stderr
    print(again.stdout, sweeps.read("digits"))
    after = sweeps.read("digits")
    assert len(ended(after)) == 12
    # What had ended stays as it was, and what ran is tried again.
    assert ended(before).items() <= ended(after).items()
    tried = [row.params for row in ended(after).values()]
    assert all(row.params in tried for row in before.rows if row.state == "running" and row.params)
    assert after.count("pruned") >= 4
