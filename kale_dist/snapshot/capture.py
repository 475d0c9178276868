"""Take a snapshot: the pickled call, the memory of its tensors, local modules and cell sources, as blobs in a store."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import json
import linecache
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import cloudpickle

from kale_dist import blobs, contract
from kale_dist.errors import SnapshotError
from kale_dist.runtime import loading, unpicklable
from kale_dist.runtime.reducers import References
from kale_dist.runtime.sources import cell_label, files_of_class
from kale_dist.snapshot import modules
from kale_dist.snapshot.pickler import CapturePickler, without_file

PACKED_BYTES = 64 << 10
"""Smaller buffers share blobs, which are files on most stores."""

PACK_BYTES = 4 << 20
"""A pack of small buffers is closed when it has reached this size."""

Originals = References
"""The notebook's own functions and classes by number: `originals.resolve(number)`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What runs: immutable, named by its digest."""

    digest: str
    """Name of the manifest, which names everything else."""
    label: str
    """What was called, for people."""
    size_bytes: int
    """Bytes of all blobs."""
    new_bytes: int
    """Bytes of those that the store did not have before."""
    blobs: tuple[str, ...]
    """Digests of all blobs, the manifest's first."""
    notes: tuple[str, ...]
    """What the user should be told, a sentence or two each."""
    compiled: tuple[str, ...] = ()
    """Paths of local modules' files that hold machine code."""
    imports: tuple[str, ...] = ()
    """Names, with dots, of what the call imports from outside the notebook's own code."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A snapshot, and what the notebook keeps to understand results."""

    snapshot: Snapshot
    originals: Originals


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    store: blobs.Store,
    label: str,
    script: modules.Script | None = None,
) -> Captured:
    """Take a snapshot of a call. When this returns, nothing that happens in the notebook can change it.

    Args:
        fn: The function that every rank calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments. Keywords and `fn`'s own name are what paths to unpicklable things begin with.
        store: Where the blobs go.
        label: What is called, for people.
        script: A script whose files are sent along.

    Raises:
        NotSerializableError: Something cannot be pickled; names the path to it and a remedy.
        StoreError: The disk is full, or the store cannot be written.
    """
    file = io.BytesIO()
    pickler = CapturePickler(file)
    try:
        pickler.dump((fn, args, kwargs))
    except Exception as error:
        raise unpicklable.explain(error, pickler.last, unpicklable.roots_of_call(fn, args, kwargs)) from error
    with _Writer(store) as writer:
        storages = writer.place(pickler.storages)
        buffers = writer.place([(_flat(buffer),) for buffer in pickler.buffers])
        local = modules.collect(pickler.modules, script)
        # One file may lie under several names; its bytes are read and kept once.
        files = [(file.path, writer.put((file.read(),)), file.mode) for file in local.files]
        texts = writer.put((json.dumps(_cell_sources(pickler.codes, pickler.classes)).encode(),))
        pickled = writer.put((file.getbuffer(),))
        manifest = {
            "contract": contract.VERSION,
            "python": loading.python_version(),
            "torch": loading.torch_version(),
            "cloudpickle": cloudpickle.__version__,
            "label": label,
            "pickle": pickled.result(),
            "buffers": [place() for place in buffers],
            "storages": [place() for place in storages],
            "modules": [(path, blob.result(), mode) for path, blob, mode in files],
            "sources": texts.result(),
            "main": _describe_main(sys.modules["__main__"]),
        }
        digest = writer.put((json.dumps(manifest, sort_keys=True).encode(),)).result()
        snapshot = Snapshot(
            digest=digest,
            label=label,
            size_bytes=sum(writer.sizes.values()),
            new_bytes=sum(size for blob, size in writer.sizes.items() if blob not in writer.before),
            blobs=(digest, *sorted(writer.sizes.keys() - {digest})),
            notes=local.notes,
            compiled=tuple(str(file.source) for file in local.files if file.source.suffix == ".so"),
            imports=tuple(name for name in local.others if not without_file(name.partition(".")[0])),
        )
    return Captured(snapshot=snapshot, originals=pickler.originals)


Place = Callable[[], tuple[str, int, int]]


class _Writer:
    """Hands buffers to a store from two threads, so that one hashes while the other writes."""

    def __init__(self, store: blobs.Store) -> None:
        self._store = store
        self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="kale_dist snapshot")
        self.before = frozenset(store.list())
        self.sizes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def put(self, buffers: Sequence[blobs.Buffer]) -> concurrent.futures.Future[str]:
        return self._pool.submit(self._put, buffers)

    def _put(self, buffers: Sequence[blobs.Buffer]) -> str:
        digest = self._store.put(buffers)
        self.sizes[digest] = _size(buffers)
        return digest

    def place(self, sources: Iterable[Sequence[blobs.Buffer]]) -> list[Place]:
        """Put each source into a blob of its own, or into one with other small ones."""
        places: list[Place] = []
        pack = _Pack()
        for source in sources:
            if _size(source) >= PACKED_BYTES:
                places.append(self._alone(source))
                continue
            places.append(pack.add(b"".join(source)))
            if len(pack.data) >= PACK_BYTES:
                pack.blob = self.put((pack.data,))
                pack = _Pack()
        if pack.data or pack.used:
            pack.blob = self.put((pack.data,))
        return places

    def _alone(self, source: Sequence[blobs.Buffer]) -> Place:
        blob, size = self.put(source), _size(source)
        return lambda: (blob.result(), 0, size)


class _Pack:
    """Small buffers in one blob, each aligned as torch's memory is; equal ones once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.used = False
        self.blob: concurrent.futures.Future[str] | None = None
        self._offsets: dict[bytes, int] = {}

    def add(self, data: bytes) -> Place:
        self.used = True
        if data not in self._offsets:
            self.data += bytes(-len(self.data) % blobs.ALIGNMENT)
            self._offsets[data] = len(self.data)
            self.data += data
        offset = self._offsets[data]
        return lambda: (self._digest(), offset, len(data))

    def _digest(self) -> str:
        if self.blob is None:
            raise SnapshotError("A pack of buffers was never written.")
        return self.blob.result()


def _size(source: Sequence[blobs.Buffer]) -> int:
    """Bytes of a source. One that makes its buffers when asked knows its size without."""
    known: int | None = getattr(source, "nbytes", None)
    return sum(len(buffer) for buffer in source) if known is None else known


def _flat(buffer: Any) -> memoryview:
    """The bytes of an out-of-band buffer, in the order in which they lie in memory."""
    raw: memoryview = buffer.raw()
    return raw


def _cell_sources(codes: Iterable[types.CodeType], classes: Iterable[type]) -> dict[str, tuple[str, str]]:
    """Texts of the cells (or scripts) from which code is sent by value.

    Args:
        codes: Code of functions.
        classes: Classes; those without methods are looked for by name.

    Returns:
        File name in the code objects, to the text and to what the user calls it ("Cell In[3]", or "").
    """
    found: dict[str, tuple[str, str]] = {}
    names = [code.co_filename for code in codes]
    names += [name for cls in classes if cls.__module__ == "__main__" for name in files_of_class(cls)]
    for name in dict.fromkeys(names):
        lines = linecache.getlines(name)
        if lines:
            found[name] = ("".join(lines), cell_label(name))
    return found


def _describe_main(main: types.ModuleType) -> dict[str, Any]:
    """What a rank's `__main__` needs to be like this one: "file" and "package", null where it has none."""
    return {"file": getattr(main, "__file__", None), "package": getattr(main, "__package__", None)}
