"""The way to a host: who is trusted, which proxy lies between, and connections that are kept open."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import ssl
import urllib.request
from urllib.parse import unquote, urlsplit

import urllib3

from kale_dist.errors import ImageError

BLOCK_BYTES = 1 << 20
CERTIFICATES = ("/etc/docker/certs.d", "/etc/containers/certs.d")
_KEPT = 8
"""Connections to one host that stay open, for as many threads."""


class Network:
    """Connections, kept open, directly or through the proxies of the environment (`HTTPS_PROXY`, `NO_PROXY`).

    Args:
        context: Who is trusted; None where nothing goes over TLS.
    """

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._context = context
        self._pools: dict[str, urllib3.PoolManager] = {}

    def close(self) -> None:
        """Close what is open. Calling it again does nothing."""
        while self._pools:
            self._pools.popitem()[1].clear()

    def pool(self, url: str) -> urllib3.PoolManager:
        """What a request to this URL goes through."""
        parts = urlsplit(url)
        # As docker: what runs on this machine is never asked for through a proxy.
        direct = is_here(parts.netloc) or urllib.request.proxy_bypass(parts.hostname or "")
        proxy = "" if direct else urllib.request.getproxies().get(parts.scheme, "")
        if proxy not in self._pools:
            self._pools[proxy] = self._make_pool(proxy)
        return self._pools[proxy]

    def _make_pool(self, proxy: str) -> urllib3.PoolManager:
        if not proxy:
            return urllib3.PoolManager(ssl_context=self._context, blocksize=BLOCK_BYTES, maxsize=_KEPT)
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ImageError(f"The proxy at {parts.hostname or 'no host'} in the environment is not HTTP's. Unset it.")
        login = None
        if parts.username:
            login = urllib3.make_headers(proxy_basic_auth=f"{unquote(parts.username)}:{unquote(parts.password or '')}")
        address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        return urllib3.ProxyManager(
            address, proxy_headers=login, ssl_context=self._context, blocksize=BLOCK_BYTES, maxsize=_KEPT
        )


def is_here(host: str) -> bool:
    """Whether a host, with or without a port, is this machine."""
    name = urlsplit(f"//{host}").hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")


def trust(host: str, ca_file: str | None = None) -> ssl.SSLContext:
    """Who is trusted when a registry is reached over TLS, and the certificate that is shown to it.

    Args:
        host: The registry, as docker's `certs.d` names its folder.
        ca_file: A PEM file that is trusted besides the system's authorities and that folder's.

    Raises:
        ImageError: A certificate cannot be read.
    """
    context = ssl.create_default_context()
    own = pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config") / "docker" / "certs.d"
    folders = [pathlib.Path(folder) / host for folder in (*CERTIFICATES, own)]
    found = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.crt"))]
    for path in (*found, *([pathlib.Path(ca_file)] if ca_file else ())):
        try:
            context.load_verify_locations(path)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or "it is no certificate"
            raise ImageError(f"The certificate {path} for {host} cannot be used: {reason}. Give one in PEM.") from error
    for path in (path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.cert"))):
        try:
            context.load_cert_chain(path, path.with_suffix(".key"))
        except (OSError, ssl.SSLError) as error:
            text = f"The certificate {path} and its key beside it (.key) cannot be shown to {host}: {error.strerror}."
            raise ImageError(f"{text} Repair or remove them.") from error
    return context
