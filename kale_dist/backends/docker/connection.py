"""Connections to engines, one for each that this process has spoken to."""

from __future__ import annotations

import contextlib
import os
import threading

from kale_dist import engine
from kale_dist.engine import Engine
from kale_dist.errors import BackendError, BackendUnavailableError

_lock = threading.Lock()
_engines: dict[str, Engine] = {}


def connect(url: str = "") -> Engine:
    """The engine at a place.

    Args:
        url: Such as `unix:///var/run/docker.sock`; empty for the one that a new job would go to.

    Raises:
        BackendUnavailableError: It cannot be reached.
    """
    # What it says may change within a process, and with it which engine is meant.
    name = url or f"as configured by {os.environ.get('DOCKER_HOST', '')} {os.environ.get('DOCKER_CONTEXT', '')}"
    with _lock:
        found = _engines.get(name)
        if found is None:
            made = engine.connect(url or None)
            found = _engines[name] = _engines.setdefault(made.url, made)
            if found is not made:
                made.close()
        return found


def place(engine: Engine) -> tuple[tuple[str, str], ...]:
    """What a record keeps of an engine, for `connect_again`."""
    return ("engine", engine.url), ("engine_id", str(engine.info.get("ID") or ""))


def connect_again(url: str, identifier: str) -> Engine:
    """The engine of a job.

    Args:
        url: Where it answered when the job was submitted.
        identifier: Its own; an engine that is reached by another way now (a tunnel, say) is known by it.

    Raises:
        BackendUnavailableError: It cannot be reached.
    """
    try:
        return connect(url)
    except BackendUnavailableError:
        with contextlib.suppress(BackendError):
            other = connect()
            if identifier and other.info.get("ID") == identifier:
                return other
        raise


def disconnect() -> None:
    """Close all connections; the next call makes new ones."""
    with _lock:
        known = set(_engines.values())
        _engines.clear()
    for found in known:
        found.close()
