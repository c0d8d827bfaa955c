"""Whisper, gauged and shrunk on recordings with transcripts: one stack at a time, or both."""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import save_checkpoint
from tiny_models import some_families
from tiny_pairs import save_paired, save_pairs
from tiny_speech import LAYERS, RATE, feature_extractor, save_recordings, save_speech_model, save_wave, speech_model

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.inputs.found_data import find_data
from depthgauge.checkpoints.inputs.windows import Samples, read_data
from depthgauge.checkpoints.source.library import quiet
from depthgauge.checkpoints.weights.described import SpeechReader
from depthgauge.cli.main import main
from depthgauge.results.gauge_record import GaugeOptions


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    save_recordings(folder / "recordings", 140)
    save_speech_model(folder / "whisper")
    save_checkpoint(folder / "llama", "llama")
    save_paired(folder / "t5", "t5")
    save_pairs(folder / "pairs.jsonl", 4)
    return folder


def reader_of(place: Path) -> SpeechReader:
    from transformers import AutoTokenizer

    return SpeechReader(feature_extractor(), AutoTokenizer.from_pretrained(place / "whisper"))


def samples_of(place: Path, count: int) -> Samples:
    found = find_data(GaugeOptions(text=str(place / "recordings")))
    return read_data(found, reader_of(place), speech_model().config, wanted=count, window=32, seed=0).inputs


def plain_losses(model: Any, samples: Samples) -> torch.Tensor:
    """Return the loss that transformers computes from labels, recording by recording, without padding."""
    found = []
    with torch.no_grad():
        for features, targets in zip(samples.inputs["input_features"], samples.targets, strict=True):
            found.append(model(input_features=features[None], labels=targets[targets != -100][None]).loss)
    return torch.stack(found).double()


def run(monkeypatch: pytest.MonkeyPatch, *words: Any) -> Any:
    monkeypatch.setattr(sys, "argv", ["depthgauge", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_recording_and_its_transcript_are_as_transformers_reads_them(place: Path, tmp_path: Path) -> None:
    """Two channels are averaged. The tokenizer writes the start token, which the decoder reads and never writes."""
    sound = np.random.default_rng(1).integers(-3000, 3000, (8000, 2))
    save_wave(tmp_path / "a.wav", sound, channels=2)
    (tmp_path / "a.txt").write_text("w3 w1 w2\n")
    reader = reader_of(place)
    config = speech_model().config
    found = find_data(GaugeOptions(text=str(tmp_path)))
    samples = read_data(found, reader, config, wanted=1, window=32, seed=0).inputs
    plain = (sound.mean(axis=1) / 32768).astype(np.float32)
    expected = feature_extractor()(plain, sampling_rate=RATE, return_tensors="pt")["input_features"]
    torch.testing.assert_close(samples.inputs["input_features"], expected)
    labels = reader.tokenizer("w3 w1 w2")["input_ids"]
    assert labels[0] == config.decoder_start_token_id
    assert samples.inputs["decoder_input_ids"].tolist() == [labels[:-1]]
    assert samples.targets.tolist() == [labels[1:]]


@pytest.mark.parametrize("stack", ["decoder", "encoder"])
def test_gauge_measures_the_loss_without_a_block(stack: str, place: Path) -> None:
    audio = place / "recordings"
    result = dg.gauge(place / "whisper", text=audio, stack=stack, samples=4, what_if="block", device="cpu")
    subject = result.subjects[0]
    model, samples = speech_model(), samples_of(place, 4)
    intact = plain_losses(model, samples)
    assert subject.baseline.loss == pytest.approx(float(intact.mean()), rel=1e-4)
    assert len(subject.layers) == LAYERS[stack]
    assert subject.text.phrase() == "4 recordings"
    for layer in range(LAYERS[stack]):
        smaller = copy.deepcopy(model)
        del (smaller.get_encoder() if stack == "encoder" else smaller.get_decoder()).layers[layer]
        added = float((plain_losses(smaller, samples) - intact).mean())
        assert subject.layers[layer].what_if["block"].loss == pytest.approx(added, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("stack", some_families(["decoder", "encoder", "both"], ["both"]))
@pytest.mark.usefixtures("forked_verification")
def test_shrink_writes_a_smaller_model(
    stack: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command; transformers loads a model with the loss of the record and the logits of the smaller model."""
    from transformers import AutoModelForSpeechSeq2Seq

    out, words = tmp_path / "out", [] if stack == "decoder" else ["--stack", stack]
    words += ["--remove-layers", "2,5"] if stack == "both" else ["--remove", "1"]
    words += ["--effort", "quick", "--device", "cpu", "--out", out]
    code = run(monkeypatch, "shrink", place / "whisper", "--data", place / "recordings", *words)
    assert code in (0, None), capsys.readouterr().err
    record = json.loads((out / "depthgauge.json").read_text())
    assert (record["objective"], record["layers_after"]) == (
        "loss",
        sum(LAYERS.values()) - 2 if stack == "both" else LAYERS[stack] - 1,
    )
    assert record["reload"]["generation"] == "equal with and without cache"
    assert re.match(r"prefill of \d+ inputs? in \d+ pairs? of runs", record["speed"]["what"])
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (place / "whisper", out))
    stacks = [*LAYERS] if stack == "both" else [stack]
    assert {key for key in before if before[key] != after.get(key)} - {"transformers_version"} <= {
        *(f"{one}_layers" for one in stacks), *(["num_hidden_layers"] if "encoder" in stacks else []),
    }  # fmt: skip
    assert all(after[f"{one}_layers"] == LAYERS[one] - 1 for one in stacks)
    assert (out / "preprocessor_config.json").is_file()
    aligned = json.loads((out / "generation_config.json").read_text())["alignment_heads"]
    first = LAYERS["encoder"] if stack == "both" else 0  # block 5 of both is block 1 of the decoder
    kept = [layer for layer in range(3) if stack == "encoder" or first + layer not in record["removed"]]
    assert aligned == [[new, 3 - old] for new, old in enumerate(kept)]
    assert "95 % of recordings like those of" in (out / "README.md").read_text()
    samples = samples_of(place, 132)[72:]
    with torch.no_grad():
        logits = AutoModelForSpeechSeq2Seq.from_pretrained(out).eval()(**samples.inputs).logits
    losses = [torch.nn.functional.cross_entropy(a, b) for a, b in zip(logits, samples.targets, strict=True)]
    assert record["loss"]["shrunk"] == pytest.approx(float(torch.stack(losses).double().mean()), rel=1e-4)
    assert record["loss"]["dense"] == pytest.approx(float(plain_losses(speech_model(), samples).mean()), rel=1e-4)
    if not record["repaired"]:
        model = speech_model()
        encoder, decoder = model.get_encoder().layers, model.get_decoder().layers
        for layer in record["removed"]:
            own = encoder if stack == "encoder" or (stack == "both" and layer < 4) else decoder
            del own[layer - (4 if stack == "both" and own is decoder else 0)]
        with torch.no_grad():
            torch.testing.assert_close(logits, model(**samples.inputs, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_gauge_by_the_command(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--samples", "4", "--what-if", "block", "--device", "cpu"]
    assert run(monkeypatch, "gauge", place / "whisper", "--data", place / "recordings", *words) in (0, None)
    assert "4 recordings" in capsys.readouterr().out


def test_a_model_in_memory_takes_its_processor(place: Path) -> None:
    audio = place / "recordings"
    result = dg.shrink(speech_model(), text=audio, tokenizer=reader_of(place), remove=1, effort="quick")
    assert (result.model.config.decoder_layers, result.model.config.encoder_layers) == (2, 4)
    with pytest.raises(InputError, match="a model in memory needs its processor"):
        dg.gauge(speech_model(), text=audio)
    with pytest.raises(InputError, match="with a feature extractor and a tokenizer"):
        dg.gauge(speech_model(), text=audio, tokenizer=reader_of(place).tokenizer)


def _folder(folder: Path, text: str | None = "w1 w2", sound: Any = range(4000), **keywords: Any) -> list[str]:
    save_wave(folder / "a.wav", sound, **keywords)
    if text is not None:
        (folder / "a.txt").write_text(text)
    return ["--data", str(folder)]


def _damaged(folder: Path, size: int) -> list[str]:
    words, path = _folder(folder), folder / "a.wav"
    path.write_bytes(path.read_bytes()[:size])
    return words


BAD: dict[str, tuple[str, Any, str]] = {
    "no files": ("whisper", lambda f: ["--data", str(f)], "contains no images and no WAV files"),
    "no directory": ("whisper", lambda _: ["--data", "gone"], "cannot read text gone"),
    "no transcript": ("whisper", lambda f: _folder(f, None), "a.wav has no transcript; write its text to a.txt"),
    "empty transcript": ("whisper", lambda f: _folder(f, " \n"), "the transcript .*a.txt is empty"),
    "no WAV": ("whisper", lambda f: _damaged(f, 10), "cannot read .*a.wav as a WAV file"),
    "cut": ("whisper", lambda f: _damaged(f, 1000), "a.wav ends after 956 of 8,000 bytes of sound"),
    "silent": ("whisper", lambda f: _folder(f, sound=[]), "a.wav contains no sound"),
    "bits": ("whisper", lambda f: _folder(f, sound=[1] * 9, width=1), "has 8 bits per sample, expected 16; .* ffmpeg"),
    "rate": ("whisper", lambda f: _folder(f, rate=8000), "rate of 8000 Hz, .* expects 16000 Hz; .* sox .* ffmpeg"),
    "decoder": ("llama", _folder, "which reads text; give it text with --data FILE; .* has recordings"),
    "pairs model": ("t5", _folder, "which reads pairs of a source and a target; give it JSON lines .* has recordings"),
    "text": ("whisper", lambda _: [], "which reads recordings with transcripts; .* with --data DIR"),
    "pairs": ("whisper", lambda f: ["--data", str(f.parent / "pairs.jsonl")], "reads recordings .* has pairs"),
    "text too": ("whisper", lambda f: [*_folder(f), "--text", "t"], "has recordings, whose transcripts are beside th"),
}  # fmt: skip


@pytest.mark.parametrize(("case", "verb"), [*((case, "gauge") for case in BAD), ("no transcript", "shrink")])
def test_bad_recordings_are_one_sentence(
    case: str, verb: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model, words, said = BAD[case]
    folder, out = tmp_path / "given", tmp_path / "out.json"
    folder.mkdir()
    save_pairs(tmp_path / "pairs.jsonl", 4)

    def load(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("depthgauge.checkpoints.weights.described.load_model", load)
    more = ["--remove", "1"] if verb == "shrink" else []
    code = run(monkeypatch, verb, place / model, *words(folder), "--device", "cpu", "--out", out, *more)
    error = " ".join(capsys.readouterr().err.split())
    assert code == 2
    assert re.search(said, error), error
    assert error.startswith("error: ")
    assert not out.exists()


def test_too_few_recordings_and_a_model_that_writes_no_text(place: Path, tmp_path: Path) -> None:
    from transformers import WhisperForAudioClassification

    few = save_recordings(tmp_path / "few", 20)
    for end in (".wav", ".txt"):  # equal recordings count once
        (few / f"copy{end}").write_bytes((few / f"000{end}").read_bytes())
    with pytest.raises(InputError, match="has 20 different recordings, and 376 are needed; give more recordings, or"):
        dg.shrink(place / "whisper", text=few, remove=1, device="cpu")
    with quiet():
        WhisperForAudioClassification(speech_model().config).save_pretrained(tmp_path / "classifier")
        feature_extractor().save_pretrained(tmp_path / "classifier")
    with pytest.raises(InputError, match="is a WhisperForAudioClassification, which writes no text"):
        dg.gauge(tmp_path / "classifier", text=few, device="cpu")
