"""Blocks of the log's format, the order, and signed requests: what notebook and worker agree on."""

import json
import random

import pytest

from kale_dist import wire
from kale_dist.wire import (
    Assignment,
    Attempt,
    BlockReader,
    EventBlock,
    Foreign,
    JobFiles,
    LineBlock,
    Order,
    OutcomePart,
    ProcessState,
    ProgressBlock,
    Source,
    Stream,
)


def read(data, step=None):
    """What a reader makes of bytes that come in pieces."""
    reader, found = BlockReader(), []
    for start in range(0, len(data), step or len(data) or 1):
        found += reader.feed(data[start : start + (step or len(data))])
    found += reader.finish()
    assert reader.whole_bytes == len(data)
    return found


def record(first, *lines, rank=0, attempt=0, ms=1234, stream=Stream.STDOUT):
    return wire.encode_lines(first, ms, attempt, rank, wire.body_of(stream, lines), len(lines))


@pytest.mark.parametrize("rank", [0, 15, None])
@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("text", ["", " ", "a b", "  lead", "é", "a\tb", "@5 1 2 3 0 -", "=0 2", "+|x", "\x1b[31mred"])
def test_lines_are_read_as_written(rank, stream, text):
    (found,) = read(record(16, text.encode(), b"second", rank=rank, attempt=3, stream=stream))
    first, second = found.lines()
    assert (first.sequence, second.sequence, found.next) == (16, 17, 18)
    assert (first.time, first.attempt, first.rank, first.stream, first.text) == (1.234, 3, rank, stream, text)
    assert not first.continued
    assert second.text == "second"
    assert found.encode() == record(16, text.encode(), b"second", rank=rank, attempt=3, stream=stream)


@pytest.mark.parametrize("text", [b"", b"abc", b"| |", b" "])
def test_parts_of_a_line_are_marked(text):
    body = wire.body_of(Stream.STDERR, [b"before", text], continued=True)
    (found,) = read(wire.encode_lines(1, 0, 0, 2, body, 2))
    assert [(line.text, line.stream, line.continued) for line in found.lines()] == [
        ("before", Stream.STDERR, False),
        (text.decode(), Stream.STDERR, True),
    ]


def test_the_lines_of_a_record_without_numbers_have_none():
    (found,) = read(record(None, b"lines 5 to 9 are missing", rank=None, stream=Stream.AGENT))
    assert (found.first, found.next) == (None, None)
    assert [line.sequence for line in found.lines()] == [None]


@pytest.mark.parametrize(
    ("number", "texts"), [(0, ["a", "b", "c"]), (10, ["a", "b", "c"]), (11, ["b", "c"]), (12, ["c"])]
)
def test_a_record_can_be_read_from_any_of_its_lines_on(number, texts):
    (found,) = read(record(10, b"a", b"b", b"c"))
    rest = found.since(number)
    assert [line.text for line in rest.lines()] == texts
    assert read(rest.encode()) == [rest]


@pytest.mark.parametrize("data", [b"plain", b"\xff\x00", b"a\r", "é\n".encode(), b"a\nb\0\nc\xc3"])
def test_what_docker_and_containerd_would_alter_is_escaped(data):
    cleaned = wire.clean(data)
    assert cleaned.count(b"\n") == data.count(b"\n")
    assert not {b"\0", b"\r"} & set(cleaned)
    cleaned.decode("utf-8")
    assert wire.clean(b"\xff\0\r") == rb"\xff\x00\x0d"


BLOCKS = [
    record(0, b"a", b"b"),
    wire.encode_event(0, {"event": "note", "text": "a\nb", "x": 1.5}),
    wire.encode_progress(b'{"event":"progress"}'),
    *wire.encode_outcome(0, 1, bytes(range(256)) * 120),
    record(2, b"c", rank=None, stream=Stream.AGENT),
]


@pytest.mark.parametrize("step", [1, 7, 100, 5000, None])
def test_blocks_of_all_kinds_come_whole_however_they_arrive(step):
    found = read(b"".join(BLOCKS), step)
    kinds = [LineBlock, EventBlock, ProgressBlock, OutcomePart, OutcomePart, OutcomePart, LineBlock]
    assert [type(block) for block in found] == kinds
    assert found[1].event == {"event": "note", "text": "a\nb", "x": 1.5}
    assert b"".join(part.data for part in found[3:6]) == bytes(range(256)) * 120
    assert [(part.index, part.count) for part in found[3:6]] == [(0, 3), (1, 3), (2, 3)]
    # containerd splits at 16 KiB.
    assert max(map(len, b"".join(BLOCKS).split(b"\n"))) < 16 << 10


@pytest.mark.parametrize(
    ("data", "texts", "events"),
    [
        (b"a crash\n" + BLOCKS[1], [b"a crash"], 1),
        (BLOCKS[0][:-3] + b"Fatal Python error\n" + BLOCKS[1], [b"|a", b"Fatal Python error"], 1),
        (BLOCKS[0][:-2], [b"|a", b"|"], 0),
        (b"@1 2 3\n" + BLOCKS[1], [b"@1 2 3"], 1),
        (b"=0 5\nnoise\n" + BLOCKS[1], [b"noise"], 1),
        (b"*0 1 0 1 5\n$$$$$\n" + BLOCKS[1], [b"$$$$$"], 1),
        (b"~fffff\n" + BLOCKS[1], [], 1),
    ],
)
@pytest.mark.parametrize("step", [1, None])
def test_what_is_torn_or_foreign_comes_out_as_that(data, texts, events, step):
    found = read(data, step)
    assert [block.text for block in found if isinstance(block, Foreign)] == texts
    assert len([block for block in found if isinstance(block, EventBlock)]) == events
    assert not [block for block in found if isinstance(block, LineBlock)]


def test_noise_between_blocks_costs_no_block():
    generator = random.Random(5)
    data = bytearray()
    for number in range(200):
        data += record(number, b"x" * generator.randrange(100))
        data += bytes(generator.choice(b"|#!@=~* 0\n") for _ in range(generator.randrange(20))) + b"\n"
    numbers = [block.first for block in read(bytes(data), 333) if isinstance(block, LineBlock)]
    assert numbers == sorted(numbers)
    assert len(numbers) > 150


def test_lines_show_their_rank():
    found = read(record(0, b"x", rank=1) + record(1, b"y", rank=None, stream=Stream.AGENT))
    assert [str(line) for block in found for line in block.lines()] == ["[1] x", "[kale-dist] y"]


def test_json_lines_leave_out_what_a_crash_cut_off():
    good = wire.encode_json({"event": "note", "text": "a\nb", "x": float("nan")})
    assert good.count(b"\n") == 1
    found = list(wire.decode_json_lines(good + b'{"event": "sta\n[1]\n"text"\n\n' + good[:-5]))
    assert [event["text"] for event in found] == ["a\nb"]


def test_an_order_survives_its_journey_and_hides_its_key():
    order = Order(
        job="j", object="j", number_of_processes=5, processes_per_agent=2, folder="/f", store="/s", snapshot="ab", key="secret",
        source=Source.STREAM, blobs=("ab", "cd"),
        process=ProcessState(
            environment=(("A", "b"),), cwd="/", sys_path=("/x",), argv=("",), umask=0o22, limits=((7, 1, -1),),
            torch_flags=(("default_dtype", "float32"),),
        ),
    )  # fmt: skip
    assert wire.decode(Order, json.loads(wire.encode_json(order))) == order
    assert "secret" not in repr(order)
    given = Assignment(order=order, attempt=Attempt.form(order, [0, 1, 2], number=1, port=5, seed=7), rank=3)
    assert wire.decode(Assignment, json.loads(wire.encode_json(given))) == given


def places(order, agents):
    """Where each rank of an attempt is: the place of its agent, its local rank, the ranks of its agent."""
    attempt = Attempt.form(order, agents, number=0, port=5, seed=7)
    found = [Assignment(order=order, attempt=attempt, rank=rank) for rank in range(attempt.world_size)]
    return [(one.group_rank, one.local_rank, one.local_world_size) for one in found]


def test_ranks_are_dealt_to_agents_in_order():
    order = Order(job="j", object="j", number_of_processes=5, processes_per_agent=2, snapshot="", head="first")
    assert places(order, range(order.agents)) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2), (2, 0, 1)]


def test_the_members_of_an_attempt_decide_its_world_size():
    sizes = (2, 4, 6, 7)
    order = Order(
        job="j", object="j", number_of_processes=7, sizes=sizes, processes_per_agent=2, snapshot="", head="first"
    )
    assert [order.size_with(agents) for agents in range(5)] == [0, 2, 4, 6, 7]
    assert places(order, [0, 3]) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    attempt = Attempt.form(order, [0, 3], number=2, port=5, seed=7)
    assert [(member.agent, list(member.ranks)) for member in attempt.members] == [(0, [0, 1]), (3, [2, 3])]
    assert attempt.world_size == 4
    assert Assignment(order=order, attempt=attempt, rank=0).master_addr == "first"
    alone = Attempt.form(order, [0], number=3, port=5, seed=7)
    assert (alone.world_size, Assignment(order=order, attempt=alone, rank=0).master_addr) == (2, "127.0.0.1")


def test_an_attempt_has_the_largest_size_that_is_allowed():
    order = Order(
        job="j", object="j", number_of_processes=8, sizes=(4, 8), processes_per_agent=2, snapshot="", head="first"
    )
    assert [order.size_with(agents) for agents in range(5)] == [0, 0, 4, 4, 8]
    attempt = Attempt.form(order, [0, 2, 3], number=0, port=5, seed=7)
    assert [(member.agent, list(member.ranks)) for member in attempt.members] == [(0, [0, 1]), (2, [2, 3])]
    fixed = Order(job="j", object="j", number_of_processes=5, processes_per_agent=2, snapshot="")
    assert [fixed.size_with(agents) for agents in range(4)] == [0, 0, 0, 5]


def test_files_of_a_job_lie_in_its_folder(tmp_path):
    files = JobFiles(str(tmp_path))
    names = {files.record, files.key, files.log, files.events, files.progress, files.modules}
    names |= {files.checkpoint, files.life, files.outcome(0, 0), files.outcome(0, 1), files.outcome(1, 0)}
    assert len(names) == 11
    assert all(path.parent == tmp_path for path in names)


def test_a_request_is_refused_if_anything_in_it_was_changed():
    mac = wire.sign_request(b"key", "GET", "/stream?line=5")
    assert wire.check_request(b"key", "GET", "/stream?line=5", "", mac)
    for changed in (("GET", "/stream?line=6", "", mac), ("PUT", "/stream?line=5", "", mac), ("GET", "/", "", "\xff")):
        assert not wire.check_request(b"key", *changed)
    assert not wire.check_request(b"other", "GET", "/stream?line=5", "", mac)
