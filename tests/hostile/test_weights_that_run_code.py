"""Folders of weights that others have made run no code, wherever they are read."""

import functools
import os
import pickle
import shutil

import made_models
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.state_dict_saver import save

from kale_dist.errors import ConfigError, KaleDistError, StoreError
from kale_dist.worker.training import checkpoint, parts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
in_parts = functools.partial(made_models.train, "local", 1, strategy="fsdp", threads=1)


class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark, function=os.system):
        self.mark, self.function = mark, function

    def __reduce__(self):
        return self.function, (f"touch {self.mark}",)


@pytest.fixture
def mark(tmp_path):
    """Is there if code has run."""
    yield tmp_path / "code-ran"
    assert not (tmp_path / "code-ran").exists()


def folder_of_parts(folder):
    save({"model.weight": torch.full((2,), 3.0), "model.note": {"a": 1}}, checkpoint_id=folder, no_dist=True)
    return folder


def weight_of(folder):
    weight = torch.zeros(2)
    parts.load(folder, {"model.weight": weight}, None)
    return weight.tolist()


def test_what_torch_has_written_is_read(tmp_path):
    assert weight_of(folder_of_parts(tmp_path / "net")) == [3.0, 3.0]
    assert list(parts.metadata(tmp_path / "net").state_dict_metadata) == ["model.weight"]
    plain = FileSystemReader(tmp_path / "net").read_metadata()
    assert (
        parts.metadata(tmp_path / "net").state_dict_metadata["model.weight"]
        == plain.state_dict_metadata["model.weight"]
    )


def test_so_is_what_an_earlier_python_has_written(tmp_path, monkeypatch):
    encoding = metadata.TensorProperties().__getstate__()[3]
    monkeypatch.setattr(type(encoding), "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    assert weight_of(folder_of_parts(tmp_path / "net")) == [3.0, 3.0]
    assert b"getattr" in (tmp_path / "net" / ".metadata").read_bytes()


def test_its_getattr_reaches_nothing(tmp_path, mark):
    folder = folder_of_parts(tmp_path / "net")
    size = b"\x8c\x05torch\x8c\x04Size\x93"
    (folder / ".metadata").write_bytes(
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93" + size + b"\x8c\x08__dict__\x86R."
    )
    with pytest.raises(StoreError, match=r"\.metadata cannot be read"):
        weight_of(folder)


@pytest.mark.parametrize("function", [os.system, eval, pickle.loads, torch.hub.load])
def test_metadata_that_names_a_function_is_refused(tmp_path, mark, function):
    folder = folder_of_parts(tmp_path / "net")
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark, function)))
    for read in (parts.size, weight_of):
        with pytest.raises(StoreError, match="no place there"):
            read(folder)


@pytest.mark.parametrize("names", [
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "os.system"),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
    ("torch", "load"), ("torch", "hub.load"), ("builtins", "eval"), ("collections", "abc.sys.modules"),
])  # fmt: skip
def test_no_way_around_its_list_of_names(tmp_path, mark, names):
    folder = folder_of_parts(tmp_path / "net")
    module, name = (f"\x8c{chr(len(one))}{one}".encode("latin-1") for one in names)
    (folder / ".metadata").write_bytes(b"\x80\x04" + module + name + b"\x93.")
    with pytest.raises(StoreError, match=r"\.metadata cannot be read"):
        weight_of(folder)


@pytest.mark.parametrize("damage", [b"", b"\x80", b"\x80\x04N.", b"\x80\x04]q\x00h\x05.", b"c" * 5000])
def test_metadata_that_is_garbage_is_one_error(tmp_path, damage):
    folder = folder_of_parts(tmp_path / "net")
    (folder / ".metadata").write_bytes(damage)
    with pytest.raises(StoreError, match=r"\.metadata cannot be read"):
        weight_of(folder)


def test_an_entry_that_is_no_tensor_is_refused_before_it_is_read(tmp_path, mark):
    folder = folder_of_parts(tmp_path / "net")
    found = FileSystemReader(folder).read_metadata()
    # It has the size of the weight, so that nothing else speaks against it.
    found.state_dict_metadata["model.weight"] = entry = metadata.BytesStorageMetadata()
    entry.size = torch.Size([2])
    index = metadata.MetadataIndex("model.weight")
    code = pickle.dumps(Evil(mark))
    (folder / "__9_0.distcp").write_bytes(code)
    kind = type(next(iter(found.storage_data.values())))
    found.storage_data = {index: kind("__9_0.distcp", 0, len(code))}
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(KaleDistError, match=r"has no weights model\.weight"):
        weight_of(folder)


def test_files_outside_of_the_folder_are_not_read(tmp_path):
    folder = folder_of_parts(tmp_path / "net")
    found = FileSystemReader(folder).read_metadata()
    for info in found.storage_data.values():
        info.relative_path = f"../elsewhere/{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(StoreError, match="not in the folder"):
        weight_of(folder)


def test_a_download_with_metadata_beside_its_safetensors_gives_the_safetensors(tmp_path, mark):
    save_file({"weight": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    assert weight_of(tmp_path) == [5.0, 5.0]


def test_a_checkpoint_leads_to_no_other_folder(tmp_path, mark):
    job = in_parts(1, save_to=tmp_path / "net")
    job.result()
    mine = next((tmp_path / "net.checkpoints").iterdir())
    # A file that was downloaded names a folder that others can write to.
    theirs = shutil.copytree(mine, tmp_path / "theirs")
    (theirs / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    given = checkpoint.read(mine / "rest")
    whole = checkpoint.collect(given) | {"parts": str(theirs)}
    (tmp_path / "download").mkdir()
    checkpoint.save(tmp_path / "download" / "rest", whole)
    with pytest.raises(ConfigError, match="in which it does not lie") as caught:
        in_parts(2, save_to=tmp_path / "net", resume_from=tmp_path / "download")
    assert caught.value.argument == "resume_from"
    # What lies in its folder is followed; that folder runs nothing.
    checkpoint.save(theirs / "rest", whole)
    more = in_parts(2, save_to=tmp_path / "other", resume_from=theirs)
    with pytest.raises(KaleDistError, match="no place there"):
        more.result()


def test_the_notebook_runs_nothing_either(tmp_path, mark):
    job = in_parts(1, save_to=tmp_path / "net")
    job.result()
    (tmp_path / "net" / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(StoreError, match="no place there"):
        job.model.state_dict()
