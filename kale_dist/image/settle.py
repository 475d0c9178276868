"""When a call is made: its recipe as it is at this moment, with the bytes of its files and the packages that were found."""

from __future__ import annotations

import dataclasses
import mmap
import pathlib
from collections.abc import Callable, Iterable

from kale_dist.blobs import Store
from kale_dist.errors import SnapshotError
from kale_dist.recipe import ImageFile, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A recipe that later changes on this machine cannot alter."""

    recipe: Recipe | None
    """None: nothing goes on top of the base."""
    image: str
    """Then the base; else empty."""
    notes: tuple[str, ...] = ()
    """What the user should be told, a sentence or two each."""


def settle(recipe: Recipe, store: Store, *, imports: Iterable[str] | None, say: Callable[[str], None]) -> Settled:
    """Take in what the recipe names on this machine.

    Args:
        recipe: As `image_checks.check` gives it.
        store: Where the bytes of its files go.
        imports: What the call imports, if the packages behind it belong to the recipe; None: they do not.
        say: Takes a line for the user, such as what was found for the imports.

    Raises:
        SnapshotError: A file cannot be read any more.
        StoreError: The disk is full.
    """
    notes: tuple[str, ...] = ()
    if imports is not None:
        from kale_dist.image import auto

        report = auto.find(imports)
        for line in report.lines:
            say(line)
        notes = report.notes
        recipe = auto.with_packages(recipe, report.packages)
    recipe = keep_files(recipe, store)
    if not recipe.adds_something:
        return Settled(recipe=None, image=recipe.base, notes=notes)
    return Settled(recipe=recipe, image="", notes=notes)


def keep_files(recipe: Recipe, store: Store) -> Recipe:
    """The recipe with its files by their digests, and their bytes in the store.

    Raises:
        SnapshotError: A file cannot be read any more.
        StoreError: The disk is full.
    """
    return dataclasses.replace(recipe, files=tuple(_kept(file, store) for file in recipe.files))


def _kept(file: ImageFile, store: Store) -> ImageFile:
    """A file by the digest of its bytes."""
    if not file.source:
        return file
    try:
        with pathlib.Path(file.source).open("rb") as opened:
            empty = not opened.read(1)
            if empty:
                digest = store.put([b""])
            else:
                with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                    digest = store.put([view])
    except OSError as error:
        raise SnapshotError(
            f"{file.source}, which goes to {file.path} in the image, cannot be read: {error.strerror or error}. "
            f"Name a file that this process can read."
        ) from error
    return ImageFile(path=file.path, digest=digest, executable=file.executable)
