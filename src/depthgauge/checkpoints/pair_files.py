"""Read texts one by one as token ids: texts with labels, and pairs of a source and a target."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted
from depthgauge.checkpoints.found_inputs import LabelledTexts, PairFile, label_indices
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.library import quiet
from depthgauge.checkpoints.samples import IGNORED, Samples

LONGEST = 128
"""The most tokens of a text, of a source and of a target by default; longer ones are cut."""


def read_pairs(
    found: PairFile, tokenizer: Any, config: Any, *, wanted: int, longest: int, seed: int, least: int = 1,
    advice: str = "",
) -> GivenWindows:  # fmt: skip
    """Draw up to `wanted` pairs by the seed, and convert them to token ids of at most `longest` tokens each.

    Sources and targets are padded at the end to the longest one. The decoder reads the target after its start token.

    Raises:
        InputError: there are fewer than `least` pairs; `advice` says what else to do.
    """
    order = _drawn(len(found.pairs), "pair", found.path, wanted, seed, least, advice)
    chosen = [found.pairs[index] for index in order]
    inputs = _token_ids([source for source, _ in chosen], tokenizer, config, longest)
    samples = target_samples(inputs, [target for _, target in chosen], tokenizer, config, longest)
    digest = hashlib.sha256("\0".join(text for pair in chosen for text in pair).encode()).hexdigest()
    return GivenWindows("pairs", samples, str(found.path), digest)


def read_labelled(
    found: LabelledTexts, tokenizer: Any, config: Any, *, wanted: int, longest: int, seed: int, least: int = 1,
    advice: str = "",
) -> GivenWindows:  # fmt: skip
    """Draw up to `wanted` texts by the seed, and convert them to token ids of at most `longest` tokens each.

    Raises:
        InputError: there are fewer than `least` texts, the model has no padding token, or it does not have a label.
    """
    if config.pad_token_id is None:
        raise InputError(
            "texts of different lengths need a padding token, and the model has none; set pad_token_id in its "
            "config.json to the id of a token that texts do not contain"
        )
    order = _drawn(len(found.texts), "text", found.path, wanted, seed, least, advice)
    indices = label_indices(found, config.label2id, config.num_labels)
    texts, labels = ([given[index] for index in order] for given in (found.texts, found.labels))
    inputs = _token_ids(texts, tokenizer, config, longest)
    samples = Samples(inputs, torch.tensor([indices[label] for label in labels]))
    digest = hashlib.sha256("\0".join([*texts, *labels]).encode()).hexdigest()
    return GivenWindows("texts", samples, str(found.path), digest)


def _drawn(count: int, noun: str, path: Path, wanted: int, seed: int, least: int, advice: str) -> list[int]:
    """Return up to `wanted` indices below `count`, drawn by the seed; raise if there are fewer than `least`."""
    if count < least:
        raise InputError(
            f"{path} has {counted(count, f'different {noun}')}, and {least} are needed; give more {noun}s{advice}"
        )
    drawn: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:wanted].tolist()
    return drawn


def _token_ids(texts: Sequence[str], tokenizer: Any, config: Any, longest: int) -> dict[str, torch.Tensor]:
    """Return texts as token ids, with the special tokens of the tokenizer, padded at the end, and their mask."""
    with quiet():
        rows = [tokenizer(text, truncation=True, max_length=longest)["input_ids"] for text in texts]
    mask = _padded([[1] * len(row) for row in rows], 0)
    return {"input_ids": _padded(rows, config.pad_token_id or 0), "attention_mask": mask}


def target_samples(
    sources: Mapping[str, torch.Tensor], texts: Sequence[str], tokenizer: Any, config: Any, longest: int
) -> Samples:
    """Return the inputs of an encoder–decoder model: sources, and target texts of at most `longest` tokens each.

    The decoder reads a target after its start token. Where the tokenizer writes this token too, as that of Whisper
    does, it is left out of the target.
    """
    pad = config.pad_token_id or 0
    # transformers generates after the first of these that is set.
    starts = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id"))
    start = next((one for one in starts if one is not None), pad)
    with quiet():
        targets = [tokenizer(text_target=text)["input_ids"] for text in texts]
    targets = [(target[1:] if target[:1] == [start] else target)[:longest] for target in targets]
    read = _padded([[start, *target[:-1]] for target in targets], pad)
    return Samples({**sources, "decoder_input_ids": read}, _padded(targets, IGNORED))


def _padded(rows: list[list[int]], pad: int) -> torch.Tensor:
    """Return rows as one tensor, padded at the end."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])
