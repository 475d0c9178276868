"""Parameter servers: what a server does, and the messages between servers and workers (`server_worker.py`).

Parameters are divided among servers as whole tensors. A worker's request is a header of whole numbers (`HEAD`), the
options of the optimizer's parameter groups where they have changed (learning rates), and gradients in flat buffers; the
answer is an error's text or nothing and, for a step, the new weights. A synchronous server reads one request of each worker
in the order of the ranks and sums in that order. Its backup gets the same requests, and so has equal bits; it needs no
thread. An asynchronous server has a thread for each worker, and carries the values that workers exchange among themselves,
because torch's collectives fail for good when a rank is lost.
"""

from __future__ import annotations

import contextlib
import enum
import io
import pickle
import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.strategies.server import DEFAULT_STALENESS
from kale_dist.wire import context
from kale_dist.worker.parallel.flat import Flat
from kale_dist.worker.parallel.pairs import LostPeerError, Pair, open_pairs
from kale_dist.worker.training.strategy import Parts, Strategy

HEAD = 4
"""Whole numbers at the beginning of a request: kind, batch, bytes of the options, and the bits of the p of a p-norm. For each
parameter follows 1 if it has a gradient, else 0."""
LONGEST_STALENESS = 8
"""From this staleness on the histogram has one class."""


class RequestKind(enum.IntEnum):
    """Kinds of requests from a worker."""

    STEP = 1
    """Step the optimizer with these gradients, and send the new weights."""
    NORM = 2
    """Send the norm of the mean of these gradients."""
    END = 3
    """The epoch is over."""
    STATE = 4
    """Send the state of the optimizer. Only rank 0 asks this, between epochs."""
    EXCHANGE = 5
    """Send the values of all workers that are left. Asynchronous only; all of them ask this at the same place."""
    LEAVE = 6
    """The training is over; needs no answer."""


def norm_bits(kind: float) -> int:
    """Return the bits of the p of a p-norm, which may be inf, as a whole number."""
    return int(torch.tensor(kind, dtype=torch.float64, device="cpu").view(torch.int64))


def norm_of(bits: int) -> float:
    """Return the p whose bits `norm_bits` returned."""
    return float(torch.tensor(bits, dtype=torch.int64, device="cpu").view(torch.float64))


class Shard:
    """The parameters of one server, in that server and in the workers.

    Args:
        parameters: The parameters, in the order of the optimizer.
        indices: Their numbers in the optimizer.
    """

    def __init__(self, parameters: Sequence[Tensor], indices: Sequence[int]) -> None:
        self.parameters = list(parameters)
        self.indices = list(indices)

    def weights(self) -> Flat:
        """Make flat buffers for the weights, on the CPU."""
        return Flat(self.parameters, torch.device("cpu"))


def divide(parameters: Sequence[Tensor], servers: int) -> list[Shard]:
    """Give each parameter, the largest first, to the server with the fewest bytes."""
    held: list[list[int]] = [[] for _ in range(servers)]
    sizes = [0] * servers
    by_size = sorted(range(len(parameters)), key=lambda i: -parameters[i].numel() * parameters[i].element_size())
    for index in by_size:
        least = sizes.index(min(sizes))
        held[least].append(index)
        sizes[least] += parameters[index].numel() * parameters[index].element_size()
    return [Shard([parameters[i] for i in sorted(indices)], sorted(indices)) for indices in held]


def open_shards(parts: Parts, servers: int, workers: int) -> tuple[list[Shard], dict[int, Pair]]:
    """Divide the parameters and open the connections; all ranks have to call this at the start.

    Returns:
        The shards of all servers, and this rank's connections by rank.

    Raises:
        ConfigError: The model cannot be divided.
    """
    parameters = [parameter for options in parts.optimizer.param_groups for parameter in options["params"]]
    if any(map(torch.nn.parameter.is_lazy, parameters)):
        raise ConfigError(
            "model",
            "has parameters without a shape, which cannot be divided among servers",
            "Run one batch through the model before the call",
        )
    wanted = [(worker, server) for worker in range(workers) for server in range(workers, parts.group.world_size)]
    return divide(parameters, servers), open_pairs(parts.group, wanted)


class Server(Strategy):
    """A rank without data, which holds a shard, steps the optimizer for it, and answers workers until they leave.

    A server takes part in nothing else, so that workers can do without it.
    """

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Connect to the workers, and leave only this server's parameters in the optimizer."""
        super().prepare(parts, stack)
        workers, rank = self.layout.shards, parts.group.rank
        servers = self.settings.servers
        shards, pairs = open_shards(parts, servers, workers)
        self._shard = shards[(rank - workers) % servers]
        self._pairs = [pairs[worker] for worker in range(workers)]
        stack.push(self._leave)
        own = set(map(id, self._shard.parameters))
        optimizer = parts.optimizer
        # This is the optimizer's own method; later the loop replaces it.
        self._step_optimizer = optimizer.step
        for options in optimizer.param_groups:
            options["params"] = [parameter for parameter in options["params"] if id(parameter) in own]
        for parameter in [parameter for parameter in optimizer.state if id(parameter) not in own]:
            del optimizer.state[parameter]
        self._weights = self._shard.weights()
        self._counting = threading.Lock()
        self._bytes_sent = 0
        self._staleness = [0] * (LONGEST_STALENESS + 1)
        self._largest_lead = 0

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for pair in self._pairs:
                pair.close()

    # -- the training ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer workers until all have left."""
        if self.settings.mode == "sync":
            self._serve_together()
        else:
            _Asynchronous(self).run()

    def _serve_together(self) -> None:
        """Read one request of each worker, then answer all of them, until the workers leave.

        Raises:
            KaleDistError: The workers' requests are not alike.
        """
        total, received = self._shard.weights(), self._shard.weights()
        while True:
            heads: list[list[int]] = []
            used = [False] * len(self._shard.parameters)
            for number, pair in enumerate(self._pairs):
                while (head := self.receive_head(pair))[0] == RequestKind.STATE:
                    self.answer_state(pair)
                heads.append(head)
                if head[0] in (RequestKind.END, RequestKind.LEAVE):
                    continue
                options = self.receive_options(pair, head)
                if number == 0:
                    self.take_options(options)
                pair.receive(*(received if number else total).buffers)
                for mine, theirs in zip(total.buffers, received.buffers if number else [], strict=False):
                    mine.add_(theirs)
                used = [is_used or bool(flag) for is_used, flag in zip(used, head[HEAD:], strict=True)]
            kind = heads[0][0]
            self._check(heads)
            if kind == RequestKind.LEAVE:
                return
            for buffer in total.buffers:
                buffer.mul_(1 / len(self._pairs))
            if kind == RequestKind.STEP:
                self.step(total, used)
                self._weights.read()
            norm = self._norm(total, used, heads[0][3]) if kind == RequestKind.NORM else None
            for pair in self._pairs:
                if kind == RequestKind.STEP:
                    self.answer(pair, *self._weights.buffers)
                else:
                    self.answer(pair, *(() if norm is None else (norm,)))
            if kind == RequestKind.END:
                self.answer_metrics(self._pairs[0])
            context.mark_progress()

    def _check(self, heads: Sequence[Sequence[int]]) -> None:
        """Check that all workers are at the same place.

        Raises:
            KaleDistError: They are not; the workers get the same error.
        """
        kinds, batches = {head[0] for head in heads}, {head[1] for head in heads}
        if len(kinds) == 1 and (len(batches) == 1 or kinds <= {RequestKind.END, RequestKind.LEAVE}):
            return
        what = "some have ended the epoch" if RequestKind.END in kinds else "some are elsewhere"
        text = (
            f"The workers do not take the same steps: when one was in batch {max(batches)}, {what}. Call optimizer.step()"
            " equally often on every rank, whatever the data, and leave the loop over the loader on all ranks or none"
        )
        for pair in self._pairs:
            self.answer_error(pair, text)
        raise KaleDistError(text)

    def _norm(self, gradients: Flat, used: Sequence[bool], kind: int) -> Tensor:
        given = [piece for piece, is_used in zip(gradients.pieces, used, strict=True) if is_used]
        return get_total_norm(given, norm_of(kind)).double().reshape(1)

    # -- requests and answers --------------------------------------------------------------------------------------

    def receive_head(self, pair: Pair) -> list[int]:
        """Receive the header of a worker's next request."""
        head = torch.empty(HEAD + len(self._shard.parameters), dtype=torch.int64, device="cpu")
        pair.receive(head)
        return head.tolist()

    def receive_options(self, pair: Pair, head: Sequence[int]) -> list[dict[str, Any]]:
        """Receive the options of the parameter groups, if the request has them; else return an empty list."""
        if not head[2]:
            return []
        data = torch.empty(head[2], dtype=torch.uint8, device="cpu")
        pair.receive(data)
        options: list[dict[str, Any]] = pickle.loads(data.numpy().tobytes())
        return options

    def take_options(self, given: Sequence[dict[str, Any]]) -> None:
        """Set options of the optimizer's parameter groups."""
        for options, new in zip(self.parts.optimizer.param_groups, given, strict=False):
            options.update(new)

    @torch.no_grad()
    def step(self, gradients: Flat, used: Sequence[bool]) -> None:
        """Step the optimizer; a parameter that no worker used has no gradient."""
        for parameter, piece, is_used in zip(self._shard.parameters, gradients.pieces, used, strict=True):
            whole = torch.view_as_complex(piece) if parameter.is_complex() else piece
            parameter.grad = whole.to(parameter.device) if is_used else None
        self._step_optimizer()

    def answer(self, pair: Pair, *tensors: Tensor) -> None:
        """Confirm a request, and send the tensors that it asked for."""
        pair.send_bytes(b"")
        pair.send(*tensors)
        with self._counting:
            self._bytes_sent += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def answer_error(self, pair: Pair, text: str) -> None:
        """Refuse a request; the worker raises this text."""
        pair.send_bytes(text.encode())

    def note(self, *, staleness: int | None = None, lead: int = 0) -> None:
        """Count a gradient by its age in versions, and keep the largest lead of a worker over the slowest."""
        if staleness is not None:
            self._staleness[min(staleness, LONGEST_STALENESS)] += 1
        self._largest_lead = max(self._largest_lead, lead)

    # -- between epochs --------------------------------------------------------------------------------------------

    def answer_state(self, pair: Pair) -> None:
        """Send this shard's part of the optimizer's state."""
        parameters = zip(self._shard.indices, self._shard.parameters, strict=True)
        state = self.parts.optimizer.state
        part = {index: dict(state[parameter]) for index, parameter in parameters if parameter in state}
        file = io.BytesIO()
        torch.save(part, file)
        pair.send_bytes(file.getvalue())

    def answer_metrics(self, pair: Pair) -> None:
        """Send an epoch's numbers: bytes sent, and in the asynchronous mode the staleness of gradients and the largest lead."""
        found: dict[str, float] = {"bytes_sent": self._bytes_sent}
        self._bytes_sent = 0
        if self.settings.mode == "async":
            for number, count in enumerate(self._staleness):
                found[f"staleness_{number}{'_or_more' if number == LONGEST_STALENESS else ''}"] = count
            self._staleness = [0] * (LONGEST_STALENESS + 1)
            # Only one server reports the lead, as rank 0 adds up the numbers of all servers.
            if self.parts.group.rank == self.layout.shards:
                found["steps_ahead"] = self._largest_lead
            self._largest_lead = 0
        pair.send_bytes(pickle.dumps(found))


class _Asynchronous:
    """An asynchronous server: a thread for each worker, and a bound on how far a worker may be ahead of the slowest.

    A worker's clock is the number of its steps that were carried out in this epoch. The answer to a step is held back until
    the clock is at most `staleness` ahead of the slowest worker's (Ho et al., stale synchronous parallel, NeurIPS 2013). The
    bound is on steps: how many steps of others came between a worker's weights and its gradient is measured, not bounded.
    When the connection to a worker ends, the server forgets the worker, and no other waits for it.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._pairs = server._pairs  # noqa: SLF001 - ours: a part of the server, in this file
        self._bound = DEFAULT_STALENESS if server.settings.staleness is None else server.settings.staleness
        self._state = threading.Condition()
        self._living = set(range(len(self._pairs)))
        self._clocks = dict.fromkeys(self._living, 0)
        """Clocks of the workers that have not ended the epoch."""
        self._version = 0
        self._seen = [0] * len(self._pairs)
        """The version of the weights that each worker has."""
        self._gathering: dict[int, bytes] = {}
        """Values of the workers that wait for the others."""
        self._final = server._shard.weights()  # noqa: SLF001 - ours
        """The weights at the end of the epoch."""
        self._ends: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve until all workers have left or are lost.

        Raises:
            BaseException: A thread's. The other threads end with the process.
        """
        for number in range(len(self._pairs)):
            threading.Thread(target=self._thread, args=(number,), name=f"worker-{number}", daemon=True).start()
        for _ in self._pairs:
            error = self._ends.get()
            if error is not None:
                raise error

    def _thread(self, number: int) -> None:
        error: BaseException | None = None
        try:
            with contextlib.suppress(LostPeerError):
                self._serve(number)
        except BaseException as caught:  # noqa: BLE001 - raised again in the main thread
            error = caught
        with self._state:
            self._living.discard(number)
            self._clocks.pop(number, None)
            self._state.notify_all()
        self._ends.put(error)

    def _serve(self, number: int) -> None:
        server, pair = self._server, self._pairs[number]
        shard = server._shard  # noqa: SLF001 - ours
        gradients, weights = shard.weights(), shard.weights()
        while (head := server.receive_head(pair))[0] != RequestKind.LEAVE:
            context.mark_progress()
            match head[0]:
                case RequestKind.STEP:
                    options = server.receive_options(pair, head)
                    pair.receive(*gradients.buffers)
                    self._step(number, options, gradients, [bool(flag) for flag in head[HEAD:]], weights)
                    server.answer(pair, *weights.buffers)
                case RequestKind.END:
                    self._gather(number, b"", ends_epoch=True)
                    server.answer(pair, *self._final.buffers)
                    if not number:
                        server.answer_metrics(pair)
                case RequestKind.EXCHANGE:
                    pair.send_bytes(pickle.dumps(self._gather(number, pair.receive_bytes())))
                case RequestKind.STATE:
                    server.answer_state(pair)

    def _step(
        self, number: int, options: list[dict[str, Any]], gradients: Flat, used: Sequence[bool], weights: Flat
    ) -> None:
        """Step the optimizer; then wait until this worker is not too far ahead, and read the weights."""
        server = self._server
        with self._state:
            server.take_options(options)
            server.step(gradients, used)
            server.note(staleness=self._version - self._seen[number])
            self._version += 1
            self._clocks[number] += 1
            self._state.notify_all()
            # The slowest worker never waits here, so all get on.
            self._state.wait_for(lambda: self._lead(number) <= self._bound)
            server.note(lead=self._lead(number))
            self._seen[number] = self._version
            weights.read()

    def _gather(self, number: int, brought: bytes, *, ends_epoch: bool = False) -> dict[int, bytes]:
        """Wait until all workers that are left have called this; returns the value of each."""
        with self._state:
            meeting = self._gathering
            meeting[number] = brought
            if ends_epoch:
                del self._clocks[number]
            self._state.notify_all()
            self._state.wait_for(lambda: self._gathering is not meeting or self._living <= meeting.keys())
            if self._gathering is meeting:
                # This thread is the first to see that all workers are here, and prepares the next meeting.
                self._gathering = {}
                if ends_epoch:
                    self._clocks = dict.fromkeys(self._living, 0)
                    self._final.read()
                self._state.notify_all()
            if ends_epoch:
                self._seen[number] = self._version
        return meeting

    def _lead(self, number: int) -> int:
        return self._clocks[number] - min(self._clocks.values())
