"""Checks of single arguments, and suggestions for words of other libraries. Nothing is read but the arguments themselves."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from kale_dist import strategies
from kale_dist.errors import ConfigError
from kale_dist.job.spec.place_settings import Docker, Kubernetes
from kale_dist.wording import closest, show

P = ParamSpec("P")
R = TypeVar("R")

_PLACES = "on=kd.Kubernetes(...) or on=kd.Docker(...)"
_EACH = "Use `number_of_processes` for all processes together, and `processes_per_pod` of kd.Kubernetes(...)"
_WORDS = {
    "number_of_processes": "num_processes nprocs n_procs nproc procs world_size", "environment": "env env_vars", "cuda": "device",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches", "clip_norm": "max_grad_norm gradient_clip_val",
    "precision": "mixed_precision", "epochs": "epoch max_epochs num_epochs n_epochs num_train_epochs",
    "train_data_loader": "dataloader train_loader train_dataloader data_loader train_data",
    "eval_data_loader": "eval_loader val_loader test_loader eval_dataloader val_dataloader evaluate eval_data validation_loader",
    "train_step": "step training_step", "optimizer": "optim", "criterion": "loss loss_fn", "scheduler": "lr_scheduler",
    "timeout_s": "timeout", "max_restarts": "max_retries max_failures",
}  # fmt: skip
_OURS = {word: ours for ours, words in _WORDS.items() for word in words.split()}
"""Words of other libraries, and of ours elsewhere, to the argument of the same meaning."""

_NEIGHBOURS = {
    "batch_size": "It is the DataLoader's", **dict.fromkeys(("lr", "learning_rate"), "It is the optimizer's"),
    "num_workers": "Use `number_of_processes`; workers that load data are an argument of the DataLoader",
    **dict.fromkeys(("nproc_per_node", "num_proc_per_node", "num_nodes", "nnodes"), _EACH),
    "env_from": "Use `secret_environment` of kd.Kubernetes(...)", "backend": "Use `on`: 'local', 'docker' or 'kubernetes'",
    "gpus": "Use `cuda=True` for one GPU a process", **dict.fromkeys(("gpu", "use_gpu"), "Use `cuda=True`"),
    **dict.fromkeys(("resources_per_node", "resources_per_worker"), "Use `resources` of kd.Kubernetes(...)"),
    "cluster": f"Its settings are arguments of the place: {_PLACES}",
}  # fmt: skip
"""Other words, which no argument of ours means, to what to write here."""


def known_words(verb: Callable[P, R]) -> Callable[P, R]:
    """Make a verb refuse an argument that it does not have, with the one that was probably meant."""

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_words(kwargs, verb)
        return verb(*args, **kwargs)

    return call


def unambiguous_words(verb: Callable[P, R]) -> Callable[P, R]:
    """Make `launch` refuse an argument that it would take for itself although the function has one of the same name."""
    parameters = inspect.signature(verb).parameters.values()
    own = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        fn = args[0] if args else kwargs.get("fn")
        _check_unambiguous(fn, args[1:], [name for name in kwargs if name in own])
        return verb(*args, **kwargs)

    return call


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
    if word in _NEIGHBOURS:
        return _NEIGHBOURS[word]
    ours = _OURS.get(word)
    if ours in known:
        return f"Use `{ours}`"
    if near := closest(word, known).strip():
        return near
    return f"`{ours}` is an argument of distribute()" if ours else f"Its arguments are listed by help({verb.__name__})"


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
        remedy = "Pass the function and its arguments: launch(train, 3), not launch(train(3))"
        if isinstance(fn, str | os.PathLike):
            remedy = f"A script is run by `kale-dist launch {os.fspath(fn)}` in a terminal, or by kale_dist.scripts.launch({str(fn)!r})"
        raise ConfigError("fn", f"{show(fn)} cannot be called", remedy)
    check_returns("fn", fn)
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        accepted = inspect.signature(fn).parameters
        hints = [f"{name}: {_suggestion(name, verb, accepted)}" for name in kwargs if name not in accepted]
        notes = [hint if hint.endswith("?") else f"{hint}." for hint in hints if "help(" not in hint]
        remedy = " ".join([*notes, f"It is {describe(fn)}"])
        raise ConfigError("fn", f"it cannot be called with these arguments ({error})", remedy) from None
    except ValueError:
        pass  # Some functions written in C have no signature.


def _check_unambiguous(fn: Any, args: tuple[Any, ...], own: Iterable[str]) -> None:
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


def check_takes(argument: str, fn: Any, arguments: tuple[str, ...], name: str) -> None:
    """Refuse what cannot be called with so many arguments; `name` is what the function is called in the remedy."""
    wanted = f"Write it as def {name}({', '.join(arguments)})"
    if not callable(fn):
        raise ConfigError(argument, f"{show(fn)} cannot be called", wanted)
    check_returns(argument, fn)
    try:
        inspect.signature(fn).bind(*arguments)
    except TypeError:
        problem = f"{describe(fn)} cannot take the {len(arguments)} arguments it is called with"
        raise ConfigError(argument, problem, wanted) from None
    except ValueError:
        pass  # Some functions written in C have no signature.


def parameters_of(fn: Any) -> list[inspect.Parameter]:
    """A function's parameters, as far as they are known."""
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


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
