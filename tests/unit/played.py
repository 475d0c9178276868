"""A small notebook and rank for the snapshot's tests: two real processes that share nothing but a store.

`play(folder, *cells, after=...)` runs the cells in the `__main__` of a fresh process, as a kernel does; they have to
define `call()`. The call is captured, loaded and made in a second process, and `outcome` and `captured` are there for
the code in `after`, which runs in the notebook again. What both processes print comes back.
"""

from __future__ import annotations

import linecache
import os
import pathlib
import sys
import types
import warnings

import forked

from kale_dist.wire import blobs

KEY = b"k" * 32


def play(folder, *cells, after="", args="()", kwargs="{}"):
    state, printed = pathlib.Path(folder, ".state"), pathlib.Path(folder, ".printed")
    theirs, ours = forked.context().Pipe()
    notebook = _start("notebook", folder, printed, theirs, state, cells, after, args, kwargs)
    theirs.close()
    try:
        # The notebook ended if it says nothing.
        rank = _start("rank", "/", printed, state, ours.recv())
        _join(rank, printed)
        ours.send("the rank has ended")
    except EOFError:
        pass
    _join(notebook, printed)
    return printed.read_text()


def _start(name, folder, printed, *args):
    process = forked.context().Process(target=_begin, args=(name, str(folder), str(printed), dict(os.environ), *args))
    process.start()
    return process


def _join(process, printed):
    process.join(100)
    process.kill()
    process.join()
    assert process.exitcode == 0, f"{process.exitcode}: {printed.read_text()}"


def _begin(name, folder, printed, environment, *args):
    """Make this process like one that `python -W error -P` has just started, with PyTorch imported."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules.pop("__mp_main__", None)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = [folder, *(path for path in sys.path if path)]
    sys.dont_write_bytecode = True
    warnings.resetwarnings()
    warnings.simplefilter("error")
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    {"notebook": notebook, "rank": rank}[name](*args)


def notebook(connection, state, cells, after, args, kwargs):
    from kale_dist.snapshot import outcome
    from kale_dist.snapshot.capture import capture

    main = sys.modules["__main__"].__dict__
    for number, cell in enumerate(cells):
        run_cell(main, cell, f"/tmp/ipykernel_1/{number}.py")
    captured = capture(main["call"], eval(args, main), eval(kwargs, main), store=blobs.FolderStore(state), label="call")
    print(*captured.notes, sep="\n", flush=True)
    connection.send(captured.digest)
    connection.recv()
    main["captured"] = captured
    main["outcome"] = outcome.read_outcome(
        state / "outcome",
        signer=outcome.Signer(key=KEY, job="j", attempt=0, rank=0),
        resolve=captured.originals.resolve,
    )
    if main["outcome"].error is not None and "error" not in after:
        sys.exit(main["outcome"].traceback)
    run_cell(main, after, "/tmp/ipykernel_1/after.py")


def run_cell(main, cell, filename):
    linecache.cache[filename] = (len(cell), None, cell.splitlines(keepends=True), filename)
    exec(compile(cell, filename, "exec", dont_inherit=True), main)


def rank(state, digest):
    from kale_dist.snapshot import loading, outcome

    store = blobs.FolderStore(state)
    loading.stage_modules(store, digest, state / "modules")
    loaded = loading.load(store, digest, modules=state / "modules")
    signer = outcome.Signer(key=KEY, job="j", attempt=0, rank=0)
    signed = {"signer": signer, "references": loaded.references}
    try:
        value = loaded.fn(*loaded.args, **loaded.kwargs)
        outcome.write_success(state / "outcome", value=value, **signed)
    except Exception as error:
        outcome.write_failure(state / "outcome", error=error, **signed)
