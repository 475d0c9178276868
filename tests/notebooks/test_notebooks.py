"""Every notebook of the repository runs from its first cell to its last, as `make demo` runs it."""

import os
import pathlib
import re
import subprocess
import sys
import uuid

import nbformat
import pytest
from on_cluster import IMAGE, make_claim

# The one of the tiny Llama makes its weights first, once in a checkout.
pytestmark = pytest.mark.timeout(600)
ROOT = pathlib.Path(__file__).parents[2]
# The tour and the strategies have outputs, and tests of their own; those on debugging and on live ranks ask for input.
NOTEBOOKS = sorted(
    path
    for path in (ROOT / "notebooks").glob("*.ipynb")
    if path.stem not in ("debugging", "live", "tour", "strategies")
)
ON_A_CLUSTER = {"cluster", "data", "finetune_llm on pods"}
CLAIMS = {"data": "datasets", "finetune_llm on pods": "finetune"}
IN_CONTAINERS = {"packages"}


def listed():
    runs = [
        *((path.stem, path) for path in NOTEBOOKS),
        ("finetune_llm on pods", ROOT / "notebooks" / "finetune_llm.ipynb"),
    ]
    return [
        pytest.param((name, path), id=name, marks=pytest.mark.newest if name == "digits" else pytest.mark.nightly)
        for name, path in runs
    ]


@pytest.fixture(scope="module", params=listed())
def executed(request, tmp_path_factory):
    name, path = request.param
    output = tmp_path_factory.mktemp("executed") / path.name
    settings = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    options = []
    if name in ON_A_CLUSTER:
        settings["KALE_DIST_NAMESPACE"] = request.getfixturevalue("make_namespace")()
        settings["KALE_DIST_IMAGE"] = IMAGE
    if name in CLAIMS:
        make_claim(settings["KALE_DIST_NAMESPACE"], CLAIMS[name])
    if name in IN_CONTAINERS:
        settings["KALE_DIST_IMAGE"] = request.getfixturevalue("image")
        settings["KALE_DIST_REGISTRY"] = f"{IMAGE.partition('/')[0]}/test-{uuid.uuid4().hex[:8]}"
    if name == "finetune_llm on pods":
        # Its packages are a layer of 300 MB, which the registry keeps once.
        settings["KALE_DIST_REGISTRY"] = f"{IMAGE.partition('/')[0]}/kale-dist-tests"
        options = ["-p", "ON", "kubernetes", "-p", "STEPS", "150"]
    found = subprocess.run(
        [sys.executable, "-m", "kale_dist.cli", "run", str(path), *options, "-o", str(output)],
        capture_output=True, text=True, check=False, timeout=500,
        env=os.environ | settings,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    return name, found.stdout, nbformat.read(output, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_repositorys_copy_has_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_it_shows_ranks_a_picture_and_the_jobs_end(executed):
    name, out, notebook = executed
    assert re.search(r"^\[0\] ", out, re.MULTILINE)
    # The ready-made step prints nothing.
    assert name in ("sweep", "hugging_face") or re.search(r"^\[1\] ", out, re.MULTILINE)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [one for one in outputs if one["output_type"] == "error"] == []
    assert any("image/png" in one.get("data", {}) for one in outputs)
    shown = [one["data"]["text/html"] for one in outputs if 'role="group"' in one.get("data", {}).get("text/html", "")]
    assert shown
    ends = ("succeeded", "12 of 12 trials", *(["cancelled"] if name == "resuming" else []))
    assert all(any(end in picture for end in ends) for picture in shown)


def test_digits_are_learnt_and_the_bar_moves(executed):
    name, out, notebook = executed
    if name == "launch":
        assert "points" in out
        return
    if name == "sweep":
        assert int(re.search(r"^(\d+) of 12 trials were pruned$", out, re.MULTILINE)[1]) >= 1
        assert float(re.search(r"^accuracy here: (0\.\d+)$", out, re.MULTILINE)[1]) >= 0.85
        return
    if name == "gan":
        assert re.search(r"^\d+% of the points drawn lie in a cloud, and [678] of 8 clouds are hit$", out, re.MULTILINE)
        waiting = next(cell for cell in notebook.cells if cell.source == "job.wait()")
        # Those that rank 0 has drawn.
        assert len([one for one in waiting.outputs if "image/png" in one.get("data", {})]) == 4
        return
    if name.startswith("finetune_llm"):
        before, after, small = map(int, re.findall(r"^(\d+) of 50 are right$", out, re.MULTILINE))
        assert before == 0
        assert after >= 45
        assert small >= 40
        # A process was lost after the checkpoint of step 10.
        assert int(re.search(r"Attempt 2: Step (\d+) of ", out)[1]) > 10
        return
    assert float(re.search(r"^test accuracy: ([01]\.\d+)$", out, re.MULTILINE)[1]) >= (
        0.9 if name == "images" else 0.95
    )
    assert len(re.findall(r"^▕.*▏ \d+ % ", out, re.MULTILINE)) >= 3
    assert (
        "800 samples, 2 ranks x 400" if name in ("sounds", "hugging_face") else "1,437 samples, 2 ranks x 719/718"
    ) in out
