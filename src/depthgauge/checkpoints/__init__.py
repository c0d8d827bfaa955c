"""Transformers checkpoints: load a model, observe its attention, and measure what each layer contributes."""
