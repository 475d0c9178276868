"""What ranks of the cluster tests do. The pods have PyTorch and no pytest."""

import os
import signal
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


def fills_the_disk_on_1(folder):
    signal.signal(signal.SIGTERM, lambda *_: (print("my last words", flush=True), os._exit(0)))
    if kd.context().rank == 1:
        with open(f"{folder}/large", "wb") as file:  # noqa: PTH123 - as users write it
            file.write(bytes(50_000_000))
    time.sleep(600)


def fills_memory_on_1():
    if kd.context().rank == 1:
        kept = [b"x" * 10_000_000 for _ in range(1000)]
        print(len(kept))
    time.sleep(600)
