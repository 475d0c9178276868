"""zstd, where this Python has it: the standard library's from 3.14 on, else the package `zstandard`."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Protocol, Self

from kale_dist.errors import ConfigError

_LEVEL = 3
"""Its own default: as fast as gzip's lowest, and smaller than its highest."""


class _Compressor(Protocol):
    """What both libraries have."""

    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class _Writable(Protocol):
    def write(self, data: bytes, /) -> int: ...


class DamagedError(Exception):
    """What was read is no zstd stream."""


class Decompressor:
    """Takes a stream piece by piece.

    Args:
        inner: One of either library.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def eof(self) -> bool:
        """Whether the stream has ended."""
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        """What came after its end."""
        return bytes(self._inner.unused_data)

    def decompress(self, data: bytes, /) -> bytes:
        """The plain bytes of some more.

        Raises:
            DamagedError: They are no zstd.
        """
        try:
            return bytes(self._inner.decompress(data))
        except Exception as error:  # each library has a class of its own, without a common root
            raise DamagedError(str(error)) from error


def decompressor() -> Decompressor | None:
    """One that takes a stream piece by piece; None where this Python cannot read zstd."""
    for module in ("compression.zstd", "zstandard"):
        with contextlib.suppress(ImportError):
            made = importlib.import_module(module).ZstdDecompressor()
            return Decompressor(made.decompressobj() if hasattr(made, "decompressobj") else made)
    return None


def compressor() -> _Compressor:
    """One that takes a stream piece by piece.

    Raises:
        ConfigError: This Python cannot write zstd.
    """
    for module in ("compression.zstd", "zstandard"):
        with contextlib.suppress(ImportError):
            made: Any = importlib.import_module(module).ZstdCompressor(level=_LEVEL)
            return made.compressobj() if hasattr(made, "compressobj") else made  # type: ignore[no-any-return]
    problem = "layers are compressed with zstd by the package zstandard, which is not installed"
    raise ConfigError("compression", problem, "pip install zstandard, or leave `compression` out")


class Zstd:
    """A zstd stream that is written; use it in a `with`, at whose end the stream is whole.

    Args:
        out: Takes the compressed bytes.
    """

    def __init__(self, out: _Writable) -> None:
        self._out = out
        self._compressor = compressor()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._out.write(self._compressor.flush())

    def write(self, data: bytes) -> int:
        """Add bytes."""
        self._out.write(self._compressor.compress(data))
        return len(data)
