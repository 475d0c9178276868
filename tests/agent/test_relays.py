"""A head and its relays over real connections, with ranks that are played: who joins, floods, cuts, and what is lost."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
import secrets
from types import SimpleNamespace

import pytest

from kale_dist import wire
from kale_dist.wire import Attempt, BlockReader, JobFiles, Order, Policy, Source, Stream, body_of, messages
from kale_dist.wire.messages import Done, Running
from kale_dist.worker.agent import writer as writer_module
from kale_dist.worker.agent.job_run import open_port
from kale_dist.worker.agent.near_rank import End
from kale_dist.worker.agent.rank_run import Rank
from kale_dist.worker.agent.writer import JobWriter
from kale_dist.worker.pod import relay
from kale_dist.worker.pod.head_relays import HeadsRelays
from kale_dist.worker.pod.relay import Relay, _Forwarder
from kale_dist.worker.pod.relay_protocol import COUNT, NO_RANK, Channel, RelayOp, is_signed, sign

KEY = b"k" * 32
RESTARTS = 2
ENDED = {"exit_code": 0, "signal": None, "reason": "", "memory_limit": "", "tail": ["last"]}


def free_port():
    while True:
        port = 20_000 + secrets.randbelow(10_000) * 3 % 30_000
        try:
            for number in (port, port + 1):
                open_port("127.0.0.1", number, 1).close()
        except OSError:
            continue
        return port


class Head:
    """The head's side, and what it was told."""

    def __init__(self, folder, agents):
        self.order = Order(
            job="j", object="j", number_of_processes=agents, processes_per_agent=1, head="127.0.0.1", port=free_port(), snapshot="",
            policy=Policy(max_restarts=RESTARTS), replaces_pods=True,
        )  # fmt: skip
        self.files = JobFiles(folder)
        self.writer = JobWriter(self.files, asyncio.get_running_loop(), lambda: None)
        self.told = []
        self.played = []
        self.relays = HeadsRelays(
            self.order, KEY, self.files, open_port("127.0.0.1", self.order.port + 1, 16), log=self.writer.log
        )

    # -- what it is told of its relays, as a `JobRun` -------------------------------------------------------------------

    def pod_is_ready(self):
        pass

    def lose_pod(self, reason, *, has_ranks):
        self.told.append(f"lost{' with ranks' if has_ranks else ''}: {reason}")

    def pod_leaves(self, reason):
        self.told.append(f"leaves: {reason}")

    def fail(self, cause, reason):
        self.told.append(f"{cause}: {reason}")

    # -- what a test does ---------------------------------------------------------------------------------------------

    def spawn(self):
        """Have the relays that are ready start an attempt; gives all its ranks."""
        attempt = Attempt.form(self.order, [0, *self.relays.ready], number=0, port=5, seed=7)
        ranks = [
            Rank(rank, self.writer, lambda _: None, lambda _: None, lambda _: None)
            for rank in range(attempt.world_size)
        ]
        self.relays.spawn(attempt, ranks)
        return ranks

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
        self.serves = ["127.0.0.1", id(self)]

    async def next(self):
        frame = await asyncio.wait_for(self.channel.read(), 10)
        if frame is None:
            return None
        kind, rank, data = frame
        assert kind == b"M"
        return {"rank": rank, **json.loads(data)}

    async def join(self, head):
        self.channel = await Channel.connect("127.0.0.1", head.order.port + 1)
        head.played.append(self.channel)
        self.channel.send_message(RelayOp.HELLO, agent=self.agent, version=wire.VERSION, nonce="mine")
        challenge = await self.next()
        assert is_signed(challenge["mac"], KEY, "head", self.agent, "mine", challenge["nonce"])
        proof = sign(self.key, "relay", self.agent, "mine", challenge["nonce"])
        self.channel.send_message(RelayOp.PROOF, mac=proof, serves=self.serves)
        return self

    def put(self, *lines):
        self.channel.send(b"O", self.agent, COUNT.pack(len(lines)), body_of(Stream.STDOUT, lines))

    def end(self):
        self.channel.send_message(RelayOp.ENDED, self.agent, end=ENDED)


async def until(condition):
    async def wait():
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 20)


def play(tmp_path, agents, scene):
    """Run a scene with a head."""

    async def run():
        head = Head(tmp_path, agents)
        await head.relays.serve(head)
        try:
            await scene(head)
        finally:
            if not head.writer.written.is_last:
                await head.close()
            for channel in head.played:
                channel.close()
            await asyncio.sleep(0.05)

    asyncio.run(run())


async def joined(head, agent):
    """A relay that is ready and whose rank runs."""
    played = await PlayedRelay(agent).join(head)
    assert (await played.next())["op"] == RelayOp.WELCOME
    assert (await played.next())["op"] == RelayOp.FETCH
    played.channel.send_message(RelayOp.READY)
    return played


def test_lines_of_all_relays_are_numbered_once_and_none_is_lost(tmp_path):
    async def scene(head):
        head.relays.deal_blobs()
        played = [await joined(head, agent) for agent in (1, 2, 3)]
        await until(lambda: not head.relays.missing)
        runs = head.spawn()[1:]
        for one in played:
            attempt = wire.decode(Attempt, (await one.next())["attempt"])
            assert (attempt.port, attempt.seed, attempt.world_size) == (5, 7, 4)
            one.channel.send_message(RelayOp.FORKED, one.agent, pid=40 + one.agent)
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


@pytest.mark.parametrize(("size", "told"), [(0, 0), (1, 1), (9_000_000, 9_000_000), (9_000_000, 9_000_001)])
def test_an_outcome_arrives_before_its_rank_is_done(tmp_path, size, told):
    data = os.urandom(size)

    async def scene(head):
        head.relays.deal_blobs()
        played = await joined(head, 1)
        await until(lambda: head.relays.ready)
        run = head.spawn()[1]
        before = head.writer.moves[1]
        for start in range(0, size, 250_000):
            played.channel.send(b"F", 1, data[start : start + 250_000])
        await played.channel.drain()
        await asyncio.sleep(0.1)
        assert run.done is None
        # On its way it is a sign of progress: the job has not stalled.
        assert (head.writer.moves[1] > before) == (size > 0)
        assert not head.files.outcome(0, 1).exists()
        played.channel.send_message(RelayOp.OUTCOME, 1, bytes=told)
        played.channel.send(b"R", 1, messages.encode(Done()))
        await until(lambda: run.done)
        # One that was cut short is not taken for a whole one.
        outcome = head.files.outcome(0, 1)
        assert (outcome.read_bytes() if outcome.exists() else None) == (data if told == size > 0 else None)

    play(tmp_path, 2, scene)


@pytest.mark.parametrize("has_spawned", [True, False])
def test_a_relay_whose_connection_is_cut_is_lost_with_its_ranks(tmp_path, has_spawned):
    async def scene(head):
        head.relays.deal_blobs()
        played = [await joined(head, agent) for agent in (1, 2)]
        await until(lambda: head.relays.ready == [1, 2])
        run = head.spawn()[1] if has_spawned else None
        played[0].put(b"last words")
        played[0].channel.close()
        await until(lambda: head.told)
        name = "Pod 1 (rank 1)" if has_spawned else "Pod 1"
        how = "lost with ranks" if has_spawned else "lost"
        assert head.told[0].startswith(f"{how}: {name} is gone: its agent has ended")
        assert head.relays.explain_loss().startswith(f"{name} is gone" if has_spawned else "")
        assert head.relays.connected == 1
        if run is not None:
            await until(lambda: run.is_gone)
            assert run.end.reason == "its pod was lost"

    play(tmp_path, 3, scene)


def test_a_pod_that_was_made_again_takes_the_place_of_the_one_before_it(tmp_path):
    async def scene(head):
        head.relays.deal_blobs()
        before = await joined(head, 1)
        await until(lambda: head.relays.ready == [1])
        run = head.spawn()[1]
        assert (await before.next())["op"] == RelayOp.SPAWN
        # Its node is gone without a word, so that nothing is known of its end.
        again = await joined(head, 1)
        await until(lambda: head.told and head.relays.ready == [1])
        assert head.told[0].startswith("lost with ranks: Pod 1 (rank 1) is gone")
        assert run.end.reason == "its pod was lost"
        assert await before.next() is None
        # What the one before it has sent since counts no more.
        before.put(b"from the dead")
        run = head.spawn()[1]
        assert (await again.next())["op"] == RelayOp.SPAWN
        again.put(b"alive")
        again.end()
        await until(lambda: run.end)
        await head.close()
        assert [line.text for line in head.lines()] == ["alive"]

    play(tmp_path, 2, scene)


def test_a_pod_is_lost_as_often_as_the_job_may_restart_and_then_sent_away(tmp_path):
    async def scene(head):
        for _ in range(RESTARTS + 1):
            played = await PlayedRelay(1).join(head)
            assert (await played.next())["op"] == RelayOp.WELCOME
            played.channel.close()
            await until(lambda: not head.relays.connected)
        again = await PlayedRelay(1).join(head)
        assert (await again.next())["op"] == RelayOp.OVER
        assert await again.next() is None
        assert len(head.told) == RESTARTS + 1

    play(tmp_path, 2, scene)


@pytest.mark.parametrize("has_ranks", [True, False])
def test_a_relay_that_is_terminated_says_so_and_is_let_go_when_it_has_no_rank(tmp_path, has_ranks):
    async def scene(head):
        head.relays.deal_blobs()
        played = await joined(head, 1)
        await until(lambda: head.relays.ready == [1])
        if has_ranks:
            head.spawn()
            assert (await played.next())["op"] == RelayOp.SPAWN
        played.channel.send_message(RelayOp.LEAVING, reason="it received SIGTERM")
        await until(lambda: head.told)
        assert head.relays.ready == []
        if has_ranks:
            assert head.told == ["leaves: Pod 1 (rank 1) is gone: it received SIGTERM"]
            played.end()
            await until(lambda: head.relays._relays[1].ranks == [])
            head.relays.dismiss_leavers()
        else:
            assert head.told == ["lost: Pod 1 is gone: it received SIGTERM"]
        assert (await played.next())["op"] == RelayOp.END
        played.channel.close()
        await until(lambda: not head.relays.connected)
        # It was told before, and is expected again until the end.
        assert len(head.told) == 1
        assert head.relays.may_return == 1
        again = await joined(head, 1)
        assert head.relays.may_return == 0
        head.relays.end()
        assert (await again.next())["op"] == RelayOp.END
        again.channel.close()
        await until(lambda: not head.relays.connected)
        assert head.relays.may_return == 0

    play(tmp_path, 2, scene)


def test_a_relay_that_is_terminated_in_the_moment_in_which_it_has_joined_says_so(tmp_path):
    async def scene(head):
        order = dataclasses.replace(head.order, source=Source.STREAM)
        mine = Relay(
            SimpleNamespace(order=order, key=KEY, place=SimpleNamespace(pod=1, listen="127.0.0.1"), store=None)
        )
        join = mine._join

        async def interrupted():
            channel = await join()
            head.played.append(channel)
            # Before the one that waits for this is woken.
            asyncio.get_running_loop().call_soon(mine.terminate)
            return channel

        mine._join = interrupted
        running = asyncio.ensure_future(mine.run())
        await until(lambda: head.told)
        assert (
            head.told[0]
            == "lost: Pod 1 is gone: it received SIGTERM: it was evicted, or the job was deleted or suspended"
        )
        running.cancel()

    play(tmp_path, 2, scene)


def test_a_peer_without_the_key_is_refused_and_that_is_said(tmp_path):
    async def scene(head):
        stranger = await PlayedRelay(1, key=b"x" * 32).join(head)
        assert await stranger.next() is None
        await until(lambda: head.writer.written.next_line == 1)
        assert "does not hold this job's key was refused" in head.lines()[0].text
        assert head.relays.connected == 0
        await PlayedRelay(1).join(head)
        await until(lambda: head.relays.connected == 1)

    play(tmp_path, 2, scene)


def test_each_pod_passes_the_blobs_on_to_two_others_at_most(tmp_path):
    async def scene(head):
        early = [await PlayedRelay(agent).join(head) for agent in range(1, 8)]
        for one in early:
            assert (await one.next())["op"] == RelayOp.WELCOME
        head.relays.deal_blobs()
        sources = [(await one.next())["source"] for one in early]
        assert sources[:3] == [None, None, early[0].serves]
        for one in early[2:4]:
            one.channel.close()
        await until(lambda: head.relays.connected == 5)
        # Pods that come late, or again, are told of one that is there.
        late = [await PlayedRelay(agent).join(head) for agent in (3, 4, *range(8, 20))]
        for one in late:
            assert (await one.next())["op"] == RelayOp.WELCOME
            sources.append((await one.next())["source"])
            assert sources[-1] not in [gone.serves for gone in early[2:4]]
        told = collections.Counter(map(str, sources))
        assert max(told.values()) == told["None"] == 2

    play(tmp_path, 20, scene)


# -- a head that does not read ----------------------------------------------------------------------------------------


class SlowChannel:
    """A connection whose head takes nothing until it is let."""

    def __init__(self):
        self.sent = []
        self.is_read = False
        self.may_send = True

    @property
    def unsent_bytes(self):
        return 0 if self.is_read else sum(len(data) for kind, _, data in self.sent if kind == b"O")

    def send(self, kind, rank, *payload):
        self.sent.append((kind, rank, b"".join(payload)))

    def send_message(self, op, rank=0, **fields):
        self.sent.append((op, rank, fields))


def test_a_relay_leaves_lines_with_their_ranks_while_the_connection_is_slow_or_the_head_has_no_room(tmp_path):
    async def scene():
        channel = SlowChannel()
        forwarder = _Forwarder(3, 0, None, channel, tmp_path / "outcome", asyncio.get_running_loop())
        count = 0
        while forwarder.has_room:
            forwarder.output(body_of(Stream.STDOUT, [b"%06d " % count + b"x" * 990]), 1)
            count += 1
        assert channel.unsent_bytes < relay.HELD_BYTES + relay.BODY_BYTES * 2
        channel.is_read = True
        assert forwarder.has_room
        channel.may_send = False
        assert not forwarder.has_room
        forwarder.output(body_of(Stream.STDOUT, [b"its last line"]), 1)
        forwarder.ended(End(exit_code=0))
        bodies = [data[COUNT.size :] for kind, _, data in channel.sent if kind == b"O"]
        lines = b"".join(bodies).split(b"\n")[:-1]
        assert sum(COUNT.unpack_from(data)[0] for kind, _, data in channel.sent if kind == b"O") == len(lines)
        assert [line[:7] for line in lines[:-1]] == [b"|%06d" % number for number in range(count)]
        assert lines[-1] == b"|its last line"
        assert channel.sent[-1][0] == RelayOp.ENDED

    asyncio.run(scene())


def test_relays_are_told_when_the_head_has_no_room_and_when_it_has_again(tmp_path, monkeypatch):
    async def scene(head):
        head.relays.deal_blobs()
        played = [await joined(head, agent) for agent in (1, 2)]
        await until(lambda: len(head.relays.ready) == 2)
        head.spawn()
        for one in played:
            assert (await one.next())["op"] == RelayOp.SPAWN
        monkeypatch.setattr(writer_module, "QUEUE_BYTES", 0)
        played[0].put(b"one line too many")
        for one in played:
            assert await one.next() == {"rank": NO_RANK, "op": RelayOp.ROOM, "is_there": False}
        monkeypatch.undo()
        head.relays.limit(has_room=head.writer.has_room)
        for one in played:
            assert await one.next() == {"rank": NO_RANK, "op": RelayOp.ROOM, "is_there": True}

    play(tmp_path, 3, scene)


@pytest.mark.parametrize("is_slow", [True, False])
def test_the_end_of_a_rank_is_told_after_its_outcome(tmp_path, is_slow):
    async def scene():
        channel, outcome = SlowChannel(), tmp_path / "outcome"
        outcome.write_bytes(b"x" * 600_000)
        may_send = asyncio.Event()
        channel.drain = may_send.wait
        forwarder = _Forwarder(3, 0, None, channel, outcome, asyncio.get_running_loop())
        forwarder.message(Running())
        forwarder.message(Done())
        if not is_slow:
            may_send.set()
            await until(lambda: len(channel.sent) == 6)
        forwarder.ended(End(exit_code=0))
        may_send.set()
        await until(lambda: channel.sent[-1][0] == RelayOp.ENDED)
        assert [kind for kind, _, _ in channel.sent] == [b"R", b"F", b"F", b"F", RelayOp.OUTCOME, b"R", RelayOp.ENDED]
        assert channel.sent[4][2] == {"bytes": 600_000}

    asyncio.run(scene())


def test_a_rank_event_travels_as_it_is(tmp_path):
    async def scene(head):
        head.relays.deal_blobs()
        played = await joined(head, 1)
        await until(lambda: head.relays.ready)
        head.spawn()
        event = {"event": "metrics", "rank": 1, "attempt": 0, "values": [["loss", 0.5]]}
        played.channel.send(b"E", 1, wire.encode_json(event))
        usage = {"event": "usage", "rank": 1, "memory_bytes": 5}
        played.channel.send(b"E", 1, wire.encode_json(usage))
        await until(lambda: head.writer.written.events)
        await head.close()
        assert list(wire.decode_json_lines(head.files.events.read_bytes())) == [event]
        assert json.loads(head.files.progress.read_bytes()) == {"usage 1": usage}

    play(tmp_path, 2, scene)
