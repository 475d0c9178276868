"""Make docs/troubleshooting.md from the table of sentences by which jobs on a cluster explain themselves.

Run it with `.venv/bin/python docs/make_troubleshooting.py` after a change to kale_dist/backends/kubernetes/explain/table.py.
"""

from __future__ import annotations

import pathlib
import re
import string

from kale_dist.backends.kubernetes.explain import table
from kale_dist.backends.kubernetes.explain.table import Entry, Seen

PAGE = pathlib.Path(__file__).parent / "troubleshooting.md"

HEAD = """# Troubleshooting on a cluster

While a job waits, and after it has failed, `job.status.reason` says why in one sentence, and what you can do in another.
Errors of a call say it in the same words. These are all of the sentences. Words in *italics* stand for what the cluster says of
your job.

What may heal is only reported while the job waits: an image that may still be pushed, a node that may become free. The job
fails when it has waited for `pending_timeout_s` (a day). What cannot heal fails the job at once; such entries say so.
"""


_IN_CALLS = frozenset((Seen.CONNECTION, Seen.API))
"""Where an error ends a call, and no job."""

_SOMETIMES = ("claim_said", "cluster_has", "last_said", "position", "queue_said")
"""Facts that bring their own words, and often are none."""

_SHOWN = {"pod_name": "pod"}

_CODE = re.compile(
    r"'(kubectl .*?)'(?=[ ;]|$)|(kubectl .*$)|'(docker run)'"
    r"|(\w+=(?:True|False|\d+|'\w+')?(?=[ ,:;)]|$)|--[a-z-]+)"
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


def _entry(entry: Entry) -> str:
    fails = "" if entry.heals or _IN_CALLS.issuperset(entry.seen) else " The job fails at once."
    # A remedy may end with an object to apply, which stands on another page.
    remedy = entry.remedy.replace(":\n\n{role}", " the Role of [this page](rbac.md)")
    return f"({entry.name})=\n### {entry.title}\n\n> {_words(entry.sentence)}.\n\n{_words(remedy)}.{fails}\n"


def page() -> str:
    """The whole page."""
    groups = ["\n".join((f"## {title}\n", *map(_entry, group))) for title, group in table.GROUPS]
    return "\n".join((HEAD, *groups))


if __name__ == "__main__":
    PAGE.write_text(page())
