"""A head and its relays over real connections, with ranks that are played: who joins, floods, cuts, and what is lost."""

from __future__ import annotations

import asyncio
import json
import os
import secrets

import pytest

from kale_dist import contract
from kale_dist.contract import BlockReader, EventKind, JobFiles, Order, Stream, body_of
from kale_dist.runtime import relay, relays
from kale_dist.runtime.ending import End
from kale_dist.runtime.rank_run import RankRun
from kale_dist.runtime.relay import _Forwarder
from kale_dist.runtime.relay_protocol import COUNT, Channel, Op, is_signed, sign
from kale_dist.runtime.relays import HeadsRelays
from kale_dist.runtime.writer import JobWriter

KEY = b"k" * 32
ENDED = {"exit_code": 0, "signal": None, "reason": "", "memory_limit": "", "tail": ["last"]}


def free_port():
    while True:
        port = 20_000 + secrets.randbelow(10_000) * 3 % 30_000
        try:
            for number in (port, port + 1):
                relays.open_port("127.0.0.1", number, 1).close()
        except OSError:
            continue
        return port


class Head:
    """The head's side, and what it was told."""

    def __init__(self, folder, agents):
        self.order = Order(
            job="j", world_size=agents, processes_per_agent=1, head="127.0.0.1", port=free_port(), snapshot=""
        )
        self.files = JobFiles(folder)
        self.writer = JobWriter(self.files, asyncio.get_running_loop(), lambda: None)
        self.relays = HeadsRelays(self.order, KEY, self.files, "127.0.0.1", self, self.writer.say)
        self.told = []
        self.runs = {}

    def relays_are_ready(self):
        self.told.append("ready")

    def relay_refuses(self, reason):
        self.told.append(f"refused: {reason}")

    def relay_is_lost(self, reason):
        self.told.append(f"lost: {reason}")

    def relay_leaves(self, reason):
        self.told.append(f"leaves: {reason}")

    def spawn(self, rank):
        run = self.runs[rank] = RankRun(rank, self.writer, lambda _: None, lambda _: None)
        self.relays.spawn(run, 0, 5, 7)
        return run

    async def close(self):
        written = asyncio.get_running_loop().create_future()
        self.writer.close(lambda: written.set_result(None))
        await written
        self.relays.close()

    def lines(self):
        reader = BlockReader()
        blocks = [*reader.feed(self.files.log.read_bytes()), *reader.finish()]
        return [line for block in blocks for line in block.lines()]


class PlayedRelay:
    """The relay's side, played."""

    def __init__(self, agent, key=KEY):
        self.agent = agent
        self.key = key
        self.messages = asyncio.Queue()
        self.is_closed = asyncio.Event()
        self.channel = Channel(self._take, self.is_closed.set)

    def _take(self, kind, rank, data):
        assert kind == b"M"
        self.messages.put_nowait({"rank": rank, **json.loads(data)})

    async def next(self):
        return await asyncio.wait_for(self.messages.get(), 10)

    async def join(self, head):
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.channel, "127.0.0.1", head.order.port + 1)
        self.channel.say(Op.HELLO, agent=self.agent, version=contract.VERSION, nonce="mine")
        challenge = await self.next()
        assert is_signed(challenge["mac"], KEY, "head", self.agent, "mine", challenge["nonce"])
        self.channel.say(Op.PROOF, mac=sign(self.key, "relay", self.agent, "mine", challenge["nonce"]))
        return self

    def put(self, *lines):
        self.channel.send(b"O", self.agent, COUNT.pack(len(lines)), body_of(Stream.STDOUT, lines))

    def end(self):
        self.channel.say(Op.ENDED, self.agent, end=ENDED)


async def until(condition):
    async def wait():
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 20)


def play(tmp_path, agents, scene):
    """Run a scene with a head."""

    async def run():
        head = Head(tmp_path, agents)
        await head.relays.serve()
        try:
            await scene(head)
        finally:
            if not head.writer.written.is_last:
                await head.close()

    asyncio.run(run())


async def joined(head, agent):
    """A relay that is ready and whose rank runs."""
    played = await PlayedRelay(agent).join(head)
    assert (await played.next())["op"] == Op.WELCOME
    assert (await played.next())["op"] == Op.FETCH
    played.channel.say(Op.READY)
    return played


def test_lines_of_all_relays_are_numbered_once_and_none_is_lost(tmp_path):
    async def scene(head):
        head.relays.deal_blobs()
        played = [await joined(head, agent) for agent in (1, 2, 3)]
        await until(lambda: head.told == ["ready"])
        runs = [head.spawn(agent) for agent in (1, 2, 3)]
        for one in played:
            assert await one.next() == {"rank": one.agent, "op": "spawn", "attempt": 0, "port": 5, "seed": 7}
            one.channel.say(Op.FORKED, one.agent, pid=40 + one.agent)
        for number in range(300):
            for one in played:
                one.put(*(b"%d %d" % (one.agent, number * 10 + line) for line in range(10)))
                await asyncio.sleep(0)
        for one in played:
            one.end()
        await until(lambda: all(run.end for run in runs))
        assert runs[0].end == End(exit_code=0, tail=("last",))
        assert [run.pid for run in runs] == [41, 42, 43]
        await head.close()
        assert [line.sequence for line in head.lines()] == list(range(9000))
        for one in (1, 2, 3):
            assert [line.text for line in head.lines() if line.rank == one] == [f"{one} {n}" for n in range(3000)]

    play(tmp_path, 4, scene)


@pytest.mark.parametrize("size", [0, 1, 9_000_000])
def test_an_outcome_arrives_before_its_rank_is_gone(tmp_path, size):
    data = os.urandom(size)

    async def scene(head):
        head.relays.deal_blobs()
        played = await joined(head, 1)
        run = head.spawn(1)
        played.channel.say(Op.SAID, 1, message={"done": True, "ok": True})
        played.end()
        await until(lambda: run.end)
        assert not run.is_gone
        played.channel.say(Op.OUTCOME, 1, bytes=size)
        for start in range(0, size, 250_000):
            played.channel.send(b"F", 1, data[start : start + 250_000])
        await until(lambda: run.is_gone)
        assert not size or head.files.outcome(0, 1).read_bytes() == data

    play(tmp_path, 2, scene)


@pytest.mark.parametrize("has_spawned", [True, False])
def test_a_relay_whose_connection_is_cut_is_lost_with_its_ranks(tmp_path, has_spawned):
    async def scene(head):
        head.relays.deal_blobs()
        played = [await joined(head, agent) for agent in (1, 2)]
        run = head.spawn(1) if has_spawned else None
        played[0].put(b"last words")
        played[0].channel.close()
        await until(lambda: len(head.told) == 2)
        assert head.told[1].startswith("lost: Pod 1 (rank 1) is gone: its agent has ended")
        assert head.relays.explain_loss().startswith("Pod 1 (rank 1) is gone")
        assert head.relays.connected == 1
        if run is not None:
            await until(lambda: run.is_gone)
            assert run.end.reason == "its pod was lost"
        # A pod that the operator makes again is told that the run goes on without it.
        again = await PlayedRelay(1).join(head)
        assert (await again.next())["op"] == Op.OVER
        await asyncio.wait_for(again.is_closed.wait(), 10)

    play(tmp_path, 3, scene)


def test_a_relay_that_is_told_to_end_says_so(tmp_path):
    async def scene(head):
        played = await PlayedRelay(1).join(head)
        played.channel.say(Op.LEAVING, reason="it received SIGTERM")
        await until(lambda: head.told)
        assert head.told == ["leaves: Pod 1 (rank 1) is gone: it received SIGTERM"]

    play(tmp_path, 2, scene)


def test_a_peer_without_the_key_is_refused_and_that_is_said(tmp_path):
    async def scene(head):
        stranger = await PlayedRelay(1, key=b"x" * 32).join(head)
        await asyncio.wait_for(stranger.is_closed.wait(), 10)
        await until(lambda: head.writer.written.next_line == 1)
        assert "does not hold this job's key was refused" in head.lines()[0].text
        assert head.relays.connected == 0
        await PlayedRelay(1).join(head)
        await until(lambda: head.relays.connected == 1)

    play(tmp_path, 2, scene)


def test_blobs_of_many_pods_are_dealt_as_a_tree(tmp_path):
    async def scene(head):
        head.relays.deal_blobs()
        hosts = []
        played = [await PlayedRelay(agent).join(head) for agent in range(1, 12)]
        waiting, rounds = list(played), []
        while waiting:
            await asyncio.sleep(0.05)
            told = []
            for one in waiting:
                while not one.messages.empty():
                    message = one.messages.get_nowait()
                    if message["op"] == Op.FETCH:
                        told.append(one)
                        hosts.append(message["host"])
            rounds.append(len(told))
            waiting = [one for one in waiting if one not in told]
            for one in told:
                one.channel.say(Op.READY)
        await until(lambda: head.told == ["ready"])
        assert hosts == ["127.0.0.1"] * 11
        # Each passes them to two others: the head to 2, those to 4, those to the rest.
        assert rounds == [2, 4, 5]

    play(tmp_path, 12, scene)


# -- a head that does not read ----------------------------------------------------------------------------------------


class SlowChannel:
    """A connection that takes nothing while it is held."""

    is_open = True

    def __init__(self):
        self.unsent_bytes = 0
        self.sent = []

    def send(self, kind, rank, *payload):
        self.sent.append((kind, rank, b"".join(payload)))

    def say(self, op, rank=0, **fields):
        self.sent.append((op, rank, fields))


def test_a_relay_holds_a_bounded_part_for_a_head_that_does_not_read_and_counts_the_rest(tmp_path):
    async def scene():
        channel = SlowChannel()
        forwarder = _Forwarder(3, 0, None, channel, tmp_path / "outcome", asyncio.get_running_loop())
        assert forwarder.has_room
        channel.unsent_bytes = relay.FULL_BYTES
        assert not forwarder.has_room
        line = b"x" * 990
        for number in range(20_000):
            forwarder.output(body_of(Stream.STDOUT, [b"%06d " % number + line]), 1)
        assert channel.sent == []
        assert sum(len(body) for body, _ in forwarder.rest(1 << 20)) <= 1 << 20
        channel.unsent_bytes = 0
        forwarder.ended(End(exit_code=0))
        bodies = [data[COUNT.size :] for kind, _, data in channel.sent if kind == b"O"]
        counts = sum(COUNT.unpack_from(data)[0] for kind, _, data in channel.sent if kind == b"O")
        lines = b"".join(bodies).split(b"\n")[:-1]
        assert counts == len(lines)
        assert lines[0].startswith(b"#")
        missing = int(lines[0][1:].split()[0].replace(b",", b""))
        assert b"lines of this rank are missing here: the first pod's agent did not take them in time" in lines[0]
        assert missing + len(lines) - 1 == 20_000
        assert lines[-1].startswith(b"|019999 ")
        assert sum(map(len, bodies)) < relay.HELD_BYTES + relay.BODY_BYTES * 4
        assert channel.sent[-1][0] == Op.ENDED

    asyncio.run(scene())


def test_a_rank_event_travels_as_it_is(tmp_path):
    async def scene(head):
        head.relays.deal_blobs()
        played = await joined(head, 1)
        head.spawn(1)
        event = {"event": str(EventKind.METRICS), "rank": 1, "attempt": 0, "values": {"loss": 0.5}}
        played.channel.send(b"E", 1, contract.encode_json(event))
        usage = {"event": str(EventKind.USAGE), "rank": 1, "memory_bytes": 5}
        played.channel.send(b"E", 1, contract.encode_json(usage))
        await until(lambda: head.writer.written.events)
        await head.close()
        assert list(contract.decode_json_lines(head.files.events.read_bytes())) == [event]
        assert json.loads(head.files.progress.read_bytes()) == {"usage 1": usage}

    play(tmp_path, 2, scene)
