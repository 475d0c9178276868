"""A pod's log has lines that no head wrote: the notebook's disk, memory and processor are not theirs."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from kale_dist import wire
from kale_dist.job.records import Life
from kale_dist.places.following.copy import HeadCopy
from kale_dist.wire import BlockReader, EventBlock, Foreign, JobFiles


@pytest.fixture
def copy(tmp_path):
    made = HeadCopy(JobFiles(tmp_path), Life(), lambda: None, lambda: None)
    yield made
    made.close()


@pytest.mark.parametrize("number", ["4000000", "ffffffffffff"])
def test_an_event_of_a_huge_number_fills_no_disk_and_hides_none_that_follows(copy, tmp_path, number):
    note = {"event": "note", "text": "of the head", "attempt": 0}
    data = f"={number} 2\n{{}}\n".encode() + wire.encode_event(0, note)
    copy.take(BlockReader().feed(data), missing="the test says so")
    assert JobFiles(tmp_path).events.read_bytes() == wire.encode_json(note)


def test_many_events_of_huge_numbers_fill_no_disk_either(copy, tmp_path):
    data = b"".join(wire.encode_event(number * 500_000, {"event": "note"}) for number in range(20))
    copy.take(BlockReader().feed(data), missing="the test says so")
    assert JobFiles(tmp_path).events.stat().st_size < 1_100_000


@pytest.mark.parametrize("header", [b"@0 1 ffffffff 0 0 0\n", b"=0 ffffffff\n", b"no end of line "])
def test_a_block_of_gigabytes_is_no_block_and_keeps_nothing_waiting(header):
    reader, piece, began = BlockReader(), b"x" * (64 << 10), time.monotonic()
    tracemalloc.start()
    found = list(reader.feed(header))
    for _ in range(400):
        found += [type(block) for block in reader.feed(piece)]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20
    assert time.monotonic() - began < 3
    assert any(block is Foreign or isinstance(block, Foreign) for block in found)
    (last,) = [
        block for block in reader.feed(b"\n" + wire.encode_event(0, {"event": "note"})) if isinstance(block, EventBlock)
    ]
    assert last.number == 0


def test_the_largest_picture_that_a_rank_may_show_still_arrives():
    event = {"event": "display", "data": {"text/html": "\u4e2d" * (512 << 10)}}
    data, reader, found = wire.encode_event(0, event), BlockReader(), []
    for at in range(0, len(data), 64 << 10):
        found += reader.feed(data[at : at + (64 << 10)])
    assert found == [EventBlock(number=0, event=event)]
