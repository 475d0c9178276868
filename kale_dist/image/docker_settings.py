"""What pip is configured for on this machine, as a build in the Docker engine can use it.

A recipe without index URLs means "from where packages come here": a mirror, its certificate, a proxy. Folders of this
machine mean nothing in a build and are left out.
"""

from __future__ import annotations

import ast
import configparser
import io
import os
import pathlib
import subprocess
import sys
import urllib.parse

from kale_dist.errors import ConfigError, ImageError
from kale_dist.image.docker_context import CERTIFICATES, NETRC, PIP_SETTINGS

_CARRIED = ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "timeout", "retries")
_URLS = ("index-url", "extra-index-url", "find-links", "proxy")
_CERTIFICATE_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
_ASKING_S = 30.0


def collect(*, buildkit: bool, own_index: bool) -> dict[str, bytes]:
    """The settings as files, by the names that `docker_context` gives them.

    Args:
        buildkit: Whether they are mounted as secrets. Where they are copied, netrc stays here.
        own_index: Whether the recipe says itself where packages come from; then pip's index settings stay here.

    Raises:
        ConfigError: An index URL holds a password, and the classic builder would keep it in the image.
        ImageError: The file of certificates cannot be read.
    """
    configured = _configured()
    found: dict[str, bytes] = {}
    certificates = next(filter(None, map(os.environ.get, _CERTIFICATE_VARIABLES)), configured.get("cert", ""))
    if certificates:
        try:
            found[CERTIFICATES] = pathlib.Path(certificates).read_bytes()
        except OSError as error:
            raise ImageError(
                f"pip is configured for the certificates in {certificates}, which cannot be read here: {error.strerror}. "
                "Set PIP_CERT to a file that can"
            ) from error
    text = _as_file(configured, own_index=own_index)
    if text:
        if not buildkit and any("@" in urllib.parse.urlsplit(word).netloc for word in text.split()):
            raise ConfigError(
                "index_urls",
                "pip is configured for an index URL with a password, and Docker's classic builder would write it into the "
                "image",
                'Install docker buildx, use a netrc file, or build with builder="layers"',
            )
        found[PIP_SETTINGS] = text.encode()
    netrc = pathlib.Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    if buildkit and netrc.is_file() and os.access(netrc, os.R_OK):
        found[NETRC] = netrc.read_bytes()
    return found


def _configured() -> dict[str, str]:
    """Pip's settings of this user: environment over files; none where there is no pip."""
    asked = [sys.executable, "-m", "pip", "config", "list"]
    try:
        ended = subprocess.run(asked, capture_output=True, text=True, timeout=_ASKING_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    by_section: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in ended.stdout.splitlines() if ended.returncode == 0 else ():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in by_section and value:
            by_section[section][key.replace("_", "-")] = str(ast.literal_eval(value))
    return by_section["global"] | by_section["install"] | by_section[":env:"]


def _as_file(configured: dict[str, str], *, own_index: bool) -> str:
    kept: dict[str, str] = {}
    for name in _CARRIED:
        words = configured.get(name, "").split()
        if name in _URLS:
            words = [word for word in words if urllib.parse.urlsplit(word).scheme in {"http", "https"}]
        if words and not (own_index and name in _URLS and name != "proxy"):
            kept[name] = "\n".join(words)
    if not kept:
        return ""
    written = configparser.RawConfigParser()
    written["global"] = kept
    stream = io.StringIO()
    written.write(stream)
    return stream.getvalue()
