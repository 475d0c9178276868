"""Jobs that the cluster ends, not their ranks: what users read then, and that the last lines are there."""

import json
import time

import flat
import pytest
from on_cluster import IMAGE, run_kubectl
from rank_work import fills_memory_on_1, says_and_waits

from kale_dist.contract import FailureCause, StateName
from kale_dist.errors import JobFailedError

pytestmark = pytest.mark.usefixtures("jobs_end")


class Jobs:
    """All jobs of this module, begun together: their pods start while others are waited for."""

    def __init__(self, namespace):
        self._on = {
            "on": "kubernetes", "image": IMAGE, "resources": {"cpu": 0.1, "memory_gib": 0.7},
            "cluster": {"namespace": namespace}, "number_of_processes": 2,
        }  # fmt: skip
        self.made = []
        functions = (says_and_waits, says_and_waits, says_and_waits, fills_memory_on_1)
        self._ready = [(function, self._launch(function)) for function in functions]

    def _launch(self, function):
        self.made.append(flat.launch(function, **self._on))
        return self.made[-1]

    def take(self, function):
        """A job that no other test has: a test that is run once more gets a new one."""
        for number, (known, job) in enumerate(self._ready):
            if known is function:
                del self._ready[number]
                return job
        return self._launch(function)


@pytest.fixture(scope="module")
def jobs(namespace, jobs_end):
    jobs = Jobs(namespace)
    yield jobs
    for job in jobs.made:
        job.delete()


def wait_until_said(job, text, times):
    deadline = time.monotonic() + 120
    while sum(line.text == text for line in job.logs()) < times:
        assert time.monotonic() < deadline, (job.status, [str(line) for line in job.logs()])
        time.sleep(0.2)


def check_failure(job, *parts):
    """The job has failed, with these words in its error; every rank's last line is there."""
    with pytest.raises(JobFailedError) as caught:
        job.result(120)
    assert job.status.state is StateName.FAILED
    for part in parts:
        assert part in str(caught.value)
        assert part in job.status.reason
    assert {line.rank for line in job.logs() if line.text == "my last words"} == {0, 1}
    said = [line.text for line in job.logs() if line.rank is None]
    assert sum(job.status.reason in text for text in said) == 1


def test_a_pod_that_somebody_deletes_fails_the_job_and_is_named(jobs, namespace):
    job = jobs.take(says_and_waits)
    wait_until_said(job, "ready", 2)
    run_kubectl("-n", namespace, "delete", "pod", f"{job.name}-worker-0", "--wait=false")
    check_failure(job, f"Pod {job.name}-worker-0 was deleted while it ran", "job.cancel()")
    assert job.status.cause is FailureCause.AGENT_DIED


def test_a_pod_that_the_operator_has_made_for_a_deleted_one_does_not_stay(jobs, namespace):
    job = jobs.take(says_and_waits)
    wait_until_said(job, "ready", 2)
    pod = f"{job.name}-worker-0"
    run_kubectl("-n", namespace, "delete", "pod", pod, "--force", "--grace-period=0")
    with pytest.raises(JobFailedError, match=f"Pod {pod} was deleted while it ran"):
        job.result(120)
    deadline = time.monotonic() + 60
    of_job = f"-l=training.kubeflow.org/job-name={job.name}"
    while run_kubectl("-n", namespace, "get", "pods", of_job, "-o", "jsonpath={.items[*].status.phase}") != "Failed":
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_a_pod_that_is_evicted_through_the_api(jobs, namespace):
    job = jobs.take(says_and_waits)
    wait_until_said(job, "ready", 2)
    pod = f"{job.name}-master-0"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    run_kubectl("create", "--raw", path, "-f", "-", text=json.dumps(eviction))
    check_failure(job, f"Pod {pod} was ended because its node", "EvictionByEvictionAPI")


def test_a_rank_that_needs_more_memory_than_its_pod_has_says_how_much_that_is(jobs):
    job = jobs.take(fills_memory_on_1)
    with pytest.raises(JobFailedError, match=r"memory.* limit of (0\.7 GiB|7\d+Mi)"):
        job.result(120)
    assert (job.status.failed_rank, job.status.cause) == (1, FailureCause.DIED)
