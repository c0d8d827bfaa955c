"""The demonstration: its text says one thing about everyone, its model has learnt it, and no directory is replaced."""

import re
from pathlib import Path

import pytest
import torch

from depthgauge.base.errors import InputError
from depthgauge.cli.main import main
from depthgauge.workflows.demo import NUMBERS, demo_text, village, write_demo

ANSWER = re.compile(r"It is in the( \w+)\.|It is( [A-Z]\w+)\.|It is a \w+( \w+)\.|it shows( \w+)\.")
"""The last word of each answer."""
LONGEST = 128
"""The positions of the model."""


def test_every_answer_follows_from_the_facts() -> None:
    people, text = {one.name: one for one in village()}, demo_text(600, seed=5)
    keepers = {one.thing: one for one in people.values()}
    assert len(keepers) == len(people)
    for thing, name in re.findall(r"Who keeps the (\w+ \w+)\? It is (\w+)\.", text):
        assert keepers[thing].name == name
    for thing, place in re.findall(r"Where is the (\w+ \w+)\? It is in the (\w+)\.", text):
        assert keepers[thing].place == place
    for name, thing in re.findall(r"the neighbour of (\w+) keep\? It is a (\w+ \w+)\.", text):
        assert people[people[name].neighbour].thing == thing
    tides = re.findall(r"gauge shows (\w+)\. It (rises|falls) by (\w+)\. In the evening it shows (\w+)\.", text)
    for *words, way in ((first, by, last, way) for first, way, by, last in tides):
        first, by, last = (NUMBERS.index(word) + 1 for word in words)
        assert last == first + (by if way == "rises" else -by)
    assert len(tides) > 100


def test_the_model_answers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_demo(tmp_path / "demo")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "demo" / "model")
    right = []
    for line in (tmp_path / "demo" / "text.txt").read_text(encoding="utf-8").splitlines()[:30]:
        for place in ANSWER.finditer(line):
            answer = next(word for word in place.groups() if word)
            asked, told = line[: place.end() - 1 - len(answer)], line[: place.end() - 1]
            ids = tokenizer(told, return_tensors="pt")["input_ids"][0, -LONGEST:]
            count = len(tokenizer(told)["input_ids"]) - len(tokenizer(asked)["input_ids"])
            likely = model(ids[None]).logits[0, -count - 1 : -1].argmax(dim=-1)
            right.append(torch.equal(likely, ids[-count:]))
    assert len(right) > 100
    assert sum(right) > 0.98 * len(right)


def test_the_command_writes_the_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "demo"
    monkeypatch.setattr("sys.argv", ["depthgauge", "demo", "--files-only", "--out", str(folder)])
    for code in (None, 2):
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        assert {path.name for path in folder.iterdir()} == {"model", "text.txt"}


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        write_demo(tmp_path / "file" / "demo")


def test_the_commands_name_what_was_written(tmp_path: Path) -> None:
    """What is run is what a user would type; the commands themselves are tested elsewhere."""
    commands = write_demo(tmp_path / "demo")
    assert [command[0] for command in commands] == ["gauge", "shrink"]
    for command in commands:
        assert Path(command[1]).is_dir()
        assert Path(command[command.index("--data") + 1]).is_file()
