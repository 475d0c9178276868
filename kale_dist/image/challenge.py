"""How a registry is answered that asks who is there: HTTP Basic, or tokens from the server that it names.

The exchange is that of https://distribution.github.io/distribution/spec/auth/token/ and, for identity tokens, oauth/.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlencode, urlsplit

import urllib3

from kale_dist.errors import ImageError
from kale_dist.image.auth import Credentials

_SCHEME = re.compile(r"(?:^|,)\s*(basic|bearer)(?=\s|,|$)", re.IGNORECASE)
_PARAMETER = re.compile(r'([a-z_]+)=(?:"((?:[^"\\]|\\.)*)"|([^",\s]+))', re.IGNORECASE)

_CLIENT = "kale-dist"
_DEFAULT_LIFE_S = 60.0
_RENEW_BEFORE_S = 5.0
"""A token that ends sooner is not used for another request."""

_MAX_TOKEN = 64 << 10

Access = tuple[str, ...]
"""What a request needs: `repository:team/train:pull,push`."""

Fetch = Callable[[str, str, Mapping[str, str], bytes | None], tuple[int, bytes]]
"""method, URL, headers, body -> status, body."""


def parse(header: str) -> dict[str, dict[str, str]]:
    """The schemes in a `WWW-Authenticate` header that are known here, in lower case, each with its parameters."""
    starts = list(_SCHEME.finditer(header))
    ends = [found.start() for found in starts[1:]] + [len(header)]
    return {
        found[1].lower(): {
            name.lower(): re.sub(r"\\(.)", r"\1", quoted) or bare
            for name, quoted, bare in _PARAMETER.findall(header[found.end() : end])
        }
        for found, end in zip(starts, ends, strict=True)
    }


class Answers:
    """The headers `Authorization` for one registry: one for each access asked for, renewed before it ends.

    Args:
        host: The registry, for messages.
        credentials: None for anonymous use.
        secure: Whether the registry is reached over TLS; then the token server has to be, too.
        fetch: How the token server is reached.
    """

    def __init__(self, host: str, credentials: Credentials | None, *, secure: bool, fetch: Fetch) -> None:
        self._host = host
        self._credentials = credentials
        self._secure = secure
        self._fetch = fetch
        self._basic = ""
        self._tokens: dict[Access, tuple[str, float]] = {}

    def header(self, access: Access) -> str:
        """What to send for this access; empty where nothing has been asked for yet."""
        if self._basic:
            return self._basic
        if self._credentials is not None and self._credentials.bearer:
            return f"Bearer {self._credentials.bearer}"
        token, ends = self._tokens.get(access, ("", 0.0))
        return f"Bearer {token}" if token and time.monotonic() < ends - _RENEW_BEFORE_S else ""

    def accept(self, challenge: str, access: Access) -> bool:
        """Get ready for the next request.

        Args:
            challenge: The header `WWW-Authenticate` of an answer 401.
            access: What was asked for.

        Returns:
            Whether there is something new to send.

        Raises:
            ImageError: The token server refuses, cannot be reached or may not be trusted with credentials.
        """
        offered = parse(challenge)
        if "bearer" in offered and "realm" in offered["bearer"]:
            self._tokens[access] = self._new_token(offered["bearer"], access)
            return True
        known = self._credentials
        if "basic" in offered and known is not None and known.password and not self._basic:
            self._basic = urllib3.make_headers(basic_auth=f"{known.username}:{known.password}")["authorization"]
            return True
        return False

    def _new_token(self, offered: Mapping[str, str], access: Access) -> tuple[str, float]:
        realm, asked = offered["realm"], time.monotonic()
        try:
            server = urlsplit(realm)
            name = server.hostname if server.scheme in ("http", "https") and server.port != 0 else ""
        except ValueError:
            name = ""
        if not name:
            raise ImageError(f"The registry {self._host} names no usable server for its tokens: {realm[:200]!r}.")
        if self._secure and server.scheme == "http" and self._credentials is not None:
            raise ImageError(
                f"The registry {self._host} asks for the credentials to be sent to {name} without encryption. "
                "They were not sent. Tell whoever runs the registry."
            )
        scopes = _joined(access, offered.get("scope", ""))
        query = [("service", offered["service"])] if "service" in offered else []
        known = self._credentials
        if known is not None and known.token:
            form = [*query, ("scope", " ".join(scopes)), ("client_id", _CLIENT)]
            form += [("grant_type", "refresh_token"), ("refresh_token", known.token)]
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            status, body = self._fetch("POST", realm, headers, urlencode(form).encode())
        else:
            headers = {}
            if known is not None and known.password:
                headers = urllib3.make_headers(basic_auth=f"{known.username}:{known.password}")
                query.append(("account", known.username))
            query += [("scope", scope) for scope in scopes]
            url = f"{realm}{'&' if server.query else '?'}{urlencode(query)}"
            status, body = self._fetch("GET", url, headers, None)
        return self._read_token(status, body, name, asked)

    def _read_token(self, status: int, body: bytes, server: str, asked: float) -> tuple[str, float]:
        """The token and when it ends; `asked` is counted from, because the answer may have taken long."""
        if status in (400, 401, 403):
            refused = "refuses anonymous use" if self._credentials is None else "refuses the credentials"
            raise ImageError(
                f"{server}, which gives the tokens for {self._host}, {refused} ({status}). {log_in(self._host)}"
            )
        try:
            answer = json.loads(body) if status == 200 else {}  # noqa: PLR2004 - HTTP's own number
            token = answer.get("token") or answer.get("access_token") or ""
            life_s = float(answer.get("expires_in") or _DEFAULT_LIFE_S)
        except (ValueError, AttributeError, TypeError):
            token, life_s = "", 0.0
        if not (isinstance(token, str) and token.isascii() and token.isprintable() and 0 < len(token) <= _MAX_TOKEN):
            problem = f"{server}, which gives the tokens for {self._host}, gave none (status {status})"
            raise ImageError(f"{problem}. Try again later.", retryable=True)
        return token, asked + max(life_s, 2 * _RENEW_BEFORE_S)


def _joined(access: Access, offered: str) -> Access:
    """What is needed, and what the registry asks for beyond that."""
    known = {scope.rpartition(":")[0]: set(scope.rpartition(":")[2].split(",")) for scope in access}
    more = []
    for scope in offered.split():
        target, _, actions = scope.rpartition(":")
        if not set(actions.split(",")) <= known.get(target, set()):
            more.append(scope)
    return (*access, *more)


def log_in(host: str) -> str:
    """What to do about credentials that are missing or wrong."""
    return f"Log in (docker login {host}), or name a pull secret that holds credentials for {host}."
