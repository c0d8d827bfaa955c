"""Norms, softmax and its sharp constants, sign norms, and outward rounding. Tensors in, tensors out."""
