"""Live ranks as a new user tries them in JupyterLab: start, cells, an error, the stop button, `breakpoint()`, stop, idle end, restarts."""

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.nightly

CELLS = [
    "%load_ext kale_dist\nimport torch\nlr = 0.1",
    "%distribute start -n 2",
    "%%distribute\nimport torch.distributed as dist\nx = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nprint('sum', x.item())\nx.item() * lr",
    "%%distribute\nif rank == 1:\n    y = x.reshape(3, 5)\ndist.barrier()",
    "%%distribute\nimport time\nprint('be' + 'gins')\nwhile True: time.sleep(0.1)",
    "%%distribute\nif rank == 1: breakpoint()\nx += 1\nx.item()",
    "%distribute stop",
]


def test_a_new_users_first_minutes(open_notebook):
    notebook = open_notebook("live.ipynb", cells=CELLS)
    page = notebook.page
    notebook.run_cell(0)
    expect(notebook.run_cell(1)).to_contain_text("%%distribute runs a cell in its 2 ranks", timeout=90_000)
    found = notebook.run_cell(2)
    expect(found).to_contain_text("[1] sum 3.0")
    expect(found).to_contain_text("From the notebook: lr")
    expect(found).to_contain_text("ranks 0-1: 0.3")
    notebook.photograph("live-cell", found)
    failed = notebook.run_cell(3)
    expect(failed).to_contain_text("CellError", timeout=20_000)
    expect(failed).to_contain_text("y = x.reshape(3, 5)")
    expect(failed).to_contain_text("Rank 0 waited in a collective, and went on")
    notebook.photograph("live-error", failed)
    busy = notebook.start(CELLS[4])
    expect(busy).to_contain_text("begins", timeout=20_000)
    notebook.command("notebook:interrupt-kernel")
    expect(busy).to_contain_text(
        "The cell was interrupted in ranks 0-1. The ranks and their variables stay", timeout=20_000
    )
    expect(busy).not_to_contain_text("kale_dist/")
    notebook.photograph("live-interrupt", busy)
    notebook.wait_idle()
    waiting = notebook.start(CELLS[5])
    box = page.locator(".jp-Stdin-input")
    for number, (line, printed) in enumerate(
        (("p x", "tensor([3.])"), ("x *= 10", "x *= 10"), ("c", "rank 1: 31.0")), 1
    ):
        # The box of the line before may still be there.
        expect(waiting).to_contain_text(re.compile(rf"(\(rank 1\).*){{{number}}}", re.DOTALL), timeout=20_000)
        expect(box).to_have_count(1)
        box.fill(line)
        box.press("Enter")
        expect(waiting).to_contain_text(printed, timeout=20_000)
    expect(waiting).to_contain_text("rank 0: 4.0")
    notebook.photograph("live-breakpoint", waiting)
    expect(notebook.start(CELLS[6])).to_contain_text("has ended", timeout=20_000)
    notebook.wait_idle()

    notebook.run("%distribute start -n 2 --idle 3s --job live")
    notebook.value("live.wait()")
    expect(notebook.run("%%distribute\nx")).to_contain_text("run no cell for 3 s")
    expect(notebook.run("%distribute restart")).to_contain_text("is ready: new processes")
    ref = notebook.value("print(live.ref)")
    notebook.photograph("live-idle-end")

    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    notebook.ready()
    notebook.run("%load_ext kale_dist")
    alone = notebook.run("%%distribute\nx = rank")
    expect(alone).to_contain_text("There are no live ranks, so this cell is a job of its own")
    expect(notebook.run(f"%attach {ref}").locator(".kd-job")).to_contain_text("cancelled")
    expect(notebook.run("%distribute restart")).to_contain_text("is ready: new processes")
    expect(notebook.run("%%distribute\nrank")).to_contain_text("rank 1: 1")
    notebook.photograph("live-attached")
    notebook.run("%distribute stop")
