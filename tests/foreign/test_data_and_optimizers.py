"""Datasets, optimizers and strategies of other packages in calls, as their own documentation has them."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import JobFailedError
from kale_dist.worker.training import supervised

datasets = pytest.importorskip("datasets")


def made():
    torch.manual_seed(1)
    return nn.Linear(4, 2).double()


def call(loader, optimizer=None, model=None, **options):
    model = model or made()
    return kd.distribute(
        model, loader, nn.CrossEntropyLoss(), optimizer or torch.optim.SGD(model.parameters(), lr=0.1),
        number_of_processes=2, threads=1, on="local", **options,
    )  # fmt: skip


def sees_samples(model, loader, criterion, optimizer, device, args):
    seen = [int(i) for batch in loader for i in batch["i"]]
    print("saw", seen, hasattr(loader.dataset, "__len__"))


def test_a_dataset_in_the_place_of_a_loader_is_named(refusal):
    refusal(lambda: call(datasets.Dataset.from_dict({"x": [[1.0] * 4] * 8}).with_format("torch")))


@pytest.mark.parametrize("shard", [True, False])
def test_a_stream_that_is_one_ranks_part_is_refused(shard, refusal):
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_dict({"i": list(range(16))}).to_iterable_dataset(num_shards=2)
    refusal(lambda: call(DataLoader(split_dataset_by_node(stream, rank=0, world_size=2), 4), shard=shard))


def splits_in_the_rank(model, loader, criterion, optimizer, device, args):
    from datasets.distributed import split_dataset_by_node

    here, stream = kd.context(), loader.dataset
    part = split_dataset_by_node(stream, rank=here.rank, world_size=here.world_size)
    print("saw", [sample["i"] for sample in part])


@pytest.mark.parametrize(
    ("step", "shard"), [(sees_samples, True), (splits_in_the_rank, False)], ids=["left out", "in the ranks"]
)
def test_both_remedies_give_each_sample_to_one_rank(step, shard):
    stream = datasets.Dataset.from_dict({"i": list(range(16))}).to_iterable_dataset(num_shards=2)
    job = call(DataLoader(stream, 4), train_step=step, shard=shard)
    try:
        job.result()
        lines = [str(line) for line in job.logs() if "saw" in str(line)]
        assert sorted(int(i) for line in lines for i in line.split("saw [")[1].split("]")[0].split(",")) == [*range(16)]
        assert not any("True" in line for line in lines), "a stream without a length has one in the rank"
    finally:
        job.delete()


def test_adafactor_that_computes_its_own_learning_rate_equals_one_process():
    adafactor = pytest.importorskip("transformers.optimization").Adafactor
    data = TensorDataset(torch.randn(32, 4, generator=torch.manual_seed(2)).double(), torch.arange(32) % 2)

    def optimizer(model):
        return adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)

    model, alone = made(), made()
    job = call(DataLoader(data, 4), optimizer(model), model, epochs=2)
    try:
        job.result()
    finally:
        job.delete()
    one = optimizer(alone)
    for _ in range(2):
        supervised.train_epoch(alone, DataLoader(data, 8), nn.CrossEntropyLoss(), one, "cpu", None)
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def fits(strategy):
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Lit(), DataLoader(TensorDataset(torch.randn(16, 4), torch.zeros(16).long()), 4))
    return trainer.world_size


@pytest.mark.nightly
def test_lightnings_strategy_for_notebooks_is_refused_and_the_remedy_trains():
    pytest.importorskip("lightning")
    job = kd.launch(fits, "ddp_notebook", number_of_processes=2, threads=1, on="local", timeout_s=60)
    try:
        with pytest.raises(JobFailedError, match=r"strategy='ddp'"):
            job.result()
    finally:
        job.delete()
    job = kd.launch(fits, "ddp", number_of_processes=2, threads=1, on="local", timeout_s=60)
    try:
        assert job.results() == [2, 2]
    finally:
        job.delete()


def gathers(model, loader, criterion, optimizer, device, args):
    import torch.distributed as dist

    for x, _ in loader:
        everyone = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, x)


def test_a_gather_of_an_uneven_batch_names_drop_last_which_works():
    data = TensorDataset(torch.zeros(13, 4).double(), torch.zeros(13).long())
    job = call(DataLoader(data, 4), train_step=gathers)
    try:
        with pytest.raises(JobFailedError, match="drop_last=True"):
            job.result()
    finally:
        job.delete()
    job = call(DataLoader(data, 4, drop_last=True), train_step=gathers)
    try:
        job.result()
    finally:
        job.delete()


class Lookahead:
    """As one of a package: it wraps an optimizer, and cannot be made again from its state."""

    def __init__(self):
        self.inner = None

    def __setstate__(self, state):
        self.defaults.setdefault("differentiable", False)


def test_an_object_that_cannot_be_sent_is_not_blamed_on_equal_versions():
    with pytest.raises(AttributeError):
        copy.deepcopy(wrapper := Lookahead())
    data = TensorDataset(torch.zeros(8, 4).double(), torch.zeros(8).long())
    job = call(DataLoader(data, 4), train_args={"wrapper": wrapper})
    try:
        with pytest.raises(JobFailedError, match=r"copy\.deepcopy\(\) of an argument") as caught:
            job.result()
        assert "cloudpickle 3" not in str(caught.value)
    finally:
        job.delete()
