"""Secrets of a specification: sealed with the job's key where they leave the call, opened by the job's agents and ranks alone.

The nonce is a MAC of the text (as in SIV, RFC 5297), so that equal secrets of one job are sealed equally, and a changed one is noticed.
What can be seen is the length.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping

_MAC_BYTES = 32


def seal(key: bytes, secrets: Mapping[str, str]) -> str:
    """Named secrets, encrypted and authenticated, in hexadecimal; empty for none.

    Args:
        key: The secret bytes of the job that may open them.
        secrets: Name to value.
    """
    if not secrets:
        return ""
    data = json.dumps(dict(secrets)).encode()
    mac = _mac(key, data)
    return (mac + _stream(key, mac, data)).hex()


def unseal(key: bytes, sealed: str) -> dict[str, str]:
    """The secrets again.

    Raises:
        ValueError: Another key has sealed them, or they were changed.
    """
    if not sealed:
        return {}
    mac, hidden = (raw := bytes.fromhex(sealed))[:_MAC_BYTES], raw[_MAC_BYTES:]
    data = _stream(key, mac, hidden)
    if not hmac.compare_digest(_mac(key, data), mac):
        raise ValueError("these secrets were not sealed with this key")
    secrets: dict[str, str] = json.loads(data)
    return secrets


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, b"seal\n" + data, hashlib.sha256)


def _stream(key: bytes, nonce: bytes, data: bytes) -> bytes:
    """The XOR of bytes with what HMAC-SHA256 makes of the key, the nonce and a counter."""
    blocks = range(-(-len(data) // _MAC_BYTES))
    pad = b"".join(hmac.digest(key, b"pad\n" + nonce + number.to_bytes(8, "big"), hashlib.sha256) for number in blocks)
    return bytes(one ^ other for one, other in zip(data, pad, strict=False))
