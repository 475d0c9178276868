"""What is found out before anything is submitted: rights, operator, namespace, quotas, claims and what pods name."""

import json

import pytest
import yaml
from on_cluster import run_kubectl

from kale_dist import cli
from kale_dist.backends.kubernetes import client, preflight, roles
from kale_dist.backends.kubernetes.preflight import Wanted
from kale_dist.config import Config
from kale_dist.errors import BackendError
from kale_dist.manifests import PodSettings, pytorch_job
from kale_dist.spec import ClusterOptions, JobSpec, Resources, Topology, Volume, VolumeKind


def wanted(namespace, processes=2, volumes=(), resources=None, **options):
    spec = JobSpec(
        name="train",
        label="train",
        kind="call",
        snapshot="",
        topology=Topology(number_of_processes=processes),
        volumes=tuple(volumes),
        resources=resources or Resources(cpu=0.01, memory_gib=0.05),
        cluster=ClusterOptions(**options),
    )
    return Wanted.of(pytorch_job(spec, PodSettings(namespace=namespace, image="x")))


def said(cluster, asked):
    return [str(item) for item in preflight.check(cluster, asked).items]


def apply(namespace, *objects):
    run_kubectl("-n", namespace, "apply", "-f", "-", text=yaml.safe_dump_all(objects))


def user_with(namespace, make_user, rights):
    def role(identity):
        return roles.role_yaml(namespace, identity, rights).replace("name: kale-dist", f"name: {identity[-11:]}")

    path = make_user(namespace, role)
    return client.connect(namespace=namespace, config=Config(kubeconfig=str(path)))


def test_nothing_is_wrong(cluster, namespace):
    found = preflight.check(cluster, wanted(namespace))
    assert found.items == ()
    assert found.may("get", "pods/log")
    assert not found.forbids_master
    found.check()


def test_the_least_role_is_enough(namespace, make_user):
    user = user_with(namespace, make_user, roles.RIGHTS)
    assert preflight.check(user, wanted(namespace)).items == ()


@pytest.mark.parametrize("missing", roles.RIGHTS, ids=str)
def test_each_missing_right_is_said_with_what_is_lost(namespace, make_user, missing):
    user = user_with(namespace, make_user, [right for right in roles.RIGHTS if right != missing])
    found = preflight.check(user, wanted(namespace))
    (item,) = found.items
    assert f"may not {', '.join(missing.verbs)} {missing.resource} in the namespace {namespace!r}" in item.sentence
    assert missing.without in item.sentence
    assert item.is_fatal is missing.is_needed
    for verb in missing.verbs:
        assert not found.may(verb, missing.resource)
    if missing.is_needed:
        assert roles.role_yaml(namespace, user.identity) in item.remedy
        with pytest.raises(BackendError, match="The job cannot run in the namespace"):
            found.check()


def test_without_port_forward_and_exec_a_store_is_needed(namespace, make_user):
    rights = [right for right in roles.RIGHTS if right.resource not in ("pods/portforward", "pods/exec")]
    (item,) = preflight.check(user_with(namespace, make_user, rights), wanted(namespace)).items
    assert "weights need a store" in item.sentence


def test_a_namespace_that_is_not_there(kubeconfig):
    (item,) = preflight.check(client.connect(namespace="no-such")).fatal
    assert item.sentence == "There is no namespace 'no-such'"


def test_pod_security(make_namespace):
    namespace = make_namespace(enforce="restricted")
    here = client.connect(namespace=namespace)
    host = Volume(mount_path="/node", source="/data", kind=VolumeKind.HOST_PATH)
    found = preflight.check(here, wanted(namespace, volumes=[host]))
    assert found.forbids_master
    assert 'Pod Security "restricted", which forbids volumes hostpath://' in found.fatal[0].sentence


def test_quotas(make_namespace):
    namespace = make_namespace()
    here = client.connect(namespace=namespace)
    hard = {"requests.cpu": "1", "limits.cpu": "8", "pods": "2", "count/pytorchjobs.kubeflow.org": "0"}
    apply(namespace, {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": hard}})
    run_kubectl("-n", namespace, "wait", "--for=jsonpath={.status.hard}", "quota/q", "--timeout=20s")
    found = preflight.check(here, wanted(namespace, processes=3, resources=Resources(cpu=0.4, memory_gib=0.1)))
    sentences = " | ".join(item.sentence for item in found.fatal)
    assert "'q' allows 1 of requests.cpu, of which 0 is used, and the job needs 1.2" in sentences
    assert "'q' allows 2 of pods, of which 0 is used, and the job needs 3" in sentences
    assert "'q' allows 0 of pytorchjobs.kubeflow.org" in sentences
    assert found.cpu_limit_needed


def test_a_quota_that_others_use_is_waited_for(make_namespace):
    namespace = make_namespace()
    here = client.connect(namespace=namespace)
    hard = {"requests.cpu": "1"}
    apply(
        namespace,
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": hard}},
        {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other"},
            "spec": {
                "nodeSelector": {"no": "where"},
                "containers": [{"name": "c", "image": "x", "resources": {"requests": {"cpu": "900m"}}}],
            },
        },
    )  # fmt: skip
    run_kubectl(
        "-n", namespace, "wait", "--for=jsonpath={.status.used.requests\\.cpu}=900m", "quota/q", "--timeout=30s"
    )
    (item,) = preflight.check(here, wanted(namespace, resources=Resources(cpu=0.1, memory_gib=0.1))).items
    assert "of which 0.9 is used, and the job needs 0.2" in item.sentence
    assert (item.remedy, item.is_fatal) == ("It waits until others end", False)


def test_limit_ranges(make_namespace):
    namespace = make_namespace()
    here = client.connect(namespace=namespace)
    limits = [{"type": "Container", "max": {"memory": "1Gi"}, "default": {"cpu": "500m"}}]
    apply(namespace, {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "r"}, "spec": {"limits": limits}})
    found = preflight.check(here, wanted(namespace, resources=Resources(cpu=1, memory_gib=2)))
    assert "'r' allows at most 1 GiB of memory, and a pod of the job has 2 GiB" in found.fatal[0].sentence
    assert found.cpu_limit_needed
    assert not preflight.check(here, wanted(namespace, resources=Resources(cpu=0.2, memory_gib=0.5))).cpu_limit_needed


def claim(name, mode, storage_class="standard"):
    spec = {
        "accessModes": [mode], "storageClassName": storage_class, "resources": {"requests": {"storage": "1Mi"}}
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def test_claims(cluster, namespace):
    apply(
        namespace,
        claim("many", "ReadWriteMany"),
        claim("once", "ReadWriteOnce"),
        claim("pod", "ReadWriteOncePod"),
        claim("unbound", "ReadWriteMany", "shared-not"),
    )
    apply(namespace, {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": f"{namespace}-c"}, "provisioner": "example.com/none"}, claim("stuck", "ReadWriteMany", f"{namespace}-c"))  # fmt: skip
    try:
        names = ("many", "once", "pod", "stuck", "gone")
        volumes = [Volume(mount_path=f"/{name}", source=name, kind=VolumeKind.CLAIM) for name in names]
        found = preflight.check(cluster, wanted(namespace, volumes=volumes))
        fatal = " | ".join(item.sentence for item in found.fatal)
        warned = " | ".join(item.sentence for item in found.warnings)
        assert f"There is no claim 'gone' in the namespace {namespace!r}" in fatal
        assert "'pod' is for a single pod" in fatal
        assert "'once' is ReadWriteOnce: all 2 pods have to be on one node" in warned
        assert "'stuck' has no volume yet" in warned
        assert "'many'" not in fatal + warned
        alone = preflight.check(cluster, wanted(namespace, processes=1, volumes=volumes[:3]))
        assert alone.items == ()
    finally:
        run_kubectl("delete", "storageclass", f"{namespace}-c", "--wait=false")


def test_what_pods_name_and_is_not_there(cluster, namespace):
    asked = wanted(
        namespace,
        volumes=[
            Volume(mount_path="/s", source="sec", kind=VolumeKind.SECRET),
            Volume(mount_path="/c", source="conf", kind=VolumeKind.CONFIG_MAP),
        ],
        service_account="acc",
        priority_class="prio",
        image_pull_secrets=("pull",),
        secret_environment=(("TOKEN", "tok", "key"),),
        queue="line",
    )
    found = preflight.check(cluster, asked)
    fatal = [item.sentence for item in found.fatal]
    for thing in ("Secret 'sec'", "Secret 'tok'", "ConfigMap 'conf'", "service account 'acc'", "priority class 'prio'"):
        assert any(sentence.startswith(f"There is no {thing}") for sentence in fatal)
    warned = " | ".join(item.sentence for item in found.warnings)
    assert "There is no image pull secret 'pull'" in warned
    assert "no Kueue queue 'line'" in warned


def test_gpus_that_the_cluster_does_not_have(cluster, namespace):
    small = {"cpu": 0.01, "memory_gib": 0.05}
    four = said(cluster, wanted(namespace, processes=5, resources=Resources(gpus=1, **small)))
    assert any("The pods need 5 of nvidia.com/gpu together, and the cluster has 4" in sentence for sentence in four)
    one = said(cluster, wanted(namespace, processes=1, resources=Resources(gpus=5, **small)))
    assert any("A pod needs 5 of nvidia.com/gpu, and the largest node has 4" in sentence for sentence in one)


def test_the_doctor_says_what_is_missing_and_prints_the_role(namespace, make_user, monkeypatch, capsys):
    rights = [right for right in roles.RIGHTS if right.resource != "pods/log"]
    user = user_with(namespace, make_user, rights)
    monkeypatch.setenv("KALE_DIST_KUBECONFIG", user_path(user))
    monkeypatch.setenv("KALE_DIST_NAMESPACE", namespace)
    monkeypatch.setenv("KALE_DIST_IMAGE", "registry.example.com/a:1")
    assert cli.main(["doctor", "--on", "kubernetes"]) == 0
    printed = capsys.readouterr().out
    assert "may not get pods/log" in printed
    role = roles.role_yaml(namespace, user.identity)
    assert role in printed
    assert cli.main(["doctor", "--on", "kubernetes", "--namespace", "no-such", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    assert ("rights", "failed") in [(check["name"], check["verdict"]) for check in checks]


def user_path(user):
    """The kubeconfig by which a user is connected."""
    return next(source.files for source, found in client._connections.items() if found.api is user.api)


def test_doctor_options_of_a_cluster_need_a_cluster(capsys):
    assert cli.main(["doctor", "--namespace", "x"]) == 2
    assert "Add --on kubernetes" in capsys.readouterr().err
