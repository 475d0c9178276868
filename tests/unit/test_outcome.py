"""Outcomes: signed, with the notebook's own classes, and an exception whatever it is like."""

import dataclasses
import functools
import json
import linecache
import pathlib
import pickle
import traceback

import numpy as np
import pytest
import torch

from kale_dist.errors import NotSerializableError, RemoteError, ResultUnavailableError, SnapshotDamagedError, StoreError
from kale_dist.snapshot import outcome, sources
from kale_dist.snapshot.reducers import References
from kale_dist.wire import blobs

WHO = outcome.Signer(key=b"k" * 32, job="digits", attempt=0, rank=1)


@pytest.fixture
def back(tmp_path):
    def back(value, references=None):
        known = references or References()
        outcome.write_success(tmp_path / "outcome", value=value, references=known, signer=WHO)
        read = outcome.read_outcome(tmp_path / "outcome", resolve=known.resolve, signer=WHO)
        assert read.ok
        assert read.error is None
        return read.value

    return back


@pytest.fixture
def failed(tmp_path):
    def failed(error):
        def fail():
            raise error

        try:
            fail()
        except BaseException as caught:
            outcome.write_failure(tmp_path / "outcome", error=caught, references=References(), signer=WHO)
        read = outcome.read_outcome(tmp_path / "outcome", resolve=References().resolve, signer=WHO)
        assert not read.ok
        return read

    return failed


@pytest.mark.parametrize("value", [None, 0, "text", {"loss": [1.5, float("inf")]}, (1, {2}), b"bytes" * 100_000])
def test_plain_values(back, value):
    assert back(value) == value


def test_tensors_and_arrays_share_what_they_shared_and_are_mapped(back, tmp_path):
    big = torch.arange(1_000_000.0)
    got = back(
        {"big": big, "view": big[5:7], "small": torch.ones(2), "array": np.arange(100_000), "none": torch.empty(0)}
    )
    assert torch.equal(got["big"], big)
    got["big"][5] = -1
    assert got["view"][0] == -1
    assert np.array_equal(got["array"], np.arange(100_000))
    assert got["none"].numel() == 0
    assert big[5] == 5
    assert str(tmp_path / "outcome") in open_maps()


def open_maps():
    return pathlib.Path("/proc/self/maps").read_text()


def test_objects_of_the_snapshot_come_back_as_references(tmp_path):
    class There:
        pass

    class Here:
        pass

    rank, notebook = References(), References()
    rank.add(3, There)
    notebook.add(3, Here)
    outcome.write_success(tmp_path / "o", value=[There(), There], references=rank, signer=WHO)
    value = outcome.read_outcome(tmp_path / "o", resolve=notebook.resolve, signer=WHO).value
    assert type(value[0]) is Here
    assert value[1] is Here
    with pytest.raises(ResultUnavailableError, match="cannot be loaded here"):
        outcome.read_outcome(tmp_path / "o", resolve=References().resolve, signer=WHO)


def test_a_function_made_in_the_rank_comes_back_by_value(back):
    factor = 3
    assert back(lambda x: x * factor)(2) == 6


def test_a_value_that_cannot_be_pickled_is_named_by_its_path(tmp_path):
    with pathlib.Path("/dev/null").open() as file, pytest.raises(NotSerializableError) as caught:
        outcome.write_success(tmp_path / "o", value={"log": [file.buffer]}, references=References(), signer=WHO)
    assert caught.value.path == ("the returned value", "['log']", "[0]", "_io.BufferedReader")
    assert not (tmp_path / "o").exists()


# -- signatures ------------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a forged outcome was unpickled",)


@pytest.mark.parametrize("changed", [{"key": b"x" * 32}, {"job": "other"}, {"attempt": 1}, {"rank": 0}])
def test_an_outcome_of_another_job_attempt_rank_or_key_is_not_unpickled(tmp_path, changed):
    outcome.write_success(
        tmp_path / "o", value=Bomb(), references=References(), signer=dataclasses.replace(WHO, **changed)
    )
    with pytest.raises(SnapshotDamagedError, match="was not signed by this job"):
        outcome.read_outcome(tmp_path / "o", resolve=len, signer=WHO)


@pytest.mark.parametrize("rewrite", [
    lambda header, buffers: (header, [pickle.dumps(Bomb()), *buffers[1:]]),
    lambda header, buffers: (header, [*buffers[:1], b"\0" * buffers[1].nbytes]),
    lambda header, buffers: (header, [*buffers, b""]),
    lambda header, buffers: (header, []),
    lambda header, buffers: (header | {"ok": False}, buffers),
    lambda header, buffers: (header | {"buffers": 1}, buffers),
    lambda header, buffers: (header | {"extra": 1}, buffers),
    lambda header, buffers: ({k: v for k, v in header.items() if k != "mac"}, buffers),
    lambda header, buffers: (header | {"mac": 5}, buffers),
    lambda header, buffers: (header | {"mac": "é"}, buffers),
])  # fmt: skip
def test_every_changed_byte_is_found_before_unpickling(tmp_path, rewrite):
    outcome.write_success(tmp_path / "o", value=torch.ones(100), references=References(), signer=WHO)
    header, buffers = blobs.open_bundle(tmp_path / "o")
    assert header["mac"]
    blobs.write_bundle(tmp_path / "o", *rewrite(header, buffers))
    with pytest.raises(SnapshotDamagedError, match="rank 1 of digits"):
        outcome.read_outcome(tmp_path / "o", resolve=len, signer=WHO)


def test_no_outcome_is_unavailable_and_says_which(tmp_path):
    with pytest.raises(ResultUnavailableError, match="Rank 1 of digits has left no outcome"):
        outcome.read_outcome(tmp_path / "nothing", resolve=len, signer=WHO)


def test_a_cut_outcome_is_damaged(tmp_path):
    outcome.write_success(tmp_path / "o", value=b"x" * 1000, references=References(), signer=WHO)
    (tmp_path / "o").write_bytes((tmp_path / "o").read_bytes()[:500])
    with pytest.raises(SnapshotDamagedError):
        outcome.read_outcome(tmp_path / "o", resolve=len, signer=WHO)


def test_a_folder_that_is_gone_is_a_store_error():
    with pytest.raises(StoreError):
        outcome.write_success("/proc/no/o", value=1, references=References(), signer=WHO)


# -- exceptions ------------------------------------------------------------------------------------------------------


class WithCode(Exception):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


class BadText(Exception):
    def __str__(self):
        raise ZeroDivisionError("in __str__")


class BadReduce(Exception):
    def __reduce__(self):
        raise TypeError("no pickle")


class BadAttributes(Exception):
    def __getattribute__(self, name):
        if name == "__class__":
            return BadAttributes
        raise ValueError(name)


class Shape(RuntimeError):
    pass


def test_builtin_exceptions_come_back_as_themselves(failed):
    read = failed(KeyError("missing"))
    assert type(read.error) is KeyError
    assert read.error.args == ("missing",)
    assert read.traceback.endswith("KeyError: 'missing'\n")
    assert "raise error" in read.traceback


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), ExceptionGroup("g", [ValueError(1)])]
)
def test_base_exceptions_and_groups(failed, error):
    read = failed(error)
    assert type(read.error) is type(error)
    assert type(error).__name__ in read.traceback


@pytest.mark.parametrize(("make", "kind"), [
    (functools.partial(WithCode, 5, hint="h"), WithCode),
    (functools.partial(BadReduce, "b"), BadReduce),
    (functools.partial(BadText, "t"), BadText),
    (functools.partial(BadAttributes, "a"), RemoteError),
    (type("Local", (Exception,), {"__reduce_ex__": 5, "__init__": lambda self: None}), None),
    (lambda: type("Local", (Exception,), {"__reduce__": lambda self: (int, ("x",))})("l"), RemoteError),
    (lambda: type("Local", (Exception,), {"__reduce__": lambda self: (int, ("5",))})("l"), RemoteError),
], ids=[
    "with a code", "bad __reduce__", "bad text", "bad attributes", "bad __reduce_ex__", "made from text",
    "made as a number",
])  # fmt: skip
def test_odd_exceptions_come_back_or_have_a_stand_in(failed, make, kind):
    error = make()
    read = failed(error)
    assert type(read.error) is (kind or type(error))
    assert type(error).__name__ in read.traceback
    if kind is RemoteError:
        assert type(error).__name__ in read.error.type_name
        assert read.error.traceback == read.traceback


def test_an_exception_with_arguments_of_its_own_keeps_text_and_attributes(failed):
    error = failed(WithCode(5, hint="h")).error
    assert (str(error), error.code, error.hint, error.args) == ("code 5", 5, "h", ("code 5",))


@pytest.mark.parametrize("error", [
    FileNotFoundError(2, "No such file", "x.txt"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    ImportError("no", name="n", path="p"),
    StopIteration(4),
], ids=repr)  # fmt: skip
def test_builtin_exceptions_keep_their_fields(failed, error):
    got = failed(error).error
    assert type(got) is type(error)
    assert str(got) == str(error)
    fields = ("errno", "filename", "object", "reason", "name", "path", "value")
    assert [getattr(got, name, None) for name in fields] == [getattr(error, name, None) for name in fields]


def test_what_cannot_be_pickled_on_an_exception_is_left_out(failed):
    error = Shape("wrong shape")
    with pathlib.Path("/dev/null").open("rb") as file:
        error.file = file
        read = failed(error)
    assert type(read.error) is Shape
    assert str(read.error) == "wrong shape"
    assert not hasattr(read.error, "file")


def test_tensors_on_an_exception_do_not_stop_it(failed):
    error = Shape("wrong shape", torch.ones(3))
    assert isinstance(failed(error).error, RemoteError)
    error = Shape("wrong shape")
    error.tensor = torch.ones(3)
    assert type(failed(error).error) is Shape


def test_causes_contexts_and_notes_are_kept(failed):
    def run():
        try:
            try:
                {}["inner"]
            except KeyError as inner:
                raise WithCode(1, hint="") from inner
        except WithCode:
            raise ValueError("outer")  # noqa: B904

    try:
        run()
    except ValueError as error:
        error.add_note("epoch 3")
        read = failed(error)
    assert type(read.error) is ValueError
    assert read.error.__notes__ == ["epoch 3"]
    assert not read.error.__suppress_context__
    assert isinstance(read.error.__context__, WithCode)
    assert type(read.error.__context__.__cause__) is KeyError
    assert "direct cause" in read.traceback
    assert "epoch 3" in read.traceback
    assert traceback.format_exception(read.error)


def test_a_circle_of_causes_ends(failed):
    one, other = ValueError(1), ValueError(2)
    one.__context__, other.__context__ = other, one
    read = failed(one)
    assert read.error.__context__.args == (2,)


def test_frames_of_kale_dist_are_left_out_and_cells_are_named(monkeypatch):
    cell = "def train_step(f):\n    return f(self_made)  # the line\n"
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_9/1.py", (1, None, [], ""))
    sources.install({"/tmp/ipykernel_9/1.py": (cell, "Cell In[3]")})
    namespace = {"self_made": object()}
    exec(compile(cell, "/tmp/ipykernel_9/1.py", "exec"), namespace)
    try:
        namespace["train_step"](blobs.digest_of)
    except TypeError as error:
        text = sources.format_error(error)
    assert 'File "Cell In[3]", line 2, in train_step\n    return f(self_made)  # the line' in text
    assert "blobs.py" not in text


def test_an_error_of_kale_dist_alone_keeps_its_frames():
    try:
        blobs.digest_of(5)
    except TypeError as error:
        error.__traceback__ = error.__traceback__.tb_next
        text = sources.format_error(error)
    assert "blobs.py" in text


def test_an_outcome_is_plain_data_around_the_pickles(failed, tmp_path):
    failed(KeyError("x"))
    header, (data,) = blobs.open_bundle(tmp_path / "outcome")
    assert (header["ok"], header["rank"]) == (False, 1)
    assert json.loads(bytes(data))["chain"][0]["type"] == "KeyError"
