"""Every trouble provoked on the real cluster, and the sentence that a user reads meanwhile.

All jobs are made at once, in namespaces of this run's own, and each test waits for its own job's sentence.
"""

import http.server
import json
import subprocess
import threading
import time
import uuid

import pytest

pytest.importorskip("kubernetes")

from kale_dist.backends.kubernetes.watching import NamespaceWatch
from on_cluster import IMAGE, run_kubectl

from kale_dist.backends.kubernetes import client, states
from kale_dist.contract import FailureCause, StateName
from kale_dist.spec import ClusterOptions, JobSpec, Topology
from kale_dist.status import JobStatus, ReplicaStatus

SLEEP = ("python3", "-c", "import time; time.sleep(300)")
MOUNT = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
WITHIN_S = 120.0


def job(
    name, *, command=SLEEP, image=IMAGE, master=True, workers=0, pod=None, container=None, run=None, policy="Never"
):
    """A PyTorchJob as the library makes them, in what matters here."""
    labels = {"app.kubernetes.io/managed-by": "kale-dist", "app.kubernetes.io/instance": name}
    pod = dict(pod or {})
    main = {
        "name": "pytorch",
        "image": image,
        "command": list(command),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {"requests": {"cpu": "5m", "memory": "16Mi"}},
        **(container or {}),
    }
    containers = [main, *pod.pop("sidecars", ())]
    replica = {
        "restartPolicy": policy,
        "template": {
            "metadata": {"labels": labels},
            "spec": {"terminationGracePeriodSeconds": 1, "containers": containers, **pod},
        },
    }
    replicas = {"Master": {**replica, "replicas": 1}} if master else {}
    if workers:
        replicas["Worker"] = {**replica, "replicas": workers}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {"runPolicy": {"cleanPodPolicy": "None", **(run or {})}, "pytorchReplicaSpecs": replicas},
    }


def resources(**amounts):
    """Amounts requested; all but cores are limits as well, as Kubernetes wants it of GPUs."""
    amounts = {name.replace("gpu", "nvidia.com/gpu"): amount for name, amount in amounts.items()}
    limits = {name: amount for name, amount in amounts.items() if name != "cpu"}
    return {"resources": {"requests": {"cpu": "5m", "memory": "16Mi"} | amounts, "limits": limits}}


def volume(kind, **source):
    return {"volumes": [{"name": "v", kind: source}]}


def claim(name, access, namespace, **more):
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": [access],
            "storageClassName": namespace,
            "resources": {"requests": {"storage": "1Gi"}},
            **more,
        },
    }


def persistent_volume(name, access, namespace, **more):
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "accessModes": [access],
            "storageClassName": namespace,
            "capacity": {"storage": "1Gi"},
            "hostPath": {"path": "/tmp"},
            **more,
        },
    }


ELSEWHERE = {
    "nodeAffinity": {
        "required": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["elsewhere"]}]}
            ]
        }
    }
}

RESTRICTED = {
    "securityContext": {
        "runAsUser": 1000,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
}


def only_on(node):
    """An affinity for one node by its name: the scheduler then looks at no other."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = [{"matchFields": [field]}]
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }


class Scene:
    """Namespaces of this run, watched."""

    def __init__(self):
        self.name = f"test-{uuid.uuid4().hex[:8]}"
        self.specs = {}
        self.watches = {}
        self.changed = threading.Condition()
        self.unsubscribe = []
        self.undo = []

    def namespace(self, suffix=""):
        name = f"{self.name}{suffix}"
        run_kubectl("create", "namespace", name)
        self.undo.append(("delete", "namespace", name, "--wait=false"))
        run_kubectl("-n", name, "wait", "--for=create", "serviceaccount/default", "--timeout=20s")
        self.watches[name] = NamespaceWatch(client.connect(namespace=name))
        return name

    def apply(self, namespace, *objects):
        run_kubectl(
            "-n", namespace, "apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )

    def run(self, namespace, *jobs):
        self.apply(namespace, *jobs)
        for item in jobs:
            name, replicas = item["metadata"]["name"], item["spec"]["pytorchReplicaSpecs"]
            spec = JobSpec(
                name=name,
                label=name,
                kind="call",
                snapshot="none",
                topology=Topology(number_of_processes=sum(part["replicas"] for part in replicas.values())),
                cluster=ClusterOptions(namespace=namespace, master="Master" in replicas),
            )
            self.specs[name] = spec
            self.unsubscribe.append(self.watches[namespace].subscribe(name, self._wake))

    def _wake(self, _name):
        with self.changed:
            self.changed.notify_all()

    def view(self, name):
        return self.watches[self.specs[name].cluster.namespace].view(name)

    def status(self, name):
        spec = self.specs[name]
        replicas = tuple(ReplicaStatus(rank=rank) for rank in range(spec.topology.number_of_processes))
        return states.overlay(JobStatus(ref=name, replicas=replicas), self.view(name), spec, time.time())

    def wait(self, name, state, *parts):
        """The first status that is in this state and says all of this."""
        deadline = time.monotonic() + WITHIN_S
        with self.changed:
            while True:
                status = self.status(name)
                if status.state is state and all(part in status.reason for part in parts):
                    return status
                left = deadline - time.monotonic()
                assert left > 0, f"{name} is {status.state.value}: {status.reason}"
                # Some sentences come with time alone, such as that of an operator that does nothing.
                self.changed.wait(min(left, 1.0))

    def close(self):
        for unsubscribe in self.unsubscribe:
            unsubscribe()
        for command in reversed(self.undo):
            subprocess.run(["kubectl", *command], capture_output=True, check=False)


class _Refuses(http.server.BaseHTTPRequestHandler):
    """A registry that gives nothing: who does not log in is refused, and so is who does."""

    def do_GET(self):
        self.send_response(401 if self.path.startswith("/v2/unknown/") else 403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def registry():
    """Its address on this machine, which is the node."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"localhost:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def scene(kubeconfig, registry):
    scene = Scene()
    try:
        _play(scene, registry)
        yield scene
    finally:
        scene.close()


def _play(scene, registry):
    main = scene.namespace()
    quota = scene.namespace("-quota")
    strict = scene.namespace("-strict")
    run_kubectl("label", "namespace", strict, "pod-security.kubernetes.io/enforce=restricted")
    policy, hook = scene.namespace("-policy"), scene.namespace("-hook")
    node = f"{scene.name}-tainted"
    elsewhere, single = f"{scene.name}-elsewhere", f"{scene.name}-single"
    scene.undo += [
        ("delete", "node", node),
        ("delete", "pv", elsewhere, single, "--wait=false"),
        ("delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", policy),
        ("delete", "validatingwebhookconfiguration", hook),
    ]
    scene.apply(
        main,
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": node},
            "spec": {"taints": [{"key": "team", "value": "other", "effect": "NoSchedule"}]},
        },
        claim("pending", "ReadWriteMany", "no-such-class"),
        persistent_volume(elsewhere, "ReadWriteOnce", main, **ELSEWHERE),
        claim("elsewhere", "ReadWriteOnce", main, volumeName=elsewhere),
        persistent_volume(single, "ReadWriteOncePod", main),
        claim("single", "ReadWriteOncePod", main, volumeName=single),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "program"},
            # "\x7fELF" and nothing behind it: what a processor's program looks like to another one.
            "binaryData": {"python3": "f0VMRgo="},
        },
    )
    scene.apply(
        policy,
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": policy},
            "spec": {
                "matchConstraints": {
                    "resourceRules": [
                        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                    ]
                },
                "validations": [
                    {"expression": "has(object.metadata.labels.team)", "message": "pods need a label team"}
                ],
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": policy},
            "spec": {
                "policyName": policy,
                "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": policy}}},
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": hook},
            "webhooks": [
                {
                    "name": "policy.example.com",
                    "sideEffects": "None",
                    "admissionReviewVersions": ["v1"],
                    "timeoutSeconds": 2,
                    "clientConfig": {"url": "https://127.0.0.1:9/"},
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": hook}},
                    "rules": [
                        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                    ],
                }
            ],
        },
    )
    scene.apply(
        quota,
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "budget"},
            "spec": {"hard": {"requests.cpu": "1"}},
        },
    )
    scene.run(quota, job("quota", container=resources(cpu="2")))
    scene.run(strict, job("refused-worker", workers=1, container=RESTRICTED), job("refused-all"))
    scene.run(
        main,
        job("image-missing", image="localhost:5000/kale-dist/none:1"),
        job("image-invalid", image="localhost:5000/UPPER:1"),
        job("pull-401", image=f"{registry}/unknown/x:1"),
        job("pull-403", image=f"{registry}/known/x:1"),
        job("registry-down", image="localhost:9/x:1"),
        job(
            "wrong-processor",
            command=("/v/python3",),
            pod=volume("configMap", name="program", defaultMode=0o755),
            container=MOUNT,
        ),
        job("no-python", image="alpine:3.10", command=("python3",)),
        job(
            "init-image",
            master=False,
            workers=1,
            pod={
                "initContainers": [{"name": "init-pytorch", "image": "localhost:5000/alpine:none", "command": ["true"]}]
            },
        ),
        job("cpu", container=resources(cpu="500")),
        job("memory", container=resources(memory="9000Gi")),
        job("gpu", container=resources(gpu="5")),
        job("node-selector", pod={"nodeSelector": {"disk": "none"}}),
        job("taint", pod=only_on(node)),
        job("claim-missing", pod=volume("persistentVolumeClaim", claimName="nowhere"), container=MOUNT),
        job("claim-pending", pod=volume("persistentVolumeClaim", claimName="pending"), container=MOUNT),
        job("claim-elsewhere", pod=volume("persistentVolumeClaim", claimName="elsewhere"), container=MOUNT),
        job(
            "claim-one-pod",
            master=False,
            workers=2,
            pod=volume("persistentVolumeClaim", claimName="single"),
            container=MOUNT,
        ),
        job(
            "oom",
            command=("python3", "-c", "x = [b'a' * 10**6 for _ in range(10**5)]"),
            container=resources(memory="60Mi"),
        ),
        job(
            "evicted",
            command=("sh", "-c", "dd if=/dev/zero of=/v/x bs=1M count=50; sleep 300"),
            pod=volume("emptyDir", sizeLimit="10Mi"),
            container=MOUNT,
        ),
        job("deadline", pod={"activeDeadlineSeconds": 2}),
        job("deadline-of-job", run={"activeDeadlineSeconds": 2}),
        job("crash-loop", command=("python3", "-c", "raise SystemExit('this is why')"), policy="OnFailure"),
        job("left-alone", run={"managedBy": "kueue.x-k8s.io/multikueue"}),
        job(
            "sidecar",
            command=("true",),
            pod={"sidecars": [{"name": "proxy", "image": IMAGE, "command": ["sleep", "300"]}]},
        ),
        job("input-missing", pod=volume("secret", secretName="input-missing-input"), container=MOUNT),
        job("config-missing", pod=volume("configMap", name="nowhere"), container=MOUNT),
        job(
            "key-missing",
            container={"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "nowhere", "key": "k"}}}]},
        ),
        job("root", container={"securityContext": {"runAsNonRoot": True}}),
        job("no-account", pod={"serviceAccountName": "nobody"}),
        job("no-priority", pod={"priorityClassName": "urgent"}),
        job("suspended", run={"suspend": True}),
        job("silent-end", command=("sh", "-c", "echo the last line; exit 3"), workers=1),
        job("pod-deleted"),
        job("job-deleted"),
    )
    scene.run(policy, job("policy"))
    scene.run(hook, job("webhook"))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("image-missing", ("localhost:5000/kale-dist/none:1 was not found in its registry", "image=")),
        ("pull-401", ("the registry refuses", "401 Unauthorized", "image_pull_secrets")),
        ("pull-403", ("the registry refuses", "403 Forbidden", "image_pull_secrets")),
        ("registry-down", ("does not reach the registry of localhost:9/x:1", "connection refused")),
        ("init-image", ("localhost:5000/alpine:none of init-pytorch", "'master': False")),
        ("cpu", ("asks for 500 cpu", "the largest node", "too little free cpu")),
        ("memory", ("asks for 9000Gi memory", "the largest node has", "memory_gib")),
        ("gpu", ("asks for 5 nvidia.com/gpu", "the cluster has 4 in all", "'gpus'")),
        ("node-selector", ("fits its node selector", "get nodes --show-labels")),
        ("taint", ("keep pods away by a taint", "'tolerations'")),
        ("claim-missing", ("there is no claim nowhere",)),
        ("claim-pending", ("its claim pending has no volume yet", "no-such-class")),
        ("claim-elsewhere", ("its claim elsewhere can be reached only from nodes that do not take", "ReadWriteMany")),
        ("crash-loop", ("is started again after a pause; it said: this is why",)),
        ("left-alone", ("left to kueue.x-k8s.io/multikueue", "managedBy")),
        ("input-missing", ("the Secret input-missing-input with the job's input is not there",)),
        ("config-missing", ("there is no configmap nowhere",)),
        ("key-missing", ("there is no secret nowhere", "secret_environment")),
        ("no-account", ("Pod no-account-master-0 cannot be made", "no service account nobody")),
        ("no-priority", ("no priority class urgent",)),
        ("suspended", ("is suspended", '"suspend":false')),
        ("quota", ("the quota budget", "allows requests.cpu=1", "requests.cpu=2")),
        ("refused-all", ("Pod Security", "restricted", "allowPrivilegeEscalation")),
        ("policy", ("policy refuses it: pods need a label team",)),
        ("webhook", ("webhook policy.example.com", "does not answer", "connection refused")),
    ],
)
def test_what_may_heal_is_explained_while_it_is_waited_for(scene, name, parts):
    scene.wait(name, StateName.PENDING, *parts)


@pytest.mark.parametrize(
    ("name", "cause", "parts"),
    [
        ("image-invalid", FailureCause.NOT_STARTED, ("UPPER:1 is not the name of an image",)),
        ("wrong-processor", FailureCause.NOT_STARTED, ("exec format error", "Build the image for that processor")),
        ("no-python", FailureCause.NOT_STARTED, ("there is no python3 in the image alpine:3.10", "image=")),
        ("root", FailureCause.NOT_STARTED, ("must not run as root", "'run_as_user'")),
        ("oom", FailureCause.DIED, ("more memory than its limit of 60Mi", "memory_gib")),
        ("evicted", FailureCause.AGENT_DIED, ("evicted from node", 'exceeds the limit "10Mi"')),
        ("deadline", FailureCause.TIMEOUT, ("longer than its deadline", "timeout_s")),
        ("deadline-of-job", FailureCause.TIMEOUT, ("runPolicy.activeDeadlineSeconds", "timeout_s")),
        ("silent-end", FailureCause.AGENT_DIED, ("exit code 3", "it said: the last line")),
    ],
)
def test_what_cannot_heal_fails_the_job_at_once(scene, name, cause, parts):
    status = scene.wait(name, StateName.FAILED, *parts)
    assert status.cause is cause
    assert status.ended is not None


def test_a_refused_worker_is_told_although_the_jobs_status_stays_empty(scene):
    status = scene.wait(
        "refused-worker", StateName.STARTING, "1 of 2 pods runs", "refused-worker-worker-0", "'master': False"
    )
    assert not (scene.view("refused-worker").job.get("status") or {}).get("conditions")
    assert [replica.pod for replica in status.replicas] == ["refused-worker-master-0", None]


def test_a_claim_for_one_pod_only_holds_up_the_second(scene):
    scene.wait("claim-one-pod", StateName.STARTING, "1 of 2 pods runs", "its claim single is ReadWriteOncePod")


def test_a_sidecar_that_stays_does_not_hide_that_the_job_has_ended(scene):
    scene.wait("sidecar", StateName.SUCCEEDED, "the container proxy runs on")
    assert scene.view("sidecar").job["status"]["conditions"][-1]["type"] == "Running"


def test_a_deleted_pod(scene):
    scene.wait("pod-deleted", StateName.STARTING, "The pod runs")
    run_kubectl("-n", scene.name, "delete", "pod", "pod-deleted-master-0", "--wait=false")
    status = scene.wait("pod-deleted", StateName.FAILED, "pod-deleted-master-0")
    assert status.cause is FailureCause.AGENT_DIED


def test_a_deleted_job(scene):
    scene.wait("job-deleted", StateName.STARTING, "The pod runs")
    run_kubectl("-n", scene.name, "delete", "pytorchjob", "job-deleted", "--wait=false")
    status = scene.wait("job-deleted", StateName.CANCELLED, "Somebody deleted the PyTorchJob job-deleted")
    assert status.cause is FailureCause.USER
