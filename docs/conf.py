"""Sphinx's settings. Warnings are errors: `make docs`."""

from __future__ import annotations

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


def setup(app: object) -> None:
    """Called by Sphinx."""
    # Before napoleon, which takes "`a: b`" at the start of an attribute's docstring for a type.
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # type: ignore[attr-defined]
