"""What a notebook, an agent and a rank send each other besides events: dataclasses, each as one line of JSON.

    notebook to agent    `Restart` and `Visit`, and those to a rank, of which the agent passes on what is meant for it
    to a rank            `Go` and `Save`; `Typed` and `PassOver` for its debugger; `Cell`, `Load`, `Repair`, `Give`, `Interrupt`,
                         `CellFailed` and `EndLive` for a live rank
    from a rank          `Received`, `Running`, `Done`, `Breakpoint`, `PassedOver` and `Answer`

A line is an object of one field, which is named after the class and has the fields that are not as by default. A relay passes the
lines to its ranks on unread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kale_dist.wire import decoding

# -- from a notebook to the agent -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """All ranks start again, in the same pods, if this attempt still runs."""

    attempt: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """A person has come to the rank's breakpoint."""


# -- to a rank --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Go:
    """The rank is done, and may end."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """The rank is to write a checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Typed:
    """What a person has typed at a prompt of the debugger. A line that was typed at another prompt does nothing."""

    prompt: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassOver:
    """No person has answered this prompt: the rank goes on, here and at the breakpoints to come."""

    prompt: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToLive:
    """A message to live ranks. One that comes twice does nothing."""

    attempt: int | None = None
    """The attempt whose ranks it is for; None for any."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Numbered(ToLive):
    """A message that a live rank answers."""

    number: int = 0
    """Higher than that of any message before."""
    name: str = ""
    """A random one: of two messages with one number, the second is refused."""
    ranks: tuple[int, ...] = ()
    """The ranks that it is for; empty for all."""

    def is_for(self, rank: int) -> bool:
        """Whether the message is for a rank."""
        return not self.ranks or rank in self.ranks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell(Numbered):
    """Run a cell."""

    source: str
    file: str
    """Its file name in tracebacks."""
    label: str
    """What the notebook calls it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load(Numbered):
    """Put what a snapshot has into the ranks' names."""

    snapshot: str
    """Digest of its manifest."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Repair(Numbered):
    """Give the process groups new backends."""

    repair: int
    """The number of the repair, from 1."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Give(Numbered):
    """Write the value of an expression into the rank's outcome file."""

    expression: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Interrupt(ToLive):
    """End the cell of this number; no other."""

    number: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CellFailed(ToLive):
    """The cell of this number has failed in another rank."""

    number: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndLive(ToLive):
    """Return from the job's function."""


# -- from a rank ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """The rank has its assignment, and can be asked for its stacks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """The user's function is called now."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """How the call went. The outcome is written."""

    ok: bool = True
    error_type: str = ""
    error_text: str = ""
    where: str = ""
    """The place in the user's code, and its line."""
    locals: str = ""
    """The local variables of the last frames."""
    node: str = ""
    """The cluster's node that it failed on."""
    is_not_started: bool = False
    """Whether it failed before the user's function was called."""
    exchanges: tuple[int, ...] = ()
    """Collectives of each backend in which the rank has taken part; empty where it does not count them (CPUs)."""
    weights: str = ""
    """A fingerprint of what it has trained of the models that its function was given; empty if nothing."""
    copies: str = ""
    """What to log where ranks have other ones."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Breakpoint:
    """Where a rank waits in `breakpoint()`."""

    prompt: str
    """Names the prompt that an answer is for; each has another one. Empty where the rank has left the breakpoint."""
    where: str
    """`Cell In[3]:5 in step`."""
    text: str
    """What the debugger has printed since the last answer, with the prompt."""
    typed: str
    """The last answer."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassedOver:
    """The rank has passed over a breakpoint."""

    where: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A live rank's answer to a message. One with number 0 means that it waits for the first."""

    number: int = 0
    name: str = ""
    ok: bool = True
    is_refused: bool = False
    """Whether another message of this number came before."""
    idle_s: float | None = None
    """Seconds without a cell after which live ranks end; None for never."""
    gives: bool = False
    """Whether the rank's outcome file has the value."""
    loaded: tuple[str, ...] = ()
    """Names that have what came from the notebook."""
    repaired: int = 0
    """The number of the repair."""
    value: Mapping[str, str] | None = None
    """The value of the cell's last expression, by MIME type; empty for None."""
    names: tuple[str, ...] = ()
    """Names that the cell has bound."""
    counts: Mapping[str, int] | None = None
    """Collectives by process group; None where they cannot be counted."""
    is_cut: bool = False
    """Whether the rank's connections were cut."""
    is_freed: bool = False
    """Whether it waited in a collective for a rank that had failed."""
    is_interrupted: bool = False
    error_type: str = ""
    traceback: str = ""


ToAgent = Restart | Visit | Typed | ToLive
ToRank = Go | Save | Typed | PassOver | ToLive
FromRank = Received | Running | Done | Breakpoint | PassedOver | Answer

_ALL = (
    Restart, Visit, Go, Save, Typed, PassOver, Cell, Load, Repair, Give, Interrupt, CellFailed, EndLive, Received, Running, Done,
    Breakpoint, PassedOver, Answer,
)  # fmt: skip
_CLASSES: dict[str, type[Any]] = {kind.__name__: kind for kind in _ALL}


def encode(message: ToRank | ToAgent | FromRank) -> bytes:
    """The message's line, with its newline."""
    return decoding.encode_json({type(message).__name__: decoding.encode(message)})


def read(data: bytes) -> Iterator[Any]:
    """The messages in whole lines; a line that is none is passed over."""
    for record in decoding.decode_json_lines(data):
        try:
            yield parse(record)
        except (TypeError, ValueError):
            continue


def parse(record: object) -> Any:
    """The message in a line's object.

    Raises:
        TypeError, ValueError: There is none, or a field is not of its type.
    """
    if not isinstance(record, Mapping) or len(record) != 1:
        raise TypeError("A message is an object of one field")
    ((name, fields),) = record.items()
    if (kind := _CLASSES.get(name)) is None or not isinstance(fields, Mapping):
        raise ValueError(f"There is no message {name!r}")
    return decoding.decode(kind, fields)
