"""`kale-dist jobs` and what a cluster itself says of jobs."""

import json

import pytest

from kale_dist import places
from kale_dist.cli import list_commands, main
from kale_dist.places.kubernetes import look
from kale_dist.places.kubernetes.views import QueuePosition
from kale_dist.places.manifests import KINDS
from kale_dist.places.manifests.object_settings import CANCELLED_ANNOTATION, FAILED_ANNOTATION, SPEC_ANNOTATION
from kale_dist.wire import StateName

PYTORCH = KINDS["pytorch"]


def pytorch_job(name, *conditions, number=0, instance=None, cancelled=False, started=None):
    annotations = {SPEC_ANNOTATION: json.dumps({"topology": {"number_of_processes": 3}})}
    if cancelled:
        annotations[CANCELLED_ANNOTATION] = "jo"
    made = {"name": name, "namespace": "team", "creationTimestamp": f"2026-01-31T08:00:{number:02}Z"}
    labels = {"app.kubernetes.io/instance": instance or name}
    status = {"conditions": [{"type": kind, "status": "True", "message": f"{name} {kind}"} for kind in conditions]}
    if started:
        status["startTime"] = started
    return {"metadata": made | {"annotations": annotations, "labels": labels}, "status": status}


@pytest.mark.parametrize(
    ("conditions", "cancelled", "state"),
    [
        ([], False, StateName.PENDING),
        (["Created"], False, StateName.PENDING),
        (["Created", "Running"], False, StateName.RUNNING),
        (["Created", "Succeeded"], False, StateName.SUCCEEDED),
        (["Created", "Failed"], False, StateName.FAILED),
        (["Created", "Suspended"], False, StateName.PENDING),
        (["Created", "Failed"], True, StateName.CANCELLED),
        (["Created", "Suspended"], True, StateName.CANCELLED),
        (["Created", "Running"], True, StateName.RUNNING),
    ],
)
def test_a_job_is_as_its_pytorch_job_says(conditions, cancelled, state):
    (found,) = look.statuses([(PYTORCH, pytorch_job("a", *conditions, cancelled=cancelled))])
    assert (found.ref, found.state, len(found.replicas)) == ("kubernetes://team/a", state, 3)
    assert found.reason == ("a Failed" if state is StateName.FAILED else "")


def test_a_job_that_its_follower_ended_has_failed():
    job = pytorch_job("a", "Suspended")
    job["metadata"]["annotations"][FAILED_ANNOTATION] = "Pod a-worker-0 was deleted while it ran"
    (found,) = look.statuses([(PYTORCH, job)])
    assert (found.state, found.reason) == (StateName.FAILED, "Pod a-worker-0 was deleted while it ran")


def test_the_last_run_of_a_job_says_how_it_is():
    first, last = pytorch_job("a", "Failed"), pytorch_job("a-r1", "Running", number=9, instance="a")
    (found,) = look.statuses([(PYTORCH, first), (PYTORCH, last)])
    assert (found.ref, found.state, found.ended) == ("kubernetes://team/a", StateName.RUNNING, None)


class Cluster:
    """A cluster with jobs of others."""

    def __init__(self, *items):
        self.items = items
        self.asked = []

    def select(self, **_):
        raise AssertionError("a list takes one request")

    def survey(self, *, namespace, labels):
        self.asked.append((namespace, labels))
        return look.statuses([(PYTORCH, item) for item in self.items])


@pytest.fixture
def crowded(monkeypatch):
    """A cluster with 25 jobs of other users, which have ended in different ways."""
    kinds = ("Succeeded", "Failed", "Running")
    made = Cluster(*(pytorch_job(f"job-{number:02}", kinds[number % 3], number=number) for number in range(25)))
    monkeypatch.setattr(places, "get", lambda _: made)
    return made


def test_jobs_of_others_are_listed_with_their_state_and_only_the_newest(crowded, capsys):
    assert main(["jobs", "--on", "kubernetes", "--namespace", "*", "--labels", "team=a,stage=test"]) == 0
    out = capsys.readouterr().out
    assert crowded.asked == [("*", {"team": "a", "stage": "test"})]
    rows = [line.split()[:3] for line in out.splitlines() if line.startswith("kubernetes://")]
    assert [row[1] for row in rows[-3:]] == ["failed", "running", "succeeded"]
    assert (len(rows), rows[-1]) == (20, ["kubernetes://team/job-24", "succeeded", "3"])
    assert "and 5 older. All: kale-dist jobs --all --on kubernetes" in out
    assert main(["jobs", "--on", "kubernetes", "--all"]) == 0
    assert capsys.readouterr().out.count("kubernetes://team/") == 25


def test_the_newest_jobs_are_listed_wherever_they_ran(crowded, monkeypatch, capsys):
    old = look.statuses([(PYTORCH, pytorch_job("old", "Failed"))]) * 20
    monkeypatch.setattr(list_commands, "elsewhere", lambda: old)
    assert main(["jobs"]) == 0
    out = capsys.readouterr().out
    assert (out.count("/job-"), out.count("/old"), "and 25 older" in out) == (20, 0, True)


def test_a_list_says_where_a_job_stands_in_its_queue(monkeypatch, capsys):
    items = [pytorch_job("waits", "Suspended"), pytorch_job("runs", "Running", number=1)]
    for item in items:
        item["metadata"]["uid"] = item["metadata"]["name"]
    queued = {"waits": QueuePosition(number=2, of=3), "runs": None}
    waits, runs = look.statuses([(PYTORCH, item) for item in items], queued)
    assert (waits.queue_position, waits.reason) == (2, "Queued at position 2 of the namespace's 3")
    assert runs.queue_position is None
    made = Cluster(*items)
    made.survey = lambda **_: [waits, runs]
    monkeypatch.setattr(places, "get", {"kubernetes": made}.__getitem__)
    assert main(["jobs", "--on", "kubernetes"]) == 0
    assert "pending, 2 in queue" in capsys.readouterr().out
    assert main(["jobs", "--on", "kubernetes", "--json"]) == 0
    assert [job["queue_position"] for job in json.loads(capsys.readouterr().out)] == [2, None]


def test_a_column_is_one_line_of_a_table(crowded, capsys, monkeypatch):
    monkeypatch.setattr(
        list_commands,
        "_COLUMNS",
        (*list_commands._COLUMNS, ("backend", lambda job: job.status.ref.partition(":")[0], False)),
    )
    assert main(["jobs", "--on", "kubernetes"]) == 0
    title, *rows = capsys.readouterr().out.splitlines()[:3]
    assert title.endswith("  backend")
    assert all(row.endswith("  kubernetes") for row in rows)
