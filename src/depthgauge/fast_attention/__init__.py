"""Attention with a guaranteed error: a polynomial where the scores are small, exact attention elsewhere."""
