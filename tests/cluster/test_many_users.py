"""Twenty notebooks submit to one namespace at once, and the API server turns them away (429) again and again."""

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import uuid

import pytest
from on_cluster import run_kubectl
from waiting import until

from kale_dist.places.kubernetes import roles
from kale_dist.places.manifests import KINDS

pytestmark = [pytest.mark.nightly]

NOTEBOOKS = 20
A_SECOND = 2.0
"""Requests of each notebook that follows its job: at most so many."""

NOTEBOOK = """
    import json, sys, time
    from urllib.parse import urlsplit
    import kale_dist as kd
    from kale_dist.places.kubernetes import client, port_forward

    asked = []
    send, tunnel = client._TimedRest._send, port_forward._open
    def count(self, method, url, options):
        answer = send(self, method, url, options)
        asked.append((time.monotonic(), method, urlsplit(url).path, answer.status))
        return answer
    def count_tunnel(cluster, namespace, pod, *rest):
        asked.append((time.monotonic(), "CONNECT", f"/namespaces/{namespace}/pods/{pod}", 101))
        return tunnel(cluster, namespace, pod, *rest)
    client._TimedRest._send, port_forward._open = count, count_tunnel

    def work(number):
        import time
        time.sleep(15)
        return number**2

    number, settings = json.loads(sys.argv[1])
    submitting = time.monotonic()
    job = kd.launch(work, number, number_of_processes=1, on=kd.Kubernetes(**settings))
    submitted = time.monotonic()
    while str(job.status.state) == "pending":
        time.sleep(0.1)
    runs = time.monotonic()
    results = job.results(300)
    ended = time.monotonic()
    used = time.process_time()
    job.delete()
    told = {"name": job.name, "results": results, "asked": asked, "submitting": submitting, "submitted": submitted}
    print(json.dumps({**told, "runs": runs, "ended": ended, "processor": used}))
"""


class Level:
    """A priority level of the API server for one user, which takes all requests or none."""

    def __init__(self, name):
        self.name = name
        self.user = f"many-{uuid.uuid4().hex[:6]}"
        self.set(1)
        schema = {
            "priorityLevelConfiguration": {"name": name},
            "matchingPrecedence": 100,
            "rules": [
                {
                    "subjects": [{"kind": "ServiceAccount", "serviceAccount": {"namespace": name, "name": self.user}}],
                    "resourceRules": [
                        {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"], "clusterScope": True}
                    ],
                    "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
                }
            ],
        }  # fmt: skip
        self._apply("FlowSchema", schema)

    def set(self, is_open):
        limited = {"nominalConcurrencyShares": 100 * is_open, "lendablePercent": 0, "borrowingLimitPercent": 0}
        limited["limitResponse"] = {"type": "Reject"}
        self._apply("PriorityLevelConfiguration", {"type": "Limited", "limited": limited})

    def turned_away(self):
        """How many requests of the user the server has refused."""
        lines = run_kubectl("get", "--raw", "/metrics").splitlines()
        name = "apiserver_flowcontrol_rejected_requests_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and f'"{self.name}"' in line)

    def remove(self):
        run_kubectl("delete", "flowschema,prioritylevelconfiguration", self.name, "--ignore-not-found")

    def _apply(self, kind, spec):
        made = {"apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": kind, "metadata": {"name": self.name}}
        run_kubectl("apply", "-f", "-", text=json.dumps({**made, "spec": spec}))


@pytest.fixture
def level(namespace):
    made = Level(namespace)
    yield made
    made.remove()


def stutter(level, stopped):
    """Turn all away for three of six seconds."""
    while not stopped.is_set():
        level.set(0)
        stopped.wait(3)
        level.set(1)
        stopped.wait(3)


def test_twenty_notebooks_submit_at_once_to_a_busy_server(namespace, plain_image, make_user, level, tmp_path):
    user = make_user(
        namespace,
        lambda identity: roles.role_yaml(namespace, identity, roles.rights(KINDS["pytorch"])),
        name=level.user,
    )
    settings = {"namespace": namespace, "image": plain_image, "resources": {"cpu": 0.05, "memory": "200Mi"}}
    stopped = threading.Event()
    stutters = threading.Thread(target=stutter, args=(level, stopped))
    stutters.start()
    notebooks = []
    try:
        for number in range(NOTEBOOKS):
            # Half are one user's, on one machine; and one in five keeps its pods.
            own = {"KUBECONFIG": str(user), "XDG_STATE_HOME": str(tmp_path / f"home-{number % 2}")}
            warm = {"keep_warm": "30 s"} if number % 5 == 0 else {}
            call = [sys.executable, "-c", textwrap.dedent(NOTEBOOK), json.dumps([number, {**settings, **warm}])]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            notebooks.append(subprocess.Popen(call, env={**os.environ, **own}, **pipes))
        ended = [notebook.communicate(timeout=500) for notebook in notebooks]
    finally:
        stopped.set()
        stutters.join()
        for notebook in notebooks:
            notebook.kill()
            notebook.wait()
    turned_away = level.turned_away()
    told = []
    for (out, errors), notebook in zip(ended, notebooks, strict=True):
        assert notebook.returncode == 0, errors
        told.append(json.loads(out.splitlines()[-1]))
    assert [one["results"] for one in told] == [[number**2] for number in range(NOTEBOOKS)]
    names = {one["name"] for one in told}
    assert len(names) == NOTEBOOKS
    for one in told:
        paths = [path for _, _, path, _ in one["asked"]]
        touched = {name for path in paths for name in names if re.search(rf"\b{name}\b", path)}
        assert touched <= {one["name"]}, touched
    waited = sum(status == 429 for one in told for *_, status in one["asked"])
    assert waited > 0
    assert turned_away > 0
    rates = []
    for one in told:
        while_followed = [moment for moment, *_ in one["asked"] if one["runs"] <= moment <= one["ended"]]
        rates.append(len(while_followed) / (one["ended"] - one["runs"]))
    to_submit = [sum(one["submitting"] <= moment <= one["submitted"] for moment, *_ in one["asked"]) for one in told]
    print(
        f"{NOTEBOOKS} notebooks: {waited} requests turned away; {min(to_submit)} to {max(to_submit)} requests to submit, in "
        f"{max(one['submitted'] - one['submitting'] for one in told):.1f} s at most; {min(rates):.2f} to {max(rates):.2f} a second "
        f"while following; {sum(len(one['asked']) for one in told) / NOTEBOOKS:.0f} each in all"
    )
    assert max(rates) <= A_SECOND
    # Of jobs nothing is left; sets of pods have ended when they were idle, and stay listed as jobs do.
    listed = run_kubectl("-n", namespace, "get", "pytorchjobs,secrets,pods", "-o", "name").split()
    assert [one for one in listed if not one.partition("/")[2].startswith("warm-")] == []
    left = ("-n", namespace, "get", "pods", "--field-selector=status.phase!=Succeeded", "-o", "name")
    until(lambda: not run_kubectl(*left), told=lambda: run_kubectl(*left))
