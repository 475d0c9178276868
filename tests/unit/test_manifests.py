"""Golden files: `KALE_DIST_UPDATE_GOLDEN=1 pytest tests/unit/test_manifests.py` writes them anew; look at the diff."""

import ast
import base64
import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys
import zipfile

import golden_jobs
import pytest
import yaml

from kale_dist.cli import main
from kale_dist.errors import ConfigError
from kale_dist.job.spec import quantities
from kale_dist.job.spec.job_spec import ClusterOptions, JobSpec, Resources, Settled, Topology, Volume, VolumeKind
from kale_dist.places import manifests
from kale_dist.places.manifests import KINDS, bootstrap
from kale_dist.places.manifests.object_settings import INPUT_BYTES, SPEC_ANNOTATION
from kale_dist.wire import EXIT_TERMINATED, Policy, payload

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def made(spec=None, settings=golden_jobs.SETTINGS, **changes):
    return KINDS["pytorch"].make(spec or golden_jobs.a_spec(**changes), settings)


def pods(job):
    return {kind: replica["template"]["spec"] for kind, replica in job["spec"]["pytorchReplicaSpecs"].items()}


def container(job, kind="Master"):
    return pods(job)[kind]["containers"][0]


def variables(job, kind="Master"):
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container(job, kind)["env"]}


@pytest.mark.parametrize("name", golden_jobs.JOBS)
def test_manifests_are_as_they_were_looked_at(name):
    text = golden_jobs.text(name)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("KALE_DIST_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert yaml.safe_load(manifests.to_yaml(golden_jobs.job(name))) == golden_jobs.job(name)


@pytest.mark.parametrize(("grace_s", "pod_s"), [(0.0, 60), (25.0, 60), (90.5, 126), (600.0, 635)])
def test_a_pod_has_longer_than_its_ranks(grace_s, pod_s):
    for pod in pods(made(policy=Policy(grace_s=grace_s))).values():
        assert pod["terminationGracePeriodSeconds"] == pod_s


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("runtime", ()),
        ("runtime_gold", ("--namespace", "team-a", "--name", "gold", "--priority-class", "high", "--runtime-class", "nvidia", "--scheduler-name",
                          "volcano", "--image-pull-policy", "Always", "--run-as-user", "-1", "--ttl", "60")),
    ],
)  # fmt: skip
def test_runtimes_are_printed_as_they_were_looked_at(name, words, capsys):
    assert main(["runtime", *words]) == 0
    text = capsys.readouterr().out
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("KALE_DIST_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(
    "words", [("--name", "Gold"), ("--ttl", "-1"), ("--image-pull-policy", "always"), ("--namespace", "a_b")]
)
def test_a_runtime_that_cannot_be_is_not_printed(words, capsys, kept_words):
    assert main(["runtime", *words]) == 2
    kept_words(capsys.readouterr().err)


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == {*golden_jobs.JOBS, "runtime", "runtime_gold"}


@pytest.mark.parametrize(
    ("processes", "per_pod", "master", "kinds", "names"),
    [
        (1, 1, True, {"Master": 1}, ["x-master-0"]),
        (1, 1, False, {"Master": 1}, ["x-master-0"]),
        (4, 4, False, {"Master": 1}, ["x-master-0"]),
        (2, 1, True, {"Master": 1, "Worker": 1}, ["x-master-0", "x-worker-0"]),
        (3, 1, False, {"Worker": 3}, ["x-worker-0", "x-worker-1", "x-worker-2"]),
        (5, 2, True, {"Master": 1, "Worker": 2}, ["x-master-0", "x-worker-0", "x-worker-1"]),
    ],
)
def test_pods_and_their_numbers(processes, per_pod, master, kinds, names):
    topology = Topology(number_of_processes=processes, processes_per_pod=per_pod)
    spec = golden_jobs.a_spec(name="x", topology=topology, cluster=ClusterOptions(master=master))
    job = made(spec)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: replica["replicas"] for kind, replica in replicas.items()} == kinds
    assert list(KINDS["pytorch"].pod_names(spec)) == names
    assert KINDS["pytorch"].head_host(spec) == names[0]
    first = {kind: variables(job, kind)["KALE_DIST_FIRST_POD"] for kind in kinds}
    assert first == {kind: "1" if kind == "Worker" and "Master" in kinds else "0" for kind in kinds}


def test_pods_ask_for_what_their_ranks_need():
    job = made(
        topology=Topology(number_of_processes=5, processes_per_pod=3), cuda=True,
        resources=Resources(cpu=0.25, memory_gib=1.5, extended=(("rdma/hca", "2"),)),
    )  # fmt: skip
    assert container(job)["resources"]["requests"] == {
        "cpu": "750m", "memory": "4608Mi", "nvidia.com/gpu": "3", "rdma/hca": "6",
    }  # fmt: skip
    assert container(job, "Worker")["resources"]["requests"]["nvidia.com/gpu"] == "2"
    assert "cpu" not in container(job)["resources"]["limits"]


def test_a_request_of_cores_is_never_above_their_limit():
    asked = container(made(resources=Resources(cpu_limit=0.5)))["resources"]
    assert (asked["requests"]["cpu"], asked["limits"]["cpu"]) == ("500m", "500m")


def test_shared_memory_has_room_in_the_memory():
    def shm(**changes):
        volume = next(volume for volume in pods(made(**changes))["Master"]["volumes"] if volume["name"] == "shm")
        return volume["emptyDir"]["sizeLimit"]

    assert shm() == "1Gi"
    assert shm(resources=Resources(memory_gib=100)) == "8Gi"
    assert shm(resources=Resources(memory_gib=8, shm_gib=8)) == "8Gi"
    wide = Topology(number_of_processes=4, processes_per_pod=4)
    assert shm(topology=wide, resources=Resources(memory_gib=4, shm_gib=0.5)) == "2Gi"


@pytest.mark.parametrize("user", [None, -1, 0, 2000])
def test_users_of_pods(user):
    context = pods(made(cluster=ClusterOptions(run_as_user=user)))["Master"]["securityContext"]
    expected = {None: 1000, -1: None}.get(user, user)
    assert context.get("runAsUser") == context.get("fsGroup") == context.get("runAsGroup") == expected
    assert context["runAsNonRoot"] is (user != 0)


def test_users_may_set_what_is_only_a_default():
    job = made(environment=(("HOME", "/data"), ("OMP_NUM_THREADS", "3"), ("TEXT", "a$(HOME)b$(")))
    names = [item["name"] for item in container(job)["env"]]
    assert len(names) == len(set(names))
    assert (variables(job)["HOME"], variables(job)["OMP_NUM_THREADS"]) == ("/data", "3")
    assert variables(job)["TEXT"] == "a$$(HOME)b$$("


def test_the_annotation_is_the_specification_without_secrets():
    settled = Settled.of(golden_jobs.a_spec(secrets=(("TOKEN", "s3cret"),), volumes=golden_jobs.VOLUMES), name="a")
    spec = JobSpec.complete(settled, b"k" * 32, snapshot="ab")
    job = made(spec)
    text = job["metadata"]["annotations"][SPEC_ANNOTATION]
    assert JobSpec.from_json(json.loads(text)) == spec
    assert "s3cret" not in json.dumps(job)
    many = made(blobs=tuple(f"{number:064x}" for number in range(10_000)))
    assert len(many["metadata"]["annotations"][SPEC_ANNOTATION]) < 200_000


def test_the_secret_goes_with_its_job():
    spec, settings = golden_jobs.a_spec(name="x"), golden_jobs.SETTINGS
    job = made(spec)
    job["metadata"]["uid"] = "the-uid"
    secret = manifests.input_secret(spec, settings, manifests.owner_of(job), {"key": b"\0" * 32})
    assert (secret["metadata"]["name"], base64.b64decode(secret["data"]["key"])) == ("x-input", b"\0" * 32)
    owner = secret["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["kind"], owner["name"], owner["blockOwnerDeletion"]) == (
        "the-uid", "PyTorchJob", "x", False,
    )  # fmt: skip
    assert (
        "ownerReferences" not in manifests.input_secret(spec, settings, manifests.owner_of(made(spec)), {})["metadata"]
    )


def test_a_later_run_has_an_object_and_a_secret_of_its_own_and_the_labels_of_its_job():
    spec, settings = golden_jobs.a_spec(name="x"), dataclasses.replace(golden_jobs.SETTINGS, life=2)
    job, secret = made(spec, settings), manifests.input_secret(spec, settings, {}, {})
    assert (job["metadata"]["name"], secret["metadata"]["name"]) == ("x-2", "x-2-input")
    for made_ in (job, secret):
        assert made_["metadata"]["labels"]["app.kubernetes.io/instance"] == "x"
    assert job["metadata"]["labels"]["kale-dist.dev/run"] == "2"
    assert next(iter(pods(job)["Master"]["volumes"]))["secret"]["secretName"] == "x-2-input"
    assert KINDS["pytorch"].head_host(spec, 2) == "x-2-master-0"
    longest = golden_jobs.a_spec(name="x" * 50, topology=Topology(number_of_processes=1000))
    assert max(map(len, KINDS["pytorch"].pod_names(longest, 9))) <= 63


# -- patches ---------------------------------------------------------------------------------------------------------


def patched(patch, **changes):
    return made(cluster=ClusterOptions(patch=json.dumps(patch)), **changes)


def in_pod(patch):
    return {"spec": {"pytorchReplicaSpecs": {"Master": {"template": {"spec": patch}}}}}


def test_a_merge_finds_items_of_lists_by_their_keys():
    job = patched(
        in_pod(
            {
                "hostNetwork": True, "terminationGracePeriodSeconds": None,
                "containers": [
                    {"name": "pytorch", "env": [{"name": "HOME", "value": "/x"}, {"name": "USER", "$patch": "delete"}]},
                    {"name": "sidecar", "image": "busybox"},
                ],
                "volumes": [{"name": "tmp", "$patch": "replace", "hostPath": {"path": "/scratch"}}],
            }
        )
    )  # fmt: skip
    pod = pods(job)["Master"]
    assert [item["name"] for item in pod["containers"]] == ["pytorch", "sidecar"]
    assert pod["hostNetwork"] is True
    assert "terminationGracePeriodSeconds" not in pod
    assert variables(job)["HOME"] == "/x"
    assert "USER" not in variables(job)
    assert variables(job)["LOGNAME"]
    assert {"name": "tmp", "hostPath": {"path": "/scratch"}} in pod["volumes"]
    assert len(pod["volumes"]) == 5
    assert pods(job)["Worker"] == pods(made())["Worker"]


def test_lists_without_a_key_are_replaced():
    tolerations = json.dumps([{"operator": "Exists"}])
    cluster = ClusterOptions(tolerations=tolerations, patch=json.dumps(in_pod({"tolerations": [{"key": "gpu"}]})))
    assert pods(made(cluster=cluster))["Master"]["tolerations"] == [{"key": "gpu"}]


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ({"metadata": {"name": "other"}}, "metadata.name"),
        ({"metadata": {"namespace": "other"}}, "metadata.namespace"),
        ({"kind": "TFJob"}, "kind"),
        ({"spec": None}, "no PyTorchJob any more"),
        ({"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 9}}}}, "number of replicas"),
        ({"spec": {"pytorchReplicaSpecs": {"Worker": {"restartPolicy": "OnFailure"}}}}, "restartPolicy"),
        (in_pod({"containers": [{"name": "pytorch", "$patch": "delete"}]}), "removes the container"),
        (in_pod({"containers": [{"image": "x"}]}), "has no name"),
        (in_pod({"containers": ["pytorch"]}), "have to be objects"),
        (in_pod({"$patch": "merge-ish"}), "merge-ish"),
        (in_pod({"$setElementOrder/containers": []}), "not supported"),
    ],
)  # fmt: skip
def test_patches_that_cannot_be(patch, said):
    with pytest.raises(ConfigError) as caught:
        patched(patch)
    assert caught.value.argument == "patch"
    assert said in str(caught.value)


# -- quantities, YAML ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "text"), [(1, "1"), (0.5, "500m"), (0.1 + 0.2, "300m"), (0.0001, "1m"), (2.0, "2"), (96, "96")]
)
def test_cores_as_quantities(cores, text):
    assert quantities.cpu_text(cores) == text
    assert quantities.cores(text) == pytest.approx(cores, abs=1e-3)


@pytest.mark.parametrize(
    ("gib", "text"), [(1, "1Gi"), (0.5, "512Mi"), (1.1, "1127Mi"), (0.0001, "1Mi"), (2048, "2048Gi")]
)
def test_memory_as_quantities(gib, text):
    assert quantities.memory_text(gib) == text
    assert quantities.memory_gib(text) >= gib


HOSTILE_TEXTS = [
    "1e3", "y", "NO", "0o17", "0x1F", "1_000", "12:30:45", "2026-11-21", "~", "null", ".inf", "", " ", "- a", "a: b", "# a", "@a",
    "'", '"', "é日本", "\n", "a\n", "a\nb", " a\nb", "a \nb\n", "\ta\nb", "\x1b[0m", "\x7f", "\u2028", "\ud7ff", "{}", "[", "&a",
    "*a", "!t", "%", "`", "=", "<<", "a\r\nb", "\N{GRINNING FACE}", "true", "on", "+1", "-", "a\n\n\nb", "---\na",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_yaml_gives_texts_back(text):
    assert yaml.safe_load(manifests.to_yaml({"a": [text], text: 1})) == {"a": [text], text: 1}


# -- what starts in a pod --------------------------------------------------------------------------------------------


def start(folder, environment=None, command=None, runtime=None):
    (folder / "input").mkdir()
    (folder / "work").mkdir()
    if runtime is not None:
        (folder / "input/runtime.zip").write_bytes(runtime)
    told = {
        "KALE_DIST_INPUT": str(folder / "input"),
        "KALE_DIST_WORK": str(folder / "work"),
        "PATH": os.environ["PATH"],
    }
    return subprocess.run(
        command or [sys.executable, *bootstrap.command()[1:]],
        check=False, env=told | (environment or {}), capture_output=True, text=True, cwd=folder, timeout=60,
    )  # fmt: skip


def zipped(path, text):
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("kale_dist/__init__.py", "")
        packed.writestr("kale_dist/worker/__init__.py", "")
        packed.writestr("kale_dist/worker/__main__.py", text)
    return path.read_bytes()


def test_the_first_command_becomes_the_agent(tmp_path):
    runtime = zipped(tmp_path / "r.zip", "import sys, os; print(sys.argv[1:], sys.path[0], os.environ['PYTHONPATH'])")
    (tmp_path / "kale_dist.py").write_text("raise SystemExit('the current folder was searched')")
    ended = start(tmp_path, {"PYTHONPATH": "/mine"}, runtime=runtime)
    target = tmp_path / "work/runtime"
    assert ended.stdout.strip() == f"['pod'] {target} /mine"
    assert ended.returncode == 0


@pytest.mark.parametrize("when", ["unpacking", "importing"])
def test_a_sigterm_before_the_agent_is_there_ends_the_container(tmp_path, when):
    """Its process 1 would ignore it: here the handler shows in the exit code."""
    kill = "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
    script = bootstrap.BOOTSTRAP
    if when == "unpacking":
        script = script.replace("source = os.path", f"{kill}\nsource = os.path", 1)
    runtime = zipped(tmp_path / "r.zip", kill)
    ended = start(tmp_path, command=[sys.executable, "-c", script], runtime=runtime)
    assert ended.returncode == EXIT_TERMINATED, ended.stderr


def test_an_input_that_cannot_be_unpacked_is_said(tmp_path):
    ended = start(tmp_path, runtime=b"no zip")
    assert ended.returncode == bootstrap.EXIT_CODE
    assert "cannot be unpacked" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_older_python_is_told_so(tmp_path):
    older = "import sys; sys.version_info = (3, 8, 10, 'final', 0)\n"
    ended = start(tmp_path, command=[sys.executable, "-c", older + bootstrap.BOOTSTRAP])
    assert ended.returncode == bootstrap.EXIT_CODE
    assert "Python is 3.8.10" in ended.stderr
    assert "3.11 or later is needed" in ended.stderr
    ast.parse(bootstrap.BOOTSTRAP, feature_version=(3, 6))
    assert "$(" not in bootstrap.BOOTSTRAP


def test_the_runtime_needs_nothing_but_what_it_brings(tmp_path):
    packed = payload.runtime_zip()
    # A Secret takes 1,048,576 bytes: the runtime, the largest snapshot that is sent in it, and the order.
    assert len(packed) + INPUT_BYTES < 1_030_000
    code = (
        "import sys, pkgutil, importlib\n"
        "sys.path[:] = [path for path in sys.path if 'site-packages' not in path]\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import kale_dist, cloudpickle\n"
        "assert kale_dist.__file__.startswith(sys.argv[1]), kale_dist.__file__\n"
        "assert cloudpickle.__file__.startswith(sys.argv[1])\n"
        "assert callable(kale_dist.report) and kale_dist.context() is not None\n"
        "names = []\n"
        "for part in ('snapshot', 'wire', 'worker.agent', 'worker.pod', 'worker.rank'):\n"
        "    package = importlib.import_module('kale_dist.' + part)\n"
        "    names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + '.')]\n"
        "for name in names:\n"
        "    if not name.endswith('matplotlib_backend'):\n"  # only where matplotlib is
        "        importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules and len(names) > 20\n"
    )
    with zipfile.ZipFile(io.BytesIO(packed)) as runtime:
        runtime.extractall(tmp_path / "there")
        assert not [name for name in runtime.namelist() if not name.endswith(".py")]
    subprocess.run([sys.executable, "-I", "-c", code, str(tmp_path / "there")], check=True, timeout=60)


def test_the_runtime_is_the_same_each_time():
    payload.runtime_zip.cache_clear()
    first = payload.runtime_zip()
    payload.runtime_zip.cache_clear()
    assert payload.runtime_zip() == first


def test_volumes_of_one_source_share_a_volume():
    volumes = (
        Volume(mount_path="/a", source="data", kind=VolumeKind.CLAIM, sub_path="a"),
        Volume(mount_path="/b", source="data", kind=VolumeKind.CLAIM, read_only=True),
        Volume(mount_path="/c", kind=VolumeKind.EMPTY_DIR),
        Volume(mount_path="/d", kind=VolumeKind.EMPTY_DIR),
    )
    job = made(volumes=volumes)
    mounts = {mount["mountPath"]: mount["name"] for mount in container(job)["volumeMounts"]}
    assert mounts["/a"] == mounts["/b"]
    assert len({mounts["/a"], mounts["/c"], mounts["/d"]}) == 3
