"""A connection to a pod's port, without a cluster."""

import contextlib
import socket
import threading

import pytest

pytest.importorskip("kubernetes")

import websocket

from kale_dist.places.kubernetes.port_forward import PodConnection

pytestmark = pytest.mark.newest


def test_shutdown_wakes_a_thread_that_reads_and_leaves_the_closing_to_it():
    closers = []

    class Watched(socket.socket):
        def close(self):
            closers.append(threading.current_thread())
            super().close()

    listener = socket.create_server(("127.0.0.1", 0))
    tunnel = websocket.WebSocket()
    tunnel.sock, tunnel.connected = Watched(), True
    tunnel.sock.connect(listener.getsockname())
    connection = PodConnection(tunnel)

    def read():
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.recv(1)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    connection.shutdown(socket.SHUT_RDWR)
    # A connection that got the descriptor's number before the reader was awake would lose bytes to it.
    assert threading.main_thread() not in closers
    reader.join(20)
    assert set(closers) == {reader}
    connection.shutdown(socket.SHUT_RDWR)
    listener.close()
