"""What the engine says of one job's containers, as frozen values."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from typing import Any

import docker.errors

from kale_dist.backends.docker import containers
from kale_dist.engine import Engine, explained

_ENDED = ("exited", "dead", "removing")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ContainerView:
    """One container."""

    id: str
    name: str
    number: int
    """Which of the job's containers it is."""
    state: str
    """In the engine's words: `created`, `running`, `paused`, `exited`, `dead`, `removing`."""
    exit_code: int | None = None
    """Of one that has ended."""
    oom_killed: bool = False
    """Whether the kernel killed something in it for want of memory."""
    error: str = ""
    """Why it could not be started, in the engine's words."""
    memory_bytes: int = 0
    """Its limit; 0 for none."""

    @property
    def has_started(self) -> bool:
        """Whether it has, or had, a log."""
        return self.state != "created"

    @property
    def is_running(self) -> bool:
        """Whether its processes are there."""
        return self.state in ("running", "paused", "restarting")

    @property
    def has_ended(self) -> bool:
        """Whether it has run and will not run again."""
        return self.state in _ENDED


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """All containers of a job, by number."""

    containers: tuple[ContainerView, ...] = ()
    problem: str = ""
    """Why this is what was seen last; empty if it is what is."""
    was_seen: bool = False
    """Whether the engine has been asked at all."""


def look(engine: Engine, job: str, before: JobView) -> JobView:
    """Ask the engine for a job's containers.

    Args:
        engine: Where.
        job: Its name.
        before: What was seen last: of what has ended nothing changes any more.

    Raises:
        BackendError: The engine does not answer.
    """
    known = {view.id: view for view in before.containers if view.has_ended}
    with explained(f"listing the containers of {job}"):
        found = engine.api.containers(all=True, filters={"label": f"{containers.JOB_LABEL}={job}"})
    views = []
    for item in found:
        identifier, state = item["Id"], str(item.get("State") or "")
        if identifier in known:
            views.append(known[identifier])
        elif state in _ENDED:
            # Somebody may remove it between the list and the look.
            with explained(f"looking at a container of {job}"), contextlib.suppress(docker.errors.NotFound):
                views.append(_inspected(engine.api.inspect_container(identifier)))
        else:
            views.append(
                ContainerView(id=identifier, name=_name(item), number=_number(item.get("Labels") or {}), state=state)
            )
    return JobView(containers=tuple(sorted(views, key=lambda view: view.number)), was_seen=True)


def created(detail: dict[str, Any]) -> float:
    """When a container was made, in seconds since 1970, by the engine's clock."""
    text = str(detail["Created"])
    # Python reads no nanoseconds.
    whole, _, rest = text.partition(".")
    zone = "+00:00" if rest.endswith("Z") or text.endswith("Z") else rest[-6:]
    return dt.datetime.fromisoformat(whole.removesuffix("Z") + zone).timestamp()


def _inspected(detail: dict[str, Any]) -> ContainerView:
    state = detail["State"]
    return ContainerView(
        id=detail["Id"],
        name=str(detail["Name"]).lstrip("/"),
        number=_number(detail["Config"].get("Labels") or {}),
        state=str(state["Status"]),
        exit_code=int(state.get("ExitCode") or 0),
        oom_killed=bool(state.get("OOMKilled")),
        error=str(state.get("Error") or ""),
        memory_bytes=int((detail.get("HostConfig") or {}).get("Memory") or 0),
    )


def _name(item: dict[str, Any]) -> str:
    return str((item.get("Names") or ["?"])[0]).lstrip("/")


def _number(labels: dict[str, str]) -> int:
    try:
        return int(labels[containers.POD_LABEL])
    except (KeyError, ValueError):
        return 0
