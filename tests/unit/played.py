"""A small notebook and rank for the snapshot's tests: two real processes that share nothing but a store.

`play(folder, *cells, after=...)` runs the cells in the `__main__` of a fresh process, as a kernel does; they have to
define `call()`. The call is captured, loaded and made in a second process, and `outcome` and `captured` are there for
the code in `after`, which runs in the notebook again. What both processes print comes back.
"""

from __future__ import annotations

import linecache
import os
import pathlib
import subprocess
import sys

from kale_dist import blobs

KEY = b"k" * 32
REPOSITORY = str(pathlib.Path(__file__).parents[2])


def play(folder, *cells, after="", args="()", kwargs="{}", options="", environment=()):
    script = f"import sys; sys.path[:0] = [{REPOSITORY!r}, {str(pathlib.Path(__file__).parent)!r}, {str(folder)!r}]\n"
    script += (
        f"import played; played.notebook({str(folder)!r}, {cells!r}, {after!r}, {args!r}, {kwargs!r}, {options!r})"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **dict(environment)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def notebook(folder, cells, after, args, kwargs, options):
    from kale_dist.runtime import outcome
    from kale_dist.snapshot.capture import capture

    main = sys.modules["__main__"].__dict__
    for number, cell in enumerate(cells):
        run_cell(main, cell, f"/tmp/ipykernel_1/{number}.py")
    state = pathlib.Path(folder, ".state")
    captured = capture(main["call"], eval(args, main), eval(kwargs, main), store=blobs.FolderStore(state), label="call")
    print(*captured.snapshot.notes, sep="\n")
    rank = f"import sys; sys.path[:0] = [{REPOSITORY!r}, {str(pathlib.Path(__file__).parent)!r}]\n"
    rank += f"import played; played.rank({str(state)!r}, {captured.snapshot.digest!r}, {options!r})"
    sys.stdout.flush()
    subprocess.run([sys.executable, "-P", "-W", "error", "-c", rank], cwd="/", check=True, timeout=100)
    main["captured"] = captured
    main["outcome"] = outcome.read(
        state / "outcome", key=KEY, job="j", attempt=0, rank=0, resolve=captured.originals.resolve
    )
    if main["outcome"].error is not None and "error" not in after:
        sys.exit(main["outcome"].traceback)
    run_cell(main, after, "/tmp/ipykernel_1/after.py")


def run_cell(main, cell, filename):
    linecache.cache[filename] = (len(cell), None, cell.splitlines(keepends=True), filename)
    exec(compile(cell, filename, "exec", dont_inherit=True), main)


def rank(state, digest, options):
    from kale_dist.runtime import loading, outcome

    state = pathlib.Path(state)
    store = blobs.FolderStore(state)
    loading.stage_modules(store, digest, state / "modules")
    loaded = loading.load(store, digest, modules=state / "modules", **eval(f"dict({options})"))
    signed = {"key": KEY, "job": "j", "attempt": 0, "rank": 0, "references": loaded.references}
    try:
        value = loaded.fn(*loaded.args, **loaded.kwargs)
        outcome.write_success(state / "outcome", value=value, **signed)
    except Exception as error:
        outcome.write_failure(state / "outcome", error=error, **signed)
