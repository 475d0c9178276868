"""The tables that the hunt draws from. To widen the hunt, add a line: everything else follows.

A case takes one row of each table, as a line such as `model=tied-3 strategy=tensor`; tables that the line leaves out give
their first row. Whatever plain PyTorch cannot run (an optimizer without the method that a step calls) is not drawn, so a
row need not say what it goes with.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

import kale_dist as kd

EPOCHS, BATCH, CLASSES, WORDS = 2, 4, 4, 12
"""Epochs, samples of a rank's batch, classes of the vectors, words of the vocabulary."""

computed_losses: list[Callable[[], None]] = []
"""Functions to call after each loss of this process: faults within an epoch."""


def criterion(scores: Any, targets: Any) -> Any:
    """The mean over all samples and positions."""
    loss = nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())
    for function in computed_losses:
        function()
    return loss


class Criterion(nn.Module):
    """With a buffer that stays as it is, to the last bit."""

    def __init__(self):
        super().__init__()
        self.register_buffer("thirds", torch.full((5,), 1 / 3))

    def forward(self, scores, targets):
        return criterion(scores, targets)


CRITERIA: dict[str, Callable[[], Any]] = {"function": lambda: criterion, "buffer": Criterion}


# -- models: `data` is what they take; every model has a method `loss` --------------------------------------------------


class Net(nn.Module):
    data = "vectors"

    def loss(self, x, y):
        return criterion(self(x), y)


class Layers(Net):
    """Layers one after another."""

    def __init__(self, *layers, data="vectors"):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.data = data

    def forward(self, x):
        return self.layers(x)


class Tied(Net):
    """Words in, scores of words out. `embeddings` of them and the head share one weight."""

    data = "words"

    def __init__(self, embeddings=1, head_first=False):
        super().__init__()
        if head_first:
            self.head = nn.Linear(8, WORDS, bias=False)
        self.embeddings = nn.ModuleList(nn.Embedding(WORDS, 8) for _ in range(embeddings))
        self.hidden = nn.Linear(8, 8)
        if not head_first:
            self.head = nn.Linear(8, WORDS, bias=False)
        for one in self.embeddings:
            one.weight = self.head.weight

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(sum(one(x) for one in self.embeddings))))


class FunctionalHead(Net):
    """The head is a function of the embedding's weight, as in many language models."""

    data = "words"

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(WORDS, 8), nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.hidden(self.embedding(x))), self.embedding.weight)


class Residual(Net):
    """A shared block, called twice, between parameters of the model itself."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(1))
        self.block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = x * self.scale + self.shift
        x = x + self.block(x)
        return self.head(x + self.block(x))


class Experts(Net):
    """Each sample goes to one of two layers; a batch may need only one of them. A third layer is never used."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(2))
        self.unused, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        goes, hidden = (x[:, 0] > 0.8).long(), x.new_zeros(len(x), 8)
        for number, expert in enumerate(self.experts):
            if (mine := goes == number).any():
                hidden = hidden.index_put((mine,), expert(x[mine]))
        return self.head(torch.tanh(hidden))


class Frozen(Layers):
    """The first layer does not train."""

    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.layers[0].requires_grad_(False)


class Recurrent(Net):
    data = "words"

    def __init__(self):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(WORDS, 8, padding_idx=0), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, x):
        return self.head(self.cell(self.embedding(x))[0])


class Attention(Net):
    data = "words"

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Parameter(torch.zeros(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, WORDS)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(5, device=x.device, dtype=torch.float64)
        return self.head(self.blocks(self.words(x) + self.places, mask=mask))


class Checkpointed(Net):
    """A method of the model is computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def block(self, x):
        return torch.tanh(self.hidden(x))

    def forward(self, x):
        return self.head(checkpoint(self.block, self.first(x), use_reentrant=False))


class Convolution(Net):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, CLASSES))

    def forward(self, x):
        return self.head(self.body(x.unsqueeze(1)))


class OwnParameters(Net):
    """Parameters in lists and dicts, one without dimensions, and a buffer that counts calls."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2))
        self.rest = nn.ParameterDict({"head": torch.randn(6, CLASSES) / 3, "heat": torch.tensor(1.5)})
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight) + self.factor * x
        return x @ self.rest["head"] * self.rest["heat"]


MODELS: dict[str, Callable[[], Net]] = {
    "mlp": lambda: Layers(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    "linear": lambda: Layers(nn.Linear(6, CLASSES)),
    "words": lambda: Layers(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, WORDS), data="words"),
    "tied": Tied,
    "tied-head-first": lambda: Tied(head_first=True),
    "tied-3": lambda: Tied(embeddings=2),
    "tied-3-head-first": lambda: Tied(embeddings=2, head_first=True),
    "functional-head": FunctionalHead,
    "residual": Residual,
    "experts": Experts,
    "frozen": Frozen,
    "lstm": Recurrent,
    "attention": Attention,
    "checkpointed": Checkpointed,
    "convolution": Convolution,
    "own-parameters": OwnParameters,
    "sparse-embedding": lambda: Layers(nn.Embedding(WORDS, 8, sparse=True), nn.Linear(8, WORDS), data="words"),
    "batchnorm-in-eval": lambda: Layers(nn.Linear(6, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, CLASSES)),
}


# -- loaders: what one rank's batches are, and how n of them are divided over n ranks ------------------------------------


class Noted(Dataset):
    """Samples of a dataset; the number of each one that is read goes into a file, if there is one."""

    def __init__(self, inner, path):
        self.inner, self.path = inner, path

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        if self.path is not None:
            with open(self.path, "a") as file:  # noqa: PTH123 - one write a sample
                file.write(f"{int(index)}\n")
        return self.inner[index]


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


class Descending(SequentialSampler):
    """A sampler of the user's own."""

    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1))


class InDicts(Dataset):
    """Samples that are dicts; the loader's `collate_fn` makes pairs of them."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return dict(zip("xy", self.data[index], strict=True))

    @staticmethod
    def collate(samples):
        return tuple(torch.stack([sample[key] for sample in samples]) for key in "xy")


def generator():
    return torch.Generator().manual_seed(2)


LOADERS: dict[str, Callable[[Any], DataLoader]] = {
    "plain": lambda data: DataLoader(data, BATCH),
    "shuffled": lambda data: DataLoader(data, BATCH, shuffle=True, generator=generator()),
    "shuffled-by-seed": lambda data: DataLoader(data, BATCH, shuffle=True),
    "drop-last": lambda data: DataLoader(data, BATCH, shuffle=True, generator=generator(), drop_last=True),
    "weighted": lambda data: DataLoader(
        data, BATCH, sampler=WeightedRandomSampler(range(1, len(data) + 1), len(data), generator=generator())
    ),
    "fewer-drawn": lambda data: DataLoader(
        data, BATCH, sampler=RandomSampler(data, num_samples=len(data) - 3, generator=generator())
    ),
    "own-sampler": lambda data: DataLoader(data, BATCH, sampler=Descending(data)),
    "batch-sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(Descending(data), BATCH, drop_last=False)
    ),
    "distributed": lambda data: DataLoader(
        data, BATCH, sampler=DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=5)
    ),
    "subset": lambda data: DataLoader(Subset(data, range(1, len(data))), BATCH, shuffle=True, generator=generator()),
    "stream": lambda data: DataLoader(Stream(data), BATCH),
    "dicts": lambda data: DataLoader(InDicts(data), BATCH, collate_fn=InDicts.collate),
    "workers": lambda data: DataLoader(data, BATCH, num_workers=1),
}

SHARES: dict[str, Callable[[list[Any], int], list[Any]]] = {
    "batch-sampler": lambda batches, n: [*batches, *[[one[:0] for one in batches[0]]] * (n - len(batches))],
    "stream": lambda batches, n: [[one[rank::n] for one in joined(batches)] for rank in range(n)],
}
"""How the next n batches are n ranks' batches, where it is not in order and as evenly as possible."""

ALL_ONCE = ("plain", "shuffled", "shuffled-by-seed", "own-sampler", "distributed", "dicts", "workers")
"""Loaders that give each sample once in a pass, and whose ranks read only their own."""


def joined(batches):
    """Batches as one."""
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


# -- optimizers ---------------------------------------------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as its users write it: another optimizer within."""

    def __init__(self, parameters, base, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * group["rho"] / (norm + 1e-12))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, state in self.state.items():
            if "old" in state:
                p.data = state["old"]
        self.base_optimizer.step()
        self.zero_grad()


class Own(torch.optim.Optimizer):
    """The user's own optimizer, without a closure."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.5)
                    p.data.add_(mean, alpha=-group["lr"])


class Distance(torch.optim.Optimizer):
    """How far it goes depends on all gradients so far, as in Prodigy."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "distance": 0.1})

    def step(self):
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            group["distance"] += sum(p.grad.norm().item() for p in trained)
            for p in trained:
                p.data.add_(p.grad, alpha=-group["lr"] / group["distance"])


def two_groups(model):
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1], "lr": 0.01}, {"params": parameters[1:]}]
    return torch.optim.SGD(groups, lr=0.2, momentum=0.5)


def warm(model):
    """Adam with a state from before the call."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1) if p.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
    "momentum": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True, foreach=True),
    "adam-fused": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
    "adam-warm": warm,
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
    "two-groups": two_groups,
    "only-trainable": lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2),
    "own": lambda model: Own(model.parameters()),
    "distance": lambda model: Distance(model.parameters()),
    "sam": lambda model: Sam(model.parameters(), torch.optim.SGD, lr=0.2, momentum=0.5),
}

ADAPTIVE = tuple(name for name in OPTIMIZERS if name.startswith("ada") or name == "rmsprop")
"""Optimizers that divide by the gradient's own size, and so magnify rounding."""


# -- steps: what a user's loop does in an epoch; each returns its mean loss over samples ---------------------------------


def of_batch(train):
    """A step of the usual form, which does this with each batch; `train` returns the loss."""

    def step(model, loader, criterion, optimizer, device, args):
        total = seen = 0
        for x, y in loader:
            total += train(model, x.to(device), y, criterion, optimizer, args).item() * len(y)
            seen += len(y)
        return {"loss": total / seen}

    return step


def plain(model, x, y, criterion, optimizer, args):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def clears_afterwards(model, x, y, criterion, optimizer, args):
    loss = model.loss(x, y)
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss


def clips_norm(model, x, y, criterion, optimizer, args):
    optimizer.zero_grad(set_to_none=False)
    loss = criterion(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    return loss


def clips_by_hand(model, x, y, criterion, optimizer, args):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    factor = 0.1 / (sum(p.grad.norm(2).item() ** 2 for p in trained) ** 0.5 + 1e-6)
    for p in trained:
        p.grad.data.mul_(min(factor, 1))
    optimizer.step()
    return loss


def gathers(model, x, y, criterion, optimizer, args):
    """Shows the loss of all ranks, as scripts that were written for torchrun do."""
    loss = plain(model, x, y, criterion, optimizer, args)
    if dist.is_initialized():
        dist.all_reduce(shown := loss.detach().clone())
        everyone = [torch.zeros_like(shown) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, shown)
    return loss


def averages(model, x, y, criterion, optimizer, args):
    """Keeps a moving average of the weights in a copy of the model."""
    loss = plain(model, x, y, criterion, optimizer, args)
    twin = args.setdefault("twin", copy.deepcopy(model)) if isinstance(args, dict) else copy.deepcopy(model)
    with torch.no_grad():
        for kept, p in zip(twin.parameters(), model.parameters(), strict=True):
            kept.lerp_(p, 0.1)
    return loss


def clips_values(model, x, y, criterion, optimizer, args):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    optimizer.step()
    return loss


def closure(model, x, y, criterion, optimizer, args):
    def evaluate():
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(evaluate)


def backward_twice(model, x, y, criterion, optimizer, args):
    optimizer.zero_grad()
    (0.25 * criterion(model(x), y)).backward()
    loss = criterion(model(x), y)
    (0.75 * loss).backward()
    optimizer.step()
    return loss


def sets_gradients(model, x, y, criterion, optimizer, args):
    loss = criterion(model(x), y)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
        p.grad = gradient
    optimizer.step()
    return loss


def penalizes_weights(model, x, y, criterion, optimizer, args):
    optimizer.zero_grad()
    loss = criterion(model(x), y) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
    loss.backward()
    optimizer.step()
    return loss


def penalizes_gradients(model, x, y, criterion, optimizer, args):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    trained = [p for p in model.parameters() if p.requires_grad]
    # Linear in the samples, so that the mean over ranks is that of one process.
    moved = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    (loss + 0.01 * sum(one.sum() for one in moved if one is not None)).backward()
    optimizer.step()
    return loss


def clamps_weights(model, x, y, criterion, optimizer, args):
    loss = plain(model, x, y, criterion, optimizer, args)
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.4, 0.4)
    return loss


def adds_to_data(model, x, y, criterion, optimizer, args):
    """An update by hand beside the optimizer, which only clears gradients."""
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.1)
    return loss


def sam_by_two_steps(model, x, y, criterion, optimizer, args):
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.first_step()
    criterion(model(x), y).backward()
    optimizer.second_step()
    return loss


def sam_in_the_step(model, x, y, criterion, optimizer, args):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.norm() for p in trained]).norm()
    moves = [p.grad * (0.05 / (norm + 1e-12)) for p in trained]
    with torch.no_grad():
        for p, move in zip(trained, moves, strict=True):
            p.add_(move)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    with torch.no_grad():
        for p, move in zip(trained, moves, strict=True):
            p.sub_(move)
    optimizer.step()
    return loss


def steps_scheduler(model, x, y, criterion, optimizer, args):
    loss = plain(model, x, y, criterion, optimizer, args)
    args["scheduler"].step()
    return loss


def swaps_in_a_copy(model, x, y, criterion, optimizer, args):
    """Gradients come from a copy of the model, as in meta-learning."""
    twin = copy.deepcopy(model)
    loss = criterion(twin(x), y)
    loss.backward()
    for p, of_twin in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = of_twin.grad
    optimizer.step()
    return loss


def accumulates_by_hand(model, loader, criterion, optimizer, device, args):
    total = seen = 0
    optimizer.zero_grad()
    for number, (x, y) in enumerate(loader, 1):
        loss = criterion(model(x), y)
        (loss / 2).backward()
        total, seen = total + loss.item() * len(y), seen + len(y)
        if number % 2 == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
    return {"loss": total / seen}


def leaves_early(model, loader, criterion, optimizer, device, args):
    for number, (x, y) in enumerate(loader):
        plain(model, x, y, criterion, optimizer, args)
        if number == 1:
            break


def goes_twice(model, loader, criterion, optimizer, device, args):
    for _ in range(2):
        for x, y in loader:
            plain(model, x, y, criterion, optimizer, args)


def unfreezes(model, loader, criterion, optimizer, device, args):
    """The first parameter does not train in the first half of the epoch."""
    first = next(model.parameters())
    first.requires_grad_(False)
    for number, (x, y) in enumerate(loader):
        plain(model, x, y, criterion, optimizer, args)
        if number == 0:
            first.requires_grad_(True)


STEPS: dict[str, Callable[..., Any]] = {
    "plain": of_batch(plain),
    "clears-afterwards": of_batch(clears_afterwards),
    "clips-norm": of_batch(clips_norm),
    "clips-by-hand": of_batch(clips_by_hand),
    "clips-values": of_batch(clips_values),
    "gathers": of_batch(gathers),
    "averages": of_batch(averages),
    "closure": of_batch(closure),
    "backward-twice": of_batch(backward_twice),
    "sets-gradients": of_batch(sets_gradients),
    "penalizes-weights": of_batch(penalizes_weights),
    "penalizes-gradients": of_batch(penalizes_gradients),
    "clamps-weights": of_batch(clamps_weights),
    "adds-to-data": of_batch(adds_to_data),
    "sam-by-two-steps": of_batch(sam_by_two_steps),
    "sam-in-the-step": of_batch(sam_in_the_step),
    "steps-scheduler": of_batch(steps_scheduler),
    "copy": of_batch(swaps_in_a_copy),
    "accumulates-by-hand": accumulates_by_hand,
    "leaves-early": leaves_early,
    "goes-twice": goes_twice,
    "unfreezes": unfreezes,
}

BY_BATCH = ("accumulates-by-hand", "clamps-weights", "leaves-early", "unfreezes")
"""Steps that do something beside the optimizer's step: with `accumulate` the one process, which sees windows, does it elsewhere."""


# -- strategies: settings, numbers of ranks, and with what the result is compared ----------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A strategy. Without `mixes` and `only_learns`, the result is that of one process that sees the global batch."""

    settings: Any
    ranks: tuple[int, ...] = (2, 3)
    mixes: Callable[[int, int, int], list[int]] | None = None
    """From the number of a step in its epoch (from 1), a rank and the number of ranks: whose weights the rank's new ones
    are the mean of. After an epoch all ranks have the mean of all."""
    only_learns: bool = False
    """Whether only this is compared: the loss fell, and each sample was used once an epoch."""


def every(steps):
    """Local SGD: the mean of all ranks after so many steps."""
    return lambda step, rank, n: list(range(n)) if step % steps == 0 else [rank]


def ring(step, rank, n):
    return sorted({(rank - 1) % n, rank, (rank + 1) % n})


def exponential(step, rank, n):
    return [rank, (rank - 2 ** (step % math.ceil(math.log2(n)))) % n]


_of = kd.strategies
STRATEGIES: dict[str, Way] = {
    "ddp": Way(settings=_of.DDP()),
    "ddp-torch": Way(settings=_of.DDP(exchange="torch", bucket_mib=0.0005)),
    "ddp-shared-memory": Way(settings=_of.DDP(exchange="shared-memory", bucket_mib=0.0005)),
    "ddp-ring": Way(settings=_of.DDP(exchange="ring")),
    "ddp-driver": Way(settings=_of.DDP(exchange="driver")),
    "ddp-fp16": Way(settings=_of.DDP(compress="fp16"), only_learns=True),
    "ddp-powersgd": Way(settings=_of.DDP(compress="powersgd"), only_learns=True),
    "fsdp": Way(settings=_of.FSDP()),
    "fsdp-whole": Way(settings=_of.FSDP(units="whole", activation_checkpointing=True)),
    "tensor": Way(settings=_of.Tensor(), ranks=(2, 4)),
    "pipeline": Way(settings=_of.Pipeline()),
    "pipeline-1": Way(settings=_of.Pipeline(micro_batches=1)),
    "pipeline-checkpointed": Way(settings=_of.Pipeline(micro_batches=2, activation_checkpointing=True)),
    "mesh-data-tensor": Way(settings=_of.Mesh(data=2, tensor=2), ranks=(4,)),
    "mesh-fsdp-tensor": Way(settings=_of.Mesh(fsdp=2, tensor=2), ranks=(4,)),
    "mesh-data-pipeline": Way(settings=_of.Mesh(data=2, pipeline=2), ranks=(4,)),
    "server": Way(settings=_of.ParameterServer(), ranks=(3, 4)),
    "server-2": Way(settings=_of.ParameterServer(servers=2), ranks=(4,)),
    "server-backup": Way(settings=_of.ParameterServer(backup=True), ranks=(4,)),
    "server-async": Way(settings=_of.ParameterServer(mode="async"), ranks=(3,), only_learns=True),
    "local-sgd-1": Way(settings=_of.LocalSGD(sync_every=1), mixes=every(1)),
    "local-sgd-2": Way(settings=_of.LocalSGD(sync_every=2), mixes=every(2)),
    "local-sgd-epoch": Way(settings=_of.LocalSGD(sync_every="epoch"), mixes=every(10**9)),
    "diloco": Way(settings=_of.LocalSGD(sync_every=2, outer="diloco"), only_learns=True),
    "gossip": Way(settings=_of.Gossip(), ranks=(2, 3, 4), mixes=ring),
    "gossip-exponential": Way(settings=_of.Gossip(graph="exponential"), ranks=(2, 3, 4), mixes=exponential),
    "gossip-changed": Way(settings=_of.Gossip(send="changed"), only_learns=True),
    "gossip-async": Way(settings=_of.Gossip(mode="async"), ranks=(2, 4), only_learns=True),
}


# -- options of the call, faults, and objects that a step has in its hands ----------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "accumulate": {"accumulate": 2},
    "accumulate-3": {"accumulate": 3, "checkpoint_every": 2},
    "clip": {"clip_norm": 0.2},
    "split": {"split_batches": True},
    "scheduler": {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)},
    "evaluates": {"eval_data_loader": lambda loader: DataLoader(loader.dataset, 5)},
}
"""Arguments of `distribute`; functions are called with the object that they need."""

FAULTS: dict[str, str] = {
    "none": "",
    "between": "the rank is killed before the first batch of its second epoch",
    "within": "the rank is killed after its first loss of the second epoch",
}

_begun: list[int] = []


def begin_epoch(fault: str, killed: int) -> None:
    """Called in each rank before its step; the fault is a name of `FAULTS`."""
    here = kd.context()
    _begun.append(1)
    if here.attempt or here.rank != killed or len(_begun) != EPOCHS:
        return

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if fault == "between":
        die()
    elif fault == "within":
        computed_losses.append(die)


def leave(thing: Any) -> None:
    """Do nothing with it."""


RANKS_KILLED = (0, 1)
SAMPLES = (22, 16, 17, 27)
"""16 has full batches only; with 17 some ranks have nothing in the last step."""


class Hostile:
    """Whatever one asks it, it raises."""

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("do not ask")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._raise()

    __eq__ = __ne__ = __len__ = __bool__ = __repr__ = __iter__ = _raise
    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    """An object that the step sees, in a global, a closure, a dict or `train_args`."""

    make: Callable[[], Any]
    touch: Callable[[Any], Any] | None = None
    """Changes the object in each epoch, alike on all ranks: the notebook's has to change as often."""
    said: str = ""
    """What the log says where it does not come back, with its name as `{}`."""


def _steps(optimizer):
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


def _trains(module):
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1)


class Meter:
    """An object of the user's with all kinds of state, and none that it would give by itself."""

    def __init__(self):
        self.count, self.mean, self.losses, self.last = 0, torch.zeros(2), {"all": []}, collections.deque(maxlen=2)

    def see(self):
        self.count += 1
        self.mean = self.mean * 0.9 + 1
        self.losses["all"].append(self.count)
        self.last.append(torch.full((1,), float(self.count)))


def contents(thing):
    """What an object holds, for comparisons."""
    if hasattr(thing, "state_dict"):
        return thing.state_dict()
    if isinstance(thing, Meter):
        return {**vars(thing), "last": [*thing.last]}
    return thing.tolist() if hasattr(thing, "tolist") else thing


THINGS: dict[str, Thing] = {
    "none": Thing(make=lambda: None),
    "coo": Thing(make=lambda: torch.eye(3).to_sparse()),
    "csr": Thing(make=lambda: torch.eye(3).to_sparse_csr()),
    "hostile": Thing(make=Hostile),
    "inference": Thing(make=torch.inference_mode()(lambda: torch.ones(2))),
    "array": Thing(make=lambda: torch.ones(3).numpy()),
    "list": Thing(make=list, touch=lambda log: log.append(1)),
    "tensor": Thing(make=lambda: torch.zeros(3), touch=lambda tensor: tensor.add_(1)),
    "sparse-changed": Thing(
        make=lambda: torch.eye(3).to_sparse().coalesce(),
        touch=lambda t: t.values().add_(1),
        said=r"left behind.*\b{}\b",
    ),
    "second-loader": Thing(make=lambda: DataLoader(range(4)), touch=list, said=r"\b{}\b.* is not divided"),
    "array-changed": Thing(make=lambda: torch.zeros(3).numpy(), touch=lambda array: array.__iadd__(1)),
    "object": Thing(make=Meter, touch=lambda meter: meter.see()),
    "module": Thing(make=lambda: nn.Linear(2, 2), touch=_trains),
    "second-optimizer": Thing(make=lambda: torch.optim.Adam([nn.Parameter(torch.ones(3))]), touch=_steps),
}

PLACES = {
    "global": "thing_of_notebook",
    "closure": "thing",
    "dict": "box['thing']",
    "train_args": "args.get('thing')",
    "model": "vars(model).get('thing')",
    "optimizer": "vars(optimizer).get('thing')",
}
"""Where a step finds the object."""
