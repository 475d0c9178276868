"""Finds this library in what users are shown."""

import pathlib

import kale_dist

_PACKAGE = pathlib.Path(kale_dist.__file__).parent
_FILES = [str(file.relative_to(_PACKAGE.parent)) for file in _PACKAGE.rglob("*.py")]


def own_files(text):
    """The library's own files that a text names. The folder of the checkout may have the library's name, too."""
    return [file for file in _FILES if file in text]
