"""Other people's trainers whose ranks are about to be ended: they save at one step by themselves, and one line resumes from it."""

import _thread
import pathlib
import re
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd

pytestmark = pytest.mark.nightly

transformers = pytest.importorskip("transformers")
pytest.importorskip("lightning")

GENERATOR = torch.Generator().manual_seed(1)
XS, YS = torch.randn(400, 4, generator=GENERATOR), torch.randn(400, generator=GENERATOR)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.line, self.drop = nn.Linear(4, 1), nn.Dropout(0.2)

    def forward(self, x, labels=None):
        y = self.line(self.drop(x)).squeeze(-1)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


def train(out, nap_s=0.02, **more):
    settings = {
        "max_steps": 120,
        "save_strategy": "steps",
        "save_steps": 1000,
        "logging_steps": 5,
        "learning_rate": 1e-2,
        **more,
    }
    args = transformers.TrainingArguments(
        out, per_device_train_batch_size=4, report_to="none", disable_tqdm=True, use_cpu=True, **settings
    )

    class Naps(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            time.sleep(nap_s)

    data = [{"x": x, "labels": y} for x, y in zip(XS, YS, strict=True)]
    trainer = transformers.Trainer(Net(), args, train_dataset=data, callbacks=[Naps()])
    last = kd.last_checkpoint(out)
    print("begins at", last and pathlib.Path(last).name, flush=True)
    trainer.train(resume_from_checkpoint=last)
    print("has trained", flush=True)
    return [p.detach().cpu() for p in trainer.model.parameters()]


def fit(out, nap_s=0.02, accumulate=1):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            time.sleep(nap_s)
            return self.net(*batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = pl.Trainer(
        max_epochs=3, devices=kd.context().world_size, accelerator="cpu", strategy="ddp", logger=False,
        enable_progress_bar=False, callbacks=[ModelCheckpoint(dirpath=out)], accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(XS, YS), batch_size=4), ckpt_path=kd.last_checkpoint(out))
    return trainer.global_step


def cancel_at(job, steps):
    """Cancel a job once its training has taken so many steps; returns the seconds until it has ended."""

    def taken():
        progress = job.status.replicas[0].progress if job.status.replicas else None
        return 0 if progress is None else max(0, progress.epoch - 1) * (progress.steps or 0) + progress.step

    deadline = time.monotonic() + 120
    while taken() < steps:
        assert time.monotonic() < deadline, job.status
        time.sleep(0.05)
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
