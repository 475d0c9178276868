"""Makes the request for the container of a job, which has all its ranks, from its specification. Pure."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from typing import Any

from kale_dist.image import for_job
from kale_dist.job.records import Life
from kale_dist.job.spec.job_spec import JobSpec, Volume, VolumeKind
from kale_dist.places.manifests import bootstrap
from kale_dist.places.manifests.object_settings import HOME_FOLDER, INPUT_FOLDER, PORT, WORK_FOLDER
from kale_dist.places.manifests.pod_template import identity_of
from kale_dist.places.orders import order_of
from kale_dist.wire import Order, PodVariable, Source

NETWORK = "kale-dist"
"""The network that the containers of all jobs share. In it nothing of a job listens but its agent, which asks for the job's key."""

JOB_LABEL = "kale-dist.job"
RUN_LABEL = "kale-dist.run"
SPEC_LABEL = "kale-dist.spec"
SUBMITTED_BY_LABEL = "kale-dist.submitted-by"
GPUS_LABEL = "kale-dist.gpus"
"""The numbers of a container's GPUs, separated by commas."""

TERMINATION_FILE = f"{WORK_FOLDER}/last-words"
"""The file of an agent's verdict, in the place of a pod's termination message."""

CANCELLED_FILE = f"{INPUT_FOLDER}/cancelled"
"""A file in the container that names who cancelled. Without it, followers of other users would call the job lost."""

INPUT_BYTES = 8 << 20
"""A snapshot up to this size is copied as one file, which who attaches from another machine reads; a larger one blob by blob."""

_TERMINATION_VARIABLE = "KALE_DIST_TERMINATION_LOG"
_GIB = 1 << 30
_SHM_GIB_PER_RANK = 1.0
_NANO = 1_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """Values for a container that do not follow from the specification, but from the engine's machine."""

    user: str = ""
    """User and group of the processes, as numbers; empty: the image's own."""
    groups: tuple[int, ...] = ()
    """Further groups of the processes."""
    cores: int | None = None
    """Cores of the engine's machine."""
    submitter: str = ""
    gpus: tuple[int, ...] = ()
    """Numbers of the job's GPUs; empty: the first ones."""


def object_name(job: str, life: int) -> str:
    """End of the name of a job's container. Names of jobs have no dot, so no other job has it."""
    return job if life == 1 else f"{job}.{life}"


def container_name(job: str, life: int) -> str:
    """Name of a job's container, unique among all users of the engine."""
    return f"kale-dist-{object_name(job, life)}"


def gpus_of(spec: JobSpec) -> int:
    """GPUs of each rank."""
    return spec.resources.gpus if spec.resources.gpus is not None else int(spec.cuda)


def source_of(spec: JobSpec) -> Source:
    """Where the agent gets the snapshot from."""
    return Source.STREAM if spec.snapshot_bytes > INPUT_BYTES or spec.offer.packages else Source.INPUT


def make_order(spec: JobSpec, life: Life, torch_flags: Any = ()) -> Order:
    """The order that the agent of a job gets."""
    return order_of(
        spec,
        used_restarts=life.used_restarts,
        object=object_name(spec.name, life.number),
        port=PORT,
        source=source_of(spec),
        torch_flags=torch_flags,
        # The files of a container can be read after its end.
        work_is_kept=True,
    )


def container(spec: JobSpec, life: int, facts: MachineFacts) -> dict[str, Any]:
    """The body of the request that makes a job's container, as the engine's API has it.

    Args:
        spec: The job, with its image.
        life: How many objects the job has had, this one included.
        facts: The values of the engine's machine.
    """
    labels = {
        JOB_LABEL: spec.name,
        RUN_LABEL: str(life),
        SPEC_LABEL: json.dumps(spec.to_json(), separators=(",", ":")),
        **({SUBMITTED_BY_LABEL: facts.submitter} if facts.submitter else {}),
    }
    # With a count, an engine would give the same GPUs to every container.
    devices = [str(number) for number in facts.gpus or range(gpus_of(spec) * spec.topology.number_of_processes)]
    if devices:
        labels[GPUS_LABEL] = ",".join(devices)
    return {
        "Image": spec.image,
        # Not as the command: the image's entry point would get it as arguments.
        "Entrypoint": bootstrap.command(),
        "Cmd": [],
        "Hostname": spec.name,
        "Env": [f"{name}={value}" for name, value in _environment(spec)],
        "Labels": labels,
        "User": facts.user,
        "WorkingDir": HOME_FOLDER,
        "StopTimeout": spec.policy.pod_grace_s,
        "HostConfig": _host(spec, facts, devices),
    }


def render(spec: JobSpec) -> str:
    """The `docker` command lines that would start the same job, for people."""
    name = container_name(spec.name, 1)
    lines = [
        *([f"# {for_job.describe(spec.recipe, spec.image)}."] if spec.recipe is not None else []),
        f"# Snapshot {spec.snapshot}: {spec.snapshot_bytes:,} bytes in {len(spec.blobs)} blobs, copied into the container.",
        f"docker network create {NETWORK}",
        _command_line(name, container(spec, 1, MachineFacts())),
        f"docker cp <input of {name}> {name}:{INPUT_FOLDER}",
        f"docker start {name}",
    ]
    return "\n".join(lines) + "\n"


def _environment(spec: JobSpec) -> list[tuple[str, str]]:
    fixed = {**identity_of(HOME_FOLDER), "PYTHONUNBUFFERED": "1"}
    variables = {
        PodVariable.INPUT: INPUT_FOLDER,
        PodVariable.WORK: WORK_FOLDER,
        PodVariable.FIRST_POD: "0",
        PodVariable.REPLICA_INDEX: "0",
        _TERMINATION_VARIABLE: TERMINATION_FILE,
    }
    return [*(fixed | dict(spec.environment)).items(), *((str(name), value) for name, value in variables.items())]


def _host(spec: JobSpec, facts: MachineFacts, devices: list[str]) -> dict[str, Any]:
    asked, ranks = spec.resources, spec.topology.number_of_processes
    host: dict[str, Any] = {
        "NetworkMode": NETWORK,
        "RestartPolicy": {"Name": "no"},
        "ShmSize": math.ceil(asked.shm_of(ranks, 2 * _SHM_GIB_PER_RANK) * _GIB),
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        # A container's output is a bounded copy: the whole log is in the agent's folder, and in the job's.
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "50m", "max-file": "2"}},
        "Mounts": [_mount(volume) for volume in spec.volumes],
    }
    cores = asked.cpu_limit or asked.cpu
    if cores:
        # An engine refuses more than its machine has, and ranks may share that.
        host["NanoCpus"] = int(min(cores * ranks, facts.cores or math.inf) * _NANO)
    if asked.memory_gib:
        # Without swap: a process that needs more memory is killed, instead of becoming very slow.
        host["Memory"] = host["MemorySwap"] = math.ceil(asked.memory_gib * ranks * _GIB)
    if facts.groups:
        host["GroupAdd"] = [str(group) for group in facts.groups]
    if devices:
        host["DeviceRequests"] = [{"Driver": "", "DeviceIDs": devices, "Capabilities": [["gpu"]]}]
    return host


def _mount(volume: Volume) -> dict[str, Any]:
    is_folder = volume.kind is VolumeKind.FOLDER
    return {
        "Type": "bind" if is_folder else "volume",
        "Source": f"{volume.source}/{volume.sub_path}".rstrip("/") if is_folder else volume.source,
        "Target": volume.mount_path,
        "ReadOnly": volume.read_only,
    }


def _command_line(name: str, body: dict[str, Any]) -> str:
    host = body["HostConfig"]
    options = [("hostname", body["Hostname"]), ("network", host["NetworkMode"])]
    options += [("cap-drop", "ALL"), ("security-opt", "no-new-privileges"), ("shm-size", str(host["ShmSize"]))]
    options += [("log-driver", "json-file"), ("workdir", body["WorkingDir"])]
    if "NanoCpus" in host:
        options.append(("cpus", f"{host['NanoCpus'] / _NANO:g}"))
    if "Memory" in host:
        options += [("memory", str(host["Memory"])), ("memory-swap", str(host["MemorySwap"]))]
    for request in host.get("DeviceRequests", ()):
        options.append(("gpus", f'"device={",".join(request["DeviceIDs"])}"'))
    for mount in host["Mounts"]:
        read_only = ",readonly" if mount["ReadOnly"] else ""
        options.append(("mount", f"type={mount['Type']},source={mount['Source']},target={mount['Target']}{read_only}"))
    options += [("env", variable) for variable in body["Env"]]
    options.append(("label", f"{JOB_LABEL}={body['Labels'][JOB_LABEL]}"))
    lines = [f"docker create --name {name}", *(f"--{option} {shlex.quote(value)}" for option, value in options)]
    return " \\\n    ".join([*lines, f"--entrypoint python3 {body['Image']} -c '<bootstrap>'"])
