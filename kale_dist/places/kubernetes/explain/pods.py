"""Turns reports of the cluster on a job and its pods into sentences with remedies. Pure; they are in `table`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from kale_dist.places.kubernetes.explain import table
from kale_dist.places.kubernetes.explain.sentences import NOT_RETRIED, Found, cut, detail, facts_of, fill
from kale_dist.places.kubernetes.explain.table import Seen
from kale_dist.places.kubernetes.views import ContainerView, EventView, JobView, PodView, seconds
from kale_dist.places.manifests import Kind
from kale_dist.wire import EXIT_BROKEN, Verdict

_DELETED_CODES = (0, 137, 143)
"""Exit codes of a container whose pod was deleted: of SIGTERM, of SIGKILL after the grace period, and of a relay that has sent its
ranks' ends to the head."""

_INIT = "init-pytorch"
_PREEMPTION = re.compile(r"\.?( no new claims to deallocate,)? preemption: .*", re.DOTALL)


def hindrance(pod: PodView, view: JobView) -> Found | None:
    """What keeps a pod from running; None if no reason is known, or if the pod runs or has ended."""
    if pod.has_ended or pod.is_running:
        return None
    if pod.scheduling and not pod.node:
        return _unscheduled(pod.scheduling, pod, view)
    for container in pod.containers:
        if container.is_init and container.state == "running" and container.name == _INIT:
            return _named("waits-for-master", pod, view, container)
        if container.is_init and container.state == "terminated" and container.exit_code:
            # The pause before another start begins a little later.
            return None
        if container.state == "waiting" and not pod.life:
            pulling = _last_event(pod, view, "Failed: Failed to pull") if container.reason == "ImagePullBackOff" else ""
            found = _match(Seen.WAITING, f"{_words_of(container)} {pulling}".rstrip(), pod, view, container)
            if found is not None:
                return found
    words = _last_event(pod, view)
    return _match(Seen.POD_EVENT, words, pod, view) if words else None


def progress(pod: PodView, view: JobView) -> str:
    """What a pod without a hindrance does before it runs, as a sentence without its full stop."""
    if not pod.node:
        if pod.scheduler:
            return (
                f"Pod {pod.name} waits for a node: the scheduler {pod.scheduler} has not looked at it yet. If that lasts, it is"
                " not installed, or scheduler_name= is wrong"
            )
        return f"Pod {pod.name} waits for a node"
    mine = [event for event in view.events if event.object_uid == pod.uid]
    last = max(mine, key=lambda event: event.time, default=None)
    if last is not None and last.reason == "Pulling":
        return f"Pod {pod.name} pulls the image {pod.main.image} on node {pod.node}"
    return f"Pod {pod.name} is being prepared on node {pod.node}"


def end(pod: PodView, view: JobView) -> Found | None:
    """Why a pod has failed; None if it has not."""
    main = pod.main
    if pod.disruption and (found := _match(Seen.DISRUPTION, pod.disruption, pod, view)):
        return found if pod.has_ended else None
    # Before the containers: they only know of a signal.
    if pod.phase == "Failed" and pod.reason and (found := _match(Seen.POD, _words_of(pod), pod, view)):
        return found
    for container in pod.containers:
        if container.is_init and container.state == "terminated" and container.exit_code and pod.phase == "Failed":
            if container.name == _INIT:
                return _without_master(pod, view, container)
            failed = _named("init-failed", pod, view, container)
            return _match(Seen.ENDED, _words_of(container), pod, view, container) or failed
    has_succeeded = main.exit_code == 0 and verdict_of(pod) is not None
    if main.exit_code in _DELETED_CODES and (pod.is_ending or pod.is_gone) and not has_succeeded:
        return _named("pod-deleted", pod, view)
    if main.exit_code == EXIT_BROKEN and main.message and verdict_of(pod) is None:
        return _named("agent-gave-up", pod, view, said=main.message.removeprefix("kale_dist: "))
    if main.state == "terminated" and main.exit_code:
        return _match(Seen.ENDED, _words_of(main), pod, view, main) or _named("ended", pod, view)
    if pod.is_gone and pod.has_started and not has_succeeded:
        return _named("pod-deleted", pod, view)
    if pod.phase == "Failed":
        return _match(Seen.POD, _words_of(pod), pod, view)
    return None


def verdict_of(pod: PodView | None) -> Verdict | None:
    """The verdict that an agent has left in its container's termination message; None if there is none."""
    return None if pod is None else Verdict.parse(pod.main.message)


def refusal(view: JobView, kind: Kind) -> Found | None:
    """Find why the controller has not made all pods of the job; None if it has, or if no event gives a known reason."""
    there = [pod for pod in view.latest_pods if not pod.is_gone]
    expected = kind.number_of_pods(view.job or {})
    meta, reporters = (view.job or {}).get("metadata") or {}, kind.reporters_of(view.name)
    began = seconds(meta.get("creationTimestamp")) or 0.0
    # An object of the same name may have been there before.
    events = [
        event for event in view.events
        if event.is_warning and "FailedCreate" in event.reason and (event.kind, event.name) in reporters
        and (event.object_uid == meta.get("uid") or (event.kind != kind.name and event.time >= began))
    ]  # fmt: skip
    if len(there) >= expected or not events:
        return None
    words = NOT_RETRIED.sub("", events[-1].message)
    name = re.search(r'(?:pods|services) "([^"]+)"', words)
    rest = expected - len(there)
    what = f"pod {name[1]}" if name else "the job's pod" if expected == 1 else f"{rest} of {expected} pods"
    found = table.match(Seen.JOB_EVENT, f"{events[-1].reason}: {words}")
    if found is None:
        return None
    facts = _job_facts(view, kind) | _cut(found[1] | {"detail": words})
    return fill(found[0], facts, prefix=f"{what} cannot be made: ")


def sidecar(pod: PodView, view: JobView) -> Found | None:
    """The other container that keeps a pod alive after its ranks have ended; None if there is none."""
    if pod.is_over or pod.main.state != "terminated":
        return None
    others = [item.name for item in pod.containers if item.name != pod.container and item.state == "running"]
    return _named("sidecar", pod, view, sidecar=" and ".join(others)) if others else None


def of_job(name: str, view: JobView, kind: Kind, facts: Mapping[str, str] | None = None) -> Found:
    """A trouble of the whole job by its name in the table."""
    return fill(table.named(name), _job_facts(view, kind) | _cut(facts or {}))


# -- inside ----------------------------------------------------------------------------------------------------------


def _without_master(pod: PodView, view: JobView, container: ContainerView) -> Found:
    """Why a worker's `init-pytorch` has failed: the reason is what the first pod lacks, or lacked, if that is known."""
    gave_up = _named("init-gave-up", pod, view, container)
    found = _match(Seen.ENDED, _words_of(container), pod, view, container) or gave_up
    head = view.latest_pods[0]
    # What the worker held may be what the head needed: it is scheduled in the second in which the worker fails.
    lacked = _last_event(head, view, "FailedScheduling: ")
    cause = hindrance(head, view) or (_unscheduled(lacked, head, view) if lacked else None)
    if cause is None or found.name != "init-gave-up":
        return found
    sentence = f"{found.trouble.sentence}: {cause.words}"
    trouble = dataclasses.replace(found.trouble, sentence=sentence, remedy=cause.trouble.remedy)
    return dataclasses.replace(found, trouble=trouble)


def _job_facts(view: JobView, kind: Kind) -> dict[str, str]:
    return {**facts_of(kind), "namespace": view.namespace, "job": view.name}


def _match(seen: Seen, words: str, pod: PodView, view: JobView, container: ContainerView | None = None) -> Found | None:
    """What the cluster's words about a pod, or about one of its containers, mean."""
    found = table.match(seen, words, "" if container is None else container.name)
    if found is None:
        return None
    entry, groups = found
    amounts = dict(pod.main.limits) | dict(pod.main.requests)
    why = detail(words) or "no reason is given"
    facts = {"detail": why, "nodes": why, "wanted": amounts.get(groups.get("resource", ""), "some")}
    prefix = f"pod {pod.name} {'waits' if entry.heals else 'cannot start'}: " if seen in table.WAITS else ""
    return fill(entry, _pod_facts(pod, view, container) | _cut(groups) | facts, prefix=prefix)


def _named(name: str, pod: PodView, view: JobView, container: ContainerView | None = None, **facts: str) -> Found:
    """The trouble of a pod by its name in the table."""
    return fill(table.named(name), _pod_facts(pod, view, container) | _cut(facts))


def _cut(facts: Mapping[str, str]) -> dict[str, str]:
    return {name: cut(value) for name, value in facts.items()}


def _pod_facts(pod: PodView, view: JobView, container: ContainerView | None) -> dict[str, str]:
    container = pod.main if container is None else container
    about_claims = [event for event in view.events if event.kind == "PersistentVolumeClaim" and event.is_warning]
    last = container.last_message or (container.message if container.exit_code is not None else "")
    exit_code = container.exit_code if container.exit_code is not None else container.last_exit_code
    return {
        "namespace": view.namespace,
        "job": view.name,
        "pod": f"pod {pod.name}",
        "pod_name": pod.name,
        "node": pod.node or "of an unknown name",
        "container": container.name,
        "image": container.image,
        "claims": " or ".join(pod.claims) or "of an unknown name",
        "claim_said": f" ({cut(about_claims[-1].message)})" if about_claims else "",
        "memory_limit": dict(container.limits).get("memory", "the node's whole memory"),
        "restarts": str(container.restarts),
        "last_exit": _exit(exit_code),
        "exit": _exit(container.exit_code),
        "last_said": f"; it said: {_last_line(last)}" if last else "",
    }


def _exit(code: int | None) -> str:
    if code is None:
        return "an unknown exit code"
    # A shell and the container runtime give these codes to a process that a signal ended.
    signals = {
        128 + number: name for number, name in ((6, "SIGABRT"), (9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM"))
    }
    return f"exit code {code}" + (f" ({signals[code]})" if code in signals else "")


def _unscheduled(words: str, pod: PodView, view: JobView) -> Found | None:
    """Why the scheduler finds no node for a pod, without the second half of its words, which is about preemption."""
    return _match(Seen.SCHEDULING, _PREEMPTION.sub("", words), pod, view)


def _words_of(about: PodView | ContainerView | EventView) -> str:
    """The cluster's words, as the table's patterns expect them."""
    return f"{about.reason}: {about.message}"


def _last_event(pod: PodView, view: JobView, words: str = "") -> str:
    """The last event about a pod, if it is a warning: a later event that is none shows that the trouble is over.

    Only events that begin with `words` count: "Failed: Error: ImagePullBackOff" follows the one that names the cause.
    """
    mine = [
        event for event in view.events
        if event.object_uid == pod.uid and _words_of(event).startswith(words)
    ]  # fmt: skip
    # Events of one second have no order; then a warning counts, and not that the pod got its node.
    last = max(mine, key=lambda event: (event.time, event.is_warning), default=None)
    return _words_of(last) if last is not None and last.is_warning else ""


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    words = lines[-1].strip() if lines else ""
    verdict = Verdict.parse(words)
    return cut(words if verdict is None else verdict.reason)
