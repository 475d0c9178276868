"""`kale-dist mcp` and a real client of the package `mcp`, over standard input and output."""

import json
import pathlib
import re
import sys

import nbformat
import pytest
from assistants import serving
from waiting import until

import kale_dist as kd
from kale_dist.cli import main
from kale_dist.job import records
from kale_dist.job.backend import JobRef

TRAINS = """
import sys, time
import kale_dist as kd
from kale_dist.cli import main
print("began with", sys.argv[1:], flush=True)
for epoch in range(3):
    kd.report(loss=1 / (1 + epoch))
print("\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07end")
"""
FAILS = """
def mean(values):
    total = sum(values)
    return total / len(values)

mean([])
"""
STAYS = """
import time
print("waits", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def assistant(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    for name, text in (("trains.py", TRAINS), ("fails.py", FAILS), ("stays.py", STAYS)):
        (folder / name).write_text(text)
    with serving(folder) as found:
        yield found


def references():
    return {job.ref for job in kd.jobs()}


def test_there_are_eight_tools_that_say_what_they_do_and_which_of_them_ends_something(assistant):
    tools = {tool.name: tool for tool in assistant.tools()}
    assert list(tools) == ["plan", "submit", "status", "logs", "metrics", "explain", "stop", "list"]
    assert all(len(tool.description) > 50 for tool in tools.values())
    assert [name for name, tool in tools.items() if tool.annotations.destructive_hint] == ["stop"]
    assert [name for name, tool in tools.items() if not tool.annotations.read_only_hint] == ["submit", "stop"]


@pytest.mark.newest
def test_it_plans_submits_waits_and_reads(assistant):
    before = references()
    asked = {"number_of_processes": 2, "arguments": ["--lr", "0.1"], "settings": {"environment": {"A": "shown"}}}
    plan = assistant.ask("plan", path="trains.py", **asked)
    assert '"arguments": ["--lr", "0.1"]' in plan
    assert '{"A": "shown"}' in plan
    token = assistant.token("trains.py", **asked)
    assert "trains.py on local, ranks: 2" in token
    assert references() == before
    said = assistant.ask("submit", token=token)
    ref = re.search(r"as (\S+)\. ", said)[1]
    assert assistant.ask("submit", token=token) == f"It was submitted before, as {ref}"
    assert references() == before | {ref}
    assert re.fullmatch(rf"{ref}: Succeeded on 2 ranks, .*\.", assistant.ask("status", ref=ref, wait_s=50))
    first = assistant.ask("logs", ref=ref)
    assert "(4 lines. It has ended; the next is since=4.)" in first
    rest = assistant.ask("logs", ref=ref, since=2)
    assert first.endswith(rest.partition("(")[0] + "(4 lines. It has ended; the next is since=4.)")
    assert first.count("red end") == first.count("began with ['--lr', '0.1']") == 2
    rows = [json.loads(line) for line in assistant.ask("metrics", ref=ref).splitlines()]
    assert [row["loss"] for row in rows if row["rank"] == 0][-1:] == [1 / 3]
    assert ref in assistant.ask("list")
    assert "It has ended already" in assistant.ask("stop", ref=ref)


def test_it_reads_why_a_job_failed_and_where(assistant):
    ref = assistant.submit("fails.py")
    assert "division by zero" in assistant.ask("status", ref=ref, wait_s=50)
    explained = assistant.ask("explain", ref=ref)
    assert "fails.py:4 in mean\nreturn total / len(values)" in explained
    assert "values = list of 0" in explained
    assert "What to do: mend that line" in explained


def test_it_stops_a_job_only_with_the_word_that_it_was_told_for_this_job(assistant):
    ref, other = assistant.submit("stays.py"), assistant.submit("stays.py")
    until(lambda: "waits" in assistant.ask("logs", ref=ref), 30)
    assert re.fullmatch(rf"{ref} running: .*\.", assistant.ask("status", ref=ref, wait_s=0.2))
    of_other = re.search("token '(.*)'", assistant.ask("stop", ref=other))[1]
    for token in ("", "yes", of_other):
        told = assistant.ask("stop", ref=ref, token=token)
        assert f"{ref} running" in told
        assert "It still runs" in told
    assert not kd.attach(ref).done()
    assert f"{ref}: Cancelled" in assistant.stop(ref)
    assert not kd.attach(other).done()
    assert f"{other}: Cancelled" in assistant.stop(other)


def test_a_job_outlives_the_assistant(assistant):
    with serving(assistant.folder) as another:
        ref = another.submit("stays.py")
        until(lambda: "waits" in another.ask("logs", ref=ref), 30)
    assert f"{ref} running" in assistant.ask("status", ref=ref)
    assistant.stop(ref)


def test_a_notebook_runs_with_parameters_and_is_stopped_with_its_jobs(assistant):
    cells = [
        nbformat.v4.new_code_cell("seconds = 0.0", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(
            "import time, kale_dist as kd\njob = kd.launch(time.sleep, seconds, number_of_processes=2, name='of-' + label)"
        ),
        nbformat.v4.new_code_cell("print(len(job.results()), 'ranks')"),
    ]
    cells[0].source += "\nlabel = 'a'"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), assistant.folder / "train.ipynb")
    assert "no parameter" in assistant.refusal("plan", path="train.ipynb", parameters={"minutes": 1})
    assert "parameters alone" in assistant.refusal("plan", path="train.ipynb", arguments=["1"])
    assert "runs once" in assistant.refusal("plan", path="train.ipynb", number_of_processes=2)
    ref = assistant.submit("train.ipynb", parameters={"seconds": 0.1})
    assert "Succeeded" in assistant.ask("status", ref=ref, wait_s=50)
    assert "2 ranks" in assistant.ask("logs", ref=ref)
    assert "seconds = 0.1" in (assistant.folder / "train.executed.ipynb").read_text()
    ref = assistant.submit("train.ipynb", parameters={"seconds": 600, "label": "b"})
    until(lambda: "local://of-b" in references() and str(kd.attach("of-b").status.state) == "running", 60)
    assistant.stop(ref)
    assert str(kd.attach("of-b").wait(20).state) == "cancelled"


HOSTILE = [
    ("plan", {"path": "../outside.py"}, "is not below"),
    ("plan", {"path": "/etc/passwd"}, "is not below"),
    ("plan", {"path": "link.py"}, "is not below"),
    ("plan", {"path": "a\0b.py"}, "no file that ends in"),
    ("plan", {"path": "."}, "no file that ends in"),
    ("plan", {"path": "trains.py; rm -rf ~"}, "no file that ends in"),
    ("plan", {"path": "torn.py"}, "not Python code"),
    ("plan", {"path": "trains.py", "on": "http://host"}, "no place"),
    ("plan", {"path": "trains.py", "number_of_processes": 0}, "is neither a whole number of 1 or more"),
    ("plan", {"path": "trains.py", "number_of_processes": 10**9}, "are free. Ask for"),
    ("plan", {"path": "trains.py", "settings": {"detach": False}}, "there is no setting"),
    ("plan", {"path": "trains.py", "settings": {"on": "local"}}, "there is no setting"),
    ("plan", {"path": "trains.py", "settings": {"\x1b[31m": 1}}, "no setting"),
    ("plan", {"path": "trains.py", "settings": {"name": "../../x"}}, "is not made of lower-case letters"),
    ("plan", {"path": "trains.py", "settings": {"image": "x"}}, "on this machine use its packages"),
    ("plan", {"path": "trains.py", "parameters": {"a": 1}}, "is a script. Give arguments"),
    ("plan", {"path": ["trains.py"]}, "should be a valid string"),
    ("plan", {}, "Field required"),
    ("submit", {"token": "trains.py on local, ranks: 1, 00000000"}, "of no plan"),
    ("status", {"ref": "local://../../etc"}, "does not name a job"),
    ("status", {"ref": "no-such-job"}, "There is no job"),
    ("status", {"ref": "no-such-job", "wait_s": 1e9}, "between 0 and 50"),
    ("status", {"ref": "no-such-job", "wait_s": "nan"}, "between 0 and 50"),
    ("logs", {"ref": "no-such-job", "since": -1}, "is not a whole number of 0 or more"),
    ("metrics", {"ref": "http://host/job"}, "there is no backend"),
    ("shell", {"command": "id"}, "Unknown tool"),
]


@pytest.mark.parametrize(("tool", "arguments", "said"), HOSTILE)
def test_what_is_wrong_is_refused_in_a_sentence_and_starts_nothing(assistant, tool, arguments, said):
    (assistant.folder.parent / "outside.py").write_text("print(1)")
    (assistant.folder / "torn.py").write_text("print(")
    link = assistant.folder / "link.py"
    if not link.is_symlink():
        link.symlink_to(assistant.folder.parent / "outside.py")
    before = references()
    assert said.lower() in assistant.refusal(tool, **arguments).lower()
    assert references() == before


def test_a_file_that_was_changed_after_its_plan_is_planned_again(assistant):
    file = assistant.folder / "changing.py"
    file.write_text("print(1)")
    token = assistant.token("changing.py")
    file.write_text("print(2)")
    assert "has changed since it was planned" in assistant.refusal("submit", token=token)
    assert "[0] 2" in assistant.ask("logs", ref=_ended(assistant, "changing.py"))


def test_a_plan_runs_no_code_of_the_folder(assistant):
    named = ("docker", "kubernetes", "nbformat", "requests", "urllib3", "yaml")
    for name in named:
        (assistant.folder / f"{name}.py").write_text(f"import pathlib\npathlib.Path('{name} ran').touch()\n")
    nbformat.write(nbformat.v4.new_notebook(), assistant.folder / "empty.ipynb")
    try:
        with serving(assistant.folder) as fresh:
            for on in ("local", "docker", "kubernetes"):
                image = {} if on == "local" else {"image": "python:3.11"}
                fresh.call("plan", path="trains.py", on=on, settings=image)
            fresh.ask("plan", path="empty.ipynb")
    finally:
        for name in named:
            (assistant.folder / f"{name}.py").unlink()
    assert [file.name for file in assistant.folder.glob("* ran")] == []


def test_a_module_beside_the_script_that_was_changed_is_planned_again(assistant):
    for folder in ("a", "b"):
        (assistant.folder / folder).mkdir()
        (assistant.folder / folder / "train.py").write_text("import beside\n")
        (assistant.folder / folder / "beside.py").write_text(f"NAME = '{folder}'\n")
    elsewhere = {"on": "docker", "settings": {"image": "python:3.11"}}
    token = assistant.token("a/train.py", **elsewhere)
    assistant.token("b/train.py", **elsewhere)
    (assistant.folder / "b" / "beside.py").write_text("NAME = 'c'\n")
    (assistant.folder / "a" / "beside.py").write_text("NAME = 'd'\n")
    assert "or what it sends" in assistant.refusal("submit", token=token)


def test_an_executed_notebook_follows_no_link(assistant):
    nbformat.write(nbformat.v4.new_notebook(), assistant.folder / "linked.ipynb")
    (assistant.folder / "linked.executed.ipynb").symlink_to(assistant.folder.parent / "victim.ipynb")
    assert "is a link" in assistant.refusal("plan", path="linked.ipynb")


def test_a_failed_notebook_names_its_cell(assistant):
    cell = nbformat.v4.new_code_cell("values = []\nvalues[3]")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), assistant.folder / "broken.ipynb")
    ref = assistant.submit("broken.ipynb")
    assert "cell 1 of 1 failed" in assistant.ask("status", ref=ref, wait_s=50)
    assert "IndexError: list index out of range" in assistant.ask("explain", ref=ref)


def test_a_long_log_says_that_more_follows_and_a_metric_that_is_no_number_is_text(assistant):
    script = "import kale_dist as kd\nfor n in range(450):\n    print(n)\nkd.report(loss=float('nan'))\n"
    (assistant.folder / "long.py").write_text(script)
    ref = _ended(assistant, "long.py")
    assert "(200 lines. More lines follow; the next is since=200.)" in assistant.ask("logs", ref=ref)
    assert "[0] 449\n(50 lines. It has ended; the next is since=450.)" in assistant.ask("logs", ref=ref, since=400)
    assert json.loads(assistant.ask("metrics", ref=ref))["loss"] == "nan"


def _ended(assistant, path):
    ref = assistant.submit(path)
    assistant.ask("status", ref=ref, wait_s=50)
    return ref


def test_of_another_users_job_it_sees_the_state_alone(assistant):
    ref = _ended(assistant, "fails.py")
    # Whose key is not here is another user's.
    pathlib.Path(records.files(JobRef.parse(ref).record_name).key).unlink()
    assert assistant.ask("status", ref=ref) == f"{ref} (of another user): failed on 1 ranks"
    for tool in ("logs", "metrics", "explain", "stop"):
        assert "was not submitted from here" in assistant.refusal(tool, ref=ref)
    assert ref not in assistant.ask("list")


def test_without_the_package_or_the_folder_it_says_what_to_do(monkeypatch, capsys, tmp_path):
    assert main(["mcp", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp", str(tmp_path)]) == 2
    assert (
        "needs the package 'mcp', which is not installed in this Python. Install it: pip install '.[mcp]'"
        in capsys.readouterr().err
    )
