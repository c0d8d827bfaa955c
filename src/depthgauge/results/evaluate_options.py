"""The options of `evaluate`, each declared once: the command line, the Python interface and the result use these."""

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from depthgauge.base.errors import InputError, require_count
from depthgauge.results.gauge_options import ModelOptions, check_common, path_list
from depthgauge.results.record import RARE, combine_options

TASKS = "tasks"
CLOZE = "depthgauge_cloze"
"""The task that depthgauge ships."""
_TASKS = Meta(extra={"only": TASKS})


class EvaluateOptions(ModelOptions, frozen=True, kw_only=True):
    """What `evaluate` is asked to do. `depthgauge evaluate --help` shows the same text.

    The options about loading a model are those of `ModelOptions`.

    Attributes:
        tasks: Tasks of lm-eval, or YAML files: piqa,mine.yaml.  [default: depthgauge_cloze, unless there is
            --perplexity].
        limit: Items of each task, the first ones  [default: 500]. 0 means all.
        text: Build depthgauge_cloze from this text. FILE or FILE.jsonl:FIELD  [default: a built-in text].
        perplexity: Also measure the perplexity on this text. FILE or NAME:FILE, such as wikitext2:wiki.test.raw; repeat
            it for several.
        window: Tokens per window of --perplexity.  [default: 2048, or the model's context if that is shorter].
        confidence: Confidence of the guarantees  [default: 0.95].
    """

    tasks: Annotated[str | None, _TASKS] = None
    limit: Annotated[int, _TASKS] = 500
    text: Annotated[str | None, _TASKS] = None
    perplexity: Annotated[tuple[str, ...], _TASKS] = ()
    window: Annotated[int | None, _TASKS] = None
    confidence: Annotated[float, _TASKS, RARE] = 0.95

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks, or the shipped one if nothing is asked for.

        >>> EvaluateOptions().task_names, EvaluateOptions(tasks="piqa, mine.yaml").task_names
        (('depthgauge_cloze',), ('piqa', 'mine.yaml'))
        """
        if self.tasks is None:
            return () if self.perplexity else (CLOZE,)
        return split_tasks(self.tasks)

    def check(self, models: int) -> None:
        """Raise for options that are out of range, contradict each other, or have no effect on so many models."""
        check_common(self)
        require_count("limit", self.limit, "the number of items of each task; 0 means all", least=0)
        names = self.task_names
        needed = {
            "text": (CLOZE in names, f"{CLOZE} among --tasks"),
            "window": (self.perplexity, "--perplexity"),
            "limit": (names, "--tasks"),
            "confidence": (names and models > 1, "--tasks and a second model"),
        }
        for name, (is_there, what) in needed.items():
            if name in self.given() and not is_there:
                raise InputError(f"--{name} has no effect without {what}; leave it out")


def split_tasks(tasks: str) -> tuple[str, ...]:
    """Return the names in a list with commas; raise if one is empty or occurs twice."""
    names = tuple(name.strip() for name in tasks.split(","))
    for name in names:
        if not name:
            raise InputError(f"tasks must be names with commas between them, such as piqa,arc_easy, got {tasks!r}")
        if names.count(name) > 1:
            raise InputError(f"the task {name} is given twice; give every task once")
    return names


def make_evaluate_options(options: EvaluateOptions | None, fields: dict[str, Any]) -> EvaluateOptions:
    """Combine an options record with single options given by keyword; check the types of both.

    Tasks and texts may be given as lists, and a single text as one path.
    """

    def names(value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    def path(value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    normal = {"tasks": names, "perplexity": path_list, "text": path, "tokenizer": path}
    return combine_options(EvaluateOptions, "evaluate", options, fields, normal)
