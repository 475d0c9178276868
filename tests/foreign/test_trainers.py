"""Other people's trainers in launched functions and live ranks, as their own quick starts have them."""

import copy
import sys
import types

import pytest
import torch

import kale_dist as kd
from kale_dist.errors import NotSerializableError, SnapshotError

pytestmark = pytest.mark.nightly

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
    return accelerator.num_processes
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


@pytest.fixture
def of_one_process(notebook, model, tmp_path):
    """The model that one process trains, with the batch of both ranks."""
    trained = copy.deepcopy(model)
    notebook.train(trained, made(tmp_path, 16))
    assert distance(model, trained) > 0.01
    return trained


@pytest.mark.parametrize("way", ["argument", "global", "closure"])
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
    # Those of the notebook are as they were.
    assert (args.world_size, args.process_index) == (1, 0)


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


def test_a_trainer_that_comes_back_joins_no_group(model, tmp_path, jobs):
    args = made(tmp_path, 8)
    jobs.append(kd.launch(lambda: (args, args.world_size), number_of_processes=2))
    back, world = jobs[0].result(120)
    assert world == 2
    assert not torch.distributed.is_initialized()
    assert (back.world_size, back.learning_rate) == (1, 0.5)


def test_numbers_that_were_counted_for_one_process_are_refused(tmp_path, jobs):
    config = made(tmp_path, 8)
    # As TRL's GRPOConfig computes it when it is made.
    config.generation_batch_size = 8 * config.world_size
    with pytest.raises(SnapshotError, match=r"TrainingArguments that was made in the notebook.*inside the function"):
        kd.launch(lambda: config.generation_batch_size, number_of_processes=2)
    jobs.append(kd.launch(lambda: config.generation_batch_size, number_of_processes=1))
    assert jobs[0].result(60) == 8


def test_what_is_bound_to_the_notebook_is_refused_with_what_to_do(notebook, model, tmp_path, jobs):
    one = transformers.Trainer(model=copy.deepcopy(model), args=made(tmp_path, 8), train_dataset=ROWS)
    notebook.names["trainer"] = one
    for function in (one.train, notebook.reads_trainer, notebook.reads_it_elsewhere):
        with pytest.raises(NotSerializableError, match="Make the Trainer inside the function"):
            kd.launch(function, number_of_processes=2)
    here = notebook.names["accelerator"] = accelerate.Accelerator(cpu=True)
    with pytest.raises(NotSerializableError, match=r"(?s)global accelerator.*Make it inside the function"):
        kd.launch(notebook.reads_accelerator, number_of_processes=2)
    loader = here.prepare(torch.utils.data.DataLoader(ROWS))
    with pytest.raises(NotSerializableError, match=r"(?s)obj.*before accelerator.prepare\(\)"):
        kd.launch(len, loader, number_of_processes=2)
    # One that the function makes itself is another.
    jobs.append(kd.launch(notebook.makes_accelerator, number_of_processes=2))
    assert jobs[0].results(60) == [2, 2]
