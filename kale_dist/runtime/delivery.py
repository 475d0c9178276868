"""Brings the outcomes of a pod's ranks to where they outlive the pod: into the store, or to the head's agent."""

from __future__ import annotations

import contextlib
import http.client
import json
import pathlib
import shutil
import threading
import time
from collections.abc import Callable

from kale_dist import transport
from kale_dist.errors import StoreError
from kale_dist.pod_order import Source
from kale_dist.runtime.pod_site import Site
from kale_dist.runtime.rank_run import RankRun
from kale_dist.transport import SMALL_OUTCOME_BYTES

_TRY_FOR_S = 60.0
_PAUSE_S = 0.5
_LOOK_EACH_S = 1.0
_SILENCE_LIMIT_S = 30.0
_BLOCK_BYTES = 1 << 20


class Delivery:
    """Carries files away in threads, and says when they are there.

    Args:
        site: The pod.
        on_shipped: Called in the loop's thread with a rank whose outcome is there, or cannot be brought.
    """

    def __init__(self, site: Site, on_shipped: Callable[[RankRun], None]) -> None:
        self._site = site
        self._on_shipped = on_shipped
        self._store_works = bool(site.order.store)
        self._checkpoint_lock = threading.Lock()
        self._kept_checkpoint = 0
        self._notebook_sees_store = "://" in site.order.store or site.order.source is Source.FOLDER

    def ship(self, rank: RankRun) -> bool:
        """Begin to bring a rank's outcome away, if it has to be; gives whether that takes time."""
        path = self._site.files.outcome(rank.attempt, rank.rank)
        if not path.exists() or not (self._store_works or self._must_go_to_head(path)):
            return False

        def carry() -> None:
            self._carry(path)
            self._site.mailbox.post(lambda: self._on_shipped(rank))

        threading.Thread(target=carry, name=f"delivery-{rank.rank}", daemon=True).start()
        return True

    def keep_checkpoints(self) -> None:
        """Put each checkpoint into the store as it comes, in a thread: for whoever goes on if this pod is lost."""
        if self._store_works:
            threading.Thread(target=self._keep_checkpoints, name="delivery-checkpoints", daemon=True).start()

    def ship_checkpoint(self, then: Callable[[], None]) -> None:
        """Put the last checkpoint into the store, if there is one and there is a store; then call."""
        if not self._store_works or not self._site.files.checkpoint.exists():
            then()
            return

        def carry() -> None:
            self._keep_checkpoint()
            self._site.mailbox.post(then)

        threading.Thread(target=carry, name="delivery-checkpoint", daemon=True).start()

    def must_be_fetched(self, *, succeeded: bool) -> bool:
        """Whether the notebook has to come for something before this pod may end.

        Args:
            succeeded: Whether the job has: then its outcomes say all, and nobody needs its last checkpoint.
        """
        if self._site.order.work_is_kept or (self._store_works and self._notebook_sees_store):
            return False
        outcomes = list(self._site.files.folder.glob("outcome-*"))
        if not self._site.order.log_is_read:
            return True
        if not succeeded and self._site.files.checkpoint.exists():
            return True
        return any(path.stat().st_size > SMALL_OUTCOME_BYTES for path in outcomes)

    @property
    def is_kept(self) -> bool:
        """Whether the store has everything, whoever can read it."""
        return self._store_works

    def _must_go_to_head(self, path: pathlib.Path) -> bool:
        is_small = path.stat().st_size <= SMALL_OUTCOME_BYTES
        stays = self._site.order.work_is_kept or (is_small and self._site.order.log_is_read)
        return self._site.place.pod != 0 and not stays

    def _carry(self, path: pathlib.Path) -> None:
        if self._store_works and self._put_into_store(path) and self._notebook_sees_store:
            return
        if self._must_go_to_head(path):
            self._put_to_head(path)

    def _say(self, text: str) -> None:
        self._site.mailbox.post(lambda: self._site.say(text))

    def _keep_checkpoints(self) -> None:
        if not self._site.order.attempt:
            self._forget_checkpoint()
        while self._store_works:
            time.sleep(_LOOK_EACH_S)
            self._keep_checkpoint()

    def _keep_checkpoint(self) -> None:
        """Put the last checkpoint into the store, if it is not there yet."""
        path = self._site.files.checkpoint
        with self._checkpoint_lock, contextlib.suppress(FileNotFoundError):
            # Each is a file of its own that takes the place of the one before.
            written = path.stat().st_mtime_ns
            if self._store_works and written != self._kept_checkpoint and self._put_into_store(path):
                self._kept_checkpoint = written

    def _forget_checkpoint(self) -> None:
        """An earlier job of this name may have left one, from which this job must not go on."""
        order = self._site.order
        name = f"jobs/{order.job}/{self._site.files.checkpoint.name}"
        with self._checkpoint_lock, contextlib.suppress(OSError, StoreError):
            if "://" in order.store:
                from kale_dist.url_store import UrlStore

                UrlStore(order.store).delete_file(name)
            else:
                pathlib.Path(order.store, name).unlink(missing_ok=True)

    # -- the store --------------------------------------------------------------------------------------------------

    def _put_into_store(self, path: pathlib.Path) -> bool:
        order = self._site.order
        name = f"jobs/{order.job}/{path.name}"
        try:
            if "://" in order.store:
                from kale_dist.url_store import UrlStore

                UrlStore(order.store).put_file(name, path)
            else:
                _copy(path, pathlib.Path(order.store, name))
        except (OSError, StoreError) as error:
            self._store_works = False
            self._say(
                f"{path.name} could not be put into the store {order.store}: {error}. The notebook has to fetch it"
            )
            return False
        return True

    # -- the head ---------------------------------------------------------------------------------------------------

    def _put_to_head(self, path: pathlib.Path) -> None:
        deadline = time.monotonic() + _TRY_FOR_S
        offset = 0
        while True:
            try:
                offset, is_there = self._put_rest(path, offset)
                if is_there:
                    return
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() > deadline:
                    self._say(f"{path.name} could not be brought to {self._site.order.head}: {error}. It is lost")
                    return
                time.sleep(_PAUSE_S)

    def _put_rest(self, path: pathlib.Path, offset: int) -> tuple[int, bool]:
        """Send a file from an offset on; gives where to go on, and whether all of it is there."""
        order, size = self._site.order, path.stat().st_size
        target = f"/files/{path.name}?offset={offset}"
        headers = {
            transport.MAC_HEADER: transport.sign_request(self._site.key, "PUT", target),
            transport.SIZE_HEADER: str(size),
            "Content-Length": str(size - offset),
        }
        peer = http.client.HTTPConnection(order.head, order.port + 2, timeout=_SILENCE_LIMIT_S, blocksize=_BLOCK_BYTES)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                peer.request("PUT", target, file, headers)
            answer = peer.getresponse()
            told = json.loads(answer.read() or b"{}")
        finally:
            peer.close()
        if answer.status not in (200, 201, 409):
            raise http.client.HTTPException(f"status {answer.status} {told.get('error', '')}")
        return int(told["received"]), bool(told.get("complete"))


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a file so that it appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.part")
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
