"""What each kind of object says of its job, in the words of its controller; which kind a cluster gets."""

import copy
import json
import types

import pytest
from golden_jobs import SETTINGS, a_spec

from kale_dist.errors import ConfigError
from kale_dist.job.spec import place_settings
from kale_dist.job.spec.job_spec import JobSpec, Policy, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.manifests import KINDS, kind_of, train_runtime


def test_every_word_has_a_kind_and_the_first_is_kubeflow_s():
    assert tuple(KINDS) == place_settings.OBJECT_KINDS
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
    ("mpi", conditions("Created", "Running"), "", True, True),
    ("mpi", conditions("Created", "Succeeded"), "succeeded", False, True),
    ("mpi", conditions("Created", "Failed"), "failed", False, True),
    ("tf", conditions("Created", "Running"), "", True, True),
    ("tf", conditions("Created", "Failed"), "failed", False, True),
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


@pytest.mark.parametrize(
    ("word", "changes", "returns"),
    [
        ("pytorch", {}, True),
        ("job", {}, True),
        ("pytorch", {"store": ""}, False),
        ("job", {"store": ""}, False),
        ("pytorch", {"saves": False}, False),
        ("pytorch", {"policy": Policy()}, False),
        ("train", {}, True),
        ("mpi", {}, False),
        ("tf", {}, False),
    ],
)
@pytest.mark.parametrize("master", [None, False])
@pytest.mark.parametrize("pods", [1, 3])
def test_a_head_comes_back_where_a_store_has_what_it_resumes_from(word, changes, returns, master, pods):
    given = {"policy": Policy(max_restarts=1), "store": "pvc://kept", "topology": Topology(number_of_processes=pods)}
    spec = a_spec(cluster=ClusterOptions(kind=word, master=master), **{**given, **changes})
    assert KINDS[word].returns_head(spec) == returns
    if word == "pytorch":
        head = KINDS[word].pod_groups(KINDS[word].make(spec, SETTINGS))[0]
        assert head.restart_policy == ("ExitCode" if returns else "Never")


@pytest.mark.parametrize("word", KINDS)
@pytest.mark.parametrize(("processes", "per_pod"), [(1, 1), (4, 4), (3, 1), (5, 2)])
def test_every_kind_makes_all_pods_and_can_be_suspended(word, processes, per_pod):
    if word == "tf" and per_pod > 1:
        pytest.skip("TensorFlow has one process a pod")
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


@pytest.mark.parametrize("word", KINDS)
@pytest.mark.parametrize("pods", [1, 2])
def test_every_kind_ends_its_pods_when_the_head_is_not_there_to_do_it(word, pods):
    spec, kind = a_spec(topology=Topology(number_of_processes=pods), cluster=ClusterOptions(kind=word)), KINDS[word]
    assert kind.is_suspended(kind.end(spec, head_leaves=False))


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("pytorch", {"runPolicy": {"cleanPodPolicy": "Running"}}),
        ("mpi", {"runPolicy": {"cleanPodPolicy": "Running"}}),
        ("tf", {"runPolicy": {"cleanPodPolicy": "Running"}}),
        ("job", {"maxFailedIndexes": 0}),
    ],
)
def test_pods_are_ended_behind_a_head_whose_log_stays(word, change):
    spec = a_spec(topology=Topology(number_of_processes=2), cluster=ClusterOptions(kind=word))
    assert KINDS[word].end(spec, head_leaves=True) == {"spec": change}


@pytest.mark.parametrize(("version", "change"), [(0, {"spec": {"suspend": True}}), (1, {})])
def test_a_train_job_s_failed_pods_end_by_a_runtime_of_ours_or_by_a_suspension(version, change):
    spec = a_spec(cluster=ClusterOptions(kind="train", runtime_version=version))
    assert KINDS["train"].end(spec, head_leaves=True) == change


@pytest.mark.parametrize(
    ("version", "said"), [(0, " Its TrainJob is Suspended, not Failed, to free its GPUs"), (1, "")]
)
def test_a_failed_job_that_is_suspended_says_so_in_its_annotation(version, said):
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import objects

    cluster = Cluster("train")
    spec = a_spec(cluster=ClusterOptions(kind="train", runtime_version=version))
    objects.end(cluster, spec, "x", {"kale-dist.dev/failed": "KeyError: 'x'."}, head_leaves=True)
    objects.end(cluster, spec, "x", {"kale-dist.dev/cancelled": "ann"}, head_leaves=False)
    marks = [body["metadata"]["annotations"] for body in cluster.patched]
    assert marks == [{"kale-dist.dev/failed": f"KeyError: 'x'.{said}"}, {"kale-dist.dev/cancelled": "ann"}]


def test_a_train_job_that_was_resumed_has_only_the_pods_since_then():
    resumed = {
        "type": "Suspended",
        "status": "False",
        "reason": "Resumed",
        "lastTransitionTime": "2026-01-31T08:00:09Z",
    }
    assert KINDS["train"].state({"status": {"conditions": [resumed]}}).started == "2026-01-31T08:00:09Z"


@pytest.mark.parametrize("word", ["pytorch", "job", "train"])
def test_a_role_that_a_kind_does_not_have_is_refused(word, refusal):
    spec = a_spec(cluster=ClusterOptions(kind=word, roles={"launcher": {"cpu": 1}}))
    error = refusal(lambda: KINDS[word].make(spec, SETTINGS))
    assert error.argument == "roles"


@pytest.mark.parametrize("roles", [["worker"], {"worker": 3}, {"worker": {"cpus": 1}}, {1: {"cpu": 1}}])
def test_roles_that_are_none_are_refused(roles, refusal):
    assert refusal(lambda: ClusterOptions(roles=roles)).argument.startswith("roles")


def test_roles_come_back_from_a_record():
    spec = a_spec(cluster=ClusterOptions(roles={"worker": {"memory": "8Gi", "rdma/hca": 1}}))
    back = JobSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert KINDS["pytorch"].make(back, SETTINGS) == KINDS["pytorch"].make(spec, SETTINGS)


@pytest.mark.parametrize(
    "changes",
    [
        {"priority_class": "high"}, {"runtime_class": "nvidia"}, {"scheduler_name": "volcano"},
        {"image_pull_policy": "Always"}, {"gang": True}, {"ttl_s": 60},
        {"runtime": "gold", "runtime_version": 1, "mount_service_account_token": True},
    ],
)  # fmt: skip
def test_what_only_a_runtime_can_say_is_refused_for_a_train_job(changes, refusal):
    error = refusal(lambda: KINDS["train"].make(a_spec(cluster=ClusterOptions(kind="train", **changes)), SETTINGS))
    assert error.argument == list(changes)[-1]


@pytest.mark.parametrize("version", [0, 1])
def test_a_runtime_of_ours_bounds_the_restarts(version, refusal):
    options = ClusterOptions(kind="train", runtime="kale-dist", runtime_version=version)

    def make(restarts):
        return KINDS["train"].make(a_spec(policy=Policy(max_restarts=restarts), cluster=options), SETTINGS)

    make(20)
    if not version:
        make(21)
    else:
        assert refusal(lambda: make(21)).argument == "max_restarts"


@pytest.mark.parametrize(
    ("trainer", "pending_s", "timeout_s", "deadline_s", "has_grace", "has_context"),
    [
        ("2.1", 60.0, 10.0, None, False, False), ("2.2", 60.0, 10.0, 1870, False, True), ("2.3", 60.0, 10.0, 1870, True, True),
        ("", 60.0, 10.0, 1870, True, True), ("2.3", None, 10.0, None, True, True), ("2.3", 60.0, None, None, True, True),
    ],
)  # fmt: skip
def test_a_train_job_has_what_its_trainer_takes(trainer, pending_s, timeout_s, deadline_s, has_grace, has_context):
    options = ClusterOptions(kind="train", trainer=trainer, pending_timeout_s=pending_s)
    kind = KINDS["train"]
    made = kind.make(a_spec(policy=Policy(timeout_s=timeout_s), cluster=options), SETTINGS)
    assert made["spec"].get("activeDeadlineSeconds") == deadline_s
    pod = kind.pod_groups(made)[0].template["spec"]
    assert ("terminationGracePeriodSeconds" in pod) == has_grace
    assert ("securityContext" in pod, "securityContext" in pod["containers"][0]) == (has_context, has_context)
    assert kind.trainer_of(made) == (trainer or "2.3")


@pytest.mark.parametrize("ttl", [{}, {"ttl_s": None}])
def test_a_train_job_takes_the_default_ttl_without_a_word(ttl):
    made = KINDS["train"].make(a_spec(cluster=ClusterOptions(kind="train", **ttl)), SETTINGS)
    assert "ttlSecondsAfterFinished" not in json.dumps(made["spec"])


@pytest.mark.parametrize("kind", ["pytorch", "job", "mpi", "tf"])
def test_an_ended_job_is_deleted_after_a_week_unless_it_is_to_stay_for_ever(kind):
    def policy(**ttl):
        made = KINDS[kind].make(a_spec(cluster=ClusterOptions(kind=kind, **ttl)), SETTINGS)
        return made["spec"].get("runPolicy", made["spec"]).get("ttlSecondsAfterFinished")

    assert (policy(), policy(ttl_s=60), policy(ttl_s=None)) == (604_800, 60, None)


def test_a_job_without_an_operator_has_no_gang(refusal):
    error = refusal(lambda: KINDS["job"].make(a_spec(cluster=ClusterOptions(kind="job", gang=True)), SETTINGS))
    assert error.argument == "gang"


@pytest.mark.parametrize("given", ["PyTorchJob", "pytorchs", "Job", 3, ("job",)])
def test_a_kind_that_there_is_not_is_refused_with_those_there_are(given, refusal):
    error = refusal(lambda: ClusterOptions(kind=given))
    assert error.argument == "kind"


class Cluster:
    """Serves some kinds, and keeps of a TrainJob what a version of Trainer knows; every other group is unknown to it.

    `runtimes` are the versions in the labels of its runtimes, by their names.
    """

    server, namespace = "https://c", "team-a"

    def __init__(self, *words, trainer="2.3", runtimes=()):
        self.custom = self
        self.words = words
        self.trainer = trainer
        self.runtimes = dict(runtimes)
        self.asked, self.patched = [], []

    def get_api_resources(self, group, version, **_):
        self.asked.append(group)
        there = [KINDS[word] for word in self.words]
        names = [types.SimpleNamespace(name=kind.plural) for kind in there if kind.api == (group, version)]
        if not names:
            raise pytest.importorskip("kubernetes").client.ApiException(status=404)
        return types.SimpleNamespace(resources=names)

    def list_cluster_custom_object(self, *_, prefix="", **__):
        named = {name: version for name, version in self.runtimes.items() if name.rpartition("/")[0] == prefix}
        return {"items": [a_runtime(name.rpartition("/")[2], version) for name, version in named.items()]}

    def list_namespaced_custom_object(self, *_, **__):
        return self.list_cluster_custom_object(prefix="TrainingRuntime")

    def create_namespaced_custom_object(self, *names, dry_run):
        self.asked.append(dry_run)
        if not self.trainer:
            raise PermissionError
        taken = copy.deepcopy(names[-1])
        dropped = {
            "2.0": ("podTemplateOverrides", "runtimePatches"),
            "2.1": ("runtimePatches", "activeDeadlineSeconds"),
        }
        for field in dropped.get(self.trainer, ("podTemplateOverrides",)):
            taken["spec"].pop(field, None)
        if self.trainer == "2.2":
            patch = taken["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
            del patch["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return taken

    def patch_namespaced_custom_object(self, *names):
        self.patched.append(names[-1])


def a_runtime(name, version, ttl_s=None):
    made = train_runtime.make(name, ClusterOptions(), ttl_s)
    made["metadata"]["labels"] = {"kale-dist.dev/runtime": str(version)} if version else {}
    return made


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
    from kale_dist.places.kubernetes import objects

    assert objects.choose(Cluster(*words), ClusterOptions(kind=asked)).kind == expected


def test_a_kind_that_a_cluster_does_not_serve_is_refused_with_those_it_has_and_how_to_install_it(refusal):
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import objects

    for kind in ("pytorch", "train"):
        error = refusal(lambda kind=kind: objects.choose(Cluster("job"), ClusterOptions(kind=kind)))
        assert error.argument == "kind"


OURS = {"kale-dist": 1}


@pytest.mark.parametrize(
    ("trainer", "runtimes", "changes", "expected"),
    [
        ("2.3", OURS, {}, "train"), ("2.2", OURS, {"runtime_class": "", "restarts": 20}, "train"),
        ("2.2", {"TrainingRuntime/kale-dist": 1}, {}, "train"), ("2.3", {"gold": 1}, {"runtime": "gold"}, "train"),
        ("2.1", OURS, {}, "pytorch"), ("2.0", OURS, {}, "pytorch"), ("", OURS, {}, "pytorch"),
        ("2.3", {}, {}, "pytorch"), ("2.3", {"kale-dist": 0, "gold": 1}, {}, "pytorch"),
        *(("2.3", OURS, changes, "pytorch") for changes in (
            {"restarts": 21}, {"priority_class": "high"}, {"roles": {"master": {"cpu": 2}}}, {"master": True}, {"master": False},
            {"gang": True}, {"queue": "team"}, {"patch": {"spec": {"x": 1}}}, {"mount_service_account_token": True}, {"kind": "pytorch"},
        )),
    ],
)  # fmt: skip
def test_a_train_job_comes_first_where_it_has_all_that_a_pytorchjob_has(trainer, runtimes, changes, expected):
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import objects

    cluster = Cluster("pytorch", "train", "job", trainer=trainer, runtimes=runtimes)
    policy = Policy(max_restarts=changes.get("restarts", 1))
    asked = ClusterOptions(**{name: value for name, value in changes.items() if name != "restarts"})
    options = objects.choose(cluster, asked, policy)
    assert options.kind == expected
    named = (options.runtime, options.runtime_version, options.trainer)
    assert named == ((next(iter(runtimes)), 1, trainer) if expected == "train" else (asked.runtime, 0, ""))


def test_a_cluster_without_trainer_is_asked_for_nothing_of_it():
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import objects

    cluster = Cluster("pytorch", "job", runtimes=OURS)
    assert objects.choose(cluster, ClusterOptions()).kind == "pytorch"
    assert cluster.asked == ["kubeflow.org", "trainer.kubeflow.org"]


@pytest.mark.parametrize("trainer", ["2.1", "2.2", "2.3", ""])
def test_the_version_of_trainer_shows_in_what_it_keeps(trainer):
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import objects

    cluster = Cluster("train", "job", trainer=trainer)
    assert objects.choose(cluster, ClusterOptions(kind="train")).trainer == trainer
    cluster.asked.clear()
    assert objects.choose(cluster, ClusterOptions(kind="train", trainer="2.2")).trainer == "2.2"
    assert "All" not in cluster.asked


def test_trainer_2_0_is_refused_by_name(refusal):
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import objects

    cluster = Cluster("train", "job", trainer="2.0")
    assert refusal(lambda: objects.choose(cluster, ClusterOptions())).argument == "kind"


@pytest.mark.parametrize(
    ("runtimes", "wanted", "found"),
    [
        ({"kale-dist": 2, "TrainingRuntime/kale-dist": 1}, "", ("TrainingRuntime/kale-dist", 1)),
        ({"kale-dist": 2, "TrainingRuntime/kale-dist": 0}, "", ("kale-dist", 2)), ({"kale-dist": 1, "mine": 0}, "mine", ("mine", 0)),
        ({"gold": 3}, "", ("", 0)), ({"gold": 3}, "gold", ("gold", 3)), ({}, "TrainingRuntime/gold", ("TrainingRuntime/gold", 0)),
    ],
)  # fmt: skip
def test_a_train_job_takes_the_runtime_of_ours_that_is_nearest(runtimes, wanted, found):
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import objects

    options = objects.choose(Cluster("train", runtimes=runtimes), ClusterOptions(kind="train", runtime=wanted))
    assert (options.runtime, options.runtime_version) == found


@pytest.mark.parametrize(
    "runtimes",
    [{}, {"torch-distributed": 0}, {"kale-dist": 1}, {"TrainingRuntime/kale-dist": 1, "kale-dist": 1}],
)
@pytest.mark.parametrize("newest", [1, 2])
def test_doctor_says_what_a_runtime_lacks(runtimes, newest, monkeypatch, kept_words):
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import doctor

    monkeypatch.setattr(train_runtime, "VERSION", newest)
    cluster = Cluster("train", runtimes=runtimes)
    for line in doctor._runtimes(cluster):
        kept_words(f"{line.verdict} {line.name}: {line.sentence}. {line.remedy}")


@pytest.mark.parametrize("of_job", [False, True])
def test_doctor_warns_of_a_time_to_live(of_job, monkeypatch, kept_words):
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import doctor, objects

    made = a_runtime("gold", 1, ttl_s=None if of_job else 60)
    if of_job:
        made["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["ttlSecondsAfterFinished"] = 60
    monkeypatch.setattr(objects, "runtimes", lambda _: {"gold": made, "kale-dist": a_runtime("kale-dist", 1)})
    _, warned = doctor._runtimes(Cluster("train"))
    kept_words(f"{warned.sentence}. {warned.remedy}")


class OldMPI(Cluster):
    """Serves the Training Operator's MPIJob."""

    def get_api_resources(self, group, version, **settings):
        if (group, version) == ("kubeflow.org", "v1"):
            return types.SimpleNamespace(resources=[types.SimpleNamespace(name="mpijobs")])
        return super().get_api_resources(group, version, **settings)


def test_the_other_mpijob_is_told_apart():
    pytest.importorskip("kubernetes")
    from kale_dist.places.kubernetes import objects

    with pytest.raises(
        ConfigError, match=r"serves another MPIJob, of kubeflow.org/v1 .* not that of kubeflow.org/v2beta1"
    ):
        objects.choose(OldMPI("job"), ClusterOptions(kind="mpi"))


def tf(processes, servers):
    return a_spec(
        topology=Topology(number_of_processes=processes + servers), cluster=ClusterOptions(kind="tf", servers=servers)
    )


def test_a_tfjob_has_a_chief_workers_and_servers():
    kind = KINDS["tf"]
    groups = kind.pod_groups(kind.make(tf(3, 2), SETTINGS))
    assert [(group.role, group.pods) for group in groups] == [("chief", 1), ("worker", 2), ("ps", 2)]
    first = [group.template["metadata"]["labels"]["kale-dist.dev/first-pod"] for group in groups]
    assert first == ["0", "1", "3"]
    assert kind.pod_names(tf(3, 2))[1:] == (
        "train-net-worker-0", "train-net-worker-1", "train-net-ps-0", "train-net-ps-1",
    )  # fmt: skip


@pytest.mark.parametrize("word", ["pytorch", "mpi", "tf"])
def test_an_agent_calls_other_pods_as_their_controller_does(word):
    from kale_dist.wire import Order
    from kale_dist.worker.pod.head_relays import pod_name

    spec = (
        tf(3, 2)
        if word == "tf"
        else a_spec(topology=Topology(number_of_processes=3), cluster=ClusterOptions(kind=word))
    )
    kind = KINDS[word]
    world = spec.topology.number_of_processes
    order = Order(
        job="j",
        object="j",
        number_of_processes=world,
        processes_per_agent=1,
        head=kind.head_host(spec),
        snapshot="",
        **kind.order(spec),
    )
    assert tuple(pod_name(order, agent) for agent in range(world)) == kind.pod_names(spec)


def test_a_tfjob_has_one_process_a_pod(refusal):
    spec = a_spec(topology=Topology(number_of_processes=4, processes_per_pod=2), cluster=ClusterOptions(kind="tf"))
    assert refusal(lambda: KINDS["tf"].make(spec, SETTINGS)).argument == "processes_per_pod"


@pytest.mark.parametrize("settings", [{"servers": 1}, {"kind": "mpi", "servers": 1}, {"kind": "tf", "servers": -1}])
def test_servers_are_a_tfjobs(settings, refusal):
    error = refusal(lambda: ClusterOptions(**settings))
    assert error.argument == "servers"


def test_a_training_with_torch_is_refused_as_a_tfjob(refusal):
    from trainings import summing

    import kale_dist as kd

    on = kd.Kubernetes(kind="tf", image="registry.example.com/tf:1")
    assert refusal(lambda: kd.distribute(*summing(), on=on)).argument == "kind"
