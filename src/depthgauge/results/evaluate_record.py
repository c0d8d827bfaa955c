"""The result of `evaluate` as records."""

from collections.abc import Mapping
from typing import Any

from depthgauge.base.format import number
from depthgauge.base.frames import frame
from depthgauge.results.evaluate_options import EvaluateOptions
from depthgauge.results.record import Count, Measured, Number, Record, ResultError, check_schema, read

EVALUATE_SCHEMA = "depthgauge.evaluate/1"
EVALUATE_ADVICE = "give the file that `depthgauge evaluate --out` wrote"


class EvaluatedModel(Record, frozen=True, kw_only=True):
    """A model that was evaluated: its name, size and number type, and whether items start with the BOS token."""

    name: str
    family: str
    layers: Count
    parameters: Count
    dtype: str
    bos: bool | None
    bos_reason: str


class AccuracyRecord(Record, frozen=True, kw_only=True):
    """The accuracy of one model, and how it differs from that of the first model on the same items.

    - `accuracy`: share of right answers
    - `lost`, `gained`: items that only the first model, and only this model, answers right
    - `difference`, `low`, `high`: accuracy of this model less that of the first, and its 95 % confidence interval
    - `p`: two-sided p-value of McNemar's exact test
    - `falls_at_most`: with the confidence of the settings, the accuracy on items like these falls by at most this

    All but `accuracy` are None for the first model.
    """

    accuracy: Number
    lost: Count | None = None
    gained: Count | None = None
    difference: Measured = None
    low: Measured = None
    high: Measured = None
    p: Measured = None
    falls_at_most: Measured = None


class EvaluatedTask(Record, frozen=True, kw_only=True):
    """One task, scored by one metric.

    - `metric`: `acc`, or `acc_norm`, which divides the likelihood of an answer by its length
    - `is_main`: whether it is the metric of this task that the mean over tasks uses
    - `items`, `all_items`: the items that were used, and those that the task has
    - `shots`: examples with answers before each item
    - `sha256`: digest of the items, with their prompts
    - `results`: one entry per model
    """

    task: str
    metric: str
    is_main: bool
    items: Count
    all_items: Count
    shots: Count
    sha256: str
    results: tuple[AccuracyRecord, ...]


class PerplexityRecord(Record, frozen=True, kw_only=True):
    """The loss of one model on a text, in nats per predicted token; the perplexity is exp(loss).

    - `bits_per_byte`: Σ −log₂ p(token) / bytes of the predicted text; it can be compared between tokenizers
    - `windows`, `tokens`: how many windows, and predicted tokens in all of them
    - `low`, `high`: the 95 % confidence interval of `loss`; None with fewer than 4 windows
    - `increase`, `increase_low`, `increase_high`: `loss` less that of the first model, window by window, with its
      interval; None for the first model, and where the tokenizers differ
    """

    loss: Number
    perplexity: Measured
    bits_per_byte: Number
    windows: Count
    tokens: Count
    low: Measured
    high: Measured
    increase: Measured = None
    increase_low: Measured = None
    increase_high: Measured = None


class EvaluatedText(Record, frozen=True, kw_only=True):
    """A text that the perplexity was measured on: its name, its file, tokens per window, one entry per model."""

    name: str
    source: str
    sha256: str
    window: Count
    results: tuple[PerplexityRecord, ...]


class EvaluateRecord(Record, frozen=True, kw_only=True):
    """The result of `evaluate`: several models on the same items and texts.

    - `models`: the models; the others are compared with the first
    - `tasks`: one entry per task and metric
    - `mean`: over the main metrics of all tasks, one entry per model; empty if there is one task
    - `texts`: the perplexities
    - `settings`: the options
    """

    schema: str = EVALUATE_SCHEMA
    version: str
    models: tuple[EvaluatedModel, ...]
    tasks: tuple[EvaluatedTask, ...]
    mean: tuple[AccuracyRecord, ...]
    texts: tuple[EvaluatedText, ...]
    settings: EvaluateOptions
    notes: tuple[str, ...]
    versions: dict[str, str]
    seconds: Number

    def summary(self) -> Mapping[str, str]:
        """Return the models, and the accuracies on each task."""
        found = {f"{task.task} {task.metric}": task.results for task in self.tasks if task.is_main}
        accuracies = {name: ", ".join(number(one.accuracy) for one in rows) for name, rows in found.items()}
        return {"models": ", ".join(model.name for model in self.models), **accuracies}

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with one row per task, metric and model.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return frame(
            [
                {"task": task.task, "metric": task.metric, "items": task.items, "model": model.name, **one.to_json()}
                for task in self.tasks
                for model, one in zip(self.models, task.results, strict=True)
            ]
        )


def check_evaluate(document: Any, name: str = "the result") -> EvaluateRecord:
    """Return a parsed result document as a record; keys that the schema does not know are ignored."""
    check_schema(document, EVALUATE_SCHEMA, name, EVALUATE_ADVICE)
    record = read(document, EvaluateRecord, name, EVALUATE_ADVICE)
    entries = {f"tasks[{k}].results": len(task.results) for k, task in enumerate(record.tasks)}
    entries |= {f"texts[{k}].results": len(text.results) for k, text in enumerate(record.texts)}
    entries |= {"mean": len(record.mean)} if record.mean else {}
    for place, count in entries.items():
        if count != len(record.models):
            expected = f"expected one entry per model, {len(record.models)}, got {count}"
            raise ResultError(f"{name}: {place}: {expected}; {EVALUATE_ADVICE}")
    return record
