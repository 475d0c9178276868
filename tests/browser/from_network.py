"""Lets a JupyterLab in a network of its own reach what listens here, such as a cluster's API server."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading

_LISTEN = """
import socket, sys
listening = socket.create_server((sys.argv[1], int(sys.argv[2])))
socket.send_fds(socket.socket(fileno=0), [b"."], [listening.fileno()])
"""


@contextlib.contextmanager
def reach(server, host, port):
    """As long as this lasts, an address here is one in the server's network, too."""
    if not server.enter:
        yield
        return
    here, there = socket.socketpair()
    with here, there:
        command = [*server.enter, sys.executable, "-c", _LISTEN, host, str(port)]
        subprocess.run(command, stdin=there, check=True)
        _, (descriptor,), *_ = socket.recv_fds(here, 1, 1)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="from network")
    thread.start()
    # A socket stays in the network in which it was made, whoever has it.
    listening = socket.socket(fileno=descriptor)
    asyncio.run_coroutine_threadsafe(_serve(listening, host, port), loop).result(10)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(_end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
        listening.close()


async def _serve(listening, host, port):
    async def pass_on(reader, writer):
        far_reader, far_writer = await asyncio.open_connection(host, port)
        with contextlib.suppress(OSError):
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    await asyncio.start_server(pass_on, sock=listening)


async def _copy(reader, writer):
    with contextlib.closing(writer):
        while block := await reader.read(1 << 16):
            writer.write(block)
            await writer.drain()


async def _end():
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
