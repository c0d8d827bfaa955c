"""Transformers checkpoints: loaded, observed at their attention, and patched to ask what a layer is good for."""
