"""Jobs on the real cluster, as their users see them: called from here, run by pods, and nothing left in the end."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap

import notebook_parts
import pytest
from data_work import WithTable
from on_cluster import pods_in, run_kubectl, wait_for
from rank_work import prints_much, rank_and, summed, waits
from waiting import until

import kale_dist as kd
from kale_dist import places
from kale_dist.errors import (
    ConfigError,
    JobCancelledError,
    JobExistsError,
    JobNotFoundError,
)
from kale_dist.job.backend import JobRef
from kale_dist.wire import FailureCause, StateName

pytestmark = pytest.mark.usefixtures("jobs_end")
INSTALLED = importlib.metadata.version("cloudpickle")


@pytest.fixture
def on(namespace):
    return pods_in(namespace)


def left_in(namespace, name):
    kinds = "pytorchjobs,secrets,pods,services"
    listed = json.loads(run_kubectl("-n", namespace, "get", kinds, "-o", "json"))["items"]
    return [item["kind"] for item in listed if item["metadata"]["name"].startswith(name)]


@pytest.mark.parametrize("path", ["{}/no such", "{}/a,b=c", "{}/pods/c"])
def test_a_reference_that_is_no_name_names_no_job(namespace, path):
    with pytest.raises(JobNotFoundError, match="There is no job"):
        kd.attach(f"kubernetes://{path.format(namespace)}")


def in_new_process(code, tmp_path):
    """Run a script as on another machine: with a state folder of its own."""
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(tmp_path),
        "IPYTHONDIR": str(tmp_path),
        "PYTHONWARNINGS": "default",
    }
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_model_of_30_mb_is_trained_by_two_pods_and_comes_back(on, namespace, capsys):
    import torch
    from trainings import summing

    model = WithTable()
    before = model.weight.detach().clone()
    job = kd.distribute(*summing(model=model), epochs=8, seed=1, number_of_processes=2, on=on)
    assert re.search(r"code and data \(30,\d{3} kB\) are sent .* about 3 s at", capsys.readouterr().out)
    assert job.wait().state is StateName.SUCCEEDED, list(job.logs())
    assert job.model is model
    assert not torch.equal(model.weight, before)
    assert torch.allclose(model.weight, torch.ones(1, 4), atol=0.2)
    assert torch.equal(model.table, torch.arange(7_500_000, dtype=torch.float32) + 32)
    losses = [row["loss"] for row in job.metrics if row["source"] == "train"]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert [replica.rank for replica in job.status.replicas] == [0, 1]
    # As Kale's monitor loop reads it: `job.get()["status"]["replicaStatuses"]["Master"]`.
    run = places.get("kubernetes").describe(JobRef.parse(job.ref))
    assert run["kind"] == "PyTorchJob"
    assert "Master" in run["status"]["replicaStatuses"]
    job.delete()
    assert left_in(namespace, job.name) == []


@pytest.mark.nightly
def test_every_rank_s_lines_are_seen_from_another_machine_too_and_results_only_with_a_store(plain, namespace, tmp_path):
    job = kd.launch(rank_and, 2, number_of_processes=2, on=plain)
    assert job.results() == [2, 3]
    texts = {(line.rank, line.text) for line in job.logs()}
    assert {(0, "rank 0 is here"), (1, "rank 1 is here")} <= texts
    told = in_new_process(
        f"""
        import kale_dist as kd
        from kale_dist import places
        from kale_dist.errors import StoreError
        print([(found.name, found.status.state.value) for found in kd.jobs(on="kubernetes", namespace={namespace!r})])
        job = kd.attach({job.ref!r}, trust=True)
        print(job.wait(60).state)
        print(*sorted(line.text for line in job.logs(ranks=[1])))
        try:
            job.results()
        except StoreError as error:
            print(error)
        places.get("kubernetes").close()
        """,
        tmp_path,
    )
    assert f"('{job.name}', 'succeeded')" in told.splitlines()[0]
    assert "succeeded" in told.splitlines()[1]
    # The notebook that submitted it has fetched them, and the log is not the place for them.
    assert "outcome-0-0 of" in told
    assert "store=" in told
    assert "rank 1 is here" in told
    with pytest.raises(JobExistsError):
        kd.launch(rank_and, 2, name=job.name, number_of_processes=2, on=plain)
    job.delete()


FAILS = """def fails(version):
    import cloudpickle

    assert cloudpickle.__version__ == version
    return {}['absent']
"""


@pytest.mark.nightly
@pytest.mark.parametrize("version", [INSTALLED, notebook_parts.CLOUDPICKLES[0]])
def test_pods_have_the_notebooks_cloudpickle_and_an_error_the_lines_of_its_cell(
    namespace, plain_image, tmp_path, version
):
    packages = [] if version == INSTALLED else [str(notebook_parts.cloudpickle(version))]
    pods = f"on_cluster.pods_in({namespace!r}, image={plain_image!r})"
    cells = [
        "import cloudpickle, on_cluster\nimport kale_dist as kd",
        FAILS,
        f"job = kd.launch(fails, cloudpickle.__version__, number_of_processes=1, on={pods})\njob.result(120)",
        "job.delete()\nprint('with', cloudpickle.__version__)",
    ]
    told = in_new_process(
        f"""
        import sys
        sys.path[:0] = {[*packages, *sys.path]!r}
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance(colors="nocolor")
        for cell in {cells!r}:
            shell.run_cell(cell, store_history=True)
        """,
        tmp_path,
    )
    assert "File \"Cell In[2]\", line 5, in fails\n    return {}['absent']\n" in told
    assert told.endswith(f"with {version}\n")


def test_cancelling_ends_the_pods_and_keeps_the_log(plain, namespace):
    job = kd.launch(waits, number_of_processes=2, on=plain)
    wait_for(job, lambda status: any("ready" in line.text for line in job.logs()))
    job.cancel()
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result(60)
    assert any(line.text == "ready" for line in job.logs())
    phases = "jsonpath={.items[*].status.phase}"
    until(lambda: "Running" not in run_kubectl("-n", namespace, "get", "pods", "-o", phases), 60)
    job.delete()
    assert left_in(namespace, job.name) == []


@pytest.mark.nightly
def test_a_job_that_never_started_is_deleted_at_once_and_its_name_is_free(namespace):
    job = kd.launch(rank_and, 2, number_of_processes=2, on=pods_in(namespace, image="localhost:5000/no/such:1"))
    waiting = f"pod/{job.name}-worker-0"
    for state in ("create", "jsonpath={.status.initContainerStatuses[0].state.running}"):
        run_kubectl("-n", namespace, "wait", waiting, "--timeout=90s", f"--for={state}")
    job.delete()
    # The operator's init container still ignores its SIGTERM, and the node still knows the old job's Secret.
    assert waiting in run_kubectl("-n", namespace, "get", "pods", "-o", "name")
    again = kd.launch(rank_and, 3, name=job.name, number_of_processes=2, on=pods_in(namespace))
    assert again.results() == [3, 4]
    again.delete()


@pytest.mark.nightly
def test_a_flood_of_lines_arrives_whole_and_in_order(plain):
    job = kd.launch(prints_much, 100_000, number_of_processes=2, on=plain)
    assert job.wait(180).state is StateName.SUCCEEDED
    for rank in range(2):
        numbered = [line.text for line in job.logs(ranks=[rank])]
        assert numbered == [f"line {number:06} of rank {rank}" for number in range(100_000)]
    job.delete()


def test_jobs_are_listed_by_labels_in_one_namespace_or_all(namespace, make_namespace):
    other = make_namespace()
    made = {}
    for place, team in ((namespace, "vision"), (namespace, "speech"), (other, "vision")):
        on = pods_in(place, labels={"team": team}, patch={"spec": {"runPolicy": {"suspend": True}}})
        made[place, team] = kd.launch(summed, 1, number_of_processes=1, on=on)

    def refs(**selection):
        return {job.ref for job in kd.jobs(on="kubernetes", **selection)}

    assert refs(namespace=namespace, labels={"team": "vision"}) == {made[namespace, "vision"].ref}
    everywhere = refs(namespace="*", labels={"team": "vision"})
    assert everywhere >= {made[namespace, "vision"].ref, made[other, "vision"].ref}
    assert made[namespace, "speech"].ref not in everywhere
    for job in made.values():
        job.delete()


@pytest.mark.parametrize(
    ("selection", "argument"),
    [
        ({"labels": {"team": "vision,app=x"}}, "labels"),
        ({"labels": {"team": 3}}, "labels"),
        ({"labels": ["team=vision"]}, "labels"),
        ({"namespace": "../kube-system"}, "namespace"),
    ],
)
def test_a_selection_that_is_none_is_refused(kubeconfig, selection, argument):
    with pytest.raises(ConfigError) as caught:
        kd.jobs(on="kubernetes", **selection)
    assert caught.value.argument == argument


def test_a_job_that_does_not_start_in_time_fails_and_frees_its_pods(namespace):
    on = pods_in(namespace, pending_timeout_s=6, node_selector={"disk": "none-has-this"})
    job = kd.launch(summed, 2, number_of_processes=1, on=on)
    status = job.wait(90)
    assert (status.state, status.cause) == (StateName.FAILED, FailureCause.TIMEOUT)
    assert "pending_timeout_s of 6 s" in status.reason
    assert "no free node fits its node selector" in status.reason
    job.delete()
