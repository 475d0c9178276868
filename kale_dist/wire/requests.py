"""Signed requests to a head."""

from __future__ import annotations

import hashlib
import hmac

MAC_HEADER = "X-Kale-Dist-Mac"
"""Header of every request to a head, with its signature."""

BODY_HEADER = "X-Kale-Dist-Body"
"""Header of a POST: SHA-256 of its body, which the signature covers, so that no body is read of those without the key."""

SIZE_HEADER = "X-Kale-Dist-Size"
"""Header of a PUT: bytes of the whole blob or file, of which the request may bring a part."""


def mark_of(key: bytes) -> str:
    """What tells the files of one job from those of another of its name: a hash of its key, which anybody may read."""
    return hashlib.sha256(b"checkpoint\n" + key).hexdigest()


def sign_request(key: bytes, method: str, path: str, body_digest: str = "") -> str:
    """The signature of a request.

    It holds no moment, because clocks differ: a request that is sent again has the same effect as the first.

    Args:
        key: The job's secret.
        method: Such as "GET".
        path: With the query, exactly as it is sent.
        body_digest: SHA-256 of a POST's body, in hexadecimal; empty for GET and PUT (what a PUT brings is checked by
            the digest in its path, or is signed itself).
    """
    text = f"request\n{method}\n{path}\n{body_digest}".encode()
    return hmac.digest(key, text, hashlib.sha256).hex()


def check_request(key: bytes, method: str, path: str, body_digest: str, mac: str) -> bool:
    """Whether a request has the right signature. Takes the same time for all wrong ones."""
    return hmac.compare_digest(sign_request(key, method, path, body_digest).encode(), mac.encode("utf-8", "replace"))
