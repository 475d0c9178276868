"""Processes of their own for tests, forked from one that has PyTorch imported: importing it costs 2 s, and 5 s with its optimizers."""

import multiprocessing

from kale_dist.worker.rank.forkserver import PRELOADED


def context():
    """Where such processes come from: `context().Process(target=..., args=...)`."""
    context = multiprocessing.get_context("forkserver")
    # The names of our runtime would make the server look like an agent that outlives the tests.
    context.set_forkserver_preload([name for name in PRELOADED if not name.startswith("kale_dist.worker")])
    return context
