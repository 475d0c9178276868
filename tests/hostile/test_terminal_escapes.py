"""Texts of a job that would control a terminal: its reason, its log, its debugger's prompt, the value of a cell."""

from __future__ import annotations

import builtins

import pytest
from fake_backend import FakeBackend

import kale_dist as kd
from kale_dist import cli, places
from kale_dist.errors import JobFailedError
from kale_dist.job.debugging import Prompts
from kale_dist.job.live_job import Values
from kale_dist.job.status import Breakpoint
from kale_dist.wire import FailureCause, StateName

EVIL = "\x1b]0;title\x07\x1b[2J\x9b1A\u202esudo password: "
COLOURED = "\x1b[31mred\x1b[0m"


def controls(text):
    return {one for one in text if not one.isprintable() and one != "\n"}


def nothing():
    pass


@pytest.fixture
def job(tmp_path, monkeypatch):
    """One that another user's pods might have played: its log and its reason are theirs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def script(run):
        run.event("state", state=StateName.RUNNING)
        run.line(0, f"{EVIL}{COLOURED}")
        run.event("note", text=f"A note {EVIL}", warns=True)
        run.event("state", state=StateName.FAILED, cause=FailureCause.LOST, reason=f"The pod {EVIL} is gone")

    return kd.launch(nothing, number_of_processes=1, on=FakeBackend(script))


def test_the_reason_of_a_failure(job, capsys):
    status = job.wait()
    out = capsys.readouterr().out
    with pytest.raises(JobFailedError) as failed:
        job.result()
    for text in (out, repr(status), str(failed.value), status.reason, *status.notes, *status.warnings):
        assert "sudo password" in text
        assert not controls(text)


@pytest.mark.parametrize(
    "show",
    [lambda job: job.stream_logs(), lambda job: print(job.logs()), lambda job: [print(line) for line in job.logs()]],
    ids=["stream", "print", "each line"],
)
def test_the_log_keeps_its_colours_and_nothing_else(job, capsys, show):
    job.wait()
    capsys.readouterr()
    show(job)
    out = capsys.readouterr().out
    assert COLOURED in out
    assert "sudo password" in out
    assert controls(out) == {"\x1b"}
    assert not controls(out.replace("\x1b[31m", "").replace("\x1b[0m", ""))


def test_the_command_line_prints_no_controls_behind_a_pipe_but_those_that_are_asked_for(job, capsys, monkeypatch):
    job.wait()
    monkeypatch.setattr(places, "NAMES", (*places.NAMES, "fake"))
    monkeypatch.setattr(places, "get", lambda _: job._backend)
    capsys.readouterr()
    assert cli.main(["logs", job.ref]) == cli.main(["status", job.ref]) == 0
    assert not controls(capsys.readouterr().out)
    assert cli.main(["logs", job.ref, "--raw"]) == 0
    assert f"[0] {EVIL}{COLOURED}\n" in capsys.readouterr().out


def test_the_value_of_a_cell_of_live_ranks():
    text = repr(Values({0: {"text/plain": f"{EVIL}{COLOURED}"}}))
    assert COLOURED in text
    assert not controls(text.replace("\x1b[31m", "").replace("\x1b[0m", ""))


def test_the_prompt_and_the_text_of_a_debugger(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(builtins, "input", lambda prompt: asked.append(prompt) or "c")
    there = Breakpoint(prompt="p", where="", text=f"> {EVIL}{COLOURED}\n{EVIL}(rank 0) ", typed="")
    prompts = Prompts(None, "fake://x", "job")
    prompts._now = there
    assert prompts._ask(there) == "c"
    out = capsys.readouterr().out
    assert COLOURED in out
    assert not controls(out.replace("\x1b[31m", "").replace("\x1b[0m", "") + asked[0])
    assert asked[0].endswith("(rank 0) ")
