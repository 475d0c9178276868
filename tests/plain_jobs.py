"""Functions for ranks in an image that has nothing but Python."""

import hashlib
import os
import sys
import time

import kale_dist as kd


def where():
    kd.report(loss=0.5)
    print("hello from", kd.context().rank)
    return "torch" in sys.modules, int(os.environ["RANK"]), kd.context().world_size


def give_back(value):
    return value


def rank():
    return kd.context().rank


def fail_on_last():
    if kd.context().rank == kd.context().world_size - 1:
        raise ValueError("the seventh batch is empty")
    time.sleep(600)


def speak_and_sleep():
    print("last words", kd.context().rank)
    time.sleep(600)


def wait_a_little(seconds):
    time.sleep(seconds)


def wait_for_file(path):
    while not os.path.exists(path):  # noqa: PTH110 - one module less
        time.sleep(0.05)


def write_much(folder):
    for number in range(130_000):
        print(f"{number:06d} {'x' * 90}")
        if number % 1000 == 0:
            with open(os.path.join(folder, f"{kd.context().rank}"), "w") as file:  # noqa: PTH118, PTH123 - one module less
                file.write(f"{number}")


def sum_of(data):
    return sum(data) + kd.context().rank


def name_of(data):
    return kd.context().rank, hashlib.sha256(data).hexdigest()


def large_result():
    return bytes([kd.context().rank]) * 800_000


def reports_and_waits(folder):
    from kale_dist.wire import context, events

    kd.report(lr=0.5)
    step = {"epoch": 1, "epochs": 2, "step": 1, "steps": 1, "samples": 8, "samples_per_s": 2.0, "loss": 0.75}
    context.emit(events.RankProgress(**step))
    while not os.path.exists(os.path.join(folder, "go")):  # noqa: PTH110, PTH118 - one module less
        time.sleep(0.02)


def be_steady():
    time.sleep(7)


def save_where_another_user_may():
    # As torch.save raises it, which names neither the file nor the user.
    raise RuntimeError("[enforce fail at inline_container.cc:747] . open file failed with strerror: Permission denied")
