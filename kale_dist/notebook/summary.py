"""How the execution of a notebook went, for machines: JSON, and the XML that JUnit made and CI servers read."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from kale_dist.errors import ConfigError
from kale_dist.view import facts

if TYPE_CHECKING:
    from kale_dist.notebook.execution import Execution


def check(option: str, file: pathlib.Path) -> None:
    """See before anything runs that a summary can be written.

    Args:
        option: Which one, as the user wrote it.
        file: Where it will go.

    Raises:
        ConfigError: It cannot.
    """
    if not file.absolute().parent.is_dir():
        raise ConfigError(option, f"{file} has no folder", "Make it first")
    if file.is_dir():
        raise ConfigError(option, f"{file} is a folder", "Name a file")
    existed = file.exists()
    try:
        file.open("a").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise ConfigError(option, f"{file} cannot be written ({error.strerror})", "Choose another file") from error


def as_json(execution: Execution, notebook: str) -> str:
    """The execution as a JSON object.

    Args:
        execution: How it went.
        notebook: What was executed.
    """
    return json.dumps(
        {
            "notebook": notebook,
            "output": str(execution.output),
            "result": _result(execution),
            "failure": execution.failure,
            "seconds": round(sum(cell.seconds for cell in execution.cells), 3),
            "cells": [
                {
                    "number": cell.number,
                    "state": cell.state,
                    "seconds": round(cell.seconds, 3),
                    "source": cell.source,
                    "error": cell.error,
                }
                for cell in execution.cells
            ],
            "jobs": [{"ref": job.ref, "state": job.state, "reason": job.reason} for job in execution.jobs],
        },
        indent=2,
    )


def as_junit(execution: Execution, notebook: str) -> str:
    """The execution as a test suite: a test case for each code cell and for each job.

    Args:
        execution: How it went.
        notebook: What was executed.
    """
    suite = ET.Element("testsuite", name=notebook)
    for cell in execution.cells:
        first = next((line.strip() for line in cell.source.splitlines() if line.strip()), "")
        case = _case(suite, notebook, f"cell {cell.number}: {first}"[:120], cell.seconds)
        if cell.state in ("skipped", "not run"):
            ET.SubElement(case, "skipped", message="tagged" if cell.state == "skipped" else "never reached")
        elif cell.state == "failed":
            _fail(case, cell.error)
    for job in execution.jobs:
        case = _case(suite, notebook, f"job {job.ref}", 0.0)
        if job.state != "succeeded":
            _fail(case, f"{job.state}: {job.reason}")
    for tag in ("failure", "skipped"):
        suite.set(f"{tag}s" if tag == "failure" else tag, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    suite.set("errors", "0")
    suite.set("time", f"{sum(cell.seconds for cell in execution.cells):.3f}")
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _result(execution: Execution) -> str:
    if execution.interrupted:
        return "interrupted"
    return "failed" if execution.failure else "succeeded"


def _case(suite: ET.Element, notebook: str, name: str, seconds: float) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=_plain(notebook), name=_plain(name), time=f"{seconds:.3f}")


def _fail(case: ET.Element, error: str) -> None:
    text = _plain(error)
    last = text.strip().rpartition("\n")[2]
    ET.SubElement(case, "failure", message=last[:200]).text = text


def _plain(text: str) -> str:
    """Text without what XML cannot hold."""
    return facts.clean_lines(text)
