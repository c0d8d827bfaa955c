"""What a model reads, window by window: how inputs of every kind are read as windows, and how a text is cut.

Most functions take a tensor with one row per window, which is the model's main input: token ids `[windows, n]`, or
images `[windows, channels, height, width]`. A model that reads several tensors, and one whose output is compared with
given targets, takes `Samples`. If a text has more windows than needed, some of them are drawn by a seed.
"""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.base.format import counted, one_line
from depthgauge.checkpoints.inputs.found_data import (
    IMAGES,
    LABELLED,
    RECORDINGS,
    TEXT,
    FoundData,
    InputKind,
    pillow,
    read_wave,
)
from depthgauge.checkpoints.inputs.text_files import TextFile, find_text, read_text
from depthgauge.checkpoints.source.library import quiet
from depthgauge.checkpoints.source.model_class import context_length
from depthgauge.results.gauge_record import TextWindows

ENCODED = "encoder_outputs"
"""The argument for states of the encoder, which are then not computed again."""
MASK = "attention_mask"
"""The argument that is 1 at tokens and 0 at padding."""
IGNORED = -100
"""A target that does not count, because the place is padding."""


@dataclass(frozen=True, eq=False, repr=False)
class Samples(ArrayRecord):
    """The inputs of a model with one row per window, and what its output is compared with.

    - `inputs`: keyword argument of the model → tensor, the main input first
    - `targets`: the label of every window, or the tokens that the model should write, `IGNORED` where there is none;
      None for text, whose next tokens are the targets, and where the output is compared with the dense model's
    """

    inputs: Mapping[str, Tensor]
    targets: Int[Tensor, "windows ..."] | None = None

    @property
    def main(self) -> Tensor:
        """The main input."""
        return next(iter(self.inputs.values()))

    @property
    def sources(self) -> Mapping[str, Tensor]:
        """The inputs without those of a decoder that reads the states of an encoder."""
        return {name: value for name, value in self.inputs.items() if not name.startswith("decoder_")}

    def __len__(self) -> int:
        return len(self.main)

    def __getitem__(self, rows: Any) -> "Samples":
        """Return some of the windows: `rows` is a slice or a tensor of indices."""
        chosen = {name: value[rows] for name, value in self.inputs.items()}
        return Samples(chosen, None if self.targets is None else self.targets[rows])

    def unpadded(self) -> "Samples":
        """Return the windows without the tokens at the end that are padding in all of them."""
        mask = self.inputs.get(MASK)
        if mask is None:
            return self
        length = int(mask.sum(dim=1).max())
        cut = {name: value[:, :length] for name, value in self.sources.items()}
        return Samples({**self.inputs, **cut}, self.targets)

    def keywords(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of the model on its device; images get the dtype of its weights.

        transformers expects the outputs of an encoder in a tuple.
        """
        placed = {
            name: value.to(device, dtype if value.is_floating_point() else None) for name, value in self.inputs.items()
        }
        return {name: (value,) if name == ENCODED else value for name, value in placed.items()}


Inputs = Tensor | Samples
"""What a model reads: its main input alone, or several tensors."""


def as_samples(inputs: Inputs, name: str = "input_ids") -> Samples:
    """Return the inputs as samples; `name` is the model's main input, such as `input_ids` or `pixel_values`."""
    return inputs if isinstance(inputs, Samples) else Samples({name: inputs})


@dataclass(frozen=True, eq=False, repr=False)
class Windows(ArrayRecord):
    """Windows of a text, images, labelled texts, pairs or recordings as a model reads them, and their origin.

    - `inputs`: token ids, special tokens included, or what a model of another kind reads, with labels or targets where
      they are given
    - `source`: the directory or the file; of a text its path, `path:field`, or `the built-in text`
    - `digest`: SHA-256 of what was read
    - `kind`: `text`, `images`, `texts`, `pairs` or `recordings`
    - `unread`: tokens of a text that are in no window because they do not fill one
    """

    inputs: Inputs
    source: str
    digest: str
    kind: str = "text"
    unread: int = 0

    @property
    def ids(self) -> Int[Tensor, "windows n"]:
        """The token ids of a text."""
        return as_samples(self.inputs).main

    @property
    def example(self) -> Inputs:
        """Two windows, to run the model on."""
        return self.inputs[:2]

    def record(self, tokens: int, bos: bool | None = None, reason: str | None = None) -> TextWindows:
        """Return the record of the windows, each of which becomes this many tokens.

        `bos` and `reason` are the decision about the BOS token.
        """
        count = len(self.inputs)
        return TextWindows(
            kind=self.kind, source=self.source, sha256=self.digest, windows=count, window=tokens, tokens=count * tokens,
            bos=bos, bos_reason=reason,
        )  # fmt: skip

    def with_first(self, token: int, after: int) -> "Windows":
        """Return the windows of a text with a token added at the start, and the last token of their text removed.

        The `after` special tokens at the end of every window stay.
        """
        ids = self.ids
        n = ids.shape[1] - after
        first = ids.new_full((len(ids), 1), token)
        return replace(self, inputs=torch.cat([first, ids[:, : n - 1], ids[:, n:]], dim=1), unread=0)


def few_windows(inputs: Inputs, tokens: int) -> Inputs:
    """Return two different short windows: `tokens` tokens and the same in reverse, or an image and its mirror image."""
    if isinstance(inputs, Samples):
        return inputs[:2] if len(inputs) > 1 else inputs[torch.zeros(2, dtype=torch.long)]
    first = shortened(inputs, tokens)
    assert isinstance(first, Tensor)
    if first.dim() == 2:
        first = first.repeat(1, -(-tokens // first.shape[1]))[:, :tokens]
    return torch.cat([first, first.flip(-1)])


def shortened(inputs: Inputs, tokens: int) -> Inputs:
    """Return the first window; of a text, at most `tokens` tokens of it."""
    first = inputs[:1]
    return first[:, :tokens] if isinstance(first, Tensor) and first.dim() == 2 else first


def repeated(inputs: Inputs, windows: int) -> Inputs:
    """Return the first window, repeated."""
    return inputs[torch.zeros(windows, dtype=torch.long)]


# --- Images, texts with labels, pairs and recordings as windows -------------------------------------------------------

LONGEST = 128
"""The most tokens of a text, of a source and of a target by default; longer ones are cut."""


def read_data(
    data: FoundData,
    reader: Any,
    config: Any,
    *,
    wanted: int,
    seed: int,
    window: int | None = None,
    least: int = 1,
    advice: str = "",
) -> Windows:
    """Read up to `wanted` different inputs, drawn by the seed, through the tokenizer or the processor of the model.

    Texts have at most `window` tokens, by default `LONGEST`, and are padded at the end to the longest one. A decoder
    reads the target after its start token.

    Raises:
        InputError: an input cannot be read, there are fewer than `least` different ones (`advice` says what else to
            do), or the model does not have a label.
    """
    kind, longest = data.kind, LONGEST if window is None else window
    longest = min(longest, context_length(config) or longest)
    if kind is LABELLED and config.pad_token_id is None:
        raise InputError(
            "texts of different lengths need a padding token, and the model has none; set pad_token_id in its "
            "config.json to the id of a token that texts do not contain"
        )
    indices = data.label_indices(config.label2id, config.num_labels) if data.labels else {}
    rows, targets, seen = list[Any](), list[str](), dict[str, None]()
    for index in torch.randperm(len(data.items), generator=torch.Generator().manual_seed(seed)).tolist():
        if len(rows) == wanted:
            break
        item, target = data.items[index], data.targets[index] if data.targets else ""
        raw = _content(item)
        # Texts are different already; the same source may have several targets.
        content = hashlib.sha256(raw).hexdigest() if isinstance(item, Path) else f"{item}\0{target}"
        if content not in seen:
            seen[content] = None
            rows.append(_READERS[kind.main](raw, item, reader, longest))
            targets.append(target)
    if len(rows) < least:
        noun = kind.name.removesuffix("s")
        count = counted(len(rows), f"different {noun}")
        raise InputError(f"{data.name} has {count}, and {least} are needed; give more {noun}s{advice}")
    inputs = _stacked(kind, rows, data.name, config)
    samples = Samples(inputs, torch.tensor([indices[label] for label in targets]) if indices else None)
    if kind.two_stacks:
        samples = _with_targets(
            inputs, targets, reader if kind is not RECORDINGS else reader.tokenizer, config, longest
        )
    digest = hashlib.sha256("\0".join([*seen, *targets]).encode()).hexdigest()
    return Windows(samples, data.name, digest, kind.name)


def _content(item: Path | str) -> bytes:
    try:
        return item.read_bytes() if isinstance(item, Path) else item.encode()
    except OSError as error:
        raise InputError(f"cannot read {item}: {error.strerror or error}") from error


def _stacked(kind: InputKind, rows: list[Any], name: str, config: Any) -> dict[str, Tensor]:
    """Return the inputs of the model with one row each; token ids are padded, and have a mask."""
    if kind.main == TEXT.main:
        mask = _padded([[1] * len(row) for row in rows], 0)
        return {kind.main: _padded(rows, config.pad_token_id or 0), "attention_mask": mask}
    shapes = {tuple(one.shape) for one in rows}
    if len(shapes) > 1:
        raise InputError(
            f"the {kind.processor[0]} gives the {kind.name} of {name} different sizes, such as "
            f"{' and '.join(map(str, sorted(shapes)[:2]))}; give {kind.name} of one size"
        )
    return {kind.main: torch.stack(rows)}


def _token_ids(raw: bytes, text: Any, tokenizer: Any, longest: int) -> list[int]:
    """Return a text as token ids, with the special tokens of the tokenizer."""
    with quiet():
        ids: list[int] = tokenizer(text, truncation=True, max_length=longest)["input_ids"]
    return ids


def _pixels(raw: bytes, path: Any, processor: Any, longest: int) -> Tensor:
    """Return an image as the image processor gives it to the model."""
    library = pillow()
    try:
        image = library.open(io.BytesIO(raw)).convert("RGB")
        with quiet():
            made: Tensor = processor(images=image, return_tensors="pt")[IMAGES.main][0]
    except Exception as error:  # decoders and processors raise errors of many kinds
        unknown = isinstance(error, library.UnidentifiedImageError)
        why = "it has no format that Pillow knows" if unknown else one_line(error)
        raise InputError(f"cannot read the image {path}: {why}; repair or remove it") from error
    return made


def _features(raw: bytes, path: Any, reader: Any, longest: int) -> Tensor:
    """Return a recording as the feature extractor gives it to the model; its channels are averaged."""
    extractor = reader.feature_extractor
    rate, channels, frames, data = read_wave(path, io.BytesIO(raw))
    if rate != extractor.sampling_rate:
        raise InputError(
            f"{path} has a sampling rate of {rate} Hz, and the model expects {extractor.sampling_rate} Hz; convert it, "
            f"for example with sox IN.wav -r {extractor.sampling_rate} OUT.wav or ffmpeg -i IN.wav -ar "
            f"{extractor.sampling_rate} OUT.wav"
        )
    if len(data) != 2 * channels * frames:
        raise InputError(
            f"{path} ends after {len(data):,} of {2 * channels * frames:,} bytes of sound; repair or remove it"
        )
    sound = np.frombuffer(data, "<i2").reshape(frames, channels).mean(axis=1, dtype=np.float32) / 2**15
    with quiet():
        made: Tensor = extractor(sound, sampling_rate=rate, return_tensors="pt")[RECORDINGS.main][0]
    return made


_READERS: Mapping[str, Callable[[bytes, Any, Any, int], Any]] = {
    TEXT.main: _token_ids,
    IMAGES.main: _pixels,
    RECORDINGS.main: _features,
}
"""Main input → the function that makes it of one item: its content, the item, the reader, and the most tokens."""


def _with_targets(
    sources: Mapping[str, Tensor], texts: Sequence[str], tokenizer: Any, config: Any, longest: int
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


def _padded(rows: list[list[int]], pad: int) -> Tensor:
    """Return rows as one tensor, padded at the end."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])


# --- Cut a text into windows of equal length --------------------------------------------------------------------------

WINDOW = 512
"""The longest window by default."""
WINDOWS = 8
"""The least number of windows by default: an interval over that many windows covers as often as it says."""
SHORT_WINDOW = 64
"""Windows are not made shorter than this in order to have more of them."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenizedText(ArrayRecord):
    """The token ids of a text, or of pieces of a large text.

    - `source`: name of the text: its path, `path:field`, or `the built-in text`
    - `digest`: SHA-256 of the bytes that were read
    - `pieces`: token ids of each piece; one piece if the text was read at once
    - `complete`: whether the whole text was read
    """

    source: str
    digest: str
    pieces: tuple[Int[Tensor, " _"], ...]
    complete: bool

    @property
    def tokens(self) -> int:
        """The number of tokens that were read."""
        return sum(len(piece) for piece in self.pieces)

    def bodies(self, length: int) -> Int[Tensor, "bodies length"]:
        """Cut the pieces into disjoint runs of `length` tokens; drop the rest of each piece.

        Of a text that was not read completely, every piece gives one run, so that the runs are spread over the text.
        """
        most = None if self.complete or len(self.pieces) == 1 else 1
        return torch.cat([piece[: len(piece) // length * length].view(-1, length)[:most] for piece in self.pieces])


def tokenize_text(
    tokenizer: Any, text: str | Path | TextFile | None, *, wanted: int, length: int, seed: int, whole: bool = False
) -> TokenizedText:
    """Read a text (see `find_text`) and convert it to token ids; of a large text, read about as much as is needed.

    `wanted` windows of `length` tokens without special tokens will be cut; `seed` chooses the pieces of a large text.
    With `whole`, all of a large text is read.
    """
    file = find_text(text)
    content = read_text(
        file, lambda chat: chat_text(tokenizer, chat), wanted=wanted, length=length, seed=seed, whole=whole
    )
    with quiet():
        pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in content.pieces]
    ids = tuple(torch.tensor(one, dtype=torch.int64) for one in pieces)
    return TokenizedText(file.name, content.digest, ids, content.complete)


def chat_text(tokenizer: Any, messages: list[Any]) -> str:
    """Convert the messages of a chat to text by the tokenizer's chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            "the tokenizer has no chat template; use the tokenizer of a chat model, or name a field with plain text"
        )
    try:
        with quiet():
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates raise errors of jinja2, KeyError, TypeError and others
        raise InputError(f"the chat template failed: {one_line(error)}") from error


def read_windows(
    tokenizer: Any,
    text: str | Path | TextFile | None,
    *,
    tokens: int,
    window: int | None,
    context: int | None,
    seed: int,
    special: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Windows:
    """Cut a text (see `find_text`) into disjoint windows of token ids, at least one and about `tokens` in total.

    A window has `window` tokens with the special ones, by default `usual_window`; `context` is the longest that the
    model accepts, if that is known. The seed chooses windows if the text has more than needed. `special` are the token
    ids before and after every window, by default those that the tokenizer adds.
    """
    if window is None:
        window = usual_window(tokens, context)
    before, after = special_tokens(tokenizer) if special is None else special
    length = body_length(window, context, len(before) + len(after))
    wanted = max(1, tokens // window)
    tokenized = tokenize_text(tokenizer, text, wanted=wanted, length=length, seed=seed)
    bodies = tokenized.bodies(length)
    if not len(bodies):
        raise too_short(tokenized, length, len(before) + len(after))
    order = torch.randperm(len(bodies), generator=torch.Generator().manual_seed(seed))
    chosen = bodies[order[:wanted].sort().values]
    return Windows(surround(chosen, before, after), tokenized.source, tokenized.digest)


def too_short(text: TokenizedText, length: int, around: int) -> InputError:
    """Return the error for a text without a window of `length` tokens, beside which it has `around` special ones."""
    advice = longer_text(text, max(map(len, text.pieces)) + around)
    return InputError(f"{text.source} has {counted(text.tokens, 'token')}, but one window needs {length}; {advice}")


def longer_text(text: TokenizedText, window: int) -> str:
    """Return what to do about a text that has windows of `window` tokens at most; short ones say too little."""
    needed = "give a text" if text.source == TextFile().name else "use a longer text"
    return needed + (f", or --window {window}" if window >= SHORT_WINDOW else "")


def usual_window(tokens: int, context: int | None) -> int:
    """Return the tokens per window where none is requested: `WINDOW`, or fewer so that there are `WINDOWS` windows.

    `tokens` is the total number of tokens, and `context` the longest window the model accepts, if that is known.

    >>> [usual_window(tokens, 8192) for tokens in (2**20, 2048, 256, 32)]
    [512, 256, 64, 32]
    """
    return min(WINDOW, context or WINDOW, max(tokens // WINDOWS, SHORT_WINDOW), tokens)


def body_length(window: int, context: int | None, around: int) -> int:
    """Return the number of tokens of a window that are not special tokens, of which each window has `around`.

    Raises:
        InputError: the window is longer than the context (512 if that is None), or holds special tokens only.
    """
    longest = context or 512
    if window > longest:
        raise InputError(
            f"window must be at most {longest} for this model, got {window}; it is the number of tokens in one window"
        )
    if window <= around:
        raise InputError(
            f"window must be at least {around + 1} for this model, got {window}; "
            f"each window has {counted(around, 'special token')}"
        )
    return window - around


def surround(
    bodies: Int[Tensor, "windows length"], before: Sequence[int], after: Sequence[int]
) -> Int[Tensor, "windows n"]:
    """Add special tokens before and after every window."""
    first, last = (bodies.new_tensor(list(ids)).expand(len(bodies), -1) for ids in (before, after))
    return torch.cat([first, bodies, last], dim=1)


def drawn_windows(
    tokenizer: Any, text: str | Path | TextFile | None, *, windows: int, window: int, seed: int
) -> Int[Tensor, "windows n"]:
    """Draw windows with random starts from a text; they may overlap, so a short text gives many samples."""
    before, after = special_tokens(tokenizer)
    length = window - len(before) - len(after)
    tokenized = tokenize_text(tokenizer, text, wanted=windows, length=length, seed=seed)
    ids = tokenized.pieces[0]
    if len(ids) < length:
        raise too_short(tokenized, length, len(before) + len(after))
    starts = torch.randint(len(ids) - length + 1, (windows,), generator=torch.Generator().manual_seed(seed)).tolist()
    return surround(torch.stack([ids[start : start + length] for start in starts]), before, after)


def drop_repeated(windows: Int[Tensor, "windows n"], seen: set[bytes], compared: int) -> Int[Tensor, "kept n"]:
    """Return the windows whose content is not in `seen`, each content once, in order; add them to `seen`.

    The content of a window are its first `compared` tokens.
    """
    kept = []
    for index, row in enumerate(windows[:, :compared].contiguous().numpy()):
        content = hashlib.sha256(row.tobytes()).digest()
        if content not in seen:
            seen.add(content)
            kept.append(index)
    return windows[kept]


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed from 0 to 2⁶³ − 1 for one purpose, so that two purposes do not use the same random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8], "big") >> 1


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer adds before and after a text."""
    with quiet():
        bare = tokenizer("a b", add_special_tokens=False)["input_ids"]
        full = tokenizer("a b")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []
