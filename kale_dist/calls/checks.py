"""What `distribute` and `launch` both take, and checks of single values. Nothing is read but the arguments themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kale_dist import strategies, trackers
from kale_dist.backends.base import Backend
from kale_dist.contract import STALL_WARN_S
from kale_dist.errors import ConfigError
from kale_dist.spec import names
from kale_dist.spec.job_spec import Policy
from kale_dist.spec.places import Docker, Kubernetes, Place
from kale_dist.wording import closest, show

_OWN_PREFIX = "KALE_DIST_"
_SET_BY_US = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)  # fmt: skip

_MOST_THREADS = 4096
"""Of a rank. Far more would take those of the agent, and with it other jobs."""

_PLACES = "on=kd.Kubernetes(...) or on=kd.Docker(...)"
_EACH = "Use `number_of_processes` for all processes together, and `processes_per_pod` of kd.Kubernetes(...)"
_NEIGHBOURS = {
    "num_processes": "Use `number_of_processes`", "nprocs": "Use `number_of_processes`", "world_size": "Use `number_of_processes`",
    "num_workers": "Use `number_of_processes`; workers that load data are an argument of the DataLoader",
    "nproc_per_node": _EACH, "num_proc_per_node": _EACH, "num_nodes": _EACH, "nnodes": _EACH,
    "env": "Use `environment`", "env_vars": "Use `environment`", "backend": "Use `on`: 'local', 'docker' or 'kubernetes'",
    "gpus": "Use `cuda=True` for one GPU a process", "gpu": "Use `cuda=True`", "use_gpu": "Use `cuda=True`", "device": "Use `cuda`",
    "gradient_accumulation_steps": "Use `accumulate`", "accumulate_grad_batches": "Use `accumulate`",
    "max_grad_norm": "Use `clip_norm`", "gradient_clip_val": "Use `clip_norm`", "mixed_precision": "Use `precision`",
    "epoch": "Use `epochs`", "max_epochs": "Use `epochs`", "num_epochs": "Use `epochs`", "n_epochs": "Use `epochs`",
    "num_train_epochs": "Use `epochs`", "dataloader": "Use `train_data_loader`", "train_loader": "Use `train_data_loader`",
    "train_dataloader": "Use `train_data_loader`", "eval_loader": "Use `eval_data_loader`", "val_loader": "Use `eval_data_loader`",
    "test_loader": "Use `eval_data_loader`", "eval_dataloader": "Use `eval_data_loader`", "val_dataloader": "Use `eval_data_loader`",
    "data_loader": "Use `train_data_loader`", "train_data": "Use `train_data_loader`", "step": "Use `train_step`",
    "training_step": "Use `train_step`", "evaluate": "Use `eval_data_loader`", "eval_data": "Use `eval_data_loader`",
    "validation_loader": "Use `eval_data_loader`", "optim": "Use `optimizer`",
    "loss": "Use `criterion`", "loss_fn": "Use `criterion`", "lr_scheduler": "Use `scheduler`", "timeout": "Use `timeout_s`",
    "max_retries": "Use `max_restarts`", "max_failures": "Use `max_restarts`",
    "resources_per_node": "Use `resources` of kd.Kubernetes(...)", "resources_per_worker": "Use `resources` of kd.Kubernetes(...)",
    "cluster": f"Its settings are arguments of the place: {_PLACES}",
}  # fmt: skip
"""Words of other libraries, and of ours elsewhere, to what to write here."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How and where a call runs, for all verbs. Fields as arguments of `distribute`."""

    number_of_processes: int | None = None
    cuda: bool | None = None
    name: str | None = None
    on: str | Place | Backend | None = None
    environment: tuple[tuple[str, str], ...] = ()
    threads: int | None = None
    seed: int | None = None
    timeout_s: float | None = None
    stall_warn_s: float | None = STALL_WARN_S
    stall_timeout_s: float | None = None
    max_restarts: int = 0
    detach: bool = False
    track: Any = ()
    """As given; then settings of trackers."""

    def __post_init__(self) -> None:
        for count in ("number_of_processes", "threads"):
            if getattr(self, count) is not None:
                check_count(count, getattr(self, count))
        if (self.threads or 0) > _MOST_THREADS:
            remedy = "Give the cores of one rank, or None for its fair share"
            raise ConfigError("threads", f"{show(self.threads)} is more than any machine has cores", remedy)
        if self.cuda is not None:
            check_flag("cuda", self.cuda)
        check_flag("detach", self.detach)
        if self.name is not None:
            names.check(self.name)
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31):
            # What numpy, random and torch all take, with room for the ranks.
            raise ConfigError(
                "seed", f"{show(seed)} is not an int from 0 to 2**31 - 1", "Give one, or None for a random one"
            )
        object.__setattr__(self, "environment", _variables(self.environment))
        object.__setattr__(self, "track", trackers.resolve(self.track))
        _ = self.policy

    @property
    def policy(self) -> Policy:
        """Its time limits, and what happens when a rank or the notebook goes away."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Policy)}
        return Policy(**fields)


def _variables(environment: Any) -> tuple[tuple[str, str], ...]:
    given = {} if environment is None else environment
    if isinstance(given, tuple):
        with contextlib.suppress(TypeError, ValueError):
            given = dict(given)
    if not isinstance(given, Mapping):
        raise ConfigError("environment", f"{show(environment)} is not a dict", "Write it as {'NAME': 'value'}")
    for name, value in given.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError("environment", f"{show(name)} cannot be a variable's name", "Use letters, digits and _")
        if not isinstance(value, str) or "\0" in value:
            remedy = f"Write {str(value)!r}" if "\0" not in str(value) else "Leave out the NUL character"
            raise ConfigError("environment", f"the value {show(value)} of {name} is not text", remedy)
        if name in _SET_BY_US or name.startswith(_OWN_PREFIX):
            raise ConfigError("environment", f"{name} is set in each rank by kale_dist", "Leave it out")
    return tuple(sorted(given.items()))


# -- words and functions ---------------------------------------------------------------------------------------------


def check_words(words: Iterable[str], verb: Callable[..., Any]) -> None:
    """Refuse an argument that a verb does not have, with the one that was probably meant."""
    known = inspect.signature(verb).parameters
    for word in words:
        if word not in known:
            raise ConfigError(word, f"{verb.__name__}() has no argument of this name", _suggestion(word, verb))


def _suggestion(word: str, verb: Callable[..., Any], own: Iterable[str] = ()) -> str:
    """A sentence that names the argument that was probably meant; `own` are those besides the verb's."""
    places = [place for place in (Kubernetes, Docker) if any(word == field.name for field in dataclasses.fields(place))]
    if places:
        return "It belongs to the place: " + " or ".join(f"on=kd.{place.__name__}({word}=...)" for place in places)
    if (owner := strategies.owner_of(word)) is not None:
        return f"It is a setting of a strategy: strategy=kd.strategies.{owner.__name__}({word}=...)"
    signature = inspect.signature(verb).parameters
    known = [*own, *(name for name, parameter in signature.items() if not parameter.kind.name.startswith("VAR_"))]
    remedy = _NEIGHBOURS.get(word, "")
    alone = re.fullmatch(r"Use `(\w+)`", remedy)
    if remedy and (alone is None or alone[1] in known):
        return remedy
    if near := closest(word, known).strip():
        return near
    return (
        f"`{alone[1]}` is an argument of distribute()"
        if alone
        else f"Its arguments are listed by help({verb.__name__})"
    )


def check_function(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], verb: Callable[..., Any]) -> None:
    """Check what `launch` is to call.

    Args:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        verb: `launch`, of whose arguments `kwargs` has none.

    Raises:
        ConfigError: It cannot be called, cannot be called so, or would return something that is no result.
    """
    if not callable(fn):
        problem = f"{show(fn)} cannot be called"
        raise ConfigError("fn", problem, "Pass the function and its arguments: launch(train, 3), not launch(train(3))")
    check_returns("fn", fn)
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        accepted = inspect.signature(fn).parameters
        hints = [f"{name}: {_suggestion(name, verb, accepted)}" for name in kwargs if name not in accepted]
        told = [hint if hint.endswith("?") else f"{hint}." for hint in hints if "help(" not in hint]
        remedy = " ".join([*told, f"It is {describe(fn)}"])
        raise ConfigError("fn", f"it cannot be called with these arguments ({error})", remedy) from None
    except ValueError:
        pass  # Some functions written in C have no signature.


def check_unambiguous(fn: Any, args: tuple[Any, ...], own: Iterable[str]) -> None:
    """Refuse an argument that `launch` would take for itself although the function has one of the same name.

    Args:
        fn: The function.
        args: Its positional arguments.
        own: Names of launch's own arguments that were given.

    Raises:
        ConfigError: The function has an argument of such a name, to which nothing is bound yet.
    """
    try:
        signature = inspect.signature(fn)
        bound = set(signature.bind_partial(*args).arguments)
    except (TypeError, ValueError):
        return
    while isinstance(fn, functools.partial):
        bound |= fn.keywords.keys()
        fn = fn.func
    for name in own:
        parameter = signature.parameters.get(name)
        if (
            parameter is not None
            and parameter.kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")
            and name not in bound
        ):
            problem = f"launch() and {describe(fn)} both have an argument of this name"
            remedy = f"Say first what the function gets: launch(functools.partial({title(fn)}, {name}=...), ...)"
            raise ConfigError(name, problem, remedy)


def check_returns(argument: str, fn: Any) -> None:
    """Refuse functions that only return something to run later."""
    inner = functools.reduce(lambda found, _: getattr(found, "func", found), range(8), fn)
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        raise ConfigError(argument, f"{title(fn)} is asynchronous", "Call it with asyncio.run in a plain function")
    if inspect.isgeneratorfunction(inner):
        raise ConfigError(argument, f"{title(fn)} has a `yield`: it returns a generator", "Return a value instead")


def describe(fn: Any) -> str:
    """A function with its arguments, as its author wrote them."""
    try:
        return f"{title(fn)}{inspect.signature(fn)}"
    except (TypeError, ValueError):
        return title(fn)


def title(fn: Any) -> str:
    """A function's name for people: without the functions around it."""
    inner = functools.reduce(lambda found, _: getattr(found, "func", found), range(8), fn)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__).rpartition("<locals>.")[2]


def is_model(value: Any) -> bool:
    """Whether this is a module, or a class of modules, without importing torch for it."""
    torch = sys.modules.get("torch")
    kind = value if isinstance(value, type) else type(value)
    return torch is not None and issubclass(kind, torch.nn.Module)


# -- single values ---------------------------------------------------------------------------------------------------


def check_flag(argument: str, value: Any) -> None:
    """Accept True and False alone: the string 'no' would count as true."""
    if not isinstance(value, bool):
        raise ConfigError(argument, f"{show(value)} is neither True nor False", "Give a bool")


def check_count(argument: str, value: Any) -> None:
    """Accept whole numbers of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(argument, f"{show(value)} is not a whole number", "Give an int of 1 or more")
    if value < 1:
        raise ConfigError(argument, f"{value} is less than 1", "Give an int of 1 or more")
