"""Before a job is planned: what its specification leaves open is settled, and the cluster is asked whether it would run."""

from __future__ import annotations

import dataclasses
import pathlib

from kale_dist import config, records
from kale_dist.backends.kubernetes import client, preflight, self_pod, submission
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.preflight import Findings, Wanted
from kale_dist.backends.kubernetes.self_pod import SelfPod
from kale_dist.blobs import FolderStore, Store
from kale_dist.config import Config
from kale_dist.errors import BackendError, ConfigError, warn
from kale_dist.pod_order import Source
from kale_dist.runtime import loading
from kale_dist.spec import JobSpec, VolumeKind
from kale_dist.url_store import UrlStore

_MIB = 1 << 20
_LONG_S = 3600.0


def prepare(spec: JobSpec, *, submit: bool) -> JobSpec:
    """Settle a specification.

    Args:
        spec: As the call gave it.
        submit: Whether a submission follows. Otherwise a cluster that cannot be reached is done without.

    Returns:
        The specification with namespace, image, form of the job, user and store.

    Raises:
        ConfigError: There is no image.
        BackendError: The job could not run; the message says why.
    """
    configured = config.load()
    cluster = _reach(spec, required=submit)
    own = self_pod.find(cluster) if cluster is not None else None
    options = spec.cluster
    settled = dataclasses.replace(
        spec,
        image=_image(spec, configured, own),
        store=spec.store or configured.store or (_own_volume(own) if own is not None else ""),
        cluster=dataclasses.replace(
            options,
            namespace=cluster.namespace if cluster is not None else options.namespace or configured.namespace or "default",
            service_account=options.service_account or configured.service_account,
            queue=options.queue or configured.queue,
            image_pull_secrets=options.image_pull_secrets or configured.image_pull_secrets,
            run_as_user=_user(options.run_as_user, own),
        ),
    )
    if cluster is None:
        return settled
    findings = preflight.check(cluster, wanted(settled))
    if submit:
        _tell(findings, settled)
    return _fit(settled, findings)
