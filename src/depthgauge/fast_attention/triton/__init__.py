"""Polynomial attention in fused Triton kernels (extra `gpu`)."""
