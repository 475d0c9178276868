"""A state of their own for tests and scripts: jobs of others are not listed there, nor theirs elsewhere."""

import os


def move_into(folder):
    """Have this process, and those that it starts, keep what outlives them in this folder."""
    for name in ("state", "run"):
        (folder / name).mkdir(mode=0o700)
    os.environ |= {"XDG_STATE_HOME": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder / "run")}
