"""Tiny checkpoints on disk: weights, configuration and a tokenizer with forty entries."""

import random
import warnings
from pathlib import Path
from typing import Any

from tiny_models import tiny_model

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
WORDS = [f"w{i}" for i in range(36)]


def save_checkpoint(folder: Path, name: str, *, tokenizer: bool = True, seed: int = 0) -> Any:
    """Save a tiny model of a family with transformers; the tokenizer of an encoder adds [CLS] and [SEP] to a text."""
    model = tiny_model(name, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder, special=not hasattr(model, "lm_head"))
    return model


def save_reader(folder: Path) -> Any:
    """Save a Llama that can read `text_in_order`: it expects the next entry of the vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=64, **sizes)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(40, 64))
        model.lm_head.weight.copy_(torch.eye(40, 64).roll(1, dims=0))
    model.save_pretrained(folder)
    save_tokenizer(folder, special=False)
    return model


def save_tokenizer(folder: Path, special: bool, reverse: bool = False) -> None:
    """Save a tokenizer that splits at white space; with `reverse`, its words have each other's ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *(WORDS[::-1] if reverse else WORDS)])}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        tokens.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)


def text_of(words: int, seed: int = 0) -> str:
    """Return a text of words drawn from the vocabulary."""
    import torch

    drawn = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in drawn.tolist())


def text_in_order(words: int, seed: int = 0) -> str:
    """Return a text in which nine of ten words are the next of the vocabulary; the others are drawn."""
    draw, found = random.Random(seed), [0]
    while len(found) < words:
        found.append((found[-1] + 1) % len(WORDS) if draw.random() < 0.9 else draw.randrange(len(WORDS)))
    return " ".join(WORDS[i] for i in found)
