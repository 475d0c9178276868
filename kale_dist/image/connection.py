"""Requests to one registry: TLS, proxies, credentials, and waiting when it is busy.

No library does what is needed here (oras and python-dxf neither wait as a busy registry asks nor know pull secrets), so the
protocol is ours, and urllib3, which the clients of Kubernetes and Docker bring with them, does the HTTP.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pathlib
import re
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self
from urllib.parse import unquote, urlencode, urljoin, urlsplit, urlunsplit

import urllib3
from urllib3 import exceptions

from kale_dist.errors import ImageError
from kale_dist.image.auth import Credentials, login_remedy
from kale_dist.image.reference import DOCKER_HUB

BLOCK_BYTES = 1 << 20
MAX_JSON_BYTES = 4 << 20
"""Limit of an answer that is read whole; registries refuse longer manifests."""

Access = tuple[str, ...]
"""The scopes that a request needs, as token servers name them: `repository:team/train:pull,push`."""

_HUB_HOST = "registry-1.docker.io"
_CERTIFICATES = ("/etc/docker/certs.d", "/etc/containers/certs.d")
_CONNECT_S, _READ_S = 10.0, 300.0
"""The read timeout is long, because registries hash a whole blob before they answer the request that ends its upload."""

_PATIENCE_S = 60.0
_BUSY = (429, 502, 503, 504)
_REDIRECTS, _MOST_MOVES = (301, 302, 303, 307, 308), 5
_KEPT = 8
"""Connections to one host that stay open, for as many threads."""

_MAX_ERROR_BYTES = 64 << 10
_SHOWN = 300
_TOKEN_LIFE_S, _RENEW_BEFORE_S = 60.0, 5.0
_UNREACHED = (
    exceptions.NewConnectionError,
    exceptions.NameResolutionError,
    exceptions.ConnectTimeoutError,
    exceptions.ProxyError,
)
_CHALLENGE = re.compile(r'(?:(basic|bearer)\s+)?([a-z_]+)=(?:"([^"]*)"|([^",\s]+))', re.IGNORECASE)


class _Patience(urllib3.Retry):
    """urllib3's retries, which wait as long as a rate-limiting registry asks, but at most `_PATIENCE_S`."""

    def get_retry_after(self, response: urllib3.BaseHTTPResponse) -> float | None:
        wait_s = super().get_retry_after(response)
        if wait_s is not None and wait_s > _PATIENCE_S:
            raise ImageError(
                f"The registry is busy ({response.status}) and asks to wait {wait_s:.0f} s. Wait, log in, or use a mirror.",
                retryable=True,
            )
        return wait_s


_REPEATED = _Patience(
    total=6, connect=1, read=4, other=0, status=5, backoff_factor=0.2, backoff_max=8.0, status_forcelist=_BUSY,
    allowed_methods=None, raise_on_status=False,
)  # fmt: skip
"""The retries of requests that may be sent twice."""

_ONCE = _Patience(total=0, status=0, allowed_methods=None, raise_on_status=False)


class Connection:
    """Sends requests to a registry. Safe to use from threads.

    Args:
        host: The registry part of a reference; `docker.io` stands for Docker Hub's own host.
        credentials: None for anonymous use.
        insecure: Whether to connect without TLS; None does so for this machine only. TLS trusts the system's authorities
            (`SSL_CERT_FILE` counts) and those in docker's `certs.d`.

    Raises:
        ImageError: A certificate cannot be read.
    """

    def __init__(self, host: str, credentials: Credentials | None = None, *, insecure: bool | None = None) -> None:
        self.host = host
        plain = insecure if insecure is not None else _is_here(host)
        self.origin = f"{'http' if plain else 'https'}://{_HUB_HOST if host == DOCKER_HUB else host}"
        self._trusted = None if plain else _trust(host)
        self._pools: dict[str, urllib3.PoolManager] = {}
        self._credentials = credentials
        self._logging_in = threading.Lock()
        self._basic = ""
        self._tokens: dict[Access, tuple[str, float]] = {}

    def close(self) -> None:
        """Close the open connections. A second call does nothing."""
        while self._pools:
            self._pools.popitem()[1].clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(
        self,
        method: str,
        url: str,
        *,
        doing: str,
        access: Access,
        expect: tuple[int, ...] = (200,),
        headers: Mapping[str, str] | None = None,
        body: bytes | Callable[[], Iterable[bytes]] | None = None,
        repeat: bool = True,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and return the answer with its body unread: pass it to `read` or `done`, or stream it.

        Args:
            method: The HTTP method.
            url: A path at this registry, or a whole URL; other hosts get no credentials.
            doing: What the request does, for messages: `read the manifest of team/train:1`.
            access: The scopes that the request needs.
            expect: Status codes that are not errors.
            headers: Headers besides those for credentials.
            body: The bytes, or a function that yields them in blocks from the start; the latter needs `repeat=False`.
            repeat: Whether the request may be sent again after a lost connection, or to a busy registry.

        Raises:
            ImageError: The registry gave another answer, cannot be reached, stays busy, or the connection was lost in
                spite of the retries.
        """
        url, moves, asked = self.absolute(url), 0, False
        while True:
            ours = urlsplit(url)[:2] == urlsplit(self.origin)[:2]
            shown = self._authorization(access) if ours else ""
            sent = {"Accept-Encoding": "identity", **(headers or {})} | ({"Authorization": shown} if shown else {})
            blocks = body() if callable(body) else body
            answer = self._request(
                method, url, doing, headers=sent, body=blocks, retries=_REPEATED if repeat else _ONCE
            )
            if answer.status in expect and answer.status != 401:  # noqa: PLR2004 - HTTP's own number
                return answer
            location, challenge = answer.headers.get("Location"), ", ".join(answer.headers.getlist("WWW-Authenticate"))
            refused = self._refusal(answer, doing)
            if answer.status == 401 and ours and not asked and self._log_in(challenge, access, shown):  # noqa: PLR2004 - HTTP's own number
                asked = True
            elif answer.status in expect:
                return answer
            elif answer.status in _REDIRECTS and location is not None and moves < _MOST_MOVES:
                url, moves = self.absolute(location, url), moves + 1
            else:
                raise refused

    def read(self, answer: urllib3.BaseHTTPResponse, doing: str) -> bytes:
        """Read the whole body of an answer.

        Raises:
            ImageError: The body is too long, or the connection was lost.
        """
        try:
            data = answer.read(MAX_JSON_BYTES + 1, decode_content=False)
        except exceptions.HTTPError as error:
            raise self.explain(error, doing, self.origin) from error
        finally:
            answer.close()
        if len(data) > MAX_JSON_BYTES:
            raise ImageError(
                f"The registry {self.host} answered with more than {MAX_JSON_BYTES >> 20} MiB to: {doing}."
            )
        return data

    def done(self, answer: urllib3.BaseHTTPResponse) -> urllib3.BaseHTTPResponse:
        """Discard the body of an answer, so that its connection can be used again; returns the answer."""
        with contextlib.suppress(exceptions.HTTPError):
            answer.read(_MAX_ERROR_BYTES, decode_content=False)
        answer.close()
        return answer

    def absolute(self, location: str, base: str = "") -> str:
        """The absolute URL of a `Location`. A registry that is reached over TLS cannot redirect to a URL without it."""
        try:
            parts = urlsplit(urljoin(base or self.origin, location))
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            # Not shown whole: it may hold a signature.
            scheme = _plain(location.partition(":")[0])[:20]
            raise ImageError(f"The registry {self.host} points to an address that HTTP cannot reach ({scheme!r}).")
        ours = urlsplit(self.origin)
        if ours.scheme == "https" and parts.scheme == "http":
            # A registry behind a proxy that ends TLS does not know that clients use TLS.
            if parts.hostname != ours.hostname:
                raise ImageError(
                    f"The registry {self.host} points to {parts.hostname} without encryption; not followed."
                )
            parts = parts._replace(scheme="https", netloc=ours.netloc)
        return urlunsplit(parts)

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def _request(self, method: str, url: str, doing: str, **options: Any) -> urllib3.BaseHTTPResponse:
        headers = {"User-Agent": "kale-dist", **options.pop("headers")}
        timeout = urllib3.Timeout(connect=_CONNECT_S, read=_READ_S)
        try:
            return self._pool(url).request(
                method, url, headers=headers, timeout=timeout, redirect=False, preload_content=False, **options
            )
        except exceptions.HTTPError as error:
            raise self.explain(error, doing, url) from error

    def _pool(self, url: str) -> urllib3.PoolManager:
        """Connections, kept open, directly or through the proxies of the environment (`HTTPS_PROXY`, `NO_PROXY`)."""
        parts = urlsplit(url)
        # Like docker: never through a proxy to this machine.
        direct = _is_here(parts.netloc) or urllib.request.proxy_bypass(parts.hostname or "")
        proxy = "" if direct else urllib.request.getproxies().get(parts.scheme, "")
        if proxy not in self._pools:
            settings: dict[str, Any] = {"ssl_context": self._trusted, "blocksize": BLOCK_BYTES, "maxsize": _KEPT}
            if proxy:
                way = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
                login = f"{unquote(way.username or '')}:{unquote(way.password or '')}"
                shown = urllib3.make_headers(proxy_basic_auth=login) if way.username else None
                self._pools[proxy] = urllib3.ProxyManager(way.geturl(), proxy_headers=shown, **settings)
            else:
                self._pools[proxy] = urllib3.PoolManager(**settings)
        return self._pools[proxy]

    # -- credentials: https://distribution.github.io/distribution/spec/auth/token/ and, for identity tokens, oauth/ --

    def _authorization(self, access: Access) -> str:
        """The `Authorization` header for these scopes; empty if the registry has not asked for one yet."""
        if self._basic:
            return self._basic
        if self._credentials is not None and self._credentials.bearer:
            return f"Bearer {self._credentials.bearer}"
        token, ends = self._tokens.get(access, ("", 0.0))
        return f"Bearer {token}" if token and time.monotonic() < ends - _RENEW_BEFORE_S else ""

    def _log_in(self, challenge: str, access: Access, shown: str) -> bool:
        """Log in as a challenge asks; concurrent requests log in once. False if there is nothing new to send."""
        with self._logging_in:
            if self._authorization(access) not in ("", shown):
                return True
            offered, known = _challenges(challenge), self._credentials
            if "realm" in offered.get("bearer", {}):
                self._tokens[access] = self._new_token(offered["bearer"], access)
                return True
            if "basic" in offered and known is not None and known.password and not self._basic:
                self._basic = urllib3.make_headers(basic_auth=f"{known.username}:{known.password}")["authorization"]
                return True
            return False

    def _new_token(self, offered: Mapping[str, str], access: Access) -> tuple[str, float]:
        realm, asked, known = self.absolute(offered["realm"]), time.monotonic(), self._credentials
        server = urlsplit(realm).netloc
        service = [("service", offered["service"])] if "service" in offered else []
        repositories = {scope.rpartition(":")[0] for scope in access}
        more = (one for one in offered.get("scope", "").split() if one.rpartition(":")[0] not in repositories)
        scopes = (*access, *more)
        headers: dict[str, str] = {}
        form: bytes | None = None
        if known is not None and known.token:
            grant = [("grant_type", "refresh_token"), ("refresh_token", known.token), ("client_id", "kale-dist")]
            form = urlencode([*service, ("scope", " ".join(scopes)), *grant]).encode()
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
        else:
            account = []
            if known is not None and known.password:
                headers = urllib3.make_headers(basic_auth=f"{known.username}:{known.password}")
                account = [("account", known.username)]
            query = urlencode([*service, *account, *(("scope", scope) for scope in scopes)])
            realm = f"{realm}{'&' if '?' in realm else '?'}{query}"
        doing = "get a token"
        method = "GET" if form is None else "POST"
        answer = self._request(method, realm, doing, headers=headers, body=form, retries=_REPEATED)
        status, body = answer.status, self.read(answer, doing)
        if status in (400, 401, 403):
            refused = "refuses anonymous use" if known is None else "refuses the credentials"
            raise ImageError(
                f"{server}, which gives the tokens for {self.host}, {refused} ({status}). {login_remedy(self.host)}"
            )
        try:
            granted = json.loads(body) if status == 200 else {}  # noqa: PLR2004 - HTTP's own number
            token = granted.get("token") or granted.get("access_token") or ""
            life_s = float(granted.get("expires_in") or _TOKEN_LIFE_S)
        except (ValueError, AttributeError, TypeError):
            token, life_s = "", 0.0
        if not (isinstance(token, str) and token and token.isascii() and token.isprintable()):
            problem = f"{server}, which gives the tokens for {self.host}, gave none (status {status})"
            raise ImageError(f"{problem}. Try again later.", retryable=True)
        # The life counts from the request, because the answer may have taken long.
        return token, asked + max(life_s, 2 * _RENEW_BEFORE_S)

    # -- errors ------------------------------------------------------------------------------------------------------

    def _refusal(self, answer: urllib3.BaseHTTPResponse, doing: str) -> ImageError:
        """The error for an unexpected answer, whose body is read and closed."""
        try:
            data = answer.read(_MAX_ERROR_BYTES, decode_content=False)
        except exceptions.HTTPError:
            data = b""
        finally:
            answer.close()
        code, message = _error_of(data)
        status = answer.status
        remedy = {
            401: f"The credentials in use are wrong or do not allow it. {login_remedy(self.host)}"
            if self._credentials is not None
            else f"{login_remedy(self.host)} Check the name, too: registries may say so where there is nothing.",
            403: f"The credentials in use do not allow it. {login_remedy(self.host)}",
            404: "Check the name; some registries say so too where credentials are missing.",
            413: "A proxy in front of the registry limits the size of requests: have its limit raised.",
            429: "It limits how often it is asked: wait, log in, or use a mirror.",
        }.get(status, "Try again later." if status >= 500 else "")  # noqa: PLR2004 - HTTP's own number
        why = " ".join(part for part in (str(status), code, message) if part)
        text = f"The registry {self.host} refused to {doing}: {why}. {remedy}".rstrip()
        return ImageError(text, status in _BUSY or status >= 500)  # noqa: PLR2004 - HTTP's own number

    def explain(self, error: exceptions.HTTPError, doing: str, url: str) -> ImageError:
        """The error for a failed connection."""
        if isinstance(error, exceptions.MaxRetryError) and isinstance(error.reason, exceptions.HTTPError):
            error = error.reason
        server = urlsplit(url).netloc.rpartition("@")[2]
        problem = f"Could not {doing} at the registry {self.host}"
        if isinstance(error, exceptions.SSLError):
            if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER" in str(error):
                return ImageError(
                    f"{problem}: {server} does not speak TLS. Name it with http:// in front if that is meant."
                )
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                reason = str(error).partition("CERTIFICATE_VERIFY_FAILED]")[2].partition("(_ssl")[0].strip(" :")
                return ImageError(
                    f"{problem}: the certificate of {server} is not trusted ({reason}). Put the certificate of its authority "
                    f"into {_CERTIFICATES[0]}/{self.host}/ca.crt, or name it by SSL_CERT_FILE."
                )
        if isinstance(error, _UNREACHED):
            text = f"{problem}: {server} cannot be reached ({_reason(error)}). Is it up, and is its name right?"
            return ImageError(text, retryable=True)
        return ImageError(f"{problem}: the connection to {server} ended ({_reason(error)}). Try again.", retryable=True)


def _is_here(host: str) -> bool:
    """Whether a host, with or without a port, is this machine."""
    name = urlsplit(f"//{host}").hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")


def _trust(host: str) -> ssl.SSLContext:
    """The TLS settings for a registry: the system's authorities, docker's `certs.d`, and a client certificate from there."""
    context = ssl.create_default_context()
    own = pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config") / "docker" / "certs.d"
    folders = [path for path in (pathlib.Path(folder) / host for folder in (*_CERTIFICATES, own)) if path.is_dir()]
    path = pathlib.Path()
    try:
        for path in (one for folder in folders for one in sorted(folder.glob("*.crt"))):
            context.load_verify_locations(path)
        for path in (one for folder in folders for one in sorted(folder.glob("*.cert"))):
            context.load_cert_chain(path, path.with_suffix(".key"))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or "it is no certificate"
        raise ImageError(
            f"The certificate {path} for {host} (with its key beside it, .key) cannot be used: {reason}."
        ) from error
    return context


def _challenges(header: str) -> dict[str, dict[str, str]]:
    """The known schemes of a `WWW-Authenticate` header, in lower case, each with its parameters."""
    scheme, found = "", dict[str, dict[str, str]]()
    for started, name, quoted, bare in _CHALLENGE.findall(header):
        scheme = started.lower() or scheme
        found.setdefault(scheme, {})[name.lower()] = quoted or bare
    return found


def _reason(error: exceptions.HTTPError) -> str:
    """urllib3's message without its objects and their addresses."""
    pattern = r"^\(?\'?|<[^<>]* object at 0x[0-9a-f]+>:? ?|^HTTPS?Connection(?:Pool)?\([^()]*\): "
    return _plain(re.sub(pattern, "", str(error.args[-1] if error.args else error)))


def _error_of(data: bytes) -> tuple[str, str]:
    """Code and message of a registry's error; the start of the body if it is not such an error."""
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        first = json.loads(data)["errors"][0]
        return _plain(str(first.get("code") or "")), _plain(str(first.get("message") or ""))
    text = data.decode(errors="replace")
    return "", "" if "<html" in text.lower() else _plain(text)


def _plain(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:_SHOWN]
