"""What works where an optional package is not installed."""

import importlib
import pkgutil
import sys

import pytest


def _ours():
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kale_dist"}


@pytest.fixture
def fresh():
    """Forget that kale_dist was imported, and bring it back as it was."""
    before = _ours()
    for name in before:
        del sys.modules[name]
    yield
    for name in _ours():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("package", ["kubernetes", "docker", "ipywidgets"])
@pytest.mark.usefixtures("fresh")
def test_every_module_imports_without(package, request):
    request.getfixturevalue(f"no_{package}")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(package)
    top = importlib.import_module("kale_dist")
    found = {module.name for module in pkgutil.walk_packages(top.__path__, "kale_dist.")}
    own = {name for name in found if package in name.split(".")}
    for name in found - own - {"kale_dist.worker.__main__"}:
        importlib.import_module(name)
    assert {"kale_dist.calls.verbs", "kale_dist.job.handle", "kale_dist.worker.rank.rank_main"} <= found
    assert package not in sys.modules
