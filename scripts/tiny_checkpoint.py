"""Write a tiny Llama with a word tokenizer, as transformers saves it: `python tiny_checkpoint.py DIRECTORY`.

Its blocks are random, and it expects that the words of its list follow each other.
"""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["?", "the", "a", "of", "and", "in", "harbour", "depth", "water", "stick", "captain", "number"]


def main(directory: str) -> None:
    """Save the model and its tokenizer; words that are not in the list become `?`."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    embeddings, following = torch.eye(len(WORDS), config.hidden_size), [0, *range(2, len(WORDS)), 1]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight[following] = embeddings
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1])
