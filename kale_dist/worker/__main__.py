"""Entry of the processes that serve jobs: `python -m kale_dist.worker agent|forkserver|pod|probe ...`."""

from __future__ import annotations

import argparse
import contextlib
import resource
import signal
import sys


def main(arguments: list[str]) -> int:
    """Read the command line and be that process.

    Args:
        arguments: Without the program's name.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m kale_dist.worker", description="Processes that serve jobs.")
    kinds = parser.add_subparsers(dest="kind", required=True)
    agent = kinds.add_parser("agent")
    agent.add_argument("--connection", type=int, required=True)
    agent.add_argument("--address", required=True)
    agent.add_argument("--kernel-pid", type=int, required=True)
    agent.add_argument("--kernel-start", type=int, required=True)
    forking = kinds.add_parser("forkserver")
    forking.add_argument("--connection", type=int, required=True)
    forking.add_argument("--agent-pid", type=int, required=True)
    kinds.add_parser("pod")
    kinds.add_parser("probe")
    given = parser.parse_args(arguments)
    if given.kind == "agent":
        # First of all: importing torch takes longest, and the forkserver does it in a process of its own.
        from kale_dist.worker.agent import forkserver_launch, processes

        lives = processes.is_running(given.kernel_pid, given.kernel_start)
        launched = forkserver_launch.launch() if lives else None
        from kale_dist.worker.agent.agent import main as run_agent

        return run_agent(
            launched,
            connection=given.connection,
            address=given.address,
            kernel_pid=given.kernel_pid,
            kernel_start=given.kernel_start,
        )
    if given.kind == "pod":
        # An agent that begins again has blocked it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        from kale_dist.worker.agent import forkserver_launch

        # Ranks inherit it, and rank 0 has a connection of each other one.
        with contextlib.suppress(OSError, ValueError):
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        launched = forkserver_launch.launch()
        from kale_dist.worker.pod.pod_main import main as run_pod

        return run_pod(launched)
    if given.kind == "probe":
        from kale_dist.worker.rank.rank_gpus import main as run_probe

        return run_probe()
    from kale_dist.worker.rank.forkserver import main as run_forkserver

    return run_forkserver(given.connection, given.agent_pid)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
