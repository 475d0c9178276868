"""What a cell shows of an error: the user's own lines and one sentence for a mistake, everything for a defect."""

import subprocess
import sys

import notebook_parts
import pytest

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
LIBRARY = ("kale_dist/", "site-packages", "lib/python")


@pytest.fixture(scope="module", params=["installed", "6"])
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
    assert not [part for part in LIBRARY if part in reply.traceback], reply.traceback
    return reply.traceback


def test_a_wrong_argument_shows_the_users_lines_and_the_sentence(notebook):
    reply = notebook("helper(-1)")
    sentence = "number_of_processes: -1 is neither a whole number of 1 or more nor a range of two, the smaller first. Give an int such as 4, or on a cluster a range such as (2, 8)"
    assert reply.error == f"ConfigError: {sentence}"
    text = shown(reply)
    assert text.splitlines()[-1] == f"ConfigError: {sentence}"
    assert "----> 1 helper(-1)" in text
    assert "in helper(count)" in text
    assert "return kd.launch(work, number_of_processes=count)" in text


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


def test_a_ranks_own_traceback_stays_as_it_is(notebook):
    reply = notebook("def fail():\n    return {}['absent']\nkd.launch(fail, number_of_processes=1).result()")
    text = shown(reply)
    assert reply.error.startswith("JobFailedError")
    assert text.startswith("-" * 70)
    assert "KeyError: 'absent'\n\nThe above exception was the direct cause" in text
    assert text.rstrip().endswith(
        "line 2, in fail\n    return {}['absent']\n           ~~^^^^^^^^^^\nKeyError: 'absent'"
    )


def test_everything_is_shown_where_the_user_asks_for_it(notebook):
    notebook.good("%xmode --show")
    everything = notebook("kd.launch(print, Closed())").traceback
    notebook.good("%xmode --hide")
    assert "kale_dist/snapshot" in everything
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
    assert "kale_dist/" not in ended.stderr
    assert ended.stderr.endswith(
        "ConfigError: number_of_processes: -1 is neither a whole number of 1 or more nor a range of two, the smaller first. Give an int such as 4, or on a cluster a range such as (2, 8)\n"
    )
