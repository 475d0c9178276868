"""YAML that kubectl reads as it was meant. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*", re.ASCII)
_WORDS_OF_YAML = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"))


def to_yaml(*objects: Mapping[str, Any]) -> str:
    """Objects as YAML documents, keys in the order they have.

    Texts that one version or another of YAML takes for a number, a time or a truth value are quoted, `1e3` and `y`
    among them, which PyYAML alone would leave plain. Texts of several lines are shown as such.

    Args:
        *objects: Made of dicts, lists, texts, numbers, bools and None.

    Returns:
        The documents, each but the first behind a line of `---`.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        """Blocks for lists and texts; no anchors."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the base's
            super().increase_indent(flow, False)  # noqa: FBT003 - the base's

        def ignore_aliases(self, _data: Any) -> bool:
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = "'"
        if "\n" in text and _fits_block(text):
            style = "|"
        elif _PLAIN.fullmatch(text) and text.lower() not in _WORDS_OF_YAML:
            style = ""
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style or None)

    Dumper.add_representer(str, represent)
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=1 << 20, allow_unicode=True)


def _fits_block(text: str) -> bool:
    """Whether a block shows the text unchanged: lines without spaces at their ends, of printable characters."""
    return all(line.isprintable() and line == line.rstrip() for line in text.split("\n")) and not text[0].isspace()
