"""Read recordings with their transcripts, as a model of speech reads them."""

import hashlib
import io
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthgauge._format import counted, one_line
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.library import CheckpointError, attempt, quiet, transformers
from depthgauge.checkpoints.load import AUDIO, Placement, load_tokenizer
from depthgauge.checkpoints.pair_files import target_samples
from depthgauge.checkpoints.source import Source
from depthgauge.errors import InputError, require_path

_EXTRACTORS = ("preprocessor_config.json", "processor_config.json")
"""Files that describe a feature extractor."""


@dataclass(frozen=True)
class AudioFolder:
    """The WAV files in a directory and in the directories below, in order, each with its transcript."""

    path: Path
    files: tuple[Path, ...]
    transcripts: tuple[str, ...]


@dataclass(frozen=True)
class SpeechReader:
    """What a model of speech is read through; the processors of transformers have the same attributes."""

    feature_extractor: Any
    tokenizer: Any


def find_audio(folder: str | Path) -> AudioFolder:
    """Return the recordings of a directory: `a.wav`, with its transcript in `a.txt`.

    Raises:
        InputError: there are no WAV files, one of them is damaged, or one has no transcript.
    """
    path = require_path("audio", folder)
    if not path.is_dir():
        raise InputError(f"--audio must be a directory of WAV files, and {path} is none; give one that exists")
    files = tuple(sorted(one for one in path.rglob("*") if one.suffix.lower() == ".wav" and one.is_file()))
    if not files:
        raise InputError(f"{path} contains no WAV files; give a directory with a.wav and its transcript a.txt")
    transcripts = tuple(map(_transcript, files))
    for file in files:
        _read_wave(file, str(file), has_sound=False)
    return AudioFolder(path, files, transcripts)


def _transcript(file: Path) -> str:
    path = file.with_suffix(".txt")
    try:
        text = path.read_text("utf-8-sig").strip()
    except FileNotFoundError as error:
        raise InputError(f"{file} has no transcript; write its text to {path.name} beside it, or remove it") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the transcript {path}: {one_line(error)}") from error
    if not text:
        raise InputError(f"the transcript {path} is empty; write what is said in {file.name}, or remove both")
    return text


def _read_wave(path: Path, given: str | io.BytesIO, has_sound: bool = True) -> tuple[int, int, int, bytes]:
    """Return the rate, the channels, the number of samples of each, and the sound of a WAV file, if it is wanted."""
    try:
        with wave.open(given, "rb") as file:
            channels, width, rate, frames = file.getparams()[:4]
            data = file.readframes(frames) if has_sound else b""
    except (wave.Error, EOFError, OSError) as error:
        reason = str(error) or "the file is too short"
        raise InputError(
            f"cannot read {path} as a WAV file of 16-bit PCM: {reason}; repair, convert or remove it"
        ) from error
    if width != 2:
        raise InputError(
            f"{path} has {8 * width} bits per sample, expected 16; convert it, for example with ffmpeg -i IN.wav -c:a "
            "pcm_s16le OUT.wav"
        )
    if not frames:
        raise InputError(f"{path} contains no sound; remove it and its transcript")
    return rate, channels, frames, data


def load_speech_reader(source: Source, placement: Placement, given: Any = None) -> SpeechReader:
    """Load the feature extractor and the tokenizer of a checkpoint; refuse a processor in memory that is `given`."""
    tokenizer = load_tokenizer(source, placement, given)
    if not any((source.folder / name).is_file() for name in _EXTRACTORS):
        raise CheckpointError(
            f"{source.target} contains no feature extractor, expected {_EXTRACTORS[0]}; download it with the model"
        )

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
    rate, channels, frames, data = _read_wave(path, io.BytesIO(raw))
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
