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

from kale_dist import wire
from kale_dist.snapshot import loading, modules, unpicklable
from kale_dist.snapshot.pickler import CapturePickler, without_file
from kale_dist.snapshot.reducers import References
from kale_dist.snapshot.sources import cell_label, files_of_class
from kale_dist.wire import blobs

PACKED_BYTES = 64 << 10
"""Smaller buffers share blobs, which are files on most stores."""

PACK_BYTES = 4 << 20
"""A pack of small buffers is closed when it has reached this size."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What runs: immutable, named by its digest."""

    digest: str
    """Name of the manifest, which names everything else."""
    size_bytes: int
    """Bytes of all blobs."""
    blobs: tuple[str, ...]
    """Digests of all blobs, the manifest's first."""
    notes: tuple[str, ...]
    """What the user should be told, a sentence or two each."""
    compiled: tuple[str, ...] = ()
    """Paths of local modules' files that hold machine code."""
    imports: tuple[str, ...] = ()
    """Names, with dots, of what the call imports from outside the notebook's own code."""
    originals: References
    """The notebook's own functions and classes by number, by which results refer to them."""


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    store: blobs.Store,
    label: str,
    script: modules.Script | None = None,
    roots: Iterable[unpicklable.Step] | None = None,
) -> Snapshot:
    """Take a snapshot of a call. When this returns, nothing that happens in the notebook can change it.

    Args:
        fn: The function that every rank calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        store: Where the blobs go.
        label: What is called, for people.
        script: A script whose files are sent along.
        roots: What paths to unpicklable things begin with; None: the arguments' names and `fn`'s own.

    Raises:
        NotSerializableError: Something cannot be pickled; names the path to it and a remedy.
        StoreError: The disk is full, or the store cannot be written.
    """
    file = io.BytesIO()
    pickler = CapturePickler(file)
    try:
        pickler.dump((fn, args, kwargs))
    except Exception as error:
        roots = roots or unpicklable.roots_of_call(fn, args, kwargs)
        raise unpicklable.explain(error, pickler.last, roots) from error
    with _Writer(store) as writer:
        storages = writer.place(pickler.storages)
        buffers = writer.place([(buffer.raw(),) for buffer in pickler.buffers])
        local = modules.collect(pickler.modules, script)
        # One file may lie under several names; its bytes are read and kept once.
        files = [(file.path, writer.put((file.read(),)), file.mode) for file in local.files]
        texts = writer.put((json.dumps(_cell_sources(pickler.codes, pickler.classes)).encode(),))
        pickled = writer.put((file.getbuffer(),))
        main = sys.modules["__main__"]
        manifest = {
            "contract": wire.VERSION,
            "python": loading.python_version(),
            "torch": loading.torch_version(),
            "cloudpickle": cloudpickle.__version__,
            "label": label,
            "pickle": pickled.result(),
            "buffers": [(blob.result(), offset, size) for blob, offset, size in buffers],
            "storages": [(blob.result(), offset, size) for blob, offset, size in storages],
            "modules": [(path, blob.result(), mode) for path, blob, mode in files],
            "sources": texts.result(),
            # What a rank's `__main__` needs to be like this one.
            "main": {"file": getattr(main, "__file__", None), "package": getattr(main, "__package__", None)},
        }
        digest = writer.put((json.dumps(manifest, sort_keys=True).encode(),)).result()
        return Snapshot(
            digest=digest,
            size_bytes=sum(writer.sizes.values()),
            blobs=(digest, *sorted(writer.sizes.keys() - {digest})),
            notes=local.notes,
            compiled=tuple(str(file.source) for file in local.files if file.source.suffix == ".so"),
            imports=tuple(name for name in local.others if not without_file(name.partition(".")[0])),
            originals=pickler.originals,
        )


Place = tuple[concurrent.futures.Future[str], int, int]
"""The blob that has a source, from which byte on, and how many."""


class _Writer:
    """Hands buffers to a store from two threads, so that one hashes while the other writes."""

    def __init__(self, store: blobs.Store) -> None:
        self._store = store
        self._pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="kale_dist snapshot")
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
        places: dict[int, Place] = {}
        small: dict[int, bytes] = {}
        packed = 0
        for number, source in enumerate(sources):
            size = _size(source)
            if size >= PACKED_BYTES:
                places[number] = self.put(source), 0, size
                continue
            small[number] = b"".join(source)
            packed += size
            if packed >= PACK_BYTES:
                places |= self._pack(small)
                small, packed = {}, 0
        places |= self._pack(small)
        return [places[number] for number in sorted(places)]

    def _pack(self, sources: dict[int, bytes]) -> dict[int, Place]:
        """Small sources in one blob, each aligned as torch's memory is; equal ones once."""
        if not sources:
            return {}
        data, offsets = bytearray(), dict[bytes, int]()
        for source in sources.values():
            if source not in offsets:
                data += bytes(-len(data) % blobs.ALIGNMENT)
                offsets[source] = len(data)
                data += source
        blob = self.put((data,))
        return {number: (blob, offsets[source], len(source)) for number, source in sources.items()}


def _size(source: Sequence[blobs.Buffer]) -> int:
    """Bytes of a source. One that makes its buffers when asked knows its size without."""
    known: int | None = getattr(source, "nbytes", None)
    return sum(len(buffer) for buffer in source) if known is None else known


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
