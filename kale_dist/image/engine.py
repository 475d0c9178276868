"""The Docker engine: how it is reached, and what its errors mean.

Besides this module only `places.docker` and `image` use the docker package, which need not be installed to import this
module. Rootless Docker and Podman offer the same API on other sockets.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kale_dist.errors import BackendError, BackendUnavailableError
from kale_dist.image import auth
from kale_dist.image.reference import Reference
from kale_dist.wording import install

if TYPE_CHECKING:
    import docker

TIMEOUT_S = 60.0
"""An engine that sends nothing for so long during a request counts as lost."""

_MIB = 1 << 20
_LOG_EACH_S = 2.0
"""Seconds between two lines about a pull's progress."""

_POOL = 64
"""Connections in the pool: each followed container holds one."""

_SPACE = "Free some: docker system df shows what is used, docker system prune removes what nothing uses"
_NAME = "Check its spelling, or name one that is there with image=. docker images lists those of the engine"

_MEANINGS = (
    (r"no space left on device|ENOSPC", "its disk is full", _SPACE, False),
    (r"disk quota exceeded", "its user has used up the disk quota", _SPACE, False),
    (r"toomanyrequests|too many requests|rate limit", "the registry wants fewer requests", "Wait, or log in to it: docker login", True),
    (r"unauthorized|no basic auth|authentication required|denied: |access denied|access forbidden", "the registry wants other credentials, or has no such image", "Log in to it with `docker login`, and check the image's name", False),
    (r"manifest unknown|manifest for .* not found|name unknown|repository .* not found|no such image|image not known|not found: manifest", "there is no such image", _NAME, False),
    (r"no matching manifest for|does not match the specified platform", "the image is not made for this engine's platform", "Name one for it, or build it with docker buildx --platform", False),
    (r"invalid reference format|invalid repository name", "the image's name cannot be read", "Write it as registry/name:tag", False),
    (r"server gave HTTP response to HTTPS client", "the registry speaks HTTP, and the engine expects HTTPS", "Add it to insecure-registries in the engine's daemon.json, or give it a certificate", False),
    (r"x509: ", "the registry's certificate is not trusted by the engine", "Put its authority's certificate into /etc/docker/certs.d/<registry>/ca.crt where the engine runs", False),
    (r"no such host|dial tcp|server misbehaving|TLS handshake timeout|Client\.Timeout|connection refused|i/o timeout", "the registry cannot be reached from where the engine runs", "Check its name and the network there, or pull the image by another way", True),
    (r"nvidia-container-cli: device error|unknown device|unresolvable CDI devices? .*gpu=\d", "its machine has fewer GPUs than this job needs beside those of other jobs", "Ask for fewer, or end a job: kale-dist jobs --on docker lists them", False),
    (r"could not select device driver|nvidia-container-cli|unknown or invalid runtime name: nvidia|unresolvable CDI", "the engine cannot give GPUs to containers", "Install the NVIDIA Container Toolkit where the engine runs, or leave out cuda and resources.gpus", False),
    (r"non-overlapping IPv4 address pool|address pools have been fully subnetted", "the engine has no address range left for a network", "Remove networks that nothing uses: docker network prune", False),
    (r"Range of CPUs is from", "it has fewer cores than resources= asks for", "Ask for fewer", False),
    (r"Minimum memory limit|less than the minimum", "the memory limit is too low for a container", "Raise resources.memory", False),
    (r"executable file not found|exec: .*: no such file|stat .*: no such file", "the image has no `python3` on its PATH", "Name an image with Python 3.11 or later and torch, with image=", False),
    (r"exec format error", "the image is made for another processor", "Name one for the engine's platform, with image=", False),
    (r"bind source path does not exist|error while creating mount source path|statfs ", "a folder of volumes= is not there where the engine runs", "Name a folder of the engine's machine, or a named volume", False),
    (r"client version .* is too (?:new|old)", "client and engine are of too different versions", "Upgrade the engine, or the docker package", False),
)  # fmt: skip
"""Messages of the engine: a pattern, what it means, the remedy, whether a retry may help. The first match counts."""

_UNREACHABLE = (
    (r"permission denied", "This user may not open the Docker engine's socket {path} (permission denied). Have the user added to its group (sudo usermod -aG docker $USER, then log in again), or use rootless Docker or Podman and set DOCKER_HOST to its socket", False),
    (r"no such file or directory", "There is no Docker engine at {url}: the socket is not there. Start the engine, or correct DOCKER_HOST or the docker context", False),
    (r"connection refused", "No Docker engine answers at {url} (connection refused). Start it: sudo systemctl start docker", True),
    (r"paramiko", "The Docker engine at {url} is reached by SSH, for which paramiko is missing. pip install paramiko, or forward its socket: ssh -L", False),
    (r"", "The Docker engine at {url} cannot be reached: {text}. {remedy}", True),
)  # fmt: skip
"""Why no engine answers: a pattern, the sentence, whether a retry may help. The first match counts."""


class Engine:
    """A connection to an engine. Safe to use from threads.

    Args:
        client: The library's client.
        url: The engine's address.
    """

    def __init__(self, client: docker.DockerClient, url: str) -> None:
        self.client = client
        """For containers, networks and images."""
        self.api: Any = client.api
        """The engine's API, request by request."""
        self.url = url
        """The engine's address, such as `unix:///var/run/docker.sock`."""

    @property
    def is_local(self) -> bool:
        """Whether the engine sees this machine's folders."""
        return self.url.startswith(("unix://", "http+unix://"))

    @property
    def version(self) -> str:
        """The engine's version, such as `20.10.24`."""
        return str(self._versions.get("Version", "unknown"))

    @property
    def is_podman(self) -> bool:
        """Whether Podman answers as if it were Docker."""
        parts = self._versions.get("Components") or ()
        return any("podman" in str(part.get("Name", "")).lower() for part in parts)

    @property
    def is_rootless(self) -> bool:
        """Whether the engine runs as a user, so that root in a container is that user outside."""
        return any("rootless" in option for option in self.info.get("SecurityOptions") or ())

    @functools.cached_property
    def info(self) -> dict[str, Any]:
        """The engine's description of itself and its machine, requested once.

        Raises:
            BackendError: The engine does not answer.
        """
        with explained("asking the Docker engine about itself"):
            return dict(self.client.info())

    def close(self) -> None:
        """Close the connections that are not in use."""
        self.client.close()

    @functools.cached_property
    def _versions(self) -> dict[str, Any]:
        with explained("asking the Docker engine for its version"):
            return dict(self.client.version())


def connect(base_url: str | None = None) -> Engine:
    """Connect to an engine that answers.

    Args:
        base_url: Such as `unix:///run/user/1000/docker.sock`, `tcp://host:2376` or `ssh://user@host`; None: that of
            DOCKER_HOST, then of docker's context, then the usual sockets of Docker, rootless Docker and Podman.

    Raises:
        BackendUnavailableError: No engine answers; the message names what was tried and what to do.
    """
    try:
        import docker  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"The package {error.name!r}, by which a Docker engine is reached, is not installed in this Python. Install it: "
            f"{install('docker')}"
        ) from None
    if base_url is None:
        base_url = os.environ.get("DOCKER_HOST") or _context_url()
    tried = (base_url,) if base_url else _sockets()
    failed: BackendError | None = None
    for url in tried:
        try:
            client = _open(url, tls=base_url is not None)
        except Exception as error:  # noqa: BLE001 - each part of the library raises its own
            # The first socket is the usual one, so its failure is the one to report.
            failed = failed or _unreachable(error, url)
        else:
            return Engine(client, url)
    if failed is None:
        failed = BackendUnavailableError(
            "There is no Docker engine here: no socket of Docker, rootless Docker or Podman was found. "
            'Start one, or set DOCKER_HOST to where it answers. Without one, on="local" runs jobs on this machine'
        )
    raise failed


def explain(error: BaseException, doing: str) -> BackendError:
    """Translate an error of the engine, or of the connection to it.

    Args:
        error: An exception of the docker package.
        doing: The operation, as it follows "while" in the message: `pulling the image x`.
    """
    import docker.errors
    import requests
    import urllib3.exceptions

    if isinstance(error, BackendError):
        return error
    text = _text_of(error)
    status = error.status_code or 0 if isinstance(error, docker.errors.APIError) else None
    if status is None and isinstance(error, requests.RequestException | urllib3.exceptions.HTTPError | OSError):
        return BackendUnavailableError(
            f"The connection to the Docker engine was cut while {doing}: {text}. Is it still running?", retryable=True
        )
    for pattern, sentence, remedy, retryable in _MEANINGS:
        if re.search(pattern, text, re.IGNORECASE):
            return BackendError(f"The Docker engine failed while {doing}: {sentence} ({text}). {remedy}", retryable)
    return BackendError(f"The Docker engine failed while {doing}: {text}", (status or 0) >= 500)  # noqa: PLR2004 - HTTP's server errors


@contextlib.contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn the docker package's errors into this library's.

    Args:
        doing: The operation, as for `explain`.

    Raises:
        BackendError: The block raised an error of the docker package.
    """
    import docker.errors
    import requests
    import urllib3.exceptions

    try:
        yield
    except (docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise explain(error, doing) from error


def find_image(engine: Engine, name: str) -> dict[str, Any] | None:
    """The engine's description of an image; None if the engine does not have it."""
    import docker.errors

    with explained(f"looking for the image {name}"):
        try:
            return dict(engine.api.inspect_image(name))
        except docker.errors.ImageNotFound:
            return None


def ensure_image(engine: Engine, image: str, *, platform: str = "", log: Callable[[str], None]) -> dict[str, Any]:
    """Pull an image unless the engine has it, as `docker run` does, with this user's credentials.

    Args:
        engine: The engine.
        image: The image's reference.
        platform: Operating system and processor; empty for the engine's own.
        log: Called with a line when the pull begins, and every two seconds while it lasts.

    Returns:
        The engine's description of the image.

    Raises:
        BackendError: The image does not exist or cannot be pulled; the message names what to do.
        ConfigError: Its name is malformed.
        ImageError: The credentials that are kept here cannot be read.
    """
    import docker.errors

    there = find_image(engine, image)
    if there is not None:
        return there
    doing, logged_at = f"pulling the image {image}", time.monotonic()
    log(f"The engine does not have the image {image} yet: it is pulled")
    sizes: dict[str, tuple[int, int]] = {}
    shown = auth.for_engine(Reference.parse(image))
    with explained(doing):
        for event in engine.api.pull(image, stream=True, decode=True, platform=platform or None, auth_config=shown):
            if "error" in event:
                raise explain(docker.errors.DockerException(str(event["error"])), doing)
            detail = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and detail.get("total"):
                sizes[str(event.get("id"))] = int(detail.get("current") or 0), int(detail["total"])
            elif event.get("status") == "Download complete" and str(event.get("id")) in sizes:
                total = sizes[str(event["id"])][1]
                sizes[str(event["id"])] = total, total
            if sizes and time.monotonic() - logged_at > _LOG_EACH_S:
                logged_at = time.monotonic()
                done, total = (sum(values) for values in zip(*sizes.values(), strict=True))
                log(f"{image}: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB")
        return dict(engine.api.inspect_image(image))


def _open(url: str, *, tls: bool) -> docker.DockerClient:
    import docker

    if url.startswith("unix://"):
        # docker-py leaves its socket open if it cannot connect.
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(TIMEOUT_S)
            probe.connect(url.removeprefix("unix://"))
    settings: dict[str, Any] = {"base_url": url, "timeout": TIMEOUT_S, "max_pool_size": _POOL}
    if url.startswith("ssh://"):
        settings["use_ssh_client"] = True
    elif tls and not url.startswith("unix://"):
        # DOCKER_TLS_VERIFY and DOCKER_CERT_PATH, as the docker program takes them.
        found = docker.utils.kwargs_from_env()
        if "tls" in found:
            settings["tls"] = found["tls"]
    client = docker.DockerClient(**settings)
    client.ping()
    return client


def _context_url() -> str | None:
    """The URL of the context that `docker context use` has chosen; None for the default one."""
    import docker.context

    with contextlib.suppress(Exception):
        context = docker.context.ContextAPI.get_current_context()
        if context is not None and context.Name != "default":
            return str(context.Host) or None
    return None


def _sockets() -> tuple[str, ...]:
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    paths = [
        "/var/run/docker.sock",
        f"{runtime}/docker.sock",
        os.path.expanduser("~/.docker/run/docker.sock"),  # noqa: PTH111 - pathlib raises for a user without a home
        f"{runtime}/podman/podman.sock",
        "/run/podman/podman.sock",
    ]
    return tuple(f"unix://{path}" for path in paths if os.path.exists(path))  # noqa: PTH110 - pathlib raises for a folder we may not enter


def _unreachable(error: BaseException, url: str) -> BackendUnavailableError:
    text, path = _text_of(error), url.removeprefix("unix://")
    sentence, retryable = next(
        (sentence, retryable)
        for pattern, sentence, retryable in _UNREACHABLE
        if re.search(pattern, text, re.IGNORECASE)
    )
    remedy = "Check DOCKER_HOST, DOCKER_TLS_VERIFY and DOCKER_CERT_PATH, and that the engine runs"
    if pathlib.PurePath(path).name == "podman.sock":
        remedy = "Start Podman's service: systemctl --user start podman.socket"
    return BackendUnavailableError(sentence.format(path=path, url=url, text=text, remedy=remedy), retryable)


def _text_of(error: BaseException) -> str:
    """The engine's own message, without the HTTP around it."""
    explanation = getattr(error, "explanation", None)
    if isinstance(explanation, bytes):
        explanation = explanation.decode(errors="replace")
    text = str(explanation or error) or type(error).__name__
    return " ".join(text.split()).rstrip(".")
