"""What the live view of a job costs: time from a rank's print to the page, and the kernel's processor time.

Run it with `.venv/bin/python benchmarks/notebook.py` after `make test`, on a machine that is else idle. It needs
Debian's chromium. Aims: 99 of 100 lines within 50 ms, and a tenth of a core, at 1,000 lines a second and 256 ranks.
"""

from __future__ import annotations

import os
import pathlib
import platform
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "browser"))
import jupyter_lab

SECONDS = 10
WORK = f"""
import kale_dist as kd, subprocess, sys, time
from kale_dist.contract import EventKind, RankStateName
from kale_dist.testing import FakeBackend

def talk(lines_each_s):
    began = time.monotonic()
    for number in range(lines_each_s * {SECONDS}):
        while number / lines_each_s > time.monotonic() - began:
            time.sleep(0.001)
        print(f"at={{time.time():.4f}} line {{number}}", flush=True)

# An agent's part, in a process of its own: 1,000 lines a second of 256 ranks into the job's log.
AGENT = '''
import sys, time
from kale_dist import contract
with open(sys.argv[1], "ab", buffering=0) as log:
    began = time.monotonic()
    for number in range(1000 * {SECONDS}):
        while number / 1000 > time.monotonic() - began:
            time.sleep(0.001)
        text = f"at={{time.time():.4f}} line {{number}}".encode()
        log.write(contract.frame_lines(number, int(time.time() * 1000), 0, number % 256, contract.Stream.STDOUT, [text]))
'''

def crowd(run):
    for rank in range(256):
        run.event(EventKind.RANK, rank=rank, state=RankStateName.RUNNING)
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(run._files.log)])
    step = 0
    while agent.poll() is None:
        step += 1
        for rank in range(256):
            run.event(EventKind.PROGRESS, rank=rank, epoch=1, epochs=9, step=step, steps=1000, samples_per_s=100.0)
        time.sleep(1)
"""
CASES = {
    "2 ranks, 20 lines a second": "kd.launch(talk, 10, number_of_processes=2)",
    "2 ranks, 1,000 lines a second": "kd.launch(talk, 500, number_of_processes=2)",
    "256 ranks, 1,000 lines a second": "kd.launch(time.sleep, 0, number_of_processes=256, on=FakeBackend(crowd))",
}
LISTEN = """view => {
    window.late = [];
    new MutationObserver((changes) => {
        const now = Date.now() / 1000;
        for (const change of changes) for (const node of change.addedNodes) {
            const found = /at=([0-9.]+) line/.exec(node.textContent);
            if (found) window.late.push(now - Number(found[1]));
        }
    }).observe(view.querySelector('.kd-lines'), {childList: true});
}"""


def measure(notebook: jupyter_lab.Notebook, call: str) -> tuple[list[float], float]:
    """Seconds that lines took, and the share of a core that the kernel used meanwhile."""
    view = notebook.show(f"job = {call}\njob")
    view.locator(".kd-line").first.wait_for(timeout=60_000)
    view.evaluate(LISTEN)
    seconds = SECONDS - 4.0
    before = float(notebook.value("import time; print(time.process_time())"))
    notebook.page.wait_for_timeout(1000 * seconds)
    used = float(notebook.value("print(time.process_time())")) - before
    late: list[float] = notebook.page.evaluate("window.late")
    notebook.value("job.delete()")
    return sorted(late), used / seconds


def main() -> None:
    """Measure all cases, and print a table."""
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':34}{'lines':>8}{'p50':>10}{'p99':>10}{'kernel':>16}")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for part in ("state", "run"):
            (folder / part).mkdir(mode=0o700)
        os.environ |= {"XDG_STATE_HOME": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder / "run")}
        with jupyter_lab.serve(folder) as server, jupyter_lab.browse(server, folder) as browser:
            content = jupyter_lab.new_notebook([WORK])
            notebook = jupyter_lab.Notebook(server, browser.new_context(), "cost.ipynb", content)
            notebook.run_cell(0)
            notebook.wait_idle()
            for case, call in CASES.items():
                late, share = measure(notebook, call)
                p50, p99 = (1000 * late[int(len(late) * part)] for part in (0.5, 0.99))
                print(f"{case:34}{len(late):8,}{p50:7.0f} ms{p99:7.0f} ms{100 * share:9.1f} % core")
            notebook.close()


if __name__ == "__main__":
    main()
