"""The protocols of backends and places, and the values that they exchange. No third-party import.

Jobs, watchers and the command line call a `Backend`. `places.local` implements it directly. For jobs in containers
`places.following` implements it over a `Place`: Docker and Kubernetes only start containers, look at them, connect to
them and end them; copying the log, deciding how a job ended and renewing it are shared.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from kale_dist.errors import BackendError, ConfigError, JobNotFoundError
from kale_dist.job.records import FIRST_LIFE, Life
from kale_dist.job.spec.job_spec import JobSpec, Request, Settled
from kale_dist.job.spec.recipe import Recipe
from kale_dist.job.status import JobStatus
from kale_dist.wire import FailureCause, LogLine, Order
from kale_dist.wire.messages import ToAgent


@dataclasses.dataclass(frozen=True, slots=True)
class JobRef:
    """Names a job everywhere: `local://name`, `kubernetes://namespace/name`."""

    backend: str
    name: str
    """The job's name, after `namespace/` if the backend has namespaces."""

    def __str__(self) -> str:
        """The form that `attach` takes."""
        return f"{self.backend}://{self.name}"

    @property
    def record_name(self) -> str:
        """The name of the job's record and folder on this machine: `name`, `kubernetes.namespace.name`."""
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
    """What `submit` would send. Equal specifications give equal plans."""

    backend: str
    spec: JobSpec
    text: str
    """What is submitted, for people: YAML, or command lines."""

    def __str__(self) -> str:
        """The text."""
        return self.text


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlaceEvent:
    """An event of a cluster about one of a job's objects."""

    time: float
    """When the event happened last, in seconds since 1970."""
    about: str
    """The object: `pod/train-x3k9f-worker-0`."""
    is_warning: bool
    reason: str
    """The cluster's word for what happened, such as `FailedScheduling`."""
    message: str
    count: int
    """How often the event happened."""


class Backend(abc.ABC):
    """Plans, submits, cancels and deletes jobs, returns their statuses and reads their logs; waiting belongs to `watch`.

    The bodies here are for backends that have no namespaces, need no preparations, and keep their files on this machine.
    """

    name: str
    """The word that `on=` takes."""

    def listen(self, callback: Callable[[JobRef], None]) -> None:  # noqa: B027 - a backend without news of its own is asked
        """Call `callback`, which must be quick, from a thread of the backend whenever a job may have changed."""

    def warm_up(self) -> None:  # noqa: B027 - most have nothing to warm up
        """Begin in the background to prepare for a job, before the call's snapshot is taken.

        Raises:
            BackendUnavailableError: No job can be run.
        """

    def settle(self, request: Request, *, name: str, image: str, recipe: Recipe | None, submit: bool) -> Settled:
        """Look up what a request leaves open, check whether the job could run, and make its image.

        Args:
            request: From the call; for a job that is submitted again, its own specification, whose image is made.
            name: The job's.
            image: Reference of the image that the call asks for; empty for the place's own.
            recipe: What goes on top of an image, with the packages that the call imports; None if no image is made.
            submit: Whether a submission follows. Otherwise no image is made, and the place need not be reachable.

        Raises:
            ConfigError: A value is missing, or the job needs more than the place has.
            ImageError: The image cannot be made.
            BackendError: The job could not run there; the message gives the reason.
        """
        del submit
        return Settled.of(request, name=name, image=image, recipe=recipe)

    @abc.abstractmethod
    def plan(self, spec: JobSpec) -> Plan:
        """The plan of a specification. Pure: reads no clock, no environment, no disk."""

    @abc.abstractmethod
    def submit(self, spec: JobSpec, key: bytes) -> JobRef:
        """Start a job and return at once.

        Args:
            spec: The job, settled by this backend.
            key: The job's 32 secret bytes, which sign its outcomes.

        Raises:
            JobExistsError: A job has this name.
            BackendUnavailableError: Nothing can be started there.
        """

    @abc.abstractmethod
    def status(self, ref: JobRef) -> JobStatus:
        """The job's status now.

        Raises:
            JobNotFoundError: No such job.
        """

    @abc.abstractmethod
    def logs(
        self,
        ref: JobRef,
        *,
        follow: bool = False,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        on_status: Callable[[JobStatus], None] | None = None,
    ) -> Iterator[LogLine]:
        """Lines of the log; with `follow` until the job has ended.

        Args:
            ref: The job.
            follow: Whether to wait for more lines while the job runs.
            ranks: Only these ranks' lines (and no lines of the agent); None for all.
            tail: Only the last lines of those there are now, this many, and with `follow` all later ones; None for
                all from the first.
            on_status: Called with the job's status, in the caller's thread, each time before more lines are waited for.

        Raises:
            JobNotFoundError: No such job.
        """

    @abc.abstractmethod
    def cancel(self, ref: JobRef, *, grace_s: float | None = None, save: bool = True) -> None:
        """End a job: SIGTERM, then SIGKILL after `grace_s`. A job that has ended is left as it is.

        Args:
            ref: The job.
            grace_s: Seconds between the signals; None for those of the job's policy.
            save: Whether ranks that can save first: in as many seconds, and 5 between the signals.

        Raises:
            JobNotFoundError: No such job.
        """

    def send(self, ref: JobRef, rank: int, message: ToAgent, blobs: Iterable[str] = ()) -> None:
        """Send a message to the debugger of a rank, or to live ranks. One that it does not expect has no effect.

        Args:
            ref: The job.
            rank: The rank; -1 for all.
            message: See `wire.messages`.
            blobs: Digests of blobs on this machine that the ranks need for it.

        Raises:
            JobNotFoundError: No such job.
            BackendError: The rank cannot be reached.
        """
        del rank, message, blobs
        raise BackendError(f"Ranks of {ref} take no messages")

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
        """The statuses of all jobs, those of other users too, oldest first. No job is followed for it.

        Args:
            namespace: None for the configured one, `*` for all.
            labels: Only jobs that have all of these labels; None for all jobs.

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
            trust: Whether results may be loaded although the job's key is not on this machine. With None nothing warns that
                they are not: the record is only for looking at the job.

        Returns:
            The full reference.

        Raises:
            JobNotFoundError: No such job.
        """
        del trust
        return ref

    def fetch(self, ref: JobRef, name: str) -> None:  # noqa: B027 - files of jobs on this machine are here
        """Fetch a job's file as it is now: `checkpoint`, or an outcome. That of a running job need not exist yet.

        Raises:
            KaleDistError: The file of a job that has ended cannot be fetched; the message gives the reason.
        """

    def describe(self, ref: JobRef) -> Mapping[str, object]:
        """The job's object as it is now, such as a PyTorchJob with its status; empty if the backend has none.

        Raises:
            JobNotFoundError: No such job.
        """
        del ref
        return {}

    def events(self, ref: JobRef) -> Sequence[PlaceEvent]:
        """The cluster's events about the job, oldest first; empty if the backend has none.

        Raises:
            JobNotFoundError: No such job.
            BackendError: They cannot be read.
        """
        del ref
        return ()

    def volumes(self) -> Sequence[str]:
        """Names of the volumes that jobs can have, as the values of `volumes=` take them."""
        return ()


# -- places: where a job's containers run ---------------------------------------------------------------------------------


class NoConnectionError(BackendError):
    """Rights or the network forbid this user to connect to the head: only its stdout can be read."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlacedJob:
    """Everything by which a place finds a job again, in its present life."""

    ref: JobRef
    object: str
    """Name of the PyTorchJob, or the prefix of the containers' names: the job's name, `<name>-2` for its second object."""
    life: int = 1
    """How many objects the job has had, this one included."""
    first_attempt: int = 0
    """The number within the job of the head's attempt 0."""
    spec: JobSpec
    place: tuple[tuple[str, str], ...] = ()
    """The place's own values, such as the cluster's address; kept in the job's record."""

    def get(self, name: str, default: str = "") -> str:
        """One value of `place`."""
        return dict(self.place).get(name, default)

    def name_at_head(self, name: str) -> str:
        """The name that a file of the job's folder has in the head's, where attempts count from 0."""
        kind, _, numbers = name.partition("-")
        attempt, _, rank = numbers.partition("-")
        return f"outcome-{int(attempt) - self.first_attempt}-{rank}" if kind == "outcome" else name


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """Why a pod or a whole run waits or has ended, as a sentence for the user."""

    sentence: str
    """What is wrong: begins with a capital, and has no full stop at its end."""
    remedy: str = ""
    """What the user can do about it, as sentences; empty if nothing."""
    cause: FailureCause | None = None
    """The cause of the job's failure, if this ends the job. None: it follows from how the pod ended."""
    heals: bool = False
    """Whether the trouble may end by itself, or because a person acts."""
    needs_action: bool = False
    """Whether the trouble ends only if a person acts, such as by pushing the image."""

    def __str__(self) -> str:
        """The sentence and the remedy."""
        return f"{self.sentence}. {self.remedy}" if self.remedy else self.sentence


PartState = Literal["waiting", "running", "ended"]
LostBy = Literal["", "evicted", "deleted", "node lost", "preempted", "out of memory", "killed"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One pod or container of a job, as the place sees it now."""

    number: int
    """The part's number; the head is 0."""
    name: str
    uid: str
    """The container's identity: another container of the same name has another UID."""
    state: PartState
    exit_code: int | None = None
    message: str = ""
    """The part's termination message; empty if it left none."""
    trouble: Trouble | None = None
    """Why the part waits, or why it ended as it did."""
    lost: LostBy = ""
    """What ended the part from outside; empty if it runs, or ended by itself."""
    node: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A place's report on a job. The place only reports, the follower decides."""

    parts: tuple[Part, ...] = ()
    """The parts that exist, by their numbers."""
    replaces: bool = False
    """Whether parts that are lost are made again, so that its head waits for them."""
    returns_head: bool = False
    """Whether the head is made again, too, and resumes from the store."""
    replaced: tuple[Part, ...] = ()
    """Lost parts in whose places new ones were made, the last one of each number."""
    trouble: Trouble | None = None
    """Why the job does not start, or why it ended: the trouble that explains most. If it does not heal, a waiting job can never start."""
    suspended: str = ""
    """Why the job is suspended; empty if it is not."""
    queue_position: int | None = None
    """The job's place in the queue that it waits in, from 1; None if it waits in none, or if that is not known."""
    gone: bool = False
    """Whether the job's object has been deleted."""
    finished: Literal["", "succeeded", "failed", "cancelled"] = ""
    """How the job ended by the state of its object; used only if no pod shows it."""
    fresh: bool = True
    """Whether the report is up to date: an old one must not end a job."""

    @property
    def head(self) -> Part | None:
        """The first pod; None if it does not exist."""
        return next((part for part in self.parts if part.number == 0), None)

    @property
    def is_over_unheard(self) -> bool:
        """Whether the object has failed, and no head runs or has ended that could say why."""
        return self.finished == "failed" and (self.head is None or self.head.state == "waiting")


class HeadConnection(Protocol):
    """A connection to the head's byte server: a socket, or a tunnel that has its methods."""

    def sendall(self, data: bytes, /) -> object:
        """Send all of the data."""

    def recv(self, size: int, /) -> bytes:
        """Receive at most `size` bytes; none at the end. Raises `TimeoutError` when the timeout is over first."""

    def settimeout(self, seconds: float | None, /) -> None:
        """Set how long `recv` and `sendall` wait."""

    def shutdown(self, how: int, /) -> None:
        """End the connection, also for a thread that waits in `recv`. `how` is always `SHUT_RDWR`."""

    def close(self) -> None:
        """Close the connection, which no other thread may use any more."""


class Place(Protocol):
    """Where containers of jobs run: a Docker engine, a Kubernetes cluster.

    Every method may raise `BackendError`; if that is `retryable`, the same call may succeed later.
    """

    name: str
    """The word that `on=` takes."""
    noun: str
    """The word for a part: `container`, `pod`."""

    def settle(self, request: Request, *, name: str, image: str, recipe: Recipe | None, submit: bool) -> Settled:
        """Look up what a request leaves open, check whether the job could run, and make its image; see `Backend`."""

    def render(self, spec: JobSpec) -> str:
        """The objects that `start` creates, as text. Pure."""

    def object_name(self, job: str, life: int) -> str:
        """Name of the object that `start` creates: the job's name, `<name>-2` for the second. Pure."""

    def start(
        self, spec: JobSpec, key: bytes, life: Life = FIRST_LIFE, checkpoint: pathlib.Path | None = None
    ) -> PlacedJob:
        """Create a job's object and its input.

        Args:
            spec: The job, settled by this place.
            key: The job's secret bytes.
            life: Which object of the job it is, and what the earlier ones have used.
            checkpoint: From which the job resumes; None to start from the beginning.

        Raises:
            JobExistsError: An object of this name exists. It may be the same job's: another follower was first.
        """

    def order(self, spec: JobSpec, life: Life) -> Order:
        """The order that a job would get in pods that are there already. Arguments as for `start`."""

    def send_input(self, handle: PlacedJob, key: bytes, on_progress: Callable[[str], None]) -> None:
        """Send the input that did not fit into the objects of `start`. Called in a thread of the follower's.

        Args:
            handle: The job.
            key: The job's secret bytes.
            on_progress: Called with a sentence such as `sent 120 of 200 MB`.
        """
        del handle, key, on_progress

    def look(self, handle: PlacedJob) -> Look:
        """Report on the job. Cheap: may be called several times a second."""

    def listen(self, handle: PlacedJob, changed: Callable[[], None]) -> Callable[[], None]:
        """Call `changed`, from any thread, whenever `look` may return something new; the follower also looks once a second.

        Returns:
            A function that ends the subscription.
        """
        del handle, changed
        return lambda: None

    def head_output(self, handle: PlacedJob, *, follow: bool) -> contextlib.AbstractContextManager[Iterator[bytes]]:
        """The output of the head's container, as far as the place still has it.

        Args:
            handle: The job.
            follow: Whether to wait for more until the container ends.
        """

    def last_words(self, handle: PlacedJob, part: Part, limit: int) -> bytes:
        """The last bytes of a container's output, at most `limit`; empty if the place no longer has them."""

    def connect(self, handle: PlacedJob) -> HeadConnection:
        """Connect to the head's byte server.

        Raises:
            NoConnectionError: Rights or the network forbid it, now and later.
            BackendError: It is not possible now.
        """

    def fetch(self, handle: PlacedJob, name: str, target: pathlib.Path) -> bool:
        """Fetch a file (an outcome, `checkpoint`) without a connection to the head, which may have ended.

        Args:
            handle: The job.
            name: Of the file in the head's folder.
            target: Where to write it.

        Returns:
            Whether the place has it.
        """

    def kill(self, handle: PlacedJob, grace_s: float, why: str = "", *, head_leaves: bool = False) -> None:
        """End all containers: SIGTERM, and SIGKILL after `grace_s`. Those that have ended stay, and no other starts.

        Args:
            handle: The job.
            grace_s: Seconds between the signals.
            why: Why the job has failed, for users of other machines; empty if a user cancels it.
            head_leaves: Whether the head ends by itself, or has ended: the others are ended after it.
        """

    def remove(self, handle: PlacedJob) -> None:
        """Remove the job's objects, which may be gone already, and everything that was made for them.

        Waits until the pods are gone, too, or until their grace is over: their quota, GPUs and names are then free.
        """

    def survey(self, namespace: str | None, labels: Mapping[str, str]) -> Sequence[JobStatus]:
        """The statuses of all jobs, oldest first, in one request; see `Backend`."""

    def adopt(self, ref: JobRef, *, trust: bool | None) -> tuple[PlacedJob, bytes | None]:
        """Find a job that was submitted from another machine.

        Args:
            ref: The job.
            trust: Whether its key is read, so that its results may be loaded; with None nothing warns that it is not.

        Returns:
            The handle of its present object, with the full reference, and the job's key; None if the key may not be read.

        Raises:
            JobNotFoundError: No such job.
        """

    def describe(self, handle: PlacedJob) -> dict[str, Any]:
        """The job's object, as its API shows it; empty if it is no single object."""
        del handle
        return {}

    def events(self, handle: PlacedJob) -> Sequence[PlaceEvent]:
        """The place's events about the job, oldest first; empty if the place has none."""
        del handle
        return ()

    def volumes(self) -> Sequence[str]:
        """Names of the volumes that jobs can have, as the values of `volumes=` take them."""

    def close(self) -> None:
        """Close idle connections; the next call opens new ones."""
