"""One kind of object, listed and then watched without an end, through cuts, expired versions and busy servers."""

from __future__ import annotations

import contextlib
import http
import json
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import urllib3
from kubernetes.client.exceptions import ApiException

LISTED, ADDED, MODIFIED, DELETED = "LISTED", "ADDED", "MODIFIED", "DELETED"
TROUBLED = "TROUBLED"

_PAGE = 500
_CONNECT_S = 10.0
_LIST_S = 60.0
_WATCH_S = 240
_SILENT_S = _WATCH_S + 30.0
"""The server ends a watch after `_WATCH_S`: a connection that is silent for longer is dead."""

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 30.0
_LONGEST_WISH_S = 600.0
_HELD_S = 5.0
"""A watch that has held for this long was a success."""

_REFUSED = (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN, http.HTTPStatus.NOT_FOUND)
_CUTS = (urllib3.exceptions.HTTPError, OSError, ValueError)
"""What reading raises when a connection is cut, also in the middle of a line; what came before counts."""


class ResourceWatch:
    """All objects of one kind and then each change of one, for a single `for` loop.

    Args:
        call: A list method of the kubernetes client; it is called with the keyword arguments of a list or a watch, and gives
            the unread response.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._stopped = threading.Event()
        self._response: urllib3.BaseHTTPResponse | None = None

    def stop(self) -> None:
        """End the loop soon, from any thread."""
        self._stopped.set()
        response = self._response
        # Only this ends a read in another thread; without it (urllib3 before 2.3) the server ends the watch in minutes.
        if response is not None and hasattr(response, "shutdown"):
            with contextlib.suppress(Exception):
                response.shutdown()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """List, then watch from there on, until `stop`.

        Yields:
            `ADDED`, `MODIFIED` or `DELETED` with one object; `LISTED` after all objects of a list, with their uids; `TROUBLED` with
            the error that keeps changes from coming, and with None when the server serves a watch (again).
        """
        version, failures = "", 0
        while not self._stopped.is_set():
            began, error = math.inf, None
            try:
                if not version:
                    version = yield from self._list()
                with self._open(version) as response:
                    began = time.monotonic()
                    yield TROUBLED, None
                    # `stop` may have come between the request and its response.
                    for change, item in () if self._stopped.is_set() else _changes(response):
                        if change != "BOOKMARK":
                            yield change, item
                        version = item["metadata"]["resourceVersion"]
            except Exception as caught:  # noqa: BLE001 - whatever a server answers, the watch goes on
                error = caught
            if self._stopped.is_set():
                return
            if time.monotonic() - began >= _HELD_S:
                failures = 0
                if error is None or isinstance(error, _CUTS):
                    continue
            failures += 1
            status = getattr(error, "status", None)
            if error is not None and (failures > 1 or status in _REFUSED):
                yield TROUBLED, error
            if status == http.HTTPStatus.GONE:
                version = ""
                if failures == 1:
                    continue
            self._stopped.wait(_pause_s(failures, error))

    def _list(self) -> Generator[tuple[str, Any], None, str]:
        """Yield a list, of which one page at a time is held, and return the version to watch from."""
        uids: set[str] = set()
        rest = None
        while True:
            response = self._call(
                limit=_PAGE, _continue=rest, _preload_content=False, _request_timeout=(_CONNECT_S, _LIST_S)
            )
            page = json.loads(response.data)
            for item in page["items"]:
                uids.add(item["metadata"]["uid"])
                yield ADDED, item
            rest = page["metadata"].get("continue")
            if not rest:
                yield LISTED, uids
                return str(page["metadata"]["resourceVersion"])

    @contextlib.contextmanager
    def _open(self, version: str) -> Iterator[urllib3.BaseHTTPResponse]:
        """The response to a request for all changes since a version; `stop` ends it."""
        response = self._response = self._call(
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
            _preload_content=False,
            _request_timeout=(_CONNECT_S, _SILENT_S),
        )
        try:
            yield response
        finally:
            self._response = None
            response.close()
            response.release_conn()


def _changes(response: urllib3.BaseHTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    """The changes in a watch's response as they come, each a line of JSON.

    Raises:
        ApiException: The server ends the watch with an error.
    """
    rest: list[bytes] = []
    for chunk in response.stream(1 << 16):
        first, *more = chunk.split(b"\n")
        rest.append(first)
        for part in more:
            if line := b"".join(rest).strip():
                change = json.loads(line)
                kind, item = change["type"], change["object"]
                if kind == "ERROR":
                    raise ApiException(status=item.get("code"), reason=item.get("message"))
                yield kind, item
            rest = [part]


def _pause_s(failures: int, error: Exception | None) -> float:
    """How long to leave the server alone: as long as it asks, else longer each time, and not all clients at once."""
    headers = getattr(error, "headers", None) or {}
    with contextlib.suppress(ValueError, KeyError):
        if wished_s := min(float(headers["Retry-After"]), _LONGEST_WISH_S):
            return wished_s
    longest = min(_FIRST_PAUSE_S * 2.0 ** min(failures, 20), _LONGEST_PAUSE_S)
    return random.uniform(longest / 2, longest)  # noqa: S311 - spreads clients, keeps nothing secret
