"""Takes a snapshot: the pickled call, the memory of its tensors, local modules and cell sources, as blobs in a store."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import json
import linecache
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import cloudpickle

from kale_dist import wire
from kale_dist.errors import SnapshotError
from kale_dist.snapshot import loading, modules, unpicklable
from kale_dist.snapshot.origin import BlobRanges, Origin, address_of
from kale_dist.snapshot.pickler import CapturePickler, without_file
from kale_dist.snapshot.reducers import References
from kale_dist.snapshot.sources import cell_label, files_of_class
from kale_dist.wire import blobs

_WITHOUT_EFFECT = sys.stdlib_module_names | {"IPython", "cloudpickle", "ipykernel", "kale_dist", "numpy", "torch"}
"""Packages whose submodules ranks import by need alone."""

PACKED_BYTES = 64 << 10
"""Smaller buffers share blobs, which are files on most stores."""

PACK_BYTES = 4 << 20
"""A pack of small buffers is closed when it has reached this size."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A snapshot in a store: immutable, named by its digest."""

    digest: str
    """The digest of the manifest, which lists everything else."""
    size_bytes: int
    """Bytes of all blobs together."""
    blobs: tuple[str, ...]
    """Digests of all blobs, the manifest's first."""
    notes: tuple[str, ...]
    """Notes for the user, a sentence or two each."""
    compiled: tuple[str, ...] = ()
    """Paths of local modules that are machine code."""
    imports: tuple[str, ...] = ()
    """Dotted names of modules that the call imports and that are not the notebook's own code."""
    originals: References
    """The notebook's own functions and classes by the numbers by which results refer to them."""
    counted: tuple[str, ...] = ()
    """Classes of arguments in which the notebook's one process has already been counted with."""
    origin: Origin
    """Where it has the bytes of the call's tensors and arrays."""

    def check_counts(self, label: str, number_of_processes: int) -> None:
        """Refuse what was computed for one process where there are more.

        Args:
            label: What uses it, for people.
            number_of_processes: Of the job.

        Raises:
            SnapshotError: A part of the snapshot has such numbers.
        """
        if self.counted and number_of_processes > 1:
            raise SnapshotError(
                f"{label} uses a {self.counted[0]} that was made in the notebook, which computed its batches for one process, and"
                f" the job has {number_of_processes}. Make the {self.counted[0]} inside the function"
            )


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    store: blobs.Store,
    label: str,
    script: modules.Script | None = None,
    roots: Iterable[unpicklable.Step] | None = None,
    own_devices: bool = False,
    references: References | None = None,
    left_out: Collection[str] = (),
    there: Mapping[str, object] = types.MappingProxyType({}),
) -> Snapshot:
    """Take a snapshot of a call. Later changes in the notebook do not alter it.

    Args:
        fn: The function that every rank calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        store: Receives the blobs.
        label: A name for the call, for people.
        script: A script whose files are sent, too.
        roots: First steps of paths to unpicklable objects; None for the arguments' names and `fn`'s own.
        own_devices: Whether a `torch.device` of a GPU becomes the rank's own, whichever it is here.
        references: Numbers of functions and classes that ranks were sent before.
        left_out: Globals of functions that are not sent with them.
        there: Objects that the ranks have in their `__main__`, by name.

    Raises:
        NotSerializableError: An object cannot be pickled; the message has the path to it and a remedy.
        StoreError: The disk is full, or the store cannot be written.
    """
    file = io.BytesIO()
    pickler = CapturePickler(file, own_devices=own_devices, originals=references, left_out=left_out, there=there)
    try:
        pickler.dump((fn, args, kwargs))
    except Exception as error:
        roots = roots or unpicklable.roots_of_call(fn, args, kwargs)
        raise unpicklable.explain(error, pickler.last, roots) from error
    with _Writer(store) as writer:
        storages = writer.put_all(pickler.storages)
        buffers = writer.put_all([(buffer.raw(),) for buffer in pickler.buffers])
        local = modules.collect(pickler.modules, script)
        # Blobs are named by their content: a file that is sent under several names is stored once.
        files = [(file.path, writer.put((file.read(),)), file.mode) for file in local.files]
        texts = writer.put((json.dumps(_cell_sources(pickler.codes, pickler.classes)).encode(),))
        pickled = writer.put((file.getvalue(),))
        main = sys.modules["__main__"]
        manifest: dict[str, Any] = {
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
            "imported": _imported({name.partition(".")[0] for name in local.others}),
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
            counted=tuple(sorted(pickler.counted)),
            origin=Origin(
                digest=digest,
                storages=dict(zip(pickler.storage_ids, manifest["storages"], strict=True)),
                buffers=dict(zip(map(address_of, pickler.buffers), manifest["buffers"], strict=True)),
                memory=BlobRanges(store),
            ),
        )


BlobRange = tuple[concurrent.futures.Future[str], int, int]
"""A blob's digest, the first byte in it, and how many bytes."""


class _Writer:
    """Writes buffers to a store in two threads, so that one hashes while the other writes."""

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

    def put_all(self, sources: Iterable[Sequence[blobs.Buffer]]) -> list[BlobRange]:
        """Write each source as a blob of its own; small ones share blobs. Returns where each source is, in order."""
        ranges: dict[int, BlobRange] = {}
        small: dict[int, bytes] = {}
        packed = 0
        for number, source in enumerate(sources):
            size = _size(source)
            if size >= PACKED_BYTES:
                ranges[number] = self.put(source), 0, size
                continue
            small[number] = b"".join(source)
            packed += size
            if packed >= PACK_BYTES:
                ranges |= self._pack(small)
                small, packed = {}, 0
        ranges |= self._pack(small)
        return [ranges[number] for number in sorted(ranges)]

    def _pack(self, sources: dict[int, bytes]) -> dict[int, BlobRange]:
        """Write small sources as one blob, each aligned as torch's memory is; equal ones once."""
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
    """Bytes of a source; `DeviceMemory` knows its size without copying its buffers."""
    known: int | None = getattr(source, "nbytes", None)
    return sum(len(buffer) for buffer in source) if known is None else known


def _imported(packages: set[str]) -> list[str]:
    """Submodules of some packages, in the order in which the notebook has imported them: some register or patch something."""
    return [
        name
        for name, module in list(sys.modules.items())
        if (top := name.partition(".")[0]) in packages
        and not (top in _WITHOUT_EFFECT or top == name or "._" in name)
        # Aliases, such as those of six, cannot be imported.
        and getattr(getattr(module, "__spec__", None), "name", "") == name
    ]


def _cell_sources(codes: Iterable[types.CodeType], classes: Iterable[type]) -> dict[str, tuple[str, str]]:
    """The texts of the cells (or scripts) whose functions and classes are sent by value.

    Args:
        codes: Code of functions.
        classes: Classes; those without methods are looked for by name.

    Returns:
        File name in the code objects, to the text and the cell's label ("Cell In[3]", or "").
    """
    found: dict[str, tuple[str, str]] = {}
    names = [code.co_filename for code in codes]
    names += [name for cls in classes if cls.__module__ == "__main__" for name in files_of_class(cls)]
    for name in dict.fromkeys(names):
        lines = linecache.getlines(name)
        if lines:
            found[name] = ("".join(lines), cell_label(name))
    return found
