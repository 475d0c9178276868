"""Addresses of stores as users write them, checked and in one form. Pure."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from kale_dist import names
from kale_dist.errors import ConfigError
from kale_dist.wording import shorten, show


def check(argument: str, value: Any) -> str:
    """Where snapshots, checkpoints and results are stored: empty for None, `pvc://claim/folder`, or a URL.

    Args:
        argument: What gave it, for the error: `store`, or the setting's place.
        value: As the user wrote it.

    Raises:
        ConfigError: Pods could not reach it, or it holds a password.
    """
    if value is None or value == "":
        return ""
    example = "Write it as 'pvc://claim/folder' or a URL such as 's3://bucket/folder'"
    if not isinstance(value, str):
        raise ConfigError(argument, f"{show(value)} is not text", example)
    scheme, separator, rest = value.partition("://")
    # First: the other refusals show the address.
    if "@" in rest.partition("/")[0] and ":" in rest.partition("@")[0]:
        remedy = "Leave it out, and give it to the pods by secret_environment={'NAME': 'secret/key'}"
        raise ConfigError(argument, "this URL holds a password", remedy)
    if not separator or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or not rest.strip("/"):
        raise ConfigError(argument, f"{shorten(value)} names no store", example)
    if scheme in ("file", "local", "memory"):
        raise ConfigError(argument, f"{shorten(value)} is on this machine, and pods do not see it", example)
    if scheme == "pvc":
        claim, _, folder = rest.partition("/")
        if not names.is_object_name(claim):
            raise ConfigError(argument, f"{show(claim)} cannot be the name of a claim", example)
        if ".." in folder.split("/"):
            raise ConfigError(argument, f"{folder!r} goes up with '..'", example)
        return value.rstrip("/")
    try:
        urllib.parse.urlsplit(value)
    except ValueError as error:
        raise ConfigError(argument, f"{shorten(value)} is not a URL ({error})", example) from None
    return value.rstrip("/")
