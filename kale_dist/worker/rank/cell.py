"""Runs the text of a cell in a rank, as the notebook would run it: its last expression is its value."""

from __future__ import annotations

import ast
import asyncio
import inspect
import linecache
from collections.abc import Callable
from typing import Any

from kale_dist.wire.context import context


def split(source: str, filename: str) -> tuple[Any, Any]:
    """Compile a cell: what comes before its last expression, and that expression; None for one that is not there.

    Args:
        source: The cell's text. `await` is allowed at its top level, as in a notebook.
        filename: What tracebacks call it.

    Raises:
        SyntaxError: It is not Python.
        ValueError: It holds a zero byte.
    """
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    before = compile(tree, filename, "exec", flags=flags) if tree.body else None
    value = compile(ast.Expression(last.value), filename, "eval", flags=flags) if isinstance(last, ast.Expr) else None
    return before, value


def cell(source: str, filename: str, names: Callable[..., Any]) -> Any:
    """Run a cell on this rank, in the namespace of the notebook's functions, with the rank's place in the job added to it.

    Args:
        source: The cell's text.
        filename: What tracebacks call it.
        names: A function of the notebook: its globals are the namespace.

    Returns:
        The value of the last expression; None if there is none.
    """
    # So that tracebacks show the cell's lines.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    here, namespace = context(), names.__globals__
    namespace.update(rank=here.rank, world_size=here.world_size, local_rank=here.local_rank, device=here.device)
    return execute(source, filename, namespace)


def execute(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Run a cell in a namespace; returns the value of its last expression, None if there is none."""
    before, value = split(source, filename)
    if any(code is not None and code.co_flags & inspect.CO_COROUTINE for code in (before, value)):
        return asyncio.run(_run(before, value, namespace))
    if before is not None:
        exec(before, namespace)  # noqa: S102 - that is what a cell is for
    return eval(value, namespace) if value is not None else None  # noqa: S307 - likewise


async def _run(before: Any, value: Any, namespace: dict[str, Any]) -> Any:
    result = None
    for code in (before, value):
        if code is not None:
            # Code that awaits gives a coroutine when it is evaluated.
            result = eval(code, namespace)  # noqa: S307 - likewise
            if code.co_flags & inspect.CO_COROUTINE:
                result = await result
    return result if value is not None else None
