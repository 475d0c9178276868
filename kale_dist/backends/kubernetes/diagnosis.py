"""From what the cluster says to one sentence with a remedy. Pure; the sentences are in `troubles`."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import string
from collections.abc import Mapping

from kale_dist import quantities
from kale_dist.backends.kubernetes import troubles
from kale_dist.backends.kubernetes.troubles import Place, Trouble
from kale_dist.backends.kubernetes.views import MAIN, ContainerView, JobView, PodView

_DETAIL_CHARACTERS = 300
_GAVE_UP = 70
"""Exit code of an agent that could not begin, as `runtime.termination` has it."""

_TOLD_TO_END = (137, 143)
"""Exit codes of a container whose pod is deleted: SIGTERM, and SIGKILL when it does not heed it."""

_NOT_RETRIED = re.compile(r'^(Error creating: |Back-off pulling image "[^"]*": |(Err)?ImagePull: )+')
_SCHEDULER_SAYS = re.compile(r"^\w+: \d+/(?P<all>\d+) nodes? (is|are) available: (?P<groups>.*?)(\. |\.?$)", re.DOTALL)
_WORDS = (
    (re.compile(r"Insufficient (\S+)"), r"too little free \1"),
    (re.compile(r"node\(s\) had untolerated taint(\(s\))?( \{(?P<taint>.*?)\})?"), r"a taint that the pod does not tolerate"),
    (re.compile(r"node\(s\) didn't match Pod's node affinity(/selector)?"), "other labels than asked for"),
    (re.compile(r"node\(s\) (didn't match PersistentVolume's node affinity|had volume node affinity conflict)"),
     "no way to the volume"),
    (re.compile(r"node\(s\) were unschedulable"), "been closed"),
    (re.compile(r"node\(s\) unavailable due to PersistentVolumeClaim with ReadWriteOncePod.*"), "another pod with the claim"),
    (re.compile(r"Too many pods"), "as many pods as it can hold"),
)  # fmt: skip
"""The scheduler's words for a group of nodes, and what follows "n has" or "n have" in ours."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A trouble that was recognised."""

    trouble: Trouble
    sentence: str
    """Without a full stop."""
    remedy: str
    """Without a full stop."""
    pod: PodView | None = None
    """The pod it is about; None for the whole job."""

    @property
    def text(self) -> str:
        """Both sentences, for people."""
        stop = "" if self.sentence.endswith(".") else "."
        return f"{self.sentence[:1].upper()}{self.sentence[1:]}{stop} {self.remedy}."


def hindrance(pod: PodView, view: JobView) -> Finding | None:
    """What keeps a pod from running; None if nothing is known to, or if it runs or has ended."""
    if pod.has_ended or pod.is_running:
        return None
    if pod.scheduling and not pod.node:
        return _find(Place.SCHEDULING, pod.scheduling, pod, view, _scheduling_facts(pod))
    for container in pod.containers:
        said = f"{container.reason}: {container.message}"
        if container.is_init and container.state == "running" and container.name == "init-pytorch":
            return _named("waits-for-master", pod, view, container=container)
        if container.state == "terminated" and (container.is_init or container.name == MAIN) and container.exit_code:
            # The pause before another start begins a little later.
            found = _find(Place.ENDED, said, pod, view, container=container)
            return found if found is not None and not container.is_init else None
        if container.state == "waiting":
            pulling = _last_event(pod, view, "Failed") if container.reason == "ImagePullBackOff" else ""
            found = _find(Place.WAITING, f"{said} {pulling}", pod, view, container=container)
            if found is not None:
                return found
    said = _last_event(pod, view)
    return _find(Place.POD_EVENT, said, pod, view, {"detail": _detail(said)}) if said else None


def progress(pod: PodView, view: JobView) -> str:
    """What a pod without a hindrance does before it runs, as a part of a sentence."""
    if not pod.node:
        return "waits for a node"
    mine = [event for event in view.events if event.object_uid == pod.uid]
    last = max(mine, key=lambda event: event.time, default=None)
    if last is not None and last.reason == "Pulling":
        return f"pulls the image {pod.main.image} on node {pod.node}"
    return f"is being prepared on node {pod.node}"


def end(pod: PodView, view: JobView, *, is_over: bool = False) -> Finding | None:
    """Why a pod has failed; None if it has not.

    Args:
        pod: The pod.
        view: Its job.
        is_over: Whether the agents have ended the job. A pod that the cluster ends need not be gone then: it may still
            take what is left of its grace period, and the node its time to say so.
    """
    main = pod.main
    said = f"{pod.reason}: {pod.message}"
    if pod.disruption and (found := _find(Place.DISRUPTION, pod.disruption, pod, view)):
        return found if pod.has_ended or (is_over and pod.is_ending) else None
    # Before the containers: they only know of a signal.
    if pod.phase == "Failed" and pod.reason and (found := _find(Place.POD, said, pod, view, {"detail": _detail(said)})):
        return found
    for container in pod.containers:
        if container.is_init and container.state == "terminated" and container.exit_code and pod.phase == "Failed":
            return _find_end(container, pod, view) or _named("init-failed", pod, view, container=container)
    if main.exit_code in _TOLD_TO_END and (pod.is_ending or pod.is_gone):
        return _named("pod-deleted", pod, view)
    if main.exit_code == _GAVE_UP and main.message:
        said = _cut(main.message.removeprefix("kale_dist: "))
        return _named("agent-gave-up", pod, view, {"said": said})
    if main.state == "terminated" and main.exit_code:
        return _find_end(main, pod, view) or _named("ended", pod, view, container=main)
    if pod.is_gone and pod.has_started and not main.exit_code == 0:  # noqa: SIM201 - None is not an end without fault
        return _named("pod-deleted", pod, view)
    if pod.phase == "Failed":
        return _find(Place.POD, said, pod, view, {"detail": _detail(said) or "nobody says why"})
    return None


def refusal(view: JobView, expected: int) -> Finding | None:
    """Why the operator has not made all pods of the job; None if it has, or if nobody says."""
    there = [pod for pod in view.latest_pods if not pod.is_gone]
    uid = ((view.job or {}).get("metadata") or {}).get("uid", "")
    events = [
        event
        for event in view.events
        if event.object_uid == uid and event.is_warning and "FailedCreate" in event.reason
    ]
    if len(there) >= expected or not events:
        return None
    said = _NOT_RETRIED.sub("", events[-1].message)
    name = re.search(r'(?:pods|services) "([^"]+)"', said)
    rest = expected - len(there)
    what = f"pod {name[1]}" if name else "the job's pod" if expected == 1 else f"{rest} of {expected} pods"
    missing = f"{what} cannot be made"
    facts = {"missing": missing, "detail": _cut(said)}
    return _find(Place.JOB_EVENT, f"{events[-1].reason}: {said}", None, view, facts)


def sidecar(pod: PodView, view: JobView) -> Finding | None:
    """What keeps a pod alive whose ranks have ended."""
    if pod.is_gone or pod.phase in ("Succeeded", "Failed") or pod.main.state != "terminated":
        return None
    others = [item.name for item in pod.containers if item.name != MAIN and item.state == "running"]
    return _named("sidecar", pod, view, {"sidecar": " and ".join(others)}) if others else None


def of_job(name: str, view: JobView, facts: Mapping[str, str]) -> Finding:
    """A trouble of the whole job by its name in the table."""
    return _named(name, None, view, facts)


# -- inside ----------------------------------------------------------------------------------------------------------


def _find(
    place: Place,
    said: str,
    pod: PodView | None,
    view: JobView,
    facts: Mapping[str, str] | None = None,
    container: ContainerView | None = None,
) -> Finding | None:
    found = troubles.match(place, said, "" if container is None else container.name)
    if found is None:
        return None
    trouble, groups = found
    given = dict(facts or {})
    wanted = groups.get("resource")
    if wanted is not None and pod is not None:
        given |= _resource_facts(wanted, pod, view)
    return _finding(trouble, pod, view, groups | given, container)


def _find_end(container: ContainerView, pod: PodView, view: JobView) -> Finding | None:
    return _find(Place.ENDED, f"{container.reason}: {container.message}", pod, view, container=container)


def _named(
    name: str,
    pod: PodView | None,
    view: JobView,
    facts: Mapping[str, str] | None = None,
    container: ContainerView | None = None,
) -> Finding:
    return _finding(troubles.named(name), pod, view, facts or {}, container)


class _Facts(dict[str, str]):
    """A fact that nobody knows leaves a gap in words, never an error on the way to a user."""

    def __missing__(self, name: str) -> str:
        return "an unknown " + name.replace("_", " ")


def _finding(
    trouble: Trouble, pod: PodView | None, view: JobView, facts: Mapping[str, str], container: ContainerView | None
) -> Finding:
    known = _Facts({"namespace": view.namespace, "job": view.name, "claim_said": "", "cluster_has": "", "nodes": ""})
    if pod is not None:
        known |= _pod_facts(pod, view, pod.main if container is None else container)
    known |= {name: _cut(value) for name, value in facts.items()}
    format_ = string.Formatter()
    return Finding(
        trouble=trouble,
        sentence=format_.vformat(trouble.sentence, (), known),
        remedy=format_.vformat(trouble.remedy, (), known),
        pod=pod,
    )


def _pod_facts(pod: PodView, view: JobView, container: ContainerView) -> dict[str, str]:
    claims = " or ".join(pod.claims) or "of an unknown name"
    about_claims = [event for event in view.events if event.kind == "PersistentVolumeClaim" and event.is_warning]
    last = container.last_message or (container.message if container.exit_code is not None else "")
    exit_code = container.exit_code if container.exit_code is not None else container.last_exit_code
    return {
        "pod": f"pod {pod.name}",
        "pod_name": pod.name,
        "node": pod.node or "of an unknown name",
        "container": container.name,
        "image": container.image,
        "claims": claims,
        "claim_said": f" ({_cut(about_claims[-1].message)})" if about_claims else "",
        "memory_limit": dict(container.limits).get("memory", "the node's whole memory"),
        "restarts": str(container.restarts),
        "last_exit": _exit(exit_code),
        "exit": _exit(container.exit_code),
        "last_said": f"; it said: {_last_line(last)}" if last else "",
        "disruption": pod.disruption.partition(":")[0],
        "detail": _detail(f"{container.reason}: {container.message}"),
    }


def _exit(code: int | None) -> str:
    if code is None:
        return "an exit code that nobody kept"
    # A shell and the container runtime say so of a process that a signal ended.
    signals = {
        128 + number: name for number, name in ((6, "SIGABRT"), (9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM"))
    }
    return f"exit code {code}" + (f" ({signals[code]})" if code in signals else "")


def _scheduling_facts(pod: PodView) -> dict[str, str]:
    """The scheduler's message in words; its second half, about preemption, helps nobody."""
    found = _SCHEDULER_SAYS.match(pod.scheduling)
    if found is None:
        return {"nodes": _detail(pod.scheduling)}
    parts = []
    for group in found["groups"].split(", "):
        count, _, rest = group.partition(" ")
        for words, ours in _WORDS:
            if count.isdigit() and (said := words.match(rest)):
                parts.append(f"{count} {'has' if count == '1' else 'have'} {said.expand(ours)}")
                break
        else:
            parts.append(group)
    return {"nodes": f"of {found['all']} node{'s' * (found['all'] != '1')}, {' and '.join(parts)}"}


def _resource_facts(resource: str, pod: PodView, view: JobView) -> dict[str, str]:
    """How much a pod wants of something, and how much the cluster has."""
    wanted = dict(pod.main.requests).get(resource) or dict(pod.main.limits).get(resource) or "some"
    if not view.nodes:
        return {"wanted": wanted}
    amounts = [
        amount for node in view.nodes if (amount := _amount(dict(node.allocatable).get(resource, "0"), resource))
    ]
    if not amounts:
        return {"wanted": wanted, "cluster_has": "; the cluster has none at all"}
    if resource == "memory":
        return {"wanted": wanted, "cluster_has": f"; the largest node has {max(amounts):.1f} GiB in all"}
    return {
        "wanted": wanted,
        "cluster_has": f"; the cluster has {sum(amounts):g} in all, the largest node {max(amounts):g}",
    }


def _amount(text: str, resource: str) -> float:
    with contextlib.suppress(ValueError):
        return quantities.memory_gib(text) if resource == "memory" else quantities.cores(text)
    return 0.0


def _last_event(pod: PodView, view: JobView, reason: str = "") -> str:
    """What was said last about a pod, if that was a warning: a later word without warning shows that it has healed."""
    mine = [event for event in view.events if event.object_uid == pod.uid and reason in ("", event.reason)]
    # What is said in one second has no order; then a warning counts, and not that the pod got its node.
    last = max(mine, key=lambda event: (event.time, event.is_warning), default=None)
    return f"{last.reason}: {last.message}" if last is not None and last.is_warning else ""


def _detail(said: str) -> str:
    """The cluster's own words without their repetitions."""
    reason, _, message = said.partition(": ")
    message = _NOT_RETRIED.sub("", message)
    # The runtime puts the steps in front of one another; the last ones say what was wrong.
    parts = message.split(": ")
    return _cut(
        ": ".join(parts[-3:]) if reason.startswith(("ErrImagePull", "ImagePull", "StartError")) else message or reason
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return _cut(lines[-1].strip()) if lines else ""


def _cut(text: str) -> str:
    text = " ".join(text.split()).rstrip(". ")
    return text if len(text) <= _DETAIL_CHARACTERS else text[: _DETAIL_CHARACTERS - 3] + "..."
