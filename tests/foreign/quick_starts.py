"""Trainings as the quick starts of other people's trainers have them, small and without a network; each gives its trained weights.

torchrun --nproc-per-node 2 quick_starts.py CASE OUT
"""

import pathlib
import sys
import tempfile

import torch

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<pad>", "<eos>", *LETTERS])}, unk_token="<pad>")
    )
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def language_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=2 + len(LETTERS), **sizes, pad_token_id=0, eos_token_id=1, bos_token_id=1)
    )


def settings(**more):
    plain = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": False,
    }
    return {"per_device_train_batch_size": 4, "logging_steps": 2, "learning_rate": 1e-2, "seed": 5, **plain, **more}


def sft():
    """TRL's supervised fine-tuning, of an adapter of PEFT."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_list(
        [{"prompt": f"{one} to ", "completion": one[::-1]} for one in map("abc ".__add__, LETTERS * 2)]
    )
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=language_model(), args=SFTConfig(num_train_epochs=2, **settings()), train_dataset=data,
        processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip
    trainer.train()
    return trainer.model


def dpo():
    """TRL's preference optimization."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_list([{"prompt": f"{one} is ", "chosen": "good", "rejected": "bad"} for one in LETTERS * 2])
    trainer = DPOTrainer(
        model=language_model(), ref_model=language_model(), args=DPOConfig(num_train_epochs=1, **settings()),
        train_dataset=data, processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    return trainer.model


def counts_e(completions, **_):
    return [float(one.count("e") - one.count("z")) for one in completions]


def grpo():
    """TRL's group relative policy optimization, with a reward that varies."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    options = settings(max_steps=6, num_generations=4, max_completion_length=8)
    trainer = GRPOTrainer(
        model=language_model(), reward_funcs=counts_e, args=GRPOConfig(**options),
        train_dataset=Dataset.from_list([{"prompt": one} for one in LETTERS]), processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    return trainer.model


def hugging_face():
    """The Trainer of transformers, with an evaluation and early stopping."""
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in torch.randint(2, 20, (64, 12), generator=torch.manual_seed(1))]
    best = {"metric_for_best_model": "eval_loss", "load_best_model_at_end": True, "save_strategy": "epoch"}
    args = TrainingArguments(**settings(num_train_epochs=6, eval_strategy="epoch", **best))
    trainer = Trainer(
        model=language_model(), args=args, train_dataset=rows, eval_dataset=rows[:16],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=0.5)],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step < trainer.state.max_steps
    return trainer.model


def lightning():
    """A module of Lightning's."""
    import lightning as L

    class Regression(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

        def training_step(self, batch, _):
            loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    x = torch.randn(96, 6, generator=torch.manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", log_every_n_steps=2, logger=False,
        enable_checkpointing=False, default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    module = Regression()
    trainer.fit(module, loader)
    return module


def accelerate():
    """A loop of Accelerate's."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(96, 6, generator=torch.manual_seed(1))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"train_loss": loss.item()}, step=step)
    return accelerator.unwrap_model(model)


CASES = {one.__name__: one for one in (sft, dpo, grpo, hugging_face, lightning, accelerate)}


def trained(name):
    """The weights of a case by their names."""
    torch.set_num_threads(1)
    return {name: value.detach().clone() for name, value in CASES[name]().state_dict().items()}


if __name__ == "__main__":
    case, out = sys.argv[1:]
    weights = trained(case)
    if torch.distributed.get_rank() == 0:
        torch.save(weights, pathlib.Path(out))
    # A rank that leaves while another one still talks to it aborts that one now and then.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
