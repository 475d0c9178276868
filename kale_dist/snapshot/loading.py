"""Loads a call from a snapshot in a store: in a rank, in its DataLoader workers, and where a job is attached.

A snapshot is a manifest (JSON, a blob; its digest names the snapshot) and the blobs it lists:

    contract, python, torch, cloudpickle   versions of the notebook
    label       a name for the call, for people
    pickle      digest of the pickled (function, arguments, keywords)
    buffers     [blob, offset, bytes] of each out-of-band buffer of the pickle, in its order
    storages    [blob, offset, bytes] of each tensor storage, by number
    modules     [path on sys.path, blob, mode] of each file of the notebook's local modules
    sources     digest of a JSON object: file name of code to [text, label]
    imported    submodules of the packages of the call that the notebook has imported
    main        attributes of the notebook's `__main__`: "file", "package" (null where it has none)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import pickle
import re
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cloudpickle

from kale_dist import wire
from kale_dist.errors import ContractError, SnapshotDamagedError, SnapshotError, StoreError
from kale_dist.snapshot import reducers, sources
from kale_dist.snapshot.origin import BlobRanges, Origin, address_of
from kale_dist.snapshot.reducers import References
from kale_dist.wire import blobs, context

MAIN_VARIABLE = "KALE_DIST_SNAPSHOT"
"""From this variable a rank's child processes (spawned DataLoader workers) learn from which snapshot to fill `__main__`."""

OLDEST_TORCH = "2.9"
"""The oldest one that is tested, as in pyproject.toml."""

MAIN_SPEC = "kale_dist.snapshot.main_module"
"""Name of the module that multiprocessing runs in place of the notebook's `__main__`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A loaded call."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    references: References
    """The functions and classes that were made here, by the same numbers as in the notebook."""
    origin: Origin
    """Where the snapshot has the bytes of the call's tensors and arrays."""


def load(
    store: blobs.Store,
    digest: str,
    *,
    modules: pathlib.Path | None = None,
    fill_main: bool = True,
    device: str | None = None,
) -> Loaded:
    """Load a snapshot.

    Everything that can run code is checked against its digest first. Tensors are mapped, and only their size is checked.

    Args:
        store: The store with the blobs.
        digest: The snapshot's digest, from a trusted source.
        modules: Folder with the snapshot's local modules (`stage_modules`); it is put at the front of `sys.path`.
        fill_main: Whether to replace `__main__` by one like the notebook's, as a rank does. Otherwise this process's own
            `__main__` stays and gets the snapshot's classes and functions under names that are free.
        device: The device of tensors and generators that were on an accelerator. None: the rank's own device, which is
            "cpu" in a job without CUDA and outside of jobs.

    Raises:
        ContractError: The snapshot was taken with another Python, torch or contract version.
        SnapshotDamagedError: A blob's bytes do not have its digest.
        StoreError: A blob is missing.
        SnapshotError: The snapshot refers to something that is missing here, such as an uninstalled package.
    """
    manifest = read_manifest(store, digest)
    device = context.context().device if device is None else device
    if modules is not None and str(modules) not in sys.path:
        sys.path.insert(0, str(modules))
    sources.install(json.loads(_checked(store, manifest["sources"])))
    if fill_main:
        main = _make_main(manifest).__dict__
        _prepare_children(store, digest)
        if has_torch():
            reducers.copy_out_on_resize()
        loaded = _load(store, digest, manifest, main, device)
        _import_too(manifest["imported"])
        return loaded
    main = {"__name__": "__main__", "__builtins__": __builtins__, "__package__": manifest["main"]["package"]}
    loaded = _load(store, digest, manifest, main, device)
    for made in loaded.references:
        name = getattr(made, "__qualname__", "")
        if getattr(made, "__module__", None) == "__main__" and name.isidentifier():
            sys.modules["__main__"].__dict__.setdefault(name, made)
    return loaded


def load_names(
    store: blobs.Store, digest: str, modules: pathlib.Path, main: dict[str, Any], references: References
) -> list[str]:
    """Put the keywords of a snapshot's call into a `__main__` that is in use; gives their names.

    Args:
        store: The store with the blobs.
        digest: The snapshot's digest.
        modules: Folder with its local modules.
        main: The globals.
        references: What was loaded before: the functions and classes that are there already are not made again.
    """
    manifest = read_manifest(store, digest)
    if str(modules) not in sys.path:
        sys.path.insert(0, str(modules))
    sources.install(json.loads(_checked(store, manifest["sources"])))
    named = _load(store, digest, manifest, main, context.context().device, references).kwargs
    main.update(named)
    _import_too(manifest["imported"])
    return sorted(named)


def blobs_of(store: blobs.Store, digest: str) -> set[str]:
    """Digests of the blobs that a snapshot's manifest, which is there, names."""
    manifest = read_manifest(store, digest)
    ranges = [one[0] for one in (*manifest["buffers"], *manifest["storages"])]
    return {manifest["pickle"], manifest["sources"], *ranges, *(blob for _, blob, _ in manifest["modules"])}


def fill_spawned(main: dict[str, Any]) -> None:
    """Fill the `__main__` of a process that a rank spawned, from the rank's snapshot.

    Args:
        main: The globals to fill.
    """
    place = json.loads(os.environ[MAIN_VARIABLE])
    store = blobs.FolderStore(place["store"])
    manifest = read_manifest(store, place["snapshot"])
    sources.install(json.loads(_checked(store, manifest["sources"])))
    _load(store, place["snapshot"], manifest, main, "cpu")
    _import_too(manifest["imported"])


def read_manifest(store: blobs.Store, digest: str) -> dict[str, Any]:
    """Read a snapshot's manifest, and check its digest and versions.

    Raises:
        ContractError: The manifest's versions differ from those of this process.
        SnapshotDamagedError: The manifest's bytes do not have this digest.
        StoreError: The manifest is missing.
    """
    manifest: dict[str, Any] = json.loads(_checked(store, digest))
    if found := _differences(manifest):
        raise ContractError(
            f"The snapshot of {manifest['label']} was taken by a notebook whose versions this process cannot load: "
            f"{'; '.join(found)}. Run both with the same versions."
        )
    return manifest


def version_differences(store: blobs.Store, digest: str) -> list[str]:
    """Why this process cannot load a snapshot, such as `python is 3.12 there and 3.11 here`; empty if it can.

    Raises:
        SnapshotDamagedError: The manifest's bytes do not have this digest.
        StoreError: The manifest is missing.
    """
    return _differences(json.loads(_checked(store, digest)))


def _differences(manifest: dict[str, Any]) -> list[str]:
    found = [
        f"{what} is {manifest[what]} there and {here} here"
        for what, here, precision in (
            ("contract", str(wire.VERSION), 1),
            ("python", python_version(), 2),
            ("torch", torch_version(), 1),
        )
        if manifest[what] and here and str(manifest[what]).split(".")[:precision] != here.split(".")[:precision]
    ]
    if (here := torch_version()) and is_too_old(here):
        found.append(f"torch is {here} here, and has to be {OLDEST_TORCH} or later")
    return found


def is_too_old(torch: str) -> bool:
    """Whether a version of torch is older than `OLDEST_TORCH`."""
    numbers, oldest = (tuple(map(int, re.findall(r"\d+", one)[:2])) for one in (torch, OLDEST_TORCH))
    return numbers < oldest


def python_version() -> str:
    """Python's minor version, on which pickled code depends, such as "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def has_torch() -> bool:
    """Whether torch is installed; it is not imported to find out."""
    return "torch" in sys.modules or importlib.util.find_spec("torch") is not None


def torch_version() -> str:
    """The version of the installed torch, without importing it; "" if torch is not installed."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    return installed_torch()[0]


def installed_torch() -> tuple[str, str]:
    """Version of the torch that would be imported here, and its file with the time it was written.

    Does not import torch. Both are empty if there is none.
    """
    loaded = sys.modules.get("torch")
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return "", ""
    file = pathlib.Path(spec.origin).with_name("version.py")
    try:
        written = f"{file} {file.stat().st_mtime_ns}"
    except OSError:
        return "", spec.origin
    return _torch_version(written), written


@functools.lru_cache(maxsize=1)
def _torch_version(_written: str) -> str:
    """The version of this installation of torch, or "". Parsing torch's metadata takes 2 ms."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("torch")
    return ""


def stage_modules(store: blobs.Store, digest: str, folder: pathlib.Path) -> None:
    """Write the notebook's local modules into a folder for `sys.path`, unless the folder exists already.

    Args:
        store: The store with the blobs.
        digest: The snapshot's digest.
        folder: The folder; it appears complete or not at all.

    Raises:
        SnapshotDamagedError: A blob's bytes do not have its digest.
        StoreError: A blob is missing, or the folder cannot be written.
    """
    if folder.exists():
        return
    manifest = read_manifest(store, digest)
    temporary = ""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = tempfile.mkdtemp(prefix=".modules-", dir=folder.parent)
        for name, blob, mode in manifest["modules"]:
            relative = pathlib.PurePosixPath(name)
            if relative.is_absolute() or ".." in relative.parts:
                raise SnapshotDamagedError(f"The snapshot has a module file outside of its folder: {name!r}.")
            path = pathlib.Path(temporary, relative)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_checked(store, blob))
            path.chmod(mode)
        pathlib.Path(temporary).rename(folder)
    except OSError as error:
        # Another agent may have written the same modules meanwhile.
        if not folder.exists():
            raise StoreError(f"The notebook's modules could not be written to {folder}: {error.strerror}.") from error
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def _checked(store: blobs.Store, digest: str) -> bytes:
    """A blob's bytes, checked against its digest."""
    data = bytes(store.open(digest))
    if blobs.digest_of((data,)) != digest:
        raise SnapshotDamagedError(
            f"The blob {digest} of the snapshot is damaged: its bytes do not have this digest. Submit the job again."
        )
    return data


def _load(
    store: blobs.Store,
    digest: str,
    manifest: dict[str, Any],
    main: dict[str, Any],
    device: str,
    references: References | None = None,
) -> Loaded:
    data = _checked(store, manifest["pickle"])
    ranges = BlobRanges(store)
    references = References() if references is None else references
    surroundings = reducers.Loading(
        storage=lambda index: ranges.view(*manifest["storages"][index]),
        main=main,
        references=references,
        resolve=references.resolve,
        device=device,
    )
    with reducers.loading(surroundings):
        try:
            buffers = [ranges.view(*found) for found in manifest["buffers"]]
            fn, args, kwargs = pickle.loads(data, buffers=buffers)
        except (ImportError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                raise ContractError("The image has no torch. Give one that has, with image=") from error
            here, sent = (torch_version(), cloudpickle.__version__), (manifest["torch"], manifest["cloudpickle"])
            versions = f" (torch {sent[0]}, cloudpickle {sent[1]}; here torch {here[0]}, cloudpickle {here[1]})"
            raise SnapshotError(
                f"The snapshot of {manifest['label']} cannot be loaded in the rank: {error}. What it uses has to be "
                f"there in the notebook's versions{versions * (here != sent)}: in pods and containers, packages='here' "
                "sends what the image lacks. If copy.deepcopy() of an argument fails in the notebook too, its class "
                "cannot be sent: make that object in the function or step."
            ) from error
    origin = Origin(
        digest=digest,
        storages={storage: tuple(manifest["storages"][index]) for storage, index in surroundings.made.items()},
        buffers={address_of(buffer): tuple(found) for buffer, found in zip(buffers, manifest["buffers"], strict=True)},
        memory=ranges,
    )
    return Loaded(fn=fn, args=args, kwargs=kwargs, references=references, origin=origin)


def _import_too(names: Iterable[str]) -> None:
    """Import what the notebook has imported, for the effects of it; rank 0 logs what cannot be imported here."""
    failed = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - of a module that the call may not need
                failed.append(f"{name}: {error}")
    if failed and not context.context().rank:
        context.log(
            f"The notebook has imported modules that cannot be imported in the ranks ({'; '.join(failed[:2])}): what"
            " they register or add is missing there."
        )


def _make_main(manifest: dict[str, Any]) -> types.ModuleType:
    """Replace this process's `__main__` by a new module with the attributes of the notebook's."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    main.__package__ = manifest["main"]["package"]
    if manifest["main"]["file"] is not None:
        main.__file__ = manifest["main"]["file"]
    # multiprocessing runs the module of this name in a spawned child, to make its `__main__` like this one.
    main.__spec__ = importlib.machinery.ModuleSpec(MAIN_SPEC, None)
    # Functions of the former `__main__` may still run, and need its globals.
    _former.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    return main


_former: list[types.ModuleType] = []


def _prepare_children(store: blobs.Store, digest: str) -> None:
    """Set the variable and the `sys.path` by which spawned children find the snapshot, kale_dist and cloudpickle."""
    if not isinstance(store, blobs.FolderStore):
        return
    os.environ[MAIN_VARIABLE] = json.dumps({"store": str(store.root.absolute()), "snapshot": digest})
    for parent in _parents():
        if parent not in sys.path:
            sys.path.append(parent)


def _parents() -> Iterator[str]:
    yield str(pathlib.Path(__file__).parents[2])
    yield str(pathlib.Path(cloudpickle.__file__).parents[1])
