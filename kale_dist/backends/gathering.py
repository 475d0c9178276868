"""Gathers what a log's stream brings in small pieces, for each batch costs the same whatever is in it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator

_MOST_PIECES = 10_000
_GATHER_S = 0.05


def gathered(stream: Iterable[bytes]) -> Iterator[bytes]:
    """What a stream brings, in order, gathered for a moment.

    Args:
        stream: Read in a thread of its own, until it ends or breaks.

    Raises:
        BaseException: What the stream raised, after what it had brought.
    """
    arrived: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for data in stream:
                arrived.put(data)
        except BaseException as error:  # noqa: BLE001 - raised where the pieces are taken
            arrived.put(error)
        else:
            arrived.put(None)

    threading.Thread(target=read, name="kale_dist log stream", daemon=True).start()
    while True:
        item = arrived.get()
        if isinstance(item, bytes):
            time.sleep(_GATHER_S)
        pieces = []
        while isinstance(item, bytes):
            pieces.append(item)
            if arrived.empty() or len(pieces) >= _MOST_PIECES:
                break
            item = arrived.get()
        if pieces:
            yield b"".join(pieces)
        if isinstance(item, BaseException):
            raise item
        if item is None:
            return
