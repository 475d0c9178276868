"""What 32 relays of 1 MB/s each cost the head: share of one core, and whether a line is lost.

Run it with `python benchmarks/relays.py [relays] [seconds]`. Head and log are the product's own; the relays are played by
four other processes, which speak its protocol and send lines of 100 bytes as ranks of 32 pods would. At the end every
number has to be in the log, in order, with nothing missing.
"""

from __future__ import annotations

import asyncio
import pathlib
import subprocess
import sys
import tempfile
import time

from kale_dist import wire
from kale_dist.wire import Attempt, BlockReader, JobFiles, LineBlock, Order, Stream, body_of
from kale_dist.worker.agent.attempt import Site
from kale_dist.worker.agent.fork_pool import ForkPool
from kale_dist.worker.agent.job_run import JobRun, open_port
from kale_dist.worker.agent.rank_run import Rank
from kale_dist.worker.agent.writer import POD_LOG_BYTES, JobWriter
from kale_dist.worker.pod.head_relays import HeadsRelays
from kale_dist.worker.pod.relay_protocol import COUNT, Channel, Op, sign

KEY = b"k" * 32
BYTES_PER_S = 1_000_000
EACH_S = 0.05
SENDERS = 4
LINE = b"x" * 99


def order_of(relays: int, port: int) -> Order:
    """One rank for each relay, and one for the head, which it does not start here."""
    processes = relays + 1
    return Order(
        job="j", number_of_processes=processes, processes_per_agent=1, head="127.0.0.1", port=port, snapshot=""
    )


async def head(relays: int, seconds: float, folder: pathlib.Path) -> tuple[int, float, float]:
    """Be the head; gives the lines in the log, and the seconds of processor and clock that they took."""
    port, loop = 21_000, asyncio.get_running_loop()
    files = JobFiles(folder)
    writer = JobWriter(files, loop, lambda: None, limit_bytes=POD_LOG_BYTES)
    listener = open_port("127.0.0.1", port + 1, 1024)
    order = order_of(relays, port)
    joined = HeadsRelays(order, KEY, files, listener, say=writer.say)
    site = Site(order=order, loop=loop, pool=ForkPool(loop, spares=0), writer=writer, relays=joined)
    await joined.serve(JobRun(site))
    arguments = [str(relays), str(seconds), str(port)]
    senders = [
        subprocess.Popen([sys.executable, __file__, "send", str(number), *arguments])  # noqa: ASYNC220 - it returns at once
        for number in range(SENDERS)
    ]
    joined.deal_blobs()
    while joined.missing:  # noqa: ASYNC110 - relays have no event, and this is cheap
        await asyncio.sleep(0.01)
    attempt = Attempt.form(order, [0, *joined.ready], number=0, port=0, seed=0)
    ranks = [Rank(number, writer, lambda _: None, lambda _: None) for number in range(attempt.world_size)]
    began, cpu = time.monotonic(), time.process_time()
    joined.spawn(attempt, ranks)
    while any(rank.end is None for rank in ranks[1:]):  # noqa: ASYNC110 - ranks have no event, and this is cheap
        await asyncio.sleep(0.1)
    used, took = time.process_time() - cpu, time.monotonic() - began
    written = loop.create_future()
    writer.close(lambda: written.set_result(None))
    await written
    joined.end()
    joined.close()
    for sender in senders:
        sender.wait(20)
    return writer.written.next_line, used, took


async def send(number: int, relays: int, seconds: float, port: int) -> None:
    """Play some of the relays."""
    await asyncio.gather(*(relay(agent, seconds, port) for agent in range(1 + number, relays + 1, SENDERS)))


async def relay(agent: int, seconds: float, port: int) -> None:
    """Play one relay: join, wait for the spawn, send lines, say that the rank has ended."""
    channel = await Channel.connect("127.0.0.1", port + 1)
    channel.say(Op.HELLO, agent=agent, version=wire.VERSION, nonce="n")
    challenge = await channel.read_from_stranger()
    channel.say(Op.PROOF, mac=sign(KEY, "relay", agent, "n", str(challenge["nonce"])))
    while (message := await channel.read_from_stranger())["op"] != Op.SPAWN:
        if message["op"] == Op.FETCH:
            channel.say(Op.READY)
    count = int(BYTES_PER_S * EACH_S / (len(LINE) + 1))
    body = body_of(Stream.STDOUT, [LINE] * count)
    began = time.monotonic()
    for tick in range(round(seconds / EACH_S)):
        channel.send(b"O", agent, COUNT.pack(count), body)
        await channel.drain()
        await asyncio.sleep(max(0.0, began + (tick + 1) * EACH_S - time.monotonic()))
    channel.say(Op.ENDED, agent, end={"exit_code": 0, "signal": None, "reason": "", "memory_limit": "", "tail": []})
    await channel.read_from_stranger()
    channel.close()


def check(files: JobFiles) -> int:
    """Lines in the log, each number once and in order."""
    reader, following = BlockReader(), 0
    with files.log.open("rb") as log:
        while data := log.read(1 << 20):
            for block in reader.feed(data):
                if not isinstance(block, LineBlock) or block.first != following:
                    raise SystemExit(f"line {following} is not where it should be: {str(block)[:200]}")
                following += block.count
    return following


def main() -> None:
    """Measure and tell."""
    relays = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 10.0  # noqa: PLR2004 - the second argument
    with tempfile.TemporaryDirectory() as folder:
        lines, used, took = asyncio.run(head(relays, seconds, pathlib.Path(folder)))
        found = check(JobFiles(folder))
    expected = relays * round(seconds / EACH_S) * int(BYTES_PER_S * EACH_S / (len(LINE) + 1))
    megabytes = expected * (len(LINE) + 1) / 1e6
    print(f"{relays} relays, {megabytes:,.0f} MB in {took:.1f} s ({megabytes / took:.1f} MB/s)")
    print(
        f"head: {used:.2f} s of processor, {100 * used / took:.0f} % of one core, {1000 * used / megabytes:.1f} ms/MB"
    )
    print(f"lines: {expected:,} sent, {lines:,} numbered, {found:,} in the log, {expected - found:,} lost")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "send":
        asyncio.run(send(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
    else:
        main()
