"""What the other pods of a job cost its head: share of one core, memory, how fast it is at its turns, and whether a line is lost.

    python benchmarks/relays.py                                                    32 ranks of 1 MB/s each
    python benchmarks/relays.py --relays 250 --ranks 8 --lines 2 --events          2,000 ranks that train
    python benchmarks/relays.py --relays 250 --ranks 8 --lines 2 --cut 100         100 pods gone at once, and made again
    python benchmarks/relays.py --relays 250 --ranks 8 --lines 2 --early           one rank ends early: the others are looked at
    python benchmarks/relays.py --relays 250 --ranks 8 --store                     the store of the ranks' process group alone

The head is a process of its own with all that a pod's agent has, but its own ranks are played, because they would wait for the
others in torch. All relays and their ranks are played by one asyncio process, which speaks the relays' protocol. A third one
reads the head's stream as a notebook does. At the end each line has to be in the log, in order, with nothing missing.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import collections
import contextlib
import dataclasses
import datetime as dt
import json
import os
import pathlib
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from kale_dist import wire
from kale_dist.errors import BackendError
from kale_dist.places.following.head_client import HeadClient
from kale_dist.snapshot.capture import capture
from kale_dist.wire import (
    Attempt,
    BlockReader,
    EventBlock,
    InputFiles,
    JobFiles,
    LineBlock,
    Order,
    PodVariable,
    Policy,
    ProgressBlock,
    Stream,
    Verdict,
    body_of,
    context,
    messages,
)
from kale_dist.wire.blobs import FolderStore, pack_blobs
from kale_dist.wire.messages import Done, Go, Received, Running
from kale_dist.worker.agent.job_run import open_port
from kale_dist.worker.agent.near_rank import End
from kale_dist.worker.pod import pod_main
from kale_dist.worker.pod.pod import LISTEN_VARIABLE, TERMINATION_LOG_VARIABLE, place_of
from kale_dist.worker.pod.relay_protocol import COUNT, TICKS, Channel, RelayOp, sign

KEY = b"k" * 32
GO = messages.encode(Go())
HOST = "127.0.0.1"
LINE_BYTES = 100
TICK_S = 0.05
USAGE_EACH_S = 2.0
OUTCOME = b"o" * 600
STACKS = b"".join(
    b"Thread 0x%016x (most recent call first):\n" % thread
    + b"".join(
        b'  File "/opt/site-packages/torch/nn/modules/module.py", line %d in _call_impl\n' % line for line in range(20)
    )
    for thread in range(4)
)
"""What a rank answers that is asked for its stacks."""
ANSWER_S = 0.15
REST_S = 2.0
CLIENTS = 8
"""Processes that have the store's clients."""
STORE_KEYS = 20
TIMEOUT = dt.timedelta(seconds=120)


def main() -> None:
    """Measure and tell."""
    asked = arguments().parse_args()
    match asked.role:
        case "head":
            sys.exit(asyncio.run(be_head(asked)))
        case "relays":
            asyncio.run(be_relays(asked))
        case "client":
            be_clients(asked)
        case _ if asked.store:
            measure_store(asked)
        case _:
            with tempfile.TemporaryDirectory() as folder:
                measure(asked, pathlib.Path(folder))


def arguments() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relays", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=1, help="of each relay, and of the head")
    parser.add_argument("--lines", type=float, default=10_000.0, help="of each rank, a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--events", action="store_true", help="ranks tell progress and memory, as a training does")
    parser.add_argument("--cut", type=int, default=0, help="relays whose connections are cut in the middle")
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--early", action="store_true", help="rank 1 ends at once")
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--profile", default="", help="where the head's profile goes (of cProfile)")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def start(role: str, port: int, **options: Any) -> subprocess.Popen[str]:
    """This script in another process, with the same arguments."""
    command = [sys.executable, __file__, *sys.argv[1:], "--role", role, "--port", str(port)]
    return subprocess.Popen(command, text=True, **options)


# -- the one who measures, as a notebook ------------------------------------------------------------------------------


def measure(asked: argparse.Namespace, folder: pathlib.Path) -> None:
    """Start the head and the relays, follow the head's stream, and print what was seen."""
    order = put_input(asked, folder)
    environment = os.environ | {
        PodVariable.INPUT: str(folder / "input"),
        PodVariable.WORK: str(folder / "work"),
        PodVariable.FIRST_POD: "0",
        PodVariable.REPLICA_INDEX: "0",
        LISTEN_VARIABLE: HOST,
        TERMINATION_LOG_VARIABLE: str(folder / "termination"),
    }
    with (folder / "stdout").open("wb") as stdout:
        head = start("head", order.port, env=environment, stdout=stdout)
    client = HeadClient(lambda: connect(order.port + 2, head), KEY)
    relays = start("relays", order.port, stdout=subprocess.PIPE)
    seen = Seen(head.pid)
    follower = threading.Thread(target=seen.follow, args=(client,))
    follower.start()
    threading.Thread(target=seen.watch, daemon=True).start()
    said = json.loads(relays.communicate()[0].splitlines()[-1])
    follower.join()
    # One that has failed waits for nobody.
    with contextlib.suppress(BackendError):
        client.ack()
    head.wait(120)
    report(asked, said, seen)
    check(asked, said, JobFiles(folder / "work" / "job"))


def put_input(asked: argparse.Namespace, folder: pathlib.Path) -> Order:
    """What a Secret would bring."""
    store = FolderStore(folder / "notebook")
    snapshot = capture(print, (), {}, store=store, label="print")
    order = Order(
        job="j", object="j", number_of_processes=(asked.relays + 1) * asked.ranks, processes_per_agent=asked.ranks, head=HOST,
        port=20_000 + secrets.randbelow(3000) * 3, snapshot=snapshot.digest, blobs=snapshot.blobs, replaces_pods=True,
        policy=Policy(max_restarts=asked.restarts if asked.cut else 0), collect_wait_s=60.0,
    )  # fmt: skip
    parts = folder / "input"
    parts.mkdir()
    (parts / InputFiles.SNAPSHOT).write_bytes(pack_blobs(store, order.blobs))
    (parts / InputFiles.KEY).write_bytes(KEY)
    (parts / InputFiles.ORDER).write_bytes(wire.encode_json(order))
    return order


def connect(port: int, head: subprocess.Popen[str]) -> Any:
    """A connection to the head, once it listens.

    Raises:
        ConnectionRefusedError: It has ended.
    """
    while head.poll() is None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((HOST, port))
        time.sleep(0.05)
    raise ConnectionRefusedError


class Seen:
    """What a notebook sees of the job, and what the head has used of its core by then.

    Args:
        head: The head's process id.
    """

    def __init__(self, head: int) -> None:
        self.head = head
        self.at: dict[str, float] = {}
        """When each attempt ran, and when the verdict came."""
        self.used: list[tuple[float, float]] = []
        """The head's processor time, again and again."""
        self.verdict: Verdict | None = None
        self.blocks = self.bytes = self.progress = 0
        self.cpu_s = self.peak = 0.0

    def follow(self, client: HeadClient) -> None:
        """Read the stream to its end."""
        reader, began = BlockReader(), time.thread_time()
        with client.stream(0, 0, 120.0) as (pieces, _):
            for piece in pieces:
                self.bytes += len(piece)
                for block in reader.feed(piece):
                    self.blocks += 1
                    self.progress += isinstance(block, ProgressBlock)
                    if isinstance(block, EventBlock):
                        self.note(block.event)
        self.cpu_s = time.thread_time() - began

    def note(self, event: dict[str, Any]) -> None:
        """Note when an attempt runs, and when the job has ended."""
        if event["event"] == "state":
            self.at[f"{event['state']} {event['attempt']}"] = time.monotonic()
            self.verdict = Verdict.read(event)

    def watch(self) -> None:
        """Look what the head uses, until it ends."""
        with contextlib.suppress(OSError, IndexError):
            while True:
                self.used.append((time.monotonic(), cpu_s(self.head)))
                self.peak = memory_mib(self.head)
                time.sleep(0.1)

    def cost(self, since: float, until: float) -> float:
        """Seconds of processor that the head used from one moment to another."""
        times = [when for when, _ in self.used]
        first, last = (min(bisect.bisect(times, moment), len(times) - 1) for moment in (since, until))
        return self.used[last][1] - self.used[first][1]


def report(asked: argparse.Namespace, said: dict[str, Any], seen: Seen) -> None:
    """Print the figures, with the head's processor time: on a busy machine it tells more than the clock."""
    print(f"{asked.relays} relays, {asked.relays * asked.ranks:,} ranks")
    verdict_at, last, cut = max(seen.at.values()), len(said["spawned"]) - 1, said["cut"]
    spans = []
    for attempt, spawned in enumerate(said["spawned"]):
        began, running = cut if attempt else said["began"], seen.at.get(f"running {attempt}", spawned)
        spans += [(f"attempt {attempt}, all spawned", began, spawned), (f"attempt {attempt}, running", began, running)]
    if cut and not last:
        spans.append(("the verdict after the cut", cut, verdict_at))
    else:
        spans.append(("the verdict after the last rank", said["done"], verdict_at))
    for name, since, until in spans:
        print(f"{name}: {until - since:.2f} s, of which the head used {seen.cost(since, until):.2f} s of processor")
    # Senders that are slow on a busy machine send the same lines in a longer time.
    if until := said["printed"]:
        used = seen.cost(seen.at[f"running {last}"], until)
        print(
            f"at work: {100 * used / asked.seconds:.0f} % of one core ({used:.2f} s for {asked.seconds:.0f} s of work)"
        )
    print(
        f"head: {seen.used[-1][1]:.1f} s of processor in all, {seen.peak:.0f} MiB; longest pause of its loop {said['pause']:.2f} s"
    )
    print(
        f"notebook: {seen.bytes / 1e6:.1f} MB, {seen.blocks:,} blocks ({seen.progress:,} of progress), {seen.cpu_s:.2f} s to read"
    )


def check(asked: argparse.Namespace, said: dict[str, Any], files: JobFiles) -> None:
    """Count the lines in the log: each number once and in order, and of each rank as many as it sent."""
    reader, following, found = BlockReader(), 0, collections.Counter[tuple[int, int | None]]()
    for path in (files.older_log, files.log):
        if path.exists():
            for block in reader.feed(path.read_bytes()):
                if not isinstance(block, LineBlock) or (following and block.first != following):
                    raise SystemExit(f"line {following} is not where it should be: {str(block)[:200]}")
                found[block.attempt, block.rank] += block.count
                following = (block.first or 0) + block.count
    sent = {(attempt, rank): count for attempt, rank, count in said["sent"]}
    lost = sum(max(0, count - found[which]) for which, count in sent.items())
    print(
        f"lines: {sum(sent.values()):,} sent, {following:,} numbered, {lost:,} lost",
        "" if not asked.cut else "(without those of relays that were cut)",
    )


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    """The most memory that a process has had."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


# -- the head ---------------------------------------------------------------------------------------------------------


class PlayedRank:
    """A rank of the head's own: it is there, and done after the given time."""

    pid = 0

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()

    def start(self, listener: Any, _assignment: Any, port: Any, **_: Any) -> None:
        """Begin."""
        self._listener, self._port = listener, port
        self._loop.call_soon(listener.forked, 1)
        self._loop.call_soon(listener.message, Received())
        self._loop.call_soon(listener.message, Running())
        self._timer = self._loop.call_later(self._seconds, listener.message, Done())

    def send(self, line: bytes) -> None:
        """End, if it may go."""
        if line == GO:
            self._end(End(exit_code=0))

    def signal(self, number: signal.Signals) -> None:
        """End by a signal."""
        self._end(End(signal=number.name))

    def _end(self, end: End) -> None:
        self._timer.cancel()
        if self._port is not None:
            self._port.close()
        self._loop.call_soon(self._listener.ended, end)

    def ask_stacks(self) -> None:
        """Say nothing."""


class PlayedPool:
    """In the place of the pool that forks ranks."""

    wanted_spares = 0

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def take(self) -> PlayedRank:
        """A rank."""
        return PlayedRank(self._seconds)

    def refill(self, delay_s: float = 0.0) -> None:
        """Do nothing."""


async def be_head(asked: argparse.Namespace) -> int:
    """Serve the job, as `pod_main` does in a pod."""
    played: Any = PlayedPool(asked.seconds)
    if not asked.profile:
        return await pod_main.serve(place_of(os.environ), played)
    import cProfile

    with cProfile.Profile() as profile:
        code = await pod_main.serve(place_of(os.environ), played)
    profile.dump_stats(asked.profile)
    return code


# -- the relays -------------------------------------------------------------------------------------------------------


class Players:
    """All relays, and what they saw.

    Args:
        asked: The arguments.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.began_at = time.monotonic()
        self.spawned: dict[int, float] = {}
        """When the last relay of each attempt was told to start its ranks."""
        self.done_at = self.cut_at = self.longest_pause = 0.0
        self.printed_at = 0.0
        """When the last relay had no more lines to send."""

        self.sent: collections.Counter[tuple[int, int]] = collections.Counter()
        """Lines of each attempt and rank."""
        self.relays = [PlayedRelay(agent, self) for agent in range(1, asked.relays + 1)]

    async def run(self) -> None:
        """Play to the end."""
        pause = asyncio.ensure_future(self._watch_pauses())
        await asyncio.gather(*(relay.run() for relay in self.relays))
        pause.cancel()

    def spawn(self, attempt: int) -> None:
        """A relay was told to start its ranks."""
        if self.asked.cut and not self.spawned:
            asyncio.get_running_loop().call_later(self.asked.seconds / 2, self._cut)
        self.spawned[attempt] = time.monotonic()

    def _cut(self) -> None:
        """Have some pods gone at once; their controller makes them again."""
        self.cut_at, self.printed_at = time.monotonic(), 0.0
        for relay in self.relays[: self.asked.cut]:
            relay.cut()

    async def _watch_pauses(self) -> None:
        """Ask the head something small over and over, to see how long its loop does not answer."""
        while True:
            began = time.monotonic()
            with contextlib.suppress(OSError):
                channel = await Channel.connect(HOST, self.asked.port + 1)
                channel.send_message(RelayOp.HELLO, agent=1, version=wire.VERSION, nonce="n")
                if await channel.read_from_stranger() and self.spawned:
                    self.longest_pause = max(self.longest_pause, time.monotonic() - began)
                channel.close()
            await asyncio.sleep(0.1)


class PlayedRelay:
    """One other pod.

    Args:
        agent: Its number.
        players: All of them.
    """

    def __init__(self, agent: int, players: Players) -> None:
        self._agent = agent
        self._players = players
        self._asked = players.asked
        self._channel: Channel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._alive: set[int] = set()
        self._attempt = -1
        self._step = 0

    async def run(self) -> None:
        """Join, and do what the head wants, until it says that the run is over."""
        while not await self._serve():  # noqa: ASYNC110 - it is tried again, not waited for
            await asyncio.sleep(random.uniform(0.1, 0.5))

    def cut(self) -> None:
        """Be gone: nothing that was sent in this attempt needs to have arrived."""
        self._stop()
        for rank in self._alive:
            del self._players.sent[self._attempt, rank]
        if self._channel is not None:
            self._channel._writer.transport.abort()  # noqa: SLF001 - as a network does it

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    async def _serve(self) -> bool:
        try:
            self._channel = channel = await Channel.connect(HOST, self._asked.port + 1)
        except OSError:
            # Before the head listens, or after it has left.
            return self._attempt >= 0
        channel.send_message(RelayOp.HELLO, agent=self._agent, version=wire.VERSION, nonce="n")
        challenge = await channel.read_from_stranger()
        channel.send_message(RelayOp.PROOF, mac=sign(KEY, "relay", self._agent, "n", str(challenge.get("nonce"))))
        if (answer := (await channel.read_from_stranger()).get("op")) != RelayOp.WELCOME:
            return answer == RelayOp.OVER
        while (frame := await channel.read()) is not None:
            if frame[0] == b"R":
                if frame[2] == GO:
                    self._leave(channel, frame[1], None)
                continue
            message = json.loads(frame[2])
            if message["op"] == RelayOp.END:
                self._stop()
                channel.close()
                return True
            self._take(channel, frame[1], message)
        self._stop()
        return False

    def _take(self, channel: Channel, rank: int, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == RelayOp.ROOM:
            channel.may_send = bool(message["is_there"])
        elif op == RelayOp.FETCH:
            channel.send_message(RelayOp.READY)
        elif op == RelayOp.SPAWN:
            self._spawn(channel, wire.decode(Attempt, message["attempt"]))
        elif op == RelayOp.SIGNAL:
            self._stop()
            self._leave(channel, rank, signal.Signals(int(message["number"])).name)
        elif op == RelayOp.STACKS:
            answer = TICKS.pack(time.process_time_ns() // 10_000_000), STACKS
            asyncio.get_running_loop().call_later(ANSWER_S, channel.send, b"S", rank, *answer)

    def _leave(self, channel: Channel, rank: int, name: str | None) -> None:
        if rank in self._alive:
            self._alive.discard(rank)
            end = End(exit_code=None if name else 0, signal=name)
            channel.send_message(RelayOp.ENDED, rank, end=dataclasses.asdict(end))

    def _spawn(self, channel: Channel, attempt: Attempt) -> None:
        self._players.spawn(attempt.number)
        self._attempt = attempt.number
        ranks = list(next(member for member in attempt.members if member.agent == self._agent).ranks)
        self._alive = set(ranks)
        for rank in ranks:
            channel.send_message(RelayOp.FORKED, rank, pid=1000 + rank)
            channel.send(b"R", rank, messages.encode(Received()))
            channel.send(b"R", rank, messages.encode(Running()))
        if self._asked.early and self._agent == 1:
            self._finish(channel, ranks.pop(0))
        self._step, works = 0, [self._print(channel, ranks)]
        if self._asked.events:
            works += [self._progress(channel, ranks), self._use(channel, ranks)]
        self._tasks = [asyncio.ensure_future(work) for work in works]

    async def _print(self, channel: Channel, ranks: list[int]) -> None:
        each_s = max(TICK_S, 1 / self._asked.lines)
        count = round(each_s * self._asked.lines)
        body = body_of(Stream.STDOUT, [b"x" * (LINE_BYTES - 1)] * count)
        async for _ in every(each_s, self._asked.seconds):
            while not channel.may_send:  # noqa: ASYNC110 - a channel has no event, and this is cheap
                await asyncio.sleep(TICK_S)
            for rank in ranks:
                channel.send(b"O", rank, COUNT.pack(count), body)
                self._players.sent[self._attempt, rank] += count
            await channel.drain()
        self._players.printed_at = time.monotonic()
        # What the end costs is a figure of its own.
        await asyncio.sleep(REST_S)
        for rank in ranks:
            self._finish(channel, rank)

    async def _progress(self, channel: Channel, ranks: list[int]) -> None:
        ranks_in_all = (self._asked.relays + 1) * self._asked.ranks
        async for _ in every(context.Context(world_size=ranks_in_all).interval_s, self._asked.seconds):
            self._step += 1
            for rank in ranks:
                self._send(
                    channel, rank, "progress", phase="train", epoch=1, epochs=3, step=self._step, steps=100_000,
                    samples=32 * self._step, samples_per_s=320.5, loss=1 / self._step,
                )  # fmt: skip

    async def _use(self, channel: Channel, ranks: list[int]) -> None:
        async for _ in every(USAGE_EACH_S, self._asked.seconds):
            for rank in ranks:
                self._send(
                    channel, rank, "usage", memory_bytes=self._step << 24, memory_limit_bytes=1 << 34,
                    gpu_percent=self._step % 100, gpu_memory_bytes=1 << 33, gpu_memory_limit_bytes=1 << 34, node=f"node-{self._agent}",
                )  # fmt: skip

    def _send(self, channel: Channel, rank: int, kind: str, **fields: Any) -> None:
        event = {"event": str(kind), "rank": rank, "attempt": self._attempt, "time": time.time(), **fields}
        channel.send(b"E", rank, wire.encode_json(event))

    def _finish(self, channel: Channel, rank: int) -> None:
        channel.send(b"F", rank, OUTCOME)
        channel.send_message(RelayOp.OUTCOME, rank, bytes=len(OUTCOME))
        channel.send(b"R", rank, messages.encode(Done()))
        self._players.done_at = time.monotonic()


async def every(each_s: float, seconds: float) -> AsyncIterator[int]:
    """Count from 0, so often, for so long. Relays do not begin in the same moment."""
    began = time.monotonic() + random.uniform(0.0, each_s)
    for tick in range(round(seconds / each_s)):
        await asyncio.sleep(max(0.0, began + tick * each_s - time.monotonic()))
        yield tick


async def be_relays(asked: argparse.Namespace) -> None:
    """Play all relays, and print what they saw as JSON."""
    players = Players(asked)
    await players.run()
    print(json.dumps({
        "began": players.began_at, "cut": players.cut_at, "printed": players.printed_at, "done": players.done_at,
        "spawned": list(players.spawned.values()), "pause": players.longest_pause,
        "sent": [(*which, count) for which, count in players.sent.items()],
    }))  # fmt: skip


# -- the store of the ranks' process group ----------------------------------------------------------------------------


def measure_store(asked: argparse.Namespace) -> None:
    """One process has the store, as rank 0 has; others are its clients, as many as there are ranks."""
    from torch._C._distributed_c10d import TCPStore

    ranks = (asked.relays + 1) * asked.ranks
    listener = open_port(HOST, 0, max(128, ranks))
    listener.settimeout(0)
    port = listener.getsockname()[1]
    store = TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listener.detach()
    )
    # Its clients in one process have no names that it could warn of.
    quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    clients = [start("client", port, env=quiet) for _ in range(CLIENTS)]
    while store.add("imported", 0) < CLIENTS:
        time.sleep(0.02)
    began, used = time.monotonic(), time.process_time()
    store.set("go", "")
    store.wait(["all"], TIMEOUT)
    met_s = time.monotonic() - began
    for client in clients:
        client.wait()
    took, used = time.monotonic() - began, time.process_time() - used
    print(f"{ranks:,} clients of one store: all connected and met after {met_s:.1f} s")
    print(
        f"each then put and read {STORE_KEYS} values: {took - met_s:.1f} s; the store's process used {used:.2f} s of processor"
    )


def be_clients(asked: argparse.Namespace) -> None:
    """Be some of the clients, each in a thread of its own."""
    from torch._C._distributed_c10d import TCPStore

    ranks = (asked.relays + 1) * asked.ranks

    first = TCPStore(HOST, asked.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    first.add("imported", 1)
    first.wait(["go"], TIMEOUT)

    def be_one(number: int) -> None:
        store = TCPStore(HOST, asked.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        if store.add("here", 1) == ranks:
            store.set("all", "")
        store.wait(["all"], TIMEOUT)
        for key in range(STORE_KEYS):
            store.set(f"{os.getpid()}/{number}/{key}", "x" * 100)
            store.get(f"{os.getpid()}/{number}/{key}")
        # Nobody leaves before all are through.
        if store.add("through", 1) == ranks:
            store.set("end", "")
        store.wait(["end"], TIMEOUT)

    threads = [threading.Thread(target=be_one, args=(number,)) for number in range(ranks // CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
