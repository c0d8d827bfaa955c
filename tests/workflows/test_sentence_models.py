"""Directories of sentence-transformers, and classifiers of text, gauged and shrunk by what their users read."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_checkpoint, save_tokenizer, text_of
from tiny_models import tiny_model
from tiny_shrinks import save

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks.model_output import POOLING, pooled
from depthgauge.checkpoints.inputs.windows import read_windows
from depthgauge.checkpoints.source.library import quiet
from depthgauge.checkpoints.source.model_class import POOLING_MODES, longest_window, pooling_modes
from depthgauge.cli.main import main

SMALL = {"window": 16, "device": "cpu"}
SHRINK = {"remove": 1, "effort": "quick", **SMALL}


def add_modules(folder: Path, pooling: dict[str, Any], *later: str) -> Path:
    """Turn a checkpoint into a sentence-transformers directory."""
    kinds = ["Transformer", "Pooling", *later]
    paths = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text("{}")
    for path in paths[1:]:
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(pooling if path == "1_Pooling" else {}))
    return folder


MEAN = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(text_of(4000))
    return path


@pytest.mark.usefixtures("forked_verification")
def test_the_embedding_is_measured_and_the_directory_is_complete(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shrunk by the command: the embeddings of the model that transformers loads turn by what the record says."""
    from transformers import AutoModel

    source, out = add_modules(save(tmp_path / "model", "bert"), MEAN, "Normalize"), tmp_path / "out"
    words = ["depthgauge", "shrink", source, "--text", corpus, "--out", out, "--remove", "1", "--effort", "quick"]
    monkeypatch.setattr(sys, "argv", [*map(str, words), "--window", "16", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert "1 − cosine of the embeddings" in " ".join(capsys.readouterr().out.split()).replace("  ", " ")
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        assert (out / name).read_text() == (source / name).read_text()
    assert (out / "1_Pooling" / "config.json").read_text() == (source / "1_Pooling" / "config.json").read_text()
    record = json.loads((out / "depthgauge.json").read_text())
    assert record["objective"] == "embedding"
    again = dg.shrink(source, text=corpus, **SHRINK)  # the same windows
    windows = again.certifier.inputs[again.certifier.calibration.certify.source == 0]
    with torch.no_grad():
        models = [AutoModel.from_pretrained(path).eval() for path in (source, out)]
        before, after = (model(windows).last_hidden_state.mean(1) for model in models)
    turned = 1 - torch.nn.functional.cosine_similarity(before, after, dim=-1)
    assert record["loss"]["shrunk"] == pytest.approx(float(turned.mean()), rel=1e-3)
    assert record["loss"]["shrunk"] > 0


def test_gauge_measures_the_embedding(corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_checkpoint(tmp_path, "bert")
    add_modules(tmp_path, {"pooling_mode": "cls"}, "Dense")
    result = dg.gauge(tmp_path, text=corpus, tokens=48, what_if="block", **SMALL)
    subject = result.subjects[0]
    assert subject.model.objective == "embedding"
    assert any("before the modules that follow: Dense" in note for note in subject.notes)
    plain, tokenizer = tiny_model("bert"), AutoTokenizer.from_pretrained(tmp_path)
    ids = read_windows(tokenizer, corpus, tokens=48, window=16, context=20, seed=0).ids
    with torch.no_grad():
        whole = plain(ids).last_hidden_state[:, 0]
        del plain.encoder.layer[1]
        less = plain(ids).last_hidden_state[:, 0]
    turned = 1 - torch.nn.functional.cosine_similarity(whole, less, dim=-1)
    assert subject.layers[1].what_if["block"].loss == pytest.approx(float(turned.mean()), rel=1e-4)


def test_windows_are_as_long_as_the_directory_says(corpus: Path, tmp_path: Path) -> None:
    add_modules(save(tmp_path / "model", "bert"), MEAN)
    assert longest_window(tmp_path / "model", 64) == 20
    assert longest_window(None, 64) == longest_window(tmp_path, 64) == 64
    with pytest.raises(InputError, match="window must be at most 20 for this model, got 24"):
        dg.gauge(tmp_path / "model", text=corpus, window=24, device="cpu")


@pytest.mark.usefixtures("forked_verification")
def test_a_decoder_with_pooling_is_no_language_model(corpus: Path, tmp_path: Path) -> None:
    source = add_modules(save(tmp_path / "model", "qwen3"), {"pooling_mode_lasttoken": True})
    record = dg.shrink(source, text=corpus, out=tmp_path / "out", **SHRINK).record
    assert record.objective == "embedding"
    assert [one.kind for one in record.plan.calibration.sources] == ["text", "built-in"]
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()


def test_every_mode_is_what_it_says() -> None:
    states = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([1.0, 2, 3, 4, 5])[:, None] / 15
    expected = {
        "cls": states[:, 0], "lasttoken": states[:, 4], "max": states.max(1).values, "mean": states.sum(1) / 5,
        "mean_sqrt_len_tokens": states.sum(1) / 5**0.5, "weightedmean": (states * weights).sum(1),
    }  # fmt: skip
    assert set(POOLING) == set(POOLING_MODES) == set(expected)
    for mode, wanted in expected.items():
        torch.testing.assert_close(pooled(states, (mode,)), wanted)
    torch.testing.assert_close(pooled(states, ("cls", "mean")), torch.cat([expected["cls"], expected["mean"]], dim=-1))
    assert pooled(states, ()) is states


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"pooling_mode": "attention"}', "names the pooling attention, expected some of cls"),
        ("{}", "names the pooling none"),
        ("[]", "is not the configuration of a pooling module"),
        ("nonsense", "cannot load the pooling module"),
    ],
)
def test_a_pooling_module_that_cannot_be_read(content: str, said: str, corpus: Path, tmp_path: Path) -> None:
    add_modules(save(tmp_path / "model", "bert"), MEAN)
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text(content)
    with pytest.raises(InputError, match=said):
        dg.gauge(tmp_path / "model", text=corpus, **SMALL)
    assert pooling_modes(tmp_path) == ()


# --- classifiers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pad"), [pytest.param("qwen3", 0, marks=pytest.mark.families), ("qwen3", None), ("bert", 0)]
)
@pytest.mark.usefixtures("forked_verification")
def test_a_classifier_is_measured_by_its_logits(
    name: str, pad: int | None, corpus: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The change of the logits on the certify windows is that of the two models as transformers loads them."""
    import transformers

    if name == "bert":  # a few steps do not improve it, and the written model would have its original weights
        request.getfixturevalue("kept_training")
    kind = getattr(transformers, {"qwen3": "Qwen3", "bert": "Bert"}[name] + "ForSequenceClassification")
    config = tiny_model(name, layers=4).config
    config.num_labels, config.pad_token_id = 3, pad
    torch.manual_seed(0)
    model = kind(config).eval()
    with quiet():
        model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", special=False)
    result = dg.shrink(tmp_path / "model", text=corpus, out=tmp_path / "out", **SHRINK)
    record, certifier = result.record, result.certifier
    assert record.objective == "logits"
    assert any(stage.kept for stage in record.stages)
    again = kind.from_pretrained(tmp_path / "out").eval()
    windows = certifier.inputs[certifier.calibration.certify.source == 0]
    with torch.no_grad():
        before, after = (torch.cat([one(row[None]).logits for row in windows]).double() for one in (model, again))
    expected = ((after - before).norm(dim=1) / before.norm(dim=1)).mean()
    assert record.loss.shrunk == pytest.approx(float(expected), rel=1e-3)
    assert any("how far the logits of its head move" in note for note in record.notes)
