"""gzip on several cores, which does not compress what does not compress.

The bytes are cut into blocks that do not refer to one another, so that threads compress them at once, as `pigz` does.
Weights and pictures hardly shrink: a block of which samples do not shrink is stored as it is. All that depends on the bytes alone, never on how many threads
there are: the same bytes give the same stream. It is one member, as every runtime reads.
"""

from __future__ import annotations

import collections
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

BLOCK_BYTES = 1 << 20
"""What is compressed by itself."""

_LEVEL = 1
"""Level 6 takes four times as long for a tenth less, and the bytes travel to a registry once."""

_SAMPLES, _SAMPLE_BYTES = 4, 4096
_WORTH = 0.95
"""A block is compressed if its samples get smaller than this part of themselves."""

_THREADS = min(4, os.cpu_count() or 1)
_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
"""No name, no time, fastest compression, unknown system."""

_STORED_BYTES = 0xFFFF
"""What one stored block holds, at most."""

_LAST_BLOCK = b"\x03\x00"
"""Of a deflate stream: one without content."""


class Writable(Protocol):
    """Whatever takes bytes."""

    def write(self, data: bytes, /) -> int:
        """Take them all."""
        ...


class Gzip:
    """A gzip stream that is written; use it in a `with`, at whose end the stream is whole.

    Args:
        out: Takes the compressed bytes, in the thread that writes.
    """

    def __init__(self, out: Writable) -> None:
        self._out = out
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kale-dist-gzip")
        self._packing: collections.deque[Future[bytes]] = collections.deque()
        self._begun: list[bytes | memoryview] = []
        self._missing = BLOCK_BYTES
        self._checksum = 0
        self._size = 0
        out.write(_HEADER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._threads.shutdown(cancel_futures=True)

    def write(self, data: bytes) -> int:
        """Add bytes, which do not change afterwards."""
        self._checksum = zlib.crc32(data, self._checksum)
        self._size += len(data)
        rest = memoryview(data)
        while len(rest) >= self._missing:
            self._pack(b"".join((*self._begun, rest[: self._missing])))
            rest, self._begun, self._missing = rest[self._missing :], [], BLOCK_BYTES
        if rest:
            self._begun.append(rest)
            self._missing -= len(rest)
        return len(data)

    def _pack(self, block: bytes) -> None:
        """Have a block compressed by a thread, or stored by this one: that is done sooner than a thread is woken."""
        if _shrinks(block):
            self._packing.append(self._threads.submit(_compressed, block))
        elif self._packing:
            self._packing.append(_done(_stored(block)))
        else:
            self._out.write(_stored(block))
        while self._packing and (len(self._packing) > 2 * _THREADS or self._packing[0].done()):
            self._out.write(self._packing.popleft().result())

    def _finish(self) -> None:
        if self._begun:
            self._pack(b"".join(self._begun))
        while self._packing:
            self._out.write(self._packing.popleft().result())
        self._out.write(_LAST_BLOCK)
        self._out.write(self._checksum.to_bytes(4, "little") + (self._size % (1 << 32)).to_bytes(4, "little"))


def _compressed(block: bytes) -> bytes:
    """A part of a deflate stream that ends at a whole byte."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return compressor.compress(block) + compressor.flush(zlib.Z_SYNC_FLUSH)


def _done(data: bytes) -> Future[bytes]:
    future: Future[bytes] = Future()
    future.set_result(data)
    return future


def _stored(block: bytes) -> bytes:
    """Stored blocks of a deflate stream (RFC 1951, 3.2.4), which zlib takes five times as long to write."""
    parts: list[bytes | memoryview] = []
    for start in range(0, len(block), _STORED_BYTES):
        part = memoryview(block)[start : start + _STORED_BYTES]
        parts += [b"\x00", len(part).to_bytes(2, "little"), (len(part) ^ 0xFFFF).to_bytes(2, "little"), part]
    return b"".join(parts)


def _shrinks(block: bytes) -> bool:
    """Whether compressing is worth its time, as samples from all over the block tell."""
    step = max(len(block) // _SAMPLES, 1)
    # Not its very beginning: headers of a tar shrink, whatever follows them.
    samples = [block[start : start + _SAMPLE_BYTES] for start in range(step // 2, len(block), step)]
    # Each by itself: one that shrinks to nothing would hide those that do not, and the other way round.
    return any(len(zlib.compress(sample, _LEVEL)) < _WORTH * len(sample) for sample in samples)
