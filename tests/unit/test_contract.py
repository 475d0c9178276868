import json

import pytest

from kale_dist import contract
from kale_dist.contract import JobFiles, JobOrder, ProcessState, Stream


@pytest.mark.parametrize("rank", [0, 15, None])
@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("text", ["", " ", "a b", "  lead", "é", "a\tb", "1f 2 0 0 o x", "\x1b[31mred"])
def test_frames_are_read_as_written(rank, stream, text):
    framed = contract.frame_lines(16, 1234, 3, rank, stream, [text.encode(), b"second"])
    first, second = (contract.parse_line(line) for line in framed.splitlines(keepends=True))
    assert (first.sequence, second.sequence) == (16, 17)
    assert (first.time, first.attempt, first.rank, first.stream, first.text) == (1.234, 3, rank, stream, text)
    assert not first.continued
    assert second.text == "second"


@pytest.mark.parametrize("part", [b"", b"abc", b"o o o", b" "])
def test_parts_of_a_line_are_marked(part):
    line = contract.parse_line(contract.frame_continued(1, 0, 0, 2, Stream.STDERR, part))
    assert (line.continued, line.stream, line.rank, line.text) == (True, Stream.STDERR, 2, part.decode())


def test_bytes_that_are_no_text_stay_visible():
    (framed,) = contract.frame_lines(0, 0, 0, 0, Stream.STDOUT, [b"\xff\x00ok"]).splitlines(keepends=True)
    assert contract.parse_line(framed).text == "\\xff\x00ok"


@pytest.mark.parametrize("framed", [b"", b"x", b"zz 0 0 0 o text", b"0 0 0 0 q text", b"0 0 0"])
def test_what_is_no_frame_is_refused(framed):
    with pytest.raises(ValueError):
        contract.parse_line(framed)


def test_lines_show_their_rank():
    lines = contract.frame_lines(0, 0, 0, 1, Stream.STDOUT, [b"x"]) + contract.frame_lines(
        1, 0, 0, None, Stream.AGENT, [b"y"]
    )
    assert [str(contract.parse_line(line)) for line in lines.splitlines()] == ["[1] x", "[kale-dist] y"]


def test_records_pass_over_what_a_crash_cut_off():
    good = contract.encode_record({"event": "note", "text": "a\nb", "x": float("nan")})
    assert good.count(b"\n") == 1
    found = list(contract.decode_records(good + b'{"event": "sta\n[1]\n"text"\n\n' + good[:-5]))
    assert [record["text"] for record in found] == ["a\nb"]


def test_an_order_survives_the_inbox_and_hides_its_key():
    order = JobOrder(
        job="j", world_size=2, local_world_size=2, folder="/f", store="/s", snapshot="ab", key="secret",
        process=ProcessState(
            environment=(("A", "b"),), cwd="/", sys_path=("/x",), argv=("",), umask=0o22, limits=((7, 1, -1),),
            torch_flags=(("default_dtype", "float32"),),
        ),
    )  # fmt: skip
    assert JobOrder.from_json(json.loads(contract.encode_record(order.to_json()))) == order
    assert "secret" not in repr(order)
    bare = JobOrder(job="j", world_size=1, local_world_size=1, folder="", store="", snapshot="", key="")
    assert JobOrder.from_json(json.loads(json.dumps(bare.to_json()))) == bare


def test_files_of_a_job_lie_in_its_folder(tmp_path):
    files = JobFiles(str(tmp_path))
    names = {files.record, files.key, files.log, files.events, files.progress, files.modules, files.checkpoint}
    names |= {files.outcome(0, 0), files.outcome(0, 1), files.outcome(1, 0)}
    assert len(names) == 10
    assert all(path.parent == tmp_path for path in names)
