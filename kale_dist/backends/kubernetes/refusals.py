"""What the API server, or the way to it, says when it refuses: in one sentence, with what to do."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from kale_dist.backends.kubernetes import roles
from kale_dist.errors import BackendError, BackendUnavailableError, JobExistsError, JobNotFoundError

BAD_REQUEST = HTTPStatus.BAD_REQUEST.value
FORBIDDEN = HTTPStatus.FORBIDDEN.value
NOT_FOUND = HTTPStatus.NOT_FOUND.value
NOT_ALLOWED = HTTPStatus.METHOD_NOT_ALLOWED.value
CONFLICT = HTTPStatus.CONFLICT.value
_UNAUTHORIZED = HTTPStatus.UNAUTHORIZED.value
_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE.value
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY.value
_TOO_MANY = HTTPStatus.TOO_MANY_REQUESTS.value
_SERVER_ERROR = HTTPStatus.INTERNAL_SERVER_ERROR.value

JOBS = "pytorchjobs"
_SHOWN = 600
_INSTALL_OPERATOR = 'kubectl apply --server-side -k "github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3"'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """What was asked of the cluster."""

    verb: str
    """As RBAC has it, such as `create`."""
    resource: str
    """Plural, with its subresource: `pods/log`. With the verb `reach`, the server's URL."""
    namespace: str = ""
    """Empty for what is asked of all namespaces."""
    name: str = ""

    def __str__(self) -> str:
        """Such as `create pytorchjobs/train-net in the namespace 'team-a'`."""
        if self.verb == "reach":
            return f"reach {self.resource}"
        whole, _, part = self.resource.partition("/")
        thing = f"{whole}/{self.name}" if self.name else whole
        everywhere = "" if self.name else " in all namespaces"
        where = f" in the namespace {self.namespace!r}" if self.namespace else everywhere
        return f"{self.verb} {thing}{f' ({part})' if part else ''}{where}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server answered, from whichever library's error."""

    status: int
    message: str
    reason: str = ""
    """The word of a Kubernetes Status, such as `AlreadyExists`; empty if the body was none."""
    causes: tuple[tuple[str, str], ...] = ()
    """(field, what is wrong with it)."""
    retry_after: str = ""


def explain(error: BaseException, *, doing: Doing) -> BackendError:
    """The error that tells a user what happened and what to do.

    Args:
        error: From the kubernetes client, urllib3, websocket-client or the operating system.
        doing: What was asked.
    """
    if isinstance(error, BackendError):
        return error
    answer = answer_of(error)
    if answer is None:
        return _no_answer(error, doing)
    for rule in _RULES:
        found = rule(answer, doing)
        if found is not None:
            return found
    return _failed(doing, f"the cluster answers {answer.status}: {_cut(answer.message)}", "Correct it and try again")


def answer_of(error: BaseException) -> Answer | None:
    """The answer in an error; None if no server answered."""
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    if not isinstance(status, int) or not status:
        return None
    body = getattr(error, "body", None) or getattr(error, "resp_body", None) or b""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body)
    headers = getattr(error, "headers", None) or getattr(error, "resp_headers", None) or {}
    retry_after = str(next((value for name, value in headers.items() if name.lower() == "retry-after"), ""))
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict) or said.get("kind") != "Status":
        return Answer(status=status, message=text.strip() or str(getattr(error, "reason", "")), retry_after=retry_after)
    details: dict[str, Any] = said.get("details") or {}
    causes = tuple((cause.get("field", ""), cause.get("message", "")) for cause in details.get("causes") or ())
    return Answer(
        status=status,
        message=said.get("message") or "",
        reason=said.get("reason") or "",
        causes=causes,
        retry_after=retry_after or str(details.get("retryAfterSeconds") or ""),
    )


# -- nobody answered -------------------------------------------------------------------------------------------------


def _no_answer(error: BaseException, doing: Doing) -> BackendError:
    chain = tuple(_chain(error))
    whole = " ".join(str(link) for link in chain)
    last = _cut(" ".join(str(chain[-1]).split()) or type(chain[-1]).__name__)
    if re.search(r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|hostname .* doesn't match", whole):
        why = next((found for found in re.findall(r"certificate verify failed: ([^(\n]+)", whole)), last).strip()
        remedy = (
            "The kubeconfig's certificate-authority does not fit the server, or its certificate expired: get the "
            "kubeconfig anew, or have the administrator renew the certificate"
        )
        return _unavailable(doing, f"the certificate of the API server is not accepted: {why}", remedy)
    if re.search(r"TLSV1\S*_ALERT|SSLV3_ALERT|tlsv1 alert|certificate required", whole):
        remedy = "The client certificate of the kubeconfig is wrong or has expired: get the kubeconfig anew"
        return _unavailable(doing, f"the API server ended the connection: {last}", remedy)
    if any(isinstance(link, ssl.SSLError) for link in chain):
        remedy = "Look at the kubeconfig's `server`: is it the API server's URL, with https?"
        return _unavailable(doing, f"there is no TLS at the other end: {last}", remedy)
    if any(isinstance(link, socket.gaierror) for link in chain) or "NameResolutionError" in whole:
        remedy = "Is the network, or the VPN, up? Is the kubeconfig's `server` right?"
        return _unavailable(doing, "the API server's host name is not known here", remedy)
    if re.search(r"[Pp]roxy", whole) and "ProxyError" in {type(link).__name__ for link in chain}:
        remedy = "Look at HTTPS_PROXY and NO_PROXY; the API server's host often belongs into NO_PROXY"
        return _unavailable(doing, f"the proxy does not let us through: {last}", remedy)
    timeout = any(isinstance(link, TimeoutError) or "Timeout" in type(link).__name__ for link in chain)
    if timeout:
        remedy = "Is the network, or the VPN, up? A firewall that drops packets looks like this, too"
        return _unavailable(doing, "the API server does not answer in time", remedy)
    if any(isinstance(link, (OSError, EOFError)) or "Connection" in type(link).__name__ for link in chain) or re.search(
        r"Connection|refused|closed", whole
    ):
        remedy = "Is the cluster running, and the network, or the VPN, up? 'kubectl get nodes' tells the same"
        return _unavailable(doing, f"the API server cannot be reached: {last}", remedy)
    return _failed(doing, last, "If 'kubectl get pods' works, please report this")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what lies behind it, the first cause last."""
    link: BaseException | None = error
    for _ in range(10):
        if link is None:
            return
        yield link
        reason = getattr(link, "reason", None)
        link = reason if isinstance(reason, BaseException) else link.__cause__ or link.__context__


# -- the server answered ---------------------------------------------------------------------------------------------


def _unauthorized(answer: Answer, doing: Doing) -> BackendError | None:
    if answer.status != _UNAUTHORIZED:
        return None
    remedy = (
        "The token or certificate has expired or was revoked: log in anew as you did for this cluster, until "
        "'kubectl get pods' works; a kubeconfig that has changed is read again by itself"
    )
    return BackendUnavailableError(_text(doing, "the cluster does not accept these credentials (401)", remedy))


def _quota(answer: Answer, doing: Doing) -> BackendError | None:
    exceeded = re.search(
        r"exceeded quota: ([^,]+), requested: (.+?), used: (.+?), limited: (.+)", answer.message, re.DOTALL
    )
    if exceeded:
        quota, requested, used, limited = (part.strip() for part in exceeded.groups())
        problem = f"the quota {quota!r} allows {limited}, of which {used} is used, and this asks for {requested}"
        remedy = (
            "Delete finished jobs (kale-dist delete), wait until others end, or have the administrator raise the quota"
        )
        return _failed(doing, problem, remedy, retryable=True)
    unspecified = re.search(r"failed quota: ([^:]+): must specify (.+)", answer.message, re.DOTALL)
    if unspecified:
        problem = f"the quota {unspecified[1]!r} demands that pods say {_cut(unspecified[2])}"
        return _failed(doing, problem, "Give them in resources=")
    return None


def _pod_security(answer: Answer, doing: Doing) -> BackendError | None:
    found = re.search(r'violates PodSecurity "([^"]+)": (.+)', answer.message, re.DOTALL)
    if not found:
        return None
    level, rules = found[1], _cut(found[2])
    remedy = "Use another namespace, or change what it names"
    for word, ours in (
        ("init-pytorch", "That container is the operator's, for jobs with a master: give cluster={'master': False}"),
        ("hostPath", "That is a volume hostpath://...: use a claim instead"),
        ("hostNamespaces", "That comes from cluster={'patch': ...}: leave it out"),
        ("runAsNonRoot", "Give cluster={'run_as_user': 1000}, or an image whose user is not root"),
        ("privileged", "That comes from cluster={'patch': ...}: leave it out"),
    ):
        if word in rules:
            remedy = ours
            break
    return _failed(doing, f'the namespace enforces Pod Security "{level}", which forbids: {rules}', remedy)


def _webhook(answer: Answer, doing: Doing) -> BackendError | None:
    silent = re.search(r'failed calling webhook "([^"]+)":(.+)', answer.message, re.DOTALL)
    if silent:
        problem = (
            f"the cluster's webhook {silent[1]!r}, which has to be asked first, does not answer: {_cut(silent[2])}"
        )
        return _failed(doing, problem, "Try again; if it lasts, tell the administrator", retryable=True)
    denied = re.search(
        r"(?:admission webhook \"|ValidatingAdmissionPolicy ')([^\"']+).*?denied (?:the )?request:?(.*)",
        answer.message,
        re.DOTALL,
    )
    if not denied:
        return None
    why = _cut(denied[2]) or "it does not say why"
    remedy = "Do as it says, by cluster={'labels': ...} or cluster={'patch': ...}, or use another namespace"
    return _failed(doing, f"the cluster's policy {denied[1]!r} refuses it: {why}", remedy)


def _terminating(answer: Answer, doing: Doing) -> BackendError | None:
    if "because it is being terminated" not in answer.message:
        return None
    return _failed(doing, "the namespace is being deleted", "Use another one, or make it anew once it is gone")


def _not_allowed(answer: Answer, doing: Doing) -> BackendError | None:
    """RBAC. The Role grants all that this library needs: otherwise one refusal would follow the other."""
    if answer.status != FORBIDDEN:
        return None
    found = re.search(r'User "([^"]*)" cannot (\w+) resource "([^"]*)"', answer.message)
    if not found:
        anonymous = "system:anonymous" in answer.message
        remedy = "Log in: the kubeconfig has no credentials" if anonymous else "Ask the administrator"
        return _failed(doing, f"it is forbidden: {_cut(answer.message)}", remedy)
    identity, verb, resource = found.groups()
    if identity == "system:anonymous":
        remedy = "Log in: the kubeconfig has no credentials, or they were not sent"
        return BackendUnavailableError(_text(doing, "the cluster does not know who asks", remedy))
    where = "in all namespaces" if not doing.namespace else f"in the namespace {doing.namespace!r}"
    group = "kubeflow.org" if resource == JOBS else ""
    denied = roles.Right(group=group, resource=resource, verbs=(verb,), without="")
    role = roles.role_yaml(doing.namespace, identity, (*roles.RIGHTS, denied))
    problem = f"{identity} may not {verb} {resource} {where}"
    remedy = f"Somebody who administers it can grant all that kale_dist needs, by 'kubectl apply -f -' of:\n\n{role}"
    return _failed(doing, problem, remedy)


def _missing(answer: Answer, doing: Doing) -> BackendError | None:
    if answer.status != NOT_FOUND:
        return None
    namespace = re.search(r'namespaces "([^"]+)" not found', answer.message)
    if namespace:
        remedy = f"Correct it, or make it: kubectl create namespace {namespace[1]}"
        return _failed(doing, f"there is no namespace {namespace[1]!r}", remedy)
    is_named = bool(answer.reason) and doing.name and f'"{doing.name}" not found' in answer.message
    if doing.resource == JOBS and not is_named:
        problem = "the cluster has no PyTorchJobs: Kubeflow's Training Operator is not installed"
        remedy = f"An administrator installs it by:\n\n    {_INSTALL_OPERATOR}"
        return BackendUnavailableError(_text(doing, problem, remedy))
    kind = JobNotFoundError if doing.resource == JOBS else BackendError
    return kind(_text(doing, _cut(answer.message) or "it is not there", "It may have been deleted meanwhile"))


def _taken(answer: Answer, doing: Doing) -> BackendError | None:
    if answer.status != CONFLICT:
        return None
    if answer.reason == "AlreadyExists":
        what = f"{doing.resource}/{doing.name} is there already"
        if doing.resource == JOBS:
            return JobExistsError(_text(doing, what, f"Give another name, or attach to it: kd.attach({_ref(doing)!r})"))
        return _failed(doing, what, "Delete it, or give the job another name")
    return _failed(doing, f"somebody else changed it meanwhile: {_cut(answer.message)}", "Try again", retryable=True)


def _too_large(answer: Answer, doing: Doing) -> BackendError | None:
    limit = r"(must have at most|may not be more than) \d+ (bytes|characters)|request is too large|etcdserver: request|larger than max|limit is \d+"
    if answer.status == _TOO_LARGE or (answer.status >= BAD_REQUEST and re.search(limit, answer.message)):
        problem = f"it is larger than the cluster takes: {_cut(answer.message)}"
        return _failed(doing, problem, "Give a store (store=), so that less travels in the object itself")
    return None


def _invalid(answer: Answer, doing: Doing) -> BackendError | None:
    if answer.status not in (_INVALID, BAD_REQUEST):
        return None
    fields = "; ".join(f"{field}: {what}" for field, what in answer.causes if field)
    problem = f"the cluster takes it for invalid: {_cut(fields or answer.message)}"
    return _failed(doing, problem, "If cluster={'patch': ...} made that field, correct it; else please report this")


def _busy(answer: Answer, doing: Doing) -> BackendError | None:
    if answer.status != _TOO_MANY:
        return None
    when = f"in {answer.retry_after} s" if answer.retry_after else "in a moment"
    return _failed(doing, "the API server has too many requests (429)", f"Try again {when}", retryable=True)


def _broken(answer: Answer, doing: Doing) -> BackendError | None:
    if answer.status < _SERVER_ERROR:
        return None
    problem = f"the API server has a trouble of its own ({answer.status}): {_cut(answer.message)}"
    return _failed(doing, problem, "Try again; if it lasts, tell the administrator", retryable=True)


_RULES: tuple[Callable[[Answer, Doing], BackendError | None], ...] = (
    _unauthorized,
    _quota,
    _pod_security,
    _webhook,
    _terminating,
    _not_allowed,
    _missing,
    _taken,
    _busy,
    _too_large,
    _invalid,
    _broken,
)
"""The most specific first."""


def _failed(doing: Doing, problem: str, remedy: str, *, retryable: bool = False) -> BackendError:
    return BackendError(_text(doing, problem, remedy), retryable)


def _unavailable(doing: Doing, problem: str, remedy: str) -> BackendUnavailableError:
    return BackendUnavailableError(_text(doing, problem, remedy), retryable=True)


def _text(doing: Doing, problem: str, remedy: str) -> str:
    return f"Cannot {doing}: {problem}. {remedy}"


def _ref(doing: Doing) -> str:
    return f"kubernetes://{doing.namespace}/{doing.name}"


def _cut(text: str) -> str:
    """The cluster's own words on one line, without a full stop, and not whole pages of them."""
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
