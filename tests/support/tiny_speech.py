"""A tiny Whisper, and directories of recordings for it."""

import random
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_checkpoints import WORDS, save_tokenizer

from depthgauge.checkpoints.source.library import quiet

RATE = 16000
"""Samples per second that the feature extractor expects."""
LAYERS = {"encoder": 4, "decoder": 3}


def feature_extractor() -> Any:
    """Return a feature extractor for recordings of one second, with 8 mel bins and 10 frames per second."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=8, sampling_rate=RATE, hop_length=1600, chunk_length=1, n_fft=400)


def speech_model() -> Any:
    """Return a Whisper with random weights, in evaluation mode; its start token is that of `save_tokenizer`."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=40, num_mel_bins=8, d_model=16, encoder_layers=LAYERS["encoder"], decoder_layers=LAYERS["decoder"],
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24,
        max_source_positions=5, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    aligned = [[layer, 3 - layer] for layer in range(LAYERS["decoder"])]
    # A new one: transformers does not load a generation configuration that comes from that of the model.
    model.generation_config = GenerationConfig(pad_token_id=0, decoder_start_token_id=1, alignment_heads=aligned)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model


def save_speech_model(folder: Path) -> Any:
    """Save a Whisper with its feature extractor and a tokenizer that writes the start token."""
    model = speech_model()
    with quiet():
        model.save_pretrained(folder)
        feature_extractor().save_pretrained(folder)
    save_tokenizer(folder, special=True)
    return model


def save_wave(path: Path, sound: Any, *, rate: int = RATE, channels: int = 1, width: int = 2) -> None:
    """Save whole numbers as a WAV file."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.asarray(sound, dtype={1: "u1", 2: "<i2"}[width]).tobytes())


def save_recordings(folder: Path, count: int) -> Path:
    """Save recordings of noise, of different lengths, with transcripts of different lengths."""
    folder.mkdir(parents=True)
    draw, noise = random.Random(0), np.random.default_rng(0)
    for index in range(count):
        sound = noise.integers(-(2**13), 2**13, draw.randint(4000, 12000)) * (1 + index % 3)
        save_wave(folder / f"{index:03}.wav", sound)
        (folder / f"{index:03}.txt").write_text(" ".join(draw.choices(WORDS, k=draw.randint(3, 8))) + "\n")
    return folder
