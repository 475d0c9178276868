"""What each kind of object says of its job, in the words of its controller; which kind a cluster gets."""

import json
import types

import pytest
from golden_jobs import SETTINGS, a_spec

from kale_dist import places
from kale_dist.errors import ConfigError
from kale_dist.manifests import KINDS, kind_of
from kale_dist.places import ClusterOptions
from kale_dist.spec import JobSpec, Topology


def test_every_word_has_a_kind_and_the_first_is_kubeflow_s():
    assert tuple(KINDS) == places.OBJECT_KINDS
    assert kind_of(a_spec()).name == "PyTorchJob"


def conditions(*held):
    return {"conditions": [{"type": kind, "status": "True", "message": f"of {kind}", "lastTransitionTime": "2026-01-31T08:00:09Z"} for kind in held]}  # fmt: skip


STATES = [
    ("pytorch", {}, "", False, False),
    ("pytorch", conditions("Created"), "", False, True),
    ("pytorch", conditions("Created", "Running"), "", True, True),
    ("pytorch", conditions("Created", "Succeeded"), "succeeded", False, True),
    ("pytorch", conditions("Created", "Failed"), "failed", False, True),
    ("train", {}, "", False, False),
    ("train", {"jobsStatus": [{"name": "node", "active": 1, "ready": 0}]}, "", True, True),
    ("train", {**conditions("Complete"), "jobsStatus": [{"name": "node", "succeeded": 1}]}, "succeeded", False, True),
    ("train", {**conditions("Failed"), "jobsStatus": [{"name": "node", "active": 1}]}, "failed", False, True),
    ("train", conditions("Suspended"), "", False, True),
    ("job", {}, "", False, False),
    ("job", {"active": 2, "startTime": "2026-01-31T08:00:00Z"}, "", True, True),
    ("job", conditions("SuccessCriteriaMet", "Complete"), "succeeded", False, True),
    ("job", conditions("FailureTarget"), "", False, True),
    ("job", conditions("FailureTarget", "Failed"), "failed", False, True),
    ("job", conditions("Suspended"), "", False, True),
]


@pytest.mark.parametrize(("word", "status", "finished", "is_running", "is_known"), STATES)
def test_states(word, status, finished, is_running, is_known):
    state = KINDS[word].state({"spec": {}, "status": status})
    assert (state.finished, state.is_running, state.is_known) == (finished, is_running, is_known)
    assert state.ended == ("2026-01-31T08:00:09Z" if finished else None)
    assert state.message == ("of Failed" if finished == "failed" else "")


@pytest.mark.parametrize("word", KINDS)
@pytest.mark.parametrize(("processes", "per_pod"), [(1, 1), (4, 4), (3, 1), (5, 2)])
def test_every_kind_makes_all_pods_and_can_be_suspended(word, processes, per_pod):
    topology = Topology(number_of_processes=processes, processes_per_pod=per_pod)
    spec, kind = a_spec(topology=topology, cluster=ClusterOptions(kind=word)), KINDS[word]
    made = kind.make(spec, SETTINGS)
    assert kind.number_of_pods(made) == topology.number_of_pods == len(kind.pod_names(spec))
    assert json.loads(json.dumps(made)) == made
    for group in kind.pod_groups(made):
        meta = group.template["metadata"]
        assert meta["labels"]["kale-dist.dev/object"] == made["metadata"]["name"]
        names = {container["name"] for container in group.template["spec"]["containers"]}
        assert meta["annotations"]["kubectl.kubernetes.io/default-container"] in names == {kind.container}
    assert not kind.is_suspended(made)
    change = kind.suspension(value=True)
    made["spec"] = {**made["spec"], **change["spec"]}
    assert kind.is_suspended(made)


def test_a_train_job_that_was_resumed_has_only_the_pods_since_then():
    resumed = {
        "type": "Suspended",
        "status": "False",
        "reason": "Resumed",
        "lastTransitionTime": "2026-01-31T08:00:09Z",
    }
    assert KINDS["train"].state({"status": {"conditions": [resumed]}}).started == "2026-01-31T08:00:09Z"


@pytest.mark.parametrize(
    ("word", "said"), [("pytorch", "It has: master, worker"), ("job", "all alike"), ("train", "all alike")]
)
def test_a_role_that_a_kind_does_not_have_is_refused(word, said):
    spec = a_spec(cluster=ClusterOptions(kind=word, roles={"launcher": {"cpu": 1}}))
    with pytest.raises(ConfigError, match=said) as caught:
        KINDS[word].make(spec, SETTINGS)
    assert caught.value.argument == "roles"


@pytest.mark.parametrize("roles", [["worker"], {"worker": 3}, {"worker": {"cpus": 1}}, {1: {"cpu": 1}}])
def test_roles_that_are_none_are_refused(roles):
    with pytest.raises(ConfigError):
        ClusterOptions(roles=roles)


def test_roles_come_back_from_a_record():
    spec = a_spec(cluster=ClusterOptions(roles={"worker": {"memory": "8Gi", "rdma/hca": 1}}))
    back = JobSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert KINDS["pytorch"].make(back, SETTINGS) == KINDS["pytorch"].make(spec, SETTINGS)


@pytest.mark.parametrize("changes", [{"priority_class": "high"}, {"gang": True}, {"ttl_s": 60}])
def test_what_only_a_runtime_can_say_is_refused_for_a_train_job(changes):
    with pytest.raises(ConfigError, match="takes this from its runtime") as caught:
        KINDS["train"].make(a_spec(cluster=ClusterOptions(kind="train", **changes)), SETTINGS)
    assert caught.value.argument == next(iter(changes))


def test_a_job_without_an_operator_has_no_gang():
    with pytest.raises(ConfigError, match="one by one"):
        KINDS["job"].make(a_spec(cluster=ClusterOptions(kind="job", gang=True)), SETTINGS)


@pytest.mark.parametrize("given", ["PyTorchJob", "pytorchs", "Job", 3, ("job",)])
def test_a_kind_that_there_is_not_is_refused_with_those_there_are(given):
    with pytest.raises(ConfigError) as caught:
        ClusterOptions(kind=given)
    assert caught.value.argument == "kind"


class Cluster:
    """Serves some kinds; every other group is unknown to it."""

    server = "https://c"

    def __init__(self, *words):
        self.custom = self
        self.words = words

    def get_api_resources(self, group, version, **_):
        there = [KINDS[word] for word in self.words]
        names = [types.SimpleNamespace(name=kind.plural) for kind in there if kind.api == (group, version)]
        if not names:
            raise pytest.importorskip("kubernetes").client.ApiException(status=404)
        return types.SimpleNamespace(resources=names)


@pytest.mark.parametrize(
    ("words", "asked", "expected"),
    [
        (("pytorch", "train", "job"), "", "pytorch"),
        (("train", "job"), "", "train"),
        (("job",), "", "job"),
        (("pytorch", "job"), "job", "job"),
    ],
)
def test_the_first_kind_that_a_cluster_serves_is_chosen(words, asked, expected):
    pytest.importorskip("kubernetes")
    from kale_dist.backends.kubernetes import served

    assert served.choose(Cluster(*words), asked).word == expected


def test_a_kind_that_a_cluster_does_not_serve_is_refused_with_those_it_has_and_how_to_install_it():
    pytest.importorskip("kubernetes")
    from kale_dist.backends.kubernetes import served

    with pytest.raises(ConfigError) as caught:
        served.choose(Cluster("job"), "pytorch")
    assert caught.value.argument == "kind"
    assert "serves no PyTorchJob of kubeflow.org/v1" in caught.value.problem
    assert "It serves 'job'" in caught.value.remedy
    assert "kubectl apply --server-side" in caught.value.remedy
