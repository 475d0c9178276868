"""Connections to clusters: which one, as whom, in which namespace. One for each kubeconfig and context of a process."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import re
import shutil
import threading
import time
import types
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import urllib3
import yaml
from kubernetes import client
from kubernetes import config as kubeconfig
from kubernetes.client import rest
from kubernetes.config.config_exception import ConfigException
from kubernetes.config.kube_config import KubeConfigMerger
from yaml import YAMLError

from kale_dist import config as settings
from kale_dist.config import Config
from kale_dist.errors import BackendError, BackendUnavailableError, ConfigError
from kale_dist.job import records
from kale_dist.places.kubernetes.explain import api as answers
from kale_dist.wire.blobs import fresh
from kale_dist.wording import closest

CONNECT_S = 10.0
READ_S = 60.0
"""Limits of a request whose caller names none."""

BUSY_S = 20.0
"""How long a request is sent again to an API server that has too many (429), each time after its `Retry-After`."""

_POOL = 64
"""Connections kept open: each watch and each log that is read takes one, and requests come beside them."""

_ACCOUNT = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TOKEN_KEYS = ("BearerToken", "authorization")
"""Names under which versions of the client keep the credentials in their settings."""

_SECRET_KEYS = ("kubeconfig", "config", "value")
"""Keys of a Secret that may hold a kubeconfig: the first that is there, else the Secret's only key."""

_OUTSIDE = ("exec", "auth-provider", "tokenFile", "client-certificate", "client-key", "certificate-authority")
"""Entries of a kubeconfig by which it runs a program, or reads a file of this machine and may send it elsewhere."""

_ANONYMOUS = "system:anonymous"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster that has answered, and a namespace in it. Safe to use from threads."""

    api: client.ApiClient = dataclasses.field(repr=False)
    """Reads its kubeconfig again whenever the file was rewritten: jobs may run longer than a login is valid."""
    core: client.CoreV1Api = dataclasses.field(repr=False)
    custom: client.CustomObjectsApi = dataclasses.field(repr=False)
    authorization: client.AuthorizationV1Api = dataclasses.field(repr=False)
    namespace: str
    server: str
    """URL of the API server."""
    identity: str
    """This user, as the API server names it; empty where it does not."""
    context: str = ""
    """Name of the kubeconfig's context; empty in a pod."""
    in_cluster: bool = False
    """Whether it is reached by the service account of the pod that this process runs in."""

    def token(self) -> str:
        """The header `Authorization`, as fresh as it can be had; empty with a client certificate. Never to be shown."""
        if isinstance(self.api, _Client):
            self.api.renew()
        for key in _TOKEN_KEYS:
            found: str | None = self.api.configuration.get_api_key_with_prefix(key)
            if found:
                return found
        basic: str | None = self.api.configuration.get_basic_auth_token() if self.api.configuration.username else None
        return basic or ""


def connect(namespace: str = "", context: str = "", config: Config | None = None, *, secret: str = "") -> Cluster:
    """The cluster that a call means.

    Args:
        namespace: Empty for the configured one, that of the context, or the pod's own.
        context: Empty for the configured one, or the current one of the kubeconfig.
        config: In place of the configured settings.
        secret: Name of a Secret with the kubeconfig of another cluster, in the namespace that a call without it means.

    Raises:
        ConfigError: There is no such kubeconfig, Secret or context.
        BackendUnavailableError: No cluster is known, or it does not answer.
        BackendError: It does not accept this user.
    """
    config = settings.load() if config is None else config
    source = _source_in(secret, config, context) if secret else _source(config, context or config.context)
    with _lock:
        found = _connections.get(source)
        if found is None:
            found = _connections[source] = _open(source)
            # Jobs remember the context by its name.
            _connections[dataclasses.replace(source, context=found.context)] = found
    # What is configured, and this pod, are of one's own cluster.
    configured, pod_s = ("", "") if secret else (config.namespace, own_namespace())
    return dataclasses.replace(found, namespace=namespace or configured or found.namespace or pod_s or "default")


def disconnect() -> None:
    """Close all connections that are idle, and forget them."""
    with _lock:
        found = list(_connections.values())
        _connections.clear()
    for cluster in found:
        cluster.api.rest_client.pool_manager.clear()


def own_namespace() -> str:
    """The namespace of the pod that this process runs in; empty elsewhere."""
    with contextlib.suppress(OSError):
        return (_ACCOUNT / "namespace").read_text().strip()
    return ""


# -- inside ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Where credentials come from. A kubeconfig that was rewritten is another source."""

    files: str = ""
    """Paths of the kubeconfig as `$KUBECONFIG` has them; empty for the pod's service account."""
    stamps: tuple[tuple[int, int], ...] = ()
    context: str = ""


_lock = threading.Lock()
_connections: dict[_Source, Cluster] = {}


_Api = TypeVar("_Api")

_REVIEW = re.compile(r"/selfsubject\w*reviews$")


def _unchecked(api: _Api) -> _Api:
    """An API without the checks of arguments that pydantic puts around its methods.

    They lie below each request as frames of Rust. When a process ends while a thread of it waits there, Python 3.11 aborts:
    it cannot unwind them.
    """
    for name in dir(type(api)):
        if not name.startswith("_") and (plain := getattr(getattr(type(api), name), "__wrapped__", None)) is not None:
            setattr(api, name, types.MethodType(plain, api))
    return api


class Patience:
    """Waits for an API server that has too many requests (429), each time as long as it asks, `BUSY_S` in all."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + BUSY_S

    def waited(self, headers: Mapping[str, str]) -> bool:
        """Wait as long as the refusal's headers ask; return false if that is too long.

        The server refuses before it reads what is asked, so a POST can be sent again, too.
        """
        wished = headers.get("retry-after", "")
        pause_s = max(1, int(wished)) if wished.isdecimal() else 1
        if time.monotonic() + pause_s > self._deadline:
            return False
        time.sleep(pause_s)
        return True


class _TimedRest(rest.RESTClientObject):
    """Gives each request a limit, since the client's own wait forever behind a silent proxy, and waits for a server that is busy."""

    def request(self, method: str, url: str, *, _request_timeout: Any = None, **options: Any) -> Any:  # type: ignore[override]
        options["_request_timeout"] = (CONNECT_S, READ_S) if _request_timeout is None else _request_timeout
        patience = Patience()
        while (answer := self._send(method, url, options)).status == HTTPStatus.TOO_MANY_REQUESTS:
            if not patience.waited(answer.headers):
                break
            answer.response.drain_conn()
        return answer

    def _send(self, method: str, url: str, options: dict[str, Any]) -> Any:
        try:
            return super().request(method, url, **options)  # type: ignore[no-untyped-call]
        except (urllib3.exceptions.HTTPError, OSError):
            # urllib3 repeats what only reads, when a kept connection turns out to be closed. So does a review, by POST.
            if method != "POST" or not _REVIEW.search(url):
                raise
            return super().request(method, url, **options)  # type: ignore[no-untyped-call]


class _Client(client.ApiClient):
    """Sends requests with the credentials that its kubeconfig has at the time.

    Args:
        configuration: Filled from the kubeconfig.
        source: The kubeconfig; that of a pod's service account is kept fresh by the kubernetes client itself.
    """

    def __init__(self, configuration: client.Configuration, source: _Source) -> None:
        super().__init__(configuration)
        self.rest_client = _TimedRest(configuration)
        self._source = source
        self._renewing = threading.Lock()

    def renew(self) -> None:
        """Use the new credentials if the kubeconfig was rewritten. One that cannot be read changes nothing."""
        if not self._source.files:
            return
        with self._renewing:
            stamps = _stamps(self._source.files.split(os.pathsep))
            if stamps == self._source.stamps:
                return
            fresh = client.Configuration()
            with contextlib.suppress(ConfigError, BackendUnavailableError):
                _load_kubeconfig(self._source, fresh)
                self._source = dataclasses.replace(self._source, stamps=stamps)
                if fresh.host == self.configuration.host:
                    self._take_over(fresh)

    def _take_over(self, fresh: client.Configuration) -> None:
        known = self.configuration
        known.api_key, known.refresh_api_key_hook = fresh.api_key, fresh.refresh_api_key_hook
        certificates = [(known, name, getattr(fresh, name)) for name in ("ssl_ca_cert", "cert_file", "key_file")]
        if any(getattr(settings, name) != value for settings, name, value in certificates):
            for settings, name, value in certificates:
                setattr(settings, name, value)
            # Connections keep the certificates with which they were made.
            self.rest_client = _TimedRest(known)

    def update_params_for_auth(self, *args: Any, **options: Any) -> None:
        """Put the credentials into a request."""
        self.renew()
        super().update_params_for_auth(*args, **options)


def _source(config: Config, context: str) -> _Source:
    named = config.kubeconfig or os.environ.get("KUBECONFIG", "")
    files = [os.path.expanduser(name) for name in (named or "~/.kube/config").split(os.pathsep) if name]  # noqa: PTH111 - pathlib raises for a user without a home
    stamps = _stamps(files)
    if stamps:
        return _Source(files=os.pathsep.join(files), stamps=stamps, context=context)
    if named and config.kubeconfig:
        origin = dict(config.origins).get("kubeconfig", "config")
        raise ConfigError("kubeconfig", f"there is no file {named} (set by {origin})", "Correct the path")
    if "KUBERNETES_SERVICE_HOST" in os.environ and (_ACCOUNT / "token").exists():
        if context:
            raise ConfigError(
                "context", f"there is no kubeconfig that could have a context {context!r}", "Leave it out"
            )
        return _Source()
    if named:
        raise ConfigError("KUBECONFIG", f"there is no file {named}", "Correct the variable, or unset it")
    raise BackendUnavailableError(
        "No cluster is known: there is no ~/.kube/config, KUBECONFIG is not set, and this is not a pod with a service "
        "account's token. Get a kubeconfig from the cluster's administrator or provider; 'kubectl get nodes' shows whether it "
        "works. For a notebook in a pod, give the pod an account: kale-dist run --in-cluster --pod service_account NAME"
    )


def _source_in(secret: str, config: Config, context: str) -> _Source:
    """A kubeconfig out of a Secret, as a private file. It may name neither programs nor files: those of this machine are not the Secret's."""
    own = connect(config=config)
    try:
        with answers.asking("get", "secrets", own.namespace, secret):
            data = own.core.read_namespaced_secret(secret, own.namespace).data or {}
    except BackendError as error:
        if answers.status_of(error.__context__ or error) != answers.NOT_FOUND:
            raise
        problem = f"there is no Secret {secret!r} in the namespace {own.namespace!r}, the one that is configured here"
        make = f"kubectl -n {own.namespace} create secret generic {secret} --from-file={_SECRET_KEYS[0]}=PATH"
        raise ConfigError("cluster_secret", problem, f"Make it there ({make}), or set KALE_DIST_NAMESPACE") from None
    key = next((key for key in _SECRET_KEYS if key in data), next(iter(data), "") if len(data) == 1 else "")
    where = f"the Secret {secret!r} of the namespace {own.namespace!r}"
    if not key:
        raise ConfigError(
            "cluster_secret", f"{where} has no kubeconfig", f"Put it there by the key {_SECRET_KEYS[0]!r}"
        )
    text = base64.b64decode(data[key])
    try:
        whole = yaml.safe_load(text)
        entries = [*(one["user"] for one in whole["users"]), *(one["cluster"] for one in whole["clusters"])]
        outside = [name for name in _OUTSIDE if any(name in entry for entry in entries)]
    except (YAMLError, KeyError, TypeError) as error:
        problem = f"{key!r} of {where} is not a kubeconfig ({type(error).__name__})"
        raise ConfigError("cluster_secret", problem, "Put a kubeconfig there, with a token or a certificate") from None
    if outside:
        remedy = "Put one there that has its token, or its certificates as `...-data`, in itself"
        problem = f"the kubeconfig in {where} has {outside[0]!r}, a program or a file of this machine"
        raise ConfigError("cluster_secret", problem, remedy)
    file = records.state_dir() / f"cluster-{hashlib.sha256(text).hexdigest()[:16]}"
    if not file.exists():
        with fresh(file) as part:
            part.touch(mode=0o600)
            part.write_bytes(text)
    return _Source(files=str(file), stamps=_stamps([str(file)]), context=context)


def _stamps(files: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Values that change when one of these files is rewritten, for those that exist."""
    stamps = []
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(file)  # noqa: PTH116 - one call for both numbers
            stamps.append((found.st_mtime_ns, found.st_ino))
    return tuple(stamps)


def _open(source: _Source) -> Cluster:
    configuration = client.Configuration()
    namespace, context = "", ""
    if source.files:
        namespace, context = _load_kubeconfig(source, configuration)
    else:
        try:
            kubeconfig.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            raise BackendUnavailableError(f"The pod's service account cannot be used: {error}") from error
    configuration.connection_pool_maxsize = _POOL
    # `_TimedRest` decides how long to wait. Otherwise urllib3 asks again by itself, and sleeps as long as a 429 asks.
    configuration.retries = urllib3.Retry(
        total=1, connect=1, read=1, redirect=0, status=0, other=0, respect_retry_after_header=False
    )
    # At this level the client writes down whole responses, and among them are Secrets.
    log = logging.getLogger("kubernetes.client.rest")
    log.setLevel(max(log.level, logging.INFO))
    # The same context from here on, also when the kubeconfig's current one is another.
    api = _Client(configuration, dataclasses.replace(source, context=context))
    return Cluster(
        api=api,
        core=_unchecked(client.CoreV1Api(api)),
        custom=_unchecked(client.CustomObjectsApi(api)),
        authorization=_unchecked(client.AuthorizationV1Api(api)),
        namespace=namespace,
        server=configuration.host,
        identity=_identity(api, configuration.host),
        context=context,
        in_cluster=not source.files,
    )


def _load_kubeconfig(source: _Source, configuration: client.Configuration) -> tuple[str, str]:
    """Fill the client's settings from the kubeconfig.

    Returns:
        The context's namespace, which may be empty, and its name.
    """
    try:
        merged = KubeConfigMerger(source.files).config  # type: ignore[no-untyped-call]
        whole: Mapping[str, Any] = merged.value if merged is not None else {}
    except (ConfigException, YAMLError, OSError, AttributeError, TypeError, KeyError) as error:
        problem = f"{source.files} cannot be read as a kubeconfig: {' '.join(str(error).split())}"
        raise ConfigError("kubeconfig", problem, "Repair it, or name another one") from None
    contexts = _named(whole, "contexts")
    name = source.context or whole.get("current-context") or ""
    if name not in contexts:
        there = f"{closest(name, contexts)}It has: {', '.join(contexts) or 'none at all'}"
        problem = f"{source.files} has no context {name!r}" if name else f"{source.files} has no current context"
        raise ConfigError("context", problem, there)
    chosen = contexts[name].get("context") or {}
    user = _named(whole, "users").get(str(chosen.get("user")), {}).get("user") or {}
    plugin = (user.get("exec") or {}).get("command", "")
    if plugin and shutil.which(plugin) is None and not pathlib.Path(plugin).is_file():
        hint = " ".join(str((user["exec"].get("installHint")) or "Install it, or put its folder into PATH").split())
        raise BackendUnavailableError(
            f"The kubeconfig's context {name!r} gets its credentials from the program {plugin!r}, which is not "
            f"installed on this machine. {hint}"
        )
    try:
        kubeconfig.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=source.files, context=name, client_configuration=configuration
        )
    except (ConfigException, OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"the context {name!r} of {source.files} cannot be used: {' '.join(str(error).split())}"
        raise ConfigError("kubeconfig", problem, "Repair it, or name another context") from None
    if plugin and not configuration.cert_file and not any(configuration.api_key.get(key) for key in _TOKEN_KEYS):
        raise BackendUnavailableError(
            f"The program {plugin!r}, from which the kubeconfig's context {name!r} gets its credentials, gave none. "
            "Run 'kubectl get nodes' in a terminal: it shows what the program says, which is often a login that expired"
        )
    return str(chosen.get("namespace") or ""), name


def _named(whole: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The entries of a kubeconfig's list by their names; malformed entries are left out."""
    entries = (getattr(node, "value", None) for node in whole.get(kind) or ())
    return {str(entry["name"]): entry for entry in entries if isinstance(entry, Mapping) and "name" in entry}


def _identity(api: client.ApiClient, server: str) -> str:
    """The user name that the API server knows this user by. As the first request, it also shows whether the cluster answers."""
    with answers.asking("reach", server):
        try:
            review = _unchecked(client.AuthenticationV1Api(api)).create_self_subject_review(
                client.V1SelfSubjectReview()
            )
        except client.ApiException as error:
            # Before Kubernetes 1.28 there is no such review.
            is_absent = error.status in (answers.FORBIDDEN, answers.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
            if is_absent and _ANONYMOUS not in str(error.body):
                return ""
            raise
    user = review.status.user_info if review.status is not None else None
    return str(user.username or "") if user is not None else ""
