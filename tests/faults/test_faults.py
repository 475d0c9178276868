"""What breaks, within how many seconds what comes of it, and that nothing is lost or left: the table in docs/faults.md.

A row's function does what the row says, on real parts, and checks the outcome; each of its waits is one of the row's bound. Then
of all its jobs: they have ended, no line of their logs is missing, no rank lives, and a deletion leaves nothing.
"""

import dataclasses
import pathlib
import signal
from collections.abc import Callable
from functools import partial

import on_this_machine as here
import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "faults.md"

RANK, AGENT, DISK, NOTEBOOK = "a rank", "the agent", "a disk", "a notebook"
NIGHTLY = True


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """A row."""

    what: str
    where: str
    bound_s: float
    outcome: str
    play: Callable
    is_nightly: bool = False


FAULTS = (
    Fault("SIGKILL", RANK, 30, "The job fails and names rank, signal and last lines", partial(here.rank_dies, how=int(signal.SIGKILL), named="SIGKILL")),
    Fault("`os._exit(3)`", RANK, 30, "The job fails and names rank and exit code", partial(here.rank_dies, how=-3, named="exit code 3")),
    Fault("a segmentation fault, under `faulthandler`", RANK, 30, "The job fails; the stack is in the log", here.segfault_under_faulthandler),
    Fault("RecursionError", RANK, 30, "The exception comes back", partial(here.rank_raises, how="recursion", kind=RecursionError)),
    Fault("MemoryError", RANK, 30, "The exception comes back", partial(here.rank_raises, how="memory", kind=MemoryError)),
    Fault("SystemExit", RANK, 30, "The exception comes back", partial(here.rank_raises, how="exit", kind=SystemExit)),
    Fault("a DataLoader's worker is killed", RANK, 60, "The exception comes back and names it", here.loader_worker_dies),
    Fault("SIGSTOP", RANK, 60, "The job fails after `stall_timeout_s`", here.rank_is_stopped, NIGHTLY),
    Fault("SIGSTOP for two seconds", RANK, 60, "The job goes on", here.rank_is_stopped_for_a_while),
    Fault("a character cut by a stream's end", RANK, 30, "Its bytes are shown as `\\xe2\\x82`; a character in two writes is whole", here.characters_are_cut),
    Fault("SIGKILL", AGENT, 30, "The job fails, and the next call has a new agent", here.agent_dies),
    Fault("its fork server is killed", AGENT, 30, "The job fails, and the next call has a new one", here.fork_server_dies),
    Fault("SIGSTOP for three seconds", AGENT, 60, "Calls and waits answer; then all goes on", here.agent_is_stopped, NIGHTLY),
    Fault("full: log", DISK, 60, "The rank waits, the status says so; no line is lost", here.log_fills_the_disk, NIGHTLY),
    Fault("full: snapshot", DISK, 30, "The call is refused and leaves nothing", here.snapshot_finds_no_room),
    Fault("full: result", DISK, 30, "The job fails and names the file", here.result_finds_no_room, NIGHTLY),
    Fault("full: checkpoint", DISK, 120, "The job fails and names the file; the checkpoint before is whole", here.checkpoint_finds_no_room, NIGHTLY),
    Fault("/dev/shm full", DISK, 100, "The job fails and names shared memory", here.shared_memory_is_full, NIGHTLY),
    Fault("SIGKILL", NOTEBOOK, 60, "Its jobs end, unless they are detached", here.notebook_is_killed),
    Fault("two on one job", NOTEBOOK, 60, "Both see all; the first cancel counts", here.two_notebooks),
    Fault("Ctrl-C at each step of a submission", NOTEBOOK, 60, "No job, or one that is listed; the name can be used", here.interrupted_at_each_step, NIGHTLY),
    Fault("killed at each step of a submission", NOTEBOOK, 60, "No job, or one that is listed; the name can be used", here.killed_at_each_step, NIGHTLY),
    Fault("its clock an hour behind", NOTEBOOK, 100, "It follows, submits and fetches as ever", here.clock_is_an_hour_behind, NIGHTLY),
)  # fmt: skip


ROWS = [
    pytest.param(fault, id=f"{fault.where}: {fault.what}", marks=[pytest.mark.nightly] if fault.is_nightly else [])
    for fault in FAULTS
]


@pytest.mark.parametrize("fault", ROWS)
def test_a_fault_ends_as_its_row_says(fault, scene):
    fault.play(scene)
    scene.check()
