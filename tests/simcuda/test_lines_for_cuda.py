"""Each line of the library that is about CUDA runs on simulated GPUs, or is listed in `lines_not_run.txt` with the reason."""

import ast
import os
import pathlib
import re
import shutil

import pytest
import simulated_gpus
from simulated_gpus import ROOT

LISTED = pathlib.Path(__file__).with_name("lines_not_run.txt")
PROBLEM = simulated_gpus.why_not()

ABOUT_CUDA = re.compile(
    r"torch\.(version\.)?cuda\b|\.is_cuda\b|[!=]= \"(cuda|cpu)\"|\"cpu\", \"cuda\"|\"cuda\" if|cuda:nccl"
)
SENTENCE = re.compile(r'(?<![a-z])r?"(?!cuda"|cpu"|cpu:)[^"]*"')

RUNS = [
    (2, "tests/simcuda/uses.py"),
    (8, "tests/strategies/test_ddp.py", "tests/strategies/test_larger.py", "tests/resuming/test_within.py"),
    (1, "--group", "A", "--group", "B", "--group", "C"),
]


def statements_about_cuda(source):
    """The innermost statement of each such line, with its function and its text."""
    found = {}
    nodes = list(ast.walk(ast.parse(source)))
    for number, line in enumerate(source.splitlines(), start=1):
        text = line.partition("  #")[0].strip()
        around = [node for node in nodes if getattr(node, "lineno", number + 1) <= number <= node.end_lineno]
        # Docstrings and programs for others speak of it, too.
        is_text = any(isinstance(node, ast.Constant) and node.lineno < node.end_lineno for node in around)
        if ABOUT_CUDA.search(SENTENCE.sub('""', text)) and not is_text and text[:3] != '"""':
            functions = [node.name for node in around if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            statement = max((node for node in around if isinstance(node, ast.stmt)), key=lambda one: one.lineno)
            found[number] = statement, f"{'.'.join(functions)}: {text}"
    return found


def note_what_runs(folder, path):
    """Have each statement about CUDA of a copy of the library write its text into a file; return the texts of all."""
    texts = set()
    for module in sorted((folder / "kale_dist").rglob("*.py")):
        source = module.read_text()
        lines = source.splitlines()
        for node, text in sorted(statements_about_cuda(source).values(), key=lambda one: -one[0].lineno):
            assert not lines[node.lineno - 1].lstrip().startswith("elif"), (
                f"write `else:` and `if` in two lines: {text}"
            )
            name = f"{module.relative_to(folder)} {text}"
            texts.add(name)
            note = f"with open({str(path)!r}, 'a') as _noted: _noted.write({name + chr(10)!r})"
            lines.insert(node.lineno - 1, " " * node.col_offset + note)
        module.write_text("\n".join(lines) + "\n")
    return texts


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(PROBLEM) and "KALE_DIST_REQUIRE_SIMCUDA" not in os.environ, reason=PROBLEM)
def test_each_line_about_cuda_runs_or_is_listed(tmp_path):
    assert not PROBLEM, PROBLEM
    for name in ("kale_dist", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    noted = tmp_path / "noted"
    texts = note_what_runs(tmp_path, noted)
    for gpus, *arguments in RUNS:
        ended = simulated_gpus.run(arguments, tmp_path, gpus, root=tmp_path)
        assert ended.returncode == 0, ended.stdout[-20_000:]
    listed = {line.partition("  # ")[0] for line in LISTED.read_text().splitlines()}
    assert sorted(texts - set(noted.read_text().splitlines())) == sorted(listed)
