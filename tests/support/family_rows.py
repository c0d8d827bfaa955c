"""What `gauge` and `shrink` do with a tiny model of a family: one run, and the row of docs/families.md about it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

from family_configs import FamilyCase, tiny_family
from forked import ForkedScript
from tiny_checkpoints import save_tokenizer, text_of
from tiny_pairs import save_pairs
from tiny_vision import save_images, save_processor

import depthgauge as dg
from depthgauge.base.errors import DepthgaugeError
from depthgauge.checkpoints.source.library import quiet
from depthgauge.results.shrink_record import ShrinkRecord
from depthgauge.surgery import speed, student, verify

WINDOW, SAMPLES, NO = 16, 73, "–"
# What a refusal or a note may say, and how the table says it.
KNOWN = {
    r"which reads \w+; give a model of text": "reads neither text nor images",
    r"which reads recordings": "reads recordings, which were not given",
    r"model with stages: its configuration": "a number of heads for each stage",
    r"without layers: its configuration has no": "no number of layers in its configuration",
    r"Unrecognized configuration class": "`AutoModelForCausalLM` does not know its text model",
    r"cannot compute the output of": "does not run on token ids alone, or on one image",
    r"no key of the configuration of .* has the number of layers": "no number of layers of one stack",
    r"its blocks need other inputs": "its blocks need more than hidden states",
    r"its blocks do not return hidden states alone": "its blocks return more than hidden states",
    r"not kept in one list|the blocks of .* cannot be found|no list of \d+ blocks": "no list of blocks",
    r"its states are not arranged by window and token": "its states are not arranged by window and token",
    r"its blocks are not called as modules": "its blocks are not called as modules",
    r"bypasses transformers' attention interface|uses another form of attention|their calls are not told apart": (
        "heads: attention not observable"
    ),
    r"has no attention heads": "heads: it has none",
    r"the search left out .* of blocks": "the search left out blocks that cannot be removed",
    r"contains a text model; shrink needs the text model alone": "contains a text model",
    r"cannot be sampled": "not sampled: no usual cache",
    r"blocks? .* not removed: ": "the removal of some blocks was not verified",
    r"without the removed blocks, the configuration gives": "the removal of a block was not verified",
    r"cannot be removed from .*: the model without them should compute": "the removal of a block was not verified",
    r"does not follow num_hidden_layers": "its number of blocks is not num_hidden_layers",
    r"blocks cannot be removed from .*: ": "its blocks cannot be called one by one",
    r"transformers does not accept the configuration": "cannot be built or run without some blocks",
    r"because the structure was not verified: ": "repair: its sublayers were not found",
    r"the repair leaves the matrices of the MLP unchanged": "repair: not of the MLP's last map",
    r"the repair leaves the matrices of the attention": "repair: not of the attention's last map",
    r"the repair leaves the matrices of the": "repair: not of every last map",
    r"generates other text with the key–value cache": "generation differs with its cache",
    r"does not contain the tensors of its model|is not the one in memory": "the written model lacks weights",
    r"a fresh process cannot run .* LinearAttention": "cannot be built or run without some blocks",
    r"the attention of a .* cannot be exchanged": "a part has another kind of attention",
    r"a fresh process cannot run": "the written model cannot be loaded or run",
    r"lacks .* weights? of|has .* weights? that a|contradicts its config": "the written model cannot be loaded or run",
}


@dataclass(frozen=True)
class FamilyRow:
    """One row: what was done with a family, `–` where it was not done, and why not.

    - `gauge`: whether it was gauged
    - `heads`: whether its attention weights were observed
    - `removed`: which of its blocks can be removed
    - `repair`: how the others were repaired
    - `cache`, `reload`: whether generation with cache, and the outputs of the reloaded model, are equal
    - `reason`: why something was not done
    """

    family: str
    kind: str
    gauge: str = NO
    heads: str = NO
    removed: str = NO
    repair: str = NO
    cache: str = NO
    reload: str = NO
    reason: str = ""

    def line(self) -> str:
        """Return the row in Markdown."""
        return f"| {' | '.join(getattr(self, field.name) for field in fields(self))} |"


@dataclass(frozen=True)
class FamilyRun:
    """What was done with a tiny model of a family.

    - `row`: what docs/families.md says about it
    - `record`: the record of `shrink`, or None if the model was not shrunk
    - `smaller`: the folder of the model that it wrote
    """

    row: FamilyRow
    record: ShrinkRecord | None
    smaller: Path


def known_reason(message: str) -> str:
    """Return how the table says a refusal or a note; raise if it is not a known one."""
    found = next((words for pattern, words in KNOWN.items() if re.search(pattern, message)), None)
    assert found is not None, f"not a known reason: {message}"
    return found


@contextmanager
def quick_shrinks() -> Iterator[None]:
    """Let `shrink` take few windows, few steps and little time, and check what it wrote in a forked process."""
    few = student.Effort(8, 6, 20, 4, 4, 0, 1, 6, window=WINDOW)
    forking = type("Forking", (), {"Popen": ForkedScript, "PIPE": None, "DEVNULL": None})
    with (
        patch.dict(student.EFFORT, quick=few),
        patch.object(verify, "subprocess", forking),
        patch.object(speed, "SECONDS", 0.1),
    ):
        yield


def run_family(case: FamilyCase, folder: Path) -> FamilyRun:
    """Gauge and shrink a tiny model of a family in an empty folder. Errors that are not ours are raised."""
    smaller = folder / "smaller"
    try:
        model = tiny_family(case)
    except ImportError as error:
        needed = re.search(r"requires the (\w+) library", str(error))
        reason = f"not built: needs {needed[1] if needed else error}"
        return FamilyRun(FamilyRow(case.model_type, case.kind, reason=reason), None, smaller)
    except Exception:  # from transformers, which checks sizes against each other
        reason = "not built: its defaults cannot be made small"
        return FamilyRun(FamilyRow(case.model_type, case.kind, reason=reason), None, smaller)
    dense = folder / "dense"
    with quiet():
        model.save_pretrained(dense)
    given, amount = _given(case, model, dense)
    cells, reasons, record = {}, [], None
    try:
        gauged = dg.gauge(dense, **given, **amount)
        unobserved = getattr(gauged.subjects[0], "unobserved", None)
        cells |= {"gauge": "yes", "heads": "yes" if unobserved is None else "no"}
        reasons += [] if unobserved is None else [unobserved]
    except DepthgaugeError as error:
        reasons.append(str(error))
    try:
        record = _shrunk(dense, smaller, given, reasons)
        cells |= _cells(record, reasons)
    except DepthgaugeError as error:
        reasons.append(str(error))
    reason = "; ".join(dict.fromkeys(map(known_reason, reasons)))
    return FamilyRun(FamilyRow(case.model_type, case.kind, **cells, reason=reason), record, smaller)


def _given(case: FamilyCase, model: Any, dense: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Save what a model reads, and return the options of `gauge` and `shrink`, and how much `gauge` needs of it."""
    folder = dense.parent
    if model.main_input_name == "pixel_values":
        save_processor(dense, model.config)
        return {"text": save_images(folder / "images", SAMPLES)}, {"samples": 2}
    # Beside the model: transformers reads the tokenizers of some families in its own way.
    has_two = bool(model.config.is_encoder_decoder)
    save_tokenizer(folder / "tokenizer", special=has_two or case.kind == "encoder")
    common = {"tokenizer": str(folder / "tokenizer"), "window": WINDOW}
    if has_two:
        return {"text": save_pairs(folder / "pairs.jsonl", SAMPLES), **common}, {"samples": 2}
    text = folder / "corpus.txt"
    text.write_text(text_of(1500))
    return {"text": str(text), "allow": "unread", **common}, {"tokens": 2 * WINDOW}


def _shrunk(dense: Path, smaller: Path, given: dict[str, Any], reasons: list[str]) -> ShrinkRecord:
    """Remove one block; if it was not sampled, why not is added to `reasons`."""
    options: dict[str, Any] = {"remove": 1, "effort": "quick", **given}
    try:
        return dg.shrink(dense, out=smaller, **options).record
    except DepthgaugeError as error:
        if "cannot be sampled" not in str(error):
            raise
        reasons.append(str(error))
        return dg.shrink(dense, out=smaller, sampled=0, **options).record


def _cells(record: ShrinkRecord, reasons: list[str]) -> dict[str, str]:
    """Return the cells about a removed block; what was not done is added to `reasons`."""
    assert record.layers_after == record.layers_before - 1
    assert record.reload is not None
    said = r"not removed: |without repair, because|the repair leaves|the search left out"
    about = [note for note in record.notes if re.search(said, note)]
    reasons += about
    fixed = next((re.match(r"blocks? (?:0 to )?(\d+) ", note) for note in about if "not removed" in note), None)
    left_out = any("the search left out" in note for note in about)
    stages = [stage.name for stage in record.stages]
    return {
        "removed": "some" if left_out else "any" if fixed is None else f"from {int(fixed[1]) + 1} on",
        "repair": NO if not stages else "least squares" if "least squares" in stages else "training",
        "cache": NO if record.reload.generation == "not applicable" else "equal",
        "reload": "equal",
    }
