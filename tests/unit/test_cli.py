"""The command line on real jobs, mostly as a program of its own."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import kale_dist as kd
from kale_dist import wire
from kale_dist.cli import main
from kale_dist.errors import JobNotFoundError
from kale_dist.job import records
from kale_dist.job.backend import JobRef
from kale_dist.wire import StateName


def speak(count):
    for number in range(count):
        print(f"line {number}", flush=True)
    kd.report(loss=0.5)


def wait_for_ever():
    print("waiting", flush=True)
    while True:
        time.sleep(0.1)


def program(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "kale_dist.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )


@pytest.fixture(scope="module")
def job():
    job = kd.launch(speak, 5, number_of_processes=2, name="speaks")
    job.wait()
    yield job
    with contextlib.suppress(JobNotFoundError):
        job.delete()


@pytest.fixture
def endless():
    job = kd.launch(wait_for_ever, number_of_processes=1)
    next(iter(job.logs(follow=True)))
    yield job
    job.delete()


def test_jobs_lists_state_ranks_and_sizes(job, capsys):
    assert main(["jobs"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^speaks +succeeded +2 +20\d\d-.* MiB$", out, re.MULTILINE)
    assert str(records.blobs_dir()) in out


def test_jobs_of_an_empty_machine(tmp_path):
    found = program("jobs", env={**os.environ, "XDG_STATE_HOME": str(tmp_path)})
    assert found.returncode == 0
    assert found.stdout.splitlines()[0] == "There are no jobs."
    assert "Elsewhere: kale-dist jobs --on docker or kale-dist jobs --on kubernetes" in found.stdout
    found = program("jobs", "--on", "local", env={**os.environ, "XDG_STATE_HOME": str(tmp_path)})
    assert (found.returncode, found.stdout) == (0, "There are no jobs.\n")


@pytest.fixture
def elsewhere(job):
    """Records of a job on a cluster, which has ended, and of one on an engine, which ran when it was last seen."""
    made = {}
    for ref, states in (
        ("kubernetes://team/far", [StateName.RUNNING, StateName.SUCCEEDED]),
        ("docker://near", [StateName.RUNNING]),
    ):
        name = JobRef.parse(ref).record_name
        files = records.create(name, b"key")
        records.write(dataclasses.replace(records.read("speaks"), ref=ref, name=name))
        files.events.write_bytes(
            b"".join(
                wire.encode_json(
                    {
                        "event": "state",
                        "time": 1.0 + second,
                        "attempt": 0,
                        "state": state,
                        "reason": "",
                        "cause": None,
                    }
                )
                for second, state in enumerate(states)
            )
        )
        made[ref] = name
    yield made
    for name in made.values():
        records.delete(name)


def test_jobs_lists_what_records_know_of_jobs_elsewhere_and_asks_nobody(elsewhere):
    nowhere = {"KUBECONFIG": "/absent/config", "DOCKER_HOST": "unix:///absent/socket"}
    found = program("jobs", env=os.environ | nowhere)
    assert found.returncode == 0, found.stderr
    assert re.search(r"^speaks +succeeded ", found.stdout, re.MULTILINE)
    assert re.search(
        r"^docker://near +running +2 +20\d\d-\d\d-\d\d \d\d:\d\d +\d+\.\d MiB$", found.stdout, re.MULTILINE
    )
    assert re.search(r"^kubernetes://team/far +succeeded +2 .* 1\.0 s +\d", found.stdout, re.MULTILINE)
    assert "as this machine last saw them" in found.stdout
    assert "As they are now: kale-dist jobs --on docker or kale-dist jobs --on kubernetes" in found.stdout


def test_jobs_of_a_place_that_is_named_are_those_of_that_place(elsewhere):
    found = program("jobs", "--on", "local")
    assert "speaks" in found.stdout
    assert "://" not in found.stdout
    assert "last saw" not in found.stdout


def test_status_from_another_process(job):
    found = program("status", "speaks")
    assert found.returncode == 0
    assert "local://speaks  succeeded" in found.stdout
    assert "loss: 0.5" in found.stdout
    assert "line 4" in found.stdout


def test_logs_all_of_one_rank_and_the_tail(job, capsys):
    assert main(["logs", job.ref]) == 0
    assert capsys.readouterr().out.splitlines() == [str(line) for line in job.logs()]
    assert main(["logs", "--ranks", "1", "speaks"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"[1] line {number}" for number in range(5)]
    assert main(["logs", "--ranks", "0", "--tail", "2", "speaks"]) == 0
    assert capsys.readouterr().out.splitlines() == ["[0] line 3", "[0] line 4"]
    assert main(["logs", "-f", "--tail", "0", "speaks"]) == 0
    assert capsys.readouterr().out == ""


def test_render_shows_what_was_submitted(job, capsys):
    assert main(["render", "speaks"]) == 0
    assert capsys.readouterr().out == kd.render(speak, 5, number_of_processes=2, name="speaks").text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["status", "nosuch"], 1, "There is no job 'nosuch'"),
        (["logs", "../../etc/passwd"], 2, "does not name a job"),
        (["cancel", "kubernets://a/b"], 2, "there is no backend 'kubernets'"),
        (["status", ""], 2, "does not name a job"),
        (["delete", "kubernetes.team.speaks"], 2, "Write it as 'local://name' or 'kubernetes://namespace/name'"),
        (["delete"], 2, "--finished"),
        (["jobs", "--namespace", "team"], 2, "namespace: jobs of 'local' have none"),
        (["delete", "speaks", "nosuch"], 1, "There is no job 'nosuch'"),
        (["delete", "--finished", "--namespace", "team"], 2, "Add --finished --on kubernetes"),
        (["run", "nosuch.ipynb"], 2, "nosuch.ipynb cannot be read"),
        (["run", "nosuch.ipynb", "--image", "a"], 2, "Add --in-cluster"),
        (["run", "nosuch.ipynb", "--json", "."], 2, "--json: . is a folder"),
        (["run", "nosuch.ipynb", "--json", "/proc/a.json"], 2, "--json: /proc/a.json cannot be written"),
        (["run", "nosuch.ipynb", "--in-cluster", "--kernel", "x"], 2, "Leave it out"),
        (["jobs", "--labels", "team=a"], 2, "labels: jobs of 'local' have none"),
    ],
)
def test_mistakes_are_one_line_on_stderr(job, capsys, words, code, message):
    assert main(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("kale-dist: ")
    assert captured.err.count("\n") == 1
    assert job.done()


@pytest.mark.parametrize(
    "words", [[], ["nosuch"], ["logs"], ["logs", "--ranks", "-1", "x"], ["logs", "--tail", "x", "y"]]
)
def test_usage_errors_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: kale-dist" in capsys.readouterr().err


def test_a_parameter_written_like_an_argument_is_told_how_it_is_written(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "-p", "learning_rate=0.1", "train.ipynb"])
    assert ended.value.code == 2
    assert "'learning_rate=0.1' is not a name. Write it as NAME VALUE" in capsys.readouterr().err


def test_a_reader_that_leaves_causes_no_traceback(job):
    command = f"{sys.executable} -m kale_dist.cli logs speaks | true"
    found = subprocess.run(
        ["/bin/bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert found.stderr == ""
    assert found.returncode in (0, 141)


def test_cancel_waits_for_the_end(endless, capsys):
    assert main(["cancel", endless.name]) == 0
    assert "Cancelled" in capsys.readouterr().out
    assert endless.status.state.value == "cancelled"
    assert main(["cancel", endless.name]) == 0


def test_following_ends_with_ctrl_c_and_the_job_runs_on(endless):
    follower = subprocess.Popen(
        [sys.executable, "-m", "kale_dist.cli", "logs", "-f", endless.ref],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert follower.stdout.readline() == b"[0] waiting\n"
    follower.send_signal(signal.SIGINT)
    _, errors = follower.communicate(timeout=20)
    assert (follower.returncode, errors) == (130, b"")
    assert not endless.done()


def test_following_ends_when_the_job_does(endless):
    follower = subprocess.Popen(
        [sys.executable, "-m", "kale_dist.cli", "logs", "-f", endless.ref],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert follower.stdout.readline() == b"[0] waiting\n"
    endless.cancel()
    follower.communicate(timeout=20)
    assert follower.returncode == 0


def test_delete_finished_leaves_what_runs(endless, capsys):
    done = kd.launch(speak, 1, number_of_processes=1)
    done.wait()
    assert main(["delete", "--finished", "--yes", done.ref]) == 0
    assert f"{done.ref} deleted" in capsys.readouterr().out
    assert not records.exists(done.name)
    assert records.exists(endless.name)


MEANT = (
    "log x: logs|list: jobs|stop x: cancel|jobs --on k8s: kubernetes|run a.ipynb epochs=2: -p epochs 2|run a.ipynb --paramters a 1: --parameters"
    "|launch a.py --nproc 2: --processes|launch a.py --procesess 2: --processes|launch a.py --lr 0.1: a.py -- --lr 0.1"
)
"""What is typed, and what the answer names."""


@pytest.mark.parametrize("words", MEANT.split("|"))
def test_words_that_it_does_not_have_are_answered_with_what_was_meant(capsys, words):
    given, _, meant = words.partition(": ")
    with contextlib.suppress(SystemExit):
        assert main(given.split()) == 2
    assert meant in capsys.readouterr().err.splitlines()[-1]


def shout():
    print("\x1b[31mred\x1b[0m \x1b]0;title\x07end", flush=True)
    raise ValueError("\x1b[2Jgone\nand a second line")


def test_what_is_read_without_a_terminal_is_plain_text(capsys):
    job = kd.launch(shout, number_of_processes=1, name="shouts")
    capsys.readouterr()
    job.wait()
    assert str(job.status) == "local://shouts: failed: Rank 0 failed: ValueError: gone and a second line."
    ref = job.ref
    for words in (
        ["status", ref], ["logs", ref], ["events", ref], ["render", ref], ["cancel", ref], ["jobs"], ["sweeps"],
        ["status", "no-such-job"], ["delete", ref], ["delete", "--yes", ref],
    ):  # fmt: skip
        code, (out, err) = main(words), capsys.readouterr()
        assert "\x1b" not in out + err, words
        assert code == 0 or len(err.splitlines()) == 1, (words, err)
