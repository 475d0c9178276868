"""Names of jobs, the forms that a cluster gives to all other names, and addresses of stores. Pure.

A job's name is a DNS-1035 label, so that one name is valid in a folder, a URL and a cluster.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec.checks import text
from kale_dist.wire import TRAINERS_VARIABLE
from kale_dist.wording import shorten, show

MAX_LENGTH = 50
"""A label may have 63 characters; the rest is kept for what backends append, such as `-worker-123`."""

MAX_LABEL_LENGTH = 63
"""Characters of a label of a DNS name, and so of a pod's or a Service's name."""

_MAX_SUBDOMAIN_LENGTH = 253
_MAX_IMAGE_LENGTH = 511
_VALID = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_WORD = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
_OF_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss")
_DATA_KEY = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[0-9a-fA-F:]+\])"
_PATH = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REGISTRY_PATH = re.compile(rf"{_HOST}(?::[0-9]+)?(?:/{_PATH})*")
_IMAGE = re.compile(
    rf"(?:{_HOST}(?::[0-9]+)?/)?{_PATH}(?:/{_PATH})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def check(name: str) -> None:
    """Accept a job's name, or refuse it with the reason.

    Args:
        name: Lower-case letters, digits and dashes; begins with a letter, does not end with a dash, at most
            `MAX_LENGTH` characters.

    Raises:
        ConfigError: The name is not of this form. The remedy has a name that is.
    """
    if not isinstance(name, str):
        raise ConfigError("name", f"{show(name)} is not a string", "Write a name such as 'train-net'")
    if not name:
        raise ConfigError("name", "it is empty", "Write a name such as 'train-net', or leave it out")
    if len(name) > MAX_LENGTH:
        remedy = f"Shorten it, such as to {_simplify(name) or 'job'!r}"
        raise ConfigError("name", f"{shorten(name)} has {len(name)} characters, more than {MAX_LENGTH}", remedy)
    if not _VALID.fullmatch(name):
        problem = f"{shorten(name)} is not made of lower-case letters, digits and dashes that begin with a letter"
        raise ConfigError("name", problem, f"Write {_simplify(name) or 'job'!r}, for example")


def make(label: str, suffix: str) -> str:
    """A valid name from a label for people.

    Args:
        label: Any text, such as `train Net`.
        suffix: Lower-case letters and digits that make the name unique, such as `x3k9f`.

    Returns:
        Such as `train-net-x3k9f`.
    """
    room = MAX_LENGTH - len(suffix) - 1
    return f"{_simplify(label)[:room].rstrip('-') or 'job'}-{suffix}"


def is_label(text: str) -> bool:
    """Whether a namespace may have this name: DNS-1123, at most 63 characters."""
    return len(text) <= MAX_LABEL_LENGTH and _LABEL.fullmatch(text) is not None


def is_object_name(text: str) -> bool:
    """Whether a claim, Secret, ConfigMap, priority class and the like may have this name: labels joined by dots."""
    return len(text) <= _MAX_SUBDOMAIN_LENGTH and all(_LABEL.fullmatch(part) for part in text.split("."))


def is_qualified_name(text: str) -> bool:
    """Whether this is a key of a label, an annotation or a resource: `name` or `domain/name`."""
    domain, separator, word = text.rpartition("/")
    valid = len(word) <= MAX_LABEL_LENGTH and _WORD.fullmatch(word) is not None
    return valid and (is_object_name(domain) if separator else True)


def is_label_value(text: str) -> bool:
    """Whether a label may have this value."""
    return not text or (len(text) <= MAX_LABEL_LENGTH and _WORD.fullmatch(text) is not None)


def is_data_key(text: str) -> bool:
    """Whether this can be a key of a Secret's or a ConfigMap's data."""
    return _DATA_KEY.fullmatch(text) is not None and text not in (".", "..")


OBJECT_NAME = text(
    is_object_name,
    "{} cannot be a name in a cluster",
    "Write lower-case letters, digits, dashes and dots, as `kubectl get` lists it",
)
RUNTIME = text(
    lambda name: is_object_name(name.removeprefix("TrainingRuntime/")), OBJECT_NAME.problem, OBJECT_NAME.remedy
)
NAMESPACE = text(is_label, "{} cannot be a namespace", "Write lower-case letters, digits and dashes, such as 'team-a'")
KEY = text(
    is_qualified_name, "{} cannot be a key", "Write letters, digits, '-', '_' and '.', such as 'example.com/team'"
)
LABEL_VALUE = text(
    is_label_value,
    "{} cannot be a label's value",
    "Write at most 63 letters, digits, '-', '_' and '.'; anything else can be an annotation",
)
VARIABLE = text(
    _VARIABLE.fullmatch, "{} cannot be a variable's name", "Use letters, digits, '_', '-' and '.', and no digit first"
)
FREE_VARIABLE = text(
    lambda name: not name.startswith("KALE_DIST_") or name == TRAINERS_VARIABLE,
    "{} is set in each rank by kale_dist",
    "Leave it out",
)
SECRET_KEY = text(
    lambda value: is_object_name(value.partition("/")[0]) and is_data_key(value.partition("/")[2]),
    "{} names no key of a Secret",
    "Write it as 'secret/key'",
)


def is_image(text: str) -> bool:
    """Whether this is a reference of an image: `host:port/path:tag@sha256:digest`, of which the path must be there."""
    return _IMAGE.fullmatch(text) is not None


def check_image(argument: str, reference: str) -> str:
    """Accept an image's reference, or refuse it with the reason.

    Raises:
        ConfigError: This is no reference. The remedy has one that is, if it is near.
    """
    if is_image(reference) and len(reference) <= _MAX_IMAGE_LENGTH:
        return reference
    remedy = "Write it as 'registry.example.com/team/train:1'"
    bare = re.sub(r"^[a-z-]+://", "", reference.strip())
    for better in (bare, bare.lower()):
        if better != reference and is_image(better):
            remedy = f"Write {better!r}"
            break
    raise ConfigError(argument, f"{shorten(reference)} is not an image's reference", remedy)


def is_registry_path(text: str) -> bool:
    """Whether this is the host of a registry, with its port and a path if there are: `localhost:5000/team`.

    `http://` in front means that it has no TLS.
    """
    text = text.removeprefix("http://")
    host = text.partition("/")[0]
    # Of a reference, docker takes a first part without these for a path on its own hub.
    return _REGISTRY_PATH.fullmatch(text) is not None and (host == "localhost" or any(char in host for char in ".:"))


def _simplify(text: str) -> str:
    """The nearest valid name; empty if no ASCII letter is in the text."""
    dashed = re.sub(r"[^a-z0-9]+", "-", text.lower())
    return re.sub(r"^[^a-z]+", "", dashed)[:MAX_LENGTH].rstrip("-")


def check_store(argument: str, value: Any) -> str:
    """Where snapshots, checkpoints and results are stored: empty for None, `pvc://claim/folder`, or a URL.

    Args:
        argument: What gave it, for the error: `store`, or the setting's place.
        value: As the user wrote it.

    Raises:
        ConfigError: Pods could not reach it, or it holds a password.
    """
    if value is None:
        return ""
    example = "Write it as 'pvc://claim/folder' or a URL such as 's3://bucket/folder'"
    if not isinstance(value, str):
        raise ConfigError(argument, f"{show(value)} is not text", example)
    if not value:
        return ""
    scheme, separator, rest = value.partition("://")
    # First: the other refusals show the address.
    if "@" in rest.partition("/")[0] and ":" in rest.partition("@")[0]:
        remedy = "Leave it out, and give it to the pods by secret_environment={'NAME': 'secret/key'}"
        raise ConfigError(argument, "this URL holds a password", remedy)
    if not separator or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or not rest.strip("/"):
        raise ConfigError(argument, f"{shorten(value)} names no store", example)
    # Other systems' addresses may begin with a folder: hdfs:///jobs.
    if scheme in _OF_BUCKETS and not re.fullmatch(r"[\w.@:-]*\w[\w.@:-]*", rest.partition("/")[0]):
        raise ConfigError(argument, f"{shorten(value)} names no bucket", example)
    if scheme in ("file", "local", "memory"):
        raise ConfigError(argument, f"{shorten(value)} is on this machine, and pods do not see it", example)
    if scheme == "pvc":
        claim, _, folder = rest.partition("/")
        if not is_object_name(claim):
            raise ConfigError(argument, f"{show(claim)} cannot be the name of a claim", example)
        if ".." in folder.split("/"):
            raise ConfigError(argument, f"{folder!r} goes up with '..'", example)
        return value.rstrip("/")
    try:
        urllib.parse.urlsplit(value)
    except ValueError as error:
        raise ConfigError(argument, f"{shorten(value)} is not a URL ({error})", example) from None
    return value.rstrip("/")
