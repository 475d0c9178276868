"""Make docs/troubleshooting.md from the table of sentences by which jobs on a cluster explain themselves.

Run it with `.venv/bin/python docs/make_troubleshooting.py` after a change to kale_dist/backends/kubernetes/troubles.
"""

from __future__ import annotations

import pathlib
import re
import string

from kale_dist.backends.kubernetes import troubles
from kale_dist.backends.kubernetes.troubles import Trouble

PAGE = pathlib.Path(__file__).parent / "troubleshooting.md"

HEAD = """# Troubleshooting on a cluster

While a job waits or after it has failed, `job.status.reason` says why in one sentence, and what to do in another. These
are all of the sentences. Words in *italics* stand for what the cluster says of your job.

What may heal is only told, and the job waits on: an image that may still be pushed, a node that may become free. Give
`cluster={"pending_timeout_s": ...}` to bound that. What cannot heal fails the job at once; such entries say so.

This page is made by `docs/make_troubleshooting.py` from the table that the library itself uses.
"""


_SOMETIMES = ("claim_said", "cluster_has", "last_said", "queue_said")
"""Facts that bring their own words, and often are none."""

_SHOWN = {"missing": "what cannot be made", "pod_name": "pod"}

_CODE = re.compile(
    r"'(kubectl .*?)'(?=[ ;]|$)|(kubectl .*$)|'(docker run)'"
    r"|((?:cluster|resources)=\{.*?\}|\w+=(?=[ ,)]|$)|--[a-z-]+)"
)


def _words(text: str) -> str:
    """A template as Markdown, its facts in italics or, within code, in angle brackets."""
    parts = []
    for literal, fact, _, _ in string.Formatter().parse(text):
        parts.append(literal)
        if fact is not None and fact not in _SOMETIMES:
            parts.append(f"<{_SHOWN.get(fact, fact.replace('_', ' '))}>")
    pieces = []
    end = 0
    joined = "".join(parts)
    for code in _CODE.finditer(joined):
        found = next(group for group in code.groups() if group)
        pieces += [re.sub("<(.*?)>", r"*\1*", joined[end : code.start()]), f"`{found}`"]
        end = code.end()
    pieces.append(re.sub("<(.*?)>", r"*\1*", joined[end:]))
    words = "".join(pieces)
    return f"{words[:1].upper()}{words[1:]}"


def _entry(trouble: Trouble) -> str:
    fails = " The job fails at once." if trouble.is_final else ""
    seen = f"Recognised by {trouble.place.value}"
    where = f"{seen}, of the container `{trouble.container}`" if trouble.container else seen
    return (
        f"({trouble.name})=\n### {trouble.title}\n\n> {_words(trouble.sentence)}.\n\n{_words(trouble.remedy)}.{fails}\n\n"
        f"{where}.\n"
    )


def page() -> str:
    """The whole page."""
    groups = ["\n".join((f"## {title}\n", *map(_entry, group))) for title, group in troubles.GROUPS]
    return "\n".join((HEAD, *groups))


if __name__ == "__main__":
    PAGE.write_text(page())
