"""The options of `shrink`, each declared once: the command line, the Python interface and the result all use these."""

import math
import numbers
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from depthgauge._format import counted
from depthgauge.errors import InputError, require_count, require_positive, require_seed, unknown_name
from depthgauge.results.record import Record, combine_options

EFFORTS = ("quick", "default", "high")
SIZE, TEXT, MODEL = "size", "text", "model"
ABOUT_FILES = ("dtype", "device", "device_map", "tokenizer", "trust_remote_code", "allow_pickle", "ignore_unused")
"""Options about how a model is loaded; they may differ from those of a plan, and do not apply to a model in memory."""


_ANY, _SIZE, _TEXT, _MODEL = (Meta(extra={"only": panel}) for panel in (None, SIZE, TEXT, MODEL))


class ShrinkOptions(Record, frozen=True, kw_only=True):
    """What `shrink` is asked to do. `depthgauge shrink --help` shows the same text.

    In Python, `remove` may also be a whole number, or a number between 0 and 1 as a share: `0.25` is `25%`.

    Attributes:
        remove: How many blocks to remove: a number, 7, or a share, 25%, rounded down, at least 1.
        max_increase: Remove as many blocks as the guarantee allows: the loss grows by at most this (nats/token).
        confidence: Confidence of the guarantee  [default: 0.95].
        effort: quick, default or high: more calibration windows, a wider search, more time.
        no_repair: Remove blocks without changing any weights.
        heal: After the repair, train this many steps towards the dense model's predictions.
        text: Text file, or FILE.jsonl:FIELD, to calibrate on; repeat it for several  [default: text sampled from the
            model].
        as_is: Read --text as plain text, even if it is JSON, CSV or HTML.
        sampled: Share of calibration windows sampled from the model  [default: 0.5].
        window: Tokens per window  [default: 512, with --effort quick 256].
        bos: Start every window with the BOS token: yes, no, or auto  [default].
        seed: Seed of everything random  [default: 0].
        dtype: Number type  [default: float32 on a CPU, the checkpoint's own on a GPU].
        device: Device  [default: a GPU if there is one].
        device_map: Spread the model over devices, as transformers does: auto.
        tokenizer: Directory of a tokenizer that replaces the one of the checkpoint; the result gets it too.
        force: Go on if the model cannot read its text.
        trust_remote_code: Run Python code that comes with the checkpoint.
        allow_pickle: Read pickled weights (pytorch_model*.bin), without running code in them.
        ignore_unused: Accept weights that no module of the model takes.
    """

    remove: Annotated[str | None, _SIZE] = None
    max_increase: Annotated[float | None, _SIZE] = None
    confidence: Annotated[float, _SIZE] = 0.95
    effort: Annotated[str, _ANY] = "default"
    no_repair: Annotated[bool, _ANY] = False
    heal: Annotated[int | None, _ANY] = None
    text: Annotated[tuple[str, ...], _TEXT] = ()
    as_is: Annotated[bool, _TEXT] = False
    sampled: Annotated[float | None, _TEXT] = None
    window: Annotated[int | None, _TEXT] = None
    bos: Annotated[str, _TEXT] = "auto"
    seed: Annotated[int, _ANY] = 0
    dtype: Annotated[str, _MODEL] = "auto"
    device: Annotated[str | None, _MODEL] = None
    device_map: Annotated[str | None, _MODEL] = None
    tokenizer: Annotated[str | None, _MODEL] = None
    force: Annotated[bool, _MODEL] = False
    trust_remote_code: Annotated[bool, _MODEL] = False
    allow_pickle: Annotated[bool, _MODEL] = False
    ignore_unused: Annotated[bool, _MODEL] = False

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        default = {field.name: field.default for field in msgspec.structs.fields(self)}
        return {name: getattr(self, name) for name in default if getattr(self, name) not in (None, default[name])}

    def check(self) -> None:
        """Raise for options that contradict each other or are out of range."""
        if self.effort not in EFFORTS:
            raise unknown_name("effort", self.effort, EFFORTS)
        if self.max_increase is not None:
            require_positive("max-increase", self.max_increase, "the largest increase of the loss in nats per token")
            if self.remove is not None:
                raise InputError("--remove and --max-increase exclude each other: give the size or the limit, not both")
        elif self.remove is None:
            raise InputError(
                "say how much to remove: a number or a share with --remove, or a limit with --max-increase"
            )
        if not 0.5 <= self.confidence <= 0.9999:
            meaning = "it is the probability that the guarantee is true"
            raise InputError(f"confidence must be a number from 0.5 to 0.9999, got {self.confidence!r}; {meaning}")
        if self.heal is not None:
            require_count("heal", self.heal, "the number of training steps after the repair")
            if self.no_repair:
                raise InputError("--heal trains the weights and --no-repair keeps them; leave one of them out")
        if self.sampled is not None and not 0 <= self.sampled <= 1:
            raise InputError(f"sampled must be a share from 0 to 1, got {self.sampled!r}")
        require_seed(self.seed)

    def check_model(self, decoder: bool, name: str) -> None:
        """Raise for options that do not apply to the model `name`; a decoder is a causal language model."""
        if not decoder and self.max_increase is not None:
            raise InputError(
                f"--max-increase limits the loss of a language model, and {name} is none; use --remove, the result "
                "shows how far its final states move"
            )
        if decoder and self.sampled is not None and self.sampled != 1 and not self.text:
            raise InputError(
                f"--sampled {self.sampled:g} needs --text: without text, all windows are sampled from the model; give "
                "a text, or leave --sampled out"
            )

    def count(self, layers: int, name: str) -> int:
        """Return the number of blocks that `remove` stands for in the model `name` with this many layers.

        >>> ShrinkOptions(remove="25%").count(30, "model"), ShrinkOptions(remove="10%").count(4, "model")
        (7, 1)
        """
        remove = (self.remove or "").strip()
        if layers == 1:
            raise InputError(f"{name} has one block, and at least one must stay, so no block can be removed")
        if re.fullmatch(r"\d+", remove):
            count = int(remove)
        elif match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", remove):
            share = round(float(match[1]) * layers / 100, 6)  # 33.3333333333% of 12 blocks are 4
            count = max(1, math.floor(share)) if float(match[1]) > 0 else 0
        else:
            raise InputError(f"remove must be a whole number or a percentage, such as 7 or 25%, got {self.remove!r}")
        if not 1 <= count < layers:
            raise InputError(
                f"remove must be from 1 to {counted(layers - 1, 'block')}, got {self.remove}; {name} has {layers} "
                "blocks and at least one must stay"
            )
        return count


def make_shrink_options(options: ShrinkOptions | None, fields: dict[str, Any]) -> ShrinkOptions:
    """Combine an options record with single options given by keyword; check the types of both.

    A single text may be given as one path, and `remove` as a whole number or as a number between 0 and 1. None keeps
    the option of the record.
    """
    known = ShrinkOptions.__struct_fields__
    given = {name: value for name, value in fields.items() if value is not None or name not in known}
    return combine_options(
        ShrinkOptions, "shrink", options, given, {"remove": _remove_text, "text": _text_list, "tokenizer": str}
    )


def _text_list(text: Any) -> list[str]:
    return [str(path) for path in (text if isinstance(text, list | tuple) else [text])]


def _remove_text(remove: Any) -> Any:
    """Return a number of blocks, or a share of all blocks between 0 and 1, as the command line writes it.

    >>> _remove_text(7), _remove_text(0.25), _remove_text(1 / 3), _remove_text("25%")
    ('7', '25%', '33.3333333333%', '25%')
    """
    if isinstance(remove, str):
        return remove
    if isinstance(remove, numbers.Integral) and not isinstance(remove, bool):
        return str(int(remove))
    if isinstance(remove, numbers.Real) and 0 < float(remove) < 1:
        return f"{100 * float(remove):.10f}".rstrip("0").rstrip(".") + "%"
    raise InputError(
        f"remove must be a number of blocks or a share of all blocks, got {remove!r}; write remove=7 for 7 blocks, and "
        "remove=0.25 or remove='25%' for a quarter of them"
    )
