"""Packages for an image: uv resolves them against what the base has, and unpacks only what is missing.

uv learns what the base has from stubs: bare metadata in the folder that it installs into, so that it takes these packages
as installed, also those that no index has (`torch 2.13.0+cpu`). The stubs are removed before the packages are packed. Packages lie in
folders of their own, and one `.pth` file in the base's site directory puts them before the base's packages and after the
standard library, in every interpreter that is started in the image. PYTHONPATH would put them before the standard library.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import csv
import dataclasses
import hashlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from kale_dist import wording
from kale_dist.errors import ConfigError, ImageError
from kale_dist.image import cache, layer
from kale_dist.image.base_image import FOLDER, Distribution, ImageFacts
from kale_dist.image.requirements import hide_credentials
from kale_dist.image.tar import TarEntry
from kale_dist.job.spec.recipe import Recipe

PTH = "kale_dist.pth"
SCRIPTS = f"{FOLDER}/bin"
"""The folder of the packages' scripts, last on the image's PATH."""

PYTORCH = "https://download.pytorch.org/whl/"
"""PyTorch's own index, to which no stranger uploads. It has old versions of some other packages."""

_STRANGE = 2
"""From so many indexes on, a package of one may be meant and that of another taken."""

_KEPT = re.compile(r"torch|torchvision|torchaudio|triton|pytorch-triton|nvidia-.*")
"""Packages that keep the base's versions, because they are built for one another."""

_OWN_SCRIPTS = re.compile(r"python[\d.]*|pip[\d.]*|torchrun")
"""Scripts that the base has itself."""

_GLIBC = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)
"""Minor versions of glibc that uv knows."""

_SHOWN_CHARACTERS = 2000
_WORTH_SHOWING = re.compile(r"\s*(?:Downloading|Building) ")
_PROGRESS = re.compile(r"\s*(?:Using CPython|Resolved|Prepared|Downloading|Downloaded|Building|Built) ")
_UV_SETTINGS = re.compile(
    r"UV_(?:CACHE_DIR|DEFAULT_INDEX|INDEX(?:_.*)?|EXTRA_INDEX_URL|FIND_LINKS|INSECURE_HOST|NATIVE_TLS|SYSTEM_CERTS|HTTP_.*|"
    r"KEYRING_PROVIDER|OFFLINE|CONCURRENT_.*|LINK_MODE)"
)
"""Variables of uv about how to reach packages; uv does not get the others, such as those about where to install."""

_PTH_LINE = (
    "import os, sys, site; n = len(sys.path); list(map(site.addsitedir, {folders!r})); new = sys.path[n:]; del sys.path[n:]; "
    "lib = os.path.dirname(os.__file__); start = sys.path.index(lib) if lib in sys.path else 0; "
    "at = next((i for i, p in enumerate(sys.path[start:], start) if p.endswith('-packages')), len(sys.path)); "
    "sys.path[at:at] = new\n"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packages:
    """The installed packages as entries of a layer."""

    entries: tuple[TarEntry, ...]
    """All files and folders of the layer."""
    key: str
    """Hash of the content: the same packages on the same base give the same key."""
    facts: ImageFacts
    """The facts about the image with the packages installed."""


def install(recipe: Recipe, facts: ImageFacts, folder: pathlib.Path, *, log: Callable[[str], None]) -> Packages | None:
    """Resolve, download and unpack the recipe's packages and their requirements, except those that the base has.

    Args:
        recipe: The packages, index URLs, and whether torch may change.
        facts: The inspected base.
        folder: An empty folder to unpack into, which has to stay until the layer is packed.
        log: Takes a line for the user.

    Returns:
        The packages; None if the base has all of them.

    Raises:
        ConfigError: uv is not installed.
        ImageError: A package does not exist, has no wheel for the base, conflicts, or would change the base's torch.
    """
    target = folder / "target"
    stubs = _lay_stubs(facts, target)
    kept = () if recipe.allow_torch_change else (one for one in facts.distributions if one.name in stubs)
    constraints = folder / "constraints.txt"
    lines = (f"{one.name}=={one.version}\n" for one in kept if _KEPT.fullmatch(one.name))
    constraints.write_text("".join(lines), encoding="utf-8")
    _run_uv(recipe, facts, constraints, target, log, fresh=recipe.rebuild)
    replaced = {name for name, place in stubs.items() if not place.exists()}
    for name in stubs.keys() - replaced:
        shutil.rmtree(stubs[name])
    found = sorted(_added(target, facts), key=lambda one: one.name)
    if not found:
        log("The base image has all packages that were asked for.")
        return None
    log("Packages for the image: " + ", ".join(f"{one.name} {one.version}" for one in found))
    had = {one.name: one.version for one in facts.distributions if one.name in replaced}
    if had:
        pairs = (f"{one.name} {had[one.name]} by {one.version}" for one in found if one.name in had)
        log(f"They come before those of the base image: {', '.join(pairs)}.")
    for note in _broken(facts, found):
        log(note)
    number = len(facts.folders) + 1
    name = "site-packages" if number == 1 else f"site-packages-{number}"
    folders = (*facts.folders, name)
    entries, records = _entries(target, f"{FOLDER}/{name}", facts)
    line = _PTH_LINE.format(folders=tuple(f"{FOLDER}/{one}" for one in reversed(folders)))
    entries.append(TarEntry(path=f"{facts.site}/{PTH}", content=line.encode()))
    places = {
        facts.real_path(FOLDER),
        *(str(parent) for entry in entries for parent in pathlib.PurePosixPath(entry.path).parents),
    }
    entries += [
        TarEntry(path=path, content=None, mode=0o755)
        for path in places
        if f"{path}/".startswith(f"{facts.real_path(FOLDER)}/")
    ]
    new = {one.name for one in found}
    distributions = (*(one for one in facts.distributions if one.name not in new), *found)
    facts_key = repr((line, facts.site, facts.executable))
    return Packages(
        entries=tuple(entries),
        key=hashlib.sha256("\n".join([facts_key, *records]).encode()).hexdigest(),
        facts=dataclasses.replace(
            facts, folders=folders, distributions=tuple(sorted(distributions, key=lambda one: one.name))
        ),
    )


# -- before uv runs --------------------------------------------------------------------------------------------------


def _lay_stubs(facts: ImageFacts, target: pathlib.Path) -> dict[str, pathlib.Path]:
    """Write stub metadata for each package of the base, with a RECORD by which uv can uninstall it; folders by name."""
    stubs = {}
    target.mkdir(parents=True)
    for one in facts.distributions:
        try:
            Version(one.version)
        except InvalidVersion:
            continue
        info = f"{one.name.replace('-', '_')}-{one.version}.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {one.name}", f"Version: {one.version}"]
        for text in one.requires:
            extras = re.findall(r"extra\s*==\s*['\"]([\w.-]+)['\"]", text)
            # A base's torch works as it is, even if its metadata asks for more.
            if _KEPT.fullmatch(one.name) and not extras and not _is_met(Requirement(text), facts):
                continue
            lines += [*(f"Provides-Extra: {extra}" for extra in extras), f"Requires-Dist: {text}"]
        stubs[one.name] = place = target / info
        place.mkdir()
        (place / "METADATA").write_text("\n".join(dict.fromkeys(lines)) + "\n", encoding="utf-8")
        (place / "RECORD").write_text("".join(f"{info}/{name},,\n" for name in ("METADATA", "RECORD")))
    return stubs


def _run_uv(
    recipe: Recipe,
    facts: ImageFacts,
    constraints: pathlib.Path,
    target: pathlib.Path,
    log: Callable[[str], None],
    *,
    fresh: bool = False,
) -> None:
    """Run `uv pip install` into a folder; if uv finds no solution, once more without its cached copies of indexes."""
    configured = _pip_settings()
    # What this Python builds from source runs only on a base like this machine.
    is_like_this = facts.machine == os.uname().machine and facts.minor == f"{sys.version_info[0]}.{sys.version_info[1]}"
    command = [
        _uv(), "pip", "install", "--target", str(target), "--python", sys.executable, "--python-version", facts.python,
        "--python-platform", _platform(facts), "--constraint", str(constraints), "--no-progress", "--color", "never",
        *_uv_settings(),
        *([] if is_like_this else ["--only-binary", ":all:"]),
        *(["--refresh"] if fresh else []),
        *(["--keyring-provider", "subprocess"] if shutil.which("keyring") else []),
        *_index_options(recipe, configured), "--", *recipe.packages,
    ]  # fmt: skip
    # Standard input is closed, because a user would not see uv's question for a password.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment(configured),
        encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        lines: list[str] = []
        try:
            for line in process.stdout or ():
                lines.append(hide_credentials(line.rstrip()))
                if _WORTH_SHOWING.match(line):
                    log(lines[-1].strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode and not fresh and any("No solution found" in line for line in lines):
        _run_uv(recipe, facts, constraints, target, log, fresh=True)
    elif process.returncode:
        raise _explain("\n".join(lines), facts, recipe)


def _uv() -> str:
    try:
        import uv
    except ModuleNotFoundError:
        found = shutil.which("uv")
        if found is None:
            problem = "packages of an image are resolved by uv, which is not installed in this Python"
            raise ConfigError("packages", problem, wording.install("images")) from None
        return found
    return str(uv.find_uv_bin())


def _platform(facts: ImageFacts) -> str:
    """The base's platform as uv names it, with the newest glibc that uv knows and the base has."""
    family, _, version = facts.libc.partition(" ")
    if family == "musl":
        return f"{facts.machine}-unknown-linux-musl"
    minor = int(version.split(".")[1]) if re.match(r"2\.\d+", version) else _GLIBC[-1]
    return f"{facts.machine}-manylinux_2_{next((known for known in _GLIBC if known <= minor), _GLIBC[-1])}"


def _index_options(recipe: Recipe, configured: Mapping[str, str]) -> list[str]:
    """Options of uv for the indexes: the recipe's, else those of pip's configuration on this machine.

    Of several indexes a package comes from the first that has it: another one, to which strangers can upload, cannot offer a newer one.
    It comes from the best of all where it does so with pip, by pip's own settings, and with PyTorch's index beside one other.
    """
    first, more = recipe.index_urls[:1], recipe.index_urls[1:]
    is_best = bool(more) and sum(not url.startswith(PYTORCH) for url in recipe.index_urls) < _STRANGE
    if not first:
        first, more = (
            tuple(configured.get("index-url", "").split()),
            tuple(configured.get("extra-index-url", "").split()),
        )
        is_best = bool(more)
    if is_best or not more:
        options = [word for url in first for word in ("--default-index", url)]
        options += [word for url in more for word in ("--index", url)]
        options += ["--index-strategy", "unsafe-best-match"] if is_best else []
    else:
        # uv looks into its default index last.
        options = [word for url in (*first, *more[:-1]) for word in ("--index", url)]
        options += ["--default-index", more[-1]]
    for place in configured.get("find-links", "").split():
        # Like pip and unlike uv, a missing folder is ignored.
        if "://" in place or pathlib.Path(place).expanduser().exists():
            options += ["--find-links", place]
    if configured.get("no-index", "").lower() in {"1", "true", "yes", "on"} and not recipe.index_urls:
        options.append("--no-index")
    return options


def _uv_settings() -> list[str]:
    """The user's own settings of uv. Those of the folder in which the notebook runs are of a project, not of an image."""
    config_home = pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    named = os.environ.get("UV_CONFIG_FILE", "")
    places = [pathlib.Path(named)] if named else [config_home / "uv/uv.toml", pathlib.Path("/etc/uv/uv.toml")]
    found = next((place for place in places if place.exists()), None)
    return ["--no-config"] if found is None else ["--config-file", str(found)]


def _environment(configured: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("UV_") or _UV_SETTINGS.fullmatch(name)
    }
    certificates = _certificate_file(configured)
    if certificates:
        kept["SSL_CERT_FILE"] = certificates
    if configured.get("proxy"):
        kept |= {"HTTP_PROXY": configured["proxy"], "HTTPS_PROXY": configured["proxy"]}
    if configured.get("trusted-host"):
        kept["UV_INSECURE_HOST"] = " ".join([kept.get("UV_INSECURE_HOST", ""), configured["trusted-host"]]).strip()
    if configured.get("timeout", "").isdecimal():
        kept.setdefault("UV_HTTP_TIMEOUT", configured["timeout"])
    return kept


def _pip_settings() -> dict[str, str]:
    """The configuration of pip on this machine, from its files and `PIP_*`: `{"index-url": ...}`."""
    own = os.environ.get("PIP_CONFIG_FILE", "")
    config_home = pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    places = [pathlib.Path(folder) / "pip" for folder in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    places += [pathlib.Path("/etc"), pathlib.Path("~/.pip").expanduser(), config_home / "pip", pathlib.Path(sys.prefix)]
    files = [] if own == os.devnull else [place / "pip.conf" for place in places] + [pathlib.Path(own)] * bool(own)
    found: dict[str, str] = {}
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ConfigError(
                "packages", f"pip's settings in {file} cannot be read: {error}", "Repair the file"
            ) from error
        for section in ("global", "install"):
            if parser.has_section(section):
                found |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    names = {
        name.removeprefix("PIP_").lower().replace("_", "-"): name for name in os.environ if name.startswith("PIP_")
    }
    return found | {key: os.environ[name] for key, name in names.items() if os.environ[name]}


def _certificate_file(configured: Mapping[str, str]) -> str:
    """The file of certificate authorities for package indexes on this machine; empty for the system's."""
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
    return next(filter(None, map(os.environ.get, names)), configured.get("cert", ""))


# -- after uv has run ------------------------------------------------------------------------------------------------


def _added(target: pathlib.Path, facts: ImageFacts) -> Iterator[Distribution]:
    for place in target.glob("*.dist-info"):
        headers: list[tuple[str, str]] = []
        for line in (place / "METADATA").read_text(encoding="utf-8", errors="replace").splitlines():
            if not line:
                break
            name, _, value = line.partition(": ")
            headers.append((name, value.strip()))
        named = dict(reversed(headers))
        wheel = (place / "WHEEL").read_text(encoding="utf-8", errors="replace")
        if re.search(r"^Tag: \S+-linux_", wheel, re.MULTILINE):
            raise ImageError(
                f"{named['Name']} {named['Version']} has no wheel for {_platform(facts)} with Python {facts.minor}, only "
                f"source with parts that were compiled for this machine's libraries. {_COMPILED}"
            )
        yield Distribution(
            name=canonicalize_name(named["Name"]),
            version=named["Version"],
            requires=tuple(value for name, value in headers if name == "Requires-Dist"),
        )


def _entries(target: pathlib.Path, place: str, facts: ImageFacts) -> tuple[list[TarEntry], list[str]]:
    """The layer's entries for all installed files, and the digests of the packages' RECORD files."""
    entries, records = [], []
    root = facts.real_path(place)
    for folder, _, names in os.walk(target):
        for name in names:
            path = pathlib.Path(folder, name)
            inside = path.relative_to(target)
            if inside.parts[0] == "bin" or inside == pathlib.Path(".lock") or name == "uv_cache.json":
                continue
            content: pathlib.Path | bytes = path
            if name == "RECORD" and inside.parent.name.endswith(".dist-info") and len(inside.parts) == 2:  # noqa: PLR2004 - NAME/RECORD
                content = _record(path, target, facts)
                records.append(hashlib.sha256(content).hexdigest())
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            entries.append(TarEntry(path=f"{root}/{inside.as_posix()}", content=content, mode=mode))
    for path in sorted((target / "bin").glob("*")):
        if path.is_file() and not _OWN_SCRIPTS.fullmatch(path.name):
            script = layer.script(path, f"#!{facts.executable}\n".encode())
            entries.append(TarEntry(path=facts.real_path(f"{SCRIPTS}/{path.name}"), content=script, mode=0o755))
    return entries, sorted(records)


def _record(path: pathlib.Path, target: pathlib.Path, facts: ImageFacts) -> bytes:
    """A package's RECORD, with the paths that its scripts have in the image."""
    rows = []
    for row in csv.reader(path.read_text(encoding="utf-8").splitlines()):
        name, kept = row[0], row
        if name.startswith("bin/") and "/" not in name.removeprefix("bin/"):
            if _OWN_SCRIPTS.fullmatch(name.removeprefix("bin/")):
                continue
            script = layer.script(target / name, f"#!{facts.executable}\n".encode())
            digest = base64.urlsafe_b64encode(hashlib.sha256(script).digest()).rstrip(b"=").decode()
            kept = [f"../{name}", f"sha256={digest}", str(len(script))]
        if not name.endswith("/uv_cache.json"):
            rows.append(kept)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _broken(facts: ImageFacts, added: Sequence[Distribution]) -> Iterator[str]:
    """A sentence for each package of the base whose requirement the new packages no longer meet."""
    new = {one.name: one for one in added}
    for one in facts.distributions:
        for text in () if one.name in new else one.requires:
            after = new.get(canonicalize_name(re.split(r"[^\w.-]", text, maxsplit=1)[0]))
            if after is None or "extra" in text.partition(";")[2]:
                continue
            with contextlib.suppress(InvalidRequirement):
                requirement = Requirement(text)
                if _is_met(requirement, facts) and not requirement.specifier.contains(after.version, prereleases=True):
                    yield (
                        f"{one.name} {one.version} of the base image asks for {requirement.name}{requirement.specifier}, "
                        f"and gets {after.version}."
                    )


def _is_met(requirement: Requirement, facts: ImageFacts) -> bool:
    there = facts.find(requirement.name)
    return there is not None and requirement.specifier.contains(there.version, prereleases=True)


# -- errors ----------------------------------------------------------------------------------------------------------

_COMPILED = (
    "Ask for a version that has a wheel, or for a base image that has it: build one with a Dockerfile of your own."
)
_REMEDIES = (
    (r"No space left on device", "Make room in {cache} and in uv's own cache (`uv cache clean`), and call again.", False),
    (r"Failed to fetch|error sending request|HTTP status|dns error|client error", "Look at the network, at pip's configuration (`pip config list`) and its credentials (~/.netrc), and call again.", True),
    (r"was not found in the", "Look at its spelling (the name to install is not always the name to import), or name its index in `index_urls=`.", False),
    (r"building from source is disabled|Failed to build|no usable wheels|is not compatible with", f"It has to be built from source for the base image. {_COMPILED}", False),
)  # fmt: skip
"""Patterns of uv's errors, what to do about each, and whether a retry may help. The first match counts."""


def _explain(output: str, facts: ImageFacts, recipe: Recipe) -> ImageError:
    """The error for a failed uv: its message and a remedy."""
    message = "\n".join(line for line in output.splitlines() if not _PROGRESS.match(line))
    # Older versions of uv draw lines around their messages, and wrap them.
    output = " ".join(re.sub(r"^error: |[\u2500-\u257f\u25b6\u00d7]+", " ", message, flags=re.MULTILINE).split())
    output = re.sub(r"No solution found when resolving dependencies:? (?:cause: )?", "", output)
    text = f"The packages for the image cannot be installed: {output[:_SHOWN_CHARACTERS].rstrip('.')}."
    torch = facts.find("torch")
    for pattern, remedy, retryable in _REMEDIES:
        if re.search(pattern, output):
            return ImageError(f"{text} {remedy.format(cache=cache.folder())}", retryable)
    if torch is not None and not recipe.allow_torch_change and f"torch=={torch.version}" in output:
        return ImageError(
            f"{text} The base image's torch {torch.version} is kept: choose versions that work with it, a base image with "
            f"another torch, or `allow_torch_change=True`."
        )
    base = f"Python {facts.minor}, {facts.libc}, {facts.machine}"
    return ImageError(
        f"{text} The base image has {base}: ask for a version that fits it, or loosen what was asked for."
    )
