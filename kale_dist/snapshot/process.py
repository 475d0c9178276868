"""What a rank would have inherited, had the notebook's process started it itself."""

from __future__ import annotations

import os
import pathlib
import re
import resource
import sys

from kale_dist.contract import ProcessState
from kale_dist.runtime import torch_flags

_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))


def capture_process(cuda: bool) -> ProcessState:  # noqa: FBT001 - the one thing it depends on
    """The state of this process that ranks take over. Reads only; nothing of CUDA is initialised.

    Args:
        cuda: Whether the job uses CUDA; without it, CUDA's own flags are left out.
    """
    cwd = _cwd()
    return ProcessState(
        environment=tuple(os.environ.items()),
        cwd=cwd,
        # An empty entry means the current folder, which a rank may change before it imports.
        sys_path=tuple(dict.fromkeys(str(pathlib.Path(cwd, entry)) for entry in sys.path if isinstance(entry, str))),
        argv=tuple(sys.argv),
        umask=_umask(),
        limits=tuple((number, *resource.getrlimit(number)) for number in _LIMITS),
        torch_flags=torch_flags.read(cuda=cuda),
    )


def _cwd() -> str:
    try:
        return str(pathlib.Path.cwd())
    except FileNotFoundError:
        # The folder was deleted under the notebook; a rank needs one that is there.
        return str(pathlib.Path.home())


def _umask() -> int:
    """The umask, read without setting it: other threads of the notebook may be making files."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
    return int(found[1], 8) if found else 0o022
