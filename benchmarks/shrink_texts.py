"""The texts of the shrink benchmark, and their windows."""

import html
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.checkpoints.load import Checkpoint, Placement, context_length, load_tokenizer
from depthgauge.checkpoints.start_token import measure_start, plan_start
from depthgauge.checkpoints.windows import read_windows
from depthgauge.errors import InputError

WINDOW = 512
"""Tokens per window."""
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


def windows_of_texts(
    checkpoint: Checkpoint, texts: Sequence[Path], windows: int, seed: int
) -> dict[str, Int[Tensor, "windows n"]]:
    """Cut texts into windows, in random order.

    Args:
        checkpoint: the model; windows start with its BOS token if that lowers the loss on the first text.
        texts: paths of UTF-8 files; the name of a file without its ending names the text.
        windows: how many windows to draw from each text.
        seed: chooses the windows and their order.
    """
    source = checkpoint.source
    if source is None:
        raise InputError(f"{checkpoint.name} has no files with a tokenizer; give --windows instead of --text")
    tokenizer = load_tokenizer(source, Placement())
    context = context_length(checkpoint.config)

    def cut(text: Path, special: tuple[Sequence[int], Sequence[int]]) -> Tensor:
        wanted = windows * WINDOW
        return read_windows(
            tokenizer, text, tokens=wanted, window=WINDOW, context=context, seed=seed, special=special
        ).ids

    start = plan_start("auto", source, tokenizer)
    if start.candidate is not None:
        start = measure_start(start, checkpoint, [ids[len(start.before) :] for ids in cut(texts[0], ((), ()))[:3]])
    found = {}
    for text in texts:
        ids = cut(text, (start.before, start.after))
        found[text.stem] = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    return found


def windows_of_file(path: Path) -> dict[str, Int[Tensor, "windows n"]]:
    """Read windows in random order from a file made by `torch.save`: a dictionary of name → token ids."""
    try:
        given = torch.load(path, weights_only=True)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(given, dict) or not all(isinstance(ids, Tensor) and ids.dim() == 2 for ids in given.values()):
        raise InputError(f"{path} must contain a dictionary of name → token ids of shape (windows, {WINDOW})")
    return {str(name): ids.long() for name, ids in given.items()}


def require_windows(windows: Mapping[str, Int[Tensor, "windows n"]], needed: int) -> None:
    """Raise unless there are several texts with enough windows of equal length."""
    if len(windows) < 2:
        raise InputError(f"at least two texts are needed, got {len(windows)}; give --text once for each")
    for name, ids in windows.items():
        if len(ids) < needed:
            raise InputError(f"{name} has {len(ids)} windows, but {needed} are needed; give a longer text")
    if len({ids.shape[1] for ids in windows.values()}) > 1:
        raise InputError("the windows of all texts must have the same number of tokens")
