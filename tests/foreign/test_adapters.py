"""Adapters of PEFT: those that a launched function makes come into the notebook's model, and LoRA after `kd.pretrained`."""

import copy
import subprocess
import sys

import pytest
import quick_starts
import torch
from torch.utils.data import DataLoader, TensorDataset

import kale_dist as kd
from kale_dist.errors import JobFailedError, KaleDistWarning
from kale_dist.job.handle import inside

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*processes share:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]

peft = pytest.importorskip("peft")
pytest.importorskip("trl")

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def tune(model, tokenizer, **options):
    """TRL's quick start, with the base model as an argument; gives the weights to compare with."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list([{"prompt": f"{one} to ", "completion": one[::-1]} for one in quick_starts.LETTERS * 2])
    trainer = SFTTrainer(
        model=model, args=SFTConfig(max_steps=4, **quick_starts.settings()), train_dataset=data,
        processing_class=tokenizer, peft_config=LoraConfig(**LORA, **options),
    )  # fmt: skip
    trainer.train()
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quick_start_trains_the_notebooks_model(jobs, dtype):
    model = quick_starts.language_model().to(dtype)
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weight.clone()
    jobs.append(kd.launch(tune, model, quick_starts.tokenizer(), number_of_processes=2))
    expected = jobs[0].result(120)
    assert jobs[0].model is model
    assert_same(model.state_dict(), expected)
    assert_same(jobs[0].state_dict(), expected)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.base_layer.weight is weight
    assert torch.equal(weight, before)
    assert layer.lora_B["default"].weight.any()
    assert [name for name, one in model.named_parameters() if one.requires_grad and "lora_" not in name] == []
    # The adapter is one of PEFT's, here as there.
    assert peft.get_peft_model_state_dict(model)
    code = f"import kale_dist as kd; print(kd.attach({jobs[0].ref!r}).model.state_dict()[{next(reversed(expected))!r}].sum().item())"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert float(said.stdout) == list(expected.values())[-1].sum().item()


def test_only_the_adapter_travels(jobs):
    def add(model):
        made = peft.get_peft_model(model, peft.LoraConfig(**LORA))
        made.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data.add_(1)

    model = quick_starts.language_model()
    model.model.embed_tokens = torch.nn.Embedding(100_000, 32)
    jobs.append(kd.launch(add, model, number_of_processes=1))
    jobs[0].wait()
    assert sum(one.nbytes for one in model.parameters()) > 12_000_000
    assert inside(jobs[0]).files.outcome(0, 0).stat().st_size < 50_000
    assert (model.model.layers[0].self_attn.q_proj.lora_B["default"].weight == 1).all()


def test_what_peft_saves_beside_the_adapter_comes_too_and_a_second_adapter(jobs):
    def more(model):
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
        for name, one in model.named_parameters():
            if "modules_to_save" in name or "second" in name:
                one.data.add_(1)

    first = peft.LoraConfig(**{**LORA, "target_modules": ["q_proj"]}, modules_to_save=["lm_head"])
    model = quick_starts.language_model()
    twin = copy.deepcopy(model)
    model, twin = (peft.get_peft_model(one, copy.deepcopy(first)) for one in (model, twin))
    twin.load_state_dict(model.state_dict())
    jobs.append(kd.launch(more, model, number_of_processes=1))
    jobs[0].wait()
    assert list(model.peft_config) == ["default", "second"]
    assert torch.equal(
        model.base_model.model.lm_head.modules_to_save["default"].weight,
        twin.base_model.model.lm_head.modules_to_save["default"].weight + 1,
    )
    assert_same(model.state_dict(), jobs[0].state_dict())


def test_adapters_of_a_part_of_one_of_several_models_come_too(jobs):
    def add(models):
        made = peft.get_peft_model(models["b"].model, peft.LoraConfig(r=2, target_modules=["first"]))
        made.base_model.model.first.lora_B["default"].weight.data.add_(1)

    models = {"a": Net(), "b": torch.nn.ModuleDict({"model": Net()})}
    jobs.append(kd.launch(add, models, number_of_processes=1))
    jobs[0].wait()
    assert (models["b"].model.first.lora_B["default"].weight == 1).all()
    assert_same(jobs[0].model[1].state_dict(), models["b"].state_dict())
    assert not [name for name in models["a"].state_dict() if "lora" in name]


def test_a_model_that_has_changed_its_shape_meanwhile_is_left_as_it_is(jobs):
    def add(model):
        peft.get_peft_model(model, peft.LoraConfig(**LORA))

    model = quick_starts.language_model()
    jobs.append(kd.launch(add, model, number_of_processes=1))
    assert jobs[0].exception() is None
    model.lm_head = torch.nn.Linear(32, 5, bias=False)
    names = list(model.state_dict())
    with pytest.warns(KaleDistWarning, match=r"which is as it was: .*\(5, 32\) in the notebook"):
        jobs[0].wait()
    assert list(model.state_dict()) == names


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def with_lora(**options):
    return lambda: peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["first"], **options))


def fit(model, strategy, epochs=2):
    x = torch.randn(32, 6, generator=torch.manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)

    def step(model, loader, criterion, optimizer, device, args):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x.to(device)), y.to(device)).backward()
            optimizer.step()

    adam = lambda parameters: torch.optim.Adam([one for one in parameters if one.requires_grad], lr=0.05)  # noqa: E731
    return kd.distribute(
        model, loader, torch.nn.CrossEntropyLoss(), adam, step, strategy=strategy, number_of_processes=2, threads=1,
        epochs=epochs, seed=3,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["safetensors", "parts"])
def test_lora_after_pretrained_is_equal_with_ddp_and_fsdp(jobs, tmp_path, kind):
    from safetensors.torch import save_file

    torch.manual_seed(1)
    base = Net()
    if kind == "safetensors":
        save_file(base.state_dict(), tmp_path / "model.safetensors")
    else:
        from torch.distributed.checkpoint import save

        save({f"model.{name}": value for name, value in base.state_dict().items()}, checkpoint_id=tmp_path)
    model = kd.pretrained(with_lora(), tmp_path)
    jobs += [fit(model, strategy) for strategy in ("ddp", "fsdp")]
    ddp, fsdp = (job.model.state_dict() for job in jobs)
    assert ddp.keys() == fsdp.keys()
    for name, value in ddp.items():
        torch.testing.assert_close(fsdp[name], value, atol=1e-6, rtol=1e-5)
    for name in ("first.weight", "first.bias", "second.weight"):
        trained = ddp["base_model.model." + name.replace("first", "first.base_layer")]
        assert torch.equal(trained, base.state_dict()[name])
    assert ddp["base_model.model.first.lora_B.default.weight"].any()


@pytest.mark.parametrize(
    "options", [{"init_lora_weights": "pissa"}, {"use_dora": True}, {"modules_to_save": ["second"]}]
)
def test_adapters_that_are_made_of_the_models_weights_are_refused_after_pretrained(jobs, tmp_path, options):
    from safetensors.torch import save_file

    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    jobs.append(fit(kd.pretrained(with_lora(**options), tmp_path), "ddp"))
    with pytest.raises(JobFailedError, match=r"has no weights .*without DoRA and modules_to_save"):
        jobs[0].result()


def scale(model, alpha, merges=False):
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["first"], lora_alpha=alpha))
    made.base_model.model.first.lora_B["default"].weight.data.add_(1)
    if merges:
        made.merge_adapter()
    return made(torch.ones(1, 6)).tolist()


def test_an_adapter_that_is_there_with_other_settings_is_refused(jobs):
    model = Net()
    jobs += [kd.launch(scale, model, alpha, number_of_processes=1) for alpha in (2, 64)]
    assert jobs[0].model(torch.ones(1, 6)).tolist() == jobs[0].result()
    with pytest.warns(KaleDistWarning, match="'default' has lora_alpha=2 here and 64 in the job"):
        second = jobs[1].result()
    assert model(torch.ones(1, 6)).tolist() == jobs[0].result() != second


def test_the_adapter_that_was_active_is_active_here(jobs):
    def two(model):
        made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["first"]), "one")
        made.add_adapter("two", peft.LoraConfig(r=2, target_modules=["first"]))
        for name, value in made.named_parameters():
            if "lora" in name:
                value.data.fill_(0.1 if ".one." in name else 0.5)
        return made(torch.ones(1, 6)).tolist()

    model = Net()
    jobs.append(kd.launch(two, model, number_of_processes=1))
    assert jobs[0].model(torch.ones(1, 6)).tolist() == jobs[0].result()


def test_a_merged_adapter_is_refused_with_what_to_do(jobs):
    model = Net()
    jobs.append(kd.launch(scale, model, 2, merges=True, number_of_processes=1))
    with pytest.warns(KaleDistWarning, match=r"call unmerge_adapter\(\) at the function's end"):
        jobs[0].result()
    assert not [name for name in model.state_dict() if "lora" in name]


def test_a_model_of_peft_comes_back_whatever_order_its_names_have_in_another_process(jobs):
    """PEFT keeps them in sets, whose order is another one in each process."""

    def adds(model):
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.data.add_(1)

    for targets in ("all-linear", ["q_proj", "v_proj", "k_proj", "o_proj"]):
        model = peft.get_peft_model(
            quick_starts.language_model(), peft.LoraConfig(**{**LORA, "target_modules": targets})
        )
        jobs.append(kd.launch(adds, model, number_of_processes=1))
        jobs[-1].wait()
        assert all((value == 1).all() for name, value in model.named_parameters() if "lora_B" in name)


def test_a_base_of_another_dtype_gets_no_adapter(jobs):
    def add(model):
        peft.get_peft_model(model.float(), peft.LoraConfig(**LORA))

    model = quick_starts.language_model().bfloat16()
    names = list(model.state_dict())
    jobs.append(kd.launch(add, model, number_of_processes=1))
    with pytest.warns(KaleDistWarning, match="which is as it was"):
        jobs[0].wait()
    assert list(model.state_dict()) == names
