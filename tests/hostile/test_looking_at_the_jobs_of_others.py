"""Somebody may create objects in your namespace. You look at what they made: they get no code into your page, nothing of your
machine, no other cluster, and none of their pods into your job."""

import base64
import dataclasses
import json
import os
import time
import warnings

import pytest

pytest.importorskip("kubernetes")

import jupyter_client
from fake_api import FakeApi, status

from kale_dist.errors import ConfigError, KaleDistWarning
from kale_dist.job.backend import JobRef, PlacedJob
from kale_dist.job.spec.job_spec import JobSpec, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places import manifests
from kale_dist.places.kubernetes import client, watch
from kale_dist.places.kubernetes import kubernetes_place as place
from kale_dist.places.kubernetes.views import JobView, pod_view

JOBS = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"
SECRET = "/api/v1/namespaces/team/secrets/evil-input"


def a_spec(name="evil", **cluster):
    options = ClusterOptions(**{"namespace": "team", "kind": "pytorch", **cluster})
    topology = Topology(number_of_processes=2)
    return JobSpec(
        name=name, label="f", kind="call", snapshot="ab" * 32, topology=topology, image="x:1", cluster=options
    )


@pytest.fixture
def api(monkeypatch, tmp_path):
    with FakeApi().running() as api:
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        yield api
        client.disconnect()


# -- what their ranks show ---------------------------------------------------------------------------------------------

SHOWN = {
    "text/plain": "a \x1b[31mred\x1b[0m figure\x1b]0;title\x07", "image/png": "iVBORw0KGgo=", "text/html": "<img src=x onerror=alert(1)>", "image/svg+xml": "<svg/>",
    "application/javascript": "fetch('/api/contents')", "text/markdown": "<script>", "text/latex": "$x$",
}  # fmt: skip

CELL = """
import json
import kale_dist as kd
from kale_dist.job import records
from kale_dist.job.spec.job_spec import JobSpec, Topology

spec = JobSpec(name={name!r}, label="f", kind="call", snapshot="ab" * 32, topology=Topology(number_of_processes=1))
files = records.create({name!r}, {key!r})
records.write(records.Record(ref="local://{name}", name={name!r}, created=1.0, spec=spec, kernel_pid=0, detach=True))
common = {{"time": 1.0, "attempt": 0, "rank": 0}}
events = [{{**common, "event": "display", "data": {shown!r}}}, {{**common, "event": "display", "data": "no dict"}},
          {{**common, "rank": None, "event": "state", "state": "succeeded", "reason": "", "cause": None}}]
files.events.write_text("".join(json.dumps(event) + chr(10) for event in events))
files.log.touch()
print(kd.attach("local://{name}").wait().state)
"""


@pytest.fixture(scope="module")
def run():
    """Run a cell in a real kernel; gives its stream and what it displayed."""
    manager = jupyter_client.KernelManager(kernel_name="python3")
    manager.start_kernel(env=dict(os.environ))
    kernel = manager.blocking_client()
    kernel.start_channels()
    kernel.wait_for_ready(timeout=60)

    def run(source):
        found = []
        kernel.execute_interactive(source, timeout=60, output_hook=found.append)
        said = "".join(one["content"].get("text", "") + str(one["content"].get("evalue", "")) for one in found)
        return said, [one["content"]["data"] for one in found if one["msg_type"] == "display_data"]

    yield run
    kernel.stop_channels()
    manager.shutdown_kernel(now=True)


def test_a_job_without_a_key_shows_text_and_pictures_and_nothing_that_runs_in_the_page(run):
    said, shown = run(CELL.format(name="of-mallory", key=b"", shown=SHOWN))
    assert "succeeded" in said
    assert shown == [{"text/plain": "a \x1b[31mred\x1b[0m figure", "image/png": SHOWN["image/png"]}]


def test_a_job_of_your_own_shows_all_of_it(run):
    said, shown = run(CELL.format(name="of-mine", key=b"k" * 32, shown=SHOWN))
    assert "succeeded" in said
    assert shown == [SHOWN]


# -- what their objects say --------------------------------------------------------------------------------------------


def an_object(spec, name="evil", run="1"):
    labels = {"app.kubernetes.io/instance": "evil", "kale-dist.dev/run": run}
    # Signed as the user who looks, and as a job of somewhere else.
    annotations = {"kale-dist.dev/spec": json.dumps(spec.to_json()), "kale-dist.dev/submitted-by": "somebody"}
    return {"metadata": {"name": name, "namespace": "team", "uid": "u1", "labels": labels, "annotations": annotations}}


@pytest.fixture
def evil(api):
    """An object whose description wants the reader elsewhere, and its Secret."""
    spec = a_spec(
        "of-somebody-else", namespace="prod", context="prod", cluster_secret="evil-kubeconfig", kind="job",
        patch={"spec": {"suspend": True}},
    )  # fmt: skip
    spec = dataclasses.replace(spec, store="s3://mallory/results")
    api.answer("GET", JOBS, 200, {"items": [an_object(spec)]})
    key = base64.b64encode(b"m" * 32).decode()
    api.answer("GET", SECRET, 200, {"kind": "Secret", "metadata": {"name": "evil-input"}, "data": {"key": key}})
    return api


@pytest.mark.parametrize("trust", [None, False, True])
def test_an_object_says_what_a_job_is_and_not_where_to_connect_to(evil, trust):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KaleDistWarning)
        handle, _ = place.KubernetesPlace().adopt(JobRef("kubernetes", "team/evil"), trust=trust)
    settings, told = handle.spec.cluster, (handle.spec.store, handle.spec.cluster.patch)
    assert str(handle.ref) == "kubernetes://team/evil"
    assert (handle.object, handle.get("context"), handle.get("server")) == ("evil", "fake", evil.url)
    assert (settings.namespace, settings.context, settings.cluster_secret, settings.kind) == ("team", "", "", "pytorch")
    assert told == (("s3://mallory/results", '{"spec":{"suspend":true}}') if trust else ("", ""))
    assert handle.spec.topology.number_of_processes == 2
    assert not [path for _, path, _ in evil.asked if "prod" in path or "evil-kubeconfig" in path]


def test_a_label_with_your_name_makes_no_job_yours(evil):
    found = place.KubernetesPlace()
    with pytest.warns(KaleDistWarning, match="trust=True"):
        _, key = found.adopt(JobRef("kubernetes", "team/evil"), trust=False)
    assert key is None
    assert found.adopt(JobRef("kubernetes", "team/evil"), trust=None)[1] is None
    assert SECRET not in [path for _, path, _ in evil.asked]
    assert found.adopt(JobRef("kubernetes", "team/evil"), trust=True)[1] == b"m" * 32


@pytest.mark.parametrize("run", ["999999999", "-1", "x", "٣"])
def test_a_run_s_number_that_is_none_is_the_first(api, run):
    api.answer("GET", JOBS, 200, {"items": [an_object(a_spec(), run=run)]})
    handle, _ = place.KubernetesPlace().adopt(JobRef("kubernetes", "team/evil"), trust=None)
    assert handle.life == 1


@pytest.mark.parametrize(
    ("user", "cluster"),
    [
        ({"exec": {"command": "sh"}}, {}),
        ({"auth-provider": {"name": "gcp"}}, {}),
        ({"tokenFile": "{file}"}, {}),
        ({"client-certificate": "{file}", "client-key-data": "eA=="}, {}),
        ({"client-certificate-data": "eA==", "client-key": "{file}"}, {}),
        ({"token": "t"}, {"certificate-authority": "{file}"}),
    ],
)
def test_a_kubeconfig_in_a_secret_runs_nothing_here_and_sends_nothing_of_this_machine(api, tmp_path, user, cluster):
    file, theirs = tmp_path / "token", FakeApi()
    file.write_text("the token of my service account")
    text = json.dumps(
        {
            "clusters": [{"name": "c", "cluster": {"server": theirs.url, **cluster}}], "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}], "current-context": "x",
        }
    ).replace("{file}", str(file))  # fmt: skip
    data = {"kubeconfig": base64.b64encode(text.encode()).decode()}
    api.answer("GET", "/api/v1/namespaces/team/secrets/theirs", 200, {"kind": "Secret", "data": data})
    with theirs.running(), pytest.raises(ConfigError) as caught:
        client.connect(secret="theirs")
    assert caught.value.argument == "cluster_secret"
    assert theirs.asked == []


# -- their pods --------------------------------------------------------------------------------------------------------


def a_pod(uid, owner=None, number=0, created="2026-01-01T00:00:00Z"):
    labels = {
        "kale-dist.dev/object": "mine",
        "training.kubeflow.org/replica-index": "0",
        "kale-dist.dev/first-pod": str(number),
    }
    owners = [] if owner is None else [{"kind": owner[0], "name": owner[1], "uid": owner[2], "controller": True}]
    meta = {"name": uid, "uid": uid, "labels": labels, "ownerReferences": owners, "creationTimestamp": created}
    running = [{"name": "pytorch", "state": {"running": {}}}]
    spec = {"containers": [{"name": "pytorch"}]}
    return {"metadata": meta, "spec": spec, "status": {"phase": "Running", "containerStatuses": running}}


@pytest.fixture
def seen(api, monkeypatch):
    """A function that gives the UIDs of a run's parts, of some pods that the namespace has with its labels."""

    def seen(*pods, kind="pytorch", there=True):
        spec = a_spec("mine", kind=kind)
        made = manifests.kind_of(spec).make(spec)
        job = {**made, "metadata": {**made["metadata"], "uid": "u1"}} if there else None
        found = tuple(pod_view(pod) for pod in pods)
        view = JobView(name="mine", namespace="team", job=job, pods=found, is_deleted=not there)

        class Watch:
            def view(self, _):
                return view

        monkeypatch.setattr(watch, "shared", lambda *_: Watch())
        ref, at = JobRef("kubernetes", "team/mine"), (("uid", "u1"), ("context", "fake"))
        handle = PlacedJob(ref=ref, object="mine", spec=spec, place=at)
        return [part.uid for part in there_is.look(handle).parts]

    there_is = place.KubernetesPlace()
    return seen


LATER = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@pytest.mark.parametrize(
    "owner", [None, ("PyTorchJob", "mine", "u2"), ("PyTorchJob", "theirs", "u2"), ("Job", "mine", "u3")]
)
def test_a_pod_with_your_labels_is_no_pod_of_your_job(seen, owner):
    mine = a_pod("mine-master-0", ("PyTorchJob", "mine", "u1"))
    assert seen(mine, a_pod("mallory", owner, created=LATER)) == ["mine-master-0"]
    assert seen(a_pod("mallory", owner, created=LATER)) == []


def an_owned(api, path, uid, owner):
    kind, name, owner_uid = owner
    meta = {"uid": uid, "ownerReferences": [{"kind": kind, "name": name, "uid": owner_uid, "controller": True}]}
    api.answer("GET", path, 200, {"metadata": meta})


JOB = "/apis/batch/v1/namespaces/team/jobs/mine-node-0"
JOB_SET = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/mine"


def test_pods_of_a_train_job_are_those_of_its_job_set_s_job(seen, api):
    an_owned(api, JOB, "j1", ("JobSet", "mine", "s1"))
    an_owned(api, JOB_SET, "s1", ("TrainJob", "mine", "u1"))
    mine = a_pod("mine-node-0-0-abcde", ("Job", "mine-node-0", "j1"))
    theirs = a_pod("mallory", ("Job", "mine-node-0", "j2"), created=LATER)
    assert seen(mine, theirs, kind="train") == ["mine-node-0-0-abcde"]
    asked = len(api.asked)
    seen(mine, theirs, kind="train")
    assert len(api.asked) == asked, "what is known is not asked for again"


def test_where_jobs_may_not_be_read_the_job_s_name_decides(seen, api):
    for name in ("mine-node-0", "mallory"):
        api.answer("GET", f"/apis/batch/v1/namespaces/team/jobs/{name}", 403, status(403, "no", "Forbidden"))
    mine = a_pod("mine-node-0-0-abcde", ("Job", "mine-node-0", "j1"))
    assert seen(mine, a_pod("mallory", ("Job", "mallory", "j2"), created=LATER), kind="train") == [
        "mine-node-0-0-abcde"
    ]


def test_owners_that_own_each_other_are_no_job_s(seen, api):
    an_owned(api, JOB, "j1", ("JobSet", "mine", "s1"))
    an_owned(api, JOB_SET, "s1", ("Job", "mine-node-0", "j1"))
    assert seen(a_pod("mallory", ("Job", "mine-node-0", "j1")), kind="train") == []


def test_a_pod_that_was_yours_stays_yours_without_its_object(seen):
    """`kubectl delete --cascade=orphan` takes the owner out of the pods."""
    assert seen(a_pod("mine-master-0", ("PyTorchJob", "mine", "u1"))) == ["mine-master-0"]
    assert seen(a_pod("mine-master-0"), a_pod("mallory", number=1), there=False) == ["mine-master-0"]
