"""A JupyterLab and a browser for all tests of this folder."""

import importlib.util
import json
import os
import sys

import jupyter_lab
import notebook_parts
import pytest

REQUIRED = bool(os.environ.get("KALE_DIST_REQUIRE_BROWSER"))
collect_ignore_glob = [] if REQUIRED or importlib.util.find_spec("playwright") else ["test_*.py"]


# Not for the session: as long as Playwright runs, no other asyncio loop can run in this thread.
@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A JupyterLab; skips where what it needs is not installed."""
    for package in ("jupyterlab", "playwright", "axe_playwright_python"):
        if importlib.util.find_spec(package) is None:
            notebook_parts.missing(f"{package} is not installed")
    if jupyter_lab.CHROMIUM is None:
        notebook_parts.missing("there is no chromium")
    with jupyter_lab.serve(tmp_path_factory.mktemp("lab")) as found:
        yield found


@pytest.fixture(scope="module")
def browser(server, tmp_path_factory):
    """A Chromium in the server's network."""
    from playwright.sync_api import expect

    expect.set_options(timeout=20_000)
    with jupyter_lab.browse(server, tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def kernel_6(server):
    """The name of a kernel with ipykernel 6, whose front ends have no subshells."""
    folder = server.folder.parent / "data" / "kernels" / "kernel6"
    folder.mkdir(parents=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3 (ipykernel 6)",
        "language": "python",
        "env": {"PYTHONPATH": f"{notebook_parts.older_ipykernel()}{os.pathsep}{jupyter_lab.ROOT}"},
    }
    (folder / "kernel.json").write_text(json.dumps(spec))
    return "kernel6"


@pytest.fixture(scope="module")
def context(browser):
    """A browser's profile of its own."""
    made = browser.new_context(
        viewport={"width": 1000, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def open_notebook(server, context):
    """A function that opens notebooks; their kernels end with the tests of the file."""
    opened = {}

    def open_one(name, cells=(), kernel="python3", content=None):
        content = content or jupyter_lab.new_notebook(cells, kernel)
        if name in opened:
            # A test that runs again gets a new kernel.
            opened[name].close()
        opened[name] = jupyter_lab.Notebook(server, context, name, content)
        return opened[name]

    yield open_one
    for notebook in opened.values():
        notebook.close()
