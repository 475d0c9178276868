"""What breaks, within how many seconds what comes of it, and that nothing is lost or left: the table in docs/faults.md.

A row's function does what the row says, on real parts, and checks the outcome; each of its waits is one of the row's bound. Then
of all its jobs: they have ended, no line of their logs is missing, no rank lives, and a deletion leaves nothing.
"""

import dataclasses
import os
import pathlib
import signal
from collections.abc import Callable
from functools import partial

import in_containers as docker
import in_pods as pods
import of_the_cluster as cluster
import on_this_machine as here
import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "faults.md"

RANK, AGENT, DISK, NOTEBOOK = "a rank", "the agent", "a disk", "a notebook"
DOCKER, PODS, CLUSTER = "Docker", "pods", "the cluster itself"
NIGHTLY = True
LEAVES_FIRST = "a head that is ended by SIGTERM does not wait for the notebook, and on a slow machine it is gone first"


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A row."""

    what: str
    where: str
    bound_s: float
    outcome: str
    play: Callable
    is_nightly: bool = False
    known: str = ""
    """Why the row may fail: it is played all the same, and a failure is no news."""


FAULTS = (
    Fault("SIGKILL", RANK, 30, "The job fails and names rank, signal and last lines", partial(here.rank_dies, how=int(signal.SIGKILL), named="SIGKILL")),
    Fault("`os._exit(3)`", RANK, 30, "The job fails and names rank and exit code", partial(here.rank_dies, how=-3, named="exit code 3")),
    Fault("a segmentation fault, under `faulthandler`", RANK, 30, "The job fails; the stack is in the log", here.segfault_under_faulthandler),
    Fault("RecursionError", RANK, 30, "The exception comes back", partial(here.rank_raises, how="recursion", kind=RecursionError)),
    Fault("MemoryError", RANK, 30, "The exception comes back", partial(here.rank_raises, how="memory", kind=MemoryError)),
    Fault("SystemExit", RANK, 30, "The exception comes back", partial(here.rank_raises, how="exit", kind=SystemExit)),
    Fault("a DataLoader's worker is killed", RANK, 60, "The exception comes back and names it", here.loader_worker_dies),
    Fault("SIGSTOP", RANK, 60, "The job fails after `stall_timeout_s`", here.rank_is_stopped, NIGHTLY),
    Fault("SIGSTOP for two seconds", RANK, 60, "The job goes on", here.rank_is_stopped_for_a_while, NIGHTLY),
    Fault("a character cut by a stream's end", RANK, 30, "Its bytes are shown as `\\xe2\\x82`; a character in two writes is whole", here.characters_are_cut),
    Fault("SIGKILL", AGENT, 30, "The job fails, and the next call has a new agent", here.agent_dies),
    Fault("its fork server is killed", AGENT, 30, "The job fails, and the next call has a new one", here.fork_server_dies),
    Fault("SIGSTOP for three seconds", AGENT, 60, "Calls and waits answer; then all goes on", here.agent_is_stopped, NIGHTLY),
    Fault("full: log", DISK, 60, "The rank waits, the status says so; no line is lost", here.log_fills_the_disk, NIGHTLY),
    Fault("full: snapshot", DISK, 30, "The call is refused and leaves nothing", here.snapshot_finds_no_room),
    Fault("full: result", DISK, 30, "The job fails and names the file", here.result_finds_no_room, NIGHTLY),
    Fault("full: checkpoint", DISK, 120, "The job fails and names the file; the checkpoint before is whole", here.checkpoint_finds_no_room),
    Fault("/dev/shm full", DISK, 100, "The job fails and names shared memory", here.shared_memory_is_full, NIGHTLY),
    Fault("full: registry", DISK, 100, "The image is refused with the registry's answer", here.registry_finds_no_room, NIGHTLY),
    Fault("SIGKILL", NOTEBOOK, 60, "Its jobs end, unless they are detached", here.notebook_is_killed),
    Fault("two on one job", NOTEBOOK, 60, "Both see all; the first cancel counts", here.two_notebooks),
    Fault("Ctrl-C at each step of a submission", NOTEBOOK, 60, "No job, or one that is listed; the name can be used", here.interrupted_at_each_step, NIGHTLY),
    Fault("killed at each step of a submission", NOTEBOOK, 60, "No job, or one that is listed; the name can be used", here.killed_at_each_step, NIGHTLY),
    Fault("its clock an hour behind", NOTEBOOK, 100, "It follows, submits and fetches as ever", here.clock_is_an_hour_behind, NIGHTLY),
    Fault("the container is killed", DOCKER, 90, "The job fails and names it", docker.container_is_killed),
    Fault("the container is killed, `max_restarts=1`", DOCKER, 120, "The job is renewed", docker.container_is_lost, NIGHTLY),
    Fault("the container is killed while the engine refuses new connections for 15 seconds, `max_restarts=1`", DOCKER, 150, "It resumes from its last checkpoint", docker.container_is_lost_while_the_engine_refuses, NIGHTLY),
    Fault("the container is removed", DOCKER, 60, "The job is cancelled and says so", docker.container_is_removed, NIGHTLY),
    Fault("memory runs out", DOCKER, 120, "The job fails and names rank and limit", docker.memory_runs_out, NIGHTLY),
    Fault("the container is paused for eight seconds", DOCKER, 120, "The job goes on; no line is lost", docker.container_is_paused, NIGHTLY),
    Fault("the notebook's clock an hour behind", DOCKER, 120, "It submits, follows and fetches as ever", docker.clock_is_an_hour_behind, NIGHTLY),
    Fault("Ctrl-C at each step of a submission", DOCKER, 60, "No container, or a job that is listed", docker.interrupted_at_each_step, NIGHTLY),
    Fault("killed at each step of a submission", DOCKER, 60, "No container, or a job that is listed", docker.killed_at_each_step, NIGHTLY),
    Fault("the network between two pods is cut for ten seconds", PODS, 150, "The job goes on; no line is lost", pods.network_is_cut, NIGHTLY),
    Fault("the way from the notebook is cut for ten seconds", PODS, 150, "The job goes on; no line is lost", pods.way_to_the_cluster_is_cut, NIGHTLY),
    *(
        Fault(f"a job {ending} while {how}", PODS, 200, f"{outcome}", partial(pods.reached_is_kept, fault=fault, ending=ending), NIGHTLY,
            known=LEAVES_FIRST if (fault, ending) == ("hang", "is cancelled") else "")
        for ending, outcome in {
            "fails": "Its exception and last checkpoint come",
            "is cancelled": "Its last checkpoint comes, and the error says so",
            "is renewed": "It resumes from its last checkpoint",
        }.items()
        for fault, how in {
            "cut_each_after": "each connection of the notebook is cut after 1 MB",
            "refuse": "new connections of the notebook are refused for 15 seconds",
            "cut": "the API server is away for 15 seconds",
            "hang": "connections neither end nor carry anything for 15 seconds",
        }.items()
    ),
    Fault("the notebook ends, then a worker is lost", PODS, 150, "The head ends; `kale-dist status` and `fetch` have the model, from its log", partial(pods.notebook_is_gone, size=2), NIGHTLY),
    Fault("the same, with 4 MB of results and a claim", PODS, 200, "The head ends; `kale-dist status` and `fetch` have the model, from the claim", partial(pods.notebook_is_gone, size=500_000), NIGHTLY),
    Fault("their namespace is deleted", PODS, 150, "The job ends and says so", pods.namespace_is_deleted, NIGHTLY),
    Fault("a quota is lowered", PODS, 150, "What runs goes on; the next job waits and names the quota", pods.quota_is_lowered, NIGHTLY),
    Fault("two users in one namespace", PODS, 180, "Neither touches the other's; a name is taken once", pods.two_users, NIGHTLY),
    Fault("the client's certificate expires, and is renewed", PODS, 180, "The job goes on; no line is lost", pods.certificate_expires, NIGHTLY),
    Fault("Ctrl-C at each step of a submission", PODS, 60, "No object, or a job that is listed", pods.interrupted_at_each_step, NIGHTLY),
    Fault("killed at each step of a submission", PODS, 60, "No object, or a job that is found by its reference", pods.killed_at_each_step, NIGHTLY),
    Fault("etcd is stopped for 20 seconds", CLUSTER, 150, "The job goes on; no line is lost", cluster.etcd_is_stopped, NIGHTLY),
    Fault("the API server is killed and started again", CLUSTER, 150, "The job goes on; no line is lost", cluster.api_server_is_restarted, NIGHTLY),
    Fault("the kubelet is stopped for a minute: the node is NotReady", CLUSTER, 200, "The job goes on; no line is lost", cluster.kubelet_is_stopped, NIGHTLY),
    Fault("a pod's containerd-shim is killed", CLUSTER, 150, "The job fails and names the pod", cluster.shim_is_killed, NIGHTLY),
)  # fmt: skip


def marks_of(fault):
    marks = [pytest.mark.nightly] if fault.is_nightly else []
    return [*marks, pytest.mark.xfail(strict=False, reason=fault.known)] if fault.known else marks


ROWS = [pytest.param(fault, id=f"{fault.where}: {fault.what}", marks=marks_of(fault)) for fault in FAULTS]


@pytest.mark.parametrize("fault", ROWS)
def test_a_fault_ends_as_its_row_says(fault, scene):
    fault.play(scene)
    scene.check()


def test_the_documentation_has_this_table():
    page = PAGE.read_text()
    rows = [
        f"| {one.where} | {one.what} | {one.bound_s} s | {one.outcome}{' (known: ' + one.known + ')' if one.known else ''} |"
        for one in FAULTS
    ]
    rule = "|---|---|---|---|\n"
    before, after = page[: page.index(rule) + len(rule)], page[page.index("\n\n", page.index(rule)) :]
    expected = before + "\n".join(rows) + after
    if os.environ.get("KALE_DIST_UPDATE_GOLDEN"):
        PAGE.write_text(expected)
    else:
        assert page == expected, "KALE_DIST_UPDATE_GOLDEN=1 pytest tests/faults writes it"
