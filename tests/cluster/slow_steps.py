"""A step that takes its time, for pods, which have no pytest."""

import os
import time


def train_slowly(model, loader, criterion, optimizer, device, args):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item()
        time.sleep(args)
    return {"loss": total}


def rank_and_world_size():
    import kale_dist as kd

    return kd.context().rank, kd.context().world_size


def waits_and_says_its_attempt():
    import kale_dist as kd

    print(f"attempt {kd.context().attempt} is here", flush=True)
    time.sleep(600)


def waits_for_its_second_attempt():
    import kale_dist as kd

    time.sleep(5 if kd.context().attempt else 600)
    return kd.context().attempt


def waits_for_its_third_attempt():
    import kale_dist as kd

    time.sleep(1 if kd.context().attempt == 2 else 600)
    return kd.context().attempt


def fills_memory():
    kept = [b"x" * 10_000_000 for _ in range(1000)]
    return len(kept)


def ends_in_first_attempt():
    import kale_dist as kd

    if not kd.context().attempt and kd.context().rank == 1:
        os._exit(1)
    return kd.context().attempt


def says_much_in_its_first_attempt(count):
    """Behind a gate, for the first attempt; the second one is short."""
    import pathlib

    import kale_dist as kd

    print("ready", flush=True)
    if not kd.context().attempt:
        while not pathlib.Path("/tmp/go").exists():
            time.sleep(0.05)
        for number in range(count):
            print(f"line {number:05}")
        print("all said", flush=True)
        time.sleep(600)
    return kd.context().attempt
