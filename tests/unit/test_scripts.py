"""`kale-dist launch`: a script runs as under torchrun, with its output, its exit code and its signals."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

import kale_dist as kd
from kale_dist.calls import starting
from kale_dist.cli import main
from kale_dist.places import local
from kale_dist.snapshot import modules

TRAINING = """
    import argparse, multiprocessing, os, pathlib, sys
    import torch
    import torch.distributed as dist
    import beside

    class Squares(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, i): return i * i

    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    if __name__ == "__main__":
        arguments = parser.parse_args()
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert (total.item(), dist.get_world_size()) == (2, int(os.environ["WORLD_SIZE"]))
        assert os.environ["LOCAL_RANK"] == os.environ["RANK"] == str(dist.get_rank())
        here = pathlib.Path(__file__)
        assert (here.is_absolute(), here.parent, sys.path[0]) == (True, pathlib.Path.cwd(), str(here.parent))
        workers = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context="spawn")
        squares = [int(one) for one in workers]
        torch.save(Squares(), f"squares-{dist.get_rank()}.pt")
        print(here.name, sys.argv, arguments.lr, beside.NAME, squares, open("beside.txt").read())
        print("to stderr", file=sys.stderr)
        dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with scripts, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("NAME = 'a module beside it'\n")
    (tmp_path / "beside.txt").write_text("a file beside it")
    return tmp_path


def write(folder, name, text):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def program(*words, **options):
    command = [sys.executable, "-m", "kale_dist.cli", "launch", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


def test_a_script_runs_as_under_torchrun(folder):
    write(folder, "train.py", TRAINING)
    ended = program("train.py", "--processes", "2", "--", "--lr", "0.1")
    line = "train.py ['train.py', '--lr', '0.1'] 0.1 a module beside it [0, 1, 4, 9] a file beside it"
    assert (ended.returncode, ended.stdout.splitlines()) == (0, [line, line]), ended.stderr
    assert ended.stderr.splitlines().count("to stderr") == 2
    assert re.match(r"\[kale-dist\] local://train-\w+ starts on 2 ranks\n", ended.stderr)
    assert {path.name for path in folder.glob("squares-*.pt")} == {"squares-0.pt", "squares-1.pt"}


@pytest.mark.nightly
def test_output_and_exit_code_are_those_of_torchrun(folder):
    write(folder, "train.py", TRAINING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "train.py", "--lr", "0.1"]
    theirs = subprocess.run(torchrun, capture_output=True, text=True, check=False, timeout=120)
    ours = program("train.py", "-n", "2", "--", "--lr", "0.1")
    assert (ours.returncode, sorted(ours.stdout.splitlines())) == (0, sorted(theirs.stdout.splitlines()))


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        pytest.param("sys.exit(256)", 1, "", marks=pytest.mark.nightly),
        pytest.param("sys.exit('too few samples')", 1, "too few samples", marks=pytest.mark.nightly),
        pytest.param("sys.exit()", 0, "", marks=pytest.mark.nightly),
        pytest.param("os._exit(5)", 5, "", marks=pytest.mark.nightly),
        ("os.kill(os.getpid(), 9)", 137, ""),
        ("raise KeyError('x')", 1, "line 5, in <module>"),
    ],
)
def test_exit_codes(folder, capsys, ending, code, said):
    write(folder, "ends.py", f"import os, sys\nprint('begun')\n\nif os.environ['RANK'] == '0':\n    {ending}\n")
    assert main(["launch", "ends.py", "-n", "1"]) == code
    out = capsys.readouterr()
    assert out.out == "begun\n"
    assert said in out.err
    assert ("Traceback" in out.err) == ("KeyError" in ending)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly)]
)
def test_a_signal_ends_all_ranks(folder, number, code):
    write(folder, "waits.py", """
        import os, signal, sys, time
        def clean_up(*_):
            print("cleaned up", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, clean_up)
        print("pid", os.getpid(), flush=True)
        time.sleep(600)
    """)  # fmt: skip
    command = [sys.executable, "-m", "kale_dist.cli", "launch", "waits.py", "-n", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        pids = [int(run.stdout.readline().split()[1]) for _ in range(2)]
        run.send_signal(number)
        out, said = run.communicate(timeout=60)
    assert (run.returncode, out.splitlines()) == (code, ["cleaned up", "cleaned up"])
    assert said.count("cancelled") == 1
    assert not any(pathlib.Path("/proc", str(pid)).exists() for pid in pids)


WAITS = """
    import os, signal, sys, time
    def clean_up(*_):
        time.sleep(1)
        print("cleaned up", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, clean_up)
    print("pid", os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("numbers", "code", "cleaned", "said"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 143, ["cleaned up"], "is cancelled"),
        ((signal.SIGINT, signal.SIGTERM), 130, ["cleaned up"], "is cancelled"),
        ((signal.SIGINT, signal.SIGINT), 130, [], "To end it: kale-dist cancel local://waits-"),
        ((signal.SIGTERM, signal.SIGINT), 143, [], "To end it: kale-dist cancel local://waits-"),
    ],
)
def test_further_sigterms_are_the_first_one_and_a_second_ctrl_c_is_meant(folder, numbers, code, cleaned, said):
    write(folder, "waits.py", WAITS)
    command = [sys.executable, "-m", "kale_dist.cli", "launch", "waits.py", "-n", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.readline()
        for number in numbers:
            run.send_signal(number)
            time.sleep(0.2)
        out, errors = run.communicate(timeout=60)
    assert (run.returncode, out.splitlines()) == (code, cleaned)
    assert said in errors.splitlines()[-1]


def test_a_signal_in_the_submission_cancels_what_was_submitted(folder, monkeypatch, capsys):
    write(folder, "waits.py", WAITS)

    def stopped(*_arguments, **_settings):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(starting, "handle", stopped)
    assert main(["launch", "waits.py", "-n", "1", "--name", "stopped"]) == 143
    assert "local://stopped is cancelled" in capsys.readouterr().err
    monkeypatch.undo()
    job = kd.attach("stopped")
    assert job.wait(60).state == "cancelled"
    job.delete()


def test_a_second_ctrl_c_in_the_submission_says_where_to_look(folder, monkeypatch, capsys):
    write(folder, "waits.py", WAITS)

    def stopped(*_arguments, **_settings):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(local.LocalBackend, "submit", stopped)
    assert main(["launch", "waits.py", "-n", "1"]) == 143
    assert "`kale-dist jobs` lists it" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_script_may_spawn_ranks_of_its_own(folder, capfd):
    write(folder, "spawns.py", """
        import os, sys
        import torch.distributed as dist
        import torch.multiprocessing as mp
        def work(rank, world_size, port):
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
            ranks = [None] * world_size
            dist.all_gather_object(ranks, rank)
            print(f"{ranks}\\n", end="")  # one write: where PYTHONUNBUFFERED is set, `print(ranks)` does two
            dist.destroy_process_group()
        if __name__ == "__main__":
            mp.spawn(work, args=(2, sys.argv[1]), nprocs=2)
    """)  # fmt: skip
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    assert main(["launch", "spawns.py", "-n", "1", "--set", "timeout_s", "100", "--", port]) == 0
    assert capfd.readouterr().out == "[0, 1]\n[0, 1]\n"


@pytest.mark.nightly
def test_a_detached_job_outlives_the_command_that_ends_at_once(folder):
    write(folder, "slow.py", "import time\ntime.sleep(1)\nprint('done')\n")
    ended = program("slow.py", "-n", "1", "--detach", "--json")
    job = kd.attach(json.loads(ended.stdout)["ref"])
    assert job.wait(60).state == "succeeded"
    assert [line.text for line in job.logs()] == ["done"]


def test_a_module_and_a_function_of_a_module(folder, capfd):
    (folder / "package").mkdir()
    write(folder, "package/__init__.py", "")
    write(folder, "package/parts.py", "def add(first, second=0, *, fast=False):\n    return [first + second, fast]\n")
    write(folder, "package/run.py", """
        import sys
        from .parts import add
        print(__package__, sys.argv[1:], add(1))
    """)  # fmt: skip
    assert main(["launch", "-m", "package.run", "-n", "1", "--", "a"]) == 0
    assert main(["launch", "package.parts:add", "-n", "1", "--", "1", "--second", "2", "--fast"]) == 0
    assert capfd.readouterr().out == "package ['a'] [1, False]\n[3, True]\n"
    assert main(["launch", "package.parts:add", "-n", "1", "--json", "--", "1"]) == 0
    ended = json.loads(capfd.readouterr().out)
    assert (ended["value"], ended["state"], ended["exit_code"]) == ([1, False], "succeeded", 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian.py"], "there is no file 'trian.py'. Did you mean 'train.py'?"),
        (["nope.py"], "there is no file 'nope.py'. It was looked for in "),
        (["."], "'.' is a folder"),
        (["broken.py"], "broken.py is not Python code that this interpreter can read (line 1: "),
        (["-m", "train.py"], "is a file, and -m takes the name of a module"),
        (["-m", "pakage.run"], "there is no module 'pakage'"),
        (["beside:MAIN"], "beside has no 'MAIN'. It has: NAME"),
        (["beside:NAME"], "beside:NAME is no function"),
        (["pakage:main"], "pakage cannot be imported: there is no module 'pakage'"),
        (["json:loads", "--", "--x", "1"], "It is loads("),
        (["json:loads", "--", "--s=1", "--s=2"], "--s=2: it is given twice"),
        (["train.py", "--lr", "1"], "Arguments of the script follow --: launch train.py -- --lr 1"),
        (["train.py", "--nproc_per_node=2"], "Say with --processes how many"),
        (["train.py", "--rdzv-endpoint=x"], "processes find each other by themselves"),
        (["train.py", "--set", "imagge", "x"], "Did you mean 'image'?"),
        (["train.py", "--env", "RANK", "1"], "'RANK' is set in each rank"),
        (["train.py", "-n", "0"], "number_of_processes: 0 is neither a whole number of 1 or more"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(folder, capsys, words, said):
    write(folder, "train.py", "print('this was not to run')\n")
    write(folder, "broken.py", "print 'Python 2'\n")
    code = main(["launch", *words])
    out = capsys.readouterr()
    assert (code, out.out) == (2, "")
    assert said in out.err


def files_of(script, *words):
    found = modules.collect((), modules.Script(path=pathlib.Path(script).absolute(), words=words))
    return [file.path for file in found.files], found.notes


def test_what_is_sent_with_a_script(folder):
    (folder / "code" / "configs").mkdir(parents=True)
    write(folder, "code/train.py", "import near\nopen('configs/a.yaml'); open('../beside.txt'); open('/etc/passwd')\n")
    for name in ("code/near.py", "code/unused.py", "code/configs/a.yaml", "code/configs/b.yaml", "run.json", "b.txt"):
        write(folder, name, "")
    sys.path.insert(0, str(folder / "code"))
    sent, notes = files_of("code/train.py", "--config=run.json", "b.txt", "missing.txt", "../outside.txt", "")
    assert sent == ["b.txt", "configs/a.yaml", "near.py", "run.json", "train.py"]
    assert not notes


def test_files_that_are_too_large_are_not_sent(folder):
    write(folder, "train.py", "open('weights.bin')\n")
    with (folder / "weights.bin").open("wb") as file:
        os.truncate(file.fileno(), modules.MAX_DATA_BYTES + 1)
    sent, notes = files_of("train.py")
    assert sent == ["train.py"]
    assert "train.py comes with more than 64 MiB of other files" in notes[0]


def test_time_limits_of_a_script(folder, capsys):
    write(folder, "slow.py", "import time\ntime.sleep(600)\n")
    assert main(["launch", "slow.py", "-n", "1", "--set", "timeout_s", "0.5"]) == 1
    assert "longer than its timeout_s of 0.5 s" in capsys.readouterr().err
