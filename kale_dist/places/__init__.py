"""Where jobs run. A backend is imported when it is first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable

from kale_dist.job.backend import Backend, Place
from kale_dist.wording import needing

NAMES = ("local", "docker", "kubernetes")
"""The words that `on=` takes."""


def get(name: str) -> Backend:
    """The backend of a name, one instance for the whole process.

    Raises:
        KeyError: There is none of this name.
        ConfigError: A package that it needs is not installed.
    """
    if name == "local":
        from kale_dist.places import local

        return local.shared()
    if name == "docker":
        with needing(name, "on", repr(name)):
            from kale_dist.places.docker.docker_place import DockerPlace
        return _followed(DockerPlace)
    if name == "kubernetes":
        with needing(name, "on", repr(name)):
            from kale_dist.places.kubernetes.kubernetes_place import KubernetesPlace
        return _followed(KubernetesPlace)
    raise KeyError(name)


@functools.cache
def _followed(place: Callable[[], Place]) -> Backend:
    from kale_dist.places.following.followed_backend import FollowedBackend

    return FollowedBackend(place())
