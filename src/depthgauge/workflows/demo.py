"""The demonstration: a tiny trained decoder and its text, and the commands that gauge and shrink it."""

from importlib import resources
from pathlib import Path

from depthgauge.base.errors import InputError
from depthgauge.workflows.demo_text import demo_text

LINES, SEED = 1200, 2
"""The lines of the text, and its seed; the model was trained on text of another seed."""
REMOVED, TOKENS = "25%", "200k"
"""The share of the eight blocks that is removed, and the tokens of the training after it."""


def write_demo(folder: Path) -> tuple[tuple[str, ...], ...]:
    """Write the model and its text into a folder; return the arguments of the commands to run.

    Args:
        folder: the directory to create.

    Raises:
        InputError: the directory exists, or cannot be made.
    """
    model, text = folder / "model", folder / "text.txt"
    try:
        model.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"{model} exists; remove it, or give another --out") from None
    except OSError as error:
        raise InputError(f"{model} cannot be made: {error.strerror}; give another --out") from None
    for file in resources.files("depthgauge.workflows").joinpath("demo_model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    text.write_text(demo_text(LINES, SEED), encoding="utf-8")
    given = (str(model), "--data", str(text))
    gauged, shrunk = folder / "gauge.html", folder / "shrink.html"
    return (
        ("gauge", *given, "--report", str(gauged)),
        ("shrink", *given, "--remove", REMOVED, "--recover", TOKENS, "--out", str(folder / "smaller"),
         "--report", str(shrunk)),
    )  # fmt: skip
