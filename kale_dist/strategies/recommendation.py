"""Recommends a strategy for a model by the memory that each needs and the bytes that it sends. Pure.

Nothing is run or measured: the figures follow from the sizes of the model's tensors. Figures that depend on the data
(activations, and the bytes that pipeline and tensor parallelism send) are given in words.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.strategies.tensor import kind_of, parameters_of

_GIB = 2**30
_MIB = 2**20

_PROCESS_BYTES = _GIB // 2
"""Memory of a process with torch loaded and without a model; a CUDA context takes about as much."""

_FOR_ACTIVATIONS = 0.3
"""Share of a rank's memory that is reserved for activations and the batch, which are not known here."""

_SMALL = 10_000
"""Parameters below which one exchange takes longer than a batch.

Forward and backward pass take about 6 operations for each parameter and sample (Kaplan et al., Scaling Laws for Neural
Language Models, 2020, section 2.1). For 10,000 parameters and a batch of 32 that is 0.2 ms at 10 GFLOP/s, which one core
gives; to have all ranks meet takes 0.2 to 1 ms."""

_SYNC_EVERY = 8
"""Default of `LocalSGD`."""

_MOMENTS = {"ASGD": 1, "Adafactor": 0, "Adagrad": 1, "Muon": 0, "RMSprop": 1, "SGD": 0}
"""Tensors of a parameter's shape that torch's optimizers keep for it, without momentum and the like; others keep two."""

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The costs of one strategy."""

    strategy: str
    """The strategy's word, for `strategy=`."""
    memory_bytes: int
    """Memory of the rank that needs most, without activations: weights, gradients, optimizer state, exchange buffers."""
    sent_bytes: int | None
    """Bytes that the busiest rank sends in a step; None if they depend on the batch."""
    formula: str
    """The formula of the sent bytes: P is the size of the trained parameters, n the number of ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """A strategy with reasons, and the costs of all strategies. It prints as a table."""

    strategy: str | None
    """The word to pass as `strategy=`; None if the training should not be distributed, or does not fit."""
    sentence: str
    """What to do, and why, in one sentence."""
    reasons: tuple[str, ...]
    """Further reasons, one sentence each."""
    parameters: int
    """How many numbers are trained."""
    estimates: tuple[Estimate, ...]
    """The costs of each strategy, in the order of the documentation; empty for one process."""

    def __str__(self) -> str:
        """The sentence, the reasons and a table."""
        lines = [self.sentence, *(f"- {reason}" for reason in self.reasons)]
        if self.estimates:
            lines += ["", f"{'strategy':<18}{'memory a rank':>14}{'sent a step':>14}  formula"]
        for one in self.estimates:
            sent = "by the batch" if one.sent_bytes is None else _size(one.sent_bytes)
            lines.append(f"{one.strategy:<18}{_size(one.memory_bytes):>14}{sent:>14}  {one.formula}")
        return "\n".join(lines)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of a model that a pipeline does not cut."""

    name: str
    """The module's name in `named_modules()`."""
    bytes: int
    """Size of the block's parameters; a shared one counts in its first block."""


def recommend(model: Any, optimizer: Any, number_of_processes: int, memory_gib: float | None = None) -> Recommendation:
    """Recommend a strategy for a training from the sizes of the model's tensors. Nothing is run.

    Args:
        model: The model, or several by name.
        optimizer: Its optimizer, or several by name. What its state takes is read from it, or known by its class before
            the first step; for an unknown class it is taken to be twice the parameters, as for Adam.
        number_of_processes: Ranks that would share the training.
        memory_gib: Memory of one rank: its GPU's, or its part of the machine's. None assumes that there is enough.

    Returns:
        The recommendation; printed, it is a table of all strategies.

    Raises:
        ConfigError: An argument is not a model, an optimizer or a positive number.
    """
    models = _several("model", model, "parameters")
    if any(type(p).__name__.startswith("Uninitialized") for one in models for p in one.parameters()):
        raise ConfigError("model", "it has parameters without a shape", "Run it once on a batch before")
    optimizers = _several("optimizer", optimizer, "param_groups")
    for argument, value, kinds, example in (
        ("number_of_processes", number_of_processes, int, "a number such as 2"),
        ("memory_gib", 1 if memory_gib is None else memory_gib, int | float, "GiB, such as 16"),
    ):
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            raise ConfigError(argument, f"{value!r} is not a positive number", f"Give {example}")
    sizes = _Sizes.of(models, optimizers)
    estimates = tuple(_estimates(sizes, number_of_processes)) if number_of_processes > 1 else ()
    strategy, (sentence, *reasons) = _choice(sizes, estimates, number_of_processes, memory_gib)
    return Recommendation(
        strategy=strategy, sentence=sentence, reasons=tuple(reasons), parameters=sizes.count, estimates=estimates
    )


def _several(argument: str, value: Any, attribute: str) -> list[Any]:
    found = list(value.values()) if isinstance(value, Mapping) else [value]
    if not found or isinstance(value, type) or not all(hasattr(one, attribute) for one in found):
        kind = "a torch.nn.Module" if argument == "model" else "a torch optimizer"
        raise ConfigError(argument, f"{value!r} is not {kind}", "Pass the object that distribute() would get")
    return found


# -- sizes -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Sizes of a model's tensors in bytes, by purpose."""

    count: int
    """The number of trained parameters (elements)."""
    trained: int
    frozen: int
    """Frozen parameters and buffers."""
    state: int
    """The optimizer's state."""
    shardable: int
    """Trained parameters of the Linear and Embedding modules that tensor parallelism divides."""
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, models: Sequence[Any], optimizers: Sequence[Any]) -> _Sizes:
        modules = [module for model in models for module in model.modules()]
        parameters = {id(p): p for model in models for p in model.parameters()}
        buffers = {id(b): b for model in models for b in model.buffers()}
        divided = {id(p) for module in modules if kind_of(module) for p in parameters_of(module).values()}
        trained = {key: p for key, p in parameters.items() if p.requires_grad}
        total = _bytes(trained.values())
        return cls(
            count=sum(p.numel() for p in trained.values()),
            trained=total,
            frozen=_bytes(parameters.values()) - total + _bytes(buffers.values()),
            state=sum(_state_bytes(optimizer) for optimizer in optimizers),
            shardable=_bytes(p for key, p in trained.items() if key in divided),
            blocks=tuple(block.bytes for model in models for block in blocks_of(model)),
        )


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _is_a(module: Any, *names: str) -> bool:
    """Whether a module is an instance of one of torch's classes; torch is not imported."""
    return any(kind.__name__ in names and kind.__module__.startswith("torch.nn.") for kind in type(module).__mro__)


def _state_bytes(optimizer: Any) -> int:
    """Bytes of an optimizer's state after its first step."""
    total = 0
    for options in optimizer.param_groups:
        for parameter in options["params"]:
            state = optimizer.state.get(parameter)
            if state:
                total += _bytes(value for value in state.values() if hasattr(value, "element_size"))
            elif parameter.requires_grad:
                total += _bytes([parameter]) * _moments(optimizer, options)
    return total


def _moments(optimizer: Any, options: Mapping[str, Any]) -> int:
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    if "LBFGS" in names:
        return 2 * int(options.get("history_size", 100))
    kept = next((_MOMENTS[name] for name in names if name in _MOMENTS), 2)
    return kept + sum(bool(options.get(option)) for option in ("momentum", "amsgrad", "centered"))


# -- blocks ----------------------------------------------------------------------------------------------------------


def blocks_of(model: Any) -> list[Block]:
    """The blocks between which a pipeline may cut a model, in the order of their registration.

    Blocks are the model's children; containers (Sequential, ModuleList, ModuleDict) are opened. A child that has more than half
    of the parameters and a container in it (a backbone) is opened too.

    Args:
        model: The model.
    """
    seen: set[int] = set()
    total = _bytes(model.parameters())

    def opened(name: str, module: Any) -> Iterator[Block]:
        is_backbone = _bytes(module.parameters()) * 2 > total and any(
            _is_a(part, *_CONTAINERS) and len(part) > 1 for part in module.modules()
        )
        children = list(module.named_children())
        if children and (module is model or _is_a(module, *_CONTAINERS) or is_backbone):
            for child_name, child in children:
                yield from opened(f"{name}.{child_name}" if name else child_name, child)
            return
        own = [p for p in module.parameters() if id(p) not in seen]
        seen.update(map(id, own))
        yield Block(name=name, bytes=_bytes(own))

    return list(opened("", model)) if list(model.children()) else []


def balanced(sizes: Sequence[int], parts: int) -> list[int]:
    """Where to cut a sequence so that the largest part is as small as it can be.

    Args:
        sizes: The size of each item.
        parts: The number of parts, none of them empty; at most the number of items.

    Returns:
        The index of the first item of each part but the first.
    """
    sums = [0, *itertools.accumulate(sizes)]
    # Of the first k items: the least largest part, and the cuts. Of equal ones the latest, so that an activation stays with
    # the layer before it.
    best: list[tuple[float, list[int]]] = [(total, []) for total in sums]
    for part in range(2, parts + 1):
        before, best = best, [(math.inf, [])] * part
        for end in range(part, len(sums)):
            least, cut = min((max(before[i][0], sums[end] - sums[i]), -i) for i in range(part - 1, end))
            best.append((least, [*before[-cut][1], -cut]))
    return best[-1][1]


# -- estimates -------------------------------------------------------------------------------------------------------


def _estimates(sizes: _Sizes, ranks: int) -> Iterator[Estimate]:
    trained, frozen, state = sizes.trained, sizes.frozen, sizes.state
    # Weights, gradients and state.
    whole = 2 * trained + state
    ring = 2 * trained * (ranks - 1) // ranks

    def estimate(strategy: str, memory: int, sent: int | None, formula: str) -> Estimate:
        return Estimate(strategy=strategy, memory_bytes=memory + frozen, sent_bytes=sent, formula=formula)

    yield estimate("ddp", whole + trained, ring, "2(n-1)/n P")
    yield estimate(
        "fsdp", whole // ranks + 2 * max(sizes.blocks, default=0), 3 * trained * (ranks - 1) // ranks, "3(n-1)/n P"
    )
    if len(sizes.blocks) >= ranks:
        cuts = [0, *balanced(sizes.blocks, ranks), len(sizes.blocks)]
        share = max(sum(sizes.blocks[i:j]) for i, j in itertools.pairwise(cuts)) / max(1, sum(sizes.blocks))
        formula = "activations at the cuts, there and back, and the output to all"
        yield estimate("pipeline", math.ceil(whole * share), None, formula)
    share = (trained - sizes.shardable + sizes.shardable / ranks) / max(1, trained)
    yield estimate("tensor", math.ceil(whole * share), None, "every Linear's and Embedding's output, there and back")
    # The server keeps a gradient that comes in and the weights that go out beside its own.
    formula = "P a worker, (n-1) P the server; backup=True: 2 P a worker, (n-2) P the server and its backup each"
    yield estimate("parameter-server", whole + 2 * trained, (ranks - 1) * trained, formula)
    yield estimate("local-sgd", whole + trained, ring // _SYNC_EVERY, f"2(n-1)/n P every {_SYNC_EVERY}th step")
    neighbours = min(2, ranks - 1)
    yield estimate("gossip", whole + neighbours * trained, neighbours * trained, f"{neighbours} P")


# -- the choice ------------------------------------------------------------------------------------------------------


def _choice(
    sizes: _Sizes, estimates: Sequence[Estimate], ranks: int, memory_gib: float | None
) -> tuple[str | None, list[str]]:
    """The recommended word, and sentences: what to do, then further reasons."""
    room = math.inf if memory_gib is None else memory_gib * _GIB * (1 - _FOR_ACTIVATIONS) - _PROCESS_BYTES
    have = f"{memory_gib or 0:g} GiB, or {_size(max(0, room))} without the process itself and 30 % for activations"
    # Every rank holds the whole model once, while it starts.
    start = sizes.trained + sizes.frozen
    alone = start + sizes.trained + sizes.state
    if start > room:
        begins = f"This does not fit: the weights alone take {_size(start)}, every rank holds them all while it starts"
        return None, [f"{begins}, and a rank has {have}. Give ranks more memory."]
    if ranks == 1 and alone > room:
        more = next((n for n in (2, 4, 8, 16, 32, 64) if _needs(_estimates(sizes, n))["fsdp"] <= room), None)
        remedy = f'number_of_processes={more} and strategy="fsdp" would fit' if more else "Give it more memory"
        takes = f"training takes {_size(alone)} and activations, and there are {have}"
        return None, [f"This does not fit: {takes}. {remedy}."]
    if ranks == 1:
        return None, ["One process has nothing to exchange: every strategy is the same."]
    count, needs = f"{sizes.count:,} parameters", _needs(estimates)
    if sizes.count < _SMALL:
        faster = f"with {count}, a batch is computed faster than ranks can exchange anything"
        remedy = "Use one process and larger batches; DataLoader workers help if the data is slow."
        return None, [f"Do not distribute this, it is too small: {faster}.", remedy]
    if needs["ddp"] <= room:
        return "ddp", [
            f'Use strategy="ddp": {count} take {_size(needs["ddp"])} of each rank, and a step sends least of all that are exact.',
            f"Each rank sends {_size(estimates[0].sent_bytes or 0)} a step, and overlaps that with the backward pass.",
            'If the network is slow, strategy="local-sgd" sends less; it converges, but is not equal to one process.',
        ]
    needed = f'strategy="ddp" needs {_size(needs["ddp"])} on each rank, and there are {have}.'
    for word, why in _WHY.items():
        if needs.get(word, math.inf) <= room:
            return word, [f'Use strategy="{word}": it needs {_size(needs[word])} on each rank.', needed, why]
    least = min(needs, key=needs.__getitem__)
    takes = f'strategy="{least}" needs least, {_size(needs[least])} on each rank, and there are {have}'
    remedy = "Use more processes, or an optimizer with less state."
    return None, [f"This does not fit on {ranks} ranks: {takes}. {remedy}", needed]


_WHY = {
    "fsdp": "It sends half as much again as ddp, and gathers one block's weights at a time.",
    "pipeline": "Its stages wait for each other for (stages - 1) / (micro_batches + stages - 1) of the time.",
    "tensor": "It exchanges the output of every Linear and Embedding: use it between GPUs of one machine.",
}
"""What else is to be known of the strategies that need less memory than ddp, the first that fits being recommended."""


def _needs(estimates: Iterable[Estimate]) -> dict[str, int]:
    """The bytes that each strategy needs in a rank."""
    return {one.strategy: one.memory_bytes for one in estimates}


def _size(amount: float) -> str:
    unit, name = next((each for each in ((_GIB, "GiB"), (_MIB, "MiB")) if amount >= each[0]), (1024, "KiB"))
    return f"{amount / unit:.1f} {name}"
