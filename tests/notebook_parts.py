"""What tests of notebooks need beyond the installed packages."""

import contextlib
import os
import pathlib
import subprocess
import sys

import pytest

_FOLDER = pathlib.Path(sys.prefix) / "share" / "kale-dist-tests"

CLOUDPICKLES = ("3.1.0", "3.1.1", "3.1.2", "3.1.3")
"""Versions of cloudpickle that users may have."""


def older_ipykernel():
    """The folder of ipykernel 6 that a kernel's PYTHONPATH needs."""
    return _installed("ipykernel6", "ipykernel>=6.29,<7")


def cloudpickle(version):
    """The folder of a version of cloudpickle that a notebook's PYTHONPATH needs."""
    return _installed(f"cloudpickle-{version}", f"cloudpickle=={version}")


def _installed(name, requirement):
    """A folder in which a package is installed the first time."""
    folder = _FOLDER / name
    if not folder.is_dir():
        begun = folder.with_suffix(f".{os.getpid()}")
        wanted = ["--quiet", "--no-deps", "--target", str(begun), requirement]
        ended = subprocess.run([sys.executable, "-m", "pip", "install", *wanted], capture_output=True, check=False)
        if ended.returncode:
            why = f"{requirement} cannot be installed: {ended.stderr.decode(errors='replace')[-300:]}"
            if os.environ.get("CI"):
                pytest.fail(why)
            missing(why)
        # Another lane may have been first.
        with contextlib.suppress(OSError):
            begun.rename(folder)
    return folder


def missing(what):
    """Skip, for this machine lacks something; fail where the tests of notebooks must not be skipped."""
    if os.environ.get("KALE_DIST_REQUIRE_BROWSER"):
        pytest.fail(f"{what}, and KALE_DIST_REQUIRE_BROWSER is set")
    pytest.skip(what)
