"""Sphinx's settings. Warnings are errors: `make docs`."""

from __future__ import annotations

import pathlib
import re

import kale_dist

project = "kale_dist"
author = "The kale_dist authors"
copyright = "The kale_dist authors, Apache-2.0"  # noqa: A001 - Sphinx's name
version = release = kale_dist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "kale_dist"
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
# Wide enough for a hundred columns of drawing.
html_theme_options = {"light_css_variables": {"code-font-size": "0.78rem"}}

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
myst_enable_extensions = ["deflist", "fieldlist"]
myst_heading_anchors = 3


def _as_restructured_text(
    _app: object, what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Docstrings mark code with single backticks, and those of modules draw trees as indented blocks."""
    result: list[str] = []
    inside = False
    for line in lines:
        indented = what == "module" and line.startswith("    ")
        if indented and not inside:
            result += ["::", ""]
        inside = indented or (inside and not line)
        result.append(line if indented else re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line))
    lines[:] = result


def _write_list_of_pages(app: object, error: Exception | None) -> None:
    """Write llms.txt (https://llmstxt.org): each page with its search words, and where its Markdown is."""
    env = app.env  # type: ignore[attr-defined]
    if error is not None or app.builder.name != "html":  # type: ignore[attr-defined]
        return
    lines = [f"# {project}", "", "> Train the PyTorch model of a notebook on many processes with one call.", ""]
    for page in env.toctree_includes["index"]:
        words = (
            (env.srcdir / f"{page}.md").read_text().partition("\nSearch words: ")[2].rstrip(".\n").replace("\n", " ")
        )
        lines.append(f"- [{env.titles[page].astext()}](_sources/{page}.md.txt){f': {words}' if words else ''}")
    pathlib.Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")  # type: ignore[attr-defined]


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("build-finished", _write_list_of_pages)  # type: ignore[attr-defined]
    # Before napoleon, which takes "`a: b`" at the start of an attribute's docstring for a type.
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # type: ignore[attr-defined]
