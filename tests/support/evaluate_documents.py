"""A document of `evaluate`: two models on two tasks and one text."""

from functools import cache
from typing import Any

from depthgauge.checkpoints.tasks.confidence import accuracy_record, mean_record
from depthgauge.results.evaluate_record import (
    AccuracyRecord,
    EvaluatedModel,
    EvaluatedTask,
    EvaluatedText,
    EvaluateOptions,
    EvaluateRecord,
    PerplexityRecord,
)

HOSTILE = "<script>alert('x')</script> & [bold]"


def answers(right: int, items: int, shift: int = 0) -> list[bool]:
    return [(k + shift) % items < right for k in range(items)]


def answers_of(model: int, items: int) -> list[bool]:
    return answers(items * 3 // 4 - 4 * model, items, 2 * model)


@cache
def accuracy_of(model: int, items: int) -> AccuracyRecord:
    return accuracy_record(answers_of(model, items), answers_of(0, items) if model else None)


@cache
def mean_of(model: int) -> AccuracyRecord:
    found, first = ([answers_of(one, items) for items in (60, 40)] for one in (model, 0))
    return mean_record(found, first if model else None)


@cache
def evaluation(*names: str) -> EvaluateRecord:
    """Return a record of these models; later models answer fewer items right."""
    names = names or ("./model", "./smaller")
    tasks = []
    for task, items, metrics in (("piqa", 60, ("acc", "acc_norm")), ("winogrande", 40, ("acc",))):
        for metric in metrics:
            is_main = metric == metrics[-1]
            tasks.append(
                EvaluatedTask(
                    task=task, metric=metric, is_main=is_main, items=items, all_items=1000, shots=0, sha256="ab" * 32,
                    results=tuple(accuracy_of(k, items) for k in range(len(names))),
                )
            )  # fmt: skip
    texts = [
        PerplexityRecord(
            loss=3.0 + k, perplexity=20.1 + k, bits_per_byte=0.9 + k, windows=8, tokens=8 * 511, low=2.9, high=3.1,
            increase=float(k) if k else None, increase_low=0.5 if k else None, increase_high=1.5 if k else None,
        )
        for k in range(len(names))
    ]  # fmt: skip
    return EvaluateRecord(
        version="0.1.0",
        models=tuple(
            EvaluatedModel(
                name=name, family="llama", layers=30 - k, parameters=10**6, dtype="float32", bos=None,
                bos_reason="the model has no BOS token",
            )
            for k, name in enumerate(names)
        ),
        tasks=tuple(tasks),
        mean=tuple(mean_of(k) for k in range(len(names))),
        texts=(EvaluatedText(name="wikitext2", source="w.txt", sha256="cd" * 32, window=512, results=tuple(texts)),),
        settings=EvaluateOptions(tasks="piqa,winogrande", limit=60, perplexity=("wikitext2:w.txt",)),
        notes=("a remark",),
        versions={"depthgauge": "0.1.0", "lm-eval": "0.4.13"},
        seconds=61.0,
    )  # fmt: skip


def document(*names: str) -> dict[str, Any]:
    return evaluation(*names).to_json()
