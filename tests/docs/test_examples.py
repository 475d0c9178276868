"""The examples of the documentation run: each page is a script in a folder of its own."""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
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


FIRST = {"README": pytest.mark.newest, "first-steps": [pytest.mark.newest, pytest.mark.nightly]}
"""The README's examples run in the gate, those of the others in the nightly, and those of a user's first hour in `make newest`, too."""
WITH_EXAMPLES = [
    pytest.param(page, id=page.stem, marks=FIRST.get(page.stem, pytest.mark.nightly))
    for page in PAGES
    if BLOCK.search(page.read_text())
]


@pytest.mark.parametrize("page", WITH_EXAMPLES)
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


ASKED = (
    "resuming: resume after crash|resuming: restart kernel|data: dataset on s3|cluster: memory of a pod|cluster: private registry"
    "|images: private registry|models: two optimizers|training: timeout"
)
"""Pages, and what people search for that find them."""


@pytest.mark.parametrize("asked", ASKED.split("|"))
def test_what_people_search_for_stands_in_the_page(asked):
    page, *words = re.findall(r"\w+", asked)
    assert set(words) <= set(re.findall(r"\w+", (ROOT / "docs" / f"{page}.md").read_text().lower()))


def test_links_lead_somewhere():
    missing = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", re.sub(r"(?s)```.*?```", "", page.read_text()))
        if not (page.parent / target).exists()
    ]
    assert not missing


def test_every_argument_of_the_call_is_in_its_table():
    import kale_dist as kd

    page = (ROOT / "docs" / "training.md").read_text()
    rows = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    of_places = {*inspect.signature(kd.Docker).parameters, *inspect.signature(kd.Kubernetes).parameters}
    assert rows - of_places == set(inspect.signature(kd.distribute).parameters) - {"unknown"}
    assert rows >= set(inspect.signature(kd.Docker).parameters)


def test_every_public_name_is_in_the_reference():
    import kale_dist as kd

    page = (ROOT / "docs" / "reference.md").read_text() + (ROOT / "docs" / "errors.md").read_text()
    documented = set(re.findall(r":: (kale_dist[\w.]*)", page))
    assert (
        set(kd.__all__) - {name.rpartition(".")[2] for name in documented} - {"KaleDistError", "__version__"} == set()
    )
    named = {f"kale_dist.strategies.{one.__name__}" for one in kd.strategies.ALL}
    named |= {f"kale_dist.callbacks.{name}" for name in kd.callbacks.__all__}
    assert named - documented == set()


EVERYWHERE = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])


def _blocks(page, words):
    return re.findall(rf"^```(?:{words})\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def _arguments(verb):
    """Names that a call of it can take; None if any."""
    parameters = inspect.signature(verb).parameters
    if dataclasses.is_dataclass(verb):
        return {field.name for field in dataclasses.fields(verb)}
    return None if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) else set(parameters)


def test_examples_that_do_not_run_use_names_and_arguments_that_exist():
    import kale_dist as kd

    wrong = []
    for page in EVERYWHERE:
        for block in _blocks(page, "py"):
            # Magics of notebooks are no Python.
            for node in ast.walk(ast.parse(re.sub(r"^%.*$", "pass", block, flags=re.MULTILINE))):
                match node:
                    case ast.Attribute(value=ast.Name(id="job"), attr=name) if not hasattr(kd.Job, name):
                        wrong.append(f"{page.name}: job.{name}")
                    case ast.Call(func=ast.Attribute()) if re.fullmatch(r"kd(\.\w+)+", name := ast.unparse(node.func)):
                        known = _arguments(functools.reduce(getattr, name.split(".")[1:], kd))
                        given = {keyword.arg for keyword in node.keywords if keyword.arg}
                        wrong += [f"{page.name}: {name}({more}=)" for more in given - (known or given)]
    assert not wrong


def test_commands_have_options_that_exist(capsys):
    from kale_dist import cli
    from kale_dist.cli import launch_command

    for page in EVERYWHERE:
        for line in re.findall(
            r"^kale-dist (.*)$", "".join(_blocks(page, "sh|text")).replace("\\\n", ""), re.MULTILINE
        ):
            words, _ = launch_command.split(shlex.split(re.split(" [|>] ", line)[0], comments=True))
            try:
                _, unknown = cli._parser().parse_known_args(words)
            except SystemExit:
                unknown = [capsys.readouterr().err]
            assert not unknown, f"{page.name}: {line}"
