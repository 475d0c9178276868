"""What objects hold besides weights comes back by its path, in place."""

import collections
import copy
import dataclasses
import pathlib
import pickle
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

from kale_dist.snapshot.changes import Arrived, Changes, put, shown


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.blocks = [nn.Linear(2, 2)]
        self.alpha = torch.zeros(3, requires_grad=True)
        self.table = {"mean": torch.zeros(2), "n": 0}
        self.queue = collections.deque([1, 2], maxlen=2)
        self.array = np.zeros(3)
        self.losses, self.count, self.shape = [], 0, None
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("lasting", torch.zeros(2))


def there_and_back(change, here=None):
    """Change a copy as a rank does, and write what has changed into the original."""
    here = Net() if here is None else here
    there = copy.deepcopy(here)
    covered = {id(part) for part in there.modules()} if isinstance(there, nn.Module) else ()
    arrived = Arrived(lambda: {"model": there}, covered=covered)
    change(there)
    sent, stay = arrived.changes()
    problems = put({"model": here}, [sent])
    return here, names(sent), problems, stay


def names(changes):
    return [shown(path) for path, _ in changes.places]


def test_nothing_comes_back_of_what_the_state_dict_has_or_did_not_change():
    def change(net):
        with torch.no_grad():
            net.net.weight.add_(1)
            net.lasting.add_(1)

    assert there_and_back(change)[1:] == ([], [], [])


def test_tensors_are_written_in_place_however_they_were_changed():
    here = Net()
    mine = here.alpha, here.blocks[0].weight, here.table, here.table["mean"], here.seen, here.array

    def change(net):
        net.alpha.data.add_(1)
        net.blocks[0].weight.detach().numpy()[0] = 5
        net.table["mean"] = net.table["mean"] + 2
        net.seen = net.seen * 0 + 3
        net.array += 4

    _, found, *rest = there_and_back(change, here)
    assert set(found) == {"model.blocks[0].weight", "model.alpha", "model.table.mean", "model.array", "model.seen"}
    assert rest == [[], []]
    now = here.alpha, here.blocks[0].weight, here.table, here.table["mean"], here.seen, here.array
    assert all(one is other for one, other in zip(mine, now, strict=True))
    assert here.alpha.requires_grad
    assert [here.alpha.tolist(), here.blocks[0].weight[0].tolist(), here.seen.tolist()] == [[1] * 3, [5, 5], [3, 3]]
    assert (here.table["mean"].tolist(), here.array.tolist()) == ([2, 2], [4] * 3)


def test_numbers_and_lists_come_back_and_new_objects_are_named():
    def change(net):
        net.count += 7
        net.losses.append(0.5)
        net.queue.append(9)
        net.table["new"] = net.fresh = torch.ones(2)
        net.shape = net.fresh.shape
        net.blocks.append(nn.Linear(1, 1))

    here, _, problems, stay = there_and_back(change)
    assert (here.count, here.losses, [*here.queue], here.shape, problems) == (7, [0.5], [2, 9], (2,), [])
    assert here.table["new"] is here.fresh
    assert here.fresh.tolist() == [1, 1]
    assert stay == ["model.blocks"]


def test_two_names_of_one_tensor_stay_one():
    def change(net):
        net.best = net.alpha
        net.alpha.data.add_(1)

    here = there_and_back(change)[0]
    assert here.best is here.alpha
    assert here.best.tolist() == [1] * 3


def test_a_queue_that_moves_on_keeps_its_tensors():
    here = {"queue": [torch.zeros(1), torch.ones(1)]}
    first, second = here["queue"]
    here["first"] = first

    there = copy.deepcopy(here)
    arrived = Arrived(lambda: {"args": there})
    there["queue"] = [*there["queue"][1:], torch.full((1,), 2.0)]
    sent, _ = arrived.changes()
    for objects in (here, later := copy.deepcopy(here)):
        assert put({"args": objects}, [copy.deepcopy(sent)]) == []
    # As a later call that resumes from this one does.
    assert put({"args": later}, [sent]) == []
    assert [one.item() for one in later["queue"]] == [1, 2]
    assert here["queue"][0] is second
    assert [one.item() for one in here["queue"]] == [1, 2]
    assert here["first"] is first
    assert first.item() == 0


@pytest.mark.parametrize("value", [float("nan"), 1.5, "text", None, (1, float("nan")), np.float32(1), 1 + 2j, b"b"])
def test_a_value_that_did_not_change_is_not_sent_and_another_one_is(value):
    args = {"args": {"a": value}}
    arrived = Arrived(lambda: args)
    assert (names(arrived.changes()[0]), arrived.changes()[1]) == ([], [])
    here = there_and_back(lambda there: there.update(a=value), {"a": 0})[0]
    assert repr(here["a"]) == repr(value)


def test_a_second_optimizer_comes_back_with_its_state_and_a_name_that_means_something_else_is_named():
    weight = nn.Parameter(torch.ones(2))
    here = {"opt": torch.optim.Adam([weight]), "best": None}
    there = copy.deepcopy(here)
    arrived = Arrived(lambda: there)
    weight = there["opt"].param_groups[0]["params"][0]
    weight.sum().backward()
    there["opt"].step()
    there["best"] = 1.0
    sent, stay = arrived.changes()
    assert put(here, [sent]) == []
    assert stay == ["best"]
    assert here["opt"].state_dict()["state"][0]["step"] == 1


def test_lists_that_hold_themselves_and_objects_that_raise_end():
    class Odd:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    ring = [Odd()]
    ring.append(ring)
    arrived = Arrived(lambda: {"ring": ring})
    ring.append(3)
    assert names(arrived.changes()[0]) == ["ring"]


def test_a_checkpoint_holds_what_came_back(tmp_path):
    from kale_dist.worker.training import checkpoint
    from kale_dist.worker.training.contents import Checkpoint, Given, Resume

    here = {"set": {1}, "array": np.zeros(2), "deque": collections.deque(maxlen=3), "count": collections.Counter()}
    there = copy.deepcopy(here)
    arrived = Arrived(lambda: {"args": there})
    there["set"].add((2, 3))
    there["array"][1] = 5
    there["deque"].extend([b"x", 1j])
    there["count"]["a"] += 2
    given = Given(
        optimizer=(), options=(), scheduler=(), schedule={}, frozen=(), strategy="{}", world_size=1, batch="", state=(),
        callbacks=(), classes={}, snapshot="",
    )  # fmt: skip
    kept = checkpoint.collect(Checkpoint(epoch=1, model={}, resume=Resume(given=given, changes=arrived.changes()[:1])))
    assert kept["left_out"] == ()
    path = pathlib.Path(tmp_path, "checkpoint.pt")
    checkpoint.save(path, kept)
    assert put({"args": here}, checkpoint.read(path).resume.changes) == []
    assert repr(here) == repr(there)


@pytest.mark.parametrize("path", [("args", "__class__", "n"), ("args", "f", "__globals__", "n"), ("no", "n")])
def test_what_somebody_else_wrote_reaches_no_class_and_runs_nothing(path):
    here = types.SimpleNamespace(f=there_and_back, d={"f": pytest.fail})
    given = Changes(places=((path, True),), values=pickle.dumps([1]), tensors=())
    assert all("args" in problem for problem in put({"args": here}, [given]))
    assert vars(here) == {"f": there_and_back, "d": {"f": pytest.fail}}
    assert "n" not in there_and_back.__globals__
    evil = Changes(places=((("args", "n"), True),), values=pickle.dumps([print]), tensors=())
    assert put({"args": here}, [evil]) == ["args.n (UnpicklingError: builtins.print is no plain value)"]
    evil = dataclasses.replace(evil, values=b"\x80\x02](X\x04\0\0\0argsX\x01\0\0\0dX\x01\0\0\0ftQ)Ra.")
    assert put({"args": here}, [evil]) == ["args.n (TypeError: '_Inert' object is not callable)"]


# -- random graphs and edits -------------------------------------------------------------------------------------------


class Node:
    pass


def grown(draw, depth, made):
    """A random object, sometimes one that is there already."""
    if made and draw.random() < 0.25:
        return draw.choice(made)
    kind = draw.choice(["tensor", "array", "number"] if depth == 0 else ["list", "dict", "node", "module", "tensor"])
    if kind == "number":
        return draw.random()
    if kind in ("tensor", "array"):
        value = torch.rand(draw.randint(1, 3))
        value = value if kind == "tensor" else value.numpy().copy()
    else:
        value = {"list": [], "dict": {}, "node": Node(), "module": nn.Module()}[kind]
    made.append(value)
    for number in range(draw.randint(1, 4) if kind in ("list", "dict", "node", "module") else 0):
        hang(value, number, grown(draw, depth - 1, made))
    return value


def hang(owner, number, value):
    name = f"k{number}"
    if isinstance(owner, list):
        owner.insert(number, value)
    elif isinstance(owner, dict):
        owner[name] = value
    elif not isinstance(owner, nn.Module) or name not in owner._modules:
        # A module in the place of another value is registered beside it.
        isinstance(value, nn.Module) and vars(owner).pop(name, None)
        setattr(owner, name, value)


def parts(value):
    if isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, nn.Module):
        return {name: part for name, part in {**vars(value), **value._modules}.items() if name.startswith("k")}
    return value if isinstance(value, dict) else vars(value) if isinstance(value, Node) else {}


def everything(root):
    """Objects by the order in which they are met."""
    met, left = {}, [root]
    while left:
        value = left.pop()
        if id(value) not in met:
            met[id(value)] = value
            left += [part for part in reversed(parts(value).values()) if not isinstance(part, float | int)]
    return [*met.values()]


def edit(draw, root):
    found = everything(root)
    value = draw.choice(found)
    if isinstance(value, torch.Tensor | np.ndarray):
        value += 1
    elif isinstance(value, list) and value and draw.random() < 0.4:
        value.pop(draw.randrange(len(value)))
    elif isinstance(value, dict) and value and draw.random() < 0.2 and value is not root:
        value.popitem()
    elif value is not root:
        fresh = [draw.random(), torch.rand(2), [torch.rand(1), {"k0": 3}], draw.choice(found[1:])]
        hang(value, draw.randint(0, 5), draw.choice(fresh))


@pytest.mark.parametrize("seed", range(40))
def test_after_random_edits_both_are_equal_and_what_kept_its_shape_is_the_same_object(seed):
    draw = random.Random(seed)
    for _ in range(10):
        made = []
        here = {"root": [grown(draw, 3, made) for _ in range(3)]}
        there, mine = copy.deepcopy(here), everything(here)
        twins = dict(zip(map(id, everything(there)), mine, strict=True))
        arrived = Arrived(lambda there=there: there)
        keep = everything(there)
        for _ in range(draw.randint(1, 6)):
            edit(draw, there)
        sent, stay = arrived.changes()
        known = Arrived(lambda here=here: here)
        # Of two ranks, and once more, as after a restart.
        assert (put(here, [sent, sent], arrived=known), stay) == ([], [])
        assert put(here, [sent], arrived=known) == []
        same(there, here, twins, {})
        del keep


def same(there, here, twins, met):
    if isinstance(there, float | int):
        assert there == here
    elif id(there) in met:
        assert met[id(there)] is here
    else:
        met[id(there)] = here
        assert type(there) is type(here)
        assert twins.get(id(there), here) is here
        if isinstance(there, torch.Tensor | np.ndarray):
            assert np.array_equal(there, here)
        assert parts(there).keys() == parts(here).keys()
        for name, part in parts(there).items():
            same(part, parts(here)[name], twins, met)
