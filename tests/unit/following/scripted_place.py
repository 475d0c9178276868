"""A place without containers: heads that say what a test has them say, over real sockets and on a stdout in memory."""

import contextlib
import dataclasses
import hashlib
import http.client
import itertools
import json
import socket
import threading
import time
import uuid

from kale_dist import wire
from kale_dist.errors import BackendError, JobExistsError
from kale_dist.job import records
from kale_dist.job.backend import JobRef, Look, NoConnectionError, Part, PlacedJob
from kale_dist.job.records import FIRST_LIFE
from kale_dist.job.spec.job_spec import JobSpec, Policy, Settled, Topology
from kale_dist.job.spec.place_settings import ClusterOptions
from kale_dist.places.following.copy import FollowerClock
from kale_dist.wire import FailureCause, StateName, Stream, messages

KEY = b"k" * 32
_numbers = itertools.count()


class FastClock(FollowerClock):
    """A second passes in a few milliseconds."""

    times_faster = 100

    def __init__(self):
        self._lock = threading.Lock()
        self._now = 1000.0

    def monotonic(self):
        with self._lock:
            return self._now

    def time(self):
        return self.monotonic()

    def wait(self, woken, seconds):
        if not woken.wait(seconds / self.times_faster):
            self.sleep(seconds)

    def sleep(self, seconds):
        """The machine slept, or somebody waited."""
        with self._lock:
            self._now += seconds


class ScriptedHead:
    """The agent of a first pod, as a follower meets it."""

    def __init__(self, uid=None):
        self.uid = uid or uuid.uuid4().hex[:8]
        self.state = "running"
        self.exit_code = None
        self.message = ""
        self.lost = ""
        self.trouble = None
        self.blocks = []  # (kind, number of the first line or event, bytes)
        self.stdout = bytearray()
        self.files = {}
        self.next_line = self.next_event = 0
        self.attempt = 0
        self.acks = 0
        self.told = []
        self.cancelled = threading.Event()
        self.streams = 0
        self.is_cut_off = False
        self.cuts_files = False
        self.cuts = 0
        self.changed = threading.Condition()

    # -- what a test says -----------------------------------------------------------------------------------------------

    def lines(self, rank, *texts, stream=Stream.STDOUT, on_stdout=True):
        body = wire.body_of(stream, [text.encode() for text in texts])
        block = wire.encode_lines(self.next_line, 1000, self.attempt, rank, body, len(texts))
        self._add("line", self.next_line, self.next_line + len(texts), block, on_stdout)
        self.next_line += len(texts)

    def event(self, kind, **fields):
        event = {"event": kind, "time": 1.0, "rank": None, "attempt": self.attempt, **fields}
        if wire.last_name(event) is not None:
            self._add("progress", 0, 0, wire.encode_progress(event), True)
            return
        self._add("event", self.next_event, self.next_event + 1, wire.encode_event(self.next_event, event), True)
        self.next_event += 1

    def run(self):
        self.event("state", state=StateName.RUNNING, reason="", cause=None)

    def verdict(self, state, reason="", cause=None, failed_rank=None):
        self.event("state", state=state, reason=reason, cause=cause, failed_rank=failed_rank, next_line=self.next_line)

    def succeed(self, results=2):
        for rank in range(results):
            self.files[f"outcome-{self.attempt}-{rank}"] = b"result of %d" % rank
        self.verdict(StateName.SUCCEEDED)

    def end(self, exit_code=0, *, lost="", message="", trouble=None):
        """Its container ends, and with it every connection."""
        with self.changed:
            self.state, self.exit_code, self.lost = "ended", exit_code, lost
            self.message, self.trouble = message, trouble
            self.changed.notify_all()

    def cut(self):
        """Connections are cut, and none can be made before `mend`."""
        with self.changed:
            self.is_cut_off = True
            self.cuts += 1
            self.changed.notify_all()

    def refuse(self):
        """No new connection can be made before `mend`; those that are there stay."""
        self.is_cut_off = True

    def cut_files(self):
        """Each answer with a file is cut in its middle before `mend`."""
        self.cuts_files = True

    def mend(self):
        with self.changed:
            self.is_cut_off = self.cuts_files = False

    @property
    def part(self):
        return Part(
            number=0, name="pod-0", uid=self.uid, state=self.state, exit_code=self.exit_code, message=self.message,
            lost=self.lost, trouble=self.trouble, node="node-a",
        )  # fmt: skip

    def _add(self, kind, first, following, block, on_stdout):
        with self.changed:
            self.blocks.append((kind, first, following, block))
            if on_stdout:
                self.stdout += block
            self.changed.notify_all()

    # -- its byte server ------------------------------------------------------------------------------------------------

    def serve(self, peer):
        with contextlib.suppress(OSError, ValueError), peer, peer.makefile("rb") as file:
            method, path, _ = file.readline().decode().split()
            headers = http.client.parse_headers(file)
            body = file.read(int(headers.get("Content-Length") or 0))
            digest = hashlib.sha256(body).hexdigest() if method == "POST" else ""
            if not wire.check_request(KEY, method, path, digest, headers[wire.MAC_HEADER]):
                self._answer(peer, 403, b"")
            elif path.startswith("/stream"):
                self._stream(peer, path)
            elif path.startswith("/files/"):
                name, _, query = path.removeprefix("/files/").partition("?")
                offset = int(query.partition("&")[0].removeprefix("offset="))
                data = self.files.get(name)
                self._answer(peer, 404 if data is None else 200, data or b"", offset, is_cut=self.cuts_files)
            elif path == "/ack":
                self.acks += 1
                self._answer(peer, 200, b"{}")
            elif path.startswith("/send"):
                self.told.append(messages.parse(json.loads(body)))
                self._answer(peer, 200, b"{}")
            elif path == "/cancel":
                self.cancelled.set()
                self._answer(peer, 200, b"{}")
            else:
                self._answer(peer, 404, b"")

    def _stream(self, peer, path):
        query = dict(part.split("=") for part in path.partition("?")[2].split("&"))
        line, event = int(query["line"]), int(query["event"])
        self.streams += 1
        cuts = self.cuts
        peer.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        at, is_first = 0, True
        while True:
            with self.changed:
                self.changed.wait(0.0 if is_first else 0.02)
                if self.cuts > cuts or self.state == "ended":
                    return
                fresh, at = self.blocks[at:], len(self.blocks)
            for kind, _, following, block in fresh:
                if kind == "progress" or following > (line if kind == "line" else event):
                    peer.sendall(block)
            if is_first:
                # There is no more by now.
                peer.sendall(b"\n")
                is_first = False

    @staticmethod
    def _answer(peer, status, data, offset=0, *, is_cut=False):
        rest = data[offset:]
        head = (
            f"HTTP/1.1 {status} x\r\nContent-Length: {len(rest)}\r\n{wire.SIZE_HEADER}: {len(data)}\r\nETag: 1\r\n\r\n"
        )
        peer.sendall(head.encode() + (rest[: len(rest) // 2] if is_cut else rest))


@dataclasses.dataclass
class ScriptedRun:
    """What the place has of one run."""

    heads: list
    others: list = dataclasses.field(default_factory=list)
    replaces: bool = False
    returns_head: bool = False
    replaced: list = dataclasses.field(default_factory=list)
    trouble: object = None
    suspended: str = ""
    gone: bool = False
    orphaned: bool = False
    finished: str = ""
    checkpoint: bytes | None = None
    used_restarts: int = 0


class ScriptedPlace:
    """Implements `Place`; tests change what it says."""

    name = "scripted"
    noun = "pod"

    def __init__(self):
        self.runs = {}
        self.taken = set()
        self.killed = []
        self.left_to_head = []
        self.refusal = None
        self.removed = []
        self.kept = {}
        self.forbids_connections = False
        self.is_down = False
        self.fresh = True
        self.threads = []

    # -- for tests --------------------------------------------------------------------------------------------------------

    def head(self, run=1):
        return self.runs[run].heads[-1]

    # -- Place ------------------------------------------------------------------------------------------------------------

    def settle(self, request, *, name, image, recipe, submit):
        return Settled.of(request, name=name, image=image, recipe=recipe)

    def render(self, spec):
        return ""

    def object_name(self, job, life):
        return job if life == 1 else f"{job}-{life}"

    def start(self, spec, key, life=FIRST_LIFE, checkpoint=None):
        number = life.number
        if number in self.taken:
            raise JobExistsError(f"{self.object_name(spec.name, number)} is there")
        others = [running_part(one) for one in range(1, spec.topology.number_of_pods)]
        made = ScriptedRun([ScriptedHead()], others, used_restarts=life.used_restarts)
        made.checkpoint = checkpoint.read_bytes() if checkpoint is not None else None
        self.runs[number] = made
        self.taken.add(number)
        return PlacedJob(
            ref=JobRef(self.name, spec.name), object=self.object_name(spec.name, number), life=number, spec=spec,
            place=(("where", "here"),),
        )  # fmt: skip

    def order(self, spec, life):
        raise NotImplementedError

    def send_input(self, handle, key, on_progress):
        pass

    def look(self, handle):
        if self.is_down:
            raise BackendError("The cluster does not answer.", retryable=True)
        run = self.runs.get(handle.life)
        if run is None or run.gone:
            return Look(gone=True)
        parts = [head.part for head in run.heads[-1:]] + list(run.others)
        return Look(
            replaces=run.replaces, returns_head=run.returns_head, replaced=tuple(run.replaced),
            parts=tuple(parts), trouble=run.trouble, suspended=run.suspended, finished=run.finished, fresh=self.fresh,
            gone=run.orphaned,
        )  # fmt: skip

    def listen(self, handle, changed):
        return lambda: None

    @contextlib.contextmanager
    def head_output(self, handle, *, follow):
        run = self.runs.get(handle.life)
        heads = run.heads if run is not None else ()
        if not heads:
            raise BackendError("There is no such pod.")
        kept = (
            []
            if follow
            else [self.kept[handle.life, name] for name in ("log", "events") if (handle.life, name) in self.kept]
        )
        yield itertools.chain(kept, self._output(heads[-1], follow))

    @staticmethod
    def _output(head, follow):
        at = 0
        while True:
            ended = head.state == "ended"
            piece, at = bytes(head.stdout[at:]), len(head.stdout)
            if piece:
                yield piece
            if not follow or ended:
                return
            time.sleep(0.01)

    def last_words(self, handle, part, limit):
        return self.kept.get(("words", part.number), b"")[-limit:]

    def connect(self, handle):
        if self.forbids_connections:
            raise NoConnectionError("you may not connect to pods")
        run = self.runs.get(handle.life)
        heads = run.heads if run is not None else ()
        if not heads or heads[-1].state != "running" or heads[-1].is_cut_off:
            raise BackendError("No connection to the pod.", retryable=True)
        here, there = socket.socketpair()
        thread = threading.Thread(target=heads[-1].serve, args=(there,), daemon=True)
        thread.start()
        self.threads.append(thread)
        return here

    def fetch(self, handle, name, target):
        data = self.kept.get((handle.life, handle.name_at_head(name)))
        if data is not None:
            target.write_bytes(data)
        return data is not None

    def kill(self, handle, grace_s, why="", *, head_leaves=False):
        if self.refusal is not None:
            raise self.refusal
        if head_leaves:
            self.left_to_head.append(handle.life)
            return
        self.killed.append((handle.life, grace_s))
        run = self.runs.get(handle.life)
        for head in run.heads[-1:] if run is not None else ():
            if head.state != "ended":
                head.end(137 if grace_s == 0 else 143, lost="killed")

    def remove(self, handle):
        self.removed.append(handle.life)
        run = self.runs.pop(handle.life, None)
        for head in run.heads if run is not None else ():
            head.end(137)

    def survey(self, namespace, labels):
        return []

    def adopt(self, ref, *, trust):
        assert trust is None
        number = max(self.runs)
        spec = spec_of()
        return PlacedJob(
            ref=ref, object=f"{ref.name}-{number}", life=number, spec=spec, place=(("where", "there"),)
        ), None

    def describe(self, handle):
        return {}

    def events(self, handle):
        return []

    def volumes(self):
        return []

    def close(self):
        pass


def spec_of(processes=2, per_pod=1, pending_timeout_s=None, collect_wait_s=600.0, **policy):
    return JobSpec(
        cluster=ClusterOptions(pending_timeout_s=pending_timeout_s, collect_wait_s=collect_wait_s),
        name=f"followed-{next(_numbers)}", label="train Net", kind="call", snapshot="00" * 32, blobs=(),
        topology=Topology(number_of_processes=processes, processes_per_pod=per_pod), policy=Policy(**policy),
    )  # fmt: skip


def lost_head(head, lost="evicted"):
    """The head's pod is taken away."""
    head.end(137, lost=lost)


def ended_part(number=1, exit_code=1, lost="", trouble=None):
    return Part(
        number=number,
        name=f"pod-{number}",
        uid=f"uid-{number}",
        state="ended",
        exit_code=exit_code,
        lost=lost,
        trouble=trouble,
    )


def running_part(number=1):
    return Part(number=number, name=f"pod-{number}", uid=f"uid-{number}", state="running")


LOST = FailureCause.LOST
__all__ = ["KEY", "FastClock", "ScriptedHead", "ScriptedPlace", "records", "spec_of"]
