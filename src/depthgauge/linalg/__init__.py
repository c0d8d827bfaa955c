"""Norms, softmax, sign norms and rounding: tensors in, tensors out; this room knows no network."""
