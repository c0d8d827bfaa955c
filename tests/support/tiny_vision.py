"""Tiny checkpoints of models of images, and a directory of random images with labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthgauge.checkpoints.source.library import quiet

SIZE = 8
LABELS = ("cat", "dog", "fox")
# name → (model class, configuration class, image processor)
VISION = {
    "vit": ("ViTForImageClassification", "ViTConfig", "ViTImageProcessorPil"),
    "deit": ("DeiTForImageClassification", "DeiTConfig", "ViTImageProcessorPil"),
    "dinov2": ("Dinov2Model", "Dinov2Config", "ViTImageProcessorPil"),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", "CLIPImageProcessorPil"),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", "SiglipImageProcessorPil"),
}


def vision_model(name: str, layers: int = 3) -> Any:
    """Return a model of images with random weights, in evaluation mode."""
    import transformers

    architecture, config, _ = VISION[name]
    made = getattr(transformers, config)(
        hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=24, image_size=SIZE,
        patch_size=4,
    )  # fmt: skip
    made.id2label = dict(enumerate(LABELS))
    made.label2id = {label: index for index, label in enumerate(LABELS)}
    torch.manual_seed(0)  # the vectors keep their initial values
    model = getattr(transformers, architecture)(made).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model


def image_processor(name: str, size: int = SIZE) -> Any:
    import transformers

    sides = {"height": size, "width": size}
    return getattr(transformers, VISION[name][2])(size=sides, crop_size=sides)


def save_vision(folder: Path, name: str, layers: int = 3) -> Any:
    """Save a model with its image processor."""
    model = vision_model(name, layers)
    with quiet():
        model.save_pretrained(folder)
        image_processor(name).save_pretrained(folder)
    return model


def save_processor(folder: Path, config: Any) -> None:
    """Save an image processor that makes images of the size that a configuration of images asks for."""
    import transformers

    size = getattr(config, "image_size", SIZE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    transformers.ViTImageProcessorPil(size={"height": height, "width": width}).save_pretrained(folder)


def save_images(folder: Path, count: int, seed: int = 0) -> Path:
    """Save random images, and a file of labels next to the directory: every third one is a cat."""
    from PIL import Image

    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    for index in range(count):
        pixels = draw.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03}.png")
    lines = [json.dumps({"file_name": f"{i:03}.png", "label": LABELS[i % 3]}) for i in range(count)]
    folder.with_suffix(".jsonl").write_text("\n".join(lines))
    return folder
