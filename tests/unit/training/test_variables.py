"""A step's variables, kept after any batch and set in the step called again: it returns what it would have returned."""

import collections
import contextlib
import io
import itertools
import random

import numpy as np
import pytest
import torch

from kale_dist.worker.training.variables import Unkept, Variables

BATCHES = 9

LOOP = """
class Passing:
    def __init__(self, loader):
        self.loader, self.index = loader, 0 if loader.first is not None else loader.start
        loader.makes(self)

    def __iter__(self):
        return self

    def __next__(self):
        self.loader.asked(self)
        if self.index == self.loader.batches:
            raise StopIteration
        self.index += 1
        return torch.tensor(float(self.index))


class Loader:
    # Saves before a batch, or begins at one with what was saved.

    def __init__(self, batches, save=None, start=0, saved=None):
        self.batches, self.save, self.start, self.saved = batches, save, start, saved
        self.state = self.variables = self.first = None
        self.is_loaded = saved is None

    def __iter__(self):
        return Passing(self)

    def __len__(self):
        return self.batches

    def makes(self, passing):
        if self.first is None:
            self.first, self.variables = passing, Variables(call.__code__, [self], passing)

    def asked(self, passing):
        if passing is not self.first:
            return
        if passing.index == self.start:
            self.variables.begin()
            if self.saved is not None:
                self.is_loaded = self.variables.load(self.saved)
        elif passing.index == self.save:
            self.state = self.variables.state()


def call(step, loader):
    return step(loader)
"""

# As the library's own frames, those of this loop are passed over.
NAMES = {"__name__": "kale_dist.worker.training.loop_of_tests", "torch": torch, "Variables": Variables}
exec(LOOP, NAMES)


def run(step, **options):
    """Call a step as the training loop does."""
    loader = NAMES["Loader"](BATCHES, **options)
    return NAMES["call"](step, loader), loader


def numbers(loader):
    total, last = 0.0, None
    for i, x in enumerate(loader):
        total += x.item() * i
        last = i
    return total, last


def counted_from(loader, start=5):
    return [(i, x.item()) for i, x in enumerated(loader, start)]


def enumerated(loader, start):
    yield from enumerate(loader, start)


def containers(loader):
    plain, byname, seen, queue = [], {}, set(), collections.deque(maxlen=3)
    count, groups = collections.Counter(), collections.defaultdict(list)
    for x in loader:
        n = int(x)
        plain.append((n, [n]))
        byname[str(n)] = {"n": n, "half": n / 2}
        seen.add(n % 4)
        queue.append(n)
        count[n % 3] += 1
        groups[n % 2].append(n)
    return plain, byname, sorted(seen), list(queue), dict(count), dict(groups)


def tensors(loader):
    hidden, best, array = torch.zeros(3), None, np.zeros(2, dtype=np.float32)
    for x in loader:
        hidden = hidden * 0.5 + x
        if best is None or x > best:
            best = x.clone()
        array += float(x)
    return hidden.tolist(), best.item(), array.tolist()


class Meter:
    def __init__(self):
        self.total, self.parts = 0.0, []

    def add(self, value):
        self.total += value
        self.parts.append(Meter.named(value))

    @staticmethod
    def named(value):
        return {"value": value}


def objects(loader):
    meter = alias = Meter()
    for x in loader:
        meter.add(x.item())
        alias.total += 1
    return meter.total, meter.parts, alias is meter


def closures(loader):
    total, steps = 0.0, iter(())

    def add(value):
        nonlocal total
        total += value

    def counter():
        n = 0

        def count():
            nonlocal n
            n += 1
            return n

        return count

    steps = counter()
    for x in loader:
        add(x.item() * steps())
    return total


def swapped(loader):
    one, two = [0], [1]
    for x in loader:
        one.append(int(x))
        one, two = two, one
    return one, two


def split_alias(loader):
    one = two = []
    for x in loader:
        one = [*one, int(x)]
        two.append(-int(x))
    return one, two


def joined_alias(loader):
    one, two = [], [7]
    for x in loader:
        if x == 2:
            two = one
        one.append(int(x))
    return one, two, one is two


def context_and_exceptions(loader):
    bad, total = 0, 0
    with contextlib.ExitStack() as stack:
        stack.callback(int)
        for x in loader:
            try:
                total += int("bad" if x % 2 else x)
            except ValueError:
                bad += 1
                continue
            finally:
                total += 100
        total += 1000
    return total, bad


def while_inside(loader):
    total = 0
    for x in loader:
        k = 0
        while k < 3:
            k += 1
            total += k * int(x)
            for j in range(k):
                total += j
            values = [v + k for v in range(3)]
        total += sum(values)
    return total


def two_passes(loader):
    total = 0
    for part in range(2):
        for x in loader:
            total += int(x) * (part + 1)
    return total


def first_use_later(loader):
    for i, x in enumerate(loader):
        total = total * 2 + int(x) if i else int(x)  # noqa: F821 - set in the first batch
    return total


def grouped(loader):
    def groups():
        group = []
        for x in loader:
            group.append(int(x))
            if len(group) == 2:
                yield group
                group = []
        yield group

    found = []
    for i, group in enumerate(groups()):
        found.append((i, list(group)))
    return found


def helper(loader):
    found = {"sum": 0}

    def inner(stats, depth):
        if depth:
            return inner(stats, depth - 1)
        for x in loader:
            stats["sum"] += int(x)
            stats.setdefault("list", []).append(int(x))
        return len(stats)

    return inner(found, 3), found


def shadowing(loader):
    enumerate, list, self, number = 0, [], {}, 0  # noqa: A001
    for node in loader:
        enumerate += int(node)  # noqa: A001
        list.append(enumerate)
        self["x"] = enumerate
        number, keeper = enumerate, number
    return enumerate, list, self, number, keeper


def by_locals(loader):
    for x in loader:
        value = locals().get("value", 0) + int(x)
    return value


def files(loader):
    out, total = io.StringIO(), 0
    for x in loader:
        print(x, file=out)
        total += int(x)
    return total


def last_of_all(loader):
    for x in loader:  # noqa: B007 - what is left of it counts
        pass
    return x.item()


EXACT = [
    numbers, containers, tensors, objects, closures, swapped, split_alias, joined_alias, context_and_exceptions, while_inside,
    two_passes, first_use_later, grouped, helper, shadowing, by_locals, files, last_of_all,
]  # fmt: skip


@pytest.mark.parametrize("step", EXACT)
@pytest.mark.parametrize("after", range(1, BATCHES))
def test_a_step_goes_on_where_it_was(step, after):
    expected, loader = run(step, save=after)
    assert loader.state is not None
    found, again = run(step, start=after, saved=loader.state)
    assert again.is_loaded
    assert found == expected


@pytest.mark.parametrize("step", EXACT)
def test_a_step_goes_on_twice(step):
    expected, loader = run(step, save=2)
    _, second = run(step, start=2, saved=loader.state, save=6)
    found, _ = run(step, start=6, saved=second.state)
    assert found == expected


# -- what cannot go on ---------------------------------------------------------------------------------------------------


def zipped(loader):
    return [a + b for a, b in zip(loader, itertools.count(), strict=False)]


def zipped_loop(loader):
    total = 0
    for x, k in zip(loader, itertools.count(), strict=False):
        total += int(x) * k
    return total


def enumerated_zip(loader):
    total = 0
    for _, (x, k) in enumerate(zip(loader, range(100), strict=False)):
        total += int(x) * k
    return total


def zipped_enumerate(loader):
    total = 0
    for (_, x), k in zip(enumerate(loader), range(100), strict=False):
        total += int(x) * k
    return total


def sliced(loader):
    total = 0
    for x in itertools.islice(loader, 8):
        total += int(x)
    return total


def by_next(loader):
    total, it = 0, iter(loader)
    while (x := next(it, None)) is not None:
        total += int(x)
    return total


def first_then_rest(loader):
    it = iter(loader)
    total = int(next(it))
    for x in it:
        total = total * 2 + int(x)
    return total


def comprehension(loader):
    return [int(x) for x in loader]


def nested_comprehension(loader):
    return {int(x) * k for x in loader for k in range(3)}


def summed(loader):
    return sum(int(x) for x in loader)


def folded(loader):
    return sum(map(int, loader))


def listed(loader):
    return len(list(loader))


def shared_by_loops(loader):
    total, it = 0, iter(loader)
    for part in range(5):
        for i, x in enumerate(it):
            total += int(x) * part
            if i == 1:
                break
    return total


def one_enumerate_in_loops(loader):
    total, it = 0, enumerate(loader)
    for part in range(5):
        for i, x in it:
            total += int(x) * part
            if i % 2:
                break
    return total


def made_once_in_a_loop(loader):
    total = 0
    for part in range(5):
        if not part:
            it = iter(loader)
        for x in it:
            total += int(x) * part
            if int(x) % 2:
                break
    return total


def helper_called_often(loader):
    it, total = iter(loader), 0

    def some(n):
        found = 0
        for i, x in enumerate(it):
            found += int(x)
            if i == n:
                break
        return found

    for n in range(1, 4):
        total += n * some(n)
    return total


def carries_an_iterator(loader):
    others, total = iter(range(100)), 0
    for x in loader:
        total += int(x) * next(others)
    return total


def carries_a_generator(loader):
    others, total = (k * k for k in range(100)), 0
    for x in loader:
        total += int(x) * next(others)
    return total


def carries_randomness(loader):
    own, total = random.Random(1), 0
    for x in loader:
        total += int(x) * own.random()
    return total


def carries_a_graph(loader):
    weight = torch.ones((), requires_grad=True)
    total = weight * 0
    for x in loader:
        total = total + weight * x
    return total.item()


def carries_views(loader):
    whole = torch.zeros(2)
    first = whole[0]
    for x in loader:
        whole += x
    return first.item()


def carries_another_object(loader):
    meter = None
    for x in loader:
        meter = meter or Meter()
        meter.add(x.item())
    return meter.total


def deletes(loader):
    fresh, total = 1, 0
    for x in loader:
        if x == 1:
            del fresh
        try:
            total += fresh
        except UnboundLocalError:
            total += int(x)
    return total


def too_large(loader):
    hidden = torch.zeros(17 << 20)
    for x in loader:
        hidden += x
    return hidden[0].item()


class Looking:
    def __init__(self, loader):
        self.it = iter(loader)
        self.held = next(self.it, None)

    def __iter__(self):
        return self

    def __next__(self):
        if self.held is None:
            raise StopIteration
        held, self.held = self.held, next(self.it, None)
        return held


def looking_ahead(loader):
    total = 0
    for x in Looking(loader):
        total += int(x)
    return total


@pytest.mark.parametrize(
    "step",
    [
        zipped, zipped_loop, enumerated_zip, zipped_enumerate, sliced, by_next, first_then_rest, comprehension,
        nested_comprehension, summed, folded, listed, shared_by_loops, one_enumerate_in_loops, made_once_in_a_loop,
        helper_called_often, carries_an_iterator, carries_a_generator, carries_randomness, carries_a_graph, carries_views,
        carries_another_object, deletes, too_large, looking_ahead, counted_from,
    ],
)  # fmt: skip
def test_a_step_that_could_not_go_on_exactly_is_refused(step):
    with pytest.raises(Unkept) as refusal:
        run(step, save=6)
    assert str(refusal.value)


def test_another_step_does_not_get_the_variables():
    _, loader = run(numbers, save=3)
    _, again = run(containers, start=3, saved=loader.state)
    assert again.is_loaded is False
