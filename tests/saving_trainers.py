"""What ranks run in tests of other people's trainers that save before they are ended. In pods there is no pytest."""

import pathlib
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd

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
    import transformers

    settings = {"max_steps": 120, "save_strategy": "steps", "save_steps": 1000, "logging_steps": 5} | more
    args = transformers.TrainingArguments(
        out,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
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
        max_epochs=3, devices=kd.context().local_world_size, num_nodes=kd.context().world_size // kd.context().local_world_size,
        accelerator="cpu", strategy="ddp", logger=False, enable_progress_bar=False, callbacks=[ModelCheckpoint(dirpath=out)], accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(TensorDataset(XS, YS), batch_size=4), ckpt_path=kd.last_checkpoint(out))
    return trainer.global_step
