"""Credentials of registries, from where docker, podman and Kubernetes keep them.

docker-py reads docker's file too, but knows neither podman's entries for a part of a registry nor the patterns of pull
secrets, and a build without a daemon should not need a client of one.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from kale_dist.errors import ImageError
from kale_dist.image.reference import DOCKER_HUB, Reference

_HUB_KEYS = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io", "registry.hub.docker.com")
_HUB_SERVER = "https://index.docker.io/v1/"
"""Docker Hub's name for credential helpers."""

_IDENTITY_USER = "<token>"
"""The user name that marks the secret as an identity token."""

_API_PATH = re.compile(r"/v[12]/?$")
_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HELPER_S = 30.0
_ABSENT = ("credentials not found", "no credentials", "not found in")
"""Parts of a helper's message when it has no credentials for a registry; the protocol has no exit code for that."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """What the client presents to a registry or to its token server. Never printed."""

    username: str = ""
    password: str = dataclasses.field(default="", repr=False)
    token: str = dataclasses.field(default="", repr=False)
    """Identity token: exchanged for short-lived tokens, in place of a password."""
    bearer: str = dataclasses.field(default="", repr=False)
    """Registry token: sent unchanged."""


def find_credentials(
    registry_host: str, *, repository: str = "", pull_secret_jsons: tuple[str, ...] = ()
) -> Credentials | None:
    """Look up this user's credentials for a registry.

    The sources, in this order: docker's `config.json` (in `DOCKER_CONFIG`, else `~/.docker`) with its credential helpers,
    podman's `auth.json`, the pull secrets. The first source with an entry wins.

    Args:
        registry_host: The registry part of a reference: `docker.io`, `localhost:5000`.
        repository: With it, entries for a part of the registry (`quay.io/team`) count too, longest first.
        pull_secret_jsons: Texts under `.dockerconfigjson` or `.dockercfg` in Kubernetes Secrets. Helpers that they
            name are not run, because other people wrote them.

    Returns:
        None if no source has an entry; requests are then anonymous.

    Raises:
        ImageError: A file is damaged, or the helper configured for this registry is not installed or fails.
    """
    for path in _files():
        found = _from_config(_read(path), registry_host, repository, origin=str(path))
        if found is not None:
            return found
    for number, text in enumerate(pull_secret_jsons, start=1):
        origin = f"pull secret {number} of {len(pull_secret_jsons)}"
        config = _parse(text, origin)
        entry = _match(config.get("auths", config), registry_host, repository)
        found = _decode(entry, origin, registry_host)
        if found is not None:
            return found
    return None


def login_remedy(host: str) -> str:
    """The remedy for missing or wrong credentials of a registry."""
    return f"Log in (docker login {host}), or name a pull secret that holds credentials for {host}."


def for_engine(image: Reference) -> dict[str, str] | None:
    """This user's credentials for an image, as the Docker engine's API takes them; None if there are none."""
    credentials = find_credentials(image.registry, repository=image.repository)
    if credentials is None:
        return None
    names = {"username": credentials.username, "password": credentials.password}
    names |= {"identitytoken": credentials.token, "registrytoken": credentials.bearer}
    return {name: value for name, value in names.items() if value}


def _files() -> Iterator[pathlib.Path]:
    home = pathlib.Path.home()
    candidates = [pathlib.Path(os.environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"]
    if os.environ.get("REGISTRY_AUTH_FILE"):
        candidates.append(pathlib.Path(os.environ["REGISTRY_AUTH_FILE"]))
    else:
        if os.environ.get("XDG_RUNTIME_DIR"):
            candidates.append(pathlib.Path(os.environ["XDG_RUNTIME_DIR"]) / "containers" / "auth.json")
        settings = pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        candidates.append(settings / "containers" / "auth.json")
    return (path for path in candidates if path.is_file())


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ImageError(f"The registry credentials in {path} cannot be read: {error.strerror}.") from error
    return _parse(text, str(path))


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        # The decoder's own message holds no part of the text, but its exception does: not chained.
        raise ImageError(f"The registry credentials in {origin} are not JSON: {error}. Repair them.") from None
    if not isinstance(config, dict):
        raise ImageError(f"The registry credentials in {origin} are not an object. Repair them.")
    return config


def _from_config(config: Mapping[str, Any], host: str, repository: str, *, origin: str) -> Credentials | None:
    entry = _match(config.get("auths"), host, repository)
    special = _match(config.get("credHelpers"), host, repository)
    if isinstance(special, str):
        return _ask_helper(special, host, origin, required=True)
    store = config.get("credsStore")
    found = _decode(entry, origin, host)
    if found is None and isinstance(store, str) and store:
        # Docker leaves an empty entry for what it has put into the store; without one, a store that is not installed
        # (as Docker Desktop's is not, in its Linux machines) does not stop anonymous use.
        found = _ask_helper(store, host, origin, required=entry is not None)
    return found


def _match(entries: Any, host: str, repository: str) -> Any:
    """The value of the longest key in a credentials file that covers the repository."""
    wanted = _HUB_KEYS if host in _HUB_KEYS else (host,)
    best: tuple[int, Any] = (-1, None)
    for key, value in entries.items() if isinstance(entries, dict) else ():
        key_host, _, path = _API_PATH.sub("", key.split("://")[-1]).strip("/").partition("/")
        covers = not path or repository == path or repository.startswith(f"{path}/")
        if covers and len(path) > best[0] and any(_fits(name, key_host) for name in wanted):
            best = (len(path), value)
    return best[1]


def _fits(host: str, pattern: str) -> bool:
    """Whether a host matches a pull secret's pattern, label by label: `*.io` does not match `a.b.io`."""
    host_parts, parts = host.split("."), pattern.split(".")
    return len(host_parts) == len(parts) and all(map(fnmatch.fnmatchcase, host_parts, parts))


def _decode(entry: Any, origin: str, host: str) -> Credentials | None:
    if not isinstance(entry, dict):
        return None
    username, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if encoded := str(entry.get("auth") or ""):
        try:
            both = base64.b64decode(encoded, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            problem = f"The entry for {host} in {origin} is damaged: `auth` is not base64 of user:password."
            raise ImageError(f"{problem} Log in again: docker login {host}") from None
        username, _, password = both.partition(":")
        # Files written by Windows clients pad with zero bytes.
        password = password.rstrip("\0")
    token, bearer = str(entry.get("identitytoken") or ""), str(entry.get("registrytoken") or "")
    if username == _IDENTITY_USER:
        username, password, token = "", "", token or password
    if not (token or bearer or (username and password)):
        return None
    return Credentials(username=username, password=password, token=token, bearer=bearer)


def _ask_helper(name: str, host: str, origin: str, *, required: bool) -> Credentials | None:
    """Run `docker-credential-NAME get`: the server's name in, JSON out.

    Args:
        name: NAME in the helper's file name.
        host: The registry whose credentials are wanted.
        origin: The file that names the helper.
        required: Whether to raise if the helper cannot answer.
    """
    program = shutil.which(f"docker-credential-{name}") if _HELPER_NAME.fullmatch(name) else None
    server = _HUB_SERVER if host in _HUB_KEYS else host
    problem = f"docker-credential-{name}, which {origin} names for {host},"
    if program is None:
        if required:
            raise ImageError(f"{problem} is not installed. Install it, or remove it there: docker login {host}")
        return None
    try:
        answer = subprocess.run(
            [program, "get"], input=server, capture_output=True, text=True, timeout=_HELPER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImageError(
            f"{problem} did not answer ({type(error).__name__}). Try it by hand.", retryable=True
        ) from None
    if answer.returncode:
        output = (answer.stdout + answer.stderr).strip()
        if not required or any(phrase in output.lower() for phrase in _ABSENT):
            return None
        raise ImageError(f"{problem} failed: {output[:300] or f'exit code {answer.returncode}'}. Log in again.")
    try:
        found = json.loads(answer.stdout)
        username, secret = found["Username"], found["Secret"]
    except (ValueError, KeyError, TypeError):
        raise ImageError(f"{problem} gave no JSON with Username and Secret. Try it by hand.") from None
    if username == _IDENTITY_USER:
        return Credentials(token=str(secret))
    return Credentials(username=str(username), password=str(secret))
