"""What ranks do while something breaks. Pods and containers have no pytest, and the plain ones no PyTorch."""

import os
import sys
import time

import kale_dist as kd


def waits():
    print("ready", flush=True)
    time.sleep(600)


def waits_the_first_time(folder):
    """Ends at once where the same rank has been before."""
    mark = os.path.join(folder, f"was-here-{kd.context().rank}")  # noqa: PTH118 - one module less
    if os.path.exists(mark):  # noqa: PTH110
        return f"second time of {kd.context().rank}"
    os.close(os.open(mark, os.O_CREAT))
    return waits()


def counts(number, pause_s=0.0):
    """Prints a line for each number."""
    for line in range(number):
        print(f"{line:06}", flush=True)
        time.sleep(pause_s)
    return number


def counts_wide(number):
    for line in range(number):
        print(f"{line:06} {'x' * 90}")
    return number


def adds_up(times, pause_s=0.05):
    """All ranks meet, again and again."""
    import torch
    import torch.distributed as dist

    total = torch.zeros(1)
    for number in range(times):
        one = torch.ones(1)
        dist.all_reduce(one)
        total += one
        if not number:
            print("ready", flush=True)
        time.sleep(pause_s)
    return total.item()


def dies_on_one(how):
    """Rank 1 ends in the middle of a collective: by a signal, or with an exit code where the number is negative."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    if kd.context().rank == 1:
        print("last words of one")
        os.kill(os.getpid(), how) if how > 0 else os._exit(-how)
    dist.all_reduce(torch.ones(1))


def crashes_under_faulthandler():
    import ctypes
    import faulthandler

    faulthandler.enable()
    ctypes.string_at(0)


def raises(how):
    def recurses():
        recurses()

    if how == "recursion":
        recurses()
    elif how == "memory":
        bytearray(1 << 60)
    else:
        sys.exit(3)


def writes_cut_characters():
    os.write(1, b"caf\xc3")
    time.sleep(0.5)
    os.write(1, b"\xa9\ncut: \xe2\x82")


def eats_memory():
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)) * 32)


def large(size):
    return os.urandom(size)


def trains_and_fails(model, loader, criterion, optimizer, device, args):
    """A slow epoch; fails in the one that `args` names. What the epochs are is in the state of the model."""
    import torch

    for inputs, labels in loader:
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()
    time.sleep(0.5)
    with torch.no_grad():
        model.epochs += 1
    if int(model.epochs) == args:
        raise ValueError("the fault of the user's code")
    return 0.0
