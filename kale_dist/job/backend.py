"""The protocols of backends, and the values they speak in. No third-party import.

`Backend` is what jobs, watchers and the command line talk to. `local` implements it directly. For jobs in containers
`following.backend.FollowedBackend` implements it over a `Place`: docker and kubernetes only start containers, look at them,
connect to them and end them; copying the log, deciding how a job ended and starting its next run are shared.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from kale_dist.errors import BackendError, ConfigError, JobNotFoundError
from kale_dist.job.spec.job_spec import JobSpec, Request, Settled
from kale_dist.job.spec.recipe import Recipe
from kale_dist.job.status import JobStatus
from kale_dist.wire import CANCEL_GRACE_S, FailureCause, LogLine


@dataclasses.dataclass(frozen=True, slots=True)
class JobRef:
    """Names a job everywhere: `local://name`, `kubernetes://namespace/name`."""

    backend: str
    name: str
    """With the namespace in front where the backend has namespaces."""

    def __str__(self) -> str:
        """The form that `attach` takes."""
        return f"{self.backend}://{self.name}"

    @property
    def record_name(self) -> str:
        """The name of its record and folder on this machine: `name`, `kubernetes.namespace.name`."""
        return self.name if self.backend == "local" else f"{self.backend}.{self.name.replace('/', '.')}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str()`. A bare name is a job of the local backend.

        Raises:
            ConfigError: The text is empty or has no name, or is a path, or that of a record of another backend.
        """
        backend, separator, name = text.rpartition("://")
        if (
            not name
            or (separator and not backend)
            or (backend in ("", "local") and any(character in name for character in "./"))
        ):
            remedy = "Write it as 'local://name' or 'kubernetes://namespace/name'; see kale_dist.jobs()"
            raise ConfigError("ref", f"{text!r} does not name a job", remedy)
        return cls(backend or "local", name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `submit` would send. Same spec, same plan."""

    backend: str
    spec: JobSpec
    text: str
    """What is submitted, for people: YAML, or command lines."""

    def __str__(self) -> str:
        """The text."""
        return self.text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlaceEvent:
    """What a part of a cluster has said about a job."""

    time: float
    """When it was said last, in seconds since 1970."""
    about: str
    """The object: `pod/train-x3k9f-worker-0`."""
    is_warning: bool
    reason: str
    """One word, such as `FailedScheduling`."""
    message: str
    count: int
    """How often it was said."""


class Backend(abc.ABC):
    """How a job runs: plans, submits, tells how it is, reads logs, cancels.

    Results go through the store and images are resolved before; waiting belongs to `watch`. What has a body here is what a
    backend does without namespaces, preparations and files that lie elsewhere.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The word that `on=` takes."""

    def listen(self, callback: Callable[[JobRef], None]) -> None:  # noqa: B027 - a backend without news of its own is asked
        """Call `callback` from a thread of the backend's own whenever a job may have changed. It must be quick."""

    def warm_up(self) -> None:  # noqa: B027 - most have nothing to warm up
        """Begin to get ready, in the background, before the call's snapshot is taken.

        Raises:
            BackendUnavailableError: There is no way to get ready.
        """

    def settle(self, request: Request, *, name: str, image: str, recipe: Recipe | None, submit: bool) -> Settled:
        """Look up what a request leaves open, check whether the job could run, and make its image.

        Args:
            request: From the call; for a job that is submitted again, its own specification, whose image is made.
            name: The job's.
            image: Reference of the image that the call asks for; empty for the place's own.
            recipe: What goes on top of an image, with the packages that the call imports; None if none is to be made.
            submit: Whether a submission follows. Otherwise what cannot be reached is left open, and no image is made.

        Raises:
            ConfigError: Something is left open that only the user can settle.
            ImageError: The image cannot be made.
            BackendError: The job could not run there; the message says why.
        """
        del submit
        return Settled.of(request, name=name, image=image, recipe=recipe)

    @abc.abstractmethod
    def plan(self, spec: JobSpec) -> Plan:
        """The request for a spec. Pure: reads no clock, no environment, no disk."""

    @abc.abstractmethod
    def submit(self, spec: JobSpec, key: bytes) -> JobRef:
        """Start a job and return at once.

        Args:
            spec: Its request was settled by this backend.
            key: The job's 32 secret bytes, which sign its outcomes.

        Raises:
            JobExistsError: A job of this name is there.
            BackendUnavailableError: Nothing can be started there.
        """

    @abc.abstractmethod
    def status(self, ref: JobRef) -> JobStatus:
        """What is known now.

        Raises:
            JobNotFoundError: No such job.
        """

    @abc.abstractmethod
    def logs(
        self, ref: JobRef, *, follow: bool = False, ranks: Sequence[int] | None = None, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Lines of the log; with `follow` until the job has ended.

        Args:
            ref: The job.
            follow: Whether to wait for more lines while the job runs.
            ranks: Only these ranks' lines (and no lines of the agent); None for all.
            tail: Only the last lines of those there are now, this many, and with `follow` all later ones; None for
                all from the first.

        Raises:
            JobNotFoundError: No such job.
        """

    @abc.abstractmethod
    def cancel(self, ref: JobRef, *, grace_s: float = CANCEL_GRACE_S) -> None:
        """End a job: SIGTERM, then SIGKILL after `grace_s`. A job that has ended is left as it is.

        Raises:
            JobNotFoundError: No such job.
        """

    @abc.abstractmethod
    def delete(self, ref: JobRef) -> None:
        """Cancel if need be, then remove every trace.

        Raises:
            JobNotFoundError: No such job.
        """

    @abc.abstractmethod
    def list(self) -> Sequence[JobRef]:
        """All jobs there are, oldest first."""

    def survey(self, *, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> Sequence[JobStatus]:
        """How all jobs are, from all users where the place has several, oldest first. None of them is followed.

        Args:
            namespace: None for the configured one, `*` for all.
            labels: Those that have all of these; None for all.

        Raises:
            ConfigError: The backend's jobs have neither namespaces nor labels.
        """
        if namespace is not None or labels is not None:
            argument = "labels" if namespace is None else "namespace"
            raise ConfigError(argument, f"jobs of {self.name!r} have none", "Leave it out, or ask on='kubernetes'")
        found = []
        for ref in self.list():
            # Another process may delete a job between the list and the look.
            with contextlib.suppress(JobNotFoundError):
                found.append(self.status(ref))
        return found

    def adopt(self, ref: JobRef, *, trust: bool | None) -> JobRef:
        """Make a record on this machine of a job that was submitted from another one.

        Args:
            ref: The job; a namespace that is left out is the configured one.
            trust: Whether results may be loaded although another user submitted the job. None only looks: the job's key
                is not taken, so the job does not become one of this user's.

        Returns:
            The full reference.

        Raises:
            JobNotFoundError: No such job.
        """
        del trust
        return ref

    def fetch(self, ref: JobRef, name: str) -> None:  # noqa: B027 - files of jobs on this machine are here
        """Bring a file of a job up to date: `checkpoint`, or an outcome. What a running job cannot give is left as it is.

        Raises:
            KaleDistError: An ended job's file cannot be had; the message says why.
        """

    def describe(self, ref: JobRef) -> Mapping[str, object]:
        """The job's object as it is now, such as a PyTorchJob with its status; empty where it is no object.

        Raises:
            JobNotFoundError: No such job.
        """
        del ref
        return {}

    def events(self, ref: JobRef) -> Sequence[PlaceEvent]:
        """What the place has said of the parts of the newest run, oldest first; empty where it says nothing.

        Raises:
            JobNotFoundError: No such job.
            BackendError: It cannot be asked.
        """
        del ref
        return ()

    def volumes(self) -> Sequence[str]:
        """Names of the volumes that jobs can have, as the values of `volumes=` take them."""
        return ()


# -- places: where a job's containers run ---------------------------------------------------------------------------------


class NoConnectionError(BackendError):
    """This user can never connect to the head: rights or the network forbid it. Its stdout is then the only way."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunHandle:
    """One run of a job: one head and its relays. All that a place needs to find them again."""

    ref: JobRef
    object: str
    """Name of the PyTorchJob, or the prefix of the containers' names: the job's name, `<name>-2` for the second run."""
    run: int
    """From 1."""
    spec: JobSpec
    place: tuple[tuple[str, str], ...] = ()
    """What else the place wrote down when it started the job; kept in the job's record."""

    def get(self, name: str, default: str = "") -> str:
        """One value of `place`."""
        return dict(self.place).get(name, default)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Something that is not as it should be, in a sentence for the user."""

    sentence: str
    """Begins with a capital, without its full stop."""
    remedy: str = ""
    """What you can do about it, as sentences; empty if nothing."""
    cause: FailureCause | None = None
    """The cause of the job's failure, if this ends the job. None: it follows from how the pod ended."""
    heals: bool = False
    """Whether it may end by itself, or because somebody acts."""
    needs_action: bool = False
    """Whether it ends only if somebody acts, such as by pushing the image."""

    def __str__(self) -> str:
        """The sentence and the remedy."""
        return f"{self.sentence}. {self.remedy}" if self.remedy else self.sentence


PartState = Literal["waiting", "running", "ended"]
LostBy = Literal["", "evicted", "deleted", "node lost", "preempted", "out of memory", "killed"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One pod or container of a run, as the place sees it now."""

    number: int
    """0 is the head."""
    name: str
    uid: str
    """Names this very container: one that was made again under the same name has another."""
    state: PartState
    exit_code: int | None = None
    message: str = ""
    """Its termination message, where the place keeps one."""
    trouble: Trouble | None = None
    """Why it waits, or why it ended as it did."""
    lost: LostBy = ""
    """Why its end is not its own doing. Empty also where it simply ended."""
    node: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A run, as its place sees it now. The place reports; the follower judges."""

    parts: tuple[Part, ...] = ()
    """Those that exist, by their numbers."""
    trouble: Trouble | None = None
    """What keeps the whole from starting, or ended it: the one sentence that explains most. One of a waiting run that does
    not heal means that it can never start."""
    suspended: str = ""
    """Why the run is suspended; empty if it is not."""
    queue_position: int | None = None
    """Where it stands in the queue that it waits in, from 1; None if it waits in none, or if that is not known."""
    gone: bool = False
    """Whether the run's object has been deleted."""
    finished: Literal["", "succeeded", "failed", "cancelled"] = ""
    """How the object itself says that the run ended; believed only where no pod says anything."""
    fresh: bool = True
    """Whether all of this is up to date: a watch that lags must not end a job."""

    @property
    def head(self) -> Part | None:
        """The first pod; None if it does not exist."""
        return next((part for part in self.parts if part.number == 0), None)


class Connection(Protocol):
    """Bytes to and from the head's byte server: a socket, or a tunnel that has its methods."""

    def sendall(self, data: bytes, /) -> object:
        """Send all of it."""

    def recv(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end. Raises `TimeoutError` when the timeout is over first."""

    def settimeout(self, seconds: float | None, /) -> None:
        """How long `recv` and `sendall` wait."""

    def shutdown(self, how: int, /) -> None:
        """With `SHUT_RDWR`: end it, also for a thread that waits in `recv`."""

    def close(self) -> None:
        """Free it; not while another thread uses it."""


class Place(Protocol):
    """Where containers of jobs run: a Docker engine, a Kubernetes cluster.

    Everything may raise `BackendError`; `retryable` says that the same call may succeed later. What has a body here is what a
    place does that derives from this class.
    """

    name: str
    """The word that `on=` takes."""
    noun: str
    """What a part is called: `container`, `pod`."""

    def settle(self, request: Request, *, name: str, image: str, recipe: Recipe | None, submit: bool) -> Settled:
        """Look up what a request leaves open, check whether the job could run, and make its image; see `Backend`."""

    def render(self, spec: JobSpec) -> str:
        """What `start` creates, for people. Pure."""

    def object_name(self, job: str, run: int) -> str:
        """Name of the object that `start` creates for a run: the job's name, `<name>-2` for the second. Pure."""

    def start(
        self, spec: JobSpec, key: bytes, *, run: int = 1, checkpoint: pathlib.Path | None = None, used_restarts: int = 0
    ) -> RunHandle:
        """Create a run's objects and their input.

        Args:
            spec: The job, settled by this place.
            key: The job's secret bytes.
            run: Which run of the job; 2 and up are named `<name>-2`.
            checkpoint: From which the run resumes; None to start from the beginning.
            used_restarts: How often earlier runs have restarted the ranks.

        Raises:
            JobExistsError: An object of this name exists. It may be the same job's: another follower was first.
        """

    def send_input(self, handle: RunHandle, key: bytes, on_progress: Callable[[str], None]) -> None:
        """Send what did not fit into `start`'s objects. Called in a thread of the follower's; may return at once.

        Args:
            handle: The run.
            key: The job's secret bytes.
            on_progress: Called with a sentence such as `sent 120 of 200 MB`.
        """
        del handle, key, on_progress

    def look(self, handle: RunHandle) -> Look:
        """How the run is now. Cheap: may be called several times a second."""

    def listen(self, handle: RunHandle, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed` whenever `look` may have a new answer, from any thread. Returns the end of the subscription.

        A place without news of its own is looked at once a second.
        """
        del handle, changed
        return lambda: None

    def head_output(self, handle: RunHandle, *, follow: bool) -> contextlib.AbstractContextManager[Iterator[bytes]]:
        """What the head's container printed, from its beginning or what the place still has of it.

        Args:
            handle: The run.
            follow: Whether to wait for more until the container ends.
        """

    def last_words(self, handle: RunHandle, part: Part, limit: int) -> bytes:
        """The last bytes that a container printed, at most `limit`; empty where there are none any more."""

    def connect(self, handle: RunHandle) -> Connection:
        """Connect to the head's byte server.

        Raises:
            NoConnectionError: Rights or the network forbid it, now and later.
            BackendError: Not possible now.
        """

    def fetch(self, handle: RunHandle, name: str, target: pathlib.Path) -> bool:
        """Bring a file of an ended head (an outcome, `checkpoint`) here without a connection to it.

        Args:
            handle: The run.
            name: Of the file in the head's folder.
            target: Where to write it.

        Returns:
            Whether it is there now; False if the place has no such way or there is no such file.
        """

    def kill(self, handle: RunHandle, grace_s: float, why: str = "", *, head_leaves: bool = False) -> None:
        """End all containers: SIGTERM, and SIGKILL after `grace_s`. What has ended stays as it is. None starts afterwards.

        Args:
            handle: The run.
            grace_s: Seconds.
            why: Why the run has failed, for those who look at it from elsewhere; empty if a user cancels it.
            head_leaves: Whether the head ends by itself, or has: the others are ended when it has.
        """

    def remove(self, handle: RunHandle) -> None:
        """Remove the run's objects and all that was made for them. What is gone already is no error.

        Returns when its pods are gone too, or after their grace: what they held (quota, GPUs, names) is free then.
        """

    def survey(self, namespace: str | None, labels: Mapping[str, str]) -> Sequence[JobStatus]:
        """How all jobs are, oldest first, in one request; see `Backend`."""

    def adopt(self, ref: JobRef, *, trust: bool | None) -> tuple[RunHandle, bytes | None]:
        """Find a job that was submitted from another machine.

        Args:
            ref: The job.
            trust: Whether its results may be loaded although another user submitted it; None: its key is not read.

        Returns:
            Its newest run with the full reference, and the job's key; None for a user who may not read it.

        Raises:
            JobNotFoundError: No such job.
        """

    def describe(self, handle: RunHandle) -> dict[str, Any]:
        """The object itself, as its API shows it; empty where a run is no single object."""
        del handle
        return {}

    def events(self, handle: RunHandle) -> Sequence[PlaceEvent]:
        """What the place has said of a run's parts, oldest first; empty where it says nothing."""
        del handle
        return ()

    def volumes(self) -> Sequence[str]:
        """Names of the volumes that jobs can have, as the values of `volumes=` take them."""

    def close(self) -> None:
        """Close connections that are kept; the next call makes new ones."""
