"""Waiting for what comes by itself."""

import time


def until(condition, timeout_s=120.0, told=lambda: "it did not happen"):
    """Wait until a condition holds, and give what it returned; `told` says what there is instead."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)
    return found
