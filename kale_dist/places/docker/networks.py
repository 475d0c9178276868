"""Networks of Docker jobs: several containers of a job get one of their own, which no other container reaches."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network
from typing import Any

import docker.errors
import docker.types

from kale_dist.errors import warn
from kale_dist.image.engine import Engine, explained
from kale_dist.job.spec.job_spec import JobSpec
from kale_dist.places.docker.containers import JOB_LABEL, NETWORK, RUN_LABEL, network_name

_RANGE_LABEL = "kale-dist.range"
"""The range of addresses that the engine gave to a network of the usual size: jobs divide it."""

_NOT_CONTAINERS = 3
"""Addresses of a network that no container gets: the first, the gateway's, and the last."""

_CONFLICT = 409
_TRIES, _PAUSE_S, _CHOICE = 10, 0.2, 64
"""Others may take the same addresses at the same time: each takes one of the first parts by chance, and tries again after a moment."""


def ensure(engine: Engine, spec: JobSpec, life: int) -> str:
    """Create the network that a job needs, if the engine has none of its name; gives its name.

    Several containers get one of their own. The others share one: a single container, as its processes talk to each other within it, and
    those of Podman, whose networks reach each other. It is never removed, because another job may be starting.

    Raises:
        BackendError: It cannot be created.
    """
    name = network_name(spec, life)
    if name != NETWORK and not engine.is_podman:
        try:
            _create_own(engine, name, spec, life)
        except docker.errors.APIError as error:
            reason = error.explanation or error
            warn(f"The containers share the network {NETWORK} with those of other jobs: none could be made ({reason})")
        else:
            return name
    with explained(f"creating the network {NETWORK}"):
        with contextlib.suppress(docker.errors.NotFound):
            engine.api.inspect_network(NETWORK)
            return NETWORK
        try:
            engine.api.create_network(NETWORK, driver="bridge", check_duplicate=True)
        except docker.errors.APIError as error:
            if error.status_code != _CONFLICT:
                raise
    return NETWORK


def remove(engine: Engine, job: str, life: int) -> None:
    """Remove the network of a job, unless a running container is in it.

    Raises:
        BackendError: The engine does not list its networks.
    """
    with explained(f"looking for the network of {job}"):
        found = engine.api.networks(filters={"label": [f"{JOB_LABEL}={job}", f"{RUN_LABEL}={life}"]})
    for each in found:
        with contextlib.suppress(docker.errors.APIError):
            engine.api.remove_network(each["Id"])


def _create_own(engine: Engine, name: str, spec: JobSpec, life: int) -> None:
    """Create a network with few addresses: of the usual size, an engine has ranges for about 30."""
    labels = {JOB_LABEL: spec.name, RUN_LABEL: str(life)}
    prefix = 32 - (spec.topology.number_of_pods + _NOT_CONTAINERS - 1).bit_length()
    for tries_left in reversed(range(_TRIES)):
        there = engine.api.networks()
        if any(each["Name"] == name for each in there):
            # The name of this job is taken: the container that is made next is refused for it.
            return
        ranges = {each["Labels"][_RANGE_LABEL] for each in there if _RANGE_LABEL in (each["Labels"] or {})}
        taken = [subnet for each in there for subnet in _subnets(each)]
        parts = ((whole, part) for whole in sorted(ranges) for part in _parts(whole, prefix, taken))
        free = list(itertools.islice(parts, _CHOICE))
        try:
            whole, part = random.choice(free or _new_parts(engine, name, prefix, labels))  # noqa: S311 - no secret
            pool = docker.types.IPAMConfig(pool_configs=[docker.types.IPAMPool(subnet=part)])
            labelled = labels | {_RANGE_LABEL: whole}
            engine.api.create_network(name, driver="bridge", ipam=pool, labels=labelled, check_duplicate=True)
        except docker.errors.APIError:
            if not tries_left:
                raise
            time.sleep(random.uniform(0, _PAUSE_S))  # noqa: S311 - no secret
        else:
            return


def _new_parts(engine: Engine, name: str, prefix: int, labels: dict[str, str]) -> list[tuple[str, str]]:
    """Parts of a range that no network has: the engine chooses it for a network of the usual size, which is removed."""
    made = engine.api.create_network(f"{name}-range", driver="bridge", labels=labels)["Id"]
    try:
        whole = str(_subnets(engine.api.inspect_network(made))[0])
    finally:
        engine.api.remove_network(made)
    return [(whole, part) for part in itertools.islice(_parts(whole, prefix, []), _CHOICE)]


def _parts(whole: str, prefix: int, taken: Sequence[IPv4Network]) -> Iterator[str]:
    """Parts of a range, of at least this size where it is not smaller, that no network has."""
    found = IPv4Network(whole)
    parts = found.subnets(new_prefix=max(prefix, found.prefixlen))
    return (str(part) for part in parts if not any(part.overlaps(other) for other in taken))


def _subnets(network: Mapping[str, Any]) -> list[IPv4Network]:
    given = [each.get("Subnet", "") for each in network["IPAM"]["Config"] or ()]
    return [IPv4Network(subnet) for subnet in given if subnet and ":" not in subnet]
