"""Models among the arguments of a launched function: what comes back, what stays behind, and how a new kernel gets them."""

import copy
import ctypes
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch import nn

import kale_dist as kd
from kale_dist.cli import main
from kale_dist.errors import (
    ConfigError,
    JobFailedError,
    KaleDistWarning,
    ResultUnavailableError,
    SnapshotDamagedError,
    StoreError,
)
from kale_dist.job.handle import inside
from kale_dist.snapshot import folders
from kale_dist.wire.blobs import FolderStore


class Net(nn.Module):
    """A large frozen embedding, a small one, tied layers, a buffer and a head."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Embedding(1000, 512), nn.Embedding(8, 4)
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(6)
        # Of one memory, and not contiguous.
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.complex, self.empty = nn.Parameter(torch.tensor([1 + 2j])), nn.Parameter(torch.empty(0, 3))


def net():
    torch.manual_seed(0)
    return Net()


def outcome(job):
    return inside(job).files.outcome(job.status.attempt, 0)


def same(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def by_data(model):
    model.head.weight.data.add_(1)


def by_numpy(model):
    model.head.weight.detach().numpy()[0, 0] += 1


def by_row(model):
    with torch.no_grad():
        model.large.weight[999, 511] += 1


def by_tie(model):
    model.two.weight.data.mul_(2)


def by_buffer(model):
    model.norm.running_mean.numpy()[3] = 5


def by_zero(model):
    """A change that a comparison of numbers would miss."""
    model.head.bias.data.neg_()


def by_new_memory(model):
    model.head.weight.data = torch.ones(2, 6)


def by_turning(model):
    model.turned.data = model.turned.data.contiguous().add_(1)


def by_conjugation(model):
    """A change of how the same bytes are read."""
    model.complex.data = model.complex.data.conj()


CHANGES = {
    by_data: ["head.weight"], by_numpy: ["head.weight"], by_row: ["large.weight"], by_tie: ["one.weight", "two.weight"],
    by_buffer: ["norm.running_mean"], by_zero: ["head.bias"], by_new_memory: ["head.weight"], by_turning: ["turned"],
    by_conjugation: ["complex"],
}  # fmt: skip


@pytest.mark.parametrize(
    "change", [by_data, *(pytest.param(change, marks=pytest.mark.nightly) for change in list(CHANGES)[1:])]
)
def test_what_has_changed_comes_back_and_the_rest_stays(jobs, change):
    model, twin = net(), net()
    for each in (model, twin):
        nn.init.zeros_(each.head.bias)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change(twin)
    jobs.append(kd.launch(change, model, number_of_processes=1))
    assert jobs[0].wait(60).state == "succeeded"
    assert same(before, model.state_dict()) == [name for name in CHANGES[change] if change is not by_zero]
    assert not same(twin.state_dict(), model.state_dict())
    assert torch.signbit(model.head.bias).all() == (change is by_zero)
    assert model.one.weight is model.two.weight
    assert (outcome(jobs[0]).stat().st_size < 20_000) == (change is not by_row)
    assert not same(jobs[0].state_dict(), twin.state_dict())


def trains(models, extra):
    for model in models:
        model.head.weight.data.add_(1)
    return "a value", extra is models[0]


def in_new_process(code):
    said = subprocess.run(
        [sys.executable, "-c", "import torch, kale_dist as kd\n" + textwrap.dedent(code)],
        check=True, capture_output=True, text=True, cwd=pathlib.Path(__file__).parent, timeout=120,
    )  # fmt: skip
    return said.stdout.strip()


def test_several_models_come_back_in_this_kernel_and_in_a_new_one(jobs, tmp_path, monkeypatch, capsys):
    first, second = net(), net()
    jobs.append(kd.launch(trains, [first, second], extra=first, number_of_processes=2))
    job = jobs[0]
    assert job.results() == [("a value", True)] * 2
    state = job.state_dict()
    assert [name for name in state if "head.weight" in name] == ["0.head.weight", "1.head.weight"]
    assert job.model[0] is first
    assert not same(nn.ModuleList([first, second]).state_dict(), state)
    torch.save(state, tmp_path / "expected.pt")
    assert torch.load(job.save(tmp_path / "model.pt")).keys() == state.keys()
    assert in_new_process(
        f"""
        job = kd.attach({job.ref!r})
        expected = torch.load({str(tmp_path / "expected.pt")!r})
        for found in (job.state_dict(), job.model.state_dict(), torch.load(job.save({str(tmp_path / "again.pt")!r}))):
            assert found.keys() == expected.keys() and all(map(torch.equal, found.values(), expected.values()))
        print(job.result(), type(job.model[1]).__name__)
        """
    ).endswith("('a value', True) Net")
    monkeypatch.chdir(tmp_path)
    for words, name in ((("--force",), "model.pt"), (("--value",), "result.pt"), (("-o", "other.pt"), "other.pt")):
        assert main(["fetch", job.ref, *words]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}\n"
    assert torch.load("result.pt") == ("a value", True)
    assert not same(torch.load("other.pt"), state)


def evaluates(model):
    return model.head.weight.sum().item()


def test_a_model_that_was_only_used_is_left_alone_until_you_ask(jobs, tmp_path):
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    jobs.append(kd.launch(evaluates, model, number_of_processes=2))
    by_row(model)
    jobs[0].result()
    assert same(before, model.state_dict()) == ["large.weight"]
    assert not same(before, jobs[0].state_dict())
    assert outcome(jobs[0]).stat().st_size < 20_000
    # What you ask for is the job's, not a mixture.
    with pytest.warns(KaleDistWarning, match="although model.large.weight changed after the job had started"):
        assert jobs[0].model is model
    assert not same(before, model.state_dict())


def test_a_model_that_has_changed_meanwhile_gets_the_jobs_values_all_of_them(jobs):
    model, twin = net(), net()
    by_data(twin)
    jobs.append(kd.launch(by_data, model, number_of_processes=1))
    by_row(model)
    model.small.weight.data.zero_()
    with pytest.warns(KaleDistWarning, match="although model.large.weight, model.small.weight changed after"):
        jobs[0].wait()
    assert not same(model.state_dict(), twin.state_dict())


@pytest.mark.parametrize("how", [pytest.param("missing", marks=pytest.mark.nightly), "damaged"])
def test_weights_whose_bytes_are_gone_are_refused_and_the_value_is_not(jobs, how):
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    jobs.append(kd.launch(lambda model: by_data(model) or "value", model, number_of_processes=1))
    job = jobs[0]
    assert job.exception() is None
    store = FolderStore(pathlib.Path(inside(job).files.folder).parents[1] / "blobs")
    largest = max(map(store.path, job.spec.blobs), key=lambda path: path.stat().st_size)
    largest.chmod(0o600)
    if how == "missing":
        largest.unlink()
    else:
        largest.write_bytes(b"x" * largest.stat().st_size)
    with pytest.warns(KaleDistWarning, match=r"model is as it was. large.weight of local.*missing or damaged"):
        assert job.result() == "value"
    assert not same(before, model.state_dict())
    for read in (lambda: job.model, job.state_dict):
        with pytest.warns(KaleDistWarning), pytest.raises(ResultUnavailableError, match=r"return model\.state_dict"):
            read()
    assert "missing or damaged" in in_new_process(
        f"""
        try:
            kd.attach({job.ref!r}).state_dict()
        except kd.KaleDistError as error:
            print(error)
        """
    )


def test_without_its_key_or_with_another_signature_nothing_is_loaded(jobs):
    model = net()
    jobs.append(kd.launch(by_data, model, number_of_processes=1))
    job = jobs[0]
    assert job.exception() is None
    files, code = inside(job).files, f"kd.attach({job.ref!r}).model"
    key, written = files.key.read_bytes(), outcome(job).read_bytes()
    ask = f"try:\n    {code}\nexcept kd.KaleDistError as error:\n    print(type(error).__name__, error)"
    files.key.unlink()
    assert in_new_process(ask).startswith("ResultUnavailableError Results of")
    files.key.write_bytes(key)
    outcome(job).write_bytes(written.replace(b"model_state", b"model_stole"))
    assert in_new_process(ask).startswith("SnapshotDamagedError")
    with pytest.raises(SnapshotDamagedError, match="was not signed"):
        job.state_dict()


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.unseen = nn.LazyLinear(2), nn.LazyLinear(2)


def shapes_one(model, both):
    model.seen(torch.ones(1, 3)).sum().backward()
    if both:
        model.unseen(torch.ones(1, 3))
    return "value"


@pytest.mark.nightly
def test_models_that_cannot_come_back_say_why(jobs):
    jobs += [kd.launch(shapes_one, Lazy(), False, number_of_processes=1)]
    with pytest.warns(KaleDistWarning, match="did not come back, because unseen.weight is a UninitializedParameter"):
        assert jobs[0].result() == "value"
    with pytest.warns(KaleDistWarning), pytest.raises(ResultUnavailableError, match=r"unseen\.weight"):
        jobs[0].state_dict()
    jobs.append(kd.launch(shapes_one, Lazy(), True, number_of_processes=1))
    with pytest.warns(KaleDistWarning, match="seen.weight has no shape yet in the notebook"):
        jobs[1].wait()
    assert jobs[1].state_dict()["seen.weight"].shape == (2, 3)


def divides(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    optimizer = torch.optim.SGD([model[1].weight], lr=0.1)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()


@pytest.mark.nightly
def test_what_was_divided_comes_back_whole_and_only_what_has_changed(jobs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 30_000), nn.Linear(30_000, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    jobs.append(kd.launch(divides, model, number_of_processes=2))
    assert jobs[0].wait(60).state == "succeeded"
    assert same(before, model.state_dict()) == ["1.weight"]
    assert outcome(jobs[0]).stat().st_size < 250_000


def test_a_function_without_models_gives_its_value_and_no_model(jobs, tmp_path):
    jobs.append(kd.launch(lambda: {"a": 1}, number_of_processes=1))
    assert torch.load(jobs[0].save(tmp_path / "value.pt")) == {"a": 1}
    for read in (lambda: jobs[0].model, jobs[0].state_dict):
        with pytest.raises(ResultUnavailableError, match=r"got no model as an argument.*job.result\(\)"):
            read()


# -- folders -----------------------------------------------------------------------------------------------------------


def writes(folder, extra=None):
    """What a trainer leaves: files, a folder in it, an empty file, and a link to a file beside it."""
    inner = pathlib.Path(folder) / "inner"
    if not kd.context().rank:
        inner.mkdir(parents=True)
        (inner / "weights.bin").write_bytes(b"w" * 100_000)
        (inner / "empty").touch()
        (inner.parent / "last").symlink_to(inner / "weights.bin")
        if extra is not None:
            extra(inner)
    return {"folder": kd.Folder(folder), "again": [kd.Folder(str(inner))]}


def files_of(folder):
    paths = [path for path in pathlib.Path(folder).rglob("*") if not path.is_dir()]
    assert not any(path.is_symlink() for path in paths)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def test_a_returned_folder_brings_its_files(jobs, tmp_path):
    jobs.append(kd.launch(writes, tmp_path / "there", number_of_processes=2))
    job = jobs[0]
    first, second = job.results()
    assert second == {"folder": None, "again": [None]}
    found = first["folder"]
    assert files_of(found) == {"inner/weights.bin": 100_000, "inner/empty": 0, "last": 100_000}
    assert files_of(first["again"][0].path) == {"weights.bin": 100_000, "empty": 0}
    assert found.path.is_relative_to(inside(job).files.folder)
    saved = found.save(tmp_path / "here")
    assert (saved, files_of(saved)) == (tmp_path / "here", files_of(found))
    with pytest.raises(ConfigError, match=r"path: .*File exists.*does not exist yet"):
        found.save(saved)
    # Each process that reads the result has the same files, which are the user's own.
    (found.path / "last").write_text("edited")
    said = in_new_process(f"print(kd.attach({job.ref!r}).result()['folder'].path)")
    assert said == str(found.path)
    assert (found.path / "last").read_text() == "edited"
    shutil.rmtree(found.path)
    assert in_new_process(f"print(kd.attach({job.ref!r}).result()['folder'].path)") == said
    assert files_of(found) == files_of(saved)
    returned = inside(job).files.folder / "returned"
    for path in (returned, *returned.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def name_themselves(parent, *names):
    for name in names:
        folder = pathlib.Path(parent, name)
        folder.mkdir(parents=True)
        (folder / "name").write_text(name)
    return [kd.Folder(pathlib.Path(parent, name)) for name in names]


@pytest.mark.nightly
def test_folders_of_all_names_come_back_apart(jobs, tmp_path):
    names = ["step-2", "step", "inner/step", "x" * 255]
    jobs.append(kd.launch(name_themselves, tmp_path, *names, number_of_processes=1))
    found = jobs[0].result()
    assert [(folder.path / "name").read_text() for folder in found] == names
    assert [folder.path.name for folder in found] == ["step-2", "step", "step", "x" * 255]


class CutsLog:
    """Writes a log anew when it is sent, after the folder and before the outcome is written."""

    def __init__(self, log):
        self.log = log

    def __reduce__(self):
        os.truncate(self.log, 0)
        return str, ()


def logs(folder):
    (folder / "log").write_text("line\n" * 10_000)
    with (folder / "large").open("wb") as file:
        file.truncate(20 << 20)
    return kd.Folder(folder), CutsLog(folder / "log")


@pytest.mark.nightly
def test_a_log_that_is_cut_meanwhile_does_not_cost_the_result(jobs, tmp_path):
    jobs.append(kd.launch(logs, tmp_path, number_of_processes=1))
    assert files_of(jobs[0].result()[0]) == {"log": 50_000, "large": 20 << 20}


def test_folders_that_cannot_be_written_say_where(jobs, tmp_path):
    jobs.append(kd.launch(name_themselves, tmp_path, "out", number_of_processes=1))
    assert jobs[0].exception() is None
    in_the_way = inside(jobs[0]).files.folder / "returned"
    in_the_way.touch()
    with pytest.raises(StoreError, match=r"could not be written to .*/returned/.*/out: File exists\. Mend that"):
        jobs[0].result()
    in_the_way.unlink()
    assert files_of(jobs[0].result()[0]) == {"name": 3}


def test_a_folder_is_fetched_as_a_folder(jobs, tmp_path, capsys, monkeypatch):
    jobs.append(kd.launch(lambda folder: writes(folder)["folder"], kd.Folder(tmp_path / "out"), number_of_processes=1))
    jobs[0].result()
    monkeypatch.chdir(tmp_path)
    assert main(["fetch", jobs[0].ref, "-o", "adapter"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'adapter'}\n"
    assert files_of("adapter") == files_of(jobs[0].result())
    with pytest.raises(ConfigError, match=r"adapter \(File exists\).*does not exist yet, such as adapter"):
        jobs[0].save("adapter")


@pytest.mark.parametrize("model", [None, nn.Linear(1, 1)])
def test_a_file_of_a_value_with_folders_in_it_is_refused(jobs, tmp_path, capsys, model):
    jobs.append(kd.launch(lambda folder, _: ({"f": [kd.Folder(folder)]}, 1), tmp_path, model, number_of_processes=1))
    refused = r"Rank 0 of .* returned a value with folders in it.*with \.save\(path\), and the rest by yourself"
    with pytest.raises(ResultUnavailableError, match=refused):
        jobs[0].save(tmp_path / "result.pt", value=model is not None)
    assert main(["fetch", jobs[0].ref, "--value", "-o", str(tmp_path / "result.pt")])
    assert "Save each folder of job.result() with .save(path)" in capsys.readouterr().err
    assert not (tmp_path / "result.pt").exists()


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x"])
def test_files_stay_in_their_folder(tmp_path, name):
    with pytest.raises(SnapshotDamagedError, match="a file outside of it"):
        folders.unpack(tmp_path / "a" / "b", {"good": memoryview(b"1"), name: memoryview(b"2")})
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_of_two_processes_that_read_at_once_the_first_writes(tmp_path):
    class Slow(dict):
        def items(self):
            folders.unpack(tmp_path / "out", {"x": memoryview(b"first")})
            return super().items()

    found = folders.unpack(tmp_path / "out", Slow(x=memoryview(b"second")))
    assert (found.path / "x").read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [found.path]


def makes_odd_files(folder):
    for number, target in enumerate(("/etc/hostname", folder / "nothing", folder.parent, ".", "link3", "link5")):
        (folder / f"link{number}").symlink_to(target)
    os.mkfifo(folder / "pipe")


@pytest.mark.nightly
def test_odd_files_stay_and_the_log_says_so(jobs, tmp_path):
    jobs.append(kd.launch(writes, tmp_path / "there", makes_odd_files, number_of_processes=1))
    assert files_of(jobs[0].result()["folder"]) == {"inner/weights.bin": 100_000, "inner/empty": 0, "last": 100_000}
    said = [line.text for line in jobs[0].logs() if "Left out" in line.text]
    assert re.fullmatch(
        rf"Only files.* come back of {tmp_path}/there. Left out: 7, first {tmp_path}/there/inner/(link|pipe).*", said[0]
    )


def give_up_what_root_can():
    """Root reads what it may not."""
    ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def cannot_be_read(folder):
    (folder / "x").touch(mode=0)
    give_up_what_root_can()


def cannot_be_looked_into(folder):
    (folder / "closed").mkdir(mode=0)
    give_up_what_root_can()


def is_large(folder):
    with (folder / "x").open("wb") as file:
        file.truncate(5 << 30)


def is_gone(folder):
    shutil.rmtree(folder.parent)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (cannot_be_read, r"ConfigError: Folder: .*/inner/x cannot be read \(PermissionError\)"),
        (cannot_be_looked_into, r"ConfigError: Folder: .*/inner/closed cannot be read \(PermissionError\)"),
        (is_large, r"4 files of 5\.4 GB together.*volumes="), (is_gone, r"rank 0 sees no folder .*there"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_come_back_is_refused(jobs, tmp_path, extra, said):
    jobs.append(kd.launch(writes, tmp_path / "there", extra, number_of_processes=1))
    with pytest.raises(JobFailedError, match=said):
        jobs[0].result()


def shards(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    whole = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    whole(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return "value"


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_shards_of_fsdp_1_are_not_taken_for_the_weights(jobs):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    before = copy.deepcopy(model.state_dict())
    jobs.append(kd.launch(shards, model, number_of_processes=2))
    with pytest.warns(KaleDistWarning, match="divided over ranks by FSDP 1"):
        assert jobs[0].result() == "value"
    assert not same(model.state_dict(), before)
    with pytest.raises(ResultUnavailableError, match=r"job.save\(value=True\) writes it"):
        jobs[0].save("model.pt")


class Extra(nn.Linear):
    """Has a tensor that no parameter and no buffer is."""

    def get_extra_state(self):
        return torch.ones(2)

    def set_extra_state(self, state):
        pass


class Raising(nn.Linear):
    def state_dict(self, *_, **__):
        raise RuntimeError("not here")


def predicts(model):
    with torch.no_grad():
        return model(torch.ones(1, 2)).shape[1]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [Extra, Raising, "quantised"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")
def test_an_evaluation_leaves_a_model_as_it_is_whatever_it_is_made_of(jobs, kind):
    model = nn.Sequential(nn.Linear(2, 3)) if kind == "quantised" else kind(2, 3)
    if kind == "quantised":
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    jobs.append(kd.launch(predicts, model, number_of_processes=1))
    if kind is Extra:
        nn.init.constant_(model.weight, 7.0)
    assert jobs[0].result() == 3
    if kind is Extra:
        assert (model.weight == 7).all()


@pytest.mark.nightly
def test_an_expanded_buffer_is_no_half_loaded_model(jobs):
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.ones(1).expand(4))
    before = model.weight.detach().clone()
    jobs.append(kd.launch(adds_one, model, number_of_processes=1))
    with pytest.warns(KaleDistWarning, match="which is as it was: wide is expanded"):
        jobs[0].wait()
    assert torch.equal(model.weight, before)
    assert torch.equal(jobs[0].state_dict()["weight"], before + 1)


def adds_one(model):
    model.weight.data.add_(1)


def test_a_checkpoint_of_a_function_is_refused_at_once(jobs, tmp_path):
    jobs.append(kd.launch(time.sleep, 600, number_of_processes=1))
    with pytest.raises(ResultUnavailableError, match="was not started by distribute"):
        jobs[0].save(tmp_path / "model.pt", partial=True)
    jobs[0].cancel()


class Loss(nn.Module):
    """Holds the model, as those of sentence-transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def wraps(model, loss):
    loss.model = nn.parallel.DistributedDataParallel(model)
    loss.model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1)


@pytest.mark.nightly
def test_a_part_in_ddp_comes_back_by_its_own_names(jobs):
    model = nn.Linear(2, 2)
    loss, before = Loss(model), model.weight.detach().clone()
    jobs.append(kd.launch(wraps, model, loss, number_of_processes=2))
    jobs[0].wait()
    assert torch.equal(model.weight, before + 1)
    assert loss.model is model
