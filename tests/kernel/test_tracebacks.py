"""What a cell shows of an error: the user's own lines and one sentence for a mistake, everything for a defect."""

import html
import re
import subprocess
import sys

import notebook_parts
import pytest
from own_files import own_files

SETUP = """
import ipykernel
import kale_dist as kd

def work():
    pass

def helper(count):
    return kd.launch(work, number_of_processes=count)

class Closed:
    def __getstate__(self):
        raise TypeError("it has no state")
"""
INSTALLED = ("site-packages", "lib/python")


@pytest.fixture(scope="module", params=["installed", pytest.param("6", marks=pytest.mark.nightly)])
def notebook(request, kernel, tmp_path_factory):
    """A kernel of either version of ipykernel."""
    if request.param == "installed":
        kernel.good(SETUP)
        yield kernel
        return
    older = type(kernel)(tmp_path_factory.mktemp("older"), packages=notebook_parts.older_ipykernel())
    older.good(SETUP)
    assert older.good("print(ipykernel.__version__)").startswith("6.")
    yield older
    older.close()


def shown(reply):
    """The traceback, which must have no line of a library."""
    assert not [part for part in INSTALLED if part in reply.traceback] + own_files(reply.traceback), reply.traceback
    return reply.traceback


@pytest.mark.newest
def test_a_wrong_argument_shows_the_users_lines_and_the_sentence(notebook):
    reply = notebook("helper(-1)")
    sentence = "number_of_processes: -1 is neither a whole number of 1 or more nor a range of two, the smaller first. Give an int such as 4, or on a cluster a range such as (2, 8)"
    assert reply.error == f"ConfigError: {sentence}"
    text = shown(reply)
    assert text.splitlines()[-1] == f"ConfigError: {sentence}"
    assert "----> 1 helper(-1)" in text
    assert "in helper(count)" in text
    assert "return kd.launch(work, number_of_processes=count)" in text


@pytest.mark.newest
def test_it_is_written_as_ipython_writes_any_other(notebook):
    header = notebook("1 / 0").coloured.splitlines()[0]
    ours = notebook("helper(-1)").coloured
    assert ours.startswith(header)
    assert "\x1b[" in ours.splitlines()[-1]


@pytest.mark.parametrize(
    ("mode", "lines"),
    [
        ("Minimal", ["ConfigError:"]),
        ("Plain", ["helper(-1)", "ConfigError:"]),
        ("Verbose", ["Cell In", "ConfigError:"]),
    ],
)
def test_the_users_choice_of_a_mode_holds(notebook, mode, lines):
    notebook.good(f"%xmode {mode}")
    reply = notebook("helper(-1)")
    notebook.good("%xmode Context")
    text = shown(reply)
    assert [line for line in lines if line in text] == lines


@pytest.mark.newest
def test_what_the_users_own_code_raised_below_stays(notebook):
    reply = notebook("kd.launch(print, Closed())")
    text = shown(reply)
    assert "in Closed.__getstate__" in text or "in __getstate__" in text
    assert 'raise TypeError("it has no state")' in text
    assert "direct cause" in text
    assert reply.error.startswith("NotSerializableError: argument 1 -> Closed")


def test_what_the_user_was_handling_stays(notebook):
    text = shown(notebook("try:\n    {}['key']\nexcept KeyError:\n    helper(0)"))
    assert "KeyError: 'key'" in text
    assert "During handling of the above exception" in text


def test_causes_within_the_library_are_not_shown(notebook):
    reply = notebook(
        "try:\n    kd.run_notebook('absent.ipynb')\nexcept Exception as error:\n    kept = error\n    raise"
    )
    assert reply.error.startswith("ConfigError: notebook:")
    assert notebook.good("print(type(kept.__cause__).__name__)") == "FileNotFoundError"
    assert "The above exception" not in shown(reply)


@pytest.mark.newest
def test_a_ranks_own_traceback_stays_as_it_is_and_its_error_is_not_told_above_it_too(notebook):
    reply = notebook("def fail():\n    return {}['absent']\nkd.launch(fail, number_of_processes=1).result()")
    text = shown(reply)
    assert reply.error.startswith("JobFailedError")
    assert text.startswith("-" * 70)
    # In the reason, and at the traceback's end.
    assert text.count("KeyError: 'absent'") == 2
    assert text.rstrip().endswith(
        "line 2, in fail\n    return {}['absent']\n           ~~^^^^^^^^^^\nKeyError: 'absent'"
    )


SHAPES = """import functools

def nested(row):
    def inner():
        return row["nested"]
    return inner()

short = lambda row: row["lambda"]

class Table:
    def look(self, row):
        return row["method"]

method = Table().look

def comprehension(row):
    return [row[name] for name in ("comprehension",)]

def logged(function):
    @functools.wraps(function)
    def call(*given):
        return function(*given)
    return call

@logged
def decorated(row):
    return row["decorated"]
"""


MAKES = """def make():
    class OddError(Exception):
        def __init__(self, row):
            super().__init__(row["absent"])

    def look(row):
        raise OddError(row)
    return look
"""


def defined(notebook, code):
    """Run a cell; gives its number."""
    return notebook.good(f"{code}\nprint(len(In) - 1)")


@pytest.mark.newest
@pytest.mark.parametrize(
    ("function", "line", "name"),
    [
        ("nested", 5, "inner"),
        ("short", 8, "<lambda>"),
        ("method", 12, "look"),
        # From 3.12 on a comprehension has no frame of its own.
        ("comprehension", 17, "<listcomp>" if sys.version_info < (3, 12) else "comprehension"),
        ("decorated", 27, "decorated"),
    ],
)
def test_a_ranks_error_has_the_lines_of_its_cell(notebook, function, line, name):
    number = defined(notebook, SHAPES)
    text = shown(notebook(f"kd.launch({function}, {{}}, number_of_processes=1).result()"))
    assert f'File "Cell In[{number}]", line {line}, in {name}\n    {SHAPES.splitlines()[line - 1].strip()}\n' in text


@pytest.mark.newest
def test_of_two_cells_that_define_the_same_name_each_has_its_own_lines(notebook):
    first = defined(notebook, "def same(row):\n    return row['first']")
    notebook.good("before = same")
    second = defined(notebook, "def same(row):\n\n    return row['second']")
    text = shown(notebook("kd.launch(before, {}, number_of_processes=1).result()"))
    assert f"File \"Cell In[{first}]\", line 2, in same\n    return row['first']\n" in text
    text = shown(notebook("kd.launch(same, {}, number_of_processes=1).result()"))
    assert f"File \"Cell In[{second}]\", line 3, in same\n    return row['second']\n" in text


@pytest.mark.newest
def test_the_box_of_a_failure_names_cell_and_line(notebook):
    number = defined(notebook, SHAPES)
    notebook("job = kd.launch(nested, {}, number_of_processes=1)\njob.wait()")
    shown = notebook.good("print(job._repr_mimebundle_()['text/html'])")
    text = html.unescape(re.sub("<.*?>", "", shown))
    assert f"Rank 0 in Cell In[{number}]:5 in inner    return row[\"nested\"]KeyError: 'nested'" in text


@pytest.mark.newest
def test_a_rank_reads_the_sources_of_cells(notebook):
    notebook.good(SHAPES)
    notebook.good("def read():\n    import inspect\n    return [inspect.getsource(one) for one in (Table, decorated)]")
    printed = notebook.good("print(*kd.launch(read, number_of_processes=1).result(), sep='')")
    assert printed.splitlines() == SHAPES.splitlines()[9:12] + SHAPES.splitlines()[24:27]


def test_what_a_rank_has_made_has_the_lines_of_its_cell_in_the_notebook(notebook):
    number = defined(notebook, MAKES)
    notebook.good("look = kd.launch(make, number_of_processes=1).result()")
    text = shown(notebook("look({})"))
    for line, name in ((7, "look(row)"), (4, "OddError.__init__(self, row)")):
        assert f"Cell In[{number}], line {line}, in make.<locals>.{name}\n" in text
        assert f"\n----> {line} {MAKES.splitlines()[line - 1]}\n" in text


@pytest.mark.newest
def test_everything_is_shown_where_the_user_asks_for_it(notebook):
    notebook.good("%xmode --show")
    everything = notebook("kd.launch(print, Closed())").traceback
    notebook.good("%xmode --hide")
    assert "kale_dist/snapshot/capture.py" in own_files(everything)
    assert shown(notebook("%tb"))


def test_the_error_itself_stays_whole(notebook):
    code = "try:\n    kd.launch(print, Closed())\nexcept Exception as error:\n    kept = error\n    raise"
    shown(notebook(code))
    notebook.good("import traceback\nwhole = ''.join(traceback.format_exception(kept))")
    assert "kale_dist/snapshot" in notebook.good("print(whole)")


def test_a_defect_of_the_library_is_shown_whole(notebook):
    code = "from unittest import mock\nwith mock.patch('kale_dist.calls.request.checked', side_effect=TypeError('a defect')):\n"
    reply = notebook(code + "    kd.launch(work)")
    assert reply.error == "TypeError: a defect"
    assert "kale_dist/calls/verbs.py" in reply.traceback


def test_a_script_shows_its_own_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import kale_dist as kd\nkd.launch(print, number_of_processes=-1)\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "script.py" in ended.stderr
    assert own_files(ended.stderr) == []
    assert ended.stderr.endswith(
        "ConfigError: number_of_processes: -1 is neither a whole number of 1 or more nor a range of two, the smaller first. Give an int such as 4, or on a cluster a range such as (2, 8)\n"
    )
