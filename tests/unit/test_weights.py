import copy
import gc
import types

import pytest
import torch

from kale_dist.errors import KaleDistWarning
from kale_dist.job import weights
from kale_dist.snapshot.origin import Origin
from kale_dist.worker.training.result import TrainingResult, one_model, one_optimizer, state_of


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(2, 2)
        self.b = torch.nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.norm = torch.nn.BatchNorm1d(2)
        self.a.bias.requires_grad_(requires_grad=False)


def trained(model, optimizer=None, /, **changes):
    """What a rank sends: the state after a step in a copy."""
    twin = copy.deepcopy((model, optimizer))
    with torch.no_grad():
        for parameter in twin[0].parameters():
            parameter.add_(1)
    return types.SimpleNamespace(state=(),
        **{
            "model": None, "reason": "", "model_state": twin[0].state_dict(),
            "optimizer_state": twin[1].state_dict() if twin[1] else None, "scheduler_state": None, **changes,
        }
    )  # fmt: skip


def objects(model=None):
    model = model or Net()
    return remembered(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def remembered(model, optimizer, *others):
    """As they are when a snapshot is taken; this one has no bytes, so that tensors are copied."""
    return weights.remember(
        model, {"model": model}, Origin(digest="", storages={}, buffers={}, memory=None), optimizer, *others
    )


def load(targets, result, ref="local://j", *, check=True):
    return weights.load(targets, result, ref, check=check)


def test_weights_go_into_the_very_tensors_of_the_notebook():
    targets = objects()
    model = targets.model
    before = dict(model.named_parameters())
    result = trained(model)
    found = load(targets, result)
    assert found.model is model
    assert found.optimizer is targets.optimizer
    assert not found.warnings
    for name, value in model.state_dict().items():
        assert torch.equal(value, result.model_state[name])
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.a.weight is model.b.weight
    assert not model.a.bias.requires_grad
    assert model.b.bias.requires_grad


def test_the_optimizer_gets_its_state_and_settings():
    targets = objects()
    result = trained(targets.model, targets.optimizer)
    result.optimizer_state["param_groups"][0]["lr"] = 0.025
    first = result.optimizer_state["param_groups"][0]["params"][0]
    result.optimizer_state["state"][first] = {"momentum_buffer": torch.ones(2, 2)}
    load(targets, result)
    assert targets.optimizer.param_groups[0]["lr"] == 0.025
    parameter = next(targets.model.parameters())
    assert targets.optimizer.param_groups[0]["params"][0] is parameter
    assert torch.equal(targets.optimizer.state[parameter]["momentum_buffer"], torch.ones(2, 2))


def test_a_scheduler_moves_on():
    targets = objects()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(targets.optimizer, 0.5)
    targets = remembered(targets.model, targets.optimizer, scheduler)
    load(targets, trained(targets.model, scheduler_state={**scheduler.state_dict(), "last_epoch": 7}))
    assert scheduler.last_epoch == 7


class Refusing(torch.optim.lr_scheduler.ExponentialLR):
    def load_state_dict(self, state_dict):
        raise RuntimeError("not mine")


def test_an_object_that_refuses_its_state_is_warned_of_and_the_weights_stay():
    targets = objects()
    scheduler = Refusing(targets.optimizer, 0.5)
    targets = remembered(targets.model, targets.optimizer, scheduler)
    result = trained(targets.model, scheduler_state=scheduler.state_dict())
    found = load(targets, result)
    assert "scheduler: load_state_dict raised RuntimeError: not mine" in found.warnings[0]
    assert torch.equal(targets.model.a.weight, result.model_state["a.weight"])


def change_weight(model):
    with torch.no_grad():
        model.a.weight.mul_(2)


def change_buffer(model):
    model.norm.running_mean.add_(1)


def replace_parameter(model):
    model.b.bias = torch.nn.Parameter(torch.ones(2))


def take_data(model):
    model.b.bias.data = torch.ones(2)


@pytest.mark.parametrize("change", [change_weight, change_buffer, replace_parameter, take_data])
def test_a_model_changed_since_the_call_is_loaded_all_the_same_and_warned_of(change):
    targets = objects()
    result = trained(targets.model)
    change(targets.model)
    found = load(targets, result)
    assert "changed after the job had started" in found.warnings[0]
    assert torch.equal(targets.model.a.weight, result.model_state["a.weight"])


def test_training_mode_gradients_and_looking_are_no_changes():
    targets = objects()
    model = targets.model
    model.eval()
    model.norm.eval()
    model.a(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    assert not weights.changes(targets)


def test_another_job_in_the_same_model_is_named():
    model = Net()
    first, second = objects(model), objects(model)
    load(first, trained(model), "local://one")
    found = load(second, trained(model), "local://two")
    assert "local://one was loaded into it" in found.warnings[0]
    third = objects(model)
    assert not load(third, trained(model), "local://three").warnings


def test_what_does_not_fit_changes_nothing():
    targets = objects()
    before = copy.deepcopy(targets.model.state_dict())
    result = trained(targets.model)
    cases = {
        "keys": {name: value for name, value in result.model_state.items() if name != "a.bias"},
        "float32 (2, 2) in the notebook and float32 (3, 3)": {**result.model_state, "b.weight": torch.ones(3, 3)},
        "float64": {**result.model_state, "norm.running_var": torch.ones(2, dtype=torch.float64)},
    }
    for said, state in cases.items():
        found = load(targets, types.SimpleNamespace(**{**vars(result), "model_state": state}))
        assert said in found.problem
        assert said in found.warnings[0]
        after = targets.model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_structure_that_changed_in_the_rank_gives_a_new_object():
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(2))
    targets = remembered(lazy, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    fresh = torch.nn.Sequential(torch.nn.Linear(3, 2))
    found = load(targets, trained(Net(), model=fresh, reason="0.weight got its shape"))
    assert found.model is fresh
    assert found.optimizer is None
    assert "0.weight got its shape" in found.warnings[0]


def test_a_lazy_model_in_the_notebook_is_no_place_for_weights():
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(2))
    assert "no shape yet" in weights.mismatch(lazy, torch.nn.Sequential(torch.nn.Linear(3, 2)).state_dict())


def test_an_optimizer_that_changed_is_left_alone():
    targets = objects()
    result = trained(targets.model, targets.optimizer)
    targets.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    found = load(targets, result)
    assert "parameter groups" in found.warnings[0]
    assert torch.equal(targets.model.a.weight, result.model_state["a.weight"])


def test_models_that_are_equal_are_not_mixed_up():
    class Equal(Net):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    one, two = Equal(), Equal()
    first, second = objects(one), objects(two)
    load(first, trained(one), "local://one")
    assert not load(second, trained(two), "local://two").warnings
    gc.collect()  # what other tests have left
    kept = len(weights._last_loaded)
    del one, first
    gc.collect()
    assert len(weights._last_loaded) == kept - 1


def test_several_models_optimizers_and_other_state_come_back():
    def make():
        models = {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 1)}
        optimizers = {name: torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for name, one in models.items()}
        return models, optimizers, [torch.nn.Linear(1, 1), [1], {"x": 1}]

    models, optimizers, state = make()
    in_rank, optimizers_in_rank, state_in_rank = make()
    for name, one in in_rank.items():
        one(torch.ones(1, 2)).sum().backward()
        optimizers_in_rank[name].step()
    state_in_rank[1].append(2)
    state_in_rank[2]["y"] = 3
    result = TrainingResult(
        metrics={}, epochs=1, model_state=one_model(in_rank).state_dict(),
        optimizer_state=one_optimizer(optimizers_in_rank).state_dict(), state=tuple(map(state_of, state_in_rank)),
    )  # fmt: skip
    loaded = weights.load(remembered(models, optimizers, None, state), result, "local://x", check=True)
    assert not loaded.warnings
    assert loaded.model["a"] is models["a"]
    for name, one in models.items():
        assert torch.equal(one.weight, in_rank[name].weight)
        assert optimizers[name].state[one.weight]["momentum_buffer"] is not None
    assert torch.equal(state[0].weight, state_in_rank[0].weight)
    assert state[1:] == [[1, 2], {"x": 1, "y": 3}]


def test_weights_that_are_nan_are_told_before_they_go_into_the_model():
    targets = objects()
    result = trained(targets.model)
    result.model_state["a.bias"][0] = float("nan")
    with pytest.warns(KaleDistWarning, match=r"Weights of local://j are nan \(a.bias\).*state_dict\(partial=True\)"):
        load(targets, result)
    assert targets.model.a.bias.isnan().any()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_sparse_buffer_goes_into_the_model_with_the_weights(layout):
    model = Net()
    model.register_buffer("graph", getattr(torch.eye(2), layout)())
    targets, result = objects(model), trained(Net())
    result.model_state["graph"] = getattr(torch.eye(2) * 3, layout)()
    loaded = load(targets, result)
    assert not loaded.warnings
    assert model.graph.to_dense().equal(torch.eye(2) * 3)
