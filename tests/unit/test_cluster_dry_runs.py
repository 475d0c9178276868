"""What a cluster is asked before a job is submitted, against an API server that answers as a test tells it."""

import json
import math
import sys
import types

import pytest

pytest.importorskip("kubernetes")

from fake_api import FakeApi, status
from golden_jobs import a_spec

from kale_dist.image import for_job
from kale_dist.job.spec.job_spec import Policy, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.job.spec.resources import Resources
from kale_dist.places import manifests
from kale_dist.places.kubernetes import client, preflight

pytestmark = pytest.mark.newest

JOBS = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"
TRAIN_JOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs"
PODS, SECRETS, NODES = "/api/v1/namespaces/team/pods", "/api/v1/namespaces/team/secrets", "/api/v1/nodes"
MAY = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
ALL = frozenset(
    f"{verb} {right.resource}" for right in preflight.roles.rights(manifests.KINDS["pytorch"]) for verb in right.verbs
)


def check(monkeypatch, tmp_path, *, answers, may_create_pods=True, spec=None, quotas=(), **changes):
    spec = spec or a_spec(image="x:1", cluster=ClusterOptions(namespace="team"), **changes)
    with FakeApi().running() as api:
        review = {"spec": {"resourceAttributes": {}}, "status": {"allowed": may_create_pods}}
        api.answer("POST", MAY, 201, review)
        for path in (JOBS, TRAIN_JOBS, PODS, SECRETS):
            api.answer("POST", path, *answers.get(path, (201, {})))
        for path in set(answers) - {JOBS, TRAIN_JOBS, PODS, SECRETS}:
            api.answer("GET", path, *answers[path])
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        found = preflight.check(client.connect(), spec, preflight.Namespace(granted=ALL, quotas=quotas))
        return (
            found,
            [(method, path) for method, path, _ in api.asked],
            [body for _, path, body in api.asked if path == PODS],
        )


def test_nothing_is_wrong(monkeypatch, tmp_path):
    found, asked, _ = check(monkeypatch, tmp_path, answers={})
    assert found == ()
    assert [path for method, path in asked if method == "POST"].count(PODS) == 2


def test_without_the_right_to_create_pods_none_is_tried(monkeypatch, tmp_path):
    _, asked, _ = check(monkeypatch, tmp_path, answers={}, may_create_pods=False)
    assert ("POST", PODS) not in asked


@pytest.mark.parametrize(
    ("message", "name", "is_fatal"),
    [
        ('pods "x" is forbidden: maximum cpu usage per Container is 1, but limit is 2', "limit-range", True),
        ('pods "x" is forbidden: [minimum cpu usage per Container is 1, minimum memory usage per Container is 2Gi]',
         "limit-range", True),
        ('pods "x" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes', "pod-security", True),
        ('pods "x" is forbidden: error looking up service account team/nope: serviceaccount "nope" not found',
         "service-account", True),
        ('admission webhook "w" denied the request: every pod needs a team', "webhook", False),
        ("exceeded quota: q, requested: pods=1, used: pods=9, limited: pods=9", "quota", False),
    ],
)  # fmt: skip
def test_what_a_dry_run_of_a_pod_tells(monkeypatch, tmp_path, message, name, is_fatal):
    found, *_ = check(monkeypatch, tmp_path, answers={PODS: (403, status(403, message, "Forbidden"))})
    assert [(item.name, item.is_fatal) for item in found] == [(name, is_fatal)]


@pytest.mark.parametrize(("trainer", "version"), [("2.1", 0), ("2.1", 1), ("2.3", 0)])
def test_where_pod_security_is_restricted_a_runtime_of_ours_or_a_newer_trainer_is_named(
    monkeypatch, tmp_path, trainer, version, kept_words
):
    options = ClusterOptions(namespace="team", kind="train", trainer=trainer, runtime_version=version)
    rule = 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container "node" must set securityContext.x=y)'
    answers = (
        {} if version or trainer == "2.3" else {PODS: (403, status(403, f'pods "x" is forbidden: {rule}', "Forbidden"))}
    )
    found, _, pods = check(monkeypatch, tmp_path, answers=answers, spec=a_spec(image="x:1", cluster=options))
    seen = [str(item.trouble) for item in found if item.name.startswith("pod-security")]
    assert len(seen) == bool(answers)
    for words in seen:
        kept_words(words)
    pod = json.loads(pods[-1])["spec"]
    has_context = [pod.get("securityContext", {}).get("runAsNonRoot"), "securityContext" in pod["containers"][0]]
    assert all(has_context) != bool(answers)


def test_a_refusal_for_lack_of_rights_is_not_the_job_s_trouble(monkeypatch, tmp_path):
    said = status(403, 'pods is forbidden: User "ann" cannot create resource "pods" in API group ""', "Forbidden")
    found, *_ = check(monkeypatch, tmp_path, answers={PODS: (403, said)})
    assert found == ()


def test_a_cluster_without_the_operator(monkeypatch, tmp_path):
    found, *_ = check(monkeypatch, tmp_path, answers={JOBS: (404, b"404 page not found")})
    assert found[0].name == "operator-missing"
    assert found[0].is_fatal
    assert "kubectl apply --server-side" in str(found[0].trouble)


@pytest.mark.parametrize(
    ("bounds", "hard", "free_cores", "forbids_master"),
    [
        (None, {}, math.inf, False),
        (None, {"limits.cpu": "4"}, 0.0, False),
        ({"default": {"cpu": "500m"}}, {"limits.cpu": "4"}, 0.5, False),
        # A container that asks for more than the default limit is refused, unless it has a limit of its own.
        ({"default": {"cpu": "2", "memory": "1Gi"}, "min": {"cpu": "50m"}}, {}, 2.0, False),
        # The operator's init container asks for 10Mi.
        ({"min": {"memory": "64Mi"}}, {}, math.inf, True),
    ],
)
def test_limit_ranges_shape_the_job(monkeypatch, tmp_path, bounds, hard, free_cores, forbids_master):
    ranges = [{"metadata": {}, "spec": {"limits": [{"type": "Container", **bounds}]}}] if bounds else []
    with FakeApi().running() as api:
        api.answer("POST", MAY, 201, {"spec": {"resourceAttributes": {}}, "status": {"allowed": True}})
        api.answer("GET", "/api/v1/namespaces/team", 200, {"metadata": {"name": "team"}})
        api.answer("GET", "/api/v1/namespaces/team/limitranges", 200, {"items": ranges})
        quotas = [{"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {"hard": hard}}]
        api.answer("GET", "/api/v1/namespaces/team/resourcequotas", 200, {"items": quotas})
        rules = {"resourceRules": [], "nonResourceRules": [], "incomplete": True}
        reviews = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        api.answer("POST", reviews, 201, {"spec": {}, "status": rules})
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "config")))
        found = preflight.look_at_namespace(client.connect(), manifests.KINDS["pytorch"])
    assert (found.free_cores, found.forbids_master) == (free_cores, forbids_master)


def nodes(*amounts):
    return 200, {"items": [{"metadata": {"name": "n"}, "status": {"allocatable": amount}} for amount in amounts]}


def test_what_no_node_can_ever_hold_is_refused(monkeypatch, tmp_path):
    two = nodes({"cpu": "2", "memory": "24Gi"}, {"cpu": "2", "memory": "24Gi"})
    for resources in (Resources(cpu=3), Resources(cpu=1, memory_gib=64)):
        found, *_ = check(monkeypatch, tmp_path, answers={NODES: two}, resources=resources)
        assert [(item.name, item.is_fatal) for item in found] == [("nodes-too-small", True)]
        assert "wait_for_nodes=True" in str(found[0].trouble)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"PYTHON_VERSION": f"{sys.version_info[0]}.{sys.version_info[1]}.99"}, []),
        ({"PYTHON_VERSION": "3.10.2"}, [("image-python", "3.10.2")]),
        ({}, []),
    ],
)
def test_an_image_with_another_python_is_warned_of(monkeypatch, tmp_path, told, said):
    monkeypatch.setattr(for_job, "variables_of", lambda _image: told)
    room = {"cpu": "99", "memory": "999Gi", "nvidia.com/gpu": "8"}
    items = [{"metadata": {"name": "n"}, "status": {"allocatable": room}}]
    spec = a_spec(image="x:1", cluster=ClusterOptions(namespace="team"), cuda=True)
    found, *_ = check(monkeypatch, tmp_path, answers={NODES: (200, {"items": items})}, spec=spec)
    assert [(item.name, item.is_fatal) for item in found] == [(name, False) for name, _ in said]
    assert all(words in str(item.trouble) for item, (_, words) in zip(found, said, strict=True))


@pytest.mark.parametrize(
    ("hard", "sizes", "names"),
    [
        ({"requests.cpu": "1"}, (), ["quota-sum"]),
        ({"memory": "3Gi"}, (), ["quota-sum"]),
        ({"pods": "1"}, (), ["quota-sum"]),
        ({"pods": "2", "requests.cpu": "4"}, (), []),
        # A range of processes needs no more than its lower number.
        ({"pods": "1"}, (1, 2), []),
    ],
)
def test_pods_that_a_quota_never_allows_together_are_refused(monkeypatch, tmp_path, hard, sizes, names):
    quota = types.SimpleNamespace(
        metadata=types.SimpleNamespace(name="q", namespace="team"), spec=types.SimpleNamespace(hard=hard)
    )
    asked = {"topology": Topology(number_of_processes=2, sizes=sizes), "policy": Policy(max_restarts=10 * len(sizes))}
    found, *_ = check(monkeypatch, tmp_path, answers={}, quotas=(quota,), **asked)
    assert [item.name for item in found] == names
    assert all(item.is_fatal and "in all" in str(item.trouble) for item in found)


@pytest.mark.parametrize(("suspended", "has_queue", "names"), [
    (True, True, []), (False, True, ["queue-ignored"]), (False, False, ["missing"]),
])  # fmt: skip
def test_a_queue_that_does_not_hold_the_job_back_is_said(monkeypatch, tmp_path, suspended, has_queue, names):
    spec = a_spec(image="x:1", cluster=ClusterOptions(namespace="team", queue="gpus"))
    taken = {"spec": {"runPolicy": {"suspend": suspended}}}
    queue = (200, {}) if has_queue else (404, status(404, "no such queue"))
    answers = {JOBS: (201, taken), "/apis/kueue.x-k8s.io/v1beta1/namespaces/team/localqueues/gpus": queue}
    found, *_ = check(monkeypatch, tmp_path, answers=answers, spec=spec)
    assert [item.name for item in found] == names
    assert not any(item.is_fatal for item in found)
