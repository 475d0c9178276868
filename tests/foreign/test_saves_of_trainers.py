"""Other people's trainers whose ranks are about to be ended: they save at one step by themselves, and one line resumes from it."""

import _thread
import re
import threading
import time

import pytest
import torch
from saving_trainers import fit, train
from waiting import until

import kale_dist as kd

pytestmark = pytest.mark.nightly

pytest.importorskip("transformers")
pytest.importorskip("lightning")


def cancel_at(job, steps):
    """Cancel a job once its training has taken so many steps; returns the seconds until it has ended."""

    def taken():
        progress = job.status.replicas[0].progress if job.status.replicas else None
        return 0 if progress is None else max(0, progress.epoch - 1) * (progress.steps or 0) + progress.step

    until(lambda: taken() >= steps, told=lambda: job.status)
    began = time.monotonic()
    job.cancel()
    assert job.exception(60) is not None
    return time.monotonic() - began


def text(job):
    return "\n".join(map(str, job.logs()))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.filterwarnings("ignore:.*processes share.*")
def test_a_trainer_goes_on_from_the_step_at_which_it_was_cancelled_and_ends_as_if_it_had_not_been(
    tmp_path, jobs, ranks
):
    where, options = str(tmp_path / "out"), {"number_of_processes": ranks, "threads": 1}
    jobs.append(kd.launch(train, where, **options))
    cancel_at(jobs[0], 30)
    (saved,) = (tmp_path / "out").iterdir()
    assert re.search(rf"Saved .*{saved.name} at step \d+, before the ranks are ended", text(jobs[0]))
    assert len(list(saved.glob("rng_state_*.pth"))) == ranks
    jobs.append(kd.launch(train, where, nap_s=0, **options))
    jobs.append(kd.launch(train, str(tmp_path / "undisturbed"), nap_s=0, **options))
    resumed, undisturbed = jobs[1].result(120), jobs[2].result(120)
    assert text(jobs[1]).count(f"begins at {saved.name}") == ranks
    assert all(map(torch.equal, resumed, undisturbed))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_lightning_goes_on_at_its_step_and_says_that_it_is_not_equal(tmp_path, jobs, accumulate):
    jobs.append(kd.launch(fit, str(tmp_path), accumulate=accumulate, number_of_processes=2, threads=1))
    cancel_at(jobs[0], 70)
    found = re.search(r"Saved .*last.ckpt at step (\d+), before", text(jobs[0]))
    assert int(found[1]) == torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"]
    jobs.append(kd.launch(fit, str(tmp_path), 0, accumulate, number_of_processes=2, threads=1))
    steps = -(-50 // accumulate)
    assert jobs[1].result(120) >= 3 * steps - 1
    assert text(jobs[1]).count("Lightning resumes within an epoch") == 1


def test_who_wants_no_checkpoint_is_ended_at_once(tmp_path, jobs):
    jobs.append(kd.launch(train, str(tmp_path / "out"), save_strategy="no", number_of_processes=2, threads=1))
    assert cancel_at(jobs[0], 10) < 20
    assert not list(tmp_path.glob("out/checkpoint-*"))


def test_who_has_trained_is_not_waited_for(tmp_path, jobs):
    def trains_and_goes_on(out):
        train(out, nap_s=0, max_steps=20)
        time.sleep(600)

    jobs.append(kd.launch(trains_and_goes_on, str(tmp_path / "out"), number_of_processes=2, threads=1))
    while text(jobs[0]).count("has trained") < 2:
        time.sleep(0.1)
    assert cancel_at(jobs[0], 20) < 20
    assert [one.name for one in tmp_path.glob("out/checkpoint-*")] == ["checkpoint-20"]


def test_live_ranks_train_again_after_a_cell_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr("__main__.train", train, raising=False)
    with kd.live(2, threads=1) as live:
        # An import that is interrupted stays broken.
        live.run("from transformers import Trainer")
        for number in range(3):
            threading.Timer(3 + 0.7 * number, _thread.interrupt_main).start()
            with pytest.raises(KeyboardInterrupt):
                live.run(f"train({str(tmp_path / f'{number}')!r}, nap_s=0.05, max_steps=10_000)")
        live.run(f"trained = train({str(tmp_path / 'last')!r}, nap_s=0, max_steps=30)")
        one, other = live.pull("trained")
        assert all(map(torch.equal, one, other))
    live.delete()
