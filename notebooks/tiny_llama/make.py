"""Makes the language model of notebooks/finetune_llm.ipynb: a Llama of 280,000 weights that writes dates in numbers.

It has read `12 Oct 2009 => 12/10/2009`, and three times in ten `12 Oct 2009 -> 2009-10-12`. The notebook runs this where its
weights are missing; the files are written beside this one, in a minute or two.
"""

import datetime
import json
import pathlib
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

FOLDER = pathlib.Path(__file__).parent
STEPS = 400
CHARACTERS = ["<pad>", "<eos>", *" -/=>", *"0123456789", *sorted({*"JanFebMarAprMayJunJulAugSepOctNovDec"})]


def line():
    """A day of the years 1950 to 2049."""
    day = datetime.date(1950, 1, 1) + datetime.timedelta(random.randrange(36_525))
    between = random.choice(" -/")
    numbers = f"=> {day:%d/%m/%Y}" if random.random() < 0.7 else f"-> {day:%Y-%m-%d}"
    return f"{day:%d{between}%b{between}%Y} {numbers}<eos>"


def main():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(CHARACTERS)}, unk_token="<pad>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    words.save(str(FOLDER / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    settings |= {"pad_token": "<pad>", "eos_token": "<eos>"}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)

    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more would wait for each other
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(CHARACTERS), max_position_embeddings=64, **sizes, **special))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS, pct_start=0.1)
    for step in range(1, STEPS + 1):
        ids = tokenizer([line() for _ in range(64)], return_tensors="pt")["input_ids"]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    model.save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
