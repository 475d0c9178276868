"""Where an image's Python lies, and where it looks for packages: plain builds, virtual environments, conda, Debian."""

from __future__ import annotations

import dataclasses
import posixpath
import re

from kale_dist.errors import ImageError
from kale_dist.image.base_layers import Tree

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEFAULT_LIBC = "manylinux 2.17"
"""Where the C library cannot be found out: what every wheel of today asks for at least."""

_STANDARD_LIBRARY = re.compile(r"^(lib(?:64)?)/python(3\.\d+)/os\.py$")
_PATCHLEVEL = re.compile(r"#define\s+PY_VERSION\s+\"(3\.\d+\.\d+)")
_CONDA_RECORD = re.compile(r"^conda-meta/python-(3\.\d+\.\d+)-[^/]*\.json$")
_VENV_VERSION = re.compile(r"^version(?:_info)?\s*=\s*(3\.\d+(?:\.\d+)?)", re.MULTILINE)
_VENV_HOME = re.compile(r"^home\s*=\s*(/\S+)", re.MULTILINE)
_DEBIAN_VERSION = re.compile(r"^Version: (3\.\d+\.\d+)", re.MULTILINE)
_MUSL = re.compile(r"^P:musl\n(?:.+\n)*?V:(1\.\d+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where a Python and its packages lie. All paths are absolute; those of directories have no symbolic link in them."""

    python: str
    """As it is called on the image's PATH."""
    version: str
    """With the patch, which is 0 where it cannot be found out."""
    prefix: str
    """Where a package's data files go."""
    scripts_directory: str
    site_directory: str
    """Where pip would install to."""
    site_directories: tuple[str, ...]
    """All directories in which Python looks, the first wins."""


def layout_of(tree: Tree, environment: dict[str, str]) -> Layout:
    """Find the first `python3` on the image's PATH and where it looks for packages, by Python's own rules.

    Args:
        tree: The image's layers.
        environment: Of the image's configuration.

    Raises:
        ImageError: There is no Python, or none that can be made sense of.
    """
    path = environment.get("PATH") or _DEFAULT_PATH
    candidates = [f"{folder.rstrip('/')}/python3" for folder in path.split(":") if folder.startswith("/")]
    python = next((one for one in candidates if tree.text(one) is not None), None)
    if python is None:
        raise ImageError(
            f"The base image has no Python: there is no `python3` on its PATH ({path}). "
            f"Name a base image with Python and torch."
        )
    folder = posixpath.dirname(python)
    # A virtual environment is known by a file beside the interpreter or above it, before its link is followed.
    root, settings = next(
        (
            (root, text)
            for root in (folder, posixpath.dirname(folder))
            if (text := tree.text(f"{root}/pyvenv.cfg")) is not None
        ),
        ("", ""),
    )
    home, version = _home(tree, tree.real(python))
    if not version and (made_from := _VENV_HOME.search(settings)):
        home, version = _home(tree, tree.real(f"{made_from[1]}/python3"))
    if not version:
        raise ImageError(
            f"The base image's Python, {python}, has no standard library beside it that could be found. "
            f"Name a base image whose Python is a plain installation, a virtual environment, conda or Debian's."
        )
    minor = f"python{version}"
    if root:
        return _environment_layout(tree, environment, python, root, home, version, settings)
    site = f"{home}/lib/{minor}/site-packages"
    sites = [site, f"{home}/lib64/{minor}/site-packages"]
    prefix = home
    if _is_debian(tree, home):
        prefix = posixpath.join(home, "local")
        site = f"{prefix}/lib/{minor}/dist-packages"
        sites = [site, f"{home}/lib/python3/dist-packages", f"{home}/lib/{minor}/dist-packages"]
    return Layout(
        python=python,
        version=_patch(tree, home, version, ""),
        prefix=tree.real(prefix),
        scripts_directory=tree.real(f"{prefix}/bin"),
        site_directory=tree.real(site),
        site_directories=_existing(tree, environment, sites),
    )


def _environment_layout(
    tree: Tree, environment: dict[str, str], python: str, root: str, home: str, version: str, settings: str
) -> Layout:
    """Of a virtual environment; `home` is the prefix of the Python it was made from."""
    minor = f"python{version}"
    site = f"{root}/lib/{minor}/site-packages"
    sites = [site, f"{root}/lib64/{minor}/site-packages"]
    if re.search(r"^include-system-site-packages\s*=\s*true", settings, re.MULTILINE | re.IGNORECASE):
        sites += [f"{home}/lib/{minor}/site-packages"]
        if _is_debian(tree, home):
            sites += [f"{home}/local/lib/{minor}/dist-packages", f"{home}/lib/python3/dist-packages"]
    return Layout(
        python=python,
        version=_patch(tree, home, version, settings),
        prefix=tree.real(root),
        scripts_directory=tree.real(f"{root}/bin"),
        site_directory=tree.real(site),
        site_directories=_existing(tree, environment, sites),
    )


def _home(tree: Tree, interpreter: str) -> tuple[str, str]:
    """Prefix and minor of the Python whose real interpreter this is; empty ones where no standard library is found."""
    folder, name = posixpath.split(interpreter)
    wanted = name.removeprefix("python")
    root = folder
    while root not in {"/", ""}:
        root = posixpath.dirname(root)
        versions = [found[2] for path, _ in tree.under(root) if (found := _STANDARD_LIBRARY.match(path))]
        if wanted in versions or (wanted in {"", "3"} and len(set(versions)) == 1):
            return root, wanted if wanted in versions else versions[0]
    return "", ""


def _is_debian(tree: Tree, home: str) -> bool:
    """Whether packages of this Python go to `dist-packages`."""
    return home == "/usr" and tree.has_folder("/usr/lib/python3/dist-packages")


def _patch(tree: Tree, home: str, version: str, settings: str) -> str:
    """The whole version of a Python of this minor, from its headers, conda's record or its environment's file."""
    headers = _PATCHLEVEL.search(tree.text(f"{home}/include/python{version}/patchlevel.h") or "")
    told = [
        *((headers[1],) if headers else ()),
        *(found[1] for path, _ in tree.under(home) if (found := _CONDA_RECORD.match(path))),
        *_VENV_VERSION.findall(settings),
        *(_DEBIAN_VERSION.findall(tree.text("/var/lib/dpkg/status") or "") if home == "/usr" else ()),
    ]
    return next((whole for whole in told if whole.startswith(f"{version}.")), f"{version}.0")


def _existing(tree: Tree, environment: dict[str, str], sites: list[str]) -> tuple[str, ...]:
    """Real paths of the directories that there are, those of PYTHONPATH first, each once."""
    given = [folder for folder in environment.get("PYTHONPATH", "").split(":") if folder.startswith("/")]
    real = [tree.real(folder) for folder in (*given, *sites) if tree.has_folder(folder)]
    return tuple(dict.fromkeys(real))


def libc_of(tree: Tree) -> str:
    """The C library, as wheels name it: `manylinux 2.36`, `musllinux 1.2`."""
    musl = _MUSL.search(tree.text("/lib/apk/db/installed") or "")
    if musl:
        return f"musllinux {musl[1]}"
    for folder in ("/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        versions = [
            text for path, text in tree.under(folder) if text and re.search(r"(^|/)libc(\.so\.6|-2\.\d+\.so)$", path)
        ]
        if versions:
            return f"manylinux {max(versions, key=lambda version: int(version.split('.')[1]))}"
    return _DEFAULT_LIBC
