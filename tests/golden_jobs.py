"""The jobs of the golden files, for tests of their text and for those that show them to an API server."""

import dataclasses
import difflib
import json

from kale_dist.job.spec.job_spec import ClusterOptions, JobSpec, Policy, Resources, Topology, Volume, VolumeKind
from kale_dist.places import manifests
from kale_dist.places.manifests.object_settings import ObjectSettings

SETTINGS = ObjectSettings()
IMAGE = "registry.example.com/team/train:1"

VOLUMES = (
    Volume(mount_path="/data", source="datasets", kind=VolumeKind.CLAIM),
    Volume(mount_path="/images", source="datasets", kind=VolumeKind.CLAIM, sub_path="images", read_only=True),
    Volume(mount_path="/node", source="/mnt/data", kind=VolumeKind.HOST_PATH, read_only=True),
    Volume(mount_path="/scratch", kind=VolumeKind.EMPTY_DIR, size_gib=10),
    Volume(mount_path="/fast", kind=VolumeKind.EMPTY_DIR, size_gib=0.5, in_memory=True),
    Volume(mount_path="/config", source="settings", kind=VolumeKind.CONFIG_MAP),
    Volume(mount_path="/token", source="token", kind=VolumeKind.SECRET),
)


def a_spec(**changes):
    """Two processes, in the namespace team-a if no other is given; `changes` replaces fields."""
    cluster = changes.pop("cluster", ClusterOptions())
    cluster = dataclasses.replace(cluster, namespace=cluster.namespace or "team-a")
    return JobSpec(
        **{
            "name": "train-net", "label": "train Net", "kind": "training", "snapshot": "ab" * 32,
            "blobs": ("ab" * 32,), "topology": Topology(number_of_processes=2), "image": IMAGE, "cluster": cluster, **changes,
        }
    )  # fmt: skip


_AFFINITY = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "kale-dist"}},
            }
        ]
    }
}

_PATCH = {
    "spec": {
        "pytorchReplicaSpecs": {
            "Master": {
                "template": {
                    "spec": {
                        "dnsConfig": {"options": [{"name": "ndots", "value": "1"}]},
                        "terminationGracePeriodSeconds": None,
                        "containers": [
                            {
                                "name": "pytorch",
                                "env": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "USER", "$patch": "delete"}],
                            },
                            {"name": "sidecar", "image": "registry.example.com/team/exporter:1"},
                        ],
                    }
                }
            }
        }
    }
}

JOBS = {
    "default": (a_spec(), SETTINGS),
    "workers_only": (
        a_spec(topology=Topology(number_of_processes=3), cluster=ClusterOptions(master=False)),
        SETTINGS,
    ),
    "one_pod": (a_spec(topology=Topology(number_of_processes=1)), SETTINGS),
    "four_gpus_a_pod": (
        a_spec(
            topology=Topology(number_of_processes=10, processes_per_pod=4),
            cuda=True,
            resources=Resources(cpu=4, memory_gib=16, extended=(("rdma/hca", "1"),)),
        ),
        SETTINGS,
    ),
    "volumes": (a_spec(volumes=VOLUMES, store="pvc://results"), SETTINGS),
    "patched": (a_spec(cluster=ClusterOptions(patch=json.dumps(_PATCH))), SETTINGS),
    "roles": (
        a_spec(
            resources=Resources(cpu=1, memory_gib=4),
            cluster=ClusterOptions(roles={"master": {"cpu": 2}, "worker": {"memory": "8Gi", "gpus": 1, "rdma/hca": 1}}),
        ),
        SETTINGS,
    ),
    "train": (a_spec(volumes=VOLUMES[:2], cluster=ClusterOptions(kind="train")), SETTINGS),
    "train_before_2.2": (
        a_spec(
            cluster=ClusterOptions(
                kind="train",
                runtime="TrainingRuntime/mine",
                trainer="2.1",
                node_selector=(("pool", "gpu"),),
                queue="team-queue",
            )
        ),
        SETTINGS,
    ),
    "train_2.2": (a_spec(policy=Policy(timeout_s=60), cluster=ClusterOptions(kind="train", trainer="2.2")), SETTINGS),
    "train_own_runtime": (
        a_spec(
            topology=Topology(number_of_processes=4, sizes=(2, 3, 4)),
            policy=Policy(max_restarts=20, timeout_s=60),
            cluster=ClusterOptions(kind="train", trainer="2.3", runtime="kale-dist", runtime_version=1),
        ),
        SETTINGS,
    ),
    "restarts": (a_spec(policy=Policy(max_restarts=2)), SETTINGS),
    "restarts_job": (a_spec(policy=Policy(max_restarts=2), cluster=ClusterOptions(kind="job")), SETTINGS),
    "restarts_store": (a_spec(policy=Policy(max_restarts=2), store="pvc://results"), SETTINGS),
    "restarts_store_job_one_pod": (
        a_spec(
            topology=Topology(number_of_processes=1),
            policy=Policy(max_restarts=2),
            store="s3://bucket/runs",
            cluster=ClusterOptions(kind="job"),
        ),
        SETTINGS,
    ),
    "job": (a_spec(cluster=ClusterOptions(kind="job", ttl_s=3600)), SETTINGS),
    "job_one_pod": (
        a_spec(topology=Topology(number_of_processes=2, processes_per_pod=2), cluster=ClusterOptions(kind="job")),
        SETTINGS,
    ),
    "mpi": (a_spec(topology=Topology(number_of_processes=3), cluster=ClusterOptions(kind="mpi")), SETTINGS),
    "tf": (
        a_spec(topology=Topology(number_of_processes=4), cluster=ClusterOptions(kind="tf", servers=1, ttl_s=3600)),
        SETTINGS,
    ),
    "everything": (
        a_spec(
            name="everything-at-once",
            topology=Topology(number_of_processes=4, processes_per_pod=2),
            cuda=True,
            threads=3,
            seed=1,
            volumes=VOLUMES,
            environment=(("GREETING", "grüß dich,\n$(HOME)"), ("LEARNING_RATE", "1e3"), ("OMP_NUM_THREADS", "2")),
            image=IMAGE,
            resources=Resources(
                cpu=0.5, cpu_limit=2, memory_gib=1.5, gpus=2, shm_gib=0.25, extended=(("rdma/hca", "1"),)
            ),
            store="pvc://results/kale",
            policy=Policy(timeout_s=3600.5),
            cluster=ClusterOptions(
                run_as_user=1234,
                labels=(("example.com/project", "p1"),),
                annotations=(("example.com/note", "a note: of any form"),),
                metrics_port=9090,
                node_selector=(("pool", "gpu"),),
                tolerations=json.dumps([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]),
                affinity=json.dumps(_AFFINITY),
                priority_class="high",
                service_account="trainer",
                mount_service_account_token=True,
                image_pull_secrets=("registry", "mirror"),
                image_pull_policy="IfNotPresent",
                scheduler_name="volcano",
                queue="team-queue",
                gang=True,
                secret_environment=(("TOKEN", "tokens", "hub"),),
                ttl_s=86400,
            ),
        ),
        ObjectSettings(submitter="system:serviceaccount:team-a:notebook"),
    ),
}


def job(name):
    """The object of a golden file."""
    spec, settings = JOBS[name]
    return manifests.kind_of(spec).make(spec, settings)


WHOLE = ("default", "job", "tf", "train")
"""Jobs whose golden file is the whole manifest. Those of the others are what differs from the whole one that is most like theirs."""


def text(name):
    """What the golden file of a job has."""
    if name in WHOLE:
        return manifests.to_yaml(job(name))
    base = next((one for one in ("job", "train") if JOBS[one][0].cluster.kind == JOBS[name][0].cluster.kind), "default")
    return "\n".join([f"# What differs from {base}.yaml.", *_differences("", job(base), job(name))]) + "\n"


def _differences(path, before, after):
    """Lines about all that is removed (-), added (+), named (>) or of another value (=); items of lists by their names, added ones with their place."""
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = (before, after), (after, before)
        gone, come = (
            [key for key in one if key not in other and isinstance(one[key], dict | list)] for one, other in pairs
        )
        if len(gone) == len(come) == 1:
            yield f"> {path}.{gone[0]} is {come[0]}"
            before = {come[0] if key == gone[0] else key: value for key, value in before.items()}
        for key in [*before, *(key for key in after if key not in before)]:
            yield from _difference(f"{path}.{key}".lstrip("."), before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list):
        old, new = ([_name(item) for item in items] for items in (before, after))
        for _, begin, end, begin_new, end_new in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            same = old[begin:end] == new[begin_new:end_new]
            yield from (() if same else (f"- {path}[{name}]" for name in old[begin:end]))
            for at in range(begin_new, end_new):
                then = before[begin + at - begin_new] if same else None
                yield from _difference(f"{path}[{new[at] if same else at}]", then, after[at])
    elif before != after:
        yield f"= {path}: {json.dumps(after, ensure_ascii=False)}"


def _difference(path, before, after):
    if after is None:
        return [f"- {path}"]
    return (
        [f"+ {path}: {json.dumps(after, ensure_ascii=False)}"] if before is None else _differences(path, before, after)
    )


def _name(item):
    return (
        str(item.get("name") or item.get("mountPath") or item.get("manager") or json.dumps(item))
        if isinstance(item, dict)
        else str(item)
    )
