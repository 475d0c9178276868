"""Turns an exception of a request into an error whose message explains what happened and what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from kale_dist.errors import BackendError
from kale_dist.places.kubernetes import roles
from kale_dist.places.kubernetes.explain import table
from kale_dist.places.kubernetes.explain.sentences import Found, cut, facts_of, fill
from kale_dist.places.kubernetes.explain.table import Seen
from kale_dist.places.manifests import KINDS, Kind

FORBIDDEN = HTTPStatus.FORBIDDEN.value
NOT_FOUND = HTTPStatus.NOT_FOUND.value
_SHOWN = 600


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """A request to the cluster, in the words of its messages."""

    verb: str
    """The verb of RBAC, such as `create`."""
    resource: str
    """Plural, with its subresource: `pods/log`. With the verb `reach`, the server's URL."""
    namespace: str = ""
    """Empty for a request about all namespaces."""
    name: str = ""
    kind: str = ""
    """The word of the job's kind, where that is known; the Role that is printed is the one for it."""

    @property
    def job_kind(self) -> Kind:
        """The kind of the job that it is about."""
        asked = (kind for kind in KINDS.values() if kind.plural == self.resource)
        return KINDS[self.kind] if self.kind else next(asked, next(iter(KINDS.values())))

    def __str__(self) -> str:
        """Such as `create pytorchjobs/train-net in the namespace 'team-a'`."""
        if self.verb == "reach":
            return f"reach {self.resource}"
        whole, _, part = self.resource.partition("/")
        thing = f"{whole}/{self.name}" if self.name else whole
        everywhere = "" if self.name else " in all namespaces"
        where = f" in the namespace {self.namespace!r}" if self.namespace else everywhere
        return f"{self.verb} {thing}{f' ({part})' if part else ''}{where}"


def status_of(error: BaseException) -> int:
    """The HTTP status in an error, or in what caused it; 0 if no server answered."""
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    return status if isinstance(status, int) else 0


def explain(error: BaseException, doing: Doing) -> BackendError:
    """The error to raise.

    Args:
        error: From the kubernetes client, urllib3, websocket-client or the operating system.
        doing: What was asked.
    """
    if isinstance(error, BackendError):
        return error
    found = look_up(error, doing)
    return found.entry.error(f"Cannot {doing}: {found.words}. {found.trouble.remedy}", found.trouble.heals)


@contextlib.contextmanager
def asking(verb: str, resource: str, namespace: str = "", name: str = "") -> Iterator[None]:
    """Replace an exception of a request by the table's error for it; the arguments are those of `Doing`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again, in the table's words
        doing = Doing(verb=verb, resource=resource, namespace=namespace, name=name)
        # The table explains what it knows in a sentence; forty frames of the client's libraries above it would hide it.
        is_known = isinstance(error, BackendError) or look_up(error, doing).entry.name not in ("no-answer", "answer")
        raise explain(error, doing) from None if is_known else error


def look_up(error: BaseException, doing: Doing) -> Found:
    """The entry of the table for an error, with its facts filled in."""
    facts = {**facts_of(doing.job_kind), "namespace": doing.namespace, "name": doing.name, "job": doing.name}
    facts["resource"] = doing.resource
    status = status_of(error)
    if not status:
        chain = tuple(_chain(error))
        kinds = [kind for kind in (ssl.SSLError, TimeoutError, OSError) for link in chain if isinstance(link, kind)]
        names = " ".join(dict.fromkeys(kind.__name__ for kind in (*map(type, chain), *kinds)))
        last = cut(str(chain[-1]), _SHOWN) or type(chain[-1]).__name__
        matched = table.match(Seen.CONNECTION, f"{names}: {' '.join(map(str, chain))}")
        return fill((matched or (table.named("no-answer"), {}))[0], {**facts, "detail": last})
    message, reason, fields, retry_after = _answer(error)
    matched = table.match(Seen.API, f"{status} {doing.verb} {doing.resource} {reason}: {message}")
    entry, groups = matched or (table.named("answer"), {})
    facts |= {
        "detail": cut(fields if entry.name == "invalid" and fields else message or "no reason is given", _SHOWN),
        "status": str(status),
        "retry_after": f"in {retry_after} s" if retry_after else "in a moment",
        **{name: cut(value, _SHOWN) for name, value in groups.items()},
    }
    if entry.name == "rights":
        facts |= _rights(groups, doing)
    return fill(entry, facts)


def _rights(groups: dict[str, str], doing: Doing) -> dict[str, str]:
    """A Role that grants all that this library needs: otherwise one refusal would follow the other."""
    kind = doing.job_kind
    group = kind.group if groups["resource"] == kind.plural else ""
    denied = roles.Right(group=group, resource=groups["resource"], verbs=(groups["verb"],), without="")
    where = f"in the namespace {doing.namespace!r}" if doing.namespace else "in all namespaces"
    return {"role": roles.role_yaml(doing.namespace, groups["user"], (*roles.rights(kind), denied)), "where": where}


def _answer(error: BaseException) -> tuple[str, str, str, str]:
    """Message, reason, fields that are wrong, and seconds after which to try again, from any library's error."""
    body = getattr(error, "body", None) or getattr(error, "resp_body", None) or b""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
    headers = getattr(error, "headers", None) or getattr(error, "resp_headers", None) or {}
    retry_after = str(next((value for name, value in headers.items() if name.lower() == "retry-after"), ""))
    try:
        status = json.loads(text)
    except ValueError:
        status = None
    if not isinstance(status, dict) or status.get("kind") != "Status":
        return text.strip() or str(getattr(error, "reason", "")), "", "", retry_after
    details: dict[str, Any] = status.get("details") or {}
    causes = ((cause.get("field", ""), cause.get("message", "")) for cause in details.get("causes") or ())
    fields = "; ".join(f"{field}: {what}" for field, what in causes if field)
    retry_after = retry_after or str(details.get("retryAfterSeconds") or "")
    return status.get("message") or "", status.get("reason") or "", fields, retry_after


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what lies behind it, the first cause last."""
    link: BaseException | None = error
    for _ in range(10):
        if link is None:
            return
        yield link
        reason = getattr(link, "reason", None)
        link = reason if isinstance(reason, BaseException) else link.__cause__ or link.__context__
