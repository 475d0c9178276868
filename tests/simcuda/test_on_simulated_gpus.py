"""Tests of other folders, run again in processes that have simulated GPUs; README.md tells what that proves.

`KALE_DIST_REQUIRE_SIMCUDA=1` fails where the simulation cannot be built, in place of leaving these tests out.
"""

import dataclasses
import os

import pytest
import simulated_gpus

PROBLEM = simulated_gpus.why_not()
pytestmark = [
    pytest.mark.skipif(bool(PROBLEM) and "KALE_DIST_REQUIRE_SIMCUDA" not in os.environ, reason=PROBLEM),
    pytest.mark.timeout(900),
]


@dataclasses.dataclass(frozen=True)
class Run:
    """What runs there: arguments of pytest, or of `tests/gpu/run.py`."""

    what: str
    arguments: tuple[str, ...]
    gpus: int = 8
    is_nightly: bool = False
    part: str = "0/1"
    """The tests' part that is run, as in `.ci/nightly`."""


RUNS = [
    Run("the rules of the simulation", ("tests/simcuda/rules.py",), 2, is_nightly=True),
    Run("what a real GPU runs with two ranks", ("--group", "C"), 1, is_nightly=True),
    Run("DDP and FSDP equal one process", ("tests/strategies/test_equality.py", "tests/strategies/test_fsdp.py", "-k", "equal")),
    Run("live ranks, launch, and tied weights", ("tests/simcuda/uses.py",), 2, is_nightly=True),
    Run("waits of the host in a step", ("tests/simcuda/waits.py",), 2),
    Run("what a real GPU runs with one rank", ("--group", "A", "--group", "B"), 1, is_nightly=True),
    Run("all of the strategies", ("tests/strategies",), is_nightly=True),
    Run("half of the nightly's strategies", ("tests/strategies", "-m", "nightly"), is_nightly=True, part="0/2"),
    Run("the other half", ("tests/strategies", "-m", "nightly"), is_nightly=True, part="1/2"),
    Run("all of resuming", ("tests/resuming", "-m", ""), is_nightly=True),
    Run("all of the agent", ("tests/agent",), is_nightly=True),
    Run("150 drawn trainings", ("tests/hunt/test_hunt.py", "-m", "nightly", "-k", "300_drawn"), is_nightly=True, part="0/2"),
]  # fmt: skip


@pytest.mark.parametrize(
    "run", [pytest.param(run, id=run.what, marks=[pytest.mark.nightly] if run.is_nightly else []) for run in RUNS]
)
def test_it_runs_on_simulated_gpus(run, tmp_path):
    assert not PROBLEM, PROBLEM
    syncs = tmp_path / "syncs"
    ended = simulated_gpus.run(
        run.arguments, tmp_path, run.gpus, SIMCUDA_SYNCS=str(syncs), KALE_DIST_TEST_PART=run.part
    )
    assert ended.returncode == 0, ended.stdout[-20_000:]
    assert syncs.stat().st_size, f"no GPU was used: {ended.stdout[-2_000:]}"
