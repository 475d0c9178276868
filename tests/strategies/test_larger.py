"""Models that the ranks make: equal to one process, in folders of parts, continued by another number of ranks."""

import functools
import os
import signal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import ConfigError, ResultUnavailableError
from kale_dist.trackers import TensorBoard

pytestmark = pytest.mark.filterwarnings("ignore:.*processes share:UserWarning")


class Net(nn.Module):
    """Units, a buffer that no state has, and weights that the constructor sets again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.arange(1.0, 7.0) / 6, persistent=False)
        nn.init.trunc_normal_(self.head.weight, std=0.3)

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def trained(ranks, strategy, *, model=Net, epochs=2, batch=48, **options):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator))
    loader = DataLoader(data, batch_size=batch // ranks)
    options = {"seed": 7, "epochs": epochs, "number_of_processes": ranks, "threads": 1, "strategy": strategy, **options}
    scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)  # noqa: E731
    return kd.distribute(model, loader, nn.CrossEntropyLoss(), adam, scheduler=scheduler, **options)


def assert_equal(job, other):
    expected = other.model.state_dict()
    assert job.model.state_dict().keys() == expected.keys()
    for name, value in job.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)


class Keeping(TensorBoard):
    """A tracker that stores models."""

    model = True


def test_ranks_that_make_the_model_learn_what_one_process_learns(tmp_path, capsys):
    one = trained(1, "ddp", epochs=3)
    tracker = Keeping(folder=str(tmp_path / "runs"))
    whole, parts = (
        trained(2, "ddp", epochs=3),
        trained(2, kd.strategies.FSDP(units=("layers.*",)), save_to=tmp_path / "net", track=tracker),
    )
    assert "tensorboard will not get the model" in capsys.readouterr().err
    assert_equal(whole, one)
    assert type(parts.model) is Net
    assert parts.result().parts == str(tmp_path / "net")
    assert parts.result().model_state is None
    for whole_state in (parts.state_dict, lambda: parts.optimizer):
        with pytest.raises(ResultUnavailableError):
            whole_state()
    assert whole.optimizer.state
    # Another number of ranks continues, from the job and from its folder alike.
    for origin, ranks in ((parts, 3), (next((tmp_path / "net.checkpoints").iterdir()), 1)):
        assert_equal(trained(ranks, "fsdp", epochs=3, resume_from=origin), one)
    assert kd.attach(parts.ref).model.head.weight.equal(parts.model.head.weight)
    # And its weights are what another training begins with.
    assert_equal(trained(2, "fsdp", model=kd.pretrained(Net, tmp_path / "net"), epochs=1, batch=12), trained(
        1, "ddp", model=kd.pretrained(Net, tmp_path / "net"), epochs=1, batch=12
    ))  # fmt: skip


def test_weights_are_read_from_safetensors(tmp_path):
    torch.manual_seed(5)
    given = Net()
    save_file(given.state_dict(), tmp_path / "model.safetensors")
    frozen = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
    loader = DataLoader(TensorDataset(torch.ones(4, 6), torch.zeros(4, dtype=torch.long)), batch_size=2)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        model = kd.pretrained(Net, path)
        job = kd.distribute(
            model, loader, nn.CrossEntropyLoss(), frozen, strategy="fsdp", number_of_processes=2, threads=1
        )
        for name, value in job.model.state_dict().items():
            assert value.equal(given.state_dict()[name]), name


@pytest.mark.nightly
def test_a_rank_that_is_lost_does_not_lose_the_parts(tmp_path):
    mark = tmp_path / "lost"

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        if optimizer.param_groups[0]["lr"] < 0.01 and kd.context().rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    job = trained(2, "fsdp", train_step=step, max_restarts=1)
    job.wait()
    assert mark.exists()
    assert_equal(job, trained(1, "ddp"))


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("optimizer", {"optimizer": None}),
        ("strategy", {"strategy": "pipeline"}),
        ("callbacks", {"strategy": "fsdp", "callbacks": [kd.callbacks.EMA()]}),
        ("save_to", {"strategy": "fsdp", "on": kd.Docker(image="busybox")}),
        ("save_to", {"strategy": "fsdp", "save_to": "s3://bucket/net"}),
        ("scheduler", {"scheduler": torch.optim.lr_scheduler.StepLR(adam([nn.Parameter(torch.ones(1))]), 1)}),
    ],
)
def test_what_is_not_built_is_refused_at_the_call(argument, changed, kept_words):
    loader = DataLoader(TensorDataset(torch.ones(4, 6), torch.zeros(4, dtype=torch.long)), batch_size=2)
    with pytest.raises(ConfigError) as caught:
        kd.render(
            **{
                "model": functools.partial(Net),
                "train_data_loader": loader,
                "criterion": nn.CrossEntropyLoss(),
                "optimizer": adam,
                **changed,
            }
        )
    assert caught.value.argument == argument
    kept_words(str(caught.value))
