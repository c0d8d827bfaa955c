"""Models of images, gauged and shrunk on a directory of images, from Python and from the command line."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_checkpoint, text_of
from tiny_models import some_families
from tiny_vision import LABELS, VISION, image_processor, save_images, save_vision, vision_model

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.inputs.found_data import find_data
from depthgauge.checkpoints.inputs.windows import read_data
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.cli.main import main
from depthgauge.results.gauge_record import GaugeOptions

SMALL = {"device": "cpu"}
SHRUNK = ("vit", "dinov2", "clip")
"""A classifier, gains after sublayers, and a norm before the blocks; `make test-families` shrinks all."""
QUICK = {"remove": 1, "effort": "quick", "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    save_images(folder / "photos", 134)
    for name in VISION:
        save_vision(folder / name, name)
    save_checkpoint(folder / "bert", "bert")
    (folder / "corpus.txt").write_text(text_of(200))
    return folder


def outputs(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = model(pixels)
    return out.logits if "logits" in out else out.last_hidden_state


def without(model: Any, layer: int) -> Any:
    """Return a copy of a model without a block, made by removing it from the list."""
    smaller = copy.deepcopy(model)
    blocks = find_blocks(smaller, 3)
    listed = next(m for m in smaller.modules() if isinstance(m, torch.nn.ModuleList) and list(m) == blocks)
    del listed[layer]
    return smaller


def pixels_of(place: Path, name: str, count: int) -> Any:
    given = GaugeOptions(text=(str(place / "photos"), str(place / "photos.jsonl")))
    return read_data(
        find_data(given), image_processor(name), vision_model("vit").config,
        wanted=count, seed=0,
    ).inputs  # fmt: skip


@pytest.mark.parametrize("name", VISION)
def test_gauge_measures_what_is_lost_without_a_block(name: str, place: Path) -> None:
    result = dg.gauge(place / name, text=place / "photos", samples=3, **SMALL)
    subject = result.to_json()["subjects"][0]
    model, pixels = vision_model(name), pixels_of(place, name, 3).inputs["pixel_values"]
    intact = outputs(model, pixels).double().flatten(1)
    for layer in range(3):
        made = outputs(without(model, layer), pixels).double().flatten(1)
        expected = float(((made - intact).norm(dim=1) / intact.norm(dim=1)).mean())
        assert subject["layers"][layer]["what_if"]["block"]["loss"] == pytest.approx(expected, rel=1e-4)
        assert {"attention", "mlp"} <= set(subject["layers"][layer]["what_if"])
        assert subject["layers"][layer]["heads"][0]["tv_mean"] > 0
    assert subject["model"]["objective"] == ("logits" if "Classification" in VISION[name][0] else "states")
    text = subject["text"]
    assert (text["kind"], text["windows"]) == ("images", 3)
    assert text["window"] == {"siglip": 4, "deit": 6}.get(name, 5)  # patches, and the tokens before them
    assert result.settings.text == str(place / "photos")


@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("name", some_families(VISION, SHRUNK))
def test_shrink_writes_a_model_that_its_class_loads(name: str, place: Path, tmp_path: Path) -> None:
    import transformers

    out = tmp_path / "out"
    result = dg.shrink(place / name, text=place / "photos", out=out, report=tmp_path / "page.html", **QUICK)
    record = result.record
    kind = getattr(transformers, VISION[name][0])
    again, found = kind.from_pretrained(out, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert len(find_blocks(again, 2)) == 2
    stages = [stage.name for stage in record.stages]  # the structure was derived
    assert stages == (["distillation"] if name == "dinov2" else ["least squares", "distillation"])  # DINOv2 has gains
    assert transformers.AutoImageProcessor.from_pretrained(out).size["height"] == 8
    sources = [(one.kind, one.fit, one.select, one.certify) for one in record.plan.calibration.sources]
    assert sources == [("images", 48, 24, 60)]
    card, page = (out / "README.md").read_text(), (tmp_path / "page.html").read_text()
    assert "95 % of images like those of" in card
    assert "images that nothing was fitted or selected on" in page.replace("Images", "images")
    assert " tokens" not in card
    assert "text" not in card
    assert not (out / "plan.mergekit.yaml").exists()


def test_the_command_line_and_a_fresh_process(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`shrink` checks the classifier in a real new process, and it computes what the record says about it."""
    from transformers import AutoModelForImageClassification

    out = tmp_path / "out"
    words = ["shrink", place / "vit", "--data", place / "photos", "--data", place / "photos.jsonl", "--remove", "1"]
    words += ["--effort", "quick", "--device", "cpu", "--out", out]
    monkeypatch.setattr(sys, "argv", ["depthgauge", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    assert "accuracy on the 60 certify images" in " ".join(shown.split())
    record = json.loads((out / "depthgauge.json").read_text())
    assert record["objective"] == "labels"
    certify = pixels_of(place, "vit", 132)[72:]
    made = AutoModelForImageClassification.from_pretrained(out)
    for name, model in (("shrunk", made), ("dense", vision_model("vit"))):
        logits = outputs(model, certify.inputs["pixel_values"])
        loss = torch.nn.functional.cross_entropy(logits.double(), certify.targets)
        assert record["loss"][name] == pytest.approx(float(loss), rel=1e-4)
        assert record["accuracy"][name] == pytest.approx(float((logits.argmax(-1) == certify.targets).double().mean()))


def test_gauge_with_labels_measures_loss_and_accuracy(place: Path, tmp_path: Path) -> None:
    table = tmp_path / "labels.csv"
    table.write_text("file_name,label\n" + "".join(f"{i:03}.png,{i % 3}\n" for i in range(134)))
    images = place / "photos"
    subject = dg.gauge(place / "vit", text=[images, table], samples=5, what_if="block", **SMALL).subjects[0]
    samples = pixels_of(place, "vit", 5)
    logits = outputs(vision_model("vit"), samples.inputs["pixel_values"]).double()
    assert subject.baseline is not None
    assert subject.baseline.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, samples.targets)))
    assert subject.accuracy == pytest.approx(float((logits.argmax(-1) == samples.targets).double().mean()))
    made = outputs(without(vision_model("vit"), 1), samples.inputs["pixel_values"]).double()
    added = torch.nn.functional.cross_entropy(made, samples.targets) - subject.baseline.loss
    assert subject.layers[1].what_if["block"].loss == pytest.approx(float(added), rel=1e-4)


def test_a_model_in_memory_takes_its_image_processor(place: Path) -> None:
    model, processor = vision_model("clip"), image_processor("clip")
    images = place / "photos"
    gauged = dg.gauge(model, text=images, tokenizer=processor, samples=2, what_if="block")
    stored = dg.gauge(place / "clip", text=images, samples=2, what_if="block", **SMALL)
    assert gauged.to_json()["subjects"][0]["layers"] == stored.to_json()["subjects"][0]["layers"]
    shrunk = dg.shrink(model, text=images, tokenizer=processor, remove=1, effort="quick", recover="none")
    assert type(shrunk.model) is type(model)
    with pytest.raises(InputError, match="a model in memory needs its image processor"):
        dg.gauge(model, text=images)
    with pytest.raises(InputError, match="a model in memory needs its image processor"):
        dg.shrink(model, text=images, remove=1)


def test_the_parts_do_not_overlap_and_equal_images_count_once(place: Path, tmp_path: Path) -> None:
    result = dg.shrink(place / "clip", text=place / "photos", recover="none", **QUICK)
    fit, select, certify = (
        [one.numpy().tobytes() for one in getattr(result.certifier.calibration, part).inputs.inputs["pixel_values"]]
        for part in ("fit", "select", "certify")
    )
    assert len({*fit, *select, *certify}) == 132
    twice = save_images(tmp_path / "twice", 70)
    for path in list(twice.iterdir()):
        (twice / f"again-{path.name}").write_bytes(path.read_bytes())
    with pytest.raises(InputError, match=r"has 70 different images, and 132 are needed; give more images$"):
        dg.shrink(place / "clip", text=twice, **QUICK)
    with pytest.raises(InputError, match="and 376 are needed; give more images, or use --effort quick"):
        dg.shrink(place / "clip", text=twice, remove=1, **SMALL)


def _broken(folder: Path) -> list[str]:
    (save_images(folder / "images", 3) / "001.png").write_bytes(b"no image")
    return ["--data", str(folder / "images")]


def _empty(folder: Path) -> list[str]:
    (folder / "images").mkdir()
    (folder / "images" / "notes.txt").write_text("no image")
    return ["--data", str(folder / "images")]


def _labels(folder: Path, content: str, name: str = "labels.csv") -> list[str]:
    (folder / name).write_text(content)
    return ["--data", str(save_images(folder / "images", 2)), "--data", str(folder / name)]


_ONE = '{"file_name": "000.png", "label": "cat"}'
BAD: dict[str, tuple[str, Any, str]] = {
    "empty": ("vit", _empty, "contains no images and no WAV files"),
    "missing": ("vit", lambda _: ["--data", "nowhere"], "cannot read text nowhere"),
    "broken": ("vit", _broken, "cannot read the image .*001.png: it has no format that Pillow knows; repair"),
    "no label": ("vit", lambda f: _labels(f, "000.png,cat\n"), "has no label for 1 image .*such as 001.png"),
    "other label": ("vit", lambda f: _labels(f, "000.png,cat\n001.png,cow\n"), "'cow' of 001.png is none of the 3"),
    "number": ("vit", lambda f: _labels(f, "000.png,0\n001.png,3\n"), "'3' of 001.png is none of the 3 labels"),
    "columns": ("vit", lambda f: _labels(f, "000.png\n"), "line 1 of .* has 1 column"),
    "field": ("vit", lambda f: _labels(f, f'{_ONE}\n{{"file_name": "a"}}', "l.jsonl"), "line 2 of .* lacks file_name"),
    "json": ("vit", lambda f: _labels(f, "nonsense", "l.jsonl"), "line 1 of .* is not JSON"),
    "no head": ("dinov2", lambda f: _labels(f, "000.png,0\n001.png,0\n"), "labels need a model with a classif"),
    "no file": ("vit", lambda f: [*_labels(f, "")[:-1], "gone.csv"], "cannot read gone.csv"),
    "no images": ("vit", lambda _: [], "which reads images; give it a folder of images with --data DIR"),
    "labels alone": ("vit", lambda f: _labels(f, "w1,0\n")[2:], "reads images; .*labels.csv has texts with labels"),
    "text model": (
        "bert", lambda f: ["--data", str(save_images(f / "images", 2))], "is a BertModel, which reads text; .* images"
    ),
    "text": (
        "vit", lambda f: ["--data", str(save_images(f / "images", 2)), "--text", "t.txt"],
        "cannot read t.txt",
    ),
    "bos": ("vit", lambda f: [*_labels(f, "")[:2], "--bos", "no"], "--bos is about text, and .* has images"),
    "window": ("vit", lambda f: [*_labels(f, "")[:2], "--window", "8"], "--window is about text"),
    "tokenizer": ("vit", lambda f: [*_labels(f, "")[:2], "--tokenizer", "t"], "--tokenizer is about text"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "verb"), [*((case, "gauge") for case in BAD), ("broken", "shrink")])
def test_bad_inputs_are_one_sentence(
    case: str, verb: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    import re

    model, words, said = BAD[case]
    out = tmp_path / "out.json"
    command = ["depthgauge", verb, str(place / model), *words(tmp_path), "--device", "cpu", "--out", str(out)]
    if verb == "shrink":
        command += ["--remove", "1", "--effort", "quick"]
        command[command.index("--data") + 1] = str(_with_one_broken(place, tmp_path))
        said = "cannot read the image .*133.png: it has no format that Pillow knows; repair"
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    error = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert re.search(said, error), error
    assert error.startswith("error: ")
    assert not out.exists()


def _with_one_broken(place: Path, folder: Path) -> Path:
    made = save_images(folder / "many", 132)
    (made / "000.png").rename(made / "133.png")
    (made / "133.png").write_bytes(b"no image")
    return made


def test_options_about_text_are_refused_with_images(place: Path) -> None:
    with pytest.raises(InputError, match=r"is about text, and .* has images; leave it out"):
        dg.gauge(place / "vit", text=place / "photos", tokens=4)


def test_samples_are_no_windows_of_text(place: Path) -> None:
    with pytest.raises(InputError, match=r"--samples is a number of images, .* is text; use --tokens"):
        dg.gauge(place / "bert", text=place / "corpus.txt", samples=3)


def test_a_model_that_does_not_fit_its_image_processor(place: Path, tmp_path: Path) -> None:
    save_vision(tmp_path / "vit", "vit")
    image_processor("vit", size=12).save_pretrained(tmp_path / "vit")
    with pytest.raises(InputError, match=r"cannot compute the output of .*12"):
        dg.gauge(tmp_path / "vit", text=place / "photos", **SMALL)
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match=r"contains no image processor, expected preprocessor_config\.json"):
        dg.gauge(tmp_path / "vit", text=place / "photos", **SMALL)


def test_a_tower_inside_another_model_is_refused(place: Path, tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    vision = small | {"image_size": 8, "patch_size": 4}
    CLIPModel(CLIPConfig(text_config=small | {"vocab_size": 40}, vision_config=vision)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="with a vision tower and other parts; save the tower alone"):
        dg.gauge(tmp_path, text=place / "photos", **SMALL)


STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "Swin": ({"embed_dim": 24, "depths": [1, 1, 1, 1]}, r"a number of heads for each, \[3, 6, 12, 24\]"),
    "ConvNext": ({"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}, "a convnext model without layers"),
}


@pytest.mark.parametrize("name", STAGES)
def test_models_with_stages_are_refused(name: str, place: Path) -> None:
    import transformers

    sizes, said = STAGES[name]
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
    processor = image_processor("vit", size=32)
    with pytest.raises(InputError, match=said):
        dg.gauge(model, text=place / "photos", tokenizer=processor)
    with pytest.raises(InputError, match=said):
        dg.shrink(model, text=place / "photos", tokenizer=processor, remove=1)


def test_labels_are_names_or_numbers(place: Path) -> None:
    named = pixels_of(place, "vit", 6).targets
    assert set(named.tolist()) <= set(range(len(LABELS)))
    assert len(set(named.tolist())) > 1
