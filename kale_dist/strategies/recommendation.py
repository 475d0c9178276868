"""Recommends a strategy for a model by the memory that each needs and the bytes that it sends. Pure.

Nothing is run or measured: the figures follow from the sizes of the model's tensors. Figures that depend on the data
(activations, and the bytes that pipeline and tensor parallelism send) are given in words.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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

_MOMENTS = {
    "ASGD": 1, "Adadelta": 2, "Adafactor": 0, "Adagrad": 1, "Adam": 2, "AdamW": 2, "Adamax": 2, "LBFGS": 0, "Muon": 1,
    "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Rprop": 2, "SGD": 0, "SparseAdam": 2,
}  # fmt: skip
"""Tensors of a parameter's shape that torch's optimizers keep for it, with their default options."""

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
    if isinstance(number_of_processes, bool) or not isinstance(number_of_processes, int) or number_of_processes < 1:
        raise ConfigError(
            "number_of_processes", f"{number_of_processes!r} is not a number of ranks", "Give a number such as 2"
        )
    if memory_gib is not None:
        is_number = isinstance(memory_gib, int | float) and not isinstance(memory_gib, bool)
        if not is_number or not math.isfinite(memory_gib) or memory_gib <= 0:
            raise ConfigError("memory_gib", f"{memory_gib!r} is not an amount of memory", "Give GiB, such as 16")
    sizes = _Sizes.of(models, optimizers)
    estimates = tuple(_estimates(sizes, number_of_processes)) if number_of_processes > 1 else ()
    strategy, sentence, reasons = _choice(sizes, estimates, number_of_processes, memory_gib)
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
    blocks: tuple[Block, ...]
    largest_block: int

    @classmethod
    def of(cls, models: Sequence[Any], optimizers: Sequence[Any]) -> _Sizes:
        parameters = {id(p): p for model in models for p in model.parameters()}
        buffers = {id(b): b for model in models for b in model.buffers()}
        trained = [p for p in parameters.values() if p.requires_grad]
        shardable = {
            id(p): p
            for model in models
            for module in model.modules()
            if kind_of(module)
            for p in parameters_of(module).values()
            if p.requires_grad
        }
        blocks = [block for model in models for block in blocks_of(model)]
        total = _bytes(trained)
        return cls(
            count=sum(p.numel() for p in trained),
            trained=total,
            frozen=_bytes(parameters.values()) - total + _bytes(buffers.values()),
            state=sum(_state_bytes(optimizer) for optimizer in optimizers),
            shardable=_bytes(shardable.values()),
            blocks=tuple(blocks),
            largest_block=max((block.bytes for block in blocks), default=0),
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
            own = parameter.numel() * parameter.element_size()
            if not state:
                total += own * _moments(optimizer, options) if parameter.requires_grad else 0
            else:
                total += _bytes(value for value in state.values() if hasattr(value, "element_size"))
    return total


def _moments(optimizer: Any, options: Mapping[str, Any]) -> int:
    name = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _MOMENTS), None)
    if name is None:
        return 2
    if name == "LBFGS":
        return 2 * int(options.get("history_size", 100))
    extra = ("amsgrad", "centered") if name != "SGD" else ()
    has_momentum = name in ("SGD", "RMSprop") and bool(options.get("momentum"))
    return _MOMENTS[name] + has_momentum + sum(bool(options.get(option)) for option in extra)


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
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # best[k]: the least largest part of the first k items, and where the last part begins. Of equal ones the latest, so
    # that an activation stays with the layer before it.
    best = [(float(total), 0) for total in sums]
    history = []
    for part in range(2, parts + 1):
        before, best = best, [(math.inf, 0)] * len(sums)
        for end in range(part, len(sums)):
            least, cut = min((max(before[i][0], sums[end] - sums[i]), -i) for i in range(part - 1, end))
            best[end] = least, -cut
        history.append(best)
    cuts, end = [], len(sizes)
    for step in reversed(history):
        end = step[end][1]
        cuts.append(end)
    return cuts[::-1]


# -- estimates -------------------------------------------------------------------------------------------------------


def _estimates(sizes: _Sizes, ranks: int) -> Iterator[Estimate]:
    trained, frozen, state = sizes.trained, sizes.frozen, sizes.state
    # Weights, gradients and state.
    whole = 2 * trained + state
    ring = 2 * trained * (ranks - 1) // ranks

    def estimate(strategy: str, memory: int, sent: int | None, formula: str) -> Estimate:
        return Estimate(strategy=strategy, memory_bytes=memory + frozen, sent_bytes=sent, formula=formula)

    yield estimate("ddp", whole + trained, ring, "2(n-1)/n P")
    yield estimate("fsdp", whole // ranks + 2 * sizes.largest_block, 3 * trained * (ranks - 1) // ranks, "3(n-1)/n P")
    if len(sizes.blocks) >= ranks:
        share = _largest_share([block.bytes for block in sizes.blocks], ranks)
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


def _largest_share(sizes: Sequence[int], parts: int) -> float:
    cuts = [0, *balanced(sizes, parts), len(sizes)]
    largest = max(sum(sizes[i:j]) for i, j in itertools.pairwise(cuts))
    return largest / max(1, sum(sizes))


# -- the choice ------------------------------------------------------------------------------------------------------


def _choice(
    sizes: _Sizes, estimates: Sequence[Estimate], ranks: int, memory_gib: float | None
) -> tuple[str | None, str, list[str]]:
    """The recommended word, the sentence, and further reasons."""
    room = None if memory_gib is None else memory_gib * _GIB * (1 - _FOR_ACTIVATIONS) - _PROCESS_BYTES
    alone = 2 * sizes.trained + sizes.state + sizes.frozen
    # Every rank holds the whole model once, while it starts.
    start = sizes.trained + sizes.frozen
    have = ""
    if room is not None:
        have = f"{memory_gib:g} GiB, or {_size(max(0, room))} without the process itself and 30 % for activations"
    if room is not None and start > room:
        sentence = (
            f"This does not fit: the weights alone take {_size(start)}, every rank holds them all while it starts, and a"
            f" rank has {have}. Give ranks more memory."
        )
        return None, sentence, []
    if room is not None and alone > room and ranks == 1:
        more = next((n for n in (2, 4, 8, 16, 32, 64) if _fits(_by_word(_estimates(sizes, n), "fsdp"), room)), None)
        remedy = f'number_of_processes={more} and strategy="fsdp" would fit' if more else "Give it more memory"
        sentence = f"This does not fit: training takes {_size(alone)} and activations, and there are {have}. {remedy}."
        return None, sentence, []
    if ranks == 1:
        return None, "One process has nothing to exchange: every strategy is the same.", []
    count = f"{sizes.count:,} parameters"
    if sizes.count < _SMALL:
        sentence = (
            f"Do not distribute this, it is too small: with {count}, a batch is computed faster than ranks can exchange"
            " anything."
        )
        return None, sentence, ["Use one process and larger batches; DataLoader workers help if the data is slow."]
    ddp = _by_word(estimates, "ddp")
    if _fits(ddp, room):
        sentence = f'Use strategy="ddp": {count} take {_size(ddp.memory_bytes)} of each rank, and a step sends least of all that are exact.'
        reasons = [f"Each rank sends {_size(ddp.sent_bytes or 0)} a step, and overlaps that with the backward pass."]
        reasons.append(
            'If the network is slow, strategy="local-sgd" sends less; it converges, but is not equal to one process.'
        )
        return "ddp", sentence, reasons
    reasons = [f'strategy="ddp" needs {_size(ddp.memory_bytes)} on each rank, and there are {have}.']
    for word in ("fsdp", "pipeline", "tensor"):
        found = _by_word(estimates, word)
        if found is not None and _fits(found, room):
            reasons += [_WHY[word]]
            return word, f'Use strategy="{word}": it needs {_size(found.memory_bytes)} on each rank.', reasons
    least = min(estimates, key=lambda one: one.memory_bytes)
    sentence = (
        f'This does not fit on {ranks} ranks: strategy="{least.strategy}" needs least, {_size(least.memory_bytes)} on each'
        f" rank, and there are {have}. Use more processes, or an optimizer with less state."
    )
    return None, sentence, reasons


_WHY = {
    "fsdp": "It sends half as much again as ddp, and gathers one block's weights at a time.",
    "pipeline": "Its stages wait for each other for (stages - 1) / (micro_batches + stages - 1) of the time.",
    "tensor": "It exchanges the output of every Linear and Embedding: use it between GPUs of one machine.",
}


def _by_word(estimates: Any, word: str) -> Any:
    return next((one for one in estimates if one.strategy == word), None)


def _fits(estimate: Estimate, room: float | None) -> bool:
    return room is None or estimate.memory_bytes <= room


def _size(amount: float) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB")):
        if amount >= unit:
            return f"{amount / unit:.1f} {name}"
    return f"{amount / 1024:.1f} KiB"
