"""The end of `shrink`: measure speed, write the model, verify it in a fresh process, and describe the result."""

import platform
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from depthgauge._format import counted
from depthgauge._journal import RECORD, Journal
from depthgauge._version import __version__
from depthgauge.checkpoints.library import transformers
from depthgauge.checkpoints.source import Source
from depthgauge.progress import Step, silent
from depthgauge.results.shrink_record import (
    BeforeAfter,
    GuaranteeRecord,
    LossRecord,
    QuantileRecord,
    ReloadRecord,
    ShrinkRecord,
    SpeedRecord,
)
from depthgauge.results.shrink_verdicts import guarantee_sentences
from depthgauge.surgery.calibration import Calibration
from depthgauge.surgery.certify import SHARE, Measured, guaranteed, loss_record, measure_windows, text_records
from depthgauge.surgery.guarantee import ASSUMPTION, mixed_loss
from depthgauge.surgery.model_card import CardFacts, hub_name, mergekit_plan, model_card
from depthgauge.surgery.speed import SpeedComparison, compare_speed, weight_bytes
from depthgauge.surgery.verify import verify_reload
from depthgauge.surgery.write_model import write_model
from depthgauge.workflows.shrink_subject import CONFIDENCE, Subject
from depthgauge.workflows.shrink_work import QUANTILE, Made, certifier_of, computed_like


@dataclass(frozen=True, eq=False)
class Finished:
    """A finished model and its measurements in memory.

    - `subject`, `calibration`, `made`: the source model, the windows, the shrunk model
    - `speed`: its speed beside the dense model's
    - `started`: when the run started
    """

    subject: Subject
    calibration: Calibration
    made: Made
    speed: SpeedComparison
    started: float
    progress: Step = silent

    def measured(self) -> Measured:
        """Measure the shrunk model in memory on the certify windows."""
        model, dense = self.made.model, self.subject.checkpoint.model
        return measure_windows(
            computed_like(dense, model),
            self.calibration.certify.ids,
            decoder=self.subject.decoder,
            dense=self.made.dense,
            progress=self.progress,
            label="shrunk model, certify windows",
        )

    def record(self, shrunk: Measured, out: str | None) -> ShrinkRecord:
        """Describe the result.

        Args:
            shrunk: the shrunk model on the certify windows.
            out: where it was written, or None.
        """
        subject, made = self.subject, self.made
        checkpoint, source = subject.checkpoint, subject.checkpoint.source
        limit, kind = subject.settings.max_increase, subject.settings.guarantee or QUANTILE
        certifier = certifier_of(subject, self.calibration, made.dense)
        guarantee = certifier.record(shrunk, limit if made.tested else None, kind, made.tested, self._looks())
        speed = self.speed
        return ShrinkRecord(
            version=__version__,
            name=checkpoint.name,
            objective=checkpoint.objective,
            layers_before=checkpoint.layers,
            layers_after=checkpoint.layers - len(made.plan.removed),
            removed=made.plan.removed,
            repaired=any(step.step for step in made.repair),
            loss=loss_record(self.calibration, made.dense, shrunk),
            texts=text_records(self.calibration, made.dense, shrunk),
            guarantee=guarantee,
            speed=SpeedRecord(
                prefill=speed.prefill,
                decode=speed.decode,
                prefill_before=speed.before.prefill,
                prefill_after=speed.after.prefill,
                decode_before=speed.before.decode,
                decode_after=speed.after.decode,
                what=f"{counted(speed.window, 'token')}, then {counted(speed.new_tokens, 'new token')}, "
                f"on {speed.device}",
            ),
            parameters=BeforeAfter(before=speed.before.parameters, after=speed.after.parameters),
            bytes=BeforeAfter(before=None if source is None else weight_bytes(source), after=None),
            memory=BeforeAfter(before=speed.before.memory, after=speed.after.memory),
            curve=made.curve,
            repair=made.repair,
            heal=made.healed,
            reload=None,
            plan=made.plan,
            notes=self._notes(),
            versions=_versions(),
            seconds=time.perf_counter() - self.started,
            out=out,
        )

    def _looks(self) -> int:
        """Return how many sizes a run with a limit, whose plan is followed, may have tested on the certify windows."""
        is_chosen = self.subject.settings.max_increase is not None and not self.made.tested
        return max(1, len(self.made.plan.search)) if is_chosen else 1

    def _notes(self) -> tuple[str, ...]:
        subject, notes = self.subject, []
        source = subject.checkpoint.source
        if source is not None and source.gguf is not None:
            notes.append("the source is a quantized GGUF file; its weights were dequantized and written as safetensors")
        if not subject.decoder:
            notes.append(
                "the model is not a causal language model: the numbers are relative distances of its final states from "
                "the dense model's, and no perplexity is claimed"
            )
            if subject.checkpoint.measured is not subject.checkpoint.model:
                notes.append(
                    f"the head of the {type(subject.checkpoint.model).__name__} was kept unchanged; its own loss was "
                    "not measured"
                )
        if self.made.repair and not any(step.step for step in self.made.repair):
            notes.append("no repair lowered the objective on the selection windows, so no weight was changed")
        if self.made.healed is not None and not self.made.healed.kept:
            notes.append("healing did not lower the objective on the selection windows, so its result was discarded")
        if (looks := self._looks()) > 1:
            notes.append(
                f"the plan is that of a run with --max-increase, which may have tested {looks} sizes on these windows; "
                "the bounds allow for it"
            )
        notes.append(f"memory: {self.speed.memory_kind}")
        return tuple(notes)


def unreached(subject: Subject, made: Made, calibration: Calibration, started: float) -> ShrinkRecord:
    """Describe a run in which no size stays within the limit, so that there is no model."""
    checkpoint, source = subject.checkpoint, subject.checkpoint.source
    confidence, chosen = subject.settings.confidence or CONFIDENCE, guaranteed(calibration)
    return ShrinkRecord(
        version=__version__,
        name=checkpoint.name,
        objective=checkpoint.objective,
        layers_before=checkpoint.layers,
        layers_after=checkpoint.layers,
        removed=(),
        repaired=False,
        loss=LossRecord(dense=float(made.dense.losses[chosen].mean()), shrunk=None, low=None, high=None),
        texts=(),
        guarantee=GuaranteeRecord(
            quantile=QuantileRecord(increase=None, share=SHARE, confidence=confidence, windows=int(chosen.sum())),
            mean=None,
            about=calibration.guaranteed_kind,
            assumption=ASSUMPTION,
            limit=subject.settings.max_increase,
            tested=made.tested,
        ),
        speed=None,
        parameters=BeforeAfter(before=sum(p.numel() for p in checkpoint.model.parameters()), after=None),
        bytes=BeforeAfter(before=None if source is None else weight_bytes(source), after=None),
        memory=None,
        curve=made.curve,
        repair=(),
        heal=None,
        reload=None,
        plan=made.plan,
        notes=(),
        versions=_versions(),
        seconds=time.perf_counter() - started,
        out=None,
    )


def finish(subject: Subject, made: Made, calibration: Calibration, started: float, progress: Step) -> Finished:
    """Measure the speed of the shrunk model beside the dense model's."""
    progress(0, 1, "speed of both models")
    dense = subject.checkpoint.model
    # Half precision is slow on a CPU: compare the models in the dtype in which the dense one was loaded.
    speed = compare_speed(dense, computed_like(dense, made.model), calibration.certify.ids[:1])
    return Finished(subject, calibration, made, speed, started, progress)


def write_result(finished: Finished, out: str | Path, overwrite: bool, journal: Journal | None = None) -> ShrinkRecord:
    """Write the model, load it in a fresh process, compare, and describe it with the reloaded model's losses.

    Args:
        finished: the model and its measurements.
        out: the directory to create.
        overwrite: replace a checkpoint that exists.
        journal: notes the directory before it gets its final name.

    Raises:
        VerificationError: the written model is not the model in memory; nothing is left at `out`.
    """
    subject, made = finished.subject, finished.made
    base = hub_name(subject.checkpoint.config, subject.checkpoint.source)
    found: list[ShrinkRecord] = []

    def verify(folder: Path) -> dict[str, str]:
        finished.progress(0, 1, "loading the result in a fresh process")
        record = _verified(finished, folder, str(out))
        found.append(record)
        text = msgspec.json.format(msgspec.json.encode(record)).decode() + "\n"
        if journal is not None:
            journal.claim(out, text)
        return {RECORD: text, "README.md": _card(record, base)}

    documents = {}
    if not any(step.step for step in made.repair) and not (made.healed and made.healed.kept):
        kept = [layer for layer in range(subject.checkpoint.layers) if layer not in made.plan.removed]
        dtype = str(made.model.dtype).removeprefix("torch.")
        documents["plan.mergekit.yaml"] = mergekit_plan(made.plan.model, dtype, kept)
    write_model(
        made.model,
        subject.checkpoint.source,
        subject.tokenizer,
        out,
        documents,
        overwrite=overwrite,
        verify=verify,
    )
    return found[0]


def _verified(finished: Finished, folder: Path, out: str) -> ShrinkRecord:
    """Load the written model in a fresh process and return the record with its losses."""
    subject, ids = finished.subject, finished.calibration.certify.ids
    device = "auto" if subject.settings.device_map else str(subject.checkpoint.device)
    # Half precision is slow on a CPU; float32 holds the same weights.
    compute = torch.float32 if device == "cpu" and finished.made.model.dtype.itemsize < 4 else None
    proof = verify_reload(
        folder, ids, finished.made.model, device=device, dense=finished.made.dense.states, compute=compute
    )
    losses = torch.tensor(proof.losses, dtype=torch.float64)
    vocabulary, mixed = finished.made.dense.vocabulary, losses
    if vocabulary is not None:
        mixed = mixed_loss(-torch.tensor(proof.token_losses, dtype=torch.float64), vocabulary).mean(dim=1)
    record = finished.record(Measured(losses, mixed, vocabulary), out)
    generation = "not applicable" if proof.generated is None else proof.remark or "equal with and without cache"
    return msgspec.structs.replace(
        record,
        bytes=BeforeAfter(before=record.bytes.before, after=weight_bytes(Source(folder))),
        reload=ReloadRecord(difference=proof.difference, layers=proof.layers, generation=generation),
    )


def _card(record: ShrinkRecord, base_model: str | None) -> str:
    """Return the model card. It is published with the model, so it contains no path of this machine."""
    speed, source = record.speed, Path(record.plan.model).name
    facts = CardFacts(
        name=source,
        base_model=base_model,
        layers=record.layers_before,
        removed=record.removed,
        repaired="the maps that write into the residual stream were refitted to the states of the source model"
        if record.repaired
        else None,
        objective=record.objective,
        before=record.loss.dense or 0.0,
        after=record.loss.shrunk or 0.0,
        healed=record.heal.steps if record.heal is not None and record.heal.kept else 0,
        texts=[(text.name, text.increase or 0.0) for text in record.texts],
        guarantees=guarantee_sentences(record),
        parameters=(record.parameters.before or 0, record.parameters.after or 0),
        speed=None if speed is None or speed.prefill is None else (speed.prefill, speed.decode),
        dequantized=record.plan.model.endswith(".gguf"),
        command=f"depthgauge shrink {source} --from-plan depthgauge.json --out smaller",
    )
    return model_card(facts)


def _versions() -> dict[str, str]:
    return {
        "depthgauge": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers().__version__),
        "machine": platform.machine(),
    }
