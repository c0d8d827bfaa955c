"""Remarks on a shrunk model in its record."""

from depthgauge.base.format import counted
from depthgauge.checkpoints.weights.load import BY_TARGETS
from depthgauge.results.labels import objective_label
from depthgauge.results.shrink_record import ShrinkRecord
from depthgauge.surgery.candidates import ShrunkModel
from depthgauge.surgery.gguf_layout import GgufLayout
from depthgauge.surgery.open_model import OpenedModel
from depthgauge.surgery.write_shrunk import type_notes


def shrink_notes(record: ShrinkRecord, opened: OpenedModel, shrunk: ShrunkModel) -> list[str]:
    """Return what a reader should know about how a model was made and what its numbers are."""
    checkpoint, notes = opened.checkpoint, [*opened.notes]
    if isinstance(opened.stored, GgufLayout):
        notes += type_notes(opened.stored, shrunk.encoded)
    elif checkpoint.source is not None and checkpoint.source.gguf is not None:
        notes.append("the source is a quantized GGUF file; its weights were dequantized and written as safetensors")
    if checkpoint.source is not None and checkpoint.source.tokenizer is not None:
        kept = "; the GGUF file keeps its own" if isinstance(opened.stored, GgufLayout) else ""
        notes.append(f"the tokenizer is that of {checkpoint.source.tokenizer}{kept}")
    if checkpoint.objective not in BY_TARGETS:
        notes.append(
            "the model is not a causal language model: the numbers say how far "
            f"{objective_label(checkpoint.objective).output} from the dense model's, and no perplexity is claimed"
        )
        if checkpoint.measured is not checkpoint.model:
            head = type(checkpoint.model).__name__
            notes.append(f"the head of the {head} was kept unchanged; its own loss was not measured")
    if checkpoint.stream is not None:
        notes.append(
            "the weights were streamed: no text was sampled from the model, no weights were trained, and the speed of "
            "transformers was not measured"
        )
    if shrunk.stages and not shrunk.repaired:
        notes.append("no repair lowered the objective on the selection windows, so no weight was changed")
    if (looks := record.plan.looks()) > 1 and record.guarantee is not None and not record.guarantee.tested:
        notes.append(
            f"{counted(looks, 'size')} may have been measured on these certify windows; the bounds allow for it"
        )
    return notes
