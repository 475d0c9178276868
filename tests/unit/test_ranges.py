"""`number_of_processes` as a range: which sizes a job may have, where it is one number, and who refuses it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist import strategies
from kale_dist.calls import request
from kale_dist.calls.options import NAMES, Options
from kale_dist.calls.request import Machine
from kale_dist.places.orders import order_of
from kale_dist.worker.training.settings import Training

FOUR_CORES = Machine(cores=4, gpus=0)


def layers(number=8):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(number)))
    loader = DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "train_data_loader": loader, "criterion": nn.CrossEntropyLoss(), "optimizer": optimizer}


def asked(machine=FOUR_CORES, **changes):
    options = Options(**{name: value for name, value in changes.items() if name in NAMES})
    trained = {**layers(), **{name: value for name, value in changes.items() if name not in NAMES}}
    training = Training(**{**trained, "strategy": strategies.resolve(trained.get("strategy"))})
    return request.checked(training, options, machine)


def pods(**settings):
    return kd.Kubernetes(image="team/torch:2", namespace="team-a", **settings)


def test_on_a_cluster_every_size_that_the_strategy_can_have_is_allowed():
    call = asked(number_of_processes=(2, 5), on=pods())
    assert call.request.topology.sizes == (2, 3, 4, 5)
    assert call.request.topology.number_of_processes == 5
    halves = kd.strategies.Mesh(pipeline=2)
    assert asked(number_of_processes=(2, 9), on=pods(), strategy=halves).request.topology.sizes == (2, 4, 6, 8)


def test_the_agents_get_the_sizes(monkeypatch):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    for given, sizes in [((2, 4), (2, 3, 4)), (3, (3,)), ([2, 2], (2,))]:
        spec = kd.render(**layers(), number_of_processes=given, on=pods()).spec
        assert order_of(spec).sizes == sizes


@pytest.mark.parametrize(
    ("machine", "given", "found"),
    [
        (FOUR_CORES, (2, 8), 4),
        (FOUR_CORES, (1, 3), 3),
        (Machine(cores=4, gpus=2), (1, 8), 2),
        (Machine(cores=4, memory_bytes=70 << 20), (1, 8), 2),
    ],
)
def test_on_this_machine_it_is_the_most_that_there_is_room_for(machine, given, found):
    call = asked(machine, number_of_processes=given)
    assert (call.request.topology.number_of_processes, call.request.topology.sizes) == (found, ())
    assert any("number_of_processes" in note for note in call.notes)


def test_the_least_is_asked_for_where_there_is_not_even_room_for_that():
    call = asked(number_of_processes=(6, 8))
    assert call.request.topology.number_of_processes == 6
    assert any("4 cores" in warning for warning in call.warnings)


def test_losses_are_survived_unless_the_call_says_otherwise(refusal):
    assert asked(number_of_processes=(1, 3)).request.policy.max_restarts == 10
    assert asked(number_of_processes=(1, 3), max_restarts=2).request.policy.max_restarts == 2
    assert asked(number_of_processes=3).request.policy.max_restarts == 0
    assert refusal(lambda: asked(number_of_processes=(1, 3), max_restarts=0)).argument == "max_restarts"


def test_a_batch_that_changes_with_the_pods_is_said():
    said = [any("split_batches" in note for note in asked(number_of_processes=(1, 3), on=pods(), split_batches=split).notes)
            for split in (False, True)]  # fmt: skip
    assert said == [True, False]


@pytest.mark.parametrize("given", [(0, 2), (3, 2), (1, 2, 3), (1,), (1, 2.0), (True, 2), "2-8"])
def test_a_range_is_two_whole_numbers(given, refusal):
    assert refusal(lambda: asked(number_of_processes=given)).argument == "number_of_processes"


@pytest.mark.parametrize(
    "settings", [{"kind": "mpi"}, {"kind": "tf"}, {"kind": "train", "trainer": "2.3"}, {"master": False}]
)
def test_kinds_whose_lost_pods_do_not_come_back_refuse_it(settings, refusal):
    assert refusal(lambda: asked(number_of_processes=(1, 3), on=pods(**settings))).argument == "number_of_processes"


@pytest.mark.parametrize("settings", [{}, {"trainer": "2.1", "runtime": "gold", "runtime_version": 1}])
def test_a_train_job_with_a_runtime_of_ours_takes_it_as_does_one_whose_runtime_is_not_known_yet(settings):
    call = asked(number_of_processes=(1, 3), on=pods(kind="train", **settings))
    assert call.request.topology.sizes == (1, 2, 3)


def test_a_range_that_fits_into_one_pod_is_one_number():
    call = asked(number_of_processes=(2, 4), on=pods(kind="job", processes_per_pod=4))
    assert (call.request.topology.sizes, call.request.topology.number_of_pods) == ((), 1)


def test_a_job_that_cannot_become_larger_says_so():
    said = [any("more pods" in note for note in asked(number_of_processes=(1, 3), on=pods(), checkpoint_every=every).notes)
            for every in (1, 5, "auto", "10 min")]  # fmt: skip
    assert said == [True, True, False, False]


def test_pods_that_come_and_go_need_checkpoints(refusal):
    error = refusal(lambda: asked(number_of_processes=(1, 3), on=pods(), checkpoint_every=None))
    assert error.argument == "checkpoint_every"
    asked(number_of_processes=(1, 3), checkpoint_every=None)


def test_functions_refuse_it(refusal):
    assert refusal(lambda: kd.render(print, number_of_processes=(1, 3))).argument == "number_of_processes"


def test_a_strategy_that_can_have_none_of_the_sizes_says_why(refusal):
    thirds = kd.strategies.Mesh(pipeline=7)
    assert refusal(lambda: asked(number_of_processes=(2, 4), on=pods(), strategy=thirds)).argument == "strategy"
