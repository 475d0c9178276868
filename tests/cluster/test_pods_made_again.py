"""Worker pods that are lost on the real cluster and made again by their controllers, while no notebook lives."""

import json
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from on_cluster import make_claim, pods_in, run_kubectl
from rank_work import batches_of, number_steps
from waiting import until

import kale_dist as kd
from kale_dist.job.spec.job_spec import JobSpec, Policy, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.kubernetes import objects
from kale_dist.places.kubernetes.views import pod_view
from kale_dist.places.manifests import KINDS, train_runtime
from kale_dist.wire import StateName

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]

NOTEBOOK = """
    import os, signal, sys
    sys.path[:0] = {paths!r}
    import kale_dist as kd
    from on_cluster import pods_in, wait_for
    from rank_work import batches_of, number_steps, waits_in_its_first_attempt
    from trainings import summing
    if __name__ == "__main__":
        options = dict(number_of_processes={ranks}, max_restarts=1, on=pods_in({namespace!r}, **{settings!r}))
        if {trains}:
            args = (*summing(800 * {ranks}, lr=0.01), number_steps)
            job = kd.distribute(*args, epochs=1, train_args=(0.2, {{0}}), seed=1, threads=1, **options)
            wait_for(job, lambda status: len(batches_of(job)) > 30)
        else:
            job = kd.launch(waits_in_its_first_attempt, **options)
            wait_for(job, lambda status: any("ready" in line.text for line in job.logs()))
        print(job.name, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


SHARED = {"shareProcessNamespace": True}
"""In a pod's specification: its agent is not process 1, which nothing in the pod can kill."""


def settings_of(word, namespace, cluster, pod=SHARED):
    """The settings of a kind of job; of TrainJobs there are two, with Trainer's own runtime and with ours, whose pods have `pod`."""
    if word not in ("stock", "ours"):
        return {"kind": word}
    if not objects.is_served(cluster, KINDS["train"]):
        pytest.skip("the cluster has no TrainJob")
    stock = json.loads(run_kubectl("get", "clustertrainingruntimes", "torch-distributed", "-o", "json"))
    runtime = train_runtime.make(word, ClusterOptions(namespace=namespace, ttl_s=None))
    if word == "stock":
        runtime = {**runtime, "metadata": {"name": word, "namespace": namespace}, "spec": stock["spec"]}
    [job] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"] |= pod
    run_kubectl("apply", "-f", "-", text=json.dumps(runtime))
    return {"kind": "train", "runtime": f"TrainingRuntime/{word}"}


def objects_of(namespace, word):
    kind = KINDS["train" if word in ("stock", "ours") else word]
    return run_kubectl("-n", namespace, "get", f"{kind.plural}.{kind.group}", "-o", "name")


def pods_of(namespace, name):
    """The pods of a job by their names, without what a Job appends to them."""
    listed = run_kubectl("-n", namespace, "get", "pods", "-l", f"kale-dist.dev/object={name}", "-o", "json")
    return json.loads(listed)["items"]


def is_worker(pod):
    return pod_view(pod).number > 0


def is_active(pod):
    return pod["status"]["phase"] in ("Pending", "Running")


def submit_and_die(namespace, *, trains=False, ranks=2, **settings):
    """Submit a job from a notebook that is killed as soon as its ranks run; gives the job's name."""
    folder = pathlib.Path(__file__).parent
    paths = [str(folder), str(folder.parent)]
    code = NOTEBOOK.format(paths=paths, trains=trains, ranks=ranks, namespace=namespace, settings=settings)
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stdout.split()[-1]


KILL_AGENT = """
import os, pathlib
found = [int(one.parent.name) for one in pathlib.Path("/proc").glob("[0-9]*/cmdline") if b"['pod']" in one.read_bytes()]
os.kill(min(found, key=lambda pid: pid if pid != os.getpid() else 1 << 30), 9)
"""


def lose(namespace, pod, how):
    if how == "delete":
        run_kubectl("-n", namespace, "delete", "pod", pod, "--wait=false")
        return
    if how == "kill":
        run_kubectl("-n", namespace, "exec", pod, "--", "python3", "-c", KILL_AGENT)
        return
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    run_kubectl("create", "--raw", path, "-f", "-", text=json.dumps(eviction))


def head_has_ended(namespace, name):
    """Whether it has, and no other is there. A Job keeps those that have failed before."""
    heads = [pod for pod in pods_of(namespace, name) if not is_worker(pod)]
    return any(pod["status"]["phase"] == "Succeeded" for pod in heads)


@pytest.mark.parametrize(
    ("word", "how"),
    [
        *((word, how) for word in ("pytorch", "job", "stock", "ours") for how in ("evict", "delete")),
        ("stock", "kill"),
        ("ours", "kill"),
    ],
)
def test_a_worker_that_is_lost_comes_back_and_the_job_ends_without_a_notebook(namespace, cluster, word, how):
    make_claim(namespace, "kept")
    name = submit_and_die(namespace, store="pvc://kept/runs", **settings_of(word, namespace, cluster))
    [lost] = [pod["metadata"] for pod in pods_of(namespace, name) if is_worker(pod)]
    lose(namespace, lost["name"], how)
    until(lambda: head_has_ended(namespace, name), 240)
    again = [pod["metadata"]["uid"] for pod in pods_of(namespace, name) if is_worker(pod)]
    assert (again == [lost["uid"]]) == ((word, how) == ("stock", "kill"))
    # A notebook of the next day.
    job = kd.attach(f"kubernetes://{namespace}/{name}")
    assert job.wait(120).state is StateName.SUCCEEDED, list(job.logs())
    assert (job.results(), job.status.attempt) == ([1, 1], 1)
    assert f"{name}-2" not in objects_of(namespace, word)
    job.delete()


@pytest.mark.parametrize(
    ("word", "how", "ranks", "master"),
    [
        ("job", "delete", 2, None),
        ("job", "delete", 1, None),
        ("job", "kill", 2, None),
        ("pytorch", "delete", 2, None),
        ("pytorch", "delete", 1, None),
        ("pytorch", "delete", 2, False),
        ("pytorch", "kill", 2, None),
        *((word, how, 2, None) for word in ("stock", "ours") for how in ("delete", "kill")),
        # A runtime's containers are started again six times in a job: relays wait in place.
        ("stock", "delete", 9, None),
    ],
)
def test_a_head_that_is_lost_comes_back_and_resumes_without_a_notebook(namespace, cluster, word, how, ranks, master):
    make_claim(namespace, "kept")
    pods, role = {"template": {"spec": SHARED}}, "Master" if master is None else "Worker"
    given, is_train = settings_of(word, namespace, cluster), word in ("stock", "ours")
    if not is_train:
        given |= {
            "patch": {"spec": {"pytorchReplicaSpecs": {role: pods}} if word == "pytorch" else pods},
            "master": master,
        }
    name = submit_and_die(namespace, trains=True, ranks=ranks, store="pvc://kept/runs", **given)
    [lost] = [pod["metadata"] for pod in pods_of(namespace, name) if not is_worker(pod)]
    lose(namespace, lost["name"], how)
    if (word, how) != ("stock", "kill"):
        until(lambda: lost["uid"] not in {pod["metadata"]["uid"] for pod in pods_of(namespace, name) if is_active(pod)})
    until(lambda: head_has_ended(namespace, name), 240)
    assert not any(pod_view(pod).main.restarts for pod in pods_of(namespace, name) if is_worker(pod))
    job = kd.attach(f"kubernetes://{namespace}/{name}")
    assert job.wait(120).state is StateName.SUCCEEDED, list(job.logs())
    lines = [line.text for line in job.logs() if line.rank in (0, None)]
    again = lines[next(index for index, text in enumerate(lines) if "was lost and made again" in text) :]
    numbers = [int(text.rpartition(" ")[2]) for text in again if "ranks: batch " in text]
    # After SIGTERM no step is lost; otherwise those since the store got a checkpoint.
    assert numbers == list(range(numbers[0], 100))
    assert numbers[0] > (30 if how == "delete" else 0)
    assert [row["epoch"] for row in job.metrics if row["source"] == "train"] == [1]
    assert f"{name}-2" not in objects_of(namespace, word)
    job.delete()


def object_with(namespace, word, whose, code):
    """The object of a job whose head or worker ends with an exit code, while the other waits."""
    spec = JobSpec(
        name=f"ends-{word}-{whose}-{code}", label="x", kind="training", snapshot="none", image="", policy=Policy(max_restarts=5),
        topology=Topology(number_of_processes=2), cluster=ClusterOptions(namespace=namespace, kind=word),
        store="pvc://kept",
    )  # fmt: skip
    made = KINDS[word].make(spec)
    groups = KINDS[word].pod_groups(made)
    for group in groups:
        pod = group.template["spec"]
        pod["volumes"], pod["terminationGracePeriodSeconds"] = [], 0
        [container] = pod["containers"]
        container.update(
            image="localhost:5000/kale-dist-tests/python:3.11-slim", env=[], volumeMounts=[], ports=[], resources={}
        )
        who = "worker" if word == "pytorch" and group is not groups[0] else "head"
        who = "$(hostname | grep -q -- '-1$' && echo worker || echo head)" if word == "job" else who
        container["command"] = ["sh", "-c", f'if [ "{who}" = {whose} ]; then sleep 1; exit {code}; else sleep 600; fi']
    return made


@pytest.mark.parametrize(
    ("word", "whose"),
    [("pytorch", "head"), ("pytorch", "worker"), ("job", "head"), ("job", "worker")],
)
def test_what_a_pods_exit_code_says_its_controller_does(namespace, word, whose, plain_image):
    codes = {0: False, 1: False, 70: False, 78: False, 137: True, 143: True, 144: True}
    for code in codes:
        run_kubectl("-n", namespace, "apply", "-f", "-", text=json.dumps(object_with(namespace, word, whose, code)))
    seen = {code: set() for code in codes}

    def are_as_expected():
        for code, uids in seen.items():
            found = pods_of(namespace, f"ends-{word}-{whose}-{code}")
            uids.update(pod["metadata"]["uid"] for pod in found if is_worker(pod) == (whose == "worker"))
        return all(len(seen[code]) > 1 for code, is_again in codes.items() if is_again)

    until(are_as_expected)
    time.sleep(5)
    are_as_expected()
    assert {code: len(uids) > 1 for code, uids in seen.items()} == codes
    for code in codes:
        kind = KINDS[word]
        run_kubectl(
            "-n", namespace, "delete", f"{kind.plural}.{kind.group}", f"ends-{word}-{whose}-{code}", "--wait=false"
        )


GATED = {"schedulingGates": [{"name": "kale-dist.dev/late"}]}


def let_in(namespace, name, number):
    """Let a pod of a job be scheduled; gives its name."""

    def found():
        return [pod["metadata"]["name"] for pod in pods_of(namespace, name) if pod_view(pod).number == number]

    until(found)
    [pod] = found()
    run_kubectl("-n", namespace, "patch", "pod", pod, "--type=merge", "-p", '{"spec": {"schedulingGates": null}}')
    return pod


@pytest.mark.parametrize("word", ["pytorch", "ours"])
def test_a_range_begins_with_fewer_grows_when_a_pod_comes_and_shrinks_when_it_goes(namespace, cluster, word):
    from trainings import summing

    settings = settings_of(word, namespace, cluster, GATED)
    if word == "pytorch":
        settings["patch"] = {"spec": {"pytorchReplicaSpecs": {"Worker": {"template": {"spec": GATED}}}}}
    job = kd.distribute(
        *summing(32_000, 1, lr=0.01), number_steps, epochs=1, train_args=(0.2, {0, 1}), seed=1, split_batches=True,
        number_of_processes=(1, 2), threads=1, on=pods_in(namespace, **settings),
    )  # fmt: skip
    if word == "ours":
        let_in(namespace, job.name, 0)

    def until_attempt(number):
        until(lambda: any(attempt == number for attempt, _, _ in batches_of(job)), 180)

    until_attempt(0)
    worker = let_in(namespace, job.name, 1)
    until_attempt(1)
    lose(namespace, worker, "delete")
    until_attempt(2)
    assert job.wait(180).state is StateName.SUCCEEDED, list(job.logs())
    found = batches_of(job)
    assert dict(one[:2] for one in found) == {0: 1, 1: 2, 2: 1}
    # Twice: of each attempt that ends, the step that has begun meanwhile.
    assert 4000 <= len(found) <= 4002
    assert len(batches_of(job, 1)) == len([attempt for attempt, _, _ in found if attempt == 1])
    job.delete()
