"""What ranks of the cluster tests do. The pods have PyTorch and no pytest."""

import base64
import os
import pathlib
import signal
import sys
import time

import kale_dist as kd


def summed(factor):
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    print(f"rank {dist.get_rank()} has {value.item()}")
    return value.item() * factor


def fails_on_1():
    if kd.context().rank == 1:
        raise KeyError("no such column")
    time.sleep(60)


def dies_on_1():
    if kd.context().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def waits():
    print("ready", flush=True)
    time.sleep(600)


def size_and_more(weights):
    return weights + 1


def prints_much():
    for number in range(100_000):
        print(f"line {number:06} of rank {kd.context().rank}")
    print("\x1b[31mred\x1b[0m \udcff".encode("utf-8", "surrogateescape"))
    print("x" * 3_000_000)


def succeed():
    print(f"rank {kd.context().rank} of 2")


def fail():
    if kd.context().rank == 1:
        raise ValueError("boom")


def exit_with_3():
    if kd.context().rank == 1:
        os._exit(3)


def hang():
    print("ready", flush=True)
    time.sleep(600)


def bytes_of(size):
    print(f"rank {kd.context().rank} is here")
    return bytes(size)


def last_of(weights):
    return float(weights[-1])


def bytes_after(seconds, size):
    time.sleep(seconds)
    return bytes(size)


def einops_version():
    """Of a package that the image does not have by itself."""
    import einops

    return einops.__version__


def says_and_waits():
    signal.signal(signal.SIGTERM, lambda *_: (print("my last words", flush=True), os._exit(0)))
    print("ready", flush=True)
    time.sleep(600)


def fills_memory_on_1():
    if kd.context().rank == 1:
        kept = [b"x" * 10_000_000 for _ in range(1000)]
        print(len(kept))
    time.sleep(600)


def prints_in_two_parts(count, gate):
    """Prints so many lines of 100 bytes in all, the last quarter when a file is there."""
    for number in range(count):
        if number == count * 3 // 4:
            sys.stdout.flush()
            while not pathlib.Path(gate).exists():
                time.sleep(0.05)
        print(f"line {number:06} {'x' * 87}")


def counts(count, pause_s):
    for number in range(count):
        print(f"count {number:05}", flush=True)
        time.sleep(pause_s)


ODD_LINES = (
    b"\x1b[31mred\x1b[0m",
    b"\x00\xff\xfe binary \x80",
    b"~0 0 0 0 o a line that looks like a frame",
    b"!0 00000000000000000000000000000000 {}",
    b".fffff fffff",
    b"=0 0 AAAA",
    b"y" * 10_000_000,
)


def prints_odd_lines():
    for line in ODD_LINES:
        os.write(1, line + b"\n")
    return "the real one"


def forges():
    """Writes into the pod's log past the agent what only the agent may say."""
    lines = (
        b'!0 00000000000000000000000000000000 {"event": "state", "state": "failed", "reason": "forged"}',
        b"=0 0 " + base64.b64encode(b"no outcome"),
        b".fffff fffff",
        b"~fffff 0 0 0 o forged line",
        b"written past the agent",
    )
    with open("/proc/1/fd/1", "wb", buffering=0) as log:  # noqa: PTH123 - a pipe
        log.writelines(line + b"\n" for line in lines)
    time.sleep(2)
    print("behind them")
    return "the real one"


def replaces_outcome(folder, name):
    """Overwrites another job's outcome in a store with one that nobody has signed."""
    path = next(pathlib.Path(folder).rglob(f"{name}/outcome-0-0"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
