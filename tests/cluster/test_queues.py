"""Jobs in a queue of Kueue's: admitted one by one, with their position until then, suspended and resumed."""

import json
import uuid

import pytest
from on_cluster import make_claim, pods_in, run_kubectl, wait_for
from rank_work import batches_of, number_steps, summed, waits_the_first_time
from trainings import summing

import kale_dist as kd
from kale_dist import cli
from kale_dist.errors import KaleDistWarning
from kale_dist.places.kubernetes import objects
from kale_dist.places.manifests import KINDS
from kale_dist.wire import StateName

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]


@pytest.fixture(scope="module")
def queue(namespace):
    """Room for one job of two pods at a time, of all the kinds in turn."""
    try:
        run_kubectl("get", "crd", "clusterqueues.kueue.x-k8s.io")
    except AssertionError:
        pytest.skip("the cluster has no Kueue")
    resources = [{"name": "cpu", "nominalQuota": "300m"}, {"name": "memory", "nominalQuota": "3Gi"}]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": namespace, "resources": resources}]}
    spec = {"namespaceSelector": {}, "resourceGroups": [group]}
    for kind, described in (("ResourceFlavor", {}), ("ClusterQueue", spec)):
        apply(kind, namespace, described)
    apply("LocalQueue", "team", {"clusterQueue": namespace}, namespace=namespace)
    yield namespace
    for kind in ("localqueue", "clusterqueue", "resourceflavor"):
        name = "team" if kind == "localqueue" else namespace
        run_kubectl("-n", namespace, "delete", kind, name, "--wait=false")


def apply(kind, name, spec, **meta):
    made = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": kind, "metadata": {"name": name, **meta}, "spec": spec}
    run_kubectl("apply", "-f", "-", text=json.dumps(made))


def hold(queue, policy):
    change = {"spec": {"stopPolicy": policy}}
    run_kubectl("patch", "clusterqueue", queue, "--type=merge", "-p", json.dumps(change))


@pytest.fixture
def on(word, namespace, cluster):
    if not objects.is_served(cluster, KINDS[word]):
        pytest.skip(f"the cluster has no {KINDS[word].name}")
    image = {"image": "localhost:5000/kale-dist/mpi-cpu:1"} if word == "mpi" else {}
    return pods_in(namespace, kind=word, queue="team", volumes={"/kept": "kept"}, **image)


@pytest.fixture(scope="module")
def kept(namespace):
    make_claim(namespace, "kept")


@pytest.mark.parametrize("word", ["pytorch", "job", "mpi", "tf"])
def test_jobs_wait_for_each_other_and_resume_after_a_suspension(queue, kept, on, word, namespace, capsys):
    first = kd.launch(waits_the_first_time, f"/kept/{word}-{uuid.uuid4().hex}", number_of_processes=2, on=on)
    wait_for(first, lambda status: any("ready" in line.text for line in first.logs()))
    second, third = (kd.launch(summed, 2, number_of_processes=2, on=on) for _ in range(2))
    # Which of the two comes first is Kueue's to say: they were created within a second.
    wait_for(second, lambda status: {status.queue_position, third.status.queue_position} == {1, 2})
    if second.status.queue_position == 2:
        second, third = third, second
    place = "queued in Kueue's queue team, at position 1 of the namespace's 2"
    wait_for(second, lambda status: status.state is StateName.PENDING and place in status.reason)
    assert cli.main(["jobs", "--on", "kubernetes", "--namespace", namespace]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("kube")}
    assert "pending, 2 in queue" in shown[third.ref]
    assert cli.main(["status", third.ref]) == 0
    assert "at position 2" in capsys.readouterr().out

    hold(queue, "HoldAndDrain")
    wait_for(first, lambda status: status.state is StateName.PENDING)
    run_kubectl(
        "-n", namespace, "wait", "--for=delete", "pods", "-l", f"kale-dist.dev/object={first.name}", "--timeout=90s"
    )
    hold(queue, "None")
    # Kueue puts what was evicted behind the others, or before them.
    assert [second.results(250), third.results(250)] == [[6.0, 6.0]] * 2
    assert first.results(250) == [True, True], (first.status, [str(line) for line in first.logs()])
    for job in (first, second, third):
        job.delete()


@pytest.mark.parametrize("word", ["train"])
def test_a_kind_that_kueue_does_not_hold_back_is_warned_of(queue, kept, on):
    with pytest.warns(KaleDistWarning, match="this TrainJob: it starts without the quota of the queue team"):
        job = kd.launch(summed, 2, number_of_processes=2, on=on)
    assert job.results(150) == [6.0, 6.0]
    job.delete()


@pytest.mark.parametrize("word", ["pytorch", "job"])
def test_a_training_that_is_suspended_within_an_epoch_resumes_at_the_very_step(queue, kept, word, namespace):
    on = pods_in(namespace, kind=word, queue="team", store="pvc://kept/runs")
    job = kd.distribute(
        *summing(1600, lr=0.01), number_steps, epochs=1, train_args=(0.2, {0}), seed=1, threads=1, number_of_processes=2,
        on=on,
    )  # fmt: skip
    wait_for(job, lambda status: len(batches_of(job)) > 30)
    hold(queue, "HoldAndDrain")
    wait_for(job, lambda status: status.state is StateName.PENDING)
    run_kubectl(
        "-n", namespace, "wait", "--for=delete", "pods", "-l", f"kale-dist.dev/object={job.name}", "--timeout=90s"
    )
    before = len(batches_of(job))
    hold(queue, "None")
    assert job.wait(150).state is StateName.SUCCEEDED, [str(line) for line in job.logs()]
    # Each batch once: none is lost, none is trained twice.
    assert [number for *_, number in batches_of(job)] == list(range(100))
    assert 30 < before < 100
    job.delete()


def test_what_a_set_of_warm_pods_holds_of_a_queue_is_said_and_seen(queue, namespace, capsys):
    job = kd.launch(summed, 2, number_of_processes=2, on=pods_in(namespace, queue="team", keep_warm="3 min"))
    assert job.results(150) == [6.0, 6.0]
    [held] = [one for one in kd.jobs() if one.name.startswith("warm-")]
    assert f"{held.ref} holds 2 pods, quota of the queue team until" in capsys.readouterr().err
    # It is an object of the queue like others: the next job waits for its quota.
    other = kd.launch(summed, 2, number_of_processes=2, on=pods_in(namespace, queue="team"))
    wait_for(other, lambda status: "queued in Kueue's queue team" in status.reason)
    kd.attach(held.ref).cancel()
    assert other.results(150) == [6.0, 6.0]
    other.delete()
