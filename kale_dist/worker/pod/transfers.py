"""Brings a snapshot's blobs, and the checkpoint to resume from, into a pod, from any source. Blocks: for a thread."""

from __future__ import annotations

import contextlib
import errno
import functools
import http.client
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable

from kale_dist import wire
from kale_dist.errors import ContractError, StoreError
from kale_dist.snapshot import loading
from kale_dist.wire import InputFiles, Order, Source
from kale_dist.wire.blobs import FolderStore, fresh, unpack_blobs
from kale_dist.worker.pod import packages
from kale_dist.worker.pod.byte_server import NOT_YET, BlobServer, is_intact
from kale_dist.worker.pod.pod import Pod

_LOOK_EACH_S = 0.2
_TRIES = 7
"""After the first one a pause of one second, which doubles: a minute in all."""
_SILENCE_LIMITS_S = 30.0, 10.0
"""How long the head may send nothing, and another relay, in whose place there is the head."""
_PIECE_BYTES = 1 << 20


def missing(pod: Pod, *, with_packages: bool = True) -> list[str]:
    """Digests of the blobs that this pod needs and that are not there yet; only the first pod's rank 0 reads a checkpoint."""
    heads = (pod.order.resume, pod.order.checkpoint) if pod.place.pod else ()
    needed = [digest for digest in pod.order.blobs if digest not in heads]
    needed += packages.blobs(pod.order.offer) if with_packages else ()
    return [digest for digest in needed if not pod.store.exists(digest)]


def bring(pod: Pod, *, received: Callable[[str], int] = lambda _: 0, server: BlobServer | None = None) -> str:
    """Get all blobs of a job, check that this pod can load them, and lay out the packages that its image lacks.

    Args:
        pod: The pod.
        received: Bytes of a blob that have come so far, of those that the notebook streams.
        server: As for `fetch`.

    Returns:
        A sentence about the packages for the log, or an empty one.

    Raises:
        StoreError: They cannot be fetched; the message gives the reason.
        SnapshotDamagedError: A blob does not have the digest that is its name.
        ContractError: This pod's Python or torch cannot load them, or its image cannot run the packages.
    """
    order = pod.order
    if server is not None and order.source is Source.STREAM:
        server.coming = dict.fromkeys(missing(pod), NOT_YET)
    if (small := pod.place.input / InputFiles.SNAPSHOT).exists():
        unpack_blobs(small, pod.store.root)
    _get(pod, functools.partial(missing, pod, with_packages=False), received, server)
    if found := loading.version_differences(pod.store, order.snapshot):
        differences = "; ".join(found).replace(" there ", " in the notebook ").replace(" here", " in the image")
        raise ContractError(
            f"The image does not fit the notebook: {differences}. "
            "Give an image with the notebook's versions, with image=, or run the notebook with the image's"
        )
    if not order.offer.packages:
        return ""
    try:
        _get(pod, functools.partial(missing, pod), received, server)
    except StoreError as error:
        remedy = "If its image lacks packages that the first pod's has, give all pods of the job one image, or a store="
        raise StoreError(
            f"{error} It was to bring packages of the notebook to pod {pod.place.pod}. {remedy}"
        ) from error
    return packages.lay_out(order.offer, pod.store, pod.tree)


def _get(pod: Pod, needed: Callable[[], list[str]], received: Callable[[str], int], server: BlobServer | None) -> None:
    """Get what is needed from where the order says that it is."""
    order = pod.order
    match order.source:
        case Source.FOLDER:
            _wait(pod, needed, f"{order.store} in pod {pod.place.pod}", received)
        case Source.URL:
            _download(pod, needed())
        case Source.STREAM if pod.place.pod == 0:
            _wait(pod, needed, "the notebook", received)
        case Source.STREAM:
            pods = pod.within or pod
            for digest in needed():
                # Warm pods have blobs in common: what serves them need not know of this job yet.
                fetch(pods.order, pods.key, pod.store, digest, server)
    if absent := needed():
        raise StoreError(f"{len(absent)} parts of the job's input are missing: {absent[0]}.")


def _wait(pod: Pod, needed: Callable[[], list[str]], whence: str, received: Callable[[str], int]) -> None:
    """Wait until the notebook has put everything there; as long as something arrives, it is there."""
    limit_s, total = pod.order.input_wait_s, len(pod.order.blobs) + len(packages.blobs(pod.order.offer))
    deadline, before = time.monotonic() + limit_s, -1
    while absent := needed():
        now = sum(map(received, absent)) + total - len(absent)
        if now != before:
            deadline, before = time.monotonic() + limit_s, now
        elif time.monotonic() > deadline:
            raise StoreError(
                f"The notebook was gone before its bytes had arrived: {len(absent)} of {total} parts of the job's input are "
                f"missing, and nothing more came from {whence} for {limit_s:g} s (input_wait_s). "
                "Keep the notebook running until the job has started, or give a store that both see (store=)"
            )
        time.sleep(_LOOK_EACH_S)


def _download(pod: Pod, digests: Iterable[str]) -> None:
    from kale_dist.wire.url_store import UrlStore

    source = UrlStore(pod.order.store)
    pod.store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for digest in digests:
        pod.store.put([source.open(digest)])


def fetch(order: Order, key: bytes, store: FolderStore, digest: str, server: BlobServer | None = None) -> None:
    """Fetch a blob from another relay, as long as that answers, or the head. If the connection is cut, the rest is asked for.

    Args:
        order: The job.
        key: Its secret.
        store: Where the blob goes.
        digest: The blob's.
        server: Knows the other relay, and passes the blob on while it comes.

    Raises:
        StoreError: It cannot be fetched.
    """
    server = server or BlobServer(key, store)
    store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with fresh(store.path(digest), lasting=False) as part:
        part.touch()
        tried, is_whole = 0, False
        while not is_whole:
            relay = server.source
            try:
                is_whole = _receive(relay or (order.head, order.port + 2), order.prefix, server, digest, part)
            except (OSError, http.client.HTTPException, TypeError, ValueError) as error:
                # What answers at the address of a pod that is gone need not be a pod of this job.
                server.source = None
                tried += relay is None
                if tried == _TRIES:
                    raise StoreError(f"Blob {digest} could not be fetched from {order.head}: {error}.") from error
                server.is_over.wait(2 ** (tried - 1) if tried else 0)
            if server.is_over.is_set() and not is_whole:
                raise StoreError(f"Blob {digest} is no longer needed: this pod's part of the job is over.")
    store.received(digest)
    server.coming.pop(digest, None)


def _receive(peer: tuple[str, int], prefix: str, server: BlobServer, digest: str, part: pathlib.Path) -> bool:
    """Append what a peer has of the rest of a blob; returns whether that is all. If it is damaged then, the next try begins again."""
    offset = part.stat().st_size
    path = f"{prefix}/blobs/{digest}?offset={offset}"
    connection = http.client.HTTPConnection(*peer, timeout=_SILENCE_LIMITS_S[peer == server.source])
    with contextlib.closing(connection), part.open("ab") as file:
        connection.request("GET", path, headers={wire.MAC_HEADER: wire.sign_request(server.key, "GET", path)})
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise http.client.HTTPException(f"status {answer.status}")
        end, whole = offset + int(answer.headers["Content-Length"]), int(answer.headers[wire.SIZE_HEADER])
        server.coming[digest] = part, whole
        shutil.copyfileobj(answer, file, _PIECE_BYTES)
    if (size := part.stat().st_size) < end:
        raise http.client.HTTPException(f"the connection was cut after {size:,} of {whole:,} bytes")
    if size < whole:
        return False
    if not is_intact(part, digest):
        part.write_bytes(b"")
        raise http.client.HTTPException("what came is damaged")
    part.chmod(0o444)
    return True


# -- the store: checkpoints and results --------------------------------------------------------------------------------


def put_into_store(pod: Pod, path: pathlib.Path) -> None:
    """Put a file of the job's folder into the store, below `jobs/<job>`.

    Raises:
        OSError, StoreError: It cannot be put there.
    """
    name = f"jobs/{pod.order.job}/{path.name}"
    if "://" in pod.order.store:
        from kale_dist.wire.url_store import UrlStore

        UrlStore(pod.order.store).put_file(name, path)
    else:
        target = pathlib.Path(pod.order.store, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with fresh(target) as file:
            shutil.copyfile(path, file)


def put_checkpoint_into_store(pod: Pod) -> None:
    """Put the last checkpoint into the store, and beside it whose it is, and from which object of the job.

    A later job of this name must not resume from it.

    Raises:
        OSError, StoreError: It cannot be put there.
    """
    put_into_store(pod, pod.files.checkpoint)
    owner = pod.files.folder / "checkpoint.owner"
    owner.write_text(f"{wire.mark_of(pod.key)} {pod.order.object}")
    put_into_store(pod, owner)


def used_restarts(pod: Pod) -> int:
    """How many restarts of this job earlier heads have used.

    Raises:
        OSError, StoreError, ValueError: The store cannot be read.
    """
    kept = pod.files.folder / "restarts"
    if not _read(pod, f"jobs/{pod.order.job}/{kept.name}", kept):
        return 0
    owner, _, number = kept.read_text().partition(" ")
    return int(number) if owner == wire.mark_of(pod.key) else 0


def put_used_restarts(pod: Pod, number: int) -> None:
    """Write beside the checkpoint how many restarts are used once this head is lost.

    Raises:
        OSError, StoreError: The store cannot be written.
    """
    kept = pod.files.folder / "restarts"
    kept.write_text(f"{wire.mark_of(pod.key)} {number}")
    put_into_store(pod, kept)


def bring_checkpoint(pod: Pod) -> None:
    """Get what an earlier head of this job has left; without it training starts from the beginning.

    Raises:
        OSError, StoreError: The store cannot be read.
    """
    target, folder = pod.files.checkpoint, f"jobs/{pod.order.job}"
    given = pod.store.path(pod.order.checkpoint) if pod.order.checkpoint else pod.place.input / InputFiles.CHECKPOINT
    try:
        if pod.order.store:
            is_there = _read(pod, f"{folder}/checkpoint.owner", target)
            owner, _, written_by = (target.read_bytes() if is_there else b"").partition(b" ")
            # What an earlier object has left there may be older than what the notebook has fetched from its head.
            is_newest = written_by == pod.order.object.encode() or not given.exists()
            if owner == wire.mark_of(pod.key).encode() and is_newest and _read(pod, f"{folder}/{target.name}", target):
                return
            target.unlink(missing_ok=True)
        if given.exists():
            shutil.copyfile(given, target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def is_refusal(error: OSError | StoreError) -> bool:
    """Whether a store fails for good: it does not permit it, is no folder, or needs what is not installed."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    return (
        cause is None
        or isinstance(cause, ImportError | PermissionError)
        or getattr(cause, "errno", 0) in (errno.EROFS, errno.ENOTDIR)
    )


def _read(pod: Pod, name: str, target: pathlib.Path) -> bool:
    if "://" in pod.order.store:
        from kale_dist.wire.url_store import UrlStore

        store = UrlStore(pod.order.store)
        if not store.exists(name):
            return False
        store.get_file(name, target)
        return True
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(pathlib.Path(pod.order.store, name), target)
        return True
    return False
