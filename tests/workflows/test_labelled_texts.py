"""Classifiers of text, gauged and shrunk on texts with labels."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import WORDS, save_tokenizer
from tiny_models import tiny_model

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.inputs.found_data import find_data
from depthgauge.checkpoints.inputs.windows import Samples, read_data
from depthgauge.checkpoints.source.library import quiet
from depthgauge.results.gauge_record import GaugeOptions

CLASSES = {"bert": "BertForSequenceClassification", "qwen3": "Qwen3ForSequenceClassification"}
NAMES = ("bad", "good", "neither")
SMALL = {"device": "cpu"}


def save_classifier(folder: Path, name: str, kind: str = "", pad: int | None = 0) -> Path:
    import transformers

    config = tiny_model(name, layers=3).config
    config.num_labels, config.pad_token_id = len(NAMES), pad
    config.id2label = dict(enumerate(NAMES))
    config.label2id = {label: index for index, label in enumerate(NAMES)}
    torch.manual_seed(0)
    model = getattr(transformers, kind or CLASSES[name])(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    with quiet():
        model.save_pretrained(folder)
    save_tokenizer(folder, special=name == "bert")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("labelled"), random.Random(0)
    for name in CLASSES:
        save_classifier(folder / name, name)
    lines = [
        {"text": " ".join(draw.choices(WORDS, k=draw.randint(1, 20))), "label": draw.choice((*NAMES, 0, 1, 2))}
        for _ in range(150)
    ]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def samples_of(place: Path, name: str, count: int) -> Samples:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, config = (auto.from_pretrained(place / name) for auto in (AutoTokenizer, AutoConfig))
    found = find_data(GaugeOptions(text=str(place / "reviews.jsonl")), CLASSES[name])
    return read_data(found, tokenizer, config, wanted=count, seed=0).inputs


def loss_and_accuracy(folder: Path, samples: Samples, skipped: int | None = None) -> tuple[float, float]:
    """Return both as transformers computes them, one text after the other, without padding."""
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    if skipped is not None:
        blocks = model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers
        del blocks[skipped]
    rows = [ids[mask.bool()] for ids, mask in zip(*samples.inputs.values(), strict=True)]
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits for row in rows]).double()
    assert samples.targets is not None
    right = (logits.argmax(-1) == samples.targets).double().mean()
    return float(torch.nn.functional.cross_entropy(logits, samples.targets)), float(right)


@pytest.mark.parametrize("name", CLASSES)
def test_gauge_measures_loss_and_accuracy(name: str, place: Path) -> None:
    result = dg.gauge(place / name, text=place / "reviews.jsonl", samples=6, **SMALL)
    subject = result.subjects[0]
    samples = samples_of(place, name, 6)
    assert len({int(one.sum()) for one in samples.inputs["attention_mask"]}) > 3  # texts of different lengths
    loss, right = loss_and_accuracy(place / name, samples)
    assert subject.model.objective == "labels"
    assert (subject.text.kind, subject.text.windows) == ("texts", 6)
    assert subject.baseline.loss == pytest.approx(loss, rel=1e-5)
    assert subject.accuracy == pytest.approx(right)
    added = loss_and_accuracy(place / name, samples, skipped=1)[0] - loss
    assert subject.layers[1].what_if["block"].loss == pytest.approx(added, rel=1e-3, abs=1e-6)
    assert {"attention", "mlp"} <= set(subject.layers[1].what_if)


@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("name", CLASSES)
def test_shrink_measures_loss_and_accuracy(name: str, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "smaller"
    result = dg.shrink(place / name, text=place / "reviews.jsonl", remove=1, effort="quick", out=out, **SMALL)
    record, certified = result.record, result.certifier.inputs
    assert isinstance(certified, Samples)
    assert (record.objective, record.plan.calibration.noun) == ("labels", "text")
    for folder, loss, right in (
        (place / name, record.loss.dense, record.accuracy.dense),
        (out, record.loss.shrunk, record.accuracy.shrunk),
    ):
        assert loss_and_accuracy(folder, certified) == pytest.approx((loss, right), rel=1e-4)
    card = (out / "README.md").read_text()
    assert f"Accuracy on the {len(certified)} certify texts:" in card
    assert "On texts that nothing was fitted or selected on" in card
    assert "reviews.jsonl" in card


_GOOD = '{"text": "w1", "label": 0}'
BAD = {
    "nothing.csv": ("", "contains no texts; give JSON lines with the fields text and label, or CSV with both"),
    "no-label.jsonl": (f'{_GOOD}\n{{"text": "w1"}}', "line 2 of .* lacks text or label; give both"),
    "no-text.jsonl": ('{"text": "", "label": 1}', "line 1 of .* lacks text or label; give both"),
    "three.csv": ("text,label\nw1,w2,good\n", "line 2 of .* has 3 columns; a file of labels has two, text and label"),
    "unknown.csv": ('"w1, w2",best\n', "the label 'best' of the text 'w1, w2' is none of the 3 labels of the model"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name: str, place: Path, tmp_path: Path) -> None:
    content, sentence = BAD[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=sentence):
        dg.gauge(place / "bert", text=tmp_path / name, **SMALL)


def test_labels_are_read_for_classifiers_of_texts_alone(place: Path, tmp_path: Path) -> None:
    save_classifier(tmp_path / "tokens", "bert", "BertForTokenClassification")
    read = dg.gauge(tmp_path / "tokens", text=place / "reviews.jsonl", what_if="none", **SMALL).subjects[0]
    assert (read.text.kind, read.model.objective) == ("text", "logits")
    save_classifier(tmp_path / "unpadded", "qwen3", pad=None)
    with pytest.raises(InputError, match="texts of different lengths need a padding token, and the model has none"):
        dg.gauge(tmp_path / "unpadded", text=place / "reviews.jsonl", **SMALL)
    with pytest.raises(InputError, match=r"--tokens is about text, and .* has texts with labels; leave it out"):
        dg.gauge(place / "bert", text=place / "reviews.jsonl", tokens=64, **SMALL)
    fields = dg.gauge(place / "bert", text=f"{place / 'reviews.jsonl'}:text", what_if="none", **SMALL).subjects[0]
    assert (fields.text.kind, fields.model.objective) == ("text", "logits")
    with pytest.raises(InputError, match="different texts, and 376 are needed; give more texts, or"):
        dg.shrink(place / "bert", text=place / "reviews.jsonl", remove=1, **SMALL)
