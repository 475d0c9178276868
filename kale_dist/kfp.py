"""A call as a step of a Kubeflow pipeline, with the trained model and the metrics as artifacts.

    from kale_dist import kfp

    @kfp.component(base_image="registry.example.com/team/kale:1")
    def train(epochs: int, lr: float = 0.1):
        import kale_dist as kd
        ...
        return kd.distribute(model, loader, criterion, optimizer, epochs=epochs, on=kd.Kubernetes(...))

    @dsl.pipeline
    def pipeline():
        trained = train(epochs=5)
        deploy(model=trained.outputs["model"])

The step's pod makes the call, prints the job's log and waits for its end.
"""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import importlib
import inspect
import linecache
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from kale_dist.errors import ConfigError, KaleDistError, short_refusals
from kale_dist.wording import show

if TYPE_CHECKING:
    from kale_dist.job.handle import Job

_OUTPUTS = {"model": "dsl.Output[dsl.Model]", "metrics": "dsl.Output[dsl.Metrics]"}
_MISSING = "pip install kfp. It wants an older kubernetes than kale-dist[kubernetes], which is not needed to compile"


@short_refusals
def component(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a component of a function that makes a call and returns its job.

    As for `dsl.component`, the function has to contain everything it needs, including imports; its arguments are the inputs.

    Args:
        fn: The function. It returns the job of `kd.distribute` or `kd.launch`.
        **options: Options of `dsl.component`, such as `base_image`, an image with kale-dist[kubernetes] and torch.

    Returns:
        The component, with the outputs `model` (a `dsl.Model`: the trained weights as `torch.save` writes a `state_dict`; of
        `launch`, what rank 0 returned) and `metrics` (`dsl.Metrics`: the last ones). Without `fn`, a decorator.

    Raises:
        ConfigError: kfp is not installed, or this cannot become a component.
    """
    try:
        dsl = importlib.import_module("kfp.dsl")
    except ModuleNotFoundError as error:
        raise ConfigError("kfp", f"the package {error.name} is not installed here", _MISSING) from None
    if fn is None:
        return lambda function: component(function, **options)
    definition = _definition(fn)
    name = definition.name
    # The component takes the function's name, so the function gets another one.
    renamed = f"def {name}_call{_source(fn).removeprefix(f'def {name}')}"
    known = {**fn.__globals__, "dsl": dsl}
    helpers = [*(options.pop("additional_funcs", None) or ()), _made(f"{name}_call", renamed, known)]
    return dsl.component(_made(name, _step(definition), known), additional_funcs=helpers, **options)


def run(call: Callable[..., Job[Any]], given: Mapping[str, Any], model: Any, metrics: Any) -> None:
    """Run the function in its step's pod, wait for the job, and fill the artifacts. Compiled components call this.

    On SIGTERM the jobs that the step has started are deleted.

    Args:
        call: The function.
        given: The function's arguments.
        model: The artifact for the weights.
        metrics: The artifact for the metrics.

    Raises:
        KaleDistError: The function returned no job.
        JobError: The job failed.
    """
    _detach(call)
    with in_pod(lambda: call(**given)) as job:
        job.stream_logs()
        result = job.result()
    job.save(model.path)
    model.metadata |= {"framework": "pytorch", "job": job.ref}
    reported = {name: value for row in job.status.metrics for name, value in row.values}
    for name, value in getattr(result, "metrics", reported).items():
        metrics.log_metric(name, value)


@contextlib.contextmanager
def in_pod(make: Callable[[], Any]) -> Iterator[Job[Any]]:
    """Make a call in a pod. On SIGTERM, the jobs that this process has started within the block are deleted.

    Args:
        make: Makes the call.

    Raises:
        KaleDistError: The call returned no job.
    """
    begun = time.time()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        job = make()
        if not hasattr(job, "stream_logs"):
            raise KaleDistError(
                f"The function returned {show(job)}, not a job. Let it end with `return kd.distribute(...)`"
            )
        yield job
    except _TerminatedError:
        # An interrupted submission removes by itself what it has created.
        _delete_since(begun)
        raise
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class _TerminatedError(SystemExit):
    """This process received SIGTERM."""


def _terminate(number: int, _frame: Any) -> NoReturn:
    """Handle SIGTERM, which a container's first process would otherwise ignore."""
    signal.signal(number, signal.SIG_IGN)
    raise _TerminatedError(128 + number)


def _delete_since(begun: float) -> None:
    """Delete the jobs that this process has started since a time, concurrently, because it may soon be killed."""
    from kale_dist.calls import verbs
    from kale_dist.job import records

    def delete(ref: str) -> None:
        try:
            verbs.attach(ref).delete()
        except KaleDistError as error:
            print(f"{ref} could not be deleted: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the step's log

    found = [
        record.ref for record in records.all_records() if record.kernel_pid == os.getpid() and record.created >= begun
    ]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(found))) as pool:
        pool.map(delete, found)


def _detach(call: Callable[..., Any]) -> None:
    """Have the component's functions sent by value, as those of a notebook are.

    Ranks would import them as a module, which imports kfp, which only the step's pod has.
    """
    names = call.__globals__
    module = names["__name__"]
    for value in (*names.values(), call):
        if inspect.isfunction(value) and value.__module__ == module:
            value.__module__ = "__main__"
    names["__name__"] = "__main__"


def _definition(fn: Any) -> ast.FunctionDef:
    """Parse and check the function's definition."""
    remedy = "Write it with def in a cell or a file, and decorate it"
    try:
        found = ast.parse(_source(fn)).body[0]
    except (OSError, TypeError, SyntaxError):
        raise ConfigError("fn", f"{show(fn)} has no source that could be sent", remedy) from None
    if not isinstance(found, ast.FunctionDef):
        raise ConfigError("fn", f"{show(fn)} is not a plain function", remedy)
    if found.args.vararg or found.args.kwarg or found.args.posonlyargs:
        problem = f"{found.name} takes arguments without names, and a component's inputs have names"
        raise ConfigError("fn", problem, "Name its arguments, each with its type")
    for argument in (*found.args.args, *found.args.kwonlyargs):
        if argument.arg in _OUTPUTS:
            problem = f"{argument.arg!r} is an argument of {found.name}, and an output of the component"
            raise ConfigError("fn", problem, "Rename the argument")
    return found


def _source(fn: Any) -> str:
    """The function's text without its decorators, as kfp sends it."""
    lines = textwrap.dedent(inspect.getsource(fn)).splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if line.startswith(("def ", "async def "))), 0)
    return "".join(lines[first:])


def _step(definition: ast.FunctionDef) -> str:
    """The source of the component's own function."""
    name, arguments = definition.name, definition.args
    inputs = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    outputs = ", ".join(f"{output}: {kind}" for output, kind in _OUTPUTS.items())
    star = ", " if arguments.kwonlyargs else ", *, " if inputs else "*, "
    passed = ", ".join(f"{given}={given}" for given in inputs)
    return (
        f"def {name}({ast.unparse(arguments)}{star}{outputs}):\n"
        f"    from kale_dist import kfp\n\n"
        f"    kfp.run({name}_call, dict({passed}), model, metrics)\n"
    )


def _made(name: str, source: str, known: dict[str, Any]) -> Any:
    """Define a function from source, and let `inspect` find the source, which kfp needs."""
    file = f"<kale_dist component {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = dict(known)
    exec(compile(source, file, "exec", dont_inherit=True), names)  # noqa: S102 - text that this module made of the user's own
    return names[name]
