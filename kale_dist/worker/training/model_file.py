"""Saves the trained weights at the call's `save_to`: a path that the rank sees, or a URL that fsspec opens."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from kale_dist.errors import StoreError
from kale_dist.wire.blobs import fresh
from kale_dist.wire.url_store import UrlStore


def check(save_to: str) -> None:
    """Check before the training that the file can be written after it.

    Args:
        save_to: An absolute path, whose folders are made, or a URL.

    Raises:
        StoreError: The file cannot be written.
    """
    if "://" in save_to:
        store, name = _store(save_to)
        store.try_to_write(name)
        return
    folder = pathlib.Path(save_to).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _refusal(save_to, error) from error


def save(save_to: str, state: Mapping[str, Any]) -> None:
    """Write weights as `torch.save` does, under a temporary name that is then renamed: a reader sees all or nothing.

    Args:
        save_to: As for `check`.
        state: A state dict.

    Raises:
        StoreError: The file cannot be written. What was there before is left as it was.
    """
    if "://" in save_to:
        store, name = _store(save_to)
        with tempfile.TemporaryDirectory(prefix="kale-dist-") as folder:
            file = pathlib.Path(folder, "model.pt")
            torch.save(state, file)
            store.put_file(name, file)
        return
    try:
        with fresh(pathlib.Path(save_to)) as temporary:
            torch.save(state, temporary)
    # Torch's own writer raises RuntimeError when a disk is full.
    except (OSError, RuntimeError) as error:
        raise _refusal(save_to, error) from error


def _store(url: str) -> tuple[UrlStore, str]:
    folder, _, name = url.rpartition("/")
    return UrlStore(folder), name


def _refusal(path: str, error: Exception) -> StoreError:
    reason = getattr(error, "strerror", None) or str(error)
    return StoreError(f"The model cannot be saved to {path}: {reason}. See that this user may write there")
