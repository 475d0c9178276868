"""A real JupyterLab in a real browser: headless Chromium, driven by Playwright. For tests, a benchmark and a picture."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import nbformat
import own_state

ROOT = pathlib.Path(__file__).parents[1]
SCREENSHOTS = ROOT / "build" / "screenshots"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


def _own_network():
    """What starts a process in a network of its own, where that is allowed.

    Elsewhere interfaces that come and go, as those of a cluster's pods do, make Chromium give up what it loads.
    """
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return []
    return [] if subprocess.run([*command, "true"], capture_output=True, check=False).returncode else command


@dataclasses.dataclass(frozen=True)
class Server:
    """A JupyterLab, or a Notebook 7, that runs."""

    url: str
    pages: str
    """Address of one notebook's page, before its name."""
    folder: pathlib.Path
    enter: tuple
    """What starts a process in its network."""


@contextlib.contextmanager
def serve(folder, program="jupyterlab"):
    """A JupyterLab (or `notebook`) with settings of its own, below this folder; its kernels see this checkout and the tests' fake backend."""
    notebooks, config = folder / "notebooks", folder / "config" / "labconfig"
    for made in (notebooks, config):
        made.mkdir(parents=True)
    (config / "default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    environment = {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
    }
    settings = [
        "--ip=127.0.0.1", "--no-browser", "--allow-root", "--IdentityProvider.token=",
        "--expose-app-in-browser", f"--ServerApp.root_dir={notebooks}", "--ServerApp.port_retries=0",
    ]  # fmt: skip
    with running([program, *settings], folder, "api", environment) as (address, enter):
        yield Server(address, f"{address}/{'notebooks' if program == 'notebook' else 'doc/tree'}", notebooks, enter)


@contextlib.contextmanager
def running(words, folder, asked, environment=()):
    """A module that serves pages in a network of its own, once it answers at this address: that of its pages, and what enters the network."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    seen = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        # A network of its own knows no names, of which torch would complain in the jobs' logs.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    own, address = _own_network(), f"http://127.0.0.1:{port}"
    with (folder / "lab.log").open("w") as log:
        command = [*own, sys.executable, "-m", *words, f"--port={port}"]
        process = subprocess.Popen(command, env=os.environ | seen | dict(environment), stdout=log, stderr=log)
    enter = ("nsenter", f"--net=/proc/{process.pid}/ns/net") if own else ()
    try:
        _await_server(process, [*enter, sys.executable, "-c", _ASK, f"{address}/{asked}"], folder / "lab.log")
        yield address, enter
    finally:
        process.terminate()
        process.wait(30)


_ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5).read()"


def _await_server(process, ask, log):
    deadline = time.monotonic() + 60
    while subprocess.run(ask, capture_output=True, check=False).returncode:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]  # noqa: PT018 - one state
        time.sleep(0.2)


@contextlib.contextmanager
def browse(server, folder):
    """A Chromium in the server's network; its start script goes into this folder."""
    from playwright.sync_api import sync_playwright

    started = folder / "chromium"
    started.write_text(f'#!/bin/sh\nexec {" ".join(server.enter)} {CHROMIUM} "$@"\n')
    started.chmod(0o755)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(started), args=QUIET)
        yield found
        found.close()


@contextlib.contextmanager
def lab_and_browser():
    """For scripts: a JupyterLab with a Chromium in its network, and a state that goes with them."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        own_state.move_into(folder)
        with serve(folder) as server, browse(server, folder) as browser:
            yield server, browser


def new_notebook(cells, kernel="python3"):
    """A notebook of code cells."""
    fresh = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    fresh.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
    return fresh


class Notebook:
    """A notebook in a page of the browser.

    Args:
        server: Serves it.
        context: Its page is made there.
        name: Its file's name.
        content: What it holds.
    """

    def __init__(self, server, context, name, content):
        nbformat.write(content, server.folder / name)
        self.server = server
        self.path = server.folder / name
        self.errors = []
        self.page = context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(f"{server.pages}/{name}")
        self.ready()

    def ready(self, kernel=True):
        """Wait until the notebook is shown and its kernel can take cells."""
        self.page.wait_for_function(
            """kernel => {
                const panel = window.jupyterapp?.shell.currentWidget;
                return panel?.content?.widgets && panel.context?.isReady
                    && (!kernel || panel.sessionContext.session?.kernel?.status === 'idle');
            }""",
            arg=kernel,
            timeout=60_000,
        )

    def command(self, name):
        """Have JupyterLab do what a menu's entry does, to its end."""
        self.page.evaluate("name => window.jupyterapp.commands.execute(name)", name)

    def start(self, code):
        """Run code in a new last cell, without waiting; returns the cell."""
        index = self.page.evaluate(
            """source => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                notebook.model.sharedModel.addCell({cell_type: 'code', source});
                notebook.activeCellIndex = notebook.widgets.length - 1;
                window.jupyterapp.commands.execute('notebook:run-cell');
                return notebook.activeCellIndex;
            }""",
            code,
        )
        return self.cell(index)

    def run(self, code):
        """Run code in a new last cell to its end; returns the cell."""
        cell = self.start(code)
        self.wait_idle()
        return cell

    def run_cell(self, index):
        """Run a cell that is there."""
        self.page.evaluate(
            """index => {
                window.jupyterapp.shell.currentWidget.content.activeCellIndex = index;
                window.jupyterapp.commands.execute('notebook:run-cell');
            }""",
            index,
        )
        return self.cell(index)

    def wait_idle(self, timeout_s=60):
        """Wait until no cell runs or is queued."""
        self.page.wait_for_function(
            """() => {
                const panel = window.jupyterapp.shell.currentWidget;
                return panel.sessionContext.session?.kernel?.status === 'idle'
                    && !document.querySelector('.jp-Notebook').innerText.includes('[*]:');
            }""",
            timeout=timeout_s * 1000,
        )

    def cell(self, index):
        """The cell at this place."""
        return self.page.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{index}"]')

    def show(self, code):
        """Run code whose value is a job; returns the job's view below it."""
        view = self.run(code).locator(".kd-job")
        view.wait_for()
        view.scroll_into_view_if_needed()
        return view

    def value(self, code):
        """What code prints in the kernel; it leaves no cell."""
        return self.page.evaluate(
            """async code => {
                const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                const future = kernel.requestExecute({code, store_history: false});
                let text = '';
                future.onIOPub = message => {
                    if (message.header.msg_type === 'stream') text += message.content.text;
                    if (message.header.msg_type === 'error') text += message.content.evalue;
                };
                await future.done;
                return text.trim();
            }""",
            code,
        )

    def dress(self, theme, width):
        """Give JupyterLab a theme, and the window a width."""
        self.page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        self.page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=theme)
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")
        # After the theme, whose sheets change sizes too: what is laid out anew is seen in the end.
        self.page.set_viewport_size({"width": width, "height": 900})
        # Colours fade in after a change of theme.
        self.page.evaluate(
            """() => Promise.allSettled(document.getAnimations().filter((one) => one instanceof CSSTransition)
                .map((one) => one.finished))"""
        )

    def fits(self, view):
        """Whether a view is no wider than its place, once the page has its new width."""
        for _ in range(25):
            if view.evaluate("view => view.scrollWidth <= view.clientWidth + 1"):
                return True
            self.page.wait_for_timeout(200)
        return False

    def accessibility_problems(self, selector):
        """What axe-core finds within these elements; empty if nothing."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page, context=selector)
        return found.generate_report() if found.violations_count else ""

    def photograph(self, name, view=None):
        """Keep a picture of the page, or of the whole of one view."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        size = self.page.viewport_size
        if view:
            # The notebook scrolls in the window: what does not fit there would be cut off.
            self.page.set_viewport_size({**size, "height": 300 + round(view.bounding_box()["height"])})
        (view or self.page).screenshot(path=SCREENSHOTS / f"{name}.png")
        self.page.set_viewport_size(size)

    def close(self):
        """End its kernel, and its page."""
        with contextlib.suppress(Exception):
            self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()
