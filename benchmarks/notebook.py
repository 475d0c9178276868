"""What the live view of a job costs: time from a rank's print to the page, and the processor time of kernel and page.

Beside it the same lines without a widget: printed by the cell that follows the job. (Appended to an `ipywidgets.Output`
they were not through after two minutes.) Run it with `.venv/bin/python benchmarks/notebook.py` after `make test`, on a machine
that is else idle. `benchmarks/notebook.py quiet` is of 1,000 ranks that print nothing: how late the page's own timers are.
It needs Debian's chromium. Aims: 99 of 100 lines within 40 ms, and 6 % of a core for the kernel,
at 1,000 lines a second and 256 ranks with curves within the epoch.
"""

from __future__ import annotations

import os
import pathlib
import platform
import statistics
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import jupyter_lab

SECONDS = 10
ROUNDS = 5
"""Each goes through all cases. Medians over the rounds are shown."""
WORK = f"""
import kale_dist as kd, os, subprocess, sys, time
from kale_dist.wire import RankStateName
from fake_backend import FakeBackend
from kale_dist.calls import request
from kale_dist.job import records
from kale_dist.job.reader import JobReader

request._RANK_BYTES = 0  # a script plays the 1,000

def talk(lines_each_s):
    began = time.monotonic()
    for number in range(lines_each_s * {SECONDS}):
        while number / lines_each_s > time.monotonic() - began:
            time.sleep(0.001)
        print(f"at={{time.time():.4f}} line={{kd.context().rank}}.{{number}};", flush=True)

# An agent's part, in a process of its own: 1,000 lines a second of 256 ranks, and each rank's progress once a second.
AGENT = '''
import pathlib, sys, time
from kale_dist import wire
from kale_dist.wire import RankStateName, StateName

files = wire.JobFiles(pathlib.Path(sys.argv[1]))

def event(kind, rank=None, **fields):
    return wire.encode_json({{"event": kind, "time": time.time(), "rank": rank, "attempt": 0, **fields}})

def progress(rank, step):
    return event("progress", rank, epoch=1, epochs=9, step=step, steps=1000, samples_per_s=100.0)

with open(files.log, "ab", buffering=0) as log, open(files.events, "ab", buffering=0) as events:
    events.write(event("state", state=StateName.RUNNING))
    events.write(b"".join(event("rank", rank, state=RankStateName.RUNNING) for rank in range(256)))
    latest = {{}}
    began = time.monotonic()
    for number in range(1000 * {SECONDS}):
        while number / 1000 > time.monotonic() - began:
            time.sleep(0.001)
        text = f"at={{time.time():.4f}} line={{number}};".encode()
        body = wire.body_of(wire.Stream.STDOUT, [text])
        log.write(wire.encode_lines(number, int(time.time() * 1000), 0, number % 256, body, 1))
        # Curves within the epoch: as many points as a head sends, which is ten a second at most.
        if number % 100 == 0:
            events.write(event("loss", epoch=1, step=number // 100, steps=10000, loss=1 / (1 + number / 1000)))
        # As the writer of a job's folder does it: four times a second.
        if number % 250 == 0:
            latest |= {{rank: progress(rank, 1 + number // 1000) for rank in range(number // 250 % 4, 256, 4)}}
            fresh = files.progress.with_suffix(".new")
            fresh.write_bytes(b"{{%s}}" % b",".join(b'"%d":%s' % one for one in latest.items()))
            fresh.replace(files.progress)
    events.write(event("state", state=StateName.SUCCEEDED))
'''

class Played(FakeBackend):
    # The status is read from the job's folder, as that of all real jobs is.
    def submit(self, spec, key):
        ref = super().submit(spec, key)
        made = {{"ref": str(ref), "name": ref.record_name, "created": time.time(), "spec": spec}}
        records.write(records.Record(**made, kernel_pid=os.getpid(), detach=False))
        self.reader = JobReader(ref.record_name, lambda _: True)
        return ref

    def status(self, ref):
        return self.reader.status()

def crowd(run):
    subprocess.run([sys.executable, "-c", AGENT, str(run._files.folder)], check=True)

def quiet(run):
    for rank in range(997):
        run.event("rank", rank=rank, state=RankStateName.RUNNING)
    time.sleep({3 * SECONDS})
"""
TWO = "kd.launch(talk, {rate}, number_of_processes=2)"
CROWD = "kd.launch(time.sleep, 0, number_of_processes=256, on=Played(crowd))"
QUIET = "kd.launch(time.sleep, 0, number_of_processes=1000, on=FakeBackend(quiet))"
WIDGET = "job = {call}\njob"
PRINT = "job = {call}\nfor line in job.logs(follow=True): print(line)"
CASES = {
    "2 ranks, 20 lines a second": (TWO.format(rate=10), WIDGET),
    "2 ranks, 1,000 lines a second": (TWO.format(rate=500), WIDGET),
    "the same, printed by the cell": (TWO.format(rate=500), PRINT),
    "256 ranks, 1,000 lines a second": (CROWD, WIDGET),
}
SILENT = "1,000 ranks, no lines"
LISTEN = """cell => {
    const seen = new Set();
    const note = (text, now) => {
        for (const [, at, line] of text.matchAll(/at=([0-9.]+) line=([0-9.]+);/g)) {
            if (!seen.has(line)) window.late.push(now - Number(at));
            seen.add(line);
        }
    };
    window.late = [];
    note(cell.textContent, 0);
    window.late = [];
    new MutationObserver((changes) => {
        const now = Date.now() / 1000;
        // A cell's plain output is one text that is replaced: what is new is at its end.
        for (const place of new Set(changes.map((change) => change.target))) note(place.textContent.slice(-20000), now);
    }).observe(cell, {childList: true, subtree: true, characterData: true});
}"""

TICK = """cell => {
    const late = window.late = [];
    const tick = () => {
        const due = performance.now() + 20;
        setTimeout(() => late === window.late && (late.push((performance.now() - due) / 1000), tick()), 20);
    };
    tick();
}"""


class Figures(NamedTuple):
    """What one run has shown."""

    lines: int
    """Lines that the page was seen to get."""
    p50: float
    """Seconds that half of them took at most."""
    p99: float
    """Seconds that 99 of 100 took at most."""
    kernel: float
    """Cores that the kernel used."""
    page: float
    """Cores that the page's main thread used."""


def used_by_kernel(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    user, system = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(notebook: jupyter_lab.Notebook, pid: int, code: str, listen: str) -> Figures:
    """Run a cell that shows a job, and look at its lines in the page, or at the page's timers."""
    cell = notebook.start(code)
    cell.locator(".jp-OutputArea-output").first.wait_for(state="attached", timeout=60_000)
    # What nobody sees is sent nothing.
    cell.evaluate("cell => cell.scrollIntoView()")
    (cell.get_by_text("line=").first if listen == LISTEN else cell.get_by_text("997 running")).wait_for()
    client = notebook.page.context.new_cdp_session(notebook.page)
    client.send("Performance.enable")

    def used_by_page() -> float:
        found = client.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "TaskDuration"))

    cell.evaluate(listen)
    seconds = SECONDS - 4.0
    kernel, page = used_by_kernel(pid), used_by_page()
    notebook.page.wait_for_timeout(1000 * seconds)
    kernel, page = used_by_kernel(pid) - kernel, used_by_page() - page
    late = sorted(notebook.page.evaluate("window.late"))
    notebook.wait_idle()
    notebook.value("job.wait()\njob.delete()")
    notebook.command("notebook:clear-all-cell-outputs")
    return Figures(len(late), late[len(late) // 2], late[int(len(late) * 0.99)], kernel / seconds, page / seconds)


def main() -> None:
    """Measure all cases, and print a table."""
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':34}{'lines':>8}{'p50':>10}{'p99':>10}{'kernel':>16}{'page':>16}")
    with jupyter_lab.lab_and_browser() as (server, browser):
        content = jupyter_lab.new_notebook([WORK])
        notebook = jupyter_lab.Notebook(server, browser.new_context(), "cost.ipynb", content)
        notebook.run_cell(0)
        notebook.wait_idle()
        pid = int(notebook.value("import os; print(os.getpid())"))
        cases = {SILENT: (QUIET, WIDGET)} if sys.argv[1:] == ["quiet"] else CASES
        found: dict[str, list[Figures]] = {case: [] for case in cases}
        for _ in range(ROUNDS):
            for case, (call, shown) in cases.items():
                listen = TICK if case == SILENT else LISTEN
                found[case].append(measure(notebook, pid, shown.format(call=call), listen))
        for case, figures in found.items():
            lines, p50, p99, kernel, page = (statistics.median(column) for column in zip(*figures, strict=True))
            shares = "".join(f"{100 * share:9.1f} % core" for share in (kernel, page))
            print(f"{case:34}{lines:8,.0f}{1000 * p50:7.0f} ms{1000 * p99:7.0f} ms{shares}")
        notebook.close()


if __name__ == "__main__":
    main()
