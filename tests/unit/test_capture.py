"""A call of the notebook, made in another process: what it sees there, and what comes back."""

import json
import linecache
import os
import pathlib
import subprocess
import sys
import types

import packaging.version  # noqa: F401 - a module that is imported here, and beside a script of that name
import pytest
from own_files import own_files
from played import play

from kale_dist import wire
from kale_dist.snapshot import modules, reducers, sources
from kale_dist.snapshot.capture import capture
from kale_dist.wire import blobs, context

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def names_in(folder):
    return [path.name for path in folder.iterdir()]


@pytest.mark.newest
def test_functions_see_globals_helpers_closures_and_classes_of_other_cells(tmp_path):
    play(
        tmp_path,
        "import math\nSCALE = 3\ndef helper(x):\n    return math.sqrt(x) * SCALE",
        "class Base:\n    def twice(self):\n        return 2 * helper(self.x)",
        "class Point(Base):\n    def __init__(self, x):\n        super().__init__()\n        self.x = x",
        "def make(n):\n    def inner(k):\n        return k if k == 0 else n + inner(k - 1)\n    return inner",
        "inner = make(5)\ndef call(point, *, add):\n    return point.twice() + inner(3) + (lambda y: (lambda z: z + add)(y))(1)",
        args="(Point(4),)",
        kwargs="{'add': 10}",
        after="assert outcome.value == 12 + 15 + 11, outcome",
    )


def test_loggers_and_text_files_that_are_read_travel(tmp_path):
    (tmp_path / "words.txt").write_text("read\nunread\n")
    play(
        tmp_path,
        "import logging\nlogger, words = logging.getLogger('a.b'), open('words.txt')\nfirst = words.readline()",
        "def call():\n    return logger.name, logger is logging.getLogger('a.b'), words.read()",
        after="assert outcome.value == ('a.b', True, 'unread\\n'), outcome",
    )


@pytest.mark.newest
def test_main_in_the_rank_is_like_the_notebooks(tmp_path):
    printed = play(
        tmp_path,
        "import json, sys\nfrom dataclasses import dataclass\n@dataclass\nclass Config:\n    lr: float = 0.1",
        "counter = 0\ndef bump():\n    global counter\n    counter += 1",
        """
def call(config):
    import inspect, pickle, __main__
    bump(); bump()
    assert __main__.counter == counter == 2
    assert __name__ == "__main__" and "__file__" not in globals()
    assert pickle.loads(pickle.dumps(config)) == config and __main__.Config is Config is type(config)
    assert "counter += 1" in inspect.getsource(bump)
    assert inspect.getsource(Config).startswith("@dataclass"), inspect.getsource(Config)
    assert "loading" not in dir(__main__) and "rank" not in dir(__main__)
    print("checked")
""",
        args="(Config(),)",
        after="assert counter == 0",
    )
    assert "checked" in printed


def test_results_have_the_notebooks_own_classes_and_functions(tmp_path):
    play(
        tmp_path,
        "OFFSET = 1\nclass Net:\n    def forward(self, x):\n        return x + OFFSET\n    def same(self):\n        return type(self)",
        "from enum import Enum\nclass Color(Enum):\n    RED = 1",
        "net = Net()\noriginal_forward = Net.forward\ndef helper():\n    return OFFSET",
        "def call():\n    net.seen = Color.RED\n    return {'net': net, 'cls': Net, 'f': helper, 'm': net.forward, 'l': Color.RED}",
        after="""
value = outcome.value
assert type(value["net"]) is Net and value["cls"] is Net and value["f"] is helper and value["l"] is Color.RED
assert value["net"].seen is Color.RED and value["net"] is not net and not hasattr(net, "seen")
assert Net.forward is original_forward and value["m"].__func__ is original_forward
OFFSET = 100
assert value["net"].forward(1) == 101 and value["f"]() == 100
""",
    )


def test_later_cells_do_not_change_the_job(tmp_path):
    store = blobs.FolderStore(tmp_path)
    data = [1, 2]

    def call():
        return data

    first = capture(call, (), {}, store=store, label="call")
    data.append(3)
    assert capture(call, (), {}, store=store, label="call").digest != first.digest
    assert all(store.exists(blob) for blob in first.blobs)


def test_what_the_standard_library_puts_around_functions_of_cells_travels(tmp_path):
    play(
        tmp_path,
        "import functools, typing, weakref",
        "@functools.lru_cache(maxsize=7)\ndef fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)",
        "UserId = typing.NewType('UserId', int)\nfibonacci(3)",
        """
class Table:
    @functools.cached_property
    def whole(self):
        return [UserId(4)]
    @functools.cache
    def row(self, number):
        return number + 1
    @functools.singledispatchmethod
    def kind(self, value):
        return "other"
    @kind.register
    def _(self, value: int):
        return "int"
""",
        "@functools.singledispatch\ndef kind(value):\n    return 'other'\n@kind.register\ndef _(value: int):\n    return 'int'",
        "table = Table()\nnotes = weakref.WeakKeyDictionary({table: 'kept'})",
        """
def call():
    assert fibonacci.cache_info() == (0, 0, 7, 0) and fibonacci(30) == 832040 and fibonacci.cache_info().misses == 31
    assert table.whole is table.whole and table.row(2) == 3
    assert [kind(1), kind(""), table.kind(1), table.kind("")] == ["int", "other"] * 2
    assert dict(notes) == {table: "kept"}
    return UserId.__supertype__, UserId.__module__
""",
        after="assert outcome.value == (int, '__main__')",
    )


@pytest.mark.nightly
def test_an_optimizer_around_another_that_skips_torchs_constructor_steps(tmp_path):
    play(
        tmp_path,
        """
import torch
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
    def step(self, closure=None):
        return self.inner.step(closure)
net = torch.nn.Linear(1, 1, bias=False)
optimizer = Lookahead(torch.optim.SGD(net.parameters(), lr=1.0))
before = net.weight.item()
""",
        "def call():\n    net(torch.ones(1, 1)).sum().backward()\n    optimizer.step()\n    return net.weight.item()",
        after="assert abs(outcome.value - (before - 1)) < 1e-6",
    )


def test_a_module_whose_class_takes_arguments_before_its_constructor_travels(tmp_path):
    """Such as `ema_pytorch.EMA`, which plain pickle writes, and cannot read."""
    play(
        tmp_path,
        """
import torch
class Average(torch.nn.Module):
    def __new__(cls, model, **kwargs):
        return super().__new__(cls)
    def __init__(self, model, **kwargs):
        super().__init__()
        self.model = model
average = Average(torch.nn.Linear(1, 1))
""",
        "def call():\n    return average",
        after="assert type(outcome.value) is Average and torch.equal(outcome.value.model.weight, average.model.weight)",
    )


def test_hooks_on_gradients_travel(tmp_path):
    """Without a mask's hook, weights that are to stay as they are would be trained, and nothing would say so."""
    play(
        tmp_path,
        "import torch\nnet = torch.nn.Linear(2, 1, bias=False)\nmask = torch.tensor([[1.0, 0.0]])\nseen = []",
        "net.weight.register_hook(lambda gradient: gradient * mask)",
        "net.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight is net.weight))",
        "def call():\n    net(torch.ones(1, 2)).sum().backward()\n    return net.weight.grad.tolist(), seen",
        after="assert outcome.value == ([[1.0, 0.0]], [True])",
    )


def test_a_writer_of_tensorboard_writes_on_in_the_same_folder(tmp_path):
    play(
        tmp_path,
        "import os\nfrom torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('events')",
        "writer.add_scalar('loss', 3.0, 0)\nwriter.flush()\nbefore = len(os.listdir('events'))",
        "def call():\n    writer.add_scalar('loss', 2.0, 1)\n    writer.close()\n    return os.getcwd()",
        after="assert outcome.value != os.getcwd() and (before, len(os.listdir('events'))) == (1, 2)",
    )


def test_ranks_other_than_0_write_nothing_to_tensorboard(monkeypatch):
    monkeypatch.setattr(context, "context", lambda: types.SimpleNamespace(rank=1))
    with reducers.make_summary_writer(pytest.fail, "runs") as writer:
        writer.add_scalar("loss", 1.0)


def test_classes_in_a_registry_of_their_base_or_metaclass_are_the_registered_ones(tmp_path):
    play(
        tmp_path,
        """
class Layer:
    kinds = {}
    def __init_subclass__(cls):
        Layer.kinds[cls.__name__] = cls
class Meta(type):
    kinds = {}
    def __new__(meta, name, bases, namespace):
        meta.kinds[name] = super().__new__(meta, name, bases, namespace)
        return meta.kinds[name]
""",
        "class Dense(Layer):\n    def size(self):\n        return 3",
        "class Plugin(metaclass=Meta):\n    def size(self):\n        return 4",
        """
def call():
    assert Dense.kinds == {"Dense": Dense} and Plugin.kinds == {"Plugin": Plugin}
    return Dense.kinds["Dense"]().size(), Plugin.kinds["Plugin"]().size()
""",
        after="assert outcome.value == (3, 4)",
    )


@pytest.mark.nightly
def test_a_function_that_was_compiled_in_a_cell_is_compiled_in_the_rank(tmp_path):
    play(
        tmp_path,
        "import torch\n@torch.compile(backend='eager')\ndef double(x):\n    return x * factor\nfactor = 2",
        "def call():\n    return double(torch.ones(2)).tolist(), hasattr(double, '_torchdynamo_orig_callable')",
        after="assert outcome.value == ([2.0, 2.0], True)",
    )


def test_functions_that_share_a_variable_go_on_sharing_it(tmp_path):
    play(
        tmp_path,
        "def make():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n    def get():\n        return n\n    return up, get",
        "up, get = make()\ndef call():\n    up(); up()\n    return get()",
        after="assert outcome.value == 2 and get() == 0",
    )


def test_modules_made_by_hand_travel_by_value(tmp_path):
    play(
        tmp_path,
        """
import sys, types
made = types.ModuleType("made_by_hand"); sys.modules["made_by_hand"] = made
exec('''
LIMIT = 4
def below(x):
    return x < LIMIT
class Kept:
    pass
''', made.__dict__)
from made_by_hand import below, Kept
""",
        "def call():\n    import made_by_hand\n    return below(3), made.LIMIT, made_by_hand.below is below, Kept",
        after="assert outcome.value == (True, 4, True, Kept), outcome.value",
    )


def test_environment_names_of_ipython_do_not_drag_the_shell_along(tmp_path):
    pytest.importorskip("IPython")
    play(
        tmp_path,
        "from IPython.core.interactiveshell import InteractiveShell\nimport sys\nshell = InteractiveShell.instance(user_module=sys.modules['__main__'])\n"
        "get_ipython = shell.get_ipython\ndel shell",
        "def call():\n    return get_ipython() is None",
        after="assert outcome.value is True",
    )


@pytest.mark.newest
def test_an_exception_comes_back_as_itself_with_cell_lines(tmp_path):
    printed = play(
        tmp_path,
        "class Broken(ValueError):\n    def __init__(self, code):\n        super().__init__(code)\n        self.code = code",
        "def helper(x):\n    try:\n        {}[x]\n    except KeyError as error:\n        raise Broken(7) from error  # here",
        "def call():\n    helper('k')",
        after="""
error = outcome.error
assert type(error) is Broken and error.code == 7 and isinstance(error.__cause__, KeyError), repr(error)
assert 'raise Broken(7) from error  # here' in outcome.traceback and "{}[x]" in outcome.traceback
assert outcome.traceback.rstrip().endswith("Broken: 7"), outcome.traceback
print(outcome.traceback)
""",
    )
    assert own_files(printed) == []


def test_a_second_snapshot_of_an_edited_cell_costs_kilobytes(tmp_path):
    numpy = pytest.importorskip("numpy")
    data = numpy.arange(300_000.0)
    store = blobs.FolderStore(tmp_path)
    first = capture(data.sum, (), {}, store=store, label="call")
    again = capture(data.mean, (), {}, store=store, label="call")
    assert first.size_bytes > data.nbytes
    new = set(again.blobs) - set(first.blobs)
    assert 0 < sum(store.path(blob).stat().st_size for blob in new) < 10_000
    assert again.size_bytes > data.nbytes


def test_small_buffers_share_a_blob_and_equal_ones_their_bytes(tmp_path):
    numpy = pytest.importorskip("numpy")
    store = blobs.FolderStore(tmp_path)
    arrays = [numpy.full(1000, number % 10, "u1") for number in range(500)]
    snapshot = capture(len, (arrays,), {}, store=store, label="len")
    assert len(snapshot.blobs) == 4  # manifest, pickle, sources, one pack
    assert max(store.path(blob).stat().st_size for blob in snapshot.blobs) < 500 * 200


def test_a_snapshot_that_fails_leaves_the_exception_readable_and_no_manifest(tmp_path):
    store = blobs.FolderStore(tmp_path)
    with pytest.raises(blobs.StoreError):
        capture(len, ([1],), {}, store=blobs.FolderStore("/proc/nothing"), label="len")
    assert list(store.list()) == []


def test_the_manifest_has_versions_and_label(tmp_path):
    store = blobs.FolderStore(tmp_path)
    snapshot = capture(len, ([1],), {}, store=store, label="a label")
    manifest = json.loads(bytes(store.open(snapshot.digest)))
    assert manifest["label"] == "a label"
    assert manifest["contract"] == wire.VERSION
    assert manifest["python"].startswith("3.")
    assert manifest["cloudpickle"]
    assert sum(store.path(blob).stat().st_size for blob in snapshot.blobs) == snapshot.size_bytes


def test_a_memory_store_counts_without_writing(tmp_path):
    snapshot = capture(len, ([1],), {}, store=blobs.MemoryStore(), label="len")
    assert snapshot.size_bytes > 0
    assert names_in(tmp_path) == []


@pytest.mark.nightly
def test_a_snapshot_of_a_large_model_takes_almost_no_memory():
    benchmark = pathlib.Path(__file__).parents[2] / "benchmarks" / "snapshot.py"
    command = [sys.executable, str(benchmark), "measure", "kale_dist", "400"]
    environment = {**os.environ, "PYTHONPATH": str(benchmark.parents[1])}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["extra"] <= 0.05


@pytest.mark.newest
def test_cells_of_a_real_shell_are_named_as_the_user_knows_them(tmp_path):
    pytest.importorskip("IPython")
    play(
        tmp_path,
        "import sys\nfrom IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance(user_module=sys.modules['__main__'])\nshell.execution_count = 7\n"
        "shell.run_cell('class Net:\\n    size = 3\\ndef call():\\n    import inspect\\n    print(inspect.getsource(Net))\\n    1 / 0  # boom', store_history=True)",
        after="error = outcome.error\nassert isinstance(error, ZeroDivisionError)\n"
        "assert 'File \"Cell In[7]\", line 6, in call\\n    1 / 0  # boom' in outcome.traceback, outcome.traceback",
    )


SAVED = """import marimo
app = marimo.App()

with app.setup:
    import kale_dist as kd

@app.cell
def _(job):
    job.wait()
    return

@app.cell
def named(job):
    def step(x):
        return 1 / x

    job.wait()
    return

@app.function
def ratio(x):
    return 1 / x
"""


@pytest.mark.parametrize(
    ("cell", "label"),
    [
        ("import kale_dist as kd", "cell 1"),
        ("def step(x):\n    return 1 / x\n\njob.wait()", "cell 3"),
        ("def ratio(x):\n    return 1 / x\n", "cell 4"),
        ("job.wait()", "a cell"),
        ("def unsaved():\n    pass", "a cell"),
        ("", "a cell"),
    ],
)
def test_cells_of_marimo_are_named_by_their_place_where_that_is_known(tmp_path, monkeypatch, cell, label):
    saved = tmp_path / "notebook.py"
    saved.write_text(SAVED)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(saved), raising=False)
    # As marimo compiles a cell.
    filename = "/tmp/marimo_1/__marimo__cell_Hbol_.py"
    monkeypatch.setitem(linecache.cache, filename, (len(cell), None, cell.splitlines(keepends=True), filename))
    assert sources.cell_label(filename) == label


def test_modules_beside_a_script_are_its_own_whatever_is_imported_here(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text("import beside, packaging, space\n")
        for name in ("beside.py", "packaging.py"):
            (tmp_path / folder / name).write_text("")
        (tmp_path / folder / "space").mkdir()
        (tmp_path / folder / "space" / "inside.py").write_text("")
    for folder in ("b", "a"):
        found = modules.collect([], modules.Script(path=tmp_path / folder / "train.py")).files
        assert {file.path for file in found} == {"train.py", "beside.py", "packaging.py", "space/inside.py"}
        assert {file.source.relative_to(tmp_path).parts[0] for file in found} == {folder}
