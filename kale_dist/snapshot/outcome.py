"""A rank's outcome: its return value or its exception, signed, in a file of its own.

The file is a bundle (`blobs`): the header names job, attempt and rank, the first buffer is a pickle, the others are the
buffers and tensors of the value, which stay mapped when it is read. The signature, an HMAC-SHA256 with the job's key
over job, attempt, rank and all bytes, is checked before anything is unpickled. It protects against other people who can
write to the outcome's folder, not against the user's own code in the rank, whose process has the key.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import hmac
import io
import json
import os
import pathlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from kale_dist import wire
from kale_dist.errors import ConfigError, RemoteError, ResultUnavailableError, SnapshotDamagedError, StoreError
from kale_dist.errors.local_variables import FrameLocals
from kale_dist.snapshot import folders, reducers, sources, unpicklable
from kale_dist.snapshot.pickling import TensorPickler
from kale_dist.snapshot.reducers import References
from kale_dist.wire import blobs, context

_SIGNED_AT_ONCE = 1 << 24
"""Bytes after which a rank that signs a large result reports progress, so that it does not count as stalled."""

_MOST_CAUSES = 100
"""Longer chains of causes are cut."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one rank."""

    ok: bool
    value: Any = None
    """The function's return value."""
    error: BaseException | None = None
    """The exception with its causes and notes; a `RemoteError` if it cannot be loaded here."""
    traceback: str = ""
    """The error's traceback as the rank would have printed it, with the lines of the cells."""
    locals: tuple[FrameLocals, ...] = ()
    """The local variables of the error's last frames."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Signer:
    """Identifies an outcome (job, attempt, rank) and signs it."""

    key: bytes = dataclasses.field(repr=False)
    """The job's secret."""
    job: str
    """Name of the job's object: `Order.object`."""
    attempt: int
    """The attempt's number at its head, from 0."""
    rank: int

    def header(self, *, ok: bool) -> dict[str, Any]:
        """The bundle's header."""
        return {
            "contract": wire.VERSION, "job": self.job, "attempt": self.attempt, "rank": self.rank, "ok": ok
        }  # fmt: skip

    def sign(self, header: dict[str, Any], buffers: Sequence[blobs.Buffer]) -> str:
        """HMAC-SHA256 over the header and each buffer with its length."""
        signature = hmac.new(self.key, json.dumps(header, sort_keys=True).encode(), hashlib.sha256)
        for buffer in buffers:
            view = memoryview(buffer)
            signature.update(b"\n%d\n" % view.nbytes)
            for start in range(0, view.nbytes, _SIGNED_AT_ONCE):
                context.mark_progress()
                signature.update(view[start : start + _SIGNED_AT_ONCE])
        return signature.hexdigest()

    def has_signed(self, header: dict[str, Any], buffers: Sequence[blobs.Buffer]) -> bool:
        """Whether a bundle has this signer's signature."""
        signed = {name: value for name, value in header.items() if name != "mac"}
        wanted = self.header(ok=signed.get("ok") is True)
        if "buffers" in signed:
            wanted["buffers"] = signed["buffers"]
        mac = str(header.get("mac")).encode("utf-8", "replace")
        return hmac.compare_digest(mac, self.sign(wanted, buffers).encode()) and signed == wanted


class _OutcomePickler(TensorPickler):
    """Pickles functions and classes that came with the snapshot as their numbers, and the files of rank 0's folders."""

    def __init__(self, file: IO[bytes], references: References, rank: int) -> None:
        super().__init__(file)
        self._references = references
        self._rank = rank
        self._folders = 0

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, folders.Folder):
            if self._rank:
                return reducers.same, (None,)
            self._folders += 1
            return reducers.make_folder, (self._folders, *folders.pack(obj))
        index = self._references.index_of(obj)
        if index is not None:
            return reducers.resolve, (index,)
        return super().reducer_override(obj)


def write_success(path: str | os.PathLike[str], *, signer: Signer, value: object, references: References) -> None:
    """Write the return value of a rank's function.

    Args:
        path: The file (`wire.JobFiles.outcome`).
        signer: Signs for the job, attempt and rank.
        value: Anything that can be pickled. Tensors are written without a copy; those on an accelerator arrive
            in main memory.
        references: Functions and classes of the loaded snapshot.

    Raises:
        NotSerializableError: The value cannot be pickled; the message has the path to the culprit.
        ConfigError: A folder in it cannot be sent.
        StoreError: The disk is full.
    """
    try:
        data, pickler = _pickle(value, references, signer.rank)
    except ConfigError:
        raise
    except Exception as error:
        raise unpicklable.explain(error, getattr(error, "culprit", value), [("the returned value", value)]) from error
    storages = [_joined(source) for source in pickler.storages]
    buffers = [data, *(buffer.raw() for buffer in pickler.buffers), *storages]
    header = signer.header(ok=True) | {"buffers": len(pickler.buffers)}
    _write(path, signer, header, buffers)


def write_failure(
    path: str | os.PathLike[str],
    *,
    signer: Signer,
    error: BaseException,
    references: References,
    shown: Mapping[int, FrameLocals] | None = None,
) -> None:
    """Write the exception of a rank's function. An exception that cannot be pickled is written as text.

    Args:
        path: The file (`wire.JobFiles.outcome`).
        signer: Signs for the job, attempt and rank.
        error: The exception with its traceback.
        references: Functions and classes of the loaded snapshot.
        shown: The local variables of its frames: `sources.locals_of`.

    Raises:
        StoreError: The disk is full.
    """

    def dump(value: object) -> bytes:
        data, pickler = _pickle(value, references, signer.rank, inline=True)
        # An exception with buffers out of band would need a list of buffers for each of its causes.
        if pickler.storages:
            raise pickle.PicklingError("an exception with tensors in it")
        return data

    described = describe_error(error, dump, shown or {})
    _write(path, signer, signer.header(ok=False), [json.dumps(described).encode()])


def read_outcome(path: str | os.PathLike[str], *, signer: Signer, resolve: Callable[[int], Any]) -> Outcome:
    """Check the signature of a rank's outcome, and read the outcome.

    Args:
        path: The file.
        signer: Identifies the expected job, attempt and rank.
        resolve: Returns this process's own function or class for a number of the snapshot (`References.resolve`).

    Raises:
        ResultUnavailableError: There is no file, or its value cannot be loaded here.
        StoreError: A returned folder cannot be written here.
        SnapshotDamagedError: The file is cut short, or the signature is not this job's for this attempt and rank.
    """
    rank, job = signer.rank, signer.job
    try:
        header, buffers = blobs.open_bundle(path)
    except StoreError as error:
        raise ResultUnavailableError(f"Rank {rank} of {job} has left no outcome: {error}", job) from error
    # The first buffer can run code, so it is copied before the check: no other process can write to the copy.
    data = bytes(buffers[0]) if buffers else b""
    if not signer.has_signed(header, [data, *buffers[1:]]):
        raise SnapshotDamagedError(
            f"The outcome of rank {rank} of {job} was not signed by this job (attempt {signer.attempt}): it is damaged, or "
            "another process wrote it. It has not been loaded."
        )
    if not header["ok"]:
        with reducers.loading(_surroundings(lambda _: memoryview(b""), resolve)):
            described = json.loads(data)
            failure, text = rebuild_error(described, pickle.loads)
        frames = tuple(FrameLocals(**frame) for frame in described.get("locals", ()))
        return Outcome(ok=False, error=failure, traceback=text, locals=frames)
    count = int(header["buffers"])
    plain, storages = buffers[1 : count + 1], buffers[count + 1 :]
    # By the signature, because a live rank's outcomes have one path.
    returned = pathlib.Path(path).with_name("returned") / str(header["mac"])[:16]
    with reducers.loading(_surroundings(storages.__getitem__, resolve, returned)):
        try:
            value = pickle.loads(data, buffers=plain)
        except StoreError:
            raise
        except Exception as error:
            raise ResultUnavailableError(
                f"The value that rank {rank} of {job} returned cannot be loaded here: {type(error).__name__}: {error}. "
                "Return numbers, tensors, dicts and lists of them, or objects of classes that are importable here.",
                job,
            ) from error
    return Outcome(ok=True, value=value)


def _pickle(value: object, references: References, rank: int, *, inline: bool = False) -> tuple[bytes, TensorPickler]:
    file = io.BytesIO()
    pickler = _OutcomePickler(file, references, rank)
    try:
        pickler.dump(value)
    except Exception as error:
        error.culprit = pickler.last  # type: ignore[attr-defined] # for the search for the path to it
        raise
    if inline and pickler.buffers:
        raise pickle.PicklingError("an exception with arrays in it")
    return file.getvalue(), pickler


def _joined(source: Sequence[blobs.Buffer]) -> blobs.Buffer:
    """The buffers of a storage as one; only memory of accelerators has several."""
    return source[0] if len(source) == 1 else b"".join(source)


def _write(
    path: str | os.PathLike[str], signer: Signer, header: dict[str, Any], buffers: Sequence[blobs.Buffer]
) -> None:
    signed = header | {"mac": signer.sign(header, buffers)}
    blobs.write_bundle(pathlib.Path(path), signed, buffers, on_progress=context.mark_progress)


def _surroundings(
    storage: Callable[[int], memoryview], resolve: Callable[[int], Any], returned: pathlib.Path | None = None
) -> reducers.Loading:
    return reducers.Loading(storage=storage, main={}, references=References(), resolve=resolve, returned=returned)


# -- exceptions: each with its causes, notes and traceback, and a stand-in where it must be ---------------------------


def describe_error(
    error: BaseException, dump: Callable[[object], bytes], shown: Mapping[int, FrameLocals]
) -> dict[str, Any]:
    """Describe an exception and its causes for JSON. Never raises, whatever the exceptions' own methods do.

    Args:
        error: The exception.
        dump: Pickles a value, or raises.
        shown: The local variables of its frames.
    """
    chain: list[BaseException] = [error]
    described: list[dict[str, Any]] = []
    for position in range(_MOST_CAUSES):
        if position == len(chain):
            break
        one = chain[position]
        links = {}
        for name in ("__cause__", "__context__"):
            linked = _quietly(getattr, one, name)
            if isinstance(linked, BaseException):
                known = next((number for number, other in enumerate(chain) if other is linked), None)
                if known is None:
                    known = len(chain)
                    chain.append(linked)
                links[name] = known
        notes = _quietly(getattr, one, "__notes__")
        described.append(
            {
                "type": sources.type_name(one),
                "text": _text_of(one),
                "traceback": sources.format_error(one, shown) if position == 0 else "",
                "notes": [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else [],
                "suppress": bool(_quietly(getattr, one, "__suppress_context__")),
                "links": links,
                "pickles": [base64.b64encode(data).decode() for data in _pickles(one, dump)],
            }
        )
    return {"chain": described, "locals": [dataclasses.asdict(frame) for frame in shown.values()]}


def rebuild_error(described: dict[str, Any], load: Callable[[bytes], Any]) -> tuple[BaseException, str]:
    """Rebuild the exception of a description, with its causes.

    Args:
        described: The value of `describe_error`.
        load: Unpickles, or raises.

    Returns:
        The exception and its formatted traceback.
    """
    chain = described["chain"]
    text = str(chain[0]["traceback"])
    made = [_rebuild_one(one, load, text if position == 0 else one["text"]) for position, one in enumerate(chain)]
    for error, one in zip(made, chain, strict=True):
        for name, position in one["links"].items():
            if position < len(made) and made[position] is not error:
                setattr(error, name, made[position])
        error.__suppress_context__ = one["suppress"]
        if one["notes"]:
            error.__notes__ = list(one["notes"])
    return made[0], text


def _rebuild_one(one: dict[str, Any], load: Callable[[bytes], Any], traceback: str) -> BaseException:
    for data in one["pickles"]:
        with contextlib.suppress(Exception):
            error = load(base64.b64decode(data))
            if isinstance(error, BaseException):
                return error
    return RemoteError(one["type"], one["text"], traceback)


def _pickles(error: BaseException, dump: Callable[[object], bytes]) -> list[bytes]:
    """The pickled exception, or else its pickled class and arguments alone; empty if neither can be pickled."""
    with contextlib.suppress(Exception):
        return [dump(error)]
    with contextlib.suppress(Exception):
        return [dump(_Bare(error))]
    return []


class _Bare:
    """Pickles as an exception of the same class and arguments, without the attributes that were set on it."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self._error), self._error.args


def _text_of(error: BaseException) -> str:
    text = _quietly(str, error)
    return text if isinstance(text, str) else "(its text cannot be shown)"


def _quietly(function: Callable[..., Any], *args: Any) -> Any:
    """The function's return value, or None if it raises."""
    with contextlib.suppress(Exception):
        return function(*args)
    return None
