"""`make near` runs the tests that import what has changed, through the package's public names, too."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def test_the_nearest_tests_come_first_and_are_few():
    found = importlib.util.spec_from_file_location("near", ROOT / ".ci" / "near.py")
    near = importlib.util.module_from_spec(found)
    found.loader.exec_module(near)
    users = near.users()
    [by_its_public_name, *others] = near.near({ROOT / "kale_dist/snapshot/folders.py"}, users)
    assert by_its_public_name == ROOT / "tests/unit/test_given_models.py"
    assert len(others) == near.MOST - 1
    assert near.near({ROOT / "tests/unit/test_usage.py"}, users) == [ROOT / "tests/unit/test_usage.py"]
    assert ROOT / "tests/agent/test_relays.py" in near.near({ROOT / "kale_dist/worker/pod/relay.py"}, users)
