"""Other people's trainers in launched functions and live ranks, as their own quick starts have them."""

import copy
import importlib.metadata
import pickle
import sys
import types

import pytest
import torch

import kale_dist as kd
from kale_dist.errors import JobFailedError, NotSerializableError, SnapshotError
from kale_dist.trackers import TensorBoard

nightly = pytest.mark.nightly

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

ROWS = [{"input_ids": row, "labels": row} for row in torch.randint(0, 40, (64, 12), generator=torch.manual_seed(1))]
CELLS = """
def train(model, args):
    one = transformers.Trainer(model=model, args=args, train_dataset=ROWS)
    one.train()
    return args.world_size, args.process_index, args.n_gpu

def train_with_global(model):
    return train(model, training_args)

def makes_closure(args):
    return lambda model: train(model, args)

def reads_trainer():
    trainer.train()

def reads_it_elsewhere():
    reads_trainer()

def reads_accelerator():
    return accelerator.num_processes

def makes_accelerator():
    global accelerator
    accelerator = accelerate.Accelerator(cpu=True)
    return reads_accelerator()
"""


@pytest.fixture
def notebook():
    """The globals of a notebook."""
    names = {"__name__": "__main__", "transformers": transformers, "accelerate": accelerate, "ROWS": ROWS}
    exec(CELLS, names)
    return types.SimpleNamespace(names=names, **{name: one for name, one in names.items() if name[0] != "_"})


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **without)).double()


def made(folder, batch, **more):
    """Arguments as a cell makes them."""
    plain = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "seed": 3}
    settings = {"num_train_epochs": 2, "optim": "sgd", "learning_rate": 0.5, "logging_steps": 1, **plain, **more}
    return transformers.TrainingArguments(str(folder), per_device_train_batch_size=batch, **settings)


def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))


def values_of(job, source, name):
    return [row[name] for row in job.metrics if row["source"] == source and name in row]


def last_progress(job):
    return [one.progress for one in job.status.replicas]


@pytest.fixture
def of_one_process(notebook, model, tmp_path):
    """The model that one process trains, with the batch of both ranks."""
    trained = copy.deepcopy(model)
    notebook.train(trained, made(tmp_path, 16))
    assert distance(model, trained) > 0.01
    return trained


@pytest.mark.parametrize("way", ["argument", *(pytest.param(one, marks=nightly) for one in ("global", "closure"))])
def test_arguments_of_the_notebook_count_the_ranks(notebook, model, of_one_process, tmp_path, jobs, way):
    args = notebook.names["training_args"] = made(tmp_path, 8)
    ways = {
        "argument": (notebook.train, args),
        "global": (notebook.train_with_global,),
        "closure": (notebook.makes_closure(args),),
    }
    function, *more = ways[way]
    here = copy.deepcopy(model)
    jobs.append(kd.launch(function, here, *more, number_of_processes=2))
    assert jobs[0].results(120) == [(2, 0, 0), (2, 1, 0)]
    assert distance(here, of_one_process) < 1e-12
    losses = values_of(jobs[0], "train", "loss")
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert [(one.epoch, one.epochs, one.share) for one in last_progress(jobs[0])] == [(2, 2, 1)] * 2
    # Those of the notebook are as they were.
    assert (args.world_size, args.process_index) == (1, 0)


@nightly
def test_arguments_of_the_notebook_count_live_ranks(model, notebook, of_one_process, tmp_path, monkeypatch):
    here = notebook.names["trainer"] = transformers.Trainer(model=copy.deepcopy(model), args=made(tmp_path, 8))
    for name in ("transformers", "ROWS"):
        monkeypatch.setattr(f"__main__.{name}", notebook.names[name], raising=False)
    monkeypatch.setattr("__main__.net", copy.deepcopy(model), raising=False)
    monkeypatch.setattr("__main__.args", made(tmp_path, 8), raising=False)
    monkeypatch.setattr("__main__.trainer", here, raising=False)
    with kd.live(2, threads=1) as live:
        live.run("trainer = transformers.Trainer(model=net, args=args, train_dataset=ROWS)\ntrainer.train()")
        assert live.pull("(args.world_size, args.process_index)") == [(2, 0), (2, 1)]
        for trained in live.pull("[p.detach() for p in net.parameters()]"):
            assert max((a - b).abs().max() for a, b in zip(trained, of_one_process.parameters(), strict=True)) < 1e-12
        # Changed ones take the place of those before, and leave the ranks' trainer whole.
        sys.modules["__main__"].args.learning_rate = 0.25
        assert repr(live.run("args.learning_rate")) == "ranks 0-1: 0.25"
        live.run("trainer.train()")
    live.delete()


@nightly
def test_reading_arguments_disturbs_no_accelerator_and_copies_are_as_good(tmp_path, jobs):
    args, others = made(tmp_path, 8), made(tmp_path, 8, bf16=True)

    def reads(args, others):
        here = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        copies = copy.deepcopy(args), copy.copy(args), pickle.loads(pickle.dumps(args))
        assert all(type(one) is transformers.TrainingArguments for one in (args, *copies))
        read = [one.learning_rate for one in copies], [one.world_size for one in (*copies, args, others)]
        here.prepare(torch.nn.Linear(1, 1))
        return (*read, here.num_processes, here.mixed_precision)

    jobs.append(kd.launch(reads, args, others, number_of_processes=2))
    assert jobs[0].results(60) == [([0.5] * 3, [2] * 5, 2, "bf16")] * 2


class Reads(torch.utils.data.Dataset):
    """A dataset whose DataLoader's worker is the first to ask for the rank."""

    def __init__(self, args):
        self.args = args

    def __len__(self):
        return 2

    def __getitem__(self, _):
        return self.args.process_index, self.args.learning_rate


@nightly
def test_a_worker_of_a_data_loader_has_what_its_rank_knew_or_says_what_to_do(tmp_path, jobs):
    args = made(tmp_path, 8)

    def load(args, first):
        if first:
            accelerate.PartialState(cpu=True)
        loader = torch.utils.data.DataLoader(Reads(args), num_workers=1, multiprocessing_context="fork")
        return [index.item() for index, _ in loader]

    jobs += [kd.launch(load, args, first, number_of_processes=2) for first in (True, False)]
    assert jobs[0].results(60) == [[0, 0], [1, 1]]
    with pytest.raises(JobFailedError, match=r"Read what you need of them, such as args.process_index, in the rank"):
        jobs[1].result(60)


@nightly
def test_live_ranks_train_in_one_precision_and_then_in_another(model, tmp_path, monkeypatch):
    names = {"transformers": transformers, "ROWS": ROWS, "net": copy.deepcopy(model).float()}
    names |= {"args": made(tmp_path, 8), "others": made(tmp_path, 8, bf16=True)}
    for name, value in names.items():
        monkeypatch.setattr(f"__main__.{name}", value, raising=False)
    with kd.live(2, threads=1) as live:
        for name in ("args", "others"):
            live.run(f"trainer = transformers.Trainer(model=net, args={name}, train_dataset=ROWS)\ntrainer.train()")
            assert live.pull("trainer.accelerator.mixed_precision") == ["bf16" if name == "others" else "no"] * 2
    live.delete()


@nightly
def test_a_trainer_that_comes_back_joins_no_group(model, tmp_path, jobs):
    args = made(tmp_path, 8)
    jobs.append(kd.launch(lambda: (args, args.world_size), number_of_processes=2))
    back, world = jobs[0].result(120)
    assert world == 2
    assert not torch.distributed.is_initialized()
    assert (back.world_size, back.learning_rate) == (1, 0.5)


@nightly
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_numbers_that_were_counted_for_one_process_are_refused(tmp_path, jobs):
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(SnapshotError, match=r"GRPOConfig that was made in the notebook.*inside the function"):
        kd.launch(lambda: config.generation_batch_size, number_of_processes=2)
    jobs.append(kd.launch(lambda: config.generation_batch_size, number_of_processes=1))
    assert jobs[0].result(60) == config.generation_batch_size


@nightly
def test_what_is_bound_to_the_notebook_is_refused_with_what_to_do(notebook, model, tmp_path, jobs):
    one = transformers.Trainer(model=copy.deepcopy(model), args=made(tmp_path, 8), train_dataset=ROWS)
    notebook.names["trainer"] = one
    for function in (one.train, notebook.reads_trainer, notebook.reads_it_elsewhere):
        with pytest.raises(NotSerializableError, match="Make the Trainer inside the function"):
            kd.launch(function, number_of_processes=2)
    here = notebook.names["accelerator"] = accelerate.Accelerator(cpu=True)
    with pytest.raises(NotSerializableError, match=r"(?s)global accelerator.*Make it inside the function"):
        kd.launch(notebook.reads_accelerator, number_of_processes=2)
    # One that the function makes itself is another, for what it calls, too.
    jobs.append(kd.launch(notebook.makes_accelerator, number_of_processes=2))
    assert jobs[0].results(60) == [2, 2]
    loader = here.prepare(torch.utils.data.DataLoader(ROWS))
    for held in (loader, (1, loader), {"a": [loader]}):
        with pytest.raises(NotSerializableError, match=r"(?s)obj.*as they were before prepare\(\)"):
            kd.launch(len, held, number_of_processes=2)


# -- what is seen while they train -------------------------------------------------------------------------------------


def trains_twice(model, folder):
    for _ in range(2):
        args = made(folder, 4, logging_steps=2, eval_strategy="epoch", num_train_epochs=3)
        transformers.Trainer(model=model, args=args, train_dataset=ROWS, eval_dataset=ROWS[:16]).train()


@nightly
def test_a_trainer_is_seen_without_a_line(model, tmp_path, jobs):
    jobs.append(kd.launch(trains_twice, model, tmp_path, number_of_processes=2))
    job = jobs[0]
    assert job.wait(120).state == "succeeded"
    for told in last_progress(job):
        # The last that they did is an evaluation, of 16 rows.
        assert (told.training, told.phase, told.epoch, told.epochs) == (2, "eval", 3, 3)
        assert told.share == 1
    for suffix in ("", " 2"):
        rows = [row for row in job.metrics if row["source"] == f"train{suffix}" and "loss" in row]
        assert [row["step"] for row in rows] == list(range(2, 25, 2))
        assert all(row["rank"] is None and row["learning_rate"] >= 0 for row in rows)
        evaluated = [row for row in job.metrics if row["source"] == f"eval{suffix}"]
        assert [row["step"] for row in evaluated] == [8, 16, 24]
        assert all(row.keys() >= {"loss"} for row in evaluated)
    (first, second) = [row for row in job.metrics if "samples_per_s" in row]
    assert first["step"] == second["step"] == 24
    assert not [line.text for line in job.logs() if "cannot be shown" in line.text]


def trains_with(model, folder, change):
    one = transformers.Trainer(model=model, args=made(folder, 8), train_dataset=ROWS)
    kinds = [type(each).__name__ for each in one.callback_handler.callbacks]
    if change == "remove":
        one.remove_callback(next(each for each in one.callback_handler.callbacks if "KaleDist" in type(each).__name__))
    one.train()
    return kinds.count("KaleDistCallback")


@nightly
@pytest.mark.parametrize("change", ["variable", "remove"])
def test_what_is_switched_off_is_not_seen(model, tmp_path, jobs, change):
    environment = {"KALE_DIST_TRAINERS": "0"} if change == "variable" else {}
    jobs.append(kd.launch(trains_with, model, tmp_path, change, number_of_processes=2, environment=environment))
    assert jobs[0].results(120) == [int(change == "remove")] * 2
    assert last_progress(jobs[0]) == [None, None]
    assert jobs[0].metrics == []


def fits(model, folder):
    import lightning

    class Fits(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
            self.log("value_loss", loss)
            self.log("accuracy", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch, _):
            loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
            self.log_dict({"val_loss": loss, "plain": loss}, sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", enable_progress_bar=False, log_every_n_steps=2,
        logger=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    loaders = [torch.utils.data.DataLoader(rows, batch_size=4) for rows in (ROWS, ROWS[:16])]
    trainer.fit(Fits(), *loaders)
    found = importlib.metadata.entry_points(group="lightning.pytorch.callbacks_factory")
    return [point.name for point in found], importlib.metadata.version("torch") == str(torch.__version__)


@nightly
def test_lightning_is_seen_without_a_line(model, tmp_path, jobs):
    pytest.importorskip("lightning")
    jobs.append(kd.launch(fits, model, tmp_path, number_of_processes=2))
    assert jobs[0].results(120) == [(["kale_dist"], True)] * 2
    for told in last_progress(jobs[0]):
        assert (told.phase, told.epoch, told.epochs, told.share) == ("eval", 2, 2, 1)
    rows = [row for row in jobs[0].metrics if row["source"] == "train" and "value_loss" in row]
    assert [row["step"] for row in rows] == list(range(2, 17, 2))
    # What is averaged over an epoch comes at its end, of the last one, too.
    assert len(values_of(jobs[0], "train", "accuracy")) == len(values_of(jobs[0], "eval", "plain")) == 2
    assert len(values_of(jobs[0], "eval", "loss")) == 2


def accelerates(model):
    from tqdm.auto import tqdm

    here = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = here.prepare(model, optimizer, torch.utils.data.DataLoader(ROWS, batch_size=4))
    for step, batch in enumerate(tqdm(loader, desc="epoch 1"), 1):
        optimizer.zero_grad()
        loss = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        here.backward(loss)
        optimizer.step()
        here.log({"train_loss": loss.item(), "name": "a word"}, step=step)


@nightly
def test_a_loop_of_accelerates_is_seen_by_its_log_and_its_bar(model, jobs):
    jobs.append(kd.launch(accelerates, model, number_of_processes=2))
    assert jobs[0].wait(120).state == "succeeded"
    assert len(values_of(jobs[0], "train", "loss")) == 8
    for told in last_progress(jobs[0]):
        assert (told.phase, told.epochs, told.step, told.steps) == ("bar epoch 1", 0, 8, 8)


@nightly
def test_a_training_is_forgotten_with_its_cell(model, tmp_path, monkeypatch):
    names = {"transformers": transformers, "ROWS": ROWS, "net": copy.deepcopy(model), "args": made(tmp_path, 8)}
    for name, value in names.items():
        monkeypatch.setattr(f"__main__.{name}", value, raising=False)
    with kd.live(2, threads=1) as live:
        for _ in range(2):
            live.run("trainer = transformers.Trainer(model=net, args=args, train_dataset=ROWS)\ntrainer.train()")
            assert [(one.progress.training, one.progress.step) for one in live.status.replicas] == [(0, 0)] * 2
        # Both began as the first of their cells.
        assert {row["source"] for row in live.metrics} == {"train"}
    live.delete()


@nightly
def test_our_callback_goes_with_a_trainer_into_other_processes(model, tmp_path, jobs):
    def sent(model, args):
        one = transformers.Trainer(model=model, args=args, train_dataset=ROWS)
        back = pickle.loads(pickle.dumps(one.callback_handler.callbacks))
        return [type(each).__name__ for each in back].count("KaleDistCallback")

    jobs.append(kd.launch(sent, model, made(tmp_path, 8), number_of_processes=2))
    assert jobs[0].results(60) == [1, 1]


def tracks_itself(model, folder, reported):
    args = made(folder, 8, report_to=reported, logging_steps=2)
    transformers.Trainer(model=model, args=args, train_dataset=ROWS).train()


@nightly
@pytest.mark.parametrize("reported", ["tensorboard", "none"])
def test_what_a_trainer_sends_to_a_tracker_itself_is_not_sent_twice(model, tmp_path, jobs, reported):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track = TensorBoard(folder=str(tmp_path / "ours"))
    jobs.append(kd.launch(tracks_itself, model, tmp_path / "theirs", reported, number_of_processes=2, track=track))
    assert jobs[0].wait(120).state == "succeeded"
    (written,) = {path.parent for path in (tmp_path / "ours").rglob("events.*")}
    events = event_accumulator.EventAccumulator(str(written))
    events.Reload()
    assert ("train/loss" in events.Tags()["scalars"]) == (reported == "none")
    assert len(values_of(jobs[0], "train", "loss")) == 4
