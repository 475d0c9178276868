"""What cannot be pickled is named by its path from the call, with a remedy."""

import asyncio
import concurrent.futures
import functools
import io
import logging
import mmap
import pathlib
import queue
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kale_dist.errors import NotSerializableError
from kale_dist.snapshot.capture import capture
from kale_dist.wire import blobs


def cells(text, **names):
    """Names of a cell: functions in it travel by value, as a notebook's do."""
    namespace = {"__name__": "__main__", **names}
    exec(text, namespace)
    return namespace


def refuse(fn, *args, **kwargs):
    with pytest.raises(NotSerializableError) as caught:
        capture(fn, args, kwargs, store=blobs.MemoryStore(), label="call")
    assert str(caught.value).startswith(" -> ".join(caught.value.path) + " cannot be sent to another process: ")
    assert isinstance(caught.value.__cause__, Exception)
    return caught.value


class Held:
    """Closes what a test opened."""

    def __init__(self, value, close):
        self.value, self.close = value, close


def generator():
    yield 1


async def coroutine():
    pass


def closed_coroutine():
    made = coroutine()
    return Held(made, made.close)


def pool():
    made = concurrent.futures.ThreadPoolExecutor(1)
    return Held(made, made.shutdown)


def opened(mode):
    made = pathlib.Path("/dev/null").open(mode)  # noqa: SIM115 - closed by the fixture
    return Held(made, made.close)


def handler():
    return Held(logging.StreamHandler(io.StringIO()), lambda: None)


CULPRITS = {
    "a lock": (lambda: Held(threading.Lock(), lambda: None), "_thread.lock", "lock", "__getstate__"),
    "a reentrant lock": (lambda: Held(threading.RLock(), lambda: None), "_thread.RLock", "lock", "__getstate__"),
    "an event": (lambda: Held(threading.Event(), lambda: None), "threading.Event", "lock", "barrier"),
    "a queue": (lambda: Held(queue.Queue(), lambda: None), "queue.Queue", "lock", "inside the function"),
    "a text file": (lambda: opened("w"), "_io.TextIOWrapper", "open file", "from its path"),
    "a binary file": (lambda: opened("rb"), "_io.BufferedReader", "open file", "from its path"),
    "a map": (lambda: (m := mmap.mmap(-1, 10)) and Held(m, m.close), "mmap.mmap", "open file", "from its path"),
    "a socket": (lambda: (s := socket.socket()) and Held(s, s.close), "socket.socket", "network connection", "Connect inside"),
    "a generator": (lambda: Held(generator(), lambda: None), "generator", "generator", "list of its items"),
    "a coroutine": (closed_coroutine, "coroutine", "generator", "function that makes it"),
    "a database": (lambda: (c := sqlite3.connect(":memory:")) and Held(c, c.close), "sqlite3.Connection", "database", "connect inside"),
    "a thread pool": (pool, "concurrent.futures.thread.ThreadPoolExecutor", "pool", "Start it inside"),
    "a thread": (lambda: Held(threading.Thread(), lambda: None), "threading.Thread", "thread", "Start it inside"),
    "a handler": (handler, "logging.StreamHandler", "handler", "getLogger"),
    "a weak reference": (lambda: Held(weakref.ref(Held), lambda: None), "weakref.ReferenceType", "weak reference", "object itself"),
    "a weak dictionary": (lambda: Held(weakref.WeakValueDictionary(), lambda: None), "weakref.WeakValueDictionary", "weak", "itself"),
    "an event loop": (lambda: (e := asyncio.new_event_loop()) and Held(e, e.close), "asyncio.unix_events._UnixSelectorEventLoop", "thread", "inside"),
}  # fmt: skip


@pytest.fixture(params=CULPRITS)
def culprit(request):
    make, type_name, problem, remedy = CULPRITS[request.param]
    held = make()
    yield held.value, type_name, problem, remedy
    held.close()


def test_a_global_is_named_with_a_remedy(culprit):
    value, type_name, problem, remedy = culprit
    step = cells("def train_step(): return db", db=value)["train_step"]
    error = refuse(len, [], train_step=step)
    assert error.path == ("train_step", "global db", type_name)
    assert problem in error.problem
    assert remedy in error.remedy


@pytest.fixture
def log():
    with pathlib.Path("/dev/null").open("w") as file:
        yield file


def test_a_closure(log):
    made = cells("def make(log):\n    def step(): return log\n    return step")["make"](log)
    assert refuse(len, train_step=made).path == ("train_step", "closure log", "_io.TextIOWrapper")


def test_lambdas_in_lambdas(log):
    inner = cells("f = lambda log: (lambda x: (lambda y: log))")["f"](log)
    outer = cells("def make(inner):\n    return lambda: inner")["make"](inner)
    assert refuse(outer).path == ("<lambda>", "closure inner", "closure log", "_io.TextIOWrapper")
    capture(lambda: lambda x: lambda y: x + y, (), {}, store=blobs.MemoryStore(), label="fine")


def test_helpers_of_helpers(log):
    namespace = cells("def a(): return b()\ndef b(): return c['k'][1]", c={"k": [0, log]})
    assert refuse(len, train_step=namespace["a"]).path == (
        "train_step", "global b", "global c", "['k']", "[1]", "_io.TextIOWrapper",
    )  # fmt: skip


def test_defaults_partials_methods_and_function_attributes(log):
    step = cells("def step(x=None, *, y=None): pass")["step"]
    step.__kwdefaults__ = {"y": log}
    assert refuse(len, step=step).path == ("step", "default y", "_io.TextIOWrapper")
    step.__kwdefaults__ = None
    step.__defaults__ = (log,)
    assert refuse(len, step=step).path == ("step", "a default", "_io.TextIOWrapper")
    step.__defaults__ = None
    assert refuse(len, f=functools.partial(step, 1, x=log)).path == ("f", "partial's argument x", "_io.TextIOWrapper")
    step.log = log
    assert refuse(len, step=step).path == ("step", "attribute log", "_io.TextIOWrapper")
    trainer = cells("class T:\n    def step(self): pass\nt = T()")["t"]
    trainer.log = log
    assert refuse(len, step=trainer.step).path == ("step", "self", "attribute log", "_io.TextIOWrapper")


def test_class_attributes_and_slots(log):
    namespace = cells("class A:\n    __slots__ = ('x',)\na = A()\nclass B:\n    log = None\nb = B()")
    namespace["a"].x = log
    assert refuse(len, namespace["a"]).path[-2:] == ("attribute x", "_io.TextIOWrapper")
    namespace["B"].log = log
    assert refuse(len, namespace["b"]).path[1:] == ("class B", "attribute log", "_io.TextIOWrapper")


class Words(Dataset):
    def __init__(self):
        self.lock = threading.Lock()

    def __len__(self):
        return 1


def test_arguments_of_the_training_call_are_named(log):
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].hook = lambda: log
    loader = DataLoader(Words())
    assert refuse(len, model=model).path == (
        "model",
        "attribute 0",
        "attribute hook",
        "closure log",
        "_io.TextIOWrapper",
    )
    error = refuse(len, train_data_loader=loader)
    assert error.path == ("train_data_loader", "attribute dataset", "attribute lock", "_thread.lock")
    assert "__getstate__" in error.remedy


def test_positional_arguments_have_their_parameters_names(log):
    def fn(first, second, *rest):
        pass

    assert refuse(fn, 1, log).path[0] == "second"
    assert refuse(fn, 1, 2, 3, log).path[0] == "argument 4"
    assert refuse(print, log).path[0] == "argument 1"


class Stubborn:
    def __reduce__(self):
        raise RuntimeError("I will not")


class Odd:
    @property
    def __dict__(self):
        raise ValueError("no")

    def __reduce__(self):
        return Odd, (Stubborn(),)


def test_a_class_that_refuses_is_named_with_its_own_words():
    error = refuse(len, [{"a": Stubborn()}])
    assert error.path[1:3] == ("[0]", "['a']")
    assert "I will not" in error.problem
    assert "__getstate__" in error.remedy


def test_what_no_walk_can_reach_is_still_named_by_type():
    assert refuse(len, Odd()).path == ("the call", "(something in it)", f"{__name__}.Stubborn")


def test_links_too_deep_for_pickle():
    chain = []
    for _ in range(sys.getrecursionlimit() * 50):
        chain = [chain]
    error = refuse(len, chain)
    assert "nested too deeply" in error.problem


@pytest.mark.nightly
def test_the_search_is_quick_beside_large_data(log):
    data = [list(range(100)) for _ in range(4_000)]
    tensors = [torch.zeros(1000) for _ in range(1000)]
    started = time.thread_time()
    assert refuse(len, data, {"t": tensors, "z": {"log": log}}).path[-2:] == ("['log']", "_io.TextIOWrapper")
    assert time.thread_time() - started < 10


def test_a_process_is_named():
    with subprocess.Popen(["true"]) as process:
        assert refuse(len, process).path[-1] == "subprocess.Popen"
