"""Brings a snapshot's blobs into a pod, whichever way they come. Runs in a thread of its own."""

from __future__ import annotations

import http.client
import pathlib
import shutil
import threading
import time
from collections.abc import Callable

from kale_dist import transport
from kale_dist.errors import ContractError, StoreError
from kale_dist.pod_order import InputFiles, PodOrder, Source
from kale_dist.runtime import loading
from kale_dist.runtime.pod_site import Site
from kale_dist.runtime.uploads import Body, Conflict, Uploads, WrongDigest

_LOOK_EACH_S = 0.2
_FETCH_LIMIT_S = 120.0
_SILENCE_LIMIT_S = 30.0


class Bringer:
    """Gets all blobs of a job and checks that this pod can load them.

    Args:
        site: The pod.
        uploads: Where streamed blobs arrive.
        may_fetch: Whether the head has all blobs.
    """

    def __init__(self, site: Site, uploads: Uploads, may_fetch: Callable[[], bool]) -> None:
        self._site = site
        self._order: PodOrder = site.order
        self._uploads = uploads
        self._may_fetch = may_fetch
        self._news = threading.Event()

    def look_again(self) -> None:
        """Something has arrived. From any thread."""
        self._news.set()

    def missing(self) -> list[str]:
        """Digests of the blobs that are not there yet."""
        return [digest for digest in self._order.blobs if not self._site.store.exists(digest)]

    def bring(self) -> None:
        """Get the blobs; returns when all are there.

        Raises:
            StoreError: They cannot be had; a sentence says why.
            SnapshotDamagedError: A blob is not what its name says.
            ContractError: This pod's Python or torch cannot load them.
        """
        match self._order.source:
            case Source.INPUT:
                transport.unpack_blobs(InputFiles(self._site.place.input).snapshot, self._site.store.root)
            case Source.FOLDER:
                self._wait(f"{self._order.store} in pod {self._site.place.pod}")
            case Source.URL:
                self._download()
            case Source.STREAM if self._site.place.pod == 0:
                self._wait("the notebook")
            case Source.STREAM:
                self._fetch_from_head()
        if self._order.attempt and self._order.store and self._site.place.pod == 0:
            self._bring_checkpoint()
        if missing := self.missing():
            raise StoreError(
                f"{len(missing)} of the {len(self._order.blobs)} parts of the snapshot are missing: {missing[0]}"
            )
        self._check_versions()

    def _wait(self, whence: str) -> None:
        """Wait until the notebook has put everything there; as long as something arrives, it is there."""
        limit_s = self._order.input_wait_s
        deadline, before = time.monotonic() + limit_s, -1
        while missing := self.missing():
            now = sum(self._uploads.received(digest) for digest in missing) + (len(self._order.blobs) - len(missing))
            if now != before:
                deadline, before = time.monotonic() + limit_s, now
            elif time.monotonic() > deadline:
                raise StoreError(
                    f"The notebook was gone before its bytes had arrived: {len(missing)} of {len(self._order.blobs)} parts "
                    f"of the snapshot are missing, and nothing more came from {whence} for {limit_s:g} s (input_wait_s). "
                    "Keep the notebook running until the job has started, or give a store that both see (store=)"
                )
            self._news.wait(_LOOK_EACH_S)
            self._news.clear()

    def _download(self) -> None:
        from kale_dist.url_store import UrlStore

        source = UrlStore(self._order.store)
        self._site.store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for digest in self.missing():
            self._site.store.put([source.open(digest)])

    def _bring_checkpoint(self) -> None:
        """Get what earlier pods have left in the store, from which rank 0 goes on; without it the ranks begin anew."""
        name, target = f"jobs/{self._order.job}/{self._site.files.checkpoint.name}", self._site.files.checkpoint
        try:
            if "://" in self._order.store:
                from kale_dist.url_store import UrlStore

                store = UrlStore(self._order.store)
                if store.exists(name):
                    store.get_file(name, target)
            elif (kept := pathlib.Path(self._order.store, name)).exists():
                shutil.copyfile(kept, target)
        except (OSError, StoreError) as error:
            target.unlink(missing_ok=True)
            text = f"The last checkpoint could not be had from the store {self._order.store}: {error}"
            self._site.mailbox.post(lambda: self._site.say(text))

    # -- from the head ----------------------------------------------------------------------------------------------

    def _fetch_from_head(self) -> None:
        while not self._may_fetch():
            self._news.wait(_LOOK_EACH_S)
            self._news.clear()
        for digest in self.missing():
            self._fetch(digest)

    def _fetch(self, digest: str) -> None:
        deadline, received = time.monotonic() + _FETCH_LIMIT_S, -1
        while not self._site.store.exists(digest):
            try:
                self._fetch_rest(digest, self._uploads.received(digest))
            except (OSError, http.client.HTTPException, Conflict, WrongDigest) as error:
                if self._uploads.received(digest) != received:
                    deadline, received = time.monotonic() + _FETCH_LIMIT_S, self._uploads.received(digest)
                if time.monotonic() > deadline:
                    raise StoreError(f"Blob {digest} could not be fetched from {self._order.head}: {error}.") from error
                time.sleep(_LOOK_EACH_S)

    def _fetch_rest(self, digest: str, offset: int) -> None:
        path = f"/blobs/{digest}"
        peer = http.client.HTTPConnection(self._order.head, self._order.port + 2, timeout=_SILENCE_LIMIT_S)
        try:
            mac = transport.sign_request(self._site.key, "GET", path)
            peer.request("GET", path, headers={transport.MAC_HEADER: mac, "Range": f"bytes={offset}-"})
            answer = peer.getresponse()
            # A server closes the connection of a request that it refuses, and the socket goes with the answer.
            connection = peer.sock
            # Nothing is left of a blob of zero bytes to ask for.
            if answer.status not in (200, 206, 416) or connection is None:
                raise http.client.HTTPException(f"status {answer.status}")
            size = int(answer.headers["Content-Length"])
            body = Body(answer, size)
            self._uploads.take(digest, offset, offset + size, connection, body, digest=digest, mode=0o444)
        finally:
            peer.close()

    def _check_versions(self) -> None:
        if not loading.torch_version():
            raise ContractError("The image has no torch. Give one that has, with image=")
        if found := loading.version_differences(self._site.store, self._order.snapshot):
            told = "; ".join(found).replace(" there ", " in the notebook ").replace(" here", " in the image")
            raise ContractError(
                f"The image does not fit the notebook: {told}. "
                "Give an image with the notebook's versions, with image=, or run the notebook with the image's"
            )
