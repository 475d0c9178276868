"""What ranks of the tests on a Docker engine do. The containers have PyTorch and no pytest."""

import os
import pathlib
import time

import kale_dist as kd


def leaves_and_looks():
    """What is seen of a job before in the same containers; then leaves what the next one must not see."""
    import random
    import subprocess
    import sys

    child = "sleep 321"
    commands = [
        path.read_bytes().replace(b"\0", b" ").decode() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
    ]
    seen = [
        "LEFT" in os.environ, "left" in sys.modules, pathlib.Path("left.txt").exists(), child in " ".join(commands)
    ]  # fmt: skip
    os.environ["LEFT"], sys.modules["left"] = "yes", sys
    pathlib.Path("left.txt").write_text("yes")
    subprocess.Popen(child.split(), start_new_session=True)
    return seen, random.random()


def succeed():
    print(f"rank {kd.context().rank} of 2")


def fail():
    if kd.context().rank == 1:
        raise ValueError("boom")


def exit_with_3():
    if kd.context().rank == 1:
        os._exit(3)


def train_slowly(model, loader, criterion, optimizer, device, args):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
        time.sleep(args)
    return {"loss": total}


def hang():
    print("ready", flush=True)
    time.sleep(600)


def fails_on_1():
    if kd.context().rank == 1:
        raise KeyError("no such column")
    time.sleep(60)


def eats_memory_on_1():
    held = []
    while kd.context().rank == 1:
        held.append(bytearray(b"x") * (16 << 20))
    time.sleep(60)


def imports_what_the_image_lacks():
    import einops

    return einops.__name__


def prints_much(lines):
    for number in range(lines):
        print(f"line {number:06} of rank {kd.context().rank}")
    print("\x1b[31mred\x1b[0m \udcff".encode("utf-8", "surrogateescape"))
    print("x" * 3_000_000)


def does_much(path, weights, lines):
    prints_much(lines)
    return writes_where_it_must(path), weights


def writes_where_it_must(path):
    """Whether a user that the image does not know can work, and what it is."""
    import getpass
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    pathlib.Path.home().joinpath(".cache").mkdir(exist_ok=True)
    pathlib.Path(path, f"from-{kd.context().rank}").write_text("written")
    return getpass.getuser(), os.getuid(), os.environ["GREETING"], os.statvfs("/dev/shm").f_blocks > 0


def waits_a_little(seconds):
    time.sleep(seconds)
    return kd.context().rank


def user_and_bytes(weights, seconds):
    time.sleep(seconds)
    return os.getuid(), weights


def einops_version():
    """Of a package that the image does not have by itself."""
    import einops

    return einops.__version__


def prints_fast(lines):
    for number in range(lines):
        print(f"{number:06} {'x' * 90}")
