"""The demonstration: a tiny trained decoder, and the commands that gauge and shrink it.

Its text has sentences about a village, and questions that its facts answer.
"""

import random
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from depthgauge.base.errors import InputError

NAMES = (
    "Ada", "Bruno", "Clara", "Dora", "Emil", "Frida", "Greta", "Hanna", "Ida", "Jonas", "Karl", "Lena", "Mira", "Nora",
    "Otto", "Petra", "Rosa", "Simon", "Tomas", "Ulla",
)  # fmt: skip
TRADES = ("baker", "captain", "doctor", "fisher", "miller", "painter", "pilot", "sailor", "smith", "teacher")
COLOURS = ("black", "blue", "brown", "green", "grey", "red", "white", "yellow")
THINGS = ("anchor", "barrel", "basket", "bell", "boat", "flag", "lamp", "net", "oar", "rope")
PLACES = ("attic", "boathouse", "cellar", "chapel", "garden", "kitchen", "market", "mill", "school", "tower")
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
VILLAGE = 7
"""The seed of the facts, which are the same in every text."""


@dataclass(frozen=True)
class Villager:
    """A person, and what the text says of them. No two keep the same thing."""

    name: str
    trade: str
    thing: str
    place: str
    neighbour: str


def village() -> tuple[Villager, ...]:
    """Return everyone who lives in the village."""
    draw = random.Random(VILLAGE)
    things = draw.sample([f"{colour} {thing}" for colour in COLOURS for thing in THINGS], len(NAMES))
    neighbours = draw.sample(NAMES, len(NAMES))
    following = dict(zip(neighbours, neighbours[1:] + neighbours[:1], strict=True))
    return tuple(
        Villager(name, draw.choice(TRADES), thing, draw.choice(PLACES), following[name])
        for name, thing in zip(NAMES, things, strict=True)
    )


def demo_text(lines: int, seed: int) -> str:
    """Return a text of so many lines, with six sentences each.

    Questions about the neighbour of a neighbour need two facts. The number of the evening is the sum or the difference
    of the numbers of the morning and the tide.
    """
    draw, people = random.Random(seed), {one.name: one for one in village()}
    return "\n".join(" ".join(_sentence(draw, people) for _ in range(6)) for _ in range(lines)) + "\n"


def _sentence(draw: random.Random, people: dict[str, Villager]) -> str:
    one = people[draw.choice(NAMES)]
    other = people[one.neighbour]
    return draw.choice(
        (
            f"{one.name} the {one.trade} keeps a {one.thing} in the {one.place}.",
            f"Who keeps the {one.thing}? It is {one.name}.",
            f"Where is the {one.thing}? It is in the {one.place}.",
            f"The neighbour of {one.name} is {other.name} the {other.trade}.",
            f"What does the neighbour of {one.name} keep? It is a {other.thing}.",
            _tide(draw),
        )
    )


def _tide(draw: random.Random) -> str:
    first, change = sorted(draw.sample(range(1, 7), 2), reverse=True)
    rises = draw.random() < 0.5
    last = first + change if rises else first - change
    return (
        f"In the morning the gauge shows {NUMBERS[first - 1]}. It {'rises' if rises else 'falls'} by "
        f"{NUMBERS[change - 1]}. In the evening it shows {NUMBERS[last - 1]}."
    )


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
