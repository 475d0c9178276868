"""An argument of a verb stands in its signature, its docstring and the class that carries it: with a part of it left out, one of these fails."""

import dataclasses
import inspect
import re

import pytest

import kale_dist as kd
from kale_dist import wire
from kale_dist.calls import options
from kale_dist.job.spec.job_spec import JobSpec, Request, Settled, Topology
from kale_dist.places.orders import order_of
from kale_dist.wire import Order, Policy
from kale_dist.worker.training.settings import Training

OF_BOTH = set(options.NAMES)
CARRIED = {
    # The checkpoint that `resume_from` names is a part of the `JobSpec`.
    kd.distribute: OF_BOTH | {field.name for field in dataclasses.fields(Training)} | {"resume_from"},
    kd.launch: OF_BOTH | {"fn", "args", "kwargs"},
}


def documented(verb):
    section = inspect.getdoc(verb).partition("\nArgs:\n")[2].partition("\n\nReturns:\n")[0]
    return re.findall(r"^    \*{0,2}(\w+): ", section, re.MULTILINE)


@pytest.mark.parametrize("verb", CARRIED)
def test_signature_docstring_and_carriers_have_the_same_arguments(verb):
    signature = list(inspect.signature(verb).parameters)
    assert documented(verb) == signature
    assert set(signature) == CARRIED[verb]


def test_what_is_left_out_means_the_same_to_the_call_and_to_the_loop():
    given = inspect.signature(kd.distribute).parameters
    for field in dataclasses.fields(Training):
        if field.default is not dataclasses.MISSING:
            assert given[field.name].default == field.default, field.name


def test_all_that_a_call_says_to_agents_is_in_the_order():
    others = ((field, 7 if field.default is None else not field.default) for field in dataclasses.fields(Policy))
    policy = Policy(**{field.name: type(field.default or value)(value) for field, value in others})
    assert all(getattr(policy, field.name) != field.default for field in dataclasses.fields(Policy))
    spec = JobSpec(
        name="a", label="f", kind="call", snapshot="", topology=Topology(number_of_processes=2), policy=policy
    )
    assert order_of(spec).policy == policy
    order = order_of(spec, used_restarts=3)
    assert (order.policy, order.used_restarts) == (policy, 3)
    assert wire.decode(Order, wire.encode(order_of(spec))).policy == policy


def test_a_stage_has_all_that_the_one_before_has():
    topology = Topology(number_of_processes=2)
    request = Request(label="f", kind="call", topology=topology, seed=3, image="x:1", threads=2)
    settled = Settled.of(request, name="a")
    spec = JobSpec.complete(settled, None, snapshot="ab", blobs=("ab",), snapshot_bytes=5)
    for field in dataclasses.fields(Request):
        if field.name != "name":
            assert getattr(spec, field.name) == getattr(settled, field.name) == getattr(request, field.name)
    assert (spec.name, spec.snapshot, spec.blobs, spec.snapshot_bytes) == ("a", "ab", ("ab",), 5)
