"""The process of a pod: waits for the job's input, then is the head or a relay. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback

from kale_dist import wire
from kale_dist.errors import KaleDistError
from kale_dist.wire import InputFiles, Order
from kale_dist.worker.agent import ending, processes
from kale_dist.worker.agent.fork_pool import ForkPool
from kale_dist.worker.pod.head import Head, WarmHead
from kale_dist.worker.pod.pod import LOST_HEAD, Pod, PodPlace, Problem, place_of
from kale_dist.worker.pod.relay import HeadReturnsError, Relay

INPUT_LIMIT_S = 300.0
"""How long the job's input may take to appear."""

_LOOK_EACH_S = 0.1

_ENDED = "ended"


async def wait_for_input(place: PodPlace, terminating: asyncio.Event) -> tuple[Order, bytes]:
    """Wait for the job's input; gives the order and the key.

    Raises:
        Problem: It does not come, or is not for this agent; or the pod received SIGTERM meanwhile.
    """
    order_file, key_file = place.input / InputFiles.ORDER, place.input / InputFiles.KEY
    deadline = time.monotonic() + INPUT_LIMIT_S
    while not (order_file.exists() and key_file.exists()):
        if terminating.is_set():
            raise Problem("the pod received SIGTERM before its input was there")
        if time.monotonic() > deadline:
            raise Problem(
                f"the job's input did not appear in {place.input} within {INPUT_LIMIT_S:.0f} s: the Secret with it could "
                "not be made, or was deleted"
            )
        await asyncio.sleep(_LOOK_EACH_S)
    try:
        described = json.loads(order_file.read_bytes())
        if described.get("version") != wire.VERSION:
            problem = f"the notebook speaks contract version {described.get('version')}, this pod {wire.VERSION}"
            raise Problem(f"{problem}: restart the notebook's kernel, so that it has the kale_dist that is installed")
        order, key = wire.decode(Order, described), key_file.read_bytes()
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise Problem(f"the agent of pod {place.pod} cannot begin: {type(error).__name__}: {error}") from error
    if place.pod >= order.agents:
        raise Problem(f"the job has {order.agents} pods, so that none has the number {place.pod}")
    return order, key


async def serve(place: PodPlace, pool: ForkPool) -> int:
    """Be the head or a relay; gives the exit code.

    Raises:
        Problem: The agent cannot begin, or received SIGTERM before it had.
        HeadReturnsError: This relay has lost the head, and another one will come.
    """
    loop = asyncio.get_running_loop()
    terminating = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, terminating.set)
    order, key = await wait_for_input(place, terminating)
    pod = Pod(place, order, key, pool)
    if order.returns_head or (order.replaces_pods and place.pod):
        # What an agent has left that was killed here, or has lost the head: this one takes its place, as a new pod's would.
        for folder in (pod.files.folder, place.work / "jobs"):
            shutil.rmtree(folder, ignore_errors=True)
    try:
        pod.files.folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise Problem(
            "this pod's container was started a second time, and its job cannot continue in it: an agent serves one job once"
        ) from None
    per_pod = order.processes_per_agent
    pool.wanted_spares = min(per_pod, order.number_of_processes - place.pod * per_pod)
    pool.refill()
    role = (WarmHead if pod.order.idle_s else Head)(pod) if place.pod == 0 else Relay(pod)
    broken: asyncio.Future[BaseException] = loop.create_future()

    def fail(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        _loop.default_exception_handler(context)
        # asyncio tries again to accept a connection for which there was no descriptor: strangers may have opened many.
        if not broken.done() and "socket" not in context:
            error = context.get("exception")
            broken.set_result(error if isinstance(error, BaseException) else RuntimeError(str(context.get("message"))))

    loop.set_exception_handler(fail)
    loop.add_signal_handler(signal.SIGTERM, role.terminate)
    if terminating.is_set():
        role.terminate()
    running = asyncio.ensure_future(role.run())
    await asyncio.wait((running, broken), return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        raise broken.result()
    code = running.result()
    if code == wire.EXIT_TERMINATED and pod.is_overdue:
        # A pod that was made again would only reach its deadline again.
        code = 1
    return code if code >= wire.FIRST_SIGNAL and order.returns_head else _keep_end(place, code)


async def _main(place: PodPlace, launched: tuple[socket.socket, int]) -> int:
    processes.become_subreaper()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, processes.reap_orphans)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pool = ForkPool(loop, spares=0)
    pool.adopt(*launched)
    try:
        return await serve(place, pool)
    except (Problem, KaleDistError, OSError) as error:
        sys.stderr.write(f"kale_dist: {error}\n")
        ending.write_termination(place.termination_log, str(error).encode("utf-8", "replace"))
        return _keep_end(place, wire.EXIT_TERMINATED if "received SIGTERM" in str(error) else wire.EXIT_BROKEN)
    finally:
        pool.close()
        processes.end_orphans(limit_s=2.0)


def main(launched: tuple[socket.socket, int]) -> int:
    """Be a pod's agent; gives the exit code.

    Args:
        launched: Socket and process id of the forkserver. Torch takes seconds to import, so that it was started first.
    """
    try:
        place = place_of(os.environ)
        place.work.mkdir(parents=True, exist_ok=True)
    except (KeyError, ValueError, OSError) as error:
        sys.stderr.write(f"kale_dist: this pod's environment is incomplete: {type(error).__name__}: {error}\n")
        return wire.EXIT_BROKEN
    with contextlib.suppress(OSError, ValueError):
        # The kubelet has started the container again, as a runtime of Kubeflow Trainer has it do: its end stays what it was.
        number, _, words = (place.work / _ENDED).read_bytes().partition(b"\n")
        ending.write_termination(place.termination_log, words)
        return int(number)
    environment = {**os.environ, LOST_HEAD: "1"}
    os.environ.pop(LOST_HEAD, None)
    try:
        return asyncio.run(_main(place, launched))
    except HeadReturnsError:
        # Its container goes on: the controller counts no failure, and the scheduler gives its place to nobody else.
        os.execve(sys.executable, sys.orig_argv, environment)  # noqa: S606 - it is itself
    except Exception as error:  # noqa: BLE001 - any error here is our own fault and has to be reported as such
        traceback.print_exc()
        problem = f"kale_dist: the pod's agent failed: {type(error).__name__}: {error}"
        ending.write_termination(place.termination_log, problem.encode("utf-8", "replace"))
        return _keep_end(place, wire.EXIT_BROKEN)


def _keep_end(place: PodPlace, code: int) -> int:
    """Write down how the agent has ended, for good; gives the exit code."""
    with contextlib.suppress(OSError):
        message = place.termination_log.read_bytes() if place.termination_log is not None else b""
        (place.work / _ENDED).write_bytes(b"%d\n%s" % (code, message))
    return code
