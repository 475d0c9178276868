"""A worker of parameter servers: it computes gradients, sends them, and takes the new weights.

Its optimizer has no state and steps nothing: `step` sends gradients and learning rates to the servers. What a
scheduler does with the optimizer reaches the servers with the next step.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kale_dist.errors import ConfigError, KaleDistError
from kale_dist.strategies import Layout, Settings
from kale_dist.training.sharding import ranks
from kale_dist.training.strategies.flat import Flat
from kale_dist.training.strategies.pairs import Pair
from kale_dist.training.strategies.protocol import FullState, Parts
from kale_dist.training.strategies.replica import Replica
from kale_dist.training.strategies.server import Kind, Server, norm_bits, open_shards


def make(settings: Settings, layout: Layout) -> Server | Worker:
    """A rank's part: the last ones are servers."""
    return Server(settings, layout) if layout.shard is None else Worker(settings, layout)


class Worker(Replica):
    """One rank with data."""

    reduces = False
    levels = Server.levels

    def prepare(self, parts: Parts, stack: contextlib.ExitStack) -> None:
        """Connect to the servers, and take the place of the optimizer's step."""
        super().prepare(parts, stack)
        self._shards, pairs = open_shards(parts, self.settings.servers)
        self._pairs = [pairs[rank] for rank in sorted(pairs)]
        stack.push(self._leave)
        workers, servers = self.layout.shards, self.settings.servers
        last = workers + servers - 1
        parts.group.say(
            f"parameter-server: {ranks(workers)} with data (workers), and {'rank' if servers == 1 else f'ranks {workers} to'}"
            f" {last} with the optimizer, mode {self.settings.mode!r}"
        )
        self._options_sent = b""
        self._bytes_sent = 0
        optimizer = parts.optimizer
        optimizer.state.clear()
        own = dict(optimizer.__dict__)

        def step(_: Any, closure: Callable[[], Any] | None = None) -> None:
            if closure is not None:
                raise ConfigError(
                    "strategy",
                    "'parameter-server' steps the optimizer in the servers, where the closure of optimizer.step(closure)"
                    " cannot be called",
                    "Call backward() and then optimizer.step() without a closure",
                )
            self._step()

        def restore() -> None:
            optimizer.__dict__.pop("step")
            if "step" in own:
                optimizer.__dict__["step"] = own["step"]

        optimizer.__dict__["step"] = types.MethodType(step, optimizer)
        stack.callback(restore)
        self._versions = self._present_versions()

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for pair in self._pairs:
                pair.close()

    def adopt(self, parameters: Iterable[Tensor]) -> None:
        """Refuse parameters that the servers do not have.

        Raises:
            ConfigError: There are some.
        """
        if any(id(parameter) not in self.parameters for parameter in parameters):
            raise ConfigError(
                "strategy",
                "'parameter-server' steps the optimizer of the call, and the step trains other parameters too",
                "Give the optimizer all parameters before the call, or use strategy='ddp'",
            )

    # -- a step ----------------------------------------------------------------------------------------------------

    def total_norm(self, gradients: Sequence[Tensor], kind: float) -> Tensor:
        """Synchronous: the norm of the mean over workers, which the servers know. Asynchronous: of this worker's own."""
        if self.settings.mode == "async":
            return super().total_norm(gradients, kind)
        given = set(map(id, gradients))
        norms = [torch.empty(1, dtype=torch.float64) for _ in self._pairs]
        self._ask(Kind.NORM, lambda parameter: id(parameter.grad) in given, norm=kind)
        for pair, norm in zip(self._pairs, norms, strict=True):
            self._receive(pair, norm)
        like = gradients[0] if len(gradients) else torch.empty(0)
        total: Tensor = torch.linalg.vector_norm(torch.cat(norms), kind)
        return total.to(like.device, like.dtype)

    def _step(self) -> None:
        if self._present_versions() != self._versions:
            raise KaleDistError(
                "train_step changed weights by itself. With strategy='parameter-server' the servers hold the weights, and"
                " would overwrite them. Change weights by the optimizer only, or use strategy='ddp'"
            )
        self._ask(Kind.STEP, lambda parameter: parameter.grad is not None)
        self._take_weights()

    def _take_weights(self) -> None:
        for pair, shard in zip(self._pairs, self._shards, strict=True):
            weights = shard.weights()
            self._receive(pair, *weights.buffers)
            weights.write()
        self._versions = self._present_versions()

    def _present_versions(self) -> int:
        return sum(parameter._version for shard in self._shards for parameter in shard.parameters)  # noqa: SLF001 - torch's public name for it

    def _ask(self, kind: Kind, is_used: Callable[[Any], bool], *, norm: float = 0.0) -> None:
        """Send a request with gradients to all servers."""
        groups = self.parts.optimizer.param_groups
        options = pickle.dumps([{key: value for key, value in one.items() if key != "params"} for one in groups])
        new = torch.frombuffer(bytearray(options), dtype=torch.uint8) if options != self._options_sent else None
        self._options_sent = options
        for pair, shard in zip(self._pairs, self._shards, strict=True):
            used = [is_used(parameter) for parameter in shard.parameters]
            head = [kind, self.parts.pace.batches, 0 if new is None else len(new), norm_bits(norm), *map(int, used)]
            gradients = [
                parameter.grad if flag and parameter.grad is not None else torch.zeros_like(parameter)
                for parameter, flag in zip(shard.parameters, used, strict=True)
            ]
            flat = Flat(gradients, torch.device("cpu"))
            flat.read()
            pair.send(torch.tensor(head), *(() if new is None else (new,)), *flat.buffers)
            self._bytes_sent += flat.bytes

    def _receive(self, pair: Pair, *tensors: Tensor) -> None:
        """Receive the answer to a request.

        Raises:
            KaleDistError: The server refuses.
        """
        length = torch.empty(1, dtype=torch.int64)
        pair.receive(length)
        if length:
            data = torch.empty(int(length), dtype=torch.uint8)
            pair.receive(data)
            raise KaleDistError(data.numpy().tobytes().decode())
        pair.receive(*tensors)

    # -- between epochs --------------------------------------------------------------------------------------------

    def end_epoch(self) -> None:
        """Tell the servers; with asynchronous ones, take the final weights, when all workers have ended."""
        for pair, shard in zip(self._pairs, self._shards, strict=True):
            pair.send(torch.tensor([Kind.END, self.parts.pace.batches, 0, 0, *([0] * len(shard.parameters))]))
        if self.settings.mode == "async":
            self._take_weights()
        else:
            for pair in self._pairs:
                self._receive(pair)
        super().end_epoch()

    def full_state(self) -> FullState | None:
        """Rank 0: its weights, and the optimizer's state from all servers."""
        whole = super().full_state()
        if whole is None:
            return None
        state: dict[int, Any] = {}
        for pair in self._pairs:
            length = torch.empty(1, dtype=torch.int64)
            pair.receive(length)
            data = torch.empty(int(length), dtype=torch.uint8)
            pair.receive(data)
            state |= torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=False)
        return FullState(model=whole.model, optimizer={**whole.optimizer, "state": dict(sorted(state.items()))})

    def metrics(self) -> dict[str, float]:
        """Bytes sent."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return {"bytes_sent": sent}
