"""One kind of object, listed and then watched: a thread that survives cuts, expired versions and busy servers."""

from __future__ import annotations

import contextlib
import http
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import urllib3
from kubernetes.client.exceptions import ApiException

_PAGE = 500
_CONNECT_S = 10.0
_LIST_S = 60.0
_WATCH_S = 240
_SILENT_S = _WATCH_S + 30.0
"""The server ends a watch after `_WATCH_S`: a connection that is silent for longer is dead."""

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 30.0
_LIVELY_S = 5.0
"""A watch that has held for this long was a success."""

_REFUSED = (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN, http.HTTPStatus.NOT_FOUND)


class Sink(Protocol):
    """Who wants to know. Called in the watch's thread, one call at a time."""

    def listed(self, items: list[dict[str, Any]]) -> None:
        """These are all objects there are."""

    def changed(self, change: str, item: dict[str, Any]) -> None:
        """An object was `ADDED`, `MODIFIED` or `DELETED`."""

    def troubled(self, error: Exception | None) -> None:
        """Why nothing is known now; None whenever a watch has started."""


class ResourceWatch:
    """Lists objects, then watches them from there on, until it is stopped.

    Args:
        name: Of the thread.
        call: A list method of the kubernetes client that gives the unread response; it is called with the keyword
            arguments of a list or a watch.
        sink: Who wants to know.
    """

    def __init__(self, name: str, call: Callable[..., Any], sink: Sink) -> None:
        self._call = call
        self._sink = sink
        self._stopped = threading.Event()
        self._response: urllib3.BaseHTTPResponse | None = None
        self._version: str | None = None
        """Where to continue; None if all has to be listed."""
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End soon, from any thread; the sink is called no more once the call that may be under way has ended."""
        self._stopped.set()
        response = self._response
        # Only that ends a read in another thread; without it (urllib3 before 2.3) the server ends the watch in minutes.
        if response is not None and hasattr(response, "shutdown"):
            with contextlib.suppress(Exception):
                response.shutdown()

    # -- inside, in the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                if self._version is None:
                    self._version = self._list()
                self._watch()
            except Exception as error:  # noqa: BLE001 - a watch that ended because of a server's answer would hide it
                if self._stopped.is_set():
                    return
                status = getattr(error, "status", None)
                self._failures += 1
                if self._failures > 1 or status in _REFUSED:
                    self._sink.troubled(error)
                if status == http.HTTPStatus.GONE:
                    self._version = None
                    if self._failures == 1:
                        continue
                self._stopped.wait(self._pause_s(error))

    def _list(self) -> str:
        """All objects, page by page.

        Returns:
            The version to watch from.
        """
        items: list[dict[str, Any]] = []
        page: dict[str, Any] = {}
        while True:
            response = self._call(
                limit=_PAGE,
                _continue=page.get("metadata", {}).get("continue"),
                _preload_content=False,
                _request_timeout=(_CONNECT_S, _LIST_S),
            )
            page = json.loads(response.data)
            items += page["items"]
            if not page["metadata"].get("continue"):
                break
        if not self._stopped.is_set():
            self._sink.listed(items)
        return str(page["metadata"]["resourceVersion"])

    def _watch(self) -> None:
        """Follow changes until the connection ends.

        Raises:
            ApiException: The server refuses, at once or in the stream.
        """
        began = time.monotonic()
        response = self._call(
            watch=True,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
            _preload_content=False,
            _request_timeout=(_CONNECT_S, _SILENT_S),
        )
        self._response = response
        self._sink.troubled(None)
        try:
            # `stop` may have come between the request and its response.
            for line in () if self._stopped.is_set() else _lines(response):
                if self._stopped.is_set():
                    return
                change = json.loads(line)
                kind, item = change["type"], change["object"]
                if kind == "ERROR":
                    raise ApiException(status=item.get("code"), reason=item.get("message"))
                if kind != "BOOKMARK":
                    self._sink.changed(kind, item)
                self._version = item["metadata"]["resourceVersion"]
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            # A connection that was cut in the middle; what came before it counts.
            if time.monotonic() - began < _LIVELY_S:
                raise
        finally:
            self._response = None
            response.close()
            response.release_conn()
            if time.monotonic() - began >= _LIVELY_S:
                self._failures = 0
        if time.monotonic() - began < _LIVELY_S and not self._stopped.is_set():
            self._failures += 1
            self._stopped.wait(self._pause_s(None))

    def _pause_s(self, error: Exception | None) -> float:
        """How long to leave the server alone: what it asks for, else longer each time, and not all clients at once."""
        headers = getattr(error, "headers", None) or {}
        with contextlib.suppress(ValueError, TypeError):
            return min(float(headers["Retry-After"]) if "Retry-After" in headers else 0.0, 600.0) or self._own_pause_s()
        return self._own_pause_s()

    def _own_pause_s(self) -> float:
        longest = min(_FIRST_PAUSE_S * 2.0 ** min(self._failures, 20), _LONGEST_PAUSE_S)
        return random.uniform(longest / 2, longest)  # noqa: S311 - spreads clients, keeps nothing secret


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Whole lines as they come."""
    rest: list[bytes] = []
    for chunk in response.stream(1 << 16):
        first, *more = chunk.split(b"\n")
        rest.append(first)
        for part in more:
            if line := b"".join(rest).strip():
                yield line
            rest = [part]
