"""Gossip: each rank steps its own optimizer, then averages its weights with those of a few neighbours.

A *round* is a list of distances round the circle of ranks. For each distance d in it, rank i sends its weights to rank
i + d and receives those of rank i - d, and with m distances,

    x_i  <-  x_i + sum over d of (x_(i-d) - x_i) / (m + 1).

Rank i gives as many shares of x_i away as it receives, so the mean of all ranks is kept: D-PSGD (Lian et al., NeurIPS 2017)
with the mixing after the step. With `send="changed"` (Koloskova et al., CHOCO-SGD, ICML 2019, algorithm 2) both sides keep a
copy of x_i as the neighbour knows it; rank i sends the largest differences, both add them to the copy, and ranks mix with the
copies. What was not sent is part of the next difference, so nothing is lost (error feedback).
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.worker.parallel.flat import Flat
from kale_dist.worker.parallel.local_averaging import OwnSteps, different_steps
from kale_dist.worker.parallel.pairs import Pair, open_pairs
from kale_dist.worker.training.strategy import Parts

CHANGED_SHARE = 0.1
"""The share of all numbers that a rank sends with `send="changed"`."""
CHANGED_STEP = 0.5
"""How far ranks move towards their copies of the neighbours: less than the whole way, or sparse changes oscillate."""


def rounds_of(graph: str, world: int) -> list[list[int]]:
    """Return the distances to the neighbours of each round; rounds take turns.

    Args:
        graph: `ring` or `exponential` (Assran et al., ICML 2019, section 3: one neighbour at a time).
        world: Number of ranks.
    """
    if world == 1:
        return [[]]
    if graph == "ring":
        return [[1, world - 1] if world > 2 else [1]]  # noqa: PLR2004 - two ranks have one neighbour each
    return [[2**power] for power in range(math.ceil(math.log2(world)))]


def partners_of(graph: str, rank: int, world: int) -> list[int]:
    """Return the ranks that a rank meets asynchronously: at odd distances, so that even ranks meet odd ranks only.

    Args:
        graph: `ring` (distance 1) or `exponential` (1, 3, 5, 9, ...: Assran et al.'s bipartite graph).
        rank: The rank.
        world: Number of ranks, even.
    """
    distances = [1]
    if graph == "exponential":
        distances += [1 + 2**power for power in range(1, max(1, math.ceil(math.log2(world))))]
    return sorted({(rank + sign * distance) % world for distance in distances for sign in (1, -1)})


class Neighbours(OwnSteps):
    """Gossip, synchronous or asynchronous."""

    levels = frozenset({"consensus_distance"})

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Copy the weights where the neighbours' copies start from them, and in the asynchronous mode connect to partners."""
        super().prepare(parts, stack)
        self._distance = 0.0
        self._keeps_copies = self.settings.mode == "async" or self.settings.send == "changed"
        if self._keeps_copies and any(map(torch.nn.parameter.is_lazy, parts.named.values())):
            raise ConfigError(
                "model",
                "has parameters without a shape, and this kind of gossip keeps copies of all weights from the start",
                "Run one batch through the model before the call, or use Gossip(mode='sync', send='all')",
            )
        self._circle: _Circle | _Meetings | None = None
        if self.group.is_alone:
            return
        self._circle = _Meetings(self, stack) if self.settings.mode == "async" else _Circle(self)

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Add new parameters.

        Raises:
            ConfigError: The settings need copies of all weights from the start.
        """
        known = {id(tensor) for tensor in self.parts.named.values()}
        if self._keeps_copies and any(id(parameter) not in known for parameter in parameters):
            raise ConfigError(
                "strategy",
                "'gossip' keeps copies of all weights from the start, and the step trains parameters that came later",
                "Make the optimizer before the call, or use Gossip(mode='sync', send='all')",
            )
        super().adopt(parameters)

    def stepped(self) -> None:
        """Average with neighbours."""
        super().stepped()
        if self._circle is not None:
            self._circle.meet()

    @torch.no_grad()
    def end_epoch(self) -> None:
        """Measure how far the ranks' weights are apart, and average them."""
        if self._circle is not None:
            self._circle.end()
            if not self.steps:
                self.are_apart()
            own = Flat(self.weights()).read()
            mean = self.average(self.weights())
            squares = sum(float((a - b).double().pow(2).sum()) for a, b in zip(own.buffers, mean.buffers, strict=True))
            self._distance = math.sqrt(sum(self.group.gather(squares)) / self.group.world_size)
            mean.write()
            self._circle.begin(mean.buffers)
        super().end_epoch()

    def metrics(self) -> dict[str, float]:
        """Return the bytes sent, and the consensus distance at the end of the epoch, before all ranks were averaged.

        The distance is the root of the mean squared distance of the ranks' weights from their mean (Kong et al.,
        Consensus Control for Decentralized Deep Learning, ICML 2021, section 3).
        """
        return {**super().metrics(), "consensus_distance": self._distance / self.group.world_size}


class _Circle:
    """Synchronous gossip.

    Args:
        owner: The strategy.
    """

    def __init__(self, owner: Neighbours) -> None:
        self._owner = owner
        self._group = owner.group
        self._rounds = rounds_of(owner.settings.graph, owner.group.world_size)
        self._sends_changes = owner.settings.send == "changed"
        self._sent: dict[int, list[Tensor]] = {}
        """This rank's weights as the neighbour knows them, by the distance to the neighbour."""
        self._known: dict[int, list[Tensor]] = {}
        """The weights, as far as this rank knows, of the neighbour at that distance in the other direction."""
        self.begin(Flat(owner.weights()).read().buffers)

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Called when all ranks have these weights: set the copies to them."""
        if self._sends_changes:
            for distance in {distance for distances in self._rounds for distance in distances}:
                self._sent[distance] = [tensor.clone() for tensor in weights]
                self._known[distance] = [tensor.clone() for tensor in weights]

    @torch.no_grad()
    def meet(self) -> None:
        """Mix this rank's weights with the weights of this round's neighbours."""
        own = Flat(self._owner.weights()).read()
        distances = self._round()
        if self._sends_changes:
            self._mix_changes(own, distances)
        else:
            received = self._exchange(dict.fromkeys(distances, own.buffers))
            share = 1 / (len(distances) + 1)
            # The mean of all, in one go: what one rank loses and another gains are the same products.
            for number, mine in enumerate(own.buffers):
                mine.mul_(share)
                for distance in distances:
                    mine.add_(received[distance][number], alpha=share)
        own.write()

    def end(self) -> None:
        """Check that the epoch is over on the neighbours too, and then on all ranks."""
        self._exchange({distance: [] for distance in self._round()}, at_end=True)
        self._owner.agree(at_end=True)

    def _round(self) -> list[int]:
        return self._rounds[self._owner.steps % len(self._rounds)]

    def _mix_changes(self, own: Flat, distances: Sequence[int]) -> None:
        messages: dict[int, list[Tensor]] = {}
        for distance in distances:
            messages[distance] = []
            for mine, sent in zip(own.buffers, self._sent[distance], strict=True):
                change = mine - sent
                count = max(1, int(CHANGED_SHARE * change.numel()))
                places = change.abs().topk(count, sorted=False).indices
                messages[distance] += [places.int(), change[places]]
        received = self._exchange(messages)
        step = CHANGED_STEP / (len(distances) + 1)
        for distance in distances:
            for kept, message in ((self._sent, messages), (self._known, received)):
                for number, tensor in enumerate(kept[distance]):
                    places, values = message[distance][2 * number : 2 * number + 2]
                    tensor.index_add_(0, places, values)
            for mine, known, sent in zip(own.buffers, self._known[distance], self._sent[distance], strict=True):
                mine.add_(known - sent, alpha=step)

    def _exchange(self, messages: dict[int, list[Tensor]], *, at_end: bool = False) -> dict[int, list[Tensor]]:
        """Send a message for each distance, and receive a message of the same sizes from each neighbour.

        Raises:
            KaleDistError: A neighbour is at another step.
        """
        group, device = self._group, self._group.device
        step = 2 * self._owner.steps + at_end
        # Filled there: a copy of a number to a GPU is waited for.
        head = torch.full((1,), step, device=device)
        heads, received, first, rest = [], {}, [], []
        for distance, message in messages.items():
            after = dist.get_global_rank(group.world, (group.rank + distance) % group.world_size)
            before = dist.get_global_rank(group.world, (group.rank - distance) % group.world_size)
            heads.append(torch.empty_like(head))
            received[distance] = [torch.empty_like(tensor) for tensor in message]
            first += [self._operation(dist.isend, head, after), self._operation(dist.irecv, heads[-1], before)]
            for tag, (mine, theirs) in enumerate(zip(message, received[distance], strict=True), start=1):
                rest += [
                    self._operation(dist.isend, mine, after, tag),
                    self._operation(dist.irecv, theirs, before, tag),
                ]
                self._owner.bytes_sent += mine.numel() * mine.element_size()
        works = [dist.batch_isend_irecv(operations) for operations in (first, rest) if operations]
        for work in works[0]:
            work.wait()
        if any(theirs != step for theirs in torch.cat(heads).tolist()):
            raise KaleDistError(different_steps(self._owner.steps))
        for work in (work for later in works[1:] for work in later):
            work.wait()
        return received

    def _operation(self, kind: Any, tensor: Tensor, peer: int, tag: int = 0) -> dist.P2POp:
        return dist.P2POp(kind, tensor, peer, group=self._group.world, tag=tag)


class _Meetings:
    """Asynchronous gossip (AD-PSGD): an even rank sends its weights to an odd one, which answers at once with its own.

    Both move half of the difference towards each other, so their mean is kept, whatever either has trained in the
    meantime. Threads of the odd rank answer with its weights after its latest step. The rank adds their changes to its
    weights when the present step is over, as a backward pass must not see weights change.

    Args:
        owner: The strategy.
        stack: Ends the threads.
    """

    def __init__(self, owner: Neighbours, stack: contextlib.ExitStack) -> None:
        self._owner = owner
        group, graph = owner.group, owner.settings.graph
        world = group.world_size
        wanted = [(even, odd) for even in range(0, world, 2) for odd in partners_of(graph, even, world)]
        self._pairs = open_pairs(group, wanted)
        self._is_active = group.rank % 2 == 0
        self._choice = random.Random(group.rank)  # noqa: S311 - of a partner; leaves the user's generators alone
        self._lock = threading.Lock()
        self._shown: list[Tensor] = []
        """In an odd rank: its weights after its latest step, with the changes of the meetings since."""
        self._before: list[Tensor] = []
        """In an odd rank: its weights after its latest step, without those changes."""
        self._problem: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self.begin(self._read().buffers)
        if not self._is_active:
            for pair in self._pairs.values():
                thread = threading.Thread(target=self._answer, args=(pair,), name=f"gossip-{pair.other}", daemon=True)
                thread.start()
                self._threads.append(thread)
        stack.push(self._leave)

    def _read(self) -> Flat:
        return Flat(self._owner.weights(), torch.device("cpu")).read()

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Called when all ranks have these weights: answer partners with them."""
        if not self._is_active:
            with self._lock:
                self._shown = [tensor.to("cpu", copy=True) for tensor in weights]
                self._before = [tensor.clone() for tensor in self._shown]

    @torch.no_grad()
    def meet(self) -> None:
        """In an even rank meet a partner; in an odd rank add the partners' changes to the weights."""
        own = self._read()
        if self._is_active:
            pair = self._pairs[self._choice.choice(sorted(self._pairs))]
            theirs = [torch.empty_like(tensor) for tensor in own.buffers]
            pair.send(torch.tensor(1, device="cpu"), *own.buffers)
            pair.receive(*theirs)
            self._owner.bytes_sent += own.bytes
            for mine, other in zip(own.buffers, theirs, strict=True):
                mine.add_(other - mine, alpha=0.5)
        else:
            self._check()
            with self._lock:
                for mine, shown, before in zip(own.buffers, self._shown, self._before, strict=True):
                    mine.add_(shown - before)
                    shown.copy_(mine)
                    before.copy_(mine)
        own.write()

    def end(self) -> None:
        """Wait until no rank meets another any more; then add the last changes to the weights."""
        self._owner.agree(at_end=True)
        if not self._is_active:
            self.meet()

    def _check(self) -> None:
        if self._problem is not None:
            raise KaleDistError(f"A neighbour can no longer be reached: {self._problem}") from self._problem

    @torch.no_grad()
    def _answer(self, pair: Pair) -> None:
        """Answer one partner until it leaves. Runs in a thread."""
        try:
            theirs = [torch.empty_like(tensor) for tensor in self._shown]
            while True:
                head = torch.tensor(0, device="cpu")
                pair.receive(head)
                if not head:
                    return
                pair.receive(*theirs)
                with self._lock:
                    mine = [tensor.clone() for tensor in self._shown]
                    for shown, own, other in zip(self._shown, mine, theirs, strict=True):
                        shown.add_(other - own, alpha=0.5)
                    self._owner.bytes_sent += sum(tensor.numel() * tensor.element_size() for tensor in mine)
                pair.send(*mine)
        except RuntimeError as error:
            self._problem = error

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the threads and close the connections, unless the training failed."""
        if kind is not None:
            return
        if self._is_active:
            for pair in self._pairs.values():
                pair.send(torch.tensor(0, device="cpu"))
        for thread in self._threads:
            thread.join()
        for pair in self._pairs.values():
            pair.close()
