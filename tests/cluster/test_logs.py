"""Logs of jobs on the real cluster: nothing lost, nothing twice, and what was not written by the job is refused."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import flat
import pytest
from on_cluster import IMAGE, Network, call_in, make_claim, run_kubectl
from rank_work import (
    ODD_LINES,
    bytes_of,
    forges,
    prints_in_two_parts,
    prints_odd_lines,
    replaces_outcome,
    summed,
)

import kale_dist as kd
from kale_dist import backends
from kale_dist.backends.kubernetes import client
from kale_dist.contract import StateName
from kale_dist.errors import JobFailedError

pytestmark = pytest.mark.usefixtures("jobs_end")

FOLDER = pathlib.Path(__file__).parent
LINES = 400_000
"""Of 100 bytes: 40 MB."""

BEFORE_GATE = f"{LINES * 3 // 4 - 1:06}"


@pytest.fixture(scope="module")
def on(namespace):
    """Arguments that send a call to one small pod."""
    return call_in(namespace, processes=1)


def patched(on, master, worker=None):
    """The same with something else in the pods."""
    pods = {"Master": {"template": {"spec": master}}, **({"Worker": {"template": {"spec": worker}}} if worker else {})}
    return {**on, "cluster": {**on["cluster"], "patch": {"spec": {"pytorchReplicaSpecs": pods}}}}


@pytest.fixture(scope="module")
def jobs(on, namespace, jobs_end):
    """Jobs that need nothing but to be started: their pods begin while others are waited for."""
    image = {"image": IMAGE, "resources": {"limits": {"cpu": "100m", "memory": "64Mi"}}}
    slow = {"name": "slow", "command": ["sleep", "5"], **image}
    talks = {"name": "talks", "command": ["sh", "-c", "while sleep 0.1; do echo rank 0 has nothing; done"], **image}
    fails = {"name": "prepare", "command": ["sh", "-c", "exit 4"], **image}
    broken = {"name": "pytorch", "env": [{"name": "PYTHONHOME", "value": "/nowhere"}]}
    two = patched(
        {**on, "number_of_processes": 2},
        {"containers": [talks], "terminationGracePeriodSeconds": 2},
        {"initContainers": [slow]},
    )
    make_claim(namespace, "kept")
    made = {
        "odd": flat.launch(prints_odd_lines, **on),
        "forging": flat.launch(forges, **on),
        "late": flat.launch(summed, 1, **two),
        "init": flat.launch(summed, 1, **patched(on, {"initContainers": [fails]})),
        "kept": flat.launch(bytes_of, 300_000, store="pvc://kept", **on),
        "broken": flat.launch(summed, 1, **patched(on, {"containers": [broken]})),
    }
    yield made
    for job in made.values():
        job.delete()


@pytest.fixture
def network(kubeconfig, tmp_path, monkeypatch):
    """A network to the cluster that this process's connections go through."""
    made = Network(kubeconfig, tmp_path / "config")
    monkeypatch.setenv("KALE_DIST_KUBECONFIG", str(tmp_path / "config"))
    yield made
    backends.get("kubernetes").close()
    client.disconnect()
    made.close()


def wait_until(condition, job, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, (job.status, [str(line) for line in job.logs(tail=20)])
        time.sleep(0.3)


def own_words(job):
    return [line.text for line in job.logs() if line.rank is None]


def start_process(code, **environment):
    """Run a script as another kernel does."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=FOLDER,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_40_mb_that_the_node_has_rotated_arrive_whole_although_the_network_was_cut(on, namespace, network, tmp_path):
    job = flat.launch(prints_in_two_parts, LINES, "/tmp/go", **on)
    pod = f"{job.name}-master-0"

    def first_line_that_the_node_has():
        return run_kubectl("-n", namespace, "logs", pod, "-c", "pytorch", "--limit-bytes=100")

    def last_line():
        return next((line.text for line in job.logs(ranks=[0], tail=1)), "")

    wait_until(last_line, job)
    network.cut()
    before = first_line_that_the_node_has()
    wait_until(lambda: first_line_that_the_node_has() != before, job)
    assert BEFORE_GATE not in last_line()
    network.mend()
    wait_until(lambda: BEFORE_GATE in last_line(), job)
    run_kubectl("-n", namespace, "exec", pod, "-c", "pytorch", "--", "touch", "/tmp/go")
    assert job.wait(120).state is StateName.SUCCEEDED
    said = list(job.logs())
    got = [line.text.split()[1] for line in said if line.rank == 0]
    assert got == [f"{number:06}" for number in range(LINES)]
    assert not any("lost" in line.text for line in said if line.rank is None)

    late = start_process(
        f"""
        import kale_dist as kd
        from kale_dist import backends
        job = kd.attach({job.ref!r})
        print(job.wait(60).state)
        for line in job.logs():
            print(line.rank, line.text)
        backends.get("kubernetes").close()
        """,
        XDG_STATE_HOME=str(tmp_path),
    )
    told = late.communicate(timeout=120)[0].splitlines()
    assert told[0] == "succeeded"
    (lost,) = [
        int(found[1].replace(",", "")) for text in told if (found := re.search(r"([\d,]+) lines were lost", text))
    ]
    numbers = [int(text.split()[2]) for text in told if text.startswith("0 line")]
    assert numbers == list(range(LINES - len(numbers), LINES))
    still_there = run_kubectl("-n", namespace, "logs", pod, "-c", "pytorch").count(" o line ")
    assert len(numbers) == still_there < LINES
    assert lost >= LINES - len(numbers)
    job.delete()


def test_bytes_that_look_like_anything_arrive_as_they_are(jobs):
    job = jobs["odd"]
    assert job.result(120) == "the real one"
    joined, last = [], None
    for line in job.logs(ranks=[0]):
        joined = [*joined[:-1], joined[-1] + line.text] if last is not None and last.continued else [*joined, line.text]
        last = line
    assert joined == [odd.decode("utf-8", "backslashreplace") for odd in ODD_LINES]


def test_what_the_job_has_not_signed_is_refused_and_said(jobs):
    job = jobs["forging"]
    assert job.result(120) == "the real one"
    said = own_words(job)
    assert sum("Refused a line in the log of pod 0" in text for text in said) == 1
    assert sum("Refused an event in the log of pod 0" in text for text in said) == 1
    assert sum("Refused an outcome in the log of pod 0" in text for text in said) == 1
    assert "pod 0: written past the agent" in said
    assert [line.text for line in job.logs(ranks=[0])] == ["behind them"]
    assert not any("lost" in text for text in said)
    assert "forged" not in job.status.reason


def test_a_forged_result_in_a_store_is_not_loaded(jobs, on, tmp_path):
    job = jobs["kept"]
    assert job.wait(120).state is StateName.SUCCEEDED
    forger = flat.launch(replaces_outcome, "/kept", job.name, volumes={"/kept": "kept"}, **on)
    assert forger.wait(120).state is StateName.SUCCEEDED, list(forger.logs())
    elsewhere = start_process(
        f"""
        import kale_dist as kd
        from kale_dist import backends
        try:
            print(len(kd.attach({job.ref!r}).result(120)))
        except kd.errors.SnapshotDamagedError as error:
            print("refused:", error)
        backends.get("kubernetes").close()
        """,
        XDG_STATE_HOME=str(tmp_path),
    )
    told = elsewhere.communicate(timeout=120)[0]
    assert told.startswith("refused:"), told
    assert "was not signed by this job" in told
    forger.delete()


def test_pods_that_start_late_and_containers_that_are_not_ours(jobs):
    job = jobs["late"]
    assert job.results(120) == [3.0, 3.0]
    said = [(line.rank, line.text) for line in job.logs()]
    assert sorted(item for item in said if item[0] is not None) == [(0, "rank 0 has 3.0"), (1, "rank 1 has 3.0")]
    assert not any("nothing" in text for _, text in said)


def test_an_init_container_that_fails_is_named(jobs):
    with pytest.raises(JobFailedError, match="its init container prepare ended with exit code 4"):
        jobs["init"].result(120)


def test_what_an_interpreter_says_that_cannot_start_the_agent_is_shown_as_it_is(jobs):
    with pytest.raises(JobFailedError, match="ended with exit code 1 before its agent could say why"):
        jobs["broken"].result(120)
    assert "pod 0: ModuleNotFoundError: No module named 'encodings'" in own_words(jobs["broken"])


def test_a_kernel_that_is_killed_is_followed_by_the_next_without_a_line_twice(on, namespace, tmp_path):
    first = start_process(
        f"""
        import kale_dist as kd
        from kale_dist.placing import gathered
        from rank_work import counts
        given = {on!r}
        job = kd.launch(counts, 1200, 0.004, **gathered({{**given, **given.pop("cluster")}}))
        print(job.ref, flush=True)
        for line in job.logs(follow=True):
            print(line.text, flush=True)
        """
    )
    job = kd.attach(first.stdout.readline().strip())
    seen, both = [], threading.Event()

    def watch():
        for line in job.logs(follow=True, ranks=[0]):
            seen.append(line.text)
            if len(seen) == 500:
                both.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert any(text == "count 00400\n" for text in first.stdout)
    assert both.wait(60)
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    assert job.wait(60).state is StateName.SUCCEEDED
    watcher.join(10)
    assert seen == [f"count {number:05}" for number in range(1200)]
    assert [line.text for line in job.logs(ranks=[0])] == seen
    job.delete()
