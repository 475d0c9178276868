"""Trainings drawn from tables are those of plain PyTorch. `hunt_cases.py` tells how to run more, and to repeat one.

`KALE_DIST_HUNT_SEED` names the seed; `.ci/nightly` prints the one that it takes.
"""

import os

import hunt_cases
import pytest
from hunt_found import KNOWN, MENDED

pytestmark = pytest.mark.filterwarnings("ignore")  # of drawn trainings: a scheduler before its optimizer, for one

SEED = int(os.environ.get("KALE_DIST_HUNT_SEED", "25"))


def _try(seed, number):
    case = hunt_cases.Case.drawn(seed, number)
    if "sparse" in case.model and os.environ.get("SIMCUDA_DEVICES"):
        pytest.skip("simulated GPUs have no sparse tensors")
    known = next((one for one in KNOWN if case.fits(one.case)), None)
    if known is None:
        assert not (wrong := hunt_cases.found(case)), f"case {seed}:{number}, {case}: {wrong}"


@pytest.mark.parametrize("number", range(12))
def test_a_drawn_training_is_that_of_plain_pytorch(number):
    _try(25, number)


@pytest.mark.parametrize("line", [one.case for one in MENDED])
def test_what_was_wrong_once_is_right(line):
    assert not hunt_cases.found(hunt_cases.Case.read(line))


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(300))
def test_each_of_300_drawn_trainings_is_that_of_plain_pytorch(number):
    _try(SEED, number)


@pytest.mark.nightly
@pytest.mark.parametrize("line", [one.case for one in KNOWN if one.is_certain])
def test_what_is_known_to_be_wrong_still_is(line):
    assert hunt_cases.found(hunt_cases.Case.read(line)), "it is right: make it a line of MENDED"
