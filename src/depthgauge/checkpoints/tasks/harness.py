"""Run tasks of the lm-eval harness on a loaded model: which items it answers right.

lm-eval reads the data, builds the prompts and scores the answers, so the numbers are those of the harness. The model is
the one that our loader made, and items start with the special tokens of `start_token`.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from depthgauge.base.format import one_line
from depthgauge.base.progress import Step
from depthgauge.checkpoints.blocks.model_output import batch_size
from depthgauge.checkpoints.inputs.text_files import offline_if_unreachable, quiet_datasets
from depthgauge.checkpoints.source.library import quiet
from depthgauge.checkpoints.source.model_class import context_length
from depthgauge.checkpoints.tasks.known_tasks import ClozeText, TaskError, cloze_config, task_folders, unknown_task
from depthgauge.checkpoints.tasks.language import Start
from depthgauge.checkpoints.weights.load import Checkpoint, require_rows
from depthgauge.results.evaluate_record import CLOZE

METRICS = ("acc_norm", "acc", "exact_match")
"""Metrics that say for each item whether the answer is right; the first one that a task has is its main metric."""
_TYPES = ("multiple_choice", "loglikelihood")
_MOST_BATCH = 64
_FEWSHOT_SEED = 1234
"""The harness's own default."""


@dataclass(frozen=True)
class ItemAnswers:
    """The answers of one model to the items of one task.

    - `right`: for each metric, whether the answer to each item is right
    - `all_items`: how many items the task has
    - `shots`: examples before each item
    - `sha256`: digest of the items with their prompts
    """

    right: dict[str, tuple[bool, ...]]
    all_items: int
    shots: int
    sha256: str


def load_tasks(names: Sequence[str], cloze: ClozeText | None, message: Callable[[str], None]) -> dict[str, Any]:
    """Load tasks and their data, by name; no model is needed yet.

    A name is one of lm-eval's tasks, groups or tags, the YAML file of a task, or `depthgauge_cloze`, whose items are
    `cloze`.

    Raises:
        TaskError: a task is not known, its data cannot be loaded, or it has no answers that are right or wrong.
    """
    loaded: dict[str, Any] = {}
    with _quiet_harness(), offline_if_unreachable():
        for name in names:
            if name != CLOZE:
                message(f"loading the data of {name}")
            for task in _load(name, cloze):
                loaded[str(task.task_name)] = _checked(task)
    return loaded


def _load(name: str, cloze: ClozeText | None) -> list[Any]:
    """Return the tasks that a name stands for, with their data."""
    from lm_eval.tasks import TaskManager

    if name == CLOZE:
        assert cloze is not None
        spec: Any = cloze_config(cloze)
    else:
        spec = name
    folders = task_folders(name)
    manager = TaskManager(include_defaults=False, include_path=folders or None)
    if folders and name in manager.all_groups:
        manager = TaskManager()  # the tasks of a group may be anywhere; this takes about 15 seconds
    if folders and name not in manager.all_tasks:
        raise unknown_task(name)
    try:
        return list(manager.load([spec])["tasks"].values())
    except Exception as error:  # datasets, yaml and the tasks' own code raise errors of many kinds
        what = f"the task {name} cannot be loaded" if Path(name).suffix else f"the data of the task {name} is missing"
        raise TaskError(
            f"{what}: {one_line(error)}; lm-eval downloads it from the Hugging Face hub, or reads the files that the "
            "task names: connect this machine, or copy the cache of another one (~/.cache/huggingface)"
        ) from error


def _checked(task: Any) -> Any:
    """Return a task, or raise if its items are not answered right or wrong by comparing likelihoods."""
    if task.OUTPUT_TYPE not in _TYPES or not set(METRICS) & set(task.aggregation()):
        advice = "; evaluate --perplexity measures a text" if task.OUTPUT_TYPE == "loglikelihood_rolling" else ""
        raise TaskError(
            f"the task {task.task_name} is of the type {task.OUTPUT_TYPE} with the metrics "
            f"{', '.join(task.aggregation())}; expected multiple_choice or loglikelihood with one of "
            f"{', '.join(METRICS)}{advice}"
        )
    if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise TaskError(f"the task {task.task_name} runs code or reads images; give a task of text")
    if task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=0)
    return task


def answer_tasks(
    checkpoint: Checkpoint,
    tokenizer: Any,
    start: Start,
    tasks: dict[str, Any],
    limit: int,
    progress: Step,
) -> dict[str, ItemAnswers]:
    """Let a model answer the first `limit` items of each task, all items if it is 0.

    The items, prompts and examples are the same for every model.
    """
    with _quiet_harness():
        from lm_eval.evaluator import evaluate

        for task in tasks.values():
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        model = _harness_model(checkpoint, tokenizer, start, progress)
        done = evaluate(lm=model, task_dict={"tasks": tasks}, limit=limit or None, bootstrap_iters=0, log_samples=True)
    return {name: _answers(task, done["samples"][name]) for name, task in tasks.items()}


def _answers(task: Any, samples: Sequence[dict[str, Any]]) -> ItemAnswers:
    first = samples[0]["filter"]
    rows = sorted((row for row in samples if row["filter"] == first), key=lambda row: int(row["doc_id"]))
    right = {}
    for metric in METRICS:
        values = [row.get(metric) for row in rows]
        if all(value in (0, 1) for value in values):  # also True and 1.0
            right[metric] = tuple(bool(value) for value in values)
    if not right:
        raise TaskError(f"the task {task.task_name} gives partial scores; expected answers that are right or wrong")
    items = "\n".join(f"{row['doc_id']} {row['doc_hash']} {row['prompt_hash']} {row['target_hash']}" for row in rows)
    digest = hashlib.sha256(items.encode()).hexdigest()
    return ItemAnswers(right, len(task.eval_docs), int(task.config.num_fewshot or 0), digest)


def _harness_model(checkpoint: Checkpoint, tokenizer: Any, start: Start, progress: Step) -> Any:
    """Return a loaded model as lm-eval calls it."""
    from lm_eval.models.huggingface import HFLM

    class HarnessModel(HFLM):  # type: ignore[misc]
        """A model that reads our special tokens and reports its progress."""

        done, total = 0, 0

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            """Convert a text to token ids, with the special tokens of our decision unless none are wanted."""
            ids: list[int] = self.tokenizer.encode(string, add_special_tokens=False)
            return ids if add_special_tokens is False else [*start.before, *ids]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            """Return the log-likelihoods of answers, without a progress bar of lm-eval."""
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, override_bs: Any = None) -> Any:
            encoded = [[*context, *continuation] for _, context, continuation in requests]
            require_rows(checkpoint, [torch.tensor(ids) for ids in encoded])
            self.done, self.total = 0, len(requests)
            longest = min(max(map(len, encoded)), context_length(checkpoint.config) or 2**31)
            self.batch_size_per_gpu = min(_MOST_BATCH, batch_size(checkpoint.model, longest, loss=True))
            return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

        def _model_call(self, inps: Any, *args: Any, **keywords: Any) -> Any:
            output = super()._model_call(inps, *args, **keywords)
            self.done = min(self.total, self.done + len(inps))
            progress(self.done, self.total, f"answers of {checkpoint.name}")
            return output

    prefix = start.before[-1] if start.before else None
    with quiet():
        return HarnessModel(
            pretrained=checkpoint.model,
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval may add a padding token
            prefix_token_id=prefix,
            max_length=context_length(checkpoint.config),
            # lm-eval 0.4.13 takes the wrong rows from its cache if two requests have the same tokens and divide them
            # into context and answer at different places.
            logits_cache=False,
            batch_size=1,
        )


@contextmanager
def _quiet_harness() -> Iterator[None]:
    """Suppress the log messages, progress bars and warnings of lm-eval and datasets; errors are still raised."""
    with quiet_datasets():
        module: Any = import_module("lm_eval.api.task")
        bar = module.tqdm
        module.tqdm = partial(bar, disable=True)
        try:
            yield
        finally:
            module.tqdm = bar
