"""Bytes from a registry, checked against the digest that names them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

from urllib3.exceptions import HTTPError

from kale_dist.errors import ImageError
from kale_dist.image.connection import Connection, CutError
from kale_dist.image.network import BLOCK_BYTES

_WHOLE, _PART = 200, 206
_CUTS = 5
"""In a row, without a byte having arrived in between."""

_BETWEEN_S = 0.2


def download(
    connection: Connection, path: str, *, digest: str, start: int, access: tuple[str, ...], doing: str
) -> Iterator[bytes]:
    """A blob's bytes from `start` on, in blocks of at most 1 MiB; after a cut the rest is asked for.

    Args:
        connection: To the registry.
        path: Of the blob there.
        digest: Its name. Checked after the last byte, where `start` is 0.
        start: How many bytes are left out.
        access: What a token has to allow.
        doing: For messages.

    Raises:
        ImageError: Refused, cut too often (retryable), or other bytes than the digest names.
    """
    hasher, at, cuts = hashlib.new(digest.partition(":")[0]), start, 0
    while True:
        headers = {"Range": f"bytes={at}-"} if at else {}
        answer = connection.send("GET", path, doing=doing, access=access, expect=(_WHOLE, _PART), headers=headers)
        skip = at if answer.status == _WHOLE else 0
        try:
            for block in answer.stream(BLOCK_BYTES, decode_content=False):
                rest = block[skip:]
                skip -= len(block) - len(rest)
                if rest:
                    at, cuts = at + len(rest), 0
                    hasher.update(rest)
                    yield rest
        except HTTPError as error:
            cuts += 1
            if cuts > _CUTS:
                text = f"Could not {doing} at the registry {connection.host}: the connection ended {cuts} times. Try again."
                raise CutError(text, retryable=True) from error
            time.sleep(_BETWEEN_S * cuts)
        else:
            break
        finally:
            answer.close()
    found = f"{hasher.name}:{hasher.hexdigest()}"
    if not start and found != digest:
        raise damaged(connection.host, doing, digest, found)


def check(host: str, data: bytes, digest: str, doing: str) -> str:
    """The digest, where it is that of the bytes.

    Raises:
        ImageError: It is not.
    """
    algorithm = digest.partition(":")[0]
    found = f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"
    if found != digest:
        raise damaged(host, doing, digest, found)
    return digest


def damaged(host: str, doing: str, wanted: str, found: str) -> ImageError:
    """The error for bytes that are not what their name says."""
    problem = f"Could not {doing} at the registry {host}: the bytes have the digest {found[:80]}, not {wanted}"
    text = f"{problem}. They were damaged there or on their way: try again, else push it again."
    return ImageError(text, retryable=True)
