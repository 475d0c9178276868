"""What real clusters have said (recorded/*.json), and the sentences made of it."""

import dataclasses
import importlib.util
import json
import pathlib
import types

import pytest

kubernetes = pytest.importorskip("kubernetes")

from kale_dist.job.spec.job_spec import JobSpec, Topology  # noqa: E402
from kale_dist.job.spec.place_settings import ClusterOptions  # noqa: E402
from kale_dist.places.kubernetes import look, preflight  # noqa: E402
from kale_dist.places.kubernetes.explain import pods as explain  # noqa: E402
from kale_dist.places.kubernetes.explain import sentences, table  # noqa: E402
from kale_dist.places.kubernetes.explain.table import Seen  # noqa: E402
from kale_dist.places.kubernetes.views import (  # noqa: E402
    ContainerView,
    EventView,
    JobView,
    PodView,
    event_view,
    pod_view,
    seconds,
)
from kale_dist.places.manifests import KINDS  # noqa: E402
from kale_dist.wire import FailureCause  # noqa: E402

RECORDED = pathlib.Path(__file__).parent / "recorded"
ROOT = pathlib.Path(__file__).parents[2]


def recorded(name):
    """A recorded job's view and specification, and the time at which it was recorded."""
    data = json.loads((RECORDED / f"{name}.json").read_text())
    job = data["job"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    events = sorted(map(event_view, data["events"]), key=lambda event: event.time)
    view = JobView(
        name=name,
        namespace="team",
        job=job,
        pods=tuple(map(pod_view, data["pods"])),
        events=tuple(events),
    )
    spec = JobSpec(
        name=name,
        label=name,
        kind="call",
        snapshot="none",
        topology=Topology(number_of_processes=sum(part["replicas"] for part in replicas.values())),
        cluster=ClusterOptions(master="Master" in replicas),
    )
    return view, spec, seconds(job["metadata"]["creationTimestamp"]) + 30


def look_of(name, **changes):
    view, spec, now = recorded(name)
    return look.look(dataclasses.replace(view, **changes), spec, now)


WAITS = [
    "registry-down", "init-image", "cpu", "memory", "gpu", "node-selector", "taint", "claim-pending", "claim-elsewhere",
    "claim-rwop", "secret-missing", "policy", "webhook", "operator-dead", "suspended", "sidecar", "ok", "running",
]  # fmt: skip
"""Recorded troubles that may heal by themselves, and jobs without any."""

NEEDS_ACTION = [
    "image-missing", "pull-401", "claim-missing", "configmap-missing", "host-path-missing", "env-secret-missing",
    "sa-missing", "priority-missing",
]  # fmt: skip
"""Those that only a person can mend."""

FAILS = [
    "image-invalid", "no-python", "workdir", "root", "quota", "pod-security", "pod-security-all", "crash-loop",
    "oom", "evicted", "deadline", "deadline-job", "exec-format", "exit-1",
]  # fmt: skip


@pytest.mark.parametrize("name", WAITS + NEEDS_ACTION + FAILS)
def test_a_recorded_trouble_is_told_in_one_sentence(name, kept_words):
    trouble = look_of(name).trouble
    kept_words(str(trouble or "nothing is wrong"))
    assert trouble is None or (trouble.heals, trouble.needs_action) == (name not in FAILS, name in NEEDS_ACTION)
    # A name in braces would be a fact that was not filled in.
    assert "an unknown" not in str(trouble)


def test_every_recording_has_its_sentence():
    assert sorted(path.stem for path in RECORDED.glob("*.json")) == sorted(WAITS + NEEDS_ACTION + FAILS)


def _pod(**changes):
    main = ContainerView(name="pytorch", image="reg/x:1", limits=(("memory", "2Gi"),))
    values = {
        "uid": "u",
        "name": "x-worker-1",
        "number": 2,
        "node": "n1",
        "containers": (main,),
    }
    return PodView(**{**values, **changes})


def _view(*pods, events=()):
    return JobView(name="x", namespace="team", pods=pods, events=events)


@pytest.mark.parametrize(
    ("reason", "message", "name"),
    [
        (
            "ErrImagePull",
            "failed to resolve reference: pull access denied, repository does not exist or may require authorization",
            "pull-forbidden",
        ),
        ("ErrImagePull", "no match for platform in manifest: not found", "image-platform"),
        (
            "ErrImagePull",
            "429 Too Many Requests - toomanyrequests: You have reached your pull rate limit",
            "image-rate",
        ),
        ("ImagePullBackOff", 'Back-off pulling image "x"', "pull-failed"),
        (
            "ErrImagePull",
            'Head "https://r/v2/x": tls: failed to verify certificate: x509: unknown',
            "registry-unreachable",
        ),
        ("ErrImageNeverPull", 'Container image "x" is not present with pull policy of Never', "image-never"),
        ("CreateContainerConfigError", "couldn't find key token in Secret team/login", "environment-key"),
        ("CreateContainerError", "context deadline exceeded", "node-failed"),
    ],
)
def test_words_of_other_clusters_are_known(reason, message, name):
    waiting = ContainerView(name="pytorch", image="x", state="waiting", reason=reason, message=message)
    finding = explain.hindrance(_pod(containers=(waiting,)), _view())
    assert finding.name == name
    assert str(finding.trouble).endswith(".")


_NOT_FOUND = 'Failed to pull image "reg/x:1": failed to resolve reference "reg/x:1": reg/x:1: not found'


@pytest.mark.parametrize(
    ("message", "needs_action"),
    [
        (_NOT_FOUND, True),
        ("unexpected status from HEAD request to https://reg/v2/x/manifests/1: 503 Service Unavailable", False),
        (
            "(Mirrors also failed: [mirror/x:1: manifest unknown]): reg/x:1: Get https://reg: dial tcp: i/o timeout",
            False,
        ),
        ("unexpected status from GET request to https://auth/token: 502 Bad Gateway: <h1>not found</h1>", False),
        ("toomanyrequests: unauthorized users have reached the rate limit", False),
        ("pull access denied, repository does not exist or may require authorization: authorization failed", True),
        ("pulling from host reg failed with status code [manifests sha256:429]: 401 Unauthorized", True),
    ],
)
def test_only_what_the_registry_itself_refuses_needs_a_person(message, needs_action):
    waiting = ContainerView(name="pytorch", image="reg/x:1", state="waiting", reason="ErrImagePull", message=message)
    assert explain.hindrance(_pod(containers=(waiting,)), _view()).trouble.needs_action is needs_action


def test_an_older_kubelet_names_the_cause_of_a_back_off_in_an_event_before_the_last():
    waiting = ContainerView(
        name="pytorch",
        image="reg/x:1",
        state="waiting",
        reason="ImagePullBackOff",
        message='Back-off pulling image "reg/x:1"',
    )
    events = [
        EventView(
            uid=message, kind="Pod", name="x-worker-1", object_uid="u", is_warning=True, reason="Failed", message=message, time=time,
        )
        for time, message in enumerate((_NOT_FOUND, "Error: ErrImagePull", "Error: ImagePullBackOff"))
    ]  # fmt: skip
    assert explain.hindrance(_pod(containers=(waiting,)), _view(events=tuple(events))).name == "image-not-found"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("0/9 nodes are available: 3 node(s) had untolerated taint {role: }, 6 Insufficient nvidia.com/gpu. preemption: 0/9 Preemption", "gpu"),
        ("0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/1 Preemption", "gpu"),
        ("0/2 nodes are available: 2 node(s) had volume node affinity conflict.", "volume-elsewhere"),
        ("0/2 nodes are available: 2 node(s) were unschedulable.", "nodes-closed"),
        ("0/2 nodes are available: 2 Too many pods.", "pods-full"),
        ("0/2 nodes are available: 2 Insufficient rdma/hca.", "resource"),
        ("0/2 nodes are available: 2 node(s) didn't satisfy existing pods anti-affinity rules.", "unschedulable"),
        ("no nodes available to schedule pods", "nodes-closed"),
    ],
)  # fmt: skip
def test_the_scheduler_of_other_clusters(said, name):
    finding = explain.hindrance(_pod(node="", scheduling=f"Unschedulable: {said}"), _view())
    assert finding.name == name
    assert not any(word in str(finding.trouble) for word in ("Preemption", "claims to"))


def test_a_volume_in_use_on_another_node():
    """Seen on clusters with block storage; the attach controller's own words."""
    said = (
        'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached to one node and can\'t be attached to '
        "another"
    )
    event = EventView(
        uid="e",
        kind="Pod",
        name="x-worker-1",
        object_uid="u",
        is_warning=True,
        reason="FailedAttachVolume",
        message=said,
        time=1,
    )
    finding = explain.hindrance(_pod(claims=("data",)), _view(events=(event,)))
    assert "its claim data is ReadWriteOnce, and another node than n1 uses the volume" in str(finding.trouble)


def test_rights_that_are_missing_are_granted_by_one_role_that_is_printed_once():
    cluster = types.SimpleNamespace(namespace="team", identity="ann")
    found = list(preflight.missing_rights(cluster, KINDS["pytorch"], frozenset()))
    assert sum(finding.is_fatal for finding in found) > 1
    assert sum("kind: Role\n" in str(finding.trouble) for finding in found) == 1
    assert "kind: Role\n" in str(next(finding.trouble for finding in found if finding.is_fatal))


def test_warm_pods_and_live_ranks_need_a_connection_to_pods():
    cluster, kind = types.SimpleNamespace(namespace="team", identity="ann"), KINDS["pytorch"]
    allowed = frozenset(f"{verb} {right.resource}" for right in preflight.roles.rights(kind) for verb in right.verbs)
    allowed -= {"create pods/portforward"}
    for connects in (False, True):
        [finding] = preflight.missing_rights(cluster, kind, allowed, connects=connects)
        assert ("pods/portforward" in finding.trouble.sentence, finding.is_fatal) == (True, connects)


def test_a_scheduler_that_does_not_come_is_named():
    assert "volcano" in explain.progress(_pod(node="", scheduler="volcano"), _view())
    assert pod_view({"metadata": {"name": "x"}, "spec": {"schedulerName": "default-scheduler"}}).scheduler == ""
    assert pod_view({"metadata": {"name": "x"}, "spec": {"schedulerName": "volcano"}}).scheduler == "volcano"


@pytest.mark.parametrize(
    ("said", "is_told"),
    [
        ('MountVolume.SetUp failed for volume "input" : failed to sync secret cache: timed out waiting', False),
        ('MountVolume.SetUp failed for volume "data" : mount failed: exit status 32', True),
    ],
)
def test_a_kubelet_that_learns_of_a_secret_a_moment_later_is_no_trouble(said, is_told):
    event = EventView(
        uid="e",
        kind="Pod",
        name="x-worker-1",
        object_uid="u",
        is_warning=True,
        reason="FailedMount",
        message=said,
        time=1,
    )
    assert (explain.hindrance(_pod(), _view(events=(event,))) is not None) is is_told


def test_a_warning_that_has_healed_is_not_told():
    warning = EventView(
        uid="e",
        kind="Pod",
        name="x-worker-1",
        object_uid="u",
        is_warning=True,
        reason="FailedMount",
        message="no",
        time=1,
    )
    pulling = dataclasses.replace(warning, uid="f", is_warning=False, reason="Pulling", time=2)
    assert explain.hindrance(_pod(), _view(events=(warning,))) is not None
    view = _view(events=(warning, pulling))
    assert explain.hindrance(_pod(), view) is None
    assert explain.progress(_pod(), view) == "Pod x-worker-1 pulls the image reg/x:1 on node n1"


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("PreemptionByScheduler: preempted by pod y", "preempted"),
        ("EvictionByEvictionAPI: Eviction API: evicting", "node-lost"),
        ("DeletionByTaintManager: Taint manager: deleting due to NoExecute taint", "node-lost"),
    ],
)
def test_pods_that_the_cluster_takes_away(reason, name):
    ended = ContainerView(name="pytorch", state="terminated", exit_code=143, reason="Error")
    finding = explain.end(_pod(disruption=reason, is_gone=True, containers=(ended,)), _view())
    assert (finding.name, finding.trouble.cause) == (name, FailureCause.AGENT_DIED)


def test_an_agent_that_gave_up_says_so_itself():
    said = "kale_dist: the notebook has not sent the snapshot within 600 s"
    ended = ContainerView(name="pytorch", state="terminated", exit_code=70, reason="Error", message=said)
    assert "The agent of pod x-worker-1 gave up: the notebook has not sent" in str(
        explain.end(_pod(containers=(ended,)), _view()).trouble
    )


def test_hostile_words_are_shown_and_not_interpreted():
    message = "{pod} {0.__class__} %s\n" + "\x1b[2J" + "x" * 100_000
    waiting = ContainerView(
        name="pytorch", image="{image}", state="waiting", reason="CreateContainerError", message=message
    )
    text = str(explain.hindrance(_pod(containers=(waiting,)), _view()).trouble)
    assert "{pod} {0.__class__} %s" in text
    assert len(text) < 1000


@pytest.mark.parametrize("entry", table.ALL, ids=lambda entry: entry.name)
def test_each_entry_is_one_sentence_and_a_remedy(entry):
    for text in (entry.sentence, entry.remedy):
        assert text.strip() == text
        assert not text.endswith(".")
    assert ". " not in entry.sentence
    assert entry.seen != (Seen.STRUCTURE,) or not entry.pattern


def test_each_fact_stands_once():
    names, facts = [entry.name for entry in table.ALL], [(entry.sentence, entry.remedy) for entry in table.ALL]
    assert sorted(set(names)) == sorted(names)
    assert sorted(set(facts)) == sorted(facts)


def test_a_quota_that_is_too_small_is_told_from_one_that_is_full():
    said = (
        "FailedCreatePod: exceeded quota: q, requested: requests.cpu=2, used: requests.cpu=0, limited: requests.cpu={}"
    )
    assert table.match(Seen.JOB_EVENT, said.format("1"))[0].name == "quota-too-small"
    assert table.match(Seen.JOB_EVENT, said.format("4"))[0].name == "quota"
    assert table.match(Seen.JOB_EVENT, said.format("2k"))[0].heals


def test_the_page_is_made_of_the_same_sentences():
    spec = importlib.util.spec_from_file_location("make_troubleshooting", ROOT / "docs" / "make_troubleshooting.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = "run docs/make_troubleshooting.py"
    assert (ROOT / "docs" / "troubleshooting.md").read_text() == module.page(), made


def test_words_are_cut_and_lose_their_full_stop():
    assert sentences.cut("a  b.\n") == "a b"
    assert len(sentences.cut("x" * 1000)) == 300
