"""Warm pods on the real cluster: calls one after the other in the same pods, and how sets end."""

import json

import pytest
from on_cluster import pods_in, run_kubectl, wait_for
from rank_work import summed, waits, waits_in_its_first_attempt
from waiting import until

import kale_dist as kd
from kale_dist.job import records
from kale_dist.job.spec.job_spec import WARM
from kale_dist.wire import StateName

pytestmark = [pytest.mark.usefixtures("jobs_end"), pytest.mark.nightly]


def sets_in(namespace):
    """This user's sets of a namespace, the newest last."""
    there = [record for record in records.all_records() if record.spec.kind == WARM]
    return [kd.attach(record.ref) for record in there if record.spec.cluster.namespace == namespace]


def names_of_pods(namespace):
    listed = json.loads(run_kubectl("-n", namespace, "get", "pods", "-o", "json"))["items"]
    return sorted(pod["metadata"]["name"] for pod in listed if "deletionTimestamp" not in pod["metadata"])


@pytest.mark.parametrize("kind", ["pytorch", "job"])
def test_calls_follow_each_other_in_the_same_pods_until_the_set_is_cancelled(namespace, kind, capsys):
    on = pods_in(namespace, keep_warm="3 min", kind=kind)
    first = kd.launch(summed, 1, number_of_processes=2, on=on, name=f"first-{kind}")
    assert first.results() == [3.0, 3.0]
    there = names_of_pods(namespace)
    one = sets_in(namespace)[-1]
    assert one.ref in capsys.readouterr().err
    first.delete()
    second = kd.launch(summed, 2, number_of_processes=2, on=on, name=f"second-{kind}")
    assert second.results() == [6.0, 6.0]
    assert (names_of_pods(namespace), sets_in(namespace)[-1].ref) == (there, one.ref)
    assert (second.status.state, "rank 1 has 3.0" in str(second.logs())) == (StateName.SUCCEEDED, True)
    wait_for(one, lambda status: status.idle_s == 180)
    # Two at once do not share pods, and one that is cancelled leaves them.
    long = kd.launch(waits, number_of_processes=2, on=on)
    wait_for(long, lambda status: status.state is StateName.RUNNING)
    beside = kd.launch(summed, 1, number_of_processes=2, on=on)
    assert beside.results() == [3.0, 3.0]
    assert len(sets_in(namespace)) == 2
    long.cancel()
    assert long.wait(60).state is StateName.CANCELLED
    assert second.retry().results() == [6.0, 6.0]
    for each in sets_in(namespace):
        each.cancel()
        assert each.wait(60).state is StateName.CANCELLED
        each.delete()
    assert kd.launch(summed, 3, number_of_processes=2, on=on).results() == [9.0, 9.0]
    sets_in(namespace)[-1].delete()
    until(lambda: not names_of_pods(namespace))


def test_a_worker_that_is_lost_under_a_job_comes_back_and_one_that_is_lost_idle_ends_the_set(namespace):
    on = pods_in(namespace, keep_warm="3 min", kind="pytorch")
    job = kd.launch(waits_in_its_first_attempt, number_of_processes=2, on=on, max_restarts=1)
    wait_for(job, lambda status: status.state is StateName.RUNNING)
    one = sets_in(namespace)[-1]
    worker = f"{one.name.rpartition('/')[2]}-worker-0"
    until(lambda: "ready" in str(job.logs()))
    run_kubectl("-n", namespace, "delete", "pod", worker, "--wait=false")
    assert job.results() == [1, 1]
    wait_for(one, lambda status: status.idle_s is not None)
    run_kubectl("-n", namespace, "delete", "pod", worker, "--wait=false")
    assert one.wait(120).state is StateName.FAILED
    again = kd.launch(summed, 1, number_of_processes=2, on=on, max_restarts=1)
    assert again.results() == [3.0, 3.0]
    assert sets_in(namespace)[-1].ref != one.ref
    for each in sets_in(namespace):
        each.delete()
