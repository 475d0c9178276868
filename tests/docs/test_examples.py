"""The examples of the documentation run: each page is a script in a folder of its own."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _script(page):
    """The blocks of a page, each on the line that it has there."""
    text = page.read_text()
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for number, line in enumerate(block[1].splitlines(), first):
            lines[number] = line
    return "\n".join(lines).rstrip() + "\n"


WITH_EXAMPLES = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.stem)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / f"{page.stem}.py"
    script.write_text(_script(page))
    run = subprocess.run(
        [sys.executable, script],
        check=False,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"


def test_links_lead_somewhere():
    missing = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not missing


def test_every_argument_of_the_call_is_in_its_table():
    import inspect

    import kale_dist as kd

    page = (ROOT / "docs" / "training.md").read_text()
    rows = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    of_places = {*inspect.signature(kd.Docker).parameters, *inspect.signature(kd.Kubernetes).parameters}
    assert rows - of_places == set(inspect.signature(kd.distribute).parameters) - {"unknown"}
    assert rows >= set(inspect.signature(kd.Docker).parameters)


def test_every_public_name_is_in_the_reference():
    import kale_dist as kd

    page = (ROOT / "docs" / "reference.md").read_text() + (ROOT / "docs" / "errors.md").read_text()
    documented = {name.rpartition(".")[2] for name in re.findall(r":: (kale_dist[\w.]*)", page)}
    assert set(kd.__all__) - documented - {"KaleDistError", "__version__"} == set()
