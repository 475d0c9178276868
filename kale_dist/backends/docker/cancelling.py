"""Ends a job's ranks through the agent in its first container, which no port leads to: a program in there asks it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import time

import docker.errors

from kale_dist import transport
from kale_dist.backends.docker import containers, submission
from kale_dist.engine import Engine
from kale_dist.errors import BackendError
from kale_dist.manifests.settings import PORT
from kale_dist.spec import JobSpec

_ASK = """
import http.client, sys
peer = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=10)
peer.request("POST", sys.argv[2], sys.argv[3].encode(), {sys.argv[4]: sys.argv[5]})
sys.exit(0 if peer.getresponse().status < 300 else 1)
"""

_TRIES = 8
_PAUSE_S = 0.3
_MARK = "cancelled"


def mark(folder: pathlib.Path) -> None:
    """Write down that this user has cancelled a job.

    Args:
        folder: The job's.
    """
    with contextlib.suppress(OSError):
        (folder / _MARK).write_text(submission.identity())


def canceller(folder: pathlib.Path) -> str:
    """Who has cancelled a job on this machine; empty if nobody has."""
    try:
        return (folder / _MARK).read_text() or "somebody"
    except OSError:
        return ""


def cancel(engine: Engine, spec: JobSpec, key: bytes | None, grace_s: float) -> None:
    """Have the agents end a job; if none can be asked, tell the containers to end.

    Args:
        engine: Where the job runs.
        spec: The job.
        key: Its secret; None if this user has none.
        grace_s: Seconds that ranks may take to end by themselves.

    Raises:
        BackendError: The engine cannot be reached.
    """
    if key is None or not _ask(engine, spec, key, grace_s):
        submission.signal_all(engine, spec.name, "SIGTERM")


def _ask(engine: Engine, spec: JobSpec, key: bytes, grace_s: float) -> bool:
    """Whether the agent has taken the request. One that has just been started does not listen yet."""
    path, body = "/cancel", json.dumps({"grace_s": grace_s})
    mac = transport.sign_request(key, "POST", path, hashlib.sha256(body.encode()).hexdigest())
    command = ["python3", "-c", _ASK, str(PORT + 2), path, body, transport.MAC_HEADER, mac]
    name = containers.container_name(spec.name, 0)
    for _ in range(_TRIES):
        try:
            made = engine.api.exec_create(name, command)["Id"]
            engine.api.exec_start(made)
            if engine.api.exec_inspect(made).get("ExitCode") == 0:
                return True
        except docker.errors.APIError:
            # It has ended, or is paused.
            return False
        except OSError as error:
            raise BackendError(f"The Docker engine cannot be reached: {error}", retryable=True) from error
        time.sleep(_PAUSE_S)
    return False
