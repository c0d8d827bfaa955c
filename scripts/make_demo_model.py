"""Train the model of `depthgauge demo` and write it into the package: `python make_demo_model.py`.

A Llama with eight small blocks learns the facts of a village, to combine two of them, and to add. The text that it
learns from has another seed than the demonstration's.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from depthgauge.workflows.demo import demo_text

FOLDER = Path(__file__).parents[1] / "src" / "depthgauge" / "workflows" / "demo_model"
LINES, SEED = 40_000, 1
STEPS, BATCH, WINDOW, RATE = 2_000, 16, 128, 3e-3


def main() -> None:
    """Train the tokenizer and the model, and save both."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    text = demo_text(LINES, SEED).splitlines(keepends=True)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    words.train_from_iterator(text[:1_000], trainer)
    ids = torch.tensor([index for line in words.encode_batch(text) for index in line.ids])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=WINDOW, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.05)
    begun = time.monotonic()
    for step in range(STEPS):
        places = torch.randint(len(ids) - WINDOW, (BATCH,))
        rows = torch.stack([ids[place : place + WINDOW] for place in places])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            sys.stdout.write(f"step {step}: loss {loss.item():.4f} ({time.monotonic() - begun:.0f} s)\n")
            sys.stdout.flush()
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", model_max_length=WINDOW)
    tokenizer.save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
