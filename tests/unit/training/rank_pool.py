"""Processes with a gloo group between them, which run functions for tests."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback

import cloudpickle
import forked


def _serve(rank, world, store, connection):
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            function, args = pickle.loads(call)
            answer = (True, function(*args))
        except Exception as error:
            answer = (False, (error, traceback.format_exc()))
        connection.send_bytes(cloudpickle.dumps(answer))


class Hang(Exception):
    """Ranks do not answer. Their stacks are on stderr."""


class Ranks:
    """Some ranks that run functions."""

    def __init__(self, world):
        self.world = world
        context = forked.context()
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, f"{self.folder.name}/store", there))
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, function, *args):
        """Every rank's value; the first error otherwise, after which these ranks are of no use."""
        call = cloudpickle.dumps((function, args))
        for connection in self.connections:
            connection.send_bytes(call)
        answers = []
        for connection in self.connections:
            if not connection.poll(40):
                for process in self.processes:
                    os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)
                raise Hang
            answers.append(pickle.loads(connection.recv_bytes()))
        for is_good, value in answers:
            if not is_good:
                value[0].add_note(value[1])
                raise value[0]
        return [value for _, value in answers]

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()
