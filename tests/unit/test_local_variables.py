"""The local variables of errors: what is said of each, and that nothing that they do can go wrong."""

import collections
import enum

import numpy as np
import pytest
import torch

from kale_dist.errors.local_variables import MAX_BYTES, describe
from kale_dist.snapshot import sources


class Angry:
    """Raises whatever it is asked."""

    def _raise(self, *_):
        raise SystemExit("no")

    __repr__ = __len__ = __eq__ = __hash__ = __bool__ = __str__ = __getattr__ = _raise


class Huge:
    def __repr__(self):
        return "x" * 1_000_000


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "3"), (True, "True"), (None, "None"), (0.1, "0.1"), (float("nan"), "nan"), (1 + 2j, "(1+2j)"),
        (np.float32(0.5), "0.5"), (10**400, "int"), ("hunter2", "str of 7"), (b"hunter2", "bytes of 7"), (Colour.RED, "Colour"),
        ({"token": "hunter2"}, "dict of 1"), (["hunter2"], "list of 1"), (collections.deque([1, 2]), "deque of 2"),
        (Angry(), "Angry (cannot be shown)"), (Huge(), "Huge"), (object(), "object"),
        (torch.tensor([[1.0, float("nan")], [-2.5, float("inf")]]), "Tensor (2, 2) float32 cpu, -2.5 to 1, 2 not finite"),
        (torch.nn.Parameter(torch.ones(2)), "Parameter (2,) float32 cpu, 1"), (torch.tensor(True), "Tensor () bool cpu, 1"),
        (torch.zeros(0), "Tensor (0,) float32 cpu"), (torch.ones(200_000), "Tensor (200000,) float32 cpu"),
        (torch.empty(2, device="meta"), "Tensor (2,) float32 meta"), (torch.ones(2) * 1j, "Tensor (2,) complex64 cpu"),
        (torch.eye(2).to_sparse(), "Tensor (2, 2) float32 cpu"), (torch.ones(2).to(torch.float8_e5m2), "Tensor (2,) float8_e5m2 cpu, 1"),
        (np.array([1, 5], dtype=np.int16), "ndarray (2,) int16, 1 to 5"), (np.array(["hunter2"]), "ndarray (1,) <U7"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), "Sequential of 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_numbers_are_shown_tensors_summarised_and_the_rest_counted(value, said):
    assert describe(value) == said


def test_a_tensor_without_memory_is_not_read():
    taken_away = torch.ones(4)
    taken_away.untyped_storage().resize_(0)
    assert describe(taken_away) == "Tensor (4,) float32 cpu"


def test_texts_and_reprs_are_shown_only_in_full_and_cut():
    assert describe("hunter2", full=True) == "'hunter2'"
    assert describe({"a": [1]}, full=True) == "{'a': [1]}"
    assert describe(Huge(), full=True).endswith("... (1,000,000 characters)")
    assert describe(Angry(), full=True) == "Angry (cannot be shown)"


def failing(**given):
    angry, unused, module = Angry(), "hunter2", torch
    h = torch.zeros(3)
    h[1] = float("nan")

    def inner(x, lr=0.1):
        return x @ torch.ones(4) * lr

    return inner(h) + angry + unused + module


def error_of(function, **given):
    try:
        function(**given)
    except Exception as error:
        return error


def test_the_frames_are_the_users_own_and_the_names_of_the_failing_line_come_first():
    frames = list(sources.locals_of(error_of(failing), show="summary").values())
    assert [frame.where.rpartition(" in ")[2] for frame in frames] == ["error_of", "failing", "inner"]
    assert dict(frames[-1].values) == {"x": "Tensor (3,) float32 cpu, 0, 1 not finite", "lr": "0.1"}
    assert next(iter(frames[1].values)) in ("angry", "unused", "h")
    assert "module" not in frames[1].values
    assert "hunter2" not in str(frames)


def test_they_follow_their_lines_in_the_traceback_whose_last_line_stays_the_error():
    error = error_of(failing)
    text = sources.format_error(error, sources.locals_of(error, show="full"))
    assert "    unused = 'hunter2'\n" in text
    assert text.rstrip().splitlines()[-1].startswith("RuntimeError")
    assert "hunter2" not in sources.format_error(error)


def test_all_of_them_together_are_at_most_2_kb():
    names = {f"name_{number}": "x" * 500 for number in range(100)}

    def deep(level, **names):
        return deep(level - 1, **names) if level else 1 / 0

    source = f"def wide(level):\n    {'; '.join(f'{name} = {value!r}' for name, value in names.items())}\n    return wide(level - 1) if level else 1 / 0\n"
    namespace = {}
    exec(compile(source, "/a/script.py", "exec"), namespace)
    found = sources.locals_of(error_of(namespace["wide"], level=5), show="full")
    said = "\n".join(map(str, found.values()))
    assert 500 < len(said.encode()) <= MAX_BYTES


def test_none_switches_them_off():
    assert sources.locals_of(error_of(failing), show="none") == {}


def test_of_a_script_only_the_names_that_it_uses_are_told():
    namespace = {f"other_{number}": number for number in range(50)}
    code = compile("rate = 0.5\nrate / 0\n", "/a/script.py", "exec")
    found = sources.locals_of(error_of(lambda: exec(code, namespace)), show="summary")
    assert dict(list(found.values())[-1].values) == {"rate": "0.5"}
