"""Requests to one registry: TLS, proxies, credentials, redirects, and waiting when it is busy.

No library does what is needed here: oras and python-dxf neither go on with an upload that was cut nor wait when a
registry is busy, and oras brings jsonschema along. So the protocol is ours, and urllib3, which the clients of
Kubernetes and Docker bring with them, does the HTTP.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Self
from urllib.parse import urljoin, urlsplit, urlunsplit

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ProxyError,
    SSLError,
)

from kale_dist.errors import ImageError
from kale_dist.image.auth import Credentials
from kale_dist.image.challenge import Access, Answers, log_in
from kale_dist.image.network import CERTIFICATES, Network, is_here, trust
from kale_dist.image.reference import DOCKER_HUB

Body = Callable[[], Iterable[bytes]]
"""Makes the body anew for each try."""

MAX_JSON_BYTES = 4 << 20
"""No answer that is read whole is longer; registries refuse longer manifests."""

_HUB_HOST = "registry-1.docker.io"
_CONNECT_S, _READ_S, _WRITE_S = 10.0, 60.0, 300.0
"""Registries check a whole blob before they answer the request that ends its upload."""

_TRIES = 5
_FIRST_WAIT_S, _LONGEST_WAIT_S, _PATIENCE_S = 0.2, 8.0, 60.0
_BUSY = (429, 502, 503, 504)
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_MAX_ERROR_BYTES = 64 << 10
_SHOWN = 300
_UNREACHED = (NewConnectionError, NameResolutionError, ConnectTimeoutError, ProxyError)


class CutError(ImageError):
    """The connection ended within a request that is not repeated as it is."""


class RefusedError(ImageError):
    """The registry refused. Its status and code are there for those who know another way.

    Args:
        message: What was refused and what to do.
        retryable: Whether the same request may succeed later.
        status: HTTP's.
        code: The registry's own, such as `BLOB_UPLOAD_INVALID`; may be empty.
    """

    def __init__(self, message: str, retryable: bool = False, status: int = 0, code: str = "") -> None:  # noqa: FBT001, FBT002 - exceptions pickle by position
        super().__init__(message, retryable)
        self.args = (message, retryable, status, code)
        self.status = status
        self.code = code


class Connection:
    """Sends requests to a registry. Safe to use from threads.

    Args:
        host: As in a reference; `docker.io` is reached where Docker Hub's registry is.
        credentials: None for anonymous use.
        insecure: Whether without TLS; None: only on this very machine, and not where `ca_file` is given.
        ca_file: A certificate that is trusted besides the system's; those in docker's `certs.d` are found without it.

    Raises:
        ImageError: A certificate cannot be read.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials | None = None,
        *,
        insecure: bool | None = None,
        ca_file: str | None = None,
    ) -> None:
        self.host = host
        plain = insecure if insecure is not None else is_here(host) and ca_file is None
        self.origin = f"{'http' if plain else 'https'}://{_HUB_HOST if host == DOCKER_HUB else host}"
        self._network = Network(None if plain else trust(host, ca_file))
        self._has_credentials = credentials is not None
        self._logging_in = threading.Lock()
        self._answers = Answers(host, credentials, secure=not plain, fetch=self._fetch)

    def close(self) -> None:
        """Close what is open. Calling it again does nothing."""
        self._network.close()

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
        body: Body | None = None,
        repeat: bool = True,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and give the answer, whose body has not been read: `read` it, stream it, or be `done` with it.

        Args:
            method: HTTP's.
            url: Path at this registry, or a whole URL; to other hosts no credentials are sent.
            doing: For messages: `read the manifest of team/train:1`.
            access: What is needed, as token servers name it.
            expect: Answers that are no error.
            headers: Besides those for credentials.
            body: With a `Content-Length` among the headers.
            repeat: Whether the same request may be sent again after the connection has ended.

        Raises:
            CutError: The connection ended, each time where it may be repeated.
            RefusedError: Another answer.
            ImageError: The registry cannot be reached, or is busy for longer than one should wait.
        """
        url, moves, tries, asked = self.absolute(url), 0, 0, False
        while True:
            shown = self._answers.header(access) if self._is_ours(url) else ""
            try:
                answer = self._once(method, url, dict(headers or {}), body, shown)
            except HTTPError as error:
                tries += 1
                cut = self._explain(error, doing, url)
                if not isinstance(cut, CutError) or not repeat or tries >= _TRIES:
                    raise cut from error
                time.sleep(_wait_s(tries))
                continue
            if answer.status in expect:
                return answer
            refused = self._refusal(answer, doing)
            if answer.status in _REDIRECTS and "Location" in answer.headers and moves < _MAX_REDIRECTS:
                url, moves = self.absolute(answer.headers["Location"], url), moves + 1
            elif answer.status == 401 and not asked and self._is_ours(url):  # noqa: PLR2004 - HTTP's own number
                asked = True
                if not self._log_in(", ".join(answer.headers.getlist("WWW-Authenticate")), access, shown):
                    raise refused
            elif answer.status in _BUSY and tries < _TRIES:
                tries += 1
                self._be_patient(answer, tries, refused)
            else:
                raise refused

    def read(self, answer: urllib3.BaseHTTPResponse, doing: str) -> bytes:
        """The whole body of a short answer.

        Raises:
            CutError: It ended early.
            ImageError: It is longer than 4 MiB.
        """
        try:
            data: bytes = answer.read(MAX_JSON_BYTES + 1, decode_content=False)
        except HTTPError as error:
            raise self._explain(error, doing, self.origin) from error
        finally:
            answer.close()
        if len(data) > MAX_JSON_BYTES:
            raise ImageError(
                f"The registry {self.host} answered with more than {MAX_JSON_BYTES >> 20} MiB to: {doing}."
            )
        return data

    def done(self, answer: urllib3.BaseHTTPResponse) -> None:
        """Let go of an answer whose body does not matter, so that its connection can be used again."""
        with contextlib.suppress(HTTPError):
            answer.read(_MAX_ERROR_BYTES, decode_content=False)
        answer.close()

    def absolute(self, location: str, base: str = "") -> str:
        """The URL that a `Location` means. Never without TLS where the registry itself is reached over TLS."""
        try:
            parts = urlsplit(urljoin(base or self.origin, location))
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            # Not shown whole: it may hold a signature.
            scheme = _plain(location.partition(":")[0])[:20]
            raise ImageError(f"The registry {self.host} points to an address that is no place for HTTP ({scheme!r}).")
        ours = urlsplit(self.origin)
        if ours.scheme == "https" and parts.scheme == "http":
            # Registries behind a proxy that ends TLS take themselves to be reached without.
            if parts.hostname != ours.hostname:
                raise ImageError(
                    f"The registry {self.host} points to {parts.hostname} without encryption; not followed."
                )
            parts = parts._replace(scheme="https", netloc=ours.netloc)
        return urlunsplit(parts)

    def _is_ours(self, url: str) -> bool:
        return _origin(url) == _origin(self.origin)

    def _log_in(self, challenge: str, access: Access, shown: str) -> bool:
        """Whether there is something else to show than what was refused; requests at the same time log in once."""
        with self._logging_in:
            return self._answers.header(access) not in ("", shown) or self._answers.accept(challenge, access)

    def _once(
        self, method: str, url: str, headers: dict[str, str], body: Body | None, authorization: str
    ) -> urllib3.BaseHTTPResponse:
        headers |= {"User-Agent": "kale-dist", "Accept-Encoding": "identity"}
        if authorization:
            headers["Authorization"] = authorization
        read_s = _READ_S if method in ("GET", "HEAD") else _WRITE_S
        return self._network.pool(url).request(
            method,
            url,
            headers=headers,
            body=body() if body else None,
            timeout=urllib3.Timeout(connect=_CONNECT_S, read=read_s),
            retries=False,
            redirect=False,
            preload_content=False,
        )

    def _fetch(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> tuple[int, bytes]:
        """A request to the token server, tried again where it is busy or ends the connection."""
        tries, doing = 0, "get a token"
        while True:
            tries += 1
            try:
                answer = self._network.pool(url).request(
                    method,
                    url,
                    headers={"User-Agent": "kale-dist", **headers},
                    body=body,
                    timeout=urllib3.Timeout(connect=_CONNECT_S, read=_READ_S),
                    retries=False,
                    redirect=False,
                    preload_content=False,
                )
                if answer.status in _BUSY and tries < _TRIES:
                    self._be_patient(answer, tries, self._refusal(answer, doing))
                    continue
                return answer.status, self.read(answer, doing)
            except HTTPError as error:
                cut = self._explain(error, doing, url)
                if not isinstance(cut, CutError) or tries >= _TRIES:
                    raise cut from error
                time.sleep(_wait_s(tries))

    def _be_patient(self, answer: urllib3.BaseHTTPResponse, tries: int, refused: RefusedError) -> None:
        wait_s = _wait_s(tries)
        with contextlib.suppress(urllib3.exceptions.InvalidHeader):
            wait_s = max(wait_s, urllib3.Retry().get_retry_after(answer) or 0.0)
        if wait_s > _PATIENCE_S:
            raise RefusedError(f"{refused} It asks to wait {wait_s:.0f} s.", True, refused.status, refused.code)  # noqa: FBT003 - exceptions pickle by position
        time.sleep(wait_s)

    def _refusal(self, answer: urllib3.BaseHTTPResponse, doing: str) -> RefusedError:
        """What an unexpected answer means. Reads and closes it."""
        try:
            data = answer.read(_MAX_ERROR_BYTES, decode_content=False)
        except HTTPError:
            data = b""
        finally:
            answer.close()
        code, said = _said(data)
        status = answer.status
        remedy = {
            401: f"The credentials in use are wrong or do not allow it. {log_in(self.host)}"
            if self._has_credentials
            else f"{log_in(self.host)} Check the name, too: registries may say so where there is nothing.",
            403: f"The credentials in use do not allow it. {log_in(self.host)}",
            404: "Check the name; some registries say so too where credentials are missing.",
            405: "The registry does not allow it: whoever runs it has to.",
            413: "A proxy in front of the registry limits the size of requests: whoever runs it has to raise the limit.",
            429: "It limits how often it is asked: wait, log in, or use a mirror.",
        }.get(status, "Try again later." if status >= 500 else "")  # noqa: PLR2004 - HTTP's own number
        if "HTTP request to an HTTPS server" in said:
            remedy = f"Reach {self.host} over TLS: insecure=False."
        why = " ".join(part for part in (str(status), code, said) if part)
        text = f"The registry {self.host} refused to {doing}: {why}. {remedy}".rstrip()
        return RefusedError(text, status in _BUSY or status >= 500, status, code)  # noqa: PLR2004 - HTTP's own number

    def _explain(self, error: HTTPError, doing: str, url: str) -> ImageError:
        """What a failed connection means."""
        server = urlsplit(url).netloc.rpartition("@")[2]
        problem = f"Could not {doing} at the registry {self.host}"
        if isinstance(error, SSLError):
            if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER" in str(error):
                return ImageError(f"{problem}: {server} does not speak TLS. If it may be used without: insecure=True.")
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                reason = str(error).partition("CERTIFICATE_VERIFY_FAILED]")[2].partition("(_ssl")[0].strip(" :")
                return ImageError(
                    f"{problem}: the certificate of {server} is not trusted ({reason}). Name the certificate of its "
                    f"authority: ca_file=, or {CERTIFICATES[0]}/{self.host}/ca.crt, or SSL_CERT_FILE."
                )
        if isinstance(error, _UNREACHED):
            text = f"{problem}: {server} cannot be reached ({_reason(error)}). Is it up, and is its name right?"
            return ImageError(text, retryable=True)
        return CutError(f"{problem}: the connection to {server} ended ({_reason(error)}). Try again.", retryable=True)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _wait_s(tries: int) -> float:
    return min(_FIRST_WAIT_S * 2.0 ** (tries - 1), _LONGEST_WAIT_S)


def _reason(error: HTTPError) -> str:
    """What urllib3 says, without its objects and their addresses."""
    return _plain(
        re.sub(
            r"^\(?\'?|<[^<>]* object at 0x[0-9a-f]+>:? ?|^HTTPS?Connection(?:Pool)?\([^()]*\): ",
            "",
            str(error.args[-1] if error.args else error),
        )
    )


def _said(data: bytes) -> tuple[str, str]:
    """Code and message of a registry's error; the start of the text where it is no such thing."""
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        first = json.loads(data)["errors"][0]
        code, message = str(first.get("code") or ""), str(first.get("message") or "")
        return _plain(code), _plain(message)
    text = data.decode(errors="replace")
    return "", "" if "<html" in text.lower() else _plain(text)


def _plain(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:_SHOWN]
