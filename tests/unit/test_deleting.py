"""`kale-dist delete`: it takes only what is this user's, shows it, and asks first."""

import io
import secrets

import pytest
from fake_backend import FakeBackend, FakeRun

from kale_dist import places
from kale_dist.cli import main
from kale_dist.job import records
from kale_dist.job.backend import JobRef
from kale_dist.job.records import Record
from kale_dist.job.spec.job_spec import JobSpec, Topology


class Cluster(FakeBackend):
    """A cluster whose users share one account: each of them sees, and may delete, the jobs of the others."""

    name = "kubernetes"

    def __init__(self):
        super().__init__()
        self.keys = {}

    def put(self, name, *, ended=True):
        """Submit a job as whoever the test is at the moment."""
        ref, key = JobRef(self.name, name), secrets.token_bytes(32)
        spec = JobSpec(
            name=name.rpartition("/")[2], label="f", kind="call", snapshot="0" * 64, topology=Topology(number_of_processes=1)
        )  # fmt: skip
        self.keys[ref] = key
        self._runs[ref] = FakeRun(ref, spec, key, records.create(ref.record_name, key))
        if ended:
            self._runs[ref].run(lambda run: None)
        self._record(ref)
        return ref

    def survey(self, *, namespace=None, labels=None):
        return [self.status(ref) for ref in self.list() if ref.name.startswith(namespace or "")]

    def adopt(self, ref, *, trust):
        self._run(ref)
        if not records.exists(ref.record_name):
            records.create(ref.record_name, b"" if trust is None else self.keys[ref])
            self._record(ref)
        return ref

    def _record(self, ref):
        spec = self._run(ref).spec
        records.write(
            Record(ref=str(ref), name=ref.record_name, created=float(len(self.keys)), spec=spec, kernel_pid=1, detach=True)
        )  # fmt: skip


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    monkeypatch.setattr(places, "get", {"kubernetes": made}.__getitem__)
    return made


@pytest.fixture
def become(monkeypatch, tmp_path):
    """A function that makes the test another user of the machine, with a home of their own."""
    return lambda name: monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name))


@pytest.fixture
def two_users(cluster, become):
    """Jobs of alice and bob, who have looked at each other's; the test goes on as bob."""
    become("alice")
    alices = cluster.put("team/alice-job")
    become("bob")
    bobs, others = cluster.put("team/bob-job"), cluster.put("other/bob-job")
    cluster.put("team/bob-runs", ended=False)
    for words in (["jobs", "--on", "kubernetes"], ["status", str(alices)], ["logs", str(alices)]):
        assert main(words) == 0
    return alices, bobs, others


FINISHED = ["delete", "--finished", "--on", "kubernetes"]


def test_finished_jobs_of_others_stay_although_this_user_has_looked_at_them(two_users, cluster, capsys):
    alices, bobs, others = two_users
    capsys.readouterr()
    assert main([*FINISHED, "--yes"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [str(ref) for ref in (bobs, others)] + [f"{ref} deleted" for ref in (bobs, others)]
    assert cluster.list() == (alices, JobRef.parse("kubernetes://team/bob-runs"))
    assert main([*FINISHED, "--yes"]) == 0
    assert capsys.readouterr().out == "None of your jobs has ended.\n"


def test_only_finished_jobs_of_a_namespace(two_users, cluster):
    alices, bobs, others = two_users
    assert main([*FINISHED, "--namespace", "other", "--yes"]) == 0
    assert others not in cluster.list()
    assert {alices, bobs} <= set(cluster.list())


def test_a_job_of_another_user_needs_its_full_reference(two_users, cluster, capsys, monkeypatch):
    alices, *_ = two_users
    monkeypatch.setattr(cluster, "adopt", lambda ref, *, trust: ref if "/" in ref.name else alices)
    assert main(["delete", "--yes", "kubernetes://alice-job"]) == 2
    assert (
        f"belongs to another user. To delete it all the same, write its full reference: kale-dist delete {alices}"
        in (capsys.readouterr().err)
    )
    assert alices in cluster.list()
    assert main(["delete", "--yes", str(alices)]) == 0
    assert "(of another user)" in capsys.readouterr().out
    assert alices not in cluster.list()


def test_without_a_terminal_nothing_is_deleted_unless_the_command_says_yes(two_users, cluster, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    before = cluster.list()
    assert main(FINISHED) == 2
    assert "nothing was deleted: there is no terminal to ask at. Add --yes" in capsys.readouterr().err
    assert cluster.list() == before


@pytest.mark.parametrize(("answer", "code", "left"), [("y", 0, 2), ("", 1, 4), ("n", 1, 4)])
def test_at_a_terminal_the_user_is_asked(two_users, cluster, capsys, monkeypatch, answer, code, left):
    terminal = io.StringIO(f"{answer}\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(FINISHED) == code
    assert "Delete 2 jobs? [y/N]" in capsys.readouterr().out
    assert len(cluster.list()) == left
