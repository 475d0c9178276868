"""What the golden files say, said to a real API server; and pods that really start where Pod Security is strictest."""

import io
import json
import subprocess
import time
import uuid
import zipfile

import pytest
import yaml
from golden_jobs import JOBS, SETTINGS, job

from kale_dist.job.spec.job_spec import ClusterOptions, JobSpec, Resources, Topology, Volume, VolumeKind
from kale_dist.places import manifests
from kale_dist.places.manifests import KINDS, train_runtime

IMAGE = "localhost:5000/kale-dist/torch-cpu:2.13.0"


def kubectl(*arguments, text=None):
    ended = subprocess.run(
        ["kubectl", *arguments], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def cluster(kubeconfig):
    return kubeconfig


@pytest.fixture(scope="module")
def restricted(cluster):
    """A namespace that enforces Pod Security "restricted"."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    kubectl("-n", name, "wait", "--for=create", "serviceaccount/default", "--timeout=20s")
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def lost(given, taken, path=""):
    """Paths of values that the server has not kept."""
    if isinstance(given, dict) and isinstance(taken, dict):
        return [one for key, value in given.items() for one in lost(value, taken.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        return [
            one for index, pair in enumerate(zip(given, taken, strict=True)) for one in lost(*pair, f"{path}[{index}]")
        ]
    # An empty variable or claim is left out.
    return [] if given == taken or (not given and taken is None) else [path]


def serves(kind, spec):
    """Whether the cluster has this version of a kind, with all fields of a spec."""
    command = ["kubectl", "get", "--raw", f"/apis/{kind.group}/{kind.version}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if found.returncode or kind.plural not in {one["name"] for one in json.loads(found.stdout)["resources"]}:
        return False
    if not kind.group.endswith("kubeflow.org"):
        return True
    definition = json.loads(kubectl("get", "crd", f"{kind.plural}.{kind.group}", "-o", "json"))
    version = next(one for one in definition["spec"]["versions"] if one["name"] == kind.version)
    return set(spec) <= set(version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])


def test_an_api_server_takes_every_golden_file(restricted):
    known = [name for name in JOBS if _takes(name, restricted)]
    assert {"default", "everything", "job", "volumes"} <= set(known)


def _takes(name, restricted):
    """Have the server take the object of a file; False if it does not know this form of the kind."""
    text = manifests.to_yaml(job(name)).replace("namespace: team-a", f"namespace: {restricted}")
    given = yaml.safe_load(text)
    kind = next(kind for kind in KINDS.values() if kind.name == given["kind"])
    if not serves(kind, given["spec"]):
        return False
    if "runtimeRef" in given["spec"]:
        # The server looks for the runtime, and has this one.
        given["spec"]["runtimeRef"] = {
            "apiGroup": kind.group,
            "kind": "ClusterTrainingRuntime",
            "name": "torch-distributed",
        }
        text = yaml.safe_dump(given)
    taken = json.loads(kubectl("apply", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", text=text))
    # The server keeps what it knows and drops the rest without a word.
    assert lost(given["spec"], taken["spec"]) == [], name
    return True


def test_an_api_server_takes_the_runtime_of_train_jobs_and_a_job_and_a_pod_of_it(restricted):
    made = train_runtime.make("kale-dist", ClusterOptions(namespace=restricted))
    spec = made["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    meta = {"name": "one", "namespace": restricted}
    given = [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": meta,
            "spec": {**spec, "completions": 2, "parallelism": 2},
        },
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec["template"]["spec"]},
        *([made] if serves(KINDS["train"], ()) else []),
    ]
    for one in given:
        taken = kubectl("apply", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", text=json.dumps(one))
        assert lost(one["spec"], json.loads(taken)["spec"]) == [], one["kind"]


def test_pod_security_takes_every_pod_without_a_folder_of_its_node(restricted):
    made = [job(name) for name in JOBS]
    # Before Trainer 2.2, what a container may do is said by the runtime alone.
    made = [given for given in made if "podTemplateOverrides" not in given["spec"]]
    # RDMA pins memory, which "restricted" does not allow: docs/gpus.md says so.
    made = [given for given in made if "IPC_LOCK" not in str(given)]
    assert len(made) > 10
    for given in made:
        _check_that_it_is_let_in(given, restricted)


def _check_that_it_is_let_in(given, restricted):
    kind = next(kind for kind in KINDS.values() if kind.name == given["kind"])
    template = kind.pod_groups(given)[0].template
    template["metadata"]["labels"]["training.kubeflow.org/replica-index"] = "0"
    pod = template["spec"] | {"restartPolicy": "Never", "serviceAccountName": "default"}
    pod.pop("priorityClassName", None)
    for container in pod["containers"][1:]:
        container["securityContext"] = pod["containers"][0]["securityContext"]
    pod["volumes"] = [volume | {"hostPath": None} for volume in pod["volumes"]]
    pod["volumes"] = [
        ({"emptyDir": {}, **volume} if set(volume) == {"name", "hostPath"} else volume) for volume in pod["volumes"]
    ]
    text = json.dumps(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one", **template["metadata"]}, "spec": pod}
    )
    taken = json.loads(
        kubectl("-n", restricted, "apply", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", text=text)
    )
    assert taken["spec"]["securityContext"] == pod["securityContext"]


def test_texts_arrive_as_they_were_given(restricted):
    texts = [
        "1e3",
        "y",
        "0o17",
        "0x1F",
        "1_000",
        "12:30:45",
        "2026-11-21",
        "~",
        ".inf",
        "NO",
        " a\nb ",
        "é\n",
        "a\r\nb",
        "'\"",
        "",
    ]
    data = {f"key-{number}": text for number, text in enumerate(texts)}
    sent = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "texts", "namespace": restricted},
        "data": data,
    }
    taken = json.loads(kubectl("apply", "--dry-run=server", "-o", "json", "-f", "-", text=manifests.to_yaml(sent)))
    assert taken["data"] == data


_AGENT = """
import getpass, json, os, pathlib, socket, tempfile, time
told = {name: os.environ[name] for name in os.environ if name.startswith("KALE_DIST_")}
for folder in (pathlib.Path.home(), tempfile.gettempdir(), "/dev/shm", told["KALE_DIST_WORK"], "/kale-dist/store", "/scratch"):
    (pathlib.Path(folder) / f"file-{told['KALE_DIST_REPLICA_INDEX']}").write_text("x")
head = ""
while not head:
    try:
        head = socket.gethostbyname("strict-worker-0")
    except OSError:
        time.sleep(0.1)
# A name leads to a pod only as long as that pod runs.
pathlib.Path(f"/kale-dist/store/found-{told['KALE_DIST_REPLICA_INDEX']}").touch()
while not pathlib.Path("/kale-dist/store/found-1").exists():
    time.sleep(0.1)
token = os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount/token")
print(json.dumps({**told, "ids": [os.getuid(), os.getgid()], "user": getpass.getuser(), "text": os.environ["TEXT"],
    "head": bool(head), "token": token, "services": [name for name in os.environ if name.startswith("STRICT_")]}), flush=True)
"""


def a_runtime():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("kale_dist/__init__.py", "")
        packed.writestr("kale_dist/worker/__init__.py", "")
        packed.writestr("kale_dist/worker/__main__.py", _AGENT)
    return buffer.getvalue()


def test_workers_start_where_pod_security_is_strictest(restricted):
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "results", "namespace": restricted},
        "spec": {"storageClassName": "shared", "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip
    kubectl("apply", "-f", "-", text=manifests.to_yaml(claim))
    spec = JobSpec(
        name="strict", label="x", kind="call", snapshot="ab" * 32, topology=Topology(number_of_processes=2),
        resources=Resources(cpu=0.05, memory_gib=0.25), environment=(("TEXT", "a$(HOME)"),),
        volumes=(Volume(mount_path="/scratch", kind=VolumeKind.EMPTY_DIR, size_gib=0.01),),
        cluster=ClusterOptions(namespace=restricted, master=False), image=IMAGE, store="pvc://results",
    )  # fmt: skip
    text = manifests.to_yaml(KINDS["pytorch"].make(spec, SETTINGS))
    job = json.loads(kubectl("create", "-o", "json", "-f", "-", text=text))
    secret = manifests.input_secret(spec, SETTINGS, manifests.owner_of(job), {"runtime.zip": a_runtime(), "key": b"\0"})
    kubectl("create", "-f", "-", text=manifests.to_yaml(secret))
    kubectl("-n", restricted, "wait", "pytorchjob/strict", "--for=condition=Succeeded", "--timeout=40s")
    for index, name in enumerate(KINDS["pytorch"].pod_names(spec)):
        told = json.loads(kubectl("-n", restricted, "logs", name))
        assert (told["KALE_DIST_FIRST_POD"], told["KALE_DIST_REPLICA_INDEX"]) == ("0", str(index))
        assert told["KALE_DIST_CPU_REQUEST"] == "50"
        assert (told["ids"], told["user"], told["text"]) == ([1000, 1000], "kale-dist", "a$(HOME)")
        assert (told["head"], told["token"], told["services"]) == (True, False, [])
    kubectl("-n", restricted, "delete", "pytorchjob", "strict")
    deadline = time.monotonic() + 30
    while "strict-input" in kubectl("-n", restricted, "get", "secrets", "-o", "name"):
        assert time.monotonic() < deadline, "the Secret outlives its job"
        time.sleep(0.2)
