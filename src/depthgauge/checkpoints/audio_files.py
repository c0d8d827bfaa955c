"""Read recordings with their transcripts, as a model of speech reads them."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted
from depthgauge.checkpoints.found_inputs import AudioFolder, read_wave
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.input_kinds import AUDIO
from depthgauge.checkpoints.library import attempt, quiet, transformers
from depthgauge.checkpoints.load import Placement, load_tokenizer
from depthgauge.checkpoints.pair_files import target_samples
from depthgauge.checkpoints.source import Source


@dataclass(frozen=True)
class SpeechReader:
    """What a model of speech is read through; the processors of transformers have the same attributes."""

    feature_extractor: Any
    tokenizer: Any


def load_speech_reader(source: Source, placement: Placement, given: Any = None) -> SpeechReader:
    """Load the feature extractor and the tokenizer of a checkpoint; refuse a processor in memory that is `given`."""
    tokenizer = load_tokenizer(source, placement, given)

    def load() -> Any:
        return transformers().AutoFeatureExtractor.from_pretrained(
            source.folder, trust_remote_code=placement.trust_remote_code, local_files_only=True
        )

    return SpeechReader(attempt(source.target, "feature extractor", load), tokenizer)


def read_audio(
    found: AudioFolder, reader: Any, config: Any, *, wanted: int, longest: int, seed: int, least: int = 1,
    advice: str = "",
) -> GivenWindows:  # fmt: skip
    """Read up to `wanted` different recordings, drawn by the seed, and their transcripts of at most `longest` tokens.

    Raises:
        InputError: a recording cannot be read, or there are fewer than `least` different ones; `advice` says what else
            to do.
    """
    features, texts, seen = list[torch.Tensor](), list[str](), dict[str, None]()
    for index in torch.randperm(len(found.files), generator=torch.Generator().manual_seed(seed)).tolist():
        if len(features) == wanted:
            break
        raw, text = found.files[index].read_bytes(), found.transcripts[index]
        digest = hashlib.sha256(raw).hexdigest()
        if digest not in seen:
            seen[digest] = None
            texts.append(text)
            features.append(_features(raw, found.files[index], reader.feature_extractor))
    if len(features) < least:
        raise InputError(
            f"{found.path} has {counted(len(features), 'different recording')}, and {least} are needed; give more "
            f"recordings{advice}"
        )
    samples = target_samples({AUDIO: torch.stack(features)}, texts, reader.tokenizer, config, longest)
    total = hashlib.sha256("\0".join([*seen, *texts]).encode()).hexdigest()
    return GivenWindows("recordings", samples, str(found.path), total)


def _features(raw: bytes, path: Path, extractor: Any) -> torch.Tensor:
    """Return a recording as the feature extractor gives it to the model; its channels are averaged."""
    rate, channels, frames, data = read_wave(path, io.BytesIO(raw))
    if rate != extractor.sampling_rate:
        raise InputError(
            f"{path} has a sampling rate of {rate} Hz, and the model expects {extractor.sampling_rate} Hz; convert it, "
            f"for example with sox IN.wav -r {extractor.sampling_rate} OUT.wav or ffmpeg -i IN.wav -ar "
            f"{extractor.sampling_rate} OUT.wav"
        )
    if len(data) != 2 * channels * frames:
        raise InputError(
            f"{path} ends after {len(data):,} of {2 * channels * frames:,} bytes of sound; repair or remove it"
        )
    sound = np.frombuffer(data, "<i2").reshape(frames, channels).mean(axis=1, dtype=np.float32) / 2**15
    with quiet():
        made: torch.Tensor = extractor(sound, sampling_rate=rate, return_tensors="pt")[AUDIO][0]
    return made
