"""Make docs/troubleshooting.md from the table of sentences by which jobs on a cluster explain themselves.

Run it with `.venv/bin/python docs/make_troubleshooting.py` after a change to kale_dist/places/kubernetes/explain/table.py.
"""

from __future__ import annotations

import pathlib
import re
import string
from collections.abc import Iterable

from kale_dist.places.kubernetes.explain import table
from kale_dist.places.kubernetes.explain.table import Entry, Seen

PAGE = pathlib.Path(__file__).parent / "troubleshooting.md"

HEAD = """# Troubleshooting on a cluster

`job.status.reason` says in one sentence why a job waits or failed, and what to do; `wait()`, `result()` and the command line print
it. Search this page for yours; words in *italics* stand for what your cluster says, and the sentence may begin with a pod and end
with a namespace.

A job waits, at most for a day (`pending_timeout_s`), while its trouble may end without you. What only a person can mend fails it
**after 5 minutes**, or when `pending_timeout_s` is over if you gave that (`None`: never); what can never start fails it **at once**.
"""


_IN_CALLS = frozenset((Seen.CONNECTION, Seen.API))
"""Where an error ends a call, and no job."""

_SOMETIMES = ("claim_said", "last_said", "position", "queue_said")
"""Facts that bring their own words, and often are none."""

_SHOWN = {"pod_name": "pod"}

_LEFT_OUT = re.compile(
    r"^\{pod\} could not start: |(?<!longer) (of|in) the namespace \{namespace\}(?!\})| \(\{nodes\}\)"
)
"""What most sentences say alike, and a search of the page does not need."""

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


def _row(entry: Entry) -> str:
    fails = " **After 5 minutes.**" if entry.needs_action else "" if entry.heals else " **At once.**"
    fails = "" if _IN_CALLS.issuperset(entry.seen) else fails
    # A remedy may end with an object to apply, which stands on another page.
    remedy = _words(entry.remedy.replace(":\n\n{role}", " the Role of [this page](rbac.md)"))
    return f"| {_words(_LEFT_OUT.sub('', entry.sentence))}.{fails} | {remedy}. |"


def _group(title: str, entries: Iterable[Entry]) -> str:
    # The cluster's own words are not on the page.
    rows = [_row(entry) for entry in entries if entry.sentence != "{detail}"]
    return "\n".join((f"## {title}\n", "| you see | what to do |", "|---|---|", *rows, ""))


SEARCHED = "Search words: pending, ImagePullBackOff, CrashLoopBackOff, Unschedulable, OOMKilled, quota exceeded, forbidden, private registry, timeout.\n"


def page() -> str:
    """The whole page."""
    return "\n".join((HEAD, *(_group(*group) for group in table.GROUPS), SEARCHED))


if __name__ == "__main__":
    PAGE.write_text(page())
