"""The program that executes a notebook in a pod, for `kale_dist.runtime.notebook_rank`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import sys

from kale_dist.notebook.execution import run_notebook
from kale_dist.notebook.terminal import Terminal
from kale_dist.runtime import notebook_rank


def main() -> int:
    """Execute what the working folder's request names; gives the exit code."""
    # A job that is cancelled ends as Ctrl-C ends it elsewhere: the cell first, and then the notebook is saved.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    request = json.loads(pathlib.Path(notebook_rank.REQUEST).read_bytes())
    result = run_notebook(
        request["notebook"],
        arguments=request["arguments"],
        output=notebook_rank.OUTPUT,
        terminal=Terminal(sys.stdout, step_percent=1),
    )
    fresh = pathlib.Path(f".{notebook_rank.SUMMARY}.new")
    fresh.write_text(json.dumps({**dataclasses.asdict(result), "output": ""}))
    fresh.replace(notebook_rank.SUMMARY)
    return 1 if result.failure or result.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
