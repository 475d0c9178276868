"""Packages that exist nowhere else, as pip would have installed them into a folder."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig

import pytest

C_CODE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef NEEDS
int mine_answer(void);
#else
static int mine_answer(void) { return 2; }
#endif
static PyObject *times(PyObject *self, PyObject *number) { return PyLong_FromLong(mine_answer() * PyLong_AsLong(number)); }
static PyMethodDef methods[] = {{"times", times, METH_O, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", "", -1, methods};
PyMODINIT_FUNC PyInit__fast(void) { return PyModule_Create(&module); }
"""
EXTENSION = f"_fast{sysconfig.get_config_var('EXT_SUFFIX')}"


def install(site, name, files, *, version="1.0", requires=(), asked_for=True, points="", pure=True, project=None):
    """Lay out a distribution in `site`: its files by their paths there, with metadata and RECORD. With `project` it is editable there."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {one}" for one in requires),
    ]
    metadata = {
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\nTag: py3-none-any\n",
        f"{info}/INSTALLER": "pip\n",
        **({f"{info}/REQUESTED": ""} if asked_for else {}),
        **({f"{info}/entry_points.txt": points} if points else {}),
    }
    if project is not None:
        for path, content in files.items():
            write(project / path, content)
        link = {"url": f"file://{project}", "dir_info": {"editable": True}}
        files = {f"__editable__.{name}.pth": f"{project}\n", f"{info}/direct_url.json": json.dumps(link)}
    rows = []
    for path, content in {**files, **metadata}.items():
        data = write(site / path, content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    write(site / info / "RECORD", "\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
    return site


def write(path, content):
    data = content if isinstance(content, bytes) else content.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return data


def compiled(folder, library=""):
    """Bytes of an extension module `_fast` whose `times(n)` gives 2 n, or what a library of its own makes of it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("There is no C compiler on this machine")
    write(folder / "fast.c", C_CODE)
    flags = [f"-I{sysconfig.get_paths()['include']}", "-shared", "-fPIC"]
    if library:
        write(folder / "mine.c", "int mine_answer(void) { return 4; }")
        made = folder / f"lib{library}.so"
        run(compiler, "-shared", "-fPIC", f"-Wl,-soname,lib{library}.so.1", "-o", made, folder / "mine.c")
        flags += ["-DNEEDS", f"-L{folder}", f"-l{library}"]
    run(compiler, "-o", folder / EXTENSION, folder / "fast.c", *flags)
    return (folder / EXTENSION).read_bytes()


def run(*command):
    subprocess.run([os.fspath(word) for word in command], check=True, capture_output=True)


def of_a_notebook(folder, monkeypatch):
    """Install what exists nowhere else in front of this Python's own packages: `fastkit`, a wheel with a compiled part, data and a
    script, which requires `minekit`, an editable project with an entry point; gives the folders of both."""
    site = folder / "notebook/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    script = f"#!{sys.executable}\nfrom fastkit import hello\nhello()\n"
    wheel = {
        "fastkit/__init__.py": "from fastkit._fast import times\ndef hello(): print('hello of fastkit')\n",
        f"fastkit/{EXTENSION}": compiled(folder), "fastkit/data/words.txt": "alpha beta", "../../../bin/fastkit-hello": script,
    }  # fmt: skip
    project, points = folder / "project", "[minekit.plugins]\none = minekit:answer\n"
    install(site, "fastkit", wheel, requires=["minekit"], pure=False)
    install(site, "minekit", {"minekit/__init__.py": "def answer(): return 41\n"}, points=points, project=project)
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.syspath_prepend(str(site))
    (site.parents[2] / "bin/fastkit-hello").chmod(0o755)
    return site / "fastkit", project / "minekit"
