"""Tiny checkpoints on disk: weights, configuration and a tokenizer with forty entries."""

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


def save_tokenizer(folder: Path, special: bool) -> None:
    """Save a tokenizer that splits at white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
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
