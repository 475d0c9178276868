"""Loading refuses what is damaged or of other versions, and makes a `__main__` that children find again."""

import json
import stat
import sys

import pytest
from played import play

from kale_dist import wire
from kale_dist.errors import ContractError, SnapshotDamagedError, SnapshotError, StoreError
from kale_dist.snapshot import loading
from kale_dist.snapshot.capture import capture
from kale_dist.wire import blobs


def names_in(folder):
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def store(tmp_path):
    return blobs.FolderStore(tmp_path / "blobs")


def changed_manifest(store, digest, **changes):
    manifest = json.loads(bytes(store.open(digest))) | changes
    return store.put([json.dumps(manifest).encode()])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"contract": 999}, f"contract is 999 there and {wire.VERSION} here"),
        ({"python": "3.8"}, r"python is 3\.8 there and 3\.\d+ here"),
        ({"torch": "1.13.1"}, r"torch is 1\.13\.1 there"),
    ],
)
def test_other_versions_are_refused_by_name(store, changes, said):
    digest = capture(len, ([],), {}, store=store, label="train").digest
    with pytest.raises(ContractError, match=said):
        loading.load(store, changed_manifest(store, digest, **changes), fill_main=False)


def overwrite(path, data):
    path.chmod(0o600)
    path.write_bytes(data)


def test_every_blob_that_can_run_code_is_checked_before_it_is_used(store):
    (store.root.parent / "trap").mkdir()
    snapshot = capture(len, ([1],), {}, store=store, label="len")
    for blob in snapshot.blobs:
        good = store.path(blob).read_bytes()
        overwrite(store.path(blob), b"cos\nabort\n(tR." + good)
        with pytest.raises(SnapshotDamagedError, match=blob):
            loading.load(store, snapshot.digest, fill_main=False)
        overwrite(store.path(blob), good)
    assert loading.load(store, snapshot.digest, fill_main=False).args == ([1],)


def test_a_missing_blob_is_a_store_error(store):
    snapshot = capture(len, ([1],), {}, store=store, label="len")
    for blob in snapshot.blobs:
        good = store.path(blob).read_bytes()
        store.delete(blob)
        with pytest.raises(StoreError, match=blob):
            loading.load(store, snapshot.digest, fill_main=False)
        store.put([good])


def test_tensors_are_checked_by_size(store):
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(200_000)
    snapshot = capture(len, (array,), {}, store=store, label="len")
    (blob,) = [name for name in snapshot.blobs if store.path(name).stat().st_size == array.nbytes]
    overwrite(store.path(blob), b"\1" * array.nbytes)
    loading.load(store, snapshot.digest, fill_main=False)
    overwrite(store.path(blob), b"\1" * 100)
    with pytest.raises(SnapshotDamagedError, match="cut short"):
        loading.load(store, snapshot.digest, fill_main=False)


def test_what_is_not_installed_in_the_rank_is_named_with_versions(store, tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "only_in_the_notebook.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(site))
    import only_in_the_notebook

    digest = capture(only_in_the_notebook.f, (), {}, store=store, label="train").digest
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "only_in_the_notebook")
    with pytest.raises(SnapshotError, match="train cannot be loaded in the rank: No module named 'only_in_the_note"):
        loading.load(store, digest, fill_main=False)


PACKAGE = {
    "__init__": "names = []\ndef known():\n    return names\nclass Thing: pass",
    "effects": "import kit_for_tests as kit\nkit.names.append('effects')\nkit.Thing.twice = lambda self: 2",
    "gone": "",
}
"""An installed package, one of whose modules only the notebook has."""


def test_imports_made_for_their_effect_are_made_in_the_rank(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "kit_for_tests"
    package.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(package.parent))
    printed = play(
        tmp_path,
        "import os, kit_for_tests.effects, kit_for_tests.gone\nos.remove(kit_for_tests.gone.__file__)",
        "from kit_for_tests import known, Thing\ndef call():\n    return known(), Thing().twice()",
        after="assert outcome.value == (['effects'], 2), outcome",
    )
    assert "cannot be imported in the ranks (kit_for_tests.gone: No module named 'kit_for_tests.gone')" in printed


def test_without_fill_main_nothing_of_this_process_is_overwritten(store, monkeypatch):
    main = sys.modules["__main__"]
    namespace = {"__name__": "__main__"}
    exec("VALUE = 1\nclass Taken: pass\nclass Free: pass\ndef call(): return VALUE, Taken, Free", namespace)
    for name in ("VALUE", "Taken"):
        monkeypatch.setattr(main, name, "mine", raising=False)
    monkeypatch.setattr(main, "Free", None, raising=False)
    monkeypatch.delattr(main, "Free")
    before = sys.modules["__main__"]
    digest = capture(namespace["call"], (), {}, store=store, label="call").digest
    loaded = loading.load(store, digest, fill_main=False)
    value, taken, free = loaded.fn()
    assert sys.modules["__main__"] is before
    assert (main.VALUE, main.Taken) == ("mine", "mine")
    assert value == 1
    assert taken is not namespace["Taken"]
    assert main.Free is free
    assert sorted(made.__name__ for made in loaded.references) == ["Free", "Taken", "call"]


def test_loading_in_the_notebook_itself_leaves_its_classes_alone(store):
    class Net:
        def forward(self):
            return 1

    forward = Net.forward
    digest = capture(Net, (), {}, store=store, label="Net").digest
    loaded = loading.load(store, digest, fill_main=False)
    assert loaded.fn is not Net
    assert Net.forward is forward
    assert loaded.fn().forward() == 1


def test_modules_are_staged_once_whole_and_inside_of_their_folder(store, tmp_path):
    blob = store.put([b"x = 1\n"])
    digest = capture(len, ([],), {}, store=store, label="len").digest
    staged = changed_manifest(store, digest, modules=[["a/b.py", blob, 0o644], ["a/run", blob, 0o755]])
    folder = tmp_path / "job" / "modules"
    loading.stage_modules(store, staged, folder)
    assert (folder / "a" / "b.py").read_text() == "x = 1\n"
    assert stat.S_IMODE((folder / "a" / "run").stat().st_mode) == 0o755
    store.delete(blob)
    loading.stage_modules(store, staged, folder)
    assert names_in(folder.parent) == ["modules"]
    for bad in ("../outside.py", "/tmp/outside.py", "a/../../outside.py"):
        blob = store.put([b"x"])
        wrong = changed_manifest(store, digest, modules=[[bad, blob, 0o644]])
        with pytest.raises(SnapshotDamagedError, match="outside"):
            loading.stage_modules(store, wrong, tmp_path / "other")
    assert not (tmp_path / "other").exists()


DATASET = """
import torch
from torch.utils.data import DataLoader, Dataset
FACTOR = 10
class Squares(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return scaled(index)
def scaled(index):
    return torch.tensor(FACTOR * index)
def collate(items):
    return torch.stack(items).tolist()
"""


@pytest.mark.parametrize(
    "method", [*(pytest.param(one, marks=pytest.mark.nightly) for one in ("forkserver", "spawn")), "fork"]
)
def test_dataloader_workers_of_every_start_method_know_the_notebooks_classes(tmp_path, method):
    play(
        tmp_path,
        DATASET,
        "def call(loader):\n    return [batch for batch in loader]",
        args=f"(DataLoader(Squares(), 3, num_workers=1, multiprocessing_context={method!r}, collate_fn=collate),)",
        after="assert outcome.value == [[0, 10, 20], [30, 40, 50]], outcome.value",
    )


def test_torch_save_and_plain_pickle_of_the_notebooks_classes_work_in_the_rank(tmp_path):
    play(
        tmp_path,
        "import torch\nclass Net(torch.nn.Module):\n    class Inner:\n        pass\n"
        "    def __init__(self):\n        super().__init__()\n        self.l = torch.nn.Linear(2, 2)\n        self.i = Net.Inner()",
        "def call(net):\n    import inspect\n    torch.save(net, 'net.pt')\n    again = torch.load('net.pt', weights_only=False)\n"
        "    assert inspect.getsource(Net).startswith('class Net(')\n    assert 'super().__init__' in inspect.getsource(Net.__init__)\n"
        "    return type(again) is type(net) is Net",
        "import os; here = os.getcwd()\ninner = call\ndef call(net):\n    os.chdir(here)\n    return inner(net)",
        args="(Net(),)",
        after="assert outcome.value is True",
    )
