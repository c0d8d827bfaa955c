"""Which tasks there are: those of lm-eval, YAML files, and the shipped one.

The shipped task `depthgauge_cloze` is to choose the true continuation of a passage among four pieces of the same text.
It needs no download. Its items are built from the built-in text or from the user's: the same text gives the same items.
"""

import random
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, optional, unknown_name
from depthgauge.checkpoints.inputs.text_files import find_text, read_text
from depthgauge.results.evaluate_record import CLOZE

# --- Which tasks there are: those of lm-eval, YAML files, and the shipped one ----------------------------------------


class TaskError(InputError):
    """A task that is not known, whose data is missing, or that cannot be scored item by item."""


def lm_eval() -> Any:
    """Import and return lm_eval; if it is missing, raise an error that names the extra to install."""
    return optional("lm_eval", "evaluate --tasks", "eval")


def task_folders(name: str) -> list[Path]:
    """Return the folders of lm-eval's tasks in which a name occurs; none for the shipped task and for a YAML file.

    Reading all 15,000 tasks would take 15 seconds. Imports neither torch nor transformers.

    Raises:
        TaskError: the name occurs in no folder, or there is no such YAML file.
    """
    root = _root()
    if name == CLOZE:
        return []
    if Path(name).suffix in (".yaml", ".yml"):
        if not Path(name).is_file():
            raise TaskError(f"cannot read the task {name}: no such file")
        return []
    wanted = name.encode()
    found = {path.relative_to(root).parts[0] for path in root.rglob("*.yaml") if wanted in path.read_bytes()}
    if not found:
        raise unknown_task(name)
    return [root / folder for folder in sorted(found)]


def unknown_task(name: str) -> TaskError:
    """Return the error for a name that no task has."""
    folders = [path.name for path in _root().iterdir() if path.is_dir()]
    hint = str(unknown_name("task", name, [CLOZE, *folders])).partition("; did you mean ")[2]
    near = f"did you mean {hint} " if hint else ""
    return TaskError(
        f"there is no task {name!r} in lm-eval {lm_eval().__version__}; {near}`lm_eval ls tasks` lists all of them, "
        "and the YAML file of a task can be given too"
    )


def _root() -> Path:
    return Path(lm_eval().__file__).parent / "tasks"


# --- The shipped task `depthgauge_cloze` ------------------------------------------------------------------------------

PIECE = 8
"""Words of a continuation."""
CONTEXT = 40
"""Words before it, at most."""
CHOICES = 4
MOST_ITEMS = 2000
"""Items of a long text, evenly spaced in it."""
LEAST_ITEMS = 20
_NEAR = 24
"""Wrong answers are drawn from this many pieces whose length is nearest to that of the true one."""
_APART = CONTEXT // PIECE + 1
"""Wrong answers are at least this many pieces away, so that none is in the context or follows soon."""


@dataclass(frozen=True)
class ClozeItem:
    """One item: the passage, the four continuations, and the place of the true one among them."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ClozeText:
    """The items of a text, in random order, and the name and SHA-256 of the text."""

    source: str
    sha256: str
    items: tuple[ClozeItem, ...]


def cloze_items(text: str | Path | None = None) -> ClozeText:
    """Build the items of a text: a path, `path:field` for a JSONL file, or None for the built-in text.

    The text is cut into pieces of `PIECE` words. Every piece but the first ones is the true continuation of the words
    before it. The wrong ones are other pieces of similar length.
    """
    found = find_text(text)
    content = read_text(found, _no_chat, wanted=MOST_ITEMS, length=CONTEXT + PIECE, seed=0)
    draw = random.Random(0)
    passages = [_pieces(part) for part in content.pieces]
    places = [(p, k) for p, pieces in enumerate(passages) for k in range(_APART, len(pieces))]
    every = [(p, k) for p, pieces in enumerate(passages) for k in range(len(pieces))]
    if len(places) < LEAST_ITEMS:
        words = sum(len(part.split()) for part in content.pieces)
        needed = (LEAST_ITEMS + _APART) * PIECE
        raise InputError(f"{found.name} has {words} words; {CLOZE} needs at least {needed}; give a longer text")
    by_length = sorted(every, key=lambda place: (len(passages[place[0]][place[1]]), place))
    lengths = [len(passages[p][k]) for p, k in by_length]
    count = min(MOST_ITEMS, len(places))
    chosen = [places[k * len(places) // count] for k in range(count)]
    items = [_item(passages, place, by_length, lengths, draw) for place in chosen]
    draw.shuffle(items)  # so that the first items are a sample of all
    return ClozeText(found.name, content.digest, tuple(items))


def cloze_config(items: ClozeText) -> dict[str, Any]:
    """Return the task as a configuration of lm-eval: multiple choice, scored by `acc` and `acc_norm`."""
    rows = [{"context": one.context, "choices": list(one.choices), "answer": one.answer} for one in items.items]

    def dataset(**_: Any) -> dict[str, Any]:
        from datasets import Dataset
        from datasets.table import InMemoryTable

        # Without a fingerprint, datasets pickles the rows by value, which fails with some versions of pyarrow.
        return {"test": Dataset(InMemoryTable.from_pylist(rows), fingerprint=items.sha256[:16])}

    measured = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return {
        "task": CLOZE, "custom_dataset": dataset, "test_split": "test", "output_type": "multiple_choice",
        "doc_to_text": "{{context}}", "doc_to_choice": "choices", "doc_to_target": "answer", "metric_list": measured,
        "metadata": {"version": 1.0},
    }  # fmt: skip


def _pieces(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[start : start + PIECE]) for start in range(0, len(words) - PIECE + 1, PIECE)]


def _item(
    passages: list[list[str]],
    place: tuple[int, int],
    by_length: list[tuple[int, int]],
    lengths: list[int],
    draw: random.Random,
) -> ClozeItem:
    p, k = place
    true = passages[p][k]
    middle = bisect_left(lengths, len(true))
    near = by_length[max(0, middle - 2 * _NEAR) : middle + 2 * _NEAR]
    others = {passages[a][b]: None for a, b in near if (a != p or abs(b - k) >= _APART) and passages[a][b] != true}
    nearest = sorted(others, key=lambda piece: abs(len(piece) - len(true)))[:_NEAR]
    if len(nearest) < CHOICES - 1:
        raise InputError(f"the text repeats itself too often to build {CLOZE} from it; give another text")
    choices = [true, *draw.sample(nearest, CHOICES - 1)]
    draw.shuffle(choices)
    context = " ".join(passages[p][max(0, k - CONTEXT // PIECE) : k])
    return ClozeItem(context, tuple(choices), choices.index(true))


def _no_chat(messages: list[Any]) -> str:
    raise InputError(f"{CLOZE} needs plain text; name a field with plain text: --text FILE:FIELD")
