"""What ranks of the cluster tests do. The pods have PyTorch and no pytest."""

import os
import pathlib
import random
import re
import socket
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


def waits():
    print("ready", flush=True)
    time.sleep(600)


def waits_in_its_first_run():
    """Ends at once in the second run, whose pods are called after it, and in another attempt."""
    is_second = "-2-" in socket.gethostname() or kd.context().attempt > 0
    print("ready", flush=True)
    time.sleep(1 if is_second else 600)
    return is_second


def waits_the_first_time(path):
    """Ends at once when it is started again, in whatever pod: a file tells."""
    mark = pathlib.Path(f"{path}-{kd.context().rank}")
    is_second = mark.exists()
    mark.touch()
    print("ready", flush=True)
    time.sleep(1 if is_second else 600)
    return is_second


def rank_and(number):
    print(f"rank {kd.context().rank} is here")
    return kd.context().rank + number


def backwards(data):
    return data[::-1]


def size_and_more(weights):
    return weights + 1


def last_of(weights):
    return float(weights[-1])


def prints_much(lines):
    for number in range(lines):
        print(f"line {number:06} of rank {kd.context().rank}")


def noise(size):
    """Bytes that cannot be packed."""
    return random.Random(0).randbytes(size)


def bytes_of(size):
    print(f"rank {kd.context().rank} is here")
    return noise(size)


def fills_memory():
    kept = [b"x" * 10_000_000 for _ in range(1000)]
    return len(kept)


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


def number_steps(model, loader, criterion, optimizer, device, args):
    """Prints the number of each batch of an epoch of 100, also of one that it takes up; pauses after it in some attempts."""
    pause_s, attempts = args
    here = kd.context()
    for number, (x, y) in enumerate(loader, 100 - len(loader)):
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        print(f"attempt {here.attempt} of {here.world_size} ranks: batch {number}", flush=True)
        time.sleep(pause_s if here.attempt in attempts else 0)
    return {"loss": loss.item()}


def batches_of(job, rank=0):
    """Attempt, ranks and number of each batch, as a rank's `number_steps` has printed them."""
    pattern = r"attempt (\d+) of (\d+) ranks: batch (-?\d+)"
    lines = [re.search(pattern, line.text) for line in job.logs() if line.rank == rank]
    return [tuple(map(int, found.groups())) for found in lines if found]


def pause(epoch, metrics, model):
    time.sleep(2)


def waits_in_its_first_attempt():
    """Ends at once when it is started again in the same object."""
    attempt = kd.context().attempt
    print("ready", flush=True)
    time.sleep(1 if attempt else 600)
    return attempt


def connections_of_the_pods():
    """Of each rank: its pod's address, and the other ends of all TCP connections of its pod, also of those that ended a minute ago."""
    import torch.distributed as dist

    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    ends = {line[2].partition(":")[0][-8:] for line in lines}
    found = sorted(socket.inet_ntoa(bytes.fromhex(end)[::-1]) for end in ends)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (socket.gethostbyname(socket.gethostname()), found))
    return every
