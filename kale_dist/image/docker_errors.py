"""What went wrong in a build, from the last lines of its log: most specific first, each with its remedy. Pure."""

from __future__ import annotations

import dataclasses
import re

from kale_dist.errors import ImageError

SHOWN_LINES = 40
"""How much of a log an error shows."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Trouble:
    pattern: str
    problem: str
    """May name what the pattern's first group found, as `{0}`."""
    remedy: str
    retryable: bool = False


_TROUBLES = (
    _Trouble(
        pattern=r"no space left on device|disk quota exceeded",
        problem="the engine's disk is full",
        remedy="`docker system df` shows what fills it; `docker builder prune` and `docker image prune` make room",
        retryable=True,
    ),
    _Trouble(
        pattern=r"CERTIFICATE_VERIFY_FAILED|certificate signed by unknown authority|x509: ",
        problem="a server showed a certificate that is not trusted",
        remedy="For packages, set PIP_CERT to the file with your network's certificates: it is taken into the build. For "
        "a registry, put its certificate into /etc/docker/certs.d on the engine's machine",
    ),
    _Trouble(
        pattern=r"server gave HTTP response to HTTPS client",
        problem="the registry speaks plain HTTP, and the engine expects HTTPS",
        remedy="Add it to `insecure-registries` in the engine's daemon.json",
    ),
    _Trouble(
        pattern=r"Temporary failure in name resolution|Name or service not known|Could not resolve '?|no such host|"
        r"Network is unreachable|Connection timed out|i/o timeout|TLS handshake timeout|connection refused",
        problem="the build cannot reach the network that it needs",
        remedy="Containers of this engine need DNS and a way out, or a proxy in ~/.docker/config.json; "
        "index_urls= names a mirror",
        retryable=True,
    ),
    _Trouble(
        pattern=r"toomanyrequests|429 Too Many Requests|rate limit",
        problem="the registry refuses further requests for now",
        remedy="Wait, or log in with `docker login`",
        retryable=True,
    ),
    _Trouble(
        pattern=r"cannot install .*\btorch\b.*conflicting|constraint\) torch==",
        problem="the packages need another torch than the base has",
        remedy="Choose versions that go with the base's torch, another base, or allow_torch_change=True",
    ),
    _Trouble(
        pattern=r"ResolutionImpossible|conflicting dependencies",
        problem="the packages contradict each other",
        remedy="pip's own words are below: loosen one of them",
    ),
    _Trouble(
        pattern=r"No matching distribution found for (\S+)",
        problem="there is no {0} for the base's Python and platform",
        remedy="Check name and version, and what the index has: `pip index versions` lists them",
    ),
    _Trouble(
        pattern=r"Unable to locate package (\S+)",
        problem="apt knows no package {0}",
        remedy="Check the name for the base's release of Debian or Ubuntu",
    ),
    _Trouble(
        pattern=r"apt-get: not found|apt-get: command not found",
        problem="the base has no apt-get",
        remedy="apt= needs a base made from Debian or Ubuntu",
    ),
    _Trouble(
        pattern=r"No module named pip",
        problem="the base's python3 has no pip",
        remedy='Build with builder="layers", which needs none, or take another base',
    ),
    _Trouble(
        pattern=r"python3: not found|python3: command not found|/bin/sh: no such file",
        problem="the base has no python3",
        remedy="Take a base with Python and torch",
    ),
    _Trouble(
        pattern=r"exit code: 137|non-zero code: 137|cannot allocate memory",
        problem="a step was killed, most likely for want of memory",
        remedy="Give the engine's machine more memory",
    ),
    _Trouble(
        pattern=r"exec format error",
        problem="the base is for another processor than the engine's",
        remedy="Take a base for the engine's platform, or install QEMU's binfmt handlers",
    ),
    _Trouble(
        pattern=r"error: command '?(?:\S*/)?(\S*(?:gcc|g\+\+|cc|clang|cmake|cargo|rustc))\b.* (?:failed|No such file)",
        problem="a package has to be compiled, and that failed ({0})",
        remedy="Take a version that has wheels, or name compilers and headers in apt=",
    ),
)

_STEP = re.compile(r"(?:executor failed running|process \"|The command ')")


def build_failed(tag: str, builder: str, log: list[str], cause: str) -> ImageError:
    """The error for a build that failed.

    Args:
        tag: The image that was to be made.
        builder: Which builder, in words.
        log: Lines of its log; the last ones are shown.
        cause: What the builder said in the end.
    """
    trouble = _find("\n".join([*log[-SHOWN_LINES:], cause]))
    if trouble is None:
        what = "a step of it failed" if _STEP.search(cause) else "the builder gave up"
        trouble = _Trouble(pattern="", problem=what, remedy="Its last lines are below")
    shown = [line for line in log[-SHOWN_LINES:] if line.strip()]
    text = f"the image {tag} could not be built by {builder}: {trouble.problem}. {trouble.remedy}"
    said = cause.strip()
    lines = [text, *(f"  {line}" for line in shown), *([f"  {said}"] if said and said not in shown else [])]
    return ImageError("\n".join(lines), trouble.retryable)


def _find(text: str) -> _Trouble | None:
    for trouble in _TROUBLES:
        found = re.search(trouble.pattern, text, re.IGNORECASE)
        if found is not None:
            words = [group or "" for group in found.groups()]
            return dataclasses.replace(trouble, problem=trouble.problem.format(*words))
    return None
