"""Follows one unfinished job from this process: reads its pods, sends what they lack, fetches what they made.

All that is learnt goes into the job's folder on this machine, so that whoever reads a job reads files. Only one process
follows a job at a time (the mirror's lock); the others read, and take over when that one has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable

from kale_dist import records
from kale_dist.backends import own_events
from kale_dist.backends.base import JobRef
from kale_dist.backends.job_reader import JobReader
from kale_dist.backends.kubernetes import leftovers, port_forward, restarts, states, submission
from kale_dist.backends.kubernetes.client import Cluster
from kale_dist.backends.kubernetes.fetching import Fetcher
from kale_dist.backends.kubernetes.lost_pods import LostPods
from kale_dist.backends.kubernetes.pod_logs import PodLogs
from kale_dist.backends.kubernetes.sending import Sender
from kale_dist.backends.kubernetes.suspensions import Suspensions
from kale_dist.backends.kubernetes.watching import JobView, NamespaceWatch, PodView
from kale_dist.backends.mirror import Mirror
from kale_dist.backends.pod_client import PodClient
from kale_dist.contract import FailureCause, RankStateName, StateName
from kale_dist.errors import BackendError, StoreError
from kale_dist.pod_order import Source
from kale_dist.spec import JobSpec
from kale_dist.status import JobStatus, reduce_events

_LOOK_S = 1.0
_REST_S = 0.1
_LOCK_S = 2.0
_SETTLE_S = 3.0
"""From the cluster's word that a job has failed until it is believed: the agents' account may still be on its way."""

_EXPLAIN_S = 5.0
"""From the agents' word that something was killed until nobody waits for the cluster to say by whom."""

_TOLD_S = 40.0
"""The same for a pod that was told to end: it has 30 s for that, and the cluster speaks afterwards."""

_DRAIN_S = 20.0
_MIB = 1 << 20


class Follower:
    """One job's follower; its thread ends with the job.

    Args:
        cluster: Where the job runs.
        watch: Of the job's namespace.
        ref: The job.
        spec: What was submitted.
        key: The job's secret bytes; None if this user has none.
        reader: Of the job's folder.
        source: Where the pods get the snapshot from.
        on_change: Called when something about the job has changed.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        watch: NamespaceWatch,
        ref: JobRef,
        spec: JobSpec,
        key: bytes | None,
        reader: JobReader,
        source: Source,
        on_change: Callable[[], None],
    ) -> None:
        self.activity = ""
        """What it is doing that takes time, as a sentence."""
        self._cluster = cluster
        self._watch = watch
        self._ref = ref
        self._spec = spec
        self._key = key
        self._reader = reader
        self._source = source
        self._on_change = on_change
        self._woken = threading.Event()
        self._stopped = threading.Event()
        self._suspend_at: float | None = None
        self._failing_since: float | None = None
        self._last_item = self._pods_ended_at = 0.0
        self._verdict_at: float | None = None
        self._mirror = Mirror(
            records.files(ref.record_name),
            key,
            job=spec.name,
            world_size=spec.topology.number_of_processes,
            fill=lambda uid, number, first, _: self._logs.ask(uid, number, lambda agent: agent.log(first)),
            fill_events=lambda uid, number, first, _: self._logs.ask(uid, number, lambda agent: agent.events(first)),
        )
        self._logs = PodLogs(cluster, watch, spec, self._mirror, key, self.agent, self._took)
        self._sender = Sender(spec, self._mirror, self.agent, self._show, self._progress, self._stopped)
        self._fetcher = Fetcher(
            cluster, spec, self._mirror, ref.record_name, has_key=key is not None,
            progress=self._progress("Fetching the results"),
        )  # fmt: skip
        self._lost_pods = LostPods(cluster, spec, self._mirror, reader, self._show, has_key=key is not None)
        self._suspensions = Suspensions(cluster, spec, self._mirror, reader, has_key=key is not None)
        self._run_now = restarts.run_of(reader.record())
        self._created = time.time() if self._run_now.attempt else reader.record().created
        self._logs.turn_to(self._run_now.number)
        self._subscriptions = [watch.subscribe(self._name, lambda _name: self._wake())]
        self._thread = threading.Thread(target=self._run, name=f"kale_dist follow {spec.name}", daemon=True)
        self._thread.start()

    @property
    def view(self) -> JobView:
        """What the cluster says of the job."""
        return self._watch.view(self._name)

    @property
    def head(self) -> str:
        """Name of the job's first pod as it is now."""
        return submission.head_of(restarts.spec_of(self._spec, self._run_now))

    @property
    def is_alive(self) -> bool:
        """Whether it still follows."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Follow no more; what the job does from here on is found later."""
        self._stopped.set()
        self._woken.set()

    def join(self, timeout_s: float = 10.0) -> None:
        """Wait until it has stopped."""
        self._thread.join(timeout_s)

    def cancel_by(self, moment: float) -> None:
        """Suspend the job if its agents have not ended it by then.

        Args:
            moment: Of `time.monotonic()`.
        """
        self._suspend_at = moment

    def agent(self, pod: str, number: int = 0) -> PodClient:
        """Requests to the agent of a pod.

        Args:
            pod: The pod's name.
            number: Which of the job's pods it is.

        Raises:
            BackendError: Nobody knows the key.
        """
        if self._key is None:
            raise BackendError(f"The key of {self._ref} cannot be read, and its agents answer nobody without it")
        order = submission.order_of(self._spec, self._source)
        return PodClient(
            lambda: port_forward.connect(self._cluster, self._spec.cluster.namespace, pod, order.port + 2),
            self._key,
            number,
        )

    # -- inside, in the thread ----------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        """Of the PyTorchJob that runs now."""
        return restarts.name_of(self._spec.name, self._run_now.number)

    def _turn_to(self, run: restarts.Run) -> None:
        """Follow another PyTorchJob of the job."""
        if run != self._run_now:
            is_other, self._run_now = run.number != self._run_now.number, run
            if is_other:
                # What is known of pods that are gone is forgotten with the last subscription; they are still read.
                self._subscriptions.append(self._watch.subscribe(self._name, lambda _name: self._wake()))
            self._logs.turn_to(run.number)
            self._created = time.time()
            self._failing_since = self._verdict_at = self._suspend_at = None
            self._pods_ended_at = 0.0

    def _wake(self) -> None:
        self._woken.set()
        self._on_change()

    def _took(self) -> None:
        self._last_item = time.monotonic()
        self._wake()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set() and not self._mirror.try_lock():
                if self._reader.status().is_final:
                    return
                self._woken.wait(_LOCK_S)
                self._woken.clear()
                self._turn_to(restarts.run_of(self._reader.record()))
            self._turn_to(restarts.run_of(self._reader.record()))
            with contextlib.closing(self._mirror):
                self._mirror.begin_attempt(self._run_now.attempt)
                while not self._stopped.is_set() and not self._step():
                    self._woken.wait(_LOOK_S)
                    # A log that talks wakes all the time.
                    self._stopped.wait(_REST_S)
                    self._woken.clear()
        except BackendError:
            # The job's folder was deleted.
            return
        finally:
            for unsubscribe in self._subscriptions:
                unsubscribe()
            self._logs.stop()
            self.activity = ""
            self._on_change()

    def _step(self) -> bool:
        """Look at everything once; whether the job is over."""
        if self._reader.status().is_final:
            return True
        view = self.view
        following = restarts.name_of(self._spec.name, self._run_now.number + 1)
        if (run := self._lost_pods.take_over(self._watch.view(following).job)) is not None:
            self._turn_to(run)
            return False
        self._logs.read()
        if (run := self._suspensions.look(view, self._run_now)) is not None:
            self._turn_to(run)
            return False
        self._logs.leave(self._free)
        head = self._head(view)
        if self._source is Source.STREAM and head is not None:
            self._sender.send(head.name, head.uid)
        if self._suspend_at is not None and time.monotonic() > self._suspend_at:
            self._suspend_at = None
            self._free(view)
        if states.is_put_off(view, self._mirror.verdict):
            self._show(self._suspensions.problem)
            if self._run_now.attempt:
                # How long it waits to be resumed is not the pods' doing.
                self._created = time.time()
            return self._end_badly(view) if self._mirror.verdict is None else False
        if self._mirror.verdict is not None:
            return self._end_well(view)
        return self._end_badly(view)

    def _head(self, view: JobView) -> PodView | None:
        running = [pod for pod in view.pods if self._logs.number(pod) == 0 and pod.has_started and not pod.has_ended]
        return running[-1] if running else None

    def _show(self, text: str) -> None:
        self.activity = text

    def _progress(self, doing: str) -> Callable[[int, int], None]:
        def show(done: int, total: int) -> None:
            self.activity = f"{doing}: {done / _MIB:,.0f} of {total / _MIB:,.0f} MiB"
            self._on_change()

        return show

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_well(self, view: JobView) -> bool:
        """Pod 0's agent has given its verdict: fetch what did not fit into the log, then let everybody see it."""
        self._verdict_at = self._verdict_at or time.monotonic()
        self._fetcher.fetch_kept()
        head = self._head(view)
        if head is not None and (self._fetcher.missing() or self._mirror.waits_for_acknowledgement):
            try:
                self._fetcher.fetch_from(self.agent(head.name))
            except (BackendError, StoreError, OSError) as error:
                self.activity = f"The results could not be fetched yet: {error}"
        if not self._logs.are_drained(view) and (self._fetcher.missing() or not self._is_told()):
            return False
        if not self._logs.has_left or not self._explain(view):
            return False
        if view.job is not None and states.is_suspended(view.job):
            # It was suspended when it had done its work, and would be resumed.
            self._free(view)
        self._release()
        return True

    def _explain(self, view: JobView) -> bool:
        """Put the cluster's better reason before the agents' own; False while it may still come."""
        told = reduce_events(self._reader.status(), [self._mirror.verdict or {}])
        if not told.is_final or not states.is_unsure(told, view):
            return True
        better = states.overlay(told, view, self._spec, time.time())
        # A view that is not up to date may show the pods' end, and not yet why, or that the job goes on in others.
        if not self._pods_ended_at and view.healthy and leftovers.are_all(view):
            self._pods_ended_at = time.monotonic()
        waits_long = better == told and (told.state is StateName.CANCELLED or self._lost_pods.may_be_missed(told))
        limit = (self._verdict_at or 0.0) + (_TOLD_S if waits_long else _EXPLAIN_S)
        if time.monotonic() < (self._pods_ended_at + _LOOK_S if self._pods_ended_at else limit):
            return False
        ended = self._try_again(better, view)
        if ended is None:
            return False
        self._free(view, suspends=False)
        if ended != told:
            own_events.record_state(self._mirror, ended)
        return True

    def _is_told(self) -> bool:
        """Whether every rank's end is here, which its agent tells after the rank's last line."""
        ended = (RankStateName.SUCCEEDED, RankStateName.FAILED, RankStateName.STOPPED)
        told = all(replica.state in ended for replica in self._reader.status().replicas)
        return told or time.monotonic() > (self._verdict_at or 0.0) + _DRAIN_S

    def _end_badly(self, view: JobView) -> bool:
        """The cluster may know of an end that no agent could tell of."""
        now = time.time()
        base = self._reader.status()
        status = states.overlay(base, view, self._spec, now)
        limit_s = self._spec.cluster.pending_timeout_s
        waiting = status.state in (StateName.PENDING, StateName.STARTING) and restarts.waits_for_pods(
            self._run_now, base
        )
        if limit_s is not None and waiting and now - self._created > limit_s:
            reason = f"The job has not started within its pending_timeout_s of {limit_s:g} s. {status.reason}"
            self._write(dataclasses.replace(status, state=StateName.FAILED, cause=FailureCause.TIMEOUT, reason=reason))
            self._free(view)
            return True
        if not status.is_final:
            self._failing_since = None
            return False
        self._failing_since = self._failing_since or time.monotonic()
        waited_s = time.monotonic() - max(self._failing_since, self._last_item)
        if (
            waited_s < _SETTLE_S
            or (not self._logs.are_read and waited_s < _DRAIN_S)
            or self._mirror.verdict is not None
        ):
            return False
        if not self._logs.has_left:
            return False
        ended = self._try_again(status, view)
        if ended is None:
            return False
        self._write(self._fetcher.with_attempt(ended))
        self._free(view)
        return True

    def _try_again(self, ended: JobStatus, view: JobView) -> JobStatus | None:
        """Have a job that has lost a pod go on in new ones, if it may.

        Returns:
            How the job has ended; None if it goes on, or if new pods have to be asked for once more.
        """
        if not (why := self._lost_pods.why_again(ended, view)):
            return ended
        found = self._lost_pods.go_on(ended, why, self._run_now)
        if not isinstance(found, restarts.Run):
            return found
        self._turn_to(found)
        return None

    def _free(self, view: JobView, *, suspends: bool = True) -> None:
        """Nobody waits any more for pods that could not start, or cannot end. Who has no key leaves them to who has."""
        if self._key is None:
            return
        if suspends:
            leftovers.suspend(self._cluster, view)
        for pod in leftovers.replacements(view):
            # It knows nothing of the job, and nobody misses the rest of what it says.
            self._mirror.finish(pod.uid, self._logs.number(pod), is_whole=True)
        left = leftovers.remove_replacements(
            self._cluster, view, lambda pod: self.agent(pod.name, self._logs.number(pod))
        )
        self._mirror.say("\n".join(left))

    def _write(self, status: JobStatus) -> None:
        """Keep the cluster's verdict."""
        own_events.record_ranks(self._mirror, status)
        own_events.record_state(self._mirror, status)
        self._release()

    def _release(self) -> None:
        """Let everybody see that the job has ended."""
        if self._key is not None and (self._run_now.number or self._lost_pods.has_asked):
            with contextlib.suppress(BackendError):
                restarts.release(self._cluster, self._spec)
        self._mirror.release_final()
