"""The options of `shrink`, each declared once: the command line, the Python interface and the result all use these."""

import math
import numbers
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from depthgauge.base.errors import InputError, require_positive, require_seed, unknown_name
from depthgauge.base.format import counted
from depthgauge.results.gauge_options import NONE, ModelOptions, check_common, path_list
from depthgauge.results.record import RARE, combine_options
from depthgauge.results.recover_options import AUTO, REPAIR, amount_of

EFFORTS = ("quick", "default", "high")
SIZE, TEXT = "size", "text"

HOW_MUCH = ("remove", "remove_layers", "max_bytes", "max_increase")
"""Options of which exactly one says how much to remove."""
WAYS = tuple(f"--{name.replace('_', '-')}" for name in HOW_MUCH)
UNKNOWN = 10**9
"""The number of layers before the configuration of a model is read; no number of blocks in an option is larger."""


_ANY, _SIZE, _TEXT = (Meta(extra={"only": panel}) for panel in (None, SIZE, TEXT))


class ShrinkOptions(ModelOptions, frozen=True, kw_only=True):
    """What `shrink` is asked to do. `depthgauge shrink --help` shows the same text.

    The options about loading a model are those of `ModelOptions`.

    In Python, `remove` may also be a whole number, a number between 0 and 1 as a share (`0.25` is `25%`), or a list.

    Attributes:
        remove: How many blocks to remove: 7, 25%, 2,4,6, or plan.json. A share is rounded down, and is at least 1
            block. Several make a model for each of them, from one search: OUT-2, OUT-4 and OUT-6. A plan that --out
            plan.json wrote, or depthgauge.json of a shrunk model, names the blocks, and has all other options.
        remove_layers: Remove exactly these blocks: 6,8-9. They are counted from 0, with both ends of a range.
        max_bytes: Remove as few blocks as make the weights fit this size on disk: 1.2GB or 800MB.
        max_increase: The most that the loss may grow: 0.1. As many blocks are removed as the guarantee allows, in
            nats per token.
        keep: Blocks that are never removed: 0,1,29.
        confidence: Confidence of the guarantee  [default: 0.95].
        effort: quick, default or high. More effort has more calibration windows, a wider search, and takes more time.
        recover: Train the kept blocks: 2M, 10min, auto, repair, none. They are trained towards the dense model's
            predictions on all of your text: a number of tokens, or a time; auto: as long as it helps, at most 2M tokens
            and 10 minutes; repair: on the calibration windows alone; none: no weights are changed  [default: auto on a
            GPU, repair on a CPU].
        general: The second half of what is trained on, which keeps the model general: a text file, a data set on the
            hub, ORG/NAME@REVISION or ORG/NAME@REVISION:FIELD, or none  [default: what the dense model writes after
            the beginnings of passages].
        evaluate: Also run these tasks on both models. Tasks are depthgauge_cloze, or names of lm-eval tasks with commas
            between them; 500 items of each, item by item.
        text: What to calibrate on. For a model of text, a text file, or FILE.jsonl:FIELD; repeat it for several. For a
            classifier, JSON lines or CSV with text and label. For an encoder–decoder model, JSON lines with source and
            target. For a model of images, a folder of them, and beside it, if it classifies, a file with file_name and
            label. For a model of speech, a folder with a.wav and its transcript a.txt  [default: text sampled from the
            model].
        stack: Stack of an encoder–decoder model: decoder  [default], encoder, or both. With both, all numbers count the
            blocks of both stacks, those of the encoder first, and the search divides what is removed.
        sampled: Share of calibration windows sampled from the model  [default: a third].
        window: Tokens per window  [default: 512, with --effort quick 256], or the most tokens of a labelled text, a
            source or a target  [default: 128].
        seed: Seed of everything random  [default: 0].
    """

    remove: Annotated[str | None, _SIZE] = None
    remove_layers: Annotated[str | None, _SIZE] = None
    max_bytes: Annotated[str | None, _SIZE, RARE] = None
    max_increase: Annotated[float | None, _SIZE] = None
    keep: Annotated[str | None, _SIZE, RARE] = None
    confidence: Annotated[float, _SIZE, RARE] = 0.95
    effort: Annotated[str, _ANY] = "default"
    recover: Annotated[str | None, _ANY] = None
    general: Annotated[str | None, _TEXT, RARE] = None
    evaluate: Annotated[str | None, _ANY] = None
    text: Annotated[tuple[str, ...], _TEXT] = ()
    stack: Annotated[str | None, _TEXT, RARE] = None
    sampled: Annotated[float | None, _TEXT, RARE] = None
    window: Annotated[int | None, _TEXT, RARE] = None
    seed: Annotated[int, _ANY, RARE] = 0

    @property
    def repairs(self) -> bool:
        """Whether the weights that are left are changed."""
        return self.recover != NONE

    def check(self) -> None:
        """Raise for options that contradict each other or are out of range."""
        check_common(self)
        if self.effort not in EFFORTS:
            raise unknown_name("effort", self.effort, EFFORTS)
        given = [f"--{name.replace('_', '-')}" for name in HOW_MUCH if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise InputError(f"say how much to remove by exactly one of {', '.join(WAYS)}, got {found}")
        if self.max_increase is not None:
            require_positive("max-increase", self.max_increase, "the largest increase of the loss in nats per token")
        if self.keep is not None and self.remove_layers is not None:
            raise InputError("--remove-layers names the blocks to remove, so there is nothing for --keep; leave it out")
        trains = self.recover is not None and amount_of(self.recover) is not None
        if self.general is not None and self.recover is not None and not trains:
            raise InputError(f"--general is trained on, and --recover {self.recover} does not train; leave one out")
        if self.sampled is not None and not 0 <= self.sampled <= 1:
            raise InputError(f"sampled must be a share from 0 to 1, got {self.sampled!r}")
        require_seed(self.seed)
        if self.sampled not in (None, 1) and not self.text:
            words = "divides the windows between --text and the model"
            raise InputError(f"--sampled {self.sampled:g} {words}; give a text, or leave --sampled out")
        if self.is_streamed:
            self.check_streamed()
        if self.max_bytes is not None:
            self.byte_limit()
        self.check_layers()

    def check_streamed(self) -> None:
        """Raise for what streamed weights are too slow for, or cannot do."""
        other = "leave --device stream out" if self.is_streamed else "use a machine with more memory"
        for is_given, reason in (
            (not self.text, "does not sample text from the model; give --text"),
            (self.sampled, "does not sample text from the model; leave --sampled out"),
            (
                self.recover not in (None, REPAIR, NONE, AUTO),
                "does not train weights, which would have to be in memory; leave --recover out, and run `depthgauge "
                "recover` on the result where it fits",
            ),
        ):
            if is_given:
                raise InputError(f"a model whose weights are streamed {reason}, or {other}")

    def check_layers(self, layers: int = UNKNOWN, name: str = "the model") -> None:
        """Raise if the options name blocks, or a number of blocks, that the model `name` cannot lose."""
        self.layers_to_remove(layers, name)
        left = layers - len(self.protected(layers, name))
        most = 1 if self.remove is None else max(self.counts(layers, name))
        if most > left:
            blocks = counted(most, "block")
            raise InputError(f"{blocks} cannot be removed from {name}: --keep leaves {left} of {layers}")

    def check_model(self, objective: str, name: str) -> None:
        """Raise for options that do not apply to the model `name`; a decoder is measured by its `loss`."""
        decoder = objective == "loss"
        if not decoder and self.max_increase is not None and objective != "labels":
            raise InputError(
                f"--max-increase limits the loss of a language model, and {name} is none; use --remove, the result "
                "shows how far its output moves"
            )
        if not decoder and self.evaluate is not None:
            raise InputError(f"--evaluate needs a causal language model, and {name} is none; leave it out")
        if not decoder and self.sampled is not None:
            raise InputError(f"--sampled needs a causal language model, and {name} is none; leave it out")

    def layers_to_remove(self, layers: int, name: str) -> tuple[int, ...] | None:
        """Return the blocks of `remove_layers` in the model `name` with this many layers; None if not given.

        >>> ShrinkOptions(remove_layers="6,8-9").layers_to_remove(12, "model")
        (6, 8, 9)
        """
        if self.remove_layers is None:
            return None
        found = _layer_numbers("remove-layers", self.remove_layers, layers, name)
        if len(found) >= layers:
            raise InputError(f"remove-layers names all {counted(layers, 'block')} of {name}; at least one must stay")
        return found

    def protected(self, layers: int, name: str) -> tuple[int, ...]:
        """Return the blocks of `keep` in the model `name` with this many layers."""
        return () if self.keep is None else _layer_numbers("keep", self.keep, layers, name)

    @property
    def removals(self) -> tuple[str, ...]:
        """The numbers and shares of `remove`, as they are written; each makes a model."""
        return tuple(part.strip() for part in (self.remove or "").split(","))

    def counts(self, layers: int = UNKNOWN, name: str = "the model") -> dict[int, str]:
        """Return the numbers of blocks that `remove` stands for in a model, in increasing order, as they are written.

        >>> ShrinkOptions(remove="25%,4").counts(30, "model"), ShrinkOptions(remove="10%").counts(4, "model")
        ({4: '4', 7: '25%'}, {1: '10%'})
        """
        found: dict[int, str] = {}
        for part in self.removals:
            match = re.fullmatch(r"0*([1-9]\d{0,8})|(\d{1,2}(?:\.\d+)?)\s*%", part)
            if match is None or (match[2] and not float(match[2])):
                what = "a number of blocks from 1 on, or a share of them below 100%"
                raise InputError(f"remove must be {what}, such as 7 or 25%, or several: 2,4,6, got {self.remove!r}")
            # 33.3333333333% of 12 blocks are 4
            count = int(match[1] or 0) or max(1, math.floor(round(float(match[2]) * layers / 100, 6)))
            if count in found:
                raise InputError(f"remove: {found[count]} and {part} are {count} of {name}; leave one of them out")
            found[_below(count, layers, name)] = part
        return dict(sorted(found.items()))

    def byte_limit(self) -> int:
        """Return the bytes of `max_bytes`: kB, MB and GB are powers of 1,000, and KiB, MiB and GiB of 1,024.

        >>> ShrinkOptions(max_bytes="1.5GB").byte_limit(), ShrinkOptions(max_bytes="2 KiB").byte_limit()
        (1500000000, 2048)
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?\s*", self.max_bytes or "")
        if match is None or float(match[1]) <= 0:
            raise InputError(f"max-bytes must be a size such as 1.2GB or 800MiB, got {self.max_bytes!r}")
        power = " KMGT".index(match[2].upper() or " ")
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _below(count: int, layers: int, name: str) -> int:
    """Return a number of blocks to remove; raise unless the model `name` has more."""
    if layers == 1:
        raise InputError(f"{name} has one block, and at least one must stay, so no block can be removed")
    if count >= layers:
        raise InputError(
            f"remove must be from 1 to {counted(layers - 1, 'block')}, got {count}; {name} has {layers} blocks and "
            "at least one must stay"
        )
    return count


def make_shrink_options(options: ShrinkOptions | None, fields: dict[str, Any]) -> ShrinkOptions:
    """Combine an options record with single options given by keyword; check the types of both.

    A single text may be given as one path, and `remove` as a whole number, a number between 0 and 1, or a list. None
    keeps the option of the record.
    """
    known = ShrinkOptions.__struct_fields__
    given = {name: value for name, value in fields.items() if value is not None or name not in known}
    normal: dict[str, Callable[[Any], Any]] = {
        "remove": _remove_text,
        "text": path_list,
        **dict.fromkeys(("tokenizer", "general"), str),
    }
    normal |= dict.fromkeys(("remove_layers", "keep", "max_bytes", "recover"), _as_text)
    return combine_options(ShrinkOptions, "shrink", options, given, normal)


def _as_text(value: Any) -> Any:
    """Return a number, or a list of numbers, as the command line writes it.

    >>> _as_text(200), _as_text([2, 4]), _as_text("auto"), _as_text(False)
    ('200', '2,4', 'auto', False)
    """
    if isinstance(value, list | tuple | range):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _layer_numbers(option: str, text: str, layers: int, name: str) -> tuple[int, ...]:
    """Return the blocks that a text such as `0,2-4` names, in increasing order."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part)
        if match is None:
            raise InputError(f"{option} must name blocks, such as 12-18 or 6,8-9, got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < layers:
            known = "" if layers == UNKNOWN else f" of {name}, whose {layers} blocks are 0 to {layers - 1}"
            raise InputError(f"{option}: {part.strip()} is not a block or an increasing range{known}")
        found |= {*range(first, last + 1)}
    return tuple(sorted(found))


def _remove_text(remove: Any) -> Any:
    """Return a number of blocks, a share of all blocks between 0 and 1, or several, as the command line writes it.

    >>> _remove_text(7), _remove_text(0.25), _remove_text(1 / 3), _remove_text([2, 4])
    ('7', '25%', '33.3333333333%', '2,4')
    """
    if isinstance(remove, str | Path):
        return str(remove)
    if isinstance(remove, list | tuple | range):
        return ",".join(map(_remove_text, remove))
    if isinstance(remove, numbers.Integral) and not isinstance(remove, bool):
        return str(int(remove))
    if isinstance(remove, numbers.Real) and 0 < float(remove) < 1:
        return f"{100 * float(remove):.10f}".rstrip("0").rstrip(".") + "%"
    raise InputError(
        f"remove must be a number of blocks or a share of all blocks, got {remove!r}; write remove=7 for 7 blocks, and "
        "remove=0.25 or remove='25%' for a quarter of them"
    )
