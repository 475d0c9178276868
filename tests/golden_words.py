"""What users read, kept once: `KALE_DIST_UPDATE_GOLDEN=1 pytest FILE` writes the words of a file's tests; look at the diff."""

from __future__ import annotations

import os
import pathlib
import re

FOLDER = pathlib.Path(__file__).parent / "golden" / "words"


class Words:
    """Texts of the tests of one file: each test's name, and below it, indented, its texts in their order.

    Args:
        name: Of the file, without its ending.
        tests: Names of all its tests; None if only some were collected.
    """

    def __init__(self, name: str, tests: set[str] | None) -> None:
        self.path = FOLDER / f"{name}.txt"
        self._is_written = bool(os.environ.get("KALE_DIST_UPDATE_GOLDEN"))
        self._kept = _read(self.path)
        if tests is not None:
            left = self._kept.keys() - tests
            assert self._is_written or not left, f"{self.path} has words of tests that are no more: {sorted(left)}"
            self._kept = {test: texts for test, texts in self._kept.items() if test not in left}

    def check(self, test: str, number: int, text: str) -> None:
        """Compare a test's text with the kept one.

        Args:
            test: The test's name.
            number: Which of its texts, from 0.
            text: What it says now.
        """
        text = "\n".join(line.strip() for line in text.splitlines() if line.strip())
        # A pickle's size changes with names of our own modules.
        text = re.sub(r"(?<![\d,^])\d[\d,]* bytes", "N bytes", text)
        kept = self._kept.setdefault(test, [])
        if self._is_written:
            self._kept[test] = [*kept[:number], text]
            self._write()
        else:
            assert text == (kept[number] if number < len(kept) else None), f"look at {self.path}, see {__name__}"

    def _write(self) -> None:
        FOLDER.mkdir(exist_ok=True)
        lines = []
        for test, texts in sorted(self._kept.items()):
            lines.append(test)
            lines += ["    " + text.replace("\n", "\n        ") for text in texts]
        self.path.write_text("".join(f"{line}\n" for line in lines))


def _read(path: pathlib.Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    texts: list[str] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        if not line.startswith("    "):
            texts = found[line] = []
        elif line.startswith("        "):
            texts[-1] += f"\n{line[8:]}"
        else:
            texts.append(line[4:])
    return found
