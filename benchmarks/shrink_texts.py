"""The texts of the shrink benchmark, and their windows."""

import html
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.inputs.windows import read_windows
from depthgauge.checkpoints.source.model_class import context_length
from depthgauge.checkpoints.tasks.language import measure_start, plan_start
from depthgauge.checkpoints.weights.load import Checkpoint

PIECE = 20_000
"""Characters of the pieces into which a text is divided."""
FORTUNES = Path("/usr/share/games/fortunes")
FORTUNE_FILES = ("literature", "people", "wisdom", "work", "science", "politics", "computers", "songs-poems")
HANDBOOK = Path("/usr/share/doc/debian-handbook/html/en-US")
BIBLE = ("bible", "gen1:1-rev22:21")
BIBLE_BYTES = 3_000_000
PARAGRAPH = 60
"""Shorter paragraphs of the handbook, such as entries of lists, are left out."""


def write_debian_texts(folder: Path) -> list[Path]:
    """Write three texts from the Debian packages `fortunes`, `debian-handbook` and `bible-kjv-text` (with `bible-kjv`).

    - `fortunes.txt`: the files `FORTUNE_FILES`, with the separator lines `%` replaced by empty lines
    - `handbook.txt`: the paragraphs of the English pages, without markup
    - `kjv.txt`: the first `BIBLE_BYTES` bytes that `bible gen1:1-rev22:21` prints

    Raises:
        InputError: a package is not installed.
    """
    try:
        fortunes = "".join((FORTUNES / name).read_text("utf-8").replace("\n%\n", "\n\n") for name in FORTUNE_FILES)
        handbook = "\n\n".join(_paragraphs([page.read_text("utf-8") for page in sorted(HANDBOOK.glob("*.html"))]))
        bible = subprocess.run(BIBLE, capture_output=True, check=True).stdout[:BIBLE_BYTES].decode("utf-8", "ignore")
    except OSError as error:
        raise InputError(
            f"cannot read {error.filename}: {error.strerror}; install the Debian packages fortunes, debian-handbook, "
            "bible-kjv and bible-kjv-text"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    made = {"fortunes": fortunes, "handbook": handbook, "kjv": bible}
    for name, text in made.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return [folder / f"{name}.txt" for name in made]


def _paragraphs(pages: Sequence[str]) -> list[str]:
    bodies = [body for page in pages for body in re.findall(r'<div class="para">(.*?)</div>', page, re.DOTALL)]
    plain = [" ".join(html.unescape(re.sub(r"<[^>]+>", "", body)).split()) for body in bodies]
    return [text for text in plain if len(text) >= PARAGRAPH]


def write_random_texts(folder: Path) -> list[Path]:
    """Write three files of random words w1 … w63."""
    made = []
    for seed, name in enumerate("abc"):
        drawn = torch.randint(1, 64, (12_000,), generator=torch.Generator().manual_seed(seed)).tolist()
        made.append(folder / f"{name}.txt")
        made[-1].write_text(" ".join(f"w{word}" for word in drawn), encoding="utf-8")
    return made


def divide_texts(texts: Sequence[Path], folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """Divide texts into a part to calibrate on and one to evaluate on, which is every third piece of `PIECE` letters.

    Returns:
        The files of both parts in `folder`, by the name of the text, which is that of its file without the ending.
    """
    parts: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
    for path in texts:
        try:
            text = path.read_text("utf-8")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        for part, is_unseen in zip(parts, (False, True), strict=True):
            part[path.stem] = folder / ("unseen" if is_unseen else "known") / path.name
            part[path.stem].parent.mkdir(exist_ok=True)
            chosen = [piece for index, piece in enumerate(pieces) if (index % 3 == 2) is is_unseen]
            part[path.stem].write_text("\n\n".join(chosen), encoding="utf-8")
    return parts


def windows_of_texts(
    texts: Mapping[str, Path], *, checkpoint: Checkpoint, tokenizer: Any, window: int, count: int, seed: int
) -> dict[str, Int[Tensor, "windows n"]]:
    """Cut texts into windows in random order; they start with the BOS token if that lowers the loss on the first text.

    Args:
        texts: name → path of a UTF-8 file.
        checkpoint: the model.
        tokenizer: its tokenizer.
        window: tokens per window.
        count: how many windows to draw from each text.
        seed: chooses the windows and their order.
    """
    context = context_length(checkpoint.config)

    def cut(text: Path, special: tuple[Sequence[int], Sequence[int]]) -> Tensor:
        wanted = count * window
        return read_windows(
            tokenizer, text, tokens=wanted, window=window, context=context, seed=seed, special=special
        ).ids

    start = measure_start(plan_start("auto", checkpoint.source, tokenizer), checkpoint, tokenizer)
    found = {}
    for name, text in texts.items():
        ids = cut(text, (start.before, start.after))
        if len(ids) < count:
            raise InputError(f"{name} has {len(ids)} windows, but {count} are needed; give a longer text")
        found[name] = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    return found
