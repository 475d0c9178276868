"""The agent of all pods but the first: spawns ranks on the head's request, forwards their output, ends with its connection."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import json
import pathlib
import random
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from kale_dist import contract
from kale_dist.contract import Assignment, EventKind, Source, Stream, body_of
from kale_dist.errors import KaleDistError
from kale_dist.runtime import ending, loading, mpi, pod_input
from kale_dist.runtime.byte_server import ByteServer
from kale_dist.runtime.ending import End
from kale_dist.runtime.near_rank import NearRank
from kale_dist.runtime.pod import Pod, Problem
from kale_dist.runtime.relay_protocol import COUNT, MAX_FRAME_BYTES, TICKS, Channel, Op, is_signed, sign
from kale_dist.runtime.usage import UsageWatch

BODY_BYTES = 64 << 10
"""Lines of a rank that are sent together."""

BODY_S = 0.05
"""How long they may wait for each other."""

HELD_BYTES = 8 << 20
"""Of a rank's lines this much waits for a head that does not read; then the oldest go, and a count takes their place."""

KEPT_BYTES = 1 << 20
"""What a relay prints at most of what it could not hand over."""

FULL_BYTES = 1 << 20
"""More than this is not given to the connection while its head does not read."""

KILL_AFTER_S = 2.0

_PART_BYTES = 256 << 10


class Relay:
    """Serves one head in its life.

    Args:
        pod: The pod.
    """

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._channel = Channel(self._take_frame, lambda: None)
        self._ranks: dict[int, _Forwarder] = {}
        self._usage: UsageWatch | None = None
        self._fetch_from: asyncio.Future[str] = pod.loop.create_future()
        self._end: asyncio.Future[int] = pod.loop.create_future()
        self._is_told_to_end = False
        self._has_blobs = False
        self._is_staged = False
        self._server: ByteServer | None = None

    def told_to_end(self) -> None:
        """The pod got SIGTERM: the head decides what that means for the job."""
        self._is_told_to_end = True
        reason = "it received SIGTERM: it was evicted, or the job was deleted or suspended"
        if self._channel.is_open:
            self._channel.say(Op.LEAVING, reason=reason)
        elif not self._end.done():
            self._end.set_result(ending.EXIT_TOLD_TO_END)

    async def run(self) -> int:
        """Serve the head until the run is over; gives the exit code.

        Raises:
            Problem: The head cannot be reached, or is not that of this job.
        """
        order = self._pod.order
        if order.source is Source.STREAM:
            self._server = ByteServer(
                self._pod.place.listen, order.port + 2, key=self._pod.key, files=self._pod.files, store=self._pod.store
            )
        joining = asyncio.ensure_future(self._join())
        await asyncio.wait((joining, self._end), return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            return self._end.result()
        if not joining.result():
            sys.stderr.write("kale_dist: the run has begun or ended without this pod, which has nothing to do\n")
            return 0
        bringing = asyncio.ensure_future(self._bring())
        code = await self._end
        bringing.cancel()
        if self._usage is not None:
            self._usage.stop()
        if self._server is not None:
            self._server.close()
        return code

    # -- the connection ---------------------------------------------------------------------------------------------

    async def _join(self) -> bool:
        """Connect to the head and prove the key to each other; whether the head takes this relay."""
        order, began = self._pod.order, time.monotonic()
        loop, agent, ours = self._pod.loop, self._pod.place.pod, secrets.token_hex(16)
        while True:
            answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
            channel = Channel(
                lambda _kind, _rank, data, answers=answers: answers.put_nowait(json.loads(data)),  # type: ignore[misc]
                lambda answers=answers: answers.put_nowait(None),  # type: ignore[misc]
            )
            try:
                connecting = loop.create_connection(functools.partial(_same, channel), order.head, order.port + 1)
                await asyncio.wait_for(connecting, 10.0)
                channel.say(Op.HELLO, agent=agent, version=contract.VERSION, nonce=ours)
                challenge = await asyncio.wait_for(answers.get(), 20.0) or {}
                if is_signed(challenge.get("mac"), self._pod.key, "head", agent, ours, str(challenge.get("nonce"))):
                    channel.say(Op.PROOF, mac=sign(self._pod.key, "relay", agent, ours, str(challenge.get("nonce"))))
                    answer = await asyncio.wait_for(answers.get(), 20.0) or {}
                    if answer.get("op") in (Op.WELCOME, Op.OVER):
                        channel.on_frame, channel.on_close = self._take_frame, self._lost_head
                        channel.limit_bytes = MAX_FRAME_BYTES
                        self._channel = channel
                        while not answers.empty():
                            self._take_message(0, answers.get_nowait() or {})
                        if self._is_told_to_end:
                            self.told_to_end()
                        return bool(answer["op"] == Op.WELCOME)
                # An agent that does not hold the job's key runs nothing here.
                channel.close()
            except (OSError, TimeoutError, ValueError):
                channel.close()
            waited_s = time.monotonic() - began
            if waited_s > order.start_wait_s:
                raise Problem(
                    f"the first pod's agent at {order.head}:{order.port + 1} could not be reached within "
                    f"{order.start_wait_s:.0f} s: look at the first pod, or at network policies"
                )
            # The head is usually there a moment later; if not, the relays of a large job must not ask all at once.
            await asyncio.sleep(random.uniform(0.1, min(2.0, 0.2 + waited_s / 2)))  # noqa: S311 - no secret

    def _lost_head(self) -> None:
        """The connection has ended, and with it this pod's part of the run."""
        if self._end.done():
            return
        for rank in self._ranks.values():
            rank.process.signal(signal.SIGKILL)
        self._pod.loop.call_later(KILL_AFTER_S / 4, self._print_rest)

    def _print_rest(self) -> None:
        """Say what could not be handed over, and end."""
        left = KEPT_BYTES
        sys.stderr.write("kale_dist: the connection to the first pod's agent has ended, and with it this pod's ranks\n")
        for rank in self._ranks.values():
            for body, _ in rank.rest(left):
                left -= len(body)
                prefix = contract.prefix_of(rank.rank).encode()
                shown = b"".join(b"%s %s\n" % (prefix, line.lstrip(b"+")[1:]) for line in body.split(b"\n")[:-1])
                sys.stdout.buffer.write(shown)
        sys.stdout.flush()
        if not self._end.done():
            self._end.set_result(ending.EXIT_TOLD_TO_END if self._is_told_to_end else 1)

    def _take_frame(self, kind: bytes, rank: int, payload: bytes) -> None:
        if kind == b"M":
            self._take_message(rank, json.loads(payload))

    def _take_message(self, rank: int, message: dict[str, Any]) -> None:
        op = message.get("op")
        if op == Op.FETCH and not self._fetch_from.done():
            self._fetch_from.set_result(str(message["host"]))
        elif op == Op.SPAWN:
            self._spawn(rank, int(message["attempt"]), int(message["port"]), int(message["seed"]))
        elif op == Op.RUN:
            mpi.run_daemon(str(message["command"]), self._pod.place.work, int(message["attempt"]), self._refuse)
        elif op == Op.END:
            if not self._end.done():
                self._end.set_result(0)
            self._channel.close()
        elif (forwarder := self._ranks.get(rank)) is None:
            return
        elif op == Op.SIGNAL:
            forwarder.process.signal(signal.Signals(int(message["number"])))
        elif op == Op.STACKS:
            forwarder.process.ask_stacks()
        elif op == Op.LET_GO:
            forwarder.process.let_go()

    # -- what the head wants ----------------------------------------------------------------------------------------

    async def _bring(self) -> None:
        """Get the blobs, and tell the head."""
        try:
            host = await self._fetch_from if self._pod.order.source is Source.STREAM else ""
            await asyncio.to_thread(pod_input.bring, self._pod, fetch_from=host)
        except Exception as error:  # noqa: BLE001 - this pod's ranks cannot start, and it has to say why
            told = str(error) if isinstance(error, KaleDistError) else f"{type(error).__name__}: {error}"
            self._refuse(told)
            return
        # From here no rank is forked that the job does not need.
        self._pod.pool.wanted_spares = 0
        self._channel.say(Op.READY)

    def _refuse(self, reason: str) -> None:
        self._channel.say(Op.REFUSED, reason=reason)

    def _spawn(self, rank: int, attempt: int, port: int, seed: int) -> None:
        order = self._pod.own_order
        if not self._is_staged:
            self._is_staged = True
            loading.stage_modules(self._pod.store, order.snapshot, self._pod.files.modules)
            self._usage = UsageWatch(order, self._pod.loop, self._pids, self._tell_usage)
            self._usage.start()
        assignment = Assignment(order=order, rank=rank, attempt=attempt, port=port, seed=seed)
        process = self._pod.pool.take()
        outcome = self._pod.files.outcome(attempt, rank)
        self._ranks[rank] = forwarder = _Forwarder(rank, attempt, process, self._channel, outcome, self._pod.loop)
        process.start(forwarder, assignment, None, is_held=True)

    def _pids(self) -> Mapping[int, int]:
        return {one.process.pid: rank for rank, one in self._ranks.items() if one.process.pid and not one.is_over}

    def _tell_usage(self, rank: int, fields: dict[str, int | str | None]) -> None:
        event = {"event": str(EventKind.USAGE), "time": time.time(), "rank": rank, "attempt": self._ranks[rank].attempt}
        self._channel.send(b"E", rank, contract.encode_json({**event, **fields}))


def _same(channel: Channel) -> Channel:
    return channel


class _Forwarder:
    """Hands on what one rank does; a `near_rank.Listener`."""

    def __init__(
        self,
        rank: int,
        attempt: int,
        process: NearRank,
        channel: Channel,
        outcome: pathlib.Path,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.rank = rank
        self.attempt = attempt
        self.process = process
        self.is_over = False
        self._channel = channel
        self._outcome = outcome
        self._loop = loop
        self._bodies: collections.deque[tuple[bytes, int]] = collections.deque()
        self._bytes = 0
        self._lost = 0
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._end: End | None = None

    @property
    def has_room(self) -> bool:
        """Whether more events may come."""
        return self._channel.unsent_bytes < FULL_BYTES

    def rest(self, limit_bytes: int) -> list[tuple[bytes, int]]:
        """The last lines that the head did not get."""
        kept: list[tuple[bytes, int]] = []
        for body, count in reversed(self._bodies):
            limit_bytes -= len(body)
            if limit_bytes < 0:
                break
            kept.insert(0, (body, count))
        return kept

    def forked(self, pid: int) -> None:
        """It has a process."""
        self._channel.say(Op.FORKED, self.rank, pid=pid)

    def output(self, body: bytes, count: int) -> None:
        """It has written lines."""
        self._bodies.append((body, count))
        self._bytes += len(body)
        while self._bytes > HELD_BYTES and len(self._bodies) > 1:
            old, lines = self._bodies.popleft()
            self._bytes -= len(old)
            self._lost += lines
        if self._bytes >= BODY_BYTES:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(BODY_S, self._flush)

    def events(self, data: bytes) -> None:
        """It has sent events."""
        self._flush()
        self._channel.send(b"E", self.rank, data)

    def message(self, message: dict[str, Any]) -> None:
        """It has said something over its control socket."""
        self._flush()
        self._channel.say(Op.SAID, self.rank, message=message)
        if "done" in message:
            self._sending = asyncio.ensure_future(self._send_outcome())

    def stacks(self, dump: bytes, cpu_ticks: int) -> None:
        """The answer to `ask_stacks`."""
        self._channel.send(b"S", self.rank, TICKS.pack(cpu_ticks), dump)

    def ended(self, end: End) -> None:
        """Its process is over."""
        self._flush(is_last=True)
        self.is_over = True
        self._channel.say(Op.ENDED, self.rank, end=dataclasses.asdict(end))

    def _flush(self, *, is_last: bool = False) -> None:
        """Send the lines there are, unless the head does not read: then they wait here, and the oldest go."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._channel.is_open:
            return
        if self._lost and self._bodies and (is_last or self.has_room):
            text = (
                f"{self._lost:,} lines of this rank are missing here: the first pod's agent did not take them in time"
            )
            self._lost = 0
            self._bodies.appendleft((body_of(Stream.AGENT, [text.encode()]), 1))
        while self._bodies and (is_last or self.has_room):
            size = count = 0
            parts: list[bytes] = []
            while self._bodies and (not parts or size + len(self._bodies[0][0]) <= BODY_BYTES):
                body, lines = self._bodies.popleft()
                parts.append(body)
                size += len(body)
                count += lines
            self._bytes -= size
            self._channel.send(b"O", self.rank, COUNT.pack(count), *parts)
        self._bytes = max(0, self._bytes)
        if self._bodies:
            self._timer = self._loop.call_later(BODY_S, self._flush)

    async def _send_outcome(self) -> None:
        try:
            file = self._outcome.open("rb")
        except OSError:
            self._channel.say(Op.OUTCOME, self.rank, bytes=0)
            return
        with file:
            size = self._outcome.stat().st_size
            self._channel.say(Op.OUTCOME, self.rank, bytes=size)
            while self._channel.is_open and (data := await asyncio.to_thread(file.read, _PART_BYTES)):
                self._channel.send(b"F", self.rank, data)
                await self._channel.may_write.wait()
