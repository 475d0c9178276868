"""Which checkpoint of another package's trainer a function resumes from."""

import os

import pytest
import torch

import kale_dist as kd
from kale_dist.wire import context


@pytest.fixture
def ranks(monkeypatch):
    """Sets how many ranks the job has that this process is rank 0 of."""

    def be(world_size):
        monkeypatch.setattr(context, "_current", context.Context(world_size=world_size, in_job=True))

    return be


def of_transformers(folder, step, ranks=2, state='{"global_step": 1}'):
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    for rank in range(ranks):
        torch.save({"cpu": torch.get_rng_state()}, made / (f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"))
    if state is not None:
        (made / "trainer_state.json").write_text(state)
    return made


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_there_is_none_in_a_folder_that_is_not_there_or_has_none(tmp_path):
    assert kd.last_checkpoint(tmp_path / "nowhere") is None
    assert kd.last_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    (tmp_path / "runs").mkdir()
    assert kd.last_checkpoint(str(tmp_path)) is None


def test_the_newest_is_that_of_the_most_steps(tmp_path, ranks):
    ranks(2)
    for step in (90, 100, 9):
        of_transformers(tmp_path, step)
    assert kd.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")


def test_what_is_unfinished_is_passed_over(tmp_path, ranks):
    ranks(2)
    whole = of_transformers(tmp_path, 10)
    (of_transformers(tmp_path, 20) / "checkpoint-is-incomplete.txt").touch()
    of_transformers(tmp_path, 30, state=None)
    of_transformers(tmp_path, 40, state='{"global_')
    (of_transformers(tmp_path, 50) / "rng_state_1.pth").unlink()
    cut(of_transformers(tmp_path, 60) / "rng_state_1.pth")
    assert kd.last_checkpoint(tmp_path) == str(whole)


def test_other_numbers_of_ranks_are_no_reason_to_go_back(tmp_path, ranks):
    ranks(2)
    of_transformers(tmp_path, 10, ranks=4)
    shrunk = of_transformers(tmp_path, 20, ranks=2)
    assert kd.last_checkpoint(tmp_path) == str(shrunk)
    ranks(8)
    of_transformers(tmp_path, 30, ranks=2)
    assert kd.last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-30")


def test_the_only_one_is_taken_although_a_random_state_is_missing(tmp_path, ranks):
    """As with save_total_limit=1, whose Trainer removes the one before: training on is worth more than the dropout of a rank."""
    ranks(4)
    only = of_transformers(tmp_path, 10, ranks=3)
    assert kd.last_checkpoint(tmp_path) == str(only)


def test_weights_alone_have_no_random_states(tmp_path, ranks):
    ranks(2)
    of_transformers(tmp_path, 10, ranks=0)
    newest = of_transformers(tmp_path, 20, ranks=0)
    assert kd.last_checkpoint(tmp_path) == str(newest)


def test_of_lightning_the_newest_file_that_can_be_read(tmp_path):
    for age_s, name in ((300, "epoch=0.ckpt"), (200, "epoch=1.ckpt"), (100, "last.ckpt")):
        torch.save({"state_dict": {}}, tmp_path / name)
        os.utime(tmp_path / name, (1e9 - age_s, 1e9 - age_s))
    assert kd.last_checkpoint(tmp_path) == str(tmp_path / "last.ckpt")
    cut(tmp_path / "last.ckpt")
    assert kd.last_checkpoint(tmp_path) == str(tmp_path / "epoch=1.ckpt")
    (tmp_path / "parts.ckpt").mkdir()
    os.utime(tmp_path / "epoch=1.ckpt", (1e9 - 200, 1e9 - 200))
    assert kd.last_checkpoint(tmp_path) == str(tmp_path / "epoch=1.ckpt")
    torch.save({}, tmp_path / "parts.ckpt" / "meta.pt")
    assert kd.last_checkpoint(tmp_path) == str(tmp_path / "parts.ckpt")


def seen_by_each(folder):
    here = kd.context()
    # As a volume that shows another machine's files only after a while.
    return kd.last_checkpoint(folder if here.rank == 0 else f"{folder}/late"), kd.last_checkpoint(f"{folder}/none")


def test_all_ranks_get_the_answer_of_rank_0(tmp_path):
    of_transformers(tmp_path, 10)
    job = kd.launch(seen_by_each, str(tmp_path), number_of_processes=2)
    assert job.results() == [(str(tmp_path / "checkpoint-10"), None)] * 2
