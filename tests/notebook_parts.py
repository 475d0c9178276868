"""What tests of notebooks need beyond the installed packages."""

import os
import pathlib
import subprocess
import sys

import pytest

_IPYKERNEL_6 = pathlib.Path(sys.prefix) / "share" / "kale-dist-tests" / "ipykernel6"


def older_ipykernel():
    """The folder of ipykernel 6 that a kernel's PYTHONPATH needs; it is installed there the first time."""
    if not (_IPYKERNEL_6 / "ipykernel").is_dir():
        wanted = ["--quiet", "--no-deps", "--target", str(_IPYKERNEL_6), "ipykernel>=6.29,<7"]
        ended = subprocess.run([sys.executable, "-m", "pip", "install", *wanted], capture_output=True, check=False)
        if ended.returncode:
            missing(f"ipykernel 6 cannot be installed: {ended.stderr.decode(errors='replace')[-300:]}")
    return _IPYKERNEL_6


def missing(what):
    """Skip, for this machine lacks something; fail where the tests of notebooks must not be skipped."""
    if os.environ.get("KALE_DIST_REQUIRE_BROWSER"):
        pytest.fail(f"{what}, and KALE_DIST_REQUIRE_BROWSER is set")
    pytest.skip(what)
