"""A worker of parameter servers: it computes gradients, sends them, and receives the new weights.

A worker's optimizer has no state and steps nothing: `step` sends gradients and learning rates to the servers. What a
scheduler changes in the optimizer reaches the servers with the next step.

With backups a worker sends everything to both servers of a shard, and receives both answers, which are equal bit for bit:
where one server is lost, even in the middle of a message, the other's answer is enough. So workers need not agree on which
server is lost.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.snapshot.identity import times_changed
from kale_dist.strategies import Layout, Settings
from kale_dist.worker.parallel.flat import Flat
from kale_dist.worker.parallel.pairs import LostPeerError, Pair
from kale_dist.worker.parallel.parameter_server import RequestKind, Server, Shard, norm_bits, open_shards
from kale_dist.worker.parallel.replica import Replica
from kale_dist.worker.training.data.sharding import ranks
from kale_dist.worker.training.strategy import FullState, Parts
from kale_dist.worker.training.trained import alter

_CHECKED_STEPS = 2
"""The batches of each epoch that are looked at: a step that changes weights by itself does so in nearly every batch, and comparing them all has a cost."""


def make(settings: Settings, layout: Layout) -> Server | Worker:
    """Make this rank's part: the last ranks are servers."""
    return Server(settings, layout) if layout.shard is None else Worker(settings, layout)


class Worker(Replica):
    """A rank with data."""

    reduces = False
    levels = frozenset({"steps_ahead"})

    @property
    def saves_within_epochs(self) -> bool:  # type: ignore[override]
        """Asynchronous workers are never at the same step."""
        return bool(self.settings.mode == "sync")

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Connect to the servers, and replace the optimizer's step."""
        super().prepare(parts, stack)
        workers, servers, last = self.layout.shards, self.settings.servers, parts.group.world_size - 1
        self._shards, pairs = open_shards(parts, servers, workers)
        self._pairs = [[pairs[rank] for rank in range(workers + n, last + 1, servers)] for n in range(servers)]
        """Connections to the servers of each shard that are left: one, or two with a backup."""
        stack.push(self._leave)
        backups = " (each with a backup)" if self.settings.backup else ""
        parts.group.log(
            f"parameter-server: {ranks(workers)} with data (workers), and {'rank' if last == workers else f'ranks {workers} to'}"
            f" {last} with the optimizer{backups}, mode {self.settings.mode!r}"
        )
        self._workers = set(range(workers))
        self._of_servers: dict[str, float] = {}
        if self.settings.mode == "async" and workers > 1:
            parts.column.exchange_by(self._exchange)
        self._options_sent = b""
        self._bytes_sent = 0
        optimizer = parts.optimizer
        optimizer.state.clear()

        def step(_: Any, closure: Callable[[], Any] | None = None) -> None:
            if closure is not None:
                raise ConfigError(
                    "strategy",
                    "'parameter-server' steps the optimizer in the servers, where the closure of optimizer.step(closure)"
                    " cannot be called",
                    "Call backward() and then optimizer.step() without a closure",
                )
            self._step()

        alter(optimizer, stack, step=types.MethodType(step, optimizer))
        self._weights = [shard.weights().read() for shard in self._shards]
        """The weights as the servers have sent them last."""
        self._checks = _CHECKED_STEPS
        self._versions = self._present_versions()

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            # This rank has all it needs, so nothing is lost with a server.
            with contextlib.suppress(LostPeerError):
                self._send(RequestKind.LEAVE)
            for pair in itertools.chain(*self._pairs):
                pair.close()

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Refuse new parameters.

        Raises:
            ConfigError: The servers do not have one of the parameters.
        """
        if any(id(parameter) not in self.parameters for parameter in parameters):
            raise ConfigError(
                "strategy",
                "'parameter-server' steps the optimizer of the call, and the step trains other parameters too",
                "Give the optimizer all parameters before the call, or use strategy='ddp'",
            )

    # -- a step ----------------------------------------------------------------------------------------------------

    def total_norm(self, gradients: Sequence[Tensor], kind: float) -> Tensor:
        """Return the norm of the gradients' mean over workers, which the servers compute; asynchronous, of this worker's own."""
        if self.settings.mode == "async":
            return super().total_norm(gradients, kind)
        given = set(map(id, gradients))
        norms = [torch.empty(1, dtype=torch.float64, device="cpu") for _ in self._pairs]
        self._ask(RequestKind.NORM, lambda parameter: id(parameter.grad) in given, norm=kind)
        for pairs, norm in zip(self._pairs, norms, strict=True):
            self._each(pairs, self._receive, norm)
        like = gradients[0] if len(gradients) else torch.empty(0, device="cpu")
        total: Tensor = torch.linalg.vector_norm(torch.cat(norms), kind)
        return total.to(like.device, like.dtype)

    def _check_weights(self) -> None:
        """Refuse weights that are not those of the servers; their bits, because writes to `p.data` leave no other trace."""
        for shard, theirs in zip(self._shards, self._weights, strict=True):
            pairs = zip(shard.weights().read().buffers, theirs.buffers, strict=True)
            if not all(mine.view(torch.uint8).equal(kept.view(torch.uint8)) for mine, kept in pairs):
                raise KaleDistError(
                    "train_step changed weights by itself. With strategy='parameter-server' the servers hold the weights, and"
                    " would overwrite them. Change weights by the optimizer only, or use strategy='ddp'"
                )

    def _step(self) -> None:
        if self._checks or self._present_versions() != self._versions:
            self._checks = max(0, self._checks - 1)
            self._check_weights()
        self._ask(RequestKind.STEP, lambda parameter: parameter.grad is not None)
        self._take_weights()

    def _take_weights(self) -> None:
        for pairs, weights in zip(self._pairs, self._weights, strict=True):
            # The second answer overwrites the first with the same bits.
            self._each(pairs, self._receive, *weights.buffers)
            weights.write()
        self._versions = self._present_versions()

    def _present_versions(self) -> int:
        return sum(times_changed(parameter) for shard in self._shards for parameter in shard.parameters)

    def _ask(self, kind: RequestKind, is_used: Callable[[Any], bool], *, norm: float = 0.0) -> None:
        """Send a request with gradients to all servers."""
        groups = self.parts.optimizer.param_groups
        options = pickle.dumps([{key: value for key, value in one.items() if key != "params"} for one in groups])
        new = torch.frombuffer(bytearray(options), dtype=torch.uint8) if options != self._options_sent else None
        self._options_sent = options
        for pairs, shard in zip(self._pairs, self._shards, strict=True):
            used = [is_used(parameter) for parameter in shard.parameters]
            head = [kind, self.parts.pace.batches, 0 if new is None else len(new), norm_bits(norm), *map(int, used)]
            gradients = [
                parameter.grad if flag and parameter.grad is not None else torch.zeros_like(parameter)
                for parameter, flag in zip(shard.parameters, used, strict=True)
            ]
            flat = Flat(gradients, torch.device("cpu")).read()
            request = (torch.tensor(head, device="cpu"), *(() if new is None else (new,)), *flat.buffers)
            self._each(pairs, Pair.send, *request)
            self._bytes_sent += flat.bytes * len(pairs)

    def _send(self, kind: RequestKind) -> None:
        """Send a request without gradients to all servers."""
        for pairs, shard in zip(self._pairs, self._shards, strict=True):
            self._each(pairs, Pair.send, self._head(kind, shard))

    def _head(self, kind: RequestKind, shard: Shard) -> Tensor:
        return torch.tensor([kind, self.parts.pace.batches, 0, 0, *([0] * len(shard.parameters))], device="cpu")

    def _each(self, pairs: list[Pair], call: Callable[..., None], *arguments: Any) -> None:
        """Call a function for each server of a shard that is left.

        Raises:
            LostPeerError: All servers of the shard are lost.
        """
        for pair in list(pairs):
            try:
                call(pair, *arguments)
            except LostPeerError:
                pairs.remove(pair)
                if not pairs:
                    raise
                self.parts.group.log(
                    f"Rank {pair.other}, a server, was lost. Rank {pairs[0].other} has the same weights and the same state of"
                    " the optimizer: nothing is lost or repeated, and from here on this server has no backup."
                )

    def _receive(self, pair: Pair, *tensors: Tensor) -> None:
        """Receive the answer to a request.

        Raises:
            KaleDistError: The server refuses.
        """
        if refusal := pair.receive_bytes():
            raise KaleDistError(refusal.decode())
        pair.receive(*tensors)

    # -- between epochs --------------------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Tell the servers that the epoch is over; from asynchronous servers, receive the final weights."""
        self._check_weights()
        self._checks = _CHECKED_STEPS
        self._send(RequestKind.END)
        if self.settings.mode == "async":
            self._take_weights()
        else:
            for pairs in self._pairs:
                self._each(pairs, self._receive)
        if not self.parts.group.rank:
            for pairs in self._pairs:
                self._each(pairs, self._add_metrics)
        super().end_epoch()

    def _add_metrics(self, pair: Pair) -> None:
        for name, value in pickle.loads(pair.receive_bytes()).items():
            self._of_servers[name] = self._of_servers.get(name, 0.0) + value

    def _exchange(self, value: Any) -> dict[int, Any]:
        """Exchange values with all workers that are left, by way of the first server; asynchronous only."""
        (pair,) = self._pairs[0]
        pair.send(self._head(RequestKind.EXCHANGE, self._shards[0]))
        pair.send_bytes(pickle.dumps(value))
        found = pickle.loads(pair.receive_bytes())
        for rank in sorted(self._workers - found.keys()):
            self.parts.group.log(
                f"Rank {rank}, a worker, was lost. What was left of its share of this epoch's data is not used; from the next"
                f" epoch on, all data is divided over those that are left ({ranks(len(found))})."
            )
        self._workers &= found.keys()
        if not all(found.values()):
            raise KaleDistError(
                "The workers do not take the same steps: some have ended the epoch, and others still draw batches. Leave the"
                " loop over the loader on all ranks or none"
            )
        return {rank: pickle.loads(data) for rank, data in found.items()}

    def full_state(self) -> FullState | None:
        """Return in rank 0 its weights, and the optimizer's state from all servers."""
        whole = super().full_state()
        state: dict[int, Any] = {}
        if whole is not None:
            self._send(RequestKind.STATE)
            for pairs in self._pairs:
                self._each(pairs, _add_state, state)
        # Asynchronous servers would step for the next batch of another worker meanwhile.
        self.parts.column.gather(None)
        if whole is None:
            return None
        return FullState(model=whole.model, optimizer={**whole.optimizer, "state": dict(sorted(state.items()))})

    def metrics(self) -> dict[str, float]:
        """Return the bytes sent; in rank 0 also the servers' numbers."""
        sent, self._bytes_sent = self._bytes_sent, 0
        of_servers, self._of_servers = self._of_servers, {}
        return {**of_servers, "bytes_sent": sent + of_servers.get("bytes_sent", 0)}


def _add_state(pair: Pair, state: dict[int, Any]) -> None:
    state |= torch.load(io.BytesIO(pair.receive_bytes()), map_location="cpu", weights_only=False)
