"""The image of a job: found on the engine, or pulled."""

from __future__ import annotations

import time
from collections.abc import Callable

import docker.errors

from kale_dist.engine import Engine, explain, explained
from kale_dist.image.for_job import say

_MIB = 1 << 20
_SAY_EACH_S = 2.0

Say = Callable[[str], None]


def is_there(engine: Engine, image: str) -> bool:
    """Whether the engine has the image.

    Raises:
        BackendError: It does not answer.
    """
    with explained(f"looking for the image {image}"):
        try:
            engine.api.inspect_image(image)
        except docker.errors.ImageNotFound:
            return False
    return True


def ensure(engine: Engine, image: str, say: Say = say) -> None:
    """Have an image on the engine. One that is there is not asked for again, as with `docker run`.

    Args:
        engine: Where.
        image: Its reference. Credentials are those of `docker login`.
        say: Is told of the pull.

    Raises:
        BackendError: There is none, or it cannot be pulled; says what to do.
    """
    if is_there(engine, image):
        return
    doing = f"pulling the image {image}"
    said = time.monotonic()
    say(f"The engine does not have the image {image} yet: it is pulled")
    sizes: dict[str, tuple[int, int]] = {}
    with explained(doing):
        for event in engine.api.pull(image, stream=True, decode=True):
            if "error" in event:
                raise explain(docker.errors.DockerException(str(event["error"])), doing)
            detail = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and detail.get("total"):
                sizes[str(event.get("id"))] = int(detail.get("current") or 0), int(detail["total"])
            elif event.get("status") == "Download complete" and str(event.get("id")) in sizes:
                total = sizes[str(event["id"])][1]
                sizes[str(event["id"])] = total, total
            if sizes and time.monotonic() - said > _SAY_EACH_S:
                said = time.monotonic()
                done, total = (sum(values) for values in zip(*sizes.values(), strict=True))
                say(f"{image}: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB")
