"""Messages between a notebook, an agent and a rank."""

from __future__ import annotations

import json

import pytest

from kale_dist.wire import messages
from kale_dist.wire.messages import (
    Answer,
    Breakpoint,
    Cell,
    CellFailed,
    Done,
    EndLive,
    Give,
    Go,
    Interrupt,
    Load,
    PassedOver,
    PassOver,
    Received,
    Repair,
    Restart,
    Running,
    Save,
    Typed,
    Visit,
)

ALL = (
    Restart(attempt=2), Visit(), Go(), Save(), Typed(prompt="p", text="n\n"), PassOver(prompt="p"),
    Cell(attempt=1, number=3, name="x", ranks=(0, 2), source="1", file="<live 3>", label=""),
    Load(number=4, name="y", snapshot="00"), Repair(number=5, name="z", repair=1), Give(number=6, name="a", expression="k"),
    Interrupt(number=3, attempt=0), CellFailed(number=3), EndLive(), Received(), Running(), Done(),
    Done(ok=False, error_type="ValueError", error_text="bad", is_not_started=True, exchanges=(1, 2)),
    Breakpoint(prompt="", where="a.py:1 in f", text="(Pdb) ", typed="n"), PassedOver(where="a.py:1"), Answer(idle_s=1.5),
    Answer(number=1, name="x", ok=False, value={"text/plain": "1"}, names=("k",), counts={"gloo": 2}, is_cut=True),
)  # fmt: skip


@pytest.mark.parametrize("message", ALL, ids=lambda one: type(one).__name__)
def test_a_message_arrives_as_it_was_sent(message):
    line = messages.encode(message)
    assert line.count(b"\n") == 1
    assert list(messages.read(line * 2)) == [message, message]


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "record",
    [
        None, [], {}, {"Go": {}, "Save": {}}, {"go": {}}, {"ToLive": {}}, {"Numbered": {}}, {"Go": []}, {"Go": {"x": 1}}, {"Restart": {}},
        {"Restart": {"attempt": "1"}}, {"Interrupt": {"number": None}}, {"Give": {"expression": 1}},
        {"Give": {"expression": "k", "ranks": [0, "1"]}}, {"Give": {"expression": "k", "ranks": "01"}},
        {"Answer": {"value": {"text/plain": 1}}}, {"Answer": {"counts": [1]}}, {"Answer": {"names": nested(900)}},
    ],
)  # fmt: skip
def test_what_is_no_message_is_passed_over(record):
    good = messages.encode(Visit())
    assert list(messages.read(good + json.dumps(record).encode() + b"\n" + b"no JSON\n" + good)) == [Visit(), Visit()]
    with pytest.raises((TypeError, ValueError)):
        messages.parse(record)
