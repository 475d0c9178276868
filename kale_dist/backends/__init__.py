"""Where jobs run. A backend is imported when it is first asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable

from kale_dist.backends.base import Backend, Place
from kale_dist.errors import ConfigError
from kale_dist.wording import install

NAMES = ("local", "docker", "kubernetes")
"""The words that `on=` takes."""

_ENGINE_PACKAGES = ("docker", "requests", "urllib3")
_CLIENT_PACKAGES = ("kubernetes", "websocket", "yaml")


def get(name: str) -> Backend:
    """The backend of a name, one instance for the whole process.

    Raises:
        KeyError: There is none of this name.
        ConfigError: A package that it needs is not installed.
    """
    if name == "local":
        from kale_dist.backends import local

        return local.shared()
    if name == "docker":
        try:
            from kale_dist.backends.docker.place import DockerPlace
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _ENGINE_PACKAGES:
                raise
            problem = f"'docker' needs the package {package!r}, which is not installed in this Python"
            raise ConfigError("on", problem, f"Install it: {install('docker')}") from None
        return _followed(DockerPlace)
    if name == "kubernetes":
        try:
            from kale_dist.backends.kubernetes.place import KubernetesPlace
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _CLIENT_PACKAGES:
                raise
            problem = f"'kubernetes' needs the package {package!r}, which is not installed in this Python"
            raise ConfigError("on", problem, f"Install it: {install('kubernetes')}") from None
        return _followed(KubernetesPlace)
    raise KeyError(name)


@functools.cache
def _followed(place: Callable[[], Place]) -> Backend:
    from kale_dist.following.backend import FollowedBackend

    return FollowedBackend(place())
