"""Every kind of object on the real cluster: the same jobs, told apart only by `kind`.

The gate runs one short job of two kinds; the rest is for the night. A kind that the cluster does not serve is skipped.
"""

import dataclasses
import json

import pytest
from on_cluster import make_claim, pods_in, run_kubectl, wait_for
from rank_work import (
    fails_on_1,
    summed,
    waits_in_its_first_run,
    waits_the_first_time,
)

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.kubernetes import client, objects, roles
from kale_dist.places.manifests import KINDS, train_runtime
from kale_dist.wire import StateName

pytestmark = pytest.mark.usefixtures("jobs_end")

OTHERS = [word for word in KINDS if word != "pytorch"]
"""Of PyTorchJobs the other files of this folder have enough."""


@pytest.fixture
def on(word, namespace, cluster):
    if not objects.is_served(cluster, KINDS[word]):
        pytest.skip(f"the cluster has no {KINDS[word].name}")
    # The same image with an Open MPI.
    image = {"image": "localhost:5000/kale-dist/mpi-cpu:1"} if word == "mpi" else {}
    return pods_in(namespace, kind=word, **image)


def left_in(namespace, word, name):
    kind = KINDS[word]
    kinds = f"{kind.plural}.{kind.group},secrets,pods,services"
    listed = json.loads(run_kubectl("-n", namespace, "get", kinds, "-o", "json"))["items"]
    return [item["kind"] for item in listed if item["metadata"]["name"].startswith(name)]


def head_of(namespace, job):
    selector = f"kale-dist.dev/object={job.name}"
    pods = json.loads(run_kubectl("-n", namespace, "get", "pods", "-l", selector, "-o", "json"))["items"]
    return sorted(pod["metadata"]["name"] for pod in pods)


def started(job):
    wait_for(job, lambda status: status.state is StateName.RUNNING and any("ready" in line.text for line in job.logs()))
    return job


@pytest.mark.parametrize(
    "word", ["train", "job", *(pytest.param(word, marks=pytest.mark.nightly) for word in ("mpi", "tf"))]
)
def test_two_processes_work_together_and_leave_nothing(on, word, namespace):
    job = kd.launch(summed, 2, number_of_processes=2, on=on)
    assert job.results(150) == [6.0, 6.0], (job.status, [str(line) for line in job.logs()])
    assert {line.text for line in job.logs()} >= {"rank 0 has 3.0", "rank 1 has 3.0"}
    assert job.name in [found.name for found in kd.jobs(on="kubernetes", namespace=namespace)]
    job.delete()
    assert left_in(namespace, word, job.name) == []


@pytest.mark.nightly
@pytest.mark.parametrize("word", OTHERS)
def test_the_first_failing_rank_s_own_exception_comes_back_with_its_line(on, word):
    job = kd.launch(fails_on_1, number_of_processes=2, on=on)
    with pytest.raises(JobFailedError, match="no such column") as caught:
        job.result(150)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "fails_on_1" in str(caught.value)
    job.delete()


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [0, 1], ids=["head", "relay"])
@pytest.mark.parametrize("word", OTHERS)
def test_a_job_that_loses_a_pod_resumes(on, word, namespace, lost):
    make_claim(namespace, f"lost-{word}-{lost}")
    on = dataclasses.replace(on, volumes={"/kept": f"lost-{word}-{lost}"})
    job = started(kd.launch(waits_the_first_time, "/kept/started", number_of_processes=2, max_restarts=1, on=on))
    run_kubectl("-n", namespace, "delete", "pod", head_of(namespace, job)[lost], "--wait=false")
    assert job.results(200) == [True, True], (job.status, [str(line) for line in job.logs()])
    job.delete()
    assert left_in(namespace, word, job.name) == []


@pytest.mark.nightly
@pytest.mark.parametrize("word", ["train", "job"])
def test_a_job_that_is_suspended_resumes_in_the_same_object(on, word, namespace):
    make_claim(namespace, f"kept-{word}")
    on = dataclasses.replace(on, volumes={"/kept": f"kept-{word}"})
    job = started(kd.launch(waits_the_first_time, "/kept/started", number_of_processes=2, on=on))
    kind, pods = f"{KINDS[word].plural}.{KINDS[word].group}", f"kale-dist.dev/object={job.name}"

    def suspend(*, value):
        change = json.dumps(KINDS[word].suspension(value=value))
        run_kubectl("-n", namespace, "patch", kind, job.name, "--type=merge", "-p", change)

    suspend(value=True)
    wait_for(job, lambda status: status.state is StateName.PENDING and "is suspended" in status.reason)
    run_kubectl("-n", namespace, "wait", "--for=delete", "pods", "-l", pods, "--timeout=90s")
    assert not job.done()
    suspend(value=False)
    assert job.results(200) == [True, True], (job.status, [str(line) for line in job.logs()])
    job.delete()
    assert left_in(namespace, word, job.name) == []


@pytest.fixture
def own_runtime(namespace, cluster):
    """The runtime that `kale-dist runtime` prints, in a namespace that enforces Pod Security "restricted"."""
    if not objects.is_served(cluster, KINDS["train"]):
        pytest.skip("the cluster has no TrainJob")
    run_kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    made = train_runtime.make(train_runtime.NAME, ClusterOptions(namespace=namespace))
    run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(made))
    there = objects.runtimes(cluster)
    assert not train_runtime.has_ttl(there["TrainingRuntime/kale-dist"])
    assert train_runtime.chosen(there, "") == ("TrainingRuntime/kale-dist", train_runtime.VERSION)


@pytest.mark.nightly
@pytest.mark.usefixtures("own_runtime")
def test_with_a_runtime_of_ours_a_train_job_that_fails_is_failed_at_once_and_its_log_stays(namespace):
    job = kd.launch(fails_on_1, number_of_processes=2, on=pods_in(namespace, kind="train"))
    with pytest.raises(JobFailedError, match="no such column"):
        job.result(150)
    run_kubectl("-n", namespace, "wait", "--for=condition=Failed", f"trainjob/{job.name}", "--timeout=20s")
    assert "no such column" in run_kubectl("-n", namespace, "logs", head_of(namespace, job)[0])
    job.delete()


@pytest.mark.nightly
@pytest.mark.parametrize("word", OTHERS)
def test_the_role_that_doctor_prints_is_enough(on, word, namespace, make_user, monkeypatch):
    def role(identity):
        name = identity.rpartition(":")[2]
        return roles.role_yaml(namespace, identity, roles.rights(KINDS[word])).replace("kale-dist", name)

    monkeypatch.setenv("KALE_DIST_KUBECONFIG", str(make_user(namespace, role)))
    job = started(kd.launch(waits_in_its_first_run, number_of_processes=2, max_restarts=1, on=on))
    run_kubectl("-n", namespace, "delete", "pod", head_of(namespace, job)[1], "--wait=false")
    assert job.results(200) == [True, True], (job.status, [str(line) for line in job.logs()])
    job.delete()
    client.disconnect()
    assert left_in(namespace, word, job.name) == []
