"""Faults of pods on the real cluster, of the namespace that they are in, and of who may do what there."""

import base64
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid

import pytest
from fault_work import counts, waits
from in_containers import check_counts, ctrl_c, trains
from on_cluster import IMAGE, Network, grant, make_claim, pods_in, run_kubectl, write_kubeconfig
from on_this_machine import breaking_at

import kale_dist as kd
from kale_dist.errors import BackendError, JobNotFoundError
from kale_dist.job import records
from kale_dist.places.kubernetes import roles
from kale_dist.places.manifests import KINDS


def namespace_of(scene):
    if not hasattr(scene, "namespace"):
        scene.namespace = scene.part("make_namespace")()
    return scene.namespace


def in_pods(scene, **settings):
    """Where a call goes that computes nothing."""
    return pods_in(namespace_of(scene), image=scene.part("plain_pod_image"), **settings)


def has_counted(scene, job, line="000003"):
    scene.until(lambda: any(one.rank == 1 and one.text == line for one in job.logs()), job)


def process_of(namespace, pod):
    """A process of a pod on this machine, which has the pod's network."""
    uid = run_kubectl("-n", namespace, "get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if uid in (folder / "cgroup").read_text():
                return int(folder.name)
    return pytest.skip("the cluster's node is another machine")


def network_is_cut(scene):
    job = scene.launch(counts, 300, 0.1, on=in_pods(scene))
    has_counted(scene, job)
    worker = f"{job.name}-worker-0"
    address = run_kubectl("-n", scene.namespace, "get", "pod", worker, "-o", "jsonpath={.status.podIP}")
    rule = ["nsenter", "--net", "--target", str(process_of(scene.namespace, f"{job.name}-master-0")), "iptables"]
    away = ["INPUT", "--source", address, "--jump", "DROP"]
    if subprocess.run([*rule, "--append", *away], capture_output=True, check=False).returncode:
        pytest.skip("only root of the node's machine can cut its networks")
    time.sleep(10)
    subprocess.run([*rule, "--delete", *away], check=True)
    scene.succeeds(job, 300, 300)
    check_counts(job, 300)


def way_to_the_cluster_is_cut(scene):
    network, _ = through_a_network(scene)
    job = scene.launch(counts, 200, 0.1, on=in_pods(scene))
    has_counted(scene, job)
    network.cut()
    time.sleep(10)
    assert not job.done()
    network.mend()
    scene.succeeds(job, 200, 200)
    check_counts(job, 200)


def through_a_network(scene):
    """Have this process reach the cluster through a network of the test's; gives it, and how `kubectl` goes around it."""
    original, path = os.environ["KUBECONFIG"], scene.folder / "kubeconfig"
    network = Network.of_cluster(original, path)
    scene.undone.callback(network.close)
    scene.patch.setenv("KUBECONFIG", str(path))
    return network, ("--kubeconfig", original)


def reached_is_kept(scene, fault, ending):
    """A training ends or is renewed while the way to its head is disturbed, and all that it has reached comes."""
    on = pods_in(namespace_of(scene), master=False)
    network, around = through_a_network(scene)
    job = trains(scene, on, {"fails": 6}.get(ending), epochs=200 if ending == "is cancelled" else 12)
    getattr(network, fault)(*((1_000_000,) if fault == "cut_each_after" else ()))
    if ending == "is cancelled":
        with contextlib.suppress(BackendError):
            job.cancel()
    elif ending == "is renewed":
        run_kubectl(
            *around, "-n", scene.namespace, "delete", "pod", f"{job.name}-worker-1", "--force", "--grace-period=0"
        )
    if fault != "cut_each_after":
        time.sleep(15)
        network.mend()
    status = scene.end_of(job)
    if ending == "is renewed":
        assert (status.state.value, status.warnings) == ("succeeded", ()), (status, [str(line) for line in job.logs()])
        assert int(job.state_dict()["epochs"]) == 12
        assert not [line.text for line in job.logs() if "from the beginning" in line.text]
        return
    assert status.state.value == ("failed" if ending == "fails" else "cancelled"), status
    assert int(job.state_dict(partial=True)["epochs"]) == status.checkpoint_epoch >= 3
    with pytest.raises(kd.errors.JobError) as caught:
        job.result()
    if ending == "fails":
        assert isinstance(caught.value.__cause__, ValueError)
    else:
        assert "Its last checkpoint is kept" in str(caught.value)


def notebook_is_gone(scene, size):
    """A notebook ends; a worker is lost; in the morning another process has the model."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    code = """
        import torch
        from torch import nn
        model = nn.Linear(8, {size})
        model.register_buffer("epochs", torch.zeros(()))
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long)), batch_size=8)
        on = kd.Kubernetes(**{settings!r})
        job = kd.distribute(model, loader, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 1e-6), trains_and_fails,
            epochs=8, checkpoint_every=1, number_of_processes=2, max_restarts=1, name={name!r}, on=on)
        while (job.status.checkpoint_epoch or 0) < 2:
            time.sleep(0.1)
        os._exit(0)
    """
    volumes = {}
    if size > 100_000:
        make_claim(namespace_of(scene), "data")
        volumes = {"volumes": {"/data": "data"}}
    on = {"namespace": namespace_of(scene), "image": IMAGE, "resources": {"cpu": 0.1, "memory": "1Gi"}, **volumes}
    scene.said_by(scene.notebook(code.format(size=size, settings=on, name=name)))
    run_kubectl("-n", scene.namespace, "delete", "pod", f"{name}-worker-0", "--force", "--grace-period=0")
    path = "jsonpath={.status.conditions[-1:].type}"
    scene.until(lambda: run_kubectl("-n", scene.namespace, "get", "pytorchjob", name, "-o", path) == "Succeeded")
    reference, weights = f"kubernetes://{scene.namespace}/{name}", scene.folder / "model.pt"
    command = [sys.executable, "-P", "-m", "kale_dist.cli"]
    for words, expected in (
        (["status", reference], "succeeded"),
        (["fetch", reference, "-o", str(weights)], "model.pt"),
    ):
        ended = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=scene.bound_s)
        assert expected in ended.stdout.lower(), ended
    import torch

    assert int(torch.load(weights)["epochs"]) == 8
    scene.follow(kd.attach(reference))


def namespace_is_deleted(scene):
    job = scene.launch(waits, ready=2, on=in_pods(scene))
    run_kubectl("delete", "namespace", scene.namespace, "--wait=false")
    status = scene.end_of(job)
    assert status.state.value in ("cancelled", "failed"), status
    assert "deleted" in status.reason, status


def quota_is_lowered(scene):
    def set_to(pods):
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "q"},
            "spec": {"hard": {"pods": str(pods)}},
        }
        run_kubectl("-n", namespace_of(scene), "apply", "-f", "-", text=json.dumps(quota))

    set_to(2)
    job = scene.launch(counts, 300, 0.1, on=in_pods(scene))
    has_counted(scene, job)
    set_to(1)
    with pytest.warns(kd.errors.KaleDistWarning, match="The quota q"):
        later = scene.launch(counts, 3, number_of_processes=1, on=in_pods(scene))
    scene.until(lambda: "the quota q" in later.status.reason, later)
    scene.succeeds(job, 300, 300)
    scene.succeeds(later, 3)


def user(scene, name):
    """The kubeconfig of a person with the least role."""
    namespace = namespace_of(scene)
    run_kubectl("-n", namespace, "create", "serviceaccount", name)
    identity = f"system:serviceaccount:{namespace}:{name}"
    role = roles.role_yaml(namespace, identity, roles.rights(KINDS["pytorch"]))
    grant(namespace, identity, role.replace("name: kale-dist", f"name: {name}"))
    token = run_kubectl("-n", namespace, "create", "token", name, "--duration=1h").strip()
    return str(write_kubeconfig(scene.folder / name, os.environ["KUBECONFIG"], token=token))


def two_users(scene):
    on = in_pods(scene)
    script = """
        job = kd.launch(counts, 20, 0.1, number_of_processes=2, on=kd.Kubernetes(**{settings!r}))
        print(job.name, job.results(150), flush=True)
        sys.stdin.readline()
        job.delete()
        try:
            kd.launch(counts, 1, number_of_processes=2, name="of-both", on=kd.Kubernetes(**{settings!r}))
        except kd.errors.JobExistsError:
            print("taken")
    """
    settings = {"namespace": scene.namespace, "image": on.image, "resources": {"cpu": 0.1, "memory": "1Gi"}}
    script = script.format(settings=settings)
    people = [
        scene.notebook(script, KUBECONFIG=user(scene, name), XDG_STATE_HOME=str(scene.folder / f"state-{name}"))
        for name in ("ada", "bob")
    ]
    names = []
    for person in people:
        name, _, results = person.stdout.readline().partition(" ")
        assert results == "[20, 20]\n", person.communicate()
        names.append(name)
    job = scene.launch(counts, 1, name="of-both", on=on)
    scene.succeeds(job, 1, 1)
    assert {one.name for one in kd.jobs(on="kubernetes", namespace=scene.namespace)} == {"of-both", *names}
    for person in people:
        assert person.communicate("\n", timeout=scene.bound_s)[0] == "taken\n"
    assert [one.name for one in kd.jobs(on="kubernetes", namespace=scene.namespace)] == ["of-both"]


AUTHORITY = """
[ca]
default_ca = own
[own]
database = index
new_certs_dir = .
unique_subject = no
serial = serial
default_md = sha256
policy = any
[any]
commonName = supplied
organizationName = supplied
"""


def write_certificate(scene, path, valid_s):
    """A kubeconfig with a client's certificate that is valid for so long."""
    authority = pathlib.Path(os.environ["KUBECONFIG"]).parent / "state" / "pki"
    if not authority.is_dir():
        pytest.skip("the key of the cluster's authority is not on this machine")
    folder = scene.folder / "authority"
    folder.mkdir(exist_ok=True)
    (folder / "ca.cnf").write_text(AUTHORITY)
    (folder / "index").touch()
    end = time.strftime("%y%m%d%H%M%SZ", time.gmtime(time.time() + valid_s))
    for command in (
        "req -newkey rsa:2048 -nodes -subj /O=system:masters/CN=ada -keyout key -out request",
        f"ca -batch -notext -rand_serial -config ca.cnf -cert {authority}/ca.crt -keyfile {authority}/ca.key -enddate {end} -in request -out certificate",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    found = {"client-key-data": folder / "key", "client-certificate-data": folder / "certificate"}
    credentials = {name: base64.b64encode(file.read_bytes()).decode() for name, file in found.items()}
    write_kubeconfig(path, os.environ["KUBECONFIG"], user=credentials)


def certificate_expires(scene):
    path = scene.folder / "kubeconfig"
    write_certificate(scene, path, 40)
    on = in_pods(scene)
    scene.patch.setenv("KALE_DIST_KUBECONFIG", str(path))
    job = scene.launch(counts, 700, 0.1, on=on)
    has_counted(scene, job)
    expired = {**os.environ, "KUBECONFIG": str(path)}
    asked = ["kubectl", "get", "pods", "-n", scene.namespace]
    scene.until(lambda: subprocess.run(asked, env=expired, capture_output=True, check=False).returncode)
    time.sleep(10)
    assert not job.done()
    write_certificate(scene, path, 3600)
    scene.succeeds(job, 700, 700)
    check_counts(job, 700)


POINTS = (
    "before kale_dist.job.records:create",
    "before kale_dist.places.kubernetes.objects:create",
    "after kale_dist.places.kubernetes.objects:create",
    "before kale_dist.places.manifests:input_secret",
    "after kale_dist.places.manifests:input_secret",
    "before kale_dist.job.records:write",
    "after kale_dist.job.records:write",
    "before kale_dist.calls.starting:handle",
)
"""Where a submission to a cluster can be stopped."""


def objects_of(scene, name):
    """What of a job the cluster has and does not end."""
    found = json.loads(run_kubectl("-n", scene.namespace, "get", "pytorchjobs,secrets,pods", "-o", "json"))["items"]
    names = [one["metadata"]["name"] for one in found if "deletionTimestamp" not in one["metadata"]]
    return [one for one in names if one.startswith(name)]


def interrupted_at_each_step(scene):
    on = in_pods(scene)
    for point in POINTS:
        name = f"test-{uuid.uuid4().hex[:8]}"
        with breaking_at(point, ctrl_c), pytest.raises(KeyboardInterrupt):
            kd.launch(waits, number_of_processes=2, name=name, on=on)
        if not records.exists(f"kubernetes.{scene.namespace}.{name}"):
            scene.until(lambda name=name: not objects_of(scene, name))
        delete_what_is_there(scene, name)


def delete_what_is_there(scene, name):
    """What a notebook has left is found by its reference, as another machine's is, and nothing else stays."""
    with contextlib.suppress(JobNotFoundError):
        kd.attach(f"kubernetes://{scene.namespace}/{name}", trust=True).delete()
    scene.until(lambda: not objects_of(scene, name))


def killed_at_each_step(scene):
    script = """
        from on_this_machine import breaking_at
        with breaking_at({point!r}, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            kd.launch(waits, number_of_processes=2, name={name!r}, on=kd.Kubernetes(namespace={namespace!r}, image={image!r}))
    """
    on = in_pods(scene)
    for point in POINTS:
        name = f"test-{uuid.uuid4().hex[:8]}"
        code = script.format(point=point, name=name, namespace=scene.namespace, image=on.image)
        scene.said_by(scene.notebook(code), -signal.SIGKILL)
        delete_what_is_there(scene, name)
