"""The agent of one pod and one job: takes its input, runs its ranks as its role wants it, and ends. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from kale_dist import contract
from kale_dist.contract import JobFiles
from kale_dist.errors import KaleDistError
from kale_dist.pod_order import InputFiles, PodOrder, Source
from kale_dist.runtime import pod_site, processes, termination
from kale_dist.runtime.ending import Verdict
from kale_dist.runtime.fork_pool import ForkPool
from kale_dist.runtime.job_writer import JobWriter
from kale_dist.runtime.log_copier import LogCopier
from kale_dist.runtime.loop import Loop
from kale_dist.runtime.mailbox import Mailbox
from kale_dist.runtime.output import POD_LOG_BYTES
from kale_dist.runtime.pod_head import PodHead
from kale_dist.runtime.pod_input import Bringer
from kale_dist.runtime.pod_member import PodMember
from kale_dist.runtime.pod_server import PodServer
from kale_dist.runtime.pod_site import Place, Site

INPUT_LIMIT_S = 300.0
"""How long the job's input may take to appear."""

TERM_GRACE_S = 12.0
"""From SIGTERM to SIGKILL for ranks when the pod is told to end; a kubelet usually gives 30 s for all."""

DRAIN_LIMIT_S = 60.0
"""How long the pod's log may take to be written out at the end."""

TERM_DRAIN_LIMIT_S = 8.0
"""The same when the pod is told to end."""

_LOOK_EACH_S = 0.1


class PodAgent:
    """Serves one pod.

    Args:
        place: Where it is.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._loop = Loop()
        self._mailbox = Mailbox(self._loop)
        self._pool = ForkPool(self._loop, spares=0)
        self._site: Site | None = None
        self._role: PodHead | PodMember | None = None
        self._server: PodServer | None = None
        self._copier: LogCopier | None = None
        self._bringer: Bringer | None = None
        self._has_blobs = False
        self._told_to_end = False
        self._problem = ""
        self._verdict: Verdict | None = None
        self._input_deadline = time.monotonic() + INPUT_LIMIT_S

    def run(self) -> int:
        """Serve until the job has ended; gives the exit code."""
        processes.become_subreaper()
        self._watch_signals()
        # Torch takes seconds to import: that begins before anything else is there.
        self._pool.start()
        self._await_input()
        while self._verdict is None and not self._problem:
            self._loop.step()
        if self._verdict is None:
            sys.stderr.write(f"kale_dist: {self._problem}\n")
            termination.write(self._place.termination_log, self._problem.encode())
            code = termination.EXIT_TOLD_TO_END if self._told_to_end else termination.EXIT_OURS
        else:
            termination.write(self._place.termination_log, termination.message(self._verdict))
            code = termination.exit_code(self._verdict, told_to_end=self._told_to_end)
        self._leave()
        return code

    def _leave(self) -> None:
        self._pool.close()
        if self._role is not None:
            self._role.close()
        if self._site is not None:
            with contextlib.suppress(OSError):
                self._site.writer.close()
        if self._copier is not None:
            self._copier.drain(TERM_DRAIN_LIMIT_S if self._told_to_end else DRAIN_LIMIT_S)
            self._copier.close()
        if self._server is not None:
            self._server.close()
        processes.end_orphans(limit_s=2.0)

    def _watch_signals(self) -> None:
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.settimeout(0)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        # The handler does nothing: the byte that Python writes wakes the loop.
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        def read() -> None:
            numbers = reader.recv(1 << 12)
            if signal.SIGCHLD in numbers:
                processes.reap_orphans()
            if signal.SIGTERM in numbers:
                self._end_soon()

        self._loop.when_readable(reader.fileno(), read)

    def _end_soon(self) -> None:
        """The pod is told to end."""
        again, self._told_to_end = self._told_to_end, True
        if self._role is None:
            self._problem = "the pod was told to end (SIGTERM) before its input was there"
            return
        if isinstance(self._role, PodHead):
            self._role.killed()
        reason = (
            f"Pod {socket.gethostname()} was told to end (SIGTERM): the job was deleted or suspended, or the pod was "
            "evicted or ran into its deadline"
        )
        self._role.cancel(reason, 0.0 if again else TERM_GRACE_S)

    # -- the input --------------------------------------------------------------------------------------------------

    def _await_input(self) -> None:
        files = InputFiles(self._place.input)
        if self._place.attempt is None:
            self._problem = "the job had ended while it was suspended, so that this pod has nothing to do"
        elif files.order.exists() and files.key.exists():
            try:
                self._begin(files)
            except (OSError, KeyError, TypeError, ValueError, KaleDistError) as error:
                self._problem = f"the agent of pod {self._place.pod} cannot begin: {type(error).__name__}: {error}"
        elif time.monotonic() > self._input_deadline:
            self._problem = (
                f"the job's input did not appear in {self._place.input} within {INPUT_LIMIT_S:.0f} s: "
                "the Secret with it could not be made, or was deleted"
            )
        else:
            self._loop.call_later(_LOOK_EACH_S, self._await_input)

    def _begin(self, files: InputFiles) -> None:
        key = files.key.read_bytes()
        described = json.loads(files.order.read_bytes())
        if described.get("version") != contract.VERSION:
            raise ValueError(
                f"the notebook speaks contract version {described.get('version')}, this pod {contract.VERSION}"
            )
        order = PodOrder.from_json(described)
        order = dataclasses.replace(order, attempt=max(order.attempt, self._place.attempt or 0))
        if not self._place.pod < pod_site.number_of_pods(order):
            raise ValueError(f"the job has {pod_site.number_of_pods(order)} pods, so that none has this number")
        job_files = JobFiles(self._place.work / "job")
        job_files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = pod_site.own_store(order, self._place.work)
        job = pod_site.job_order(order, self._place.pod, job_files, store, key)
        self._pool.wanted_spares = job.local_world_size
        self._pool.refill()
        self._copier = copier = LogCopier(job_files, key, self._place.pod)
        writer = JobWriter(job_files, job.attempt, self._loop, copier.wake, POD_LOG_BYTES)
        self._site = site = Site(
            place=self._place,
            order=order,
            job=job,
            key=key,
            files=job_files,
            store=store,
            loop=self._loop,
            mailbox=self._mailbox,
            pool=self._pool,
            writer=writer,
            end=self._end,
        )
        self._server = PodServer(
            self._place.listen,
            order.port + 2,
            key=key,
            pod=self._place.pod,
            files=job_files,
            store=store,
            handler=_Requests(self),
        )
        self._role = PodHead(site) if self._place.pod == 0 else PodMember(site)
        self._bringer = Bringer(site, self._server.blobs, self._role.blobs_may_be_fetched)
        threading.Thread(target=self._bring, args=(self._bringer,), name="input", daemon=True).start()

    def _bring(self, bringer: Bringer) -> None:
        """Get the snapshot. In a thread."""
        try:
            bringer.bring()
        except Exception as error:  # noqa: BLE001 - whatever it is, the job cannot start and has to say why
            text = str(error) if isinstance(error, KaleDistError) else f"{type(error).__name__}: {error}"
            self._mailbox.post(lambda: self._brought(text))
        else:
            self._mailbox.post(lambda: self._brought(""))

    def _brought(self, problem: str) -> None:
        if self._role is None:
            return
        if problem:
            self._role.blobs_cannot_be_had(problem)
        else:
            self._has_blobs = True
            # From here no rank is forked that the job does not need.
            self._pool.wanted_spares = 0
            self._role.blobs_are_here()

    def _end(self, verdict: Verdict) -> None:
        self._verdict = verdict

    # -- requests, in the server's threads --------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What the server says of this pod."""
        role, bringer, site = self._role, self._bringer, self._site
        verdict = role.verdict if role is not None else None
        state = "ended" if verdict is not None else "running" if self._has_blobs else "waiting-for-input"
        streams = site is not None and site.order.source is Source.STREAM
        return {
            "state": state,
            "missing": bringer.missing() if streams and bringer is not None and not self._has_blobs else [],
            "verdict": None if verdict is None else {"state": str(verdict.state), "reason": verdict.reason},
        }

    def requested_cancel(self, grace_s: float) -> None:
        """The notebook wants the job to end."""
        self._mailbox.post(lambda: self._role.cancel("The job was cancelled", grace_s) if self._role else None)

    def acknowledged(self) -> None:
        """The notebook has all it wants."""
        if self._role is not None:
            self._mailbox.post(self._role.acknowledged)

    def blob_arrived(self) -> None:
        """A blob is whole."""
        if self._bringer is not None:
            self._bringer.look_again()


class _Requests:
    """What the server asks for, handed to the agent."""

    def __init__(self, agent: PodAgent) -> None:
        self._agent = agent

    def status(self) -> dict[str, Any]:
        return self._agent.status()

    def cancel(self, grace_s: float) -> None:
        self._agent.requested_cancel(grace_s)

    def acknowledged(self) -> None:
        self._agent.acknowledged()

    def blob_arrived(self, digest: str) -> None:
        del digest
        self._agent.blob_arrived()

    def outcome_arrived(self, name: str) -> None:
        del name


def main() -> int:
    """Be a pod's agent; gives the exit code."""
    try:
        place = pod_site.place_of(os.environ)
        place.work.mkdir(parents=True, exist_ok=True)
    except (KeyError, ValueError, OSError) as error:
        sys.stderr.write(f"kale_dist: this pod's environment is incomplete: {type(error).__name__}: {error}\n")
        return termination.EXIT_OURS
    try:
        return PodAgent(place).run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is our own fault and has to be told as that
        traceback.print_exc()
        told = f"kale_dist: the pod's agent failed: {type(error).__name__}: {error}"
        termination.write(place.termination_log, told.encode("utf-8", "replace"))
        return termination.EXIT_OURS
