"""Steps that change weights or gradients themselves: they equal one process, or it is said or refused with the true reason."""

import contextlib
import functools
import io

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import fit

from kale_dist.errors import KaleDistError
from kale_dist.strategies import DDP, FSDP, Gossip, LocalSGD, Pipeline, Tensor


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation as the usual package has it: two steps, and an optimizer within (Foret et al., ICLR 2021)."""

    def __init__(self, parameters, lr=0.1, rho=0.5):
        super().__init__(parameters, {"lr": lr, "rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"] if p.grad is not None]).norm()
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x[:, :2])


def loss(model, x, y):
    return (model(x) - y).pow(2).mean()


def sharpness_aware(model, x, y, optimizer):
    loss(model, x, y).backward()
    optimizer.first_step()
    loss(model, x, y).backward()
    optimizer.second_step()


def sharpness_aware_by_hand(model, x, y, optimizer):
    optimizer.zero_grad()
    loss(model, x, y).backward()
    own = [p for p in model.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in own]).norm()
    moves = [p.grad * (0.5 / norm) for p in own]
    with torch.no_grad():
        for p, move in zip(own, moves, strict=True):
            p.add_(move)
    optimizer.zero_grad()
    loss(model, x, y).backward()
    with torch.no_grad():
        for p, move in zip(own, moves, strict=True):
            p.sub_(move)
    optimizer.step()


def by_data(model, x, y, optimizer):
    model.zero_grad()
    loss(model, x, y).backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)


def by_autograd(model, x, y, optimizer):
    own = list(model.parameters())
    gradients = torch.autograd.grad(loss(model, x, y), own)
    with torch.no_grad():
        for p, gradient in zip(own, gradients, strict=True):
            p.sub_(gradient, alpha=0.1)


def clamping(model, x, y, optimizer):
    optimizer.zero_grad()
    loss(model, x, y).backward()
    optimizer.step()
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def clipping_by_hand(model, x, y, optimizer):
    optimizer.zero_grad()
    loss(model, x, y).backward()
    own = [p for p in model.parameters() if p.grad is not None]
    norm = sum(p.grad.norm() ** 2 for p in own) ** 0.5
    for p in own:
        p.grad.mul_(0.05 / norm)
    optimizer.step()


def perturbing_one_weight(model, x, y, optimizer):
    """The fast gradient method (Miyato et al., ICLR 2017), as it is often written for embeddings."""
    optimizer.zero_grad()
    loss(model, x, y).backward()
    weight = model[0].weight
    if weight.grad is not None:
        before = weight.data.clone()
        weight.data.add_(0.5 * weight.grad / weight.grad.norm())
    loss(model, x, y).backward()
    if weight.grad is not None:
        weight.data = before
    optimizer.step()


def penalised(model, x, y, optimizer):
    optimizer.zero_grad()
    (loss(model, x, y) + 0.1 * sum(p.norm() for p in model.parameters())).backward()
    optimizer.step()


def clipping(model, x, y, optimizer):
    """What every rank may do to its part, also with a factor for some layers."""
    optimizer.zero_grad()
    loss(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    for p in model[0].parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    optimizer.step()


def on_ranks(ranks, body, strategy, make=torch.optim.SGD, epochs=2, **options):
    """Rank 0's weights, each rank's batches and rank 0's log."""

    def job():
        model, seen = net(), []
        optimizer = make(model.parameters(), lr=0.1)

        def step(model, loader, criterion, optimizer, device, args):
            for x, y in loader:
                seen.append((x, y))
                body(model, x, y, optimizer)
            return 0.5

        size = 8 // strategy.layout(0, 2).shards
        with contextlib.redirect_stdout(io.StringIO()) as log:
            result = fit(
                model, DataLoader(data(), size), optimizer, train_step=step, epochs=epochs, strategy=strategy, **options
            )
        return result.model_state, seen, log.getvalue()

    everyone = ranks(2, job)
    return everyone[0][0], [seen for _, seen, _ in everyone], everyone[0][2]


def plain(body, batches=None, make=torch.optim.SGD, epochs=2):
    """The weights after the same training in one process."""
    model = net()
    optimizer = make(model.parameters(), lr=0.1)
    for x, y in batches or [batch for _ in range(epochs) for batch in DataLoader(data(), 8)]:
        body(model, x, y, optimizer)
    return model.state_dict()


def assert_equal(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("body", [by_data, clamping, sharpness_aware_by_hand], ids=lambda f: f.__name__)
def test_updates_by_hand_from_backward_equal_one_process(ranks, body):
    assert_equal(on_ranks(ranks, body, DDP())[0], plain(body))


@pytest.mark.parametrize("strategy", [LocalSGD(sync_every=1), LocalSGD(sync_every=2), Gossip()], ids=repr)
def test_a_step_of_a_wrapped_optimizer_counts_as_one(ranks, strategy):
    by_hand, *_ = on_ranks(ranks, sharpness_aware_by_hand, strategy)
    wrapped, _, log = on_ranks(ranks, sharpness_aware, strategy, SAM)
    assert_equal(wrapped, by_hand)
    assert "Weights were not equal" not in log


def test_a_wrapped_optimizer_has_its_scheduler_and_its_clipping(ranks):
    def clipped(model, x, y, optimizer):
        loss(model, x, y).backward()
        optimizer.first_step()
        loss(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.second_step()

    def job_scheduled():
        model = net()
        optimizer = SAM(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def step(model, loader, criterion, optimizer, device, args):
            for x, y in loader:
                sharpness_aware(model, x, y, optimizer)
            return 0.5

        fit(model, DataLoader(data(), 4), optimizer, train_step=step, epochs=2, scheduler=scheduler)
        return optimizer.param_groups[0]["lr"]

    assert ranks(2, job_scheduled) == [0.025, 0.025]
    assert_equal(on_ranks(ranks, sharpness_aware, DDP(), SAM, clip_norm=0.05)[0], plain(clipped, make=SAM))


@pytest.mark.parametrize("body", [by_data, by_autograd], ids=lambda f: f.__name__)
@pytest.mark.parametrize("strategy", [LocalSGD(), LocalSGD(sync_every="epoch"), Gossip()], ids=repr)
def test_weights_that_no_optimizer_changed_are_averaged_after_the_epoch(ranks, strategy, body):
    found, batches, log = on_ranks(ranks, body, strategy, epochs=1)
    first, second = (plain(body, own) for own in batches)
    assert_equal(found, {name: (first[name] + second[name]) / 2 for name in first})
    assert "averaged over all ranks at the end of the epoch, and not within it" in log
    assert "not equal" not in log


def test_weights_changed_by_a_ranks_own_gradients_are_refused_with_a_remedy(ranks):
    with pytest.raises(KaleDistError, match=r"without optimizer.step\(\), on each rank by its own data \(0.weight"):
        on_ranks(ranks, by_autograd, DDP())

    def with_step(model, x, y, optimizer):
        own = list(model.parameters())
        for p, gradient in zip(own, torch.autograd.grad(loss(model, x, y), own), strict=True):
            p.grad = gradient
        optimizer.step()

    assert_equal(on_ranks(ranks, with_step, DDP())[0], plain(by_autograd))
    assert_equal(on_ranks(ranks, by_data, DDP())[0], plain(by_autograd))


@pytest.mark.parametrize("strategy", [DDP(), FSDP()], ids=repr)
@pytest.mark.parametrize("body", [sharpness_aware, clipping_by_hand, perturbing_one_weight], ids=lambda f: f.__name__)
def test_norms_of_all_gradients_are_right_where_gradients_are_whole(ranks, strategy, body):
    make = SAM if body is sharpness_aware else torch.optim.SGD
    assert_equal(on_ranks(ranks, body, strategy, make)[0], plain(body, make=make))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [Tensor(), Pipeline()], ids=repr)
@pytest.mark.parametrize("body", [sharpness_aware, clipping_by_hand], ids=lambda f: f.__name__)
def test_norms_of_a_ranks_part_are_refused_in_the_first_steps(ranks, strategy, body):
    make = SAM if body is sharpness_aware else torch.optim.SGD
    with pytest.raises(KaleDistError, match="by a number that is not the same on all ranks"):
        on_ranks(ranks, body, strategy, make, epochs=1)


@pytest.mark.nightly
def test_a_norm_of_one_weight_is_right_in_a_stage_and_refused_for_a_part(ranks):
    assert_equal(on_ranks(ranks, perturbing_one_weight, Pipeline())[0], plain(perturbing_one_weight))
    with pytest.raises(KaleDistError, match="by a number that is not the same on all ranks"):
        on_ranks(ranks, perturbing_one_weight, Tensor(), epochs=1)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [Tensor(), Pipeline()], ids=repr)
def test_torchs_clipping_and_factors_of_a_layer_are_right_where_gradients_are_divided(ranks, strategy):
    assert_equal(on_ranks(ranks, clipping, strategy)[0], plain(clipping))


@pytest.mark.nightly
def test_a_penalty_on_divided_weights_is_refused_and_weight_decay_is_right(ranks):
    with pytest.raises(KaleDistError, match="computed different losses"):
        on_ranks(ranks, penalised, Tensor(), epochs=1)
    decaying = functools.partial(torch.optim.SGD, weight_decay=0.1)
    assert_equal(on_ranks(ranks, clipping, Tensor(), decaying)[0], plain(clipping, make=decaying))
