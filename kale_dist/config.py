"""Settings for all calls, from a file and from the environment, which overrides it. Arguments of a call override both."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from kale_dist.errors import ConfigError
from kale_dist.job.spec import names
from kale_dist.job.spec.place_settings import KINDS, ClusterOptions, Docker, Kubernetes, Local, Place, settings_of
from kale_dist.wording import closest, shorten, show

FILE_VARIABLE = "KALE_DIST_CONFIG"
"""Names the file; without it, `kale-dist/config.toml` in `$XDG_CONFIG_HOME` (`~/.config`), which need not be there."""

_PREFIX = "KALE_DIST_"

_TABLE_REMEDY = 'Write it as {"keep_warm": "10 min"}'
_REGISTRY = (
    names.is_registry_path,
    "is not a registry's host with a path",
    "Write it as 'registry.example.com/team' or 'localhost:5000'; only one without TLS begins with http://",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Settings. An empty one is not set. Each can be a line of the file, and a variable such as `KALE_DIST_IMAGE`."""

    on: str = ""
    """Where calls without `on=` run: `local`, `docker` or `kubernetes`."""
    docker: Docker = dataclasses.field(default_factory=Docker)
    """Arguments of `kd.Docker` for all calls: a table in the file, a JSON object in the environment."""
    kubernetes: Kubernetes = dataclasses.field(default_factory=Kubernetes)
    """Arguments of `kd.Kubernetes` for all calls, in the same forms."""
    image: str = ""
    """Container image of ranks in containers and on a cluster."""
    namespace: str = ""
    """Namespace of the cluster."""
    context: str = ""
    """Context of the kubeconfig; its current one if not set."""
    kubeconfig: str = ""
    """Path of the kubeconfig; else `$KUBECONFIG` or `~/.kube/config`."""
    service_account: str = ""
    """Service account of the pods."""
    store: str = ""
    """Where snapshots, checkpoints and results are stored: `pvc://claim/folder`, or a URL that fsspec opens."""
    queue: str = ""
    """Kueue's local queue."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets with credentials of registries: a list in the file, separated by commas in the environment."""
    registry: str = ""
    """Where images that are made for jobs are pushed: a registry's host, with a path before their names if need be, and
    `http://` in front if it has no TLS."""
    registry_pull: str = ""
    """The same place as the cluster's nodes reach it, if that is another name."""
    registry_tags: str = ""
    """Whose images are used that the registry has already: `own` (those that you made on this machine), or `shared` (also those that
    others pushed there, whose code then runs in your jobs); `own` if not set."""
    show_locals: str = ""
    """How much an error shows of the local variables of its last frames: `none`, `summary` (numbers, shapes, types), `full` (texts
    and reprs, too); `summary` if not set."""
    origins: tuple[tuple[str, str], ...] = dataclasses.field(default=(), repr=False, compare=False)
    """(setting, file or variable that it comes from), for each that is set."""

    def place(self, word: str) -> Place:
        """The configured settings of `local`, `docker` or `kubernetes`."""
        found: dict[str, Place] = {"docker": self.docker, "kubernetes": self.kubernetes}
        return found.get(word, Local())

    def as_environment(self) -> dict[str, str]:
        """The settings as variables for another process: name to value."""
        found = {}
        for key, _ in self.origins:
            value = getattr(self, key)
            if key in _TABLES:
                text = json.dumps(settings_of(value), default=dataclasses.asdict)
            else:
                text = value if isinstance(value, str) else ",".join(value)
            found[f"{_PREFIX}{key.upper()}"] = text
        return found


KEYS = tuple(field.name for field in dataclasses.fields(Config) if field.name != "origins")
"""The settings there are."""


def path(environment: Mapping[str, str] | None = None) -> pathlib.Path:
    """The configuration file, whether it exists or not."""
    environment = os.environ if environment is None else environment
    named = environment.get(FILE_VARIABLE, "")
    if named:
        return pathlib.Path(os.path.expanduser(named))  # noqa: PTH111 - pathlib raises for a user without a home
    folder = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(folder):  # noqa: PTH117 - by the XDG specification relative ones are ignored
        folder = os.path.expanduser("~/.config")  # noqa: PTH111 - pathlib raises for a user without a home
    return pathlib.Path(folder, "kale-dist", "config.toml")


def load(environment: Mapping[str, str] | None = None) -> Config:
    """Read the file and the environment.

    Args:
        environment: Variables in place of the process's own.

    Raises:
        ConfigError: The file cannot be read, or a setting is unknown or wrong. The message names the file or variable.
    """
    environment = os.environ if environment is None else environment
    file = path(environment)
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, value in _read(file, must_exist=bool(environment.get(FILE_VARIABLE))).items():
        found[key], origins[key] = _checked(key, value, f"{key} in {file}"), str(file)
    for key in KEYS:
        variable = f"{_PREFIX}{key.upper()}"
        text = environment.get(variable, "").strip()
        if text:
            found[key], origins[key] = _checked(key, _from_text(key, text, variable), variable), variable
    # For commands without a call, such as `kale-dist jobs`: a call finds them in the table itself, first.
    for key in (*_OF_CLUSTERS, "context"):
        if "kubernetes" in found and (value := getattr(found["kubernetes"], key)):
            found[key], origins[key] = value, origins["kubernetes"]
    return Config(**found, origins=tuple((key, origins[key]) for key in KEYS if found.get(key)))


def _read(file: pathlib.Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise ConfigError(FILE_VARIABLE, f"there is no file {file}", "Correct the path, or unset it") from None
        return {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("configuration", f"{file} cannot be read: {reason}", "Mend or remove it") from error
    try:
        settings = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError("configuration", f"{file}, line {line}, is not UTF-8", "Save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        remedy = 'A line of it looks like this: image = "registry.example.com/team/train:1"'
        raise ConfigError("configuration", f"{file} is not valid TOML: {error}", remedy) from None
    for key in settings:
        if key not in KEYS:
            remedy = f"{closest(key, KEYS)}Use one of: {', '.join(KEYS)}"
            raise ConfigError("configuration", f"{file} has an unknown setting {shorten(key)}", remedy)
    return settings


def _from_text(key: str, text: str, variable: str) -> Any:
    """Parse a variable's text into the form that the setting has in the file."""
    if key in _TABLES:
        try:
            return json.loads(text)
        except ValueError:
            raise ConfigError(variable, f"{shorten(text)} is not JSON", _TABLE_REMEDY) from None
    return [part.strip() for part in text.split(",") if part.strip()] if key == "image_pull_secrets" else text


def _checked(key: str, value: Any, argument: str) -> Any:
    """Check a setting, and convert it to its own type."""
    if key in _TABLES:
        if not isinstance(value, Mapping):
            raise ConfigError(argument, f"{show(value)} is not a table", _TABLE_REMEDY)
        try:
            return _TABLES[key](**value)
        except ConfigError as error:
            raise ConfigError(f"{error.argument} of {argument}", error.problem, error.remedy) from None
    if key in _OF_CLUSTERS:
        try:
            return getattr(ClusterOptions(**{key: value}), key)
        except ConfigError as error:
            raise ConfigError(argument, error.problem, error.remedy) from None
    if not isinstance(value, str):
        raise ConfigError(argument, f"{show(value)} is not text", "Write it in quotes")
    if not value:
        return value
    if "\0" in value or "\n" in value:
        raise ConfigError(argument, f"{show(value)} is more than one line", "Write it on one line")
    if key == "store":
        return names.check_store(argument, value)
    is_valid, problem, remedy = _FORMS.get(key, (bool, "", ""))
    if not is_valid(value):
        raise ConfigError(argument, f"{shorten(value)} {problem}", remedy)
    return value


_TABLES: dict[str, type[Docker | Kubernetes]] = {"docker": Docker, "kubernetes": Kubernetes}
_OF_CLUSTERS = ("namespace", "service_account", "queue", "image_pull_secrets")
"""Settings that are also arguments of `kd.Kubernetes`, which checks them."""

_FORMS: dict[str, tuple[Callable[[str], bool], str, str]] = {
    "on": (KINDS.__contains__, "is not a place to run", "Use one of: 'local', 'docker', 'kubernetes'"),
    "image": (names.is_image, "is not an image's reference", "Write it as 'registry.example.com/team/train:1'"),
    **dict.fromkeys(("registry", "registry_pull"), _REGISTRY),
    "show_locals": (("none", "summary", "full").__contains__, "is no such choice", "Use one of: 'none', 'summary', 'full'"),
    "registry_tags": (("own", "shared").__contains__, "is no such choice", "Use one of: 'own', 'shared'"),
}  # fmt: skip
